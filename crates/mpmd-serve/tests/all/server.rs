//! A front with an engine that computes nothing.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use mpmd_models::{Folder, PromptEncoder, Sampling};
use mpmd_serve::{
    EngineFigures, Finish, Front, FrontSettings, Logprobs, Model, ReplyEvent, ReplyToken,
    RequestArrival, RequestArrivals, RequestQueue, TextRequest,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::client::{Answer, LONG, send};

/// Number of positions of the model.
pub(crate) const POSITIONS: usize = 200;

/// Returns front settings that listen on any free port.
pub(crate) fn settings() -> FrontSettings {
    FrontSettings {
        port: 0,
        ..FrontSettings::default()
    }
}

/// The actions of the fake engine for a request.
#[derive(Clone)]
pub(crate) enum Act {
    /// Sends these tokens, then the end with this reason.
    Send(Vec<u32>, Finish),
    /// Sends the prompt's tokens back, `max_tokens` of them at most.
    Echo,
    /// Sends these tokens, then nothing until the client has left.
    Stall(Vec<u32>),
    /// Sends a token, then fails the request.
    Fail,
    /// Sends a token, then drops the sender.
    Forget,
    /// Leaves the request in the queue.
    Ignore,
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) queue: RequestQueue,
    arrivals: Arc<RequestArrivals>,
    front: Option<Front>,
    engine: Option<JoinHandle<Vec<TextRequest>>>,
    _folder: TempDir,
}

/// Returns the path of a model folder without a chat template.
pub(crate) fn plain() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpmd-models/tests/folders/plain")
}

impl Server {
    pub(crate) fn echo() -> Self {
        Self::start(|_| Act::Echo)
    }

    pub(crate) fn start(act: fn(&TextRequest) -> Act) -> Self {
        Self::start_with(settings(), act)
    }

    pub(crate) fn start_with(settings: FrontSettings, act: fn(&TextRequest) -> Act) -> Self {
        Self::start_of(&plain(), settings, act)
    }

    /// Starts a server of the model in the folder `from`, with a chat template.
    pub(crate) fn start_of(
        from: &Path,
        settings: FrontSettings,
        act: fn(&TextRequest) -> Act,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ] {
            std::fs::copy(from.join(file), folder.path().join(file)).unwrap();
        }
        let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                        {% if messages[0].role == 'tool' %}{{ raise_exception('no \u{9b}tools') }}\
                        {% endif %}{% if add_generation_prompt %}<assistant>{% endif %}";
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let opened = Folder::open(folder.path()).unwrap();
        let prompts = PromptEncoder::of(&opened).unwrap();
        let model = Model::of(&opened, prompts, Some("toy".to_owned()), POSITIONS).unwrap();
        let (queue, arrivals) = mpmd_serve::queue(settings.waiting);
        let front = Front::start(&settings, model, queue.clone()).unwrap();
        arrivals.open();
        let arrivals = Arc::new(arrivals);
        let own = arrivals.clone();
        let engine = std::thread::spawn(move || {
            let (mut seen, mut held) = (Vec::new(), Vec::new());
            while !arrivals.is_over() {
                arrivals.wait(LONG);
                held.retain(|arrival: &RequestArrival| !arrival.sender.is_gone());
                for arrival in arrivals.take() {
                    seen.push(arrival.request.clone());
                    let act = act(&arrival.request);
                    held.extend(answer(arrival, act));
                }
            }
            seen
        });
        let address = front.address();
        let (front, engine) = (Some(front), Some(engine));
        Self {
            address,
            queue,
            arrivals: own,
            front,
            engine,
            _folder: folder,
        }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        send(
            self.address,
            &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n"),
            b"",
        )
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub(crate) fn post_bytes(&self, path: &str, body: &[u8]) -> Answer {
        send(
            self.address,
            &format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n"),
            body,
        )
    }

    /// Sets the figures that the engine reports.
    pub(crate) fn report(&self, figures: EngineFigures) {
        self.arrivals.report(figures);
    }

    pub(crate) fn front(&self) -> &Front {
        self.front.as_ref().unwrap()
    }

    /// Ends the server. Returns the requests that the engine got.
    pub(crate) fn end(mut self) -> Vec<TextRequest> {
        self.finish()
    }

    fn finish(&mut self) -> Vec<TextRequest> {
        let Some(front) = self.front.take() else {
            return Vec::new();
        };
        front.drain();
        front.drain();
        front.join();
        self.engine.take().unwrap().join().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Answers a request. Returns it if it should stay open.
fn answer(mut arrival: RequestArrival, act: Act) -> Option<RequestArrival> {
    let RequestArrival { request, sender } = &mut arrival;
    let token = |id| {
        let wanted = |top| Logprobs {
            chosen: -0.5,
            top: (0..top as u32)
                .map(|at| (70 + at, -1.0 - at as f32))
                .collect(),
        };
        ReplyEvent::Token(ReplyToken {
            id,
            logprobs: request.logprobs.map(wanted),
        })
    };
    if !matches!(act, Act::Ignore) {
        sender.start();
    }
    match act {
        Act::Send(tokens, finish) => {
            tokens.into_iter().for_each(|id| sender.send(token(id)));
            sender.send(ReplyEvent::End(finish));
        }
        Act::Echo => {
            let tokens = request.prompt.iter().take(request.max_tokens);
            tokens.for_each(|id| sender.send(token(*id)));
            let is_all = request.prompt.len() <= request.max_tokens;
            sender.send(ReplyEvent::End(if is_all {
                Finish::Stop
            } else {
                Finish::Length
            }));
        }
        Act::Stall(tokens) => {
            tokens.into_iter().for_each(|id| sender.send(token(id)));
            return Some(arrival);
        }
        Act::Fail => {
            sender.send(token(70));
            sender.send(ReplyEvent::Failed("process 1 has died".into()));
        }
        Act::Forget => sender.send(token(70)),
        Act::Ignore => return Some(arrival),
    }
    None
}

/// Returns the sampling of requests without settings, with this seed.
pub(crate) fn greedy(seed: u64) -> Sampling {
    Sampling {
        seed,
        ..Sampling::default()
    }
}
