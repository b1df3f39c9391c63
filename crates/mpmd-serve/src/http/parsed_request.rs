//! Reads a request from its JSON.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use axum::http::StatusCode;
use mpmd_models::{Conversation, Day, PromptFault};

use super::failure::HttpFailure;
use super::fields::{Fields, SHOWN};
use super::prompt_list::{NamedPrompt, prompts};
use super::request_settings::{
    TokenLimit, TokenSpace, WantedSampling, logprobs, stop_tokens, stops, usage,
};
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
        let mut ends = match fields.flag("ignore_eos", false)? {
            true => Vec::new(),
            false => model.ends.clone(),
        };
        ends.extend(stop_tokens(&mut fields, model.vocab)?);
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
            let space = TokenSpace {
                prompt: prompt.len(),
                room,
                option: limits.tokens,
                positions: model.positions,
            };
            let request = TextRequest {
                max_tokens: limit.within(&space, form)?,
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
    /// A conversation for the chat template, and the day on which it takes place.
    Chat {
        conversation: Conversation,
        day: Option<Day>,
    },
}

/// Removes and reads the conversation of a chat, and the day that it takes place on.
pub(super) fn chat_source(fields: &mut Fields<'_>) -> Result<PromptSource, HttpFailure> {
    const ROLES: [&str; 6] = [
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
    ];
    let day = fields.take("date", "a day as YYYY-MM-DD", |value| {
        value.as_str()?.parse().ok()
    })?;
    let conversation = fields.conversation()?;
    let mut roles = conversation.roles();
    let unknown = roles.position(|role| !ROLES.contains(&role));
    drop(roles);
    match unknown {
        None => Ok(PromptSource::Chat { conversation, day }),
        Some(at) => {
            let why = format!("expected one of {ROLES:?}");
            Err(HttpFailure::field(format!("messages[{at}].role"), why))
        }
    }
}

/// Returns the tokens of a conversation. Refuses keys of messages that would be passed over.
fn chat_tokens(
    conversation: &Conversation,
    day: Option<Day>,
    model: &Model,
    check: impl Fn(&str) -> Result<(), HttpFailure>,
) -> Result<Vec<u32>, HttpFailure> {
    if let Some((at, key)) = model.prompts.unread_keys(conversation).first() {
        let key: String = key.chars().take(SHOWN).collect();
        let why = "not supported by this server, and the chat template does not read it";
        return Err(HttpFailure::field(format!("messages[{at}].{key}"), why));
    }
    let prompt = model.prompts.rendered(conversation, day).map_err(|why| {
        // The reason names a path of the server, which the log has.
        if let PromptFault::NoTemplate(_) = why {
            let why = "this model has no usable chat template: use /v1/completions";
            return HttpFailure::field("messages", why);
        }
        let message = why.message();
        let field = message.map_or("messages".to_owned(), |at| format!("messages[{at}]"));
        HttpFailure::field(field, why)
    })?;
    check(prompt.text())?;
    let tokens = model.prompts.tokens(&prompt);
    tokens.map_err(|why| HttpFailure::field("messages", why))
}

/// Turns a prompt into tokens. `name` is its request field, for messages. Refuses a text of more
/// than `most` tokens before all of it is turned into tokens.
pub(super) fn tokens(
    source: &PromptSource,
    name: &str,
    model: &Model,
    most: Option<usize>,
) -> Result<Vec<u32>, HttpFailure> {
    let check = |text: &str| {
        let is_beyond = |most| model.is_beyond(text, most);
        let is_beyond = most.map(is_beyond).transpose();
        match is_beyond.map_err(|why| HttpFailure::field(name, why))? {
            Some(true) => {
                let most = most.unwrap_or_default();
                let why = format!("more than {most} tokens; {}", length_limit(model.positions));
                Err(HttpFailure::field(name, why).code("context_length_exceeded"))
            }
            _ => Ok(()),
        }
    };

    let tokens = match source {
        PromptSource::Text { text, special } => {
            check(text)?;
            let tokens = model.prompts.text_tokens(text, *special);
            tokens.map_err(|why| HttpFailure::field(name, why))?
        }
        PromptSource::Tokens(tokens) => tokens.clone(),
        PromptSource::Chat { conversation, day } => chat_tokens(conversation, *day, model, check)?,
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

    use mpmd_models::{Folder, PromptEncoder};
    use serde_json::{Value, json};

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
        model_of(folder.path())
    }

    fn model_of(folder: &Path) -> Model {
        let opened = Folder::open(folder).unwrap();
        let prompts = PromptEncoder::of(&opened).unwrap();
        Model::of(&opened, prompts, None, POSITIONS).unwrap()
    }

    /// Returns the code and the text of the error for a chat.
    fn refusal(model: &Model, limits: RequestLimits, body: &Value) -> (String, String) {
        let body = body.to_string();
        let failed = ParsedRequest::of(body.as_bytes(), ReplyForm::Chat, model, limits);
        let error = failed.err().expect("it is refused").body();
        let text = |key: &str| error["error"][key].as_str().unwrap_or_default().to_owned();
        (text("code"), text("message"))
    }

    #[test]
    fn limit_of_the_server_is_no_limit_of_the_model() {
        let limits = RequestLimits {
            tokens: Some(9),
            ..LIMITS
        };
        let body = |tokens: usize| {
            let messages = json!([{ "role": "user", "content": "x" }]);
            json!({ "messages": messages, "max_tokens": tokens })
        };
        let (code, text) = refusal(&model(), limits, &body(10));
        assert_eq!(code, "");
        assert!(text.contains("at most 9 new tokens, found 10"), "{text}");
        let (code, text) = refusal(&model(), LIMITS, &body(POSITIONS));
        assert_eq!(code, "context_length_exceeded");
        assert!(text.contains("`max_model_len`"), "{text}");
    }

    #[test]
    fn model_without_a_template_names_no_path_of_the_server() {
        let plain = Path::new(env!("CARGO_MANIFEST_DIR"));
        let model = model_of(&plain.join("../mpmd-models/tests/folders/plain"));
        let body = json!({ "messages": [{ "role": "user", "content": "x" }] });
        let (_, text) = refusal(&model, LIMITS, &body);
        assert_eq!(
            text,
            "messages: this model has no usable chat template: use /v1/completions"
        );
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
            assert_eq!(
                model.decoder.text(&asks[0].request.prompt).unwrap(),
                expected
            );
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
