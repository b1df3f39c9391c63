//! The answers of the stages to process 0: whether they still come.

use std::time::Duration;

use mpmd_base::block::Instant;

/// Shortest time without an answer after which the stages can count as stalled.
const STALLED: Duration = Duration::from_secs(10);
/// Multiple of the usual time without an answer after which the stages can count as stalled.
const UNUSUAL: f64 = 8.0;
/// Weight of the newest answer in the moving average of the usual time.
const LAST: f64 = 0.2;

/// A kind of answer from the stages to process 0.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    /// The choices of a pass.
    Choices,
    /// The times of the stages. Process 0 requests them even if there are no client requests.
    Times,
    /// The stages of the next epoch, after a process was lost.
    Stages,
}

/// Tracks whether the stages still answer process 0 in the usual time.
#[derive(Debug, Default)]
pub(super) struct Answers {
    since: [Option<Instant>; 3],
    /// Moving average of the time to an answer, in seconds.
    usual: f64,
}

impl Answers {
    /// Records that process 0 waits for an answer from `now` on, if it does not already.
    pub(super) fn wait(&mut self, awaited: Awaited, now: Instant) {
        self.since[awaited as usize].get_or_insert(now);
    }

    /// Records that an answer arrived at `now`.
    pub(super) fn come(&mut self, awaited: Awaited, now: Instant) {
        if let Some(since) = self.since[awaited as usize].take() {
            let took = now.saturating_duration_since(since).as_secs_f64();
            self.usual += LAST * (took - self.usual);
        }
    }

    /// Forgets all awaited answers, since the stages are created anew: earlier ones will not send
    /// them.
    pub(super) fn forget(&mut self) {
        self.since = [None; 3];
    }

    /// True if an awaited answer takes far longer than usual.
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

    #[test]
    fn lost_stages_are_late_until_new_ones_begin() {
        let start = mpmd_base::block::now();
        let mut answers = Answers::default();
        let at = |seconds| start + Duration::from_secs(seconds);
        answers.wait(Awaited::Stages, at(0));
        // A process that is lost while the next epoch begins takes no new time.
        answers.wait(Awaited::Stages, at(8));
        assert!(!answers.are_late(at(9)) && answers.are_late(at(11)));
        answers.forget();
        assert!(!answers.are_late(at(99)));
    }
}
