//! A CUDA stream of a device, and the waiter thread that reports the ends of its work.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys;
use mpmd_base::block::{Condvar, Mutex, thread};
use mpmd_memory::{Fence, Fences, Landing, Latch};

use super::calls;
use super::context::{DeviceContext, cuda};
use super::error::CudaError;
use super::stream_clock::StreamClock;
use super::stream_turn::StreamTurn;
use super::{Then, WorkOutcome};

/// The most unused events that a stream keeps for reuse. A stream needs about one event for each
/// piece of work in flight.
const MOST_SPARE: usize = 1024;

/// A CUDA stream with a waiter thread. After it is dropped, issued work still finishes.
pub struct Stream {
    pub(super) stream: Arc<RawStream>,
    /// The number of pieces of work issued so far. The lock is held while a piece is issued, so
    /// that pieces do not mix and their ends are in order.
    pub(super) issuing: Mutex<u64>,
    pub(super) ends: Arc<StreamEnds>,
}

/// The raw CUDA stream of a [`Stream`], with its context.
pub struct RawStream {
    pub(super) context: Arc<DeviceContext>,
    pub(super) raw: sys::CUstream,
    /// False if another library has created the stream and will destroy it.
    pub(super) is_own: bool,
}

// SAFETY: streams may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// The issued work of a stream that has not ended, in order.
#[derive(Default)]
pub(super) struct StreamEnds {
    state: Mutex<PendingEnds>,
    changed: Condvar,
    spare: Mutex<Vec<RawEvent>>,
    /// The clock for begin and end times, if times are recorded.
    pub(super) clock: OnceLock<StreamClock>,
}

#[derive(Default)]
struct PendingEnds {
    entries: VecDeque<PendingEnd>,
    closed: bool,
}

struct PendingEnd {
    event: Arc<StreamEvent>,
    /// The result of issuing the work.
    issued: Result<(), CudaError>,
}

/// The end of one piece of work in a stream. It is also the fence for memory that the work uses.
pub(super) struct StreamEvent {
    /// The CUDA event. `None` if nothing was issued, or if the event could not be created or
    /// recorded. Without an event, issued work has ended, or the device has failed and the work
    /// counts as lost.
    raw: Option<RawEvent>,
    /// The event recorded before the work, if times are recorded.
    begin: Option<RawEvent>,
    /// The host's time in nanoseconds at which the work was issued; 0 if times are not recorded.
    pub(super) issued_at: u64,
    /// The number of this piece of work in its stream, counted from 1.
    number: u64,
    stream: Arc<RawStream>,
    over: Latch,
    /// True if the fence counts as passed, although the work may still be running.
    lost: AtomicBool,
    /// The work's error message, if it failed.
    failure: OnceLock<String>,
    told: Mutex<EndReport>,
    ends: Weak<StreamEnds>,
}

/// The begin of a piece of work. It is empty if times are not recorded.
#[derive(Default)]
pub(super) struct WorkBegin {
    /// The event that was recorded before the work.
    pub(super) event: Option<RawEvent>,
    /// The host's time in nanoseconds at which the work was issued.
    pub(super) issued_at: u64,
}

/// The completion callback of a piece of work. It runs after all fence callbacks.
#[derive(Default)]
struct EndReport {
    then: Option<Box<dyn FnOnce(WorkOutcome) + Send>>,
    /// The outcome, if the work ended before the callback was set. It is set only after all fence
    /// callbacks have run.
    ended: Option<WorkOutcome>,
}

/// A CUDA event.
pub(super) struct RawEvent(sys::CUevent);

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// The driver's flag for a default wait for an event.
pub(super) const WAIT_DEFAULT: u32 = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;

impl Stream {
    /// Creates the CUDA stream and starts its waiter thread.
    pub(super) fn start(context: &Arc<DeviceContext>, name: String) -> Result<Self, CudaError> {
        context.bind()?;
        // The stream does not synchronise with the default stream, which is not used here.
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING;
        // SAFETY: the context is bound, and there is room for the stream.
        unsafe { calls::cuStreamCreate(&raw mut raw, flags as u32) }
            .result()
            .map_err(|error| cuda("making a stream", error))?;

        let stream = Arc::new(RawStream {
            context: context.clone(),
            raw,
            is_own: true,
        });

        let ends = Arc::<StreamEnds>::default();
        let theirs = ends.clone();
        let of = stream.clone();
        thread::Builder::new()
            .name(name)
            .spawn(move || theirs.tell_all(&of))
            .map_err(|error| {
                CudaError::new("starting the thread of a stream", "", error.to_string())
            })?;

        Ok(Self {
            stream,
            issuing: Mutex::new(0),
            ends,
        })
    }

    /// Issues work that runs after the fences `after` and after all work issued to this stream
    /// before. Does not wait for the device.
    ///
    /// Returns a fence at the end of the work, for the memory that the work uses. After the device
    /// has passed it, calls `then` with the first error of issuing or running the work. `then` runs
    /// on the waiter thread, or on this thread before the return if the work has already ended. If
    /// only part of the work could be issued, the fence is behind that part.
    pub fn submit(
        &self,
        after: &[&Fences],
        work: impl FnOnce(&RawStream) -> Result<(), CudaError>,
        then: Then,
    ) -> Arc<dyn Fence> {
        // This thread may be in the middle of issuing work to another device.
        let _visit = self.stream.context.visit();

        let mut turn = self.turn();
        let issued = after.iter().try_for_each(|fences| turn.come_after(fences));
        let issued = issued.and_then(|()| turn.begin()).and_then(work);

        let ending = turn.end(issued);
        let fence = ending.fence();
        ending.then(Box::new(move |ended: WorkOutcome| then(ended.result)));
        fence
    }

    /// Returns the raw stream, for other libraries. To issue work of this framework, call
    /// [`Stream::submit`] or [`Stream::turn`].
    pub(super) fn stream(&self) -> &RawStream {
        &self.stream
    }

    /// Locks the stream for issuing work. Blocks while another thread holds it.
    pub fn turn(&self) -> StreamTurn<'_> {
        StreamTurn::new(self, self.issuing.lock())
    }

    /// Returns true if all `fences` belong to this stream, so that their callbacks run before those
    /// of later work on this stream. Returns false if `fences` is empty.
    pub fn has_issued_all(&self, fences: &Fences) -> bool {
        let mine = |fence: &Arc<dyn Fence>| {
            let event = (&**fence as &dyn Any).downcast_ref::<StreamEvent>();
            event.is_some_and(|event| event.stream.raw == self.stream.raw)
        };
        fences.iter().next().is_some() && fences.iter().all(mine)
    }

    /// Records begin and end times of work on this stream from now on. `now` returns nanoseconds
    /// since an arbitrary origin. Waits for the device. Call it before any work is issued. A second
    /// call has no effect.
    pub(super) fn keep_time(
        &self,
        now: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Result<(), CudaError> {
        let clock = StreamClock::new(self, now)?;
        // A second call keeps the first clock.
        let _ = self.ends.clock.set(clock);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.ends.state.lock().closed = true;
        self.ends.changed.notify_one();
    }
}

impl RawStream {
    /// Makes later work on this stream wait, on the device, for the work before `fence`. Fails if
    /// the fence does not belong to a CUDA device.
    pub(super) fn come_after(&self, fence: &dyn Fence) -> Result<(), CudaError> {
        if fence.is_over() {
            return Ok(());
        }
        if (fence as &dyn Any).is::<Landing>() {
            // The other process lent the memory after its work had ended.
            return Ok(());
        }
        let Some(event) = (fence as &dyn Any).downcast_ref::<StreamEvent>() else {
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

impl RawStream {
    /// Blocks the thread until the device has finished all work issued to the stream so far. The
    /// context must be current. Fails if the device has failed.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive and its context bound by this thread.
        unsafe { calls::cuStreamSynchronize(self.raw) }
            .result()
            .map_err(|error| cuda("work of a CUDA device", error))
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if !self.is_own {
            return;
        }
        let Ok(_visit) = self.context.visit() else {
            return;
        };
        // SAFETY: made in `Stream::start`, destroyed once; CUDA lets what is in it come to its end.
        if let Err(error) = unsafe { calls::cuStreamDestroy_v2(self.raw) }.result() {
            tracing::debug!(%error, "destroying a stream");
        }
    }
}

impl StreamEnds {
    /// Appends the end of a piece of work and wakes the waiter thread. The caller must hold the
    /// lock [`Stream::issuing`].
    pub(super) fn push(&self, event: Arc<StreamEvent>, issued: Result<(), CudaError>) {
        self.state
            .lock()
            .entries
            .push_back(PendingEnd { event, issued });
        self.changed.notify_one();
    }

    /// Records an event in the stream, behind all work issued so far.
    pub(super) fn record(&self, stream: &RawStream) -> Result<RawEvent, CudaError> {
        let spare = self.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => {
                // The waiter thread sleeps while it waits for the event.
                let mut flags = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
                if self.clock.get().is_none() {
                    flags |= sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
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

    /// Keeps an unused event for reuse and returns `None`. If [`MOST_SPARE`] events are kept
    /// already, returns the event.
    pub(super) fn spare(&self, event: RawEvent) -> Option<RawEvent> {
        let mut spare = self.spare.lock();
        if spare.len() >= MOST_SPARE {
            return Some(event);
        }
        spare.push(event);
        None
    }

    /// Runs the waiter thread: waits for the end of each piece of work in order, and calls its
    /// callbacks. Returns after the stream was dropped and all work has ended.
    fn tell_all(&self, stream: &RawStream) {
        // A failure shows up when events are waited for.
        let _ = stream.context.bind();
        while let Some(PendingEnd { event, issued }) = self.next() {
            // If no event was recorded, `issued` has the error.
            let ran = event.raw.as_ref().map_or(Ok(()), RawEvent::wait);
            let ran = ran.map_err(|error| stream.context.fails(error));
            let times = match (self.clock.get(), &ran) {
                (Some(clock), Ok(())) => clock.times(&event),
                _ => None,
            };
            event.pass(WorkOutcome {
                result: issued.and(ran),
                times,
            });
        }
    }

    fn next(&self) -> Option<PendingEnd> {
        let mut state = self.state.lock();
        loop {
            if let Some(entry) = state.entries.pop_front() {
                return Some(entry);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl StreamEvent {
    pub(super) fn new(line: &Stream, raw: Option<RawEvent>, begin: WorkBegin, number: u64) -> Self {
        Self {
            raw,
            begin: begin.event,
            issued_at: begin.issued_at,
            number,
            stream: line.stream.clone(),
            over: Latch::default(),
            lost: AtomicBool::default(),
            failure: OnceLock::default(),
            told: Mutex::default(),
            ends: Arc::downgrade(&line.ends),
        }
    }

    /// Returns the device times in nanoseconds from this event to the begin and to the end of the
    /// work that ends at `other`. Returns `None` if one of them is unknown.
    pub(super) fn until(&self, other: &Self) -> Option<[f64; 2]> {
        let from = self.raw.as_ref()?;
        let begin = other.begin.as_ref()?;
        let end = other.raw.as_ref()?;
        Some([from.until(begin).ok()?, from.until(end).ok()?])
    }

    fn pass(&self, ended: WorkOutcome) {
        if let Err(error) = &ended.result {
            self.lost.store(error.is_lost(), Ordering::Relaxed);
            // Set only here.
            let _ = self.failure.set(error.to_string());
        }

        // Memory returns to its pool before the callback runs: waiters for memory check the pool
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

    /// Sets the callback that receives the outcome of the work. It runs on the waiter thread, or
    /// immediately on this thread if the work has ended.
    pub(super) fn on_end(&self, then: Box<dyn FnOnce(WorkOutcome) + Send>) {
        let mut told = self.told.lock();
        let Some(ended) = told.ended.take() else {
            told.then = Some(then);
            return;
        };
        drop(told);
        then(ended);
    }
}

/// Calls a completion callback. If it panics, logs the panic, so that the other callbacks still
/// run.
fn guarded(then: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(then)).is_err() {
        tracing::error!("a callback for the end of CUDA device work panicked");
    }
}

impl Fence for StreamEvent {
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

impl Drop for StreamEvent {
    fn drop(&mut self) {
        let is_over = self.over.is_passed();
        for raw in [self.raw.take(), self.begin.take()].into_iter().flatten() {
            let left = match self.ends.upgrade().filter(|_| is_over) {
                Some(ends) => ends.spare(raw),
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
    pub(super) fn handle(&self) -> sys::CUevent {
        self.0
    }

    /// Records the event in the stream, behind all work issued so far.
    pub(super) fn record(&self, stream: &RawStream) -> Result<(), CudaError> {
        // SAFETY: event and stream are of the context that is bound, and alive.
        unsafe { calls::cuEventRecord(self.0, stream.raw) }
            .result()
            .map_err(|error| cuda("recording an event", error))
    }

    /// Blocks the thread, asleep, until the device has reached the event. Fails if the device has
    /// failed.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive and its context bound by this thread.
        unsafe { calls::cuEventSynchronize(self.0) }
            .result()
            .map_err(|error| cuda("work of a CUDA device", error))
    }

    /// Returns the device time in nanoseconds from this event to `other`.
    fn until(&self, other: &Self) -> Result<f64, CudaError> {
        let mut millis = 0f32;
        // SAFETY: both are alive, of the context that is bound, and were made with their times;
        // there is room for the number.
        let told = unsafe { calls::cuEventElapsedTime(&raw mut millis, self.0, other.0) }.result();
        told.map(|()| f64::from(millis) * 1e6)
            .map_err(|error| cuda("reading a time", error))
    }

    pub(super) fn destroy(self) {
        // SAFETY: the event is alive and this was its owner; CUDA lets waits for it come to their
        // end.
        if let Err(error) = unsafe { calls::cuEventDestroy_v2(self.0) }.result() {
            tracing::debug!(%error, "destroying an event");
        }
    }
}

pub(super) fn create_event(flags: u32) -> Result<RawEvent, CudaError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: `event` is a place for the result.
    unsafe { calls::cuEventCreate(&raw mut event, flags) }
        .result()
        .map_err(|error| cuda("making an event", error))?;
    Ok(RawEvent(event))
}
