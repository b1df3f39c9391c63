//! The keys of a config: their values, and those that change no result.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::{Debug, Display};
use std::path::Path;

use mpmd::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::unexpected;

/// Limit on each size in a config, so that products of sizes do not overflow.
const LARGEST: usize = (1 << 31) - 1;
/// Largest length of a config value that an error message quotes, in characters.
const SHOWN: usize = 60;

/// Config keys that change no result of the decoder, separated by blanks. All other keys must be
/// read, or the config is refused. In this order: the origin of a folder and settings of programs
/// that load it; settings of speed and memory; outputs beside the results; the first values of a
/// new model; heads of other tasks; special tokens, and how a text is generated.
pub(crate) const HARMLESS: &str = "
    _name_or_path architectures auto_map base_model_name_or_path custom_pipelines dtype
    is_llama_config max_sequence_length model_max_length model_name name_or_path tokenizer_class
    torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation
    cache_implementation chunk_size_feed_forward gradient_checkpointing pretraining_tp
    reorder_and_upcast_attn tf_legacy_loss torchscript use_bfloat16 use_cache use_flash_attention
    use_flash_attn
    output_attentions output_hidden_states output_past output_scores return_dict
    return_dict_in_generate
    initializer_range
    _num_labels classifier_dropout finetuning_task id2label label2id num_labels problem_type
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    mask_token_id max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences pad_token_id prefix remove_invalid_values repetition_penalty sep_token_id
    suppress_tokens temperature top_k top_p typical_p unk_token_id
";

/// Starts of the names of switches. Such a switch may be on by default in the code that its config
/// was written for, so turning it off may change results.
const SWITCHES: [&str; 7] = [
    "add_", "include_", "is_", "norm_", "scale_", "skip_", "use_",
];
/// Switches that are off by default, separated by blanks.
const OFF_BY_DEFAULT: &str = "
    scale_attn_by_inverse_layer_idx use_dynamic_ntk use_logn_attn use_mrope use_sliding_window
";

/// The keys of a JSON object in a config. Records which of them have been read, for
/// [`ConfigKeys::finish`].
pub(crate) struct ConfigKeys<'a> {
    file: &'a Path,
    /// Path of the object in the config, for messages: empty, or with a dot at its end.
    prefix: String,
    map: Map<String, Value>,
    /// The family's names of keys, as (common name, name in this family).
    words: &'static [(&'static str, &'static str)],
    read: RefCell<BTreeSet<String>>,
}

impl<'a> ConfigKeys<'a> {
    pub(crate) fn new(file: &'a Path, map: Map<String, Value>) -> Self {
        Self {
            file,
            prefix: String::new(),
            map,
            words: &[],
            read: RefCell::default(),
        }
    }

    /// Sets the family's names of keys, as (common name, name in this family).
    pub(crate) fn words(self, words: &'static [(&'static str, &'static str)]) -> Self {
        Self { words, ..self }
    }

    /// Returns the family's name of a key that is given by its common name.
    pub(crate) fn word<'k>(&self, key: &'k str) -> &'k str {
        word(self.words, key)
    }

    fn value(&self, key: &str) -> Option<&Value> {
        let key = self.word(key);
        self.read.borrow_mut().insert(key.to_owned());
        self.map.get(key)
    }

    /// Returns the value of a key. `None` if it is absent or null.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<T>> {
        match self.value(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|_| self.unexpected(key, expected, value)),
        }
    }

    pub(crate) fn or<T: DeserializeOwned>(
        &self,
        key: &str,
        expected: &str,
        default: T,
    ) -> Result<T> {
        Ok(self.get(key, expected)?.unwrap_or(default))
    }

    pub(crate) fn number(&self, key: &str, default: f64) -> Result<f64> {
        self.or(key, "a number", default)
    }

    /// Returns the number at a key, which must be more than zero. `None` if the key is absent or
    /// null.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.get::<f64>(key, "a number")? {
            Some(number) if number <= 0.0 => {
                Err(self.unexpected(key, "a number of more than 0", number))
            }
            number => Ok(number),
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        self.or(key, "true or false", default)
    }

    pub(crate) fn required<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<T> {
        self.get(key, expected)?
            .ok_or_else(|| self.unexpected(key, expected, "none"))
    }

    /// Returns the number at a key, which must be from 1 to [`LARGEST`].
    pub(crate) fn size(&self, key: &str, default: usize) -> Result<usize> {
        let expected = format!("a number from 1 to {LARGEST}");
        let size = self.or(key, &expected, default)?;
        match (1..=LARGEST).contains(&size) {
            true => Ok(size),
            false => Err(self.unexpected(key, &expected, size)),
        }
    }

    /// Calls `read` if the key has a value that is not null. Returns `default` if the key is
    /// absent, and `None` if it is null.
    pub(crate) fn unless_null<T>(
        &self,
        key: &str,
        default: Option<T>,
        read: impl FnOnce(&Self, &str) -> Result<T>,
    ) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => read(self, key).map(Some),
        }
    }

    /// Returns an error if the key has another value than `value`. An absent or null key is
    /// accepted.
    pub(crate) fn only<T>(&self, key: &str, value: T) -> Result<()>
    where
        T: DeserializeOwned + PartialEq + Debug,
    {
        let expected = format!("{value:?}");
        match self.get::<T>(key, &expected)? {
            Some(found) if found != value => {
                Err(self.unexpected(key, expected, format!("{found:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the keys of the JSON object at `key`. `None` if the object is absent, null or empty.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        let map = self.get::<Map<String, Value>>(key, "an object or null")?;
        Ok(map.filter(|map| !map.is_empty()).map(|map| Self {
            prefix: format!("{}{key}.", self.prefix),
            ..Self::new(self.file, map)
        }))
    }

    /// Returns an error for the first key that nothing has read, since it may change results. Keys
    /// that ask for nothing or are listed in `harmless` are accepted.
    pub(crate) fn finish(&self, harmless: &str) -> Result<()> {
        let read = self.read.borrow();
        let is_known = |key: &String| {
            read.contains(key) || harmless.split_whitespace().any(|known| known == key)
        };
        match self
            .map
            .iter()
            .find(|(key, value)| !asks_for_nothing(key, value) && !is_known(key))
        {
            None => Ok(()),
            Some((key, value)) => {
                let expected = "no such key: it may change results, and nothing here handles it";
                Err(self.unexpected(key, expected, shown(value)))
            }
        }
    }

    pub(crate) fn unexpected(
        &self,
        key: &str,
        expected: impl Display,
        found: impl Display,
    ) -> Error {
        let key = self.word(key);
        unexpected(self.file, &format!("{}{key}", self.prefix), expected, found)
    }
}

/// True if a value turns off what its key stands for, and that is off by default: null, false, 0,
/// an empty list or an empty object.
fn asks_for_nothing(key: &str, value: &Value) -> bool {
    let is_known = |list: &str| list.split_whitespace().any(|known| known == key);
    let is_switch = SWITCHES.iter().any(|start| key.starts_with(start));
    match value {
        Value::Null => true,
        Value::Bool(false) => !is_switch || is_known(OFF_BY_DEFAULT),
        Value::Number(number) => !is_switch && number.as_f64() == Some(0.0),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::String(_) => false,
    }
}

/// Returns the start of a config value as text, for messages.
pub(crate) fn shown(value: &Value) -> String {
    value.to_string().chars().take(SHOWN).collect()
}

/// Returns the family's name for the common name of a key. `words` has pairs (common name, name in
/// this family); without a pair the common name is returned.
pub(crate) fn word<'a>(words: &'a [(&'static str, &'static str)], common: &'a str) -> &'a str {
    words
        .iter()
        .find(|(from, _)| *from == common)
        .map_or(common, |(_, own)| own)
}
