//! Initial parameters and gradients, against candle without a framework around it.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};
use mpmd_candle::nn::{self, Module};
use mpmd_candle::{Cx, VarBuilder, stage};
use mpmd_core::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::{Result, Simulation};

use crate::model::{
    LAYERS, ROWS, SEED, Settings, TOKENS, WIDTH, last, microbatches, middle, pipeline, tokens,
};

/// Values by parameter path.
type Values = BTreeMap<String, Vec<f32>>;

/// Returns the initial parameters and their gradients in a step of two microbatches.
fn of_pipeline(stages: usize) -> (Values, Values) {
    let mut results = Simulation::new(1, stages).run(|p| -> Result<(Values, Values)> {
        let mut model = pipeline(
            p,
            Settings {
                stages,
                ..Settings::default()
            },
        )?;
        let ends = [model.mesh(0).clone(), model.mesh(stages - 1).clone()];
        let values = |arrays: Vec<(String, MpmdArray)>| -> Result<Values> {
            let value = |(path, array): (String, MpmdArray)| {
                Ok((path, array.to_host()?.unwrap().to_vec::<f32>()?))
            };
            arrays.into_iter().map(value).collect()
        };
        let params = values((0..stages).flat_map(|stage| model.params(stage)).collect())?;
        let batch = microbatches(p, [&ends[0], &ends[1]], stages, (5, 2))?;
        let output = model.train_step(p, &Schedule::named("gpipe", stages, 2, None)?, batch)?;
        let gradients = values(output.gradients.into_iter().flatten().collect())?;
        Ok((params, gradients))
    });
    results.remove(0).unwrap()
}

#[test]
fn initial_parameters_do_not_depend_on_the_stages() {
    let (one, _) = of_pipeline(1);
    assert_eq!(one.len(), 2 + 6 * LAYERS);
    assert!(one["layers.3.up.weight"].iter().any(|value| *value != 0.0));
    assert_ne!(one["layers.0.up.weight"], one["layers.1.up.weight"]);
    for stages in [2, 4] {
        assert_eq!(of_pipeline(stages).0, one, "{stages} stages");
    }
}

/// Computes the gradients with candle's own operations alone.
fn of_candle(params: &Values) -> candle_core::Result<Values> {
    let shape = |path: &str| match path
        .rsplit_once("layers.")
        .map_or(path, |(_, path)| &path[2..])
    {
        "embedding.weight" | "head.weight" => vec![TOKENS, WIDTH],
        "up.weight" => vec![2 * WIDTH, WIDTH],
        "up.bias" => vec![2 * WIDTH],
        "down.weight" => vec![WIDTH, 2 * WIDTH],
        _ => vec![WIDTH],
    };
    let mut vars = BTreeMap::new();
    for (path, values) in params {
        vars.insert(
            path.as_str(),
            Var::from_slice(values, shape(path), &Device::Cpu)?,
        );
    }
    let var = |path: String| vars[path.as_str()].as_tensor().clone();
    let linear = |x: &Tensor, path: &str| -> candle_core::Result<Tensor> {
        let y = x.matmul(&var(format!("{path}.weight")).t()?)?;
        match vars.get(format!("{path}.bias").as_str()) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    };
    let mut sums: BTreeMap<&str, Tensor> = BTreeMap::new();
    for microbatch in 0..2 {
        let [ids, labels] = [0, 1].map(|stream| {
            Tensor::from_vec(
                tokens(5, microbatch, stream),
                ROWS[0] * ROWS[1],
                &Device::Cpu,
            )
        });
        let mut x = var("embedding.weight".to_owned()).index_select(&ids?, 0)?;
        for layer in 0..LAYERS {
            let path = format!("layers.{layer}");
            let mean = x.mean_keepdim(1)?;
            let centred = x.broadcast_sub(&mean)?;
            let variance = centred.sqr()?.mean_keepdim(1)?;
            let normal = centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?;
            let normal = normal
                .broadcast_mul(&var(format!("{path}.norm.weight")))?
                .broadcast_add(&var(format!("{path}.norm.bias")))?;
            let hidden = linear(&normal, &format!("{path}.up"))?.gelu()?;
            x = (x + linear(&hidden, &format!("{path}.down"))?)?;
        }
        let logits = linear(&x, "head")?;
        let log = logits.broadcast_sub(&logits.exp()?.sum_keepdim(1)?.log()?)?;
        let loss = log.gather(&labels?.unsqueeze(1)?, 1)?.sum_all()?.neg()?;
        let store = loss.backward()?;
        for (path, var) in &vars {
            let Some(more) = store.get(var) else { continue };
            let sum = match sums.remove(path) {
                Some(sum) => (sum + more)?,
                None => more.clone(),
            };
            sums.insert(path, sum);
        }
    }
    let flat =
        |(path, sum): (&str, Tensor)| Ok((path.to_owned(), sum.flatten_all()?.to_vec1::<f32>()?));
    sums.into_iter().map(flat).collect()
}

#[test]
fn gradients_equal_those_of_plain_candle() {
    let (params, _) = of_pipeline(1);
    let expected = of_candle(&params).unwrap();
    for stages in [1, 2, 4] {
        let (_, found) = of_pipeline(stages);
        assert_eq!(
            found.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>()
        );
        for (path, expected) in &expected {
            let largest = expected
                .iter()
                .fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (found, expected) in found[path].iter().zip(expected) {
                let error = (found - expected).abs() / largest.max(1e-3);
                assert!(
                    error < 1e-5,
                    "{path} at {stages} stages: {found} and {expected}"
                );
            }
        }
    }
}

#[test]
fn gradients_of_candles_layers_have_the_same_bits() {
    type Layers = [candle_nn::Linear; 2];
    let new = |vb: &VarBuilder<'_>| -> candle_core::Result<Layers> {
        Ok([
            candle_nn::linear(6, 5, vb.pp("a"))?,
            candle_nn::linear(5, 4, vb.pp("b"))?,
        ])
    };
    let loss = |[a, b]: &Layers, x: &Tensor| b.forward(&a.forward(x)?.relu()?)?.sqr()?.sum_all();
    let values: Vec<f32> = (0..18).map(|i| (i as f32 * 0.7).cos()).collect();
    let mut results = Simulation::new(1, 1).run(|p| -> Result<(Values, Values)> {
        let mesh = p.mesh(&[("x", 1)])?;
        let stage = stage(
            move |vb: VarBuilder<'static>| new(&vb),
            move |layers: &Layers, x: Tensor, _: &mut Cx<'_>| {
                let sum = loss(layers, &x)?;
                Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
            },
        )?;
        let params = stage.init(p, &mesh, 9)?;
        let mut pipeline = Pipeline::first(stage, &mesh, params)?;
        let x = p.device_put(&MpmdArray::from_slice(&[3, 6], &values)?, mesh.replicated())?;
        let batch = Microbatch::new(x);
        pipeline.probe(p, &batch.shapes())?;
        let read = |arrays: Vec<(String, MpmdArray)>| -> Result<Values> {
            let value = |(path, array): (String, MpmdArray)| {
                Ok((path, array.to_host()?.unwrap().to_vec::<f32>()?))
            };
            arrays.into_iter().map(value).collect()
        };
        let params = read(pipeline.params(0))?;
        let schedule = Schedule::named("gpipe", 1, 1, None)?;
        let output = pipeline.train_step(p, &schedule, vec![batch])?;
        Ok((
            params,
            read(output.gradients.into_iter().flatten().collect())?,
        ))
    });
    let (params, found) = results.remove(0).unwrap();
    let shapes = BTreeMap::from([
        ("a.bias", vec![5]),
        ("a.weight", vec![5, 6]),
        ("b.bias", vec![4]),
        ("b.weight", vec![4, 5]),
    ]);
    let vars = candle_nn::VarMap::new();
    for (path, shape) in shapes {
        let var = Var::from_slice(&params[path], shape, &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert(path.to_owned(), var);
    }
    let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &Device::Cpu);
    let x = Tensor::from_slice(&values, (3, 6), &Device::Cpu).unwrap();
    let store = loss(&new(&vb).unwrap(), &x).unwrap().backward().unwrap();
    assert_eq!(found.len(), 4);
    for (path, var) in vars.data().lock().unwrap().iter() {
        let expected = store
            .get(var)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found[path]), bits(&expected), "{path}");
    }
}

/// Returns the gradients of a stage with layers that can defer and some that cannot.
fn of_mixed_layers(split: bool) -> Values {
    type Layers = (nn::Linear, nn::GroupNorm, Tensor, nn::Linear);
    let new = |vb: VarBuilder<'static>| -> candle_core::Result<Layers> {
        let table = vb.get((1, 4), "positions")?;
        let norm = nn::group_norm(2, 4, 1e-5, vb.pp("norm"))?;
        Ok((
            nn::linear(6, 4, vb.pp("up"))?,
            norm,
            table,
            nn::linear(4, 2, vb.pp("down"))?,
        ))
    };
    let forward = |(up, norm, table, down): &Layers, x: Tensor, _: &mut Cx<'_>| {
        let x = norm
            .forward(&up.forward(&x)?.unsqueeze(2)?)?
            .squeeze(2)?
            .broadcast_add(table)?;
        let sum = down.forward(&x)?.sqr()?.sum_all()?;
        Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
    };
    let mut results = Simulation::new(1, 1).run(|p| -> Result<Values> {
        let mesh = p.mesh(&[("x", 1)])?;
        let stage = stage(new, forward)?;
        let stage = if split {
            stage.split_gradients()
        } else {
            stage
        };
        let params = stage.init(p, &mesh, 9)?;
        let mut pipeline = Pipeline::first(stage, &mesh, params)?;
        let mut batch = Vec::new();
        for microbatch in 0..3 {
            let value = |i: i32| ((i * 7 + microbatch) as f32 * 0.3).sin();
            let x = MpmdArray::from_slice(&[3, 6], &(0..18).map(value).collect::<Vec<_>>())?;
            batch.push(Microbatch::new(p.device_put(&x, mesh.replicated())?));
        }
        pipeline.probe(p, &batch[0].shapes())?;
        let output = pipeline.train_step(p, &Schedule::named("zb-h1", 1, 3, None)?, batch)?;
        let read = |(path, gradient): (String, MpmdArray)| {
            Ok((
                path,
                gradient.to_host()?.expect("one process").to_vec::<f32>()?,
            ))
        };
        output.gradients.into_iter().flatten().map(read).collect()
    });
    results.remove(0).unwrap()
}

#[test]
fn layers_that_cannot_defer_give_the_same_bits_at_once() {
    let (split, whole) = (of_mixed_layers(true), of_mixed_layers(false));
    assert_eq!((split.len(), &split), (7, &whole));
    assert!(split.values().flatten().all(|value| value.is_finite()));
    for path in ["positions", "norm.weight", "up.weight"] {
        assert!(split[path].iter().any(|value| *value != 0.0), "{path}");
    }
}

/// Returns the gradients of the embedding and of the head, where the head has the embedding's
/// values: as a tied parameter, or as one of its own.
fn of_equal_weights(is_tied: bool) -> Values {
    let mut results = Simulation::new(2, 2).run(|p| -> Result<Values> {
        let settings = Settings::default();
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let (first, last) = (middle(0, settings), last(settings));
        let a = first.init(p, &meshes[0], SEED)?;
        let mut b = last.init(p, &meshes[1], SEED)?;
        if !is_tied {
            let here = p.device_put(&a["embedding.weight"], meshes[1].replicated())?;
            b.insert("head.weight".to_owned(), here);
        }
        let mut pipeline = Pipeline::first(first, &meshes[0], a)?.then(last, &meshes[1], b)?;
        if is_tied {
            pipeline.tie((0, "embedding.weight"), (1, "head.weight"))?;
        }
        let batch = microbatches(p, [&meshes[0], &meshes[1]], 2, (5, 2))?;
        pipeline.probe(p, &batch[0].shapes())?;
        let output = pipeline.train_step(p, &Schedule::one_f_one_b(2, 2)?, batch)?;
        let all = p.mesh(&[("all", 2)])?.replicated();
        let mut values = Values::new();
        for (path, gradient) in output.gradients.into_iter().flatten() {
            if ["embedding.weight", "head.weight"].contains(&path.as_str()) {
                let gradient = p.device_put(&gradient, &all)?.to_host()?.expect("on all");
                values.insert(path, gradient.to_vec::<f32>()?);
            }
        }
        Ok(values)
    });
    results.remove(0).unwrap()
}

#[test]
fn tied_weights_of_two_stages_add_their_gradients() {
    let (tied, own) = (of_equal_weights(true), of_equal_weights(false));
    assert_eq!((tied.len(), own.len()), (1, 2));
    let sums = own["embedding.weight"]
        .iter()
        .zip(&own["head.weight"])
        .map(|(a, b)| a + b);
    assert_eq!(tied["embedding.weight"], sums.collect::<Vec<f32>>());
    assert_ne!(tied["embedding.weight"], own["embedding.weight"]);
}

/// Returns the gradients of a step where the first stage's embedding is frozen. The head is tied to
/// it, or frozen with the embedding's values.
fn of_frozen_embedding(is_tied: bool, split: bool, probes_first: bool) -> Result<Values> {
    const BUT_THE_TABLES: &str = "^layers";
    let mut results = Simulation::new(2, 2).run(|p| -> Result<Values> {
        let settings = Settings {
            split,
            ..Settings::default()
        };
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let (first, mut last) = (
            middle(0, settings).trainable(BUT_THE_TABLES)?,
            last(settings),
        );
        let a = first.init(p, &meshes[0], SEED)?;
        let mut b = last.init(p, &meshes[1], SEED)?;
        if !is_tied {
            last = last.trainable(BUT_THE_TABLES)?;
            let here = p.device_put(&a["embedding.weight"], meshes[1].replicated())?;
            b.insert("head.weight".to_owned(), here);
        }
        let mut pipeline = Pipeline::first(first, &meshes[0], a)?.then(last, &meshes[1], b)?;
        let batch = microbatches(p, [&meshes[0], &meshes[1]], 2, (5, 2))?;
        if probes_first {
            // A pass, too: the working form has to follow.
            pipeline.probe(p, &batch[0].shapes())?;
            pipeline.train_step(p, &Schedule::one_f_one_b(2, 2)?, batch)?;
        }
        if is_tied {
            pipeline.tie((0, "embedding.weight"), (1, "head.weight"))?;
        }
        let batch = microbatches(p, [&meshes[0], &meshes[1]], 2, (5, 2))?;
        pipeline.probe(p, &batch[0].shapes())?;
        let output = pipeline.train_step(p, &Schedule::one_f_one_b(2, 2)?, batch)?;
        let all = p.mesh(&[("all", 2)])?.replicated();
        let mut values = Values::new();
        for (path, gradient) in output.gradients.into_iter().flatten() {
            let gradient = p.device_put(&gradient, &all)?.to_host()?.expect("on all");
            values.insert(path, gradient.to_vec::<f32>()?);
        }
        Ok(values)
    });
    results.remove(0)
}

#[test]
fn head_tied_to_a_frozen_embedding_is_frozen() {
    let expected = of_frozen_embedding(false, false, false).unwrap();
    assert_eq!(expected.len(), 6 * LAYERS);
    for (split, probes_first) in [(false, false), (true, false), (false, true), (true, true)] {
        let found = of_frozen_embedding(true, split, probes_first).unwrap();
        assert_eq!(found, expected, "split {split}, probe first {probes_first}");
    }
}
