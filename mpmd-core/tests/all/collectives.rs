//! Collectives inside kernels: compared with an oracle on host values, at every number of
//! processes, and in failures.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::simulations::simulation;
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use half::bf16;
use mpmd_core::aval::Element;
use mpmd_core::kernel::{Reducible, TWO_ROUNDS_FROM_BYTES};
use mpmd_core::prelude::*;
use mpmd_core::{Error, ProcessId, run_here};
use num_complex::Complex;

/// The collective that a kernel calls. `Permute` holds pairs of device indices on the axis (from,
/// to).
#[derive(Clone, Debug)]
enum Kind {
    AllReduce(Reduce),
    AllGather,
    ReduceScatter(Reduce),
    AllToAll,
    Permute(Vec<(usize, usize)>),
}

/// A call of a collective over `axis` with `len` elements per device; the kernel declares
/// `declared`, which may be more.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    axis: &'static str,
    len: usize,
    declared: usize,
}

impl Case {
    fn declare<O>(&self, to: Signature<O>, dtype: mpmd_core::aval::DType) -> Signature<O> {
        let aval = ShapedArray::new(&[self.declared], dtype);
        match &self.kind {
            Kind::AllReduce(Reduce::Sum) => to.all_reduce(self.axis, aval),
            Kind::AllReduce(reduce) => to.all_reduce_with(self.axis, aval, *reduce),
            Kind::AllGather => to.all_gather(self.axis, aval),
            Kind::ReduceScatter(Reduce::Sum) => to.reduce_scatter(self.axis, aval),
            Kind::ReduceScatter(reduce) => to.reduce_scatter_with(self.axis, aval, *reduce),
            Kind::AllToAll => to.all_to_all(self.axis, aval),
            Kind::Permute(pairs) => to.permute(self.axis, aval, pairs.clone()),
        }
    }

    /// Calls the collective with this device's `values`, and returns the result on this device.
    fn call<T: Value>(&self, cx: &mut Context<'_>, mut values: Vec<T>) -> Result<Vec<T>> {
        let n = cx.axis_size(self.axis)?;
        let fresh = |len: usize| vec![T::of(77); len];
        match &self.kind {
            Kind::AllReduce(_) => cx.all_reduce(self.axis, &mut values)?,
            Kind::AllGather => {
                let mut out = fresh(values.len() * n);
                cx.all_gather(self.axis, &values, &mut out)?;
                return Ok(out);
            }
            Kind::ReduceScatter(_) => {
                let mut out = fresh(values.len() / n);
                cx.reduce_scatter(self.axis, &values, &mut out)?;
                return Ok(out);
            }
            Kind::AllToAll => {
                let mut out = fresh(values.len());
                cx.all_to_all(self.axis, &values, &mut out)?;
                return Ok(out);
            }
            Kind::Permute(_) => {
                let mut out = fresh(values.len());
                cx.permute(self.axis, &values, &mut out)?;
                return Ok(out);
            }
        }
        Ok(values)
    }

    /// Returns the expected result on the device with index `me` on the axis. `given` are the
    /// values of all devices, by index.
    fn oracle<T: Value>(&self, given: &[Vec<T>], me: usize) -> Vec<T> {
        let n = given.len();
        let reduced = |reduce: Reduce| -> Vec<T> {
            let element = |i: usize| {
                let values = given.iter().map(|part| part[i]);
                values
                    .reduce(|a, b| T::reduce(reduce, a, b))
                    .expect("nobody is alone without itself")
            };
            (0..self.len).map(element).collect()
        };
        let block = |of: &[T], i: usize| of[of.len() / n * i..of.len() / n * (i + 1)].to_vec();
        match &self.kind {
            Kind::AllReduce(reduce) => reduced(*reduce),
            Kind::AllGather => given.concat(),
            Kind::ReduceScatter(reduce) => block(&reduced(*reduce), me),
            Kind::AllToAll => given.iter().flat_map(|part| block(part, me)).collect(),
            Kind::Permute(pairs) => match pairs.iter().find(|(_, to)| *to == me) {
                Some((from, _)) => given[*from].clone(),
                None => vec![T::of(0); self.len],
            },
        }
    }
}

/// An element type, with conversion from `i64` and with its own reductions for the oracle.
trait Value: Reducible {
    fn of(value: i64) -> Self;
    fn reduce(reduce: Reduce, a: Self, b: Self) -> Self;
}

macro_rules! values {
    ($($t:ty: $of:expr, $add:expr;)*) => {$(
        impl Value for $t {
            fn of(value: i64) -> Self {
                $of(value)
            }

            fn reduce(reduce: Reduce, a: Self, b: Self) -> Self {
                match reduce {
                    Reduce::Sum => $add(a, b),
                    Reduce::Max => if b > a { b } else { a },
                    _ => if b < a { b } else { a },
                }
            }
        }
    )*};
}

values! {
    // Values with rounded sums, so that the order of additions is visible.
    f32: |v| v as f32 / 3.0, |a, b| a + b;
    f64: |v| v as f64 / 3.0, |a, b| a + b;
    bf16: |v| bf16::from_f32(v as f32 / 3.0), |a, b| a + b;
    i32: |v| v as i32 * 99_991, i32::wrapping_add;
    u8: |v| v as u8, u8::wrapping_add;
}

/// Returns the `len` values that device `device` contributes to the collective with index `case`.
fn given<T: Value>(device: usize, case: usize, len: usize) -> Vec<T> {
    let mix = |i: usize| (device * 7919 + case * 104_729 + i * 1_299_709) % 20_011;
    (0..len).map(|i| T::of(mix(i) as i64 - 10_000)).collect()
}

/// The bytes of the results, by (index of the collective, device).
type Outcomes = BTreeMap<(usize, usize), Vec<u8>>;

/// Calls all of `cases` in one kernel, on a mesh of axes `a` and `b` with these sizes over all
/// devices. Returns the results of all devices.
fn outcomes<T: Value>(processes: usize, shape: [usize; 2], cases: &[Case], seed: u64) -> Outcomes {
    let seen = Arc::new(Mutex::new(Outcomes::new()));
    let longest = Duration::from_millis(seed % 3);
    let simulation = simulation(processes, shape[0] * shape[1]).delays(seed, longest);
    let results = simulation.run(|p| {
        let mesh = p.mesh(&[("a", shape[0]), ("b", shape[1])])?;
        let (declared, called, seen) = (cases.to_vec(), cases.to_vec(), seen.clone());
        let infer = move |x: &[ShapedArray]| {
            let signature = like_first(x)?;
            Ok(declared.iter().fold(signature, |signature, case| {
                case.declare(signature, T::DTYPE)
            }))
        };
        let run = move |cx: &mut Context<'_>, _: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>| {
            let device = cx.device().0 as usize;
            for (i, case) in called.iter().enumerate() {
                let out = case.call(cx, given::<T>(device, i, case.len))?;
                seen.lock()
                    .unwrap()
                    .insert((i, device), bytemuck::cast_slice(&out).to_vec());
            }
            y[0].zero();
            Ok(())
        };
        let jit = p
            .jit(fun("all", infer, run))
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()?;
        let x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
        jit.call(p, vec![x])?[0].block_until_ready()?;
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
    // A device's thread may hold its kernel a moment longer.
    std::mem::take(&mut *seen.lock().unwrap())
}

/// Returns (devices of the device's group along `axis`, index of the device in the group), on a
/// mesh of axes `a` and `b`.
fn group(device: usize, shape: [usize; 2], axis: &str) -> (Vec<usize>, usize) {
    let (a, b) = (device / shape[1], device % shape[1]);
    match axis {
        "a" => ((0..shape[0]).map(|a| a * shape[1] + b).collect(), a),
        _ => ((0..shape[1]).map(|b| a * shape[1] + b).collect(), b),
    }
}

fn agree_with_the_oracle<T: Value>(
    processes: &[usize],
    shape: [usize; 2],
    cases: &[Case],
    seed: u64,
) {
    for processes in processes {
        let found = outcomes::<T>(*processes, shape, cases, seed);
        assert_eq!(found.len(), cases.len() * shape[0] * shape[1]);
        for ((i, device), bytes) in found {
            let case = &cases[i];
            let (group, me) = group(device, shape, case.axis);
            let given: Vec<Vec<T>> = group
                .iter()
                .map(|device| given(*device, i, case.len))
                .collect();
            let expected = case.oracle(&given, me);
            assert!(
                bytes == bytemuck::cast_slice::<T, u8>(&expected),
                "{} {case:?} on {shape:?} over {processes} processes, device {device}",
                T::DTYPE
            );
        }
    }
}

/// Returns calls of every collective over an axis of `n` devices, for each of `lengths`. `declared`
/// gives the declared length for the length of a call.
fn every(
    axis: &'static str,
    n: usize,
    lengths: &[usize],
    declared: impl Fn(usize) -> usize,
) -> Vec<Case> {
    let mut cases = Vec::new();
    for len in lengths {
        let mut case = |kind, len| {
            cases.push(Case {
                kind,
                axis,
                len,
                declared: declared(len),
            })
        };
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            case(Kind::AllReduce(reduce), *len);
            case(Kind::ReduceScatter(reduce), len * n);
        }
        case(Kind::AllGather, *len);
        case(Kind::AllToAll, len * n);
        case(
            Kind::Permute((0..n).map(|i| (i, (i + 1) % n)).collect()),
            *len,
        );
        case(Kind::Permute((1..n).map(|i| (i, i - 1)).collect()), *len);
        case(Kind::Permute(vec![(0, 0)]), *len);
        case(Kind::Permute(Vec::new()), *len);
    }
    cases
}

/// Returns a declared length of at least `len`, so large that an all-reduce of any dtype takes two
/// rounds.
fn large(len: usize) -> usize {
    len.max(TWO_ROUNDS_FROM_BYTES + 1)
}

#[test]
fn small_collectives_match_the_oracle_on_each_axis() {
    let _limit = watchdog(120);
    let lengths = [0, 1, 3, 50];
    let both = [
        every("a", 2, &lengths, |len| len),
        every("b", 4, &lengths, |len| len + 1),
    ]
    .concat();
    agree_with_the_oracle::<f32>(&[1, 2, 4, 8], [2, 4], &both, 1);
    agree_with_the_oracle::<bf16>(&[1, 4], [2, 4], &both, 2);
    agree_with_the_oracle::<i32>(&[2], [2, 4], &both, 3);
    agree_with_the_oracle::<u8>(&[2], [2, 4], &both, 4);
    agree_with_the_oracle::<f64>(&[1, 3], [1, 3], &every("b", 3, &[0, 1, 7], |len| len), 5);
    agree_with_the_oracle::<f32>(&[1], [1, 1], &every("a", 1, &lengths, |len| len), 6);
}

#[test]
fn two_round_collectives_match_the_oracle_at_every_length() {
    let _limit = watchdog(120);
    // Fewer elements than devices, uneven lengths, and more elements than one round takes.
    let lengths = [0, 1, 5, 131];
    let both = [
        every("a", 2, &lengths, large),
        every("b", 4, &lengths, large),
    ]
    .concat();
    agree_with_the_oracle::<f32>(&[1, 2, 4, 8], [2, 4], &both, 7);
    agree_with_the_oracle::<bf16>(&[4], [4, 2], &[every("a", 4, &lengths, large)].concat(), 8);
    agree_with_the_oracle::<i32>(&[1, 3], [3, 1], &every("a", 3, &lengths, large), 9);
    let long = every("b", 4, &[70_001], |len| len);
    agree_with_the_oracle::<f32>(&[1, 2, 4], [1, 4], &long, 10);
    agree_with_the_oracle::<f64>(&[3], [1, 3], &every("b", 3, &[40_000], |len| len), 11);
}

#[test]
fn both_algorithms_give_same_bits_at_every_process_count() {
    let _limit = watchdog(60);
    let sum = |declared| Case {
        kind: Kind::AllReduce(Reduce::Sum),
        axis: "b",
        len: 999,
        declared,
    };
    for seed in 20..26 {
        let reference = outcomes::<f32>(1, [1, 8], &[sum(999)], seed);
        for processes in [1, 2, 4, 8] {
            for declared in [999, large(999)] {
                assert!(outcomes::<f32>(processes, [1, 8], &[sum(declared)], seed) == reference);
            }
        }
    }
}

#[test]
fn flags_and_complex_numbers_move_too() {
    let _limit = watchdog(60);
    let results = simulation(2, 4).run(|p| {
        let mesh = p.mesh(&[("x", 4)])?;
        let infer = |x: &[ShapedArray]| {
            let flags = ShapedArray::new(&[2], bool::DTYPE);
            let complex = ShapedArray::new(&[1], Complex::<f32>::DTYPE);
            let signature = like_first(x)?.all_gather("x", flags.clone());
            Ok(signature
                .permute("x", flags, [(3, 0)])
                .all_reduce("x", complex))
        };
        let run = |cx: &mut Context<'_>, _: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>| {
            let me = cx.axis_index("x")?;
            let mut all = [true; 8];
            cx.all_gather("x", &[me == 1, true], &mut all)?;
            assert_eq!(all, [false, true, true, true, false, true, false, true]);
            let mut moved = [true; 2];
            cx.permute("x", &[true, false], &mut moved)?;
            assert_eq!(moved, [me == 0, false]);
            let mut sum = [Complex::new(me as f32, 1.0)];
            cx.all_reduce("x", &mut sum)?;
            assert_eq!(sum, [Complex::new(6.0, 4.0)]);
            Ok(y[0].fill(1u8)?)
        };
        let jit = p
            .jit(fun("flags", infer, run))
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()?;
        let x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
        jit.call(p, vec![x])?[0].block_until_ready().map(drop)
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn kernel_with_every_collective_runs_locally() {
    let _limit = watchdog(60);
    let cases = every("x", 1, &[0, 3], large);
    let (declared, called) = (cases.clone(), cases);
    let kernel = fun(
        "here",
        move |x| {
            let signature = like_first(x)?;
            Ok(declared.iter().fold(signature, |signature, case| {
                case.declare(signature, f32::DTYPE)
            }))
        },
        move |cx, x, mut y| {
            for case in &called {
                let values = x[0].as_slice::<f32>()?[..case.len].to_vec();
                let expected = case.oracle(std::slice::from_ref(&values), 0);
                assert_eq!(case.call(cx, values)?, expected, "{case:?}");
            }
            Ok(y[0].fill(2.0f32)?)
        },
    );
    let x = HostArray::from_slice(&[3], &[1.0f32, 2.0, 3.0]).unwrap();
    let y = run_here(kernel, &vec![x]).unwrap();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), [2.0; 3]);
}

/// Runs a kernel that calls collectives over one axis `x` of all devices; `infer` adds their
/// declarations. Returns one error per process: that of the array if there is one, otherwise that
/// of the program's end.
fn failing(
    processes: usize,
    devices: usize,
    seed: u64,
    infer: impl Fn(Signature<Vec<ShapedArray>>) -> Signature<Vec<ShapedArray>>
    + Copy
    + Send
    + Sync
    + 'static,
    run: impl Fn(&mut Context<'_>) -> Result<()> + Copy + Send + Sync + 'static,
) -> Vec<String> {
    let simulation = simulation(processes, devices)
        .delays(seed, Duration::from_millis(2))
        .settings(|settings| settings.peer_timeout(Duration::from_secs(5)));
    let results = simulation.run(|p| {
        let mesh = p.mesh(&[("x", devices)])?;
        let infer = move |x: &[ShapedArray]| Ok(infer(like_first(x)?));
        let kernel = fun("broken", infer, move |cx, _, _| run(cx));
        let jit = p.jit(kernel).on(&mesh).outputs(mesh.replicated()).build()?;
        let x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
        jit.call(p, vec![x])?[0].block_until_ready().map(drop)
    });
    results
        .into_iter()
        .map(|result| {
            result
                .expect_err("every process ends with an error")
                .to_string()
        })
        .collect()
}

/// Declares seven large and small collectives over `x`. The last one, an all-reduce, needs every
/// device.
fn mixed(declared: Signature<Vec<ShapedArray>>) -> Signature<Vec<ShapedArray>> {
    let (small, large) = (f32s([8]), f32s([40_000]));
    declared
        .all_gather("x", small.clone())
        .all_reduce("x", large.clone())
        .all_gather("x", f32s([10_000]))
        .reduce_scatter("x", small.clone())
        .all_to_all("x", large.clone())
        .permute("x", large, [(0, 1), (1, 2), (2, 3)])
        .all_reduce("x", small)
}

/// Calls the first `calls` of the collectives that [`mixed`] declares, in order.
fn call_mixed(cx: &mut Context<'_>, calls: usize) -> Result<()> {
    call_some(cx, 0..calls)
}

fn call_some(cx: &mut Context<'_>, calls: Range<usize>) -> Result<()> {
    let (mut small, mut large) = (vec![1.0f32; 8], vec![1.0f32; 40_000]);
    let mut out = vec![0.0f32; 40_000];
    for call in calls {
        match call {
            0 => cx.all_gather("x", &small, &mut out[..32])?,
            1 => cx.all_reduce("x", &mut large)?,
            2 => cx.all_gather("x", &large[..10_000], &mut out)?,
            3 => cx.reduce_scatter("x", &small, &mut out[..2])?,
            4 => cx.all_to_all("x", &large, &mut out)?,
            5 => cx.permute("x", &large, &mut out)?,
            _ => cx.all_reduce("x", &mut small)?,
        }
    }
    Ok(())
}

#[test]
fn device_that_stops_before_any_collective_fails_all() {
    let _limit = watchdog(180);
    for processes in [1, 2, 4] {
        for stops_before in 0..7 {
            for stops in [0, 3] {
                let errors = failing(processes, 4, stops_before as u64, mixed, move |cx| {
                    if cx.axis_index("x")? == stops {
                        call_mixed(cx, stops_before)?;
                        return Err(Error::kernel("not today"));
                    }
                    call_mixed(cx, 7)
                });
                for error in errors {
                    let expected = format!("failed on device {stops}: not today");
                    assert!(
                        error.contains(&expected),
                        "{processes} {stops_before}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn devices_stopping_at_different_calls_block_nobody() {
    let _limit = watchdog(180);
    for processes in [1, 2, 4] {
        for seed in 0..12 {
            let errors = failing(processes, 4, seed, mixed, move |cx| {
                let me = cx.axis_index("x")?;
                // Each device stops at a different call, in an order that depends on the seed.
                call_mixed(cx, (me * 3 + seed as usize) % 7)?;
                assert!(me != 2, "lost the thread");
                Err(Error::kernel("not today"))
            });
            for error in errors {
                let known = error.contains("not today") || error.contains("lost the thread");
                assert!(known, "{processes} {seed}: {error}");
            }
        }
    }
}

#[test]
fn failure_in_first_round_reaches_all_in_the_second() {
    let _limit = watchdog(60);
    // With 401 and 400 elements only the first of four segments differs. Its owner detects this.
    for processes in [1, 2, 4] {
        let declare = |signature: Signature<_>| signature.all_reduce("x", f32s([40_000]));
        let errors = failing(processes, 4, 1, declare, |cx| {
            let len = 400 + usize::from(cx.axis_index("x")? == 2);
            cx.all_reduce("x", &mut vec![0.0f32; len])
        });
        for error in errors {
            for says in [
                "collective 0 of operation 2",
                "all_reduce of f32[40000]",
                "device 0",
                "different lengths",
            ] {
                assert!(error.contains(says), "{error}\n  lacks {says}");
            }
        }
    }
}

#[test]
fn wrong_lengths_are_errors_in_every_collective() {
    let _limit = watchdog(120);
    for at in 0..7 {
        for processes in [1, 2, 4] {
            let errors = failing(processes, 4, at as u64, mixed, move |cx| {
                call_mixed(cx, at)?;
                // Device 1 contributes in the permutation too.
                let odd = cx.axis_index("x")? == 1;
                let len = if odd { 4 } else { 8 };
                let (mut values, mut out) = (vec![0.0f32; len], vec![0.0f32; 4 * len]);
                match at {
                    0 | 2 => cx.all_gather("x", &values, &mut out)?,
                    1 | 6 => cx.all_reduce("x", &mut values)?,
                    3 => cx.reduce_scatter("x", &values, &mut out[..len / 4])?,
                    4 => cx.all_to_all("x", &values, &mut out[..len])?,
                    _ => cx.permute("x", &values, &mut out[..len])?,
                }
                // Devices that this call does not concern learn of the error in a later one.
                call_some(cx, at + 1..7)
            });
            let collective = format!("collective {at} of operation 2, declared as");
            for error in errors {
                let says = error.contains(&collective) && error.contains("with different lengths");
                assert!(says, "{at}, {processes} processes: {error}");
            }
        }
    }
}

#[test]
fn undeclared_calls_report_declaration_and_call() {
    let _limit = watchdog(120);
    type Call = fn(&mut Context<'_>) -> Result<()>;
    let wrong: [(usize, Call, &str, &str); 8] = [
        (
            0,
            |cx| cx.all_reduce("x", &mut [0.0f32]),
            "calls all_reduce of 1 f32 elements",
            "all_gather of f32[8]",
        ),
        (
            1,
            |cx| cx.all_to_all("x", &[0.0f32; 4], &mut [0.0; 4]),
            "calls all_to_all of 4",
            "declares all_reduce",
        ),
        (
            1,
            |cx| cx.all_reduce("x", &mut [0.0f64]),
            "of 1 f64 elements",
            "all_reduce of f32[40000] over \"x\"",
        ),
        (
            3,
            |cx| cx.reduce_scatter("x", &[0.0f32; 12], &mut [0.0; 3]),
            "of 12 f32",
            "reduce_scatter of f32[8]",
        ),
        (
            3,
            |cx| cx.reduce_scatter("x", &[0.0f32; 6], &mut [0.0; 1]),
            "4 devices cannot share",
            "of f32[8]",
        ),
        (
            3,
            |cx| cx.reduce_scatter("x", &[0.0f32; 8], &mut [0.0; 3]),
            "an output of 3 where 2",
            "of f32[8]",
        ),
        (
            5,
            |cx| cx.permute("x", &[0.0f32; 8], &mut [0.0; 7]),
            "an output of 7 where 8",
            "permute by [(0, 1), ",
        ),
        (
            7,
            |cx| cx.all_reduce("x", &mut [0.0f32]),
            "calls all_reduce of 1",
            "declares only 7 collectives",
        ),
    ];
    for (at, call, called, declared) in wrong {
        for processes in [1, 4] {
            let errors = failing(processes, 4, at as u64, mixed, move |cx| {
                call_mixed(cx, at)?;
                // Only one device calls wrongly; the others call correctly.
                if cx.axis_index("x")? == 1 {
                    call(cx)
                } else {
                    call_some(cx, at..7)
                }
            });
            for error in errors {
                let index = format!("collective {at}");
                assert!(
                    error.contains(called) && error.contains(declared),
                    "{at}: {error}"
                );
                assert!(error.contains(&index) || at == 7, "{at}: {error}");
                assert!(error.contains("failed on device 1"), "{error}");
            }
        }
    }
}

#[test]
fn invalid_declarations_are_refused_and_move_nothing() {
    let _limit = watchdog(60);
    type Declare = fn(Signature<Vec<ShapedArray>>) -> Signature<Vec<ShapedArray>>;
    let declarations: [(Declare, &str); 4] = [
        (
            |s| s.permute("x", f32s([1]), [(0, 1), (0, 0)]),
            "device 0 of the axis gives twice",
        ),
        (
            |s| s.permute("x", f32s([1]), [(0, 1), (1, 1)]),
            "device 1 of the axis gets twice",
        ),
        (
            |s| s.permute("x", f32s([1]), [(0, 2)]),
            "the signature declares permute by [(0, 2)] of f32[1] over \"x\", but axis \"x\" has",
        ),
        (
            |s| s.all_reduce_with("x", ShapedArray::new(&[1], bool::DTYPE), Reduce::Max),
            "all_reduce (max) of bool[1] over \"x\", but bool has no max",
        ),
    ];
    let results = simulation(2, 2).run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
        let mut texts = Vec::new();
        for (declare, expected) in declarations {
            let infer = move |x: &[ShapedArray]| Ok(declare(like_first(x)?));
            let jit = p
                .jit(fun("odd", infer, |_, _, _| Ok(())))
                .on(&mesh)
                .outputs(mesh.replicated())
                .build()?;
            let before = p.operations();
            let error = jit
                .call(p, vec![x.clone()])
                .expect_err("it cannot be")
                .to_string();
            assert!(error.contains(expected), "{error}\n  lacks {expected}");
            assert_eq!(p.operations(), before);
            texts.push(error);
        }
        Ok(texts)
    });
    let texts: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn process_lost_in_large_collectives_is_named_by_others() {
    let _limit = watchdog(180);
    for seed in 0..6 {
        for at in 2..8 {
            let lost = ProcessId((at + seed) as u32 % 4);
            let simulation = simulation(4, 4)
                .delays(seed, Duration::from_millis(3))
                .lose(lost, at);
            let results = simulation.run(|p| {
                let mesh = p.mesh(&[("x", 4)])?;
                let infer = |x: &[ShapedArray]| Ok(mixed(like_first(x)?));
                let kernel = fun("large", infer, |cx, _, mut y| {
                    call_mixed(cx, 7)?;
                    y[0].zero();
                    Ok(())
                });
                let jit = p.jit(kernel).on(&mesh).outputs(mesh.replicated()).build()?;
                let mut x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
                for _ in 0..8 {
                    // Not waited for: the process is lost while these run.
                    x = jit.call(p, vec![x])?.remove(0);
                }
                x.block_until_ready().map(drop)
            });
            for result in results {
                let error = result
                    .expect_err("every process ends with an error")
                    .to_string();
                assert!(
                    error.contains(&format!("process {lost} ")),
                    "seed {seed}, operation {at}: {error}"
                );
            }
        }
    }
}
