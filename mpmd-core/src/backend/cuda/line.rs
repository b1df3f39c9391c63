//! A queue of a device's work, and the thread that waits for its ends.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{result, sys};
use mpmd_transport::memory::{Fence, Fences};
use parking_lot::{Condvar, Mutex};

use super::Then;
use super::error::CudaError;
use super::gpu::{Context, cuda};

/// Events that have been used and are kept for later ones; a line has about as many as a program runs ahead.
const MOST_SPARE: usize = 1024;

/// A queue of work on a device: a stream. Dropping it lets what was issued come to its end.
pub(crate) struct Line {
    stream: Arc<Stream>,
    /// Held while work is issued, so that what belongs together stays together and ends are told in order.
    issuing: Mutex<()>,
    ends: Arc<Ends>,
}

/// A line while work is issued to it.
pub(crate) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) raw: sys::CUstream,
}

// SAFETY: streams may be used by any thread that has bound their context; CUDA's calls are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// What was issued and has not ended, in order.
#[derive(Default)]
struct Ends {
    state: Mutex<State>,
    changed: Condvar,
    spare: Mutex<Vec<RawEvent>>,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    closed: bool,
}

struct Entry {
    event: Arc<Event>,
    /// What went wrong while it was issued.
    issued: Result<(), CudaError>,
    then: Then,
}

/// A point in the work of a line.
pub(super) struct Event {
    /// `None` where it could not be made, or not be recorded: then the device does nothing more.
    raw: Option<RawEvent>,
    stream: Arc<Stream>,
    over: AtomicBool,
    waiting: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    ends: std::sync::Weak<Ends>,
}

struct RawEvent(sys::CUevent);

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are thread-safe.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl Line {
    /// Makes the stream and starts its thread.
    pub(super) fn start(context: &Arc<Context>, name: String) -> Result<Self, CudaError> {
        context.bind()?;
        // Without regard for the default stream, which nobody here uses.
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| cuda("making a stream", error))?;
        let stream = Arc::new(Stream { context: context.clone(), raw });
        let ends = Arc::<Ends>::default();
        let (theirs, of) = (ends.clone(), stream.clone());
        std::thread::Builder::new()
            .name(name)
            .spawn(move || theirs.tell_all(&of))
            .map_err(|error| CudaError::new("starting the thread of a stream", "", error.to_string()))?;
        Ok(Self { stream, issuing: Mutex::new(()), ends })
    }

    /// Issues work that comes after `after` and after all that was issued here before. Never blocks on the device.
    ///
    /// Returns a fence behind the work, for the memory that it uses, and calls `then` once it is passed, with what
    /// went wrong while the work was issued or when it ran. Where only part of it could be issued, that part is before the
    /// fence.
    pub(crate) fn submit(
        &self,
        after: &[&Fences],
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
        then: Then,
    ) -> Arc<dyn Fence> {
        let _issuing = self.issuing.lock();
        let issued = self.stream.context.bind().and_then(|()| {
            after.iter().try_for_each(|fences| {
                fences.iter().try_for_each(|fence| self.stream.come_after(&**fence))
            })?;
            work(&self.stream)
        });
        let (raw, issued) = match self.record() {
            Ok(raw) => (Some(raw), issued),
            Err(error) => (None, issued.and(Err(error))),
        };
        let event = Arc::new(Event {
            raw,
            stream: self.stream.clone(),
            over: AtomicBool::new(false),
            waiting: Mutex::default(),
            ends: Arc::downgrade(&self.ends),
        });
        self.ends.state.lock().entries.push_back(Entry { event: event.clone(), issued, then });
        self.ends.changed.notify_one();
        event
    }

    /// The stream, to be told to other libraries; work is issued to it by [`Line::submit`].
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// An event behind what was issued.
    fn record(&self) -> Result<RawEvent, CudaError> {
        let spare = self.ends.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => {
                // The thread that waits for it sleeps.
                let flags = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32
                    | sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
                RawEvent(create_event(flags)?)
            }
        };
        // SAFETY: event and stream are of the context that is bound, and alive.
        match unsafe { result::event::record(event.0, self.stream.raw) } {
            Ok(()) => Ok(event),
            Err(error) => {
                event.destroy();
                Err(cuda("recording an event", error))
            }
        }
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
    fn come_after(&self, fence: &dyn Fence) -> Result<(), CudaError> {
        if fence.is_over() {
            return Ok(());
        }
        let Some(event) = (fence as &dyn Any).downcast_ref::<Event>() else {
            return Err(CudaError::new("waiting for other work", "", "it is no work of a CUDA device's"));
        };
        let Some(raw) = event.raw.as_ref().filter(|_| event.stream.raw != self.raw) else { return Ok(()) };
        // SAFETY: the event is alive, as `event` holds it, and was recorded when it was made.
        unsafe { result::stream::wait_event(self.raw, raw.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(|error| cuda("waiting for other work on a device", error))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        // SAFETY: made in `Line::start`, destroyed once; CUDA lets what is in it come to its end.
        if let Err(error) = unsafe { result::stream::destroy(self.raw) } {
            tracing::debug!(%error, "destroying a stream");
        }
    }
}

impl Ends {
    /// Waits for each end in turn and tells who wants to know, until the line is dropped and nothing is left.
    fn tell_all(&self, stream: &Stream) {
        // Errors show when events are waited for.
        let _ = stream.context.bind();
        while let Some(Entry { event, issued, then }) = self.next() {
            let ran = event.wait();
            event.pass();
            then(issued.and(ran));
        }
    }

    fn next(&self) -> Option<Entry> {
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

impl Event {
    /// Sleeps until the device has come here.
    fn wait(&self) -> Result<(), CudaError> {
        // Nothing was recorded where the device does nothing more: that error is known.
        let Some(raw) = &self.raw else { return Ok(()) };
        // SAFETY: the event is alive and its context bound by this thread.
        unsafe { result::event::synchronize(raw.0) }.map_err(|error| cuda("work of a CUDA device", error))
    }

    fn pass(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock();
            self.over.store(true, Ordering::Release);
            std::mem::take(&mut *waiting)
        };
        waiting.into_iter().for_each(|then| then());
    }
}

impl Fence for Event {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        let mut waiting = self.waiting.lock();
        if self.is_over() {
            drop(waiting);
            return then();
        }
        waiting.push(then);
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        if self.over.load(Ordering::Acquire)
            && let Some(ends) = self.ends.upgrade()
        {
            let mut spare = ends.spare.lock();
            if spare.len() < MOST_SPARE {
                spare.push(raw);
                return;
            }
        }
        if self.stream.context.bind().is_ok() {
            raw.destroy();
        }
    }
}

impl RawEvent {
    fn destroy(self) {
        // SAFETY: the event is alive and this was its owner; CUDA lets waits for it come to their end.
        if let Err(error) = unsafe { result::event::destroy(self.0) } {
            tracing::debug!(%error, "destroying an event");
        }
    }
}

fn create_event(flags: u32) -> Result<sys::CUevent, CudaError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: `event` is a place for the result.
    unsafe { sys::cuEventCreate(&raw mut event, flags) }
        .result()
        .map_err(|error| cuda("making an event", error))?;
    Ok(event)
}
