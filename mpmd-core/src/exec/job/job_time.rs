//! The time that a job has lost: from each loss of a process until the step that the job had
//! reached is issued again.

use std::time::Duration;

use mpmd_base::block::{Instant, now, since};

/// The age of a job and the time that it has lost, as known to this process.
#[derive(Debug)]
pub(crate) struct JobTime {
    /// The moment at which the job had the age `before`.
    at: Instant,
    before: Duration,
    /// The time lost before `behind`, by earlier losses of processes.
    lost: Duration,
    /// The time of the first process loss after which the job has not yet reached step `reached`
    /// again. `None` if it has.
    behind: Option<Instant>,
    /// The newest step that the program has asked to commit.
    pub(crate) reached: u64,
}

impl JobTime {
    pub(crate) fn begin() -> Self {
        let zero = Duration::ZERO;
        Self {
            at: now(),
            before: zero,
            lost: zero,
            behind: None,
            reached: 0,
        }
    }

    /// Notes that a process was lost.
    pub(crate) fn lose(&mut self) {
        self.behind.get_or_insert(now());
    }

    /// Notes that the program has come to `step`.
    pub(crate) fn reach(&mut self, step: u64) {
        if step >= self.reached {
            self.reached = step;
            self.lost += self.behind.take().map(since).unwrap_or_default();
        }
    }

    /// Returns the age of the job.
    pub(crate) fn age(&self) -> Duration {
        self.before + since(self.at)
    }

    /// Returns the time lost so far.
    pub(crate) fn lost(&self) -> Duration {
        self.lost + self.behind.map(since).unwrap_or_default()
    }

    /// Adopts the times and the step that processes of the earlier epoch have reported, after a
    /// loss.
    pub(crate) fn learn(&mut self, age: Duration, lost: Duration, reached: u64) {
        *self = Self {
            at: now(),
            before: age,
            lost,
            behind: Some(now()),
            reached,
        };
    }
}

#[cfg(test)]
mod tests {
    use mpmd_base::block::{WorldSettings, simulated, thread};

    use super::*;

    fn wait(seconds: u64) {
        thread::sleep(Duration::from_secs(seconds));
    }

    /// The (age, lost time) in whole seconds.
    fn seconds(time: &JobTime) -> (u64, u64) {
        (time.age().as_secs(), time.lost().as_secs())
    }

    #[test]
    fn time_is_lost_until_the_job_is_back_where_it_was() {
        let settings = WorldSettings {
            seed: 1,
            longest: Duration::from_secs(600),
            log: false,
        };
        simulated(settings, || {
            let mut time = JobTime::begin();
            wait(10);
            time.reach(7);
            assert_eq!(seconds(&time), (10, 0));
            time.lose();
            wait(3);
            time.lose();
            wait(2);
            time.reach(6);
            assert_eq!(seconds(&time), (15, 5), "a second loss on the way back");
            wait(1);
            time.reach(7);
            wait(4);
            assert_eq!(seconds(&time), (20, 6));

            time.lose();
            wait(1);
            let mut new = JobTime::begin();
            new.learn(time.age(), time.lost(), time.reached);
            wait(1);
            assert_eq!(
                seconds(&new),
                (22, 8),
                "a new process knows what the others know"
            );
            new.reach(7);
            wait(1);
            assert_eq!(seconds(&new), (23, 8));
        });
    }
}
