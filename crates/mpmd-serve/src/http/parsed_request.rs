//! Reads a request from its JSON.

use std::fmt::Display;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use axum::http::StatusCode;
use mpmd_models::ChatMessage;
use serde_json::{Map, Value};

use super::failure::HttpFailure;
use super::fields::Fields;
use super::prompt_list::{NamedPrompt, prompts};
use super::request_settings::{TokenLimit, WantedSampling, logprobs, stops, usage};
use crate::model::Model;
use crate::request::TextRequest;

/// The form of a request and its reply: a completion or a chat.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReplyForm {
    Completion,
    Chat,
}

/// The limits of a server on requests.
#[derive(Clone, Copy)]
pub(super) struct RequestLimits {
    /// Largest number of new tokens of a choice. `None` without a limit.
    pub(super) tokens: Option<usize>,
    /// Largest number of requests that wait.
    pub(super) waiting: usize,
}

/// A request for one choice of a reply, and the form of the reply.
pub(super) struct ParsedRequest {
    pub(super) form: ReplyForm,
    /// The place of the choice in the reply: that of its prompt in a list of prompts.
    pub(super) index: usize,
    pub(super) request: TextRequest,
    /// The stop texts. The reply ends before the first one that occurs.
    pub(super) stops: Vec<String>,
    /// True if the reply is streamed as server-sent events.
    pub(super) streams: bool,
    /// True if a streamed reply ends with an event that has the token counts.
    pub(super) has_usage: bool,
    /// True if the reply contains the token numbers of the prompt and of the new text.
    pub(super) has_ids: bool,
}

impl ParsedRequest {
    /// Reads the requests from a JSON body, one for each prompt.
    pub(super) fn of(
        body: &[u8],
        form: ReplyForm,
        model: &Model,
        limits: RequestLimits,
    ) -> Result<Vec<Self>, HttpFailure> {
        let mut fields = Fields::of(body)?;
        check_model(&mut fields, model)?;
        let mut sampling = WantedSampling::of(&mut fields, model)?;
        let streams = fields.flag("stream", false)?;
        let has_usage = usage(&mut fields, streams)?;
        let stops = stops(&mut fields)?;
        let has_ids = fields.flag("return_token_ids", false)?;
        let ends = match fields.flag("ignore_eos", false)? {
            true => Vec::new(),
            false => model.ends.clone(),
        };
        let logprobs = logprobs(&mut fields, form)?;
        let limit = TokenLimit::of(&mut fields, form)?;
        let prompts = match form {
            ReplyForm::Completion => prompts(&mut fields, limits.waiting)?,
            ReplyForm::Chat => vec![NamedPrompt {
                name: "messages".to_owned(),
                source: chat_source(&mut fields)?,
            }],
        };

        // The costly part comes last.
        fields.end()?;
        let choice = |(index, prompt): (usize, NamedPrompt)| {
            let NamedPrompt { name, source } = prompt;
            let prompt = tokens(&source, &name, model, Some(model.positions))?;
            let room = model.positions.saturating_sub(prompt.len());
            if room == 0 {
                let why = format!("{} tokens; {}", prompt.len(), length_limit(model.positions));
                return Err(HttpFailure::field(name, why).code("context_length_exceeded"));
            }
            let most = room.min(limits.tokens.unwrap_or(usize::MAX));
            let request = TextRequest {
                max_tokens: limit.behind(prompt.len(), most, form, model.positions)?,
                prompt,
                sampling: sampling.next(),
                ends: ends.clone(),
                logprobs,
            };
            Ok(Self {
                form,
                index,
                request,
                stops: stops.clone(),
                streams,
                has_usage,
                has_ids,
            })
        };
        prompts.into_iter().enumerate().map(choice).collect()
    }
}

/// Returns what clients are told about the most tokens of a prompt and its reply.
pub(super) fn length_limit(positions: usize) -> String {
    format!("`max_model_len` of /v1/models is {positions}, replies included")
}

/// Returns an error if a request names another model than `model`.
pub(super) fn check_model(fields: &mut Fields<'_>, model: &Model) -> Result<(), HttpFailure> {
    let named = fields.text("model")?.filter(|name| !name.is_empty());
    match named.is_none_or(|name| name == model.name) {
        true => Ok(()),
        false => Err(other_model(model)),
    }
}

/// Returns the error for a request that names another model than `model`.
pub(super) fn other_model(model: &Model) -> HttpFailure {
    let why = format!("the model of this server is {:?}", model.name);
    let failure = HttpFailure::field("model", why).code("model_not_found");
    failure.status(StatusCode::NOT_FOUND)
}

/// Returns a random number that clients cannot predict.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A prompt as it is in the request, before it is turned into tokens.
pub(super) enum PromptSource {
    /// A text. If `special`, the tokenizer adds its special tokens around it.
    Text {
        text: String,
        special: bool,
    },
    Tokens(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

/// Removes and reads the field `messages` of a chat.
pub(super) fn chat_source(fields: &mut Fields<'_>) -> Result<PromptSource, HttpFailure> {
    let list = |value: &Value| value.as_array().filter(|list| !list.is_empty()).cloned();
    let messages = fields
        .take("messages", "a list of messages", list)?
        .ok_or_else(|| HttpFailure::field("messages", "expected a list of messages, found none"))?;

    let mut read = Vec::new();
    for (at, message) in messages.into_iter().enumerate() {
        let Value::Object(message) = message else {
            let why = "expected an object with role and content";
            return Err(HttpFailure::field(format!("messages[{at}]"), why));
        };
        read.push(message_of(at, message)?);
    }

    let ordered = fields.message_keys()?.into_iter().zip(read);
    Ok(PromptSource::Messages(
        ordered
            .map(|(keys, texts)| in_order(&keys, texts))
            .collect(),
    ))
}

/// Returns the role, the content and perhaps the name of the message at index `at`.
fn message_of(at: usize, mut fields: Map<String, Value>) -> Result<MessageTexts, HttpFailure> {
    const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
    let wrong = |field: &str, why: &str| HttpFailure::field(format!("messages[{at}]{field}"), why);
    let role = fields.remove("role").unwrap_or_default();
    let role = role.as_str().filter(|role| ROLES.contains(role));
    let role = role.ok_or_else(|| wrong(".role", &format!("expected one of {ROLES:?}")))?;

    let expected = "expected a text, or a list of objects with type \"text\" and text";
    let content = match fields.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match part["type"].as_str() {
                Some("text") => part["text"].as_str().map(str::to_owned),
                _ => None,
            };
            let texts: Option<Vec<String>> = parts.iter().map(text).collect();
            texts.ok_or_else(|| wrong(".content", expected))?.concat()
        }
        _ => return Err(wrong(".content", expected)),
    };

    let name = fields.remove("name").filter(|name| !name.is_null());
    if let Some((key, _)) = fields.iter().find(|(_, value)| !value.is_null()) {
        let key: String = key.chars().take(60).collect();
        return Err(wrong(&format!(".{key}"), "not supported by this server"));
    }

    let mut texts = vec![("role", role.to_owned()), ("content", content)];
    match name {
        Some(Value::String(name)) => texts.push(("name", name)),
        Some(_) => return Err(wrong(".name", "expected a text")),
        None => {}
    }
    Ok(texts)
}

/// Pairs of a message's key and its text.
type MessageTexts = Vec<(&'static str, String)>;

/// Returns a message with its keys in the order of the request. The order can change the prompt,
/// since a template may write the whole message.
fn in_order(keys: &[String], mut texts: MessageTexts) -> ChatMessage {
    texts.sort_by_key(|(key, _)| keys.iter().position(|found| found == key));
    ChatMessage::new(texts)
}

/// Turns a prompt into tokens. `name` is its request field, for messages. Refuses a text of more
/// than `most` tokens before all of it is turned into tokens.
pub(super) fn tokens(
    source: &PromptSource,
    name: &str,
    model: &Model,
    most: Option<usize>,
) -> Result<Vec<u32>, HttpFailure> {
    let failed = |why: &dyn Display| HttpFailure::field(name, why);
    let encode = |text: &str, special: bool| {
        if let Some(most) = most
            && model.is_beyond(text, most).map_err(|why| failed(&why))?
        {
            let why = format!("more than {most} tokens; {}", length_limit(model.positions));
            return Err(failed(&why).code("context_length_exceeded"));
        }
        model.encode(text, special).map_err(|why| failed(&why))
    };

    let tokens = match source {
        PromptSource::Text { text, special } => encode(text, *special)?,
        PromptSource::Tokens(tokens) => tokens.clone(),
        PromptSource::Messages(messages) => {
            let text = model.rendered(messages).map_err(|why| failed(&why))?;
            encode(&text, false)?
        }
    };

    let vocab = model.vocab;
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(HttpFailure::field(
            name,
            format!("expected tokens below {vocab}, found {token}"),
        ));
    }
    match tokens.is_empty() {
        true => Err(HttpFailure::field(
            name,
            "expected at least one token, found none",
        )),
        false => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use mpmd_models::Folder;
    use serde_json::json;

    use super::*;
    use crate::http::request_settings::{MOST_STOPS, STOP_BYTES};

    const POSITIONS: usize = 64;
    const LIMITS: RequestLimits = RequestLimits {
        tokens: None,
        waiting: 256,
    };

    fn model() -> Model {
        model_with("{% for m in messages %}{{ m.role ~ m.content ~ m.name }}{% endfor %}")
    }

    fn model_with(template: &str) -> Model {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpmd-models/tests/folders/plain");
        let folder = tempfile::tempdir().unwrap();
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ] {
            std::fs::copy(from.join(file), folder.path().join(file)).unwrap();
        }
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        Model::of(&Folder::open(folder.path()).unwrap(), None, POSITIONS).unwrap()
    }

    #[test]
    fn messages_keep_the_order_of_their_keys() {
        let model = model_with("{{ messages | tojson }}");
        for (message, expected) in [
            (
                r#"{"role": "user", "content": "x"}"#,
                r#"[{"role": "user", "content": "x"}]"#,
            ),
            (
                r#"{"content": "x", "role": "user"}"#,
                r#"[{"content": "x", "role": "user"}]"#,
            ),
            (
                r#"{"tool_calls": null, "name": "me", "role": "user",
                    "content": [{"text": "x", "type": "text"}]}"#,
                r#"[{"name": "me", "role": "user", "content": "x"}]"#,
            ),
        ] {
            let body = format!("{{\"messages\": [{message}], \"max_tokens\": 1}}");
            let asks = ParsedRequest::of(body.as_bytes(), ReplyForm::Chat, &model, LIMITS).unwrap();
            assert_eq!(model.decode(&asks[0].request.prompt).unwrap(), expected);
        }
    }

    #[test]
    fn fuzz_requests() {
        let model = model();
        let sampling = "\"temperature\": 0.5, \"top_k\": -1, \"top_p\": 0.9, \"min_p\": 0.1, \
                        \"repetition_penalty\": 1.1, \"presence_penalty\": -1, \
                        \"frequency_penalty\": 2, \"seed\": -5, \"stop\": [\"a\", \"bc\"], \
                        \"stream\": true, \"stream_options\": {\"include_usage\": true}";
        let samples = [
            format!("{{\"prompt\": \"a text\", \"max_tokens\": 9, {sampling}}}"),
            format!("{{\"prompt\": [[5, 60, 319]], \"logprobs\": 5, \"n\": 1, {sampling}}}"),
            format!(
                "{{\"messages\": [{{\"role\": \"system\", \"content\": \"S\"}}, {{\"role\": \
                 \"user\", \"name\": \"me\", \"content\": [{{\"type\": \"text\", \"text\": \
                 \"Hi\"}}]}}], \"logprobs\": true, \"top_logprobs\": 3, \
                 \"max_completion_tokens\": 4, \"user\": \"x\", {sampling}}}"
            ),
        ];
        for form in [ReplyForm::Completion, ReplyForm::Chat] {
            assert!(
                samples
                    .iter()
                    .any(|body| ParsedRequest::of(body.as_bytes(), form, &model, LIMITS).is_ok())
            );
        }
        mpmd_fuzz::bytes("requests", &samples.map(String::into_bytes), |body| {
            check(body, &model)
        });
    }

    #[test]
    fn fuzz_request_fields() {
        let model = model();
        let names = [
            "frequency_penalty",
            "ignore_eos",
            "logprobs",
            "max_completion_tokens",
            "max_tokens",
            "min_p",
            "model",
            "n",
            "presence_penalty",
            "repetition_penalty",
            "return_token_ids",
            "seed",
            "stop",
            "stream",
            "stream_options",
            "temperature",
            "top_k",
            "top_logprobs",
            "top_p",
        ];
        mpmd_fuzz::cases("request-fields", |rng| {
            let mut body = match rng.bool() {
                true => json!({ "prompt": value(rng, 3) }),
                false => {
                    let mut messages = json!([{ "role": "user", "content": value(rng, 2) }]);
                    if rng.bool() {
                        messages[0]["name"] = value(rng, 0);
                    }
                    json!({ "messages": messages })
                }
            };
            for _ in 0..rng.usize(..3) {
                body[names[rng.usize(..names.len())]] = value(rng, 1);
            }
            check(body.to_string().as_bytes(), &model);
        });
    }

    /// Returns a random value with lists and objects up to this depth.
    fn value(rng: &mut mpmd_fuzz::Rng, depth: usize) -> Value {
        let texts = ["", "a", "text", "日本", "\0", "</s>"];
        let text = |rng: &mut mpmd_fuzz::Rng| texts[rng.usize(..texts.len())].to_owned();
        match rng.usize(..if depth > 0 { 9 } else { 6 }) {
            0 => Value::Null,
            1 => rng.bool().into(),
            2 => rng.i64(-2..400).into(),
            3 => mpmd_fuzz::integer(rng).into(),
            4 => [0.0, -0.5, 0.25, 1.5, 1e300, 1e-300][rng.usize(..6)].into(),
            5 => text(rng).repeat(rng.usize(1..30)).into(),
            6 => json!({ "type": "text", "text": text(rng), "include_usage": rng.bool() }),
            7 => (0..rng.usize(..80)).map(|_| rng.u32(..330)).collect(),
            _ => (0..rng.usize(..4)).map(|_| value(rng, depth - 1)).collect(),
        }
    }

    /// Checks that a request is refused or within all bounds.
    fn check(body: &[u8], model: &Model) {
        for form in [ReplyForm::Completion, ReplyForm::Chat] {
            let limits = RequestLimits {
                tokens: Some(40),
                waiting: 3,
            };
            let Ok(asks) = ParsedRequest::of(body, form, model, limits) else {
                continue;
            };
            assert!((1..=3).contains(&asks.len()));
            for (index, ask) in asks.into_iter().enumerate() {
                assert_eq!(ask.index, index);
                check_choice(ask, model);
            }
        }
    }

    fn check_choice(ask: ParsedRequest, model: &Model) {
        let TextRequest {
            prompt,
            max_tokens,
            sampling,
            logprobs,
            ..
        } = ask.request;
        assert!(!prompt.is_empty() && prompt.iter().all(|id| (*id as usize) < model.vocab));
        assert!((1..=40).contains(&max_tokens) && prompt.len() + max_tokens <= POSITIONS);
        assert!(sampling.check().is_ok() && logprobs.unwrap_or(0) <= 20);
        assert!(ask.stops.len() <= MOST_STOPS && ask.streams >= ask.has_usage);
        assert!(
            ask.stops
                .iter()
                .all(|stop| (1..=STOP_BYTES).contains(&stop.len()))
        );
    }
}
