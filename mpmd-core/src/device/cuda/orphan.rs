//! Work of a device that waits for another process's, which is no more.
//!
//! CUDA does not say what becomes of a wait for an event whose process dies before its device has
//! come there. If the wait ends, all is well: the memory behind it is known to mean nothing. If it
//! does not, the stream will never do anything again, and neither will what waits for it. Then the
//! device counts as failed: what was issued to streams that stand still ends with an error, as does
//! what is issued later, and nothing of the device's is waited for, or freed, any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::error::CudaError;
use super::gpu::Context;
use super::ipc::Imported;
use super::line::Ends;

/// How long such waits may take to end.
const GRACE: Duration = Duration::from_secs(2);
/// How long a stream may stand at one place from then on, until it counts as standing still.
const STILL: Duration = Duration::from_millis(500);
/// How often they are looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Sees to it that nobody waits for ever for work of `context` that comes after `events`, whose
/// process will not get there, because of `why`.
pub(super) fn watch(context: Arc<Context>, events: Vec<Arc<Imported>>, why: String) {
    let started = std::thread::Builder::new().name("cuda-orphan".to_owned()).spawn(move || {
        let until = Instant::now() + GRACE;
        loop {
            // Where the device has failed, its streams end by themselves.
            if context.bind().is_err() || events.iter().all(|event| event.is_passed()) {
                return;
            }
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(LOOK);
        }
        let error =
            CudaError::new("work of a CUDA device waits for another process's, in vain", "", why);
        context.give_up(error);
    });
    if let Err(error) = started {
        tracing::warn!(%error, "starting a thread that looks after work which waits for a process \
            that is no more");
    }
}

impl Context {
    /// The device will not come to the end of some of its work: that ends with an error now, as
    /// does all that comes.
    fn give_up(self: &Arc<Self>, error: CudaError) {
        self.is_stuck.store(true, Ordering::Release);
        // What uses memory there may go on: nobody else is to have it.
        let error = self.fails(error).lost();
        for line in self.lines() {
            let (context, error) = (self.clone(), error.clone());
            let told = std::thread::Builder::new().name("cuda-given-up".to_owned());
            if let Err(error) = told.spawn(move || context.give_up_line(&line, &error)) {
                tracing::warn!(%error, "starting a thread that tells of the end of work");
            }
        }
    }

    /// Ends what a line stands still at, and all that comes after it. One that goes on ends by
    /// itself.
    fn give_up_line(&self, line: &Ends, error: &CudaError) {
        let mut standing = (None, Instant::now());
        // Also one that has nothing to do: somebody may be about to end a turn.
        while self.bind_failed().is_ok() && !line.is_closed() {
            let at = line.stands_at();
            if at != standing.0 {
                standing = (at, Instant::now());
            }
            if at.is_some() && standing.1.elapsed() >= STILL {
                return line.give_up(error);
            }
            std::thread::sleep(LOOK);
        }
    }
}
