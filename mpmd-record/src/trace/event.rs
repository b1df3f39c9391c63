//! Events of a traced process. All have the same size, in memory and in files.

use crate::trace::Label;

/// Size of an event in a file, in bytes.
pub(super) const EVENT_BYTES: usize = 6 * 8;

/// The word of an absent label.
const NONE: u64 = u64::MAX;

/// An event of a traced process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// Time in nanoseconds since the process's trace began.
    pub at: u64,
    /// The kind of the event, with its data.
    pub what: What,
}

/// The kinds of events. Texts are numbers: indices into
/// [`ProcessTrace::texts`](super::ProcessTrace::texts). Times are in nanoseconds since the
/// process's trace began.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum What {
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
        /// For [`PieceStep::Posted`], the ticket by which [`What::Left`] reports completion. For
        /// other progress it is 0.
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
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
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

impl PieceStep {
    const ALL: [Self; 5] =
        [Self::Offered, Self::Posted, Self::Expected, Self::Arrived, Self::Taken];
}

const ISSUED: u8 = 1;
const STARTED: u8 = 2;
const ENDED: u8 = 3;
const OVER: u8 = 4;
const LEFT: u8 = 5;
const WAITED: u8 = 6;
const STEP_END: u8 = 7;
const ANNOTATED: u8 = 8;
/// The kind of an event of a piece's first step; the other steps follow in the order of
/// `PieceStep`.
const PIECE: u8 = 16;

impl Event {
    /// Encodes the event as six little-endian words. The words are: time, then the kind with a
    /// 32-bit value above it, then four words of the kind.
    #[doc(hidden)]
    pub fn to_bytes(self) -> [u8; EVENT_BYTES] {
        let (kind, high, words) = match self.what {
            What::Issued { op, label, text, line, source } => {
                let texts = u64::from(text) | u64::from(line) << 32;
                (ISSUED, 0, [op, label.map_or(NONE, Label::word), texts, source])
            }
            What::Started { op, device, since, input, memory } => {
                (STARTED, device, [op, since, input, memory])
            }
            What::Ended { op, device, memory } => (ENDED, device, [op, memory, 0, 0]),
            What::Over { op } => (OVER, 0, [op, 0, 0, 0]),
            What::Piece { step, op, piece, peer, bytes, ticket } => {
                (PIECE + step as u8, peer, [op, piece, bytes, ticket])
            }
            What::Left { ticket } => (LEFT, 0, [ticket, 0, 0, 0]),
            What::Waited { since, text, line } => {
                (WAITED, 0, [since, u64::from(text) | u64::from(line) << 32, 0, 0])
            }
            What::Annotated { since, text, line } => {
                (ANNOTATED, 0, [since, u64::from(text) | u64::from(line) << 32, 0, 0])
            }
            What::StepEnd { step, op } => (STEP_END, 0, [step, op, 0, 0]),
        };
        let mut bytes = [0; EVENT_BYTES];
        let first = [self.at, u64::from(kind) | u64::from(high) << 32];
        for (to, word) in bytes.chunks_exact_mut(8).zip(first.into_iter().chain(words)) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes an event. `None` if its kind is unknown to this version.
    #[doc(hidden)]
    pub fn of_bytes(bytes: &[u8; EVENT_BYTES]) -> Option<Self> {
        let mut words = [0; 6];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into().ok()?);
        }
        let [at, kind, a, b, c, d] = words;
        let high = (kind >> 32) as u32;
        let texts = |word: u64| (word as u32, (word >> 32) as u32);
        let what = match kind as u8 {
            ISSUED => {
                let ((text, line), label) = (texts(c), (b != NONE).then(|| Label::of_word(b)));
                What::Issued { op: a, label, text, line, source: d }
            }
            STARTED => What::Started { op: a, device: high, since: b, input: c, memory: d },
            ENDED => What::Ended { op: a, device: high, memory: b },
            OVER => What::Over { op: a },
            LEFT => What::Left { ticket: a },
            WAITED => {
                let (text, line) = texts(b);
                What::Waited { since: a, text, line }
            }
            ANNOTATED => {
                let (text, line) = texts(b);
                What::Annotated { since: a, text, line }
            }
            STEP_END => What::StepEnd { step: a, op: b },
            kind => {
                let step = *PieceStep::ALL.get(usize::from(kind.checked_sub(PIECE)?))?;
                What::Piece { step, op: a, piece: b, peer: high, bytes: c, ticket: d }
            }
        };
        Some(Self { at, what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Role;

    #[test]
    fn events_survive_encoding() {
        let label = Some(Label { stage: 3, microbatch: Some(1), role: Role::SendForward });
        let piece =
            |step| What::Piece { step, op: 9, piece: u64::MAX, peer: 7, bytes: 1 << 40, ticket: 3 };
        let whats = [
            What::Issued { op: u64::MAX - 1, label, text: u32::MAX, line: 2, source: 4 },
            What::Issued { op: 1, label: None, text: 0, line: 0, source: 0 },
            What::Started { op: 2, device: 5, since: 3, input: 1, memory: 1 << 50 },
            What::Ended { op: 2, device: 5, memory: 6 },
            What::Over { op: 2 },
            What::Left { ticket: 3 },
            What::Waited { since: 4, text: 1, line: 9 },
            What::Annotated { since: 5, text: 8, line: 9 },
            What::StepEnd { step: 1, op: 2 },
        ];
        for what in whats.into_iter().chain(PieceStep::ALL.map(piece)) {
            let event = Event { at: 1 << 60, what };
            assert_eq!(Event::of_bytes(&event.to_bytes()), Some(event));
        }
        assert_eq!(Event::of_bytes(&[0; EVENT_BYTES]), None);
        assert_eq!(Event::of_bytes(&[0xff; EVENT_BYTES]), None);
    }
}
