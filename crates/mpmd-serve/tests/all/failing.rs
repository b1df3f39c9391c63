//! A server whose engine ends before the server is drained.

use std::net::TcpStream;

use mpmd::{Error, Failure, FailureKind, ProcessId};
use mpmd_models::{Folder, PromptEncoder};
use mpmd_serve::{
    Engine, Front, Model, RequestArrivals, RequestQueue, SchedulerSizes, ServerPhase,
};
use serde_json::{Value, json};

use crate::client::{Answer, LONG, connect, read, send, write};
use crate::refusals::param;
use crate::server::{plain, settings};

/// A front with an engine that takes no request.
struct Fronted {
    front: Front,
    queue: RequestQueue,
    engine: Engine,
}

impl Fronted {
    fn start() -> Self {
        let folder = Folder::open(plain()).unwrap();
        let prompts = PromptEncoder::of(&folder).unwrap();
        let model = Model::of(&folder, prompts, None, 99).unwrap();
        let (queue, arrivals) = mpmd_serve::queue(settings().waiting);
        let front = Front::start(&settings(), model, queue.clone()).unwrap();
        Self {
            front,
            queue,
            engine: engine(arrivals),
        }
    }

    fn get(&self, path: &str) -> Answer {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n");
        send(self.front.address(), &head, b"")
    }

    /// Opens a request for tokens.
    fn ask(&self, body: &Value) -> TcpStream {
        let mut stream = connect(self.front.address());
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
        write(&mut stream, head, body.to_string().as_bytes());
        stream
    }
}

fn engine(arrivals: RequestArrivals) -> Engine {
    arrivals.open();
    let sizes = SchedulerSizes {
        lanes: 1,
        sequences: 4,
        blocks: 16,
        chunk: 8,
        positions: 64,
    };
    Engine::new(sizes, arrivals)
}

/// Returns the error of a lost process.
fn lost() -> Error {
    let message = "put (operation 3, src/load.rs:70): process 1 is gone";
    Error::Failed(Failure::new(FailureKind::PeerLost, ProcessId(1), 3, message).into())
}

#[test]
fn server_that_has_failed_says_why_until_it_ends() {
    let mut server = Fronted::start();
    let whole = server.ask(&json!({ "prompt": [5, 6] }));
    let streamed = server.ask(&json!({ "prompt": [5, 6], "stream": true }));
    let start = std::time::Instant::now();
    while server.queue.open() < 2 {
        assert!(start.elapsed() < LONG, "two requests");
    }
    assert_eq!(server.get("/health").status, 200);

    server.engine.fail_with(&lost());
    let (_, arrivals) = mpmd_serve::queue(settings().waiting);
    std::mem::replace(&mut server.engine, engine(arrivals)).end();
    let why = "the server has failed: process 1 is lost";
    let whole = read(whole);
    assert_eq!(param(&whole, 500), None);
    assert_eq!(whole.json()["error"]["message"], why);
    assert_eq!(read(streamed).chunks()[0]["error"]["message"], why);

    // The front may live on for a while: it takes nothing and says so.
    assert_eq!(server.queue.phase(), ServerPhase::Failed);
    for path in ["/health", "/ready"] {
        let answer = server.get(path);
        assert_eq!(answer.status, 503, "{answer:?}");
        assert_eq!(answer.json(), json!({ "status": "failed" }));
    }
    let late = read(server.ask(&json!({ "prompt": [5, 6] })));
    assert_eq!(param(&late, 503), None);
    assert_eq!(
        late.json()["error"]["message"],
        "the server has failed, and ends"
    );
    let metrics = server.queue.metrics();
    assert!(metrics.contains("mpmd_requests_rejected_total{reason=\"failed\"} 1\n"));

    // A request to stop changes nothing of that.
    server.queue.drain();
    assert_eq!(server.get("/ready").json(), json!({ "status": "failed" }));
    server.front.drain();
    server.front.join();
}
