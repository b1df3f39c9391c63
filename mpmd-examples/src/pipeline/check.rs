//! The check job: a small fixed instance of the pipeline job with known losses and weights.

use std::fmt;

use mpmd::ProcessId;
use mpmd::prelude::*;

use super::{Layer, Number, Pipeline, STAGES, Settings, Start};
use crate::mm;

/// Results of an independent implementation, in double precision and without tensor parallelism.
mod figures {
    use crate::mm::MICROBATCHES;

    /// By step: the loss of each microbatch if each is the whole batch. It is also the mean loss if
    /// each microbatch is one row.
    pub(super) const LOSSES: [f64; 6] =
        [2.217942, 1.206537, 0.180603, 0.030177, 0.024658, 0.014348];
    /// The losses if each microbatch is one row, in the first and in the last step.
    pub(super) const FIRST_BY_ROW: [f64; MICROBATCHES] = [0.179679, 1.032449, 2.644327, 5.015312];
    pub(super) const LAST_BY_ROW: [f64; MICROBATCHES] = [0.019327, 0.008598, 0.008983, 0.020484];
    /// Row 0 of `WA` of stage 0 and row 3 of `WB` of stage 3 after the last step, with or without
    /// slicing.
    pub(super) const WA0: [f64; 4] = [0.983358, 0.129885, 0.048083, -0.062251];
    pub(super) const WB3: [f64; 4] = [0.036992, 0.143912, -0.106465, 1.103899];
}

/// Limit on the absolute error of a figure: the figures have six decimals, and `f32` has seven
/// digits.
const TOLERANCE: f64 = 1e-5;

/// The expected figures of a run, and the figures found.
#[derive(Clone, Debug)]
pub struct Report {
    rows: Vec<Row>,
}

/// The expected figures of one kind in one run, such as the losses of a step, and those found.
#[derive(Clone, Debug)]
struct Row {
    run: String,
    quantity: String,
    expected: Vec<f64>,
    /// For each expected figure, the figure found, or `None`. If several devices own a value, it is
    /// the one with the largest error.
    found: Vec<Option<f64>>,
}

/// A figure found by one process: (index of the report's row, index in the row, value).
type Finding = (usize, usize, f64);

/// Runs the check job in `f32` and `f64`. Each runs twice: with the whole batch as each microbatch,
/// and with slices of it. The figures expect the learning rate [`mm::LEARNING_RATE`].
///
/// Each process compares the figures that it owns. All processes get the same report. Blocks until
/// the job has ended.
///
/// # Errors
///
/// If the job fails. Wrong figures are not an error: see [`Report::first_off`].
pub fn check(p: &mut Program, learning_rate: f64) -> Result<Report> {
    let mut report = Report { rows: Vec::new() };
    let mut findings = Vec::new();
    for slice in [false, true] {
        run::<f32>(p, learning_rate, slice, &mut report.rows, &mut findings)?;
        run::<f64>(p, learning_rate, slice, &mut report.rows, &mut findings)?;
    }
    for process in 0..p.processes() as u32 {
        let theirs: Vec<Finding> =
            p.broadcast_value(ProcessId(process), Vec::new(), || Ok(findings.clone()))?;
        theirs.into_iter().for_each(|finding| report.add(finding));
    }
    Ok(report)
}

fn run<T: Number>(
    p: &mut Program,
    learning_rate: f64,
    slice: bool,
    rows: &mut Vec<Row>,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let settings = Settings {
        width: mm::WIDTH,
        batch: mm::BATCH,
        microbatches: mm::MICROBATCHES,
        slice,
        learning_rate,
        start: Start::Check,
    };
    let microbatch = if slice { "one row" } else { "the whole batch" };
    let run = format!("{}, each microbatch {microbatch}", T::DTYPE);
    let mut row = |quantity: String, expected: Vec<f64>| {
        rows.push(Row { run: run.clone(), quantity, found: vec![None; expected.len()], expected });
        rows.len() - 1
    };
    let mut job = Pipeline::<T>::new(p, &settings)?;
    // All steps are issued before the first value is read: no step waits for a loss.
    let steps = figures::LOSSES.iter().map(|_| job.step(p)).collect::<Result<Vec<_>>>()?;
    let last = steps.len() - 1;
    for (step, losses) in steps.iter().enumerate() {
        let (row, mean) = match (slice, step) {
            (false, _) => (
                row(format!("losses, step {step}"), vec![figures::LOSSES[step]; losses.len()]),
                false,
            ),
            (true, 0) => {
                (row(format!("losses, step {step}"), figures::FIRST_BY_ROW.to_vec()), false)
            }
            (true, _) if step == last => {
                (row(format!("losses, step {step}"), figures::LAST_BY_ROW.to_vec()), false)
            }
            (true, _) => {
                (row(format!("mean loss, step {step}"), vec![figures::LOSSES[step]]), true)
            }
        };
        let mut values = Vec::new();
        for loss in losses {
            if let Some(loss) = loss.to_host()? {
                values.extend(loss.as_slice::<T>()?.iter().map(|loss| loss.to_f64()));
            }
        }
        if mean && !values.is_empty() {
            values = vec![values.iter().sum::<f64>() / values.len() as f64];
        }
        findings.extend(values.into_iter().enumerate().map(|(column, value)| (row, column, value)));
    }
    let wa = row("WA of stage 0, row 0".to_owned(), figures::WA0.to_vec());
    let wb = row("WB of stage 3, row 3".to_owned(), figures::WB3.to_vec());
    let Layer { wa: first, .. } = job.weights(0);
    let Layer { wb: final_, .. } = job.weights(STAGES - 1);
    findings
        .extend(matrix_row::<T>(first, 0)?.into_iter().map(|(column, value)| (wa, column, value)));
    findings
        .extend(matrix_row::<T>(final_, 3)?.into_iter().map(|(column, value)| (wb, column, value)));
    Ok(())
}

/// Waits for a matrix. Returns (column, value) for each of this process's elements of one row.
fn matrix_row<T: Number>(matrix: &MpmdArray, row: usize) -> Result<Vec<(usize, f64)>> {
    let mut values = Vec::new();
    if matrix.is_fully_remote() {
        return Ok(values);
    }
    for shard in matrix.addressable_shards()? {
        let (rows, columns) = (shard.region.range(0), shard.region.range(1));
        if rows.contains(&row) {
            let start = (row - rows.start) * columns.len();
            let part = &shard.data.as_slice::<T>()?[start..start + columns.len()];
            values.extend(columns.zip(part).map(|(column, value)| (column, value.to_f64())));
        }
    }
    Ok(values)
}

impl Report {
    fn add(&mut self, (row, column, value): Finding) {
        let Some(row) = self.rows.get_mut(row) else { return };
        let (Some(expected), Some(found)) = (row.expected.get(column), row.found.get_mut(column))
        else {
            return;
        };
        let farther = |old: f64| distance(*expected, value) > distance(*expected, old);
        if found.is_none_or(farther) {
            *found = Some(value);
        }
    }

    /// Describes the first figure that is wrong or missing. `None` if all figures are right.
    pub fn first_off(&self) -> Option<String> {
        let off = |row: &Row| {
            let mut figures = row.expected.iter().zip(&row.found);
            let column = figures.position(|(expected, found)| !near(*expected, *found))?;
            let found =
                row.found[column].map_or("no figure".to_owned(), |found| format!("{found:.6}"));
            let Row { run, quantity, expected, .. } = row;
            Some(format!(
                "{run}: {quantity}, number {column}: {found} instead of {:.6}",
                expected[column]
            ))
        };
        self.rows.iter().find_map(off)
    }
}

fn near(expected: f64, found: Option<f64>) -> bool {
    found.is_some_and(|found| distance(expected, found) <= TOLERANCE)
}

/// Returns the absolute error: infinite for a NaN.
fn distance(expected: f64, found: f64) -> f64 {
    if found.is_nan() { f64::INFINITY } else { (found - expected).abs() }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut run = "";
        for row in &self.rows {
            if row.run != run {
                run = &row.run;
                writeln!(f, "{run}")?;
            }
            write!(f, "  {:<21}", row.quantity)?;
            for found in &row.found {
                match found {
                    Some(found) => write!(f, " {found:>10.6}")?,
                    None => write!(f, " {:>10}", "-")?,
                }
            }
            let blank = 11 * figures::WA0.len().saturating_sub(row.found.len());
            let off = row.expected.iter().zip(&row.found).any(|(e, found)| !near(*e, *found));
            write!(f, "{:blank$}   {}", "", if off { "OFF, expected" } else { "ok" })?;
            if off {
                row.expected.iter().try_for_each(|expected| write!(f, " {expected:.6}"))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(found: &[Option<f64>]) -> Report {
        let row = |found: &[Option<f64>]| Row {
            run: "f64".to_owned(),
            quantity: "losses".to_owned(),
            expected: vec![1.0; found.len()],
            found: found.to_vec(),
        };
        Report { rows: vec![row(&[Some(1.0)]), row(found)] }
    }

    #[test]
    fn first_off_names_the_first_wrong_figure() {
        assert_eq!(report(&[Some(1.000009), Some(0.999991)]).first_off(), None);
        let off = |found: &[Option<f64>]| report(found).first_off().unwrap();
        assert_eq!(
            off(&[Some(1.0), Some(1.00002), Some(3.0)]),
            "f64: losses, number 1: 1.000020 instead of 1.000000"
        );
        assert_eq!(off(&[None]), "f64: losses, number 0: no figure instead of 1.000000");
        assert_eq!(off(&[Some(f64::NAN)]), "f64: losses, number 0: NaN instead of 1.000000");
    }

    #[test]
    fn worst_value_of_several_owners_counts() {
        for values in [[1.0, 1.5, 1.2], [1.0, f64::NAN, 1.0], [f64::NAN, 1.5, 1.0]] {
            let mut report = report(&[None]);
            values.into_iter().for_each(|value| report.add((1, 0, value)));
            let worst = values[1].max(1.5);
            let found = report.rows[1].found[0].unwrap();
            assert!(found.is_nan() || found == worst, "{values:?}: {found}");
            assert!(report.first_off().is_some());
        }
    }
}
