//! A send to a process that is stopped before it can take the data.

use std::path::Path;
use std::time::Duration;

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Error, ProcessId};

use super::Say;

/// Number of bytes of the array.
const BYTES: usize = 1 << 20;

/// Name of a file in the working folder. Both processes wait for it before the move.
pub const STOPPED: &str = "stopped";

/// Sends an array from process 0 to process 1, which the test has stopped before. Process 0 prints
/// `pending` if the handle does not complete within half a second. Then it waits without a time
/// limit, and prints `taken` or the error.
pub(super) fn send(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let on = |device: u32| Sharding::single_device(DeviceId(device));
    let x = p.array_from_fn(u8s([BYTES]), on(0), |_, mut view| Ok(view.fill(7u8)?))?;
    x.block_until_ready()?;
    say("ready".to_owned());
    while !Path::new(STOPPED).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let y = p.device_put(&x, on(1))?;
    if p.process() == ProcessId(0) {
        match y.wait_timeout(Duration::from_millis(500)) {
            Err(Error::TimedOut { .. }) => say("pending".to_owned()),
            Err(error) => return Err(error),
            Ok(_) => say("complete TOO EARLY".to_owned()),
        }
    }
    let waited = y.block_until_ready();
    match &waited {
        Ok(_) => say("taken".to_owned()),
        Err(error) => say(format!("failed: {error}")),
    }
    waited.map(drop)
}
