//! Corner cases: empty arrays, late messages, and results that no one needs any more.

use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, ProcessId, Simulation};

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

#[test]
fn maximal_peer_timeout_does_not_panic() {
    let _limit = watchdog(60);
    let simulation =
        Simulation::new(2, 2).settings(|b| b.peer_timeout(Duration::MAX).run_ahead(1, 1 << 30));
    let results = simulation.run(|p| {
        let x = p.array_from_fn(f32s([4096]), on(0), |_, mut view| Ok(view.fill(1.0f32)?))?;
        let y = p.device_put(&x, on(1))?;
        y.wait_timeout(Duration::MAX)?;
        y.block_until_ready()?;
        p.broadcast_value(ProcessId(0), 7u8, || Ok(7)).map(drop)
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn small_pieces_beyond_the_credit_arrive_unchanged() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        if p.process() == ProcessId(1) {
            // Late, so that the sender has used up its credit.
            std::thread::sleep(Duration::from_millis(300));
        }
        let mut moved = Vec::new();
        for i in 0..100u8 {
            let x = p.array_from_fn(f32s([4096]), on(0), move |_, mut view| {
                Ok(view.fill(f32::from(i))?)
            })?;
            moved.push(p.device_put(&x, on(1))?);
        }
        for (i, y) in (0..100u8).zip(&moved) {
            if let Some(y) = y.to_host()? {
                assert!(
                    y.as_slice::<f32>()?
                        .iter()
                        .all(|value| *value == f32::from(i)),
                    "{i}"
                );
            }
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn empty_arrays_work_everywhere() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let mesh = p.mesh(&[("model", 2)])?;
        let reduce = |x: &[ShapedArray]| {
            Ok(Signature::new(vec![x[0].clone()]).all_reduce("model", x[0].clone()))
        };
        let sum = fun("sum", reduce, |cx, x, mut y| {
            y[0].as_mut_slice::<f32>()?
                .copy_from_slice(x[0].as_slice::<f32>()?);
            cx.all_reduce("model", y[0].as_mut_slice::<f32>()?)
        });
        let sum = p.jit(sum).on(&mesh).outputs(mesh.replicated()).build()?;
        let x = p.device_put(&MpmdArray::from_slice::<f32>(&[0, 3], &[])?, on(0))?;
        let x = p.device_put(&x, mesh.replicated())?;
        let y = sum.call(p, vec![x])?;
        Ok(y[0]
            .to_host()?
            .map(|y| (y.shape().to_vec(), y.to_vec::<f32>())))
    });
    for result in results {
        let (shape, values) = result.unwrap().expect("both own a copy");
        assert_eq!((shape, values.unwrap()), (vec![0, 3], vec![]));
    }
}

#[test]
fn donated_host_values_are_not_overwritten_by_shards() {
    let _limit = watchdog(60);
    let mut p = Builder::default().devices(2).alone().unwrap();
    let mesh = p.mesh(&[("rows", 2)]).unwrap();
    let rows = mesh.sharding(spec!["rows"]);
    let infer = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0"));
    let same = fun("same", infer, |_, _, _| Ok(()));
    let same = p
        .jit(same)
        .on(&mesh)
        .outputs(&rows)
        .donate("0")
        .build()
        .unwrap();
    for _ in 0..20 {
        let x = p.array_from_fn(f32s([64]), on(0), |_, mut view| {
            (0..)
                .zip(view.as_mut_slice::<f32>()?)
                .for_each(|(i, value)| *value = i as f32);
            Ok(())
        });
        // Nothing else holds these values when the kernel is called.
        let host = MpmdArray::from_host(x.unwrap().to_host().unwrap().unwrap());
        let y = same.call(&mut p, vec![host]).unwrap().remove(0);
        let values = y.to_host().unwrap().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(values, (0..64).map(|i| i as f32).collect::<Vec<_>>());
    }
    p.finish().unwrap();
}

#[test]
fn kernels_failed_on_both_sides_do_not_block_finish() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let mesh = p.mesh(&[("model", 2)])?;
        let x = p.array_from_fn(f32s([32768]), mesh.replicated(), |_, mut view| {
            Ok(view.fill(1.0f32)?)
        })?;
        for broken in 0..2 {
            let reduce = |x: &[ShapedArray]| {
                Ok(Signature::new(vec![x[0].clone()]).all_reduce("model", x[0].clone()))
            };
            let kernel = fun("breaks", reduce, move |cx, _, mut y| {
                if cx.device() == DeviceId(broken) {
                    return Err(Error::kernel("broken"));
                }
                cx.all_reduce("model", y[0].as_mut_slice::<f32>()?)
            });
            let _ = p
                .jit(kernel)
                .on(&mesh)
                .outputs(mesh.replicated())
                .build()?
                .call(p, vec![x.clone()])?;
        }
        Ok(())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("broken"), "{error}");
    }
}

#[test]
fn then_before_a_donation_gets_the_values() {
    let _limit = watchdog(60);
    let mut p = Builder::default().devices(2).alone().unwrap();
    let mesh = p.mesh(&[("rows", 2)]).unwrap();
    let rows = mesh.sharding(spec!["rows"]);
    // The first shard is ready long after the second one.
    let x = p.array_from_fn(f32s([2]), &rows, |region, mut view| {
        if region.range(0).start == 0 {
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(view.fill(3.0f32)?)
    });
    let x = x.unwrap();
    let (tell, hear) = channel();
    x.then(move |values| {
        tell.send(values.and_then(|values| Ok(values.to_vec::<f32>()?)))
            .unwrap()
    });
    let copy = fun("copy", like_first, |_, x, mut y| {
        y[0].as_mut_slice::<f32>()?
            .copy_from_slice(x[0].as_slice::<f32>()?);
        Ok(())
    });
    let copy = p
        .jit(copy)
        .on(&mesh)
        .outputs(&rows)
        .donate("0")
        .build()
        .unwrap();
    let _ = copy.call(&mut p, vec![x]).unwrap();
    p.finish().unwrap();
    assert_eq!(hear.recv().unwrap().unwrap(), [3.0, 3.0]);
}

#[test]
fn collective_with_different_lengths_fails_on_each_device() {
    let _limit = watchdog(60);
    // Both small, both large, and one of each. The large transfer waits for its receiver.
    for lengths in [[3, 5], [20_000, 20_001], [100, 20_000], [20_000, 100]] {
        let results = Simulation::new(2, 2).run(|p| {
            let mesh = p.mesh(&[("model", 2)])?;
            let reduce = |x: &[ShapedArray]| {
                Ok(Signature::new(vec![x[0].clone()]).all_reduce("model", x[0].clone()))
            };
            let sum = fun("sum", reduce, move |cx, _, mut y| {
                let length = lengths[cx.axis_index("model")?];
                cx.all_reduce("model", &mut y[0].as_mut_slice::<f32>()?[..length])
            });
            let sum = p.jit(sum).on(&mesh).outputs(mesh.replicated()).build()?;
            let x = p.array_from_fn(f32s([30_000]), mesh.replicated(), |_, mut view| {
                Ok(view.fill(1.0f32)?)
            })?;
            sum.call(p, vec![x])?[0].to_host()
        });
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains("bytes, another device of its group"),
                "{lengths:?}: {error}"
            );
        }
    }
}
