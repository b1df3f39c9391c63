//! From texts and conversations to tokens. This is the only way: all programs use it.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use mpmd::{Error, Result};
use serde_json::Value as Json;
use tokenizers::{Encoding, Tokenizer};

use super::conversation::{Conversation, ConversationFault};
use super::template::{AddedTokens, Day, RenderSettings, RenderedText, TemplateFault, Templates};
use super::tokens::{encode_text, has_more_tokens, tokenizer};
use crate::hub::folder::Folder;

/// The first of the characters that stand for the special tokens of a template.
const STAND_INS: u32 = 0x10_0000;

/// Turns texts and conversations into tokens, with the tokenizer and the chat templates of a
/// folder.
pub struct PromptEncoder {
    tokenizer: Arc<Tokenizer>,
    /// The chat templates, or the reason why there are none.
    templates: Result<Templates, Arc<Error>>,
    added: Option<AddedTokens>,
    /// True if texts of messages that spell a special token are this token.
    parses_special: bool,
    day: Option<Day>,
    /// Variables of the chat template, unless a conversation has others.
    variables: Conversation,
    /// Made for the first text that spells a special token.
    literal: OnceLock<std::result::Result<LiteralTokenizer, String>>,
}

/// A prompt, made from a conversation, that is not yet turned into tokens.
pub struct RenderedPrompt(RenderedText);

/// Error: a conversation gives no prompt.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PromptFault {
    /// The folder has no usable chat template.
    #[error(transparent)]
    NoTemplate(Arc<Error>),
    /// The template gives no text.
    #[error(transparent)]
    Template(Arc<TemplateFault>),
}

impl PromptFault {
    /// Returns the index of the message at fault, if it is one.
    pub fn message(&self) -> Option<usize> {
        match self {
            Self::Template(fault) => match &**fault {
                TemplateFault::Lost { message, .. } => Some(*message),
                _ => None,
            },
            Self::NoTemplate(_) => None,
        }
    }
}

impl PromptEncoder {
    /// Reads the tokenizer and the chat templates of a folder. A folder without templates is no
    /// error.
    ///
    /// # Errors
    ///
    /// If the tokenizer is missing or damaged.
    pub fn of(folder: &Folder) -> Result<Self> {
        let tokenizer = tokenizer(folder)?;
        Ok(Self {
            added: AddedTokens::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            templates: Templates::of(folder).map_err(Arc::new),
            parses_special: false,
            day: None,
            variables: Conversation::default(),
            literal: OnceLock::new(),
        })
    }

    /// Sets whether the text of a message that spells a special token becomes this token. By
    /// default it does not, so a user cannot begin a turn of the system.
    ///
    /// Only text that a reply of the assistant has, and tokens that are not marked as special, are
    /// tokens in any case.
    #[must_use]
    pub fn parse_special(mut self, parses_special: bool) -> Self {
        self.parses_special = parses_special;
        self
    }

    /// Sets the day that templates may tell the model. By default it is the current day in UTC.
    #[must_use]
    pub fn day(mut self, day: Option<Day>) -> Self {
        self.day = day;
        self
    }

    /// Gives chat templates a variable with this value, unless a conversation has another one.
    ///
    /// # Errors
    ///
    /// If the name is one that templates get from the conversation or the tokenizer.
    pub fn variable(mut self, name: &str, value: &Json) -> Result<Self, ConversationFault> {
        self.variables = self.variables.with_variable(name, value)?;
        Ok(self)
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the reason why the folder has no usable chat template, if it has none.
    pub fn template_fault(&self) -> Option<&Error> {
        self.templates.as_ref().err().map(|why| &**why)
    }

    /// Returns the keys of messages that nothing reads, each with the index of its message. They
    /// change no prompt. Empty without a chat template.
    pub fn unread_keys(&self, conversation: &Conversation) -> Vec<(usize, String)> {
        let templates = self.templates.iter();
        let keys = templates.flat_map(|templates| templates.unread_keys(conversation));
        keys.map(|(at, key)| (at, key.to_owned())).collect()
    }

    /// Returns the text of a conversation, after which the model writes its reply. `day` replaces
    /// the day of this encoder.
    ///
    /// # Errors
    ///
    /// If there is no chat template, or it raises an error for these messages, or leaves out a
    /// message that the model must know of.
    pub fn rendered(
        &self,
        conversation: &Conversation,
        day: Option<Day>,
    ) -> Result<RenderedPrompt, PromptFault> {
        let templates = self.templates.as_ref();
        let templates = templates.map_err(|why| PromptFault::NoTemplate(why.clone()))?;
        let text = templates.prompt(conversation, self.settings(day));
        let text = text.map_err(|why| PromptFault::Template(Arc::new(why)))?;
        Ok(RenderedPrompt(text))
    }

    /// Returns the tokens of a rendered conversation.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn tokens(&self, prompt: &RenderedPrompt) -> Result<Vec<u32>> {
        let tokens = self.tokens_of(&prompt.0)?;
        Ok(tokens.into_iter().map(|(token, _)| token).collect())
    }

    /// Turns a text into tokens, as it is. If `special`, the tokenizer adds its special tokens
    /// around the text.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn text_tokens(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = encode_text(&self.tokenizer, text, special)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// True if a text has more than `most` tokens, special ones not counted. Stops soon after that
    /// many tokens of a long text.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn has_more_tokens(&self, text: &str, most: usize) -> Result<bool> {
        has_more_tokens(&self.tokenizer, text, most)
    }

    /// Returns the chat templates.
    pub(super) fn templates(&self) -> Result<&Templates, Arc<Error>> {
        self.templates.as_ref().map_err(Arc::clone)
    }

    /// Returns how conversations become texts.
    pub(super) fn settings(&self, day: Option<Day>) -> RenderSettings<'_> {
        RenderSettings {
            quoted: self.added.as_ref().filter(|_| !self.parses_special),
            day: day.or(self.day).unwrap_or_else(Day::today),
            variables: &self.variables.variables,
        }
    }

    /// Turns a text into tokens, each with its byte range in the text. The tokenizer adds its
    /// special tokens around the text.
    pub(super) fn text_with_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        Ok(places(&encode_text(&self.tokenizer, text, true)?))
    }

    /// Returns the tokens of a text, each with its byte range in the text.
    pub(super) fn tokens_of(&self, text: &RenderedText) -> Result<Vec<(u32, Range<usize>)>> {
        let spells = |added: &&AddedTokens| {
            let mut places = added.find(&text.text).map(|(_, place)| place);
            places.any(|place| text.is_quoted(&place))
        };
        let Some(added) = self.added.as_ref().filter(spells) else {
            return Ok(places(&encode_text(&self.tokenizer, &text.text, false)?));
        };
        let literal = self.literal.get_or_init(|| {
            LiteralTokenizer::new(&self.tokenizer, added).map_err(|why| why.to_string())
        });
        let failed = |why: &String| {
            let why = format!("a message that spells a special token cannot be tokenized: {why}");
            Error::Environment(why)
        };
        literal.as_ref().map_err(failed)?.tokens_of(text, added)
    }
}

impl RenderedPrompt {
    /// Returns the text.
    pub fn text(&self) -> &str {
        &self.0.text
    }
}

impl fmt::Debug for PromptEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PromptEncoder")
            .field("templates", &self.templates.is_ok())
            .field("parses_special", &self.parses_special)
            .finish_non_exhaustive()
    }
}

/// Returns the tokens of an encoding, each with its byte range in the text.
fn places(encoding: &Encoding) -> Vec<(u32, Range<usize>)> {
    let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
    tokens
        .map(|(token, (start, end))| (*token, *start..*end))
        .collect()
}

/// A tokenizer that knows no special token by its text, but by a character for private use.
///
/// All else is as in the tokenizer that it is made from. So texts that spell a special token have
/// the tokens of any other text, and those of the template keep theirs.
struct LiteralTokenizer(Tokenizer);

impl LiteralTokenizer {
    fn new(tokenizer: &Tokenizer, added: &AddedTokens) -> tokenizers::Result<Self> {
        let mut json: Json = serde_json::from_str(&tokenizer.to_string(false)?)?;
        let names = added
            .special()
            .map(|(number, text)| Ok((text, stand_in(number)?.to_string())));
        let names: tokenizers::Result<HashMap<&str, String>> = names.collect();
        rename(&mut json, &names?);
        Ok(Self(Tokenizer::from_bytes(json.to_string())?))
    }

    /// Returns the tokens of a text, each with its byte range in the text.
    fn tokens_of(
        &self,
        text: &RenderedText,
        added: &AddedTokens,
    ) -> Result<Vec<(u32, Range<usize>)>> {
        let failed = |why: tokenizers::Error| Error::Environment(format!("the tokenizer: {why}"));
        let mut renamed = String::with_capacity(text.text.len());
        // Places at which the renamed text and the text part.
        let mut borders = vec![(0, 0)];
        let mut done = 0;
        // As long as the characters that it replaces.
        let plain = |part: &str| part.replace(is_stand_in, "\u{ffffd}");
        for (number, place) in added.find(&text.text) {
            if text.is_quoted(&place) {
                continue;
            }
            renamed += &plain(&text.text[done..place.start]);
            borders.push((renamed.len(), place.start));
            renamed.push(stand_in(number).map_err(failed)?);
            borders.push((renamed.len(), place.end));
            done = place.end;
        }
        renamed += &plain(&text.text[done..]);

        let original = |at: usize| {
            let next = borders.partition_point(|(renamed, _)| *renamed <= at);
            let (renamed, original) = borders[next.saturating_sub(1)];
            original + (at - renamed)
        };
        let tokens = places(&encode_text(&self.0, &renamed, false)?).into_iter();
        Ok(tokens
            .map(|(token, place)| (token, original(place.start)..original(place.end)))
            .collect())
    }
}

/// Returns the character for a special token.
fn stand_in(number: usize) -> tokenizers::Result<char> {
    let code = u32::try_from(number)
        .ok()
        .and_then(|number| STAND_INS.checked_add(number));
    let char = code
        .and_then(char::from_u32)
        .filter(|char| is_stand_in(*char));
    char.ok_or_else(|| "too many special tokens".into())
}

/// True for characters that stand for special tokens.
fn is_stand_in(char: char) -> bool {
    (STAND_INS..=0x10_fffd).contains(&char.into())
}

/// Renames tokens in the JSON of a tokenizer: among the added tokens and in the vocabulary.
fn rename(json: &mut Json, names: &HashMap<&str, String>) {
    let rename_text = |text: &mut Json| {
        if let Some(new) = text.as_str().and_then(|old| names.get(old)) {
            *text = new.as_str().into();
        }
    };
    for token in json["added_tokens"].as_array_mut().into_iter().flatten() {
        rename_text(&mut token["content"]);
    }

    let model = &mut json["model"];
    if let Some(unknown) = model.get_mut("unk_token") {
        rename_text(unknown);
    }
    match &mut model["vocab"] {
        Json::Object(vocab) => {
            for (old, new) in names {
                if let Some(id) = vocab.remove(*old) {
                    vocab.insert(new.clone(), id);
                }
            }
        }
        Json::Array(vocab) => vocab
            .iter_mut()
            .for_each(|piece| rename_text(&mut piece[0])),
        _ => {}
    }
    // A token that merges make cannot be renamed with its parts.
    if let Some(merges) = model.get_mut("merges").and_then(Json::as_array_mut) {
        merges.retain(|merge| {
            let made = match merge {
                Json::String(pair) => pair.replacen(' ', "", 1),
                pair => {
                    let part = |at: usize| pair[at].as_str().unwrap_or_default();
                    format!("{}{}", part(0), part(1))
                }
            };
            !names.contains_key(&*made)
        });
    }
}

#[cfg(test)]
mod tests;
