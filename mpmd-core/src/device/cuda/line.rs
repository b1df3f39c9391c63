//! A queue of a device's work, and the thread that waits for its ends.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys;
use mpmd_transport::memory::{Fence, Fences, Latch};
use parking_lot::{Condvar, Mutex};

use super::calls;
use super::clock::Clock;
use super::error::CudaError;
use super::gpu::{Context, cuda};
use super::ipc::{Landing, Words, sharable};
use super::turn::Turn;
use super::{Ended, Then};

/// Events that have been used and are kept for later ones; a line has about as many as a program
/// runs ahead.
const MOST_SPARE: usize = 1024;

/// A queue of work on a device: a stream. Dropping it lets what was issued come to its end.
pub(crate) struct Line {
    pub(super) stream: Arc<Stream>,
    /// Held while work is issued, so that what belongs together stays together and ends are told in
    /// order. How often that was.
    pub(super) issuing: Mutex<u64>,
    pub(super) ends: Arc<Ends>,
}

/// A line while work is issued to it.
pub(crate) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) raw: sys::CUstream,
}

// SAFETY: streams may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// What was issued and has not ended, in order.
#[derive(Default)]
pub(super) struct Ends {
    state: Mutex<State>,
    changed: Condvar,
    spare: Mutex<Vec<RawEvent>>,
    /// Where somebody wants to know when work began and ended.
    pub(super) clock: OnceLock<Clock>,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    /// What the line's thread waits for.
    waited: Option<Entry>,
    /// The device will never come there: another thread tells of the ends.
    is_given_up: bool,
    closed: bool,
}

#[derive(Clone)]
struct Entry {
    event: Arc<Event>,
    /// What went wrong while it was issued.
    issued: Result<(), CudaError>,
}

/// A point in the work of a line.
pub(super) struct Event {
    /// `None` where there was nothing to be behind, or where it could not be made or recorded: then
    /// the device counts as failed, and what was issued as lost.
    raw: Option<RawEvent>,
    /// Where the work before it began, if anybody wants to know.
    begin: Option<RawEvent>,
    /// The clock's time then, on the host.
    pub(super) issued_at: u64,
    /// Its place in the line.
    number: u64,
    stream: Arc<Stream>,
    over: Latch,
    /// Passed, though the work before it may not be over.
    lost: AtomicBool,
    /// What went wrong with the work before it.
    failure: OnceLock<String>,
    told: Mutex<Told>,
    ends: Weak<Ends>,
}

/// Who is told how work ended, after all who wait for its end.
#[derive(Default)]
struct Told {
    then: Option<Box<dyn FnOnce(Ended) + Send>>,
    /// How it ended, where nobody has asked yet; kept only once all who waited have been told.
    ended: Option<Ended>,
}

/// An event, and what other processes know it by, where they have been told.
pub(super) struct RawEvent(pub(super) sys::CUevent, pub(super) OnceLock<Option<Words>>);

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// A wait for an event in the ordinary way.
pub(super) const WAIT_DEFAULT: u32 = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;

impl Line {
    /// Makes the stream and starts its thread.
    pub(super) fn start(context: &Arc<Context>, name: String) -> Result<Self, CudaError> {
        context.bind()?;
        // Without regard for the default stream, which nobody here uses.
        let (mut raw, flags) = (std::ptr::null_mut(), sys::CUstream_flags::CU_STREAM_NON_BLOCKING);
        // SAFETY: the context is bound, and there is room for the stream.
        unsafe { calls::cuStreamCreate(&raw mut raw, flags as u32) }
            .result()
            .map_err(|error| cuda("making a stream", error))?;
        let stream = Arc::new(Stream { context: context.clone(), raw });
        let ends = Arc::<Ends>::default();
        context.note_line(&ends);
        let (theirs, of) = (ends.clone(), stream.clone());
        std::thread::Builder::new().name(name).spawn(move || theirs.tell_all(&of)).map_err(
            |error| CudaError::new("starting the thread of a stream", "", error.to_string()),
        )?;
        Ok(Self { stream, issuing: Mutex::new(0), ends })
    }

    /// Issues work that comes after `after` and after all that was issued here before. Never blocks
    /// on the device.
    ///
    /// Returns a fence behind the work, for the memory that it uses, and calls `then` once it is
    /// passed, with what went wrong while the work was issued or when it ran. Where only part of it
    /// could be issued, that part is before the fence.
    pub(crate) fn submit(
        &self,
        after: &[&Fences],
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
        then: Then,
    ) -> Arc<dyn Fence> {
        // On a thread that may be issuing work to another device.
        let _visit = self.stream.context.visit();
        let mut turn = self.turn();
        let issued = after.iter().try_for_each(|fences| turn.come_after(fences));
        let issued = issued.and_then(|()| turn.begin()).and_then(work);
        let ending = turn.end(issued);
        let fence = ending.fence();
        ending.then(Box::new(move |ended: Ended| then(ended.result)));
        fence
    }

    /// The stream, to be told to other libraries; work is issued to it by [`Line::submit`] and in
    /// turns.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The calling thread's turn to issue work here; waits for the turns of others.
    pub(crate) fn turn(&self) -> Turn<'_> {
        Turn::new(self, self.issuing.lock())
    }

    /// Whether `fences` are all of this line: then whoever hears of their ends hears of those of
    /// later work after that. False where there are none.
    pub(crate) fn has_issued_all(&self, fences: &Fences) -> bool {
        let mine = |fence: &Arc<dyn Fence>| {
            let event = (&**fence as &dyn Any).downcast_ref::<Event>();
            event.is_some_and(|event| event.stream.raw == self.stream.raw)
        };
        fences.iter().next().is_some() && fences.iter().all(mine)
    }

    /// From now on work on this line is told with the times at which it began and ended, by `now`:
    /// nanoseconds from some beginning. To be called before there is any.
    pub(super) fn keep_time(
        &self,
        now: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Result<(), CudaError> {
        let clock = Clock::new(self, now)?;
        // A second clock would be none the wiser.
        let _ = self.ends.clock.set(clock);
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.ends.state.lock().closed = true;
        self.ends.changed.notify_one();
    }
}

impl Stream {
    /// Has what is issued from now on come after what `fence` is behind.
    pub(super) fn come_after(&self, fence: &dyn Fence) -> Result<(), CudaError> {
        if fence.is_over() {
            return Ok(());
        }
        if let Some(landing) = (fence as &dyn Any).downcast_ref::<Landing>() {
            return landing.before(self);
        }
        let Some(event) = (fence as &dyn Any).downcast_ref::<Event>() else {
            return Err(CudaError::new(
                "waiting for other work",
                "",
                "it is no work of a CUDA device's",
            ));
        };
        let Some(raw) = event.raw.as_ref().filter(|_| event.stream.raw != self.raw) else {
            return Ok(());
        };
        // SAFETY: the event is alive, as `event` holds it, and was recorded when it was made.
        unsafe { calls::cuStreamWaitEvent(self.raw, raw.0, WAIT_DEFAULT) }
            .result()
            .map_err(|error| cuda("waiting for other work on a device", error))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_visit) = self.context.visit() else { return };
        // SAFETY: made in `Line::start`, destroyed once; CUDA lets what is in it come to its end.
        if let Err(error) = unsafe { calls::cuStreamDestroy_v2(self.raw) }.result() {
            tracing::debug!(%error, "destroying a stream");
        }
    }
}

impl Ends {
    /// What was issued ends with `event`; for who has the turn.
    pub(super) fn push(&self, event: Arc<Event>, issued: Result<(), CudaError>) {
        self.state.lock().entries.push_back(Entry { event, issued });
        self.changed.notify_one();
    }

    /// An event that is recorded here and now.
    pub(super) fn record(&self, stream: &Stream) -> Result<RawEvent, CudaError> {
        let spare = self.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => {
                // The thread that waits for it sleeps.
                let mut flags = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
                if self.clock.get().is_none() {
                    flags |= sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
                    if stream.context.shares_events() {
                        flags |= sharable();
                    }
                }
                create_event(flags)?
            }
        };
        match event.record(stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                event.destroy();
                Err(error)
            }
        }
    }

    /// Keeps an event for later, which nobody waits for any more.
    pub(super) fn spare(&self, event: RawEvent) -> Option<RawEvent> {
        let mut spare = self.spare.lock();
        let is_known = event.1.get().is_some_and(Option::is_some);
        // Those that other processes know stay for ever: there are as many as were in use at a
        // time.
        if spare.len() >= MOST_SPARE && !is_known {
            return Some(event);
        }
        spare.push(event);
        None
    }

    /// Waits for each end in turn and tells who wants to know, until the line is dropped and
    /// nothing is left.
    fn tell_all(&self, stream: &Stream) {
        // Errors show when events are waited for.
        let _ = stream.context.bind();
        while let Some(Entry { event, issued }) = self.next() {
            // Where nothing was recorded, the error is known.
            let ran = event.raw.as_ref().map_or(Ok(()), RawEvent::wait);
            if self.is_given_up() {
                return;
            }
            let ran = ran.map_err(|error| stream.context.fails(error));
            let times = match (self.clock.get(), &ran) {
                (Some(clock), Ok(())) => clock.times(&event),
                _ => None,
            };
            event.pass(Ended { result: issued.and(ran), times });
        }
    }

    fn next(&self) -> Option<Entry> {
        let mut state = self.state.lock();
        loop {
            if let Some(entry) = state.entries.pop_front() {
                state.waited = Some(entry.clone());
                return Some(entry);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Whether another thread has told of the end that was waited for; else nobody will any more.
    fn is_given_up(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_given_up {
            state.waited = None;
        }
        state.is_given_up
    }

    /// Whether the line is gone, and nothing is left of its work.
    pub(super) fn is_closed(&self) -> bool {
        let state = self.state.lock();
        state.closed && state.entries.is_empty() && state.waited.is_none()
    }

    /// What is waited for and the device has not come to, by its place in the line. The context is
    /// bound.
    pub(super) fn stands_at(&self) -> Option<u64> {
        let Entry { event, .. } = self.state.lock().waited.clone()?;
        let is_ahead = event.raw.as_ref().is_some_and(|raw| !raw.is_passed());
        is_ahead.then_some(event.number)
    }

    /// The device will never come to the end of what is issued here: all of it ends with `error`,
    /// told by this thread in place of the line's, until the line is dropped.
    pub(super) fn give_up(&self, error: &CudaError) {
        let mut next = {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.is_given_up, true) {
                return;
            }
            state.waited.take()
        };
        while let Some(Entry { event, issued }) = next.take().or_else(|| self.next()) {
            event.pass(Ended { result: issued.and(Err(error.clone())), times: None });
        }
    }
}

impl Event {
    pub(super) fn new(
        line: &Line,
        raw: Option<RawEvent>,
        (begin, issued_at): (Option<RawEvent>, u64),
        number: u64,
    ) -> Self {
        let (stream, ends) = (line.stream.clone(), Arc::downgrade(&line.ends));
        let (over, lost, failure, told) = Default::default();
        Self { raw, begin, issued_at, number, stream, over, lost, failure, told, ends }
    }

    /// Nanoseconds on the device from this to the beginning and the end of the work before `other`.
    pub(super) fn until(&self, other: &Self) -> Option<[f64; 2]> {
        let from = self.raw.as_ref()?;
        let (begin, end) = (other.begin.as_ref()?, other.raw.as_ref()?);
        Some([from.until(begin).ok()?, from.until(end).ok()?])
    }

    /// By what other processes have work come after it; `None` where they cannot.
    pub(super) fn words(&self) -> Option<Words> {
        self.raw.as_ref()?.words(&self.stream.context)
    }

    fn pass(&self, ended: Ended) {
        if let Err(error) = &ended.result {
            self.lost.store(error.is_lost(), Ordering::Relaxed);
            // Set here alone.
            let _ = self.failure.set(error.to_string());
        }
        // Memory goes back before anybody hears that the work has ended: who waits for memory looks
        // then.
        self.over.pass().into_iter().for_each(guarded);
        let mut told = self.told.lock();
        let Some(then) = told.then.take() else {
            told.ended = Some(ended);
            return;
        };
        drop(told);
        guarded(|| then(ended));
    }

    /// Calls `then` with how the work before this ended: on the line's thread, or here where that
    /// has told everybody else.
    pub(super) fn on_end(&self, then: Box<dyn FnOnce(Ended) + Send>) {
        let mut told = self.told.lock();
        let Some(ended) = told.ended.take() else {
            told.then = Some(then);
            return;
        };
        drop(told);
        then(ended);
    }
}

/// Calls what wants to know of an end. What is wrong with that is no reason for the others never to
/// hear of theirs.
fn guarded(then: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(then)).is_err() {
        tracing::error!("a panic of who was told that work of a CUDA device has ended");
    }
}

impl Fence for Event {
    fn is_over(&self) -> bool {
        self.over.is_passed()
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.over.on_pass(then);
    }

    fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    fn covers(&self, earlier: &dyn Fence) -> bool {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>();
        earlier.is_some_and(|earlier| {
            earlier.stream.raw == self.stream.raw && earlier.number < self.number
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let is_over = self.over.is_passed();
        for raw in [self.raw.take(), self.begin.take()].into_iter().flatten() {
            let left = match self.ends.upgrade().filter(|_| is_over) {
                Some(ends) => ends.spare(raw),
                // Others may still come after it: it goes with the context.
                None if raw.1.get().is_some_and(Option::is_some) => None,
                None => Some(raw),
            };
            if let Some(raw) = left
                && let Ok(_visit) = self.stream.context.visit()
            {
                raw.destroy();
            }
        }
    }
}

impl RawEvent {
    /// Puts it behind what was issued to the stream.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: event and stream are of the context that is bound, and alive.
        unsafe { calls::cuEventRecord(self.0, stream.raw) }
            .result()
            .map_err(|error| cuda("recording an event", error))
    }

    /// Sleeps until the device has come here.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive and its context bound by this thread.
        unsafe { calls::cuEventSynchronize(self.0) }
            .result()
            .map_err(|error| cuda("work of a CUDA device", error))
    }

    /// Whether the device has come here, well or not. The context is bound.
    pub(super) fn is_passed(&self) -> bool {
        is_passed(self.0)
    }

    /// Nanoseconds on the device from this to `other`.
    fn until(&self, other: &Self) -> Result<f64, CudaError> {
        let mut millis = 0f32;
        // SAFETY: both are alive, of the context that is bound, and were made with their times;
        // there is room for the number.
        let told = unsafe { calls::cuEventElapsedTime(&raw mut millis, self.0, other.0) }.result();
        told.map(|()| f64::from(millis) * 1e6).map_err(|error| cuda("reading a time", error))
    }

    pub(super) fn destroy(self) {
        // SAFETY: the event is alive and this was its owner; CUDA lets waits for it come to their
        // end.
        if let Err(error) = unsafe { calls::cuEventDestroy_v2(self.0) }.result() {
            tracing::debug!(%error, "destroying an event");
        }
    }
}

/// Whether a device has come to an event, well or not. Its context is bound.
pub(super) fn is_passed(event: sys::CUevent) -> bool {
    // SAFETY: the event is alive, as the caller holds it, and of the context that is bound.
    let state = unsafe { calls::cuEventQuery(event) };
    !state.is(sys::CUresult::CUDA_ERROR_NOT_READY)
}

pub(super) fn create_event(flags: u32) -> Result<RawEvent, CudaError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: `event` is a place for the result.
    unsafe { calls::cuEventCreate(&raw mut event, flags) }
        .result()
        .map_err(|error| cuda("making an event", error))?;
    Ok(RawEvent(event, OnceLock::new()))
}
