//! `cargo xtask fuzz`: runs parsers and state machines on generated inputs, each target in a
//! process of its own.
//!
//! A target is a unit test with a name that starts with `fuzz_`; see the package `mpmd-fuzz`.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, pipe};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::commands::{cargo_in, shown};
use crate::steps::WITH_ALL;

/// Number of inputs for each target if `--inputs` is absent: the same as in the ordinary test run.
const INPUTS: u64 = 20_000;

/// Time limit for the start of a target. The time for its inputs is added.
const START: Duration = Duration::from_secs(120);

/// Time limit for each input: ten times the time of the slowest targets.
const EACH: Duration = Duration::from_millis(1);

/// Number of output lines that are shown of a failed target: the last ones.
const MOST_LINES: usize = 400;

/// Arguments of `cargo xtask fuzz`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct FuzzOptions {
    inputs: u64,
    /// The only target to run. `None` for all targets.
    target: Option<String>,
}

impl FuzzOptions {
    /// Parses `[--inputs N] [--target T]`; returns `None` for other arguments.
    pub(crate) fn parse(arguments: &[&str]) -> Option<Self> {
        let mut options = Self {
            inputs: INPUTS,
            target: None,
        };
        for pair in arguments.chunks(2) {
            match pair {
                ["--inputs", inputs] => {
                    options.inputs = inputs.parse().ok().filter(|inputs| *inputs > 0)?
                }
                ["--target", target] => options.target = Some((*target).to_owned()),
                _ => return None,
            }
        }
        Some(options)
    }
}

/// A test executable with unit tests.
#[derive(Debug, Eq, PartialEq)]
struct TestProgram {
    file: PathBuf,
    /// The folder of its package, in which its tests run.
    folder: PathBuf,
}

/// A unit test that is a fuzz target.
#[derive(Debug)]
struct FuzzTarget {
    /// Name of the target: the test's name without `fuzz_`, and with `-` for `_`.
    name: String,
    /// The path of the test in its program.
    test: String,
    program: usize,
}

/// The number of inputs that a target has tried, and the number that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FuzzCount {
    inputs: u64,
    failures: u64,
}

/// Builds the unit tests and runs all targets, or the chosen one, one after the other. Fails if an
/// input of a target failed.
pub(crate) fn fuzz(root: &Path, options: &FuzzOptions) -> anyhow::Result<ExitCode> {
    let programs = build(root)?;
    let mut targets = Vec::new();
    for (program, TestProgram { file, folder }) in programs.iter().enumerate() {
        let mut list = Command::new(file);
        list.current_dir(folder)
            .args(["--list", "--format", "terse"])
            .stderr(Stdio::inherit());
        let output = list
            .output()
            .with_context(|| format!("`{}`", shown(&list)))?;
        targets.extend(listed(&String::from_utf8_lossy(&output.stdout), program));
    }

    targets.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<String> = targets.iter().map(|target| target.name.clone()).collect();

    if let Some(wanted) = &options.target {
        targets.retain(|target| target.name == *wanted);
        if targets.is_empty() {
            bail!(
                "there is no target {wanted:?}; there are {}",
                names.join(", ")
            );
        }
    }
    if targets.is_empty() {
        bail!("no package has a test with a name that starts with fuzz_");
    }

    let begin = Instant::now();
    let mut failed = Vec::new();
    let mut slowest = (0.0, "");
    for target in &targets {
        let begin = Instant::now();
        if let Err(why) = run(target, &programs[target.program], options.inputs) {
            println!("{}: FAILED: {why:#}", target.name);
            failed.push(target.name.as_str());
        }
        let seconds = begin.elapsed().as_secs_f64();
        slowest = if seconds > slowest.0 {
            (seconds, target.name.as_str())
        } else {
            slowest
        };
    }

    let count = targets.len();
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "\n{count} targets; {seconds:.1} s, of which {} took {:.1} s",
        slowest.1, slowest.0
    );

    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    bail!("{}", failed.join(", "));
}

/// Builds all unit tests, and returns their executables.
fn build(root: &Path) -> anyhow::Result<Vec<TestProgram>> {
    // Of the programs, only the command line has tests. `--bins` would build the examples as tests,
    // which takes minutes.
    let targets = ["--lib", "--bin", "mpmd"];
    let asked = [
        &["test", "--workspace"][..],
        &targets,
        &["--no-run", "--message-format", "json"],
    ]
    .concat();

    let mut build = cargo_in(root, &[&asked, WITH_ALL].concat());
    let line = shown(&build);
    let output = build
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("`{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }

    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| program(line).transpose())
        .collect()
}

/// Parses a line of cargo's messages. Returns `None` unless it reports a test executable.
fn program(line: &str) -> anyhow::Result<Option<TestProgram>> {
    let message: serde_json::Value = serde_json::from_str(line).context("a message of cargo")?;
    let is_test = message["profile"]["test"] == true && message["reason"] == "compiler-artifact";
    let (Some(file), Some(manifest)) = (
        message["executable"].as_str(),
        message["manifest_path"].as_str(),
    ) else {
        return Ok(None);
    };

    let folder = Path::new(manifest)
        .parent()
        .context("a manifest without a folder")?;
    Ok(is_test.then(|| TestProgram {
        file: file.into(),
        folder: folder.to_owned(),
    }))
}

/// Finds the targets in the list of a test executable's tests. `program` is the index of the
/// executable.
fn listed(list: &str, program: usize) -> Vec<FuzzTarget> {
    let target = |line: &str| {
        let test = line.strip_suffix(": test")?;
        let name = test
            .rsplit("::")
            .next()?
            .strip_prefix("fuzz_")?
            .replace('_', "-");
        Some(FuzzTarget {
            name,
            test: test.to_owned(),
            program,
        })
    };
    list.lines().filter_map(target).collect()
}

/// Parses a target's result line, which may begin with text of the test runner. Returns `None` for
/// other lines.
fn count(line: &str, target: &str) -> Option<FuzzCount> {
    let (_, said) = line.split_once(&format!("{target}: "))?;
    let (inputs, failures) = said.strip_suffix(" failures")?.split_once(" inputs, ")?;
    Some(FuzzCount {
        inputs: inputs.parse().ok()?,
        failures: failures.parse().ok()?,
    })
}

/// Runs a target and prints its result line. Fails with its last lines of output if the target
/// failed or took too long.
fn run(target: &FuzzTarget, program: &TestProgram, inputs: u64) -> anyhow::Result<()> {
    let (reader, writer) = pipe()?;

    let mut command = Command::new(&program.file);
    command
        .args([&target.test, "--exact", "--nocapture"])
        .current_dir(&program.folder);
    command
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("MPMD_FUZZ_INPUTS", inputs.to_string());
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command
        .spawn()
        .with_context(|| format!("`{}`", shown(&command)))?;

    // Closes this process's ends of the pipe, so that the output ends with the child.
    drop(command);
    let (say, said) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if say.send(text).is_err() {
                return;
            }
        }
    });

    let limit = START + EACH.saturating_mul(u32::try_from(inputs).unwrap_or(u32::MAX));
    let until = Instant::now() + limit;
    let mut lines = VecDeque::new();
    let mut found = None;
    let in_time = loop {
        match said.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                found = count(&line, &target.name).or(found);
                lines.push_back(line);
                if lines.len() > MOST_LINES {
                    lines.pop_front();
                }
            }
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => break false,
        }
    };

    if !in_time {
        child.kill().context("ending it")?;
    }
    let status = child.wait()?;
    if let Some(FuzzCount { inputs, failures }) = found {
        println!("{}: {inputs} inputs, {failures} failures", target.name);
    }
    let why = if in_time {
        fault(status, found, inputs)
    } else {
        Some(format!("not over after {limit:?}"))
    };

    let Some(why) = why else { return Ok(()) };
    let said = lines.make_contiguous().join("\n    ");
    bail!("{why}; it said\n    {said}\n");
}

/// Returns the reason why a target has failed, or `None` if it has not.
fn fault(status: ExitStatus, found: Option<FuzzCount>, inputs: u64) -> Option<String> {
    match found {
        None => Some(format!("it ended with {status} before it was through")),
        Some(count) if count.failures > 0 => Some(format!("{} inputs failed", count.failures)),
        Some(count) if count.inputs != inputs => {
            Some(format!("it tried {} of {inputs}", count.inputs))
        }
        Some(_) if !status.success() => Some(format!("it ended with {status}")),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn arguments_are_read_and_others_refused() {
        let options = |inputs, target: Option<&str>| {
            Some(FuzzOptions {
                inputs,
                target: target.map(Into::into),
            })
        };
        assert_eq!(FuzzOptions::parse(&[]), options(INPUTS, None));
        assert_eq!(
            FuzzOptions::parse(&["--target", "a", "--inputs", "7"]),
            options(7, Some("a"))
        );
        for wrong in [
            &["--inputs"][..],
            &["--inputs", "0"],
            &["--inputs", "x"],
            &["--jobs", "2"],
            &["a"],
        ] {
            assert_eq!(FuzzOptions::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn targets_are_found_in_a_list_of_tests() {
        let list = "a::tests::fuzz_one_two: test\na::fuzz_helper::other: test\nfuzz_three: test\n\
                    b::fuzz_slow: benchmark\n\n3 tests, 1 benchmark\n";
        let found = listed(list, 4);
        let names: Vec<_> = found
            .iter()
            .map(|t| (t.name.as_str(), t.test.as_str(), t.program))
            .collect();
        assert_eq!(
            names,
            [
                ("one-two", "a::tests::fuzz_one_two", 4),
                ("three", "fuzz_three", 4)
            ]
        );
    }

    #[test]
    fn programs_with_tests_are_found_in_cargos_messages() {
        let message = |reason: &str, test: bool, file: &str| {
            let line = format!(
                r#"{{"reason":"{reason}","manifest_path":"/w/p/Cargo.toml",
                "profile":{{"test":{test}}},"executable":{file}}}"#
            );
            program(&line).unwrap()
        };
        let file = r#""/w/target/p-1""#;
        let expected = TestProgram {
            file: "/w/target/p-1".into(),
            folder: "/w/p".into(),
        };
        assert_eq!(message("compiler-artifact", true, file), Some(expected));
        assert_eq!(message("compiler-artifact", false, file), None);
        assert_eq!(message("compiler-artifact", true, "null"), None);
        assert_eq!(message("build-finished", true, file), None);
        assert!(program("no message").is_err());
    }

    #[test]
    fn result_line_of_a_target_is_recognised() {
        let of = |line| count(line, "wire").map(|count| (count.inputs, count.failures));
        assert_eq!(of("wire: 20000 inputs, 0 failures"), Some((20_000, 0)));
        assert_eq!(
            of("test wire::fuzz_wire ... wire: 5 inputs, 3 failures"),
            Some((5, 3))
        );
        for other in [
            "wire: input 7 of seed 1 failed: why",
            "wire: x inputs, 0 failures",
            "wires",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn target_passes_only_if_it_tried_all_inputs_and_succeeded() {
        let (good, killed) = (ExitStatus::from_raw(0), ExitStatus::from_raw(9));
        let count = |inputs, failures| Some(FuzzCount { inputs, failures });
        assert_eq!(fault(good, count(9, 0), 9), None);
        assert!(fault(killed, None, 9).unwrap().contains("signal: 9"));
        assert!(
            fault(good, None, 9)
                .unwrap()
                .contains("before it was through")
        );
        assert_eq!(fault(killed, count(9, 2), 9).unwrap(), "2 inputs failed");
        assert_eq!(fault(good, count(8, 0), 9).unwrap(), "it tried 8 of 9");
        assert!(fault(killed, count(9, 0), 9).is_some());
    }
}
