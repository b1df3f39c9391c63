//! The secret that the processes of one job share.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::str::FromStr;

/// Tells the processes of a job from strangers. Its `Debug` output shows nothing of it.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// The token with these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// A fresh token from the operating system's random numbers.
    ///
    /// # Errors
    ///
    /// Where the operating system gives none.
    pub fn random() -> Result<Self, TokenError> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut bytes))
            .map_err(|e| TokenError::NoRandomness { why: e.to_string() })?;
        Ok(Self(bytes))
    }

    /// A token that every process of a job can work out from something they all know, such as a
    /// cluster's job number.
    ///
    /// It keeps two jobs apart that meet at one address by accident. It keeps out nobody who can
    /// guess `known`: for that, give all processes one [random](Self::random) token.
    pub fn derived(known: &str) -> Self {
        let mut lanes =
            [0x243f_6a88_85a3_08d3u64, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
        for (at, byte) in known.bytes().enumerate() {
            for (number, lane) in lanes.iter_mut().enumerate() {
                let input = u64::from(byte) | ((at as u64) << 8) | ((number as u64) << 56);
                *lane = scramble(*lane ^ input);
            }
        }
        let mut bytes = [0; 32];
        for (into, lane) in bytes.chunks_exact_mut(8).zip(lanes) {
            into.copy_from_slice(&scramble(lane).to_le_bytes());
        }
        Self(bytes)
    }

    /// The token as 64 hexadecimal digits, which [`str::parse`] reads: the secret itself.
    pub fn to_hex(&self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// The bytes: the secret itself, for the preambles of transports.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Whether `other` is this token, in a time that does not depend on where they differ.
    pub(crate) fn matches(&self, other: &[u8; 32]) -> bool {
        let mut difference = 0;
        for (a, b) in self.0.iter().zip(other) {
            difference |= black_box(a ^ b);
        }
        black_box(difference) == 0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.matches(&other.0)
    }
}

impl Eq for Token {}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let digits = text.trim().as_bytes();
        if digits.len() != 64 {
            return Err(TokenError::Malformed { digits: digits.len() });
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or(TokenError::Malformed { digits: 64 });
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// Why there is no token.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The text is none: the caller's fault. Shows nothing of it.
    #[error("a job token is 64 hexadecimal digits; this is something else, {digits} characters long")]
    Malformed {
        /// The text's length.
        digits: usize,
    },
    /// The operating system's fault.
    #[error("the operating system gives no random numbers for a job token: {why}")]
    NoRandomness {
        /// The system's word on it.
        why: String,
    },
}

/// A bijective mixing of 64 bits.
fn scramble(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_text_and_show_nothing() {
        let token = Token::random().unwrap();
        assert_eq!(token.to_hex().parse::<Token>().unwrap(), token);
        assert_ne!(token, Token::random().unwrap());
        assert_eq!(format!("{token:?}"), "Token(secret)");
    }

    #[test]
    fn malformed_tokens_are_errors_that_do_not_repeat_them() {
        let short = "c0ffee".parse::<Token>().unwrap_err();
        assert_eq!(short, TokenError::Malformed { digits: 6 });
        assert!("g".repeat(64).parse::<Token>().is_err());
        assert!("é".repeat(32).parse::<Token>().is_err(), "64 bytes, but no digits");
        assert!(!short.to_string().contains("c0ffee"));
    }

    #[test]
    fn derived_tokens_depend_on_every_character() {
        let tokens = ["slurm 17", "slurm 18", "slurm 71", "slurm 17 ", ""].map(Token::derived);
        for (at, token) in tokens.iter().enumerate() {
            assert!(tokens[at + 1..].iter().all(|other| other != token));
        }
        assert_eq!(Token::derived("slurm 17"), tokens[0]);
    }
}
