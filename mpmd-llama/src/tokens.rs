//! The tokenizer of a folder, and texts as tokens.

use std::fmt;
use std::sync::Arc;

use mpmd::random::Key;
use mpmd::train::data::{SEPARATOR, Text, TokenSource};
use mpmd::{Error, Program, Result};
use tokenizers::Tokenizer;

use crate::folder::{Folder, TOKENIZER};
use crate::unexpected;

/// Reads the tokenizer of a folder.
///
/// # Errors
///
/// If `tokenizer.json` is missing or damaged, or has tokens without a row in the embedding. The
/// message names both numbers.
pub fn tokenizer(folder: &Folder) -> Result<Tokenizer> {
    let file = folder.path().join(TOKENIZER);
    let expected = "a tokenizer";
    // The error of the library does not say that a file is missing.
    let json = folder.small(TOKENIZER).map_err(|why| unexpected(&file, "", expected, why))?;
    let mut tokenizer =
        Tokenizer::from_bytes(json).map_err(|why| unexpected(&file, "", expected, why))?;
    let rows = folder.config().vocab_size;
    let ids = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
    if ids > rows {
        let expected = format!("at most {rows} tokens, the vocab_size of config.json");
        return Err(unexpected(&file, "vocabulary", expected, ids));
    }
    let unset = tokenizer.with_padding(None).with_truncation(None).map(drop);
    unset.map_err(|why| unexpected(&file, "", expected, why))?;
    Ok(tokenizer)
}

/// The tokens of a text, in memory. Clones share them.
#[derive(Clone)]
pub struct Tokens {
    ids: Arc<[u32]>,
}

impl Tokens {
    /// Turns a text into tokens, file by file, without special tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn of(text: &Text, tokenizer: &Tokenizer) -> Result<Self> {
        let failed = |why: &dyn fmt::Display| Error::Environment(format!("the tokenizer: {why}"));
        let mut ids = Vec::new();
        // The last file ends with a separator, too.
        for file in text.bytes().split(|byte| *byte == SEPARATOR) {
            let file = std::str::from_utf8(file).map_err(|why| failed(&why))?;
            let encoding = tokenizer.encode(file, false).map_err(|why| failed(&why))?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(Self { ids: ids.into() })
    }

    /// Returns the first tokens: `count`, or all if there are fewer.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        Self { ids: self.ids[..self.ids.len().min(count)].into() }
    }

    /// Returns the numbers of the tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.ids.len())
    }
}

impl TokenSource for Tokens {
    fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()> {
        let Some(ids) = self.ids.get(start..start + tokens.len()) else {
            return Err(Error::kernel(format!("token {start} is near the end of {self:?}")));
        };
        tokens.copy_from_slice(ids);
        Ok(())
    }

    fn compare(&self, p: &mut Program) -> Result<()> {
        let hash = |key: Key, id: &u32| key.fold_in(u64::from(*id));
        let key = self.ids.iter().fold(Key(self.ids.len() as u64), hash);
        p.assert_same(format!("{self:?} of a text, with hash {:016x}", key.0))
    }
}
