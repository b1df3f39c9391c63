//! Simulation of programs that recover.

use mpmd_base::block::Mutex;

use super::Commits;
use super::run::{EpochRules, run_epochs};
use crate::api::program::{EpochsOfProcess, Program, Simulation, SimulationReport};
use crate::error::Result;

impl Simulation {
    /// Runs a program that [recovers](crate::RecoveringBuilder::run) from lost processes, and
    /// commits steps that are multiples of `every`. Returns the result of each process, spares
    /// included, and a report. The result of an unused spare is `None`.
    ///
    /// Faults identify processes by the order in which they start, not by their numbers in the job.
    /// The result of a lost process is an error.
    ///
    /// # Panics
    ///
    /// Without a [seed](Simulation::seed).
    pub fn run_recovering<T: Send>(
        &self,
        every: u64,
        program: impl Fn(&mut Program, &Commits) -> Result<T> + Sync,
    ) -> (Vec<Result<Option<T>>>, SimulationReport) {
        let count = self.processes_and_spares();
        let values: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::default()).collect();
        let program = &program;
        let of_process = |value| -> EpochsOfProcess<'_> {
            let value: &Mutex<Option<T>> = value;
            Box::new(move |job| {
                let rules = EpochRules {
                    every,
                    may_change: job.may_change(),
                    slow: None,
                };
                let ended = run_epochs(rules, |returning| job.join(returning), program)?;
                let has_place = ended.is_some();
                *value.lock() = ended;
                Ok(has_place)
            })
        };

        let (results, report) = self.run_epochs(values.iter().map(of_process).collect());
        let values = values.into_iter().map(Mutex::into_inner);
        let ends = results.into_iter().zip(values);
        let ends = ends.map(|(result, value)| result.map(|_| value));
        (ends.collect(), report)
    }
}
