//! How tokenizers split a text before they join its bytes, as `tokenizer.ggml.pre` names it.

use serde_json::{Value, json};

/// A way to split texts.
pub(crate) struct Splitter {
    /// The values of `tokenizer.ggml.pre` that mean it.
    pub(crate) names: &'static [&'static str],
    /// Expressions that split a text, each the pieces of the one before.
    expressions: &'static [&'static str],
    /// True if pieces are split as GPT-2 does in the end.
    is_gpt2: bool,
    /// True if a text takes the normal form C of Unicode first.
    is_normal: bool,
    /// True if a piece that is a token stays whole, also against the merges.
    pub(super) keeps_tokens: bool,
    /// True if texts begin with the token BOS, unless the file says otherwise.
    pub(super) begins: bool,
}

/// A splitter that adds nothing to the expressions.
const PLAIN: Splitter = Splitter {
    names: &[],
    expressions: &[],
    is_gpt2: false,
    is_normal: false,
    keeps_tokens: false,
    begins: false,
};

/// Llama 3: up to three digits together.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Qwen 2: single digits.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Tekken, of Mistral: words end before a capital letter.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// GPT-4o: words end before a capital letter, and keep their contractions.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// All splitters, in the order of the guide.
pub(crate) static SPLITTERS: [Splitter; 10] = [
    Splitter {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "pixtral",
            "midm-2.0",
        ],
        expressions: &[LLAMA3],
        keeps_tokens: true,
        begins: true,
        ..PLAIN
    },
    Splitter {
        names: &["dbrx", "smaug-bpe"],
        expressions: &[LLAMA3],
        ..PLAIN
    },
    Splitter {
        names: &["qwen2"],
        expressions: &[QWEN2],
        is_normal: true,
        ..PLAIN
    },
    Splitter {
        names: &["deepseek-r1-qwen", "stablelm2", "megrez", "kormo"],
        expressions: &[QWEN2],
        ..PLAIN
    },
    Splitter {
        names: &["gpt-2", "phi-2", "mellum", "a.x-4.0", "trillion"],
        is_gpt2: true,
        ..PLAIN
    },
    Splitter {
        names: &["mpt", "olmo"],
        is_gpt2: true,
        is_normal: true,
        ..PLAIN
    },
    Splitter {
        names: &[
            "starcoder",
            "refact",
            "smollm",
            "codeshell",
            "command-r",
            "minerva-7b",
        ],
        expressions: &[r"\p{N}"],
        is_gpt2: true,
        ..PLAIN
    },
    Splitter {
        names: &["tekken"],
        expressions: &[TEKKEN],
        keeps_tokens: true,
        begins: true,
        ..PLAIN
    },
    Splitter {
        names: &["gpt-4o", "llama4"],
        expressions: &[GPT4O],
        ..PLAIN
    },
    Splitter {
        names: &["deepseek-coder"],
        expressions: &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        ],
        ..PLAIN
    },
];

impl Splitter {
    /// Returns the splitter of this name. `None` if it is unknown.
    pub(super) fn of(name: &str) -> Option<&'static Self> {
        SPLITTERS.iter().find(|known| known.names.contains(&name))
    }

    /// Returns the names of all splitters, for messages.
    pub(super) fn all() -> String {
        let names = SPLITTERS.iter().flat_map(|splitter| splitter.names);
        let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
        names.join(", ")
    }

    /// Returns the part `pre_tokenizer` of a `tokenizer.json`.
    pub(super) fn pre_tokenizer(&self) -> Value {
        let split = |expression: &&str| {
            json!({
                "type": "Split",
                "pattern": { "Regex": expression },
                "behavior": "Isolated",
                "invert": false,
            })
        };
        let mut parts: Vec<Value> = self.expressions.iter().map(split).collect();
        parts.push(json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": self.is_gpt2,
        }));
        match &parts[..] {
            [only] => only.clone(),
            _ => json!({ "type": "Sequence", "pretokenizers": parts }),
        }
    }

    /// Returns the part `normalizer` of a `tokenizer.json`.
    pub(super) fn normalizer(&self) -> Value {
        match self.is_normal {
            true => json!({ "type": "NFC" }),
            false => Value::Null,
        }
    }
}
