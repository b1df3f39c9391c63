//! The secret that the processes of one job share.

use std::fmt::{self, Write as _};
use std::io;
use std::str::FromStr;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// A job's secret, by which its processes recognise each other. The `Debug` output does not show
/// the secret.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// Creates a token from its 32 bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Creates a token from the operating system's random numbers.
    ///
    /// # Errors
    ///
    /// If the operating system gives no random numbers.
    pub fn random() -> Result<Self, TokenError> {
        random_bytes()
            .map(Self)
            .map_err(|e| TokenError::NoRandomness { why: e.to_string() })
    }

    /// Derives a token from a text that every process of a job knows, such as a cluster's job
    /// number.
    ///
    /// The token keeps two jobs apart that use one address by accident. It does not keep out an
    /// attacker who can guess `known`. For that, give all processes one [random](Self::random)
    /// token, or a [secret](Self::of_secret).
    pub fn derived(known: &str) -> Self {
        Self::of_secret(b"", known)
    }

    /// Derives a job's token from a secret that its processes share. `known` identifies the job,
    /// for example its number.
    ///
    /// The token is the HMAC-SHA-256 (RFC 2104) of `known` under the secret. It reveals neither the
    /// secret nor the token of any other job.
    pub fn of_secret(secret: &[u8], known: &str) -> Self {
        Self(hmac(secret, &[known.as_bytes()]))
    }

    /// Returns the secret token as 64 hexadecimal digits, which [`str::parse`] reads.
    pub fn to_hex(&self) -> String {
        self.0
            .iter()
            .fold(String::with_capacity(64), |mut text, byte| {
                // Writing to a string cannot fail.
                let _ = write!(text, "{byte:02x}");
                text
            })
    }

    /// Returns the bytes of the secret token, for the configurations of transports.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the HMAC-SHA-256 (RFC 2104) of the concatenated `parts` under this token.
    pub fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        hmac(&self.0, parts)
    }
}

/// Returns the HMAC-SHA-256 of the concatenated `parts` under `key`.
fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts
        .iter()
        .fold(mac, |mac, part| mac.chain_update(part))
        .finalize()
        .into_bytes()
        .into()
}

/// Compares two secrets in a time that does not depend on which bytes differ.
pub fn are_equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.ct_eq(other).into()
}

/// Returns random bytes from the operating system. Needs no file descriptor.
pub fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // Linux gives up to 256 bytes at once, even if a signal comes.
    match getrandom(&mut bytes, GetRandomFlags::empty())? {
        32 => Ok(bytes),
        few => Err(io::Error::other(format!(
            "{few} random bytes instead of 32"
        ))),
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        are_equal(&self.0, &other.0)
    }
}

impl Eq for Token {}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let digits = text.trim().as_bytes();
        if digits.len() != 64 {
            return Err(TokenError::Malformed {
                digits: digits.len(),
            });
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| {
                (c as char)
                    .to_digit(16)
                    .ok_or(TokenError::Malformed { digits: 64 })
            };
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

/// The reason why a token could not be parsed or created.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The text is not a token. The caller's fault. The error does not show the text, which may be
    /// a secret.
    #[error(
        "a job token is 64 hexadecimal digits; this is something else, {digits} characters long"
    )]
    Malformed {
        /// The length of the text in bytes, without surrounding spaces.
        digits: usize,
    },
    /// The operating system gave no random numbers. Its fault.
    #[error("the operating system gives no random numbers for a job token: {why}")]
    NoRandomness {
        /// The system's error, as text.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_as_text_and_debug_hides_them() {
        let token = Token::random().unwrap();
        assert_eq!(token.to_hex().parse::<Token>().unwrap(), token);
        assert_ne!(token, Token::random().unwrap());
        assert_eq!(format!("{token:?}"), "Token(secret)");
    }

    #[test]
    fn malformed_token_error_hides_the_text() {
        let short = "c0ffee".parse::<Token>().unwrap_err();
        assert_eq!(short, TokenError::Malformed { digits: 6 });
        assert!("g".repeat(64).parse::<Token>().is_err());
        assert!(
            "é".repeat(32).parse::<Token>().is_err(),
            "64 bytes, but no digits"
        );
        assert!(!short.to_string().contains("c0ffee"));
    }

    #[test]
    fn of_secret_matches_rfc_4231() {
        // RFC 4231, case 2.
        let token = Token::of_secret(b"Jefe", "what do ya want for nothing?");
        assert_eq!(
            token.to_hex(),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
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
