//! The memory limit of a rank, and its form as text.

use std::str::FromStr;

use mpmd_base::parse_bytes;

/// The maximum that a rank may keep at a time between forward and backward passes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Budget {
    /// Limit of forward passes that wait for the end of their weight gradient.
    Activations(u64),
    /// Limit in bytes, as counted by the costs.
    Bytes(u64),
}

impl FromStr for Budget {
    type Err = String;

    /// Parses bytes, also with KiB, MiB or GiB, or a number as in `4activations`.
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
