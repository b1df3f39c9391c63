//! Formats the results for people and for programs.

use serde_json::{Value, json};

use super::found::Test;
use crate::case::{self, Beside, Case};
use crate::options::Size;

/// One line of the results: a test at one size.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) test: Test,
    pub(super) bytes: usize,
    /// Samples of mpmd, in the unit of the test.
    pub(super) ours: Vec<f64>,
    /// The (test, median) of the reference with as many bytes: a plain copy for a bandwidth, the
    /// hand-over by CUDA alone for a hand-over. `None` for other tests.
    pub(super) beside: Option<(Test, f64)>,
}

/// The options that all lines of the results have in common.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) transport: &'static str,
    pub(super) spin: String,
}

impl Row {
    /// Returns this row as a JSON object. A plain copy has null as transport and spin.
    pub(super) fn json(&self, setting: &Setting) -> Value {
        let pair = !self.test.is_plain();
        let mut line = self.case(setting).json();
        line["transport"] = json!(pair.then_some(setting.transport));
        line["processes"] = json!(self.test.processes());
        line["bytes"] = json!(self.bytes);
        line["spin"] = json!(pair.then_some(&setting.spin));
        line
    }

    fn case(&self, setting: &Setting) -> Case {
        let (name, unit) = (self.test.name(), self.test.unit());
        let beside = self.beside.map(|(test, median)| match unit {
            "us" => Beside::Over(test.name(), median),
            _ => Beside::Ratio(test.name(), median),
        });
        let (parameters, samples) = (self.parameters(setting), self.ours.clone());
        Case {
            name,
            parameters,
            unit,
            samples,
            beside,
        }
    }

    /// Describes the size and the settings, in the form of other `mpmd bench` cases.
    fn parameters(&self, Setting { transport, spin }: &Setting) -> String {
        let size = Size(self.bytes);
        match self.test.is_plain() {
            true => size.to_string(),
            false => format!("{size}, array over {transport}, spin {spin}"),
        }
    }
}

/// Prints all rows: as lines of JSON if `json` is true, else as a table.
pub(super) fn show(rows: &[Row], setting: &Setting, json: bool) {
    if json {
        rows.iter()
            .for_each(|row| println!("{}", row.json(setting)));
        return;
    }
    let cases: Vec<Case> = rows.iter().map(|row| row.case(setting)).collect();
    case::show(&cases, false);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> Setting {
        Setting {
            transport: "tcp",
            spin: "auto".to_owned(),
        }
    }

    fn row(test: Test, ours: &[f64]) -> Row {
        let ours = ours.to_vec();
        Row {
            test,
            bytes: 4096,
            ours,
            beside: None,
        }
    }

    #[test]
    fn plain_copies_have_no_transport() {
        let line = row(Test::Latency, &[2.0, 3.0, 4.0]).json(&setting());
        assert_eq!(
            (&line["transport"], &line["bytes"]),
            (&json!("tcp"), &json!(4096))
        );
        let line = row(Test::Memcpy, &[2.0]).json(&setting());
        assert_eq!(
            (&line["transport"], &line["spin"]),
            (&Value::Null, &Value::Null)
        );
    }

    #[test]
    fn bandwidths_and_hand_overs_have_a_reference() {
        let copied = Row {
            beside: Some((Test::Memcpy, 8.0)),
            ..row(Test::Bandwidth, &[4.0])
        };
        let line = copied.json(&setting());
        assert_eq!(line["of_memcpy"], json!(0.5));
        assert_eq!(line["parameters"], "4Ki, array over tcp, spin auto");
        let on_device = Row {
            beside: Some((Test::DeviceCopy, 8.0)),
            ..copied.clone()
        };
        assert_eq!(on_device.json(&setting())["of_device_copy"], json!(0.5));
        let bare = Some((Test::BareIpc, 8.0));
        let handed = Row {
            beside: bare,
            ..row(Test::Handover, &[10.0])
        };
        assert_eq!(handed.json(&setting())["over_bare_ipc_us"], json!(2.0));
        let line = row(Test::Latency, &[4.0]).json(&setting());
        assert!(line.get("of_memcpy").is_none(), "{line}");
    }
}
