//! What this process has issued lately: enough to compare with a peer and to find where two
//! programs parted.

use std::collections::VecDeque;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::wire::ProcessId;

/// How many operations are remembered.
const REMEMBERED: usize = 8192;

/// How many of them are shown to a peer that disagrees. They must fit a control message.
const SHOWN: usize = 512;

/// Stands in messages for the hash of an operation that the sender no longer remembers: it may have issued
/// any number of operations that it has no part in. Never compared.
pub(super) const UNKNOWN_HASH: u128 = 0;

/// One issued operation.
#[derive(Clone)]
pub struct OpRecord {
    /// Its number, from 1.
    pub op: u64,
    /// The rolling hash of operations 1 to `op`.
    pub hash: u128,
    /// What it is, made into text only when somebody asks.
    pub what: Arc<dyn fmt::Display + Send + Sync>,
    /// The line of the program that issued it.
    pub at: &'static Location<'static>,
}

impl fmt::Display for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {} ({}) at {}", self.op, self.what, self.at)
    }
}

impl fmt::Debug for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An [`OpRecord`] as a peer sees it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct ShownRecord {
    pub(super) op: u64,
    pub(super) hash: u128,
    pub(super) what: String,
    /// How many steps had ended before it.
    pub(super) steps: u64,
}

/// The recent operations of one process, as shown to a peer.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Shown {
    pub(super) count: u64,
    pub(super) records: Vec<ShownRecord>,
}

/// The last operations of this process, numbered without gaps from 1.
#[derive(Default)]
pub(super) struct History {
    count: u64,
    /// With the number of steps that had ended before.
    records: VecDeque<(OpRecord, u64)>,
    steps: u64,
}

impl History {
    pub(super) fn step_ended(&mut self) {
        self.steps += 1;
    }

    pub(super) fn push(&mut self, record: OpRecord) {
        debug_assert_eq!(record.op, self.count + 1, "operations are numbered without gaps");
        self.count = record.op;
        if self.records.len() == REMEMBERED {
            self.records.pop_front();
        }
        self.records.push_back((record, self.steps));
    }

    /// How many operations were issued.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The hash at the last operation; 0 before the first.
    pub(super) fn hash(&self) -> u128 {
        self.records.back().map_or(0, |(record, _)| record.hash)
    }

    /// The hash at `op`, where that is remembered.
    pub(super) fn hash_at(&self, op: u64) -> Option<u128> {
        if op == 0 { Some(0) } else { self.get(op).map(|record| record.hash) }
    }

    /// Whether a peer's hash at `op` is known to be another one than this process's.
    pub(super) fn differs(&self, op: u64, theirs: u128) -> bool {
        theirs != UNKNOWN_HASH && self.hash_at(op).is_some_and(|mine| mine != theirs)
    }

    pub(super) fn get(&self, op: u64) -> Option<&OpRecord> {
        self.entry(op).map(|(record, _)| record)
    }

    fn entry(&self, op: u64) -> Option<&(OpRecord, u64)> {
        let first = self.count + 1 - self.records.len() as u64;
        let index = op.checked_sub(first)?;
        self.records.get(usize::try_from(index).ok()?)
    }

    /// What to show to a peer that disagrees at `op`: the last operations up to some way past it.
    pub(super) fn show(&self, op: u64) -> Shown {
        let last = self.count.min(op.saturating_add(SHOWN as u64 / 4));
        let first = (last + 1).saturating_sub(SHOWN as u64).max(1);
        let records = (first..=last)
            .filter_map(|op| self.entry(op))
            .map(|(record, steps)| {
                let mut what = record.to_string();
                // Long descriptions must not push the message over its limit.
                what.truncate((0..=1500).rev().find(|i| what.is_char_boundary(*i)).unwrap_or(0));
                ShownRecord { op: record.op, hash: record.hash, what, steps: *steps }
            })
            .collect();
        Shown { count: self.count, records }
    }
}

/// Says where two processes parted: the first operation at which their hashes differ.
pub(super) fn first_difference(
    me: ProcessId,
    mine: &Shown,
    peer: ProcessId,
    theirs: &Shown,
) -> (u64, String) {
    let find = |shown: &Shown, op: u64| shown.records.iter().find(|record| record.op == op).cloned();
    let hash = |shown: &Shown, op: u64| if op == 0 { Some(0) } else { find(shown, op).map(|r| r.hash) };
    let last = mine.count.max(theirs.count);
    let oldest =
        [mine, theirs].iter().filter_map(|shown| shown.records.first()).map(|r| r.op).max().unwrap_or(1);
    let first = (oldest..=last).find(|op| hash(mine, *op) != hash(theirs, *op)).unwrap_or(last);
    let before = first.saturating_sub(1);
    let agreed_before = hash(mine, before).is_some() && hash(mine, before) == hash(theirs, before);
    // What was issued may well be the same, a step earlier or later.
    let steps = |shown: &Shown| find(shown, first).map(|record| record.steps);
    let differ = steps(mine).zip(steps(theirs)).is_some_and(|(mine, theirs)| mine != theirs);
    let side = |process: ProcessId, shown: &Shown| match find(shown, first) {
        Some(record) if differ => {
            format!("process {process} issued {} after {} steps", record.what, record.steps)
        }
        Some(record) => format!("process {process} issued {}", record.what),
        None if shown.count < first => {
            format!("process {process} has issued only {} operations", shown.count)
        }
        None => format!("process {process} no longer remembers its operation {first}"),
    };
    // The lower process first, so that every process says the same.
    let (a, b) =
        if me <= peer { (side(me, mine), side(peer, theirs)) } else { (side(peer, theirs), side(me, mine)) };
    let since = if agreed_before { "first differ" } else { "differ, at the latest," };
    (first, format!("the programs diverged: they {since} at operation {first}: {a}; {b}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(hashes: &[u128]) -> History {
        let mut history = History::default();
        for (i, hash) in hashes.iter().enumerate() {
            history.push(OpRecord {
                op: i as u64 + 1,
                hash: *hash,
                what: Arc::new(format!("op with hash {hash}")),
                at: Location::caller(),
            });
        }
        history
    }

    #[test]
    fn the_first_difference_shows_both_sides_and_is_the_same_for_both() {
        let (a, b) = (history(&[1, 2, 3, 4]).show(4), history(&[1, 2, 33, 44, 55]).show(5));
        let (op, text) = first_difference(ProcessId(0), &a, ProcessId(1), &b);
        assert_eq!(op, 3);
        assert!(text.contains("process 0 issued operation 3 (op with hash 3) at"), "{text}");
        assert!(text.contains("process 1 issued operation 3 (op with hash 33) at"), "{text}");
        assert!(text.contains("history.rs"), "source lines are shown: {text}");
        assert_eq!(first_difference(ProcessId(1), &b, ProcessId(0), &a).1, text);
    }

    #[test]
    fn a_process_that_stopped_early_is_said_to_have_issued_less() {
        let (a, b) = (history(&[1, 2]).show(2), history(&[1, 2, 3]).show(3));
        let (op, text) = first_difference(ProcessId(0), &a, ProcessId(1), &b);
        assert_eq!(op, 3);
        assert!(text.contains("process 0 has issued only 2 operations"), "{text}");
    }

    #[test]
    fn only_the_last_operations_are_remembered() {
        let hashes: Vec<u128> = (1..=REMEMBERED as u128 + 10).collect();
        let history = history(&hashes);
        assert_eq!(history.hash_at(10), None);
        assert_eq!(history.hash_at(11), Some(11));
        assert_eq!(history.hash(), REMEMBERED as u128 + 10);
    }
}
