//! Kernels made from closures: values, and every error that they may cause.

use std::time::Duration;

use crate::common::cuda::{CPU, CUDA};
use crate::common::kernels::fun;
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceKind;
use mpmd_core::{Simulation, run_here};

fn floats(values: &[f32]) -> HostArray {
    HostArray::from_slice(&[values.len()], values).unwrap()
}

/// Runs `kernel` on one device and returns the text of the error of its call.
fn refused<K: Kernel>(kernel: K, x: K::In) -> String {
    let mut p = Program::builder().alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let kernel = p
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let error = kernel.call(&mut p, x).map(drop).expect_err("it is refused");
    assert!(matches!(error, Error::Issue(_)), "{error}");
    p.finish().unwrap();
    error.to_string()
}

fn array<T: mpmd_core::aval::Element>(values: &[T]) -> MpmdArray {
    MpmdArray::from_slice(&[values.len()], values).unwrap()
}

#[test]
fn closures_take_one_to_six_inputs_and_give_one_to_three() {
    let _limit = watchdog(60);
    let x = floats(&[1.0, 2.0]);
    let negated = kernel(like_input, |x: View<f32>, mut y: ViewMut<f32>| {
        y.iter_mut().zip(x.iter()).for_each(|(y, x)| *y = -x);
    });
    assert_eq!(
        run_here(negated, &x).unwrap().to_vec::<f32>().unwrap(),
        [-1.0, -2.0]
    );
    let both = kernel(
        |x: &ShapedArray, n: &ShapedArray| Ok((f32s([]), i32s([n.elements() + x.elements()]))),
        |x: View<f32>, n: View<i32>, mut sum: ViewMut<f32>, mut all: ViewMut<i32>| {
            sum[0] = x.iter().sum();
            all[..n.len()].copy_from_slice(&n);
            all[n.len()..].fill(x.len() as i32);
            Ok(())
        },
    );
    let (sum, all) = run_here(both, &(x, HostArray::scalar(7i32))).unwrap();
    assert_eq!(sum.to_vec::<f32>().unwrap(), [3.0]);
    assert_eq!(all.to_vec::<i32>().unwrap(), [7, 2, 2]);
    let six = kernel(
        like_input,
        |a: View<u8>,
         b: View<u8>,
         c: View<u8>,
         d: View<u8>,
         e: View<u8>,
         f: View<u8>,
         mut x: ViewMut<u8>,
         mut y: ViewMut<u8>,
         mut z: ViewMut<u8>|
         -> Result<()> {
            (x[0], y[0], z[0]) = (a[0] + b[0], c[0] + d[0], e[0] + f[0]);
            Ok(())
        },
    );
    let [a, b, c, d, e, f] = [1u8, 2, 3, 4, 5, 6].map(HostArray::scalar);
    let (x, y, z) = run_here(six, &(a, b, c, d, e, f)).unwrap();
    assert_eq!([x, y, z].map(|x| x.to_vec::<u8>().unwrap()[0]), [3, 7, 11]);
}

fn half(x: i32) -> f64 {
    f64::from(x) / 2.0
}

#[test]
fn elementwise_repeats_scalars_and_changes_dtypes() {
    let _limit = watchdog(60);
    // More than one chunk, and a rest.
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let line = elementwise(|a: f32, x: f32, b: f32| a * x + b);
    let y = run_here(
        line,
        &(
            HostArray::scalar(2.0f32),
            floats(&x),
            HostArray::scalar(1.0f32),
        ),
    );
    let expected: Vec<f32> = x.iter().map(|x| 2.0 * x + 1.0).collect();
    assert_eq!(y.unwrap().to_vec::<f32>().unwrap(), expected);
    let small = elementwise(|x: f32, n: u8, yes: bool, d: f64| yes && f64::from(x) + d < n.into());
    let x = (
        floats(&[1.0, 9.0]),
        HostArray::from_slice(&[2], &[5u8, 5]).unwrap(),
    );
    let y = run_here(
        small,
        &(x.0, x.1, HostArray::scalar(true), HostArray::scalar(0.5f64)),
    );
    assert_eq!(y.unwrap().to_vec::<bool>().unwrap(), [true, false]);
    let y = run_here(elementwise(half), &HostArray::scalar(3i32)).unwrap();
    assert_eq!(
        (y.to_vec::<f64>().unwrap(), y.shape()),
        (vec![1.5], &[][..])
    );
    let none = run_here(
        elementwise(half),
        &HostArray::from_slice::<i32>(&[0, 3], &[]).unwrap(),
    );
    assert_eq!(none.unwrap().shape(), [0, 3]);
}

#[test]
fn wrong_dtypes_are_refused_with_the_path() {
    let _limit = watchdog(60);
    let two = || kernel(like_input, |_: View<f32>, _: View<i32>, _: ViewMut<f32>| ());
    let said = refused(two(), (array(&[1.0f32]), array(&[1.0f32])));
    assert!(
        said.contains("input \"1\": f32[1] does not fit the closure, which has i32"),
        "{said}"
    );
    let one = kernel(like_input, |_: View<f32>, _: ViewMut<f32>| ());
    let said = refused(one, array(&[1u8]));
    assert!(
        said.contains("input u8[1] does not fit the closure, which has f32"),
        "{said}"
    );
    let output = kernel(
        like_input,
        |_: View<f32>, _: ViewMut<f32>, _: ViewMut<f64>| (),
    );
    let said = refused(output, array(&[1.0f32]));
    assert!(
        said.contains("output \"1\": f32[1] does not fit the closure, which has f64"),
        "{said}"
    );
    let said = refused(
        elementwise(|x: f32, n: i32| x + n as f32),
        (array(&[1i32]), array(&[1i32])),
    );
    assert!(
        said.contains("input \"0\": i32[1] does not fit the closure, which has f32"),
        "{said}"
    );
}

#[test]
fn shapes_that_differ_or_fail_are_refused() {
    let _limit = watchdog(60);
    let said = refused(
        elementwise(|x: f32, _: f32, z: f32| x + z),
        (
            MpmdArray::scalar(1.0f32),
            array(&[1.0f32]),
            array(&[1.0f32, 2.0]),
        ),
    );
    assert!(
        said.contains("input 1 is f32[1], but input 2 is f32[2]"),
        "{said}"
    );
    let never = kernel(
        |_: &ShapedArray| -> Result<ShapedArray> { Err(Error::kernel("no shape at all")) },
        |_: View<f32>, _: ViewMut<f32>| (),
    );
    let said = refused(never, array(&[1.0f32]));
    assert!(
        said.contains("no shape at all") && said.contains("jit kernel at "),
        "{said}"
    );
}

#[test]
fn captured_values_without_with_are_refused() {
    let _limit = watchdog(60);
    let factor = std::hint::black_box(2.0f32);
    for said in [
        refused(elementwise(move |x: f32| x * factor), array(&[1.0f32])),
        refused(
            kernel(like_input, move |_: View<f32>, mut y: ViewMut<f32>| {
                y.fill(factor)
            }),
            array(&[1.0f32]),
        ),
    ] {
        let line = concat!(file!(), ":");
        assert!(
            said.contains("captures values: declare each by `.with(value)`"),
            "{said}"
        );
        assert_eq!(
            said.matches(line).count(),
            3,
            "the call, the name, the closure: {said}"
        );
    }
    let declared = elementwise(move |x: f32| x * factor).with(factor);
    assert_eq!(
        run_here(declared, &floats(&[3.0]))
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [6.0]
    );
}

#[test]
fn names_show_the_line_and_short_values() {
    let line = line!() + 1;
    let plain = elementwise(|x: f32| x);
    assert_eq!(plain.name(), format!("elementwise at {}:{line}", file!()));
    let two = elementwise(|x: f32| x).with(2.0f32).with("a");
    assert!(two.name().ends_with(" (2.0, \"a\")"), "{}", two.name());
    let long = two.with([1000u32; 20]);
    assert!(
        long.name().ends_with(|last: char| last.is_ascii_digit()),
        "{}",
        long.name()
    );
    assert_ne!(
        long.statics(),
        elementwise(|x: f32| x).with(2.0f32).with("a").statics()
    );
    // On one line, the column tells two closures apart.
    let both = [
        elementwise(half as fn(i32) -> f64),
        elementwise(half as fn(i32) -> f64),
    ];
    assert_ne!(both[0].statics(), both[1].statics());
}

#[test]
fn declared_values_that_differ_diverge_with_the_line() {
    let _limit = watchdog(60);
    for large in [false, true] {
        let results = Simulation::new(2, 2)
            .delays(1, Duration::from_millis(1))
            .run(|p| {
                let mesh = p.mesh(&[("x", 2)])?;
                let own = p.process().0;
                let declared = if large { vec![own; 50] } else { vec![own] };
                let add = elementwise(move |x: u32| x + own).with(declared);
                let add = p.jit(add).on(&mesh).outputs(mesh.replicated()).build()?;
                let _ = add.call(p, MpmdArray::scalar(1u32))?;
                p.step_end()
            });
        for result in results {
            let error = result.expect_err("the processes differ");
            assert!(error.is_divergence(), "{error}");
            let said = error.to_string();
            assert!(
                said.contains(concat!("elementwise at ", file!(), ":")),
                "{said}"
            );
            assert_eq!(
                said.contains("([0])") && said.contains("([1])"),
                !large,
                "{said}"
            );
        }
    }
}

#[test]
fn inputs_that_are_divided_in_different_ways_are_refused_at_issue() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    let rows = mesh.sharding(spec!["x"]);
    let x = p.device_put(&array(&[1.0f32, 2.0]), &rows).unwrap();
    let add = elementwise(|x: f32, y: f32| x + y);
    let add = p.jit(add).on(&mesh).outputs(&rows).build().unwrap();
    let whole = p.device_put(&x, mesh.replicated()).unwrap();
    let line = line!() + 1;
    let said = add.call(&mut p, (x, whole)).unwrap_err().to_string();
    for part in [
        "dimension 0 of input 0 and dimension 0 of input 1 are divided in different ways: device 0 \
         has 0..1 of the one and 0..2 of the other: input 0 is P(x), input 1 is P(), output 0 is \
         P(x)",
        &format!("{}:{line}", file!()),
    ] {
        assert!(said.contains(part), "{said}\n lacks {part}");
    }
    p.finish().unwrap();
}

#[test]
fn host_values_are_divided_as_the_other_inputs() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(4).alone().unwrap();
    let mesh = p.mesh(&[("x", 2), ("y", 2)]).unwrap();
    let tiles = mesh.sharding(spec!["x", "y"]);
    let counted: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let host = MpmdArray::from_slice(&[4, 2], &counted).unwrap();
    let x = p.device_put(&host, &tiles).unwrap();
    let whole = mesh.replicated();
    let read = |p: &mut Program, y: MpmdArray| {
        let y = p.device_put(&y, &whole).unwrap().to_host();
        y.unwrap().unwrap().to_vec::<f32>().unwrap()
    };

    let add = elementwise(|x: f32, y: f32| x + 10.0 * y);
    let add = p.jit(add).on(&mesh).outputs(&tiles).build().unwrap();
    let y = add.call(&mut p, (x.clone(), host.clone())).unwrap();
    let expected: Vec<f32> = counted.iter().map(|x| 11.0 * x).collect();
    assert_eq!(read(&mut p, y), expected);

    // Each device gets the columns of the row that belong to its tile.
    let scale = |x: View<f32>, row: View<f32>, mut y: ViewMut<f32>| {
        for (y, x) in y.chunks_mut(row.len()).zip(x.chunks(row.len())) {
            for ((y, x), b) in y.iter_mut().zip(x).zip(row.iter()) {
                *y = x * b;
            }
        }
    };
    let scale = kernel(like_input, scale).rule("i j, j -> i j");
    let scale = p.jit(scale).on(&mesh).outputs(&tiles).build().unwrap();
    let y = scale.call(&mut p, (x.clone(), array(&[1.0f32, -1.0])));
    let expected = [0.0, -1.0, 2.0, -3.0, 4.0, -5.0, 6.0, -7.0];
    assert_eq!(read(&mut p, y.unwrap()), expected);

    // A call whose plan is kept takes the values of this call.
    let y = scale.call(&mut p, (x, array(&[0.0f32, 1.0]))).unwrap();
    assert_eq!(read(&mut p, y), [0.0, 1.0, 0.0, 3.0, 0.0, 5.0, 0.0, 7.0]);
    p.finish().unwrap();
}

#[test]
fn rules_that_do_not_fit_the_kernel_are_refused() {
    let _limit = watchdog(60);
    for (rule, expected) in [
        ("i -> i", "is not for 2 inputs and 1 outputs"),
        ("i j, i -> i", "input 0 has shape [2], which does not fit"),
        ("i, -> i", "input 1 has shape [2], which does not fit"),
        ("i, i", "rule"),
    ] {
        let add = elementwise(|x: f32, y: f32| x + y).rule(rule);
        let said = run_here(add, &(floats(&[1.0, 2.0]), floats(&[3.0, 4.0])));
        let said = said.unwrap_err().to_string();
        assert!(said.contains(expected), "{said}\n lacks {expected}");
    }
}

#[test]
fn failing_closure_fails_its_outputs() {
    let _limit = watchdog(60);
    let fails = kernel(like_input, |_: View<f32>, _: ViewMut<f32>| {
        Err(Error::kernel("too cold"))
    });
    let said = run_here(fails, &floats(&[1.0])).unwrap_err().to_string();
    assert!(
        said.contains("too cold") && said.contains("kernel at "),
        "{said}"
    );
    let panics = kernel(like_input, |x: View<f32>, mut y: ViewMut<f32>| y[0] = x[1]);
    let said = run_here(panics, &floats(&[1.0])).unwrap_err().to_string();
    assert!(said.contains("index out of bounds"), "{said}");
}

#[test]
fn typed_views_need_their_dtype() {
    let _limit = watchdog(60);
    let infer = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]));
    let ran = run_here(
        fun("typed", infer, |_, mut x, mut y| {
            let x = x.remove(0);
            assert!(x.typed::<i32>().is_err());
            let (x, mut y) = (x.typed::<f32>()?, y.remove(0).typed::<f32>()?);
            assert_eq!(
                (x.shape(), x.region(), x.global()),
                (y.shape(), y.region(), y.global())
            );
            y.copy_from_slice(&x);
            Ok(())
        }),
        &vec![floats(&[4.0, 5.0])],
    );
    assert_eq!(ran.unwrap()[0].to_vec::<f32>().unwrap(), [4.0, 5.0]);
}

/// Runs a closure and an elementwise kernel on one device of this kind, twice, and returns the
/// values, and the error of a closure that fails.
fn on(kind: DeviceKind) -> Result<(Vec<f32>, Vec<u8>, String)> {
    let mut p = Program::builder().device_kinds(&[kind]).alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let whole = mesh.replicated();
    let twice = p
        .jit(elementwise(|x: f32, a: f32| a * x))
        .on(&mesh)
        .outputs(&whole)
        .build()?;
    let split = kernel(
        |x: &ShapedArray| (f32s([x.elements()]), u8s([3])),
        |x: View<f32>, mut y: ViewMut<f32>, mut n: ViewMut<u8>| {
            y.copy_from_slice(&x);
            y.reverse();
            n.fill(x.len() as u8);
        },
    );
    let split = p.jit(split).on(&mesh).outputs(&whole).build()?;
    let fails = kernel(like_input, |_: View<f32>, _: ViewMut<f32>| {
        Err(Error::kernel("too cold"))
    });
    let fails = p.jit(fails).on(&mesh).outputs(&whole).build()?;
    let x = p.device_put(&array(&[1.0f32, 2.0, 3.0]), &whole)?;
    // The second factor is a host value.
    let x = twice.call(&mut p, (x, MpmdArray::scalar(2.0f32)))?;
    let x = twice.call(&mut p, (x, MpmdArray::scalar(0.5f32)))?;
    let (y, n) = split.call(&mut p, x)?;
    let cold = fails
        .call(&mut p, y.clone())?
        .to_host()
        .unwrap_err()
        .to_string();
    let (y, n) = (y.to_host()?, n.to_host()?);
    // The failure is reported a second time here.
    assert!(p.finish().is_err());
    Ok((y.unwrap().to_vec()?, n.unwrap().to_vec()?, cold))
}

#[test]
fn closures_compute_the_same_on_cuda_devices() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    for kind in [CPU, CUDA] {
        let (y, n, cold) = on(kind).unwrap();
        assert_eq!((y, n), (vec![3.0, 2.0, 1.0], vec![3, 3, 3]), "{kind}");
        assert!(cold.contains("too cold"), "{cold}");
    }
}

#[test]
fn output_shardings_follow_from_the_rule() {
    let _limit = watchdog(60);
    let results = mpmd_core::simulate(2, 4, 7, |p| {
        let mesh = p.mesh(&[("x", 2), ("y", 2)])?;
        let array = MpmdArray::from_slice(&[4, 4], &[1.0f32; 16])?;
        let columns = mesh.sharding(spec![None, "x"]);
        let (rows, columns) = (
            p.device_put(&array, mesh.sharding(spec!["x"]))?,
            p.device_put(&array, &columns)?,
        );
        let add = p
            .jit(elementwise(|x: f32, y: f32| x + y))
            .on(&mesh)
            .build()?;
        // Of the host value, each device gets the part that it needs.
        let sum = add.call(p, (rows.clone(), array.clone()))?;
        assert_eq!(sum.sharding(), rows.sharding());

        let product = p.jit(mpmd_core::kernel::matmul()).on(&mesh).build()?;
        let partial = product.call(p, (columns.clone(), rows.clone()))?;
        assert_eq!(partial.sharding().unwrap().unreduced_axes(), ["x"]);
        let total = p.device_put(&partial, mesh.replicated())?;
        assert_eq!(total.to_host()?.unwrap().to_vec::<f32>()?, [4.0; 16]);

        let conflict = add.call(p, (rows, columns)).unwrap_err().to_string();
        let partial = add
            .call(p, (partial.clone(), partial))
            .unwrap_err()
            .to_string();
        Ok([conflict, partial])
    });
    for result in results {
        let [conflict, partial] = result.unwrap();
        let expected = "both dimension 0 of input 0 and dimension 1 of input 1 are divided over \
                        `x`: input 0 is P(x), input 1 is P(None, x)";
        assert!(conflict.contains(expected), "{conflict}");
        assert!(partial.contains("partial sums"), "{partial}");
    }
}
