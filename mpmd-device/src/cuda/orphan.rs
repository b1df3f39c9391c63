//! Recovery from device work that waits for an event of a process that has ended.
//!
//! CUDA does not define the result of such a wait if the process dies before its device has reached
//! the event. If the wait ends, nothing is lost: the memory behind it is known to be invalid. If it
//! does not end, the stream hangs, as does all work behind it.
//!
//! Then the device counts as failed. Work issued to hanging streams ends with an error, and so does
//! later work. Nothing of the device is waited for or freed any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mpmd_ids::block::{now, since, thread};

use super::error::CudaError;
use super::gpu::Context;
use super::ipc::Imported;
use super::stream::Ends;

/// The time that waits for an ended process's events have to end before the device is given up.
const GRACE: Duration = Duration::from_secs(2);
/// The time after which a stream without progress counts as hanging, once `GRACE` is over.
const STILL: Duration = Duration::from_millis(500);
/// The interval between two checks of the events or of a stream's progress.
const LOOK: Duration = Duration::from_millis(20);

/// Starts a thread that gives up the device of `context` if the device does not pass `events`
/// within [`GRACE`]. The process that owns the events has ended, because of `why`.
pub(super) fn watch(context: Arc<Context>, events: Vec<Arc<Imported>>, why: String) {
    let started = thread::Builder::new().name("cuda-orphan".to_owned()).spawn(move || {
        let until = now() + GRACE;
        loop {
            // If the device has failed, its streams end by themselves.
            if context.bind().is_err() || events.iter().all(|event| event.is_passed()) {
                return;
            }
            if now() >= until {
                break;
            }
            thread::sleep(LOOK);
        }
        let error =
            CudaError::new("work of a CUDA device waits for a process that has ended", "", why);
        context.give_up(error);
    });
    if let Err(error) = started {
        tracing::warn!(
            %error,
            "cannot start the thread that ends CUDA work which waits for a process that has ended"
        );
    }
}

impl Context {
    /// Marks the device as hanging and failed, so that all later work ends with `error`. Starts a
    /// thread per stream, which ends the stream's work with `error` once the stream hangs.
    fn give_up(self: &Arc<Self>, error: CudaError) {
        self.is_stuck.store(true, Ordering::Release);
        // Work may still use the memory there, so the memory must not be reused.
        let error = self.fails(error).lost();
        for line in self.lines() {
            let (context, error) = (self.clone(), error.clone());
            let told = thread::Builder::new().name("cuda-given-up".to_owned());
            if let Err(error) = told.spawn(move || context.give_up_line(&line, &error)) {
                tracing::warn!(
                    %error, "cannot start the thread that ends work of a hanging CUDA stream"
                );
            }
        }
    }

    /// Watches a stream until it hangs or closes. If it hangs, ends all its work with `error` until
    /// the stream is dropped. Work of a stream that makes progress ends by itself.
    fn give_up_line(&self, line: &Ends, error: &CudaError) {
        let mut standing = (None, now());
        // Idle streams are watched too: a thread may be about to issue work.
        while self.bind_failed().is_ok() && !line.is_closed() {
            let at = line.stands_at();
            if at != standing.0 {
                standing = (at, now());
            }
            if at.is_some() && since(standing.1) >= STILL {
                return line.give_up(error);
            }
            thread::sleep(LOOK);
        }
    }
}
