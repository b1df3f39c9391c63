//! The check job: a small fixed instance of the pipeline job with known losses and weights.

use std::fmt;

use mpmd::prelude::*;
use mpmd::sharding::Sharding;

use super::{DEVICES, InitialValues, JobSettings, Number, STAGES, TrainingJob};

/// The number of microbatches of a step, of rows of the batch, and of columns of the weights.
const SIZE: usize = 4;

/// Results of an independent implementation, in double precision and without tensor parallelism.
mod figures {
    /// Loss of each step. It is the loss of every microbatch if each is the whole batch, and the
    /// mean loss if each is one row.
    pub(super) const LOSSES: [f64; 6] =
        [2.217942, 1.206537, 0.180603, 0.030177, 0.024658, 0.014348];
    /// Loss of each microbatch in the first step, if each microbatch is one row.
    pub(super) const FIRST_BY_ROW: [f64; 4] = [0.179679, 1.032449, 2.644327, 5.015312];
    pub(super) const LAST_BY_ROW: [f64; 4] = [0.019327, 0.008598, 0.008983, 0.020484];
    /// Row 0 of stage 0's `WA` after the last step, with or without slicing. `WB3` is row 3 of
    /// stage 3's `WB`.
    pub(super) const WA0: [f64; 4] = [0.983358, 0.129885, 0.048083, -0.062251];
    pub(super) const WB3: [f64; 4] = [0.036992, 0.143912, -0.106465, 1.103899];
}

/// Limit on the absolute error of a figure: the figures have six decimals, and `f32` has seven
/// digits.
const TOLERANCE: f64 = 1e-5;

/// The expected figures of all runs, and the figures found.
#[derive(Clone, Debug)]
pub struct CheckReport {
    rows: Vec<CheckedQuantity>,
}

/// The expected figures of one kind in one run, such as the losses of a step, and those found.
#[derive(Clone, Debug)]
struct CheckedQuantity {
    run: String,
    quantity: String,
    expected: Vec<f64>,
    /// Figures found. Empty in a dry run.
    found: Vec<f64>,
}

/// Runs the check job in `f32` and `f64`, each twice: with the whole batch as each microbatch, and
/// with one row as each microbatch. The expected figures hold for the learning rate
/// [`LEARNING_RATE`](super::LEARNING_RATE).
///
/// The loss of a microbatch is the mean square over its own elements. One row has a fourth of the
/// batch's elements. So both runs have the same mean gradient, the same weights up to rounding, and
/// the same mean loss.
///
/// All processes get the same report. Blocks until the job has ended.
///
/// # Errors
///
/// If the job fails. Wrong figures are not an error: see [`CheckReport::first_off`].
pub fn check(p: &mut Program, learning_rate: f64) -> Result<CheckReport> {
    let mut rows = Vec::new();
    for slice in [false, true] {
        rows.extend(run::<f32>(p, learning_rate, slice)?);
        rows.extend(run::<f64>(p, learning_rate, slice)?);
    }
    Ok(CheckReport { rows })
}

fn run<T: Number>(
    p: &mut Program,
    learning_rate: f64,
    slice: bool,
) -> Result<Vec<CheckedQuantity>> {
    let settings = JobSettings {
        width: SIZE,
        batch: SIZE,
        microbatches: SIZE,
        slice,
        learning_rate,
        start: InitialValues::Check,
    };

    let microbatch = if slice { "one row" } else { "the whole batch" };
    let run = format!("{}, each microbatch {microbatch}", T::DTYPE);
    let row = |quantity: String, expected: &[f64], found: Vec<f64>| CheckedQuantity {
        run: run.clone(),
        quantity,
        expected: expected.to_vec(),
        found,
    };

    let mut job = TrainingJob::new::<T>(p, &settings)?;
    // All steps are issued before the first value is read: no step waits for a loss.
    let steps = figures::LOSSES
        .iter()
        .map(|_| Ok(job.step(p)?.0))
        .collect::<Result<Vec<_>>>()?;

    let all = p.mesh(&[("all", DEVICES)])?.replicated();
    let last = steps.len() - 1;
    let mut rows = Vec::new();
    for (step, losses) in steps.iter().enumerate() {
        let losses = losses.iter().map(|loss| values::<T>(p, loss, &all));
        let losses = losses.collect::<Result<Vec<_>>>()?.concat();
        let name = format!("losses, step {step}");
        rows.push(match (slice, step) {
            (false, _) => row(name, &[figures::LOSSES[step]; SIZE], losses),
            (true, 0) => row(name, &figures::FIRST_BY_ROW, losses),
            (true, _) if step == last => row(name, &figures::LAST_BY_ROW, losses),
            (true, _) => {
                let mean = losses.iter().sum::<f64>() / losses.len() as f64;
                row(
                    format!("mean loss, step {step}"),
                    &[figures::LOSSES[step]],
                    vec![mean],
                )
            }
        });
    }

    let wa = values::<T>(p, &job.pipeline.params(0)[0].1, &all)?;
    let wb = values::<T>(p, &job.pipeline.params(STAGES - 1)[1].1, &all)?;
    let wa = wa.into_iter().take(SIZE).collect();
    let wb = wb.into_iter().skip(3 * SIZE).collect();
    rows.push(row("WA of stage 0, row 0".to_owned(), &figures::WA0, wa));
    rows.push(row("WB of stage 3, row 3".to_owned(), &figures::WB3, wb));
    Ok(rows)
}

/// Moves an array to all devices of the job and waits for it. Returns its values; in a dry run an
/// empty list.
fn values<T: Number>(p: &mut Program, array: &MpmdArray, all: &Sharding) -> Result<Vec<f64>> {
    let Some(values) = p.device_put(array, all)?.to_host()? else {
        return Ok(Vec::new());
    };
    Ok(values
        .as_slice::<T>()?
        .iter()
        .map(|value| value.double())
        .collect())
}

impl CheckedQuantity {
    /// Returns the index of the first figure that is wrong or missing.
    fn first_off(&self) -> Option<usize> {
        let near = |(at, expected): (usize, &f64)| {
            self.found
                .get(at)
                .is_some_and(|found| (found - expected).abs() <= TOLERANCE)
        };
        self.expected
            .iter()
            .enumerate()
            .position(|figure| !near(figure))
    }
}

impl CheckReport {
    /// Describes the first figure that is wrong or missing. `None` if all figures are right.
    pub fn first_off(&self) -> Option<String> {
        let off = |row: &CheckedQuantity| {
            let at = row.first_off()?;
            let found = row
                .found
                .get(at)
                .map_or("no figure".to_owned(), |found| format!("{found:.6}"));

            let CheckedQuantity {
                run,
                quantity,
                expected,
                ..
            } = row;
            Some(format!(
                "{run}: {quantity}, number {at}: {found} instead of {:.6}",
                expected[at]
            ))
        };
        self.rows.iter().find_map(off)
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut run = "";
        for row in &self.rows {
            if row.run != run {
                run = &row.run;
                writeln!(f, "{run}")?;
            }
            write!(f, "  {:<21}", row.quantity)?;
            row.found
                .iter()
                .try_for_each(|found| write!(f, " {found:>10.6}"))?;

            let blank = 11 * SIZE.saturating_sub(row.found.len());
            let off = row.first_off().is_some();
            write!(
                f,
                "{:blank$}   {}",
                "",
                if off { "OFF, expected" } else { "ok" }
            )?;
            if off {
                row.expected
                    .iter()
                    .try_for_each(|expected| write!(f, " {expected:.6}"))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_off_names_the_first_wrong_figure() {
        let report = |found: &[f64]| {
            let row = |found: &[f64], expected: usize| CheckedQuantity {
                run: "f64".to_owned(),
                quantity: "losses".to_owned(),
                expected: vec![1.0; expected],
                found: found.to_vec(),
            };
            CheckReport {
                rows: vec![row(&[1.0], 1), row(found, found.len().max(1))],
            }
        };
        assert_eq!(report(&[1.000009, 0.999991]).first_off(), None);
        let off = |found: &[f64]| report(found).first_off().unwrap();
        assert_eq!(
            off(&[1.0, 1.00002, 3.0]),
            "f64: losses, number 1: 1.000020 instead of 1.000000"
        );
        assert_eq!(
            off(&[]),
            "f64: losses, number 0: no figure instead of 1.000000"
        );
        assert_eq!(
            off(&[f64::NAN]),
            "f64: losses, number 0: NaN instead of 1.000000"
        );
    }
}
