//! The facts about the model that requests are checked by.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use mpmd::Result as CoreResult;
use mpmd_models::{Folder, PromptEncoder, Sampling, TokenBytes, TokenDecoder};

/// Length of a text, in bytes, above which its tokens are counted before the whole text is turned
/// into tokens.
const LONG_TEXT: usize = 64 << 10;

/// A model as clients see it: its name, tokenizer, templates and defaults.
pub struct Model {
    /// The name that requests must have in the field `model`.
    pub(crate) name: String,
    /// Largest number of tokens of a prompt and its reply together.
    pub(crate) positions: usize,
    /// Number of tokens in the model's vocabulary.
    pub(crate) vocab: usize,
    /// The tokens that end a text.
    pub(crate) ends: Vec<u32>,
    pub(crate) decoder: Arc<TokenDecoder>,
    pub(crate) prompts: PromptEncoder,
    /// The most bytes that a token stands for, if there is a bound.
    token_bytes: Option<TokenBytes>,
    /// The default settings of requests for choosing tokens.
    pub(crate) sampling: Sampling,
    /// Time at which the server started, in seconds since 1970.
    pub(crate) created: u64,
}

impl Model {
    /// Reads the generation settings of a folder. `prompts` has its tokenizer and its chat
    /// templates. Without `name` the model has the name of the folder, or of the file without its
    /// ending. A prompt and its reply have at most `positions` tokens together.
    ///
    /// # Errors
    ///
    /// If a file is damaged.
    pub fn of(
        folder: &Folder,
        prompts: PromptEncoder,
        name: Option<String>,
        positions: usize,
    ) -> CoreResult<Self> {
        let sampling = Sampling::of(folder)?;
        let path = folder.path();
        let path = match path.is_file() {
            // A link of the hub's cache leads to a file with another name.
            true => path.with_extension(""),
            false => path.canonicalize().unwrap_or_else(|_| path.to_owned()),
        };

        let own_name = || {
            path.file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into()
        };
        Ok(Self {
            name: name.unwrap_or_else(own_name),
            positions,
            vocab: folder.config().vocab_size,
            ends: folder.end_tokens()?,
            decoder: Arc::new(TokenDecoder::new(prompts.tokenizer().clone())),
            token_bytes: TokenBytes::of(prompts.tokenizer()),
            prompts,
            sampling,
            created: unix_seconds(),
        })
    }

    /// True if a long text has more than `most` tokens. Looks at its length first, which costs
    /// nothing. Always false for short texts, whose tokens are cheap to compute.
    pub(crate) fn is_beyond(&self, text: &str, most: usize) -> CoreResult<bool> {
        if text.len() <= LONG_TEXT {
            return Ok(false);
        }
        if self
            .token_bytes
            .is_some_and(|bytes| bytes.fewest_tokens(text) > most)
        {
            return Ok(true);
        }
        self.prompts.has_more_tokens(text, most)
    }
}

/// Returns the time in seconds since the start of 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
