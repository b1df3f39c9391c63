//! The records in a ring of returns, by which a borrower informs the owner of memory.

use mpmd_proto::wire::ProcessId;

/// Record kinds of a ring of returns. They differ from those of a ring of messages.
pub(super) const RETURNED: u32 = 5;
pub(super) const PASSED_ON: u32 = 6;
pub(super) const CLOSED: u32 = 9;
pub(super) const LAST: u32 = 10;

/// The most words of 8 bytes in a note.
const MOST_WORDS: usize = 6;

/// Identifies one of the loans to a borrower.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct LoanId {
    /// The process that sent the borrower the memory: the owner, or another borrower.
    pub(super) lender: ProcessId,
    /// The number that the lender has chosen. It is never reused for the same borrower.
    pub(super) number: u64,
}

/// One record of a borrower for the owner.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReturnNote {
    /// The borrower does not read the memory any more. It has posted `to_owner` messages to the
    /// owner with parts of the memory.
    Returned { loan: LoanId, to_owner: u64 },
    /// The borrower re-lends the part at `offset` of the segment to process `to`, with the loan
    /// number `number`.
    PassedOn {
        loan: LoanId,
        to: ProcessId,
        number: u64,
        offset: u64,
        bytes: u64,
    },
    /// No more loans of `lender` reach the borrower. Those with higher numbers were lost.
    Last(LoanId),
    /// The borrower has closed a freed device segment.
    Closed(u32),
}

/// A note as the words of a record.
struct EncodedNote {
    kind: u32,
    words: [u64; MOST_WORDS],
    /// Number of the words that the note takes.
    used: usize,
}

impl ReturnNote {
    /// Encodes the note.
    fn encode(&self) -> EncodedNote {
        let encoded = |kind, words, used| EncodedNote { kind, words, used };
        let id = |loan: LoanId| [u64::from(loan.lender.0), loan.number];
        match *self {
            Self::Returned { loan, to_owner } => {
                let [lender, number] = id(loan);
                encoded(RETURNED, [lender, number, to_owner, 0, 0, 0], 3)
            }
            Self::PassedOn {
                loan,
                to,
                number: new,
                offset,
                bytes,
            } => {
                let [lender, number] = id(loan);
                let words = [lender, number, u64::from(to.0), new, offset, bytes];
                encoded(PASSED_ON, words, 6)
            }
            Self::Last(loan) => {
                let [lender, number] = id(loan);
                encoded(LAST, [lender, number, 0, 0, 0, 0], 2)
            }
            Self::Closed(segment) => encoded(CLOSED, [u64::from(segment), 0, 0, 0, 0, 0], 1),
        }
    }

    /// Encodes the note and passes the record's kind and payload to `push`.
    pub(super) fn push<R>(&self, push: impl FnOnce(u32, &[u8]) -> R) -> R {
        let EncodedNote { kind, words, used } = self.encode();
        let bytes = words.map(u64::to_le_bytes);
        push(kind, bytes[..used].as_flattened())
    }

    /// Decodes a record. Returns `None` for any other record.
    pub(super) fn read(kind: u32, bytes: &[u8]) -> Option<Self> {
        let (chunks, []) = bytes.as_chunks::<8>() else {
            return None;
        };
        if chunks.len() > MOST_WORDS {
            return None;
        }

        let mut words = [0; MOST_WORDS];
        for (word, chunk) in words.iter_mut().zip(chunks) {
            *word = u64::from_le_bytes(*chunk);
        }

        let process = |word: u64| u32::try_from(word).ok().map(ProcessId);
        let id = |lender, number| {
            Some(LoanId {
                lender: process(lender)?,
                number,
            })
        };

        Some(match (kind, &words[..chunks.len()]) {
            (RETURNED, &[lender, number, to_owner]) => Self::Returned {
                loan: id(lender, number)?,
                to_owner,
            },
            (PASSED_ON, &[lender, number, to, new, offset, bytes]) => Self::PassedOn {
                loan: id(lender, number)?,
                to: process(to)?,
                number: new,
                offset,
                bytes,
            },
            (LAST, &[lender, number]) => Self::Last(id(lender, number)?),
            (CLOSED, &[segment]) => Self::Closed(u32::try_from(segment).ok()?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_written_and_others_are_not() {
        let loan = LoanId {
            lender: ProcessId(3),
            number: u64::MAX,
        };
        let notes = [
            ReturnNote::Returned { loan, to_owner: 9 },
            ReturnNote::PassedOn {
                loan,
                to: ProcessId(7),
                number: 8,
                offset: 1 << 40,
                bytes: 5,
            },
            ReturnNote::Last(loan),
            ReturnNote::Closed(u32::MAX),
        ];
        for note in notes {
            let (kind, bytes) = note.push(|kind, bytes| (kind, bytes.to_vec()));
            assert_eq!(ReturnNote::read(kind, &bytes), Some(note));
            assert_eq!(ReturnNote::read(kind, &bytes[1..]), None);
            assert_eq!(
                ReturnNote::read(kind, &[&bytes[..], &[0; 8]].concat()),
                None
            );
            assert_eq!(ReturnNote::read(99, &bytes), None);
        }
        assert_eq!(ReturnNote::read(CLOSED, &u64::MAX.to_le_bytes()), None);
        assert_eq!(
            ReturnNote::read(LAST, &[0xff; 16]),
            None,
            "no process has this id"
        );
    }
}
