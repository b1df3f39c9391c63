//! The memory limit of a rank, and its form as text.

use std::str::FromStr;

use mpmd_base::parse_bytes;

/// The limit of the memory that a rank may keep between forward and backward passes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Budget {
    /// Maximum number of forward passes whose weight gradient has not ended.
    Activations(u64),
    /// Maximum number of bytes, as counted by the costs.
    Bytes(u64),
}

impl FromStr for Budget {
    type Err = String;

    /// Parses a number of bytes such as `4096` or `2GiB` (also KiB, MiB), or of activations such as
    /// `4activations`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_suffix("activations") {
            Some(number) => number.trim().parse().map(Self::Activations).map_err(|_| {
                format!("not a number of activations: {text:?}; there is 4activations")
            }),
            None => parse_bytes(text)
                .map(Self::Bytes)
                .map_err(|error| error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_bytes_or_activations() {
        assert_eq!("1KiB".parse(), Ok(Budget::Bytes(1024)));
        assert_eq!("4 activations".parse(), Ok(Budget::Activations(4)));
        assert!("activations".parse::<Budget>().is_err());
        assert!("1MB".parse::<Budget>().is_err());
    }
}
