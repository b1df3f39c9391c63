//! The sequences that a transformer learns from and is tested with, made where they are needed.

use std::ops::Range;
use std::sync::Arc;

use mpmd_core::prelude::*;
use mpmd_core::random::{Key, bits};
use mpmd_core::topology::Mesh;

use crate::text::{BLOCK, HELD_OUT_EVERY, Text};

/// A text cut into sequences of one length. Clones share it.
#[derive(Clone, Debug)]
pub struct Sequences {
    text: Arc<Text>,
    time: usize,
    /// For each run of training blocks: how many sequences start before it, and where it starts.
    runs: Vec<(usize, usize)>,
    training: usize,
    /// Where the targets of each held-out sequence start.
    held_out: Arc<[usize]>,
}

impl Sequences {
    /// Sequences of `time` tokens; each has as many targets, one byte further on.
    ///
    /// # Errors
    ///
    /// Where no run of training blocks is that long.
    pub fn new(text: &Arc<Text>, time: usize) -> Result<Self> {
        let len = text.bytes().len();
        let (mut runs, mut training) = (Vec::new(), 0);
        let mut held_out = Vec::new();
        for start in (0..len).step_by(BLOCK * HELD_OUT_EVERY) {
            let end = len.min(start + BLOCK * (HELD_OUT_EVERY - 1));
            if end - start > time {
                runs.push((training, start));
                training += end - start - time;
            }
            let block_end = len.min(end + BLOCK);
            held_out.extend((end..block_end).step_by(time).filter(|first| first + time <= block_end));
        }
        if training == 0 || time == 0 {
            let problem = format!("{len} bytes of text have no training sequence of {time}");
            return Err(Error::Environment(problem));
        }
        Ok(Self { text: text.clone(), time, runs, training, held_out: held_out.into() })
    }

    /// The bytes of a step's sequence and the one after it: `time + 1`, none of them held out.
    pub fn training(&self, seed: u64, step: u64, row: u64) -> &[u8] {
        let draw = bits(Key(seed).fold_in(step), row);
        // The high half of the product maps 64 random bits onto the sequences; how unevenly is far below
        // what anyone could see.
        let index = ((u128::from(draw) * self.training as u128) >> 64) as usize;
        let (before, start) = self.runs[self.runs.partition_point(|(before, _)| *before <= index) - 1];
        &self.text.bytes()[start + index - before..][..self.time + 1]
    }

    /// How many held-out sequences there are. They do not overlap.
    pub fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    /// Held-out sequence `index`: `time` held-out bytes, and the byte before them.
    ///
    /// # Panics
    ///
    /// Where there are not as many.
    pub fn held_out(&self, index: usize) -> &[u8] {
        &self.text.bytes()[self.held_out[index] - 1..][..self.time + 1]
    }

    /// Tokens (on `first`) and targets (on `last`) of rows of a step, `[rows, time]` each.
    ///
    /// # Errors
    ///
    /// As [`Program::make`].
    pub fn make_training(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        (seed, step): (u64, u64),
        rows: Range<usize>,
    ) -> Result<(MpmdArray, MpmdArray)> {
        let this = self.clone();
        let start = rows.start;
        self.make(p, (first, last), rows.len(), move |row, out, shift| {
            let bytes = this.training(seed, step, (start + row) as u64);
            out.copy_from_slice(&bytes[shift..][..this.time]);
        })
    }

    /// Tokens and targets of held-out sequences, `[rows, time]` each.
    ///
    /// # Errors
    ///
    /// As [`Program::make`].
    pub fn make_held_out(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        rows: Range<usize>,
    ) -> Result<(MpmdArray, MpmdArray)> {
        let this = self.clone();
        let start = rows.start;
        self.make(p, (first, last), rows.len(), move |row, out, shift| {
            out.copy_from_slice(&this.held_out(start + row)[shift..][..this.time]);
        })
    }

    fn make(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        rows: usize,
        fill: impl Fn(usize, &mut [u8], usize) + Clone + Send + Sync + 'static,
    ) -> Result<(MpmdArray, MpmdArray)> {
        let time = self.time;
        let mut made = |mesh: &Mesh, shift| {
            let fill = fill.clone();
            p.make(u8s([rows, time]), &mesh.replicated(), move |region, mut out| {
                let out = out.as_mut_slice::<u8>()?.chunks_exact_mut(time);
                out.zip(region.range(0)).for_each(|(out, row)| fill(row, out, shift));
                Ok(())
            })
        };
        Ok((made(first, 0)?, made(last, 1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text in which every byte tells its block: held-out blocks are all `h`, the others all `t`.
    fn marked(blocks: usize, rest: usize) -> Arc<Text> {
        let len = blocks * BLOCK + rest;
        let mark = |at: usize| if at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 { b'h' } else { b't' };
        Arc::new(Text::of_files(&[(0..len - 1).map(mark).collect()]).unwrap())
    }

    #[test]
    fn training_sequences_have_no_held_out_byte_and_cover_the_rest() {
        let sequences = Sequences::new(&marked(21, 100), 64).unwrap();
        assert_eq!(sequences.training, 2 * (9 * BLOCK - 64) + BLOCK + 100 - 64);
        let (mut first, mut last) = (usize::MAX, 0);
        for row in 0..20_000 {
            let bytes = sequences.training(3, 5, row);
            assert!(bytes.len() == 65 && !bytes.contains(&b'h'), "{row}");
            let at = bytes.as_ptr() as usize - sequences.text.bytes().as_ptr() as usize;
            (first, last) = (first.min(at), last.max(at + 65));
        }
        assert!(first < 50 && last > 21 * BLOCK, "{first} {last}");
        assert_eq!(sequences.training(3, 5, 9), sequences.training(3, 5, 9));
        let at = |seed, step| sequences.training(seed, step, 9).as_ptr();
        assert!(at(3, 5) != at(4, 5) && at(3, 5) != at(3, 6));
    }

    #[test]
    fn held_out_sequences_have_each_held_out_byte_once() {
        let sequences = Sequences::new(&marked(21, 100), 64).unwrap();
        assert_eq!(sequences.held_out_len(), 2 * BLOCK / 64);
        for index in 0..sequences.held_out_len() {
            assert!(sequences.held_out(index)[1..].iter().all(|byte| *byte == b'h'));
        }
        assert_eq!(Sequences::new(&marked(2, 0), 64).unwrap().held_out_len(), 0);
    }

    #[test]
    fn a_text_that_is_too_short_is_an_error() {
        assert!(Sequences::new(&marked(1, 0), BLOCK).is_err());
        assert_eq!(Sequences::new(&marked(1, 0), BLOCK - 1).unwrap().training, 1);
    }
}
