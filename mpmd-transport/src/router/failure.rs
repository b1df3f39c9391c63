//! Why an operation cannot complete, in a form that travels between processes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wire::ProcessId;

/// What went wrong, at its root. Shared by everything that fails because of it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// Whose fault it is, and what kind.
    pub kind: FailureKind,
    /// The process where it began.
    pub process: ProcessId,
    /// The operation that failed or that waited; 0 where it was none in particular.
    pub op: u64,
    /// What happened, for people.
    pub message: String,
    /// The second process of a divergence, which `process` found to have issued other operations.
    pub other: Option<ProcessId>,
}

/// The longest message that travels, in bytes.
const MOST_MESSAGE_BYTES: usize = 16 << 10;

/// Kinds of [`Failure`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process is gone, or has gone silent. The environment's fault.
    PeerLost,
    /// Two processes issued different operations. The program's fault.
    Diverged,
    /// A kernel or a closure of the program failed or panicked.
    Kernel,
    /// Memory ran out.
    Memory,
    /// A process left before the program's end; its own error says why.
    Left,
    /// An array's memory had been donated.
    Donated,
    /// A peer broke the protocol, or a transport failed.
    Transport,
}

impl Failure {
    /// A failure that began on `process` in operation `op`.
    pub fn new(kind: FailureKind, process: ProcessId, op: u64, message: impl Into<String>) -> Self {
        Self { kind, process, op, message: message.into(), other: None }
    }

    /// Cuts the message to a length that fits a control message beside other things: an error text
    /// without end must not keep the failure from arriving.
    pub fn shortened(mut self) -> Self {
        cut(&mut self.message, MOST_MESSAGE_BYTES);
        self
    }

    /// Whether a process other than the one asking is at fault by having disappeared.
    pub fn is_peer_failure(&self) -> bool {
        matches!(self.kind, FailureKind::PeerLost | FailureKind::Left | FailureKind::Transport)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// Shortens a text to at most `most` bytes.
pub(super) fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate((0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0));
        text.shrink_to_fit();
    }
}
