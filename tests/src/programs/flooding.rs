//! Large transfers from one process to all others, or from all others to one, until the test ends
//! it.

use std::sync::Arc;

use mpmd_core::Builder;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use crate::random;

/// Number of rounds, more than a test has time for.
const ROUNDS: usize = 1_000_000;

/// Bytes of each transfer: more than any transport takes at once.
const BYTES: usize = 64 << 20;

/// Limits the lead of the program to 6 unfinished operations. So some transfers are always in
/// flight, but never more than fit into a machine's memory.
pub(super) fn short_lead(builder: Builder) -> Builder {
    builder.run_ahead(6, 1 << 30)
}

/// Runs `flooding sends PROCESS`, in which this process sends 64 MiB to each other process again
/// and again. In `flooding receives PROCESS`, each other process sends 64 MiB to this one. The
/// receiver compares the bytes while the next transfer is in flight.
pub(super) fn flood(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let wrong = || Error::kernel("flooding sends|receives PROCESS");
    let [how, who] = args else {
        return Err(wrong());
    };
    let who: usize = who.parse().map_err(|_| wrong())?;
    let others = (0..p.processes()).filter(|other| *other != who);
    let ways: Vec<(usize, usize)> = match *how {
        "sends" => others.map(|other| (who, other)).collect(),
        "receives" => others.map(|other| (other, who)).collect(),
        _ => return Err(wrong()),
    };
    let on = |process: usize| Sharding::single_device(DeviceId(process as u32));
    // Each process sends different bytes: the pattern from its own offset on.
    let pattern = Arc::new(random::bytes(64, BYTES + p.processes()));
    let mut sources = Vec::new();
    for process in 0..p.processes() {
        let pattern = pattern.clone();
        let fill = move |_: &Region, mut view: ViewMut<'_>| -> Result<()> {
            view.as_mut_slice::<u8>()?
                .copy_from_slice(&pattern[process..process + BYTES]);
            Ok(())
        };
        sources.push(p.array_from_fn(u8s([BYTES]), on(process), fill)?);
    }
    let mut before: Vec<(usize, MpmdArray)> = Vec::new();
    for round in 0..ROUNDS {
        let mut moved = Vec::new();
        for (from, to) in &ways {
            moved.push((*from, p.device_put(&sources[*from], on(*to))?));
        }
        for (from, x) in std::mem::replace(&mut before, moved) {
            let right = &pattern[from..from + BYTES];
            if x.to_host()?
                .is_some_and(|found| found.bytes()[..] != *right)
            {
                say(format!("WRONG data of process {from} before round {round}"));
            }
        }
        p.step_end()?;
        say(format!("round {round}"));
    }
    Ok(())
}
