//! The check that the weights of a folder belong to the model in use: to its config, its tokenizer,
//! its end tokens and its chat templates.

use std::collections::BTreeSet;
use std::path::Path;

use mpmd::Result;
use serde_json::{Map, Value};

use crate::config::shown;
use crate::error::unexpected;
use crate::family::model_of;
use crate::hub::folder::{CONFIG, Folder, GENERATION, TOKENIZER};
use crate::text::template::{FILES, special_tokens, template_source};
use crate::text::tokens::tokenizer;

/// The file of the special tokens, for messages.
const SPECIAL: &str = "tokenizer_config.json";
/// The key of the end tokens, for messages.
const ENDS: &str = "eos_token_id";

/// The first difference between two values of JSON.
struct JsonDifference {
    /// The path of the differing value, such as `rope_scaling.factor` or `added_tokens[3].id`.
    key: String,
    expected: String,
    found: String,
}

/// Returns an error if inference in the model of `used` cannot use the weights of `folder`. Files
/// that a folder lacks are not compared: a host without a tokenizer computes, too.
///
/// # Errors
///
/// If config, tokenizer, end tokens, special tokens or chat templates differ, or a file is damaged.
/// The message names the file and key of `folder`, and both values.
pub(super) fn check_same_model(used: &Folder, folder: &Folder) -> Result<()> {
    check_config(used, folder)?;
    check_tokenizer(used, folder)?;
    check_end_tokens(used, folder)?;
    check_templates(used, folder)
}

/// Returns the error for a value of `folder` that differs from the model in use.
fn other(folder: &Folder, name: &str, difference: &JsonDifference) -> mpmd::Error {
    let JsonDifference {
        key,
        expected,
        found,
    } = difference;
    let expected = format!("{expected}, as in the model in use");
    unexpected(&folder.file(name), key, expected, found)
}

/// Compares the settings that inference computes by.
fn check_config(used: &Folder, folder: &Folder) -> Result<()> {
    let expected = used.config().of_inference();
    if folder.config().of_inference() == expected {
        return Ok(());
    }

    // The weights decide it, too: an output with values of its own is not tied.
    let [is_tied, found] = [used, folder].map(|folder| folder.config().tie_word_embeddings);
    if is_tied != found {
        let difference = JsonDifference {
            key: "tie_word_embeddings".to_owned(),
            expected: is_tied.to_string(),
            found: found.to_string(),
        };
        return Err(other(folder, CONFIG, &difference));
    }

    let file = folder.file(CONFIG);
    let [keys, other_keys] = [used.keys(), folder.keys()];
    let all: BTreeSet<&String> = keys.keys().chain(other_keys.keys()).collect();
    let differences = all.into_iter().filter_map(|key| {
        let difference = difference(key, keys.get(key), other_keys.get(key))?;
        Some((key, difference))
    });
    let mut differences: Vec<(&String, JsonDifference)> = differences.collect();
    let place = differences
        .iter()
        .position(|(key, _)| changes_model(&file, keys, key, other_keys.get(*key)));
    if differences.is_empty() {
        return Err(unexpected(&file, "", "the model in use", "another one"));
    }
    let (_, first) = differences.swap_remove(place.unwrap_or(0));
    Err(other(folder, CONFIG, &first))
}

/// True if a model with `value` at `key` computes something else than one with `keys`, or is no
/// model.
fn changes_model(file: &Path, keys: &Map<String, Value>, key: &str, value: Option<&Value>) -> bool {
    let mut mixed = keys.clone();
    match value {
        Some(value) => mixed.insert(key.to_owned(), value.clone()),
        None => mixed.remove(key),
    };
    let of = |keys| model_of(file, keys).map(|(_, config)| config.of_inference());
    match (of(keys.clone()), of(mixed)) {
        (Ok(before), Ok(after)) => before != after,
        _ => true,
    }
}

/// Compares the tokenizers, as the library reads them: texts of other versions of it may differ.
fn check_tokenizer(used: &Folder, folder: &Folder) -> Result<()> {
    let [expected, found] = [
        used.content()?.file_hash(TOKENIZER),
        folder.content()?.file_hash(TOKENIZER),
    ];
    if expected.is_none() || found.is_none() || expected == found {
        return Ok(());
    }

    let of = |folder: &Folder| {
        let tokenizer = tokenizer(folder)?.to_string(false);
        let failed = |why: &dyn std::fmt::Display| {
            let file = folder.file(TOKENIZER);
            unexpected(&file, "", "a tokenizer", why)
        };
        let tokenizer = tokenizer.map_err(|why| failed(&why))?;
        serde_json::from_str::<Value>(&tokenizer).map_err(|why| failed(&why))
    };
    let [expected, found] = [of(used)?, of(folder)?];
    match difference("", Some(&expected), Some(&found)) {
        None => Ok(()),
        Some(difference) => Err(other(folder, TOKENIZER, &difference)),
    }
}

/// Compares the end tokens. They count in any order. Those in a `config.json` count only without a
/// `generation_config.json` that has some.
fn check_end_tokens(used: &Folder, folder: &Folder) -> Result<()> {
    let set = |tokens: Vec<u32>| tokens.into_iter().collect::<BTreeSet<u32>>();
    let (name, expected, found) = match folder.generation_ends()? {
        Some(found) => (GENERATION, Some(used.end_tokens()?), Some(found)),
        // The file of the model in use may have added some.
        None if folder.config_ends()?.map(set) == Some(set(used.end_tokens()?)) => {
            return Ok(());
        }
        None => (CONFIG, used.config_ends()?, folder.config_ends()?),
    };
    let (Some(expected), Some(found)) = (expected.map(set), found.map(set)) else {
        return Ok(());
    };
    if expected == found {
        return Ok(());
    }
    let difference = JsonDifference {
        key: ENDS.to_owned(),
        expected: format!("{expected:?}"),
        found: format!("{found:?}"),
    };
    Err(other(folder, name, &difference))
}

/// Compares the chat templates, wherever the folders have them, and the special tokens that they
/// may write.
fn check_templates(used: &Folder, folder: &Folder) -> Result<()> {
    for (name, file) in FILES.into_iter().enumerate() {
        let [expected, found] = [template_source(used, name)?, template_source(folder, name)?];
        let (Some(expected), Some(found)) = (expected, found) else {
            continue;
        };
        if expected != found {
            let lines = expected.lines().zip(found.lines());
            let same = lines.take_while(|(expected, found)| expected == found);
            let line = same.count() + 1;
            let expected = "the chat template of the model in use";
            let found = format!("another one from line {line} on");
            return Err(unexpected(&folder.file(file), "", expected, found));
        }
    }

    let expected = special_tokens(used)?;
    for (key, found) in special_tokens(folder)? {
        if let Some(expected) = expected.get(&key).filter(|expected| **expected != found) {
            let difference = JsonDifference {
                key,
                expected: format!("{expected:?}"),
                found: format!("{found:?}"),
            };
            return Err(other(folder, SPECIAL, &difference));
        }
    }
    Ok(())
}

/// Returns the first difference between two values, which are at the path `key`.
fn difference(
    key: &str,
    expected: Option<&Value>,
    found: Option<&Value>,
) -> Option<JsonDifference> {
    match (expected, found) {
        (Some(Value::Object(expected)), Some(Value::Object(found))) => {
            let dot = if key.is_empty() { "" } else { "." };
            let all: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
            all.into_iter().find_map(|own| {
                let path = format!("{key}{dot}{own}");
                difference(&path, expected.get(own), found.get(own))
            })
        }
        (Some(Value::Array(expected)), Some(Value::Array(found))) => {
            let count = expected.len().max(found.len());
            (0..count)
                .find_map(|at| difference(&format!("{key}[{at}]"), expected.get(at), found.get(at)))
        }
        _ if expected == found => None,
        _ => {
            let text = |value: Option<&Value>| value.map_or("none".to_owned(), shown);
            Some(JsonDifference {
                key: key.to_owned(),
                expected: text(expected),
                found: text(found),
            })
        }
    }
}
