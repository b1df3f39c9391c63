//! Detection of races: accesses of streams to the same bytes without an order between them.
//!
//! Each stream has a vector clock: for every stream, the amount of its work that precedes the next
//! work issued here. The host has a clock too. Every operation that creates an order joins clocks:
//! issuing (the stream learns the host's clock), a wait for an event, a host function, and a wait
//! or query of the host. Two accesses to the same bytes, one of them a write, are a race if neither
//! clock covers the other. Detection depends on the issued work, not on the actual timing. So a
//! race is found even if both accesses happened to run in the intended order.
//!
//! All threads of the host count as one, because synchronization between them is not visible here.
//! Memory of other processes is not checked, for the same reason. A kernel is not checked unless
//! its program declared its accesses.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::device::Context;
use crate::device::memory::{Origin, space};
use crate::device::stream::Stream;
use crate::handles::Handle;
use crate::settings::settings;

/// Number of recorded accesses per allocation above which old ones are dropped: those whose
/// completion the host has seen.
const MANY: usize = 64;

static HOST: Mutex<Clock> = Mutex::new(Clock(Vec::new()));
/// Recorded accesses that may conflict with later ones, by the number of their allocation.
static ACCESSES: LazyLock<Mutex<HashMap<u64, Vec<Access>>>> = LazyLock::new(Mutex::default);
static RACES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static NOTES: RefCell<Vec<(Handle, Use)>> = const { RefCell::new(Vec::new()) };
}

/// A range of device memory that a piece of work reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
}

impl Use {
    fn end(&self) -> u64 {
        self.address + self.bytes
    }

    fn doing(&self) -> &'static str {
        if self.write { "writes" } else { "reads" }
    }
}

/// A vector clock: for each stream number, the number of that stream's pieces of work that are
/// known to come before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    fn of(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Advances the clock by one step on a stream, and returns the new step.
    fn step(&mut self, stream: usize) -> u64 {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] += 1;
        self.0[stream]
    }
}

/// An access of one piece of work to one memory range. `name` names the work in messages, `step` is
/// its number in its stream.
#[derive(Clone, Debug)]
struct Access {
    name: &'static str,
    stream: usize,
    step: u64,
    used: Use,
}

/// Returns a number for a new stream, from 1, that is unique in this process.
pub(crate) fn new_stream() -> usize {
    static STREAMS: AtomicUsize = AtomicUsize::new(1);
    STREAMS.fetch_add(1, Ordering::Relaxed)
}

/// Records that work with these accesses is issued on a stream, after all work that the host has
/// seen done. Counts and prints races with earlier accesses.
pub(crate) fn used(stream: &Stream, name: &'static str, uses: &[Use]) {
    let mut clock = stream.clock.lock();
    clock.join(&HOST.lock());
    let step = clock.step(stream.number);
    for used in uses {
        let access = Access {
            name,
            stream: stream.number,
            step,
            used: *used,
        };

        if let Some(found) = space()
            .find(used.address)
            .filter(|found| found.origin != Origin::Import)
        {
            let mut all = ACCESSES.lock();
            enter(
                all.entry(found.number).or_default(),
                access,
                &clock,
                found.address,
            );
        }
    }
}

/// Reports the races of a new access with the recorded accesses to its allocation. Then records it,
/// and drops accesses that no later one can conflict with. `base` is the allocation's address.
fn enter(earlier: &mut Vec<Access>, new: Access, clock: &Clock, base: u64) {
    let ordered = |old: &Access| old.step <= clock.of(old.stream);
    for old in earlier.iter() {
        let overlap = old.used.address < new.used.end() && new.used.address < old.used.end();
        if overlap && (old.used.write || new.used.write) && !ordered(old) {
            report(old, &new, base);
        }
    }

    // Work ordered after the new access is ordered after these too.
    earlier.retain(|old| {
        let covered = new.used.address <= old.used.address && old.used.end() <= new.used.end();
        !(covered && ordered(old) && (new.used.write || !old.used.write))
    });

    if earlier.len() > MANY {
        let host = HOST.lock();
        earlier.retain(|old| old.step > host.of(old.stream));
    }
    earlier.push(new);
}

fn report(old: &Access, new: &Access, base: u64) {
    RACES.fetch_add(1, Ordering::SeqCst);
    eprintln!(
        "softcuda: race: {} on stream {} {} bytes {}..{} of the allocation at {base:#x}, and {} \
         on stream {} {} bytes {}..{} of it, with no order between them",
        new.name,
        new.stream,
        new.used.doing(),
        new.used.address - base,
        new.used.end() - base,
        old.name,
        old.stream,
        old.used.doing(),
        old.used.address - base,
        old.used.end() - base,
    );
    if settings().abort_on_race {
        std::process::abort();
    }
}

/// Returns the clock of the work that precedes anything issued on a stream now: earlier work of the
/// stream, and work that the host has seen done.
pub(crate) fn now(stream: &Stream) -> Clock {
    let mut clock = stream.clock.lock();
    clock.join(&HOST.lock());
    clock.clone()
}

/// Orders later work of a stream after the work in `clock`.
pub(crate) fn follows(stream: &Stream, clock: &Clock) {
    stream.clock.lock().join(clock);
}

/// Returns the clock of the work that precedes anything issued on every stream of a context now:
/// work of all its streams, and work that the host has seen done.
pub(crate) fn now_of_all(context: &Context) -> Clock {
    let mut all = Clock::default();
    for stream in context.streams() {
        all.join(&now(&stream));
    }
    all
}

/// Records that the host has seen all work in `clock` done. Work that is issued later on any stream
/// comes after it.
pub(crate) fn host_saw(clock: &Clock) {
    HOST.lock().join(clock);
}

/// Drops the recorded accesses of the allocation with this number.
pub(crate) fn forget(allocation: u64) {
    ACCESSES.lock().remove(&allocation);
}

/// Removes and returns the accesses that the calling thread has declared for its next launch on a
/// stream.
pub(crate) fn noted(stream: Handle) -> Vec<Use> {
    NOTES.with_borrow_mut(|notes| {
        notes
            .extract_if(.., |(on, _)| *on == stream)
            .map(|(_, used)| used)
            .collect()
    })
}

/// Declares that the calling thread's next kernel on a stream reads (`write` is 0) or writes
/// `bytes` bytes from `address` on. The kernel's launch checks this access for races.
#[unsafe(no_mangle)]
extern "C" fn softcuda_note_use(stream: Handle, address: u64, bytes: u64, write: i32) {
    let used = Use {
        address,
        bytes,
        write: write != 0,
    };
    if bytes > 0 {
        NOTES.with_borrow_mut(|notes| notes.push((stream, used)));
    }
}

/// Returns the number of races found in this process.
#[unsafe(no_mangle)]
extern "C" fn softcuda_races() -> u64 {
    RACES.load(Ordering::SeqCst)
}
