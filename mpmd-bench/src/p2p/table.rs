//! Formats the results for people and for programs.

use serde_json::{Value, json};

use super::found::Test;
use super::words::Level;
use crate::case::{self, quantile};
use crate::options::Size;

/// One line of the results: a test at one size.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// The level of the test; `None` for a plain copy.
    pub(super) level: Option<Level>,
    pub(super) test: Test,
    pub(super) bytes: usize,
    /// Samples of mpmd, in the unit of the test.
    pub(super) ours: Vec<f64>,
    /// The (test, median) of the reference in the same unit, for as many bytes: of bandwidths a
    /// plain copy, of hand-overs the same by CUDA alone. `None` for other tests.
    pub(super) beside: Option<(Test, f64)>,
}

/// The options that all lines of the results have in common. `busy` is a number of threads.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) transport: &'static str,
    pub(super) spin: String,
    pub(super) busy: usize,
}

impl Row {
    /// Returns this row as a JSON object. A plain copy has null as level, transport and spin.
    pub(super) fn json(&self, setting: &Setting) -> Value {
        let pair = self.level.is_some();
        let mut line = json!({
            "name": self.test.name(),
            "parameters": self.parameters(setting),
            "level": self.level,
            "transport": pair.then_some(setting.transport),
            "processes": self.test.processes(),
            "bytes": self.bytes,
            "spin": pair.then_some(&setting.spin),
            "busy": setting.busy,
            "median": quantile(&self.ours, 0.5),
            "p10": quantile(&self.ours, 0.1),
            "p90": quantile(&self.ours, 0.9),
            "unit": self.test.unit(),
            "repeats": self.ours.len(),
        });
        if let Some((test, reference)) = self.beside {
            let (name, median) = (test.name().replace(' ', "_"), quantile(&self.ours, 0.5));
            match test.unit() {
                "us" => line[format!("over_{name}_us")] = json!(median - reference),
                _ => line[format!("of_{name}")] = json!(median / reference),
            }
        }
        line
    }

    /// Describes the size, level and settings, in the form of other `mpmd bench` cases.
    fn parameters(&self, Setting { transport, spin, busy }: &Setting) -> String {
        let size = Size(self.bytes);
        let mut words = match self.level {
            Some(level) => format!("{size}, {} over {transport}, spin {spin}", level.name()),
            None => size.to_string(),
        };
        if *busy > 0 {
            words += &format!(", {busy} busy");
        }
        words
    }

    /// Returns the cells of the table.
    fn cells(&self) -> Vec<String> {
        let figures =
            |of: &[f64]| [0.5, 0.1, 0.9].map(|share| figure(quantile(of, share))).to_vec();
        let level = self.level.map_or("", Level::name).to_owned();
        let name = match self.test {
            Test::Ring(processes) => format!("ring of {processes}"),
            test => test.name().to_owned(),
        };
        let mut cells = vec![level, name, Size(self.bytes).to_string()];
        cells.extend(figures(&self.ours));
        cells.push(self.test.unit().to_owned());
        let beside = |(test, reference): (Test, f64)| {
            let median = quantile(&self.ours, 0.5);
            match test.unit() {
                "us" => format!("{:+.2} over {}", median - reference, test.name()),
                _ => format!("{:.2} of {}", median / reference, test.name()),
            }
        };
        cells.push(self.beside.map(beside).unwrap_or_default());
        cells
    }
}

/// Prints all rows: as lines of JSON if `json` is true, else as a table.
pub(super) fn show(rows: &[Row], setting: &Setting, json: bool) {
    if json {
        for row in rows {
            println!("{}", row.json(setting));
        }
        return;
    }
    let Setting { transport, spin, busy } = setting;
    println!("{transport}, spin {spin}, {busy} busy beside it");
    let heading = ["level", "case", "size", "median", "p10", "p90", "unit", "beside"];
    println!("{}", case::table(&heading, rows.iter().map(Row::cells).collect(), &[0, 1, 6, 7]));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> Setting {
        Setting { transport: "tcp", spin: "auto".to_owned(), busy: 1 }
    }

    fn row(test: Test, ours: &[f64]) -> Row {
        let ours = ours.to_vec();
        Row { level: Some(Level::Message), test, bytes: 4096, ours, beside: None }
    }

    #[test]
    fn plain_copies_have_no_level_and_no_transport() {
        let line = row(Test::Latency, &[2.0, 3.0, 4.0]).json(&setting());
        assert_eq!(
            (&line["level"], &line["bytes"], &line["busy"]),
            (&json!("message"), &json!(4096), &json!(1))
        );
        let line = Row { level: None, ..row(Test::Memcpy, &[2.0]) }.json(&setting());
        assert_eq!(
            (&line["level"], &line["transport"], &line["spin"]),
            (&Value::Null, &Value::Null, &Value::Null)
        );
    }

    #[test]
    fn bandwidths_and_hand_overs_have_a_reference() {
        let copied = Row { beside: Some((Test::Memcpy, 8.0)), ..row(Test::Bandwidth, &[4.0]) };
        let line = copied.json(&setting());
        assert_eq!(line["of_memcpy"], json!(0.5));
        assert_eq!(line["parameters"], "4Ki, message over tcp, spin auto, 1 busy");
        let on_device = Row { beside: Some((Test::DeviceCopy, 8.0)), ..copied.clone() };
        assert_eq!(on_device.json(&setting())["of_device_copy"], json!(0.5));
        assert_eq!(copied.cells()[6..], ["GB/s", "0.50 of memcpy"]);
        let bare = Some((Test::BareIpc, 8.0));
        let handed = Row { beside: bare, ..row(Test::Handover, &[10.0]) };
        assert_eq!(handed.json(&setting())["over_bare_ipc_us"], json!(2.0));
        assert_eq!(handed.cells()[6..], ["us", "+2.00 over bare ipc"]);
        let line = row(Test::Latency, &[4.0]).json(&setting());
        assert!(line.get("of_memcpy").is_none(), "{line}");
    }
}
