//! The reply to a request: as one object, or as server-sent events.

use std::convert::Infallible;
use std::fmt::Display;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Json;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures::stream::{Stream as _, poll_fn, unfold};
use mpmd_models::TextStream;
use serde_json::{Value, json};

use super::failure::HttpFailure;
use super::parsed_request::{ParsedRequest, ReplyForm, random};
use super::peer_socket::PeerSocket;
use super::request_log::RequestRecord;
use super::token_logprobs::{TokenLogprobs, chat_logprobs, text_logprobs};
use crate::model::{Model, unix_seconds};
use crate::queue::ReplyStream;
use crate::request::{Finish, ReplyEvent, ReplyToken};

/// Time without an event after which a comment is sent, so that proxies do not close the
/// connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// A reply while it is computed and sent.
pub(super) struct ReplyProgress {
    model: Arc<Model>,
    ask: ParsedRequest,
    /// The events of the reply. `None` once it has ended.
    stream: Option<ReplyStream>,
    record: Arc<RequestRecord>,
    text: TextStream,
    /// Number of tokens in the reply so far.
    count: usize,
    id: String,
    created: u64,
    /// The labels of the weight versions that computed the reply. Empty until it has ended.
    versions: Vec<Arc<str>>,
}

/// A piece of a reply: some tokens and their text.
#[derive(Default)]
struct ReplyPiece {
    text: String,
    tokens: Vec<ReplyToken>,
    /// The log probabilities of the tokens, if the client wants them.
    logprobs: Vec<TokenLogprobs>,
    finish: Option<&'static str>,
}

impl ReplyProgress {
    /// Creates a reply to `ask` whose tokens come from `stream`.
    ///
    /// # Errors
    ///
    /// If the prompt's tokens have no text.
    pub(super) fn new(
        model: Arc<Model>,
        ask: ParsedRequest,
        stream: ReplyStream,
        record: Arc<RequestRecord>,
    ) -> Result<Self, HttpFailure> {
        let decoder = model.decoder.clone();
        let text = TextStream::new(decoder, &ask.request.prompt, ask.stops.clone());
        let text = text.map_err(no_text)?;
        let prefix = if ask.form == ReplyForm::Chat {
            "chatcmpl"
        } else {
            "cmpl"
        };
        let id = format!("{prefix}-{:016x}", random());
        record.begin_reply(&id, ask.request.prompt.len());
        Ok(Self {
            model,
            ask,
            stream: Some(stream),
            record,
            text,
            count: 0,
            id,
            created: unix_seconds(),
            versions: Vec::new(),
        })
    }

    /// Waits for the next piece with content for the client. `None` after the last one.
    async fn next(&mut self) -> Option<Result<ReplyPiece, HttpFailure>> {
        let mut piece = ReplyPiece::default();
        let shows_tokens = self.ask.has_ids || self.ask.request.logprobs.is_some();
        while let Some(event) = self.stream.as_mut()?.next().await {
            let added = match event {
                ReplyEvent::Token(token) => self.add_token(token, &mut piece),
                ReplyEvent::End(finish) => {
                    let finish = match finish {
                        Finish::Stop => "stop",
                        Finish::Length => "length",
                        Finish::Abort => "abort",
                    };
                    self.end(finish);
                    piece.finish = Some(finish);
                    self.text.end().map(|rest| piece.text += rest)
                }
                ReplyEvent::Failed(why) => {
                    self.end("failed");
                    return Some(Err(HttpFailure::server(&*why)));
                }
            };

            if let Err(why) = added {
                self.end("failed");
                return Some(Err(no_text(why)));
            }
            if self.text.is_stopped() {
                piece.finish = Some("stop");
                self.end("stop").into_iter().for_each(ReplyStream::stop);
            }
            if piece.finish.is_some() || !piece.text.is_empty() || shows_tokens {
                return Some(Ok(piece));
            }
        }
        None
    }

    /// Adds a token to a piece, with the text that can no longer change. End tokens add no text.
    fn add_token(&mut self, token: ReplyToken, piece: &mut ReplyPiece) -> mpmd::Result<()> {
        self.count += 1;
        self.record.token();
        piece
            .logprobs
            .extend(TokenLogprobs::of(&token, &self.text)?);

        let is_end = self.ask.request.ends.contains(&token.id);
        piece.text += match is_end {
            true => self.text.push_end(token.id),
            false => self.text.push(token.id)?,
        };
        piece.tokens.push(token);
        Ok(())
    }

    /// Removes and returns the event stream of a reply that has ended for the reason `end`, and
    /// keeps its version labels.
    fn end(&mut self, end: &'static str) -> Option<ReplyStream> {
        self.record.end_reply(end);
        let stream = self.stream.take()?;
        self.versions = stream.versions().to_vec();
        Some(stream)
    }

    /// Waits for the whole reply, and returns it as one JSON object.
    pub(super) async fn whole(mut self) -> Result<Response, HttpFailure> {
        let mut whole = ReplyPiece::default();
        while let Some(piece) = self.next().await {
            let ReplyPiece {
                text,
                tokens,
                logprobs,
                finish,
            } = piece?;
            whole.text += &text;
            whole.tokens.extend(tokens);
            whole.logprobs.extend(logprobs);
            whole.finish = finish;
        }

        let is_chat = self.ask.form == ReplyForm::Chat;
        let mut choice = self.choice(&whole);
        let text = whole.text;
        match is_chat {
            true => {
                choice["message"] = json!({ "role": "assistant", "content": text, "refusal": null })
            }
            false => choice["text"] = text.into(),
        }
        let object = if is_chat {
            "chat.completion"
        } else {
            "text_completion"
        };

        let mut reply = self.frame(object, vec![choice]);
        self.add_prompt(&mut reply);
        self.add_versions(&mut reply);
        reply["usage"] = self.usage();
        Ok(Json(reply).into_response())
    }

    /// Returns the reply as server-sent events. If the client closes its sending side, a comment is
    /// sent to test whether it has left.
    pub(super) fn events(self, peer: Arc<PeerSocket>) -> Response {
        let at = if self.ask.form == ReplyForm::Chat {
            ReplyPart::Role
        } else {
            ReplyPart::Piece
        };
        let mut events = Box::pin(unfold((self, at), async |(mut reply, at)| {
            let (data, at) = reply.event(at).await?;
            Some((Ok::<_, Infallible>(Sent::default().data(data)), (reply, at)))
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

    /// Waits for the next event. Returns its data, and the part of the reply that follows it.
    async fn event(&mut self, mut at: ReplyPart) -> Option<(String, ReplyPart)> {
        loop {
            let chunk = match at {
                ReplyPart::Role => {
                    let delta = json!({ "role": "assistant", "content": "" });
                    let choice = json!({ "index": 0, "delta": delta, "logprobs": null,
                        "finish_reason": null });
                    let mut chunk = self.chunk(vec![choice]);
                    self.add_prompt(&mut chunk);
                    (chunk, ReplyPart::Piece)
                }
                ReplyPart::Piece => match self.next().await {
                    Some(Ok(piece)) => (self.piece_chunk(piece), ReplyPart::Piece),
                    Some(Err(failure)) => (failure.body(), ReplyPart::Done),
                    None => {
                        at = if self.ask.has_usage {
                            ReplyPart::Usage
                        } else {
                            ReplyPart::Done
                        };
                        continue;
                    }
                },
                ReplyPart::Usage => {
                    let mut chunk = self.chunk(Vec::new());
                    chunk["usage"] = self.usage();
                    (chunk, ReplyPart::Done)
                }
                ReplyPart::Done => return Some(("[DONE]".to_owned(), ReplyPart::Nothing)),
                ReplyPart::Nothing => return None,
            };
            return Some((chunk.0.to_string(), chunk.1));
        }
    }

    /// Returns the event data of a piece.
    fn piece_chunk(&self, piece: ReplyPiece) -> Value {
        let is_first = self.count == piece.tokens.len();
        let is_last = piece.finish.is_some();
        let mut choice = self.choice(&piece);
        match self.ask.form {
            ReplyForm::Chat if piece.text.is_empty() => choice["delta"] = json!({}),
            ReplyForm::Chat => choice["delta"] = json!({ "content": piece.text }),
            ReplyForm::Completion => choice["text"] = piece.text.into(),
        }

        let mut chunk = self.chunk(vec![choice]);
        if is_first && self.ask.form == ReplyForm::Completion {
            self.add_prompt(&mut chunk);
        }
        if is_last {
            self.add_versions(&mut chunk);
        }
        chunk
    }

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
        let is_chat = self.ask.form == ReplyForm::Chat;
        let object = if is_chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        let mut chunk = self.frame(object, choices);
        if self.ask.has_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// Adds the tokens of the prompt to a reply, if the client requested them. The field is where
    /// vLLM has it.
    fn add_prompt(&self, reply: &mut Value) {
        if self.ask.has_ids {
            let at = match self.ask.form {
                ReplyForm::Chat => reply,
                ReplyForm::Completion => &mut reply["choices"][0],
            };
            at["prompt_token_ids"] = self.ask.request.prompt.iter().copied().collect();
        }
    }

    /// Adds the label of the first weight version that computed the reply. If there were several
    /// versions, also adds the list of all labels.
    fn add_versions(&self, reply: &mut Value) {
        let labels = || self.versions.iter().map(|label| &**label);
        reply["weight_version"] = labels().next().into();
        if self.versions.len() > 1 {
            reply["weight_versions"] = labels().collect();
        }
    }

    fn usage(&self) -> Value {
        let prompt = self.ask.request.prompt.len();
        let count = self.count;
        json!({ "prompt_tokens": prompt, "completion_tokens": count,
            "total_tokens": prompt + count })
    }

    /// Returns the entry of `choices` for a piece, without the text.
    fn choice(&self, piece: &ReplyPiece) -> Value {
        let wanted = self.ask.request.logprobs;
        let logprobs = match wanted.filter(|_| !piece.tokens.is_empty()) {
            Some(_) if self.ask.form == ReplyForm::Chat => chat_logprobs(&piece.logprobs),
            Some(_) => text_logprobs(&piece.logprobs),
            None => Value::Null,
        };
        let mut choice = json!({ "index": 0, "logprobs": logprobs, "finish_reason": piece.finish });
        if self.ask.has_ids {
            choice["token_ids"] = piece.tokens.iter().map(|token| token.id).collect();
        }
        choice
    }
}

/// Returns the failure of a reply whose tokens the tokenizer cannot turn into text.
fn no_text(why: impl Display) -> HttpFailure {
    HttpFailure::internal("the tokens have no text", why)
}

/// The parts of a streamed reply, in order.
enum ReplyPart {
    /// The role of the speaker, at the beginning of a chat.
    Role,
    Piece,
    Usage,
    Done,
    Nothing,
}
