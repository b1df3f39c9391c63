//! Measures bare wake-ups between two processes, in turns with hand-overs, alone and with work of
//! their GPUs.

use std::time::{Duration, Instant};

use mpmd_core::prelude::Program;
use mpmd_core::{Error, Result};
use mpmd_transport::shm::BareWord;

use super::array::FIRST;
use super::handover::SECOND;
use crate::job::now;

/// Deadline of one wake-up. It passes only if the other process has ended.
const WITHIN: Duration = Duration::from_secs(60);

/// A word that both processes map, and the times that this process has recorded.
pub(super) struct BareWake {
    word: BareWord,
    is_first: bool,
    /// Times in nanoseconds. The first process records one before each wake-up, the second process
    /// one at the end of each wake-up.
    moments: Vec<u64>,
}

impl BareWake {
    /// Creates the word on the first process and opens it on the second. Both processes must call
    /// this.
    pub(super) fn new(p: &mut Program) -> Result<Self> {
        let is_first = p.process() == FIRST;
        let failed = |error: std::io::Error| Error::kernel(format!("a bare wake-up: {error}"));
        let own = is_first
            .then(BareWord::create)
            .transpose()
            .map_err(failed)?;

        let path = || Ok(own.as_ref().map(BareWord::path).unwrap_or_default());
        let path = p.broadcast_value(FIRST, String::new(), path)?;
        let word = own
            .map_or_else(|| BareWord::open(&path), Ok)
            .map_err(failed)?;

        Ok(Self {
            word,
            is_first,
            moments: Vec::new(),
        })
    }

    /// Measures one wake-up. The second process falls asleep; after `settled` the first process
    /// calls `give` and wakes it. The wake-up ends when the second process has called `take`. Both
    /// processes must call this at about the same time.
    pub(super) fn measure(
        &mut self,
        settled: Duration,
        give: impl FnOnce() -> Result<()>,
        take: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.moments.len() as u32;
        if self.is_first {
            std::thread::sleep(settled);
            self.moments.push(now());
            let given = give();
            self.word.count();
            return given;
        }

        let until = Instant::now() + WITHIN;
        while self.word.value() <= before {
            if Instant::now() >= until {
                return Err(Error::kernel(
                    "the other process did not wake this one".to_owned(),
                ));
            }
            self.word.wait(before, WITHIN);
        }
        take()?;
        self.moments.push(now());
        Ok(())
    }

    /// Returns the times of all wake-ups, on both processes. Both processes must call this.
    pub(super) fn times(self, p: &mut Program) -> Result<Vec<Duration>> {
        let moments = self.moments;
        let moments = p.gather_value(Vec::new(), || Ok(moments))?;
        let given = &moments[FIRST.index()];
        let had = &moments[SECOND.index()];
        let times = given
            .iter()
            .zip(had)
            .map(|(given, had)| had.saturating_sub(*given));
        Ok(times.map(Duration::from_nanos).collect())
    }
}
