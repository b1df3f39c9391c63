//! What can be wrong with a schedule.

use super::builtin::Builtin;

/// What is wrong with a schedule. The caller's fault.
///
/// Positions are those in a rank's row, from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No ranks, no microbatches, or no actions.
    #[error(
        "a schedule needs at least one rank and one microbatch, not {ranks} and {microbatches}"
    )]
    Empty {
        /// Ranks asked for.
        ranks: usize,
        /// Microbatches asked for.
        microbatches: usize,
    },
    /// There is no built-in schedule of this name.
    #[error("there is no schedule {name:?}; there are {}", Builtin::names())]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// A built-in schedule does not exist for these numbers.
    #[error(
        "{schedule} with {ranks} ranks, {microbatches} microbatches and {chunks} stages a rank: \
         {rule}"
    )]
    Rule {
        /// The schedule's name.
        schedule: &'static str,
        /// Ranks asked for.
        ranks: usize,
        /// Microbatches asked for.
        microbatches: usize,
        /// Stages on each rank asked for.
        chunks: usize,
        /// What is allowed.
        rule: String,
    },
    /// Actions are missing, there twice, or on a rank that does not have the stage.
    #[error("schedule {schedule}: {}{}", .problems.join("; "), and_more(.more))]
    Actions {
        /// The schedule's name.
        schedule: String,
        /// The first problems: which action, where, and what is wrong with it.
        problems: Vec<String>,
        /// How many more there are.
        more: usize,
    },
    /// The orders of the ranks wait for each other in a circle.
    #[error("schedule {schedule} cannot proceed: {}", .cycle.join("; "))]
    Stuck {
        /// The schedule's name.
        schedule: String,
        /// A shortest circle, one rank after another: where it is, and what for on the next one it
        /// waits.
        cycle: Vec<String>,
        /// How many ranks cannot proceed; those that are not in the circle wait for it, or for
        /// another.
        ranks: usize,
    },
    /// No order could be looked for, or none was found.
    #[error("no order by cost: {problem}")]
    Search {
        /// Why.
        problem: String,
    },
}

fn and_more(more: &usize) -> String {
    if *more == 0 { String::new() } else { format!("; and {more} more") }
}
