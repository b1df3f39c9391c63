//! Cases with their samples, and how they are printed.

use std::time::Duration;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

/// One line of the output: a measured case with its samples, all in `unit`.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) parameters: String,
    pub(crate) unit: &'static str,
    pub(crate) samples: Vec<f64>,
    /// The reference that the output compares the median with, if there is one.
    pub(crate) beside: Option<Beside>,
}

/// The reference that a case's median is compared with: its name, and its value in the median's
/// unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Beside {
    /// A reference for a ratio: a goal that is an upper bound, or the median of another case. The
    /// output shows the median divided by this value.
    Ratio(&'static str, f64),
    /// A lower bound of the cost. The output shows the median minus this value.
    Over(&'static str, f64),
}

impl Case {
    /// Creates a case measured in microseconds.
    pub(crate) fn micros(
        name: &'static str,
        parameters: impl Into<String>,
        samples: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples = samples
            .into_iter()
            .map(|time| time.as_secs_f64() * 1e6)
            .collect();
        Self {
            name,
            parameters: parameters.into(),
            unit: "us",
            samples,
            beside: None,
        }
    }

    /// Creates a case measured in GB/s (10^9 bytes per second): `bytes` were moved in each of
    /// `times`.
    pub(crate) fn bandwidth(
        name: &'static str,
        parameters: impl Into<String>,
        bytes: usize,
        times: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples = times
            .into_iter()
            .map(|time| bytes as f64 / time.as_secs_f64() / 1e9)
            .collect();
        Self {
            name,
            parameters: parameters.into(),
            unit: "GB/s",
            samples,
            beside: None,
        }
    }

    /// Adds the ratio of the median to `goal`, an upper bound in the same unit, to the output. A
    /// median above the goal is not an error.
    pub(crate) fn within(mut self, goal: f64) -> Self {
        self.beside = Some(Beside::Ratio("goal", goal));
        self
    }

    /// Adds the ratio of the median to the median of `memcpy` to the output. `memcpy` is a plain
    /// copy of the same number of bytes.
    pub(crate) fn beside(self, memcpy: &Case) -> Self {
        self.ratio_to("memcpy", memcpy)
    }

    /// Adds the ratio of this median to the median of `other` to the output, under the name `name`.
    pub(crate) fn ratio_to(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Ratio(name, other.quantile(0.5)));
        self
    }

    /// Adds this median minus the median of `other` to the output, under the name `name`.
    pub(crate) fn over(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Over(name, other.quantile(0.5)));
        self
    }

    /// Returns the case as a JSON object. Blanks in the name of the reference become underscores.
    pub(crate) fn json(&self) -> Value {
        let median = self.quantile(0.5);
        let mut line = json!({
            "name": self.name,
            "parameters": self.parameters,
            "median": median,
            "p10": self.quantile(0.1),
            "p90": self.quantile(0.9),
            "unit": self.unit,
            "repeats": self.samples.len(),
        });

        match self.beside {
            Some(Beside::Ratio(name, value)) => {
                line[format!("of_{}", name.replace(' ', "_"))] = json!(median / value);
            }
            Some(Beside::Over(name, value)) => {
                let name = name.replace(' ', "_");
                line[format!("over_{name}_{}", self.unit)] = json!(median - value);
            }
            None => {}
        }
        line
    }

    /// Returns the cells of this case's row in the table.
    fn row(&self) -> Vec<String> {
        let figures = [0.5, 0.1, 0.9].map(|share| figure(self.quantile(share)));
        let median = self.quantile(0.5);
        let ratio = match self.beside {
            Some(Beside::Ratio(name, value)) => format!("{:.2} of {name}", median / value),
            Some(Beside::Over(name, value)) => format!("{:+.2} over {name}", median - value),
            None => String::new(),
        };
        let names = [self.name.to_owned(), self.parameters.clone()];
        names
            .into_iter()
            .chain(figures)
            .chain([self.unit.to_owned(), ratio])
            .collect()
    }

    /// Returns the sample at `share` (0 to 1) of the sorted samples; 0.5 is the median. NaN if
    /// there are no samples.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        quantile(&self.samples, share)
    }
}

/// Returns the element at `share` (0 to 1) of the sorted `samples`, without interpolation; 0.5 is
/// the median. NaN if there are no samples.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// The printer of the output. It prints a line of JSON as soon as a case is measured, so that a
/// time limit does not lose it, or one table at the end.
pub(crate) struct BenchOutput {
    json: bool,
    cases: Vec<Case>,
}

impl BenchOutput {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            cases: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, case: Case) {
        if self.json {
            show(&[case], true)
        } else {
            self.cases.push(case)
        }
    }

    /// Prints the table, unless the output is JSON.
    pub(crate) fn end(self) {
        if !self.json {
            show(&self.cases, false);
        }
    }
}

impl Extend<Case> for BenchOutput {
    fn extend<I: IntoIterator<Item = Case>>(&mut self, cases: I) {
        cases.into_iter().for_each(|case| self.push(case));
    }
}

/// Prints `cases` to standard output: as one table, or as a line of JSON per case if `json` is
/// true.
pub(crate) fn show(cases: &[Case], json: bool) {
    if json {
        cases.iter().for_each(|case| println!("{}", case.json()));
        return;
    }
    let heading = [
        "case",
        "parameters",
        "median",
        "p10",
        "p90",
        "unit",
        "ratio",
    ];

    let shown = heading.len() - usize::from(cases.iter().all(|case| case.beside.is_none()));
    let rows = cases.iter().map(Case::row).collect();
    println!("{}", table(&heading[..shown], rows, &[0, 1, 5, 6]));
}

/// Formats a value with about four significant digits.
fn figure(value: f64) -> String {
    match value.abs() {
        0.0..0.01 => format!("{value:.6}"),
        0.01..1.0 => format!("{value:.4}"),
        1.0..10.0 => format!("{value:.3}"),
        10.0..100.0 => format!("{value:.2}"),
        100.0..1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Formats rows as a table below a heading. Columns are aligned right, except those with an index
/// in `left`.
pub(crate) fn table(heading: &[&str], rows: Vec<Vec<String>>, left: &[usize]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(heading).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if !left.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_samples() {
        let case = Case::micros("x", "", [3, 1, 2, 5, 4].map(Duration::from_micros));
        assert_eq!(
            (case.quantile(0.5), case.quantile(0.0), case.quantile(1.0)),
            (3.0, 1.0, 5.0)
        );
    }

    #[test]
    fn bandwidth_counts_a_billion_bytes_as_one() {
        let case = Case::bandwidth("x", "", 500_000_000, [Duration::from_millis(250)]);
        assert!((case.quantile(0.5) - 2.0).abs() < 1e-9);
    }
}
