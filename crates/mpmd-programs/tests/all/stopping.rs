//! Trainings that are asked to stop, or lose a process.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::finetune::{FINETUNE, bare, run};
use crate::folders::{path, text};

/// A running `finetune` that no launcher has started. It is killed when dropped.
pub(crate) struct Alone(pub(crate) Child);

impl Alone {
    pub(crate) fn start(args: &[&str]) -> Self {
        let (model, text) = (path("plain"), text());
        let mut command = bare(FINETUNE);
        command
            .arg("--model")
            .arg(model)
            .arg(text)
            .args("--time 8 --microbatches 1".split(' '));
        command
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Waits for the line of the first step. Returns the errors that follow it.
    fn after_first_step(&mut self) -> BufReader<ChildStderr> {
        let mut errors = BufReader::new(self.0.stderr.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("step 1/") {
            line.clear();
            assert!(errors.read_line(&mut line).unwrap() > 0, "it has ended");
        }
        errors
    }

    /// Sends SIGINT, as Ctrl-C does.
    pub(crate) fn interrupt(&self) {
        let pid = self.0.id().to_string();
        assert!(
            Command::new("sh")
                .args(["-c", "kill -INT $0", &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the program has not ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ctrl_c_saves_and_says_what_is_true() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (option, reads, end) in [
        ("--save", true, ""),
        ("--checkpoints", true, ", saved"),
        // As after `2>&1 | tee log`: Ctrl-C ends tee first.
        ("--save", false, ""),
    ] {
        let to = at(&format!("{option}-{reads}"));
        let mut job = Alone::start(&[option, &to, "--steps", "100000000"]);
        let mut errors = BufReader::new(job.0.stderr.take().unwrap());
        let mut line = String::new();
        errors.read_line(&mut line).unwrap();
        assert!(
            line.ends_with(" parameters in 1 stage, on 1 device of 1 process\n"),
            "{line}"
        );
        line.clear();
        errors.read_line(&mut line).unwrap();
        assert_eq!(line, "CPUs compute all passes\n");
        line.clear();
        errors.read_line(&mut line).unwrap();
        assert!(line.starts_with("step 1/"), "{line}");
        let errors = Some(errors).filter(|_| reads);
        job.interrupt();
        if let Some(mut errors) = errors {
            let mut said = String::new();
            errors.read_to_string(&mut said).unwrap();
            let lines: Vec<&str> = said.lines().collect();
            assert!(
                lines.contains(&"Ctrl-C: ends after this step; once more ends at once"),
                "{said}"
            );
            let number = |line: &str, before: &str, after: &str| {
                let number = line.strip_prefix(before)?.strip_suffix(after)?;
                number.parse::<u64>().ok()
            };
            let before = "stopped by Ctrl-C after step ";
            let step = lines.iter().find_map(|line| number(line, before, end));
            assert!(step.is_some(), "{option}: {said}");
            if option == "--save" {
                let last = lines.last().unwrap_or(&"");
                let saved = number(last, "saved after step ", &format!(" to {to}"));
                assert_eq!(saved, step, "{said}");
            }
        }
        assert_eq!(job.wait().code(), Some(130), "{option}");
        let saved = fs::read_dir(to)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let mut saved = saved.map(|name| name.to_str().unwrap().to_owned());
        let manifest = |name: &str| name.starts_with("step-") && name.ends_with(".json");
        assert!(
            saved.any(|name| name == "model.safetensors" || manifest(&name)),
            "{option}"
        );
    }
}

#[test]
fn request_that_comes_twice_to_all_processes_saves() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("saved");
    let args = [
        "--stages",
        "2",
        "--steps",
        "100000000",
        "--checkpoints",
        to.to_str().unwrap(),
    ];
    let mut job = Alone::start(&args);
    let mut errors = job.after_first_step();
    // As systemd does: to the launcher and to its processes, which hear it from the launcher too.
    let launcher = job.0.id();
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let all = format!("kill -TERM {launcher} {}", children.unwrap());
    for _ in 0..2 {
        assert!(
            Command::new("sh")
                .args(["-c", &all])
                .status()
                .unwrap()
                .success(),
            "{all}"
        );
    }
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    assert!(
        said.lines()
            .last()
            .is_some_and(|line| line.ends_with(", saved")),
        "{said}"
    );
    assert_eq!(job.wait().code(), Some(143), "{said}");
}

/// Returns the pid of the process of a job that was started with this rank.
fn pid_of(launcher: u32, rank: usize) -> String {
    let children = format!("/proc/{launcher}/task/{launcher}/children");
    let children = fs::read_to_string(children).unwrap();
    let variable = format!("MPMD_RANK={rank}");
    let has_rank = |child: &&str| {
        let variables = fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
        let mut variables = variables.split(|byte| *byte == 0);
        variables.any(|found| found == variable.as_bytes())
    };
    children
        .split_whitespace()
        .find(has_rank)
        .unwrap()
        .to_owned()
}

/// One process is asked first, so it leaves the job. The launcher starts no other in its place.
#[test]
fn stop_of_an_elastic_training_waits_for_no_new_process() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("saved");
    let args = [
        "--stages",
        "2",
        "--elastic",
        "--steps",
        "100000000",
        "--save",
    ];
    let mut job = Alone::start(&[&args[..], &[to.to_str().unwrap()]].concat());
    let mut errors = job.after_first_step();

    let launcher = job.0.id();
    let both = format!(
        "kill -TERM {}; sleep 0.1; kill -TERM {launcher}",
        pid_of(launcher, 1)
    );
    let asked = Command::new("sh").args(["-c", &both]).status().unwrap();
    assert!(asked.success(), "{both}");
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    job.wait();
    assert!(said.contains("saved after step "), "{said}");
    assert!(to.join("model.safetensors").exists(), "{said}");
}

#[test]
fn result_of_the_process_in_place_of_the_first_is_json() {
    let mut job = Alone::start(&["--stages", "2", "--elastic", "--steps", "600"]);
    let mut errors = job.after_first_step();
    let launcher = job.0.id();
    let first = pid_of(launcher, 0);
    assert!(
        Command::new("sh")
            .args(["-c", "kill -KILL $0", &first])
            .status()
            .unwrap()
            .success()
    );
    let (mut said, mut result) = (String::new(), String::new());
    let mut output = job.0.stdout.take().unwrap();
    errors.read_to_string(&mut said).unwrap();
    output.read_to_string(&mut result).unwrap();
    assert_eq!(job.wait().code(), Some(0), "{said}");
    assert!(
        said.contains("it was ended by signal 9 (SIGKILL): by a user, a scheduler, or the system")
    );
    let result: serde_json::Value = serde_json::from_str(result.trim_end()).unwrap();
    assert_eq!(result["steps"], 600, "{said}");
}

/// Started by hand with as many processes as stages: one of them is the spare.
#[test]
fn spare_of_a_job_of_one_process_ends_with_it() {
    let (model, text) = (path("plain"), text());
    let named = ["--model", model.to_str().unwrap(), text.to_str().unwrap()];
    let options = "--stages 2 --elastic --steps 3 --time 8 --microbatches 1";
    let args: Vec<&str> = named.into_iter().chain(options.split(' ')).collect();
    for end in run(2, &args) {
        assert_eq!(end.code(), 0, "{end:?}");
    }
}
