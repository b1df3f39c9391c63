//! Runs this test program again in a process of its own: under valgrind, or with other UCX
//! transports.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a process that a test starts.
const LIMIT: Duration = Duration::from_secs(240);

/// Exit code of valgrind if it has found an error; nothing else ends with it.
const FOUND: i32 = 99;

/// The exit code and the output of a process that has ended. The code is `None` if the process was
/// killed.
struct Ended {
    code: Option<i32>,
    said: String,
}

/// A child process that is killed when this is dropped, also if a test fails.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command and waits for its end; kills it after [`LIMIT`]. Returns its exit code and
/// output.
fn run(mut command: Command) -> Ended {
    let piped = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Ending(piped.spawn().expect("this program can be started again"));
    fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = from.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        })
    }
    let out = child.0.stdout.take().map(collect);
    let errors = child.0.stderr.take().map(collect);
    let until = Instant::now() + LIMIT;
    let code = loop {
        if let Some(status) = child.0.try_wait().expect("a child of this process") {
            break status.code();
        }
        if Instant::now() > until {
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // The process has certainly ended, so its output has an end too.
    drop(child);
    let said = [out, errors]
        .into_iter()
        .flatten()
        .map(|said| said.join().unwrap_or_default());
    Ended {
        code,
        said: said.collect::<Vec<_>>().join("\n"),
    }
}

fn this_program() -> std::path::PathBuf {
    std::env::current_exe().expect("a test knows its own file")
}

/// Runs one test of this program under valgrind; `None` if valgrind is not installed.
fn under_valgrind(test: &[&str], environment: &[(&str, &str)]) -> Option<Ended> {
    let version = Command::new("valgrind")
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    if !version.is_ok_and(|version| version.status.success()) {
        println!("skipped: valgrind is not installed");
        return None;
    }
    let mut command = Command::new("valgrind");
    command.args([
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
        "--show-leak-kinds=definite",
    ]);
    // Fair scheduling: otherwise a thread that polls may keep the others from ever running.
    command.args([&format!("--error-exitcode={FOUND}"), "--fair-sched=yes"]);
    command
        .arg(this_program())
        .args(["--exact", "--test-threads=1", "--nocapture"])
        .args(test);
    command.envs(environment.iter().copied());
    Some(run(command))
}

fn has_no_errors(test: &str, environment: &[(&str, &str)]) {
    let Some(ended) = under_valgrind(&[test], environment) else {
        return;
    };
    assert_ne!(
        ended.code,
        Some(FOUND),
        "valgrind has found errors:\n{}",
        ended.said
    );
    assert_eq!(
        ended.code,
        Some(0),
        "the test failed, or took more than {LIMIT:?}:\n{}",
        ended.said
    );
    assert!(
        ended.said.contains("1 passed"),
        "not one test has run:\n{}",
        ended.said
    );
}

#[test]
fn valgrind_finds_nothing_over_tcp() {
    has_no_errors("over_tcp::payloads_are_dropped_at_any_time", &[]);
}

#[cfg(feature = "ucx")]
#[test]
fn valgrind_finds_nothing_over_ucx() {
    // UCX hooks functions of the C library by writing into their code, which valgrind does not see.
    has_no_errors(
        "over_ucx::payloads_are_dropped_at_any_time",
        &[("UCX_MEM_EVENTS", "no")],
    );
}

#[test]
fn valgrind_finds_a_leak() {
    let leaks = ["rerun::leaks", "--ignored"];
    let Some(ended) = under_valgrind(&leaks, &[]) else {
        return;
    };
    assert_eq!(ended.code, Some(FOUND), "{}", ended.said);
    assert!(
        ended.said.contains("definitely lost: 1,000 bytes"),
        "{}",
        ended.said
    );
}

#[test]
#[ignore = "leaks on purpose, to see that it is found"]
fn leaks() {
    std::mem::forget(std::hint::black_box(vec![1u8; 1000]));
}

/// Runs all checks over UCX with these transports only, in a new process, and asserts that they
/// pass. UCX reads the variable when it is first opened, so each run needs a process of its own.
#[cfg(feature = "ucx")]
fn passes_over_ucx_by(ways: &str) {
    let mut command = Command::new(this_program());
    command
        .args(["over_ucx::", "huge_over_ucx::", "--test-threads=2"])
        .env("UCX_TLS", ways);
    let ended = run(command);
    assert_eq!(
        ended.code,
        Some(0),
        "a check failed, or all took more than {LIMIT:?}:\n{}",
        ended.said
    );
    assert!(
        !ended.said.contains(" 0 passed"),
        "no check has run:\n{}",
        ended.said
    );
}

#[cfg(feature = "ucx")]
#[test]
fn all_checks_pass_over_ucx_by_shared_memory_alone() {
    passes_over_ucx_by("posix,sysv,cma,self");
}

#[cfg(feature = "ucx")]
#[test]
fn all_checks_pass_over_ucx_by_tcp_alone() {
    passes_over_ucx_by("tcp,self");
}
