//! Recomputed calls: of right and wrong kernels, in captured steps, and those that are skipped.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::Simulation;
use crate::api::program::Convicted;
use crate::prelude::*;

/// A kernel that doubles its input. On a faulty process it flips one bit of about one in 100 calls.
#[derive(Default)]
struct Double {
    /// The seed of the faults of this process, which is the faulty one.
    faults: Option<u64>,
    calls: AtomicU64,
    /// True if the output is the input updated in place.
    in_place: bool,
    fails: bool,
}

impl Double {
    fn of(p: &Program, faulty: Option<(ProcessId, u64)>) -> Self {
        let faults = faulty
            .filter(|(process, _)| *process == p.process())
            .map(|(_, seed)| seed);
        Self {
            faults,
            ..Self::default()
        }
    }
}

impl Kernel for Double {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        let signature = Signature::new(x.clone());
        Ok(if self.in_place {
            signature.alias("", "")
        } else {
            signature
        })
    }

    fn run(&self, _: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        if self.fails {
            return Err(Error::kernel("not today"));
        }
        let y = y.as_mut_slice::<u32>()?;
        match self.in_place {
            true => y.iter_mut().for_each(|y| *y = y.wrapping_mul(2)),
            false => y
                .iter_mut()
                .zip(x.as_slice::<u32>()?)
                .for_each(|(y, x)| *y = x * 2),
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let chance = |seed: u64| Rolling::default().mix(seed).mix(call).word();
        if self
            .faults
            .is_some_and(|seed| chance(seed).is_multiple_of(100))
        {
            y[call as usize % 4] ^= 1 << (call % 32);
        }
        Ok(())
    }
}

fn job(processes: usize, every: u64) -> Simulation {
    Simulation::new(processes, processes).settings(|builder| builder.check_replay(every))
}

/// Doubles an array on each device, and does so `rounds` times. Returns the processes that were
/// named so far, of which it wants `enough`.
fn rounds(
    p: &mut Program,
    (faulty, rounds): (Option<(ProcessId, u64)>, usize),
    enough: usize,
) -> Result<Vec<Convicted>> {
    let host = MpmdArray::from_slice(&[4], &[1u32, 2, 3, 4])?;
    let on = |p: &mut Program, mesh: &Mesh| -> Result<(Jit<Double>, MpmdArray)> {
        let kernel = Double::of(p, faulty);
        let jit = p.jit(kernel).on(mesh).outputs(mesh.replicated()).build()?;
        Ok((jit, p.device_put(&host, mesh.replicated())?))
    };
    let meshes = p.mesh(&[("x", -1)])?.split("x")?;
    let places = meshes
        .iter()
        .map(|mesh| on(p, mesh))
        .collect::<Result<Vec<_>>>()?;
    let mut named = Vec::new();
    for round in 1..=rounds {
        for (jit, x) in &places {
            drop(jit.call(p, x.clone())?);
        }
        if round % 25 == 0 {
            p.step_end()?;
            named.extend(std::iter::from_fn(|| p.convicted()));
            if named.len() >= enough {
                break;
            }
        }
    }
    Ok(named)
}

/// Ends steps until all comparisons are read.
fn end_steps(p: &mut Program) -> Result<()> {
    (0..3).try_for_each(|_| p.step_end())
}

#[test]
fn equal_bits_convict_nobody() {
    for (processes, every) in [(2, 1), (4, 3), (1, 1)] {
        let (results, report) = job(processes, every).seed(every).run_reported(|p| {
            let named = rounds(p, (None, 60), usize::MAX)?;
            end_steps(p)?;
            Ok((named, p.compared()))
        });
        let checks = if processes > 1 {
            60 * processes as u64 / every
        } else {
            0
        };
        for result in results {
            assert_eq!(result.unwrap(), (Vec::new(), (checks, 0)));
        }
        assert!(report.left.is_empty(), "{:?}", report.left);
    }
}

#[test]
fn process_that_flips_a_bit_now_and_then_is_named_and_no_other() {
    let mut missed = 0;
    for seed in 0..20 {
        let faulty = ProcessId(seed as u32 % 4);
        // Some go on after the process was named: nobody else is.
        let enough = if seed < 2 { usize::MAX } else { 1 };
        let results = job(4, 10).run(|p| rounds(p, (Some((faulty, seed)), 5000), enough));
        let results: Vec<Vec<Convicted>> = results.into_iter().map(Result::unwrap).collect();
        assert!(
            results.iter().all(|named| *named == results[0]),
            "all know the same: {results:?}"
        );
        match &results[0][..] {
            [] => missed += 1,
            [Convicted { process, why, .. }] => {
                assert_eq!(*process, faulty, "seed {seed}");
                assert!(
                    why.contains("kernel Double at") && why.contains(file!()),
                    "{why}"
                );
            }
            more => panic!("seed {seed}: {more:?}"),
        }
    }
    assert!(
        missed <= 1,
        "{missed} of 20 faulty processes were not named"
    );
}

#[test]
fn nobody_is_named_in_a_job_of_two() {
    let faulty = Some((ProcessId(1), 7));
    let results = job(2, 1).run(|p| {
        let named = rounds(p, (faulty, 500), usize::MAX)?;
        end_steps(p)?;
        Ok((named, p.compared()))
    });
    for result in results {
        let (named, (compared, differed)) = result.unwrap();
        assert!(
            named.is_empty() && compared == 1000 && differed > 1,
            "{differed}"
        );
    }
}

#[test]
fn calls_that_cannot_be_recomputed_are_skipped() {
    let run = |every| {
        let results = job(3, every).run(|p| {
            let all = p.topology().device_ids().to_vec();
            let single = p.mesh_of(&[("x", 1)], &all[..1])?;
            let pair = p.mesh_of(&[("x", 2)], &all[..2])?;
            let host = MpmdArray::from_slice(&[4], &[1u32, 2, 3, 4])?;
            let rows = pair.sharding(spec!["x"]);
            // On two devices.
            let x = p.device_put(&host, &rows)?;
            let jit = p.jit(Double::default()).on(&pair).outputs(&rows).build()?;
            drop(jit.call(p, x.clone())?);
            // A part of an array.
            let part = p
                .jit(Double::default())
                .on(&single)
                .outputs(single.replicated());
            let part = part.build()?;
            let called = part.call(p, x).map(drop).map_err(|error| error.to_string());
            // An array in host memory, which is declared.
            let in_host = single.replicated().with_memory_kind(MemoryKind::Host);
            let jit = p.jit(Double::default()).on(&single).inputs(&in_host);
            let jit = jit.outputs(single.replicated()).build()?;
            let x = p.device_put(&host, &in_host)?;
            drop(jit.call(p, x)?);
            // A donated input.
            let kernel = Double {
                in_place: true,
                ..Double::default()
            };
            let jit = p
                .jit(kernel)
                .on(&single)
                .outputs(single.replicated())
                .donate("")
                .build()?;
            let x = p.device_put(&host, single.replicated())?;
            drop(jit.call(p, x)?);
            // An object.
            drop(p.object(&single, |_| Ok(7u32))?);
            end_steps(p)?;
            assert_eq!(p.compared(), (0, 0));
            Ok((called, p.operations()))
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(0));
}

#[test]
fn loss_of_a_process_ends_the_job_with_an_error() {
    for op in [20, 150] {
        let simulation = job(3, 1).seed(op).lose(ProcessId(1), op);
        let results = simulation.run(|p| rounds(p, (None, 1000), usize::MAX));
        assert!(results.into_iter().all(|result| result.is_err()));
    }
}

#[test]
fn nothing_is_recomputed_where_a_process_has_no_device() {
    let simulation = job(3, 1).settings(|builder| builder.devices_by_process(&[2, 0, 1]));
    let results = simulation.run(|p| {
        let named = rounds(p, (None, 30), usize::MAX)?;
        end_steps(p)?;
        Ok((named.len(), p.compared()))
    });
    results
        .into_iter()
        .for_each(|result| assert_eq!(result.unwrap(), (0, (0, 0))));
}

#[test]
fn failed_kernel_fails_the_job_as_without_the_check() {
    let run = |every| {
        let results = job(3, every).run(|p| {
            let meshes = p.mesh(&[("x", 3)])?.split("x")?;
            let kernel = Double {
                fails: true,
                ..Double::default()
            };
            let jit = p
                .jit(kernel)
                .on(&meshes[1])
                .outputs(meshes[1].replicated())
                .build()?;
            let y = jit.call(p, MpmdArray::scalar(1u32))?;
            for _ in 0..4 {
                p.step_end()?;
            }
            y.block_until_ready().map(drop)
        });
        results
            .into_iter()
            .map(|result| result.unwrap_err().to_string())
            .collect::<Vec<_>>()
    };
    for error in [run(0), run(1)].concat() {
        assert!(error.contains("not today"), "{error}");
    }
}

/// Captures a step that doubles an array on each device in turn, and replays it. Returns the last
/// result on the last device, and the processes that were named.
fn captured(
    p: &mut Program,
    faulty: Option<(ProcessId, u64)>,
    replays: usize,
) -> Result<(Option<Vec<u32>>, Vec<Convicted>)> {
    let meshes = p.mesh(&[("x", -1)])?.split("x")?;
    let double = |p: &mut Program, mesh: &Mesh| {
        p.jit(Double::of(p, faulty))
            .on(mesh)
            .outputs(mesh.replicated())
            .build()
    };
    let jits = meshes
        .iter()
        .map(|mesh| double(p, mesh))
        .collect::<Result<Vec<_>>>()?;
    let first = |p: &mut Program, i: usize| {
        let host = MpmdArray::from_slice(&[4], &[1, 2, 3, i as u32])?;
        p.device_put(&host, meshes[0].replicated())
    };
    let x = first(p, 0)?;
    let (y, step) = p.capture(x, |p, mut x| {
        for (jit, mesh) in jits.iter().zip(&meshes) {
            x = p.device_put(&x, mesh.replicated())?;
            x = jit.call(p, x)?;
        }
        Ok(x)
    })?;
    let mut named = Vec::new();
    let mut y = y;
    for i in 0..replays {
        p.step_end()?;
        named.extend(std::iter::from_fn(|| p.convicted()));
        let x = first(p, i)?;
        y = step.replay(p, x)?;
    }
    end_steps(p)?;
    named.extend(std::iter::from_fn(|| p.convicted()));
    Ok((y.to_host()?.map(|y| y.to_vec()).transpose()?, named))
}

#[test]
fn replays_of_a_captured_step_recompute_its_calls() {
    let results = job(3, 1)
        .seed(3)
        .run(|p| Ok((captured(p, None, 8)?, p.compared())));
    for (process, result) in results.into_iter().enumerate() {
        let last = (process == 2).then(|| vec![8, 16, 24, 56]);
        assert_eq!(result.unwrap(), ((last, Vec::new()), (27, 0)));
    }
    let faulty = ProcessId(1);
    let results = job(3, 1).run(|p| captured(p, Some((faulty, 5)), 1000));
    for result in results {
        let (_, named) = result.unwrap();
        assert_eq!(
            named.iter().map(|it| it.process).collect::<Vec<_>>(),
            [faulty]
        );
    }
}

#[test]
fn dry_run_lists_the_operations_without_the_check() {
    let run = |every| {
        let builder = Program::builder().devices(3).check_replay(every);
        let mut p = builder.dry_run(3).unwrap();
        rounds(&mut p, (None, 50), usize::MAX).unwrap();
        let operations = p.operations();
        p.finish().unwrap();
        operations
    };
    assert_eq!(run(1), run(0));
}
