//! Sequences of unequal lengths, padded to a few lengths.

use std::sync::Arc;

use mpmd_core::pipeline::Microbatch;
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::random::{self, Key};
use mpmd_layout::sharding::Spec;
use mpmd_layout::topology::Mesh;

use super::rows::{Named, array_of_rows, below, ends};
use super::{At, Data, HELD_OUT_EVERY};

/// Sequences of tokens of unequal lengths. Each microbatch has rows of one *bucket*: a length to
/// which shorter sequences are padded.
///
/// A sequence goes to the bucket with the smallest sufficient length. Its input is all tokens but
/// the last, its targets all but the first. The first stage gets the inputs, `u32` of shape
/// `[rows, length]`. The last stage gets the side inputs `targets` (`u32`) and `weights` (`f32`) of
/// the same shape. Tokens of padding are 0 and have weight 0, others weight 1.
///
/// Every tenth sequence is held out. Training rows are drawn from all others, by the microbatch's
/// key alone.
#[derive(Clone, Debug)]
pub struct Buckets {
    sequences: Arc<[Vec<u32>]>,
    rows: usize,
    spec: Spec,
    /// Names of targets and weights.
    names: (String, String),
    /// (length, indices of the training sequences) of each bucket that has any.
    training: Arc<[(usize, Vec<usize>)]>,
    /// (length, indices of the sequences) of each held-out microbatch.
    held_out: Arc<[(usize, Vec<usize>)]>,
}

impl Buckets {
    /// Distributes sequences over buckets of these lengths. A microbatch has `rows` rows.
    ///
    /// # Errors
    ///
    /// If a sequence has less than two tokens, or more than the longest bucket takes. If there are
    /// no sequences, or no rows.
    pub fn new(sequences: Vec<Vec<u32>>, lengths: &[usize], rows: usize) -> Result<Self> {
        if sequences.is_empty() || rows == 0 {
            let problem = format!("{} sequences in rows of {rows}", sequences.len());
            return Err(Error::Environment(problem));
        }
        let mut lengths = lengths.to_vec();
        lengths.sort_unstable();
        lengths.dedup();
        let mut training: Vec<(usize, Vec<usize>)> =
            lengths.iter().map(|length| (*length, Vec::new())).collect();
        let mut held_out = training.clone();
        for (index, sequence) in sequences.iter().enumerate() {
            let bucket = lengths.partition_point(|length| length + 1 < sequence.len());
            if sequence.len() < 2 || bucket == lengths.len() {
                let (tokens, longest) = (sequence.len(), lengths.last().copied().unwrap_or(0));
                return Err(Error::Environment(format!(
                    "sequence {index} has {tokens} tokens: buckets take 2 to {}",
                    longest + 1
                )));
            }
            let is_held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
            let all = if is_held_out { &mut held_out } else { &mut training };
            all[bucket].1.push(index);
        }
        training.retain(|(_, members)| !members.is_empty());
        let held_out = held_out.iter().flat_map(|(length, members)| {
            members.chunks(rows).map(|members| (*length, members.to_vec()))
        });
        Ok(Self {
            rows,
            spec: Spec::default(),
            names: ("targets".to_owned(), "weights".to_owned()),
            training: training.into(),
            held_out: held_out.collect(),
            sequences: sequences.into(),
        })
    }

    /// Sets the sharding of the arrays over the stages' meshes, for instance `spec!["data"]`.
    /// Default: replicated on every device.
    #[must_use]
    pub fn sharded(mut self, spec: Spec) -> Self {
        self.spec = spec;
        self
    }

    /// Sets the names of the targets and the weights among the last stage's side inputs.
    #[must_use]
    pub fn side_names(mut self, targets: impl Into<String>, weights: impl Into<String>) -> Self {
        self.names = (targets.into(), weights.into());
        self
    }

    /// Issues the making of a microbatch of one bucket. `sequence` maps a row to the index of its
    /// sequence, or `None` for a row of padding.
    fn microbatch(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        length: usize,
        sequence: impl Fn(usize) -> Option<usize> + Clone + Send + Sync + 'static,
    ) -> Result<Microbatch<MpmdArray>> {
        let (first, last) = ends(meshes, &self.spec);
        let shape = [self.rows, length];
        // Maps (row, column) to a token, or `None` in the padding.
        let tokens = |shift: usize| {
            let (all, sequence) = (self.sequences.clone(), sequence.clone());
            move |row: usize, column: usize| {
                let tokens = &all[sequence(row)?];
                // The last token is only a target.
                (column + 1 < tokens.len()).then(|| tokens[column + shift])
            }
        };
        let (input, target) = (tokens(0), tokens(1));
        let is_real = target.clone();
        let inputs = array_of_rows::<u32>(p, &first, shape, move |row, columns, values| {
            let values = values.iter_mut().zip(columns);
            values.for_each(|(value, column)| *value = input(row, column).unwrap_or(0));
            Ok(())
        })?;
        let targets = array_of_rows::<u32>(p, &last, shape, move |row, columns, values| {
            let values = values.iter_mut().zip(columns);
            values.for_each(|(value, column)| *value = target(row, column).unwrap_or(0));
            Ok(())
        })?;
        let weights = array_of_rows::<f32>(p, &last, shape, move |row, columns, values| {
            let values = values.iter_mut().zip(columns);
            values.for_each(|(value, column)| {
                *value = f32::from(u8::from(is_real(row, column).is_some()));
            });
            Ok(())
        })?;
        let names = self.names.clone();
        let side = Named::from([(names.0, targets), (names.1, weights)]);
        Ok(Microbatch::new(inputs).side(meshes.len() - 1, side))
    }
}

impl Data<MpmdArray> for Buckets {
    fn compare(&self, p: &mut Program) -> Result<()> {
        let tokens: usize = self.sequences.iter().map(Vec::len).sum();
        let hash = self.sequences.iter().fold(Key(tokens as u64), |key, sequence| {
            let key = key.fold_in(sequence.len() as u64);
            sequence.iter().fold(key, |key, token| key.fold_in(u64::from(*token)))
        });
        let count = self.sequences.len();
        p.assert_same(format!("{count} sequences of {tokens} tokens, with hash {:016x}", hash.0))
    }

    fn training(&self, p: &mut Program, meshes: &[Mesh], at: At) -> Result<Microbatch<MpmdArray>> {
        // A bucket is drawn as often as it has sequences.
        let count: usize = self.training.iter().map(|(_, members)| members.len()).sum();
        let mut drawn = below(random::bits(at.key, u64::MAX), count);
        for (bucket, (length, members)) in self.training.iter().enumerate() {
            if drawn < members.len() {
                let training = self.training.clone();
                return self.microbatch(p, meshes, *length, move |row| {
                    let members = &training[bucket].1;
                    Some(members[below(random::bits(at.key, row as u64), members.len())])
                });
            }
            drawn -= members.len();
        }
        Err(Error::kernel("there are no training sequences: one in ten is held out"))
    }

    /// Returns the number of microbatches. The last of a bucket may have rows of padding.
    fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        let missing = || Error::kernel(format!("there is no held-out microbatch {index}"));
        let (length, members) = self.held_out.get(index).cloned().ok_or_else(missing)?;
        self.microbatch(p, meshes, length, move |row| members.get(row).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_go_to_the_smallest_bucket() {
        let sequence = |tokens: usize| vec![7; tokens];
        let sequences = [2, 5, 6, 9, 3, 3, 3, 3, 3, 4].map(sequence).to_vec();
        let buckets = Buckets::new(sequences, &[8, 4], 2).unwrap();
        assert_eq!(*buckets.training, [(4, vec![0, 1, 4, 5, 6, 7, 8]), (8, vec![2, 3])]);
        assert_eq!(*buckets.held_out, [(4, vec![9])]);
        for wrong in [vec![sequence(10)], vec![sequence(1)], vec![]] {
            assert!(Buckets::new(wrong, &[4, 8], 2).is_err());
        }
    }
}
