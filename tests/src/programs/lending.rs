//! Arrays that are transferred without copies, held, lent on, changed in place and dropped, all at
//! random.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, Jit, ProcessId};

use super::Say;
use super::soak::resident_bytes;
use crate::random;

/// Minimum bytes of an array. `MOST_BYTES` is the maximum.
const LEAST_BYTES: usize = 8;
const MOST_BYTES: usize = 4 << 20;

/// Number of different sizes in one run.
const SIZES: usize = 64;

/// One array in `LARGE` has any size, one in [`MIDDLE`] has at most [`MIDDLE_BYTES`], and the
/// others have at most [`SMALL_BYTES`].
const LARGE: usize = 400;
const MIDDLE: usize = 8;
const MIDDLE_BYTES: usize = 64 << 10;
const SMALL_BYTES: usize = 8 << 10;

/// Number of offsets in the random pattern at which an array's contents can begin.
const PLACES: usize = 1 << 16;

/// Maximum number of arrays that are held after each transfer.
const KEPT: usize = 48;

/// Number of arrays that are made between two points at which none is held.
const PERIOD: usize = 2000;

/// Limits the lead of the program to 128 unfinished operations, so that a drop of an array can meet
/// an operation in any state.
pub(super) fn long_lead(builder: Builder) -> Builder {
    builder.run_ahead(128, 64 << 20)
}

/// Runs `lending HAND-OVERS SEED TIME_LIMIT`: moves this many arrays from one process to another.
/// The time limit for memory to come back is in seconds. All bits of the checked arrays are
/// compared; wrong data is printed as `WRONG`, even if the program ends with another error.
///
/// After each fifth of the hand-overs, prints the memory in use. At the end, prints the number of
/// arrays that were checked on this process and on all processes.
pub(super) fn lend(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let number = |text: &&str| {
        text.parse::<usize>()
            .map_err(|error| Error::kernel(error.to_string()))
    };
    let numbers = args.iter().map(number).collect::<Result<Vec<usize>>>()?;
    let [hand_overs, seed, peer_timeout] = numbers[..] else {
        return Err(Error::kernel("lending HAND-OVERS SEED TIME_LIMIT"));
    };
    let mut lending = Lending::new(p, seed as u64, Duration::from_secs(peer_timeout as u64))?;
    let end = lending.run(p, hand_overs, say);
    if end.is_err() {
        // Held arrays are right even after an unwanted end. Meanwhile other processes may have died
        // and memory come back.
        std::thread::sleep(Duration::from_millis(200));
        for kept in &lending.kept {
            if let Ok(Some(values)) = kept.x.to_host() {
                kept.expected.check(values.bytes())?;
            }
        }
    }
    end
}

struct Lending {
    random: Rng,
    /// Time limit for memory without a holder to become free.
    peer_timeout: Duration,
    sizes: [Vec<usize>; 3],
    pattern: Arc<Vec<u8>>,
    /// The shardings of arrays on one process, by process number.
    on: Vec<Sharding>,
    /// The kernels that flip an array, by process number.
    flip: Vec<Jit<Flip>>,
    kept: Vec<Kept>,
    handed_over: usize,
    /// Number of arrays that this process has compared, including comparisons in callbacks.
    looked_at: Arc<AtomicUsize>,
    /// Number of arrays that all processes together compare, each on its owner.
    awaited: usize,
    /// Number of arrays to compare whose owner is this process.
    awaited_here: usize,
}

struct Kept {
    x: MpmdArray,
    expected: Expected,
}

/// The contents that an array should have.
#[derive(Clone)]
struct Expected {
    pattern: Arc<Vec<u8>>,
    /// Offset of the contents in the pattern, in bytes.
    place: usize,
    bytes: usize,
    /// Number of times that all bits of the array were flipped.
    flips: usize,
}

impl Lending {
    fn new(p: &mut Program, seed: u64, peer_timeout: Duration) -> Result<Self> {
        let mut random = Rng::with_seed(seed);
        let mut sizes = |most: usize| -> Vec<usize> {
            let mut size = || {
                let least = LEAST_BYTES << random.usize(..(most / LEAST_BYTES).ilog2() as usize);
                least + random.usize(..least)
            };
            (0..SIZES).map(|_| size()).collect()
        };
        let sizes = [sizes(SMALL_BYTES), sizes(MIDDLE_BYTES), sizes(MOST_BYTES)];
        let meshes = p.mesh(&[("process", p.processes())])?.split("process")?;
        let mut flip = Vec::new();
        for mesh in &meshes {
            flip.push(
                p.jit(Flip)
                    .on(mesh)
                    .outputs(mesh.replicated())
                    .donate("")
                    .build()?,
            );
        }
        Ok(Self {
            random,
            peer_timeout,
            sizes,
            pattern: Arc::new(random::bytes(8, MOST_BYTES + PLACES)),
            on: meshes.iter().map(|mesh| mesh.replicated()).collect(),
            flip,
            kept: Vec::new(),
            handed_over: 0,
            looked_at: Arc::default(),
            awaited: 0,
            awaited_here: 0,
        })
    }

    fn run(&mut self, p: &mut Program, hand_overs: usize, say: &mut Say<'_>) -> Result<()> {
        let mut reported = 0;
        for i in 1.. {
            self.one(p)?;
            if i % PERIOD == 0 {
                self.settle(p)?;
                p.step_end()?;
            }
            if i % 100 == 0 {
                say(format!("array {i}"));
            }
            if self.handed_over * 5 >= (reported + 1) * hand_overs {
                reported += 1;
                self.settle(p)?;
                say(memory_use(reported, p));
                if reported == 5 {
                    break;
                }
            }
        }
        say(format!(
            "looked at {} of {}",
            self.looked_at.load(Ordering::Relaxed),
            self.awaited
        ));
        Ok(())
    }

    /// Makes one array and moves it one to three times. All processes draw the same random numbers,
    /// so that they issue the same operations.
    fn one(&mut self, p: &mut Program) -> Result<()> {
        let processes = p.processes();
        let from = self.random.usize(..processes);
        let mut at = from;
        let expected = self.expected();
        let fill = expected.clone();
        let mut x = p.array_from_fn(
            u8s([expected.bytes]),
            &self.on[from],
            move |_: &Region, mut view: ViewMut<'_>| {
                view.as_mut_slice::<u8>()?.copy_from_slice(fill.unchanged());
                Ok(())
            },
        )?;
        // Most arrays go to one other process, some on to a third and a fourth, perhaps before they
        // have arrived.
        let hops = [1, 1, 1, 2, 2, 3][self.random.usize(..6)];
        for _ in 0..hops {
            at = (at + 1 + self.random.usize(..processes - 1)) % processes;
            let next = p.device_put(&x, &self.on[at])?;
            self.handed_over += 1;
            let before = Kept {
                x: std::mem::replace(&mut x, next),
                expected: expected.clone(),
            };
            match self.random.usize(..4) {
                0 => self.kept.push(before),
                1 => self.look_when_there(&before),
                _ => drop(before),
            }
        }
        let mut here = Kept { x, expected };
        if self.random.usize(..4) == 0 {
            // Its owner and others may still have it: none of them sees the change.
            let Kept { x, mut expected } = here;
            expected.flips += 1;
            here = Kept {
                x: self.flip[at].call(p, x)?,
                expected,
            };
        }
        match self.random.usize(..10) {
            0..3 => drop(here),
            3 => self.look(here)?,
            4..7 => self.look_when_there(&here),
            _ => self.kept.push(here),
        }
        while self.kept.len() > KEPT {
            let chosen = self.random.usize(..self.kept.len());
            let kept = self.kept.swap_remove(chosen);
            match self.random.usize(..3) {
                0 => self.look(kept)?,
                1 => self.look_when_there(&kept),
                _ => drop(kept.x.into_future()),
            }
        }
        Ok(())
    }

    fn expected(&mut self) -> Expected {
        let sizes = match self.random.usize(..LARGE) {
            0 => &self.sizes[2],
            i if i % MIDDLE == 0 => &self.sizes[1],
            _ => &self.sizes[0],
        };
        let bytes = sizes[self.random.usize(..SIZES)];
        Expected {
            pattern: self.pattern.clone(),
            place: self.random.usize(..PLACES),
            bytes,
            flips: 0,
        }
    }

    fn look(&mut self, kept: Kept) -> Result<()> {
        self.awaited += 1;
        self.awaited_here += usize::from(!kept.x.is_fully_remote());
        let Some(values) = kept.x.to_host()? else {
            return Ok(());
        };
        kept.expected.check(values.bytes())?;
        self.looked_at.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn look_when_there(&mut self, kept: &Kept) {
        self.awaited += 1;
        self.awaited_here += usize::from(!kept.x.is_fully_remote());
        let (expected, looked_at) = (kept.expected.clone(), self.looked_at.clone());
        kept.x.then(move |values| {
            // A wrong array is missing in the count, and `settle` waits for it in vain.
            if values
                .as_ref()
                .is_ok_and(|values| expected.check(values.bytes()).is_ok())
            {
                looked_at.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Checks all held arrays, and waits until no memory is in use or lent. Fails if that takes
    /// longer than `peer_timeout`. All processes call this at the same point of the program.
    fn settle(&mut self, p: &mut Program) -> Result<()> {
        while let Some(kept) = self.kept.pop() {
            self.look(kept)?;
        }
        let until = Instant::now() + self.peer_timeout;
        loop {
            let memory = p.memory();
            let looked_at = self.looked_at.load(Ordering::Relaxed);
            if memory.live + memory.host_live + memory.lent == 0 && looked_at == self.awaited_here {
                return Ok(());
            }
            if Instant::now() > until {
                // If a process has died, that is the error. Otherwise no process answers, or all
                // have the same problem.
                for process in 0..p.processes() {
                    p.broadcast_value(ProcessId(process as u32), 0, || Ok(0))?;
                }
                let missing = self.awaited_here - looked_at;
                let message =
                    format!("nobody holds anything, {missing} arrays are missing, {memory:?}");
                return Err(Error::kernel(message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Expected {
    fn unchanged(&self) -> &[u8] {
        &self.pattern[self.place..self.place + self.bytes]
    }

    fn check(&self, found: &[u8]) -> Result<()> {
        let expected = self.unchanged();
        let mask = if self.flips.is_multiple_of(2) {
            0
        } else {
            0xff
        };
        let is_right = |found: u8, expected: u8| found == expected ^ mask;
        let mut pairs = found.iter().zip(expected);
        if found.len() == expected.len()
            && pairs
                .clone()
                .all(|(found, expected)| is_right(*found, *expected))
        {
            return Ok(());
        }
        let at = pairs.position(|(found, expected)| !is_right(*found, *expected));
        let wrong = format!(
            "WRONG data at {at:?} of {} bytes, expected {}",
            found.len(),
            expected.len()
        );
        // Printed here too: the error of a callback goes nowhere, and another error may end the
        // program.
        eprintln!("{wrong}");
        Err(Error::kernel(wrong))
    }
}

/// A kernel that flips every bit, in place.
struct Flip;

impl Kernel for Flip {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()).alias("", ""))
    }

    fn run(&self, _: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        y.as_mut_slice::<u8>()?
            .iter_mut()
            .for_each(|byte| *byte = !*byte);
        Ok(())
    }
}

/// Runs `holding`: process 0 lends an array to process 1, which checks it again and again. Process
/// 0 prints its live and lent memory until all lent memory has come back.
pub(super) fn hold(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let pattern = Arc::new(random::bytes(8, MOST_BYTES));
    let fill = pattern.clone();
    let x = p.array_from_fn(
        u8s([MOST_BYTES]),
        on(0),
        move |_: &Region, mut view: ViewMut<'_>| {
            view.as_mut_slice::<u8>()?.copy_from_slice(&fill);
            Ok(())
        },
    )?;
    // Lent before the first look: on a busy machine the owner would otherwise find nothing lent
    // yet, and report that all is back.
    x.block_until_ready()?;
    let y = p.device_put(&x, on(1))?;
    drop(x);
    y.block_until_ready()?;
    for look in 0.. {
        match y.to_host()? {
            Some(values) if values.bytes()[..] == pattern[..] => say(format!("look {look}: right")),
            Some(_) => say(format!("look {look}: WRONG")),
            None => {
                let memory = p.memory();
                say(format!(
                    "look {look}: live {} lent {}",
                    memory.live, memory.lent
                ));
                if look > 0 && memory.live + memory.lent == 0 {
                    say("all is back".to_owned());
                    break;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn memory_use(fifth: usize, p: &Program) -> String {
    let memory = p.memory();
    let (resident, segments) = (resident_bytes(), segments());
    format!(
        "memory {fifth}: mapped {} resident {resident} segments {segments}",
        memory.mapped
    )
}

/// Returns the number of mappings and file descriptors of shared memory in this process, for its
/// own memory and that of other processes.
fn segments() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mapped = maps
        .lines()
        .filter(|line| line.contains("memfd:mpmd"))
        .count();
    let open = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter(|entry| {
            let link = entry
                .as_ref()
                .ok()
                .and_then(|entry| std::fs::read_link(entry.path()).ok());
            link.is_some_and(|link| link.to_string_lossy().contains("memfd:mpmd"))
        });
    mapped + open.count()
}

fn on(process: usize) -> Sharding {
    Sharding::single_device(DeviceId(process as u32))
}
