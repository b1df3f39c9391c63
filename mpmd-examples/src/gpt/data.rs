//! Sequences for training and evaluation. Each process makes those that its devices need.

use std::ops::Range;
use std::sync::Arc;

use mpmd::prelude::*;
use mpmd::topology::Mesh;
use mpmd_train::data::Text;

use super::placement::DATA_AXIS;
use crate::math::random_bits;

/// A text cut into sequences of one length. Clones share the text.
#[derive(Clone, Debug)]
pub struct Sequences {
    text: Arc<Text>,
    time: usize,
    held_out: Arc<[Sequence]>,
}

/// (tokens, the byte that follows each token).
type Sequence = (Vec<u8>, Vec<u8>);

impl Sequences {
    /// Cuts the text into sequences of `time` tokens. Keeps no more than `most_held_out` held-out
    /// sequences, spread evenly over the text.
    ///
    /// # Errors
    ///
    /// If no run of training blocks is as long as `time` tokens need, or if `time` is zero.
    pub fn new(text: &Arc<Text>, time: usize, most_held_out: usize) -> Result<Self> {
        if time == 0 || text.sequence(0, time).is_none() {
            let problem =
                format!("{} bytes of text have no training sequence of {time}", text.bytes().len());
            return Err(Error::Environment(problem));
        }
        let held_out = text.held_out_sequences(time);
        let every = held_out.len().div_ceil(most_held_out.max(1)).max(1);
        let held_out = held_out.into_iter().step_by(every).take(most_held_out);
        let held_out =
            held_out.map(|(tokens, targets)| (tokens.to_vec(), targets.to_vec())).collect();
        Ok(Self { text: text.clone(), time, held_out })
    }

    /// Returns the number of held-out sequences.
    pub fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    /// Returns the held-out sequences: tokens, and the byte that follows each.
    pub fn held_out(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.held_out.iter().map(|(tokens, targets)| (&tokens[..], &targets[..]))
    }

    /// Issues the making of a step's tokens on mesh `first` and of the targets, the byte after each
    /// token, on mesh `last`. Returns (tokens, targets) without waiting. Each array is `[rows,
    /// time]`, divided over [`DATA_AXIS`].
    ///
    /// The order of the rows makes each of the `microbatches` the same for any number of devices. A
    /// microbatch takes one part of each device's rows. The first microbatch gets the first rows of
    /// the step, and so on. The bytes depend only on the text, `seed`, `step` and the row.
    ///
    /// # Errors
    ///
    /// As [`Program::array_from_fn`].
    pub fn make_training(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        (seed, step): (u64, u64),
        (rows, microbatches): (usize, usize),
    ) -> Result<(MpmdArray, MpmdArray)> {
        let this = self.clone();
        let devices = first.axis_size(DATA_AXIS)?;
        self.make(p, (first, last), rows, move |place, side, out| {
            let row = row_at(place, rows, devices, microbatches) as u64;
            let random = random_bits(random_bits(seed, step), row);
            let Some(sequence) = this.text.sequence(random, this.time) else {
                return;
            };
            out.copy_from_slice(match side {
                Side::Tokens => sequence.0,
                Side::Targets => sequence.1,
            });
        })
    }

    /// Issues the making of the held-out sequences with indices `rows`, each repeated `copies`
    /// times. Returns (tokens, targets) without waiting. Each array is `[rows * copies, time]`,
    /// divided over [`DATA_AXIS`].
    ///
    /// # Errors
    ///
    /// As [`Program::array_from_fn`].
    pub fn make_held_out(
        &self,
        p: &mut Program,
        (first, last): (&Mesh, &Mesh),
        (rows, copies): (Range<usize>, usize),
    ) -> Result<(MpmdArray, MpmdArray)> {
        let this = self.clone();
        let start = rows.start;
        self.make(p, (first, last), rows.len() * copies, move |place, side, out| {
            let (tokens, targets) = &this.held_out[start + place / copies];
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
            p.array_from_fn(
                u8s([rows, time]),
                &mesh.sharding(spec![DATA_AXIS]),
                move |region, mut out| {
                    let out = out.as_mut_slice::<u8>()?.chunks_exact_mut(time);
                    out.zip(region.range(0)).for_each(|(out, row)| fill(row, side, out));
                    Ok(())
                },
            )
        };
        Ok((made(first, Side::Tokens)?, made(last, Side::Targets)?))
    }
}

/// Returns the index in the step of the row at index `place` of the step's array. Each device's
/// part of the array has its rows microbatch by microbatch.
fn row_at(place: usize, rows: usize, devices: usize, microbatches: usize) -> usize {
    let part = rows / devices / microbatches;
    let (device, within) = (place / (part * microbatches), place % (part * microbatches));
    let (microbatch, at) = (within / part, within % part);
    (microbatch * devices + device) * part + at
}

/// One half of a sequence.
#[derive(Clone, Copy)]
enum Side {
    Tokens,
    Targets,
}

#[cfg(test)]
mod tests {
    use mpmd::testing::Simulation;

    use super::*;
    use mpmd_train::data::BLOCK;

    #[test]
    fn tokens_and_targets_match_the_text_on_every_process() {
        let text = Arc::new(
            Text::of_files(&[(0..20 * BLOCK).map(|i| (i % 251) as u8 + 1).collect()]).unwrap(),
        );
        let sequences = Sequences::new(&text, 8, usize::MAX).unwrap();
        let host = |array: &MpmdArray| -> Result<Option<Vec<u8>>> {
            array.to_host()?.map(|host| host.to_vec::<u8>().map_err(Error::from)).transpose()
        };
        let results = Simulation::new(2, 2).run(|p| {
            let meshes = p.mesh(&[("stage", 2), (DATA_AXIS, 1)])?.split("stage")?;
            let ends = (&meshes[0], &meshes[1]);
            let training = sequences.make_training(p, ends, (3, 7), (6, 2))?;
            let held_out = sequences.make_held_out(p, ends, (1..3, 1))?;
            Ok([host(&training.0)?, host(&training.1)?, host(&held_out.0)?, host(&held_out.1)?])
        });
        let results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
        let rows: Vec<_> = (0..6)
            .map(|row| text.sequence(random_bits(random_bits(3, 7), row), 8).unwrap())
            .collect();
        let held_out = &text.held_out_sequences(8)[1..3];
        let tokens =
            |rows: &[(&[u8], &[u8])]| Some(rows.iter().flat_map(|row| row.0).copied().collect());
        let targets =
            |rows: &[(&[u8], &[u8])]| Some(rows.iter().flat_map(|row| row.1).copied().collect());
        assert_eq!(results[0], [tokens(&rows), None, tokens(held_out), None]);
        assert_eq!(results[1], [None, targets(&rows), None, targets(held_out)]);
        assert_eq!(sequences.held_out_len(), text.held_out_sequences(8).len());
    }

    #[test]
    fn microbatches_have_the_same_rows_for_any_devices() {
        // Each microbatch gets a third of each device's part of 12 rows.
        for devices in [1, 2, 4] {
            let (own, part) = (12 / devices, 12 / devices / 3);
            for microbatch in 0..3 {
                let places = (0..devices).flat_map(|device| {
                    let start = device * own + microbatch * part;
                    start..start + part
                });
                let rows: Vec<usize> = places.map(|place| row_at(place, 12, devices, 3)).collect();
                assert_eq!(
                    rows,
                    (4 * microbatch..4 * microbatch + 4).collect::<Vec<_>>(),
                    "{devices}"
                );
            }
        }
    }

    #[test]
    fn copies_of_a_held_out_sequence_are_adjacent() {
        let text = Arc::new(
            Text::of_files(&[(0..20 * BLOCK).map(|i| (i % 251) as u8 + 1).collect()]).unwrap(),
        );
        let sequences = Sequences::new(&text, 8, usize::MAX).unwrap();
        let results = Simulation::new(1, 2).run(|p| {
            let mesh = p.mesh(&[(DATA_AXIS, 2)])?;
            let (tokens, _) = sequences.make_held_out(p, (&mesh, &mesh), (2..3, 2))?;
            Ok(tokens.to_host()?.map(|host| host.to_vec::<u8>()))
        });
        let expected = text.held_out_sequences(8)[2].0.repeat(2);
        assert_eq!(results[0].as_ref().unwrap(), &Some(Ok(expected)));
    }

    #[test]
    fn held_out_sequences_are_bounded_and_evenly_spread() {
        let bytes = (0..40 * BLOCK).map(|i| (i / 32) as u8).collect();
        let text = Arc::new(Text::of_files(&[bytes]).unwrap());
        let all = text.held_out_sequences(8);
        for most in [0, 1, 7, all.len() - 1, all.len(), usize::MAX] {
            let sequences = Sequences::new(&text, 8, most).unwrap();
            let count = sequences.held_out_len();
            assert!(count <= most && 2 * count >= most.min(all.len()), "{count} of {most}");
            let every = all.len().div_ceil(most.max(1));
            assert!(
                sequences
                    .held_out()
                    .zip(all.iter().step_by(every))
                    .all(|(one, other)| one == *other)
            );
        }
    }

    #[test]
    fn text_that_is_too_short_is_an_error() {
        let text = Arc::new(Text::of_files(&[vec![b'x'; 99]]).unwrap());
        assert!(Sequences::new(&text, 100, 9).is_err() && Sequences::new(&text, 0, 9).is_err());
        assert_eq!(Sequences::new(&text, 99, 9).unwrap().held_out_len(), 0);
    }
}
