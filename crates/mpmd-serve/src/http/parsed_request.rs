//! Reads a request from its JSON.

use std::fmt::Display;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use axum::http::StatusCode;
use mpmd_models::{ChatMessage, InvalidSetting, Sampling};
use serde_json::{Map, Value};

use super::failure::HttpFailure;
use super::fields::Fields;
use crate::model::Model;
use crate::request::TextRequest;

/// Largest number of stop texts in a request.
const MOST_STOPS: usize = 16;
/// Largest size of a stop text, in bytes.
const STOP_BYTES: usize = 256;
/// Largest number of stop tokens in a request.
const MOST_STOP_TOKENS: usize = 256;
/// Largest number of most probable tokens that a client can request for each token.
const LOGPROBS: u64 = 20;
/// Default number of new tokens of a completion, as at OpenAI.
const COMPLETION: usize = 16;

/// The form of a request and its reply: a completion or a chat.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReplyForm {
    Completion,
    Chat,
}

/// A request that has been read from JSON, and the form of its reply.
pub(super) struct ParsedRequest {
    pub(super) form: ReplyForm,
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
    /// Reads a request from a JSON body. `most` is the largest number of new tokens that the server
    /// allows.
    pub(super) fn of(
        body: &[u8],
        form: ReplyForm,
        model: &Model,
        most: Option<usize>,
    ) -> Result<Self, HttpFailure> {
        let mut fields = Fields::of(body)?;
        check_model(&mut fields, model)?;
        let sampling = sampling(&mut fields, model)?;
        let streams = fields.flag("stream", false)?;
        let has_usage = usage(&mut fields, streams)?;
        let stops = stops(&mut fields)?;
        let has_ids = fields.flag("return_token_ids", false)?;
        let mut ends = match fields.flag("ignore_eos", false)? {
            true => Vec::new(),
            false => model.ends.clone(),
        };
        ends.extend(stop_tokens(&mut fields, model.vocab)?);
        let logprobs = match form {
            ReplyForm::Completion => fields.count("logprobs", 0..=LOGPROBS)?,
            ReplyForm::Chat => chat_logprobs(&mut fields)?,
        };
        let limit = TokenLimit::of(&mut fields, form)?;
        let (source, name) = match form {
            ReplyForm::Completion => (text_source(&mut fields)?, "prompt"),
            ReplyForm::Chat => (chat_source(&mut fields)?, "messages"),
        };

        // The costly part comes last.
        fields.end()?;
        let prompt = tokens(&source, name, model, Some(model.positions))?;
        let room = model.positions.saturating_sub(prompt.len());
        if room == 0 {
            let why = format!("{} tokens; {}", prompt.len(), length_limit(model.positions));
            return Err(HttpFailure::field(name, why).code("context_length_exceeded"));
        }
        let most = room.min(most.unwrap_or(usize::MAX));
        limit.check(most, prompt.len(), model.positions)?;

        let own = if form == ReplyForm::Chat {
            most
        } else {
            most.min(COMPLETION)
        };
        let request = TextRequest {
            prompt,
            max_tokens: limit.tokens.unwrap_or(own),
            sampling,
            ends,
            logprobs,
        };
        Ok(Self {
            form,
            request,
            stops,
            streams,
            has_usage,
            has_ids,
        })
    }
}

/// A request's limit on its number of new tokens.
struct TokenLimit {
    tokens: Option<usize>,
    /// The name of the field with the limit.
    field: &'static str,
}

impl TokenLimit {
    /// Removes the limit from the fields. In chats `max_completion_tokens` comes before
    /// `max_tokens`.
    fn of(fields: &mut Fields<'_>, form: ReplyForm) -> Result<Self, HttpFailure> {
        let tokens = fields.count("max_tokens", 1..=u64::MAX)?;
        if form == ReplyForm::Chat
            && let Some(newer) = fields.count("max_completion_tokens", 1..=u64::MAX)?
        {
            return Ok(Self {
                tokens: Some(newer),
                field: "max_completion_tokens",
            });
        }
        Ok(Self {
            tokens,
            field: "max_tokens",
        })
    }

    /// Returns an error if the limit is more than `most`. `given` is the number of tokens in the
    /// prompt.
    fn check(&self, most: usize, given: usize, positions: usize) -> Result<(), HttpFailure> {
        let Some(limit) = self.tokens.filter(|limit| *limit > most) else {
            return Ok(());
        };
        let why = format!(
            "expected at most {most} behind a prompt of {given} tokens, found {limit}; {}",
            length_limit(positions)
        );
        Err(HttpFailure::field(self.field, why).code("context_length_exceeded"))
    }
}

/// Returns what clients are told about the most tokens of a prompt and its reply.
fn length_limit(positions: usize) -> String {
    format!("`max_model_len` of /v1/models is {positions}, replies included")
}

/// Returns an error if a request names another model than `model`.
pub(super) fn check_model(fields: &mut Fields<'_>, model: &Model) -> Result<(), HttpFailure> {
    match fields.text("model")?.filter(|name| *name != model.name) {
        None => Ok(()),
        Some(_) => {
            let why = format!("the model of this server is {:?}", model.name);
            let failure = HttpFailure::field("model", why).code("model_not_found");
            Err(failure.status(StatusCode::NOT_FOUND))
        }
    }
}

fn sampling(fields: &mut Fields<'_>, model: &Model) -> Result<Sampling, HttpFailure> {
    let own = model.sampling;
    // vLLM's clients write all tokens as -1.
    let top_k = fields.take("top_k", "a whole number, -1 or more", |value| {
        match value.as_i64() {
            Some(-1) => Some(0),
            count => usize::try_from(count?).ok(),
        }
    })?;
    let seed = fields.take("seed", "a whole number", |value| {
        value.as_u64().or(value.as_i64().map(i64::cast_unsigned))
    })?;

    let sampling = Sampling {
        temperature: fields.number("temperature", own.temperature)?,
        top_k: top_k.unwrap_or(own.top_k),
        top_p: fields.number("top_p", own.top_p)?,
        min_p: fields.number("min_p", own.min_p)?,
        repetition_penalty: fields.number("repetition_penalty", own.repetition_penalty)?,
        presence_penalty: fields.number("presence_penalty", own.presence_penalty)?,
        frequency_penalty: fields.number("frequency_penalty", own.frequency_penalty)?,
        seed: seed.unwrap_or_else(random),
    };
    let Sampling {
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ..
    } = sampling;

    // Beyond them logits overflow.
    let limits = [
        (
            "repetition_penalty",
            repetition_penalty,
            0.01..=100.0,
            "0.01 to 100",
        ),
        ("presence_penalty", presence_penalty, -2.0..=2.0, "-2 to 2"),
        (
            "frequency_penalty",
            frequency_penalty,
            -2.0..=2.0,
            "-2 to 2",
        ),
    ];
    for (name, found, range, expected) in limits {
        if !range.contains(&found) {
            let why = format!("expected {expected}, found {found}");
            return Err(HttpFailure::field(name, why));
        }
    }

    let invalid = |invalid: InvalidSetting| {
        let InvalidSetting {
            setting,
            expected,
            found,
        } = invalid;
        HttpFailure::field(setting, format!("expected {expected}, found {found}"))
    };
    sampling.check().map(|()| sampling).map_err(invalid)
}

/// Returns a random number that clients cannot predict.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn usage(fields: &mut Fields<'_>, streams: bool) -> Result<bool, HttpFailure> {
    let options = fields.take("stream_options", "an object with include_usage", |value| {
        let options = value.as_object()?;
        let usage = options
            .get("include_usage")
            .map_or(Some(false), Value::as_bool)?;
        options
            .keys()
            .all(|key| key == "include_usage")
            .then_some(usage)
    })?;
    match options {
        Some(_) if !streams => Err(HttpFailure::field(
            "stream_options",
            "only with \"stream\": true",
        )),
        options => Ok(options.unwrap_or(false)),
    }
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, HttpFailure> {
    let expected =
        format!("a text, or {MOST_STOPS} texts at most, each of 1 to {STOP_BYTES} bytes");
    let stops = fields.take("stop", &expected, |value| {
        let one = |value: &Value| value.as_str().map(str::to_owned);
        let stops: Option<Vec<String>> = match value {
            Value::Array(several) => several.iter().map(one).collect(),
            value => Some(vec![one(value)?]),
        };
        let is_valid = |stop: &String| (1..=STOP_BYTES).contains(&stop.len());
        stops.filter(|stops| stops.len() <= MOST_STOPS && stops.iter().all(is_valid))
    })?;
    Ok(stops.unwrap_or_default())
}

/// Removes and reads the tokens that end a reply beside the model's end tokens.
fn stop_tokens(fields: &mut Fields<'_>, vocab: usize) -> Result<Vec<u32>, HttpFailure> {
    let expected = format!("a list of at most {MOST_STOP_TOKENS} tokens below {vocab}");
    let is_valid = |tokens: &Vec<u32>| {
        let mut tokens = tokens.iter();
        tokens.len() <= MOST_STOP_TOKENS && tokens.all(|token| (*token as usize) < vocab)
    };
    let tokens = fields.take("stop_token_ids", &expected, |value| {
        read_tokens(value).filter(is_valid)
    })?;
    Ok(tokens.unwrap_or_default())
}

fn chat_logprobs(fields: &mut Fields<'_>) -> Result<Option<usize>, HttpFailure> {
    let wanted = fields.flag("logprobs", false)?;
    let top = fields.count("top_logprobs", 0..=LOGPROBS)?;
    match top {
        Some(1..) if !wanted => Err(HttpFailure::field(
            "top_logprobs",
            "only with \"logprobs\": true",
        )),
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
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

fn text_source(fields: &mut Fields<'_>) -> Result<PromptSource, HttpFailure> {
    fields
        .take(
            "prompt",
            "a text, a list of tokens, or a list of one of these",
            read_prompt,
        )?
        .ok_or_else(|| HttpFailure::field("prompt", "expected a prompt, found none"))
}

fn read_prompt(value: &Value) -> Option<PromptSource> {
    let value = match value {
        Value::Array(one) if one.len() == 1 && !one[0].is_number() => &one[0],
        value => value,
    };
    match value {
        Value::String(text) => Some(PromptSource::Text {
            text: text.clone(),
            special: true,
        }),
        several => read_tokens(several).map(PromptSource::Tokens),
    }
}

/// Reads a list of tokens from JSON. `None` if an element is not a token number.
pub(super) fn read_tokens(value: &Value) -> Option<Vec<u32>> {
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    value.as_array()?.iter().map(token).collect()
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

    const POSITIONS: usize = 64;

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
            let ask = ParsedRequest::of(body.as_bytes(), ReplyForm::Chat, &model, None).unwrap();
            assert_eq!(model.decoder.text(&ask.request.prompt).unwrap(), expected);
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
                    .any(|body| ParsedRequest::of(body.as_bytes(), form, &model, None).is_ok())
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
            "stop_token_ids",
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
            let Ok(ask) = ParsedRequest::of(body, form, model, Some(40)) else {
                continue;
            };
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
}
