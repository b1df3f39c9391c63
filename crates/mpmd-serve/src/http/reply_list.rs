//! The reply to a request, with a choice for each prompt: as one object, or as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use futures::future::try_join_all;
use futures::stream::{BoxStream, SelectAll, Stream as _, poll_fn, select_all, unfold};
use serde_json::{Value, json};

use super::client_key::KeyPermit;
use super::failure::HttpFailure;
use super::parsed_request::{ParsedRequest, ReplyForm, random};
use super::peer_socket::PeerSocket;
use super::reply::{ChoiceChunk, ReplyProgress};
use super::request_log::RequestRecord;
use crate::model::{Model, unix_seconds};
use crate::queue::ReplyStream;

/// Time without an event after which a comment is sent, so that proxies do not close the
/// connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// A reply while its choices are computed and sent. If it is dropped, all of them are cancelled.
pub(super) struct ReplyList {
    head: ReplyHead,
    choices: Vec<ReplyProgress>,
}

/// The facts that all objects of a reply share.
struct ReplyHead {
    id: String,
    created: u64,
    model: Arc<Model>,
    form: ReplyForm,
    /// True if a streamed reply ends with an event that has the token counts.
    has_usage: bool,
    /// Number of tokens of all prompts.
    prompt_tokens: usize,
}

impl ReplyList {
    /// Begins the reply. There must be a stream for each request, and at least one.
    ///
    /// # Errors
    ///
    /// If the tokens of a prompt have no text.
    pub(super) fn new(
        model: &Arc<Model>,
        asks: Vec<ParsedRequest>,
        streams: Vec<ReplyStream>,
        record: &Arc<RequestRecord>,
    ) -> Result<Self, HttpFailure> {
        let form = asks[0].form;
        let prefix = match form {
            ReplyForm::Chat => "chatcmpl",
            ReplyForm::Completion => "cmpl",
        };
        let head = ReplyHead {
            id: format!("{prefix}-{:016x}", random()),
            created: unix_seconds(),
            model: model.clone(),
            form,
            has_usage: asks[0].has_usage,
            prompt_tokens: asks.iter().map(|ask| ask.request.prompt.len()).sum(),
        };
        record.begin_reply(&head.id, head.prompt_tokens, asks.len());
        let choices = asks.into_iter().zip(streams);
        let begin = |(ask, stream)| ReplyProgress::new(model, ask, stream, record.clone());
        Ok(Self {
            head,
            choices: choices.map(begin).collect::<Result<_, _>>()?,
        })
    }

    /// Holds a permit of the client's key for each choice until its end.
    pub(super) fn hold(&mut self, permits: Vec<KeyPermit>) {
        for (choice, permit) in self.choices.iter_mut().zip(permits) {
            choice.hold(permit);
        }
    }

    /// Waits for the whole reply, and returns it as one JSON object.
    pub(super) async fn whole(mut self) -> Result<Response, HttpFailure> {
        let choices = try_join_all(self.choices.iter_mut().map(ReplyProgress::whole)).await?;
        let object = match self.head.form {
            ReplyForm::Chat => "chat.completion",
            ReplyForm::Completion => "text_completion",
        };
        let mut reply = self.head.frame(object, choices);
        if self.head.form == ReplyForm::Chat {
            self.choices[0].add_prompt(&mut reply);
        }

        let mut versions: Vec<Arc<str>> = Vec::new();
        for label in self.choices.iter().flat_map(|choice| &choice.versions) {
            if !versions.contains(label) {
                versions.push(label.clone());
            }
        }
        add_versions(&mut reply, &versions);
        let new_tokens = self.choices.iter().map(|choice| choice.count).sum();
        reply["usage"] = self.head.usage(new_tokens);
        Ok(Json(reply).into_response())
    }

    /// Returns the reply as server-sent events. If the client closes its sending side, a comment is
    /// sent to test whether it has left.
    pub(super) fn events(self, peer: Arc<PeerSocket>) -> Response {
        let stream = ReplyEvents::of(self);
        let mut events = Box::pin(unfold(stream, async |mut stream| {
            let data = stream.next().await?;
            Some((Ok::<_, Infallible>(Sent::default().data(data)), stream))
        }));
        let mut silence = Box::pin(async move { peer.silence().await });
        let mut is_silent = false;
        let events = poll_fn(move |cx| {
            if !is_silent && silence.as_mut().poll(cx).is_ready() {
                is_silent = true;
                return Poll::Ready(Some(Ok(Sent::default().comment(""))));
            }
            events.as_mut().poll_next(cx)
        });

        Sse::new(events)
            .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
            .into_response()
    }
}

impl ReplyHead {
    /// Returns a JSON object with the fields that all objects of a reply have.
    fn frame(&self, object: &str, choices: Vec<Value>) -> Value {
        let Self {
            id, created, model, ..
        } = self;
        let model = &model.name;
        json!({ "id": id, "object": object, "created": created, "model": model,
            "choices": choices })
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.form {
            ReplyForm::Chat => "chat.completion.chunk",
            ReplyForm::Completion => "text_completion",
        };
        let mut chunk = self.frame(object, choices);
        if self.has_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn usage(&self, new_tokens: usize) -> Value {
        json!({ "prompt_tokens": self.prompt_tokens, "completion_tokens": new_tokens,
            "total_tokens": self.prompt_tokens + new_tokens })
    }
}

/// Adds the label of the first weight version that computed a reply. If there were several
/// versions, also adds the list of all labels.
fn add_versions(reply: &mut Value, versions: &[Arc<str>]) {
    let labels = || versions.iter().map(|label| &**label);
    reply["weight_version"] = labels().next().into();
    if versions.len() > 1 {
        reply["weight_versions"] = labels().collect();
    }
}

type ChunkStream = BoxStream<'static, Result<ChoiceChunk, HttpFailure>>;

/// The events of a streamed reply.
struct ReplyEvents {
    head: ReplyHead,
    /// The chunks of all choices, as they come.
    chunks: SelectAll<ChunkStream>,
    /// The first chunk of a chat, with the role of the speaker.
    role: Option<Value>,
    /// Number of new tokens so far.
    new_tokens: usize,
    end: StreamEnd,
}

/// The events that follow the last chunk of a choice, in order.
#[derive(Clone, Copy)]
enum StreamEnd {
    Usage,
    Done,
    Nothing,
}

impl ReplyEvents {
    fn of(reply: ReplyList) -> Self {
        let ReplyList { head, choices } = reply;
        let role = (head.form == ReplyForm::Chat).then(|| {
            let delta = json!({ "role": "assistant", "content": "" });
            let choice = json!({ "index": 0, "delta": delta, "logprobs": null,
                "finish_reason": null });
            let mut chunk = head.chunk(vec![choice]);
            choices[0].add_prompt(&mut chunk);
            chunk
        });
        let chunks = choices.into_iter().map(|choice| {
            let next = async |mut choice: ReplyProgress| Some((choice.chunk().await?, choice));
            unfold(choice, next).boxed()
        });
        let end = match head.has_usage {
            true => StreamEnd::Usage,
            false => StreamEnd::Done,
        };
        Self {
            head,
            chunks: select_all(chunks),
            role,
            new_tokens: 0,
            end,
        }
    }

    /// Waits for the data of the next event. `None` after the last one.
    async fn next(&mut self) -> Option<String> {
        if let Some(role) = self.role.take() {
            return Some(role.to_string());
        }
        if let Some(chunk) = self.chunks.next().await {
            return Some(self.chunk(chunk).to_string());
        }
        match self.end {
            StreamEnd::Usage => {
                self.end = StreamEnd::Done;
                let mut chunk = self.head.chunk(Vec::new());
                chunk["usage"] = self.head.usage(self.new_tokens);
                Some(chunk.to_string())
            }
            StreamEnd::Done => {
                self.end = StreamEnd::Nothing;
                Some("[DONE]".to_owned())
            }
            StreamEnd::Nothing => None,
        }
    }

    /// Returns the data of a choice's chunk. A failure ends the stream and all choices.
    fn chunk(&mut self, chunk: Result<ChoiceChunk, HttpFailure>) -> Value {
        let ChoiceChunk {
            choice,
            tokens,
            versions,
        } = match chunk {
            Ok(chunk) => chunk,
            Err(failure) => {
                self.chunks.clear();
                self.end = StreamEnd::Done;
                return failure.body();
            }
        };
        self.new_tokens += tokens;
        let mut chunk = self.head.chunk(vec![choice]);
        if let Some(versions) = versions {
            add_versions(&mut chunk, &versions);
        }
        chunk
    }
}
