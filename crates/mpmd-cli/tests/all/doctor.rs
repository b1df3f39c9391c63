//! `mpmd doctor` on the machine that runs the tests, for any machine.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit of a call of `mpmd doctor`, after which it is killed.
const LONG: Duration = Duration::from_secs(60);

fn doctor(args: &[&str], vars: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    command.arg("doctor").args(args);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["MPMD_", "UCX_", "CUDA_"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(&name);
        }
    }
    command
        .envs(vars.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let until = Instant::now() + LONG;
    // The output is a few KiB, less than a pipe's buffer.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("mpmd doctor {args:?} takes more than {LONG:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(args: &[&str], vars: &[(&str, &str)]) -> (Option<i32>, Value) {
    let output = doctor(args, vars);
    let said = serde_json::from_slice(&output.stdout);
    let said = said.unwrap_or_else(|error| {
        panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr))
    });
    (output.status.code(), said)
}

fn finding<'a>(said: &'a Value, name: &str) -> &'a Value {
    let findings = said["findings"].as_array().unwrap();
    findings
        .iter()
        .find(|finding| finding["name"] == name)
        .unwrap_or_else(|| panic!("{name}: {said}"))
}

#[test]
fn text_output_fits_the_terminal() {
    let output = doctor(&[], &[]);
    let said = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{said}{}",
        text(&output.stderr)
    );
    for expected in ["transport", "sharing memory", "in the way of auto"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    for line in said.lines() {
        // A path without blanks is not broken.
        assert!(line.chars().count() <= 100 || line.contains('/'), "{line}");
    }
}

#[test]
fn json_and_exit_status_report_problems() {
    for transport in ["auto", "shm", "tcp", "ucx"] {
        let (status, said) = json(&["--json", "--transport", transport], &[]);
        let problems = said["problems"].as_u64().unwrap();
        assert_eq!(status, Some(i32::from(problems > 0)), "{said}");
        assert_eq!(said["transport"], transport);
        let findings = said["findings"].as_array().unwrap();
        let found = findings
            .iter()
            .filter(|finding| finding["verdict"] == "problem")
            .count();
        assert_eq!(found as u64, problems, "{said}");
        for finding in findings {
            let fields = ["name", "value", "verdict", "advice"];
            assert!(
                fields.iter().all(|field| finding[field].is_string()),
                "{finding}"
            );
        }
        assert!(said["facts"]["sharing"].is_object(), "{said}");
    }
}

#[test]
fn memory_sharing_is_tested() {
    let (status, said) = json(&["--json", "--transport", "shm"], &[]);
    let (tried, found) = (
        &said["facts"]["sharing"]["error"],
        finding(&said, "sharing memory"),
    );
    // Machines that run the tests can usually share memory. If not, the finding must be a problem.
    let expected = if tried.is_null() {
        (Some(0), "ok")
    } else {
        (Some(1), "problem")
    };
    assert_eq!(
        (status, found["verdict"].as_str().unwrap()),
        expected,
        "{said}"
    );
    if tried.is_null() {
        assert!(finding(&said, "open files")["value"].is_string(), "{said}");
    }
}

#[cfg(not(feature = "ucx"))]
#[test]
fn missing_ucx_is_a_problem_only_if_requested() {
    for (args, vars) in [
        (&["--json", "--transport", "ucx"][..], &[][..]),
        (&["--json"], &[("MPMD_TRANSPORT", "ucx")]),
    ] {
        let (status, said) = json(args, vars);
        assert_eq!(status, Some(1), "{said}");
        let ucx = finding(&said, "ucx");
        assert_eq!(ucx["verdict"], "problem");
        assert!(
            ucx["advice"].as_str().unwrap().contains("--features ucx"),
            "{ucx}"
        );
    }
    let (status, said) = json(&["--json"], &[]);
    assert_eq!(
        (status, &finding(&said, "ucx")["verdict"]),
        (Some(0), &Value::from("note"))
    );
}

#[test]
fn missing_gpus_are_a_problem_only_if_requested() {
    // GPUs of the machine, if any, are hidden.
    let hidden = ("CUDA_VISIBLE_DEVICES", "");
    for (args, vars) in [
        (&["--json", "--device", "cuda"][..], &[hidden][..]),
        (&["--json"], &[hidden, ("MPMD_DEVICE", "cpu,cuda")]),
    ] {
        let (status, said) = json(args, vars);
        let cuda = finding(&said, "cuda");
        assert_eq!(
            (status, cuda["verdict"].as_str()),
            (Some(1), Some("problem")),
            "{said}"
        );
        let value = cuda["value"].as_str().unwrap();
        let known = [
            "no CUDA driver found",
            "the CUDA driver shows no graphics processor",
        ];
        assert!(known.iter().any(|known| value.starts_with(known)), "{cuda}");
        assert!(
            cuda["advice"]
                .as_str()
                .unwrap()
                .contains("devices of kind cpu work"),
            "{cuda}"
        );
        assert!(
            said["facts"]["cuda"]["missing"]["why"].is_string(),
            "{said}"
        );
    }
    let (status, said) = json(&["--json"], &[hidden]);
    assert_eq!(
        (status, &finding(&said, "cuda")["verdict"]),
        (Some(0), &Value::from("note")),
        "{said}"
    );
    let output = doctor(&["--json"], &[hidden, ("MPMD_DEVICE", "gpu")]);
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && said.contains("MPMD_DEVICE=gpu"),
        "{said}"
    );
}

#[test]
fn unknown_transport_is_a_problem() {
    let (status, said) = json(&["--json"], &[("MPMD_TRANSPORT", "pigeon")]);
    assert_eq!(status, Some(1), "{said}");
    assert!(
        finding(&said, "transport")["advice"]
            .as_str()
            .unwrap()
            .contains("auto, shm, tcp, ucx"),
        "{said}"
    );
    assert_eq!(
        doctor(&["--transport", "pigeon"], &[]).status.code(),
        Some(2)
    );
}
