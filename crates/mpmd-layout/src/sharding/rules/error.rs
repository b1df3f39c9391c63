//! The errors of tactics and of strategies, alone and applied to leaves.

use crate::aval::ShapedArray;
use crate::sharding::{Spec, SpecEntry};
use crate::topology::Mesh;

/// The reason that a strategy gives no shardings. Always the caller's fault, and the same on every
/// process.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RulesError {
    /// The strategy has no rules.
    #[error("the strategy has no rule; `(\".*\", \"replicate\")` keeps every leaf whole")]
    EmptyStrategy,
    /// There are no leaves to shard.
    #[error("there is no leaf to shard")]
    NoLeaves,
    /// A pattern starts with a slash. Names of leaves never do, so the pattern would match nothing.
    #[error("rule {rule}: pattern {pattern:?} starts with `/`, but names of leaves do not")]
    PatternStartsWithSlash {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
    },
    /// A pattern is not a regular expression.
    #[error("rule {rule}: pattern {pattern:?}{}: {message}", position.map(|at| format!(", \
        position {at}")).unwrap_or_default())]
    BadPattern {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
        /// The position of the problem in the pattern, in bytes from 0, or `None` if it is unknown.
        position: Option<usize>,
        /// The problem with the pattern.
        message: String,
    },
    /// A pattern of logical names is not a regular expression.
    #[error("logical names: pattern {pattern:?}{}: {message}", position.map(|at| format!(", \
        position {at}")).unwrap_or_default())]
    BadLogicalPattern {
        /// The pattern of logical names.
        pattern: String,
        /// The position of the problem in the pattern, in bytes from 0, or `None` if it is unknown.
        position: Option<usize>,
        /// The problem with the pattern.
        message: String,
    },
    /// Matching a pattern took more steps than allowed.
    #[error("rule {rule}: pattern {pattern:?} cannot be matched with leaf `{leaf}`: {message}")]
    PatternGaveUp {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
        /// The name of the leaf that was matched.
        leaf: String,
        /// The message of the regular expression engine.
        message: String,
    },
    /// A tactic cannot be parsed.
    #[error("rule {rule}, pattern {pattern:?}: {source}")]
    Tactic {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
        /// The problem with the tactic, and its position.
        source: Box<ParseError>,
    },
    /// A tactic calls an op that is not registered.
    #[error("rule {rule}, pattern {pattern:?}: there is no op `{op}`; known are \
        {}", known.join(", "))]
    UnknownOp {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
        /// The name of the missing op.
        op: String,
        /// The registered names, sorted.
        known: Vec<String>,
    },
    /// An op is called with wrong arguments.
    #[error("rule {rule}, pattern {pattern:?}: `{op}` {message}")]
    Arguments {
        /// The rule's index in the strategy, from 0.
        rule: usize,
        /// The rule's pattern.
        pattern: String,
        /// The call of the op, as written in the tactic.
        op: String,
        /// The problem with the arguments.
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
        /// The leaf's final spec.
        spec: Box<Spec>,
        /// The unknown axis.
        axis: String,
        /// The op that added the axis, as written.
        op: String,
        /// The mesh that lacks the axis.
        mesh: Mesh,
    },
    /// A leaf's final spec uses an axis more than once.
    #[error("leaf `{leaf}`: {spec} uses axis `{axis}` twice, by `{first}` and by `{second}`")]
    AxisUsedTwice {
        /// The leaf's name.
        leaf: String,
        /// The leaf's final spec.
        spec: Box<Spec>,
        /// The axis that is used twice.
        axis: String,
        /// The op that used the axis first, as written.
        first: Box<str>,
        /// The op that used the axis again, as written; may be the same op.
        second: Box<str>,
    },
    /// The leaves need more memory on each device than the budget.
    #[error("the leaves need {needed} bytes of each device, the budget is {budget}; largest: \
        {}", largest_text(largest, *leaves))]
    OverBudget {
        /// Bytes that all leaves together need on each device.
        needed: u64,
        /// The budget: bytes allowed on each device.
        budget: u64,
        /// The five largest leaves, or all if there are fewer, as (name, bytes per device), largest
        /// first.
        largest: Vec<(String, u64)>,
        /// Number of leaves in all.
        leaves: usize,
    },
    /// The registry already has an op of that name.
    #[error("there is an op `{name}` already; `replace` replaces it")]
    NameTaken {
        /// The name that is registered already.
        name: String,
    },
    /// The name of an op is no identifier, nor several identifiers joined by dots.
    #[error("{name:?} cannot be an op's name: names are identifiers, or several joined by dots")]
    BadName {
        /// The refused name.
        name: String,
    },
}

/// The error of an op that refused a leaf. Names the rule, the op and the leaf.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "leaf `{leaf}`, {aval} with spec {spec}: `{op}` of rule {rule} (pattern {pattern:?}): {reason}"
)]
#[non_exhaustive]
pub struct OpFailed {
    /// The rule's index in the strategy, from 0.
    pub rule: usize,
    /// The rule's pattern.
    pub pattern: String,
    /// The op, as written in the tactic.
    pub op: String,
    /// The leaf's name.
    pub leaf: String,
    /// The leaf's shape and dtype.
    pub aval: ShapedArray,
    /// The leaf's spec before the op.
    pub spec: Spec,
    /// The reason that the op refuses the leaf.
    pub reason: OpError,
}

/// The reason that an op refuses a leaf.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The dimension is divided already, by an earlier op.
    #[error("dimension {dim} is divided over {by} already")]
    AlreadySharded {
        /// Index of the divided dimension, from 0.
        dim: usize,
        /// The axes that divide the dimension.
        by: SpecEntry,
    },
    /// The leaf is divided, but `replicate` needs a leaf that is whole.
    #[error("inconsistent: the leaf is divided already, so it cannot be replicated")]
    NotWhole,
    /// The leaf has no such dimension.
    #[error(
        "dimension {dim} is out of range: its absolute value must be below {ndim}, the number of \
         dimensions"
    )]
    DimOutOfRange {
        /// The requested dimension; a negative number counts from the end.
        dim: i64,
        /// Number of dimensions of the leaf.
        ndim: usize,
    },
    /// The mesh has no such axis.
    #[error("there is no axis `{axis}` in the mesh {mesh}")]
    UnknownAxis {
        /// The unknown axis.
        axis: String,
        /// The mesh that lacks the axis.
        mesh: Mesh,
    },
    /// An earlier op of the tactic keeps the leaf whole along the axis.
    #[error("it divides over axis `{axis}`, but `{by}` keeps the leaf whole along it")]
    KeptWhole {
        /// The axis along which the leaf is kept whole.
        axis: String,
        /// The earlier op, as written.
        by: String,
    },
    /// An earlier op of the tactic divides the leaf over the axis.
    #[error("it keeps the leaf whole along axis `{axis}`, but `{by}` divides over it")]
    DividedBefore {
        /// The axis over which the leaf is divided.
        axis: String,
        /// The earlier op, as written.
        by: String,
    },
    /// Two dimensions of the leaf have the same logical name.
    #[error("logical name `{name}` comes twice in {}", names_text(names))]
    DuplicateLogicalName {
        /// The repeated logical name.
        name: String,
        /// The logical names of all dimensions.
        names: Vec<Option<String>>,
    },
    /// The leaf has more or fewer logical names than dimensions.
    #[error(
        "its logical names are {}, but it has {ndim} dimensions",
        names_text(names)
    )]
    LogicalNames {
        /// The logical names of the leaf's dimensions.
        names: Vec<Option<String>>,
        /// Number of dimensions of the leaf.
        ndim: usize,
    },
    /// A user's op refuses the leaf, with this message.
    #[error("{0}")]
    Refused(String),
}

/// The error that a tactic cannot be parsed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("tactic {text:?}, column {column}: expected {expected}, found {found}")]
#[non_exhaustive]
pub struct ParseError {
    /// The text of the whole tactic.
    pub text: String,
    /// The position of the error in the tactic, in characters from 1.
    pub column: usize,
    /// The text or kind of text that the parser expects at that column.
    pub expected: String,
    /// The text found at that column, or "the end".
    pub found: String,
    pub(super) kind: ErrorKind,
}

/// The error of an op that is called with wrong arguments. The text is a predicate to the op's
/// name, for example "has no argument `dim`".
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ArgumentError(pub String);

/// The class of an error, named like the exception that the Python original raises.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An error that is a `ValueError` in Python.
    Value,
    /// An error that is a `KeyError` in Python.
    Key,
    /// An error that is a `SyntaxError` in Python.
    Syntax,
    /// An error that is a `TypeError` in Python.
    Type,
    /// An error that is an `AssertionError` in Python.
    Assertion,
    /// An error that is a `DuplicateSpecError` in the Python original.
    DuplicateSpec,
}

impl RulesError {
    /// Returns the class of the error.
    ///
    /// Errors that the Python original does not know (a pattern that is not a regular expression, a
    /// memory budget) are [`ErrorKind::Value`].
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
            | Self::BadLogicalPattern { .. }
            | Self::PatternGaveUp { .. }
            | Self::UnknownAxis { .. }
            | Self::OverBudget { .. }
            | Self::BadName { .. } => ErrorKind::Value,
        }
    }
}

impl ErrorKind {
    /// Returns the name of the Python exception, for example `ValueError`.
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

impl OpError {
    /// Returns the class of the error, named like a Python exception.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownAxis { .. } => ErrorKind::Key,
            _ => ErrorKind::Value,
        }
    }
}

impl ParseError {
    /// Returns [`ErrorKind::Syntax`] or [`ErrorKind::Value`], as
    /// [`OpCall::parse_tactic`](super::OpCall::parse_tactic) describes.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

fn largest_text(largest: &[(String, u64)], leaves: usize) -> String {
    let listed: Vec<String> = largest
        .iter()
        .map(|(leaf, bytes)| format!("`{leaf}` {bytes}"))
        .collect();
    let more = match leaves - largest.len() {
        0 => String::new(),
        more => format!(" and {more} more leaves"),
    };
    format!("{}{more}", listed.join(", "))
}

fn names_text(names: &[Option<String>]) -> String {
    let names: Vec<&str> = names
        .iter()
        .map(|name| name.as_deref().unwrap_or("None"))
        .collect();
    format!("({})", names.join(", "))
}
