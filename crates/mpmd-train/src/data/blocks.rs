//! The division of a long sequence of tokens into training blocks and held-out blocks.

use std::ops::Range;

use super::rows::below;

/// Length of a block, in tokens or, for a text, in bytes. Each block of a sequence is used either
/// for training or for evaluation.
pub const BLOCK: usize = 4 << 10;
/// Number of consecutive blocks of which the last one is held out for evaluation.
pub const HELD_OUT_EVERY: usize = 10;

/// Number of tokens in the training blocks between two held-out blocks.
const RUN: usize = BLOCK * (HELD_OUT_EVERY - 1);

/// The division of `len` tokens into training blocks and held-out blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceBlocks {
    pub(super) len: usize,
    /// True if all tokens are for training, and no block is held out.
    pub(super) is_whole: bool,
}

impl SequenceBlocks {
    /// Returns the ranges of token indices of the held-out blocks.
    pub(super) fn held_out(self) -> impl Iterator<Item = Range<usize>> {
        let starts = (0..self.len)
            .step_by(BLOCK)
            .skip(HELD_OUT_EVERY - 1)
            .step_by(HELD_OUT_EVERY);
        starts.map(move |start| start..self.len.min(start + BLOCK))
    }

    /// Returns the number of start positions of training sequences: `time` tokens and one more,
    /// without a held-out block between.
    pub(super) fn sequences(self, time: usize) -> usize {
        let (period, room) = (BLOCK * HELD_OUT_EVERY, |run: usize| {
            run.saturating_sub(time)
        });
        if self.is_whole {
            return room(self.len);
        }
        self.len / period * room(RUN) + room((self.len % period).min(RUN))
    }

    /// Maps 64 random bits to the index of a training sequence's first token. Returns `None` if
    /// there is no training sequence of `time` tokens and one more.
    pub(super) fn sequence_start(self, random: u64, time: usize) -> Option<usize> {
        let starts = self.sequences(time);
        if starts == 0 {
            return None;
        }
        let index = below(random, starts);
        if self.is_whole {
            return Some(index);
        }
        // All runs but the last have the same length, and the last is not longer.
        let each = RUN - time;
        Some(index / each * BLOCK * HELD_OUT_EVERY + index % each)
    }

    /// Cuts each held-out block into pieces of `time` tokens and one more within the block. Returns
    /// the index of each piece's first token.
    pub(super) fn held_out_starts(self, time: usize) -> impl Iterator<Item = usize> {
        let cut = move |block: Range<usize>| {
            (block.start..block.end)
                .step_by(time)
                .filter(move |start| start + time < block.end)
        };
        self.held_out().flat_map(cut)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn sequences_cover_exactly_the_training_runs() {
        // A run of nine blocks has a sequence for each token but the last ones.
        let run = 9 * BLOCK - 16;
        let cases = [
            (1, 1, BLOCK + 1 - 16),
            (9, 0, run),
            (10, 0, run),
            (10, 5, run),
            (10, 17, run + 1),
            (25, 100, 2 * run + 5 * BLOCK + 100 - 16),
            (30, 3000, 3 * run + 3000 - 16),
        ];
        for (count, rest, expected) in cases {
            let blocks = SequenceBlocks {
                len: count * BLOCK + rest,
                is_whole: false,
            };
            assert_eq!(blocks.sequences(16), expected, "{count} blocks, {rest}");
            let starts: BTreeSet<usize> = (0..expected as u128)
                .map(|i| {
                    let random = ((i << 64) / expected as u128 + 1) as u64;
                    blocks.sequence_start(random, 16).unwrap()
                })
                .collect();
            assert_eq!(starts.len(), expected, "each sequence once");
            // The block of each token of a sequence, and of the token after it.
            let blocks_of = |start: usize| [start / BLOCK % 10, (start + 16) / BLOCK % 10];
            assert!(starts.iter().all(|start| !blocks_of(*start).contains(&9)));
            assert!(starts.iter().all(|start| start + 16 < blocks.len));
            assert!(
                blocks
                    .held_out_starts(16)
                    .all(|start| blocks_of(start) == [9; 2])
            );
        }
        let start =
            |len, time, is_whole| SequenceBlocks { len, is_whole }.sequence_start(u64::MAX, time);
        assert_eq!(start(16, 16, false), None);
        assert_eq!(start(100 * BLOCK, RUN, false), None);
        assert_eq!(start(100 * BLOCK, RUN, true), Some(100 * BLOCK - RUN - 1));
    }
}
