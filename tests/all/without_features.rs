//! A crate outside of the workspace needs neither UCX nor CUDA. Its program, which was built
//! without UCX, reports that, and how to get it. It neither hangs nor uses something else.

use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::thread;

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job};

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

/// Its second program is the example `quickstart`, which its own tests run. Its first compiles
/// without the feature that the second needs.
#[test]
fn outside_crate_with_mpmd_alone_compiles_and_passes_its_tests() {
    outside(&["check", "--no-default-features", "--bin", "outside"]);
    assert_eq!(outside(&["test"]).matches("test result: ok. ").count(), 3);
}

/// Runs cargo in a copy of `tests/outside`, a crate that has `mpmd` as its only dependency. Returns
/// the output.
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
    write(
        "src/quickstart.rs",
        read("mpmd-examples/src/bin/quickstart.rs"),
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

/// Returns cargo's target folder. What the workspace built there of others' crates serves the crate
/// too.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("it lies in cargo's folder")
        .to_owned()
}
