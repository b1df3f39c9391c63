//! The benchmarks run, and say what they measured.

use std::process::{Command, Stdio};

fn bench(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.arg("bench").args(args).stdin(Stdio::null());
    // What may be set where the tests run.
    for name in ["MPMD_RANK", "MPMD_WORLD_SIZE", "MPMD_LAUNCHER_PID", "MPMD_TRANSPORT", "MPMD_LINKS"] {
        command.env_remove(name);
    }
    let output = command.output().expect("the program of this package");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}{complained}");
    said
}

#[test]
fn resharding_is_measured_beside_a_plain_copy() {
    let said = bench(&["reshard", "--mib", "1", "--repeats", "1", "--processes", "1,2", "--json"]);
    let lines: Vec<serde_json::Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    let count = |name: &str| lines.iter().filter(|line| line["name"] == name).count();
    for name in ["rows to columns", "to other devices", "replicate"] {
        assert_eq!(count(name), 2, "{said}");
    }
    assert_eq!((count("memcpy"), count("copy_region")), (6, 1), "{said}");
    assert!(lines.iter().all(|line| line["median"].as_f64().is_some_and(|median| median > 0.0)), "{said}");
}

#[test]
fn measured_links_are_a_file_that_jobs_read() {
    let file = std::env::temp_dir().join(format!("mpmd-bench-links-{}.json", std::process::id()));
    let path = file.to_str().expect("a name in Unicode");
    let said = bench(&["links", "--repeats", "1", "--out", path]);
    for class in ["same_device", "same_process", "same_host", "network"] {
        assert!(said.contains(class), "{said}");
    }
    assert!(said.contains("measured") && said.contains("default"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.args(["bench", "links", "--repeats", "1", "--json"]).env("MPMD_LINKS", path);
    let output = command.stdin(Stdio::null()).output().expect("the program of this package");
    std::fs::remove_file(&file).expect("it was written");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let costs: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(costs["same_host"]["bytes_per_us"].as_u64() > Some(0), "{costs}");
}
