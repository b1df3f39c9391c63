//! A program that was built without UCX or CUDA reports that, and how to get it. It neither hangs
//! nor uses something else. A crate outside of the workspace needs none of them either.
#![cfg(not(any(feature = "ucx", feature = "cuda")))]

use std::path::Path;
use std::process::Command;

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

#[test]
fn requested_cuda_devices_are_reported_as_not_compiled_in() {
    each_says(variables::DEVICE, "cuda", |said| said.contains("built without the feature `cuda`"));
}

/// Starts two processes with this variable. Both must end at once, with a message for which
/// `is_said` is true.
fn each_says(variable: &str, value: &str, is_said: impl Fn(&str) -> bool) {
    const PROCESSES: usize = 2;
    let mut job = Job::prepare(Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), PROCESSES));
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        command.arg("hello").env(variable, value);
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{}", job.report());
        assert!(is_said(&end.stderr), "{}", job.report());
    }
}

#[test]
fn outside_crate_passes_its_tests_with_mpmd_alone() {
    let files = ["src/main.rs", "tests/processes.rs"];
    outside("outside", &files.map(|file| (format!("tests/outside/{file}"), file)));
}

/// Its program is the example `quickstart`.
#[test]
fn outside_crate_trains_a_candle_model() {
    let program = "mpmd-examples/src/bin/quickstart.rs".to_owned();
    let test = "tests/processes.rs";
    outside(
        "outside-candle",
        &[(program, "src/main.rs"), (format!("tests/outside-candle/{test}"), test)],
    );
}

/// Runs the tests of a copy of `tests/NAME`, a crate that has `mpmd` as its only dependency.
/// `files` are (file in the repository, file in the crate).
fn outside(name: &str, files: &[(String, &str)]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests have a workspace");
    let copy = tempfile::tempdir().expect("a folder");
    let manifest = root.join("tests").join(name).join("Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).expect("a manifest");
    let mpmd = root.join("mpmd");
    let manifest = manifest.replace("../../mpmd", mpmd.to_str().expect("a path in Unicode"));
    std::fs::write(copy.path().join("Cargo.toml"), manifest).expect("a manifest");
    // The same versions as the workspace's, which are here already.
    std::fs::copy(root.join("Cargo.lock"), copy.path().join("Cargo.lock")).expect("a lock file");
    for folder in ["src", "tests"] {
        std::fs::create_dir(copy.path().join(folder)).expect("a folder");
    }
    for (from, to) in files {
        std::fs::copy(root.join(from), copy.path().join(to)).expect("a source file");
    }
    let output = Command::new(env!("CARGO"))
        .current_dir(copy.path())
        .args(["test", "--offline", "--quiet", "--target-dir"])
        .arg(root.join("target/outside"))
        .output()
        .expect("cargo runs");
    let shown = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}{errors}");
    assert_eq!(shown.matches("test result: ok. ").count(), 2, "{shown}{errors}");
}
