//! Runs the benchmarks, and checks the form of their results.

use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Time limit of a benchmark with few repeats, after which it is killed.
const LONG: Duration = Duration::from_secs(120);

/// Variables of a job, which `mpmd` must not inherit from the tests.
const SET: [&str; 5] = [
    "MPMD_RANK",
    "MPMD_WORLD_SIZE",
    "MPMD_LAUNCHER_PID",
    "MPMD_TRANSPORT",
    "MPMD_SPIN",
];

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.arg("bench").args(args).stdin(Stdio::null());
    for name in SET {
        command.env_remove(name);
    }
    command
}

/// Runs a command until it ends and returns its output. Kills it and panics after the time limit.
fn run(mut command: Command) -> Output {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program of this package");
    let pid = Pid::from_child(&child);
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match ended.recv_timeout(LONG) {
        Ok(output) => output.expect("its output"),
        Err(_) => {
            let _ = kill_process(pid, Signal::KILL);
            panic!("{command:?} did not end within {LONG:?}");
        }
    }
}

fn bench(args: &[&str]) -> String {
    let output = run(command(args));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}{complained}");
    said
}

/// Runs `mpmd bench`, which must fail without standard output. Returns the standard error.
fn complaint(args: &[&str]) -> String {
    let output = run(command(args));
    assert!(
        !output.status.success() && output.stdout.is_empty(),
        "{args:?}: {output:?}"
    );
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn lines(said: &str) -> Vec<Value> {
    said.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

/// Checks that a line of results counts all repeats, and that its times are above zero and in
/// order.
fn assert_measured(line: &Value, repeats: u64) {
    let figure = |name: &str| {
        line[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name} in {line}"))
    };
    assert!(
        0.0 < figure("p10") && figure("p10") <= figure("median"),
        "{line}"
    );
    assert!(figure("median") <= figure("p90"), "{line}");
    assert_eq!(line["repeats"], repeats, "{line}");
}

#[test]
fn resharding_is_measured_beside_a_plain_copy() {
    let said = bench(&[
        "reshard",
        "--mib",
        "1",
        "--repeats",
        "1",
        "--processes",
        "1,2",
        "--json",
    ]);
    let lines = lines(&said);
    let count = |name: &str| lines.iter().filter(|line| line["name"] == name).count();
    let moves = [
        "rows to columns",
        "replicate",
        "chunks to chunks",
        "regions to rows",
    ];
    for name in moves.into_iter().chain(["to other devices"]) {
        assert_eq!(count(name), 2, "{said}");
    }
    assert_eq!(count("copy_region"), 1, "{said}");
    // One copy beside each of the others, and copies by several threads where there are cores.
    let copies = lines.iter().filter(|line| line["name"] == "memcpy");
    let by_one = |line: &&Value| line["parameters"] == "1 MiB, 1 thread";
    assert_eq!(copies.filter(by_one).count(), 11, "{said}");
    for line in &lines {
        assert_measured(line, 1);
        assert_eq!(
            line["of_memcpy"].is_number(),
            line["name"] != "memcpy",
            "{line}"
        );
    }
    let table = bench(&[
        "reshard",
        "--mib",
        "1",
        "--repeats",
        "1",
        "--processes",
        "1",
    ]);
    assert_eq!(
        table
            .lines()
            .filter(|line| line.ends_with(" of memcpy"))
            .count(),
        6,
        "{table}"
    );
}

#[test]
fn pair_is_measured_at_every_size() {
    for transport in ["shm", "tcp", "inproc"] {
        let said = bench(&[
            "p2p",
            "--transport",
            transport,
            "--sizes",
            "8,20Ki,1Mi",
            "--repeats",
            "2",
            "--spin",
            "never",
            "--json",
        ]);
        let lines = lines(&said);
        let mut expected = Vec::new();
        // Each size is printed as soon as it is measured.
        for bytes in [8, 20 << 10, 1 << 20] {
            expected.push(("latency", bytes, "us", 2));
            expected.push(("bandwidth", bytes, "GB/s", 2));
            // 16 together: twice the repeats of other cases, and 12 until every piece of memory was
            // used.
            expected.push(("handover", bytes, "us", 16));
            expected.push(("handover warm-up", bytes, "us", 16));
            expected.push(("futex wake", bytes, "us", 16));
            expected.push(("memcpy", bytes, "GB/s", 2));
        }
        assert_eq!(lines.len(), expected.len(), "{said}");
        for (line, (name, bytes, unit, repeats)) in lines.iter().zip(expected) {
            assert_eq!(line["name"], name, "{line}");
            assert_eq!(
                (&line["bytes"], &line["unit"]),
                (&bytes.into(), &unit.into()),
                "{line}"
            );
            let pair = name != "memcpy";
            assert_eq!(
                line["transport"].as_str(),
                pair.then_some(transport),
                "{line}"
            );
            assert_eq!(line["spin"].as_str(), pair.then_some("never"), "{line}");
            let other = match name {
                "handover" => "handover warm-up",
                "handover warm-up" => "handover",
                _ => "",
            };
            let beside = lines
                .iter()
                .find(|line| line["name"] == other && line["bytes"] == bytes);
            let beside = beside
                .and_then(|line| line["repeats"].as_u64())
                .unwrap_or(0);
            assert_measured(line, repeats - beside);
            assert_eq!(
                line["of_memcpy"].is_number(),
                pair && unit == "GB/s",
                "{line}"
            );
            assert!(
                line["parameters"]
                    .as_str()
                    .is_some_and(|words| words.contains("i") || bytes == 8),
                "{line}"
            );
        }
    }
}

#[test]
fn handover_table_has_separate_warm_up_rows() {
    let words = "p2p --case handover --sizes 1Mi --repeats 3 --spin always";
    let said = bench(&words.split(' ').collect::<Vec<_>>());
    let lines: Vec<&str> = said.lines().collect();
    let expected = [
        "case",
        "handover 1Mi, array over shm, spin always",
        "handover warm-up 1Mi, array over shm, spin always",
        "futex wake 1Mi, array over shm, spin always",
        "memcpy 1Mi",
    ];
    assert_eq!(lines.len(), expected.len(), "{said}");
    for (line, starts) in lines.iter().zip(expected) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words.join(" ").starts_with(starts), "{said}");
    }
}

#[test]
fn invalid_pair_arguments_are_refused() {
    assert!(complaint(&["p2p", "--sizes", "0"]).contains("4Ki"));
    assert!(complaint(&["p2p", "--spin", "sometimes"]).contains("microseconds"));
    assert!(complaint(&["p2p", "--transport", "pigeon"]).contains("inproc"));
    let in_a_job = |processes: &str, args: &[&str]| {
        let mut command = command(args);
        command
            .env("MPMD_RANK", "0")
            .env("MPMD_WORLD_SIZE", processes)
            .env("MPMD_COORDINATOR", "127.0.0.1:9");
        let output = run(command);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = in_a_job("3", &["p2p"]);
    assert!(said.contains("this job has 3 processes"), "{said}");
}

#[test]
fn job_with_another_transport_is_refused() {
    let this = env!("CARGO_BIN_EXE_mpmd");
    let in_a_job = |job: &str, words: &str| {
        let mut command = Command::new(this);
        command
            .args(["run", "-n", "2", "--no-prefix"])
            .args(job.split_whitespace())
            .args(["--", this, "bench"]);
        command.args(words.split(' ')).stdin(Stdio::null());
        for name in SET {
            command.env_remove(name);
        }
        run(command)
    };
    let words = "p2p --case latency --sizes 8 --repeats 1 --sample-us 100 --json";
    // The default for two processes of one host.
    let output = in_a_job("", words);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(lines(&said)[0]["transport"], "shm", "{said}");
    let output = in_a_job("--transport tcp", words);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{complained}");
    assert!(
        complained.contains("the job's arrays go over tcp, and --transport says shm"),
        "{complained}"
    );
}

#[test]
fn probe_of_a_cpu_is_refused() {
    assert!(complaint(&["probe"]).contains("add --device cuda"));
}

#[test]
fn model_is_measured_in_one_process_and_in_several() {
    let grouped = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../mpmd-models/tests/folders/grouped"
    );
    let of = |more: &str| {
        let mut args = vec!["model", "--model", grouped, "--repeats", "2", "--json"];
        args.extend(more.split_whitespace());
        lines(&bench(&args))
    };
    let parameters = |lines: &[Value]| -> Vec<String> {
        lines.iter().for_each(|line| assert_measured(line, 2));
        let each = lines.iter().map(|line| line["parameters"].to_string());
        each.collect()
    };
    let expected = [r#""8 tokens""#, r#""1 clients""#, r#""5 clients""#];
    for more in ["", "--stages 2", "--stages 2 --processes 2 --half"] {
        let said = of(&format!("--prompt 8 --reply 3 --clients 1,5 {more}"));
        assert_eq!(parameters(&said), expected, "{more}");
    }
    let said = of("--train --stages 2 --processes 2");
    assert_eq!(parameters(&said), [r#""4 microbatches of 256 tokens""#]);

    let said = complaint(&["model", "--stages", "2", "--processes", "3"]);
    assert!(
        said.contains("--processes: expected 1 or --stages"),
        "{said}"
    );
    let said = complaint(&["model", "--train", "--half"]);
    assert!(
        said.contains("--half") && said.contains("--train"),
        "{said}"
    );
}
