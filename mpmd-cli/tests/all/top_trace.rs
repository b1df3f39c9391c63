//! `mpmd top --trace` beside jobs of two processes, which are this test program again.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mpmd_core::prelude::*;
use mpmd_record::activity::Activity;
use mpmd_record::trace::{ProcessTrace, Run};
use mpmd_transport::rendezvous::{JoinConfig, Member, Rendezvous, Server, ServerConfig, Token};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Told, call};
use crate::top::{GO, Job, LONG};

#[test]
#[ignore = "a process of the jobs of these tests"]
fn program_that_steps() {
    let go = PathBuf::from(std::env::var_os(GO).expect("started by a test"));
    let mut program = Program::from_env().unwrap();
    let p = &mut program;
    println!("\nthis is process {}: {}", p.process(), std::process::id());
    let stages = p.mesh(&[("stage", 2)]).unwrap().split("stage").unwrap();
    let (here, there) = (stages[0].replicated(), stages[1].replicated());
    let next = [(&stages[0], &here), (&stages[1], &there)].map(|(stage, sharding)| {
        let next = p.jit(elementwise(|x: f32| x + 1.0)).on(stage).outputs(sharding);
        next.build().unwrap()
    });
    let mut x = p.device_put(&MpmdArray::scalar(1.0f32), &here).unwrap();
    let begin = Instant::now();
    let is_over = || Ok(go.exists() || begin.elapsed() > 3 * LONG);
    while !p.broadcast_value(mpmd_core::ProcessId(0), true, is_over).unwrap() {
        let doubled = p.annotate("forth", |p| {
            let x = next[0].call(p, x).unwrap();
            p.device_put(&x, &there).unwrap()
        });
        let doubled = next[1].call(p, doubled).unwrap();
        x = p.device_put(&doubled, &here).unwrap();
        p.step_end().unwrap();
    }
    program.finish().unwrap();
}

fn stepping(name: &str, options: &[&str]) -> Job {
    Job::of("top_trace::program_that_steps", name, options)
}

/// A `mpmd top --trace` that has begun its trace. It is ended when this is dropped.
struct Tracing {
    top: Child,
    output: BufReader<ChildStdout>,
}

impl Tracing {
    /// Begins a trace of a minute.
    fn begin(job: &Job, folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        command.args(["top", &job.pids[1].to_string(), "--trace", "60", "--trace-folder"]);
        command.arg(folder).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut top = command.spawn().unwrap();
        let mut output = BufReader::new(top.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("traces 2 processes for 60s"), "{line:?}");
        Self { top, output }
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.top), signal).unwrap();
    }

    /// Waits for the end. Returns its output.
    fn end(mut self) -> String {
        let lines = self.output.by_ref().lines().map_while(std::result::Result::ok);
        let text = lines.collect::<Vec<_>>().join("\n");
        assert!(self.top.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let _ = self.top.kill();
        let _ = self.top.wait();
    }
}

fn trace_for(job: &Job, seconds: &str, more: &[&str]) -> Told {
    call(&[&["top", &job.pids[0].to_string(), "--trace", seconds], more].concat(), "")
}

/// Reads the trace of a folder, in which both processes must have ended their files.
fn whole(folder: &Path) -> Vec<ProcessTrace> {
    let (traces, problems) = ProcessTrace::read_all(folder).unwrap();
    assert_eq!(problems, [""; 0]);
    assert!(traces.len() == 2 && traces.iter().all(|trace| trace.ended && trace.about.is_part));
    traces
}

fn end(mut job: Job) {
    std::fs::write(&job.go, "").unwrap();
    assert!(job.launcher.wait().unwrap().success());
}

#[test]
fn running_job_is_traced_for_a_time() {
    let (job, folder) = (stepping("traced", &[]), tempfile::tempdir().unwrap());
    let shown = folder.path().display().to_string();
    // Twice: a process may be traced again.
    for _ in 0..2 {
        let told = trace_for(&job, "1.5s", &["--trace-folder", &shown]);
        assert_eq!((told.status, &*told.stderr), (Some(0), ""), "{told:?}");
        assert!(told.stdout.contains(&format!("mpmd trace {shown} ")), "{told:?}");
        let mut traces = whole(folder.path());
        for apart in [false, true] {
            for (process, trace) in traces.iter_mut().enumerate().filter(|_| apart) {
                // As if each process had a host with another clock.
                assert_eq!(trace.clocks.len(), 2, "at the beginning and at the end");
                trace.about.clock = format!("host {process}");
                trace.about.monotonic += process as u64 * 3_600_000_000_000;
            }
            let run = Run::merge(&traces, Vec::new());
            assert!(run.is_part && run.problems.is_empty(), "{:?}", run.problems);
            assert!(run.end < 60.0, "both processes are on one clock: {} s", run.end);
            assert!(run.steps.len() > 1, "whole steps: {:?}", run.steps);
            for process in [0, 1] {
                let kernels = run.kernels.iter().filter(|kernel| kernel.process == process);
                assert!(kernels.filter(|kernel| kernel.ended).count() > 0, "process {process}");
                let mut ranges = run.annotations.iter();
                assert!(ranges.any(|range| range.process == process && &*range.name == "forth"));
            }
        }
    }
    let told = call(&["trace", &shown], "");
    assert!(told.status == Some(0) && told.stdout.contains("of a part of the run"), "{told:?}");
    end(job);
}

#[test]
fn second_trace_at_a_time_is_refused_and_ctrl_c_ends_the_first() {
    let (job, folder) = (stepping("second", &[]), tempfile::tempdir().unwrap());
    let tracing = Tracing::begin(&job, folder.path());
    let second = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.args(["top", &job.pids[0].to_string(), "--trace", "1"]).current_dir(second.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    let reason = format!("another `mpmd top --trace` traces it into {}", folder.path().display());
    for process in [0, 1] {
        assert!(said.contains(&format!("process {process}: {reason}")), "{said}");
    }
    assert_eq!(std::fs::read_dir(second.path()).unwrap().count(), 0, "no empty folder is left");
    tracing.send(Signal::INT);
    tracing.end();
    whole(folder.path());
    // Now it is allowed, with a folder of its own.
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    whole(&second.path().join("mpmd-trace-1"));
    // A file in place of the folder: the processes cannot write.
    let file = second.path().join("file");
    std::fs::write(&file, "").unwrap();
    let told = trace_for(&job, "60", &["--trace-folder", file.to_str().unwrap()]);
    assert!(told.status == Some(1) && told.stderr.contains("its trace cannot be written in"));
    end(job);
}

#[test]
fn trace_ends_with_its_job() {
    let (mut job, folder) = (stepping("ends", &[]), tempfile::tempdir().unwrap());
    let tracing = Tracing::begin(&job, folder.path());
    std::fs::write(&job.go, "").unwrap();
    let text = tracing.end();
    assert!(text.contains("up to the end of the job"), "{text}");
    whole(folder.path());
    assert!(job.launcher.wait().unwrap().success());
}

#[test]
fn processes_end_a_trace_without_its_top() {
    let (job, folder) = (stepping("killed", &[]), tempfile::tempdir().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.args(["top", &job.pids[0].to_string(), "--trace", "1", "--trace-folder"]);
    let mut top =
        command.arg(folder.path()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(top.stdout.take().unwrap()).read_line(&mut line).unwrap();
    top.kill().unwrap();
    top.wait().unwrap();
    let begin = Instant::now();
    let have_ended = || {
        let traces = ProcessTrace::read_all(folder.path());
        traces.is_ok_and(|(all, _)| all.len() == 2 && all.iter().all(|trace| trace.ended))
    };
    while !have_ended() {
        assert!(begin.elapsed() < LONG, "they still write");
        std::thread::sleep(Duration::from_millis(20));
    }
    whole(folder.path());
    end(job);
}

#[test]
fn traced_job_and_other_versions_refuse() {
    let folder = tempfile::tempdir().unwrap();
    let job = stepping("from-start", &["--trace", folder.path().to_str().unwrap()]);
    let told = trace_for(&job, "1", &["--trace-folder", "elsewhere"]);
    assert_ne!(told.status, Some(0));
    assert!(told.stderr.contains("process 1: it is traced from its start on"), "{told:?}");
    end(job);
    // A process that answers each look with its activity, as one of an older version does.
    let (token, peer_timeout) = (Token::new([3; 32]), LONG);
    let config = ServerConfig { processes: 1, token: token.clone(), peer_timeout };
    let server = Server::bind(([127, 0, 0, 1], 0).into(), config).unwrap();
    let (address, hex) = (server.address().to_string(), token.to_hex());
    let process = mpmd_core::ProcessId(0);
    let config = JoinConfig { server: address.clone(), process, processes: 1, token, peer_timeout };
    let process = Rendezvous::connect(config).unwrap();
    process.join(Member::default()).unwrap();
    process.on_look(|_| serde_json::to_vec(&Activity::default()).unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.args(["top", &address, "--trace", "1", "--trace-folder", "elsewhere"]);
    let output = command.env("MPMD_JOB_TOKEN", hex).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another version of mpmd"), "{said}");
}
