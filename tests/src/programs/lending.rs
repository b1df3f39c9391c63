//! Arrays that are handed to others, held, passed on, changed in place and dropped, all at random.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, Jit, ProcessId};

use super::Say;
use super::soak::resident_bytes;
use crate::random::Random;

/// Of an array, at least and at most.
const LEAST_BYTES: usize = 8;
const MOST_BYTES: usize = 4 << 20;

/// Different sizes in one run.
const SIZES: usize = 64;

/// One array of so many is of any size, one of [`MIDDLE`] at most [`MIDDLE_BYTES`], the others
/// [`SMALL_BYTES`].
const LARGE: usize = 400;
const MIDDLE: usize = 8;
const MIDDLE_BYTES: usize = 64 << 10;
const SMALL_BYTES: usize = 8 << 10;

/// Arrays are parts of one pattern, from so many places.
const PLACES: usize = 1 << 16;

/// Arrays that are held.
const KEPT: usize = 48;

/// Arrays that are made from one point at which nothing is held to the next.
const PERIOD: usize = 2000;

/// So that every drop can meet an operation in any state.
pub(super) fn long_lead(builder: Builder) -> Builder {
    builder.run_ahead(128, 64 << 20)
}

/// `lending HAND-OVERS SEED PATIENCE`: so many arrays go from one process to another. What is
/// looked at is compared to the bit. Says after each fifth of them what is in use, and at the end
/// how many arrays were looked at, here and by all processes. Whatever is wrong is said to be
/// `WRONG`, also where the program ends with another error.
pub(super) fn lend(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let number =
        |text: &&str| text.parse::<usize>().map_err(|error| Error::kernel(error.to_string()));
    let numbers = args.iter().map(number).collect::<Result<Vec<usize>>>()?;
    let [hand_overs, seed, patience] = numbers[..] else {
        return Err(Error::kernel("lending HAND-OVERS SEED PATIENCE"));
    };
    let mut lending = Lending::new(p, seed as u64, Duration::from_secs(patience as u64))?;
    let end = lending.run(p, hand_overs, say);
    if end.is_err() {
        // What somebody has is right also after an end that nobody wanted. Meanwhile others may
        // have died and memory come back.
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
    random: Random,
    /// How long it may take until what nobody holds is not in use either.
    patience: Duration,
    sizes: [Vec<usize>; 3],
    pattern: Arc<Vec<u8>>,
    /// Each process.
    on: Vec<Sharding>,
    /// On each process.
    flip: Vec<Jit<Flip>>,
    kept: Vec<Kept>,
    handed_over: usize,
    /// Arrays that this process has compared. Callbacks count too.
    looked_at: Arc<AtomicUsize>,
    /// Arrays that were to be compared where they are.
    awaited: usize,
    /// Those of them that are here.
    awaited_here: usize,
}

struct Kept {
    x: MpmdArray,
    expected: Expected,
}

/// What an array should hold.
#[derive(Clone)]
struct Expected {
    pattern: Arc<Vec<u8>>,
    /// From which place of the pattern on.
    place: usize,
    bytes: usize,
    /// How often it was changed.
    flips: usize,
}

impl Lending {
    fn new(p: &mut Program, seed: u64, patience: Duration) -> Result<Self> {
        let mut random = Random::new(seed);
        let mut sizes = |most: usize| -> Vec<usize> {
            let mut size = || {
                let least = LEAST_BYTES << random.below((most / LEAST_BYTES).ilog2() as usize);
                least + random.below(least)
            };
            (0..SIZES).map(|_| size()).collect()
        };
        let sizes = [sizes(SMALL_BYTES), sizes(MIDDLE_BYTES), sizes(MOST_BYTES)];
        let meshes = p.mesh(&[("process", p.processes())])?.split("process")?;
        let mut flip = Vec::new();
        for mesh in &meshes {
            flip.push(p.jit(Flip).on(mesh).outputs(mesh.replicated()).donate("").build()?);
        }
        Ok(Self {
            random,
            patience,
            sizes,
            pattern: Arc::new(Random::new(8).bytes(MOST_BYTES + PLACES)),
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
        say(format!("looked at {} of {}", self.looked_at.load(Ordering::Relaxed), self.awaited));
        Ok(())
    }

    /// Draws the same on every process: what is issued follows from it.
    fn one(&mut self, p: &mut Program) -> Result<()> {
        let processes = p.processes();
        let from = self.random.below(processes);
        let mut at = from;
        let expected = self.expected();
        let fill = expected.clone();
        let mut x = p.make(
            u8s([expected.bytes]),
            &self.on[from],
            move |_: &Region, mut view: ViewMut<'_>| {
                view.as_mut_slice::<u8>()?.copy_from_slice(fill.unchanged());
                Ok(())
            },
        )?;
        // Most go to one other, some to a third and a fourth: from where they may not have arrived
        // yet.
        let hops = [1, 1, 1, 2, 2, 3][self.random.below(6)];
        for _ in 0..hops {
            at = (at + 1 + self.random.below(processes - 1)) % processes;
            let next = p.device_put(&x, &self.on[at])?;
            self.handed_over += 1;
            let before = Kept { x: std::mem::replace(&mut x, next), expected: expected.clone() };
            match self.random.below(4) {
                0 => self.kept.push(before),
                1 => self.look_when_there(&before),
                _ => drop(before),
            }
        }
        let mut here = Kept { x, expected };
        if self.random.below(4) == 0 {
            // Its owner may still have it, and so may others: none of them sees the change.
            let Kept { x, mut expected } = here;
            expected.flips += 1;
            here = Kept { x: self.flip[at].call(p, x)?, expected };
        }
        match self.random.below(10) {
            0..3 => drop(here),
            3 => self.look(here)?,
            4..7 => self.look_when_there(&here),
            _ => self.kept.push(here),
        }
        while self.kept.len() > KEPT {
            let chosen = self.random.below(self.kept.len());
            let kept = self.kept.swap_remove(chosen);
            match self.random.below(3) {
                0 => self.look(kept)?,
                1 => self.look_when_there(&kept),
                _ => drop(kept.x.into_future()),
            }
        }
        Ok(())
    }

    fn expected(&mut self) -> Expected {
        let sizes = match self.random.below(LARGE) {
            0 => &self.sizes[2],
            i if i % MIDDLE == 0 => &self.sizes[1],
            _ => &self.sizes[0],
        };
        let bytes = sizes[self.random.below(SIZES)];
        Expected {
            pattern: self.pattern.clone(),
            place: self.random.below(PLACES),
            bytes,
            flips: 0,
        }
    }

    fn look(&mut self, kept: Kept) -> Result<()> {
        self.awaited += 1;
        self.awaited_here += usize::from(!kept.x.is_fully_remote());
        let Some(values) = kept.x.to_host()? else { return Ok(()) };
        kept.expected.check(values.bytes())?;
        self.looked_at.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn look_when_there(&mut self, kept: &Kept) {
        self.awaited += 1;
        self.awaited_here += usize::from(!kept.x.is_fully_remote());
        let (expected, looked_at) = (kept.expected.clone(), self.looked_at.clone());
        kept.x.then(move |values| {
            // What is wrong here is missing in the count, and waited for in vain.
            if values.as_ref().is_ok_and(|values| expected.check(values.bytes()).is_ok()) {
                looked_at.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Looks at all that is held, and waits until nothing is in use and everything lent is back. It
    /// is the same point of the program everywhere.
    fn settle(&mut self, p: &mut Program) -> Result<()> {
        while let Some(kept) = self.kept.pop() {
            self.look(kept)?;
        }
        let until = Instant::now() + self.patience;
        loop {
            let memory = p.memory();
            let looked_at = self.looked_at.load(Ordering::Relaxed);
            if memory.live + memory.host_live + memory.lent == 0 && looked_at == self.awaited_here {
                return Ok(());
            }
            if Instant::now() > until {
                // Somebody has died: then that is the error. Else nobody answers, or all have the
                // same trouble.
                for process in 0..p.processes() {
                    p.agree(ProcessId(process as u32), 0, || Ok(0))?;
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
        let mask = if self.flips.is_multiple_of(2) { 0 } else { 0xff };
        let is_right = |found: u8, expected: u8| found == expected ^ mask;
        let mut pairs = found.iter().zip(expected);
        if found.len() == expected.len()
            && pairs.clone().all(|(found, expected)| is_right(*found, *expected))
        {
            return Ok(());
        }
        let at = pairs.position(|(found, expected)| !is_right(*found, *expected));
        let wrong =
            format!("WRONG data at {at:?} of {} bytes, expected {}", found.len(), expected.len());
        // Said here too: in a callback nobody hears of the error, and another may be the program's
        // end.
        eprintln!("{wrong}");
        Err(Error::kernel(wrong))
    }
}

/// Changes every bit, in place.
struct Flip;

impl Kernel for Flip {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()).alias("", ""))
    }

    fn run(&self, _: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        y.as_mut_slice::<u8>()?.iter_mut().for_each(|byte| *byte = !*byte);
        Ok(())
    }
}

/// `holding`: process 0 hands an array over to process 1, which says again and again whether it is
/// right. Process 0 says what it has in use and lent, until it is all back.
pub(super) fn hold(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let pattern = Arc::new(Random::new(8).bytes(MOST_BYTES));
    let fill = pattern.clone();
    let x = p.make(u8s([MOST_BYTES]), &on(0), move |_: &Region, mut view: ViewMut<'_>| {
        view.as_mut_slice::<u8>()?.copy_from_slice(&fill);
        Ok(())
    })?;
    // Lent before anybody looks: on a busy machine the owner would find nothing lent yet, and call
    // that all back.
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
                say(format!("look {look}: live {} lent {}", memory.live, memory.lent));
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
    format!("memory {fifth}: mapped {} resident {resident} segments {segments}", memory.mapped)
}

/// Memory that other processes can map, or that this has mapped of others: how many mappings and
/// descriptors.
fn segments() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mapped = maps.lines().filter(|line| line.contains("memfd:mpmd")).count();
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().filter(|entry| {
        let link = entry.as_ref().ok().and_then(|entry| std::fs::read_link(entry.path()).ok());
        link.is_some_and(|link| link.to_string_lossy().contains("memfd:mpmd"))
    });
    mapped + open.count()
}

fn on(process: usize) -> Sharding {
    Sharding::single_device(DeviceId(process as u32))
}
