//! The records in a ring of returns, by which a borrower informs the owner of memory.

use mpmd_proto::wire::ProcessId;

/// Kinds of the records in a return ring. They differ from the record kinds of a ring of messages.
pub(super) const RETURNED: u32 = 5;
pub(super) const PASSED_ON: u32 = 6;
pub(super) const CLOSED: u32 = 9;
pub(super) const LAST: u32 = 10;

/// Largest number of 8-byte words in a note.
const MOST_WORDS: usize = 6;

/// Identifies one of the loans to a given borrower.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct LoanId {
    /// The process that lent the memory to the borrower: the owner, or a process that borrowed it
    /// before.
    pub(super) lender: ProcessId,
    /// The number that the lender chose. It is never reused for the same borrower.
    pub(super) number: u64,
}

/// A record by which a borrower informs the owner of borrowed memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReturnNote {
    /// The borrower no longer reads the memory. It has posted `to_owner` messages to the owner that
    /// contained parts of the memory.
    Returned { loan: LoanId, to_owner: u64 },
    /// The borrower lends a part of the memory to the process `to`, as its loan `number`. The part
    /// is at `offset` in the segment and has `bytes` bytes.
    PassedOn {
        loan: LoanId,
        to: ProcessId,
        number: u64,
        offset: u64,
        bytes: u64,
    },
    /// This loan was the last that reached the borrower from its lender. Loans with higher numbers
    /// are lost.
    Last(LoanId),
    /// The borrower has closed the device segment with this number, which the owner has freed.
    Closed(u32),
}

/// A note encoded as the words of a ring record.
struct EncodedNote {
    kind: u32,
    words: [u64; MOST_WORDS],
    /// Number of words at the start of `words` that the note uses.
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

    /// Decodes a record of a return ring. Returns `None` if it is not a valid note.
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
