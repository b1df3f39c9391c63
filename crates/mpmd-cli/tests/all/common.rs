//! Calls `mpmd` and checks its answers.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit of a call of `mpmd`, after which it is killed and the test fails.
const LONG: Duration = Duration::from_secs(60);

/// The output of `mpmd` and its exit code; `status` is `None` after a signal.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `mpmd plan` with `input` on standard input, and waits until it ends; see [`call`].
pub(crate) fn ask(args: &[&str], input: &str) -> Told {
    call(&[&["plan"], args].concat(), input)
}

/// Runs `mpmd` with `input` on standard input, and waits until it ends. Panics after the time
/// limit.
pub(crate) fn call(args: &[&str], input: &str) -> Told {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.args(args);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_owned());
    // The program may end before it has read everything.
    let writer = thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let (stdout, stderr) = (
        reader(child.stdout.take().unwrap()),
        reader(child.stderr.take().unwrap()),
    );
    let until = Instant::now() + LONG;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("mpmd {args:?} takes more than {LONG:?}");
        }
        thread::sleep(Duration::from_millis(1));
    };
    writer.join().unwrap();
    Told {
        status: status.code(),
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

/// Runs `mpmd plan` for a case and returns its answer. Panics unless it succeeds and prints nothing
/// on standard error.
pub(crate) fn told(command: &str, case: &Value) -> Value {
    let answer = ask(&[command], &case.to_string());
    assert_eq!(
        (answer.status, answer.stderr.as_str()),
        (Some(0), ""),
        "{command} of {case}"
    );
    serde_json::from_str(&answer.stdout).unwrap()
}

/// Checks that `mpmd plan` answers a case with the error `error`, and a message that contains all
/// texts.
pub(crate) fn refused(command: &str, case: &Value, error: &str, texts: &[&str]) {
    let answer = told(command, case);
    assert_eq!(answer["error"], error, "{command} of {case}: {answer}");
    let message = answer["message"].as_str().unwrap();
    for text in texts {
        assert!(
            message.contains(text),
            "{command} of {case}: {message:?} lacks {text:?}"
        );
    }
    assert_eq!(
        answer.as_object().unwrap().len(),
        2,
        "{command} of {case}: {answer}"
    );
}

/// Returns a path in cargo's temporary folder that ends in `name` and is unique to this process.
/// Creates nothing.
pub(crate) fn temporary(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

fn reader(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        text
    })
}
