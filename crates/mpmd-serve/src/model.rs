//! The facts about the model that requests are checked by.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use mpmd::{Error, Result as CoreResult};
use mpmd_models::{
    ChatMessage, Folder, Sampling, Templates, encode_prompt, has_more_tokens, tokenizer,
};
use tokenizers::Tokenizer;

/// Bytes of a text from which on its first tokens are counted before all are made.
const LONG_TEXT: usize = 64 << 10;

/// A model, as clients know it.
pub struct Model {
    /// The name by which requests ask for it.
    pub(crate) name: String,
    /// Most tokens of a prompt and its reply.
    pub(crate) positions: usize,
    /// Number of tokens that the model knows.
    pub(crate) vocab: usize,
    /// The tokens that end a text.
    pub(crate) ends: Vec<u32>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// The chat templates, or why there is none.
    templates: Result<Templates, Arc<Error>>,
    /// The choice of tokens, where a request says nothing.
    pub(crate) sampling: Sampling,
    /// Time of the start, in seconds of Unix.
    pub(crate) created: u64,
}

impl Model {
    /// Reads the tokenizer, the chat templates and the settings of generation of a folder. Without
    /// a name it is called as the folder. A prompt and its reply have at most `positions` tokens.
    ///
    /// # Errors
    ///
    /// If a file is damaged. A folder without a chat template is none.
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
        Ok(Self {
            name: name.unwrap_or_else(own_name),
            positions,
            vocab: folder.config().vocab_size,
            ends: folder.end_tokens()?,
            tokenizer: Arc::new(tokenizer(folder)?),
            templates: Templates::of(folder).map_err(Arc::new),
            sampling,
            created: unix_seconds(),
        })
    }

    /// Returns the tokens of a text, with those that the tokenizer puts around it if `special` is
    /// set.
    pub(crate) fn encode(&self, text: &str, special: bool) -> CoreResult<Vec<u32>> {
        encode_prompt(&self.tokenizer, text, special)
    }

    /// True if a long text has more than `most` tokens. False for short ones: their tokens are
    /// cheap.
    pub(crate) fn is_beyond(&self, text: &str, most: usize) -> CoreResult<bool> {
        if text.len() <= LONG_TEXT {
            return Ok(false);
        }
        has_more_tokens(&self.tokenizer, text, most)
    }

    /// Returns the text with which a conversation goes on.
    pub(crate) fn rendered(&self, messages: &[ChatMessage]) -> Result<String, Arc<Error>> {
        let templates = self.templates.as_ref().map_err(Arc::clone)?;
        templates.prompt(messages).map_err(Arc::new)
    }

    /// True if the tokenizer has the token: a model may have further rows.
    pub(crate) fn knows(&self, token: u32) -> bool {
        self.tokenizer.id_to_token(token).is_some()
    }

    /// Returns the text of tokens, special ones included. Tokens that the tokenizer lacks have
    /// none.
    pub(crate) fn decode(&self, tokens: &[u32]) -> tokenizers::Result<String> {
        self.tokenizer.decode(tokens, false)
    }
}

/// Returns the time in seconds since the start of 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
