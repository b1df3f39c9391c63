//! What can be wrong with a strategy, or with a strategy for some leaves.

use super::ops::OpError;
use super::reader::ParseError;
use crate::aval::ShapedArray;
use crate::sharding::Spec;
use crate::topology::Mesh;

/// Why a strategy gives no shardings. Always the caller's fault, and the same on every process.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RulesError {
    /// A strategy without rules.
    #[error("the strategy has no rule; `(\".*\", \"replicate\")` keeps every leaf whole")]
    EmptyStrategy,
    /// Nothing to shard.
    #[error("there is no leaf to shard")]
    NoLeaves,
    /// Names never start with a slash, so such a pattern is a mistake.
    #[error("rule {rule}: pattern {pattern:?} starts with `/`, but names of leaves do not")]
    PatternStartsWithSlash {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
    },
    /// A pattern is no regular expression.
    #[error("rule {rule}: pattern {pattern:?}{}: {message}", position.map(|at| format!(", \
        position {at}")).unwrap_or_default())]
    BadPattern {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
        /// Where in the pattern, in bytes from 0, if that is known.
        position: Option<usize>,
        /// What is wrong there.
        message: String,
    },
    /// Matching took more steps than is allowed.
    #[error("rule {rule}: pattern {pattern:?} cannot be matched with leaf `{leaf}`: {message}")]
    PatternGaveUp {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
        /// The leaf's name.
        leaf: String,
        /// Why.
        message: String,
    },
    /// A tactic cannot be read.
    #[error("rule {rule}, pattern {pattern:?}: {source}")]
    Tactic {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
        /// What is wrong with the tactic, and where.
        source: Box<ParseError>,
    },
    /// Nobody registered an op of that name.
    #[error("rule {rule}, pattern {pattern:?}: there is no op `{op}`; known are \
        {}", known.join(", "))]
    UnknownOp {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
        /// The name.
        op: String,
        /// The registered names, sorted.
        known: Vec<String>,
    },
    /// An op is called with other arguments than it takes.
    #[error("rule {rule}, pattern {pattern:?}: `{op}` {message}")]
    Arguments {
        /// The rule's index.
        rule: usize,
        /// Its pattern.
        pattern: String,
        /// The call as written.
        op: String,
        /// What is wrong.
        message: String,
    },
    /// An op refuses a leaf.
    #[error(transparent)]
    Op(Box<OpFailed>),
    /// A leaf's final spec names an axis that the mesh does not have.
    #[error("leaf `{leaf}`: {spec} names axis `{axis}` (by `{op}`), but the mesh is {mesh}")]
    UnknownAxis {
        /// The leaf's name.
        leaf: String,
        /// Its final spec.
        spec: Box<Spec>,
        /// The axis.
        axis: String,
        /// The op that put it there, as written.
        op: String,
        /// The mesh.
        mesh: Mesh,
    },
    /// A leaf's final spec uses an axis more than once.
    #[error("leaf `{leaf}`: {spec} uses axis `{axis}` twice, by `{first}` and by `{second}`")]
    AxisUsedTwice {
        /// The leaf's name.
        leaf: String,
        /// Its final spec.
        spec: Box<Spec>,
        /// The axis.
        axis: String,
        /// The op that used it first, as written.
        first: Box<str>,
        /// The op that used it again; may be the same.
        second: Box<str>,
    },
    /// The leaves need more memory of a device than they may.
    #[error("the leaves need {needed} bytes of each device, the budget is {budget}; largest: \
        {}", largest_text(largest, *leaves))]
    OverBudget {
        /// Bytes that all leaves together need of each device.
        needed: u64,
        /// Bytes that they may need.
        budget: u64,
        /// The largest leaves and their bytes per device, largest first.
        largest: Vec<(String, u64)>,
        /// How many leaves there are.
        leaves: usize,
    },
    /// An op of that name is registered already.
    #[error("there is an op `{name}` already; `replace` replaces it")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// No tactic could call an op of that name.
    #[error("{name:?} cannot be an op's name: names are identifiers, or several joined by dots")]
    BadName {
        /// The name.
        name: String,
    },
}

/// An op that refuses a leaf, with all there is to say about where.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "leaf `{leaf}`, {aval} with spec {spec}: `{op}` of rule {rule} (pattern {pattern:?}): {reason}"
)]
#[non_exhaustive]
pub struct OpFailed {
    /// The rule's index.
    pub rule: usize,
    /// Its pattern.
    pub pattern: String,
    /// The op as written.
    pub op: String,
    /// The leaf's name.
    pub leaf: String,
    /// Its shape and dtype.
    pub aval: ShapedArray,
    /// Its spec before the op.
    pub spec: Spec,
    /// Why the op refuses.
    pub reason: OpError,
}

/// The class of an error, as programs that know this kind of strategy from Python name it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// `ValueError`
    Value,
    /// `KeyError`
    Key,
    /// `SyntaxError`
    Syntax,
    /// `TypeError`
    Type,
    /// `AssertionError`
    Assertion,
    /// `DuplicateSpecError`
    DuplicateSpec,
}

impl RulesError {
    /// The class of the error.
    ///
    /// What the Python original has no such class for (a pattern that is no regular expression, a
    /// memory budget) counts as [`ErrorKind::Value`].
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::PatternStartsWithSlash { .. } => ErrorKind::Assertion,
            Self::Tactic { source, .. } => source.kind(),
            Self::UnknownOp { .. } | Self::NameTaken { .. } => ErrorKind::Key,
            Self::Arguments { .. } => ErrorKind::Type,
            Self::Op(failed) => failed.reason.kind(),
            Self::AxisUsedTwice { .. } => ErrorKind::DuplicateSpec,
            Self::EmptyStrategy
            | Self::NoLeaves
            | Self::BadPattern { .. }
            | Self::PatternGaveUp { .. }
            | Self::UnknownAxis { .. }
            | Self::OverBudget { .. }
            | Self::BadName { .. } => ErrorKind::Value,
        }
    }
}

impl ErrorKind {
    /// The name of the class: `ValueError`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Value => "ValueError",
            Self::Key => "KeyError",
            Self::Syntax => "SyntaxError",
            Self::Type => "TypeError",
            Self::Assertion => "AssertionError",
            Self::DuplicateSpec => "DuplicateSpecError",
        }
    }
}

fn largest_text(largest: &[(String, u64)], leaves: usize) -> String {
    let listed: Vec<String> =
        largest.iter().map(|(leaf, bytes)| format!("`{leaf}` {bytes}")).collect();
    let more = match leaves - largest.len() {
        0 => String::new(),
        more => format!(" and {more} more leaves"),
    };
    format!("{}{more}", listed.join(", "))
}
