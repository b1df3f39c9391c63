//! Runs the measurements of both sides in turns, and collects their figures.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::compare::{RatioSpread, order, ratios};
use super::peers::Peers;
use super::programs::Programs;
use super::set::{FigureSpec, Measurement};
use crate::program_output::quiet;

/// Time limit for one run of a program.
const RUN: Duration = Duration::from_secs(120);

/// Exit code of a program that rejects its arguments as unknown.
const USAGE: i32 = 2;

/// The two sides that are compared. Without another side there is only the working tree.
pub(super) struct Sides<'a> {
    pub(super) tree: Side<'a>,
    pub(super) against: Option<Side<'a>>,
}

/// The programs of one side.
#[derive(Clone, Copy)]
pub(super) enum Side<'a> {
    Tree(&'a Programs),
    Commit(&'a Programs),
    Peers(&'a Peers),
}

impl Side<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Tree(_) => "the working tree",
            Self::Commit(_) => "the other commit",
            Self::Peers(_) => "the peer",
        }
    }

    /// Returns the command of a measurement, or the reason why this side does not have it.
    fn command(self, measurement: &Measurement) -> Result<Command, String> {
        let programs = match self {
            Self::Tree(programs) | Self::Commit(programs) => programs,
            Self::Peers(peers) => {
                let peer = measurement.peer.ok_or("no peer")?;
                return peers.command(peer);
            }
        };
        let program = programs.get(measurement.program);
        let program = program
            .ok_or_else(|| format!("{} has no program {}", self.name(), measurement.program))?;
        let mut command = Command::new(program);
        command.args(measurement.arguments);
        Ok(command)
    }
}

/// The folders of a measurement, and the flag that stops it.
pub(super) struct MeasurePlace<'a> {
    /// The folder in which programs run.
    pub(super) root: &'a Path,
    /// The folder for the programs' temporary files.
    pub(super) scratch: &'a Path,
    pub(super) stop: &'a AtomicBool,
}

/// The values of a figure, one per pair on each side. `None` for a value that is missing.
pub(super) struct MeasuredFigure {
    pub(super) measurement: &'static Measurement,
    pub(super) figure: &'static FigureSpec,
    pub(super) tree: Vec<Option<f64>>,
    /// The values of the other side. Empty if there is none.
    pub(super) against: Vec<Option<f64>>,
    /// The name of the peer on the other side.
    pub(super) peer: Option<String>,
    /// The reason why values are missing.
    pub(super) why: Option<String>,
    /// True if a program failed, or the working tree lacks the figure.
    pub(super) failed: bool,
}

impl MeasuredFigure {
    /// Returns the ratios of the pairs and their spread; see [`ratios`].
    pub(super) fn ratios(&self) -> (Vec<f64>, Option<RatioSpread>) {
        let all = ratios(&self.tree, &self.against, self.figure.better);
        let spread = RatioSpread::of(all.iter().copied());
        (all, spread)
    }
}

/// The result of one run of a measurement.
enum Ran {
    /// The figures of the measurement, in order. `None` for a figure that is not in the output.
    Done(Vec<Option<f64>>),
    /// This side does not have the measurement. The text is the reason.
    Absent(String),
    Failed(String),
}

/// Runs a measurement in `pairs` pairs. Without another commit, a pair is one run. A side that
/// failed, or lacks the measurement, does not run again.
///
/// Returns early after an interruption; the rows then lack values.
pub(super) fn measure(
    measurement: &'static Measurement,
    sides: &Sides<'_>,
    pairs: usize,
    place: &MeasurePlace<'_>,
) -> Vec<MeasuredFigure> {
    let peer = match sides.against {
        Some(Side::Peers(peers)) => measurement.peer.and_then(|peer| peers.name(peer)),
        _ => None,
    };
    let mut rows: Vec<MeasuredFigure> = measurement
        .figures
        .iter()
        .map(|figure| MeasuredFigure {
            measurement,
            figure,
            tree: Vec::new(),
            against: Vec::new(),
            peer: peer.map(str::to_owned),
            why: None,
            failed: false,
        })
        .collect();

    let mut over = [false; 2];
    for pair in 0..pairs {
        for other in order(pair) {
            let side = if other {
                sides.against
            } else {
                Some(sides.tree)
            };
            let Some(side) = side.filter(|_| !over[usize::from(other)]) else {
                continue;
            };

            if place.stop.load(Ordering::Relaxed) {
                return rows;
            }
            let ran = run(measurement, side, place);
            over[usize::from(other)] = !matches!(ran, Ran::Done(_));
            for (at, row) in rows.iter_mut().enumerate() {
                row.take(&ran, at, pair, side);
            }
        }
    }
    rows
}

impl MeasuredFigure {
    /// Adds the result of one run. `at` is the index of this figure in the measurement.
    fn take(&mut self, ran: &Ran, at: usize, pair: usize, side: Side<'_>) {
        let other = !matches!(side, Side::Tree(_));
        let side = side.name();

        let value = match ran {
            Ran::Done(values) => values.get(at).copied().flatten(),
            Ran::Absent(_) | Ran::Failed(_) => None,
        };
        let (why, failed) = match ran {
            Ran::Done(_) if value.is_some() => (None, false),
            Ran::Done(_) => (Some(format!("{side} gives no such figure")), !other),
            Ran::Absent(why) => (Some(why.clone()), !other),
            Ran::Failed(why) => (Some(format!("{side}: {why}")), true),
        };

        self.failed |= failed;
        self.why = self.why.take().or(why);
        let values = if other {
            &mut self.against
        } else {
            &mut self.tree
        };
        // The places of pairs in which this side did not run stay empty.
        values.resize(pair, None);
        values.push(value);
    }
}

fn run(measurement: &Measurement, side: Side<'_>, place: &MeasurePlace<'_>) -> Ran {
    let mut command = match side.command(measurement) {
        Ok(command) => command,
        Err(why) => return Ran::Absent(why),
    };
    command.current_dir(place.root).env("TMPDIR", place.scratch);

    let said = match quiet(&mut command, RUN, place.stop) {
        Ok(said) => said,
        Err(error) => return Ran::Failed(format!("{error:#}")),
    };
    match said.code {
        Some(0) => {
            let figures = measurement
                .figures
                .iter()
                .map(|figure| figure.read(&said.stdout));
            figures
                .collect::<anyhow::Result<_>>()
                .map_or_else(|error| Ran::Failed(error.to_string()), Ran::Done)
        }
        Some(USAGE) => Ran::Absent(format!(
            "{} does not have it: {}",
            side.name(),
            said.first_words()
        )),
        _ => Ran::Failed(said.last_words()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::programs::tests::Repository;
    use super::super::set::SET;
    use super::*;

    /// A shell command that prints a figure of the measurement `handover`.
    const HANDOVER: &str = r#"echo '{"name":"handover","parameters":"64Mi, x","median":20}'
        echo '{"name":"handover warm-up","parameters":"64Mi, x","median":4}'"#;

    /// Measures `handover` in three pairs. The scripts `tree` and `against` run in place of the
    /// programs.
    fn handover(name: &str, tree: &str, against: Option<&str>) -> Vec<MeasuredFigure> {
        let there = Repository::new(name, tree);
        let of = |script: &str| Programs::from([("mpmd".to_owned(), there.root.join(script))]);
        let measurement = SET
            .iter()
            .find(|measurement| measurement.name == "handover")
            .unwrap();
        there.script("other", against.unwrap_or_default());
        let (tree, other) = (of("mpmd"), of("other"));
        let sides = Sides {
            tree: Side::Tree(&tree),
            against: against.map(|_| Side::Commit(&other)),
        };
        let place = MeasurePlace {
            root: &there.root,
            scratch: &there.root,
            stop: &there.stop,
        };
        measure(measurement, &sides, 3, &place)
    }

    #[test]
    fn both_sides_are_measured_in_turns() {
        let count = |name| format!("echo {name} >> order; {HANDOVER}");
        let there = Repository::new("turns", &count("tree"));
        there.script("other", &count("other"));
        let of = |script: &str| Programs::from([("mpmd".to_owned(), there.root.join(script))]);
        let measurement = SET
            .iter()
            .find(|measurement| measurement.name == "handover")
            .unwrap();
        let (tree, other) = (of("mpmd"), of("other"));
        let sides = Sides {
            tree: Side::Tree(&tree),
            against: Some(Side::Commit(&other)),
        };
        let place = MeasurePlace {
            root: &there.root,
            scratch: &there.root,
            stop: &there.stop,
        };
        let rows = measure(measurement, &sides, 3, &place);
        let order = std::fs::read_to_string(there.root.join("order")).unwrap();
        assert_eq!(order, "other\ntree\ntree\nother\nother\ntree\n");
        assert_eq!(rows[0].tree, [Some(20.0); 3]);
        assert_eq!(rows[1].against, [Some(4.0); 3]);
        assert_eq!(rows[0].ratios().0, [1.0; 3]);
        assert!(rows.iter().all(|row| !row.failed && row.why.is_none()));
    }

    #[test]
    fn working_tree_is_measured_alone() {
        let rows = handover("alone", HANDOVER, None);
        assert_eq!(
            (&rows[0].tree[..], rows[0].against.len()),
            (&[Some(20.0); 3][..], 0)
        );
        assert_eq!(rows[0].ratios(), (Vec::new(), None));
    }

    #[test]
    fn figure_that_the_other_commit_lacks_is_no_failure() {
        let (first, _) = HANDOVER.split_once('\n').unwrap();
        let rows = handover("lacks", HANDOVER, Some(first));
        assert!(!rows[0].failed && rows[0].why.is_none() && !rows[1].failed);
        assert_eq!(
            rows[1].why.as_deref(),
            Some("the other commit gives no such figure")
        );
        assert_eq!(rows[1].ratios(), (Vec::new(), None));
        // The other way round it is one.
        let rows = handover("lacked", first, Some(HANDOVER));
        assert!(!rows[0].failed && rows[1].failed);
    }

    #[test]
    fn measurement_that_the_other_commit_lacks_is_no_failure() {
        let unknown = "echo 'error: unrecognized subcommand' >&2; exit 2";
        let rows = handover("unknown", HANDOVER, Some(unknown));
        let why = "the other commit does not have it: error: unrecognized subcommand";
        assert_eq!((rows[0].why.as_deref(), rows[0].failed), (Some(why), false));
        assert_eq!(rows[0].tree, [Some(20.0); 3]);
        assert!(handover("unknown-here", unknown, None)[0].failed);
    }

    #[test]
    fn failed_program_says_why_and_runs_no_more() {
        let rows = handover(
            "fails",
            HANDOVER,
            Some("echo x >> failures; echo oh >&2; exit 7"),
        );
        let why = "the other commit: ended with status 7: oh";
        assert_eq!((rows[0].why.as_deref(), rows[0].failed), (Some(why), true));
        assert_eq!((rows[0].tree.len(), rows[0].against.len()), (3, 1));
        let rows = handover("damaged", "echo '{\"name\":'", None);
        let why = "the working tree: no JSON: {\"name\":";
        assert_eq!((rows[1].why.as_deref(), rows[1].failed), (Some(why), true));
    }
}
