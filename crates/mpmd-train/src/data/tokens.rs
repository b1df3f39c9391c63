//! Sources of tokens, such as a text.

use std::fmt;

use mpmd_core::{Error, Program, Result};

use super::TextBytes;

/// A long sequence of tokens, from which [`Windows`](super::Windows) takes its sequences.
pub trait TokenSource: fmt::Debug + Send + Sync + 'static {
    /// Returns the number of tokens. It is the same on every process.
    fn tokens(&self) -> usize;

    /// Fills `tokens` with the tokens from index `start` on.
    ///
    /// # Errors
    ///
    /// If there are fewer tokens from `start` on, or they cannot be read.
    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()>;

    /// Checks that all processes have the same tokens.
    ///
    /// # Errors
    ///
    /// If the tokens cannot be read, or the call is within a captured step.
    fn compare(&self, p: &mut Program) -> Result<()>;
}

/// Each byte is a token.
impl TokenSource for TextBytes {
    fn tokens(&self) -> usize {
        self.bytes().len()
    }

    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()> {
        let bytes = self.bytes().get(start..start + tokens.len());
        let bytes =
            bytes.ok_or_else(|| Error::kernel(format!("byte {start} is the text's end")))?;
        tokens
            .iter_mut()
            .zip(bytes)
            .for_each(|(token, byte)| *token = u32::from(*byte));
        Ok(())
    }

    fn compare(&self, p: &mut Program) -> Result<()> {
        TextBytes::compare(self, p)
    }
}
