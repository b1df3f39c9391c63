//! Numbers on the command line.

use clap::builder::RangedU64ValueParser;

/// Returns a parser of numbers from `least` on. Larger ones than its limit would overflow products
/// of sizes.
pub fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=1 << 30)
}

/// Parses a number that is finite and not negative, such as a learning rate.
///
/// # Errors
///
/// If it is another number, or none.
pub fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number that is not negative".to_owned()),
    }
}

/// Parses a number that is finite and greater than zero, such as a limit on a norm.
///
/// # Errors
///
/// If it is another number, or none.
pub fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a number greater than zero".to_owned()),
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
