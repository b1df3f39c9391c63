//! What a kernel declares before it runs.

use std::fmt;

use crate::aval::ShapedArray;

/// A kernel's outputs, and what else the framework must know before it runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Signature<O> {
    pub(crate) outputs: O,
    pub(crate) aliases: Vec<(String, String)>,
    pub(crate) collectives: Vec<Collective>,
}

/// A collective operation that a kernel declares, in the order of its calls.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Collective {
    pub(crate) kind: CollectiveKind,
    pub(crate) axis: String,
    pub(crate) aval: ShapedArray,
}

/// Kinds of [`Collective`].
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// Every device gets the sum over the axis, added in the order of the devices along it.
    AllReduce,
}

impl<O> Signature<O> {
    /// A kernel that makes `outputs`, a tree of global shapes, and communicates nothing.
    pub fn new(outputs: O) -> Self {
        Self { outputs, aliases: Vec::new(), collectives: Vec::new() }
    }

    /// The output leaf at path `output` is the input leaf at path `input`, updated in place.
    ///
    /// Both must have one shape and dtype. The kernel finds the input's values in the output's view,
    /// and the input's own view is empty. Where the input is donated and nobody else holds its memory
    /// the output takes that memory over; otherwise the values are copied first. A tree of one leaf has
    /// the path `""`.
    #[must_use]
    pub fn alias(mut self, input: impl Into<String>, output: impl Into<String>) -> Self {
        self.aliases.push((input.into(), output.into()));
        self
    }

    /// The kernel's next call to a collective is an all-reduce over mesh axis `axis` of at most as many
    /// elements per device as `aval` has.
    #[must_use]
    pub fn all_reduce(mut self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.collectives.push(Collective { kind: CollectiveKind::AllReduce, axis: axis.into(), aval });
        self
    }

    /// The declared outputs.
    pub fn outputs(&self) -> &O {
        &self.outputs
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CollectiveKind::AllReduce => write!(f, "all_reduce of {} over {:?}", self.aval, self.axis),
        }
    }
}
