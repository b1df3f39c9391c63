//! `cargo xtask gpu`: runs everything that needs a GPU, in stages with time limits.
//!
//! Builds for speed and lays a kit: a folder with the programs, the tests, the driver in software,
//! and this program. The stages run from the kit, here or on a machine
//! without cargo and Python (`--pack`, then `--prebuilt`).
//!
//! With `--software` the same stages run on the tests' own driver, with small sizes. That only
//! shows that the stages work; the figures have no meaning.

mod kit;
mod report;
mod stages;
mod tests;
mod turn;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::commands::target;
use kit::{CANDLE, FRAMEWORK, Kit, KitContent};
use report::StageReport;
use stages::{GpuStage, STAGES};
use turn::{StagePlace, StageTurn};

/// Exit status if there is no CUDA driver.
const NO_DRIVER: u8 = 2;

/// Device files of NVIDIA's drivers: a machine with a driver has at least one of them.
const DRIVER_FILES: [&str; 3] = ["/dev/nvidiactl", "/dev/dxg", "/dev/nvmap"];

/// Remaining time below which no further stage is started.
const WORTH_A_START: Duration = Duration::from_secs(5);

/// Arguments of `cargo xtask gpu`.
pub(crate) struct GpuOptions {
    way: GpuCommand,
    /// The definition of the kit to build.
    content: &'static KitContent,
    /// True if the stages run on the driver in software.
    software: bool,
    stages: Vec<&'static GpuStage>,
    /// Time limit of all stages together.
    limit: Duration,
}

/// The action of the command.
#[derive(Debug, Eq, PartialEq)]
enum GpuCommand {
    List,
    /// Builds the stages, and runs them on this machine.
    Here,
    /// Builds a kit in this folder, and packs it.
    Pack(PathBuf),
    /// Runs the stages from the kit in this folder.
    Prebuilt(PathBuf),
}

impl GpuOptions {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// If an argument is unknown or wrong.
    pub(crate) fn parse(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self {
            way: GpuCommand::Here,
            content: &FRAMEWORK,
            software: false,
            stages: STAGES.iter().collect(),
            limit: Duration::MAX,
        };

        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || {
                rest.next()
                    .copied()
                    .with_context(|| format!("{argument} takes a value"))
            };
            match *argument {
                "--list" => options.way = GpuCommand::List,
                "--pack" => options.way = GpuCommand::Pack(value()?.into()),
                "--prebuilt" => options.way = GpuCommand::Prebuilt(value()?.into()),
                "--software" => options.software = true,
                "--candle" => options.content = &CANDLE,
                "--stage" => {
                    let names: Vec<&str> = value()?.split(',').collect();
                    if let Some(name) = names
                        .iter()
                        .find(|name| STAGES.iter().all(|stage| stage.name != **name))
                    {
                        let all: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
                        bail!("there is no stage {name:?}; there are {}", all.join(", "));
                    }
                    options.stages.retain(|stage| names.contains(&stage.name));
                }
                "--limit" => {
                    let text = value()?;
                    let limit = text.parse().ok().filter(|limit| *limit > 0);
                    let limit =
                        limit.with_context(|| format!("--limit {text} is no number of seconds"))?;
                    options.limit = Duration::from_secs(limit);
                }
                other => bail!("there is no argument {other}"),
            }
        }
        Ok(options)
    }
}

/// Lists, builds or runs the stages, by the options. Calls `root`, which returns the workspace,
/// only to build. The exit status is 0 if all stages have passed, 1 if one failed or was cut off,
/// and 2 if there is no driver.
///
/// # Errors
///
/// If the build fails, if the kit is damaged or too large, or if the results cannot be written.
pub(crate) fn gpu(
    root: impl FnOnce() -> anyhow::Result<&'static Path>,
    options: &GpuOptions,
) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("listening for signals")?;
    }

    match &options.way {
        GpuCommand::List => {
            print!("{}", stages::list());
            Ok(ExitCode::SUCCESS)
        }
        GpuCommand::Pack(folder) => {
            let kit = kit::lay(root()?, options.content, options.software, folder, &stop)?;
            println!("{}", kit::pack(&kit)?);
            Ok(ExitCode::SUCCESS)
        }
        GpuCommand::Prebuilt(folder) => staged(&Kit::read(folder)?, options, stop),
        GpuCommand::Here
            if !options.software && DRIVER_FILES.iter().all(|file| !Path::new(file).exists()) =>
        {
            eprintln!(
                "no CUDA driver found: there is none of {}; nothing was built or run. `cargo xtask \
                 gpu --software` tries the command itself, `--pack` is for another machine",
                DRIVER_FILES.join(", ")
            );
            Ok(ExitCode::from(NO_DRIVER))
        }
        GpuCommand::Here => {
            let name = format!("gpu-kit-{}", options.content.name);
            let folder = target()?.join(name);
            let kit = kit::lay(root()?, options.content, options.software, &folder, &stop)?;
            staged(&kit, options, stop)
        }
    }
}

/// Runs the stages from a kit, and prints their results.
fn staged(kit: &Kit, options: &GpuOptions, stop: Arc<AtomicBool>) -> anyhow::Result<ExitCode> {
    let begin = Instant::now();
    let end = begin.checked_add(options.limit);
    let place = StagePlace::new(kit, options.software, stop)?;
    let mut report = StageReport::new(&place);

    for stage in &options.stages {
        let mut until = Instant::now() + Duration::from_secs(stage.limit);
        let is_cut = end.is_some_and(|end| end < until);
        if let Some(end) = end.filter(|_| is_cut) {
            until = end;
        }

        let mut turn = StageTurn::new(&place, until);
        let missing = stage
            .programs
            .iter()
            .find(|name| !kit.content.programs.contains(name));
        if let Some(name) = missing {
            turn.not_run(&format!(
                "the kit {} has no program {name}",
                kit.content.name
            ));
        } else if place.is_stopped() {
            turn.not_run("interrupted");
        } else if until.saturating_duration_since(Instant::now()) < WORTH_A_START {
            turn.cut("no time is left of --limit");
        } else {
            println!("{} …", stage.name);
            (stage.run)(&mut turn);
        }

        report.add(stage, turn)?;
    }
    report.end(begin.elapsed())
}

#[cfg(test)]
mod options {
    use super::*;

    fn parsed(arguments: &str) -> anyhow::Result<GpuOptions> {
        GpuOptions::parse(&arguments.split_whitespace().collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_parsed() {
        let all = parsed("").unwrap();
        assert_eq!(
            (all.way, all.stages.len(), all.software),
            (GpuCommand::Here, STAGES.len(), false)
        );
        let some = parsed("--prebuilt kit --stage tests,facts --limit 30 --software").unwrap();
        assert_eq!(
            (some.way, some.software),
            (GpuCommand::Prebuilt("kit".into()), true)
        );
        assert_eq!(some.limit, Duration::from_secs(30));
        // In the order of the list, which is that of their priority.
        let names: Vec<&str> = some.stages.iter().map(|stage| stage.name).collect();
        assert_eq!(names, ["facts", "tests"]);
        let pack = parsed("--pack kit").unwrap();
        assert_eq!(
            (pack.way, pack.content.name),
            (GpuCommand::Pack("kit".into()), "framework")
        );
        assert_eq!(
            parsed("--pack kit --candle").unwrap().content.name,
            "candle"
        );
        assert_eq!(parsed("--list").unwrap().way, GpuCommand::List);
    }

    #[test]
    fn wrong_arguments_are_refused_with_a_reason() {
        for (arguments, reason) in [
            ("--fast", "no argument --fast"),
            ("--pack", "--pack takes a value"),
            ("--limit 0", "--limit 0 is no number of seconds"),
            (
                "--stage tests,test",
                "no stage \"test\"; there are facts, doctor, ",
            ),
        ] {
            let Err(error) = parsed(arguments) else {
                panic!("{arguments} is taken")
            };
            let why = error.to_string();
            assert!(why.contains(reason), "{arguments}: {why}");
        }
    }
}
