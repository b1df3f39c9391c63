//! The facts about the model that requests are checked by.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use mpmd::{Error, Result as CoreResult};
use mpmd_models::{
    ChatMessage, Folder, Sampling, Templates, TokenDecoder, encode_prompt, has_more_tokens,
    tokenizer,
};
use tokenizers::Tokenizer;

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
    tokenizer: Arc<Tokenizer>,
    /// The decoder of `tokenizer`.
    pub(crate) decoder: Arc<TokenDecoder>,
    /// The chat templates, or the reason why there are none.
    templates: Result<Templates, Arc<Error>>,
    /// The default settings of requests for choosing tokens.
    pub(crate) sampling: Sampling,
    /// Time at which the server started, in seconds since 1970.
    pub(crate) created: u64,
}

impl Model {
    /// Reads the tokenizer, the chat templates and the generation settings of a folder. Without
    /// `name` the model has the name of the folder. A prompt and its reply have at most `positions`
    /// tokens together.
    ///
    /// # Errors
    ///
    /// If a file is damaged. A folder without a chat template is no error.
    pub fn of(folder: &Folder, name: Option<String>, positions: usize) -> CoreResult<Self> {
        let sampling = Sampling::of(folder)?;
        let path = folder.path();
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());

        let own_name = || {
            path.file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into()
        };
        let tokenizer = Arc::new(tokenizer(folder)?);
        Ok(Self {
            name: name.unwrap_or_else(own_name),
            positions,
            vocab: folder.config().vocab_size,
            ends: folder.end_tokens()?,
            decoder: Arc::new(TokenDecoder::new(tokenizer.clone())),
            tokenizer,
            templates: Templates::of(folder).map_err(Arc::new),
            sampling,
            created: unix_seconds(),
        })
    }

    /// Turns a text into tokens. If `special`, the tokenizer adds its special tokens around the
    /// text.
    pub(crate) fn encode(&self, text: &str, special: bool) -> CoreResult<Vec<u32>> {
        encode_prompt(&self.tokenizer, text, special)
    }

    /// True if a long text has more than `most` tokens. Always false for short texts, whose tokens
    /// are cheap to compute.
    pub(crate) fn is_beyond(&self, text: &str, most: usize) -> CoreResult<bool> {
        if text.len() <= LONG_TEXT {
            return Ok(false);
        }
        has_more_tokens(&self.tokenizer, text, most)
    }

    /// Returns the prompt that the chat template makes of a conversation.
    pub(crate) fn rendered(&self, messages: &[ChatMessage]) -> Result<String, Arc<Error>> {
        let templates = self.templates.as_ref().map_err(Arc::clone)?;
        templates.prompt(messages).map_err(Arc::new)
    }
}

/// Returns the time in seconds since the start of 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
