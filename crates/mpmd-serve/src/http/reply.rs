//! One choice of a reply: its text and its figures, as its tokens come.

use std::fmt::Display;
use std::sync::Arc;

use mpmd_models::TextStream;
use serde_json::{Value, json};

use super::client_key::KeyPermit;
use super::failure::HttpFailure;
use super::parsed_request::{ParsedRequest, ReplyForm};
use super::request_log::RequestRecord;
use super::token_logprobs::{TokenLogprobs, chat_logprobs, text_logprobs};
use crate::model::Model;
use crate::queue::ReplyStream;
use crate::request::{Finish, ReplyEvent, ReplyToken};

/// A choice of a reply while it is computed and sent.
pub(super) struct ReplyProgress {
    pub(super) ask: ParsedRequest,
    /// The events of the reply. `None` once it has ended.
    stream: Option<ReplyStream>,
    record: Arc<RequestRecord>,
    /// The permit of the client's key. `None` without keys, and once the choice has ended.
    permit: Option<KeyPermit>,
    text: TextStream,
    /// Number of tokens in the choice so far.
    pub(super) count: usize,
    /// The labels of the weight versions that computed the choice. Empty until it has ended.
    pub(super) versions: Vec<Arc<str>>,
}

/// The entry of `choices` in a chunk of a streamed reply.
pub(super) struct ChoiceChunk {
    pub(super) choice: Value,
    /// Number of tokens in the chunk.
    pub(super) tokens: usize,
    /// The versions that computed the choice. `None` before its last chunk.
    pub(super) versions: Option<Vec<Arc<str>>>,
}

/// A piece of a choice: some tokens and their text.
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
        model: &Model,
        ask: ParsedRequest,
        stream: ReplyStream,
        record: Arc<RequestRecord>,
    ) -> Result<Self, HttpFailure> {
        let decoder = model.decoder.clone();
        let text = TextStream::new(decoder, &ask.request.prompt, ask.stops.clone());
        let text = text.map_err(no_text)?;
        Ok(Self {
            ask,
            stream: Some(stream),
            record,
            permit: None,
            text,
            count: 0,
            versions: Vec::new(),
        })
    }

    /// Holds a permit of the client's key until the choice has ended.
    pub(super) fn hold(&mut self, permit: KeyPermit) {
        self.permit = Some(permit);
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
        if let Some(permit) = &self.permit {
            permit.token();
        }
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
        self.record.end_choice(self.ask.index, end);
        // Before the client knows of the end, and sends its next request.
        self.permit = None;
        let stream = self.stream.take()?;
        self.versions = stream.versions().to_vec();
        Some(stream)
    }

    /// Waits for the whole choice, and returns its entry of `choices`.
    pub(super) async fn whole(&mut self) -> Result<Value, HttpFailure> {
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

        let mut choice = self.choice(&whole);
        let text = whole.text;
        match self.ask.form {
            ReplyForm::Chat => {
                choice["message"] =
                    json!({ "role": "assistant", "content": text, "refusal": null });
            }
            ReplyForm::Completion => {
                choice["text"] = text.into();
                self.add_prompt(&mut choice);
            }
        }
        Ok(choice)
    }

    /// Waits for the next chunk. `None` after the last one.
    pub(super) async fn chunk(&mut self) -> Option<Result<ChoiceChunk, HttpFailure>> {
        let piece = match self.next().await? {
            Ok(piece) => piece,
            Err(failure) => return Some(Err(failure)),
        };
        let tokens = piece.tokens.len();
        let is_first = self.count == tokens;
        let is_last = piece.finish.is_some();

        let mut choice = self.choice(&piece);
        match self.ask.form {
            ReplyForm::Chat if piece.text.is_empty() => choice["delta"] = json!({}),
            ReplyForm::Chat => choice["delta"] = json!({ "content": piece.text }),
            ReplyForm::Completion => {
                choice["text"] = piece.text.into();
                if is_first {
                    self.add_prompt(&mut choice);
                }
            }
        }
        Some(Ok(ChoiceChunk {
            choice,
            tokens,
            versions: is_last.then(|| self.versions.clone()),
        }))
    }

    /// Adds the tokens of the prompt to a reply or a choice, if the client requested them.
    pub(super) fn add_prompt(&self, at: &mut Value) {
        if self.ask.has_ids {
            at["prompt_token_ids"] = self.ask.request.prompt.iter().copied().collect();
        }
    }

    /// Returns the entry of `choices` for a piece, without the text.
    fn choice(&self, piece: &ReplyPiece) -> Value {
        let wanted = self.ask.request.logprobs;
        let logprobs = match wanted.filter(|_| !piece.tokens.is_empty()) {
            Some(_) if self.ask.form == ReplyForm::Chat => chat_logprobs(&piece.logprobs),
            Some(_) => text_logprobs(&piece.logprobs),
            None => Value::Null,
        };
        let mut choice = json!({ "index": self.ask.index, "logprobs": logprobs,
            "finish_reason": piece.finish });
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
