//! Issuing work to a line.

use std::sync::Arc;
use std::sync::mpsc::channel;

use mpmd_transport::memory::{Fence, Fences};
use parking_lot::MutexGuard;

use super::Ended;
use super::error::CudaError;
use super::line::{Event, Line, RawEvent, Stream};

/// A thread's turn to issue work to a [`Line`]: nobody else's comes between.
///
/// First it says what the work comes [after](Turn::come_after), then it [begins](Turn::begin), and
/// at last it [ends](Turn::end), whatever went wrong: only then is there a fence behind what was
/// issued.
pub(crate) struct Turn<'a> {
    line: &'a Line,
    issuing: MutexGuard<'a, u64>,
    /// Where the work began and when, by the clock, if there is one.
    begin: (Option<RawEvent>, u64),
    /// Something may have been issued.
    has_begun: bool,
}

/// The end of what was issued in a turn: still to come.
#[must_use = "who issued work must hear of its end"]
pub(crate) struct Ending(Arc<Event>);

impl<'a> Turn<'a> {
    pub(super) fn new(line: &'a Line, issuing: MutexGuard<'a, u64>) -> Self {
        Self { line, issuing, begin: (None, 0), has_begun: false }
    }

    /// Has the work come after all of `fences`, on the device.
    ///
    /// # Errors
    ///
    /// Where the device does nothing more, and where a fence is no CUDA device's.
    pub(crate) fn come_after(&self, fences: &Fences) -> Result<(), CudaError> {
        if let Some(why) = fences.failure() {
            return Err(CudaError::new("using what other work was to make", "", why));
        }
        if fences.are_over() {
            return Ok(());
        }
        self.line.stream.context.bind()?;
        fences.iter().try_for_each(|fence| self.line.stream.come_after(&**fence))
    }

    /// The stream to issue work to, of the context that this thread has bound from now on.
    ///
    /// # Errors
    ///
    /// Where the device does nothing more.
    pub(crate) fn begin(&mut self) -> Result<&'a Stream, CudaError> {
        let Line { stream, ends, .. } = self.line;
        stream.context.bind()?;
        self.has_begun = true;
        if let Some(clock) = ends.clock.get()
            && self.begin.0.is_none()
        {
            self.begin = (Some(ends.record(stream)?), clock.now());
        }
        Ok(stream)
    }

    /// Sleeps until the device has done what was issued to the line so far. Others may have a turn
    /// meanwhile.
    ///
    /// Only for kernels that need their values on the host in the middle of a call.
    ///
    /// # Errors
    ///
    /// Where work on the device has failed.
    pub(crate) fn wait(&mut self) -> Result<(), CudaError> {
        let Line { stream, ends, .. } = self.line;
        stream.context.bind()?;
        let here = ends.record(stream)?;
        *self.issuing += 1;
        let event = Arc::new(Event::new(self.line, Some(here), (None, 0), *self.issuing));
        ends.push(event.clone(), Ok(()));
        // The line's thread tells of it, as it does of all ends: also where the device will never
        // come there.
        let (tell, told) = channel();
        event.on_end(Box::new(move |ended| tell.send(ended.result).unwrap_or_default()));
        let ended = MutexGuard::unlocked(&mut self.issuing, || told.recv());
        ended.unwrap_or_else(|_| {
            Err(CudaError::new(
                "waiting for work of a CUDA device",
                "",
                "nobody tells of its end any more",
            ))
        })
    }

    /// Lets go of the line while `wait` runs, which must not issue anything.
    pub(crate) fn pause<R>(&mut self, wait: impl FnOnce() -> R) -> R {
        MutexGuard::unlocked(&mut self.issuing, wait)
    }

    /// Ends the turn. `issued` is what went wrong while the work was issued: it is told as the
    /// work's own end. What could be issued is before the fence.
    pub(crate) fn end(mut self, issued: Result<(), CudaError>) -> Ending {
        let Line { stream, ends, .. } = self.line;
        *self.issuing += 1;
        // What was issued is under way also where the device has come to count as failed since.
        let bound =
            if self.has_begun { stream.context.bind_failed() } else { stream.context.bind() };
        let (raw, issued) = match bound.and_then(|()| ends.record(stream)) {
            Ok(raw) => (Some(raw), issued),
            // Nobody will see when it is over.
            Err(error) if self.has_begun => {
                (None, issued.and(Err(stream.context.fails(error).lost())))
            }
            Err(error) => (None, issued.and(Err(error))),
        };
        let event = Arc::new(Event::new(self.line, raw, self.begin, *self.issuing));
        ends.push(event.clone(), issued);
        Ending(event)
    }
}

impl Ending {
    /// The fence behind what was issued, for the memory that it uses.
    pub(crate) fn fence(&self) -> Arc<dyn Fence> {
        self.0.clone()
    }

    /// Calls `then` with how the work ended, after all memory that waited for it has gone back: on
    /// the line's thread or, where it is over, here. It must be short.
    pub(crate) fn then(self, then: Box<dyn FnOnce(Ended) + Send>) {
        self.0.on_end(then);
    }
}
