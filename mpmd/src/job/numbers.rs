//! Numbers on the command line.

use clap::builder::RangedU64ValueParser;

/// Returns a parser of numbers from `least` to 2^30. Products of larger sizes could overflow.
pub fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=1 << 30)
}

/// The error of a text that is not a number, or is outside the range of an option.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NumberError {
    /// The number must be finite, and zero or greater.
    #[error("expected a number that is not negative")]
    Negative,
    /// The number must be finite and greater than zero.
    #[error("expected a number greater than zero")]
    NotPositive,
}

/// Parses a number that is finite and not negative, such as a learning rate.
///
/// # Errors
///
/// If `text` is another number, or not a number.
pub fn not_negative(text: &str) -> Result<f64, NumberError> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(NumberError::Negative),
    }
}

/// Parses a number that is finite and greater than zero, such as a limit on a norm.
///
/// # Errors
///
/// If `text` is another number, or not a number.
pub fn positive(text: &str) -> Result<f64, NumberError> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err(NumberError::NotPositive),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_and_infinite_numbers_are_refused() {
        assert_eq!(not_negative("0"), Ok(0.0));
        assert!(
            ["-1", "inf", "nan", "x"]
                .iter()
                .all(|text| not_negative(text).is_err())
        );
        assert_eq!(positive("0.1"), Ok(0.1));
        assert!(
            ["0", "-1", "inf", "nan", "x"]
                .iter()
                .all(|text| positive(text).is_err())
        );
    }
}
