//! Servers that go on after the loss of a process, with all else that can go wrong meanwhile.

use std::net::TcpStream;
use std::process::Command;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::client::{Answer, LONG};
use crate::folders::{Tensor, change, copy, path};
use crate::serve::{Serving, process_of, processes};

/// Returns the processes that a launcher has started, except process 0 of the job.
fn processes_but_first(launcher: u32) -> Vec<Pid> {
    let first = process_of(launcher, 0);
    let all = processes(launcher).into_iter();
    all.filter(|child| Some(*child) != first).collect()
}

#[test]
fn killed_stages_are_replaced_and_requests_go_on() {
    let args = ["--stages", "2", "--processes", "2", "--elastic"];
    let serving = Serving::start("plain", &args);
    let request = |seed: u32| ask(&[5 + seed; 3], 900, seed as usize);
    let undisturbed: Vec<Value> = (0..3)
        .map(|seed| tokens(&serving.send("POST", "/v1/completions", &request(seed))))
        .collect();
    for round in 1..=2 {
        thread::scope(|scope| {
            let clients: Vec<_> = (0..3)
                .map(|seed| {
                    let serving = &serving;
                    scope.spawn(move || serving.send("POST", "/v1/completions", &request(seed)))
                })
                .collect();
            until_running(&serving, 3);
            // The spare is on the second stage from the second round on.
            kill(&serving, round);
            for (client, undisturbed) in clients.into_iter().zip(&undisturbed) {
                assert_eq!(
                    tokens(&client.join().unwrap()),
                    *undisturbed,
                    "round {round}"
                );
            }
        });
        let recoveries = format!("mpmd_recoveries_total {round}");
        assert!(
            serving.metrics().contains(&recoveries),
            "{}",
            serving.metrics()
        );
    }
    let (status, said) = serving.end();
    assert!(status.success(), "{status}: {said:?}");
}

#[test]
fn any_process_but_the_front_may_be_lost() {
    let args = ["--stages", "2", "--front", "--elastic"];
    let serving = Serving::start("plain", &args);
    let ask = json!({
        "prompt": [5, 17, 3], "max_tokens": 700, "ignore_eos": true, "temperature": 0,
        "return_token_ids": true,
    });
    let undisturbed = tokens(&serving.send("POST", "/v1/completions", &ask));
    assert_eq!(undisturbed.as_array().unwrap().len(), 700);
    for round in 0..6 {
        thread::scope(|scope| {
            let client = scope.spawn(|| serving.send("POST", "/v1/completions", &ask));
            until_running(&serving, 1);
            // The two stages and the spare, each twice.
            let processes = processes_but_first(serving.child.id());
            assert!(!processes.is_empty());
            kill_process(processes[round % processes.len()], Signal::KILL).unwrap();
            assert_eq!(
                tokens(&client.join().unwrap()),
                undisturbed,
                "round {round}"
            );
        });
    }
    // They are asked for each second.
    let start = Instant::now();
    for name in ["stage_busy_seconds", "handover_bytes", "handover_seconds"] {
        for stage in 0..2 {
            let line = format!("mpmd_{name}_total{{stage=\"{stage}\"}} ");
            let value = |metrics: &str| {
                let value = metrics
                    .lines()
                    .find_map(|known| known.strip_prefix(&line))?;
                value.parse::<f64>().ok()
            };
            // The last stage hands nothing to a later one.
            let is_least = |value: f64| value > 0.0 || (name, stage) == ("handover_seconds", 1);
            while !value(&serving.metrics()).is_some_and(is_least) {
                assert!(start.elapsed() < LONG, "{}", serving.metrics());
                serving.send("POST", "/v1/completions", &ask);
            }
        }
    }
    let (status, said) = serving.end();
    assert!(status.success(), "{status}: {said:?}");
}

/// Returns a request for this number of tokens, drawn with this seed.
fn ask(prompt: &[u32], tokens: usize, seed: usize) -> Value {
    json!({
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "seed": seed,
        "temperature": 0.7, "return_token_ids": true,
    })
}

/// Returns the tokens of a reply.
fn tokens(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0]["token_ids"].clone()
}

/// Waits until this number of requests is being answered.
fn until_running(serving: &Serving, requests: usize) {
    let line = format!("mpmd_requests_running {requests}\n");
    let start = Instant::now();
    while !serving.metrics().contains(&line) {
        assert!(start.elapsed() < LONG, "{}", serving.metrics());
    }
}

/// Kills a process of a server's job.
fn kill(serving: &Serving, process: usize) {
    let process = process_of(serving.child.id(), process).expect("it runs");
    kill_process(process, Signal::KILL).unwrap();
}

/// Checks that exactly one lost process was replaced.
fn check_replaced_once(serving: &Serving) {
    let metrics = serving.metrics();
    assert!(metrics.contains("mpmd_recoveries_total 1\n"), "{metrics}");
}

/// Returns the tensor of this name.
fn tensor<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    let found = tensors.iter_mut().find(|(other, ..)| other == name);
    found.unwrap()
}

/// The token whose keys overflow: its embedding alone has a value in the column that the first norm
/// makes very large. No text of the test has it.
const POISONED: usize = 199;

#[test]
fn request_without_finite_logits_ends_no_other_at_a_loss() {
    let folder = copy("plain");
    change(folder.path(), |tensors| {
        let table = tensor(tensors, "model.embed_tokens.weight");
        let row = 4 * table.1.shape()[1];
        for (token, row) in table.2.chunks_mut(row).enumerate() {
            let first: f32 = if token == POISONED { 1.0 } else { 0.0 };
            row[..4].copy_from_slice(&first.to_le_bytes());
        }
        let norm = tensor(tensors, "model.layers.0.input_layernorm.weight");
        norm.2[..4].copy_from_slice(&f32::MAX.to_le_bytes());
    });
    let model = folder.path().to_str().unwrap();
    let serving = Serving::start_with(&["--model", model, "--stages", "2", "--front", "--elastic"]);
    let ask_good = |first: u32| {
        let mut good = ask(&[first, 6], 700, 0);
        good["temperature"] = json!(0);
        serving.send("POST", "/v1/completions", &good)
    };
    let ask_bad = || serving.send("POST", "/v1/completions", &ask(&[POISONED as u32], 50, 0));
    let undisturbed: Vec<Value> = (8..16).map(|first| tokens(&ask_good(first))).collect();

    thread::scope(|scope| {
        let ask_good = &ask_good;
        let good: Vec<ScopedJoinHandle<Answer>> = (8..16)
            .map(|first| scope.spawn(move || ask_good(first)))
            .collect();
        until_running(&serving, 8);
        let bad = scope.spawn(ask_bad);
        kill(&serving, 2);
        let later_bad = scope.spawn(ask_bad);
        for bad in [bad, later_bad] {
            let answer = bad.join().unwrap();
            assert_eq!(answer.status, 500, "{answer:?}");
        }
        for (good, undisturbed) in good.into_iter().zip(&undisturbed) {
            assert_eq!(tokens(&good.join().unwrap()), *undisturbed);
        }
    });
    check_replaced_once(&serving);
    assert!(serving.end().0.success());
}

#[test]
fn more_clients_than_files_are_outlived_at_a_loss() {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 110; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_serve"),
    ]);
    command
        .arg("--model")
        .arg(path("plain"))
        .args(["--port", "0", "--stages", "2"]);
    command.args(["--front", "--elastic", "--max-connections", "20"]);
    let serving = Serving::launch(command);
    serving.until_ready();
    let good = ask(&[5, 6], 60, 0);
    let undisturbed = tokens(&serving.send("POST", "/v1/completions", &good));

    let idle: Vec<TcpStream> = (0..250)
        .map_while(|_| TcpStream::connect(serving.address).ok())
        .collect();
    assert!(idle.len() > 110, "{}", idle.len());
    kill(&serving, 1);
    drop(idle);
    assert_eq!(
        tokens(&serving.send("POST", "/v1/completions", &good)),
        undisturbed
    );
    assert!(serving.end().0.success());
}

#[test]
fn request_to_stop_that_comes_twice_is_one_at_a_loss() {
    let serving = Serving::start("plain", &["--stages", "2", "--front", "--elastic"]);
    let long = ask(&[5, 17, 3], 900, 1);
    let undisturbed = tokens(&serving.send("POST", "/v1/completions", &long));
    let answer = thread::scope(|scope| {
        let client = scope.spawn(|| serving.send("POST", "/v1/completions", &long));
        until_running(&serving, 1);
        kill(&serving, 2);
        serving.signal_all_twice();
        client.join().unwrap()
    });
    assert_eq!(tokens(&answer), undisturbed);
    let (status, said) = serving.ended();
    assert!(status.success(), "{status}: {said:?}");
}

#[test]
fn loss_of_the_process_that_answers_clients_is_a_failure() {
    let serving = Serving::start("plain", &["--stages", "2", "--front", "--elastic"]);
    kill(&serving, 0);
    let (status, said) = serving.ended();
    assert!(!status.success(), "{said:?}");
    assert!(
        said.iter().any(|line| line.contains("the server ends")),
        "{said:?}"
    );
}

#[test]
fn elastic_server_of_threads_is_refused_before_it_listens() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serve"));
    command
        .arg("--model")
        .arg(path("plain"))
        .args(["--stages", "2", "--elastic", "--port", "0"]);
    let output = command.args(["--transport", "inproc"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("leave --transport inproc out"),
        "{said}"
    );
    assert!(!said.contains("listening"), "{said}");
}
