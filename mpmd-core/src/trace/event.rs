//! What a traced process notes: events of one size, as memory and files have them.

use crate::trace::Label;

/// Bytes of an event in a file.
pub(super) const EVENT_BYTES: usize = 6 * 8;

/// What a word says that says nothing: no label, no operation's input.
const NONE: u64 = u64::MAX;

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// When, in nanoseconds since the process began its trace.
    pub at: u64,
    /// What.
    pub what: What,
}

/// What happened. Texts are numbers: places in [`ProcessTrace::texts`](super::ProcessTrace::texts).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum What {
    /// The program issued an operation in which this process takes part.
    Issued {
        /// Its number.
        op: u64,
        /// What it is for.
        label: Option<Label>,
        /// The text that describes it.
        text: u32,
        /// The text of the program's line.
        line: u32,
        /// The operation that made what a `device_put` moves; 0 for none.
        source: u64,
    },
    /// A device began with its part: the inputs are there.
    Started {
        /// The operation.
        op: u64,
        /// The device's place among those of this process.
        device: u32,
        /// When the device turned to it.
        since: u64,
        /// The operation that made the input that was waited for last; 0 where all were there.
        input: u64,
        /// Bytes of arrays that the device has, this operation's outputs included.
        memory: u64,
    },
    /// A device has ended its part.
    Ended {
        /// The operation.
        op: u64,
        /// The device's place among those of this process.
        device: u32,
        /// Bytes of arrays that the device has.
        memory: u64,
    },
    /// All parts of an operation have ended here, and others have what they get of it.
    Over {
        /// The operation.
        op: u64,
    },
    /// Something became of a piece.
    Piece {
        /// What became of it.
        step: PieceStep,
        /// The operation.
        op: u64,
        /// Its number within the operation.
        piece: u64,
        /// The process at the other end.
        peer: u32,
        /// Its size.
        bytes: u64,
        /// Of [`PieceStep::Posted`], by which [`What::Left`] says that it is done; else 0.
        ticket: u64,
    },
    /// The transport is done with what it was given under this number.
    Left {
        /// The number.
        ticket: u64,
    },
    /// The program's thread has waited, until now.
    Waited {
        /// Since when.
        since: u64,
        /// The text that says in what.
        text: u32,
        /// The text of the program's line.
        line: u32,
    },
    /// The program ended a step.
    StepEnd {
        /// Which, from 1.
        step: u64,
        /// The last operation issued before.
        op: u64,
    },
}

/// What becomes of a piece that goes from one process to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PieceStep {
    /// Its bytes are there, and the router has them.
    Offered,
    /// The transport has got it.
    Posted,
    /// The receiver has issued what it is for.
    Expected,
    /// It has come, or word of where it is.
    Arrived,
    /// Its bytes are here.
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
/// Of the first step of a piece; the others follow.
const PIECE: u8 = 16;

impl Event {
    /// Six words, the lowest byte first: time, kind with two halves above it, and what the kind
    /// has.
    pub(super) fn to_bytes(self) -> [u8; EVENT_BYTES] {
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
            What::StepEnd { step, op } => (STEP_END, 0, [step, op, 0, 0]),
        };
        let mut bytes = [0; EVENT_BYTES];
        let first = [self.at, u64::from(kind) | u64::from(high) << 32];
        for (to, word) in bytes.chunks_exact_mut(8).zip(first.into_iter().chain(words)) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` where it is of a kind that this version does not know.
    pub(super) fn of_bytes(bytes: &[u8; EVENT_BYTES]) -> Option<Self> {
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
    fn events_are_bytes_and_bytes_events() {
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
