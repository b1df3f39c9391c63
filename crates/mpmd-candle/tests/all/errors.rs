//! Mistakes of users: each message names the stage and its line, the layer, and a cure.

use mpmd_candle::nn::{self, Dropout, Embedding, Linear, Module};
use mpmd_candle::{CandleStage, Cx, Tensor, VarBuilder, named, stage};
use mpmd_core::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::{Result, Simulation};
use mpmd_layout::aval::DType;

type Model<M> = CandleStage<M, Tensor, Tensor>;
type Head = CandleStage<Linear, Tensor, Loss<Tensor>>;

/// Returns a last stage of the width 4 that reads the side input "labels".
fn head() -> Head {
    stage(
        |vb: VarBuilder<'static>| nn::linear(4, 3, vb.pp("head")),
        |head: &Linear, x: Tensor, cx: &mut Cx<'_>| {
            let y = head.forward(&x)?;
            let sum = (y * cx.side("labels")?)?.sum_all()?;
            Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
        },
    )
    .unwrap()
    .named("head")
}

/// Trains one step of `first` and the head on two processes. Returns the error of each process.
fn errors<M: Send + 'static>(
    first: impl Fn() -> Model<M> + Sync,
    x: impl Fn() -> MpmdArray + Sync,
    labels: bool,
) -> Vec<String> {
    let results = Simulation::new(2, 2).run(|p| -> Result<()> {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let (first, head) = (first(), head());
        let a = first.init(p, &meshes[0], 0)?;
        let b = head.init(p, &meshes[1], 0)?;
        let mut pipeline = Pipeline::first(first, &meshes[0], a)?.then(head, &meshes[1], b)?;
        let x = p.device_put(&x(), meshes[0].replicated())?;
        let mut batch = Microbatch::new(x);
        if labels {
            let values = MpmdArray::from_slice(&[2, 3], &[1.0f32; 6])?;
            let labels = p.device_put(&values, meshes[1].replicated())?;
            batch = batch.side(1, named([("labels", labels)]));
        }
        pipeline.probe(p, &batch.shapes())?;
        let output = pipeline.train_step(p, &Schedule::named("zb-h1", 2, 1, None)?, vec![batch])?;
        output.loss.sum.block_until_ready().map(drop)
    });
    results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect()
}

/// Checks that every error contains all of `parts`.
fn check(errors: &[String], parts: &[&str]) {
    assert_eq!(errors.len(), 2);
    for error in errors {
        for part in parts {
            assert!(error.contains(part), "{error}\n  lacks {part}");
        }
    }
}

fn floats() -> MpmdArray {
    MpmdArray::from_slice(&[2, 4], &[0.5f32; 8]).unwrap()
}

fn linear(inputs: usize) -> Model<Linear> {
    let new = move |vb: VarBuilder<'static>| nn::linear(inputs, 4, vb.pp("layers.3.up"));
    stage(new, |layer: &Linear, x: Tensor, _: &mut Cx<'_>| {
        layer.forward(&x)
    })
    .unwrap()
}

#[test]
fn wrong_width_names_the_layer() {
    let found = errors(|| linear(5), floats, true);
    check(
        &found,
        &["stage 0", "errors.rs:", "layers.3.up", "[2, 4]", "5"],
    );
}

#[test]
fn missing_side_input_is_named() {
    let found = errors(|| linear(4), floats, false);
    check(
        &found,
        &["stage 1", "head", "\"labels\"", "Microbatch::side"],
    );
}

#[test]
fn layer_without_backward_pass_is_named() {
    let first = || {
        let new = |vb: VarBuilder<'static>| candle_nn::rms_norm(4, 1e-5, vb.pp("norm"));
        let forward = |norm: &candle_nn::RmsNorm, x: Tensor, _: &mut Cx<'_>| norm.forward(&x);
        stage(new, forward).unwrap()
    };
    let found = errors(first, floats, true);
    check(
        &found,
        &[
            "stage 0",
            "norm.weight",
            "no gradient",
            "mpmd::candle::nn",
            "errors.rs:",
        ],
    );
}

#[test]
fn forward_that_fails_on_one_device_names_it() {
    let first = || {
        let new = |vb: VarBuilder<'static>| nn::embedding(5, 2, vb.pp("tokens"));
        let forward =
            |layer: &Embedding, x: Tensor, _: &mut Cx<'_>| layer.forward(&x)?.flatten_from(1);
        stage(new, forward).unwrap()
    };
    // The probe's zeros are tokens; 99 is none.
    let ids = || MpmdArray::from_slice(&[2, 2], &[0u32, 1, 99, 2]).unwrap();
    check(
        &errors(first, ids, true),
        &["stage 0", "microbatch 0", "errors.rs:", "99"],
    );
}

#[test]
fn inputs_that_were_not_probed_are_refused() {
    let results = Simulation::new(1, 1).run(|p| {
        let mesh = p.mesh(&[("x", 1)])?;
        let head = head();
        let params = head.init(p, &mesh, 0)?;
        let mut pipeline = Pipeline::first(head, &mesh, params)?;
        let x = p.device_put(&floats(), mesh.replicated())?;
        pipeline.forward(p, Microbatch::new(x)).map(drop)
    });
    let error = results.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("Pipeline::probe") && error.contains("errors.rs:"),
        "{error}"
    );
}

#[test]
fn parameters_on_another_mesh_are_refused() {
    let results = Simulation::new(1, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let head = head();
        let params = head.init(p, &meshes[1], 0)?;
        Pipeline::first(head, &meshes[0], params).map(drop)
    });
    let error = results.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("head.bias") && error.contains("not on its mesh"),
        "{error}"
    );
}

#[test]
fn pattern_without_match_lists_the_parameters() {
    let error = head().trainable("lora").map(drop).unwrap_err().to_string();
    assert!(
        error.contains("\"lora\"") && error.contains("head.weight"),
        "{error}"
    );
}

#[test]
fn pattern_that_gives_up_or_reads_otherwise_is_an_error() {
    let new = |vb: VarBuilder<'static>| nn::linear(2, 2, vb.pp("x".repeat(40)));
    let layer: Result<Model<Linear>> = stage(new, |layer: &Linear, x: Tensor, _: &mut Cx<'_>| {
        layer.forward(&x)
    });
    let pattern = r"^(?:(x+)*)*\1y";
    let error = layer.unwrap().trainable(pattern).map(drop).unwrap_err();
    assert!(error.to_string().contains("backtracking"), "{error}");
    let error = head().trainable(r"\<head").map(drop).unwrap_err();
    assert!(error.to_string().contains("write <"), "{error}");
}

#[test]
fn dropout_without_key_says_what_to_give() {
    let first = || {
        let new = |_: VarBuilder<'static>| Ok(Dropout::new(0.5));
        let forward =
            |layer: &Dropout, x: Tensor, cx: &mut Cx<'_>| layer.forward(&x, cx.is_training());
        stage(new, forward).unwrap()
    };
    check(
        &errors(first, floats, true),
        &["stage 0", "Microbatch::key"],
    );
}

#[test]
fn constructor_that_fails_names_the_line() {
    let new = |vb: VarBuilder<'static>| {
        vb.get((2, 2), "w")?;
        vb.get((3, 3), "w")
    };
    let forward = |_: &Tensor, x: Tensor, _: &mut Cx<'_>| Ok(x);
    let error = stage(new, forward).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("errors.rs:") && error.contains("f32[3,3]"),
        "{error}"
    );
}

#[test]
fn integers_pass_between_stages_without_gradient() {
    let results = Simulation::new(2, 2).run(|p| -> Result<Vec<f32>> {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        type Two = (Tensor, Tensor);
        let first = stage(
            |vb: VarBuilder<'static>| nn::embedding(5, 4, vb.pp("tokens")),
            |layer: &Embedding, ids: Tensor, _: &mut Cx<'_>| Ok((layer.forward(&ids)?, ids)),
        )?;
        let second = stage(
            |vb: VarBuilder<'static>| nn::embedding(5, 4, vb.pp("more")),
            |layer: &Embedding, (x, ids): Two, _: &mut Cx<'_>| {
                let sum = (x * layer.forward(&ids)?)?.sum_all()?;
                Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
            },
        )?;
        let [a, b] = [
            first.init(p, &meshes[0], 0)?,
            second.init(p, &meshes[1], 0)?,
        ];
        let mut pipeline = Pipeline::first(first, &meshes[0], a)?.then(second, &meshes[1], b)?;
        let ids = MpmdArray::from_slice(&[3], &[0u32, 4, 4])?;
        assert_eq!(ids.aval().dtype(), DType::U32);
        let batch = Microbatch::new(p.device_put(&ids, meshes[0].replicated())?);
        pipeline.probe(p, &batch.shapes())?;
        let output = pipeline.train_step(p, &Schedule::named("gpipe", 2, 1, None)?, vec![batch])?;
        let more = pipeline.params(1).remove(0).1;
        let all = p.mesh(&[("all", 2)])?.replicated();
        let read = |p: &mut Program, array: &MpmdArray| -> Result<Vec<f32>> {
            let host = p
                .device_put(array, &all)?
                .to_host()?
                .expect("replicated everywhere");
            Ok(host.to_vec()?)
        };
        let (more, found) = (read(p, &more)?, read(p, &output.gradients[0][0].1)?);
        let row = |values: &[f32], row: usize| values[4 * row..4 * row + 4].to_vec();
        assert_eq!(row(&found, 0), row(&more, 0));
        assert_eq!(
            row(&found, 4),
            row(&more, 4).iter().map(|x| 2.0 * x).collect::<Vec<_>>()
        );
        assert_eq!(row(&found, 2), [0.0; 4]);
        Ok(found)
    });
    let found: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
    assert_eq!(found[0], found[1]);
}
