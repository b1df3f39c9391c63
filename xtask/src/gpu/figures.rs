//! The requirements on a machine with GPUs, and the fields of the benchmarks' output that show
//! them. Does no I/O.

use serde_json::Value;

use super::table::{Row, Verdict};

/// A benchmark: `mpmd bench …`.
pub(super) struct Benchmark {
    pub(super) arguments: &'static [&'static str],
    /// Further arguments for runs with meaningful figures.
    pub(super) large: &'static [&'static str],
    /// Further arguments for short runs, to check that everything works: on the software driver and
    /// under the sanitizer.
    pub(super) small: &'static [&'static str],
    /// True if the benchmark's processes share one GPU, even if there are more.
    pub(super) on_one: bool,
    /// Number of GPUs without which the figures have no meaning.
    pub(super) processors: usize,
    /// The figures to read from the benchmark's output.
    pub(super) figures: &'static [Figure],
}

/// A figure and its limit.
pub(super) struct Figure {
    /// The name of the figure, for people.
    pub(super) item: &'static str,
    /// The name of the benchmark's case that has the figure.
    case: &'static str,
    /// The field of the case.
    field: &'static str,
    limit: Limit,
    unit: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

/// All benchmarks.
pub(super) const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        arguments: &["p2p", "--level", "array", "--case", "handover"],
        large: &["--sizes", "256Mi"],
        small: &["--sizes", "64Ki", "--repeats", "2"],
        on_one: true,
        processors: 1,
        figures: &[
            Figure {
                item: "hand-over of 256 MiB in place, two processes on one processor",
                case: "handover",
                field: "median",
                limit: Limit::AtMost(20.0),
                unit: "us",
            },
            Figure {
                item: "hand-over of 256 MiB by one copy, of a copy on the device",
                case: "one copy",
                field: "of_device_copy",
                limit: Limit::AtLeast(0.9),
                unit: "",
            },
        ],
    },
    Benchmark {
        arguments: &["dispatch"],
        large: &[],
        small: &["--repeats", "2"],
        on_one: false,
        processors: 1,
        figures: &[Figure {
            item: "issue of a kernel by jit, over a launch by cudarc alone",
            case: "jit issue",
            field: "over_launch_us",
            limit: Limit::AtMost(1.0),
            unit: "us",
        }],
    },
    Benchmark {
        arguments: &["reshard"],
        large: &[],
        small: &["--repeats", "2", "--mib", "1", "--processes", "1"],
        on_one: false,
        processors: 1,
        figures: &[
            Figure {
                item: "host to device while kernels run, of pinned copies",
                case: "host to device",
                field: "of_pinned",
                limit: Limit::AtLeast(0.9),
                unit: "",
            },
            Figure {
                item: "device to host while kernels run, of pinned copies",
                case: "device to host",
                field: "of_pinned",
                limit: Limit::AtLeast(0.9),
                unit: "",
            },
        ],
    },
    Benchmark {
        arguments: &["pipeline", "--stages", "2"],
        large: &["--dim", "2048", "--microbatch", "512"],
        small: &[
            "--dim",
            "32",
            "--microbatch",
            "8",
            "--microbatches",
            "4",
            "--repeats",
            "2",
            "--schedule",
            "1f1b",
        ],
        on_one: false,
        processors: 2,
        figures: &[Figure {
            item: "idle share of a pipeline of two stages, over the simulation's",
            case: "idle",
            field: "over_simulation_points",
            limit: Limit::AtMost(5.0),
            unit: "points",
        }],
    },
];

impl Figure {
    /// Returns the limit as a text for people.
    pub(super) fn asked(&self) -> String {
        let (word, limit) = match self.limit {
            Limit::AtMost(limit) => ("at most", limit),
            Limit::AtLeast(limit) => ("at least", limit),
        };
        format!("{word} {limit} {}", self.unit).trim_end().to_owned()
    }

    fn is_met_by(&self, found: f64) -> bool {
        match self.limit {
            Limit::AtMost(limit) => found <= limit,
            Limit::AtLeast(limit) => found >= limit,
        }
    }

    /// Returns the worst figure of all cases with this name, as one benchmark may measure several.
    /// `None` if the output has no such figure.
    fn of(&self, lines: &[Value]) -> Option<f64> {
        let cases = lines.iter().filter(|line| line["name"] == self.case);
        let found = cases.filter_map(|line| line[self.field].as_f64());
        match self.limit {
            Limit::AtMost(_) => found.max_by(f64::total_cmp),
            Limit::AtLeast(_) => found.min_by(f64::total_cmp),
        }
    }
}

/// Judges the figures in a benchmark's output and returns a row for each. With `software`, a figure
/// that is there counts as run, and a missing one as failed.
pub(super) fn judge(benchmark: &Benchmark, lines: &[Value], software: bool) -> Vec<Row> {
    let one = |figure: &Figure| {
        let (item, asked) = (figure.item, figure.asked());
        let Some(found) = figure.of(lines) else {
            let missing = format!("the benchmark says no `{}` of `{}`", figure.field, figure.case);
            return Row::failed(item, asked, missing);
        };
        let verdict = match (software, figure.is_met_by(found)) {
            (true, _) => Verdict::Ran,
            (false, true) => Verdict::Passed,
            (false, false) => Verdict::Failed,
        };
        let found = format!("{found:.2} {}", figure.unit);
        let found = if software {
            format!("{} (means nothing)", found.trim_end())
        } else {
            found.trim_end().to_owned()
        };
        Row::new(item, asked, found, verdict)
    };
    benchmark.figures.iter().map(one).collect()
}

/// Reads the output of `mpmd doctor --json`. Returns the driver and its GPUs as a text with the
/// number of GPUs, or the reason why there are none.
pub(super) fn seen(doctor: &Value) -> Result<(String, usize), String> {
    let cuda = &doctor["facts"]["cuda"];
    if let Some(why) = cuda["missing"]["why"].as_str() {
        return Err(why.to_owned());
    }
    let driver = &cuda["found"]["driver"];
    let gpus = driver["gpus"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = gpus.iter().filter_map(|gpu| gpu["name"].as_str()).collect();
    match (driver["version"].as_str(), names.is_empty()) {
        (Some(version), false) => {
            Ok((format!("{}, CUDA {version}", names.join(", ")), names.len()))
        }
        _ => {
            Err("`mpmd doctor` reports neither CUDA devices nor a reason why there are none"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rows(lines: &[Value], software: bool) -> Vec<Verdict> {
        judge(&BENCHMARKS[0], lines, software).into_iter().map(|row| row.verdict).collect()
    }

    #[test]
    fn worst_figure_of_a_case_counts() {
        let good = [
            json!({"name": "handover", "median": 12.5}),
            json!({"name": "one copy", "of_device_copy": 0.95}),
        ];
        assert_eq!(rows(&good, false), [Verdict::Passed, Verdict::Passed]);
        let worse = [&good[..], &[json!({"name": "handover", "median": 21.0})]].concat();
        assert_eq!(rows(&worse, false), [Verdict::Failed, Verdict::Passed]);
        assert_eq!(rows(&worse, true), [Verdict::Ran, Verdict::Ran]);
        // A missing figure is a failure on any driver.
        assert_eq!(rows(&good[..1], true), [Verdict::Ran, Verdict::Failed]);
        let said = judge(&BENCHMARKS[0], &good[..1], false);
        assert!(said[1].found.contains("no `of_device_copy` of `one copy`"), "{said:?}");
        assert_eq!(said[0].found, "12.50 us");
        assert_eq!(
            (said[0].asked.as_str(), said[1].asked.as_str()),
            ("at most 20 us", "at least 0.9")
        );
    }

    #[test]
    fn doctor_output_on_cuda_is_read() {
        let gpus = json!([{"name": "H200"}, {"name": "H200"}]);
        let found =
            json!({"facts": {"cuda": {"found": {"driver": {"version": "12.8", "gpus": gpus}}}}});
        assert_eq!(seen(&found), Ok(("H200, H200, CUDA 12.8".to_owned(), 2)));
        let missing =
            json!({"facts": {"cuda": {"missing": {"why": "no CUDA driver found", "built": true}}}});
        assert_eq!(seen(&missing), Err("no CUDA driver found".to_owned()));
        assert!(seen(&json!({})).is_err());
    }
}
