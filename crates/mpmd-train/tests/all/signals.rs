//! Signals to one of several real processes.

use mpmd_core::launch::testing::{ProcessEnd, Processes, RunningProcesses};
use mpmd_core::pipeline::Microbatch;
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_train::Run;
use mpmd_train::data::{Data, MicrobatchPlace, Windows};
use mpmd_train::optimizer::AdamW;
use rustix::process::{Pid, Signal, kill_process};

use crate::stages::{trainer, windows};

/// The variable that makes a test process one of the job's. Its value is the work: `train` or
/// `evaluate`.
const WORK: &str = "MPMD_TEST_WORK";

/// Windows with any number of held-out microbatches.
struct Endless {
    windows: Windows,
    held_out: usize,
}

impl Data<MpmdArray> for Endless {
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        self.windows.training(p, meshes, at)
    }

    fn held_out_len(&self) -> usize {
        self.held_out
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        if index == 30 {
            println!("evaluating");
        }
        self.windows
            .held_out(p, meshes, index % self.windows.held_out_len())
    }
}

/// The program of each process. Does nothing if the test itself runs.
#[test]
fn child_process() {
    let Ok(work) = std::env::var(WORK) else {
        return;
    };
    let held_out = if work == "evaluate" { 1 << 40 } else { 0 };
    let result = Program::builder().devices(4).run(|p| -> Result<()> {
        let data = Endless {
            windows: windows(),
            held_out,
        };
        let mut trainer = trainer(p, true, AdamW::default())?;
        let run = Run::steps(1 << 40).evaluate_every(7).on_step(|report| {
            if report.step == 3 {
                println!("training");
            }
        });
        let outcome = trainer.run(p, run, &data)?;
        println!(
            "outcome: {:?} after {} steps",
            outcome.stopped, outcome.steps
        );
        assert_eq!(p.stopped_by(), outcome.stopped);
        Ok(())
    });
    result.unwrap();
}

/// Starts four processes after the commands `first` of a shell, and waits until process `one` has
/// printed `text`.
fn start(first: &str, work: &str, one: usize, text: &str) -> RunningProcesses {
    let program = std::env::current_exe().unwrap();
    let shell = format!("{first} exec \"$0\" --exact signals::child_process --nocapture");
    let processes = Processes::new(4, "sh")
        .args(["-c".as_ref(), shell.as_ref(), program.as_os_str()])
        .env(WORK, work);
    let mut job = processes.start().unwrap();
    job.wait_for_output_of(one, text)
        .unwrap_or_else(|error| panic!("{error}\n{}", job.report()));
    job
}

fn signal(job: &RunningProcesses, process: usize, signal: Signal) {
    let pid = Pid::from_raw(job.pids()[process].cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Returns the line with the outcome of each process.
fn outcomes(ends: &[ProcessEnd]) -> Vec<String> {
    let line = |end: &ProcessEnd| {
        let found = end.stdout.lines().find(|line| line.contains("outcome: "));
        found.unwrap_or_else(|| panic!("{ends:?}")).to_owned()
    };
    ends.iter().map(line).collect()
}

#[test]
fn sigterm_to_one_process_stops_all_after_the_same_step() {
    let mut job = start("", "train", 2, "training\n");
    signal(&job, 2, Signal::TERM);
    let ends = job.wait().unwrap();
    assert!(ends.iter().all(|end| end.code() == 0), "{}", job.report());
    let outcomes = outcomes(&ends);
    assert!(outcomes[0].contains("Some(15) after"), "{outcomes:?}");
    assert!(
        outcomes.iter().all(|outcome| *outcome == outcomes[0]),
        "{outcomes:?}"
    );
}

#[test]
fn sigterm_in_an_evaluation_stops_all_after_the_same_step() {
    let mut job = start("", "evaluate", 3, "evaluating\n");
    signal(&job, 3, Signal::TERM);
    let ends = job.wait().unwrap();
    assert!(ends.iter().all(|end| end.code() == 0), "{}", job.report());
    let expected = vec!["outcome: Some(15) after 7 steps"; 4];
    assert_eq!(outcomes(&ends), expected);
}

#[test]
fn sigint_that_a_shell_has_ignored_stops_the_training() {
    // So begins a job in the background of a script.
    let mut job = start("trap '' INT;", "train", 1, "training\n");
    signal(&job, 1, Signal::INT);
    let ends = job.wait().unwrap();
    assert!(ends.iter().all(|end| end.code() == 0), "{}", job.report());
    assert!(
        outcomes(&ends)[0].contains("Some(2) after"),
        "{}",
        job.report()
    );
}
