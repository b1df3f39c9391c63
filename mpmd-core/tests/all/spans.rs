//! Spans of the program's log, and calls that wait for their operations.

use std::io::Write;
use std::sync::{Arc, Mutex};

use super::simulations::simulation;
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::trace::{Label, Role};
use mpmd_core::{Error, Program};

/// Takes the text of a log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Makes a log of all spans, of all threads. No other test of this process may do so.
    pub(crate) fn of_this_process() -> Self {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).unwrap();
        log
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn spans_of_a_step_are_nested() {
    let _limit = watchdog(60);
    // Kernels run on the threads of devices.
    let log = Log::of_this_process();
    let results = simulation(2, 2).run(|p| {
        let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
        p.annotate("outer", |p| {
            p.annotate("inner", |_| tracing::info!("inside of the range"))
        });
        let x = p.device_put(&MpmdArray::scalar(1.0f32), stages[0].replicated())?;
        p.step_end()?;
        p.set_label(Some(Label {
            stage: 1,
            microbatch: Some(7),
            role: Role::Forward,
        }));
        let x = p.device_put(&x, stages[1].replicated())?;
        let same = p.jit(fun("same", like_first, |_, x, mut y| {
            tracing::info!("inside of the kernel");
            y[0].as_mut_slice::<f32>()?
                .copy_from_slice(x[0].as_slice()?);
            Ok(())
        }));
        let same = same
            .on(&stages[1])
            .outputs(stages[1].replicated())
            .build()?;
        same.call(p, vec![x])?[0].block_until_ready()?;
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
    let text = log.text();
    let line = |what: &str| {
        let mut lines = text
            .lines()
            .filter(|line| line.contains("stage{number=1 role=\"forward\"}"));
        lines
            .find(|line| line.contains(what))
            .unwrap_or_else(|| panic!("no {what:?} in\n{text}"))
    };
    for what in ["inside of the kernel", "ran microseconds="] {
        let line = line(what);
        let (mut rest, at) = (line, format!("{}:", file!()));
        for part in [
            "step{number=2}:stage{number=1",
            ":microbatch{number=7}:operation{number=3",
            "same",
            at.as_str(),
            "}:kernel{device=1}:",
        ] {
            let (_, after) = rest
                .split_once(part)
                .unwrap_or_else(|| panic!("{part:?} in {line}"));
            rest = after;
        }
    }
    let range = text
        .lines()
        .find(|line| line.contains("inside of the range"))
        .unwrap();
    let inner = range
        .split_once("annotation{name=\"outer\"")
        .expect("the outer range")
        .1;
    assert!(
        inner.contains("}:annotation{name=\"inner\"") && inner.contains(file!()),
        "{range}"
    );
    for what in ["sent peer=1", "received peer=0"] {
        let line = line(what);
        assert!(
            line.contains("operation{number=2") && line.contains("bytes=4"),
            "{line}"
        );
    }
}

/// Makes an array on device 1 with values that cannot be computed, and uses it.
fn fails(p: &mut Program) -> Result<u64> {
    let on = Sharding::single_device(DeviceId(1));
    let error = p.array_from_fn(f32s([]), &on, |_, _| Err(Error::kernel("not today")));
    match error.and_then(|x| p.device_put(&x, Sharding::single_device(DeviceId(0)))) {
        Err(error) if error.to_string().contains("not today") => Ok(p.operations()),
        Err(error) => Err(error),
        Ok(_) => Ok(p.operations()),
    }
}

#[test]
fn synchronous_call_returns_the_failure_of_its_operation() {
    let _limit = watchdog(60);
    for (sync, operations) in [(true, 1), (false, 2)] {
        let mut p = Program::builder().devices(2).sync(sync).alone().unwrap();
        assert_eq!(fails(&mut p).unwrap(), operations);
    }
    let results = simulation(2, 2)
        .settings(|program| program.sync(true))
        .run(|p| {
            let mut x = p.device_put(
                &MpmdArray::scalar(1.0f32),
                Sharding::single_device(DeviceId(0)),
            )?;
            for step in 0..100u32 {
                x = p.device_put(&x, Sharding::single_device(DeviceId(step % 2)))?;
                assert!(x.is_fully_remote() || x.is_complete(), "{x:?}");
            }
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn replicas_that_differ_are_named() {
    let _limit = watchdog(60);
    for (check, differ) in [(true, true), (true, false), (false, true)] {
        let simulation = simulation(2, 4).settings(move |program| program.check_replicas(check));
        let results = simulation.run(|p| {
            let mesh = p.mesh(&[("x", 2), ("y", 2)])?;
            let kernel = fun("uneven", like_first, move |cx, x, mut y| {
                y[0].as_mut_slice::<f32>()?
                    .copy_from_slice(x[0].as_slice()?);
                if differ && cx.device() == DeviceId(3) {
                    y[0].as_mut_slice::<f32>()?[1] += 1.0;
                }
                Ok(())
            });
            let columns = mesh.sharding(spec![None, "y"]);
            let jit = p.jit(kernel).on(&mesh).outputs(&columns).build()?;
            let x = MpmdArray::from_slice(&[2, 4], &[1.0f32; 8])?;
            let x = p.device_put(&x, &columns)?;
            let y = jit.call(p, vec![x])?;
            y[0].block_until_ready()?;
            Ok(p.operations())
        });
        for result in results {
            match result {
                Ok(operations) => {
                    assert!(!(check && differ));
                    assert_eq!(operations, if check { 5 } else { 2 });
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(check && differ, "{error}");
                    let said = "the replicas of output \"0\" of kernel uneven at";
                    let devices = "devices 1 and 3 have different values of [0..2, 2..4]";
                    assert!(error.contains(said) && error.contains(devices), "{error}");
                    assert!(error.contains(file!()), "{error}");
                }
            }
        }
    }
}
