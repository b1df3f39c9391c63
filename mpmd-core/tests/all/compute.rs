//! `compute`: functions over sharded arrays, their shardings, and every error that its
//! documentation names.

use crate::common::cuda::{CPU, CUDA};
use crate::common::watchdog;
use mpmd_core::compute::{Expr, concatenate, einsum, normal, number};
use mpmd_core::prelude::*;
use mpmd_core::random::Key;
use mpmd_core::sharding::{Sharding, Spec};
use mpmd_core::topology::{DeviceId, Mesh};

/// A function of one array.
type Function = fn(Expr) -> Expr;

/// Runs a program over two processes with four devices, on the mesh `x` by `y` of two each. Returns
/// what the first process returns.
pub(crate) fn on_mesh<T: Send>(program: impl Fn(&mut Program, &Mesh) -> Result<T> + Sync) -> T {
    let _limit = watchdog(120);
    let results = mpmd_core::simulate(2, 4, 7, |p| {
        let mesh = p.mesh(&[("x", 2), ("y", 2)])?;
        program(p, &mesh)
    });
    let mut results = results.into_iter();
    let first = results.next().unwrap().unwrap();
    results.for_each(|other| drop(other.unwrap()));
    first
}

pub(crate) fn counted(shape: &[usize]) -> MpmdArray {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i| i as f32 + 1.0)
        .collect();
    MpmdArray::from_slice(shape, &values).unwrap()
}

/// Returns all elements of an array, moved to every device.
pub(crate) fn whole(p: &mut Program, mesh: &Mesh, x: &MpmdArray) -> Result<Vec<f32>> {
    let x = p.device_put(x, mesh.replicated())?;
    Ok(x.to_host()?.unwrap().to_vec::<f32>()?)
}

fn over(mesh: &Mesh, spec: Spec, axes: &[&str]) -> Sharding {
    mesh.sharding(spec).unreduced(axes).unwrap()
}

/// Returns the error of a function of two `[4, 4]` arrays with these shardings.
fn refused(
    shardings: impl Fn(&Mesh) -> [Sharding; 2] + Sync,
    function: impl Fn(Expr, Expr) -> Expr + Sync,
) -> String {
    on_mesh(|p, mesh| {
        let [a, b] = shardings(mesh);
        let (a, b) = (
            p.device_put(&counted(&[4, 4]), a)?,
            p.device_put(&counted(&[4, 4]), b)?,
        );
        Ok(p.compute((&a, &b), |(a, b)| function(a, b))
            .unwrap_err()
            .to_string())
    })
}

#[test]
fn sums_and_products_follow_their_operands() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4, 2]), mesh.sharding(spec!["x"]))?;
        let y = p.device_put(&counted(&[2, 4]), mesh.sharding(spec![None, "y"]))?;
        let host = counted(&[4, 2]);

        let both = p.compute((&x, &host), |(x, host)| x * 2.0 + host)?;
        assert_eq!(both.sharding(), Some(&mesh.sharding(spec!["x"])));
        assert_eq!(
            whole(p, mesh, &both)?,
            [3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0]
        );

        let product = p.compute((&x, &y), |(x, y)| x.matmul(y))?;
        assert_eq!(product.sharding(), Some(&mesh.sharding(spec!["x", "y"])));
        let expected = [11.0, 14.0, 17.0, 20.0, 23.0, 30.0, 37.0, 44.0];
        assert_eq!(whole(p, mesh, &product)?[..8], expected);

        let sum = p.compute(&x, |x| x.sum(..))?;
        assert_eq!(sum.sharding(), Some(&over(mesh, spec![], &["x"])));
        assert_eq!(whole(p, mesh, &sum)?, [36.0]);

        // A contraction over a divided dimension, one operand of which is whole.
        let z = p.device_put(&counted(&[2, 4]), mesh.replicated())?;
        let product = p.compute((&y, &z), |(y, z)| einsum("a b, c b -> a c", y, z))?;
        assert_eq!(product.sharding(), Some(&over(mesh, spec![], &["y"])));
        assert_eq!(whole(p, mesh, &product)?, [30.0, 70.0, 70.0, 174.0]);

        let (mean, largest) = p.compute(&x, |x| (x.mean([0]), x.max(-1)))?;
        assert_eq!(mean.sharding(), Some(&over(mesh, spec![], &["x"])));
        assert_eq!(largest.sharding(), Some(&mesh.sharding(spec!["x"])));
        assert_eq!(whole(p, mesh, &mean)?, [4.0, 5.0]);
        assert_eq!(whole(p, mesh, &largest)?, [2.0, 4.0, 6.0, 8.0]);
        Ok(())
    });
}

#[test]
fn shapes_change_as_in_numpy() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4, 3]), mesh.sharding(spec!["x"]))?;
        let checks: [(&str, Function, Spec, Vec<f32>); 9] = [
            (
                "t",
                |x| x.t(),
                spec![None, "x"],
                vec![1.0, 4.0, 7.0, 10.0, 2.0],
            ),
            (
                "reshape",
                |x| x.reshape(&[12]),
                spec!["x"],
                vec![1.0, 2.0, 3.0, 4.0, 5.0],
            ),
            (
                "part",
                |x| x.reshape(&[2, 2, 3]),
                spec!["x"],
                vec![1.0, 2.0, 3.0, 4.0, 5.0],
            ),
            (
                "slice",
                |x| x.slice(1, 1..3),
                spec!["x"],
                vec![2.0, 3.0, 5.0, 6.0, 8.0],
            ),
            (
                "pad",
                |x| x.pad(1, 1, 0, 0.5),
                spec!["x"],
                vec![0.5, 1.0, 2.0, 3.0, 0.5],
            ),
            (
                "concatenate",
                |x| concatenate(&[x.slice(1, 2..3), x.slice(1, 0..1)], 1),
                spec!["x"],
                vec![3.0, 1.0, 6.0, 4.0, 9.0],
            ),
            (
                "take",
                |x| x.take(1, number(1.0, DType::I32).broadcast_to(&[2])),
                spec!["x"],
                vec![2.0, 2.0, 5.0, 5.0, 8.0],
            ),
            (
                "broadcast_to",
                |x| x.expand(1).broadcast_to(&[4, 2, 3]),
                spec!["x"],
                vec![1.0, 2.0, 3.0, 1.0, 2.0],
            ),
            (
                "one_hot",
                |x| {
                    (x.slice(1, 0..1).cast(DType::I32) - 1)
                        .reshape(&[4])
                        .one_hot(4, DType::F32)
                },
                spec!["x"],
                vec![1.0, 0.0, 0.0, 0.0, 0.0],
            ),
        ];
        for (name, function, spec, expected) in checks {
            let y = p.compute(&x, function)?;
            assert_eq!(y.sharding(), Some(&mesh.sharding(spec)), "{name}");
            assert_eq!(whole(p, mesh, &y)?[..5], expected, "{name}");
        }
        Ok(())
    });
}

#[test]
fn dtypes_compare_choose_and_convert() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4]), mesh.sharding(spec!["x"]))?;
        let checks: [(Function, [f32; 4]); 8] = [
            (|x| x.greater(2.0).select(x, -x), [-1.0, -2.0, 3.0, 4.0]),
            (|x| x.maximum(2.5).minimum(3.5), [2.5, 2.5, 3.0, 3.5]),
            (
                |x| ((x.cast(DType::I32) * 3) - 5).abs().cast(DType::F32),
                [2.0, 1.0, 4.0, 7.0],
            ),
            (
                |x| (x.less_equal(1.0) | !x.not_equal(4.0)).cast(DType::F32),
                [1.0, 0.0, 0.0, 1.0],
            ),
            (|x| 1.0 / x, [1.0, 0.5, 1.0 / 3.0, 0.25]),
            (|x| x.pow(2.0).sqrt(), [1.0, 2.0, 3.0, 4.0]),
            (
                |x| x.argmax(0).cast(DType::F32) + x.filled_like(0.0),
                [3.0; 4],
            ),
            (
                |x| x.equal(9.0).any(..).select(x, x.square()),
                [1.0, 4.0, 9.0, 16.0],
            ),
        ];
        for (index, (function, expected)) in checks.into_iter().enumerate() {
            // The last two need the whole.
            let x = match index < 6 {
                true => x.clone(),
                false => p.device_put(&x, mesh.replicated())?,
            };
            let y = p.compute(&x, function)?;
            assert_eq!(whole(p, mesh, &y)?, expected, "function {index}");
        }
        let softmax = p.compute(&x, |x| x.reshape(&[4, 1]).broadcast_to(&[4, 2]).softmax(1))?;
        assert_eq!(whole(p, mesh, &softmax)?, [0.5; 8]);
        let sums = p.compute(&x, |x| x.reshape(&[4, 1]).log_sum_exp(1))?;
        assert_eq!(whole(p, mesh, &sums)?, [1.0, 2.0, 3.0, 4.0]);
        Ok(())
    });
}

#[test]
fn moves_inside_cut_a_function_into_operations() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4, 2]), mesh.sharding(spec!["x"]))?;
        let before = p.operations();
        let normalised = p.compute(&x, |x| {
            let mean = x.mean([0]).to(mesh.replicated());
            let centred = x - mean;
            let deviation = centred.square().mean([0]).to(mesh.replicated()).sqrt();
            centred / deviation
        })?;
        // The mean, its move, the variance, its move, and the quotient.
        assert_eq!(p.operations() - before, 5);
        assert_eq!(normalised.sharding(), Some(&mesh.sharding(spec!["x"])));
        let values = whole(p, mesh, &normalised)?;
        let deviation = 5f32.sqrt();
        assert_eq!(values[..2], [-3.0 / deviation; 2]);
        assert_eq!(values[6..], [3.0 / deviation; 2]);

        // To another mesh, and back.
        let single = p.mesh_of(&[("only", 1)], &[DeviceId(3)])?;
        let y = p.compute(&x, |x| {
            (x.to(single.replicated()) * 2.0).to(mesh.replicated()) + x
        })?;
        assert_eq!(y.sharding(), Some(&mesh.sharding(spec!["x"])));
        assert_eq!(whole(p, mesh, &y)?[7], 24.0);
        Ok(())
    });
}

#[test]
fn random_numbers_have_the_same_bits_with_every_sharding() {
    let fill = |spec: Spec| {
        on_mesh(|p, mesh| {
            let aval = f32s([4, 6]);
            let make = |()| {
                let sharding = mesh.sharding(spec.clone());
                normal(Key(9), aval.clone(), sharding)
            };
            let x = p.compute_on(mesh, (), make)?;
            assert_eq!(x.sharding(), Some(&mesh.sharding(spec.clone())));
            whole(p, mesh, &x)
        })
    };
    let expected = fill(spec![]);
    for spec in [spec!["x", "y"], spec![("x", "y")], spec![None, "y"]] {
        assert_eq!(fill(spec), expected);
    }
}

#[test]
fn host_values_alone_need_a_mesh() {
    on_mesh(|p, mesh| {
        let x = counted(&[2]);
        let error = p.compute(&x, |x| x + 1.0).unwrap_err().to_string();
        assert!(
            error.contains("no input is on devices") && error.contains("compute_on"),
            "{error}"
        );
        let y = p.compute_on(mesh, &x, |x| x + 1.0)?;
        assert_eq!(whole(p, mesh, &y)?, [2.0, 3.0]);
        Ok(())
    });
}

#[test]
fn second_call_takes_the_kernel_of_the_first() {
    on_mesh(|p, mesh| {
        let mut x = p.device_put(&counted(&[4]), mesh.sharding(spec!["x"]))?;
        for factor in [2.0, 2.0, 3.0] {
            x = p.compute(&x, |x| x * factor)?;
        }
        assert_eq!(whole(p, mesh, &x)?, [12.0, 24.0, 36.0, 48.0]);
        Ok(())
    });
}

#[test]
fn conflicts_are_errors_of_the_line_with_both_operands() {
    let rows_and_columns = |mesh: &Mesh| [mesh.sharding(spec!["x"]), mesh.sharding(spec!["y"])];
    let line = line!() + 1;
    let error = refused(rows_and_columns, |a, b| a + b);
    for part in [
        "add: dimension 0 of input 0 is divided over `x`, but dimension 0 of input 1 over `y`",
        "input 0 is f32[4,4] P(x)",
        "input 1 is f32[4,4] P(y)",
        "`.to(sharding)`",
        &format!("tests/all/compute.rs:{line}:"),
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }

    let partial = |mesh: &Mesh| [mesh.sharding(spec!["x"]), mesh.replicated()];
    let error = refused(partial, |a, _| a.sum([0]).exp());
    assert!(
        error.contains("exp: input 0 consists of summands over `x`: reduce it first"),
        "{error}"
    );
    let error = refused(partial, |a, _| a.max([0]));
    let expected =
        "max: dimension 0 of input 0 is divided over `x`, and each device needs it whole";
    assert!(error.contains(expected), "{error}");
    let error = refused(partial, |a, b| a + b.cast(DType::F64));
    assert!(
        error.contains("add: the dtypes of f32[4,4] and f64[4,4] differ: cast"),
        "{error}"
    );
    let error = refused(partial, |a, b| a + b.slice(1, 0..3));
    assert!(
        error.contains("the shapes of f32[4,4] and f32[4,3] do not fit together"),
        "{error}"
    );
    let error = refused(partial, |a, b| a.matmul(b).sum([5]));
    assert!(
        error.contains("sum: there is no dimension 5 of 2"),
        "{error}"
    );
    let error = refused(partial, |a, _| a.cast(DType::Bf16));
    assert!(error.contains("and not bf16"), "{error}");
}

#[test]
fn expression_of_another_function_is_refused() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[4]), mesh.replicated())?;
        let mut kept = None;
        let unchanged = p.compute(&x, |x| {
            kept = Some(x + 1.0);
            x
        })?;
        assert_eq!(whole(p, mesh, &unchanged)?, [1.0, 2.0, 3.0, 4.0]);
        let functions: [fn(Expr, Expr) -> Expr; 2] = [|_, kept| kept, |x, kept| x + kept];
        for function in functions {
            let error = p.compute(&x, |x| function(x, kept.unwrap())).unwrap_err();
            let expected = "an expression of another function is used";
            assert!(error.to_string().contains(expected), "{error}");
        }
        Ok(())
    });
}

#[test]
fn panic_after_an_error_is_not_told_in_its_place() {
    on_mesh(|p, mesh| {
        let x = p.device_put(&counted(&[2, 3]), mesh.replicated())?;
        let error = p.compute(&x, |x| {
            let product = x.matmul(x);
            product.reshape(&[product.shape()[0] * product.shape()[1]])
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("matmul: the shapes of f32[2,3] and f32[2,3]"),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn edges_of_floats_are_those_of_numpy() {
    on_mesh(|p, mesh| {
        let infinite = f32::INFINITY;
        let values = [-infinite, -infinite, infinite, 1.0];
        let x = MpmdArray::from_slice(&[2, 2], &values)?;
        let x = p.device_put(&x, mesh.replicated())?;
        let empty = p.device_put(&counted(&[0]), mesh.replicated())?;
        let sums = p.compute(&x, |x| x.log_sum_exp(1))?;
        assert_eq!(whole(p, mesh, &sums)?, [-infinite, infinite]);
        let none = p.compute(&empty, |x| 1.0 / x.sum(..))?;
        assert_eq!(whole(p, mesh, &none)?, [infinite]);
        let nothing = p.compute((&empty, &x), |(e, x)| einsum("i, a b -> a", e, x))?;
        assert_eq!(whole(p, mesh, &nothing)?, [0.0, 0.0]);
        let kept = p.compute(&empty, |x| x.expand(0).reshape(&[1, 0]))?;
        assert_eq!(kept.shape(), [1, 0]);
        Ok(())
    });
}

#[test]
fn functions_are_the_same_on_cuda_devices() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let found = [CPU, CUDA].map(|kind| {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let x = p
            .device_put(&counted(&[4, 3]), mesh.sharding(spec!["x"]))
            .unwrap();
        let host = counted(&[3]);
        let y = p.compute((&x, &host), |(x, host)| {
            (x.exp() / 9.0 + host).t().matmul(x)
        });
        let y = y.unwrap();
        let y = p.device_put(&y, mesh.replicated()).unwrap();
        let y = y.to_host().unwrap().unwrap().to_vec::<f32>().unwrap();
        p.finish().unwrap();
        y
    });
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0].len(), 9);
}

#[test]
fn values_of_other_dtypes_are_refused_by_name() {
    let replicated = |mesh: &Mesh| [mesh.replicated(), mesh.replicated()];
    let error = refused(replicated, |a, _| a.pad(0, 1, 0, number(1.0, DType::I32)));
    assert!(
        error.contains("pad: the dtypes of f32[4,4] and i32[] differ"),
        "{error}"
    );
    let error = refused(replicated, |a, b| concatenate(&[a, b.cast(DType::I32)], 0));
    assert!(
        error.contains("concatenate: the dtypes of f32[4,4] and i32[4,4] differ"),
        "{error}"
    );
    let error = refused(replicated, |a, b| einsum("a b, b -> a", a, b));
    assert!(
        error.contains("expected 1 dimensions of input 1, found f32[4,4]"),
        "{error}"
    );
}
