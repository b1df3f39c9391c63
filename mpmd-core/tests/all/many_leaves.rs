//! Calls with many arrays that stay the same from call to call, and with many results.

use std::sync::Mutex;

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::Mesh;
use mpmd_core::{Error, FailureKind, Jit, ProcessId, simulate};

const LEAVES: usize = 12;

fn group(p: &mut Program, mesh: &Mesh) -> Result<Vec<MpmdArray>> {
    let one = |value| {
        p.array_from_fn(f32s([4]), mesh.replicated(), move |_, mut view| {
            Ok(view.fill(value as f32)?)
        })
    };
    (0..LEAVES).map(one).collect()
}

/// Returns a kernel that copies its inputs. It fails if an input is negative.
fn copies(
    p: &Program,
    mesh: &Mesh,
) -> Result<Jit<impl Kernel<In = Vec<MpmdArray>, Out = Vec<MpmdArray>>>> {
    let copy = fun("copies", like_each, |_, x, y| {
        for (x, mut y) in x.iter().zip(y) {
            let x = x.as_slice::<f32>()?;
            if x[0] < 0.0 {
                return Err(Error::kernel("negative"));
            }
            y.as_mut_slice::<f32>()?.copy_from_slice(x);
        }
        Ok(())
    });
    p.jit(copy).on(mesh).outputs(mesh.replicated()).build()
}

fn like_each(x: &[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> {
    Ok(Signature::new(x.to_vec()))
}

/// The mesh of the second device, which process 0 does not own.
fn second(p: &mut Program) -> Result<Mesh> {
    let device = p.topology().device_ids()[1];
    p.mesh_of(&[("x", 1)], &[device])
}

/// Runs a program on two processes with a device each. Both must succeed with the same result.
fn on_two<T: PartialEq + std::fmt::Debug + Send>(
    program: impl Fn(&mut Program) -> Result<T> + Sync,
) -> T {
    let _limit = watchdog(60);
    let mut results = simulate(2, 2, 1, program).into_iter().map(Result::unwrap);
    let first = results.next().expect("two processes");
    assert_eq!(results.next().as_ref(), Some(&first));
    first
}

#[test]
fn donated_leaf_of_unchanged_inputs_is_refused_everywhere() {
    let text = on_two(|p| {
        let mesh = second(p)?;
        let (copies, mut x) = (copies(p, &mesh)?, group(p, &mesh)?);
        for _ in 0..3 {
            copies.call(p, x.clone())?;
        }
        let update = fun("update", like_first, |_, _, _| Ok(()));
        let update = p
            .jit(update)
            .on(&mesh)
            .outputs(mesh.replicated())
            .donate("0")
            .build()?;
        let mut new = update.call(p, vec![x[7].clone()])?;
        let before = p.operations();
        let mut refuse = || {
            copies
                .call(p, x.clone())
                .expect_err("a donated input")
                .to_string()
        };
        let (refused, again) = (refuse(), refuse());
        assert_eq!((&again, p.operations()), (&refused, before));
        // The others are still usable, and so is a group with a new array in its place.
        x[7] = new.swap_remove(0);
        for _ in 0..3 {
            copies.call(p, x.clone())?;
        }
        Ok(refused)
    });
    assert!(text.contains("\"7\"") && text.contains("donated"), "{text}");
}

#[test]
fn donated_result_of_another_process_is_refused_alone() {
    let text = on_two(|p| {
        let mesh = second(p)?;
        let (copies, x) = (copies(p, &mesh)?, group(p, &mesh)?);
        let y = copies.call(p, x)?;
        let host = fun("first", like_first, |_, _, _| Ok(()));
        let host = p
            .jit(host)
            .on(&mesh)
            .outputs(mesh.replicated())
            .donate("0")
            .build()?;
        // An array that nobody has looked at before.
        host.call(p, vec![y[3].clone()])?;
        let refused = host
            .call(p, vec![y[3].clone()])
            .expect_err("it is donated")
            .to_string();
        host.call(p, vec![y[4].clone()])?;
        let rest: Vec<MpmdArray> = y[5..].to_vec();
        assert_eq!(rest[0].is_fully_remote(), p.process() == ProcessId(0));
        copies.call(p, rest)?;
        Ok(refused)
    });
    assert!(text.contains("donated to operation"), "{text}");
}

#[test]
fn failed_leaf_of_unchanged_inputs_fails_each_call() {
    let _limit = watchdog(60);
    let mut p = Program::builder().alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let copies = copies(&p, &mesh).unwrap();
    let mut x = group(&mut p, &mesh).unwrap();
    let good = x[5].clone();
    let bad = MpmdArray::from_slice(&[4], &[-1.0f32; 4]).unwrap();
    let bad = p.device_put(&bad, mesh.replicated()).unwrap();
    x[5] = copies.call(&mut p, vec![bad]).unwrap().swap_remove(0);
    for _ in 0..4 {
        let y = copies.call(&mut p, x.clone()).unwrap();
        let error = y[0].block_until_ready().unwrap_err();
        assert!(matches!(&error, Error::Failed(failure) if failure.kind == FailureKind::Kernel));
        assert!(error.to_string().contains("negative"), "{error}");
    }
    x[5] = good;
    for _ in 0..3 {
        let y = copies.call(&mut p, x.clone()).unwrap();
        for (i, y) in y.iter().enumerate() {
            let y = y.to_host().unwrap().unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), [i as f32; 4]);
        }
    }
    assert!(p.finish().is_err(), "a kernel has failed");
}

#[test]
fn one_other_leaf_among_unchanged_inputs_is_divergence() {
    let _limit = watchdog(60);
    for leaf in [0, 6, LEAVES - 1] {
        let seen = Mutex::new(Vec::new());
        let results = simulate(2, 2, 1, |p| {
            let mesh = second(p)?;
            let (copies, mut x, other) = (copies(p, &mesh)?, group(p, &mesh)?, group(p, &mesh)?);
            for _ in 0..3 {
                copies.call(p, x.clone())?;
            }
            if p.process() == ProcessId(0) {
                x[leaf] = other[leaf].clone();
            }
            let y = copies.call(p, x)?;
            let back = Sharding::single_device(p.topology().device_ids()[0]);
            let moved = p.device_put(&y[0], back)?;
            if p.process() == ProcessId(0) {
                seen.lock().unwrap().push(moved.to_host().is_ok());
            }
            Ok(())
        });
        assert_eq!(seen.into_inner().unwrap(), [false], "nothing is delivered");
        for result in results {
            let error = result.expect_err("a diverged program does not end well");
            assert!(error.is_divergence(), "{error}");
            let expected = "issued the same call, but with other arrays";
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
