//! Calls that look equal on two processes but differ. The error names the difference, and nothing
//! issued afterwards is delivered.

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{ProcessId, Simulation};

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

/// Creates host values, all 1 except the first element, which is the process's number.
fn own_values(p: &Program, elements: usize) -> Result<MpmdArray> {
    let mut values = vec![1.0f32; elements];
    values[0] = p.process().0 as f32;
    MpmdArray::from_slice(&[elements], &values)
}

/// Checks that both processes end with a divergence error of the same text, and returns the text.
fn diverged(results: Vec<Result<()>>) -> String {
    let errors: Vec<_> = results
        .into_iter()
        .map(|result| result.expect_err("the programs differ"))
        .collect();
    assert!(
        errors.iter().all(mpmd_core::Error::is_divergence),
        "{errors:?}"
    );
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(texts[0], texts[1]);
    texts[0].clone()
}

fn assert_values_are_named(text: &str) {
    assert!(
        text.contains("process 1 issued the same call, but the values differ: their hash is"),
        "{text}"
    );
    assert!(
        text.contains("from the same seed") && text.contains("`broadcast_value`"),
        "{text}"
    );
    assert_eq!(text.matches("tests/all/same_call.rs:").count(), 1, "{text}");
}

/// Runs `differs` on two processes, then moves an array from process 0 to process 1, which must not
/// receive it. The `first` process issues everything before the other one issues `differs`. Returns
/// the text of the divergence.
fn nothing_arrives_after(
    simulation: &Simulation,
    elements: usize,
    first: ProcessId,
    differs: impl Fn(&mut Program) -> Result<()> + Sync,
) -> String {
    let (arrived, behind) = (Mutex::new(None), Barrier::new(2));
    let results = simulation.run(|p| {
        let x = p.array_from_fn(
            f32s([elements]),
            on(0),
            |_, mut view| Ok(view.fill(2.0f32)?),
        )?;
        // The first process's messages arrive before the other process issues anything more.
        if p.process() != first {
            behind.wait();
        }
        let moved = differs(p).and_then(|()| p.device_put(&x, on(1)));
        if p.process() == first {
            behind.wait();
        }
        let moved = moved?;
        if p.process() == ProcessId(1) {
            *arrived.lock().unwrap() = Some(moved.to_host().is_ok());
        }
        Ok(())
    });
    assert_eq!(
        arrived.into_inner().unwrap(),
        Some(false),
        "delivered after a difference"
    );
    diverged(results)
}

/// Runs `differs` with small and large arrays, both orders of issuing, delays, and zero-copy
/// transfers. Returns the text of the divergence of each run.
fn in_all_ways(differs: impl Fn(&mut Program) -> Result<()> + Sync) -> Vec<String> {
    let mut texts = Vec::new();
    for seed in 0..3 {
        for elements in [4, 100_000] {
            for (first, hosts) in [(0, &[][..]), (1, &[]), (0, &[0, 0]), (1, &[0, 0])] {
                let simulation = Simulation::new(2, 2)
                    .delays(seed, Duration::from_millis(2))
                    .zero_copy(hosts);
                texts.push(nothing_arrives_after(
                    &simulation,
                    elements,
                    ProcessId(first),
                    &differs,
                ));
            }
        }
    }
    texts
}

#[test]
fn host_values_that_differ_in_a_put_are_named() {
    let _limit = watchdog(120);
    let texts = in_all_ways(|p| {
        let x = own_values(p, 2)?;
        p.device_put(&x, on(0)).map(drop)
    });
    for text in texts {
        assert_values_are_named(&text);
        assert!(
            text.contains(
                "first differ at operation 2: process 0 issued operation 2 (device_put of"
            ),
            "{text}"
        );
    }
}

#[test]
fn host_values_that_differ_in_a_kernel_call_are_named() {
    let _limit = watchdog(120);
    let texts = in_all_ways(|p| {
        let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(0)])?;
        let same = p.jit(fun("same", like_first, |_, _, _| Ok(()))).on(&mesh);
        let (same, equal) = (
            same.outputs(mesh.replicated()).build()?,
            MpmdArray::scalar(1.0f32),
        );
        let own = own_values(p, 1)?;
        same.call(p, vec![equal, own]).map(drop)
    });
    texts.iter().for_each(|text| assert_values_are_named(text));
}

#[test]
fn host_values_that_differ_in_a_replay_are_named() {
    let _limit = watchdog(120);
    let texts = in_all_ways(|p| {
        // Process 1 has no part in the step.
        let (_, step) = p.capture(MpmdArray::scalar(0.0f32), |p, x| p.device_put(&x, on(0)))?;
        let own = MpmdArray::scalar(p.process().0 as f32);
        step.replay(p, own).map(drop)
    });
    for text in texts {
        assert!(
            text.contains("process 1 issued the same call, but the values differ: their hash is"),
            "{text}"
        );
        assert!(text.contains("of the step captured at"), "{text}");
    }
}

/// Puts values of `bytes` bytes `calls` times from one line, as a release build does. In call
/// `wrong` process 1 has another byte at `place`. Returns the outcomes of both processes.
fn put_sampled(bytes: usize, place: usize, calls: usize, wrong: usize) -> Vec<Result<()>> {
    Simulation::new(2, 2)
        .settings(|builder| builder.check_uncommitted(false))
        .run(|p| {
            for call in 1..=calls {
                let mut values: Vec<u8> = (0..bytes).map(|i| (i / 7 + call) as u8).collect();
                if call == wrong && p.process() == ProcessId(1) {
                    values[place] ^= 0x10;
                }
                let _ = p.device_put(&MpmdArray::from_slice(&[bytes], &values)?, on(0))?;
            }
            p.step_end()
        })
}

#[test]
fn values_of_four_kib_are_compared_whole() {
    let _limit = watchdog(120);
    for bytes in [65, 1000, 4096] {
        for place in [0, 63, bytes / 2, bytes - 1] {
            assert_values_are_named(&diverged(put_sampled(bytes, place, 3, 3)));
        }
    }
}

#[test]
fn larger_values_are_compared_in_blocks() {
    let _limit = watchdog(120);
    let (bytes, unseen) = (1 << 20, 70);
    // Some calls between the powers of two compare the whole, too.
    let passes = |call| {
        put_sampled(bytes, unseen, call, call)
            .iter()
            .all(Result::is_ok)
    };
    assert!(
        [3, 5, 6, 7].into_iter().any(passes),
        "no block has this byte"
    );
    for place in [0, bytes - 1] {
        assert_values_are_named(&diverged(put_sampled(bytes, place, 3, 3)));
    }
    for wrong in [1, 2, 4, 8] {
        assert_values_are_named(&diverged(put_sampled(bytes, unseen, wrong, wrong)));
    }
}

#[test]
fn large_values_from_other_lines_are_compared_alike() {
    let _limit = watchdog(120);
    let results = Simulation::new(2, 2)
        .settings(|b| b.check_uncommitted(false))
        .run(|p| {
            let large = MpmdArray::from_slice(&[1 << 20], &vec![7u8; 1 << 20])?;
            for step in 0..20 {
                let _ = match step == 0 && p.process() == ProcessId(0) {
                    true => p.device_put(&large, on(0))?,
                    false => p.device_put(&large, on(0))?,
                };
                p.step_end()?;
            }
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn large_leaves_of_one_call_are_compared_alike() {
    let _limit = watchdog(120);
    for (wrong, by_reshard) in [(2, false), (4, false), (2, true), (4, true)] {
        let results = Simulation::new(2, 2)
            .settings(|b| b.check_uncommitted(false))
            .run(|p| {
                let leaf = |leaf: usize| {
                    let mut values = vec![leaf as u8; 1 << 20];
                    values[70] ^= u8::from(leaf == wrong && p.process() == ProcessId(1));
                    MpmdArray::from_slice(&[1 << 20], &values)
                };
                let leaves = (0..5).map(leaf).collect::<Result<Vec<_>>>()?;
                let _ = match by_reshard {
                    true => p.reshard(&leaves, on(0), MoveOptions::default())?,
                    false => p.device_put(&leaves, on(0))?,
                };
                p.step_end()
            });
        assert_values_are_named(&diverged(results));
    }
}

#[test]
fn large_values_are_compared_whole_if_the_job_says_so() {
    let _limit = watchdog(120);
    let results = Simulation::new(2, 2)
        .settings(|b| b.check_uncommitted(true))
        .run(|p| {
            for call in 1..=3 {
                let mut values = vec![0u8; 1 << 20];
                values[70] = u8::from(call == 3 && p.process() == ProcessId(1));
                let _ = p.device_put(&MpmdArray::from_slice(&[1 << 20], &values)?, on(0))?;
            }
            p.step_end()
        });
    assert_values_are_named(&diverged(results));
}

#[test]
fn values_of_each_process_go_into_an_array_by_region() {
    let _limit = watchdog(120);
    let results = Simulation::new(2, 2)
        .settings(|b| b.check_uncommitted(true))
        .run(|p| {
            let own: Vec<f32> = (0..2048)
                .map(|i| (i + 10_000 * p.process().0) as f32)
                .collect();
            let rows = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
            let batch = p.array_from_fn(f32s([4096]), &rows, move |_, mut view| {
                view.as_mut_slice::<f32>()?.copy_from_slice(&own);
                Ok(())
            })?;
            let whole = p.device_put(&batch, on(0))?;
            p.step_end()?;
            Ok(whole
                .to_host()?
                .map(|host| host.to_vec::<f32>())
                .transpose()?)
        });
    let all: Vec<Option<Vec<f32>>> = results.into_iter().map(Result::unwrap).collect();
    let expected = (0..2).flat_map(|process| (0..2048).map(move |i| (i + 10_000 * process) as f32));
    assert_eq!(all, [Some(expected.collect()), None]);
}

#[test]
fn puts_that_differ_in_donation_or_aliasing_diverge() {
    let _limit = watchdog(120);
    let options = MoveOptions::default();
    for other in [options.donate(true), options.may_alias(false)] {
        let texts = in_all_ways(|p| {
            let x = p.array_from_fn(f32s([2]), on(0), |_, mut view| Ok(view.fill(1.0f32)?))?;
            let options = if p.process() == ProcessId(1) {
                other
            } else {
                options
            };
            p.device_put_with(&x, on(0), options).map(drop)
        });
        for text in texts {
            assert!(
                text.ends_with(
                    "process 1 issued the same call, but with other arrays or other options"
                ),
                "{text}"
            );
        }
    }
}
