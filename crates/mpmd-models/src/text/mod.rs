//! Texts, conversations and examples as tokens, and tokens as text.

pub(crate) mod examples;
pub(crate) mod neutral;
pub(crate) mod stream;
pub(crate) mod template;
pub(crate) mod token_bytes;
pub(crate) mod token_file;
pub(crate) mod tokens;
