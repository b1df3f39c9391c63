//! Examples of prompts and replies, from a file of JSON lines, as tokens.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use mpmd::train::data::Sequence;
use mpmd::train::tensors::{JsonError, read_json};
use mpmd::{Error, Program, Result};

use crate::error::unexpected;
use crate::hub::folder::{Folder, TOKENIZER};
use crate::text::conversation::{Conversation, ConversationFault, KWARGS, pairs};
use crate::text::prompts::PromptEncoder;
use crate::text::template::{RenderedText, TemplateFault, special_tokens};
use crate::text::tokens::{check_rows, spread};

/// Limit on the length of a line, in bytes. The tokenizer needs some 200 times the memory of the
/// line.
const LONGEST_LINE: u64 = 4 << 20;
/// The allowed forms of a line, for messages.
const FORMS: &str = "an object with `messages`, or with `prompt` and `completion`, both texts or \
                     both messages, each with `role` and `content`";

/// Number of tokens at the end of a reply among which an end token is looked for.
const ENDING: usize = 3;

/// The examples made of one line. There are several if its replies cannot share one text.
type Examples = Vec<Sequence>;

/// Calls `make` on process 0, and returns its examples on every process. Every process must call
/// it, and blocks until it has the examples.
///
/// # Errors
///
/// As for [`Tokens::spread`](crate::Tokens::spread).
pub fn spread_examples(
    p: &mut Program,
    make: impl Fn() -> Result<Vec<Examples>>,
) -> Result<Vec<Examples>> {
    // A line is the number of its examples. An example is its length, then twice each token, plus
    // one if it has a loss.
    let words = |sequence: &Sequence| {
        let tokens = sequence
            .iter()
            .map(|(token, has_loss)| token << 1 | u32::from(*has_loss));
        [sequence.len() as u32]
            .into_iter()
            .chain(tokens)
            .collect::<Vec<u32>>()
    };
    let line = |line: &Examples| {
        [line.len() as u32]
            .into_iter()
            .chain(line.iter().flat_map(words))
            .collect::<Vec<u32>>()
    };
    let words: Arc<[u32]> = spread(p, || Ok(make()?.iter().flat_map(line).collect()))?;

    let mut words = words.iter().copied();

    let mut all = Vec::new();
    while let Some(count) = words.next() {
        let mut sequence = || -> Sequence {
            let len = words.next().unwrap_or(0) as usize;
            words
                .by_ref()
                .take(len)
                .map(|word| (word >> 1, word & 1 == 1))
                .collect()
        };
        all.push((0..count).map(|_| sequence()).collect());
    }
    Ok(all)
}

/// Reads the examples of each line of a file. Only tokens of a completion or of an assistant's
/// reply have a loss, as does the end token of a completion. Errors call `time` by the name that it
/// has for the user, `time_name`.
///
/// # Errors
///
/// If the file cannot be read, or has no examples. If a line is in none of the allowed forms, or
/// has more than `time + 1` tokens. If it needs a chat template or an end token that the folder
/// lacks.
pub fn read_examples(
    file: &Path,
    folder: &Folder,
    prompts: &PromptEncoder,
    time: usize,
    time_name: &str,
) -> Result<Vec<Examples>> {
    let failed = |why| unexpected(file, "", "lines of JSON", why);
    let mut lines = BufReader::new(File::open(file).map_err(failed)?);
    let mut reader = ExampleReader {
        file,
        folder,
        prompts,
        end: None,
        unread: BTreeSet::new(),
        number: 0,
    };
    let mut all = Vec::new();
    let mut long = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        reader.number += 1;
        let len = lines
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)
            .map_err(failed)?;
        if len as u64 == LONGEST_LINE {
            return Err(reader.wrong(format!("less than {LONGEST_LINE} bytes"), "more"));
        }

        if len == 0 {
            break;
        }

        // Some editors begin a file with a mark of its encoding.
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line);
        if !line.trim_ascii().is_empty() {
            let line: Value = read_json(line).map_err(|why| reader.no_json(&why))?;

            let examples = reader.examples(&line)?;
            let lengths = examples
                .iter()
                .map(|example| (example.len(), reader.number));
            long.extend(lengths.filter(|(tokens, _)| *tokens > time + 1));
            all.push(examples);
        }
    }

    if let Some((tokens, number)) = long.iter().max() {
        reader.number = *number;
        let expected = format!("at most {} tokens for {time_name} {time}", time + 1);
        let count = long.len();
        let all = all.iter().map(Vec::len).sum::<usize>();
        let found = format!("{tokens}, the longest of {count} (of {all}) that are too long");
        return Err(reader.wrong(expected, found));
    }
    if all.is_empty() {
        return Err(unexpected(file, "", "examples", "none"));
    }
    reader.warn_of_unread_parts();
    reader.warn_of_ends(&all)?;
    Ok(all)
}

/// Turns the lines of a file into examples, with the tokenizer and chat template of a folder.
struct ExampleReader<'a> {
    file: &'a Path,
    folder: &'a Folder,
    prompts: &'a PromptEncoder,
    /// The end token, looked up for the first line that needs it.
    end: Option<u32>,
    /// Keys of messages, roles and tools that the chat template does not name.
    unread: BTreeSet<String>,
    /// Number of the current line, for messages.
    number: usize,
}

impl ExampleReader<'_> {
    fn wrong(&self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        unexpected(self.file, &format!("line {}", self.number), expected, found)
    }

    /// Returns the error for a line that is no JSON. The line's number in the file takes the place
    /// of its own.
    fn no_json(&self, why: &JsonError) -> Error {
        match why {
            JsonError::RepeatedKey { key, column, .. } => self.wrong(
                "each key of an object once",
                format!("{key:?} twice, the second time at column {column}"),
            ),
            JsonError::Invalid(why) => {
                let column = why.column();
                let why = why.to_string();
                let why = why.split(" at line ").next().unwrap_or_default();
                self.wrong(FORMS, format!("no JSON: {why} at column {column}"))
            }
        }
    }

    /// Returns the examples of a line.
    fn examples(&mut self, line: &Value) -> Result<Examples> {
        let get = |key| {
            line.get_attr(key)
                .ok()
                .filter(|value| !value.is_none() && !value.is_undefined())
        };
        if let (Some(prompt), Some(completion)) = (get("prompt"), get("completion")) {
            if get("messages").is_some() {
                return Err(self.wrong(FORMS, "the keys messages and completion"));
            }
            return match (prompt.as_str(), completion.as_str()) {
                (Some(prompt), Some(completion)) => self.completion(prompt, completion),
                (None, None) => {
                    let read = |field, list| self.messages(field, list);
                    let prompt = read("prompt", &prompt)?;
                    let from = prompt.messages.len();
                    let all = prompt.followed_by(read("completion", &completion)?);
                    self.conversation(line, all, from)
                }
                _ => Err(self.wrong(FORMS, "a text and a list")),
            };
        }
        if let (None, Some(messages)) = (get("completion"), get("messages")) {
            let all = self.messages("messages", &messages)?;
            return self.conversation(line, all, 0);
        }

        let found = match pairs(line) {
            Some(pairs) => {
                let keys: Vec<String> = pairs.into_iter().map(|(key, _)| key).collect();
                format!("the keys {}", keys.join(", "))
            }
            None => line.kind().to_string(),
        };
        Err(self.wrong(FORMS, found))
    }

    fn messages(&self, field: &str, list: &Value) -> Result<Conversation> {
        let messages = Conversation::of_messages(field, list);
        messages.map_err(|why| self.at_field(&why))
    }

    /// Returns the error for a value of the line.
    fn at_field(&self, why: &ConversationFault) -> Error {
        let ConversationFault {
            field,
            expected,
            found,
        } = why;
        let at = format!("line {}: {field}", self.number);
        unexpected(self.file, &at, expected, found)
    }

    /// Returns the example of a prompt and a completion, both texts.
    fn completion(&mut self, prompt: &str, completion: &str) -> Result<Examples> {
        let end = self.end()?;
        let text = format!("{prompt}{completion}");
        let tokens = self.prompts.text_with_places(&text);
        let tokens = tokens.map_err(|why| self.wrong("a text", why))?;
        let reply = prompt.len()..text.len();
        let mut tokens = with_losses(tokens, std::slice::from_ref(&reply));
        // Some tokenizers add it themselves.
        tokens.pop_if(|(last, _)| *last == end);
        tokens.push((end, true));
        Ok(vec![self.checked(tokens)?])
    }

    /// Returns the examples of a conversation whose replies from message `from` on have a loss.
    fn conversation(
        &mut self,
        line: &Value,
        conversation: Conversation,
        from: usize,
    ) -> Result<Examples> {
        let get = |key| line.get_attr(key).unwrap_or_default();
        let conversation = conversation
            .with_tools(get("tools"))
            .and_then(|all| all.with_variables(KWARGS, &get(KWARGS)))
            .map_err(|why| self.at_field(&why))?;
        let keys = self.prompts.unread_keys(&conversation);
        let keys = keys
            .into_iter()
            .map(|(_, key)| format!("the key {key} of messages"));
        self.unread.extend(keys);

        let templates = self.prompts.templates();
        let templates = templates.map_err(|why| Error::Environment(why.to_string()))?;
        let texts = templates.texts(&conversation, from, self.prompts.settings(None));
        let texts = texts.map_err(|why| match why {
            TemplateFault::Lost { message, role } => {
                let at = format!("line {}: messages[{message}]", self.number);
                let found = format!("one of the role {role} that it leaves out");
                unexpected(
                    self.file,
                    &at,
                    "a message that the chat template shows",
                    found,
                )
            }
            why => self.wrong("a conversation for the chat template", why),
        })?;
        self.unread.extend(templates.unread_parts(&conversation));
        let tokens = |text: &RenderedText| {
            let tokens = self.prompts.tokens_of(text);
            let tokens = tokens.map_err(|why| self.wrong("a text", why))?;
            self.checked(with_losses(tokens, &text.replies))
        };
        texts.iter().map(tokens).collect()
    }

    /// Returns an example, or an error if it has no token to learn or one that the model lacks.
    fn checked(&self, tokens: Sequence) -> Result<Sequence> {
        let ids = tokens.iter().map(|(id, _)| id);
        check_rows(self.folder, self.prompts.tokenizer(), ids)?;
        match tokens.iter().skip(1).any(|(_, has_loss)| *has_loss) {
            true => Ok(tokens),
            false => Err(self.wrong("tokens of a reply behind the first", "none")),
        }
    }

    /// Logs the parts of conversations that the chat template does not name.
    fn warn_of_unread_parts(&self) {
        if !self.unread.is_empty() {
            let parts: Vec<&str> = self.unread.iter().map(String::as_str).collect();
            let (file, parts) = (self.file.display(), parts.join(", "));
            tracing::warn!("{file}: the chat template does not name {parts}");
        }
    }

    /// Logs a warning if no reply ends with a token that ends a text of the model. A model that
    /// learns such replies would not stop.
    fn warn_of_ends(&self, all: &[Examples]) -> Result<()> {
        let ends = self.folder.end_tokens()?;
        let mut last = all.iter().flatten().filter_map(|example| {
            let reply = example.rsplit(|(_, has_loss)| !has_loss);
            let mut reply = reply.filter(|reply| !reply.is_empty());
            // A line end may stand behind the token that ends a turn.
            let reply = reply.next()?.iter().rev().take(ENDING).map(|(id, _)| *id);
            Some(reply.collect::<Vec<u32>>())
        });
        let first = last.next();
        let ends_text = |reply: &Vec<u32>| reply.iter().any(|id| ends.contains(id));
        if ends.is_empty()
            || first.as_ref().is_none_or(ends_text)
            || last.any(|one| ends_text(&one))
        {
            return Ok(());
        }
        let name = |id: &u32| {
            self.prompts
                .tokenizer()
                .id_to_token(*id)
                .unwrap_or_default()
        };
        let found: Vec<String> = first.iter().flatten().rev().map(name).collect();
        let expected: Vec<String> = ends.iter().map(name).collect();
        let file = self.file.display();
        tracing::warn!(
            "{file}: replies end with {found:?}, and no end token of the model is among them \
             ({expected:?}): the trained model may not stop. To end there, name the token in \
             eos_token_id of generation_config.json"
        );
        Ok(())
    }

    /// Returns the end token of completions: the tokenizer's, or else the first end token of the
    /// model.
    fn end(&mut self) -> Result<u32> {
        if let Some(end) = self.end {
            return Ok(end);
        }

        let special = special_tokens(self.folder)?;
        let end = match special.get("eos_token") {
            Some(token) => self.prompts.tokenizer().token_to_id(token).ok_or_else(|| {
                let expected = "eos_token of tokenizer_config.json among its tokens";
                unexpected(
                    &self.folder.file(TOKENIZER),
                    "",
                    expected,
                    format!("no {token:?}"),
                )
            })?,
            None => *self.folder.end_tokens()?.first().ok_or_else(|| {
                let expected = "eos_token in tokenizer_config.json, or eos_token_id in config.json";
                unexpected(self.folder.path(), "", expected, "none")
            })?,
        };
        Ok(*self.end.insert(end))
    }
}

/// Marks the tokens of replies. Each token has its byte range in the text.
fn with_losses(tokens: Vec<(u32, Range<usize>)>, replies: &[Range<usize>]) -> Sequence {
    let is_reply = |place: &Range<usize>| {
        // Some tokenizers leave out blanks, so a token of blanks is empty.
        let start = place.start.min(place.end.saturating_sub(1));
        replies
            .iter()
            .any(|reply| start < reply.end && reply.start < place.end)
    };
    let tokens = tokens.into_iter();
    tokens.map(|(id, place)| (id, is_reply(&place))).collect()
}
