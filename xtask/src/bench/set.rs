//! The fixed set of measurements, and how their figures are read from a program's output. Does no
//! I/O.

use anyhow::anyhow;
use serde_json::Value;

use super::peers::Peer;

/// One run of a program, whose output has several figures.
pub(super) struct Measurement {
    /// Name of the measurement in `--only`.
    pub(super) name: &'static str,
    /// Name of the program: a binary of the workspace.
    pub(super) program: &'static str,
    pub(super) arguments: &'static [&'static str],
    pub(super) figures: &'static [FigureSpec],
    /// The program of another project that does the same.
    pub(super) peer: Option<Peer>,
}

/// A figure that a measurement prints.
pub(super) struct FigureSpec {
    /// The name of the figure, for people.
    pub(super) item: &'static str,
    at: FigurePosition,
    pub(super) unit: &'static str,
    pub(super) better: Better,
}

/// The position of a figure in a program's output.
enum FigurePosition {
    /// The median in the first line of JSON with this case, and with parameters that begin like
    /// this.
    Median {
        case: &'static str,
        parameters: &'static str,
    },
    /// The number before this word.
    Before(&'static str),
}

/// The direction in which a figure improves.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Better {
    /// Smaller is better: for times.
    Lower,
    /// Larger is better: for rates and shares.
    Higher,
}

use Better::{Higher, Lower};

/// Describes a figure that `mpmd bench … --json` prints.
const fn median(
    item: &'static str,
    case: &'static str,
    parameters: &'static str,
    unit: &'static str,
    better: Better,
) -> FigureSpec {
    FigureSpec {
        item,
        at: FigurePosition::Median { case, parameters },
        unit,
        better,
    }
}

/// Describes the rate in tokens per second that `train_gpt` prints.
const fn tokens(item: &'static str) -> FigureSpec {
    FigureSpec {
        item,
        at: FigurePosition::Before("tokens/s"),
        unit: "tokens/s",
        better: Higher,
    }
}

/// Returns the arguments of a short training. Both sides read the same text, which rarely changes.
const fn training(processes: &'static str) -> [&'static str; 8] {
    [
        "--steps",
        "30",
        "--sample",
        "0",
        "--processes",
        processes,
        "--",
        "LICENSE-APACHE",
    ]
}

/// The arguments that measure a model. The peer's script measures the same by default.
const MODEL: [&str; 7] = [
    "bench",
    "model",
    "--json",
    "--repeats",
    "3",
    "--clients",
    "1,8",
];
const MODEL_IN_HALF: [&str; 8] = {
    let [bench, model, json, repeats, count, clients, counts] = MODEL;
    [
        bench, model, json, repeats, count, clients, counts, "--half",
    ]
};

/// All measurements. Most take a few seconds, those of a model of 124 million parameters a minute.
pub(super) const SET: &[Measurement] = &[
    Measurement {
        name: "dispatch",
        program: "mpmd",
        arguments: &["bench", "dispatch", "--json"],
        figures: &[
            median(
                "issue an empty `jit` call",
                "jit issue",
                "empty, 1 leaf",
                "us",
                Lower,
            ),
            median(
                "issue one of 64 leaves in and out",
                "jit issue",
                "64 leaves",
                "us",
                Lower,
            ),
            median(
                "issue one without a part in it",
                "jit issue",
                "no part in it",
                "us",
                Lower,
            ),
            median(
                "the empty call until it has run",
                "jit complete",
                "empty, 1 leaf",
                "us",
                Lower,
            ),
        ],
        peer: None,
    },
    Measurement {
        name: "latency",
        program: "mpmd",
        arguments: &[
            "bench",
            "p2p",
            "--json",
            "--case",
            "latency",
            "--sizes",
            "8,64Ki,1Mi,4Mi",
        ],
        figures: &[
            median(
                "array of 8 B to and fro, one way",
                "latency",
                "8,",
                "us",
                Lower,
            ),
            median(
                "array of 64 KiB to and fro, one way",
                "latency",
                "64Ki,",
                "us",
                Lower,
            ),
            median(
                "array of 1 MiB to and fro, one way",
                "latency",
                "1Mi,",
                "us",
                Lower,
            ),
            median(
                "array of 4 MiB to and fro, one way",
                "latency",
                "4Mi,",
                "us",
                Lower,
            ),
        ],
        peer: Some(Peer::OpenMpi {
            processes: "2",
            transport: "vader,self",
            case: "latency",
        }),
    },
    Measurement {
        name: "bandwidth",
        program: "mpmd",
        arguments: &[
            "bench",
            "p2p",
            "--json",
            "--case",
            "bandwidth",
            "--sizes",
            "64Mi",
            "--transport",
            "tcp",
        ],
        figures: &[
            median(
                "arrays of 64 MiB over tcp",
                "bandwidth",
                "64Mi,",
                "GB/s",
                Higher,
            ),
            median("a plain copy of 64 MiB", "memcpy", "64Mi", "GB/s", Higher),
        ],
        peer: Some(Peer::OpenMpi {
            processes: "2",
            transport: "tcp,self",
            case: "bandwidth",
        }),
    },
    Measurement {
        name: "handover",
        program: "mpmd",
        arguments: &[
            "bench", "p2p", "--json", "--case", "handover", "--sizes", "64Mi",
        ],
        figures: &[
            median("hand-over of 64 MiB", "handover", "64Mi,", "us", Lower),
            median(
                "the first hand-overs of it",
                "handover warm-up",
                "64Mi,",
                "us",
                Lower,
            ),
        ],
        peer: Some(Peer::OpenMpi {
            processes: "2",
            transport: "vader,self",
            case: "handover",
        }),
    },
    Measurement {
        name: "reshard",
        program: "mpmd",
        arguments: &["bench", "reshard", "--json", "--processes", "1,4"],
        figures: &[
            rows_to_columns("rows to columns, 1 MiB, 1 process", "1 MiB, 1 p"),
            rows_to_columns("rows to columns, 16 MiB, 1 process", "16 MiB, 1 p"),
            rows_to_columns("rows to columns, 64 MiB, 1 process", "64 MiB, 1 p"),
            rows_to_columns("rows to columns, 1 MiB, 4 processes", "1 MiB, 4 p"),
            rows_to_columns("rows to columns, 16 MiB, 4 processes", "16 MiB, 4 p"),
            rows_to_columns("rows to columns, 64 MiB, 4 processes", "64 MiB, 4 p"),
        ],
        peer: Some(Peer::OpenMpi {
            processes: "4",
            transport: "vader,self",
            case: "reshard",
        }),
    },
    Measurement {
        name: "train-1",
        program: "train_gpt",
        arguments: &training("1"),
        figures: &[tokens("train_gpt, 4 stages, 1 process")],
        peer: None,
    },
    Measurement {
        name: "train-4",
        program: "train_gpt",
        arguments: &training("4"),
        figures: &[tokens("train_gpt, 4 stages, 4 processes")],
        peer: Some(Peer::Torch { arguments: &["30"] }),
    },
    Measurement {
        name: "train-core",
        program: "train_gpt",
        arguments: &training_in_stages("1"),
        figures: &[tokens("train_gpt, 1 stage: one thread")],
        peer: Some(Peer::Torch {
            arguments: &["30", "1"],
        }),
    },
    Measurement {
        name: "train-cores",
        program: "train_gpt",
        arguments: &training_in_stages("2"),
        figures: &[tokens("train_gpt, 2 stages in 2 processes")],
        peer: Some(Peer::Torch {
            arguments: &["30", "2"],
        }),
    },
    Measurement {
        name: "train-model",
        program: "mpmd",
        arguments: &["bench", "model", "--json", "--repeats", "3", "--train"],
        figures: &[rate("training of a Llama, 124M", "training", "2 micro")],
        peer: Some(Peer::Transformers { arguments: &[] }),
    },
    Measurement {
        name: "model",
        program: "mpmd",
        arguments: &MODEL,
        figures: &[
            rate("a prompt of 512 tokens, f32", "prompt", "512 tokens"),
            rate("replies to 1 client, f32", "replies", "1 clients"),
            rate("replies to 8 clients, f32", "replies", "8 clients"),
        ],
        peer: Some(Peer::LlamaCpp { arguments: &[] }),
    },
    Measurement {
        name: "model-half",
        program: "mpmd",
        arguments: &MODEL_IN_HALF,
        figures: &[
            rate("a prompt of 512 tokens, bf16", "prompt", "512 tokens"),
            rate("replies to 1 client, bf16", "replies", "1 clients"),
            rate("replies to 8 clients, bf16", "replies", "8 clients"),
        ],
        peer: Some(Peer::LlamaCpp {
            arguments: &["--half"],
        }),
    },
];

/// Returns the arguments of a short training with one process for each stage.
const fn training_in_stages(stages: &'static str) -> [&'static str; 10] {
    let [steps, count, sample, none, processes, _, end, text] = training(stages);
    [
        steps, count, sample, none, "--stages", stages, processes, stages, end, text,
    ]
}

/// Describes a rate that `mpmd bench model --json` prints.
const fn rate(item: &'static str, case: &'static str, parameters: &'static str) -> FigureSpec {
    median(item, case, parameters, "tokens/s", Higher)
}

const fn rows_to_columns(item: &'static str, parameters: &'static str) -> FigureSpec {
    median(item, "rows to columns", parameters, "GB/s", Higher)
}

impl FigureSpec {
    /// Reads the figure from a program's output. `None` if the output has no such figure, or if it
    /// is not a finite number.
    ///
    /// # Errors
    ///
    /// If a line of JSON is damaged.
    pub(super) fn read(&self, output: &str) -> anyhow::Result<Option<f64>> {
        let found = match self.at {
            FigurePosition::Median { case, parameters } => {
                let lines = output.lines().filter(|line| line.starts_with('{'));
                let lines = lines.map(|line| serde_json::from_str::<Value>(line).map_err(|_| line));
                let lines = lines.collect::<Result<Vec<_>, _>>();
                let lines = lines.map_err(|line| anyhow!("no JSON: {line}"))?;
                let wanted = lines.iter().find(|line| {
                    line["name"] == case
                        && line["parameters"]
                            .as_str()
                            .is_some_and(|p| p.starts_with(parameters))
                });
                wanted.and_then(|line| line["median"].as_f64())
            }
            FigurePosition::Before(word) => {
                let words: Vec<&str> = output.split_whitespace().collect();
                let at = words.iter().position(|found| *found == word);
                at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok())
            }
        };

        Ok(found.filter(|value| f64::is_finite(*value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "8 processes\n\
        {\"name\":\"a\",\"parameters\":\"1 MiB, 14 p\",\"median\":1.5}\n\
        {\"name\":\"a\",\"parameters\":\"1 MiB, 1 p\",\"median\":2.5}\n\
        {\"name\":\"a\",\"parameters\":\"1 MiB, 1 p, traced\",\"median\":3.5}\n\
        {\"name\":\"b\",\"parameters\":\"x\",\"median\":null}\n";

    #[test]
    fn first_case_with_these_parameters_counts() {
        let of = |case, parameters| median("", case, parameters, "", Lower).read(LINES);
        assert_eq!(of("a", "1 MiB, 1 p").unwrap(), Some(2.5));
        assert_eq!(of("a", "1 MiB, 14").unwrap(), Some(1.5));
        // No such case, no such parameters, no number.
        assert_eq!(
            [of("c", ""), of("a", "2 MiB"), of("b", "x")].map(Result::unwrap),
            [None, None, None]
        );
        let damaged = median("", "a", "", "", Lower).read("{\"name\":\"a\",");
        assert_eq!(
            damaged.unwrap_err().to_string(),
            "no JSON: {\"name\":\"a\","
        );
    }

    #[test]
    fn rate_is_the_number_before_its_unit() {
        let of = |text: &str| tokens("").read(text).unwrap();
        assert_eq!(
            of("loss 1.7\n30 steps in 2.5 s: 22916 tokens/s\n"),
            Some(22916.0)
        );
        assert_eq!(
            [of("tokens/s"), of("no tokens/s"), of("5 tokens")],
            [None; 3]
        );
    }

    #[test]
    fn names_of_measurements_and_figures_are_unique() {
        let names: Vec<&str> = SET.iter().map(|measurement| measurement.name).collect();
        let items: Vec<&str> = SET
            .iter()
            .flat_map(|m| m.figures)
            .map(|figure| figure.item)
            .collect();
        for (all, kind) in [(names, "measurement"), (items, "figure")] {
            for (at, name) in all.iter().enumerate() {
                assert!(!all[..at].contains(name), "two of {kind} {name}");
            }
        }
    }
}
