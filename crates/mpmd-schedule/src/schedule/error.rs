//! Errors of schedules.

use super::builtin::Builtin;

/// An error in a schedule. The caller is at fault.
///
/// Positions in the messages are indices in a rank's row, from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No ranks, no microbatches, or no actions.
    #[error(
        "a schedule needs at least one rank and one microbatch, not {ranks} and {microbatches}"
    )]
    Empty {
        /// The requested number of ranks.
        ranks: usize,
        /// The requested number of microbatches.
        microbatches: usize,
    },
    /// No built-in schedule has the requested name.
    #[error("there is no schedule {name:?}; there are {}", Builtin::names())]
    Unknown {
        /// The requested name.
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
        /// The requested number of ranks.
        ranks: usize,
        /// The requested number of microbatches.
        microbatches: usize,
        /// The requested number of stages on each rank.
        chunks: usize,
        /// The rule that the numbers violate.
        rule: String,
    },
    /// Actions are missing, appear twice, or are on a rank that does not have the stage.
    #[error("schedule {schedule}: {}{}", .problems.join("; "), and_more(.more))]
    Actions {
        /// The schedule's name.
        schedule: String,
        /// The first 8 problems or fewer, as text: action, position, and fault.
        problems: Vec<String>,
        /// The number of further problems, which are not listed.
        more: usize,
    },
    /// The ranks wait for each other in a cycle.
    #[error("schedule {schedule} cannot proceed: {}", .cycle.join("; "))]
    Stuck {
        /// The schedule's name.
        schedule: String,
        /// A shortest cycle, as text: for each rank its position, and the action on the next rank
        /// that it waits for.
        cycle: Vec<String>,
        /// The number of ranks that cannot proceed. Ranks outside the cycle wait for it, or for
        /// another cycle.
        ranks: usize,
    },
    /// The search for an order by cost had invalid input, or found no order.
    #[error("no order by cost: {problem}")]
    Search {
        /// The invalid input, or the reason that no order was found.
        problem: String,
    },
}

fn and_more(more: &usize) -> String {
    if *more == 0 {
        String::new()
    } else {
        format!("; and {more} more")
    }
}
