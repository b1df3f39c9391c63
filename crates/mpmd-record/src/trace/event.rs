//! Events of a traced process.

use serde::{Deserialize, Serialize};

use crate::trace::Label;

/// An event of a traced process.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct TraceEvent {
    /// Time in nanoseconds since the process's trace began.
    pub at: u64,
    /// The kind of the event, with the data of that kind.
    pub what: TraceEventKind,
}

/// The kinds of events. A text is given as a number: an index into
/// [`ProcessTrace::texts`](super::ProcessTrace::texts). Times are in nanoseconds since the
/// process's trace began.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub enum TraceEventKind {
    /// The program issued an operation in which this process takes part.
    Issued {
        /// The number of the operation.
        op: u64,
        /// The operation's stage, microbatch and role in a pipeline; `None` outside of pipelines.
        label: Option<Label>,
        /// Description of the operation, as an index into `ProcessTrace::texts`.
        text: u32,
        /// Source line that issued the operation, as an index into `ProcessTrace::texts`.
        line: u32,
        /// For a `device_put`, the number of the operation that made the array; 0 if there is none.
        source: u64,
    },
    /// A device started its part of an operation, after the inputs were ready.
    Started {
        /// The number of the operation.
        op: u64,
        /// The device's index in this process.
        device: u32,
        /// Time at which the device took the operation from its queue, in nanoseconds since the
        /// process's trace began.
        since: u64,
        /// Number of the operation whose output was the last input that the device waited for; 0 if
        /// all inputs were ready.
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
    /// All parts of an operation on this process have ended, and all its sends are complete.
    Over {
        /// The number of the operation.
        op: u64,
    },
    /// A piece of an array, which one process sends to another, reached a stage of its transfer.
    Piece {
        /// The stage of the transfer that the piece reached.
        step: PieceStep,
        /// The number of the operation.
        op: u64,
        /// The number of the piece in the operation.
        piece: u64,
        /// The other process of the transfer.
        peer: u32,
        /// Size of the piece in bytes.
        bytes: u64,
        /// For [`PieceStep::Posted`], a number by which [`TraceEventKind::Left`] reports that the
        /// send completed. 0 for other stages.
        ticket: u64,
    },
    /// The sender's transport completed the send of a piece.
    Left {
        /// The ticket of the send, from the event with its [`PieceStep::Posted`].
        ticket: u64,
    },
    /// The program thread ended a wait.
    Waited {
        /// Start of the wait, in nanoseconds since the process's trace began.
        since: u64,
        /// Name of the call that waited, as an index into `ProcessTrace::texts`.
        text: u32,
        /// Source line of the wait, as an index into `ProcessTrace::texts`.
        line: u32,
    },
    /// The program thread left a range that the program had given a name.
    Annotated {
        /// Start of the range, in nanoseconds since the process's trace began.
        since: u64,
        /// Name of the range, as an index into `ProcessTrace::texts`.
        text: u32,
        /// Source line of the range, as an index into `ProcessTrace::texts`.
        line: u32,
    },
    /// The program ended a step.
    StepEnd {
        /// Number of the step, from 1.
        step: u64,
        /// Number of the last operation that was issued before the end of the step.
        op: u64,
    },
    /// A kernel ended a wait for values of other devices, in a collective. Recorded of devices that
    /// run kernels on threads of the host.
    CollectiveWaited {
        /// The number of the operation.
        op: u64,
        /// The device's index in this process.
        device: u32,
        /// Start of the wait, in nanoseconds since the process's trace began.
        since: u64,
    },
}

/// The stages of the transfer of a piece from one process to another.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum PieceStep {
    /// The bytes are ready, and the sender's router knows of them.
    Offered,
    /// The bytes were given to the sender's transport.
    Posted,
    /// The receiver's program has issued the operation that the piece belongs to.
    Expected,
    /// The bytes have arrived at the receiver. In a zero-copy transfer, the message with their
    /// location has arrived.
    Arrived,
    /// The bytes are available to the receiver's operation.
    Taken,
}
