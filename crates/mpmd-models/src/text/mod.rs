//! Texts, conversations and examples as tokens, and tokens as text.

pub(crate) mod conversation;
pub(crate) mod examples;
mod piece_rule;
pub(crate) mod prompts;
pub(crate) mod stream;
pub(crate) mod template;
pub(crate) mod token_bytes;
pub(crate) mod token_decoder;
pub(crate) mod token_file;
mod token_window;
pub(crate) mod tokens;
