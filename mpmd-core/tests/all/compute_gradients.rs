//! Gradients of `compute`: those of random functions beside JAX, their shardings, and the errors.
//!
//! `gradients.jsonl` was written by JAX 0.10.2 in f64. The loss is the sum of all values that no
//! other is computed from, times fixed weights.

use crate::common::watchdog;
use crate::compute::{counted, on_mesh, whole};
use crate::compute_functions::{Input, InputSpec, Step, apply, put_inputs, sharding};
use mpmd_core::compute::{Expr, concatenate, einsum, number};
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use serde::Deserialize;

#[derive(Deserialize)]
struct Function {
    seed: u64,
    inputs: Vec<Input>,
    steps: Vec<Step>,
    loss: f64,
    gradients: Vec<Vec<f64>>,
}

impl Function {
    /// Computes all values. A step that is not in `fits` is computed of whole values.
    fn values(&self, inputs: &[Expr], fits: &[bool], mesh: &Mesh) -> Vec<Expr> {
        let mut made = inputs.to_vec();
        for (step, fits) in self.steps.iter().zip(fits) {
            let whole = |x: &Expr| x.to(mesh.replicated());
            let value = match fits {
                true => apply(step, &made),
                false => apply(step, &made.iter().map(whole).collect::<Vec<_>>()),
            };
            made.push(value);
        }
        made
    }

    fn loss(&self, made: &[Expr], mesh: &Mesh) -> Expr {
        let is_used = |id: &usize| self.steps.iter().any(|step| step.args.contains(id));
        let last = (self.inputs.len()..made.len()).filter(|id| !is_used(id));
        let terms = last.map(|id| (made[id] * weights(&made[id].shape())).sum(..));
        let terms = terms.map(|term| term.to(mesh.replicated()));
        terms
            .reduce(|sum, term| sum + term)
            .expect("there is a step")
    }
}

/// Returns the weights of the elements of a value in the loss.
fn weights(shape: &[usize]) -> Expr {
    let weight = |i: usize| ((i * 5 + 2) % 7) as f64 / 4.0 - 0.75;
    let count: usize = shape.iter().product();
    let each = (0..count).map(|i| number(weight(i), DType::F64).expand(0));
    concatenate(&each.collect::<Vec<_>>(), 0).reshape(shape)
}

/// Computes the loss of a function and its gradients. Returns what differs from those of JAX.
fn differences(p: &mut Program, mesh: &Mesh, function: &Function) -> Result<Vec<String>> {
    let inputs = put_inputs(p, mesh, &function.inputs, |x| x)?;

    // Which steps fit the shardings of their operands.
    let mut fits = Vec::new();
    for _ in &function.steps {
        fits.push(true);
        let made = p.compute_on(mesh, &inputs[..], |inputs| {
            let made = function.values(&inputs, &fits, mesh);
            made[made.len() - 1]
        });
        *fits.last_mut().expect("was pushed") = made.is_ok();
    }
    let (loss, gradients) = p.compute_on(mesh, &inputs[..], |inputs| {
        let made = function.values(&inputs, &fits, mesh);
        let loss = function.loss(&made, mesh);
        let gradients = loss.gradients(inputs);
        (loss, gradients)
    })?;

    let loss = p.device_put(&loss, mesh.replicated())?;
    let loss = loss.to_host()?.expect("a shard is here").to_vec::<f64>()?;
    let mut differences = Vec::from_iter(difference("loss", &loss, &[function.loss]));
    let pairs = gradients.iter().zip(&function.gradients).enumerate();
    for (index, (gradient, expected)) in pairs {
        let name = format!("gradient {index}");
        if let InputSpec::Placed(spec) = &function.inputs[index].spec {
            let placed = sharding(mesh, spec).layout(gradient.shape()).unwrap();
            let own = gradient.sharding().expect("it is on devices");
            let is_placed = own.layout(gradient.shape()).unwrap() == placed;
            if !is_placed || !own.unreduced_axes().is_empty() {
                differences.push(format!("{name} is {own}"));
            }
        }
        let gradient = p.device_put(gradient, mesh.replicated())?;
        let found = gradient
            .to_host()?
            .expect("a shard is here")
            .to_vec::<f64>()?;
        differences.extend(difference(&name, &found, expected));
    }
    Ok(differences)
}

fn difference(name: &str, found: &[f64], expected: &[f64]) -> Option<String> {
    let scale = expected.iter().fold(1.0f64, |scale, x| scale.max(x.abs()));
    let is_close = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-9 * scale;
    let same = found.len() == expected.len() && found.iter().zip(expected).all(is_close);
    (!same).then(|| format!("{name}: {found:?} in place of {expected:?}"))
}

#[test]
fn gradients_are_those_of_jax() {
    let _limit = watchdog(300);
    let text = match std::env::var("MPMD_TEST_GRADIENTS") {
        Ok(path) => std::fs::read_to_string(path).expect("functions"),
        Err(_) => include_str!("../golden/gradients.jsonl").to_owned(),
    };
    let functions: Vec<Function> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a function"))
        .collect();
    assert!(functions.len() > 100);
    let results = mpmd_core::simulate(2, 8, 7, |p| {
        let mesh = p.mesh(&[("x", 2), ("y", 2), ("z", 2)])?;
        let mut found = Vec::new();
        for function in &functions {
            let seed = function.seed;
            match differences(p, &mesh, function) {
                Ok(list) => found.extend(list.iter().map(|what| format!("{seed}: {what}"))),
                Err(why) => found.push(format!("{seed}: {why}")),
            }
        }
        Ok(found)
    });
    for result in results {
        let found = result.unwrap();
        assert!(
            found.is_empty(),
            "{} differ: {}",
            found.len(),
            found.join("\n")
        );
    }
}

#[test]
fn gradient_of_a_whole_value_is_added_up_once() {
    on_mesh(|p, mesh| {
        // Rows over `x`, as data parallel training has them. The weights are on all devices.
        let x = p.device_put(&counted(&[4, 2]), mesh.sharding(spec!["x"]))?;
        let w = p.device_put(&counted(&[2]), mesh.replicated())?;
        let before = p.operations();
        let (value, of_w) = p.compute((&x, &w), |(x, w)| {
            let loss = einsum("b i, i -> b", x, w).square().sum(..) + (x * w).sum(..);
            (loss, loss.gradients([w]))
        })?;
        // One kernel, one sum over the devices: both parts of the gradient are added before.
        assert_eq!(p.operations() - before, 2);
        assert_eq!(of_w[0].sharding(), w.sharding());
        assert_eq!(value.sharding().unwrap().unreduced_axes(), ["x"]);
        // 2 (x w) x, and x: 5, 11, 17, 23 times the columns.
        assert_eq!(
            whole(p, mesh, &of_w[0])?,
            [2.0 * 284.0 + 16.0, 2.0 * 340.0 + 20.0]
        );
        Ok(())
    });
}

#[test]
fn gradients_go_back_through_moves_and_meshes() {
    on_mesh(|p, mesh| {
        let stages = mesh.split("x")?;
        let (first, last) = (stages[0].clone(), stages[1].clone());
        let x = p.device_put(&counted(&[2, 2]), first.sharding(spec!["y"]))?;
        let w = p.device_put(&counted(&[2, 2]), last.sharding(spec![None, "y"]))?;
        let (of_x, of_w) = p.compute((&x, &w), |(x, w)| {
            let y = x.square().to(last.replicated());
            y.matmul(w).sum(..).gradients((x, w))
        })?;
        assert_eq!(
            (of_x.sharding(), of_w.sharding()),
            (x.sharding(), w.sharding())
        );
        assert_eq!(whole(p, mesh, &of_x)?, [6.0, 28.0, 18.0, 56.0]);
        assert_eq!(whole(p, mesh, &of_w)?, [10.0, 10.0, 20.0, 20.0]);

        // A host value that both stages compute with.
        let host = counted(&[2]);
        let of_host = p.compute((&x, &host, &w), |(x, host, w)| {
            let y = (x * host).to(last.replicated());
            (y * host * w).sum(..).gradients(host)
        })?;
        assert_eq!(whole(p, mesh, &of_host)?, [20.0, 80.0]);
        Ok(())
    });
}

#[test]
fn stopped_and_missing_gradients_are_zero() {
    on_mesh(|p, mesh| {
        let rows = mesh.sharding(spec!["x"]);
        let x = p.device_put(&counted(&[4]), &rows)?;
        let other = p.device_put(&counted(&[4, 2]), mesh.sharding(spec!["x", "y"]))?;
        let ([of_x, of_other], kept) = p.compute((&x, &other), |(x, other)| {
            let stopped = x.stop_gradient();
            let steps = x.cast(DType::I32).cast(DType::F32) * x.greater(2.0).cast(DType::F32);
            let loss = (stopped * x + steps).sum(..);
            (loss.gradients([x, other]), stopped)
        })?;
        assert_eq!(whole(p, mesh, &of_x)?, [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(whole(p, mesh, &of_other)?, [0.0; 8]);
        assert_eq!(of_other.sharding(), other.sharding());
        // A value whose gradient is stopped is the value itself.
        assert_eq!(whole(p, mesh, &kept)?, [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(kept.sharding(), Some(&rows));
        Ok(())
    });
}

#[test]
fn gradients_refuse_what_has_none() {
    let errors = on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4]), mesh.sharding(spec!["x"]))?;
        let whole_number = MpmdArray::scalar(3i32);
        let texts = [
            p.compute(&x, |x| x.gradients(x)).map(drop),
            p.compute(&x, |x| x.argmax(0).gradients(x)).map(drop),
            p.compute((&x, &whole_number), |(x, n)| x.sum(..).gradients((x, n)))
                .map(drop),
            p.compute(&x, |x| x.segment_sum(0, x.cast(DType::I32), 2))
                .map(drop),
            p.compute(&x, |x| {
                x.segment_sum(1, number(0.0, DType::I32).expand(0), 2)
            })
            .map(drop),
            p.compute(&x, |x| x.segment_sum(0, x, 2)).map(drop),
        ];
        let lines: Vec<String> = texts
            .into_iter()
            .map(|text| text.err().map_or_else(String::new, |why| why.to_string()))
            .collect();
        Ok(lines)
    });
    for (error, expected) in errors.iter().zip([
        "gradients: expected one float, found f32[4]: sum it up with `.sum(..)`",
        "argmax: dimension 0 of input 0 is divided over `x`",
        "gradients: value 1 is i32[], and only floats have them",
        "",
        "segment_sum: there is no dimension 1 of 1",
        "segment_sum: expected indices of i32 or i64, found f32[4]",
    ]) {
        assert!(
            error.contains(expected),
            "{error:?} in place of {expected:?}"
        );
        assert_eq!(error.is_empty(), expected.is_empty(), "{error}");
    }
}

#[test]
fn segments_are_summed_over_devices() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4, 2]), mesh.sharding(spec!["x", "y"]))?;
        let segments = MpmdArray::from_slice(&[4], &[1i32, -1, 1, 3])?;
        let segments = p.device_put(&segments, mesh.sharding(spec!["x"]))?;
        let sums = p.compute((&x, &segments), |(x, segments)| {
            x.segment_sum(0, segments, 3)
        })?;
        let own = sums.sharding().unwrap();
        assert_eq!(own, &mesh.sharding(spec![None, "y"]).unreduced(&["x"])?);
        // The second row and the last are of no segment.
        assert_eq!(whole(p, mesh, &sums)?, [0.0, 0.0, 6.0, 8.0, 0.0, 0.0]);
        Ok(())
    });
}

#[test]
fn inputs_nest_and_lists_of_them_do_not_mix() {
    on_mesh(|p, mesh| {
        let lists = [1usize, 2].map(|count| {
            let arrays = (0..3).map(|_| counted(&[2]));
            let mut first: Vec<MpmdArray> = arrays.collect();
            let second = first.split_off(count);
            (first, second)
        });
        for (first, second) in &lists {
            // One line for both: the closure captures nothing.
            let count = p.compute_on(mesh, (first, second), |(first, second)| {
                number((first.len() * 10 + second.len()) as f64, DType::F32)
            })?;
            let expected = (first.len() * 10 + second.len()) as f32;
            assert_eq!(whole(p, mesh, &count)?, [expected]);
        }
        Ok(())
    });
}

#[test]
fn elements_are_taken_along_a_dimension_and_split() {
    on_mesh(|p, mesh| {
        // The rows are divided: each device chooses from its own.
        let x = p.device_put(&counted(&[4, 3]), mesh.sharding(spec!["x"]))?;
        let indices = MpmdArray::from_slice(&[4, 2], &[0i32, 2, 1, 1, 7, -1, 2, 0])?;
        let (taken, of_x) = p.compute((&x, &indices), |(x, indices)| {
            let taken = x.take_along(1, indices);
            (taken, taken.square().sum(..).gradients(x))
        })?;
        assert_eq!(taken.sharding(), x.sharding());
        assert_eq!(
            whole(p, mesh, &taken)?,
            [1.0, 3.0, 5.0, 5.0, 9.0, 7.0, 12.0, 10.0]
        );
        let expected = [
            2.0, 0.0, 6.0, 0.0, 20.0, 0.0, 14.0, 0.0, 18.0, 20.0, 0.0, 24.0,
        ];
        assert_eq!(whole(p, mesh, &of_x)?, expected);

        let parts = p.compute(&x, |x| x.split(1, &[2, 0, 1]))?;
        let shapes: Vec<&[usize]> = parts.iter().map(|part| part.shape()).collect();
        assert_eq!(shapes, [&[4, 2], &[4, 0], &[4, 1]]);
        assert_eq!(whole(p, mesh, &parts[2])?, [3.0, 6.0, 9.0, 12.0]);

        for (error, expected) in [
            (
                p.compute(&x, |x| x.split(-1, &[1, 1])[0]),
                "split: the sizes [1, 1] do not add up to dimension 1 of f32[4,3]",
            ),
            (
                p.compute((&x, &indices), |(x, indices)| x.take_along(0, indices)),
                "take_along: f32[4,3] and i32[4,2] differ in more than dimension 0",
            ),
            (
                p.compute(&x, |x| x.split(1, &[usize::MAX, 4])[0]),
                "do not add up to dimension 1 of f32[4,3]",
            ),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        Ok(())
    });
}

#[test]
fn axes_of_size_one_divide_gradients_as_others_do() {
    let _limit = watchdog(60);
    for size in [1usize, 2] {
        let results = mpmd_core::simulate(1, 2, 7, |p| {
            let devices = &p.mesh(&[("all", 2)])?.devices()[..size].to_vec();
            let mesh = p.mesh_of(&[("x", size)], devices)?;
            let (rows, all) = (mesh.sharding(spec!["x"]), mesh.replicated());
            let x = p.device_put(&counted(&[4]), &all)?;
            let y = p.device_put(&counted(&[4]), &rows)?;
            let before = p.operations();
            let of_part = p.compute(&x, |x| {
                x.slice(0, 0..2).to(&rows).square().sum(..).gradients(x)
            })?;
            let of_x = p.compute((&x, &y), |(x, y)| (x * y).sum(..).gradients(x))?;
            let of_y = p.compute(&y, |y| y.to(&all).square().sum(..).gradients(y))?;
            let operations = p.operations() - before;
            assert_eq!(
                (of_part.sharding(), of_x.sharding()),
                (Some(&all), Some(&all))
            );
            assert_eq!(of_y.sharding(), Some(&rows));
            // Nothing is left of a part without elements.
            let of_none = p.compute(&x, |x| {
                x.slice(0, 0..0).to(&rows).square().sum(..).gradients(x)
            })?;
            assert_eq!(whole(p, &mesh, &of_none)?, [0.0; 4]);
            assert_eq!(whole(p, &mesh, &of_part)?, [2.0, 4.0, 0.0, 0.0]);
            Ok((operations, whole(p, &mesh, &of_x)?, whole(p, &mesh, &of_y)?))
        });
        let found = results.into_iter().next().unwrap().unwrap();
        assert_eq!(found.1, [1.0, 2.0, 3.0, 4.0], "{size}");
        assert_eq!(found.2, [2.0, 4.0, 6.0, 8.0], "{size}");
    }
}

#[test]
fn host_values_have_gradients_whatever_they_go_through() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4]), mesh.sharding(spec!["x"]))?;
        let host = counted(&[4]);
        type Case = (fn(Expr) -> Expr, [f32; 4]);
        let functions: [Case; 3] = [
            (
                |h| concatenate(&[h.slice(0, 0..2), h.slice(0, 0..2)], 0),
                [4.0, 6.0, 0.0, 0.0],
            ),
            (|h| h.slice(0, 0..3).pad(0, 1, 0, 0.0), [2.0, 3.0, 4.0, 0.0]),
            (
                |h| h.reshape(&[2, 2]).t().reshape(&[4]),
                [1.0, 3.0, 2.0, 4.0],
            ),
        ];
        for (function, expected) in functions {
            let of_host =
                p.compute((&x, &host), |(x, h)| (x * function(h)).sum(..).gradients(h))?;
            assert_eq!(of_host.sharding(), Some(&mesh.replicated()));
            assert_eq!(whole(p, mesh, &of_host)?, expected);
        }
        // The same move twice is one.
        let before = p.operations();
        let all = mesh.replicated();
        let both = p.compute(&x, |x| (x.to(&all), x.to(&all)))?;
        assert_eq!(p.operations() - before, 1);
        assert_eq!(whole(p, mesh, &both.0)?, whole(p, mesh, &both.1)?);
        Ok(())
    });
}
