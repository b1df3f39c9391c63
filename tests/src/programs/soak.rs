//! Thousands of transfers with handles and futures that are dropped at any time, and objects.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Waker};
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures::executor::block_on;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{ArrayFuture, Builder, ProcessId, method};

use super::Say;
use crate::random;

/// Maximum bytes of a common transfer.
const BYTES: usize = 1 << 20;

/// Maximum bytes of a large transfer. One transfer in [`RARE`] is large.
const LARGE_BYTES: usize = 8 << 20;
const RARE: usize = 200;

/// Exclusive limit on the offset in the random pattern at which an array's contents begin.
const OFFSETS: usize = 1 << 16;

/// Maximum number of handles and futures that are held for later.
const KEPT: usize = 24;

/// Number of transfers between two points at which nothing is held.
const PERIOD: usize = 500;

/// Limits the lead of the program to 128 unfinished operations, so that a drop of an array can meet
/// an operation in any state.
pub(super) fn long_lead(builder: Builder) -> Builder {
    builder.run_ahead(128, 64 << 20)
}

/// Runs `soak TRANSFERS SEED SECONDS`: moves arrays of random sizes between random processes. It
/// ends after this number of transfers and this number of seconds, whichever comes last. All bits
/// of awaited arrays are compared. The others are dropped: as a handle or as a future, at once,
/// later, or after some polls. Objects are made, changed and dropped meanwhile.
///
/// Prints the use of memory, open files and threads: once after a fifth of the transfers and half
/// of the seconds, and once at the end. Memory is the bytes in use, mapped by pools, and resident.
/// At the end, also prints the number of arrays that were checked on this process and on all
/// processes.
pub(super) fn soak(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let number = |text: &&str| {
        text.parse::<usize>()
            .map_err(|error| Error::kernel(error.to_string()))
    };
    let numbers = args.iter().map(number).collect::<Result<Vec<usize>>>()?;
    let [transfers, seed, seconds] = numbers[..] else {
        return Err(Error::kernel("soak TRANSFERS SEED SECONDS"));
    };
    let begin = Instant::now();
    let mut soak = Soak {
        random: Rng::with_seed(seed as u64),
        pattern: Arc::new(random::bytes(8, LARGE_BYTES + OFFSETS)),
        kept: Vec::new(),
        looked_at: Arc::default(),
        awaited: 0,
        awaited_here: 0,
    };
    let mut is_warm = false;
    for i in 1.. {
        soak.transfer(p)?;
        if i % PERIOD != 0 {
            continue;
        }
        soak.object(p)?;
        soak.settle(p)?;
        p.step_end()?;
        let passed = || Ok(begin.elapsed().as_secs() as usize);
        let passed = p.broadcast_value(ProcessId(0), 0, passed)?;
        if !is_warm && i >= transfers / 5 && passed >= seconds / 2 {
            is_warm = true;
            soak.settle(p)?;
            say(memory_use("warm", p));
        }
        if i >= transfers && passed >= seconds {
            break;
        }
    }
    soak.settle(p)?;
    say(memory_use("end", p));
    say(format!(
        "looked at {} of {}",
        soak.looked_at.load(Ordering::Relaxed),
        soak.awaited
    ));
    Ok(())
}

fn memory_use(when: &str, p: &Program) -> String {
    let memory = p.memory();
    let live = memory.live + memory.host_live;
    let (mapped, resident) = (memory.mapped, resident_bytes());
    let entries = |folder| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let (files, threads) = (entries("/proc/self/fd"), entries("/proc/self/task"));
    format!(
        "{when}: live {live} mapped {mapped} resident {resident} files {files} threads {threads}"
    )
}

/// Returns the resident bytes of this process.
pub(super) fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

struct Soak {
    random: Rng,
    pattern: Arc<Vec<u8>>,
    kept: Vec<Kept>,
    /// Number of arrays that this process has compared, including comparisons in callbacks.
    looked_at: Arc<AtomicUsize>,
    /// Number of arrays that all processes together compare, each on its owner.
    awaited: usize,
    /// Number of arrays to compare whose owner is this process.
    awaited_here: usize,
}

/// A handle or future that is dropped or awaited later.
enum Kept {
    /// The source array of a transfer, which is only dropped.
    Source {
        _x: MpmdArray,
    },
    Handle(Moved),
    Future(Pin<Box<ArrayFuture>>, Moved),
}

/// An array that was moved.
#[derive(Clone)]
struct Moved {
    x: MpmdArray,
    /// Offset of the contents in the pattern, in bytes.
    place: usize,
    bytes: usize,
}

impl Soak {
    /// Makes one array, moves it, and checks, holds or drops it at random. All processes draw the
    /// same random numbers, so that they issue the same operations.
    fn transfer(&mut self, p: &mut Program) -> Result<()> {
        let processes = p.processes();
        let from = self.random.usize(..processes);
        let to = (from + 1 + self.random.usize(..processes - 1)) % processes;
        let bytes = self.size();
        let place = self.random.usize(..OFFSETS);
        let pattern = self.pattern.clone();
        let fill = move |_: &Region, mut view: ViewMut<'_>| -> Result<()> {
            view.as_mut_slice::<u8>()?
                .copy_from_slice(&pattern[place..place + bytes]);
            Ok(())
        };
        let source = p.array_from_fn(u8s([bytes]), on(from), fill)?;
        let mut x = p.device_put(&source, on(to))?;
        if self.random.usize(..4) == 0 {
            // Moved on, perhaps before it has arrived; the handle in between is dropped.
            let next = self.random.usize(..processes);
            x = p.device_put(&x, on(next))?;
        }
        if self.random.usize(..4) == 0 {
            self.kept.push(Kept::Source { _x: source });
        }
        let moved = Moved { x, place, bytes };
        match self.random.usize(..8) {
            0 | 1 => drop(moved),
            2 => self.look(moved)?,
            3 => {
                let times = self.random.usize(..6);
                drop(polled(&moved, times));
            }
            4 => {
                let times = self.random.usize(..3);
                self.kept.push(Kept::Future(polled(&moved, times), moved));
            }
            5 => self.look_when_there(&moved),
            _ => self.kept.push(Kept::Handle(moved)),
        }
        if self.kept.len() > KEPT {
            let chosen = self.random.usize(..self.kept.len());
            let kept = self.kept.swap_remove(chosen);
            self.decide(kept)?;
        }
        Ok(())
    }

    /// Makes an object on a random process, adds numbers to it, and drops it. Checks the last sum.
    fn object(&mut self, p: &mut Program) -> Result<()> {
        let mesh = Mesh::new(
            &[("x", 1)],
            vec![DeviceId(self.random.usize(..p.processes()) as u32)],
        )
        .map_err(|error| Error::kernel(error.to_string()))?;
        let total = p.object(&mesh, |_| Ok(0.0f32))?;
        let add = method(
            like_input,
            |total: &mut f32, x: View<f32>, mut y: ViewMut<f32>| {
                *total += x[0];
                y[0] = *total;
            },
        );
        let add = p.method(add).on(&mesh).build()?;
        let sums = (1..=10).map(|i| add.call(p, &total, MpmdArray::scalar(i as f32)));
        let sums = sums.collect::<Result<Vec<_>>>()?;
        match sums[9]
            .to_host()?
            .map(|sum| sum.to_vec::<f32>())
            .transpose()?
        {
            Some(sum) if sum != [55.0] => Err(Error::kernel(format!("the sum is {sum:?}"))),
            _ => Ok(()),
        }
    }

    /// Draws a random size in bytes. Small sizes are as frequent as large ones.
    fn size(&mut self) -> usize {
        if self.random.usize(..RARE) == 0 {
            return LARGE_BYTES - self.random.usize(..64);
        }
        let order = self.random.usize(..BYTES.ilog2() as usize + 1);
        let least = 1 << order;
        (least + self.random.usize(..least)).min(BYTES)
    }

    /// Awaits and checks a held handle or future, or drops it, at random.
    fn decide(&mut self, kept: Kept) -> Result<()> {
        match (kept, self.random.usize(..3)) {
            (Kept::Handle(moved), 0) => self.look(moved),
            (Kept::Future(future, moved), 0 | 1) => {
                drop(block_on(future)?);
                self.look(moved)
            }
            (Kept::Future(mut future, moved), _) => {
                // The handle goes first: the future alone holds the array.
                drop(moved);
                let _ = future
                    .as_mut()
                    .poll(&mut TaskContext::from_waker(Waker::noop()));
                Ok(())
            }
            (Kept::Handle(_) | Kept::Source { .. }, _) => Ok(()),
        }
    }

    fn look(&mut self, moved: Moved) -> Result<()> {
        self.awaited += 1;
        self.awaited_here += usize::from(!moved.x.is_fully_remote());
        let Moved { x, place, bytes } = moved;
        let x = block_on(x.into_future())?;
        let Some(values) = x.to_host()? else {
            return Ok(());
        };
        check(values.bytes(), &self.pattern[place..place + bytes])?;
        self.looked_at.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn look_when_there(&mut self, moved: &Moved) {
        self.awaited += 1;
        self.awaited_here += usize::from(!moved.x.is_fully_remote());
        let Moved { x, place, bytes } = moved.clone();
        let (pattern, looked_at) = (self.pattern.clone(), self.looked_at.clone());
        x.then(move |values| {
            // A wrong array is missing in the count, and `settle` waits for it in vain.
            let right =
                |values: &HostArray| check(values.bytes(), &pattern[place..place + bytes]).is_ok();
            if values.as_ref().is_ok_and(right) {
                looked_at.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Drops or awaits everything that is held, and waits until no memory is in use. All processes
    /// call this at the same point of the program. Operations that have not begun use no memory
    /// yet: their leaks are found at the next such point.
    fn settle(&mut self, p: &Program) -> Result<()> {
        while let Some(kept) = self.kept.pop() {
            self.decide(kept)?;
        }
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let memory = p.memory();
            let looked_at = self.looked_at.load(Ordering::Relaxed);
            if memory.live + memory.host_live == 0 && looked_at == self.awaited_here {
                return Ok(());
            }
            if Instant::now() > until {
                let missing = self.awaited_here - looked_at;
                let message =
                    format!("nobody holds anything, {missing} arrays are missing, {memory:?}");
                return Err(Error::kernel(message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn on(process: usize) -> Sharding {
    Sharding::single_device(DeviceId(process as u32))
}

fn polled(moved: &Moved, times: usize) -> Pin<Box<ArrayFuture>> {
    let mut future = Box::pin(moved.x.clone().into_future());
    for _ in 0..times {
        // A future that has ended must not be polled again.
        if future
            .as_mut()
            .poll(&mut TaskContext::from_waker(Waker::noop()))
            .is_ready()
        {
            break;
        }
        std::thread::yield_now();
    }
    future
}

fn check(found: &[u8], expected: &[u8]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let at = found
        .iter()
        .zip(expected)
        .position(|(found, expected)| found != expected);
    let (found, expected) = (found.len(), expected.len());
    Err(Error::kernel(format!(
        "WRONG data at {at:?} of {found} bytes, expected {expected}"
    )))
}
