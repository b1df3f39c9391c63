//! A program that prints the lent and borrowed memory of each process, step by step.

use std::time::{Duration, Instant};

use mpmd_core::ProcessId;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use super::parts::numbered;

/// Number of elements of an array of 1 MiB.
const ELEMENTS: usize = 256 << 10;

/// Time limit for the lent and borrowed memory to reach the expected sums.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Sends an array from process 0 to both others, and one from process 1 to process 2; then drops
/// all arrays. Before and after the drop, prints a line about this process's memory. Waits up to
/// `TIME_LIMIT` until the sums are those of zero-copy transfers.
pub(super) fn three(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let on = |device| Sharding::single_device(DeviceId(device));
    let me = p.process().index();
    let first = p.array_from_fn(f32s([ELEMENTS]), on(0), numbered(0))?;
    let second = p.array_from_fn(f32s([ELEMENTS]), on(1), numbered(1))?;
    let there = vec![
        p.device_put(&first, on(1))?,
        p.device_put(&first, on(2))?,
        p.device_put(&second, on(2))?,
    ];
    drop((first, second));
    there
        .iter()
        .try_for_each(|array| array.block_until_ready().map(drop))?;
    let bytes = 4 * ELEMENTS as u64;
    meet(p)?;
    settled(p, [[2 * bytes, 0], [bytes, bytes], [0, 2 * bytes]][me], say);
    meet(p)?;
    drop(there);
    settled(p, [0, 0], say);
    meet(p)
}

fn meet(p: &mut Program) -> Result<()> {
    (0..p.processes() as u32).try_for_each(|process| {
        p.broadcast_value(ProcessId(process), 0u8, || Ok(0))
            .map(drop)
    })
}

fn settled(p: &Program, expected: [u64; 2], say: &mut Say<'_>) {
    let until = Instant::now() + TIME_LIMIT;
    loop {
        let (found, memory) = (p.metrics(), p.memory());
        let sums: [u64; 2] = [&found.lent_to, &found.borrowed_from].map(|bytes| bytes.iter().sum());
        if sums == expected || Instant::now() > until {
            return say(format!(
                "{} live, {} cached, lent {:?}, borrowed {:?}, {} at most",
                memory.live, memory.cached, found.lent_to, found.borrowed_from, memory.peak_live
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
