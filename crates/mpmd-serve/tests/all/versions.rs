//! Pauses and new versions of the weights on the engine itself.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use mpmd::ProcessId;
use mpmd::testing::Simulation;
use mpmd_models::{Folder, PromptEncoder, Room, Sampling, Stages, WeightVersions};
use mpmd_serve::{
    Engine, Front, FrontSettings, Model, ReplyEvent, RequestQueue, SchedulerSizes, TextRequest,
    queue, run,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{Answer, LONG, send};
use crate::control::key_file;
use crate::folder::{copied, path, with_low_lines, with_nan};
use crate::server::settings;

const SIZES: SchedulerSizes = SchedulerSizes {
    lanes: 2,
    sequences: 4,
    blocks: 200,
    chunk: 24,
    positions: 800,
};

/// A server of a model over two processes, with its HTTP front.
struct Live {
    address: SocketAddr,
    queue: RequestQueue,
    versions: WeightVersions,
    front: Option<Front>,
    job: Option<JoinHandle<()>>,
}

impl Live {
    fn start(grace: Duration) -> Self {
        Self::start_with(grace, Vec::new(), &path("plain"))
    }

    /// Starts a server that shows clients the tokenizer of the folder `shown`.
    fn start_with(grace: Duration, weight_folders: Vec<PathBuf>, shown: &Path) -> Self {
        let key = key_file("control");
        let control_key_file = Some(key.path().to_owned());
        let settings = FrontSettings {
            control_key_file,
            weight_folders,
            ..settings()
        };
        let folder = Folder::open(path("plain")).unwrap();
        let shown = Folder::open(shown).unwrap();
        let prompts = PromptEncoder::of(&shown).unwrap();
        let model = Model::of(&shown, prompts, None, SIZES.positions).unwrap();
        let (queue, arrivals) = queue(settings.waiting);
        let front = Front::start(&settings, model, queue.clone()).unwrap();
        let engine = Mutex::new(Some(Engine::new(SIZES, arrivals).grace(grace)));
        let (to, versions) = mpsc::channel();
        let job = spawn(move || {
            let model = Stages::new(&folder, SIZES.lanes, SIZES.positions).unwrap();
            let results = Simulation::new(SIZES.lanes, SIZES.lanes).run(|p| {
                let meshes = model.meshes(|stage| stage)?;
                let room = Room {
                    blocks: SIZES.blocks,
                    sequences: SIZES.sequences,
                };
                let mut inference = model.inference(p, &meshes, room, false)?;
                // Those that the tests announce have the same weights.
                for version in [1, 3] {
                    inference.read_weights(p, &path("plain"), version)?;
                }
                let own = || engine.lock().unwrap().take();
                let mut own = (p.process() == ProcessId(0)).then(own).flatten();
                if own.is_some() {
                    to.send(inference.versions().clone()).unwrap();
                }
                run(p, &mut inference, SIZES.lanes, own.as_mut())
            });
            results.into_iter().for_each(|result| result.unwrap());
        });
        let versions = versions.recv_timeout(LONG).unwrap();
        let (address, front, job) = (front.address(), Some(front), Some(job));
        let live = Self {
            address,
            queue,
            versions,
            front,
            job,
        };
        live.until("requests are taken", || {
            live.get("/ready")["status"] == "ready"
        });
        live
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < LONG, "{what}: {}", self.queue.metrics());
            sleep(Duration::from_millis(2));
        }
    }

    fn get(&self, path: &str) -> Value {
        send(
            self.address,
            &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n"),
            b"",
        )
        .json()
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        post(self.address, path, body)
    }

    /// Requests `count` tokens on another thread.
    fn ask(&self, first: usize, count: usize) -> JoinHandle<Value> {
        let (address, body) = (self.address, body(first, count));
        let before = self.queue.open();
        let client = spawn(move || post(address, "/v1/completions", &body).json());
        self.until("the request is taken", || self.queue.open() > before);
        client
    }

    /// Returns the number of requests that are being answered, from the metrics.
    fn running(&self) -> usize {
        let metrics = self.queue.metrics();
        let count = metrics
            .lines()
            .find_map(|line| line.strip_prefix("mpmd_requests_running "));
        count.unwrap().parse().unwrap()
    }

    /// Returns the number of tokens sent to clients, from the metrics.
    fn generated(&self) -> usize {
        let metrics = self.queue.metrics();
        let name = "mpmd_generated_tokens_total ";
        metrics
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .parse()
            .unwrap()
    }

    /// Waits until clients have got more than five further tokens.
    fn until_some_tokens(&self) {
        let before = self.generated();
        self.until("tokens", || self.generated() > before + 5);
    }

    fn end(mut self) {
        self.front.take().unwrap().drain();
        self.job.take().unwrap().join().unwrap();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // A failed test must end the job, too.
        self.queue.drain();
    }
}

fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    let key = "Authorization: Bearer control\r\n";
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}");
    send(address, &head, body.to_string().as_bytes())
}

fn body(first: usize, count: usize) -> Value {
    json!({ "prompt": [first, 17, 3], "max_tokens": count, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true })
}

fn tokens(reply: &Value) -> Vec<u64> {
    let tokens = reply["choices"][0]["token_ids"]
        .as_array()
        .unwrap_or_else(|| panic!("{reply}"));
    tokens.iter().map(|token| token.as_u64().unwrap()).collect()
}

fn finish(reply: &Value) -> &str {
    reply["choices"][0]["finish_reason"]
        .as_str()
        .unwrap_or_else(|| panic!("{reply}"))
}

const NEVER: Duration = Duration::from_secs(1 << 20);

#[test]
fn requests_go_on_after_a_pause_that_keeps_them() {
    let live = Live::start(NEVER);
    let undisturbed = tokens(&live.post("/v1/completions", &body(5, 600)).json());
    let client = live.ask(5, 600);
    live.until_some_tokens();
    let paused = live.post("/pause?mode=keep", &json!({}));
    assert_eq!(
        (paused.status, paused.json()),
        (200, json!({ "status": "paused" }))
    );
    assert_eq!(live.get("/is_paused"), json!({ "is_paused": true }));
    let before = live.generated();
    let later = live.ask(6, 5);
    sleep(Duration::from_millis(200));
    assert_eq!(live.generated(), before, "nothing is computed");
    assert!(live.queue.metrics().contains("mpmd_requests_waiting 1"));
    assert_eq!(
        live.post("/resume", &json!({})).json(),
        json!({ "status": "resumed" })
    );
    assert_eq!(live.get("/is_paused"), json!({ "is_paused": false }));
    assert_eq!(tokens(&client.join().unwrap()), undisturbed);
    assert_eq!(tokens(&later.join().unwrap()).len(), 5);
    live.end();
}

#[test]
fn pause_waits_for_requests_that_have_begun() {
    let live = Live::start(NEVER);
    let client = live.ask(5, 700);
    live.until_some_tokens();
    let address = live.address;
    let pause = spawn(move || post(address, "/pause", &json!({ "mode": "wait" })).status);
    // Whatever comes before the pause, comes first.
    sleep(Duration::from_millis(20));
    let later = live.ask(6, 5);
    assert_eq!((pause.join().unwrap(), live.running()), (200, 0));
    assert_eq!(tokens(&client.join().unwrap()).len(), 700);
    assert_eq!(live.get("/is_paused"), json!({ "is_paused": true }));
    assert!(live.queue.open() == 1 || tokens(&later.join().unwrap()).len() == 5);
    live.end();
}

#[test]
fn pause_that_aborts_ends_open_requests_with_what_they_have() {
    let live = Live::start(NEVER);
    let undisturbed = tokens(&live.post("/v1/completions", &body(5, 700)).json());
    // More than have places.
    let clients: Vec<_> = (0..6).map(|_| live.ask(5, 700)).collect();
    live.until("four run", || live.running() == 4);
    let head = "POST /pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer control\r\n";
    assert_eq!(send(live.address, head, b"").status, 200, "the default");
    assert_eq!(live.get("/weight_info")["requests"], 0);
    for reply in clients.into_iter().map(|client| client.join().unwrap()) {
        let tokens = tokens(&reply);
        assert_eq!(
            (finish(&reply), &reply["weight_version"]),
            ("abort", &json!("default"))
        );
        assert!(tokens.len() < 700 && undisturbed.starts_with(&tokens));
    }
    live.until("all have left", || live.queue.open() == 0);
    let later = live.ask(5, 20);
    sleep(Duration::from_millis(100));
    assert!(!later.is_finished());
    live.post("/resume", &json!({}));
    assert_eq!(tokens(&later.join().unwrap()), undisturbed[..20]);
    live.end();
}

#[test]
fn paused_server_drains() {
    for mode in ["keep", "abort", "wait"] {
        let live = Live::start(NEVER);
        let client = (mode == "keep").then(|| live.ask(5, 300));
        if client.is_some() {
            live.until_some_tokens();
        }
        assert_eq!(live.post("/pause", &json!({ "mode": mode })).status, 200);
        let later = live.ask(6, 5);
        live.end();
        for client in client.into_iter().chain([later]) {
            assert_eq!(finish(&client.join().unwrap()), "length", "{mode}");
        }
    }
}

#[test]
fn requests_keep_the_version_with_which_they_began() {
    let live = Live::start(NEVER);
    live.until("there is room", || live.versions.has_room());
    let first = live.ask(5, 700);
    live.until_some_tokens();
    live.versions.arrive(1);
    live.until("it has begun", || live.get("/weight_info")["version"] == 1);
    assert!(!live.versions.has_room());
    let second = live.ask(6, 700);
    live.until("it runs", || live.get("/weight_info")["requests"] == 1);
    let info = live.get("/weight_info");
    let old = json!({ "version": 0, "weight_version": "default", "requests": 1 });
    assert_eq!(
        (&info["weight_version"], &info["old"]),
        (&json!("1"), &old),
        "{info}"
    );
    live.post(
        "/update_weight_version",
        &json!({ "weight_version": "step-9" }),
    );
    let third = live.post("/v1/completions", &body(7, 3)).json();
    let replies = [first.join().unwrap(), second.join().unwrap(), third];
    let versions = replies
        .each_ref()
        .map(|reply| reply["weight_version"].as_str().unwrap());
    assert_eq!(versions, ["default", "1", "step-9"]);
    assert!(
        replies
            .iter()
            .all(|reply| reply.get("weight_versions").is_none())
    );
    live.until("the older one has retired", || live.versions.has_room());
    assert_eq!(live.get("/weight_info")["old"], Value::Null);
    let metrics = live.queue.metrics();
    for line in [
        "weight_version 1",
        "weight_versions_total 1",
        "upgraded_requests_total 0",
    ] {
        assert!(
            metrics.contains(&format!("mpmd_{line}\n")),
            "{line} in {metrics}"
        );
    }
    live.end();
}

#[test]
fn requests_are_computed_again_when_the_grace_is_over() {
    let shown = with_low_lines("plain");
    let live = Live::start_with(Duration::from_millis(100), Vec::new(), shown.path());
    let undisturbed = live.post("/v1/completions", &body(5, 700)).json();
    let client = live.ask(5, 700);
    live.until_some_tokens();
    live.post("/pause", &json!({ "mode": "keep" }));
    live.versions.arrive(3);
    live.until("the older one has retired", || {
        live.versions.has_room() && live.get("/weight_info")["version"] == 3
    });
    live.post("/resume", &json!({}));
    let reply = client.join().unwrap();
    assert_eq!(
        tokens(&reply),
        tokens(&undisturbed),
        "from its tokens so far"
    );
    let text = |reply: &Value| reply["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(text(&reply), text(&undisturbed));
    let whole = |tokens: &[u64]| {
        let whole = live
            .post("/detokenize", &json!({ "tokens": tokens }))
            .json();
        let whole = whole["prompt"].as_str().unwrap().to_owned();
        whole.replace("<s>", "").replace("</s>", "")
    };
    let prompt = [5, 17, 3];
    let all = [&prompt[..], &tokens(&reply)].concat();
    assert_eq!(whole(&prompt) + &text(&reply), whole(&all));
    assert_eq!(reply["weight_version"], "default");
    assert_eq!(reply["weight_versions"], json!(["default", "3"]));
    let later = live.post("/v1/completions", &body(5, 1)).json();
    assert_eq!(
        (&later["weight_version"], later.get("weight_versions")),
        (&json!("3"), None)
    );
    assert!(
        live.queue
            .metrics()
            .contains("mpmd_upgraded_requests_total 1\n")
    );
    live.end();
}

#[test]
fn idle_server_takes_and_retires_versions() {
    let live = Live::start(NEVER);
    // The last is the largest number.
    for version in [4, 2, (1 << 48) - 1] {
        live.until("there is room", || live.versions.has_room());
        // The source takes the room.
        live.versions.set_room(false);
        live.versions.arrive(version);
        live.until("it is in use alone", || {
            let info = live.get("/weight_info");
            info["version"] == version && info["old"].is_null() && live.versions.has_room()
        });
    }
    assert!(
        live.queue
            .metrics()
            .contains("mpmd_weight_versions_total 3\n")
    );
    live.end();
}

#[test]
fn failed_pass_spares_requests_of_the_other_version() {
    let live = Live::start(NEVER);
    let undisturbed = tokens(&live.post("/v1/completions", &body(5, 700)).json());
    let first = live.ask(5, 700);
    live.until_some_tokens();
    // Its weights are nowhere, so its passes fail.
    live.versions.arrive(9);
    live.until("it has begun", || live.get("/weight_info")["version"] == 9);
    let (prompt, sampling, ends) = (vec![1], Sampling::default(), Vec::new());
    let request = TextRequest {
        prompt,
        max_tokens: 4,
        sampling,
        ends,
        logprobs: None,
    };
    let mut wrong = live.queue.submit(request).unwrap();
    assert!(matches!(
        block_on(wrong.next()),
        Some(ReplyEvent::Failed(_))
    ));
    drop(wrong);
    let reply = first.join().unwrap();
    assert_eq!(
        (tokens(&reply), &reply["weight_version"]),
        (undisturbed, &json!("default"))
    );
    live.until("the older one has retired", || live.versions.has_room());
    assert!(
        live.queue
            .metrics()
            .contains("mpmd_failed_passes_total 1\n")
    );
    live.end();
}

#[test]
fn weights_that_cannot_be_loaded_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let allowed = folder.path().to_str().unwrap();
    let live = Live::start_with(NEVER, vec![allowed.into()], &path("plain"));
    for _ in 0..2 {
        // It is empty.
        let answer = live.post("/load_weights", &json!({ "path": allowed }));
        assert_eq!(answer.status, 400, "{answer:?}");
        live.until("there is room again", || live.versions.has_room());
    }
    assert_eq!(live.get("/weight_info")["version"], 0);
    assert_eq!(
        tokens(&live.post("/v1/completions", &body(5, 9)).json()).len(),
        9
    );
    live.end();
}

#[test]
fn weights_that_are_not_finite_are_no_version() {
    let folder = with_nan("plain");
    let live = Live::start_with(NEVER, vec![folder.path().to_owned()], &path("plain"));
    let answer = live.post(
        "/load_weights",
        &json!({ "path": folder.path().to_str().unwrap() }),
    );
    assert_eq!(answer.status, 400, "{answer:?}");
    let named = "model.safetensors: model.embed_tokens.weight: expected finite values, found NaN";
    assert!(answer.body.contains(named), "{answer:?}");
    assert_eq!(live.get("/weight_info")["version"], 0);
    live.end();
}

#[test]
fn weights_of_another_model_are_refused_by_key() {
    let other = copied("plain");
    let file = other.path().join("config.json");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replace("10000.0", "5000.0")).unwrap();
    let good = copied("plain");
    let allowed = [&other, &good].map(|folder| folder.path().to_owned());
    let live = Live::start_with(NEVER, allowed.into(), &path("plain"));
    let undisturbed = tokens(&live.post("/v1/completions", &body(5, 9)).json());

    let load = |folder: &TempDir| {
        let path = folder.path().to_str().unwrap();
        live.post("/load_weights", &json!({ "path": path }))
    };
    let expected = "config.json: rope_parameters.rope_theta: expected 10000.0, as in the model in \
                    use, found 5000.0";
    for _ in 0..2 {
        let answer = load(&other);
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(answer.body.contains(expected), "{answer:?}");
        let failure = live.get("/weight_info")["failure"].clone();
        assert!(failure.as_str().unwrap().ends_with(expected), "{failure}");
        let later = tokens(&live.post("/v1/completions", &body(5, 9)).json());
        assert_eq!(later, undisturbed);
    }

    assert_eq!(load(&good).json()["version"], 1);
    assert_eq!(live.get("/weight_info")["failure"], Value::Null);
    live.end();
}

#[test]
fn weights_of_a_folder_become_a_version() {
    let model = copied("plain");
    let other = tempfile::tempdir().unwrap();
    let live = Live::start_with(
        NEVER,
        vec![model.path().to_owned(), other.path().to_owned()],
        &path("plain"),
    );
    let first = live.ask(5, 700);
    live.until_some_tokens();
    let answer = live.post(
        "/load_weights",
        &json!({ "path": model.path().to_str().unwrap() }),
    );
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(live.get("/weight_info")["version"], 1);
    let second = live.post("/v1/completions", &body(5, 700)).json();
    let first = first.join().unwrap();
    assert_eq!(tokens(&first), tokens(&second), "the files are the same");
    assert_eq!(
        (&first["weight_version"], &second["weight_version"]),
        (&json!("default"), &json!("1"))
    );
    live.until("the older one has retired", || live.versions.has_room());
    // It has no model.
    let answer = live.post(
        "/load_weights",
        &json!({ "path": other.path().to_str().unwrap() }),
    );
    assert_eq!(answer.status, 400, "{answer:?}");
    live.end();
}
