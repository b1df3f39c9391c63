//! The memory limit of a rank, and its form as text.

use std::str::FromStr;

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
            None => bytes(text).map(Self::Bytes),
        }
    }
}

/// Parses a number of bytes with an optional unit KiB, MiB or GiB, as `0.5GiB`.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let found = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (number, unit) = found.unwrap_or((text, 1));
    let wrong =
        || format!("not a number of bytes: {text:?}; there are 1048576, 1024KiB, 1MiB, 0.5GiB");
    if let Ok(number) = number.trim().parse::<u64>() {
        return number.checked_mul(unit).ok_or_else(wrong);
    }
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let product = number * unit as f64;
    // Larger `f64` values are not exact numbers of bytes.
    if (0.0..9e15).contains(&product) { Ok(product as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("1000"), Ok(1000));
        assert_eq!(bytes("2MiB"), Ok(2 << 20));
        assert_eq!(bytes("0.5 GiB"), Ok(1 << 29));
        assert_eq!("1KiB".parse(), Ok(Budget::Bytes(1024)));
        assert_eq!("4 activations".parse(), Ok(Budget::Activations(4)));
        assert!("activations".parse::<Budget>().is_err());
        for wrong in ["", "MiB", "-1", "1MB", "NaN", "1e300GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
