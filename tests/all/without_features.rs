//! A crate outside of the workspace needs neither UCX nor CUDA. Its program, which was built
//! without UCX, reports that, and how to get it. It neither hangs nor uses something else.

use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::thread;
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job, Sandbox};

#[test]
fn requested_ucx_is_reported_as_not_compiled_in() {
    each_says(variables::TRANSPORT, "ucx", |said| {
        // The text tells how to get it, or lists the transports of the build.
        said.contains("ucx")
            && (said.contains("--features ucx") || said.contains("that this build has"))
    });
}

/// Starts two processes with this variable. Both must end at once, with a message for which
/// `is_said` is true.
fn each_says(variable: &str, value: &str, is_said: impl Fn(&str) -> bool) {
    const PROCESSES: usize = 2;
    // `build` would leave out the features that tests add, and build others' crates once more.
    outside(&["test", "--no-run"]);
    let program = target().join("debug/outside");
    let mut job = Job::prepare(Carrier::TCP.processes(program, PROCESSES));
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        command.env(variable, value);
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{}", job.report());
        assert!(is_said(&end.stderr), "{}", job.report());
    }
}

/// Time limit for the program `handles`.
const LONG: Duration = Duration::from_secs(60);

/// The text that the program `handles` prints, as the README shows it.
const HANDLES: &str = "process 0: copied [1.0, 2.0]
process 1: sent [3.0, 4.0]
process 2: received [3.0, 4.0]
process 3: did nothing
the sum is [10.0]
";

/// The crate's first program compiles with `mpmd` alone. The others are the examples, which their
/// own tests run, but for `handles`.
#[test]
fn outside_crate_compiles_all_examples_and_passes_its_tests() {
    outside(&["check", "--no-default-features", "--bin", "outside"]);
    assert_eq!(outside(&["test"]).matches("test result: ok. ").count(), 2);

    let site = Sandbox::new().expect("a sandbox");
    let handles = site.command(target().join("debug/outside-handles"));
    let mut process = site.start(handles, "handles").expect("it starts");
    let end = process.wait(Instant::now() + LONG).expect("it ends");
    assert_eq!(end.stdout, HANDLES, "{}", process.report());
}

/// Runs cargo in a copy of `tests/outside`, with the sources of the examples. Returns the output.
fn outside(arguments: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests have a workspace");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside");
    let write = |file: &str, text: String| {
        let file = copy.join(file);
        std::fs::create_dir_all(file.parent().expect("it lies in a folder")).expect("a folder");
        // A new time would have cargo build it again.
        if std::fs::read_to_string(&file).ok().as_ref() != Some(&text) {
            // Other tests may read it meanwhile.
            let new = copy.join(format!(
                "new.{}.{:?}",
                process::id(),
                thread::current().id()
            ));
            std::fs::write(&new, text).expect("a file");
            std::fs::rename(new, file).expect("a file takes the place of another");
        }
    };
    let read = |file: &str| std::fs::read_to_string(root.join(file)).expect("a file");
    let mpmd = root.join("mpmd");
    let manifest = read("tests/outside/Cargo.toml");
    write(
        "Cargo.toml",
        manifest.replace("../../mpmd", mpmd.to_str().expect("a path in Unicode")),
    );
    // The same versions as the workspace's, which are here already.
    write("Cargo.lock", read("Cargo.lock"));
    write("src/main.rs", read("tests/outside/src/main.rs"));
    let examples = root.join("mpmd-examples/src");
    for file in files_below(&examples) {
        let name = file.strip_prefix(&examples).expect("it lies there");
        let text = std::fs::read_to_string(&file).expect("a file");
        write(&format!("src/examples/{}", name.display()), text);
    }
    write(
        "src/examples/bin/handles.rs",
        read("mpmd/examples/handles.rs"),
    );
    write(
        "tests/processes.rs",
        read("tests/outside/tests/processes.rs"),
    );
    let output = Command::new(env!("CARGO"))
        .current_dir(&copy)
        .args(arguments)
        .args(["--offline", "--quiet", "--target-dir"])
        .arg(target())
        .output()
        .expect("cargo runs");
    let shown = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}{errors}");
    shown.into_owned()
}

/// Returns all files below `folder`.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files_below(&path),
            false => vec![path],
        })
        .collect()
}

/// Returns cargo's target folder. What the workspace built there of others' crates serves the crate
/// too.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("it lies in cargo's folder")
        .to_owned()
}
