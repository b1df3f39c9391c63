//! Cases with their samples, and how they are printed.

use std::time::Duration;

use serde_json::json;

/// A case and its samples.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) parameters: String,
    pub(crate) unit: &'static str,
    pub(crate) samples: Vec<f64>,
    /// The reference of the median.
    pub(crate) beside: Option<Beside>,
}

/// The reference of a median: its name, and its value in the same unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Beside {
    /// A reference for a ratio: a goal that is an upper bound, or a plain copy. The answer has the
    /// median divided by this value.
    Ratio(&'static str, f64),
    /// A lower bound of the cost. The answer has the median minus this value.
    Over(&'static str, f64),
}

impl Case {
    /// Creates a case measured in microseconds.
    pub(crate) fn micros(
        name: &'static str,
        parameters: impl Into<String>,
        samples: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples = samples.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
        Self { name, parameters: parameters.into(), unit: "us", samples, beside: None }
    }

    /// Creates a case measured in GB/s: `bytes` were moved in each of the times.
    pub(crate) fn bandwidth(
        name: &'static str,
        parameters: impl Into<String>,
        bytes: usize,
        times: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples =
            times.into_iter().map(|time| bytes as f64 / time.as_secs_f64() / 1e9).collect();
        Self { name, parameters: parameters.into(), unit: "GB/s", samples, beside: None }
    }

    /// Creates a case that counts something.
    pub(crate) fn count(
        name: &'static str,
        parameters: impl Into<String>,
        samples: impl IntoIterator<Item = f64>,
    ) -> Self {
        let samples = samples.into_iter().collect();
        Self { name, parameters: parameters.into(), unit: "", samples, beside: None }
    }

    /// Compares the median with a goal, an upper bound. The answer has their ratio.
    pub(crate) fn within(mut self, goal: f64) -> Self {
        self.beside = Some(Beside::Ratio("goal", goal));
        self
    }

    /// Compares the median with a plain copy of as many bytes, measured in the same run. The answer
    /// has their ratio.
    pub(crate) fn beside(self, memcpy: &Case) -> Self {
        self.ratio_to("memcpy", memcpy)
    }

    /// Adds the ratio to the median of `other`, under the name `name`.
    pub(crate) fn ratio_to(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Ratio(name, other.quantile(0.5)));
        self
    }

    /// Adds the difference to the median of `other`, under the name `name`.
    pub(crate) fn over(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Over(name, other.quantile(0.5)));
        self
    }

    /// Returns a quantile of the samples; 0.5 is the median.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        quantile(&self.samples, share)
    }
}

/// Returns a quantile of `samples`; 0.5 is the median. NaN if there are no samples.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// Prints cases as a table or as lines of JSON.
pub(crate) fn show(cases: &[Case], json: bool) {
    let wide = cases.iter().map(|case| case.parameters.len()).max().unwrap_or(0).max(26);
    let ratios = cases.iter().any(|case| case.beside.is_some());
    if !json {
        let (case, parameters) = ("case", "parameters");
        let ratio = if ratios { "           ratio" } else { "" };
        println!(
            "{case:<16} {parameters:<wide$} {:>10} {:>10} {:>10}  unit{ratio}",
            "median", "p10", "p90"
        );
    }
    for case in cases {
        let (median, p10, p90) = (case.quantile(0.5), case.quantile(0.1), case.quantile(0.9));
        if json {
            let mut line = json!({
                "name": case.name,
                "parameters": case.parameters,
                "median": median,
                "p10": p10,
                "p90": p90,
                "unit": case.unit,
                "repeats": case.samples.len(),
            });
            match case.beside {
                Some(Beside::Ratio(name, value)) => {
                    line[format!("of_{name}")] = json!(median / value)
                }
                Some(Beside::Over(name, value)) => {
                    line[format!("over_{name}_{}", case.unit)] = json!(median - value);
                }
                None => {}
            }
            println!("{line}");
        } else {
            let (name, parameters, unit) = (case.name, &case.parameters, case.unit);
            let ratio = case.beside.map(|beside| match beside {
                Beside::Ratio(name, value) => format!("  {:.2} of {name}", median / value),
                Beside::Over(name, value) => format!("  {:+.2} over {name}", median - value),
            });
            let ratio = ratio.unwrap_or_default();
            let line = format!(
                "{name:<16} {parameters:<wide$} {median:>10.3} {p10:>10.3} {p90:>10.3}  {unit:<4}"
            );
            println!("{}", format!("{line}{ratio}").trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_samples() {
        let case = Case::micros("x", "", [3, 1, 2, 5, 4].map(Duration::from_micros));
        assert_eq!((case.quantile(0.5), case.quantile(0.0), case.quantile(1.0)), (3.0, 1.0, 5.0));
    }

    #[test]
    fn bandwidth_counts_a_billion_bytes_as_one() {
        let case = Case::bandwidth("x", "", 500_000_000, [Duration::from_millis(250)]);
        assert!((case.quantile(0.5) - 2.0).abs() < 1e-9);
    }
}
