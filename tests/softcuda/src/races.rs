//! Whether accesses of streams to the same bytes have an order.
//!
//! Each stream has a clock that says how much of every stream is known to come before what is
//! issued on it next; the host has one too. Whatever gives an order joins clocks: issuing (the
//! stream learns what the host has seen), a wait for an event, a host function, a wait or a look of
//! the host. Two accesses to the same bytes, one of them a write, whose clocks say nothing of one
//! another, are a race. It is found by what was issued, not by what happened: also when both
//! chanced to run in the order that was meant.
//!
//! All threads of the host count as one, as what they tell one another is not seen. Memory of other
//! processes is not looked at, for the same reason; nor is a kernel whose program did not say what
//! it uses.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::device::Context;
use crate::handles::Handle;
use crate::memory::{Origin, space};
use crate::settings::settings;
use crate::stream::Stream;

/// Accesses of one allocation above which those are dropped that everything comes after.
const MANY: usize = 64;

static HOST: Mutex<Clock> = Mutex::new(Clock(Vec::new()));
/// Accesses that later ones may be in conflict with, by number of the allocation.
static ACCESSES: LazyLock<Mutex<HashMap<u64, Vec<Access>>>> = LazyLock::new(Mutex::default);
static RACES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static NOTES: RefCell<Vec<(Handle, Use)>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of device memory that work reads or writes.
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

/// How much of each stream is known to have happened, by the stream's number.
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

    /// Goes one further on a stream, and says how far that is.
    fn step(&mut self, stream: usize) -> u64 {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] += 1;
        self.0[stream]
    }
}

/// A use, and when it was.
#[derive(Clone, Debug)]
struct Access {
    what: &'static str,
    stream: usize,
    step: u64,
    used: Use,
}

/// A number for a new stream.
pub(crate) fn new_stream() -> usize {
    static STREAMS: AtomicUsize = AtomicUsize::new(1);
    STREAMS.fetch_add(1, Ordering::Relaxed)
}

/// Notes that work with these uses was issued.
pub(crate) fn used(stream: &Stream, what: &'static str, uses: &[Use]) {
    let mut clock = stream.clock.lock();
    clock.join(&HOST.lock());
    let step = clock.step(stream.number);
    for used in uses {
        let access = Access { what, stream: stream.number, step, used: *used };
        if let Some(found) =
            space().find(used.address).filter(|found| found.origin != Origin::Import)
        {
            let mut all = ACCESSES.lock();
            enter(all.entry(found.number).or_default(), access, &clock, found.address);
        }
    }
}

/// Compares an access with the earlier ones of its allocation, and keeps what later ones have to be
/// compared with.
fn enter(earlier: &mut Vec<Access>, new: Access, clock: &Clock, base: u64) {
    let ordered = |old: &Access| old.step <= clock.of(old.stream);
    for old in earlier.iter() {
        let overlap = old.used.address < new.used.end() && new.used.address < old.used.end();
        if overlap && (old.used.write || new.used.write) && !ordered(old) {
            report(old, &new, base);
        }
    }
    // Whoever comes after the new access comes after these too.
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
         on stream {} {} bytes \
         {}..{} of it; nothing says which is first",
        new.what,
        new.stream,
        new.used.doing(),
        new.used.address - base,
        new.used.end() - base,
        old.what,
        old.stream,
        old.used.doing(),
        old.used.address - base,
        old.used.end() - base,
    );
    if settings().abort_on_race {
        std::process::abort();
    }
}

/// What comes before work that is issued on a stream now.
pub(crate) fn now(stream: &Stream) -> Clock {
    let mut clock = stream.clock.lock();
    clock.join(&HOST.lock());
    clock.clone()
}

/// What comes on a stream from now on comes after what a clock says.
pub(crate) fn follows(stream: &Stream, clock: &Clock) {
    stream.clock.lock().join(clock);
}

/// What comes before work that is issued on any stream of a context now.
pub(crate) fn now_of_all(context: &Context) -> Clock {
    let mut all = Clock::default();
    for stream in context.streams() {
        all.join(&now(&stream));
    }
    all
}

/// The host has seen that what a clock says has happened.
pub(crate) fn host_saw(clock: &Clock) {
    HOST.lock().join(clock);
}

/// Forgets the accesses of an allocation that is gone.
pub(crate) fn forget(allocation: u64) {
    ACCESSES.lock().remove(&allocation);
}

/// The uses that this thread told of for its next launch on a stream.
pub(crate) fn noted(stream: Handle) -> Vec<Use> {
    NOTES.with_borrow_mut(|notes| {
        notes.extract_if(.., |(on, _)| *on == stream).map(|(_, used)| used).collect()
    })
}

/// Tells of bytes that the next kernel which the calling thread launches on a stream reads (0) or
/// writes.
#[unsafe(no_mangle)]
extern "C" fn softcuda_note_use(stream: Handle, address: u64, bytes: u64, write: i32) {
    let used = Use { address, bytes, write: write != 0 };
    if bytes > 0 {
        NOTES.with_borrow_mut(|notes| notes.push((stream, used)));
    }
}

/// How many races were found in this process.
#[unsafe(no_mangle)]
extern "C" fn softcuda_races() -> u64 {
    RACES.load(Ordering::SeqCst)
}
