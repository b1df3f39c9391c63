//! An array that goes around a ring of processes, hop by hop, without copies.

use std::time::{Duration, Instant};

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;

/// Bytes of the array.
const BYTES: usize = 64 << 10;

/// Number of times that the memory in use is printed, at equal intervals.
const LOOKS: usize = 10;

/// Time limit for memory without a holder to become free.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Runs `circling ROUNDS`: sends an array around all processes this many times. Each process checks
/// some values at every hop.
///
/// In each tenth of the rounds it checks all values once. It then prints the bytes that its pools
/// have mapped, and the bytes that it has lent. At the end, also after an error, it drops the array
/// and prints whether all memory has come back.
pub(super) fn circle(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let rounds = args.first().and_then(|text| text.parse().ok());
    let rounds: usize = rounds.ok_or_else(|| Error::kernel("circling ROUNDS"))?;
    let end = go_around(p, rounds, say);
    let until = Instant::now() + TIME_LIMIT;
    loop {
        let memory = p.memory();
        if memory.live + memory.lent == 0 {
            say("all is back".to_owned());
            return end;
        }
        if Instant::now() > until {
            say(format!("not back: {memory:?}; {:?}", p.metrics()));
            return end;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn go_around(p: &mut Program, rounds: usize, say: &mut Say<'_>) -> Result<()> {
    let on: Vec<Sharding> = (0..p.processes() as u32)
        .map(|device| Sharding::single_device(DeviceId(device)))
        .collect();
    let mut x = p.array_from_fn(u8s([BYTES]), &on[0], |_, mut view| {
        let values = view.as_mut_slice::<u8>()?.iter_mut().enumerate();
        values.for_each(|(at, value)| *value = expected(at));
        Ok(())
    })?;
    for round in 1..=rounds {
        let is_look = round.is_multiple_of((rounds / LOOKS).max(1));
        for hop in 1..=on.len() {
            x = p.device_put(&x, &on[hop % on.len()])?;
            let Some(values) = x.to_host()? else { continue };
            let values = values.bytes();
            let step = if is_look { 1 } else { BYTES / 8 - 1 };
            if let Some(at) = (0..BYTES)
                .step_by(step)
                .find(|at| values.get(*at) != Some(&expected(*at)))
            {
                return Err(Error::kernel(format!(
                    "WRONG data at {at} in round {round}"
                )));
            }
        }
        if round == 10 {
            say("started".to_owned());
        }
        if is_look {
            let lent: u64 = p.metrics().lent_to.iter().sum();
            say(format!(
                "round {round}: mapped {} lent {lent}",
                p.memory().mapped
            ));
        }
    }
    Ok(())
}

fn expected(at: usize) -> u8 {
    (at % 251) as u8
}
