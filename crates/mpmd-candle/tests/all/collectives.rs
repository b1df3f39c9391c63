//! Several devices in a stage: layers that are divided by columns or by rows of the batch, and
//! parameters that are stored in parts, give the values and gradients of the whole.

use mpmd_candle::{Cx, Tensor, VarBuilder, named, stage};
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, ParamSharding, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::{Result, Simulation};
use mpmd_layout::sharding::Spec;

/// The layout of the layer over the devices of the stage.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Form {
    Whole,
    /// Columns of the first matrix, rows of the second, and an all-reduce at the end.
    Reduced,
    /// The same with sums in the order of a tree.
    Tree,
    /// One matrix is divided by columns, and the other is whole.
    Gathered,
    /// The same with the rows of the input divided between the layers.
    Scattered,
    /// Rows divided over the devices.
    Rows,
    /// The same with parameters that are stored in parts, and gathered for a step.
    Stored,
}

/// Returns the loss and the gradients of both matrices, of the first stage's bias, and of the input
/// by way of it.
fn run(form: Form) -> Vec<Vec<f32>> {
    let devices = devices(form);
    let mut results = Simulation::new(devices, 2 * devices).run(|p| train(p, form));
    let first = results.remove(0).unwrap();
    results
        .into_iter()
        .for_each(|other| assert_eq!(other.unwrap(), first));
    first
}

/// Returns the number of devices of a stage.
pub(crate) fn devices(form: Form) -> usize {
    if form == Form::Whole { 1 } else { 2 }
}

/// Does the same as `run` for one process.
pub(crate) fn train(p: &mut Program, form: Form) -> Result<Vec<Vec<f32>>> {
    let devices = devices(form);
    let meshes = p
        .mesh(&[("stage", 2), ("model", devices)])?
        .split("stage")?;
    let shift = stage(
        |vb: VarBuilder<'static>| vb.get(4, "shift"),
        |shift: &Tensor, x: Tensor, _: &mut Cx<'_>| x.broadcast_add(shift),
    )?;
    let layer = stage(
        |vb: VarBuilder<'static>| {
            let init = candle_nn::Init::Randn {
                mean: 0.0,
                stdev: 1.0,
            };
            let up = vb.get_with_hints((4, 6), "up", init)?;
            Ok((up, vb.get_with_hints((6, 4), "down", init)?))
        },
        move |(up, down): &(Tensor, Tensor), x: Tensor, cx: &mut Cx<'_>| {
            let y = match form {
                Form::Whole | Form::Rows | Form::Stored => x.matmul(up)?.sqr()?.matmul(down)?,
                Form::Reduced => {
                    let x = cx.replicated(&x, "model")?;
                    cx.all_reduce(&x.matmul(up)?.sqr()?.matmul(down)?, "model")?
                }
                Form::Tree => {
                    let x = cx.tree_replicated(&x, "model")?;
                    cx.tree_sum(&x.matmul(up)?.sqr()?.matmul(down)?, "model")?
                }
                // Each device computes columns in between, and all compute the same of them.
                Form::Gathered => {
                    let x = cx.replicated(&x, "model")?;
                    let y = cx.gathered(&x.matmul(up)?.sqr()?, 1, "model")?;
                    y.matmul(down)?
                }
                Form::Scattered => {
                    let x = cx.all_gather(&x, 0, "model")?;
                    cx.reduce_scatter(&x.matmul(up)?.sqr()?.matmul(down)?, 0, "model")?
                }
            };
            let loss = (y * cx.side("factors")?)?.sum_all()?;
            let sum = match form {
                Form::Whole | Form::Reduced | Form::Tree | Form::Gathered => loss,
                _ => cx.all_reduce(&loss, "model")?,
            };
            let weight = sum.ones_like()?.detach();
            Ok(Loss::new(sum, weight))
        },
    )?;
    let rows = match form {
        Form::Whole | Form::Reduced | Form::Tree | Form::Gathered => Spec::default(),
        _ => spec!["model"],
    };
    let layer = layer.input_spec(rows.clone());
    let params = [shift.init(p, &meshes[0], 3)?, {
        let mesh = &meshes[1];
        layer.init_as(p, 3, |path, _| {
            mesh.sharding(match (form, path) {
                (Form::Whole | Form::Rows, _) => Spec::default(),
                (Form::Reduced | Form::Tree | Form::Scattered | Form::Gathered, "up") => {
                    spec![None, "model"]
                }
                (Form::Gathered, _) => Spec::default(),
                _ => spec!["model"],
            })
        })?
    }];
    let [a, b] = params;
    let mut pipeline = Pipeline::first(shift, &meshes[0], a)?.then(layer, &meshes[1], b)?;
    if matches!(form, Form::Rows | Form::Stored) {
        let whole = ParamSharding::new(vec![meshes[1].replicated(); 2]);
        pipeline.store(1, whole.partial_over(&["model"])?)?;
    }
    let values: Vec<f32> = (0..16).map(|i| (i as f32 * 0.37).sin()).collect();
    let host = MpmdArray::from_slice(&[4, 4], &values)?;
    let x = p.device_put(&host, meshes[0].replicated())?;
    let factors = p.device_put(&host, meshes[1].sharding(rows))?;
    let batch = Microbatch::new(x).side(1, named([("factors", factors)]));
    pipeline.probe(p, &batch.shapes())?;
    let output = pipeline.train_step(p, &Schedule::named("gpipe", 2, 1, None)?, vec![batch])?;
    let mut arrays = vec![output.loss.sum];
    arrays.extend(
        output
            .gradients
            .into_iter()
            .flatten()
            .map(|(_, gradient)| gradient),
    );
    let all = p.mesh(&[("all", 2 * devices)])?;
    let mut values = Vec::new();
    for array in arrays {
        let array = p.device_put(&array, all.replicated())?;
        values.push(
            array
                .to_host()?
                .expect("replicated everywhere")
                .to_vec::<f32>()?,
        );
    }
    Ok(values)
}

#[test]
fn divided_layers_have_values_and_gradients_of_the_whole() {
    let whole = run(Form::Whole);
    assert_eq!(whole.len(), 4);
    for form in [
        Form::Reduced,
        Form::Tree,
        Form::Gathered,
        Form::Scattered,
        Form::Rows,
        Form::Stored,
    ] {
        for (found, expected) in run(form).iter().zip(&whole) {
            let largest = expected
                .iter()
                .fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (found, expected) in found.iter().zip(expected) {
                let error = (found - expected).abs() / largest;
                assert!(error < 1e-5, "{form:?}: {found} and {expected}");
            }
        }
    }
}

#[test]
fn divided_batch_with_whole_gradients_is_refused() {
    let results = Simulation::new(2, 2).run(|p| -> Result<()> {
        let mesh = p.mesh(&[("data", 2)])?;
        let stage = stage(
            |vb: VarBuilder<'static>| vb.get(4, "w"),
            |w: &Tensor, x: Tensor, cx: &mut Cx<'_>| {
                let sum = cx.all_reduce(&x.broadcast_mul(w)?.sum_all()?, "data")?;
                Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
            },
        )?;
        let stage = stage.input_spec(spec!["data"]);
        let params = stage.init(p, &mesh, 0)?;
        let mut pipeline = Pipeline::first(stage, &mesh, params)?;
        let shapes = MicrobatchShapes::new(f32s([2, 4]));
        let refused = pipeline.probe(p, &shapes).unwrap_err().to_string();
        assert!(
            refused.contains("\"w\"") && refused.contains("partial_over"),
            "{refused}"
        );
        let whole = ParamSharding::new(vec![mesh.replicated()]);
        pipeline.store(0, whole.partial_over(&["data"])?)?;
        pipeline.probe(p, &shapes)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn tree_sums_add_halves_first() {
    // 1 is lost beside a large number. Both halves of the devices have one.
    for (is_tree, expected) in [(false, 1.0), (true, 0.0)] {
        let results = Simulation::new(2, 4).run(|p| -> Result<_> {
            let mesh = p.mesh(&[("model", 4)])?;
            let stage = stage(
                |vb: VarBuilder<'static>| Ok([vb.get(1, "shift")?, vb.get(4, "w")?]),
                move |[shift, w]: &[Tensor; 2], x: Tensor, cx: &mut Cx<'_>| {
                    let (x, axis) = ((x + shift)?, "model");
                    let sum = match is_tree {
                        true => cx.tree_sum(&(cx.tree_replicated(&x, axis)? * w)?, axis)?,
                        false => cx.all_reduce(&(cx.replicated(&x, axis)? * w)?, axis)?,
                    };
                    let sum = sum.sum_all()?;
                    Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
                },
            )?;
            let of = |path: &str| {
                if path == "w" {
                    spec!["model"]
                } else {
                    Spec::default()
                }
            };
            let mut params = stage.init_as(p, 0, |path, _| mesh.sharding(of(path)))?;
            let w = MpmdArray::from_slice(&[4], &[1.0f32, 1e8, -1e8, 1.0])?;
            params.insert(
                "w".to_owned(),
                p.device_put(&w, mesh.sharding(spec!["model"]))?,
            );
            let mut pipeline = Pipeline::first(stage, &mesh, params)?;
            let x = p.device_put(&MpmdArray::from_slice(&[1], &[1.0f32])?, mesh.replicated())?;
            let batch = Microbatch::new(x);
            pipeline.probe(p, &batch.shapes())?;
            let schedule = Schedule::named("gpipe", 1, 1, None)?;
            let output = pipeline.train_step(p, &schedule, vec![batch])?;
            let mut gradients = output.gradients.into_iter().flatten();
            let (_, gradient) = gradients
                .find(|(path, _)| path == "shift")
                .expect("a gradient");
            let value = |array: MpmdArray| -> Result<f32> {
                Ok(array.to_host()?.expect("here").to_vec::<f32>()?[0])
            };
            Ok([value(output.loss.sum)?, value(gradient)?])
        });
        results
            .into_iter()
            .for_each(|found| assert_eq!(found.unwrap(), [expected; 2]));
    }
}
