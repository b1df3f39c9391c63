//! Numbers of bytes as text.

use std::fmt;

/// Formats a number of bytes, for example as `512 B`, `4.0 KiB` or `1.5 GiB`.
pub fn bytes_text(bytes: u64) -> String {
    let mut amount = bytes as f64;
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // Values that would round to 1024.0 take the next unit.
        if amount < 1023.95 {
            break;
        }
        amount /= 1024.0;
        unit = larger;
    }
    format!("{amount:.1} {unit}")
}

/// The error of a text that is not a valid number of bytes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ByteCountError {
    /// The invalid text.
    pub text: String,
}

impl fmt::Display for ByteCountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not a number of bytes: {:?}; there are 1048576, 1024KiB, 1MiB, 0.5GiB",
            self.text
        )
    }
}

impl std::error::Error for ByteCountError {}

/// Parses a number of bytes with an optional unit KiB, MiB or GiB, such as `0.5GiB`.
///
/// # Errors
///
/// If the text is not such a number, or the number is too large.
pub fn parse_bytes(text: &str) -> Result<u64, ByteCountError> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let found = units
        .into_iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (number, unit) = found.unwrap_or((text, 1));

    let wrong = || ByteCountError {
        text: text.to_owned(),
    };
    if let Ok(number) = number.trim().parse::<u64>() {
        return number.checked_mul(unit).ok_or_else(wrong);
    }

    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let product = number * unit as f64;
    // Larger `f64` values are not exact numbers of bytes.
    if (0.0..9e15).contains(&product) {
        Ok(product as u64)
    } else {
        Err(wrong())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_in_binary_units() {
        let texts = [0, 1023, 1024, 1536, 1_048_575, 1 << 20, 3 << 30].map(bytes_text);
        assert_eq!(
            texts,
            [
                "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "3.0 GiB"
            ]
        );
    }
    #[test]
    fn bytes_have_units() {
        assert_eq!(parse_bytes("1000"), Ok(1000));
        assert_eq!(parse_bytes("2MiB"), Ok(2 << 20));
        assert_eq!(parse_bytes("0.5 GiB"), Ok(1 << 29));
        for wrong in ["", "MiB", "-1", "1MB", "NaN", "1e300GiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
