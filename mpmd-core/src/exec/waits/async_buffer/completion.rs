//! The completion status of the work that fills an async buffer, for holders of only the buffer.

use std::sync::{Arc, OnceLock};

use mpmd_memory::{Fence, Latch};
use mpmd_proto::router::Failure;

use super::AsyncBuffer;

/// A fence that is passed once an issued async buffer has ended. It then has the async buffer's
/// failure, if any. A device's own fence would not do: its work may succeed on inputs that were
/// never made.
///
/// Holds neither the async buffer nor its memory.
#[derive(Default)]
pub(super) struct CompletionStatus {
    failure: OnceLock<String>,
    over: Latch,
}

impl AsyncBuffer {
    /// Returns a fence that is passed when this async buffer has ended, and that then has its
    /// failure. The async buffer must be issued.
    pub(crate) fn completion(&self) -> Arc<dyn Fence> {
        let completion = Arc::<CompletionStatus>::default();
        let told = completion.clone();
        self.on_completion(move |result| told.pass(result));
        completion
    }
}

impl CompletionStatus {
    fn pass(&self, result: Result<(), Arc<Failure>>) {
        if let Err(failure) = result {
            // Set only here, once.
            let _ = self.failure.set(failure.message.clone());
        }
        self.over.pass().into_iter().for_each(|then| then());
    }
}

impl Fence for CompletionStatus {
    fn is_over(&self) -> bool {
        self.over.is_passed()
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.over.on_pass(then);
    }

    fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use mpmd_base::ProcessId;
    use mpmd_proto::router::FailureKind;

    use super::*;

    #[test]
    fn status_is_known_at_the_end_and_has_the_failure() {
        let failure = Arc::new(Failure::new(FailureKind::Kernel, ProcessId(0), 4, "no"));
        for (result, expected) in [(Ok(()), None), (Err(failure), Some("no".to_owned()))] {
            let (resolver, slot) = AsyncBuffer::new();
            let end = resolver.issue(vec![1u8].into());
            let (completion, called) = (slot.completion(), Arc::new(AtomicUsize::new(0)));
            let count = || {
                let called = called.clone();
                Box::new(move || {
                    called.fetch_add(1, Ordering::Relaxed);
                })
            };
            completion.on_over(count());
            assert!(!completion.is_over() && completion.failure().is_none());
            end.end(result);
            assert!(completion.is_over());
            completion.on_over(count());
            assert_eq!(
                (called.load(Ordering::Relaxed), completion.failure()),
                (2, expected.clone())
            );
            let late = slot.completion();
            assert_eq!(
                (late.is_over(), late.failure()),
                (true, expected),
                "a later status is the same"
            );
        }
    }
}
