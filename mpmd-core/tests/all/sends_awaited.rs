//! Futures of arrays under tokio: of shards and of sends, with time-outs and `select!`.

use std::future::IntoFuture;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

use super::sends::{Gate, on, sevens};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::{ProcessId, Simulation, all_ready};

/// A time that only a wait without an end exceeds.
const SHORT: Duration = Duration::from_millis(20);
/// A time that no wait of the tests takes.
const LONG: Duration = Duration::from_secs(50);

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Runs a move from process 0 to process 1 which process 1 issues when process 0 opens the gate.
/// Both processes await it.
fn moves(runtime: fn() -> Runtime, zero_copy: bool) {
    let gate = Gate::default();
    let simulation = Simulation::new(2, 2);
    let simulation = if zero_copy {
        simulation.zero_copy(&[0, 0])
    } else {
        simulation
    };
    let results = simulation.run(|p| {
        let x = [sevens(p, 100_000, &on(0))?, sevens(p, 200_000, &on(0))?];
        if p.process() == ProcessId(1) {
            gate.pass();
        }
        let y = p.device_put(&x.to_vec(), on(1))?;
        let sends = p.process() == ProcessId(0);
        runtime().block_on(async {
            if sends {
                assert!(timeout(SHORT, y[0].clone().into_future()).await.is_err());
                assert!(timeout(SHORT, all_ready(y.clone())).await.is_err());
                let mut waiting = y[1].clone().into_future();
                // The same future is polled by several tasks, one after another.
                for _ in 0..3 {
                    tokio::select! {
                        _ = &mut waiting => panic!("nobody has taken it"),
                        () = sleep(SHORT) => {}
                    }
                }
                let others: Vec<_> = (0..8)
                    .map(|i| tokio::spawn(y[i % 2].clone().into_future()))
                    .collect();
                tokio::task::yield_now().await;
                gate.open();
                drop(waiting.await?);
                for other in others {
                    assert!(other.await.expect("no panic")?.is_complete());
                }
            }
            let y = timeout(LONG, all_ready(y.clone()))
                .await
                .expect("it is taken")?;
            assert!(y.iter().all(MpmdArray::is_complete));
            // Of a complete array, at once.
            tokio::select! {
                biased;
                done = y[0].clone().into_future() => drop(done?),
                () = sleep(LONG) => panic!("it is complete"),
            }
            Ok(())
        })
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn sends_are_awaited_on_one_thread() {
    let _limit = watchdog(60);
    [false, true]
        .into_iter()
        .for_each(|zero_copy| moves(current_thread, zero_copy));
}

#[test]
fn sends_are_awaited_on_several_threads() {
    let _limit = watchdog(60);
    [false, true]
        .into_iter()
        .for_each(|zero_copy| moves(multi_thread, zero_copy));
}

#[test]
fn awaited_failure_names_its_cause() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let fails = |_: &Region, _: ViewMut<'_>| Err(Error::kernel("no values today"));
        let x = p.array_from_fn(u8s([100_000]), on(0), fails)?;
        let y = p.device_put(&x, on(1))?;
        let ended = current_thread().block_on(async { timeout(LONG, all_ready(vec![y])).await });
        let error = ended.expect("it ends").unwrap_err();
        assert!(error.to_string().contains("no values today"), "{error}");
        Ok(())
    });
    results
        .into_iter()
        .for_each(|result| drop(result.unwrap_err()));
}
