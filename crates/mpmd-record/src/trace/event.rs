//! Events of a traced process.

use serde::{Deserialize, Serialize};

use crate::trace::Label;

/// An event of a traced process.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct TraceEvent {
    /// Time in nanoseconds since the process's trace began.
    pub at: u64,
    /// The kind of the event, with its data.
    pub what: TraceEventKind,
}

/// The kinds of events. Texts are numbers: indices into
/// [`ProcessTrace::texts`](super::ProcessTrace::texts). Times are in nanoseconds since the
/// process's trace began.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub enum TraceEventKind {
    /// The program issued an operation in which this process takes part.
    Issued {
        /// The number of the operation.
        op: u64,
        /// The part of the operation in a pipeline; `None` outside of pipelines.
        label: Option<Label>,
        /// The text that describes the operation: an index into `ProcessTrace::texts`.
        text: u32,
        /// The source line that issued the operation, as a text: an index into
        /// `ProcessTrace::texts`.
        line: u32,
        /// The operation that made the array, for a `device_put`; 0 if there is none.
        source: u64,
    },
    /// A device started its part of an operation, after the inputs were ready.
    Started {
        /// The number of the operation.
        op: u64,
        /// The device's index in this process.
        device: u32,
        /// Time at which the device took up the operation, in nanoseconds since the process's trace
        /// began.
        since: u64,
        /// The operation that made the last input that the device waited for; 0 if all were ready.
        input: u64,
        /// Bytes of arrays on the device, this operation's outputs included.
        memory: u64,
    },
    /// A device ended its part of an operation.
    Ended {
        /// The number of the operation.
        op: u64,
        /// The device's index in this process.
        device: u32,
        /// Bytes of arrays on the device at this time.
        memory: u64,
    },
    /// All parts of an operation on this process have ended, and its sends are complete.
    Over {
        /// The number of the operation.
        op: u64,
    },
    /// A piece made progress. A piece is a part of an array that one process sends to another.
    Piece {
        /// The progress that the piece made.
        step: PieceStep,
        /// The number of the operation.
        op: u64,
        /// The number of the piece in the operation.
        piece: u64,
        /// The process at the other end of the transfer.
        peer: u32,
        /// Size of the piece in bytes.
        bytes: u64,
        /// For [`PieceStep::Posted`], the ticket by which [`TraceEventKind::Left`] reports
        /// completion. For other progress it is 0.
        ticket: u64,
    },
    /// The transport of the sender has completed a send.
    Left {
        /// The ticket of the send: that of its [`PieceStep::Posted`].
        ticket: u64,
    },
    /// The program's thread has waited until now.
    Waited {
        /// Start of the wait, in nanoseconds since the process's trace began.
        since: u64,
        /// The text that names the waiting call: an index into `ProcessTrace::texts`.
        text: u32,
        /// The source line of the wait, as a text: an index into `ProcessTrace::texts`.
        line: u32,
    },
    /// The program's thread has been in a range that the program named, until now.
    Annotated {
        /// Start of the range, in nanoseconds since the process's trace began.
        since: u64,
        /// The name as a text: an index into `ProcessTrace::texts`.
        text: u32,
        /// The source line of the range, as a text: an index into `ProcessTrace::texts`.
        line: u32,
    },
    /// The program ended a step.
    StepEnd {
        /// Number of the step, from 1.
        step: u64,
        /// The number of the last operation that was issued before the end of the step.
        op: u64,
    },
}

/// The progress of a piece that is sent from one process to another.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum PieceStep {
    /// The bytes are ready, and the sender's router has them.
    Offered,
    /// The bytes were given to the sender's transport.
    Posted,
    /// The receiver's program has issued the operation of the piece.
    Expected,
    /// The bytes have arrived at the receiver; in a zero-copy transfer, the notice of their
    /// location.
    Arrived,
    /// The bytes are available to the receiver's operation.
    Taken,
}
