//! Sequences of unequal lengths, several in a row.

use std::collections::BTreeSet;
use std::sync::Arc;

use mpmd_core::aval::Element;
use mpmd_core::pipeline::Microbatch;
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::random::{self, Key};
use mpmd_layout::sharding::Spec;
use mpmd_layout::topology::Mesh;

use super::rows::{Named, array_of_rows};
use super::{Data, HELD_OUT_EVERY, MicrobatchPlace};

/// (token, true if the token counts in the loss) for each token. Usually the tokens of a prompt do
/// not count, and those of the reply do.
pub type Sequence = Vec<(u32, bool)>;

/// Sequences of tokens of unequal lengths, packed into rows of `time` tokens. Packing does not
/// change the loss if no token attends to another sequence.
///
/// The input of a sequence is all tokens but the last; its targets are all tokens but the first.
/// The first stage gets the inputs, `u32` of shape `[rows, time]`. Every stage gets the side input
/// `starts`, `u32` of the same shape: the column at which the token's sequence starts, for
/// `Mask::CausalFrom`. The last stage also gets `targets` (`u32`) and `weights` (`f32`). The weight
/// is 1 for a target that counts in the loss, otherwise 0. The rest of a row is filled with tokens
/// 0 of weight 0, each a sequence of its own.
///
/// An epoch of training uses each row once, in an order that depends only on the seed and the
/// epoch. Without separate sequences for evaluation, every tenth sequence is held out.
#[derive(Clone, Debug)]
pub struct PackedSequences {
    /// The sequences for training, then the sequences for evaluation.
    sequences: Arc<[Sequence]>,
    time: usize,
    rows: usize,
    spec: Spec,
    /// The indices of the sequences in each training row.
    training: Arc<[Vec<usize>]>,
    /// The indices of the sequences in each held-out row.
    held_out: Arc<[Vec<usize>]>,
}

/// The values for one column of a row.
#[derive(Clone, Copy)]
struct RowToken {
    input: u32,
    start: u32,
    target: u32,
    weight: f32,
}

impl PackedSequences {
    /// Packs sequences into rows of `time` tokens. Takes the longest sequences first, and puts each
    /// into the row with the least sufficient space. A microbatch has `rows` rows.
    ///
    /// # Errors
    ///
    /// If no token of a sequence behind its first counts in the loss, or a sequence has more than
    /// `time + 1` tokens. If there is no sequence for training, or `rows` is 0.
    pub fn new(
        training: Vec<Sequence>,
        held_out: Option<Vec<Sequence>>,
        time: usize,
        rows: usize,
    ) -> Result<Self> {
        let own = training.len();
        let is_held_out = |index: &usize| match held_out {
            Some(_) => *index >= own,
            None => index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1,
        };
        let all = own + held_out.as_ref().map_or(0, Vec::len);
        let (evaluated, trained) = (0..all).partition::<Vec<usize>, _>(is_held_out);
        let sequences: Vec<Sequence> = training
            .into_iter()
            .chain(held_out.into_iter().flatten())
            .collect();
        for (index, sequence) in sequences.iter().enumerate() {
            let tokens = sequence.len();
            if tokens > time + 1 || !sequence.iter().skip(1).any(|(_, has_loss)| *has_loss) {
                return Err(Error::Environment(format!(
                    "sequence {index} has {tokens} tokens: expected at most {} for rows of {time}, \
                     and one with a loss behind the first",
                    time + 1
                )));
            }
        }
        if trained.is_empty() || rows == 0 {
            let trained = trained.len();
            return Err(Error::Environment(format!(
                "{trained} sequences in {rows} rows"
            )));
        }

        let pack = |members| pack(&sequences, members, time);
        let training = pack(trained).into();
        let held_out = pack(evaluated).into();
        let spec = Spec::default();
        Ok(Self {
            time,
            rows,
            spec,
            training,
            held_out,
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

    /// Returns the number of training rows, which are an epoch.
    pub fn training_rows(&self) -> usize {
        self.training.len()
    }

    /// Issues the operations that create a microbatch. `members` returns the indices of a row's
    /// sequences.
    fn microbatch(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        members: impl Fn(usize) -> Vec<usize> + Clone + Send + Sync + 'static,
    ) -> Result<Microbatch<MpmdArray>> {
        let inputs = self.array(p, &meshes[0], members.clone(), |token| token.input)?;

        let mut microbatch = Microbatch::new(inputs);
        for (stage, mesh) in meshes.iter().enumerate() {
            let starts = self.array(p, mesh, members.clone(), |token| token.start)?;
            let mut side = Named::from([("starts".to_owned(), starts)]);
            if stage == meshes.len() - 1 {
                let targets = self.array(p, mesh, members.clone(), |token| token.target)?;
                let weights = self.array(p, mesh, members.clone(), |token| token.weight)?;
                side.extend([
                    ("targets".to_owned(), targets),
                    ("weights".to_owned(), weights),
                ]);
            }
            microbatch = microbatch.side(stage, side);
        }
        Ok(microbatch)
    }

    fn array<T: Element>(
        &self,
        p: &mut Program,
        mesh: &Mesh,
        members: impl Fn(usize) -> Vec<usize> + Send + Sync + 'static,
        value: impl Fn(RowToken) -> T + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        let all = self.sequences.clone();
        let shape = [self.rows, self.time];
        let sharding = mesh.sharding(self.spec.clone());
        array_of_rows::<T>(p, &sharding, shape, move |row, columns, values| {
            let tokens = tokens(&all, &members(row)).skip(columns.start);
            values
                .iter_mut()
                .zip(tokens)
                .for_each(|(to, token)| *to = value(token));
            Ok(())
        })
    }
}

/// Returns the columns of a row with these sequences, followed by padding without end.
fn tokens(all: &[Sequence], members: &[usize]) -> impl Iterator<Item = RowToken> + use<> {
    let mut row = Vec::new();
    for sequence in members.iter().map(|member| &all[*member]) {
        let start = row.len() as u32;
        row.extend(sequence.windows(2).map(|pair| {
            let [(input, _), (target, has_loss)] = [pair[0], pair[1]];
            RowToken {
                input,
                start,
                target,
                weight: f32::from(u8::from(has_loss)),
            }
        }));
    }

    let end = row.len() as u32;
    let fill = |start| RowToken {
        input: 0,
        start,
        target: 0,
        weight: 0.0,
    };
    row.into_iter().chain((end..).map(fill))
}

/// Packs the sequences `members` into rows of `time` tokens. Returns the members of each row.
fn pack(sequences: &[Sequence], mut members: Vec<usize>, time: usize) -> Vec<Vec<usize>> {
    members.sort_by_key(|member| std::cmp::Reverse(sequences[*member].len()));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // (room, row)
    let mut rooms = BTreeSet::new();
    for member in members {
        let len = sequences[member].len() - 1;
        let found = rooms.range((len, 0)..).next().copied();
        let (room, row) = found.unwrap_or((time, rows.len()));
        rooms.remove(&(room, row));
        rooms.insert((room - len, row));
        rows.resize_with(rows.len().max(row + 1), Vec::new);
        rows[row].push(member);
    }
    rows
}

impl Data<MpmdArray> for PackedSequences {
    fn compare(&self, p: &mut Program) -> Result<()> {
        let hash = self
            .sequences
            .iter()
            .fold(Key(self.training.len() as u64), |key, sequence| {
                let key = key.fold_in(sequence.len() as u64);
                let word =
                    |(token, has_loss): &(u32, bool)| u64::from(*token) << 1 | u64::from(*has_loss);
                sequence.iter().map(word).fold(key, Key::fold_in)
            });
        p.assert_same(format!(
            "{} sequences, with hash {:016x}",
            self.sequences.len(),
            hash.0
        ))
    }

    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        let training = self.training.clone();
        let rows = self.rows as u64;
        self.microbatch(p, meshes, move |row| {
            let count = training.len() as u64;
            let taken = at.before * rows + row as u64;
            let epoch = Key(at.seed).fold_in(taken / count);
            training[random::permuted(epoch, taken % count, count) as usize].clone()
        })
    }

    /// Returns the number of held-out microbatches. The last one may have rows of padding.
    fn held_out_len(&self) -> usize {
        self.held_out.len().div_ceil(self.rows)
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        if index >= self.held_out_len() {
            return Err(Error::kernel(format!(
                "there is no held-out microbatch {index}"
            )));
        }
        let held_out = self.held_out.clone();
        let first = index * self.rows;
        self.microbatch(p, meshes, move |row| {
            held_out.get(first + row).cloned().unwrap_or_default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a sequence whose tokens after the prompt have a loss.
    fn sequence(prompt: usize, reply: usize) -> Sequence {
        (0..prompt + reply)
            .map(|at| (at as u32 + 1, at >= prompt))
            .collect()
    }

    #[test]
    fn rows_are_filled_by_the_longest_first() {
        let lengths = [3, 9, 4, 6, 2, 5, 3];
        let sequences = lengths.map(|tokens| sequence(1, tokens - 1)).to_vec();
        let packed = PackedSequences::new(sequences.clone(), None, 8, 2).unwrap();
        assert_eq!(
            *packed.training,
            [vec![1], vec![3, 2], vec![5, 0, 6], vec![4]]
        );
        let row: Vec<_> = tokens(&sequences, &[2, 4]).take(6).collect();
        let of = |field: fn(&RowToken) -> u32| row.iter().map(field).collect::<Vec<_>>();
        assert_eq!(of(|token| token.input), [1, 2, 3, 1, 0, 0]);
        assert_eq!(of(|token| token.target), [2, 3, 4, 2, 0, 0]);
        assert_eq!(of(|token| token.start), [0, 0, 0, 3, 4, 5]);
        assert_eq!(of(|token| token.weight as u32), [1, 1, 1, 1, 0, 0]);
    }

    #[test]
    fn every_tenth_sequence_is_held_out_unless_others_are_given() {
        let some = |count| vec![sequence(2, 3); count];
        let members = |packed: &PackedSequences| {
            let mut all: Vec<usize> = packed.held_out.concat();
            all.sort_unstable();
            (packed.training.concat().len(), all)
        };
        let tenth = PackedSequences::new(some(21), None, 8, 2).unwrap();
        assert_eq!(members(&tenth), (19, vec![9, 19]));
        let given = PackedSequences::new(some(21), Some(some(3)), 8, 2).unwrap();
        assert_eq!(members(&given), (21, vec![21, 22, 23]));
        assert_eq!((given.held_out.len(), given.held_out_len()), (2, 1));
    }

    #[test]
    fn sequences_that_cannot_be_trained_on_are_refused() {
        for wrong in [
            vec![sequence(2, 8)],
            vec![sequence(3, 0)],
            vec![sequence(0, 1)],
            vec![],
        ] {
            assert!(
                PackedSequences::new(wrong.clone(), None, 8, 1).is_err(),
                "{wrong:?}"
            );
        }
        assert!(PackedSequences::new(vec![sequence(2, 7)], None, 8, 1).is_ok());
    }
}
