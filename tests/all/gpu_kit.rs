//! The stages of `cargo xtask gpu` from a kit that was moved to a fresh folder, on the driver in
//! software: without cargo and Python, and with the program that a packed kit has.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use mpmd_tests::{ProcessEnd, Sandbox, bare_command, package_program, system_program};

/// Programs of the kit, and their packages.
const PROGRAMS: [(&str, &str); 4] = [
    ("xtask", "xtask"),
    ("mpmd-cli", "mpmd"),
    ("mpmd-examples", "cuda_kernel"),
    ("mpmd-tests", "named"),
];

/// A few of the tests of a kit; the last one is of another stage.
const TESTS: [&str; 3] = [
    "cuda_ipc::parts_of_shards_are_copied_once",
    "devices::with_a_driver_in_software::doctor_lists_all_cuda_devices",
    "cuda_ipc::stop_shorter_than_peer_timeout_is_no_failure",
];

/// The compiler of the driver in software: each program with its Debian package.
const COMPILER: [(&str, &str); 3] = [("c++", "g++"), ("as", "binutils"), ("ld", "binutils")];

/// Lays a kit without programs that the stages below do not start.
fn lay(kit: &Path, tests: &[&str]) {
    fs::create_dir_all(kit.join("deps")).expect("a folder for tests");
    let put = |from: &Path, to: &str| {
        // Links keep the name by which a program was started; a copy works everywhere.
        if fs::hard_link(from, kit.join(to)).is_err() {
            fs::copy(from, kit.join(to)).expect("the file is there");
        }
    };
    for (package, program) in PROGRAMS {
        put(&package_program(package, program), program);
    }
    put(
        &softcuda::library().expect("the driver is built"),
        "libsoftcuda_driver.so",
    );
    put(
        &std::env::current_exe().expect("a test knows its own file"),
        "deps/tests-all",
    );
    let tests: String = tests
        .iter()
        .map(|test| format!("deps/tests-all {test}\n"))
        .collect();
    fs::write(
        kit.join("manifest"),
        format!("commit 0123\nkit framework\n{tests}"),
    )
    .expect("a manifest");
}

/// Runs stages of the kit with nothing but a C++ compiler in `PATH`.
fn staged(folder: &Path, stages: &str, more: &[&str]) -> ProcessEnd {
    let kit = folder.join("kit");
    let mut command = bare_command(kit.join("xtask"));
    command
        .args(["gpu", "--software", "--stage", stages, "--prebuilt"])
        .arg(&kit)
        .args(more);
    command
        .env("PATH", folder.join("bin"))
        .env_remove("OUT")
        .env_remove("CARGO");
    let site = Sandbox::new().expect("a folder for the output");
    let until = Instant::now() + Duration::from_secs(240);
    site.start(command, "stages")
        .and_then(|mut stages| stages.wait(until))
        .expect("an end")
}

#[test]
fn kit_runs_its_stages_without_cargo_and_python() {
    let folder = tempfile::tempdir().expect("a folder for the kit");
    let folder = folder.path();
    fs::create_dir(folder.join("bin")).expect("a folder for the compiler");
    for (program, package) in COMPILER {
        let Some(path) = system_program(program, package) else {
            return;
        };
        symlink(path, folder.join("bin").join(program)).expect("a link");
    }
    let kit = folder.join("kit");
    lay(&kit, &TESTS);
    let end = staged(
        folder,
        "facts,doctor,kernel,tests,kills",
        &["--limit", "200"],
    );
    assert_eq!(end.code(), 0, "{end:?}");
    let summary = fs::read_to_string(kit.join("out/summary.txt")).expect("a summary");
    assert!(
        end.stdout.contains(&summary),
        "it is printed last: {}\n{summary}",
        end.stdout
    );
    for line in [
        "2 passed, 0 skipped, 0 failed",
        "1 passed, 0 skipped",
        "5 stages passed, 0 fail",
    ] {
        assert!(summary.contains(line), "{line}: {summary}");
    }
    let log = fs::read_to_string(kit.join("out/log.txt")).expect("a log");
    assert!(log.contains("4096 of 4096 elements are right"), "{log}");
    assert!(fs::read_dir(kit.join("out")).expect("results").count() <= 8);
    assert!(!kit.join("scratch").exists());

    fs::remove_dir_all(&kit).expect("the kit can be removed");
    lay(&kit, &["cuda_ipc::no_such_test"]);
    let end = staged(folder, "tests", &[]);
    assert_eq!(end.code(), 1, "{end:?}");
    let failed = "== tests-all cuda_ipc::no_such_test: there is no such test";
    assert!(end.stdout.contains(failed), "{}", end.stdout);
    let end = staged(folder, "tests,kills", &["--limit", "1"]);
    assert_eq!(end.code(), 1, "{end:?}");
    assert!(
        end.stdout.contains("0 stages passed, 0 failed, 2 not run"),
        "{}",
        end.stdout
    );
}
