//! Formats the results for people and for programs.

use serde_json::{Value, json};

use super::samples::P2pTest;
use crate::case::{self, Beside, Case};
use crate::options::Size;

/// One row of the results: a test at one size.
#[derive(Clone, Debug)]
pub(super) struct P2pRow {
    pub(super) test: P2pTest,
    pub(super) bytes: usize,
    /// Samples of mpmd, in the unit of the test.
    pub(super) ours: Vec<f64>,
    /// The reference with the same number of bytes, as (test, median). For a bandwidth it is a
    /// plain copy, for a hand-over the hand-over by CUDA alone. `None` for other tests.
    pub(super) beside: Option<(P2pTest, f64)>,
}

/// The options that hold for all rows of the results.
#[derive(Clone, Debug)]
pub(super) struct RunSetting {
    pub(super) transport: &'static str,
    pub(super) spin: String,
}

impl P2pRow {
    /// Returns this row as a JSON object. The transport and spin time of a plain copy are null.
    pub(super) fn json(&self, setting: &RunSetting) -> Value {
        let pair = !self.test.is_plain();
        let mut line = self.case(setting).json();
        line["transport"] = json!(pair.then_some(setting.transport));
        line["processes"] = json!(self.test.processes());
        line["bytes"] = json!(self.bytes);
        line["spin"] = json!(pair.then_some(&setting.spin));
        line
    }

    fn case(&self, setting: &RunSetting) -> Case {
        let name = self.test.name();
        let unit = self.test.unit();
        let beside = self.beside.map(|(test, median)| match unit {
            "us" => Beside::Over(test.name(), median),
            _ => Beside::Ratio(test.name(), median),
        });
        Case {
            name,
            parameters: self.parameters(setting),
            unit,
            samples: self.ours.clone(),
            beside,
        }
    }

    /// Describes the size and the settings, in the form of other cases of `mpmd bench`.
    fn parameters(&self, RunSetting { transport, spin }: &RunSetting) -> String {
        let size = Size(self.bytes);
        match self.test.is_plain() {
            true => size.to_string(),
            false => format!("{size}, array over {transport}, spin {spin}"),
        }
    }
}

/// Prints all rows: as lines of JSON if `json` is true, else as a table.
pub(super) fn show(rows: &[P2pRow], setting: &RunSetting, json: bool) {
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

    fn setting() -> RunSetting {
        RunSetting {
            transport: "tcp",
            spin: "auto".to_owned(),
        }
    }

    fn row(test: P2pTest, ours: &[f64]) -> P2pRow {
        let ours = ours.to_vec();
        P2pRow {
            test,
            bytes: 4096,
            ours,
            beside: None,
        }
    }

    #[test]
    fn plain_copies_have_no_transport() {
        let line = row(P2pTest::Latency, &[2.0, 3.0, 4.0]).json(&setting());
        assert_eq!(
            (&line["transport"], &line["bytes"]),
            (&json!("tcp"), &json!(4096))
        );
        let line = row(P2pTest::Memcpy, &[2.0]).json(&setting());
        assert_eq!(
            (&line["transport"], &line["spin"]),
            (&Value::Null, &Value::Null)
        );
    }

    #[test]
    fn bandwidths_and_hand_overs_have_a_reference() {
        let copied = P2pRow {
            beside: Some((P2pTest::Memcpy, 8.0)),
            ..row(P2pTest::Bandwidth, &[4.0])
        };
        let line = copied.json(&setting());
        assert_eq!(line["of_memcpy"], json!(0.5));
        assert_eq!(line["parameters"], "4Ki, array over tcp, spin auto");
        let on_device = P2pRow {
            beside: Some((P2pTest::DeviceCopy, 8.0)),
            ..copied.clone()
        };
        assert_eq!(on_device.json(&setting())["of_device_copy"], json!(0.5));
        let bare = Some((P2pTest::BareIpc, 8.0));
        let handed = P2pRow {
            beside: bare,
            ..row(P2pTest::Handover, &[10.0])
        };
        assert_eq!(handed.json(&setting())["over_bare_ipc_us"], json!(2.0));
        let line = row(P2pTest::Latency, &[4.0]).json(&setting());
        assert!(line.get("of_memcpy").is_none(), "{line}");
    }
}
