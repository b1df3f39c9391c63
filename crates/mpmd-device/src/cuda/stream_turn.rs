//! Exclusive access to a stream for issuing work.

use std::sync::Arc;

use mpmd_base::block::{MutexGuard, mpsc};
use mpmd_memory::{Fence, Fences};

use super::WorkOutcome;
use super::error::CudaError;
use super::stream::{RawStream, Stream, StreamEvent, WorkBegin};

/// Exclusive access to a [`Stream`] for issuing one piece of work. No other work is issued in
/// between.
///
/// Call the methods in this order: [`come_after`](StreamTurn::come_after) with the fences that the
/// work must follow, then [`begin`](StreamTurn::begin), then issue the work, and finally
/// [`end`](StreamTurn::end), even after an error. Only `end` creates the fence behind the issued
/// work.
pub struct StreamTurn<'a> {
    line: &'a Stream,
    issuing: MutexGuard<'a, u64>,
    begin: WorkBegin,
    /// True after `begin`: work may have been issued to the stream in this turn.
    has_begun: bool,
}

/// A handle to the end of issued work, which gives its fence and sets its completion callback.
#[must_use = "errors of the issued work are reported only through `then`"]
pub struct WorkEnding(Arc<StreamEvent>);

impl<'a> StreamTurn<'a> {
    pub(super) fn new(line: &'a Stream, issuing: MutexGuard<'a, u64>) -> Self {
        Self {
            line,
            issuing,
            begin: WorkBegin::default(),
            has_begun: false,
        }
    }

    /// Makes the work wait, on the device, for all `fences`.
    ///
    /// # Errors
    ///
    /// If work before a fence has failed, the device has failed, or a fence does not belong to a
    /// CUDA device.
    pub fn come_after(&self, fences: &Fences) -> Result<(), CudaError> {
        if let Some(why) = fences.failure() {
            return Err(CudaError::new("using a result of earlier work", "", why));
        }
        if fences.are_over() {
            return Ok(());
        }
        self.line.stream.context.bind()?;
        fences
            .iter()
            .try_for_each(|fence| self.line.stream.come_after(&**fence))
    }

    /// Makes the device's context current on this thread, and returns the raw stream to which work
    /// is issued. If times are recorded, the first call records the begin of the work.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn begin(&mut self) -> Result<&'a RawStream, CudaError> {
        let Stream { stream, ends, .. } = self.line;
        stream.context.bind()?;
        self.has_begun = true;
        if let Some(clock) = ends.clock.get()
            && self.begin.event.is_none()
        {
            // Without an event the times of the work are not known.
            self.begin = WorkBegin {
                event: ends.record(stream).ok(),
                issued_at: clock.now(),
            };
        }
        Ok(stream)
    }

    /// Sleeps until the device has finished all work issued to the stream so far. Unlocks the
    /// stream meanwhile, so other threads may issue work.
    ///
    /// Use it only for kernels that need values on the host in the middle of a call.
    ///
    /// # Errors
    ///
    /// If work on the device has failed.
    pub fn wait(&mut self) -> Result<(), CudaError> {
        let Stream { stream, ends, .. } = self.line;
        stream.context.bind()?;
        let Ok(here) = ends.record(stream) else {
            return stream.synchronize();
        };

        *self.issuing += 1;
        let begin = WorkBegin::default();
        let event = Arc::new(StreamEvent::new(
            self.line,
            Some(here),
            begin,
            *self.issuing,
        ));
        ends.push(event.clone(), Ok(()));

        // The waiter thread reports this end like any other.
        let (tell, told) = mpsc::channel();
        event.on_end(Box::new(move |ended| {
            tell.send(ended.result).unwrap_or_default()
        }));

        let ended = MutexGuard::unlocked(&mut self.issuing, || told.recv());
        ended.unwrap_or_else(|_| {
            Err(CudaError::new(
                "waiting for work of a CUDA device",
                "",
                "the stream was closed before the work ended",
            ))
        })
    }

    /// Unlocks the stream while the closure `wait` runs, then locks it again. Returns the result of
    /// `wait`, which must not issue work.
    pub fn pause<R>(&mut self, wait: impl FnOnce() -> R) -> R {
        MutexGuard::unlocked(&mut self.issuing, wait)
    }

    /// Ends the turn. `issued` is the result of issuing; its error is reported as the work's
    /// result. The fence is behind all work that could be issued.
    pub fn end(mut self, issued: Result<(), CudaError>) -> WorkEnding {
        let Stream { stream, ends, .. } = self.line;
        *self.issuing += 1;

        // Issued work is under way even if the device has been marked as failed since.
        let bound = if self.has_begun {
            stream.context.bind_failed()
        } else {
            stream.context.bind()
        };

        let (raw, issued) = match bound.and_then(|()| ends.record(stream)) {
            Ok(raw) => (Some(raw), issued),
            // No event can show the end of the work, so this thread waits for it.
            Err(error) if self.has_begun => match stream.synchronize() {
                Ok(()) => {
                    tracing::debug!(%error, "waiting for work of a CUDA device without an event");
                    (None, issued)
                }
                Err(_) => {
                    let failed = stream.context.fails(error);
                    (None, Err(issued.err().unwrap_or(failed).lost()))
                }
            },
            Err(error) => {
                // The fence stands for earlier work of the stream as well.
                let _ = stream.synchronize();
                (None, issued.and(Err(error)))
            }
        };

        let event = Arc::new(StreamEvent::new(self.line, raw, self.begin, *self.issuing));
        ends.push(event.clone(), issued);
        WorkEnding(event)
    }
}

impl WorkEnding {
    /// Returns the fence behind the issued work, for the memory that the work uses.
    pub fn fence(&self) -> Arc<dyn Fence> {
        self.0.clone()
    }

    /// Sets the callback that receives the outcome, after all memory that waited for the work has
    /// returned to its pool. It runs on the waiter thread, or immediately on this thread if the
    /// work has ended. It must be fast.
    pub fn then(self, then: Box<dyn FnOnce(WorkOutcome) + Send>) {
        self.0.on_end(then);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::mpsc::channel;

    use super::*;
    use crate::cuda::Gpu;

    const TIME_LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn refused_events_lose_no_device() {
        if softcuda::again!("SOFTCUDA_EVENTS" = "2", "SOFTCUDA_PACE" = "lazy:20") {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let mut fences = Vec::new();
        let (said, told) = channel();
        for number in 0..10 {
            let said = said.clone();
            let then = Box::new(move |result| said.send((number, result)).unwrap());
            // The fences keep their events, so the later ones are refused.
            fences.push(
                gpu.compute()
                    .submit(&[&Fences::default()], |_| Ok(()), then),
            );
        }
        for number in 0..10 {
            assert_eq!(told.recv_timeout(TIME_LIMIT).unwrap(), (number, Ok(())));
        }
        assert!(
            fences
                .iter()
                .all(|fence| fence.is_over() && !fence.is_lost())
        );
        let mut turn = gpu.compute().turn();
        turn.begin().unwrap();
        assert_eq!(turn.wait(), Ok(()));
        assert_eq!(turn.end(Ok(())).fence().failure(), None);
    }
}
