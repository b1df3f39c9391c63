//! Work of a device that waits for another process's, which is no more.
//!
//! CUDA does not say what becomes of a wait for an event whose process dies before its device has come there. If the wait ends,
//! all is well: the memory behind it is known to mean nothing. If it does not, the stream will never do anything again, and
//! neither will what waits for it. Then the device counts as failed: what was issued to streams that stand still ends with an
//! error, as does what is issued later, and nothing of the device's is waited for, or freed, any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::error::CudaError;
use super::gpu::Context;
use super::ipc::Imported;

/// How long such waits may take to end.
const GRACE: Duration = Duration::from_secs(2);
/// How often they are looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Sees to it that nobody waits for ever for work of `context` that comes after `events`, whose process will not get there,
/// because of `why`.
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
        let error = CudaError::new("work of a CUDA device waits for another process's, in vain", "", why);
        context.give_up(error);
    });
    if let Err(error) = started {
        tracing::warn!(%error, "starting a thread that looks after work which waits for a process that is no more");
    }
}

impl Context {
    /// The device will not come to the end of some of its work: that ends with an error now, as does all that comes.
    fn give_up(&self, error: CudaError) {
        // Asked before the context counts as failed.
        let stuck: Vec<_> = self.lines().into_iter().filter(|line| line.is_stuck()).collect();
        self.is_stuck.store(true, Ordering::Release);
        let error = self.fails(error);
        for line in stuck {
            let error = error.clone();
            let told = std::thread::Builder::new().name("cuda-given-up".to_owned());
            if let Err(error) = told.spawn(move || line.give_up(&error)) {
                tracing::warn!(%error, "starting a thread that tells of the end of work");
            }
        }
    }
}
