//! The type of the numbers in a file of tokens, as an argument.

use mpmd_models::TokenType;

/// The type of the numbers in a file of tokens.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum TokenTypeArg {
    /// Two bytes, as nanoGPT writes them.
    #[default]
    U16,
    /// Four bytes.
    U32,
}

impl From<TokenTypeArg> for TokenType {
    fn from(argument: TokenTypeArg) -> Self {
        match argument {
            TokenTypeArg::U16 => Self::U16,
            TokenTypeArg::U32 => Self::U32,
        }
    }
}
