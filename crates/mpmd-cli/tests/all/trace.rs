//! `mpmd trace` on the files of a traced run.

use std::path::{Path, PathBuf};
use std::process::Command;

use mpmd_core::prelude::*;
use mpmd_core::{Label, Role, Simulation};
use serde_json::Value;

const STEPS: u64 = 3;

/// Runs `STEPS` traced steps of two stages in two processes. Returns the folder with the traces.
fn traced(name: &str) -> PathBuf {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    let results = Simulation::new(2, 2)
        .settings(|settings| settings.trace(&folder))
        .run(|p| {
            let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
            let mut kernels = Vec::new();
            for stage in &stages {
                let next = p.jit(elementwise(|x: f32| x + 1.0)).on(stage);
                kernels.push(next.outputs(stage.replicated()).build()?);
            }
            for _ in 0..STEPS {
                let label = |stage, role| {
                    Some(Label {
                        stage,
                        microbatch: Some(0),
                        role,
                    })
                };
                let x = p.device_put(&MpmdArray::scalar(1.0f32), stages[0].replicated())?;
                p.set_label(label(0, Role::Forward));
                let x = kernels[0].call(p, x)?;
                p.set_label(label(0, Role::SendForward));
                let x = p.device_put(&x, stages[1].replicated())?;
                p.set_label(label(1, Role::Forward));
                let x = kernels[1].call(p, x)?;
                p.set_label(label(1, Role::BackwardInput));
                let x = kernels[1].call(p, x)?;
                p.set_label(label(1, Role::SendBackward));
                let x = p.device_put(&x, stages[0].replicated())?;
                p.set_label(label(0, Role::BackwardInput));
                let _ = kernels[0].call(p, x)?;
                p.set_label(None);
                p.step_end()?;
            }
            Ok(())
        });
    results.into_iter().for_each(|result| result.unwrap());
    folder
}

/// Runs `mpmd trace` on a folder. Returns (exit code, standard output, standard error); the code is
/// `None` after a signal.
fn ask(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    let output = command
        .arg("trace")
        .arg(folder)
        .args(args)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn traced_run_gives_summary_timelines_and_costs() {
    let folder = traced("whole");
    let path = |name: &str| folder.join(name).display().to_string();
    let (events, timeline, costs) = (path("a.json"), path("t.json"), path("costs.toml"));
    let args = ["-o", &events, "--timeline", &timeline, "--costs", &costs];
    let (code, said, wrong) = ask(&folder, &args);
    assert_eq!((code, &*wrong), (Some(0), ""));
    for text in [
        "2 processes, 12 kernels, 6 pieces sent",
        "steps 1 to 3: ",
        "process 1: computes ",
    ] {
        assert!(said.contains(text), "{text:?} is not in\n{said}");
    }
    let events = read(Path::new(&events));
    let events = events["traceEvents"].as_array().unwrap();
    let kernels = events
        .iter()
        .filter(|event| event["ph"] == "X" && event["args"]["operation"].is_u64())
        .filter(|event| event["cat"] != "transfer");
    assert_eq!(kernels.count(), 12);
    let bars = |timeline: &Value| -> usize {
        let rows = timeline["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        rows.iter()
            .map(|row| row["bars"].as_array().unwrap().len())
            .sum()
    };
    assert_eq!(bars(&read(Path::new(&timeline))), 12);
    let costs = std::fs::read_to_string(&costs).unwrap();
    assert!(
        costs.starts_with("unit = \"s\"\n") && costs.matches("[[stage]]").count() == 2,
        "{costs}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn broken_files_are_reported() {
    let folder = traced("broken");
    // One process's file is truncated, then deleted.
    let second = folder.join("process-1.trace");
    let bytes = std::fs::read(&second).unwrap();
    std::fs::write(&second, &bytes[..bytes.len() - 60]).unwrap();
    let (code, said, _) = ask(&folder, &[]);
    assert!(
        code == Some(0) && said.contains("note: the trace of process 1 is not whole"),
        "{said}"
    );
    std::fs::remove_file(&second).unwrap();
    let (code, said, _) = ask(&folder, &[]);
    assert!(
        code == Some(0) && said.contains("note: the trace of process 1 is missing"),
        "{said}"
    );
    std::fs::remove_file(folder.join("process-0.trace")).unwrap();
    let (code, _, wrong) = ask(&folder, &[]);
    assert!(
        code == Some(1) && wrong.contains("has no file process-<n>.trace"),
        "{wrong}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
