//! Windows, and rows of unequal lengths, padded and unpadded.

use std::collections::BTreeMap;

use mpmd_core::aval::Element;
use mpmd_core::pipeline::Microbatch;
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::{Simulation, random};
use mpmd_train::data::{Data, MicrobatchPlace};
use mpmd_train::optimizer::AdamW;
use mpmd_train::stop::StopFlag;
use mpmd_train::{Rate, Run, StepReport};

use crate::stages::{MICROBATCHES, TOKENS, meshes, trainer, untimed};

/// Returns sequences of 2 to 13 tokens.
fn sequences(count: u64) -> Vec<Vec<u32>> {
    let one = |i: u64| {
        let key = random::Key(i);
        let tokens = 2 + random::bits(key, 0) % 12;
        (1..=tokens)
            .map(|at| (random::bits(key, at) % TOKENS as u64) as u32)
            .collect()
    };
    (0..count).map(one).collect()
}

/// Sequences that are padded to the smallest sufficient of some lengths. Padding has weight 0.
/// Every tenth sequence is held out.
struct Padded {
    sequences: Vec<Vec<u32>>,
    lengths: Vec<usize>,
    rows: usize,
}

impl Padded {
    fn new(sequences: Vec<Vec<u32>>, lengths: &[usize], rows: usize) -> Self {
        Self {
            sequences,
            lengths: lengths.to_vec(),
            rows,
        }
    }

    /// Returns, for each length, the training sequences or the held-out ones.
    fn members(&self, held_out: bool) -> Vec<(usize, Vec<Vec<u32>>)> {
        let mut members: Vec<_> = self
            .lengths
            .iter()
            .map(|length| (*length, Vec::new()))
            .collect();
        for (i, sequence) in self.sequences.iter().enumerate() {
            if (i % 10 == 9) == held_out {
                let at = self
                    .lengths
                    .partition_point(|length| length + 1 < sequence.len());
                members[at].1.push(sequence.clone());
            }
        }
        members
    }

    fn microbatch(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        length: usize,
        rows: Vec<Vec<u32>>,
    ) -> Result<Microbatch<MpmdArray>> {
        let token = |shift: usize| {
            let rows = rows.clone();
            move |row: usize, column: usize| {
                let tokens = rows.get(row)?;
                (column + 1 < tokens.len()).then(|| tokens[column + shift])
            }
        };
        let (input, target, real) = (token(0), token(1), token(1));
        let (first, last) = (&meshes[0], &meshes[meshes.len() - 1]);
        let shape = [self.rows, length];
        let inputs = filled(p, first, shape, move |row, at| input(row, at).unwrap_or(0))?;
        let targets = filled(p, last, shape, move |row, at| target(row, at).unwrap_or(0))?;
        let weight = move |row, at| if real(row, at).is_some() { 1.0 } else { 0.0 };
        let weights = filled::<f32>(p, last, shape, weight)?;
        let side = [("targets", targets), ("weights", weights)];
        let side = BTreeMap::from(side.map(|(name, x)| (name.to_owned(), x)));
        Ok(Microbatch::new(inputs).side(meshes.len() - 1, side))
    }
}

/// Creates an array, replicated over a mesh, from a function of the row and the column.
fn filled<T: Element>(
    p: &mut Program,
    mesh: &Mesh,
    shape: [usize; 2],
    value: impl Fn(usize, usize) -> T + Send + Sync + 'static,
) -> Result<MpmdArray> {
    p.array_from_fn(
        ShapedArray::new(&shape, T::DTYPE),
        mesh.replicated(),
        move |_, mut values| {
            let values = values.as_mut_slice::<T>()?.iter_mut().enumerate();
            values.for_each(|(i, to)| *to = value(i / shape[1], i % shape[1]));
            Ok(())
        },
    )
}

impl Data<MpmdArray> for Padded {
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        let mut members = self.members(false);
        members.retain(|(_, sequences)| !sequences.is_empty());
        let drawn = |i: u64, end: usize| random::bits(at.key, i) as usize % end;
        let (length, sequences) = &members[drawn(u64::MAX, members.len())];
        let rows = (0..self.rows as u64).map(|row| sequences[drawn(row, sequences.len())].clone());
        self.microbatch(p, meshes, *length, rows.collect())
    }

    fn held_out_len(&self) -> usize {
        let members = self.members(true);
        members
            .iter()
            .map(|(_, sequences)| sequences.len().div_ceil(self.rows))
            .sum()
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        let members = self.members(true);
        let mut all = members.iter().flat_map(|(length, sequences)| {
            sequences
                .chunks(self.rows)
                .map(|rows| (*length, rows.to_vec()))
        });
        let (length, rows) = all.nth(index).expect("the index is below the number");
        self.microbatch(p, meshes, length, rows)
    }
}

/// Returns (mean loss, weight) of all held-out sequences.
fn evaluated(padded: &Padded) -> (f64, f64) {
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = trainer(p, false, AdamW::default())?;
        let meshes = meshes(p)?;
        let all = (0..padded.held_out_len()).map(|index| padded.held_out(p, &meshes, index));
        let all = all.collect::<Result<Vec<_>>>()?;
        let report = trainer.evaluate(p, all)?.read()?;
        Ok((report.loss(), report.weight))
    });
    results.into_iter().next().unwrap().unwrap()
}

#[test]
fn loss_of_padded_rows_equals_the_unpadded_one() {
    let all = sequences(200);
    let held_out = all.iter().skip(9).step_by(10);
    let tokens: usize = held_out.map(|sequence| sequence.len() - 1).sum();
    let every: Vec<usize> = (1..=12).collect();
    let unpadded = evaluated(&Padded::new(all.clone(), &every, 1));
    for (lengths, rows) in [(&[12][..], 3), (&[4, 8, 12], 4), (&[20], 1)] {
        let padded = evaluated(&Padded::new(all.clone(), lengths, rows));
        assert_eq!((padded.1, unpadded.1), (tokens as f64, tokens as f64));
        let near = (padded.0 - unpadded.0).abs() < 1e-6 * unpadded.0;
        assert!(near, "{lengths:?}: {padded:?} {unpadded:?}");
    }
}

#[test]
fn steps_of_several_forms_train_and_replay() {
    let run = |processes: usize, replay: bool| {
        let results = Simulation::new(processes, 4).run(|p| {
            let padded = Padded::new(sequences(100), &[4, 8, 12], 2);
            let trainer = trainer(p, true, AdamW::default())?.rate(Rate::Constant(0.02));
            let mut trainer = trainer.replay(replay).stop_on(&StopFlag::default());
            let mut reports: Vec<StepReport> = Vec::new();
            let options = Run::steps(12)
                .progress(false)
                .on_step(|report| reports.push(untimed(report.clone())));
            trainer.run(p, options, &padded)?;
            Ok(reports)
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let expected = run(1, false).remove(0);
    let mut weights: Vec<u64> = expected.iter().map(|report| report.weight as u64).collect();
    weights.sort_unstable();
    weights.dedup();
    assert!(weights.len() > 3, "unequal weights: {weights:?}");
    for (processes, replay) in [(1, true), (2, false), (4, true)] {
        for found in run(processes, replay) {
            assert_eq!(found, expected, "{processes} processes, replay {replay}");
        }
    }
}

/// The number of steps depends on the time, but all processes agree on it, and on the rates.
#[test]
fn training_by_seconds_ends_alike_on_all_processes() {
    let rate = Rate::WarmupLinear {
        peak: 0.02,
        floor: 0.0,
        warmup: 0,
        total: 1 << 40,
    };
    let results = Simulation::new(2, 4).run(|p| {
        let padded = Padded::new(sequences(40), &[12], 2);
        let mut trainer = trainer(p, false, AdamW::default())?.rate(rate);
        trainer = trainer.stop_on(&StopFlag::default());
        let mut reports: Vec<StepReport> = Vec::new();
        let run = Run::steps(1 << 40).seconds(0.3).progress(false);
        let outcome = trainer.run(
            p,
            run.on_step(|report| reports.push(report.clone())),
            &padded,
        )?;
        Ok((outcome.steps, reports))
    });
    let mut results = results.into_iter().map(Result::unwrap);
    let (steps, reports) = results.next().unwrap();
    assert_eq!(results.next().unwrap(), (steps, reports.clone()));
    assert_eq!(reports.len() as u64, steps);
    assert!(
        reports.windows(2).all(|pair| pair[0].rate >= pair[1].rate),
        "{reports:?}"
    );
    // The first three steps are issued before any report is read. Later rates follow the reports.
    assert!(
        reports
            .iter()
            .take(3)
            .all(|report| report.rate == rate.at(1)),
        "{reports:?}"
    );
    assert!(
        reports
            .iter()
            .skip(3)
            .all(|report| report.rate < rate.at(1)),
        "{reports:?}"
    );
}

#[test]
fn gradient_of_unequal_weights_is_that_of_one_batch() {
    // One microbatch of four rows, or four microbatches of one row.
    let norm = |rows: usize, count: usize| {
        let results = Simulation::new(1, 4).run(|p| {
            let pipeline = crate::stages::pipeline(p, false)?;
            let schedule = mpmd_core::pipeline::Schedule::gpipe(2, count)?;
            let mut trainer = mpmd_train::Trainer::new(p, pipeline, schedule, AdamW::default())?;
            let padded = Padded::new(sequences(40), &[12], rows);
            let meshes = meshes(p)?;
            let all = (0..count).map(|index| padded.held_out(p, &meshes, index));
            let all = all.collect::<Result<Vec<_>>>()?;
            trainer.step(p, all)?.read()
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let (whole, parts) = (norm(MICROBATCHES, 1), norm(1, MICROBATCHES));
    assert_eq!(whole.weight, parts.weight);
    assert!(
        (whole.loss - parts.loss).abs() < 1e-6 * whole.loss,
        "{whole:?} {parts:?}"
    );
    assert!(
        (whole.norm - parts.norm).abs() < 1e-5 * whole.norm,
        "{whole:?} {parts:?}"
    );
}

#[test]
fn keys_differ_by_seed_step_and_microbatch() {
    let at = MicrobatchPlace::new(1, 2, 3, 4);
    assert_eq!(at, MicrobatchPlace::new(1, 2, 3, 4));
    for other in [
        MicrobatchPlace::new(2, 2, 3, 4),
        MicrobatchPlace::new(1, 3, 3, 4),
        MicrobatchPlace::new(1, 2, 4, 4),
        MicrobatchPlace::new(1, 3, 2, 4),
    ] {
        assert_ne!(at.key, other.key);
    }
}
