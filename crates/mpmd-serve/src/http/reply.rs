//! One choice of a reply: its text and its figures, as its tokens come.

use std::sync::Arc;

use mpmd_models::TextStream;
use serde_json::{Map, Value, json};

use super::failure::HttpFailure;
use super::parsed_request::{ParsedRequest, ReplyForm};
use super::request_log::RequestRecord;
use crate::model::Model;
use crate::queue::ReplyStream;
use crate::request::{Finish, ReplyEvent, ReplyToken};

/// The value for the logarithm of probability 0, since JSON has no infinity.
const NEVER: f32 = -9999.0;

/// A choice of a reply while it is computed and sent.
pub(super) struct ReplyProgress {
    model: Arc<Model>,
    pub(super) ask: ParsedRequest,
    /// The events of the reply. `None` once it has ended.
    stream: Option<ReplyStream>,
    record: Arc<RequestRecord>,
    text: TextStream,
    /// Number of tokens in the choice so far.
    pub(super) count: usize,
    /// Number of characters in the texts of the tokens so far, for the field `text_offset`.
    offset: usize,
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
    finish: Option<&'static str>,
}

impl ReplyProgress {
    pub(super) fn new(
        model: Arc<Model>,
        ask: ParsedRequest,
        stream: ReplyStream,
        record: Arc<RequestRecord>,
    ) -> Self {
        let text = TextStream::new(model.tokenizer.clone(), ask.stops.clone());
        Self {
            model,
            ask,
            stream: Some(stream),
            record,
            text,
            count: 0,
            offset: 0,
            versions: Vec::new(),
        }
    }

    /// Waits for the next piece with content for the client. `None` after the last one.
    async fn next(&mut self) -> Option<Result<ReplyPiece, HttpFailure>> {
        let mut piece = ReplyPiece::default();
        let shows_tokens = self.ask.has_ids || self.ask.request.logprobs.is_some();
        while let Some(event) = self.stream.as_mut()?.next().await {
            let added = match event {
                ReplyEvent::Token(token) => {
                    self.count += 1;
                    self.record.token();
                    let is_end = self.ask.request.ends.contains(&token.id);
                    let added = if is_end {
                        Ok("")
                    } else {
                        self.text.push(token.id)
                    };
                    piece.tokens.push(token);
                    added
                }
                ReplyEvent::End(finish) => {
                    let finish = match finish {
                        Finish::Stop => "stop",
                        Finish::Length => "length",
                        Finish::Abort => "abort",
                    };
                    self.end(finish);
                    piece.finish = Some(finish);
                    self.text.end()
                }
                ReplyEvent::Failed(why) => {
                    self.end("failed");
                    return Some(Err(HttpFailure::server(&*why)));
                }
            };

            match added {
                Ok(added) => piece.text += added,
                Err(why) => {
                    self.end("failed");
                    return Some(Err(HttpFailure::internal("the tokens have no text", why)));
                }
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

    /// Removes and returns the event stream of a reply that has ended for the reason `end`, and
    /// keeps its version labels.
    fn end(&mut self, end: &'static str) -> Option<ReplyStream> {
        self.record.end_choice(self.ask.index, end);
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
                finish,
            } = piece?;
            whole.text += &text;
            whole.tokens.extend(tokens);
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
    fn choice(&mut self, piece: &ReplyPiece) -> Value {
        let logprobs = match self
            .ask
            .request
            .logprobs
            .filter(|_| !piece.tokens.is_empty())
        {
            Some(_) if self.ask.form == ReplyForm::Chat => self.chat_logprobs(&piece.tokens),
            Some(_) => self.text_logprobs(&piece.tokens),
            None => Value::Null,
        };
        let mut choice = json!({ "index": self.ask.index, "logprobs": logprobs,
            "finish_reason": piece.finish });
        if self.ask.has_ids {
            choice["token_ids"] = piece.tokens.iter().map(|token| token.id).collect();
        }
        choice
    }

    fn chat_logprobs(&self, tokens: &[ReplyToken]) -> Value {
        let entry = |id: u32, logprob: f32| {
            let text = self.token_text(id);
            let bytes = text.as_bytes();
            json!({ "token": text, "logprob": logprob.max(NEVER), "bytes": bytes })
        };
        let content = tokens.iter().filter_map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            let top = logprobs
                .top
                .iter()
                .map(|(id, logprob)| entry(*id, *logprob));
            let mut content = entry(token.id, logprobs.chosen);
            content["top_logprobs"] = top.collect();
            Some(content)
        });
        json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
    }

    fn text_logprobs(&mut self, tokens: &[ReplyToken]) -> Value {
        let mut texts = Vec::new();
        let mut chosen = Vec::new();
        let mut tops = Vec::new();
        let mut offsets = Vec::new();
        for token in tokens {
            let Some(logprobs) = &token.logprobs else {
                continue;
            };
            let text = self.token_text(token.id);
            offsets.push(self.offset);
            self.offset += text.chars().count();

            let top = logprobs
                .top
                .iter()
                .map(|(id, logprob)| (self.token_text(*id), *logprob));
            let top = top.chain([(text.clone(), logprobs.chosen)]);
            tops.push(
                top.map(|(text, logprob)| (text, logprob.max(NEVER).into()))
                    .collect::<Map<String, Value>>(),
            );
            texts.push(text);
            chosen.push(logprobs.chosen.max(NEVER));
        }
        json!({ "tokens": texts, "token_logprobs": chosen, "top_logprobs": tops,
            "text_offset": offsets })
    }

    fn token_text(&self, id: u32) -> String {
        self.model.decode(&[id]).unwrap_or_default()
    }
}
