//! A simulated world: real threads of which one runs at a time, in an order and at times that a
//! seed decides.
//!
//! A thread of the world runs until it blocks, or until it comes to a point where another may run:
//! a lock, a wake-up, a channel operation, a new thread. There the world draws the next thread. If
//! none can run, the simulated clock jumps to the earliest deadline. So the same seed gives the
//! same run, and waiting costs nothing.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Number of simulated worlds that exist. While it is 0, a primitive of [`super`] costs one load
/// more than the real one.
static WORLDS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ME: RefCell<Option<WorldMember>> = const { RefCell::new(None) };
    /// Number of locks that this thread holds.
    static LOCKS: Cell<usize> = const { Cell::new(0) };
}

/// Identifies a thread of a simulated world.
#[derive(Clone)]
pub(super) struct WorldMember {
    world: Arc<World>,
    thread: usize,
}

/// The address of an object that threads wait for, such as a lock. It is only compared with others,
/// so a run does not depend on it.
pub(super) type Key = usize;

/// A simulated world, shared by its threads.
struct World {
    state: Mutex<WorldState>,
    /// The real time at which the world started; simulated times count from it.
    epoch: Instant,
    settings: WorldSettings,
}

/// The settings of a [simulated] world.
#[derive(Clone, Debug)]
pub struct WorldSettings {
    /// Seed of the random order of events and of the time between them.
    pub seed: u64,
    /// The simulated time after which a run is treated as hung.
    pub longest: Duration,
    /// True to keep the [log](WorldReport::log) of all events.
    pub log: bool,
}

/// The state of a simulated world, under its lock.
struct WorldState {
    random: fastrand::Rng,
    /// Simulated time since the world's start.
    now: Duration,
    threads: Vec<WorldThread>,
    /// Stops of groups of threads, including stops that have ended.
    stops: Vec<GroupStop>,
    /// FNV-1a hash of all switches between threads so far.
    history: u64,
    switches: u64,
    log: String,
    /// True once the function passed to [`simulated`] has returned.
    is_over: bool,
}

/// A pause of all threads of a group.
struct GroupStop {
    group: u32,
    /// The simulated time at which the group's threads continue.
    until: Duration,
}

/// A thread of a simulated world.
struct WorldThread {
    name: String,
    status: ThreadStatus,
    /// Notified when it is the thread's turn to run.
    turn: Arc<Condvar>,
    /// True for the one thread that is running.
    runs: bool,
    /// The group of threads that are stopped together; `None` if the thread is in no group.
    group: Option<u32>,
    /// True if the thread held locks when it last ran. It is then not stopped, because groups share
    /// locks.
    has_locks: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ThreadStatus {
    /// The thread can run.
    Ready,
    /// The thread waits for a wake-up of `key` until `until`. It becomes `Ready` by a wake-up, or
    /// `TimedOut` at that time.
    Waiting {
        key: Key,
        until: Option<Duration>,
    },
    TimedOut,
    Ended,
}

/// The report of a run in a simulated world.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorldReport {
    /// Simulated time of the run.
    pub time: Duration,
    /// Number of switches from one thread to another.
    pub switches: u64,
    /// A hash of all switches, with their times. It is the same for equal runs.
    pub history: u64,
    /// One line for each event, with its time in nanoseconds. An event is a point at which a switch
    /// is possible, the thread that continues, or a [note](note()). Empty unless
    /// [`WorldSettings::log`] is set.
    pub log: String,
}

/// Identifies the calling thread in its simulated world. Returns `None` in the real world.
#[inline]
pub(super) fn me() -> Option<WorldMember> {
    if WORLDS.load(Ordering::Relaxed) == 0 {
        None
    } else {
        find_me()
    }
}

#[cold]
fn find_me() -> Option<WorldMember> {
    // Destructors of thread-local values run in the real world.
    ME.try_with(|me| me.borrow().clone()).ok().flatten()
}

/// Runs `f` as the first thread of a new simulated world. Then waits until all other threads of the
/// world have ended. Returns the result of `f` and a report.
///
/// Exits the process with code 101 and a report on stderr if threads hang. They do if one still
/// waits after the simulated time [`longest`](WorldSettings::longest), or if all wait without a
/// deadline.
///
/// # Panics
///
/// With the panic of `f`, or if the calling thread already belongs to a world.
pub fn simulated<T>(settings: WorldSettings, f: impl FnOnce() -> T) -> (T, WorldReport) {
    assert!(me().is_none(), "a simulated world within another");
    let state = WorldState {
        random: fastrand::Rng::with_seed(settings.seed),
        now: Duration::ZERO,
        threads: Vec::new(),
        stops: Vec::new(),
        history: 0xcbf2_9ce4_8422_2325,
        switches: 0,
        log: String::new(),
        is_over: false,
    };

    let world = Arc::new(World {
        state: Mutex::new(state),
        epoch: Instant::now(),
        settings,
    });

    let me = WorldMember {
        world: world.clone(),
        thread: world.add("first", None),
    };
    world.state.lock().threads[0].runs = true;
    WORLDS.fetch_add(1, Ordering::Relaxed);
    ME.set(Some(me.clone()));

    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    world.state.lock().is_over = true;
    while me.world.state.lock().threads[1..]
        .iter()
        .any(|thread| thread.status != ThreadStatus::Ended)
    {
        me.wait(world.ends(), None);
    }
    ME.set(None);
    WORLDS.fetch_sub(1, Ordering::Relaxed);

    let mut state = world.state.lock();
    let log = std::mem::take(&mut state.log);
    let WorldState {
        now: time,
        switches,
        history,
        ..
    } = *state;
    let report = WorldReport {
        time,
        switches,
        history,
        log,
    };

    match result {
        Ok(result) => (result, report),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Writes a note into the log of the calling thread's simulated world, if that world keeps a log.
pub fn note(text: fmt::Arguments<'_>) {
    if let Some(WorldMember { world, .. }) = me() {
        world.state.lock().note(text, &world);
    }
}

/// Puts the calling thread into a group of threads that can be [stopped](stop_group) together.
/// Threads that it starts later belong to the group too. Does nothing outside a simulated world.
pub fn join_group(group: u32) {
    if let Some(me) = me() {
        me.join_group(group);
    }
}

/// Stops all threads of a group for `time`, as a stop signal would stop a process. Does nothing
/// outside a simulated world.
pub fn stop_group(group: u32, time: Duration) {
    if let Some(me) = me() {
        me.stop_group(group, time);
    }
}

impl WorldMember {
    /// Returns the simulated time.
    pub(super) fn now(&self) -> Instant {
        self.world.epoch + self.world.state.lock().now
    }

    /// Returns the simulated time plus `time`. `None`, which stands for never, if an [`Instant`]
    /// cannot represent it.
    pub(super) fn after(&self, time: Duration) -> Option<Instant> {
        self.now().checked_add(time)
    }

    /// Lets the world choose the thread that runs next, which may be this one. Simulated time may
    /// pass.
    #[track_caller]
    pub(super) fn pause(&self) {
        let mut state = self.world.state.lock();
        state.note(
            format_args!("thread {} at {}", self.thread, Location::caller()),
            &self.world,
        );

        let drawn = state.random.u16(..);
        // Now and then a thread is slow, so that time limits end while others could run.
        let slow = match drawn {
            0 => Duration::from_millis(state.random.u64(1..200)),
            1..2048 => Duration::from_nanos(state.random.u64(100..50_000)),
            _ => Duration::ZERO,
        };
        if !slow.is_zero() {
            state.now += slow;
            self.world.expire(&mut state);
        }

        // Mostly the same thread goes on: a change costs two system calls.
        if drawn.is_multiple_of(8) {
            self.world.switch(&mut state, self.thread);
        }
    }

    /// Counts a lock that this thread has taken.
    pub(super) fn has_locked(&self) {
        LOCKS.set(LOCKS.get() + 1);
    }

    /// Counts a lock that this thread has released, and wakes the threads that wait for it.
    pub(super) fn has_unlocked(&self, key: Key) {
        LOCKS.set(LOCKS.get() - 1);
        self.wake_all(key);
    }

    /// Puts this thread into a group. Threads that it starts later belong to the group too.
    fn join_group(&self, group: u32) {
        self.world.state.lock().threads[self.thread].group = Some(group);
    }

    /// Stops all threads of a group for `time`. A thread that holds locks stops once it has
    /// released them.
    fn stop_group(&self, group: u32, time: Duration) {
        let mut state = self.world.state.lock();
        let until = state.now.saturating_add(time);
        state.note(
            format_args!("group {group} stops for {time:?}"),
            &self.world,
        );

        state.stops.push(GroupStop { group, until });
        self.world.switch(&mut state, self.thread);
    }

    /// Lets another thread run, if one can.
    pub(super) fn give_way(&self) {
        let mut state = self.world.state.lock();
        // Time passes for a thread that polls, or it could poll forever.
        state.now += Duration::from_micros(1);
        self.world.expire(&mut state);
        self.world.switch(&mut state, self.thread);
    }

    /// Waits for a wake-up of `key` until `until`. Returns false if that time came first.
    pub(super) fn wait(&self, key: Key, until: Option<Instant>) -> bool {
        let mut state = self.world.state.lock();
        let until = until.map(|until| until.saturating_duration_since(self.world.epoch));
        state.threads[self.thread].status = ThreadStatus::Waiting { key, until };
        self.world.switch(&mut state, self.thread);

        let thread = &mut state.threads[self.thread];
        let woken = thread.status != ThreadStatus::TimedOut;
        thread.status = ThreadStatus::Ready;
        woken
    }

    /// Wakes all threads that wait for `key`.
    pub(super) fn wake_all(&self, key: Key) {
        let mut state = self.world.state.lock();
        state.wake_all(key);
    }

    /// Wakes one of the threads that wait for `key`, chosen at random.
    pub(super) fn wake_one(&self, key: Key) {
        let mut state = self.world.state.lock();
        let WorldState {
            random, threads, ..
        } = &mut *state;

        let waiting: Vec<usize> = (0..threads.len())
            .filter(|thread| threads[*thread].waits_for(key))
            .collect();
        if let Some(drawn) = random.choice(waiting) {
            threads[drawn].status = ThreadStatus::Ready;
        }
    }

    /// Adds a thread to the world. The new thread must first call [`enter`](Self::enter).
    pub(super) fn add(&self, name: &str) -> Self {
        let group = self.world.state.lock().threads[self.thread].group;
        Self {
            world: self.world.clone(),
            thread: self.world.add(name, group),
        }
    }

    /// Registers the calling thread as this thread of the world, and waits for its turn to run. The
    /// thread ends in the world when the result is dropped.
    pub(super) fn enter(self) -> Entered {
        ME.set(Some(self.clone()));
        let mut state = self.world.state.lock();
        self.world.until_turn(&mut state, self.thread);
        drop(state);
        Entered(self)
    }

    /// Records that the system could not start this thread.
    pub(super) fn never_starts(&self) {
        self.world.state.lock().threads[self.thread].status = ThreadStatus::Ended;
    }

    /// Waits until this thread has ended. `caller` is the thread that waits.
    pub(super) fn join(&self, caller: &WorldMember) {
        while self.world.state.lock().threads[self.thread].status != ThreadStatus::Ended {
            caller.wait(self.world.ends(), None);
        }
    }

    /// Returns true once this thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.world.state.lock().threads[self.thread].status == ThreadStatus::Ended
    }
}

/// Marks the calling thread as running in a world, until this is dropped.
pub(super) struct Entered(WorldMember);

impl Drop for Entered {
    fn drop(&mut self) {
        let WorldMember { world, thread } = &self.0;
        ME.set(None);
        let mut state = world.state.lock();
        state.wake_all(world.ends());
        state.threads[*thread].status = ThreadStatus::Ended;
        world.switch(&mut state, *thread);
    }
}

impl WorldThread {
    fn waits_for(&self, key: Key) -> bool {
        matches!(self.status, ThreadStatus::Waiting { key: of, .. } if of == key)
    }
}

impl WorldState {
    fn wake_all(&mut self, key: Key) {
        for thread in self
            .threads
            .iter_mut()
            .filter(|thread| thread.waits_for(key))
        {
            thread.status = ThreadStatus::Ready;
        }
    }

    /// Returns true if `thread` is ready and its group is not stopped.
    fn can_run(&self, thread: &WorldThread) -> bool {
        let stopped = |group| {
            self.stops
                .iter()
                .any(|stop| stop.group == group && stop.until > self.now)
        };
        matches!(thread.status, ThreadStatus::Ready | ThreadStatus::TimedOut)
            && (thread.has_locks || !thread.group.is_some_and(stopped))
    }

    /// Returns the earliest time at which a waiting or stopped thread may run again.
    fn next_deadline(&self) -> Option<Duration> {
        let waits = self
            .threads
            .iter()
            .filter_map(|thread| match thread.status {
                ThreadStatus::Waiting { until, .. } => until,
                _ => None,
            });

        let stops = self
            .stops
            .iter()
            .map(|stop| stop.until)
            .filter(|until| *until > self.now);
        waits.chain(stops).min()
    }

    fn note(&mut self, text: fmt::Arguments<'_>, world: &World) {
        if world.settings.log {
            let line = format!("{} {text}\n", self.now.as_nanos());
            self.log.push_str(&line);
        }
    }
}

impl World {
    fn add(&self, name: &str, group: Option<u32>) -> usize {
        let mut state = self.state.lock();
        state.threads.push(WorldThread {
            name: name.to_owned(),
            status: ThreadStatus::Ready,
            turn: Arc::default(),
            runs: false,
            group,
            has_locks: false,
        });
        state.threads.len() - 1
    }

    /// Returns the key by which threads wait for the end of other threads.
    fn ends(&self) -> Key {
        std::ptr::from_ref(self).addr()
    }

    /// Wakes the threads whose deadline has passed.
    fn expire(&self, state: &mut WorldState) {
        let now = state.now;
        for thread in &mut state.threads {
            if let ThreadStatus::Waiting {
                until: Some(until), ..
            } = thread.status
                && until <= now
            {
                thread.status = ThreadStatus::TimedOut;
            }
        }
    }

    /// Chooses the next thread at random and lets it run. If it is another thread than `thread`,
    /// returns when `thread` may run again, or at once if `thread` has ended.
    fn switch(&self, state: &mut MutexGuard<'_, WorldState>, thread: usize) {
        state.threads[thread].has_locks = LOCKS.get() > 0;
        let drawn = loop {
            let ready: Vec<usize> = (0..state.threads.len())
                .filter(|i| state.can_run(&state.threads[*i]))
                .collect();
            if let Some(drawn) = state.random.choice(ready) {
                break drawn;
            }
            match state.next_deadline() {
                Some(earliest) if earliest <= self.settings.longest => {
                    state.now = state.now.max(earliest);
                    self.expire(state);
                }
                // The last thread of the world has ended.
                None if state
                    .threads
                    .iter()
                    .all(|thread| thread.status == ThreadStatus::Ended) =>
                {
                    return;
                }
                _ => self.hang(state),
            }
        };

        if drawn == thread {
            return;
        }

        state.switches += 1;
        let time = u64::try_from(state.now.as_nanos()).unwrap_or(u64::MAX);
        for word in [drawn as u64, time] {
            state.history = (state.history ^ word).wrapping_mul(0x0100_0000_01b3);
        }

        if self.settings.log {
            let text = format!("thread {drawn} ({}) goes on", state.threads[drawn].name);
            state.note(format_args!("{text}"), self);
        }

        state.threads[thread].runs = false;
        state.threads[drawn].runs = true;
        state.threads[drawn].turn.notify_one();
        if state.threads[thread].status != ThreadStatus::Ended {
            self.until_turn(state, thread);
        }
    }

    /// Waits until it is the turn of `thread`.
    fn until_turn(&self, state: &mut MutexGuard<'_, WorldState>, thread: usize) {
        let turn = state.threads[thread].turn.clone();
        while !state.threads[thread].runs {
            turn.wait(state);
        }
    }

    /// Reports that all threads would wait forever, and exits the process.
    fn hang(&self, state: &WorldState) -> ! {
        eprintln!("{state}");
        std::process::exit(101)
    }
}

impl fmt::Display for WorldState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the simulation hangs after {:?} of simulated time:",
            self.now
        )?;
        for thread in self
            .threads
            .iter()
            .filter(|thread| thread.status != ThreadStatus::Ended)
        {
            let state = match thread.status {
                ThreadStatus::Waiting { until: None, .. } => "waits without a deadline",
                ThreadStatus::Waiting { .. } => "waits with a deadline",
                _ => "could run",
            };
            write!(f, "\n  {}: {state}", thread.name)?;
        }

        if self.is_over {
            let cause = "its programs have ended; something outside keeps parts of them, such as a \
                         handle to an array or object: drop it before the simulation ends";
            write!(f, "\n  {cause}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{mpsc, now, thread};
    use super::*;

    #[test]
    fn hang_after_the_end_names_the_cause() {
        let mut state = WorldState {
            random: fastrand::Rng::with_seed(1),
            now: Duration::from_secs(3),
            threads: Vec::new(),
            stops: Vec::new(),
            history: 0,
            switches: 0,
            log: String::new(),
            is_over: false,
        };
        assert!(!state.to_string().contains("keeps parts of them"));
        state.is_over = true;
        assert!(state.to_string().contains("keeps parts of them"));
    }

    #[test]
    fn endless_waits_overflow_nothing() {
        let settings = WorldSettings {
            seed: 1,
            longest: Duration::from_secs(60),
            log: false,
        };
        simulated(settings, || {
            let (sender, receiver) = mpsc::channel();
            let pair = Arc::new((
                super::super::Mutex::new(false),
                super::super::Condvar::new(),
            ));
            let other = pair.clone();
            thread::Builder::new()
                .name("other".to_owned())
                .spawn(move || {
                    thread::sleep(Duration::from_secs(1));
                    let _ = sender.send(7);
                    thread::sleep(Duration::from_secs(1));
                    *other.0.lock() = true;
                    other.1.notify_all();
                })
                .unwrap();
            assert_eq!(receiver.recv_timeout(Duration::MAX), Ok(7));
            let mut is_done = pair.0.lock();
            while !*is_done {
                assert!(!pair.1.wait_for(&mut is_done, Duration::MAX).timed_out());
            }
            drop(is_done);
            // No thread is in this group.
            stop_group(77, Duration::MAX);
            let before = now();
            thread::sleep(Duration::from_secs(1));
            assert!(now() >= before + Duration::from_secs(1));
        });
    }
}
