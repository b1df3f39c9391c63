//! `mpmd run` with programs that do not use the library: output, exit codes, leftover processes.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of a job, after which the test fails and the launcher is terminated.
const LONG: Duration = Duration::from_secs(40);

pub(crate) fn mpmd(args: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command
        .arg("run")
        .args(args)
        .args(["--", "sh", "-c", script]);
    // Variables that may be set where the tests run.
    for name in [
        "MPMD_RANK",
        "MPMD_WORLD_SIZE",
        "MPMD_LAUNCHER_PID",
        "MPMD_TRANSPORT",
        "MPMD_PEER_TIMEOUT",
    ] {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A running launcher. If it still runs when dropped, it is terminated.
pub(crate) struct Job {
    child: Child,
    /// Standard output of the launcher. `None` if it goes elsewhere, or is closed.
    stdout: Option<BufReader<ChildStdout>>,
    stderr: BufReader<ChildStderr>,
}

impl Job {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take().map(BufReader::new);
        let stderr = BufReader::new(child.stderr.take().unwrap());
        // Keeps a test that waits for a line from waiting forever.
        let launcher = Pid::from_child(&child);
        thread::spawn(move || {
            let until = Instant::now() + LONG;
            while Instant::now() < until && alive(launcher.as_raw_nonzero().get()) {
                thread::sleep(Duration::from_millis(50));
            }
            // The process id of a zombie is not reused before the test reaps it.
            if alive(launcher.as_raw_nonzero().get()) {
                let _ = kill_process(launcher, Signal::TERM);
            }
        });
        Self {
            child,
            stdout,
            stderr,
        }
    }

    pub(crate) fn line(&mut self) -> String {
        next_line(self.stdout.as_mut().unwrap())
    }

    pub(crate) fn error_line(&mut self) -> String {
        next_line(&mut self.stderr)
    }

    /// Closes the test's end of the job's standard output.
    pub(crate) fn close_output(&mut self) {
        self.stdout = None;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the launcher to end. Returns (exit code, rest of standard output, standard error);
    /// the code is `None` after a signal.
    pub(crate) fn end(mut self) -> (Option<i32>, String, String) {
        let until = Instant::now() + LONG;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < until, "the launcher does not end");
            thread::sleep(Duration::from_millis(5));
        };
        let (mut out, mut err) = (String::new(), String::new());
        if let Some(stdout) = &mut self.stdout {
            stdout.read_to_string(&mut out).unwrap();
        }
        self.stderr.read_to_string(&mut err).unwrap();
        (status.code(), out, err)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            drop(self.child.wait());
        }
    }
}

fn next_line(output: &mut impl BufRead) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "the output ended");
    line.trim_end().to_owned()
}

fn alive(pid: i32) -> bool {
    // The state follows the name, which is in parentheses. A zombie counts as ended.
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    stat.is_ok_and(|stat| {
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    })
}

fn assert_gone(pids: &[i32]) {
    let until = Instant::now() + LONG;
    while let Some(pid) = pids.iter().find(|&&pid| alive(pid)) {
        assert!(Instant::now() < until, "process {pid} is left");
        thread::sleep(Duration::from_millis(10));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Reads `count` lines of a job and returns the process ids after each prefix `[...] `.
fn pids(job: &mut Job, count: usize) -> Vec<i32> {
    let line = |_| {
        let line = job.line();
        let (_, numbers) = line.split_once("] ").unwrap();
        numbers
            .split(' ')
            .map(|number| number.parse().unwrap())
            .collect::<Vec<i32>>()
    };
    (0..count).flat_map(line).collect()
}

#[test]
fn processes_know_their_rank_and_lines_have_it_as_prefix() {
    let script = "echo $MPMD_RANK of $MPMD_WORLD_SIZE by $MPMD_TRANSPORT \
        $MPMD_DEVICES_PER_PROCESS; \
                  printf 'no newline' >&2; [ ${#MPMD_JOB_TOKEN} = 64 ] && [ \
                  -n \"$MPMD_COORDINATOR\" ]";
    let output = mpmd(
        &[
            "-n",
            "3",
            "--transport",
            "tcp",
            "--devices-per-process",
            "2",
        ],
        script,
    )
    .output()
    .unwrap();
    assert_eq!(
        lines(&output),
        [
            "[0] 0 of 3 by tcp 2",
            "[1] 1 of 3 by tcp 2",
            "[2] 2 of 3 by tcp 2"
        ]
    );
    let err = text(&output.stderr);
    for process in 0..3 {
        assert!(err.contains(&format!("[{process}] no newline\n")), "{err}");
    }
    assert_eq!(output.status.code(), Some(0), "{err}");
    let plain = mpmd(&["-n", "2", "--no-prefix"], "echo $MPMD_RANK")
        .output()
        .unwrap();
    assert_eq!(lines(&plain), ["0", "1"]);
}

#[test]
fn arguments_reach_the_program_as_they_are() {
    for args in [
        &["run", "-n1", "--", "printf", "%s|", "-n", "--", "a b"][..],
        &["run", "-n", "1", "printf", "%s|", "-n", "--", "a b"],
        &[
            "run",
            "--processes=1",
            "--no-prefix",
            "--",
            "printf",
            "[0] %s|",
            "-n",
            "--",
            "a b",
        ],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_mpmd"))
            .args(args)
            .output()
            .unwrap();
        let out = text(&output.stdout).replace("|[0] ", "|");
        assert_eq!(
            out,
            "[0] -n|--|a b|\n",
            "{args:?}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn first_failure_gives_the_code_and_ends_the_others() {
    // One of the others ignores the signal to end.
    let script = "case $MPMD_RANK in 1) exit 3;; 2) trap '' TERM;; esac; \
                  while [ $((i += 1)) -lt 600 ]; do sleep 0.1; done";
    let job = Job::start(mpmd(&["-n", "3", "--grace", "0.2"], script));
    let (code, _, err) = job.end();
    assert_eq!(code, Some(3), "{err}");
    assert!(
        err.contains("process 1 failed first: it ended with exit code 3"),
        "{err}"
    );
}

#[test]
fn processes_may_end_by_themselves_after_a_failure() {
    let script = "[ $MPMD_RANK = 0 ] && kill -9 $$; sleep 0.5; echo last words; exit 1";
    let (code, out, err) = Job::start(mpmd(&["-n", "2"], script)).end();
    assert_eq!(code, Some(137), "{err}");
    assert_eq!(out, "[1] last words\n");
    assert!(
        err.contains("process 0 failed first: it was ended by signal 9 (SIGKILL)"),
        "{err}"
    );
}

#[test]
fn signals_are_forwarded_and_may_end_a_job_well() {
    for (signal, name) in [
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ] {
        let script = format!(
            "trap 'echo heard; exit 0' {name}; echo ready; while [ $((i += 1)) -lt 600 ]; do \
             sleep 0.1; done"
        );
        let mut job = Job::start(mpmd(&["-n", "2"], &script));
        let mut ready = [job.line(), job.line()];
        ready.sort();
        assert_eq!(ready, ["[0] ready", "[1] ready"]);
        job.signal(signal);
        let (code, out, err) = job.end();
        assert_eq!(
            (code, out.matches("heard").count()),
            (Some(0), 2),
            "{name}: {out}{err}"
        );
        assert!(!err.contains("mpmd: "), "{name}: {err}");
    }
    let mut job = Job::start(mpmd(&["-n", "2"], "echo ready; exec sleep 60"));
    job.line();
    job.line();
    job.signal(Signal::INT);
    let (code, _, err) = job.end();
    assert_eq!(
        (code, err.as_str()),
        (Some(130), "mpmd: stopped by Ctrl-C\n")
    );
    // A program that says itself how it was stopped, and one that fails then.
    for (then, expected, last) in [
        ("exit 130", 130, ""),
        (
            "echo Error: no disk >&2; exit 4",
            4,
            "failed with exit code 4: no disk\n",
        ),
    ] {
        let script = format!("trap '{then}' INT; echo ready; while :; do sleep 0.05; done");
        let mut job = Job::start(mpmd(&["-n", "2"], &script));
        job.line();
        job.line();
        job.signal(Signal::INT);
        let (code, _, err) = job.end();
        assert_eq!(code, Some(expected), "{err}");
        assert!(err.ends_with(last) && err.lines().count() <= 1, "{err}");
    }
}

#[test]
fn child_processes_end_with_the_job() {
    let mut job = Job::start(mpmd(&["-n", "2"], "sleep 60 & echo $$ $!"));
    let pids = pids(&mut job, 2);
    let (code, ..) = job.end();
    assert_eq!((code, pids.len()), (Some(0), 4));
    assert_gone(&pids);
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let mut job = Job::start(mpmd(&["-n", "3"], "sleep 60 & echo $$ $!; wait"));
    let pids = pids(&mut job, 3);
    assert_eq!(pids.len(), 6);
    assert!(pids.iter().all(|&pid| alive(pid)));
    job.signal(Signal::KILL);
    assert_gone(&pids);
    assert_eq!(job.end().0, None);
}

#[test]
fn processes_end_with_their_launcher_without_its_guard() {
    let mut job = Job::start(mpmd(&["-n", "2"], "echo $$; exec sleep 60"));
    let pids = pids(&mut job, 2);
    let launcher = job.child.id().to_string();
    let all = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let guard = all.filter(|pid| {
        let read = |file| {
            std::fs::read_to_string(Path::new("/proc").join(pid).join(file)).unwrap_or_default()
        };
        read("cmdline").contains("__guard")
            && read("status").contains(&format!("PPid:\t{launcher}\n"))
    });
    let guard: Vec<i32> = guard.map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(guard.len(), 1);
    kill_process(Pid::from_raw(guard[0]).unwrap(), Signal::KILL).unwrap();
    assert_gone(&guard);
    assert!(
        pids.iter().all(|&pid| alive(pid)),
        "the guard's end is not the job's"
    );
    job.signal(Signal::KILL);
    assert_gone(&pids);
}

#[test]
fn process_of_a_dead_launcher_does_not_start() {
    let mut dead = Command::new("true").spawn().unwrap();
    dead.wait().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command
        .args(["__exec", "--", "echo", "begun"])
        .env("MPMD_LAUNCHER_PID", dead.id().to_string());
    let output = command.output().unwrap();
    assert_eq!(
        (text(&output.stdout).as_str(), output.status.code()),
        ("", Some(1))
    );
    assert!(text(&output.stderr).contains("is gone"));
}

#[test]
fn missing_program_is_named_if_it_is_beside_mpmd() {
    let mpmd = env!("CARGO_BIN_EXE_mpmd");
    let mut command = Command::new(mpmd);
    command.env("PATH", "/no/such/folder");
    let output = command.args(["run", "-n", "2", "mpmd"]).output().unwrap();
    let expected =
        format!("mpmd: there is no program mpmd in PATH, and there is {mpmd}: give that path\n");
    assert_eq!(text(&output.stderr), expected);
    assert_eq!(output.status.code(), Some(127));
}

#[test]
fn missing_program_is_perhaps_a_command_of_mpmd() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.env("PATH", "/no/such/folder");
    let output = command.args(["run", "-n", "2", "--", "top"]);
    let expected = "mpmd: there is no program top in PATH. If `mpmd top` is meant, write \
                    `-- mpmd top`\n";
    assert_eq!(text(&output.output().unwrap().stderr), expected);
}

#[test]
fn a_program_that_cannot_start_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken");
    std::fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let broken = broken.to_str().unwrap();
    for (program, code, why) in [
        (
            "no-such-program-here",
            127,
            "mpmd: there is no program no-such-program-here\n",
        ),
        (
            "/no/such/program",
            127,
            "mpmd: there is no program /no/such/program\n",
        ),
        (
            "/etc/passwd",
            126,
            "mpmd: /etc/passwd is no program: it may not be executed\n",
        ),
        ("/etc", 126, "mpmd: /etc is a folder, not a program\n"),
        (
            broken,
            126,
            &format!(
                "mpmd: all 2 processes failed with exit code 126: {broken} cannot be \
                 started: No such file or directory (os error 2)\n"
            ),
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
        let output = command.args(["run", "-n", "2", program]).output().unwrap();
        assert_eq!(
            (output.status.code(), text(&output.stderr).as_str()),
            (Some(code), why)
        );
    }
}

#[test]
fn errors_of_all_processes_are_shown_once() {
    let run = |script: &str| {
        let output = mpmd(&["-n", "3"], script).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    // One says "process 1: error: ...", as mpmd's own programs do.
    let all = "echo a warning >&2; [ $MPMD_RANK = 1 ] && p='process 1: e' || p=E; \
               printf \"${p}rror: no such file\\n\\nStack backtrace:\\n   0: main\\n\" >&2; exit 2";
    let (code, err) = run(all);
    assert_eq!(code, Some(2), "{err}");
    assert_eq!(err.matches("no such file").count(), 1, "{err}");
    assert_eq!(err.matches("0: main").count(), 1, "{err}");
    assert_eq!(err.matches("] a warning\n").count(), 3, "{err}");
    let last = "\nmpmd: all 3 processes failed with exit code 2: no such file\n";
    assert!(err.ends_with(last), "{err}");
    // The error of one, and another of the others.
    let (code, err) = run(
        "[ $MPMD_RANK = 1 ] && echo 'Error: no disk' >&2 && exit 3; sleep 0.3; \
         echo Error: it is gone >&2; exit 1",
    );
    assert_eq!(code, Some(3), "{err}");
    let expected = "[0,2] Error: it is gone\n[1] Error: no disk\n\
                    mpmd: process 1 failed first: it ended with exit code 3\n";
    assert_eq!(err, expected);
}

#[test]
fn error_is_shown_while_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    // The others end in order only after the test has read the error.
    let goes_on = "while [ ! -e go ]; do sleep 0.02; done; echo went on";
    let fails = "[ $MPMD_RANK = 1 ] && echo 'Error: no disk' >&2 && exit 3;";
    // It is replaced, in a job that has never formed.
    let dies = "[ $MPMD_RANK = 1 ] && [ ! -e died ] && touch died && echo 'Error: no disk' >&2 \
                && kill -9 $$;";
    for (options, script, error, ends, code) in [
        (
            &["-n", "2", "--grace", "60"][..],
            fails,
            "[1] Error: no disk",
            1,
            3,
        ),
        (
            &["-n", "2", "--restart", "1"],
            dies,
            "[1] Error: no disk",
            2,
            0,
        ),
        (
            &["-n", "1", "--no-prefix"],
            "echo error: not yet >&2;",
            "error: not yet",
            1,
            0,
        ),
    ] {
        let script = format!("cd {}; {script} {goes_on}", folder.path().display());
        let mut job = Job::start(mpmd(options, &script));
        while job.error_line() != error {}
        std::fs::write(&go, "").unwrap();
        let (found, out, err) = job.end();
        assert_eq!(
            (found, out.matches("went on").count()),
            (Some(code), ends),
            "{out}{err}"
        );
        std::fs::remove_file(&go).unwrap();
    }
}

#[test]
fn settings_of_the_environment_reach_the_processes() {
    let script = "echo $MPMD_PEER_TIMEOUT $MPMD_TRANSPORT";
    let set = |args: &[&str]| {
        let mut command = mpmd(&[&["-n", "1", "--no-prefix"], args].concat(), script);
        command
            .env("MPMD_PEER_TIMEOUT", "2.5")
            .env("MPMD_TRANSPORT", "tcp");
        lines(&command.output().unwrap())
    };
    assert_eq!(set(&[]), ["2.5 tcp"]);
    assert_eq!(
        set(&["--peer-timeout", "7", "--transport", "auto"]),
        ["7 auto"]
    );
    assert_eq!(
        lines(&mpmd(&["-n", "1", "--no-prefix"], script).output().unwrap()),
        [""]
    );
}

#[test]
fn senseless_settings_are_refused_before_the_start() {
    let refused = |args: &[&str], (name, value): (&str, &str), expected: &str| {
        let mut command = mpmd(&[&["-n", "2"], args].concat(), "echo begun");
        let output = command.env(name, value).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(
            (output.status.success(), text(&output.stdout).as_str()),
            (false, ""),
            "{err}"
        );
        assert!(err.contains(expected), "{expected}: {err}");
        assert_eq!(err.matches(expected).count(), 1, "{err}");
    };
    let none = ("MPMD_TEST_NONE", "");
    refused(&["--peer-timeout", "0"], none, "it must be above 0");
    refused(
        &["--chaos", "0", "--restart", "1"],
        none,
        "it must be above 0",
    );
    for (name, value) in [
        ("MPMD_PEER_TIMEOUT", "soon"),
        ("MPMD_PEER_TIMEOUT", "0"),
        ("MPMD_SPIN", "often"),
        ("MPMD_DEVICE", "gpu"),
        ("MPMD_CHECK", "everything"),
        ("MPMD_DEVICES_PER_PROCESS", "0"),
    ] {
        refused(
            &[],
            (name, value),
            &format!("{name}={value} makes no sense: it must be"),
        );
    }
    refused(
        &[],
        ("MPMD_PEER_TIMOUT", "5"),
        "set MPMD_PEER_TIMEOUT, if that is meant",
    );
    let mut command = mpmd(&["-n", "1"], "echo begun");
    let output = command
        .env("MPMD_X_SERVICE_HOST", "10.0.0.1")
        .output()
        .unwrap();
    assert_eq!(lines(&output), ["[0] begun"]);
}

#[test]
fn job_that_needs_too_many_files_does_not_start() {
    let mpmd = env!("CARGO_BIN_EXE_mpmd");
    let limited = |hard: u32| {
        let script = format!("ulimit -Sn 80 && ulimit -Hn {hard} && exec {mpmd} run -n 40 -- true");
        Command::new("sh").args(["-c", &script]).output().unwrap()
    };
    let output = limited(100);
    let why = "mpmd: preparing the start of 40 processes failed: the launcher needs 224 open files \
               and may have 100: raise the limit (ulimit -n), or start fewer processes\n";
    assert_eq!(
        (output.status.code(), text(&output.stderr).as_str()),
        (Some(1), why)
    );
    let output = limited(300);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn job_that_nobody_has_joined_says_so() {
    let output = mpmd(&["-n", "2"], "exit 0").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let err = text(&output.stderr);
    assert!(err.starts_with("mpmd: no process has joined the job") && err.lines().count() == 1);
}

#[test]
fn unknown_transport_is_refused_before_the_start() {
    let output = mpmd(&["-n", "2", "--transport", "pigeon"], "echo begun")
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert_eq!(
        (output.status.code(), text(&output.stdout).as_str()),
        (Some(2), ""),
        "{err}"
    );
    assert!(
        err.contains("'pigeon'") && err.contains("tcp, ucx"),
        "{err}"
    );
    let output = mpmd(&["-n", "2"], "echo begun")
        .env("MPMD_TRANSPORT", "pigeon")
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert_eq!(
        (output.status.code(), text(&output.stdout).as_str()),
        (Some(1), ""),
        "{err}"
    );
    assert!(
        err.contains("MPMD_TRANSPORT=pigeon") && err.contains("auto, shm, tcp, ucx"),
        "{err}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_mpmd"))
        .args(["run", "--help"])
        .output()
        .unwrap();
    assert!(
        text(&output.stdout).contains("tcp, ucx"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn ucx_leaves_faults_to_the_program_by_default() {
    let script = "echo \"${UCX_HANDLE_ERRORS-unset} '${UCX_ERROR_SIGNALS-unset}'\"";
    let mut command = mpmd(&["-n", "1"], script);
    command
        .env_remove("UCX_HANDLE_ERRORS")
        .env_remove("UCX_ERROR_SIGNALS");
    assert_eq!(lines(&command.output().unwrap()), ["[0] none ''"]);
    let mut command = mpmd(&["-n", "1"], script);
    command
        .env("UCX_HANDLE_ERRORS", "bt")
        .env("UCX_ERROR_SIGNALS", "SIGSEGV");
    assert_eq!(lines(&command.output().unwrap()), ["[0] bt 'SIGSEGV'"]);
}

#[test]
fn a_huge_line_passes_in_pieces() {
    let script = "head -c 1000000 /dev/zero | tr '\\0' x";
    let output = mpmd(&["-n", "1"], script).output().unwrap();
    let out = text(&output.stdout);
    assert_eq!(out.bytes().filter(|&byte| byte == b'x').count(), 1_000_000);
    assert!(
        out.lines()
            .all(|line| line.starts_with("[0] ") && line.len() <= 65_540)
    );
}
