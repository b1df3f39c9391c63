//! `cargo xtask bench`: runs a fixed set of measurements, and compares them with those of another
//! commit, or with programs of other projects that do the same.
//!
//! The programs of both sides are built for speed and run in turns, on the same machine and within
//! seconds of each other. So noise that lasts longer than a pair affects both, and the ratios of
//! the pairs show a difference that single runs would not.

mod compare;
mod machine;
mod measure;
mod options;
mod peers;
mod programs;
mod report;
mod set;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::commands::{cargo, target};
use machine::Machine;
use measure::{MeasurePlace, MeasuredFigure, Side, Sides};
use peers::Peers;
use programs::ProgramBuilder;
use report::{BenchRun, OtherSide};

pub(crate) use options::BenchOptions;

/// Exit code after Ctrl-C, as in a shell.
const INTERRUPTED: u8 = 130;

/// Runs the measurements in the workspace at `root` and prints the results. The exit code is 1 if a
/// program failed or `--at-most` is exceeded, and 130 after an interruption.
///
/// # Errors
///
/// If a build fails, if there is no such commit, or if a file cannot be written.
pub(crate) fn bench(root: &Path, options: &BenchOptions) -> anyhow::Result<ExitCode> {
    if options.list {
        for measurement in &options.only {
            println!("{:10}{} {}", measurement.name, measurement.program, {
                measurement.arguments.join(" ")
            });
            measurement
                .figures
                .iter()
                .for_each(|figure| println!("{:12}{}", "", figure.item));
        }
        return Ok(ExitCode::SUCCESS);
    }

    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }

    let folder = target()?.join("bench");
    let builder = ProgramBuilder {
        root,
        folder,
        cargo: cargo(),
        stop: &stop,
    };
    match measured(&builder, options) {
        // The error, if any, is a consequence.
        _ if stop.load(Ordering::Relaxed) => {
            eprintln!("interrupted");
            Ok(ExitCode::from(INTERRUPTED))
        }
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::FAILURE),
        Err(error) => Err(error),
    }
}

/// Builds, measures and reports. Returns true if nothing failed.
fn measured(builder: &ProgramBuilder<'_>, options: &BenchOptions) -> anyhow::Result<bool> {
    let date = machine::now();
    let machine = Machine::look();

    // Without a repository the figures have no name, and can still be read.
    let known = builder
        .commit("HEAD")
        .and_then(|commit| Ok((commit, builder.has_changes()?)));
    if options.record {
        let (_, changed) = known
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error:#}"))?;
        ensure!(
            !changed,
            "a record names a commit: commit your changes first"
        );
    }

    let (commit, changed) = known.unwrap_or_else(|_| ("unknown".to_owned(), true));
    let other = match &options.against {
        Some(rev) => Some((rev.as_str(), builder.commit(rev)?)),
        None => None,
    };

    let mut names: Vec<&str> = options
        .only
        .iter()
        .map(|measurement| measurement.program)
        .collect();
    names.sort_unstable();
    names.dedup();

    let tree = builder.here(&names)?;
    let against = other
        .as_ref()
        .map(|(_, hash)| builder.of(hash, &names))
        .transpose()?;
    let peers = options.peers.then(|| {
        let folder = builder.folder.join("peers");
        Peers::prepare(builder.root, &folder, &options.python, builder.stop)
    });
    let peers = peers.transpose()?;

    let sides = Sides {
        tree: Side::Tree(&tree),
        against: match (&against, &peers) {
            (Some(programs), _) => Some(Side::Commit(programs)),
            (None, peers) => peers.as_ref().map(Side::Peers),
        },
    };
    let rows = all(builder, options, &sides)?;
    ensure!(!builder.stop.load(Ordering::Relaxed), "interrupted");

    let run = BenchRun {
        date: &date,
        machine: &machine,
        commit: &commit,
        changed,
        against: match (&other, &peers) {
            (Some((rev, hash)), _) => Some(OtherSide::Commit { rev, hash }),
            (None, peers) => peers.as_ref().map(|peers| OtherSide::Peers(peers.names())),
        },
        pairs: options.pairs,
    };
    println!("\n{}", report::text(&rows, &run));

    let json = serde_json::to_string_pretty(&report::json(&rows, &run))? + "\n";
    if let Some(path) = &options.json {
        write(path, &json)?;
    }

    if options.record {
        let docs = builder.root.join("docs");
        let name = format!(
            "{}-{}.json",
            date.get(..10).unwrap_or(&date),
            run.short_commit()
        );
        write(&docs.join("performance").join(&name), &json)?;
        write(
            &docs.join("performance.md"),
            &report::page(&rows, &run, &name),
        )?;
    }
    Ok(verdict(&rows, options.at_most))
}

/// Runs all measurements, and prints a line for each.
fn all(
    builder: &ProgramBuilder<'_>,
    options: &BenchOptions,
    sides: &Sides<'_>,
) -> anyhow::Result<Vec<MeasuredFigure>> {
    let scratch = ScratchFolder::make(builder.folder.join("temporary"))?;
    let place = MeasurePlace {
        root: builder.root,
        scratch: &scratch.0,
        stop: builder.stop,
    };

    let mut rows = Vec::new();
    for measurement in options.only.iter().copied() {
        let runs = options.pairs * (1 + usize::from(sides.against.is_some()));
        println!("   measuring {}, {runs} runs", measurement.name);
        rows.extend(measure::measure(measurement, sides, options.pairs, &place));
    }
    Ok(rows)
}

/// Prints the failed figures and those that are too slow. Returns true if there are none.
fn verdict(rows: &[MeasuredFigure], at_most: Option<f64>) -> bool {
    let mut well = true;
    for row in rows {
        let ratio = row.ratios().1;
        let slow = at_most.filter(|limit| ratio.is_some_and(|ratio| ratio.is_above(*limit)));
        if let Some(limit) = slow {
            eprintln!("too slow: {}: the ratio is above {limit}", row.figure.item);
        }
        if let Some(why) = row.why.as_ref().filter(|_| row.failed) {
            eprintln!("failed: {}: {why}", row.figure.item);
        }
        well &= slow.is_none() && !row.failed;
    }
    well
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// A folder for temporary files, removed on drop.
struct ScratchFolder(PathBuf);

impl ScratchFolder {
    fn make(path: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // A file that is left harms no later run.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::programs::tests::Repository;
    use super::*;

    /// A shell command that prints figures of the measurement `handover`. `FIRST` is replaced by
    /// the first figure.
    const HANDOVER: &str = r#"echo '{"name":"handover","parameters":"64Mi, x","median":FIRST}'
        echo '{"name":"handover warm-up","parameters":"64Mi, x","median":4}'"#;

    fn options(text: &str) -> BenchOptions {
        BenchOptions::parse(&text.split(' ').collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn slower_tree_fails_only_above_the_limit() {
        let there = Repository::new("limit", &HANDOVER.replace("FIRST", "20"));
        there.script("mpmd", &HANDOVER.replace("FIRST", "23"));
        let file = there.root.join("out/values.json");
        let run = |more: &str| {
            let all = format!("--against HEAD --only handover --pairs 3{more}");
            measured(&there.builder(), &options(&all)).unwrap()
        };
        assert!(run(&format!(" --json {}", file.display())));
        assert!(run(" --at-most 1.2"));
        assert!(!run(" --at-most 1.1"));
        let said: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(said["figures"][0]["ratio"]["spread"]["median"], 1.15);
        assert_eq!(said["figures"][0]["mark"], "slower");
        assert_eq!(said["changed"], true);
        assert!(!there.builder().folder.join("temporary").exists());
    }

    #[test]
    fn failed_program_fails_the_run_at_its_end() {
        let there = Repository::new("end", "exit 3");
        assert!(!measured(&there.builder(), &options("--only handover --pairs 1")).unwrap());
    }

    #[test]
    fn missing_commit_stops_before_a_build() {
        let there = Repository::new("missing", &HANDOVER.replace("FIRST", "20"));
        let error = measured(&there.builder(), &options("--against nowhere")).unwrap_err();
        assert!(
            error.to_string().contains("there is no commit nowhere"),
            "{error:#}"
        );
        assert!(!there.root.join("calls").exists());
    }

    #[test]
    fn record_needs_a_commit_without_changes() {
        let there = Repository::new("record", &HANDOVER.replace("FIRST", "20"));
        let mut options = options("--only handover --pairs 1");
        options.record = true;
        assert!(measured(&there.builder(), &options).unwrap());
        let page = fs::read_to_string(there.root.join("docs/performance.md")).unwrap();
        let (_, name) = page.split_once("(performance/").unwrap();
        let (name, _) = name.split_once(')').unwrap();
        assert!(
            there.root.join("docs/performance").join(name).is_file(),
            "{page}"
        );
        there.script("mpmd", "exit 0");
        let error = measured(&there.builder(), &options).unwrap_err();
        assert!(
            error.to_string().contains("commit your changes first"),
            "{error:#}"
        );
    }
}
