//! `mpmd run`: jobs that end over a signal to the launcher, or over its output, beside a failure.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::run::{Job, mpmd};

/// The message about a process that SIGKILL has ended.
const KILLED: &str = "it was ended by signal 9 (SIGKILL): by a user, a scheduler, or the system if \
                      memory was full (see dmesg)";

/// A shell script that runs until a trap ends it.
const ENDLESS: &str = "while :; do sleep 0.02; done";

/// Starts two processes with this script before an endless loop. Returns the job after both have
/// printed `ready`.
fn start_two(script: &str) -> Job {
    let script = format!("{script}; echo ready; {ENDLESS}");
    let mut job = Job::start(mpmd(&["-n", "2", "--grace", "30"], &script));
    let mut ready = [job.line(), job.line()];
    ready.sort();
    assert_eq!(ready, ["[0] ready", "[1] ready"]);
    job
}

#[test]
fn output_that_fails_asks_each_process_once() {
    for full in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        // Process 1 prints only after SIGTERM: then the output of a second process fails.
        let script = format!(
            "cd {}; left=-1; trap 'echo heard >&2; [ $left -ge 0 ] || left=20' TERM; \
             touch ready$MPMD_RANK; while [ ! -e go ]; do sleep 0.02; done; \
             while [ $left -ne 0 ]; do [ $MPMD_RANK$left = 1-1 ] || echo more; \
             [ $left -lt 0 ] || left=$((left - 1)); sleep 0.02; done",
            folder.path().display()
        );
        let mut command = mpmd(&["-n", "2", "--grace", "30"], &script);
        if full {
            command.stdout(File::options().write(true).open("/dev/full").unwrap());
        }
        let mut job = Job::start(command);
        job.close_output();
        while !["ready0", "ready1"]
            .iter()
            .all(|file| folder.path().join(file).exists())
        {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        std::fs::write(folder.path().join("go"), "").unwrap();
        let (code, _, err) = job.end();
        // The shell may tell of a child that the signal has ended.
        assert_eq!(
            (code, err.matches("heard").count()),
            (Some(141), 2),
            "{err}"
        );
        let why = "mpmd: the job ends: its output cannot be written: No space left on device";
        assert_eq!(err.matches(why).count(), usize::from(full), "{err}");
        assert_eq!(err.matches("mpmd: ").count(), usize::from(full), "{err}");
    }
}

#[test]
fn last_line_that_cannot_be_written_counts() {
    for _ in 0..5 {
        // A line without its end is written when the process has ended.
        let mut command = mpmd(&["-n", "1"], "printf last");
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        let (code, _, err) = Job::start(command).end();
        assert_eq!(code, Some(141), "{err}");
        assert_eq!(
            err.matches("its output cannot be written: No space left")
                .count(),
            1,
            "{err}"
        );
    }
}

#[test]
fn job_goes_on_when_nobody_reads_the_errors() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {}; [ $MPMD_RANK = 1 ] && [ ! -e died ] && touch died && kill -9 $$; echo end",
        folder.path().display()
    );
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    // The launcher tells of the lost process.
    let mut command = mpmd(&["-n", "2", "--restart", "1"], &script);
    let output = command.stderr(writer).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        (output.status.code(), said.matches("end").count()),
        (Some(0), 2),
        "{said}"
    );
}

#[test]
fn ctrl_c_counts_although_the_output_is_closed() {
    // As in a pipe to `tee`, which Ctrl-C ends too.
    let mut job = start_two(
        "trap 'echo asked >&2' TERM; \
         trap 'for i in 1 2 3 4 5 6 7 8; do echo more; sleep 0.02; done; exit 130' INT",
    );
    job.close_output();
    job.signal(Signal::INT);
    let (code, _, err) = job.end();
    assert_eq!((code, err.as_str()), (Some(130), ""));
}

#[test]
fn failure_before_ctrl_c_stays_the_cause() {
    let script = format!(
        "[ $MPMD_RANK = 1 ] && echo 'Error: no memory' >&2 && kill -9 $$; trap 'exit 130' INT; \
         {ENDLESS}"
    );
    let mut job = Job::start(mpmd(&["-n", "2", "--grace", "30"], &script));
    // The launcher has held it back for longer than ends count as simultaneous.
    assert_eq!(job.error_line(), "[1] Error: no memory");
    job.signal(Signal::INT);
    let (code, _, err) = job.end();
    let expected = format!("mpmd: process 1 failed first: {KILLED}\n");
    assert_eq!((code, err), (Some(137), expected));
}

#[test]
fn silent_failure_is_said_before_the_others_end() {
    let script = format!("[ $MPMD_RANK = 1 ] && kill -9 $$; {ENDLESS}");
    let mut job = Job::start(mpmd(&["-n", "2", "--grace", "3"], &script));
    let said = job.error_line();
    let expected =
        format!("mpmd: process 1 has failed: {KILLED}. The others have up to 1 s to end");
    assert_eq!(said, expected);
    let (code, _, err) = job.end();
    let expected = format!("mpmd: process 1 failed first: {KILLED}\n");
    assert_eq!(code, Some(137));
    assert!(err.ends_with(&expected), "{err}");
}

#[test]
#[ignore = "a process of the job of the next test"]
fn program_that_only_joins() {
    mpmd_core::Program::run(|_| Ok::<(), mpmd_core::Error>(())).unwrap();
}

#[test]
fn late_process_is_named() {
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "[ $MPMD_RANK = 1 ] && sleep 14; exec {} --exact ends::program_that_only_joins --ignored",
        program.display()
    );
    let (code, _, err) = Job::start(mpmd(&["-n", "2"], &script)).end();
    let expected = "[0] mpmd: process 0 has waited 10 s for the job to begin: these processes \
                    have not joined it, and have perhaps not started: 1\n";
    assert_eq!((code, err.as_str()), (Some(0), expected));
}

#[test]
fn host_without_loopback_is_said_at_once() {
    let begin = Instant::now();
    // A network of its own, whose loopback interface is down.
    let mut command = Command::new("unshare");
    command
        .args(["-rn", env!("CARGO_BIN_EXE_mpmd"), "run", "-n", "2", "true"])
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // Not every system lets its users do this.
    if said.contains("unshare: ") {
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("this host does not reach itself at 127.0.0.1: ")
            && said.contains("look at the loopback interface"),
        "{said}"
    );
    assert!(begin.elapsed() < Duration::from_secs(20), "{said}");
}

#[test]
fn crash_after_ctrl_c_is_a_failure() {
    let job = start_two("trap '[ $MPMD_RANK = 1 ] && kill -9 $$; exit 130' INT");
    job.signal(Signal::INT);
    let (code, _, err) = job.end();
    let expected = format!("mpmd: process 1 failed first: {KILLED}\n");
    assert_eq!((code, err), (Some(137), expected));
}

#[test]
fn first_of_several_signals_stops_the_job() {
    let mut job = start_two(
        "case $MPMD_RANK in 0) trap '' TERM; trap 'echo heard; exit 138' USR1;; \
         1) trap 'echo heard' USR1; trap 'exit 143' TERM;; esac",
    );
    job.signal(Signal::USR1);
    let mut heard = [job.line(), job.line()];
    heard.sort();
    assert_eq!(heard, ["[0] heard", "[1] heard"]);
    job.signal(Signal::TERM);
    let (code, _, err) = job.end();
    assert!(
        code == Some(138) && !err.contains("mpmd: "),
        "{code:?}: {err}"
    );
}

#[test]
fn errors_of_a_stopped_job_are_shown() {
    let job = start_two("trap 'echo Error: no metrics >&2; exit 130' INT");
    job.signal(Signal::INT);
    let (code, _, err) = job.end();
    assert_eq!(
        (code, err.as_str()),
        (Some(130), "[0,1] Error: no metrics\n")
    );
}

#[test]
fn end_over_a_pipe_of_its_own_is_a_failure() {
    let (code, _, err) = Job::start(mpmd(&["-n", "2"], "exit 141")).end();
    let expected = "mpmd: all 2 processes failed with exit code 141\n";
    assert_eq!((code, err.as_str()), (Some(141), expected));
    let script = format!("[ $MPMD_RANK = 1 ] && kill -PIPE $$; {ENDLESS}");
    let (code, _, err) = Job::start(mpmd(&["-n", "2", "--grace", "0.1"], &script)).end();
    let expected = "mpmd: process 1 failed first: it was ended by signal 13 (SIGPIPE)\n";
    assert!(
        code == Some(141) && err.ends_with(expected),
        "{code:?}: {err}"
    );
}
