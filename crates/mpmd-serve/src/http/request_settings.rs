//! The settings of a request: the choice of tokens, the end of the reply, and its form.

use mpmd_models::{InvalidSetting, Sampling, asks_for_nothing};
use serde_json::Value;

use super::failure::HttpFailure;
use super::fields::{Fields, SHOWN, whole};
use super::parsed_request::{ReplyForm, length_limit, random};
use super::prompt_list::read_tokens;
use crate::model::Model;

/// Largest number of stop texts in a request.
pub(super) const MOST_STOPS: usize = 16;
/// Largest size of a stop text, in bytes.
pub(super) const STOP_BYTES: usize = 256;
/// Largest number of stop tokens in a request.
const MOST_STOP_TOKENS: usize = 256;
/// Largest number of most probable tokens that a client can request for each token.
const LOGPROBS: u64 = 20;
/// Default number of new tokens of a completion, as at OpenAI.
const COMPLETION: usize = 16;

/// A request's limit on its number of new tokens.
pub(super) struct TokenLimit {
    tokens: WantedTokens,
    /// The name of the field with the limit.
    field: &'static str,
}

/// The number of new tokens that a client wants.
#[derive(Clone, Copy)]
enum WantedTokens {
    Default,
    /// As many as have room. Clients write -1.
    All,
    Most(usize),
}

impl TokenLimit {
    /// Removes the limit from the fields. In chats `max_completion_tokens` comes before
    /// `max_tokens`.
    pub(super) fn of(fields: &mut Fields<'_>, form: ReplyForm) -> Result<Self, HttpFailure> {
        let mut limit = Self {
            tokens: WantedTokens::Default,
            field: "max_tokens",
        };
        let names: &[&'static str] = match form {
            ReplyForm::Completion => &["max_tokens"],
            ReplyForm::Chat => &["max_tokens", "max_completion_tokens"],
        };
        for field in names {
            let wanted = fields.take(
                field,
                "a whole number, 1 or more, or -1 for all",
                |value| match whole(value)? {
                    -1 => Some(WantedTokens::All),
                    0 => None,
                    count => usize::try_from(count).ok().map(WantedTokens::Most),
                },
            )?;
            if let Some(tokens) = wanted {
                limit = Self { tokens, field };
            }
        }
        Ok(limit)
    }

    /// Returns the largest number of new tokens. Fails if the request wants more than `space` has.
    pub(super) fn within(&self, space: &TokenSpace, form: ReplyForm) -> Result<usize, HttpFailure> {
        let most = space.room.min(space.option.unwrap_or(usize::MAX));
        match self.tokens {
            WantedTokens::Default if form == ReplyForm::Completion => Ok(most.min(COMPLETION)),
            WantedTokens::Default | WantedTokens::All => Ok(most),
            WantedTokens::Most(limit) if limit <= most => Ok(limit),
            WantedTokens::Most(limit) => Err(space.lacks(self.field, limit)),
        }
    }
}

/// The number of new tokens that a server allows behind a prompt.
pub(super) struct TokenSpace {
    /// Number of tokens in the prompt.
    pub(super) prompt: usize,
    /// Number of tokens that the model takes behind the prompt.
    pub(super) room: usize,
    /// The server's own limit for a reply, `--max-tokens`. `None` without one.
    pub(super) option: Option<usize>,
    /// Largest number of tokens of a prompt and its reply.
    pub(super) positions: usize,
}

impl TokenSpace {
    /// Returns the error for a request that wants `limit` tokens by the field `field`.
    fn lacks(&self, field: &'static str, limit: usize) -> HttpFailure {
        if let Some(most) = self.option.filter(|most| *most <= self.room) {
            let why = format!("this server allows at most {most} new tokens, found {limit}");
            return HttpFailure::field(field, why);
        }
        let why = format!(
            "expected at most {} behind a prompt of {} tokens, found {limit}; {}",
            self.room,
            self.prompt,
            length_limit(self.positions)
        );
        HttpFailure::field(field, why).code("context_length_exceeded")
    }
}

/// The settings for choosing tokens, as a request has them.
pub(super) struct WantedSampling {
    sampling: Sampling,
    has_seed: bool,
}

impl WantedSampling {
    /// Removes the settings from the fields. Without a seed they have a random one.
    pub(super) fn of(fields: &mut Fields<'_>, model: &Model) -> Result<Self, HttpFailure> {
        let own = model.sampling;
        // vLLM's clients write all tokens as -1.
        let top_k = fields.take(
            "top_k",
            "a whole number, -1 or more",
            |value| match whole(value)? {
                -1 => Some(0),
                count => usize::try_from(count).ok(),
            },
        )?;
        let seed = fields.take("seed", "a whole number", |value| {
            let seed = whole(value)?;
            let unsigned = u64::try_from(seed).ok();
            unsigned.or_else(|| i64::try_from(seed).ok().map(i64::cast_unsigned))
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
        check_sampling(&sampling)?;
        Ok(Self {
            sampling,
            has_seed: seed.is_some(),
        })
    }

    /// Returns the settings of the next choice. Choices without a given seed have a random one
    /// each.
    pub(super) fn next(&mut self) -> Sampling {
        let next = self.sampling;
        if !self.has_seed {
            self.sampling.seed = random();
        }
        next
    }
}

/// Returns an error if a setting is out of its range.
fn check_sampling(sampling: &Sampling) -> Result<(), HttpFailure> {
    let Sampling {
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ..
    } = *sampling;

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
    sampling.check().map_err(invalid)
}

/// Removes the options of a stream. Returns true if its last event has the token counts.
pub(super) fn usage(fields: &mut Fields<'_>, streams: bool) -> Result<bool, HttpFailure> {
    const NAME: &str = "stream_options";
    let wrong = |key: &str, why: &str| HttpFailure::field(NAME, format!("{key}: {why}"));
    let options = fields.take(NAME, "an object with include_usage", |value| {
        value.as_object().cloned()
    })?;

    let mut has_usage = false;
    for (key, value) in options.unwrap_or_default() {
        match (key.as_str(), value) {
            ("include_usage", Value::Bool(wanted)) => has_usage = wanted,
            ("include_usage", value) if !value.is_null() => {
                return Err(wrong(&key, "expected true or false"));
            }
            // Padding that hides the length of a token.
            ("include_obfuscation", _) => {}
            (_, value) if asks_for_nothing(&value) => {}
            _ => {
                let key: String = key.chars().take(SHOWN).collect();
                return Err(wrong(&key, "not supported by this server"));
            }
        }
    }
    match has_usage && !streams {
        true => Err(HttpFailure::field(NAME, "only with \"stream\": true")),
        false => Ok(has_usage),
    }
}

/// Removes and returns the stop texts.
pub(super) fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, HttpFailure> {
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
pub(super) fn stop_tokens(fields: &mut Fields<'_>, vocab: usize) -> Result<Vec<u32>, HttpFailure> {
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

/// Removes the wish for log probabilities. Returns the number of most probable tokens for each new
/// one. `None` if there is no wish.
pub(super) fn logprobs(
    fields: &mut Fields<'_>,
    form: ReplyForm,
) -> Result<Option<usize>, HttpFailure> {
    if form == ReplyForm::Completion {
        let expected = format!("a whole number from 0 to {LOGPROBS}");
        let count = fields.take("logprobs", &expected, |value| match value {
            Value::Bool(false) => Some(None),
            value => {
                let count = whole(value).and_then(|count| u64::try_from(count).ok());
                count.filter(|count| *count <= LOGPROBS).map(Some)
            }
        })?;
        return Ok(count.flatten().map(|count| count as usize));
    }

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
