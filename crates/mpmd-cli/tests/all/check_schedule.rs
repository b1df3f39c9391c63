//! `mpmd check` on schedules: its output and exit codes.

use std::fs;
use std::process::{Command, Output};

fn check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mpmd"))
        .arg("check")
        .args(args)
        .output()
        .unwrap()
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn proved_schedule_exits_with_0() {
    let (code, out, _) = said(&check(&["interleaved", "-p", "8", "-m", "16", "-v", "2"]));
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.contains("order    ends over tags, direction, pair, single\n"),
        "{out}"
    );
    assert!(
        out.contains("step     117 unit") && out.contains("over single: 172 unit"),
        "{out}"
    );
    let (code, out, _) = said(&check(&["1f1b", "-p", "4", "-m", "8", "--channel", "pair"]));
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.contains("order    ends over pair\n") && out.contains("step     33 unit"),
        "{out}"
    );
    assert!(
        out.contains("30 units if results are sent at once"),
        "{out}"
    );
}

#[test]
fn refuted_schedule_exits_with_1() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    let file = file.to_str().unwrap();
    fs::write(file, "0F0,0F0,0B0\n1F0\n").unwrap();
    let (code, out, _) = said(&check(&[file]));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("fault    0F0 appears twice: rank 0, place 0 and rank 0, place 1\n"),
        "{out}"
    );
    assert!(
        out.contains("fault    1B0 is missing; stage 1 is on rank 1\n"),
        "{out}"
    );
    let (code, out, _) = said(&check(&[
        "gpipe",
        "-p",
        "2",
        "-m",
        "8",
        "--budget",
        "4activations",
    ]));
    assert_eq!(code, Some(1), "{out}");
    // Each rank waits for the other: no order of moves helps.
    fs::write(file, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").unwrap();
    let (code, out, _) = said(&check(&[file]));
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("rank 1 computes 1F1 needs: rank 1 receives 0SEND_F1\n"),
        "{out}"
    );
}

#[test]
fn invalid_arguments_exit_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    let file = file.to_str().unwrap();
    fs::write(file, "0F0,2BW0\n").unwrap();
    for args in [
        &[file][..],
        &["gpipe"],
        &["no such", "-p", "2", "-m", "2"],
        &["no/such.csv"],
        &[],
    ] {
        let (code, out, error) = said(&check(args));
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args:?} {error}");
        assert!(!error.is_empty());
    }
    let (code, _, error) = said(&check(&[
        "gpipe",
        "-p",
        "2",
        "-m",
        "2",
        "--channel",
        "fifo",
    ]));
    assert_eq!(code, Some(2));
    assert!(
        error.contains("there are tags, direction, pair and single"),
        "{error}"
    );
}
