//! `mpmd schedule`: runs the golden files through the program, and checks files and errors.

use std::fs;

use crate::common::{Told, call};
use serde_json::Value;
use tempfile::TempDir;

fn cases(golden: &str, count: usize) -> Vec<Value> {
    let golden: Value = serde_json::from_str(golden).unwrap();
    let cases = golden["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), count);
    cases
}

/// Returns the arguments for `mpmd` that ask for the schedule of a golden file's case.
fn asked(case: &Value) -> Vec<String> {
    let number = |key: &str| case[key].as_u64().unwrap().to_string();
    let name = case["schedule"].as_str().unwrap();
    let (p, m, v) = (
        number("ranks"),
        number("microbatches"),
        number("chunks_per_rank"),
    );
    [
        "schedule",
        name,
        "--ranks",
        &p,
        "--microbatches",
        &m,
        "--chunks",
        &v,
    ]
    .map(str::to_owned)
    .to_vec()
}

fn ask(args: &[&str]) -> Told {
    call(&[&["schedule"], args].concat(), "")
}

/// Returns the output of `mpmd schedule`, which must succeed.
fn shown(args: &[&str]) -> String {
    let told = ask(args);
    assert_eq!(
        (told.status, told.stderr.as_str()),
        (Some(0), ""),
        "{args:?}"
    );
    told.stdout
}

/// Returns the standard error of `mpmd schedule`, which must fail with one line and exit code 2.
fn refused(args: &[&str]) -> String {
    let told = ask(args);
    assert_eq!(
        (told.status, told.stdout.as_str()),
        (Some(2), ""),
        "{args:?}: {}",
        told.stderr
    );
    assert_eq!(told.stderr.lines().count(), 1, "{}", told.stderr);
    told.stderr
}

fn path(folder: &TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn text_is_that_of_the_golden_file() {
    for case in cases(
        include_str!("../../../mpmd-schedule/tests/golden/schedules.json"),
        101,
    ) {
        let args = asked(&case);
        let told = call(&args.iter().map(String::as_str).collect::<Vec<_>>(), "");
        let rows: Vec<Vec<String>> = serde_json::from_value(case["rows"].clone()).unwrap();
        let expected: String = rows.into_iter().map(|row| row.join(",") + "\n").collect();
        assert_eq!((told.status, told.stdout), (Some(0), expected), "{args:?}");
    }
}

#[test]
fn files_equal_torchs_and_can_be_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (file, again) = (path(&folder, "a.csv"), path(&folder, "b.csv"));
    for case in cases(
        include_str!("../../../mpmd-schedule/tests/golden/torch_text.json"),
        35,
    ) {
        let mut args = asked(&case);
        args.extend(["--comms", "-o", file.as_str()].map(str::to_owned));
        let told = call(&args.iter().map(String::as_str).collect::<Vec<_>>(), "");
        assert_eq!(
            (told.status, told.stdout.as_str()),
            (Some(0), ""),
            "{args:?} {}",
            told.stderr
        );
        let theirs = case["compute_comms"].as_str().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), theirs, "{args:?}");
        shown(&[&file, "--comms", "-o", &again]);
        assert_eq!(fs::read_to_string(&again).unwrap(), theirs, "{args:?}");
        // Without moves, both of torch's files are the same schedule.
        fs::write(&again, case["compute_only"].as_str().unwrap()).unwrap();
        assert_eq!(shown(&[&file]), shown(&[&again]), "{args:?}");
    }
}

#[test]
fn figures_match_published_formulas() {
    for (name, chunks, makespan, activations, idle) in [
        ("gpipe", "1", 33.0, [8, 8, 8, 8], [9.0, 6.0, 3.0, 0.0]),
        ("1F1B", "1", 33.0, [4, 3, 2, 1], [9.0, 6.0, 3.0, 0.0]),
        (
            "interleaved",
            "2",
            57.0,
            [11, 9, 7, 5],
            [9.0, 6.0, 3.0, 0.0],
        ),
        (
            "Looped-BFS",
            "2",
            57.0,
            [16, 16, 16, 16],
            [9.0, 6.0, 3.0, 0.0],
        ),
        ("zb_h1", "1", 27.0, [4, 4, 4, 4], [3.0, 2.0, 1.0, 0.0]),
        ("zb1p", "2", 51.0, [8, 8, 8, 8], [3.0, 2.0, 1.0, 0.0]),
        ("ZBV", "2", 51.0, [8, 8, 8, 8], [0.0, 0.0, 0.0, 0.0]),
        ("DualPipeV", "2", 54.0, [9, 9, 9, 9], [6.0, 5.0, 4.0, 3.0]),
    ] {
        let args = [
            name,
            "--ranks",
            "4",
            "--microbatches",
            "8",
            "--chunks",
            chunks,
            "--format",
            "json",
        ];
        let found: Value = serde_json::from_str(&shown(&args)).unwrap();
        assert_eq!(found["makespan"], makespan, "{name}");
        assert_eq!(
            found["activations"],
            Value::from(activations.to_vec()),
            "{name}"
        );
        assert_eq!(found["idle"], Value::from(idle.to_vec()), "{name}");
        let ideal: f64 = 24.0 * chunks.parse::<f64>().unwrap();
        assert_eq!(found["bubble"], makespan - ideal, "{name}");
        let share = found["bubble_share"].as_f64().unwrap();
        assert!(
            (share - (makespan - ideal) / makespan).abs() < 1e-12,
            "{name} {share}"
        );
    }
}

#[test]
fn every_format_shows_the_schedule() {
    let of = |format| shown(&["zbv", "-p", "2", "-m", "4", "--format", format]);
    let table = of("table");
    assert!(
        table.starts_with("ZBVZeroBubble: 2 ranks, 4 microbatches, 4 stages (V)\ntakes 25 units"),
        "{table}"
    );
    assert!(table.contains("0F0 0F1 0F2 3F0 3I0 3W0"), "{table}");
    let events: Value = serde_json::from_str(&of("perfetto")).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|event| event["name"] == "3W0"));
    let json: Value = serde_json::from_str(&of("json")).unwrap();
    assert_eq!(
        (&json["placement"], &json["stages"]),
        (&Value::from("V"), &Value::from(4))
    );
    assert_eq!(json["rank_of_stage"], Value::from(vec![0, 1, 1, 0]));
    assert_eq!(
        of("text").lines().next(),
        Some(
            &*json["rows"][0]
                .as_array()
                .map(|row| {
                    row.iter()
                        .map(|cell| cell.as_str().unwrap())
                        .collect::<Vec<_>>()
                        .join(",")
                })
                .unwrap()
        )
    );
    let inference = shown(&["forward", "-p", "2", "-m", "2", "--format", "table"]);
    assert!(inference.contains("takes 3 units"), "{inference}");
}

#[test]
fn wrong_file_error_names_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.csv");
    let of = |text: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        refused(&[&[file.as_str()], more].concat())
    };
    let said = of("0F0,0BW0\n", &[]);
    assert!(
        said.contains("line 1, column 2 (byte 4), `0BW0`: BW is of old files"),
        "{said}"
    );
    let said = of("0F0,0F1,0B0\n", &[]);
    assert!(
        said.contains("0B1 is missing; stage 0 is on rank 0"),
        "{said}"
    );
    let said = of("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", &[]);
    let expected =
        "rank 0 is at 0B0, position 1, which waits for 1B0 on rank 1, position 2, behind 1F1";
    assert!(said.contains(expected), "{said}");
    let said = of("0F0,,0B0\n", &["--flavour", "compute_comms"]);
    assert!(said.contains("no empty cells"), "{said}");
    let said = of("0F0,0B0\n", &["--ranks", "2"]);
    assert!(
        said.contains("--ranks is 2, and") && said.contains("has 1"),
        "{said}"
    );
    assert!(refused(&[&path(&folder, "none.csv")]).contains("cannot read"));
}

#[test]
fn file_that_is_no_schedule_says_what_it_is_for() {
    let folder = tempfile::tempdir().unwrap();
    let costs = path(&folder, "costs.toml");
    let stage = "[[stage]]\nforward = 1.0\nbackward_input = 1.0\nbackward_weight = 1.0\n";
    fs::write(&costs, format!("unit = \"ms\"\n{stage}")).unwrap();
    let said = refused(&[&costs]);
    let expected = format!("{costs} has the costs of stages, and no schedule: name a schedule");
    assert!(
        said.contains(&expected) && said.contains("--costs"),
        "{said}"
    );
    fs::write(&costs, "[package]\nname = \"x\"\n").unwrap();
    assert!(refused(&[&costs]).contains("is TOML, and no text of a schedule"));
}

#[test]
fn arguments_that_are_wrong_are_refused() {
    for (args, expected) in [
        (
            &["nonsense", "-p", "2", "-m", "2"][..],
            "there is no schedule \"nonsense\"; there are GPipe",
        ),
        (&["gpipe"], "needs --ranks and --microbatches"),
        (
            &["gpipe", "-p", "0", "-m", "2"],
            "at least one rank and one microbatch",
        ),
        (
            &["gpipe", "-p", "2", "-m", "2", "-v", "2"],
            "one stage a rank",
        ),
        (
            &["zbv", "-p", "2", "-m", "2", "-v", "1"],
            "two stages a rank",
        ),
        (
            &["dualpipev", "-p", "2", "-m", "3"],
            "two microbatches a rank, 4, at the least",
        ),
        (
            &["interleaved", "-p", "2", "-m", "5"],
            "2 does not divide 5; 4 and 6 would do",
        ),
        (
            &["gpipe", "-p", "9999999999", "-m", "9999999999"],
            "more than",
        ),
        (
            &["gpipe", "-p", "2", "-m", "2", "--format", "json", "--comms"],
            "--comms is for --format text",
        ),
        (
            &["gpipe", "-p", "2", "-m", "2", "--costs", "no/such.toml"],
            "cannot read no/such.toml",
        ),
    ] {
        let said = refused(args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert_eq!(ask(&["gpipe", "-p", "two", "-m", "2"]).status, Some(2));
    assert_eq!(
        ask(&["gpipe", "-p", "2", "-m", "2", "--format", "poem"]).status,
        Some(2)
    );
}

#[test]
fn texts_of_files_command_no_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let costs = path(&folder, "costs.toml");
    // The error shows this line.
    fs::write(&costs, "unit = \"\u{1b}]0;title\u{7}\"\n").unwrap();
    let error = ask(&["1F1B", "-p", "2", "-m", "2", "--costs", &costs]).stderr;
    assert!(error.contains("\\u001b]0;title\\u0007"), "{error:?}");
    assert!(
        !error.contains(|c: char| c.is_control() && c != '\n'),
        "{error:?}"
    );
}
