//! The same graphs over MPI: builds `mpi.c` with `mpicc` and runs it with Open MPI's `mpirun`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use mpmd_launch::EXEC;
use mpmd_launch::variables::LAUNCHER_PID;
use tempfile::TempDir;

use super::graph::Graph;

const SOURCE: &str = include_str!("mpi.c");

/// The options of the compiler. The task's loop is compiled like the one in task.rs: for any
/// processor of this kind, without fused operations, and unrolled.
const COMPILE: [&str; 5] = ["-O3", "-funroll-loops", "-std=gnu11", "-ffp-contract=off", "-Wall"];
/// The options of `mpirun`: more ranks than cores, as any user, by shared memory only. Its own
/// messages stay on this machine.
const RUN: [&str; 11] = [
    "--oversubscribe",
    "--allow-run-as-root",
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "self,vader",
    "--mca",
    "oob_tcp_if_include",
    "lo",
];

/// The time limit of one run, with the start of the ranks. They have a shorter one of their own.
const RUN_WITHIN: Duration = Duration::from_secs(90);
/// The time limit for the ranks to end after the last run.
const END_WITHIN: Duration = Duration::from_secs(5);

/// The running program. Its ranks sleep between runs. They end when this is dropped, or with this
/// process.
pub(super) struct Mpi {
    child: Child,
    /// The input of rank 0. `None` while this is being dropped.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The program, its errors, and temporary files of MPI.
    folder: TempDir,
}

impl Mpi {
    /// Builds the program and starts `ranks` ranks of it, each with `points` points. Returns the
    /// reason if there is no Open MPI to do so.
    ///
    /// # Errors
    ///
    /// If the program cannot be built or started.
    pub(super) fn start(ranks: usize, points: usize, bytes: usize) -> Result<Result<Self, String>> {
        if let Some(why) = missing()? {
            return Ok(Err(why));
        }
        let folder = tempfile::tempdir().context("a folder for the MPI program")?;
        let program = folder.path().join("metg");
        build(&program)?;
        let complaints = File::create(folder.path().join(COMPLAINTS))?;
        // Started through this program, so that it ends with this process.
        let mut command = Command::new(std::env::current_exe()?);
        command.args([EXEC, "--", "mpirun"]).args(RUN).args(["-n", &ranks.to_string()]);
        command.arg(&program).args([points.to_string(), bytes.to_string()]);
        command.env(LAUNCHER_PID, std::process::id().to_string()).env("TMPDIR", folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(complaints);
        let mut child = command.spawn().context("starting mpirun")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (sender, lines) = mpsc::channel();
        let mpi = Self { child, input, lines, folder };
        let read = move || {
            let lines = BufReader::new(output.expect("a pipe")).lines().map_while(Result::ok);
            // Fails if nothing waits for the line any more.
            lines.for_each(|line| sender.send(line).unwrap_or_default());
        };
        std::thread::Builder::new().name("mpi".to_owned()).spawn(read)?;
        Ok(Ok(mpi))
    }

    /// Runs `graph` `rounds` times. Blocks until then. Returns the time of the slowest rank.
    ///
    /// # Errors
    ///
    /// If a task gets a wrong input, if tasks are missing, or if the program fails or takes too
    /// long.
    pub(super) fn run(&mut self, graph: Graph, iterations: u64, rounds: u64) -> Result<Duration> {
        // The order of the patterns is the same in mpi.c.
        let pattern = graph.pattern as u8;
        let told = self.input.as_mut().map_or(Ok(()), |input| {
            writeln!(input, "{pattern} {} {rounds} {iterations}", graph.rows)
        });
        let answer = told.ok().and_then(|()| self.lines.recv_timeout(RUN_WITHIN).ok());
        let Some(line) = answer else {
            let said = fs::read_to_string(self.folder.path().join(COMPLAINTS)).unwrap_or_default();
            return Err(anyhow!("the MPI program gave no result: {}", said.trim()));
        };
        let (took, tasks) = parse(&line).with_context(|| format!("the MPI program: {line}"))?;
        let expected = rounds * graph.tasks(&(0..graph.width)) as u64;
        ensure!(tasks == expected, "the MPI program has run {tasks} tasks, not {expected}");
        Ok(took)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // The ranks end with their input.
        self.input = None;
        let until = Instant::now() + END_WITHIN;
        while Instant::now() < until && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file for errors of the program.
const COMPLAINTS: &str = "errors";

/// Returns the missing part of Open MPI, if there is one.
fn missing() -> Result<Option<String>> {
    for program in ["mpicc", "mpirun"] {
        match Command::new(program).arg("--version").stdin(Stdio::null()).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Some(format!("there is no {program}")));
            }
            Err(error) => return Err(error).with_context(|| format!("starting {program}")),
            Ok(said) if program == "mpirun" && !said.stdout.starts_with(b"mpirun (Open MPI)") => {
                return Ok(Some("mpirun is not Open MPI's".to_owned()));
            }
            Ok(_) => {}
        }
    }
    Ok(None)
}

/// Compiles the program to the file `program`.
fn build(program: &Path) -> Result<()> {
    let source = program.with_extension("c");
    fs::write(&source, SOURCE)?;
    let mut compile = Command::new("mpicc");
    compile.args(COMPILE).arg("-o").arg(program).arg(&source).stdin(Stdio::null());
    let built = compile.output().context("starting mpicc")?;
    let said = String::from_utf8_lossy(&built.stderr);
    ensure!(built.status.success(), "mpicc ended with {}: {}", built.status, said.trim());
    Ok(())
}

/// Reads a line of results: the seconds, then the number of tasks.
fn parse(line: &str) -> Result<(Duration, u64)> {
    let (seconds, tasks) = line.split_once(' ').context("not two numbers")?;
    Ok((Duration::try_from_secs_f64(seconds.parse()?)?, tasks.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_and_others_refused() {
        assert_eq!(parse("0.001500000 200").unwrap(), (Duration::from_micros(1500), 200));
        for wrong in ["", "0.1", "-1 5", "x 5", "0.1 -5"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
