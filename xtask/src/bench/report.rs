//! The results as a table for people, as a page of the documentation, and as JSON. Does no I/O.

use comfy_table::presets::{ASCII_MARKDOWN, NOTHING};
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use super::compare::RatioSpread;
use super::machine::Machine;
use super::measure::MeasuredFigure;
use super::set::Better;

/// What the working tree is compared with.
#[derive(Clone)]
pub(super) enum OtherSide<'a> {
    /// Another commit.
    Commit {
        /// The commit as the user named it.
        rev: &'a str,
        hash: &'a str,
    },
    /// Programs of other projects. These are their names.
    Peers(Vec<&'a str>),
}

/// The machine, the commits and the settings of a run of the benchmarks.
pub(super) struct BenchRun<'a> {
    pub(super) date: &'a str,
    pub(super) machine: &'a Machine,
    /// The commit of the working tree.
    pub(super) commit: &'a str,
    /// True if the working tree differs from its commit.
    pub(super) changed: bool,
    /// The side to compare with, if there is one.
    pub(super) against: Option<OtherSide<'a>>,
    pub(super) pairs: usize,
}

/// Number of digits of a hash in texts for people.
const SHORT: usize = 9;

impl BenchRun<'_> {
    /// Returns the first digits of the hash of the working tree's commit.
    pub(super) fn short_commit(&self) -> &str {
        short(self.commit)
    }

    /// Returns the sentences that explain how the figures were measured.
    fn about(&self) -> String {
        let changed = if self.changed { " with changes" } else { "" };
        let tree = format!("{}{changed}", self.short_commit());
        let other = match &self.against {
            None => None,
            Some(OtherSide::Commit { rev, hash }) if hash.starts_with(rev) => {
                Some(short(hash).to_owned())
            }
            Some(OtherSide::Commit { rev, hash }) => Some(format!("{} ({rev})", short(hash))),
            Some(OtherSide::Peers(names)) => Some(names.join(" and ")),
        };
        let how = match other {
            None => format!("Commit {tree}: medians of {} runs.", self.pairs),
            Some(other) => format!(
                "Commit {tree} against {other}: medians of {} pairs of runs in turns. A ratio is \
                 that of the times, or the inverse of that of the rates: below 1 the working tree \
                 is better. It is marked where p10 and p90 are on one side of 1.",
                self.pairs
            ),
        };

        format!("{how}\n{}; {}.", self.machine.text(), self.date)
    }
}

fn short(hash: &str) -> &str {
    hash.get(..SHORT).unwrap_or(hash)
}

/// Formats the results for a terminal.
pub(super) fn text(rows: &[MeasuredFigure], run: &BenchRun<'_>) -> String {
    format!("{}\n\n{}", table(rows, run, false), run.about())
}

/// Formats the results as the page of the performance record. `data` is the name of the file with
/// all values.
pub(super) fn page(rows: &[MeasuredFigure], run: &BenchRun<'_>, data: &str) -> String {
    format!(
        "# Performance\n\n`cargo xtask bench --record` writes this page. All values: \
         [{data}](performance/{data}).\n\n{}\n\n{}\n",
        run.about(),
        table(rows, run, true)
    )
}

fn table(rows: &[MeasuredFigure], run: &BenchRun<'_>, markdown: bool) -> String {
    let mut table = Table::new();
    table.load_style(if markdown { ASCII_MARKDOWN } else { NOTHING });

    let numbers = match &run.against {
        None => {
            table.set_header(["figure", "median", "p10", "p90", "unit", ""]);
            1..4
        }
        Some(other) => {
            let other = match other {
                OtherSide::Commit { hash, .. } => short(hash),
                OtherSide::Peers(_) => "peer",
            };
            let heading = [
                "figure",
                other,
                "working tree",
                "ratio",
                "p10",
                "p90",
                "unit",
                "",
            ];
            table.set_header(heading);
            1..6
        }
    };

    for row in rows {
        let tree = spread(&row.tree);
        let cells = match &run.against {
            None => spread_cells(tree).to_vec(),
            Some(_) => {
                let ratio = row.ratios().1;
                let medians = [spread(&row.against), tree].map(median_cell);
                [&medians[..], &spread_cells(ratio)].concat()
            }
        };

        let note = row.why.clone().unwrap_or_else(|| {
            let notes = [Some(mark(row)), row.peer.as_deref()];
            let notes = notes.into_iter().flatten().filter(|note| !note.is_empty());
            notes.collect::<Vec<_>>().join(": ")
        });
        let name = [row.figure.item.to_owned()];
        table.add_row([&name[..], &cells, &[row.figure.unit.to_owned(), note]].concat());
    }

    for (at, column) in table.column_iter_mut().enumerate() {
        if !markdown {
            column.set_padding((0, 2));
        }
        if numbers.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

fn mark(row: &MeasuredFigure) -> &'static str {
    row.ratios().1.map_or("", |spread| spread.mark().word())
}

fn spread(values: &[Option<f64>]) -> Option<RatioSpread> {
    RatioSpread::of(values.iter().copied().flatten())
}

fn median_cell(spread: Option<RatioSpread>) -> String {
    spread.map_or_else(|| "-".to_owned(), |spread| figure(spread.median))
}

fn spread_cells(spread: Option<RatioSpread>) -> [String; 3] {
    let cell =
        |of: fn(RatioSpread) -> f64| spread.map_or_else(|| "-".to_owned(), |s| figure(of(s)));
    [
        cell(|spread| spread.median),
        cell(|spread| spread.p10),
        cell(|spread| spread.p90),
    ]
}

/// Formats a value with about three significant digits.
fn figure(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Returns all values, and the description of the run, as JSON.
pub(super) fn json(rows: &[MeasuredFigure], run: &BenchRun<'_>) -> Value {
    let spread_of = |spread: Option<RatioSpread>| {
        spread.map(
            |RatioSpread { median, p10, p90 }| json!({"median": median, "p10": p10, "p90": p90}),
        )
    };

    let one = |row: &MeasuredFigure| {
        let (ratios, ratio) = row.ratios();
        let measurement = row.measurement;
        let words = [&[measurement.program], measurement.arguments].concat();
        json!({
            "figure": row.figure.item,
            "unit": row.figure.unit,
            "better": if row.figure.better == Better::Lower { "lower" } else { "higher" },
            "measurement": measurement.name,
            "command": words.join(" "),
            "tree": {"values": row.tree, "spread": spread_of(spread(&row.tree))},
            "against": run.against.as_ref().map(|_| {
                json!({"values": row.against, "spread": spread_of(spread(&row.against))})
            }),
            "peer": row.peer,
            "ratio": run.against.as_ref().map(|_| {
                json!({"values": ratios, "spread": spread_of(ratio)})
            }),
            "mark": mark(row),
            "why": row.why,
        })
    };
    json!({
        "date": run.date,
        "machine": run.machine.json(),
        "commit": run.commit,
        "changed": run.changed,
        "against": run.against.as_ref().map(|other| match other {
            OtherSide::Commit { rev, hash } => json!({"rev": rev, "commit": hash}),
            OtherSide::Peers(names) => json!({"peers": names}),
        }),
        "pairs": run.pairs,
        "figures": rows.iter().map(one).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::set::SET;
    use super::*;

    fn row(tree: [f64; 3], against: &[f64], why: Option<&str>) -> MeasuredFigure {
        MeasuredFigure {
            measurement: &SET[0],
            figure: &SET[0].figures[0],
            tree: tree.map(Some).to_vec(),
            against: against.iter().copied().map(Some).collect(),
            peer: None,
            why: why.map(str::to_owned),
            failed: false,
        }
    }

    fn run<'a>(machine: &'a Machine, against: Option<(&'a str, &'a str)>) -> BenchRun<'a> {
        let commit = "0123456789abcdef";
        BenchRun {
            date: "today",
            machine,
            commit,
            changed: true,
            against: against.map(|(rev, hash)| OtherSide::Commit { rev, hash }),
            pairs: 3,
        }
    }

    #[test]
    fn table_has_ratios_marks_and_reasons() {
        let machine = Machine::look();
        let rows = [
            row([2.0, 2.0, 2.0], &[4.0, 3.9, 4.1], None),
            row([2.0, 2.0, 2.0], &[], Some("there is none")),
        ];
        let said = text(&rows, &run(&machine, Some(("HEAD~1", "fedcba9876543210"))));
        let lines: Vec<&str> = said.lines().collect();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(lines[0]),
            "figure fedcba987 working tree ratio p10 p90 unit"
        );
        assert_eq!(
            words(lines[1]),
            "issue an empty `jit` call 4.00 2.00 0.50 0.49 0.51 us faster"
        );
        assert_eq!(
            words(lines[2]),
            "issue an empty `jit` call - 2.00 - - - us there is none"
        );
        assert!(
            said.contains("Commit 012345678 with changes against fedcba987 (HEAD~1)"),
            "{said}"
        );
        assert!(said.contains(&machine.text()), "{said}");
    }

    #[test]
    fn table_names_the_peer_of_each_row() {
        let machine = Machine::look();
        let mut faster = row([2.0, 2.0, 2.0], &[4.0, 4.0, 4.0], None);
        faster.peer = Some("Open MPI 4".to_owned());
        let mut run = run(&machine, None);
        run.against = Some(OtherSide::Peers(vec!["Open MPI 4", "torch 2"]));

        let said = text(&[faster], &run);
        let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.starts_with("figure peer working tree ratio"),
            "{said}"
        );
        assert!(words.contains("0.50 us faster: Open MPI 4"), "{said}");
        assert!(said.contains("against Open MPI 4 and torch 2:"), "{said}");
        let json = json(&[], &run);
        assert_eq!(json["against"]["peers"][1], "torch 2");
    }

    #[test]
    fn page_is_a_table_of_markdown() {
        let machine = Machine::look();
        let said = page(
            &[row([150.0, 160.0, 170.0], &[], None)],
            &run(&machine, None),
            "x.json",
        );
        assert!(said.contains("[x.json](performance/x.json)"), "{said}");
        let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.contains("| issue an empty `jit` call | 160 | 150 | 170 | us |"),
            "{said}"
        );
    }

    #[test]
    fn json_has_values_spreads_and_commits() {
        let machine = Machine::look();
        let rows = [row([2.0, 3.0, 4.0], &[4.0, 6.0, 8.0], None)];
        let said = json(&rows, &run(&machine, Some(("v1", "fedcba"))));
        assert_eq!(said["against"], json!({"rev": "v1", "commit": "fedcba"}));
        assert_eq!(
            (&said["commit"], &said["pairs"]),
            (&json!("0123456789abcdef"), &json!(3))
        );
        let figure = &said["figures"][0];
        assert_eq!(figure["tree"]["values"], json!([2.0, 3.0, 4.0]));
        assert_eq!(
            figure["ratio"]["spread"],
            json!({"median": 0.5, "p10": 0.5, "p90": 0.5})
        );
        assert_eq!(figure["command"], "mpmd bench dispatch --json");
        let alone = json(&rows, &run(&machine, None));
        assert!(alone["against"].is_null() && alone["figures"][0]["ratio"].is_null());
    }
}
