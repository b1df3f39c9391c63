//! The answers of the stages to process 0: whether they still come.

use std::time::Duration;

use mpmd_base::block::Instant;

/// Shortest time without an answer after which the stages count as stalled.
const STALLED: Duration = Duration::from_secs(10);
/// The same, as a multiple of the usual time.
const UNUSUAL: f64 = 8.0;
/// Share of the last answer in the usual time.
const LAST: f64 = 0.2;

/// An answer that process 0 waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    /// The choices of a pass.
    Choices,
    /// The times of the stages, for which it asks also without requests.
    Times,
}

/// The answers that process 0 waits for, and the time that one usually takes.
#[derive(Debug, Default)]
pub(super) struct Answers {
    since: [Option<Instant>; 2],
    /// In seconds.
    usual: f64,
}

impl Answers {
    /// Notes that process 0 waits for an answer from `now` on.
    pub(super) fn wait(&mut self, awaited: Awaited, now: Instant) {
        self.since[awaited as usize] = Some(now);
    }

    /// Notes that an answer has come at `now`.
    pub(super) fn come(&mut self, awaited: Awaited, now: Instant) {
        if let Some(since) = self.since[awaited as usize].take() {
            let took = now.saturating_duration_since(since).as_secs_f64();
            self.usual += LAST * (took - self.usual);
        }
    }

    /// Forgets the answers that would come: the stages are made anew.
    pub(super) fn forget(&mut self) {
        self.since = [None; 2];
    }

    /// True if an answer takes far longer than usual.
    pub(super) fn are_late(&self, now: Instant) -> bool {
        let bound = STALLED.as_secs_f64().max(UNUSUAL * self.usual);
        let is_late = |since: &Instant| now.saturating_duration_since(*since).as_secs_f64() > bound;
        self.since.iter().flatten().any(is_late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_late_after_ten_seconds_or_eight_times_the_usual() {
        let start = mpmd_base::block::now();
        let mut answers = Answers::default();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!answers.are_late(at(99)), "nothing is awaited");
        answers.wait(Awaited::Times, at(100));
        assert!(!answers.are_late(at(110)) && answers.are_late(at(111)));
        answers.come(Awaited::Times, at(111));
        assert!(!answers.are_late(at(200)));
        // Passes of a large model on CPUs take long.
        for pass in 0..40 {
            answers.wait(Awaited::Choices, at(200 + 20 * pass));
            answers.come(Awaited::Choices, at(220 + 20 * pass));
        }
        answers.wait(Awaited::Choices, at(2000));
        assert!(!answers.are_late(at(2150)) && answers.are_late(at(2170)));
        answers.forget();
        assert!(!answers.are_late(at(9999)));
    }
}
