//! A replay's view for the router and for messages: hashes and descriptions of its operations.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::exec::{OpSpan, Rolling, ValueHashes};
use mpmd_record::trace::Label;

/// The descriptions of a captured step's operations, for messages.
pub(super) struct CapturedNames {
    pub(super) operations: u64,
    /// The source line that captured the step.
    pub(super) at: &'static Location<'static>,
    /// The operations in which this process takes part, sorted by their position in the step, which
    /// starts at 1.
    pub(super) here: Vec<CapturedName>,
}

/// The description of an operation of a captured step.
pub(super) struct CapturedName {
    pub(super) place: u64,
    pub(super) what: Arc<dyn fmt::Display + Send + Sync>,
    pub(super) label: Option<Label>,
    pub(super) at: &'static Location<'static>,
}

/// A running replay of a step.
///
/// The hash of an operation mixes four values: the hash of all operations before the replay, the
/// step, its inputs, and the operation's position. So each process can compute it without the other
/// operations.
pub(super) struct Replaying {
    /// The number of operations issued before the replay.
    pub(super) before: u64,
    pub(super) start: Rolling,
    /// Hash of the host values among the inputs; `None` if there are none to compare.
    pub(super) values: Option<ValueHashes>,
    pub(super) names: Arc<CapturedNames>,
    /// The source line that replays the step.
    pub(super) at: &'static Location<'static>,
}

impl Replaying {
    /// Returns the rolling hash up to the operation at position `place` of the step, from 1.
    pub(super) fn hash(&self, place: u64) -> Rolling {
        self.start.mix(place)
    }
}

impl OpSpan for Replaying {
    fn hash_at(&self, op: u64) -> u128 {
        self.hash(op.saturating_sub(self.before)).value()
    }

    fn values(&self) -> Option<ValueHashes> {
        self.values
    }

    fn describe(&self, op: u64) -> String {
        let CapturedNames {
            operations,
            at: captured,
            here,
        } = &*self.names;

        let place = op.saturating_sub(self.before);
        let at = self.at;
        let of = format!(
            "{place} of {operations} of the step captured at {captured} and replayed at {at}"
        );

        match here.binary_search_by_key(&place, |name| name.place) {
            Ok(found) => {
                let CapturedName {
                    what, label, at, ..
                } = &here[found];
                let label = label.map_or_else(String::new, |label| format!("; {label}"));
                format!("{what}{label} at {at}, {of}")
            }
            Err(_) => of,
        }
    }
}
