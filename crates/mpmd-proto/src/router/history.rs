//! The operations that this process has issued lately: enough to compare with a peer and to find
//! the first difference.

use std::collections::VecDeque;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::wire::ProcessId;

/// Largest number of entries that are kept. An entry is one operation, or all operations of a span.
const REMEMBERED: usize = 8192;

/// Largest number of operations sent to a peer in a dispute. They must fit a control message.
const SHOWN: usize = 512;

/// An operation that this process has issued.
#[derive(Clone)]
pub struct OpRecord {
    /// The operation's number, from 1.
    pub op: u64,
    /// The rolling hash of operations 1 to `op`.
    pub hash: u128,
    /// The operation's description, formatted only when needed.
    pub what: Arc<dyn fmt::Display + Send + Sync>,
    /// Hashes of the host values that the operation takes; `None` if host values are not compared.
    pub values: Option<ValueHashes>,
    /// The operation's purpose, if the code that issued it has given one.
    pub note: Option<OpNote>,
    /// The line of the program that issued the operation.
    pub at: &'static Location<'static>,
}

/// Hashes by which a difference in host values can be told from any other difference.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ValueHashes {
    /// Hash of the operation without its host values, and of all operations before it.
    pub call: u64,
    /// Hash of the host values.
    pub hash: u64,
}

/// The purpose of an operation: a number, and a function that formats it.
#[derive(Clone, Copy)]
pub struct OpNote {
    /// A number whose meaning only `show` knows.
    pub word: u64,
    /// Formats the purpose that the number `word` encodes, for users.
    pub show: fn(u64, &mut fmt::Formatter<'_>) -> fmt::Result,
}

impl fmt::Display for OpNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.show)(self.word, f)
    }
}

impl fmt::Display for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {} ({}", self.op, self.what)?;
        if let Some(note) = &self.note {
            write!(f, "; {note}")?;
        }
        write!(f, ") at {}", self.at)
    }
}

impl fmt::Debug for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Operations that are issued together, such as those of a replayed step. The hash and description
/// of one operation are computed from the span only when needed. Operations in which a process
/// takes no part thus cost it nothing.
pub trait OpSpan: Send + Sync {
    /// Returns the rolling hash of all operations up to `op`, which is part of the span.
    fn hash_at(&self, op: u64) -> u128;

    /// Returns a description of operation `op` for users, with the lines of the program that it
    /// comes from.
    fn describe(&self, op: u64) -> String;

    /// Returns the hashes of all host values that the span takes; `None` if host values are not
    /// compared.
    fn values(&self) -> Option<ValueHashes>;
}

/// An [`OpRecord`] in the form that is sent to a peer.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct ShownRecord {
    pub(super) op: u64,
    pub(super) hash: u128,
    pub(super) what: String,
    pub(super) values: Option<ValueHashes>,
    /// Number of steps that had ended before the operation.
    pub(super) steps: u64,
}

/// The recent operations of one process, in the form that is sent to a peer.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct ShownOperations {
    pub(super) count: u64,
    pub(super) records: Vec<ShownRecord>,
}

impl ShownOperations {
    /// Returns the record of operation `op`, if it is among the recent ones.
    fn record(&self, op: u64) -> Option<&ShownRecord> {
        self.records.iter().find(|record| record.op == op)
    }

    /// Returns the rolling hash at operation `op`, if it is known.
    fn hash_at(&self, op: u64) -> Option<u128> {
        if op == 0 {
            Some(0)
        } else {
            self.record(op).map(|record| record.hash)
        }
    }

    /// Describes operation `op` of `process` for users. `process` is the owner of these records. If
    /// `tells_steps` is true, adds the number of steps that ended before the operation.
    fn tell(&self, process: ProcessId, op: u64, tells_steps: bool) -> String {
        match self.record(op) {
            Some(record) if tells_steps => {
                format!(
                    "process {process} issued {} after {} steps",
                    record.what, record.steps
                )
            }
            Some(record) => format!("process {process} issued {}", record.what),
            None if self.count < op => {
                format!(
                    "process {process} has issued only {} operations",
                    self.count
                )
            }
            None => format!("process {process} no longer remembers its operation {op}"),
        }
    }

    /// Returns true if a correct process could have sent these operations.
    pub(super) fn is_sound(&self) -> bool {
        self.records.len() <= SHOWN
            && self.records.is_sorted_by(|one, next| one.op < next.op)
            && self.records.first().is_none_or(|first| first.op > 0)
            && self.records.last().is_none_or(|last| last.op <= self.count)
    }
}

/// The most recent operations of this process, numbered without gaps from 1.
#[derive(Default)]
pub(super) struct OpHistory {
    count: u64,
    /// The entries, oldest first.
    entries: VecDeque<KeptEntry>,
    /// Number of steps that have ended.
    steps: u64,
}

/// An entry of the history, with its place among the steps.
struct KeptEntry {
    entry: HistoryEntry,
    /// Number of steps that had ended when the entry was added.
    steps: u64,
}

/// A single operation, or the operations of a span that have been issued so far.
enum HistoryEntry {
    One(OpRecord),
    Span {
        first: u64,
        last: u64,
        span: Arc<dyn OpSpan>,
    },
}

impl HistoryEntry {
    fn first(&self) -> u64 {
        match self {
            Self::One(record) => record.op,
            Self::Span { first, .. } => *first,
        }
    }

    fn last(&self) -> u64 {
        match self {
            Self::One(record) => record.op,
            Self::Span { last, .. } => *last,
        }
    }

    fn hash_at(&self, op: u64) -> u128 {
        match self {
            Self::One(record) => record.hash,
            Self::Span { span, .. } => span.hash_at(op),
        }
    }

    fn describe(&self, op: u64) -> String {
        match self {
            Self::One(record) => record.to_string(),
            Self::Span { span, .. } => format!("operation {op} ({})", span.describe(op)),
        }
    }

    fn values(&self) -> Option<ValueHashes> {
        match self {
            Self::One(record) => record.values,
            Self::Span { span, .. } => span.values(),
        }
    }
}

impl OpHistory {
    pub(super) fn step_ended(&mut self) {
        self.steps += 1;
    }

    /// Records an operation that this process has issued.
    pub(super) fn push(&mut self, record: OpRecord) {
        debug_assert_eq!(
            record.op,
            self.count + 1,
            "operations are numbered without gaps"
        );
        self.count = record.op;
        self.keep(HistoryEntry::One(record));
    }

    /// Records that all operations up to `op` have been issued. They are parts of `span`.
    pub(super) fn extend(&mut self, op: u64, span: &Arc<dyn OpSpan>) {
        debug_assert!(op > self.count, "a span goes on");
        let first = self.count + 1;
        self.count = op;
        match self.entries.back_mut() {
            Some(KeptEntry {
                entry:
                    HistoryEntry::Span {
                        last, span: known, ..
                    },
                ..
            }) if Arc::ptr_eq(known, span) => *last = op,
            _ => self.keep(HistoryEntry::Span {
                first,
                last: op,
                span: span.clone(),
            }),
        }
    }

    /// Adds an entry, and drops the oldest one if there are too many.
    fn keep(&mut self, entry: HistoryEntry) {
        if self.entries.len() == REMEMBERED {
            self.entries.pop_front();
        }
        self.entries.push_back(KeptEntry {
            entry,
            steps: self.steps,
        });
    }

    /// Returns the number of operations that this process has issued.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the rolling hash at the last issued operation; 0 if none was issued.
    pub(super) fn hash(&self) -> u128 {
        self.entries
            .back()
            .map_or(0, |kept| kept.entry.hash_at(self.count))
    }

    /// Returns the rolling hash at operation `op`. `None` if it is not issued yet or no longer
    /// stored.
    pub(super) fn hash_at(&self, op: u64) -> Option<u128> {
        if op == 0 {
            Some(0)
        } else {
            self.entry(op).map(|kept| kept.entry.hash_at(op))
        }
    }

    /// Describes an operation, with its number. `None` if it is not issued yet or no longer stored.
    pub(super) fn describe(&self, op: u64) -> Option<String> {
        self.entry(op).map(|kept| kept.entry.describe(op))
    }

    /// Returns the entry with an operation. `None` if it is not issued yet or no longer stored.
    fn entry(&self, op: u64) -> Option<&KeptEntry> {
        let behind = usize::try_from(self.count.checked_sub(op)?).ok()?;

        // Mostly an operation of the step that is under way.
        if let Some(last) = self.entries.back()
            && last.entry.first() <= op
        {
            return Some(last);
        }

        // The entry's place if no span was issued since.
        let place = self.entries.len().checked_sub(behind + 1);
        if let Some(found) = place.and_then(|place| self.entries.get(place))
            && found.entry.first() == op
        {
            return Some(found);
        }

        let place = self.entries.partition_point(|kept| kept.entry.last() < op);
        self.entries
            .get(place)
            .filter(|kept| kept.entry.first() <= op)
    }

    /// Returns the operations to send to a peer in a dispute about operation `op`: at most 512, up
    /// to 128 of them after `op`.
    pub(super) fn show(&self, op: u64) -> ShownOperations {
        let last = self.count.min(op.saturating_add(SHOWN as u64 / 4));
        let first = (last + 1).saturating_sub(SHOWN as u64).max(1);
        let records = (first..=last)
            .filter_map(|op| Some((op, self.entry(op)?)))
            .map(|(op, KeptEntry { entry, steps })| {
                let mut what = entry.describe(op);
                // Long descriptions must not push the message over its limit.
                what.truncate(
                    (0..=1500)
                        .rev()
                        .find(|i| what.is_char_boundary(*i))
                        .unwrap_or(0),
                );
                ShownRecord {
                    op,
                    hash: entry.hash_at(op),
                    what,
                    values: entry.values(),
                    steps: *steps,
                }
            })
            .collect();
        ShownOperations {
            count: self.count,
            records,
        }
    }
}

/// The first difference between the operations of two processes.
pub(super) struct HistoryDifference {
    /// Number of the first operation that differs.
    pub(super) op: u64,
    /// A description of the difference, for users.
    pub(super) text: String,
}

/// Finds the first operation at which the hashes of two processes differ.
pub(super) fn first_difference(
    me: ProcessId,
    mine: &ShownOperations,
    peer: ProcessId,
    theirs: &ShownOperations,
) -> HistoryDifference {
    // invariant: divergence-is-an-error
    let first = first_differing_op(mine, theirs);
    let before = first.saturating_sub(1);
    let agreed_before =
        mine.hash_at(before).is_some() && mine.hash_at(before) == theirs.hash_at(before);

    // Both may have issued the same operation, but one of them a step earlier or later.
    let steps = |shown: &ShownOperations| shown.record(first).map(|record| record.steps);
    let steps_differ = steps(mine)
        .zip(steps(theirs))
        .is_some_and(|(mine, theirs)| mine != theirs);

    // The lower process comes first, so that every process gives the same text.
    let (lower, of_lower, higher, of_higher) = if me <= peer {
        (me, mine, peer, theirs)
    } else {
        (peer, theirs, me, mine)
    };
    let same = of_lower
        .record(first)
        .zip(of_higher.record(first))
        .filter(|_| !steps_differ)
        .and_then(|(x, y)| same_call(lower, x, higher, y));
    let a = of_lower.tell(lower, first, steps_differ);
    let b = same.unwrap_or_else(|| of_higher.tell(higher, first, steps_differ));

    let since = if agreed_before {
        "first differ"
    } else {
        "differ, at the latest,"
    };
    HistoryDifference {
        op: first,
        text: format!("the programs diverged: they {since} at operation {first}: {a}; {b}"),
    }
}

/// Returns the number of the first operation at which two processes differ.
fn first_differing_op(mine: &ShownOperations, theirs: &ShownOperations) -> u64 {
    let oldest = [mine, theirs]
        .iter()
        .filter_map(|shown| shown.records.first())
        .map(|record| record.op)
        .max()
        .unwrap_or(1);

    // Only operations that one of them has sent: a peer's count may be any number.
    let records = mine.records.iter().chain(&theirs.records);
    let mut known: Vec<u64> = records
        .map(|record| record.op)
        .filter(|op| *op >= oldest)
        .collect();
    known.sort_unstable();
    let differing = known
        .into_iter()
        .find(|op| mine.hash_at(*op) != theirs.hash_at(*op));

    // If all records are equal: the first operation that one of the two has not issued.
    differing.unwrap_or_else(|| match mine.count.min(theirs.count) {
        fewer if mine.count == theirs.count => fewer,
        fewer => fewer + 1,
    })
}

/// Describes the difference between two records of the same call. Returns `None` if the calls
/// differ.
fn same_call(
    first: ProcessId,
    a: &ShownRecord,
    second: ProcessId,
    b: &ShownRecord,
) -> Option<String> {
    let issued = format!("process {second} issued the same call, but");
    match (a.values, b.values) {
        (Some(x), Some(y)) if x.call == y.call && x.hash != y.hash => Some(format!(
            "{issued} the values differ: their hash is {:016x} on process {first} and {:016x} on \
             process {second}; host values must be equal on all processes: compute them everywhere \
             from the same seed or file, or on one process alone and give them to all by \
             `broadcast_value`; values that each process has of its own go into its part of an \
             array by `array_from_fn`",
            x.hash, y.hash
        )),
        _ => (a.what == b.what).then(|| format!("{issued} with other arrays or other options")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(hashes: &[u128]) -> OpHistory {
        let mut history = OpHistory::default();
        for (i, hash) in hashes.iter().enumerate() {
            history.push(OpRecord {
                op: i as u64 + 1,
                hash: *hash,
                what: Arc::new(format!("op with hash {hash}")),
                values: None,
                note: None,
                at: Location::caller(),
            });
        }
        history
    }

    #[test]
    fn first_difference_gives_the_same_text_on_both_sides() {
        let (a, b) = (
            history(&[1, 2, 3, 4]).show(4),
            history(&[1, 2, 33, 44, 55]).show(5),
        );
        let HistoryDifference { op, text } = first_difference(ProcessId(0), &a, ProcessId(1), &b);
        assert_eq!(op, 3);
        assert!(
            text.contains("process 0 issued operation 3 (op with hash 3) at"),
            "{text}"
        );
        assert!(
            text.contains("process 1 issued operation 3 (op with hash 33) at"),
            "{text}"
        );
        assert!(
            text.contains("history.rs"),
            "source lines are shown: {text}"
        );
        assert_eq!(
            first_difference(ProcessId(1), &b, ProcessId(0), &a).text,
            text
        );
    }

    /// Returns the text of the difference between two histories that differ at operation 2. They
    /// have the same description there, and these values.
    fn parted(values: [Option<ValueHashes>; 2]) -> String {
        let shown = [0, 1].map(|process: usize| {
            let mut history = OpHistory::default();
            for op in 1..=2 {
                let hash = if op == 1 { 1 } else { 20 + process as u128 };
                let (what, at) = (Arc::new("put"), Location::caller());
                history.push(OpRecord {
                    op,
                    hash,
                    what,
                    values: values[process],
                    note: None,
                    at,
                });
            }
            history.show(2)
        });
        let HistoryDifference { op, text } =
            first_difference(ProcessId(0), &shown[0], ProcessId(1), &shown[1]);
        assert_eq!(
            (op, &text),
            (
                2,
                &first_difference(ProcessId(1), &shown[1], ProcessId(0), &shown[0]).text
            )
        );
        assert!(
            text.contains("process 0 issued operation 2 (put) at"),
            "{text}"
        );
        text
    }

    #[test]
    fn differing_values_are_reported_with_both_hashes() {
        let values = |call, hash| Some(ValueHashes { call, hash });
        let text = parted([values(7, 0xab), values(7, 0xcd)]);
        let hashes =
            "their hash is 00000000000000ab on process 0 and 00000000000000cd on process 1";
        assert!(
            text.contains("process 1 issued the same call, but the values differ:"),
            "{text}"
        );
        assert!(
            text.contains(hashes) && text.contains("`broadcast_value`"),
            "{text}"
        );
        let other = "process 1 issued the same call, but with other arrays or other options";
        // Something other than the values differs.
        for values in [
            [values(7, 1), values(8, 1)],
            [values(7, 1), values(8, 2)],
            [None, None],
        ] {
            let text = parted(values);
            assert!(text.ends_with(other), "{text}");
        }
    }

    #[test]
    fn early_stop_is_reported_with_its_operation_count() {
        let (a, b) = (history(&[1, 2]).show(2), history(&[1, 2, 3]).show(3));
        let HistoryDifference { op, text } = first_difference(ProcessId(0), &a, ProcessId(1), &b);
        assert_eq!(op, 3);
        assert!(
            text.contains("process 0 has issued only 2 operations"),
            "{text}"
        );
    }

    #[test]
    fn impossible_count_of_a_peer_ends_the_comparison() {
        let mine = history(&[1, 2, 3]).show(3);
        let records = mine.records.clone();
        for (records, first, says) in [
            (records.clone(), 4, "process 0 has issued only 3 operations"),
            (
                records[..2].to_vec(),
                3,
                "process 1 no longer remembers its operation 3",
            ),
            (
                Vec::new(),
                1,
                "process 1 no longer remembers its operation 1",
            ),
        ] {
            let theirs = ShownOperations {
                count: u64::MAX,
                records,
            };
            assert!(theirs.is_sound(), "no count is too high by itself");
            let HistoryDifference { op, text } =
                first_difference(ProcessId(0), &mine, ProcessId(1), &theirs);
            assert_eq!(op, first);
            assert!(text.contains(says), "{text}");
        }
        // With operation numbers far apart, as no correct process sends them.
        let far = ShownRecord {
            op: u64::MAX,
            ..records[2].clone()
        };
        let theirs = ShownOperations {
            count: u64::MAX,
            records: [&records[..2], &[far]].concat(),
        };
        assert_eq!(
            first_difference(ProcessId(0), &mine, ProcessId(1), &theirs).op,
            3
        );
    }

    #[test]
    fn impossible_records_are_not_sound() {
        let shown = history(&[1, 2, 3]).show(3);
        assert!(shown.is_sound() && ShownOperations::default().is_sound());
        let mut twice = shown.clone();
        twice.records[1].op = 1;
        let mut beyond = shown.clone();
        beyond.count = 2;
        let mut none = shown.clone();
        none.records[0].op = 0;
        let numbered = |i| ShownRecord {
            op: i as u64 + 1,
            ..shown.records[0].clone()
        };
        let many = ShownOperations {
            count: u64::MAX,
            records: (0..=SHOWN).map(numbered).collect(),
        };
        for (i, unsound) in [twice, beyond, none, many].into_iter().enumerate() {
            assert!(!unsound.is_sound(), "case {i}");
        }
    }

    #[test]
    fn only_the_last_operations_are_remembered() {
        let hashes: Vec<u128> = (1..=REMEMBERED as u128 + 10).collect();
        let history = history(&hashes);
        assert_eq!(history.hash_at(10), None);
        assert_eq!(history.hash_at(11), Some(11));
        assert_eq!(history.hash(), REMEMBERED as u128 + 10);
    }

    /// A span with hashes that are a base plus the operation's number.
    struct Counted(u128);

    impl OpSpan for Counted {
        fn hash_at(&self, op: u64) -> u128 {
            self.0 + u128::from(op)
        }

        fn describe(&self, op: u64) -> String {
            format!("{op} of a span")
        }

        fn values(&self) -> Option<ValueHashes> {
            None
        }
    }

    fn one(history: &mut OpHistory, hash: u128) {
        let op = history.count() + 1;
        let (what, at) = (Arc::new("one"), Location::caller());
        history.push(OpRecord {
            op,
            hash,
            what,
            values: None,
            note: None,
            at,
        });
    }

    #[test]
    fn every_operation_of_a_span_has_hash_and_description() {
        let mut history = history(&[1, 2]);
        let spans: [Arc<dyn OpSpan>; 2] = [Arc::new(Counted(100)), Arc::new(Counted(200))];
        history.extend(5, &spans[0]);
        assert_eq!(
            (history.count(), history.hash(), history.hash_at(6)),
            (5, 105, None),
            "so far"
        );
        history.extend(1_000_000, &spans[0]);
        history.extend(1_000_003, &spans[1]);
        history.step_ended();
        one(&mut history, 7);
        let hashes = [
            0, 2, 3, 999_999, 1_000_000, 1_000_001, 1_000_003, 1_000_004, 1_000_005,
        ];
        let expected = [
            Some(0),
            Some(2),
            Some(103),
            Some(1_000_099),
            Some(1_000_100),
            Some(1_000_201),
            Some(1_000_203),
            Some(7),
            None,
        ];
        assert_eq!(hashes.map(|op| history.hash_at(op)), expected);
        assert_eq!(history.describe(77).unwrap(), "operation 77 (77 of a span)");
        let shown = history.show(1_000_003);
        assert_eq!(shown.records.len(), 512);
        assert_eq!(
            shown
                .records
                .last()
                .map(|record| (record.op, record.hash, record.steps)),
            Some((1_000_004, 7, 1))
        );
        assert!(
            shown
                .records
                .windows(2)
                .all(|pair| pair[0].op + 1 == pair[1].op)
        );
    }

    #[test]
    fn operations_before_many_spans_are_forgotten() {
        let mut history = history(&[1, 2]);
        for i in 0..REMEMBERED as u64 {
            let span: Arc<dyn OpSpan> = Arc::new(Counted(0));
            history.extend(2 + 10 * (i + 1), &span);
        }
        assert_eq!(
            [2, 3, 12].map(|op| history.hash_at(op)),
            [None, Some(3), Some(12)]
        );
    }
}
