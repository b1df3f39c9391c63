//! `cargo xtask gpu`: runs everything that needs a GPU, and prints one table at the end.
//!
//! Builds for speed with the feature `cuda`, examines the machine, and runs the tests for GPUs on
//! real ones. Then runs programs under compute-sanitizer, if it is installed, and the benchmarks,
//! and compares the figures with the requirements.
//!
//! With `--software` it does the same on the tests' own driver, with small sizes and debug builds.
//! That only shows that this command works; the figures have no meaning.

mod driver;
mod figures;
mod table;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::captured::captured;
use crate::commands::{answers, cargo, run, target};
use figures::{Benchmark, judge};
use table::{Row, Verdict};

/// Exit status if there is no driver to run on.
const NO_DRIVER: u8 = 2;

/// Time limit for one benchmark, or for one program under the sanitizer.
const LONG: Duration = Duration::from_secs(600);

/// Time limit for examining the machine: drivers start slowly if nothing else has them loaded.
const LOOK: Duration = Duration::from_secs(60);

/// The variable that selects the GPUs that the driver shows.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Exit code of the sanitizer if it has found an error.
const FOUND: i32 = 86;

/// The devices that everything runs on.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Ground {
    /// Real GPUs.
    Gpu,
    /// The tests' own driver, which lies in this folder under the names of CUDA's libraries.
    Software(PathBuf),
}

/// Runs everything in the workspace at `root`, on real GPUs unless `software` is true. The exit
/// status is 0 if all has passed, 1 if something failed, and 2 if there is no driver.
///
/// # Errors
///
/// If the build fails, or if one of the programs cannot be started.
pub(crate) fn gpu(root: &Path, software: bool) -> anyhow::Result<ExitCode> {
    let target = target()?;
    if !software && let Some(why) = driver::why_none() {
        eprintln!(
            "{why}; nothing was built or run. `cargo xtask gpu --software` tries the command itself"
        );
        return Ok(ExitCode::from(NO_DRIVER));
    }
    let ground = if software { Ground::Software(target.join("softcuda")) } else { Ground::Gpu };
    build(root, &target, &ground)?;
    let place = Place { root, programs: target.join(ground.profile()), ground: &ground };
    let (seen, processors) = match place.look()? {
        Ok(seen) => seen,
        Err(why) => {
            eprintln!("{why}; nothing was run");
            return Ok(ExitCode::from(NO_DRIVER));
        }
    };
    let mut rows = vec![Row::told("processors", seen)];
    rows.push(place.tests());
    rows.extend(place.sanitized());
    for benchmark in figures::BENCHMARKS {
        rows.extend(place.measured(benchmark, processors));
    }
    println!("\n{}", table::text(&rows, software));
    let passed = rows.iter().all(|row| row.verdict != Verdict::Failed);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Ground {
    /// Returns the name of cargo's folder of the programs that are built for these devices.
    fn profile(&self) -> &'static str {
        if *self == Self::Gpu { "release" } else { "debug" }
    }

    /// Adds the environment with which a program runs on these devices.
    fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        match self {
            // With this variable, tests do not install their own driver.
            Self::Gpu => command.env("MPMD_TEST_GPU", "1"),
            Self::Software(folder) => {
                command.env("LD_LIBRARY_PATH", folder).env_remove("MPMD_TEST_GPU")
            }
        }
    }
}

fn build(root: &Path, target: &Path, ground: &Ground) -> anyhow::Result<()> {
    let mut command = Command::new(cargo());
    command.current_dir(root).args(["build", "--bins"]).args(PACKAGES).args(["--features", "cuda"]);
    if *ground == Ground::Gpu {
        command.arg("--release");
    }
    run(&mut command)?;
    if let Ground::Software(folder) = ground {
        run(Command::new(cargo()).current_dir(root).args(["build", "--package", "softcuda"]))?;
        driver::install(&target.join(ground.profile()), folder)?;
    }
    Ok(())
}

/// The packages with programs or tests for GPUs.
const PACKAGES: [&str; 10] = [
    "--package",
    "mpmd-core",
    "--package",
    "mpmd-bench",
    "--package",
    "mpmd-cli",
    "--package",
    "mpmd-examples",
    "--package",
    "mpmd-tests",
];

/// The folders and devices for running programs.
struct Place<'a> {
    root: &'a Path,
    programs: PathBuf,
    ground: &'a Ground,
}

impl Place<'_> {
    /// Returns a command for a built program, with its full path, because other programs get it as
    /// an argument.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        self.ground.set(command.current_dir(self.root));
        command
    }

    /// Returns (the GPUs that `mpmd doctor` finds as a text, their number), or the reason why it
    /// finds none. The outer error means that `mpmd doctor` itself failed.
    fn look(&self) -> anyhow::Result<Result<(String, usize), String>> {
        let mut doctor = self.program("mpmd");
        let said = captured(doctor.args(["doctor", "--device", "cuda", "--json"]), LOOK)?;
        let said: Value =
            serde_json::from_str(&said.stdout).context("`mpmd doctor --json` says no JSON")?;
        Ok(figures::seen(&said))
    }

    fn tests(&self) -> Row {
        let item = "tests for graphics processors";
        // A device that one test has made fail stays failed in that process.
        if !answers("cargo-nextest", &["nextest", "--version"]) {
            let why =
                "not run: each takes a process of its own (`cargo install cargo-nextest --locked`)";
            return Row::failed(item, "all pass", why);
        }
        let mut command = Command::new(cargo());
        command.current_dir(self.root);
        // By name: every such test has `cuda` in its name, or in that of its module.
        command.args(["nextest", "run"]).args(PACKAGES).args(["--features", "cuda"]);
        command.args(["--filterset", "test(/cuda/)"]);
        // Tests that need their own driver know its place themselves.
        if *self.ground == Ground::Gpu {
            self.ground.set(command.arg("--release"));
        }
        match run(&mut command) {
            Ok(()) => Row::passed(item, "all pass", "all passed"),
            Err(error) => Row::failed(item, "all pass", format!("{error:#}")),
        }
    }

    /// Runs the benchmarks, small, under compute-sanitizer: for memory errors and for races within
    /// kernels. Without the sanitizer or GPUs, returns rows that say so.
    fn sanitized(&self) -> Vec<Row> {
        const SANITIZER: &str = "compute-sanitizer";
        let there = *self.ground == Ground::Gpu && answers(SANITIZER, &["--version"]);
        let mut rows = Vec::new();
        let benchmarks = figures::BENCHMARKS.iter().map(|benchmark| {
            let Benchmark { arguments, small, .. } = benchmark;
            let arguments =
                [&["bench"], *arguments, &["--device", "cuda", "--json"], *small].concat();
            (benchmark.arguments[0], arguments)
        });
        let benchmarks: Vec<_> = benchmarks.collect();
        for tool in ["memcheck", "racecheck"] {
            for (name, arguments) in &benchmarks {
                let (item, asked) = (format!("{tool}: {name}"), "clean");
                if !there {
                    rows.push(Row::not_run(item, asked, format!("{SANITIZER} is not installed")));
                    continue;
                }
                let mut command = Command::new(SANITIZER);
                self.ground.set(command.current_dir(self.root));
                command.args(["--tool", tool, "--target-processes", "all"]);
                command.args(["--error-exitcode", &FOUND.to_string()]);
                command.arg(self.programs.join("mpmd")).args(arguments);
                rows.push(match captured(&mut command, LONG) {
                    Ok(said) if said.code == Some(0) => Row::passed(item, asked, "clean"),
                    Ok(said) => Row::failed(item, asked, said.last_words()),
                    Err(error) => Row::failed(item, asked, format!("{error:#}")),
                });
            }
        }
        rows
    }

    fn measured(&self, benchmark: &Benchmark, processors: usize) -> Vec<Row> {
        if *self.ground == Ground::Gpu && processors < benchmark.processors {
            let why = format!(
                "it takes {} processors: on fewer they wait for each other",
                benchmark.processors
            );
            let not_run =
                |figure: &figures::Figure| Row::not_run(figure.item, figure.asked(), why.clone());
            return benchmark.figures.iter().map(not_run).collect();
        }
        let software = *self.ground != Ground::Gpu;
        match self.lines(benchmark, software) {
            Ok(lines) => judge(benchmark, &lines, software),
            Err(error) => {
                let failed = |figure: &figures::Figure| {
                    Row::failed(figure.item, figure.asked(), format!("{error:#}"))
                };
                benchmark.figures.iter().map(failed).collect()
            }
        }
    }

    /// Runs a benchmark; returns its output, a line of JSON for each case. Fails if the benchmark
    /// does.
    fn lines(&self, benchmark: &Benchmark, software: bool) -> anyhow::Result<Vec<Value>> {
        let mut command = self.program("mpmd");
        command.arg("bench").args(benchmark.arguments).args(["--device", "cuda", "--json"]);
        command.args(if software { benchmark.small } else { benchmark.large });
        if benchmark.on_one {
            let visible = std::env::var(VISIBLE).unwrap_or_default();
            let first = visible.split(',').map(str::trim).find(|name| !name.is_empty());
            command.env(VISIBLE, first.unwrap_or("0"));
        }
        let said = captured(&mut command, LONG)?;
        if said.code != Some(0) {
            bail!("{}", said.last_words());
        }
        let lines = said.stdout.lines().filter(|line| line.starts_with('{'));
        lines
            .map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}")))
            .collect()
    }
}
