//! Training windows of a text: [`CONTEXT`] bytes and the byte that follows.

use std::ops::Range;

pub use mpmd_train::data::{BLOCK, HELD_OUT_EVERY, SEPARATOR, Text};

use crate::math::random_bits;
use crate::next_byte::{BYTES, CONTEXT};

/// Methods of a [`Text`] for a model that predicts the next byte from the last [`CONTEXT`] bytes.
pub trait ByteWindows {
    /// Returns the number of training windows.
    fn training_windows(&self) -> usize;

    /// Returns the training window for one row of one step's batch: (the context, the byte that
    /// follows). It is the same on every process.
    ///
    /// # Panics
    ///
    /// If there is no training window.
    fn sample(&self, seed: u64, step: u64, row: u64) -> (&[u8], u8);

    /// Returns the number of held-out bytes: zero if the text is shorter than [`HELD_OUT_EVERY`]
    /// blocks.
    fn held_out_windows(&self) -> usize;

    /// Returns (the context, the byte) for each held-out byte, in order. The first contexts of a
    /// block overlap the training text before the block.
    fn held_out(&self) -> impl Iterator<Item = (&[u8], u8)>;

    /// Returns the cross-entropy of the held-out bytes under the byte frequencies of the training
    /// text, in nats per byte. A model should be below it. Each frequency count is one more than
    /// the number seen. `None` if nothing is held out.
    fn byte_frequency_loss(&self) -> Option<f64>;
}

impl ByteWindows for Text {
    fn training_windows(&self) -> usize {
        self.sequences(CONTEXT)
    }

    fn sample(&self, seed: u64, step: u64, row: u64) -> (&[u8], u8) {
        // Each step has its own stream, and each row a place in it.
        let random = random_bits(random_bits(seed, step), row);
        let (context, targets) =
            self.sequence(random, CONTEXT).expect("the text has a training window");
        (context, targets[CONTEXT - 1])
    }

    fn held_out_windows(&self) -> usize {
        self.held_out_blocks().map(|block| block.len()).sum()
    }

    fn held_out(&self) -> impl Iterator<Item = (&[u8], u8)> {
        let bytes = self.bytes();
        self.held_out_blocks().flatten().map(move |at| (&bytes[at - CONTEXT..at], bytes[at]))
    }

    fn byte_frequency_loss(&self) -> Option<f64> {
        let mut seen = [1u64; BYTES];
        let runs: Vec<Range<usize>> = self.training_runs().collect();
        for byte in runs.into_iter().flat_map(|run| &self.bytes()[run]) {
            seen[usize::from(*byte)] += 1;
        }
        let total = seen.iter().sum::<u64>() as f64;
        let losses =
            self.held_out().map(|(_, byte)| -(seen[usize::from(byte)] as f64 / total).ln());
        let held_out = self.held_out_windows();
        (held_out > 0).then(|| losses.sum::<f64>() / held_out as f64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns a text in which each byte marks its block: `h` in held-out blocks, `t` in the
    /// others.
    fn marked(blocks: usize, rest: usize) -> Text {
        let len = blocks * BLOCK + rest;
        let mark =
            |at: usize| if at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 { b'h' } else { b't' };
        Text::of_files(&[(0..len - 1).map(mark).collect()]).unwrap()
    }

    #[test]
    fn each_held_out_byte_has_one_window() {
        let text = marked(25, 100);
        assert_eq!(text.held_out_windows(), 2 * BLOCK);
        let windows: Vec<_> = text.held_out().collect();
        assert_eq!(windows.len(), 2 * BLOCK);
        assert!(
            windows.iter().all(|(context, target)| context.len() == CONTEXT && *target == b'h')
        );
        assert_eq!(windows[0].0, [b't'; CONTEXT]);
        let short = marked(9, 0);
        assert_eq!((short.held_out_windows(), short.byte_frequency_loss()), (0, None));
    }

    #[test]
    fn samples_depend_on_seed_step_and_row_and_cover_the_text() {
        let text = Text::of_files(&[(0..200u8).map(|i| i.max(1)).collect()]).unwrap();
        let draw =
            |seed, step| (0..16).map(|row| text.sample(seed, step, row).1).collect::<Vec<_>>();
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
        let seen: BTreeSet<u8> = (0..5000).map(|step| text.sample(7, step, 0).1).collect();
        assert_eq!(seen.len(), text.training_windows());
    }

    #[test]
    fn byte_frequency_loss_matches_its_definition() {
        let text = marked(10, 0);
        // Training text has no `h`, and each of 256 counts is one more. The separator ends the
        // held-out block.
        let total = (9 * BLOCK + BYTES) as f64;
        assert!((text.byte_frequency_loss().unwrap() - total.ln()).abs() < 1e-12);
        let even: Vec<u8> = (0..20 * BLOCK).map(|i| if i % 2 == 0 { b'a' } else { b'b' }).collect();
        let loss = Text::of_files(&[even]).unwrap().byte_frequency_loss().unwrap();
        assert!((loss - 2f64.ln()).abs() < 0.01, "{loss}");
    }
}
