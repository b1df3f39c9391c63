//! Parsing of `MPMD_PEER_TIMEOUT`: the time for which processes wait for each other.

use std::time::Duration;

use crate::{LaunchError, variables};

/// Parses a value of `MPMD_PEER_TIMEOUT`: a number of seconds above 0.
///
/// # Errors
///
/// [`LaunchError::Variable`] if the text is no such number.
pub fn peer_timeout(text: &str) -> Result<Duration, LaunchError> {
    let seconds = text.parse::<f64>().unwrap_or(f64::NAN);
    // More than a `Duration` can hold. `Duration::MAX` itself becomes such a value when written in
    // decimals.
    if seconds >= u64::MAX as f64 {
        return Ok(Duration::MAX);
    }
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        // With zero every peer would count as lost at once.
        _ => Err(LaunchError::Variable {
            variable: variables::PEER_TIMEOUT.to_owned(),
            value: text.to_owned(),
            expected: "a number of seconds above 0".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_may_be_endless_but_not_zero() {
        assert_eq!(peer_timeout("1e19").unwrap(), Duration::from_secs_f64(1e19));
        assert_eq!(peer_timeout("1.5").unwrap(), Duration::from_millis(1500));
        // The launcher writes `Duration::MAX` as the first value; the others are larger.
        let longest = Duration::MAX.as_secs_f64().to_string();
        for endless in [&longest, "1e20", "inf"] {
            assert_eq!(peer_timeout(endless).unwrap(), Duration::MAX, "{endless}");
        }
        for wrong in ["0", "0.0", "1e-12", "-1", "NaN", "soon", "5s"] {
            let said = peer_timeout(wrong).unwrap_err().to_string();
            let expected = format!(
                "MPMD_PEER_TIMEOUT={wrong} makes no sense: it must be a number of seconds above 0"
            );
            assert_eq!(said, expected);
        }
    }
}
