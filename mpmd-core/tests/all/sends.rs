//! Handles of processes that send: they complete when what was sent is taken or copied out, and
//! fail with it.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::simulations::{simulation, zero_copy};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::reshard::{self, DeliveryOrigin};
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, Mesh, Topology};
use mpmd_core::{Error, FailureKind, ProcessId};

/// A time that only a wait without an end exceeds.
const SHORT: Duration = Duration::from_millis(20);

/// Bytes of an array that moves after a grant, and of one that moves without.
const GRANTED: usize = 100_000;
const EAGER: usize = 100;

/// A gate at which a simulated process waits before it issues its next operation.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(crate) fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    /// Blocks until the gate is open. The watchdog of the test ends a wait that lasts too long.
    pub(crate) fn pass(&self) {
        drop(
            self.opened
                .wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open)
                .unwrap(),
        );
    }
}

pub(crate) fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

pub(crate) fn sevens(p: &mut Program, bytes: usize, to: &Sharding) -> Result<MpmdArray> {
    let x = p.array_from_fn(u8s([bytes]), to, |_, mut view| Ok(view.fill(7u8)?))?;
    x.block_until_ready()?;
    Ok(x)
}

fn mesh(p: &Program, devices: &[u32]) -> Result<Mesh> {
    let devices: Vec<DeviceId> = devices.iter().copied().map(DeviceId).collect();
    p.mesh_of(&[("x", devices.len())], &devices)
}

/// Checks that the handle is pending and stays so.
pub(crate) fn check_pending(y: &MpmdArray) {
    assert!(
        !y.is_complete() && format!("{y:?}").contains("pending"),
        "{y:?}"
    );
    let error = y.wait_timeout(SHORT).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

/// Checks that the handle becomes complete, and says so.
pub(crate) fn check_complete(y: &MpmdArray) -> Result<()> {
    y.block_until_ready()?;
    assert!(
        y.is_complete() && !format!("{y:?}").contains("pending"),
        "{y:?}"
    );
    Ok(())
}

/// Moves `bytes` bytes from process 0 to process 1, which issues the move only when process 0 opens
/// the gate: after its own handle is complete, or else after that was found to be pending.
fn moves(bytes: usize, completes_alone: bool) {
    let gate = Gate::default();
    let results = simulation(3, 3).run(|p| {
        let x = sevens(p, bytes, &on(0))?;
        if p.process() == ProcessId(1) {
            gate.pass();
        }
        let y = p.device_put(&x, on(1))?;
        match p.process() {
            ProcessId(0) if completes_alone => check_complete(&y)?,
            ProcessId(0) => {
                assert!(format!("{y:?}").contains("fully remote, pending"), "{y:?}");
                check_pending(&y);
            }
            // No part of it is here.
            ProcessId(2) => assert!(y.is_complete()),
            _ => {}
        }
        if p.process() == ProcessId(0) {
            // Values do not wait for sends.
            assert!(y.to_host()?.is_none());
            gate.open();
        }
        check_complete(&y)?;
        assert_eq!(y.is_fully_local(), p.process() == ProcessId(1));
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn granted_send_completes_when_it_is_taken() {
    let _limit = watchdog(60);
    moves(GRANTED, false);
    moves(1 << 20, false);
}

#[test]
fn eager_send_completes_when_copied_out_or_taken() {
    let _limit = watchdog(60);
    moves(EAGER, !zero_copy());
}

#[test]
fn send_of_no_bytes_is_complete_at_once() {
    let _limit = watchdog(60);
    moves(0, true);
}

#[test]
fn send_of_a_shard_that_comes_later_is_awaited() {
    let _limit = watchdog(60);
    let (gate, source) = (Gate::default(), std::sync::Arc::new(Gate::default()));
    let results = simulation(2, 2).run(|p| {
        let filled = source.clone();
        let x = p.array_from_fn(u8s([GRANTED]), on(0), move |_, mut view| {
            filled.pass();
            Ok(view.fill(7u8)?)
        })?;
        if p.process() == ProcessId(1) {
            gate.pass();
        }
        let y = p.device_put(&x, on(1))?;
        if p.process() == ProcessId(0) {
            // The wait begins before there is anything to send.
            check_pending(&y);
            source.open();
            check_pending(&y);
            gate.open();
        }
        check_complete(&y)
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn forwarder_completes_after_the_next_process_has_taken() {
    let _limit = watchdog(60);
    let hosts = [0, 1, 1];
    let topology = Topology::even(3, 1).on_hosts(&hosts).unwrap();
    let [from, to] = [vec![DeviceId(0)], vec![DeviceId(1), DeviceId(2)]].map(|devices| {
        Mesh::new(&[("x", devices.len())], devices)
            .unwrap()
            .replicated()
    });
    for bytes in [EAGER, GRANTED] {
        let [from, layout] = [&from, &to].map(|sharding| sharding.layout(&[bytes]).unwrap());
        let plan = reshard::plan(&from, &layout, 1, &topology).unwrap();
        let forwards = |process: &u32| {
            let part = plan.part_of(ProcessId(*process));
            part.deliveries.iter().any(|delivery| {
                matches!(delivery.from, DeliveryOrigin::Process(_)) && !delivery.peers.is_empty()
            })
        };
        let forwarder = [1, 2]
            .into_iter()
            .find(forwards)
            .expect("the host gets it once");
        let (forwarder, last) = (ProcessId(forwarder), ProcessId(3 - forwarder));
        let gate = Gate::default();
        let results = simulation(3, 3).settings(|b| b.hosts(&hosts)).run(|p| {
            let x = sevens(p, bytes, &on(0))?;
            if p.process() == last {
                gate.pass();
            }
            let y = p.device_put(&x, &to)?;
            if p.process() == forwarder {
                // Its own shard is there, and can be used.
                assert_eq!(
                    y.to_host()?.expect("it is local").to_vec::<u8>()?,
                    vec![7; bytes]
                );
                match bytes {
                    EAGER if !zero_copy() => check_complete(&y)?,
                    _ => check_pending(&y),
                }
                gate.open();
            }
            check_complete(&y)
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn replayed_send_completes_when_it_is_taken() {
    let _limit = watchdog(60);
    let gate = Gate::default();
    let results = simulation(2, 2).run(|p| {
        let x = sevens(p, GRANTED, &on(0))?;
        let (y, step) = p.capture(x.clone(), |p, x| p.device_put(&x, on(1)))?;
        check_complete(&y)?;
        if p.process() == ProcessId(1) {
            gate.pass();
        }
        let y = step.replay(p, x)?;
        if p.process() == ProcessId(0) {
            check_pending(&y);
            gate.open();
        }
        check_complete(&y)
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn sum_in_two_steps_completes_on_every_process() {
    let _limit = watchdog(60);
    let gate = Gate::default();
    let results = simulation(3, 6).run(|p| {
        let sums = mesh(p, &[0, 2])?.replicated().unreduced(&["x"])?;
        // The values become the first of the partial sums.
        let x = p.device_put(
            &MpmdArray::from_slice(&[1 << 17], &vec![2.0f32; 1 << 17])?,
            sums,
        )?;
        if p.process() == ProcessId(2) {
            gate.pass();
        }
        let before = p.operations();
        let y = p.device_put(&x, mesh(p, &[4, 5])?.replicated())?;
        assert_eq!(p.operations() - before, 2);
        if p.process() == ProcessId(0) {
            check_pending(&y);
            gate.open();
        }
        check_complete(&y)?;
        if let Some(y) = y.to_host()? {
            assert_eq!(y.to_vec::<f32>()?, vec![2.0; 1 << 17]);
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn failed_source_fails_the_handle_of_its_sender() {
    let _limit = watchdog(60);
    for bytes in [EAGER, GRANTED] {
        let results = simulation(3, 3).run(|p| {
            let fails = |_: &Region, _: ViewMut<'_>| Err(Error::kernel("no values today"));
            let x = p.array_from_fn(u8s([bytes]), on(0), fails)?;
            let y = p.device_put(&x, on(1))?;
            match p.process() {
                // It has no part of it, so it hears nothing.
                ProcessId(2) => drop(y.block_until_ready()?),
                _ => {
                    let error = y.block_until_ready().unwrap_err();
                    let failure = error.failure().expect("a failure");
                    assert_eq!(
                        (failure.kind, failure.process),
                        (FailureKind::Kernel, ProcessId(0))
                    );
                    assert!(y.is_complete() && error.to_string().contains("no values today"));
                }
            }
            Ok(())
        });
        for result in results {
            assert!(result.unwrap_err().to_string().contains("no values today"));
        }
    }
}

#[test]
fn lost_receiver_fails_the_handle_of_its_sender() {
    let _limit = watchdog(60);
    let sizes = if zero_copy() {
        vec![EAGER, GRANTED]
    } else {
        vec![GRANTED]
    };
    for bytes in sizes {
        let gate = Gate::default();
        let results = simulation(2, 2).lose(ProcessId(1), 2).run(|p| {
            let x = sevens(p, bytes, &on(0))?;
            if p.process() == ProcessId(1) {
                gate.pass();
            }
            let y = p.device_put(&x, on(1))?;
            if p.process() == ProcessId(0) {
                check_pending(&y);
                gate.open();
                let error = y.block_until_ready().unwrap_err();
                assert!(error.is_peer_failure(), "{error}");
                assert!(error.to_string().contains("process 1 is gone"), "{error}");
            }
            Ok(())
        });
        results
            .into_iter()
            .for_each(|result| drop(result.unwrap_err()));
    }
}
