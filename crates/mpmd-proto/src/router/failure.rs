//! The reason why an operation cannot complete, in a form that can be sent to other processes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wire::ProcessId;

/// The root cause of an error. All operations that fail because of it refer to the same `Failure`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The kind of failure, which shows if the environment or the program is at fault.
    pub kind: FailureKind,
    /// The process where the failure began.
    pub process: ProcessId,
    /// Number of the operation that failed or was waiting; 0 if there is no such operation.
    pub op: u64,
    /// The failure's text, for users.
    pub message: String,
    /// The second process of a divergence, which issued different operations than `process`. `None`
    /// for other kinds.
    pub other: Option<ProcessId>,
}

/// Limit in bytes on the text of a failure that is sent to peers.
const MOST_MESSAGE_BYTES: usize = 16 << 10;

/// The kind of a [`Failure`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process has died, or has gone silent. The environment is at fault.
    PeerLost,
    /// Two processes issued different operations. The program is at fault.
    Diverged,
    /// A kernel or a closure of the program failed or panicked.
    Kernel,
    /// A process has run out of memory.
    Memory,
    /// A process left before the program's end; its own error gives the reason.
    Left,
    /// The program used an array after its memory had been donated.
    Donated,
    /// A peer broke the protocol, or a transport failed.
    Transport,
}

impl Failure {
    /// Creates a failure that began on `process` in operation `op`.
    pub fn new(kind: FailureKind, process: ProcessId, op: u64, message: impl Into<String>) -> Self {
        Self {
            kind,
            process,
            op,
            message: message.into(),
            other: None,
        }
    }

    /// Cuts the text to 16 KiB, so that the failure fits a control message. Otherwise a very long
    /// text could keep the failure from being sent.
    pub fn shortened(mut self) -> Self {
        cut(&mut self.message, MOST_MESSAGE_BYTES);
        self
    }

    /// Returns true if the cause is the loss of a peer or of a connection.
    pub fn is_peer_failure(&self) -> bool {
        matches!(
            self.kind,
            FailureKind::PeerLost | FailureKind::Left | FailureKind::Transport
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// Cuts a text to at most `most` bytes, at a character boundary.
pub(super) fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(
            (0..=most)
                .rev()
                .find(|at| text.is_char_boundary(*at))
                .unwrap_or(0),
        );
        text.shrink_to_fit();
    }
}
