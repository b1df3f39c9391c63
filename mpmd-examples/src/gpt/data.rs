//! The sequences that a transformer learns from and is tested with, made where they are needed.

use std::ops::Range;
use std::sync::Arc;

use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;

use crate::text::Text;

/// A text cut into sequences of one length. Clones share it.
#[derive(Clone, Debug)]
pub struct Sequences {
    text: Arc<Text>,
    time: usize,
    held_out: Arc<[Sequence]>,
}

/// Tokens, and the byte that follows each.
type Sequence = (Vec<u8>, Vec<u8>);

impl Sequences {
    /// Sequences of `time` tokens.
    ///
    /// # Errors
    ///
    /// Where no run of training blocks is that long, or `time` is zero.
    pub fn new(text: &Arc<Text>, time: usize) -> Result<Self> {
        if time == 0 || text.sequence(0, 0, 0, time).is_none() {
            let problem = format!("{} bytes of text have no training sequence of {time}", text.bytes().len());
            return Err(Error::Environment(problem));
        }
        let held_out = text.held_out_sequences(time).into_iter();
        let held_out = held_out.map(|(tokens, targets)| (tokens.to_vec(), targets.to_vec())).collect();
        Ok(Self { text: text.clone(), time, held_out })
    }

    /// How many held-out sequences there are.
    pub fn held_out_len(&self) -> usize {
        self.held_out.len()
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
        self.make(p, (first, last), rows.len(), move |row, side, out| {
            let Some(sequence) = this.text.sequence(seed, step, (start + row) as u64, this.time) else {
                return;
            };
            out.copy_from_slice(match side {
                Side::Tokens => sequence.0,
                Side::Targets => sequence.1,
            });
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
        self.make(p, (first, last), rows.len(), move |row, side, out| {
            let (tokens, targets) = &this.held_out[start + row];
            out.copy_from_slice(match side {
                Side::Tokens => tokens,
                Side::Targets => targets,
            });
        })
    }

    fn make(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        rows: usize,
        fill: impl Fn(usize, Side, &mut [u8]) + Clone + Send + Sync + 'static,
    ) -> Result<(MpmdArray, MpmdArray)> {
        let time = self.time;
        let mut made = |mesh: &Mesh, side| {
            let fill = fill.clone();
            p.make(u8s([rows, time]), &mesh.replicated(), move |region, mut out| {
                let out = out.as_mut_slice::<u8>()?.chunks_exact_mut(time);
                out.zip(region.range(0)).for_each(|(out, row)| fill(row, side, out));
                Ok(())
            })
        };
        Ok((made(first, Side::Tokens)?, made(last, Side::Targets)?))
    }
}

/// Which half of a sequence.
#[derive(Clone, Copy)]
enum Side {
    Tokens,
    Targets,
}

#[cfg(test)]
mod tests {
    use mpmd_core::Simulation;

    use super::*;
    use crate::text::BLOCK;

    #[test]
    fn tokens_and_targets_are_the_texts_sequences_wherever_they_are_made() {
        let text =
            Arc::new(Text::of_files(&[(0..20 * BLOCK).map(|i| (i % 251) as u8 + 1).collect()]).unwrap());
        let sequences = Sequences::new(&text, 8).unwrap();
        let host = |array: &MpmdArray| -> Result<Option<Vec<u8>>> {
            array.to_host()?.map(|host| host.to_vec::<u8>().map_err(Error::from)).transpose()
        };
        let results = Simulation::new(2, 2).run(|p| {
            let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
            let ends = (&meshes[0], &meshes[1]);
            let training = sequences.make_training(p, ends, (3, 7), 2..5)?;
            let held_out = sequences.make_held_out(p, ends, 1..3)?;
            Ok([host(&training.0)?, host(&training.1)?, host(&held_out.0)?, host(&held_out.1)?])
        });
        let results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
        let rows: Vec<_> = (2..5).map(|row| text.sequence(3, 7, row, 8).unwrap()).collect();
        let held_out = &text.held_out_sequences(8)[1..3];
        let tokens = |rows: &[(&[u8], &[u8])]| Some(rows.iter().flat_map(|row| row.0).copied().collect());
        let targets = |rows: &[(&[u8], &[u8])]| Some(rows.iter().flat_map(|row| row.1).copied().collect());
        assert_eq!(results[0], [tokens(&rows), None, tokens(held_out), None]);
        assert_eq!(results[1], [None, targets(&rows), None, targets(held_out)]);
        assert_eq!(sequences.held_out_len(), text.held_out_sequences(8).len());
    }

    #[test]
    fn a_text_that_is_too_short_is_an_error() {
        let text = Arc::new(Text::of_files(&[vec![b'x'; 99]]).unwrap());
        assert!(Sequences::new(&text, 100).is_err() && Sequences::new(&text, 0).is_err());
        assert_eq!(Sequences::new(&text, 99).unwrap().held_out_len(), 0);
    }
}
