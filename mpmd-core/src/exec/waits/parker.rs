//! The parker: how threads wait for async buffers that messages complete.
//!
//! If threads can drive the transport ([`Transport::parking`]), a waiting thread does so. It polls
//! the buffer and the transport in turns for a short time, then sleeps in the transport. So the
//! waiting thread mostly handles the awaited message itself, and no other thread has to wake it.
//! Over other transports, and without one, it sleeps until another thread completes the buffer.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use mpmd_base::block::{CoreBudget, Instant, PollGap, Spin, SpinPace, SpinPolicy, now, thread};
use mpmd_transport::Transport;

use crate::exec::waits::async_buffer::{AsyncBuffer, Outcome};

const PACE: SpinPace = SpinPace {
    first: Duration::from_micros(50),
    // A thread of a pipeline waits for a pass of a neighbour, and a wake-up would delay each pass.
    longest: Duration::from_millis(2),
    worth: Duration::from_millis(2),
    looks: 8,
    yields: 8,
    // From then on the awaited thread may need this very core.
    alone: Duration::from_micros(3),
    most_skipped: 0,
};
/// Maximum time for which a thread without a deadline sleeps before it checks again.
const NAP: Duration = Duration::from_secs(1);

thread_local! {
    /// True while this thread is inside a call of the transport. If the transport then calls the
    /// runtime, the runtime must not drive the transport to wait.
    static DRIVING: Cell<bool> = const { Cell::new(false) };
    /// Spin policy of this thread. It adapts to the length of recent waits.
    static POLICY: SpinPolicy = const { SpinPolicy::new(PACE, Spin::Auto) };
}

/// The wait settings and state that all threads of a process share.
pub(crate) struct Parker {
    transport: Option<Arc<dyn Transport>>,
    setting: Spin,
    room: CoreBudget,
    /// True while a thread polls. Used only if the core budget lets one thread poll at a time.
    taken: AtomicBool,
}

impl Parker {
    /// Creates the parker of a process. `setting` is the spin policy of waiting threads, and `room`
    /// limits the number of threads that poll at once.
    pub(crate) fn new(
        transport: Option<Arc<dyn Transport>>,
        setting: Spin,
        room: CoreBudget,
    ) -> Self {
        Self {
            transport,
            setting,
            room: room.under(setting),
            taken: AtomicBool::new(false),
        }
    }

    /// Creates the parker of a process without a transport.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Self::new(None, Spin::Auto, CoreBudget::None)
    }

    /// Returns true if this thread would drive the transport if it waited now.
    pub(crate) fn can_drive(&self) -> bool {
        self.door().is_some()
    }

    /// Blocks until `slot` ends and returns its buffer or failure. Returns `None` if `deadline`
    /// comes first. Call it without holding a lock: incoming messages are handled on this thread,
    /// and may end any async buffer.
    pub(crate) fn wait(&self, slot: &AsyncBuffer, deadline: Option<Instant>) -> Option<Outcome> {
        self.wait_for(Until::Ended, slot, deadline)
    }

    /// Blocks until `slot` is issued or ends, and returns its buffer, filled or not, or its
    /// failure. For threads that issue work to devices.
    pub(crate) fn wait_issued(&self, slot: &AsyncBuffer) -> Outcome {
        self.wait_for(Until::Issued, slot, None)
            .expect("no deadline was set")
    }

    fn wait_for(
        &self,
        until: Until,
        slot: &AsyncBuffer,
        deadline: Option<Instant>,
    ) -> Option<Outcome> {
        if until.has_come(slot) {
            return until.peek(slot);
        }
        let Some(transport) = self.door() else {
            return until.sleep(slot, deadline);
        };

        let mut gap = POLICY.with(|policy| policy.begin_as(self.setting, now()));
        if let Some(deadline) = deadline {
            gap.poll_until(deadline);
        }
        let found = self.look(&**transport, until, slot, &mut gap);
        let outcome = if found {
            until.peek(slot)
        } else {
            sleep(transport, until, slot, deadline)
        };
        POLICY.with(|policy| policy.end(&gap, now()));
        outcome
    }

    /// Returns the transport if this thread may drive it. `None` if waiting threads cannot drive
    /// the transport, or this thread is already inside one of its calls.
    fn door(&self) -> Option<&Arc<dyn Transport>> {
        let transport = self.transport.as_ref()?;
        (!DRIVING.get() && transport.parking().is_some()).then_some(transport)
    }

    /// Polls the transport and `slot` for the time that the spin policy allows. Returns true if
    /// `slot` has reached the awaited state.
    fn look(
        &self,
        transport: &dyn Transport,
        until: Until,
        slot: &AsyncBuffer,
        gap: &mut PollGap,
    ) -> bool {
        if !gap.polls() {
            return false;
        }
        let Some(_place) = self.place() else {
            return false;
        };
        drive(|| transport.drive(&mut || !until.has_come(slot) && gap.wait()));
        until.has_come(slot)
    }

    /// Returns the right to poll. `None` if too many threads poll for the core budget.
    fn place(&self) -> Option<PollPermit<'_>> {
        match self.room {
            CoreBudget::All => Some(PollPermit(None)),
            CoreBudget::One if !self.taken.swap(true, Ordering::Acquire) => {
                Some(PollPermit(Some(&self.taken)))
            }
            CoreBudget::One | CoreBudget::None => None,
        }
    }
}

/// The right to poll. Dropping it lets another thread poll.
struct PollPermit<'a>(Option<&'a AtomicBool>);

impl Drop for PollPermit<'_> {
    fn drop(&mut self) {
        if let Some(taken) = self.0 {
            taken.store(false, Ordering::Release);
        }
    }
}

/// The awaited state of an async buffer.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Until {
    /// Issued or ended: the async buffer has its buffer, filled or not, or has failed.
    Issued,
    Ended,
}

impl Until {
    fn has_come(self, slot: &AsyncBuffer) -> bool {
        match self {
            Self::Issued => slot.has_issued(),
            Self::Ended => slot.has_ended(),
        }
    }

    fn peek(self, slot: &AsyncBuffer) -> Option<Outcome> {
        match self {
            Self::Issued => slot.peek_issued(),
            Self::Ended => slot.peek(),
        }
    }

    fn poll(self, slot: &AsyncBuffer, wait: &mut Option<u64>, waker: &Waker) -> Poll<Outcome> {
        match self {
            Self::Issued => slot.poll_issued(wait, waker),
            Self::Ended => slot.poll(wait, waker),
        }
    }

    fn sleep(self, slot: &AsyncBuffer, deadline: Option<Instant>) -> Option<Outcome> {
        match self {
            Self::Issued => slot.wait_issued_until(deadline),
            Self::Ended => slot.wait_until(deadline),
        }
    }
}

/// Sleeps in the transport until `slot` reaches the awaited state. Messages that arrive are handled
/// on this thread. Returns the buffer or failure of `slot`, or `None` after `deadline`.
fn sleep(
    transport: &Arc<dyn Transport>,
    until: Until,
    slot: &AsyncBuffer,
    deadline: Option<Instant>,
) -> Option<Outcome> {
    let mut bell = None;
    let mut wait = None;
    let outcome = loop {
        let Some(parking) = transport.parking() else {
            break until.sleep(slot, deadline);
        };
        // Handles messages that came before `parking` was taken.
        drive(|| transport.progress());
        if until.has_come(slot) {
            break until.peek(slot);
        }
        let bell = bell.get_or_insert_with(|| ParkBell::of(transport.clone()));
        if let Poll::Ready(outcome) = until.poll(slot, &mut wait, bell) {
            break Some(outcome);
        }

        let now = now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            break None;
        }
        drive(|| transport.park(parking, deadline.unwrap_or(now + NAP)));
    };
    if let Some(wait) = wait
        && !slot.has_ended()
    {
        slot.forget(wait);
    }
    outcome
}

/// Wakes a thread that sleeps in the transport.
struct ParkBell {
    transport: Arc<dyn Transport>,
    thread: thread::ThreadId,
}

impl ParkBell {
    fn of(transport: Arc<dyn Transport>) -> Waker {
        Waker::from(Arc::new(Self {
            transport,
            thread: thread::current().id(),
        }))
    }
}

impl Wake for ParkBell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A thread that ends its own wait is awake.
        if thread::current().id() != self.thread {
            self.transport.wake();
        }
    }
}

/// Runs a call to the transport and returns its result. During the call this thread is marked as
/// driving the transport.
fn drive<R>(call: impl FnOnce() -> R) -> R {
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            DRIVING.set(false);
        }
    }
    DRIVING.set(true);
    let _back = Back;
    call()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::AtomicUsize;

    use mpmd_base::ProcessId;
    use mpmd_base::block::{Condvar, Mutex, mpsc};
    use mpmd_memory::SharedBuffer;
    use mpmd_proto::{Failure, FailureKind, Header};
    use mpmd_transport::{Handler, Parking, Ticket};

    use super::*;
    use crate::exec::Resolver;

    const SOON: Duration = Duration::from_secs(20);

    type Message = Box<dyn FnOnce() + Send>;

    /// A transport with closures as messages. Only a thread that drives it runs them.
    #[derive(Default)]
    struct TransportHandler {
        state: Mutex<State>,
        changed: Condvar,
        progresses: AtomicUsize,
        parks: AtomicUsize,
        wakes: AtomicUsize,
        /// True if no thread can drive it.
        shut: bool,
    }

    #[derive(Default)]
    struct State {
        messages: VecDeque<Message>,
        changes: u32,
    }

    impl TransportHandler {
        fn arrives(&self, message: impl FnOnce() + Send + 'static) {
            self.change(|state| state.messages.push_back(Box::new(message)));
        }

        fn change(&self, change: impl FnOnce(&mut State)) {
            let mut state = self.state.lock();
            change(&mut state);
            state.changes += 1;
            self.changed.notify_all();
        }

        fn seen(&self) -> [usize; 2] {
            [&self.parks, &self.wakes].map(|count| count.load(Ordering::SeqCst))
        }

        fn until_parks(&self, count: usize) {
            let deadline = Instant::now() + SOON;
            while self.seen()[0] < count {
                assert!(
                    Instant::now() < deadline,
                    "no thread sleeps in the transport"
                );
                thread::yield_now();
            }
        }
    }

    impl Transport for TransportHandler {
        fn name(&self) -> &'static str {
            "door"
        }

        fn process(&self) -> ProcessId {
            ProcessId(0)
        }

        fn processes(&self) -> usize {
            2
        }

        fn start(&self, _: Arc<dyn Handler>) {}

        fn post(&self, _: ProcessId, _: Header, _: Option<SharedBuffer>, _: Ticket) {}

        fn progress(&self) -> bool {
            self.progresses.fetch_add(1, Ordering::SeqCst);
            let messages = std::mem::take(&mut self.state.lock().messages);
            let any = !messages.is_empty();
            messages.into_iter().for_each(|message| message());
            any
        }

        fn parking(&self) -> Option<Parking> {
            (!self.shut).then(|| Parking(self.state.lock().changes))
        }

        fn park(&self, parking: Parking, deadline: Instant) {
            let mut state = self.state.lock();
            self.parks.fetch_add(1, Ordering::SeqCst);
            while Parking(state.changes) == parking && Instant::now() < deadline {
                self.changed.wait_until(&mut state, deadline);
            }
            drop(state);
            self.progress();
        }

        fn wake(&self) {
            self.wakes.fetch_add(1, Ordering::SeqCst);
            self.change(|_| {});
        }

        fn shutdown(&self, _: Duration) {}
    }

    fn parker(door: &Arc<TransportHandler>, setting: Spin) -> Parker {
        Parker::new(Some(door.clone()), setting, CoreBudget::All)
    }

    fn keep(resolver: Resolver) {
        resolver.keep(Ok(vec![1u8, 2, 3].into()));
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + SOON)
    }

    fn is_whole(outcome: Option<Outcome>) -> bool {
        outcome.is_some_and(|outcome| outcome.is_ok_and(|buffer| buffer.len() == 3))
    }

    #[test]
    fn ended_buffer_is_returned_without_a_wait() {
        let (door, (resolver, slot)) = (Arc::new(TransportHandler::default()), AsyncBuffer::new());
        keep(resolver);
        assert!(is_whole(parker(&door, Spin::Auto).wait(&slot, soon())));
        assert_eq!(door.progresses.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn progress_alone_ends_a_wait_without_sleep_or_wake() {
        for setting in [Spin::Auto, Spin::Never, Spin::For(SOON)] {
            let (door, (resolver, slot)) =
                (Arc::new(TransportHandler::default()), AsyncBuffer::new());
            door.arrives(move || keep(resolver));
            assert!(is_whole(parker(&door, setting).wait(&slot, soon())));
            assert_eq!(door.seen(), [0, 0], "{setting:?}");
        }
    }

    #[test]
    fn later_message_ends_a_polling_wait() {
        let (door, (resolver, slot)) = (Arc::new(TransportHandler::default()), AsyncBuffer::new());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| parker(&door, Spin::For(SOON)).wait(&slot, soon()));
            while door.progresses.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            door.arrives(move || keep(resolver));
            assert!(is_whole(waiting.join().unwrap()));
        });
        assert_eq!(door.seen(), [0, 0]);
    }

    #[test]
    fn sleeper_gets_messages_itself_other_threads_wake_it() {
        for by_message in [true, false] {
            let (door, (resolver, slot)) =
                (Arc::new(TransportHandler::default()), AsyncBuffer::new());
            thread::scope(|scope| {
                let waiting = scope.spawn(|| parker(&door, Spin::Never).wait(&slot, soon()));
                door.until_parks(1);
                // An unrelated message comes first.
                door.arrives(|| ());
                door.until_parks(2);
                if by_message {
                    door.arrives(move || keep(resolver));
                } else {
                    keep(resolver);
                }
                assert!(is_whole(waiting.join().unwrap()));
            });
            assert_eq!(door.seen()[1], usize::from(!by_message));
        }
    }

    #[test]
    fn a_wait_ends_at_its_deadline_awake_or_asleep() {
        for setting in [Spin::For(SOON), Spin::Never] {
            let (door, (resolver, slot)) =
                (Arc::new(TransportHandler::default()), AsyncBuffer::new());
            let deadline = Instant::now() + Duration::from_millis(5);
            assert!(parker(&door, setting).wait(&slot, Some(deadline)).is_none());
            assert!(Instant::now() >= deadline);
            drop(resolver);
        }
    }

    #[test]
    fn undriven_or_nested_wait_sleeps_on_the_buffer() {
        let door = Arc::new(TransportHandler {
            shut: true,
            ..TransportHandler::default()
        });
        let (resolver, slot) = AsyncBuffer::new();
        assert!(!parker(&door, Spin::Auto).can_drive());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| parker(&door, Spin::Auto).wait(&slot, soon()));
            keep(resolver);
            assert!(is_whole(waiting.join().unwrap()));
        });
        assert_eq!(door.progresses.load(Ordering::SeqCst), 0);

        let door = Arc::new(TransportHandler::default());
        let (within, (resolver, slot)) = (door.clone(), AsyncBuffer::new());
        door.arrives(move || {
            let (never, other) = AsyncBuffer::new();
            let at_once = Some(Instant::now() + Duration::from_millis(5));
            assert!(
                parker(&within, Spin::For(SOON))
                    .wait(&other, at_once)
                    .is_none()
            );
            drop(never);
            keep(resolver);
        });
        assert!(is_whole(parker(&door, Spin::Never).wait(&slot, soon())));
        assert_eq!(door.progresses.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn with_one_polling_place_the_second_thread_sleeps() {
        let (door, (resolver, slot), (other, second)) = (
            Arc::new(TransportHandler::default()),
            AsyncBuffer::new(),
            AsyncBuffer::new(),
        );
        let parker = Parker {
            setting: Spin::For(SOON),
            ..Parker::new(Some(door.clone()), Spin::Auto, CoreBudget::One)
        };
        thread::scope(|scope| {
            let first = scope.spawn(|| parker.wait(&slot, soon()));
            while !parker.taken.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let sleeper = scope.spawn(|| parker.wait(&second, soon()));
            door.until_parks(1);
            // The polling thread ends the wait and wakes the sleeper.
            door.arrives(move || keep(other));
            assert!(is_whole(sleeper.join().unwrap()));
            door.arrives(move || keep(resolver));
            assert!(is_whole(first.join().unwrap()));
        });
        assert!(parker.place().is_some(), "the place is free again");
    }

    #[test]
    fn no_wake_is_lost_in_races() {
        const ROUNDS: usize = 3000;
        let door = Arc::new(TransportHandler::default());
        for setting in [Spin::Never, Spin::Auto] {
            let parker = parker(&door, setting);
            thread::scope(|scope| {
                for waiter in 0..2 {
                    let (give, take) = mpsc::channel::<Resolver>();
                    let (ender, parker) = (door.clone(), &parker);
                    scope.spawn(move || {
                        for (round, resolver) in take.into_iter().enumerate() {
                            (0..round % 64).for_each(|_| std::hint::spin_loop());
                            if (round + waiter) % 3 == 0 {
                                keep(resolver);
                            } else {
                                ender.arrives(move || keep(resolver));
                            }
                        }
                    });
                    scope.spawn(move || {
                        for round in 0..ROUNDS {
                            let (resolver, slot) = AsyncBuffer::new();
                            give.send(resolver).unwrap();
                            (0..round % 47).for_each(|_| std::hint::spin_loop());
                            assert!(is_whole(parker.wait(&slot, soon())), "round {round}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_failure_ends_a_wait_too() {
        let (door, (resolver, slot)) = (Arc::new(TransportHandler::default()), AsyncBuffer::new());
        door.arrives(move || {
            resolver.keep(Err(Arc::new(Failure::new(
                FailureKind::Kernel,
                ProcessId(1),
                4,
                "why",
            ))));
        });
        let outcome = parker(&door, Spin::Auto)
            .wait(&slot, soon())
            .expect("it ended");
        assert_eq!(outcome.unwrap_err().kind, FailureKind::Kernel);
    }
}
