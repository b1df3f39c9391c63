//! The program, as a user starts it.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use mpmd_base::variables;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::client::{Answer, LONG, send};
use crate::folders::{Expected, change_config, copy, expected, path};

/// The level and target of a line about a request or a state, as the log has them.
const LOG: &str = " INFO mpmd::serve: ";

const GUIDE: &str = include_str!("../../../../docs/guide/serve.md");

/// A running server program.
pub(crate) struct Serving {
    pub(crate) child: Child,
    /// Its output up to the line with its address.
    said: String,
    pub(crate) address: SocketAddr,
    pub(crate) lines: Mutex<mpsc::Receiver<String>>,
}

impl Serving {
    /// Starts `serve` on a free port, and waits until it takes requests.
    pub(crate) fn start(model: &str, args: &[&str]) -> Self {
        let model = path(model);
        Self::start_with(&[&["--model", model.to_str().unwrap()], args].concat())
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        Self::start_with_env(args, &[])
    }

    pub(crate) fn start_with_env(args: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::start_of(env!("CARGO_BIN_EXE_serve"), args, variables)
    }

    fn start_of(program: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(program);
        command
            .args(["--port", "0"])
            .args(args)
            .envs(variables.iter().copied());
        let serving = Self::launch(command);
        serving.until_ready();
        serving
    }

    /// Waits until the server takes requests.
    pub(crate) fn until_ready(&self) {
        let start = Instant::now();
        while self.send("GET", "/ready", &Value::Null).status != 200 {
            assert!(start.elapsed() < LONG, "it never takes requests");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts a program, and waits until it prints its address.
    pub(crate) fn launch(mut command: Command) -> Self {
        let mut child = command
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let (to, lines) = mpsc::channel();
        let from = BufReader::new(child.stderr.take().unwrap());
        thread::spawn(move || {
            from.lines()
                .map_while(Result::ok)
                .try_for_each(|line| to.send(line))
        });
        let mut said = String::new();
        let address = loop {
            let Ok(line) = lines.recv_timeout(LONG) else {
                let _ = child.kill();
                panic!("no address: {said}");
            };
            let address = line.split("http://").nth(1).map(str::to_owned);
            said += &(line + "\n");
            if let Some(address) = address {
                break address.trim_end_matches('/').parse().unwrap();
            }
        };
        let lines = Mutex::new(lines);
        Self {
            said,
            address,
            child,
            lines,
        }
    }

    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> Answer {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n",
            self.address
        );
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        send(self.address, &head, body.as_bytes())
    }

    pub(crate) fn metrics(&self) -> String {
        self.send("GET", "/metrics", &Value::Null).body
    }

    /// Sends a signal to end the program, and waits until it has ended. Returns its status and its
    /// lines of output, without those of its log of requests and states.
    pub(crate) fn end(self) -> (ExitStatus, Vec<String>) {
        self.signal(Signal::TERM);
        self.ended()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends SIGTERM twice to the program and to the processes that it has started.
    pub(crate) fn signal_all_twice(&self) {
        for _ in 0..2 {
            self.signal(Signal::TERM);
            for process in processes(self.child.id()) {
                kill_process(process, Signal::TERM).unwrap();
            }
        }
    }

    /// Waits until the program has ended. Returns the same as [`end`](Self::end).
    pub(crate) fn ended(self) -> (ExitStatus, Vec<String>) {
        let (status, mut said) = self.ended_with_log();
        said.retain(|line| !line.contains(LOG));
        (status, said)
    }

    /// Waits until the program has ended. Returns its status and all lines of output.
    fn ended_with_log(mut self) -> (ExitStatus, Vec<String>) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LONG, "it never ends");
            thread::sleep(Duration::from_millis(5));
        };
        // Up to the end of its output.
        let lines = self.lines.lock().unwrap();
        let said = std::iter::from_fn(|| lines.recv_timeout(LONG).ok()).collect();
        drop(lines);
        (status, said)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It has ended, but for a failed test.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Returns the id of process `index` of the job that the process `launcher` has started.
pub(crate) fn process_of(launcher: u32, index: usize) -> Option<Pid> {
    let children = format!("/proc/{launcher}/task/{launcher}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let mut children = children.split_whitespace();
    let is_it = |child: &&str| {
        let variables = std::fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
        let expected = format!("MPMD_RANK={index}");
        variables
            .split(|byte| *byte == 0)
            .any(|variable| variable == expected.as_bytes())
    };
    children
        .find(is_it)
        .and_then(|child| Pid::from_raw(child.parse().ok()?))
}

/// Returns the ids of the processes that the process `launcher` has started.
pub(crate) fn processes(launcher: u32) -> Vec<Pid> {
    let children = format!("/proc/{launcher}/task/{launcher}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let children = children
        .split_whitespace()
        .filter_map(|child| child.parse().ok());
    children.filter_map(Pid::from_raw).collect()
}

#[test]
fn program_answers_over_one_and_several_processes() {
    let Expected { prompt, greedy, .. } = expected("qwen3-window");
    for args in [
        &["--stages", "1"][..],
        &[
            "--stages",
            "2",
            "--processes",
            "2",
            "--cache",
            "100KiB",
            "--max-len",
            "200",
        ],
        &[
            "--stages",
            "2",
            "--processes",
            "2",
            "--tensor-parallel",
            "2,1",
            "--dtype",
            "bf16",
        ],
        &["--stages", "2", "--front", "--chunk", "20"],
        &["--stages", "3", "--transport", "inproc"],
    ] {
        let serving = Serving::start("qwen3-window", args);
        assert!(
            serving.said.contains("no chats, only completions: "),
            "{}",
            serving.said
        );
        let ask = json!({
            "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": true,
            "return_token_ids": true,
        });
        let answer = serving.send("POST", "/v1/completions", &ask);
        assert_eq!(answer.status, 200, "{answer:?}");
        let tokens = answer.json()["choices"][0]["token_ids"].clone();
        if args.contains(&"bf16") {
            assert_eq!(tokens.as_array().unwrap().len(), 64);
        } else {
            assert_eq!(tokens, json!(greedy), "{args:?}");
        }
        let metrics = serving.send("GET", "/metrics", &Value::Null).body;
        assert!(
            metrics.contains("mpmd_generated_tokens_total 64"),
            "{metrics}"
        );
        let (status, said) = serving.end();
        assert!(status.success() && said.is_empty(), "{status}: {said:?}");
    }
}

#[test]
fn requests_and_states_have_a_line_in_the_log() {
    for (args, is_logged) in [
        (&["--stages", "2", "--processes", "2"][..], true),
        (&["--no-request-log"][..], false),
    ] {
        let serving = Serving::start("plain", args);
        let ask = json!({ "prompt": "A kernel", "max_tokens": 5, "ignore_eos": true });
        let answer = serving.send("POST", "/v1/completions?key=hidden", &ask);
        let id = answer.json()["id"].as_str().unwrap().to_owned();
        let prompt = answer.json()["usage"]["prompt_tokens"].clone();
        serving.send("GET", "/nowhere", &Value::Null);
        serving.send("GET", "/metrics", &Value::Null);

        serving.signal(Signal::TERM);
        let (status, said) = serving.ended_with_log();
        assert!(status.success(), "{status}: {said:?}");
        let lines: Vec<&str> = said
            .iter()
            .filter_map(|line| Some(line.split_once(LOG)?.1))
            .collect();
        let states = lines.iter().filter(|line| !line.contains("took_ms="));
        assert_eq!(
            states.copied().collect::<Vec<_>>(),
            [
                "ready: requests are taken",
                "draining: no new request is taken, and 0 are answered to their end",
                "drained: the server ends",
            ]
        );

        let requests: Vec<Vec<&str>> = lines
            .iter()
            .filter(|line| line.contains("took_ms="))
            .map(|line| {
                let words = line.split(' ');
                words.filter(|word| !word.contains("_ms=")).collect()
            })
            .collect();
        let reply = format!(
            "POST /v1/completions 200 id={id} prompt_tokens={prompt} new_tokens=5 end=length"
        );
        let expected = match is_logged {
            true => vec![
                reply.split(' ').collect::<Vec<_>>(),
                vec!["GET", "/nowhere", "404"],
            ],
            false => Vec::new(),
        };
        assert_eq!(requests, expected, "{said:?}");
    }
}

#[test]
fn open_requests_end_before_the_program() {
    let two = &["--stages", "2", "--processes", "2"][..];
    for (args, twice) in [(&["--stages", "1"][..], false), (two, false), (two, true)] {
        let serving = Serving::start("plain", args);
        let ask = json!({ "prompt": "A kernel", "max_tokens": 900, "ignore_eos": true });
        let (address, body) = (serving.address, ask.to_string());
        let client = thread::spawn(move || {
            let kind = "Content-Type: application/json\r\n";
            let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n{kind}");
            send(address, &head, body.as_bytes())
        });
        let start = Instant::now();
        loop {
            let metrics = serving.send("GET", "/metrics", &Value::Null).body;
            if metrics.contains("mpmd_requests_running 1") {
                break;
            }
            assert!(start.elapsed() < LONG && !client.is_finished(), "{metrics}");
        }
        match twice {
            true => serving.signal_all_twice(),
            false => serving.signal(Signal::TERM),
        }
        let (status, said) = serving.ended();
        assert!(
            status.success() && said.is_empty(),
            "{args:?}, {twice}: {status}: {said:?}"
        );
        let answer = client.join().unwrap();
        assert_eq!(
            answer.json()["usage"]["completion_tokens"],
            900,
            "{args:?}: {answer:?}"
        );
    }
}

#[test]
fn second_request_to_stop_ends_a_server_well() {
    for args in [
        &["--stages", "1"][..],
        &["--stages", "2", "--processes", "2"],
    ] {
        let serving = Serving::start("plain", &[args, &["--sequences", "1"]].concat());
        let address = serving.address;
        // More than the fastest server computes until the second signal.
        let prompts = ["A kernel"; 4];
        let ask = json!({ "prompt": prompts, "max_tokens": 900, "ignore_eos": true });
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n");
        let clients: Vec<_> = (0..60)
            .map(|_| {
                let (head, body) = (head.clone(), ask.to_string());
                thread::spawn(move || send(address, &head, body.as_bytes()))
            })
            .collect();
        let start = Instant::now();
        let waiting = |metrics: String| {
            let mut lines = metrics.lines();
            let number = lines.find_map(|line| line.strip_prefix("mpmd_requests_waiting "));
            number.unwrap().parse::<usize>().unwrap()
        };
        while waiting(serving.metrics()) < 200 {
            assert!(start.elapsed() < LONG, "{}", serving.metrics());
        }

        serving.signal(Signal::TERM);
        thread::sleep(Duration::from_millis(2_100));
        serving.signal(Signal::TERM);
        let (status, said) = serving.ended();
        assert_eq!(status.code(), Some(0), "{args:?}: {said:?}");
        let answers: Vec<Answer> = clients.into_iter().map(|one| one.join().unwrap()).collect();
        let shut = "the server is shutting down";
        let is_failed = |answer: &&Answer| answer.status == 500 && answer.body.contains(shut);
        assert!(answers.iter().filter(is_failed).count() > 10, "{answers:?}");
        assert!(
            answers.iter().all(|answer| answer.status != 0),
            "{answers:?}"
        );
    }
}

#[test]
fn hang_up_drains_but_for_nohup() {
    let model = path("plain");
    for (ignored, signal) in [("", Signal::HUP), ("trap '' HUP; ", Signal::TERM)] {
        let mut command = Command::new("sh");
        let script = format!("{ignored}exec \"$0\" --port 0 --model \"$1\"");
        command
            .args(["-c", &script, env!("CARGO_BIN_EXE_serve")])
            .arg(&model);
        let serving = Serving::launch(command);
        serving.until_ready();
        if !ignored.is_empty() {
            serving.signal(Signal::HUP);
            thread::sleep(Duration::from_millis(200));
            let ready = serving.send("GET", "/ready", &Value::Null);
            assert_eq!(ready.status, 200, "{ready:?}");
        }
        serving.signal(signal);
        let (status, said) = serving.ended();
        assert!(status.success(), "{ignored}: {status}: {said:?}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_the_start() {
    for (args, expected) in [
        (
            "--max-len 2000",
            "--max-len: expected at most 1024, the positions of the model, found",
        ),
        (
            "--cache 1KiB",
            "--cache: expected at least 1.0 MiB, for one sequence of --max-len 1024",
        ),
        ("--cache 1048576GiB", "--cache: expected at most "),
        (
            "--host 0.0.0.0",
            "--host 0.0.0.0: other hosts can connect, so give --api-key-file FILE",
        ),
        (
            "--stages 2 --front --processes 2",
            "--processes: with --front expected 3, one more than stages, found 2",
        ),
        (
            "--stages 2 --front --elastic --processes 4",
            "--processes: with --front expected 3, one more than stages, found 4",
        ),
        (
            "--elastic --control-key-file Cargo.toml --allow-weights /",
            "--allow-weights: a spare has the weights of the start alone, so leave out --elastic",
        ),
        (
            "--control-key-file /dev/null",
            "--control-key-file=/dev/null: it is no regular file",
        ),
        (
            "--control-key-file Cargo.lock --allow-weights none",
            "--control-key-file=Cargo.lock: No such file",
        ),
        (
            "--max-connections 1073741824",
            "raise it (`ulimit -n`), or give fewer connections",
        ),
        ("--stages 9", "error: --stages: "),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serve"));
        let model = path("plain");
        command
            .arg("--model")
            .arg(model)
            .args(["--port", "0"])
            .args(args.split(' '));
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains(expected),
            "{args}: {said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn launched_processes_that_do_not_fit_a_front_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json");
    let coordinator = (variables::COORDINATOR, "127.0.0.1:9");
    let by_hand = |processes| {
        vec![
            (variables::RANK, "0"),
            (variables::WORLD_SIZE, processes),
            coordinator,
        ]
    };
    // The launchers that know spares, `mpmd run` and `mpmd check`, and three that do not.
    let launchers = |processes| {
        let run = [by_hand(processes), vec![(variables::SPARES, "0")]].concat();
        let check = vec![
            (variables::DRY_RUN, plan.to_str().unwrap()),
            (variables::DRY_RUN_PROCESSES, processes),
            (variables::DRY_RUN_PROCESS, "0"),
        ];
        let torchrun = vec![
            ("RANK", "0"),
            ("WORLD_SIZE", processes),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "9"),
        ];
        let open_mpi = vec![
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", processes),
            coordinator,
        ];
        [
            (run, true),
            (check, true),
            (by_hand(processes), false),
            (torchrun, false),
            (open_mpi, false),
        ]
    };
    let refusal = |variables: &[(&str, &str)], more: Option<&str>| {
        let output = Command::new(env!("CARGO_BIN_EXE_serve"))
            .arg("--model")
            .arg(path("plain"))
            .args(["--port", "0", "--stages", "2", "--front"])
            .args(more)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{variables:?}: {said}");
        said
    };

    // One process could hold the devices of all stages, and six could share three devices.
    for found in ["1", "2", "6"] {
        for (variables, knows_spares) in launchers(found) {
            let three = format!(
                "error: --front: expected a job of 3 processes, one more than stages, found \
                 {found}: start 3, by `-n 3` or MPMD_WORLD_SIZE=3\n"
            );
            let four = format!(
                "error: --front: expected a job of 4 processes, one more than stages, and a spare \
                 for --elastic, found {found}: start 4, by `-n 4` or MPMD_WORLD_SIZE=4\n"
            );
            // Before it listens, and before it looks for the other processes.
            assert_eq!(refusal(&variables, None), three);
            let elastic = if knows_spares { three } else { four };
            assert_eq!(refusal(&variables, Some("--elastic")), elastic);
        }
    }
    let said = refusal(&by_hand("3"), Some("--elastic"));
    assert!(said.contains("expected a job of 4 processes"), "{said}");
}

#[test]
fn address_in_use_is_said_before_anything_else() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for args in [
        &["--stages", "1"][..],
        &["--stages", "2", "--processes", "2"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_serve"));
        command.arg("--model").arg(path("plain")).args(args);
        let output = command
            .args(["--port", &address.port().to_string()])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let expected = format!("error: cannot listen on {address}: ");
        assert!(
            !output.status.success() && said.contains(&expected),
            "{said}"
        );
        assert!(
            said.contains("give another --port") && !said.contains("broadcast"),
            "{said}"
        );
    }
}

#[test]
fn server_says_that_it_starts_until_all_processes_have_joined() {
    // Process 0 of two, of which the other one never comes.
    let rendezvous = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_serve"));
    command
        .arg("--model")
        .arg(path("plain"))
        .args(["--stages", "2", "--port", "0"]);
    command.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
    ]);
    command.env("MASTER_PORT", rendezvous.port().to_string());
    let serving = Serving::launch(command);
    assert_eq!(serving.send("GET", "/health", &Value::Null).status, 200);
    let ready = serving.send("GET", "/ready", &Value::Null);
    assert_eq!(
        (ready.status, &ready.json()["status"]),
        (503, &json!("starting"))
    );
    let refused = serving.send("POST", "/v1/completions", &json!({ "prompt": "a" }));
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("5"))
    );
    // It is not caught yet.
    let (status, _) = serving.end();
    assert_eq!(status.signal(), Some(15));
}

#[test]
fn without_a_model_the_demonstration_model_chats() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpmd-demo");
    let files = std::fs::read_dir(&demo).unwrap();
    let bytes: u64 = files
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(
        bytes <= 2 << 20,
        "the demonstration model has {bytes} bytes"
    );
    let ask = json!({
        "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0,
        "max_tokens": 100,
    });
    for args in [&[][..], &["--stages", "2", "--processes", "2"]] {
        let serving = Serving::start_with(args);
        let address = serving.address;
        let expected = format!("Its chat page: http://{address}/");
        let said = serving.said.trim_end();
        assert!(
            said.starts_with("mpmd-demo is a tiny") && said.ends_with(&expected),
            "{said}"
        );
        let models = serving.send("GET", "/v1/models", &Value::Null).json();
        assert_eq!(models["data"][0]["id"], "mpmd-demo");
        let description = models["data"][0]["description"].as_str().unwrap();
        assert!(said.starts_with(description), "{said}");
        assert!(
            serving
                .send("GET", "/", &Value::Null)
                .body
                .contains("id=\"about\"")
        );
        let answer = serving.send("POST", "/v1/chat/completions", &ask).json();
        let reply = &answer["choices"][0];
        let text = reply["message"]["content"].as_str().unwrap();
        assert!(text.starts_with("I am mpmd-demo, a tiny model"), "{answer}");
        assert_eq!(reply["finish_reason"], "stop", "{answer}");
        let (status, said) = serving.end();
        assert!(status.success() && said.is_empty(), "{status}: {said:?}");
    }
}

#[test]
fn stopped_stage_is_seen_also_without_requests() {
    let serving = Serving::start("plain", &["--stages", "2", "--processes", "2"]);
    let stage = process_of(serving.child.id(), 1).expect("the second stage");
    for (signal, status, word) in [(Signal::STOP, 503, "stalled"), (Signal::CONT, 200, "ready")] {
        kill_process(stage, signal).unwrap();
        let start = Instant::now();
        loop {
            let answer = serving.send("GET", "/ready", &Value::Null);
            if answer.status == status {
                assert_eq!(answer.json(), json!({ "status": word }));
                break;
            }
            assert!(start.elapsed() < LONG, "{answer:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
    let (status, said) = serving.end();
    assert!(status.success(), "{status}: {said:?}");
}

#[test]
fn without_a_spare_open_requests_fail_with_the_reason() {
    let serving = Serving::start("plain", &["--stages", "2", "--processes", "2"]);
    let ask = json!({ "prompt": "A", "max_tokens": 900, "ignore_eos": true });
    thread::scope(|scope| {
        let client = scope.spawn(|| serving.send("POST", "/v1/completions", &ask));
        let start = Instant::now();
        while !serving.metrics().contains("mpmd_requests_running 1") {
            assert!(start.elapsed() < LONG, "{}", serving.metrics());
        }
        let stage = process_of(serving.child.id(), 1).expect("the second stage");
        kill_process(stage, Signal::KILL).unwrap();
        let answer = client.join().unwrap();
        assert_eq!(answer.status, 500, "{answer:?}");
        assert!(answer.body.contains("process 1 is lost"), "{answer:?}");
    });
}

/// Opens streamed and whole requests, kills a process of the server's job, and checks that each
/// request is told the loss, and that the server ends with an error. `running` of the requests
/// begin; the others wait.
fn check_loss_is_told(serving: Serving, process: usize, running: usize) {
    let ask = json!({ "prompt": [5, 17, 3], "max_tokens": -1, "ignore_eos": true });
    let mut streamed = ask.clone();
    streamed["stream"] = true.into();
    let why = format!("the server has failed: process {process} is lost");

    thread::scope(|scope| {
        let serving = &serving;
        let open = |ask| scope.spawn(move || serving.send("POST", "/v1/completions", ask));
        let whole = [&ask; 3].map(open);
        let streams = [&streamed; 3].map(open);
        let lines = [
            format!("mpmd_requests_running {running}\n"),
            format!("mpmd_requests_waiting {}\n", 6 - running),
        ];
        let start = Instant::now();
        loop {
            let metrics = serving.metrics();
            if lines.iter().all(|line| metrics.contains(line)) {
                break;
            }
            assert!(start.elapsed() < LONG, "{metrics}");
        }
        let lost = process_of(serving.child.id(), process).expect("it runs");
        kill_process(lost, Signal::KILL).unwrap();

        for answer in whole {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 500, "{answer:?}");
            assert_eq!(answer.json()["error"]["message"], why);
        }
        for answer in streams {
            let last = answer.join().unwrap().chunks().pop().expect("an event");
            assert_eq!(last["error"]["message"], why);
        }
    });
    let (status, said) = serving.ended_with_log();
    assert!(!status.success(), "{said:?}");
    let is_told = |line: &String| line.contains(&format!("{why}; no request is taken"));
    assert!(said.iter().any(is_told), "{said:?}");
    assert!(!said.iter().any(|line| line.contains("drain")), "{said:?}");
}

#[test]
fn all_open_requests_hear_of_the_loss_that_ends_a_server() {
    let args = ["--stages", "2", "--front", "--sequences", "2"];
    check_loss_is_told(Serving::start("plain", &args), 2, 2);
}

#[test]
fn all_open_requests_hear_of_the_loss_that_ends_a_training() {
    let model = path("plain");
    let text = path("text.txt");
    let paths = ["--model", model.to_str().unwrap(), text.to_str().unwrap()];
    let args = [&paths[..], &["--steps", "100000", "--time", "24"]].concat();
    let serving = Serving::start_of(env!("CARGO_BIN_EXE_train_and_serve"), &args, &[]);
    check_loss_is_told(serving, 1, 6);
}

#[test]
fn model_with_dropout_is_served_but_not_trained() {
    let folder = copy("plain");
    change_config(folder.path(), |config| {
        config["attention_dropout"] = json!(0.1)
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_train_and_serve"));
    command
        .arg("--model")
        .arg(folder.path())
        .arg(path("text.txt"))
        .args(["--port", "0"]);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("attention_dropout"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    let serving = Serving::start_with(&["--model", folder.path().to_str().unwrap()]);
    assert!(serving.end().0.success());
}

#[test]
fn server_goes_on_after_a_training_that_is_spoiled() {
    let model = path("plain");
    let text = path("text.txt");
    let paths = ["--model", model.to_str().unwrap(), text.to_str().unwrap()];
    let args = [
        &paths[..],
        &["--steps", "50", "--time", "24", "--lr", "1e38"],
    ]
    .concat();
    let serving = Serving::start_of(env!("CARGO_BIN_EXE_train_and_serve"), &args, &[]);
    let found = "error: the training has ended, and the server goes on: step ";
    let start = Instant::now();
    loop {
        let line = serving.lines.lock().unwrap().recv_timeout(LONG).unwrap();
        if line.starts_with(found) {
            assert!(line.contains("NaN") || line.contains("inf"), "{line}");
            break;
        }
        // The server refuses its weights, and says so, too.
        assert!(start.elapsed() < LONG, "{line}");
    }
    let ask = json!({ "prompt": "A", "max_tokens": 8, "temperature": 0, "ignore_eos": true });
    let answer = serving.send("POST", "/v1/completions", &ask);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 8, "{answer:?}");
    let (status, said) = serving.end();
    assert!(!status.success(), "{status}: {said:?}");
}

#[test]
fn one_program_trains_and_serves() {
    let (model, text) = (path("plain"), path("text.txt"));
    let (model, text) = (model.to_str().unwrap(), text.to_str().unwrap());
    let args = [
        "--model",
        model,
        text,
        "--steps",
        "6",
        "--time",
        "24",
        "--tensor-parallel",
        "2",
    ];
    let serving = Serving::start_of(env!("CARGO_BIN_EXE_train_and_serve"), &args, &[]);
    let Expected { prompt, .. } = expected("plain");
    let ask = json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true });
    let start = Instant::now();
    loop {
        let answer = serving.send("POST", "/v1/completions", &ask).json();
        assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer}");
        if answer["weight_version"] == "6" {
            break;
        }
        assert!(start.elapsed() < LONG, "{answer}");
    }
    let info = serving.send("GET", "/weight_info", &Value::Null).json();
    assert_eq!(
        (&info["failure"], &info["publisher"]),
        (&Value::Null, &json!("linked")),
        "{info}"
    );
    let (status, said) = serving.end();
    assert!(
        status.success() && said.iter().any(|line| line.starts_with("step 6: loss")),
        "{said:?}"
    );
}

#[test]
fn limits_of_the_guide_are_the_defaults() {
    let limits = GUIDE.split("\n## Limits\n").nth(1).unwrap();
    let rows = limits
        .lines()
        .filter_map(|line| line.strip_prefix("| `--")?.split_once("` | "));
    let output = Command::new(env!("CARGO_BIN_EXE_serve"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let mut count = 0;
    for (name, rest) in rows {
        let default = rest.split(" |").next().unwrap();
        let option = help.split(&format!("--{name} ")).nth(1).unwrap();
        let option = option.split("\n      --").next().unwrap();
        let is_said = option.contains(&format!("[default: {default}]"));
        assert!(
            is_said || name == "max-tokens",
            "{name}: {default}, not {option}"
        );
        count += 1;
    }
    assert_eq!(count, 6);
}

#[test]
fn folders_of_weights_need_a_key_to_load_them() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serve"));
    let output = command.args(["--allow-weights", "/"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("--control-key-file"),
        "{said}"
    );
}
