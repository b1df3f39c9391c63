//! Rules of the dimensions of a computation's operands and results: those of one name have one size
//! and are divided alike.
//!
//! A rule is a text: `"b k, k n -> b n"` is that of a matrix product. [`BoundRule::check`] compares
//! the region of each device, so it works for any sharding.

mod bound;
mod infer;
mod text;

pub use bound::{BoundRule, DeviceParts, DimensionMisfit, RuleArray, RulePlace};
pub use infer::{ComputedShardings, DimensionLinks, Linearity, OperandDimension, ShardingConflict};
pub use text::DimensionRuleError;

use std::fmt;

/// The rule by which the dimensions of a computation's operands and results belong together.
///
/// The text lists the dimensions of each operand, `->`, and those of each result. Arrays are
/// separated by commas, dimensions by blanks:
///
/// | text | computation |
/// |---|---|
/// | `b k, k n -> b n` | a matrix product |
/// | `..., ... -> ...` | one on each element, with the broadcasting of numpy |
/// | `... !i -> ... !i` | a softmax over the last dimension, which each device needs whole |
/// | `i ->` | a sum of a vector |
///
/// - Dimensions of one name have one size and are divided alike.
/// - A name with `!` is never divided.
/// - `...` stands for any number of dimensions. Those of several arrays are counted from the last
///   one. Where one of them has size 1, its only element is used for all.
/// - A name that no result has is summed over: if it is divided, each device has a summand of the
///   result, which is then unreduced. Write `!` in front of it if the computation is no sum.
///
/// The form is that of Shardy's rules for custom operations, with `!` for its
/// `need_replication`.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct DimensionRule {
    /// The name of each dimension, by index.
    names: Vec<DimensionName>,
    operands: Vec<ArrayDimensions>,
    results: Vec<ArrayDimensions>,
}

/// A dimension's name in a rule.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct DimensionName {
    text: String,
    /// True if no device may have only a part of the dimension.
    is_whole: bool,
}

/// The dimensions of an array in a rule.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
struct ArrayDimensions {
    /// Indices of the names in front of `...`, or of all names without it.
    front: Vec<usize>,
    /// Indices of the names behind `...`. `None` without it.
    back: Option<Vec<usize>>,
}

impl ArrayDimensions {
    /// Returns the number of dimensions that have names.
    fn named(&self) -> usize {
        self.front.len() + self.back.as_ref().map_or(0, Vec::len)
    }
}

impl fmt::Display for DimensionRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |index: &usize| {
            let DimensionName { text, is_whole } = &self.names[*index];
            match is_whole {
                true => format!("!{text}"),
                false => text.clone(),
            }
        };
        let array = |array: &ArrayDimensions| {
            let front = array.front.iter().map(name);
            let rest = array.back.iter().map(|_| "...".to_owned());
            let back = array.back.iter().flatten().map(name);
            front.chain(rest).chain(back).collect::<Vec<_>>().join(" ")
        };
        let all =
            |arrays: &[ArrayDimensions]| arrays.iter().map(array).collect::<Vec<_>>().join(", ");
        write!(f, "{} -> {}", all(&self.operands), all(&self.results))
    }
}
