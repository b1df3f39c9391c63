//! `mpmd top` beside jobs of two processes, which are this test program again.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mpmd_core::prelude::*;
use mpmd_core::{Label, Role};
use mpmd_record::activity::Activity;
use mpmd_rendezvous::{JobMember, JoinConfig, Rendezvous, RendezvousServer, ServerConfig, Token};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Told, call};

/// Time limit for a state of the job to be seen.
const LONG: Duration = Duration::from_secs(40);

/// Environment variable with the path of a file. Process 0 waits for the file before it issues its
/// part or ends its steps.
const GO: &str = "MPMD_TEST_GO";

/// A job whose processes wait for each other. Dropping this ends the job.
struct Job {
    launcher: Child,
    /// The read end of the job's output, kept open because the job ends when it closes.
    _output: BufReader<ChildStdout>,
    go: PathBuf,
    /// The process ids of the two processes.
    pids: [u32; 2],
}

impl Job {
    fn start(name: &str) -> Self {
        Self::of("top::program_of_the_job", name, &[])
    }

    /// Starts a job of a test program of this file, with options of `mpmd run`.
    fn of(program: &str, name: &str, options: &[&str]) -> Self {
        let go = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{}-{name}.go", std::process::id()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        command
            .args(["run", "-n", "2", "--no-prefix", "--grace", "1"])
            .args(options)
            .arg("--");
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", program, "--ignored", "--nocapture"]);
        command
            .env(GO, &go)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut launcher = command.spawn().unwrap();
        let mut output = BufReader::new(launcher.stdout.take().unwrap());
        let lines = output.by_ref().lines().map_while(Result::ok);
        let mut pids = [None; 2];
        for line in lines {
            // The test harness may begin the line with the name of its test.
            let Some((_, words)) = line.split_once("this is process ") else {
                continue;
            };
            let (process, pid) = words.split_once(": ").unwrap();
            pids[process.parse::<usize>().unwrap()] = Some(pid.parse().unwrap());
            if pids.iter().all(Option::is_some) {
                break;
            }
        }
        Self {
            launcher,
            _output: output,
            go,
            pids: pids.map(|pid| pid.expect("both processes start")),
        }
    }

    /// Looks at the job until `is_seen` returns true, and returns that look.
    fn until(&self, is_seen: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let begin = Instant::now();
        loop {
            let told = top(&[
                &self.pids[0].to_string(),
                "--once",
                "--json",
                "--interval",
                "0.1",
            ]);
            let look: Value = serde_json::from_str(&told.stdout).unwrap_or_default();
            let processes = look["processes"].as_array().cloned().unwrap_or_default();
            if is_seen(&processes) {
                return processes;
            }
            assert!(begin.elapsed() < LONG, "{told:?}");
        }
    }

    fn send(&self, process: usize, signal: Signal) {
        kill_process(
            Pid::from_raw(self.pids[process].cast_signed()).unwrap(),
            signal,
        )
        .unwrap();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.go, "");
        let _ = kill_process(Pid::from_child(&self.launcher), Signal::TERM);
        let _ = self.launcher.wait();
        let _ = std::fs::remove_file(&self.go);
    }
}

fn top(args: &[&str]) -> Told {
    call(&[&["top"], args].concat(), "")
}

#[test]
#[ignore = "a process of the jobs of these tests"]
fn program_of_the_job() {
    let go = PathBuf::from(std::env::var_os(GO).expect("started by a test"));
    let mut program = Program::from_env().unwrap();
    let p = &mut program;
    println!("\nthis is process {}: {}", p.process(), std::process::id());
    let stages = p.mesh(&[("stage", 2)]).unwrap().split("stage").unwrap();
    let begin = Instant::now();
    while p.process().0 == 0 && !go.exists() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(5));
    }
    let x = p
        .device_put(&MpmdArray::scalar(1.0f32), stages[0].replicated())
        .unwrap();
    let x = p.device_put(&x, stages[1].replicated()).unwrap();
    if let Some(value) = x.to_host().unwrap() {
        assert_eq!(value.to_vec::<f32>().unwrap(), [1.0]);
    }
    program.finish().unwrap();
}

/// Computes steps of 20 ms on process 0 until the file [`GO`] exists. Process 1 only takes part in
/// their ends.
#[test]
#[ignore = "a process of the jobs of these tests"]
fn steps_of_the_job() {
    let go = PathBuf::from(std::env::var_os(GO).expect("started by a test"));
    let mut program = Program::from_env().unwrap();
    let p = &mut program;
    println!("\nthis is process {}: {}", p.process(), std::process::id());
    let stages = p.mesh(&[("stage", 2)]).unwrap().split("stage").unwrap();
    let slow = elementwise(|x: f32| {
        std::thread::sleep(Duration::from_millis(20));
        x + 1.0
    });
    let slow = p.jit(slow).on(&stages[0]);
    let slow = slow.outputs(stages[0].replicated()).build().unwrap();

    let begin = Instant::now();
    let mut goes_on = true;
    while goes_on && begin.elapsed() < LONG {
        let x = MpmdArray::scalar(1.0f32);
        let x = p.device_put(&x, stages[0].replicated()).unwrap();
        p.set_label(Some(Label {
            stage: 0,
            microbatch: None,
            role: Role::Forward,
        }));
        let x = slow.call(p, x).unwrap();
        p.set_label(None);
        x.block_until_ready().unwrap();
        p.step_end().unwrap();
        goes_on = p
            .broadcast_value(mpmd_base::ProcessId(0), true, || Ok(!go.exists()))
            .unwrap();
    }
    program.finish().unwrap();
}

#[test]
fn step_times_busy_shares_hosts_and_stages_are_shown() {
    let job = Job::of("top::steps_of_the_job", "steps", &[]);
    // By the id of the launcher, which is no process of the job.
    let launcher = job.launcher.id().to_string();
    let begin = Instant::now();
    let look = loop {
        let told = top(&[&launcher, "--once", "--json", "--interval", "1"]);
        let look: Value = serde_json::from_str(&told.stdout).unwrap_or_default();
        if look["processes"][0]["busy_share"].as_f64() > Some(0.2) {
            break look;
        }
        assert!(begin.elapsed() < LONG, "{told:?}");
    };

    let of = |process: usize, name: &str| look["processes"][process][name].as_f64();
    let step = of(0, "step_seconds").unwrap();
    assert!((0.02..10.0).contains(&step), "{look}");
    assert!(of(0, "busy_share") <= Some(1.0), "{look}");
    assert_eq!(of(1, "busy_share"), Some(0.0), "{look}");
    let activity = |process: usize| &look["processes"][process]["activity"];
    assert_eq!(activity(0)["devices"][0]["stages"], serde_json::json!([0]));
    assert_eq!(activity(1)["devices"][0]["stages"], serde_json::json!([]));

    let host = activity(0)["host"].as_str().unwrap();
    assert!(!host.is_empty(), "{look}");
    let told = top(&[&launcher, "--once", "--interval", "0.1"]);
    let place = format!("process 0 on {host}, stage 0: its program");
    assert!(told.stdout.contains(&place), "{told:?}");
}

#[test]
fn several_jobs_are_listed() {
    let jobs = [Job::start("several-0"), Job::start("several-1")];
    let told = top(&["--once"]);
    assert_eq!(told.status, Some(1), "{told:?}");
    let expected = "jobs run on this machine; name one by a process id:";
    assert!(told.stderr.contains(expected), "{told:?}");
    for job in &jobs {
        let lowest = job.pids.iter().min().unwrap();
        let is_listed = |line: &str| {
            line.starts_with(&format!("  {lowest}  ")) && line.contains(", 2 processes, at ")
        };
        assert!(told.stderr.lines().any(is_listed), "{told:?}");
    }
}

#[test]
fn waits_stops_and_ends_of_processes_are_shown() {
    let job = Job::start("waits");
    let waits =
        |processes: &[Value]| processes.len() == 2 && processes[1]["activity"]["wait"].is_string();
    let seen = job.until(waits);
    let activity = |process: usize| &seen[process]["activity"];
    assert_eq!(activity(0)["pid"], job.pids[0]);
    assert_eq!(activity(0)["program"], "runs code of its own");
    let doing = activity(1)["program"].as_str().unwrap();
    assert!(
        doing.contains("waits in") && doing.contains("top.rs"),
        "{doing}"
    );
    let wait = activity(1)["wait"].as_str().unwrap();
    assert!(
        wait.contains("process 1 waits in operation 2 (device_put"),
        "{wait}"
    );
    assert_eq!(activity(1)["issued"], 2);
    assert_eq!(seen[0]["sent_per_second"], 0.0);
    // As a table.
    let told = top(&[&job.pids[1].to_string(), "--once", "--interval", "0.1"]);
    assert_eq!((told.status, &*told.stderr), (Some(0), ""), "{told:?}");
    assert!(told.stdout.contains(": its program waits in"), "{told:?}");
    // A stopped process does not answer; looking at it does no harm.
    job.send(1, Signal::STOP);
    let unknown = |process: usize, why: &'static str| {
        move |seen: &[Value]| {
            seen.get(process)
                .is_some_and(|seen| seen["unknown"].to_string().contains(why))
        }
    };
    job.until(unknown(1, "no answer within 1s"));
    job.send(1, Signal::CONT);
    job.until(waits);
    job.send(1, Signal::KILL);
    job.until(unknown(1, "closed"));
}

/// Starts `mpmd top` beside a job, and waits for its first line of output.
fn watching(job: &Job, args: &[&str]) -> (Child, impl Iterator<Item = String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command
        .args(["top", &job.pids[0].to_string(), "--interval", "0.05"])
        .args(args);
    let mut top = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(
        lines.next().is_some_and(|line| line.contains("job")),
        "it shows the job"
    );
    (top, lines)
}

#[test]
fn top_ends_with_the_job() {
    let mut job = Job::start("end");
    let (mut top, lines) = watching(&job, &[]);
    std::fs::write(&job.go, "").unwrap();
    let last = lines.last().unwrap();
    assert!(last.contains("the job has ended: "), "{last}");
    assert!(top.wait().unwrap().success());
    assert!(job.launcher.wait().unwrap().success());
}

#[test]
fn top_ends_with_its_reader() {
    let job = Job::start("reader");
    let (mut top, lines) = watching(&job, &["--json"]);
    drop(lines);
    let begin = Instant::now();
    while top.try_wait().unwrap().is_none() {
        let in_time = begin.elapsed() < LONG;
        if !in_time {
            top.kill().unwrap();
            top.wait().unwrap();
        }
        assert!(in_time, "it still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(top.wait().unwrap().success());
}

#[test]
fn texts_of_processes_command_no_terminal() {
    let (token, peer_timeout) = (Token::new([3; 32]), LONG);
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = ServerConfig {
        processes: 1,
        token: token.clone(),
        peer_timeout,
    };
    let server = RendezvousServer::bind(any, config).unwrap();
    let (process, hex) = (mpmd_base::ProcessId(0), token.to_hex());
    let server = server.address().to_string();
    let config = JoinConfig {
        server: server.clone(),
        process,
        processes: 1,
        token,
        peer_timeout,
    };
    let process = Rendezvous::connect(config).unwrap();
    process.join(JobMember::default()).unwrap();
    process.on_look(|_| {
        let program = "\u{1b}]0;title\u{7} \u{9b}2J".to_owned();
        serde_json::to_vec(&Activity {
            program,
            ..Activity::default()
        })
        .unwrap()
    });
    for args in [&["--json"][..], &[]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        command
            .args(["top", &server, "--once", "--interval", "0.05"])
            .args(args);
        command.env("MPMD_JOB_TOKEN", &hex).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(
            said.contains("\\u001b]0;title\\u0007 \\u009b2J"),
            "{said:?}"
        );
        assert!(
            !said.contains(|c: char| c.is_control() && c != '\n'),
            "{said:?}"
        );
        if !args.is_empty() {
            let look: Value = serde_json::from_str(&said).unwrap();
            let program = look["processes"][0]["activity"]["program"]
                .as_str()
                .unwrap();
            assert_eq!(
                program, "\u{1b}]0;title\u{7} \u{9b}2J",
                "JSON has the same meaning"
            );
        }
    }
}

#[test]
fn wrong_jobs_and_tokens_are_refused() {
    let refused = |args: &[&str], token: Option<&str>, text: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        command
            .arg("top")
            .args(args)
            .env_remove("MPMD_JOB_TOKEN")
            .stdin(Stdio::null());
        let output = command
            .envs(token.map(|token| ("MPMD_JOB_TOKEN", token)))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(text),
            "{args:?}: {said}"
        );
    };
    refused(&["here"], None, "neither a process id nor an address");
    refused(
        &["127.0.0.1:7"],
        None,
        "token of the job is needed, in MPMD_JOB_TOKEN",
    );
    refused(&["127.0.0.1:7"], Some("abc"), "in MPMD_JOB_TOKEN");
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    refused(
        &[&other.id().to_string()],
        None,
        "a job of one process has nothing to show",
    );
    other.kill().unwrap();
    other.wait().unwrap();
    refused(
        &["4294967295"],
        None,
        "no process 4294967295 runs on this machine",
    );
    let job = Job::start("tokens");
    let variables = std::fs::read(format!("/proc/{}/environ", job.pids[0])).unwrap();
    let variables = String::from_utf8_lossy(&variables);
    let find = |name: &str| {
        variables
            .split('\0')
            .find_map(|text| text.strip_prefix(name))
    };
    let address = find("MPMD_COORDINATOR=").unwrap();
    refused(&[address], Some(&"7".repeat(64)), "token");
    let right = find("MPMD_JOB_TOKEN=").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command
        .args(["top", address, "--once", "--interval", "0.05"])
        .env("MPMD_JOB_TOKEN", right);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains(": its program runs"),
        "{output:?}"
    );
    // The job has not noticed anything.
    std::fs::write(&job.go, "").unwrap();
    let mut job = job;
    assert!(job.launcher.wait().unwrap().success());
}
