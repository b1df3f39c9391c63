//! Parsing of `MPMD_SPIN`: the time to poll for work before a thread sleeps.

use std::time::Duration;

use crate::{LaunchError, variables};
use mpmd_base::block::Spin;

/// Parses a value of `MPMD_SPIN`: `auto`, `never`, `always`, or a number of microseconds.
///
/// # Errors
///
/// [`LaunchError::Variable`] if it is none of these.
pub fn spin(text: &str) -> Result<Spin, LaunchError> {
    match text {
        "auto" => Ok(Spin::Auto),
        "never" => Ok(Spin::Never),
        "always" => Ok(Spin::For(Duration::MAX)),
        micros => micros
            .parse()
            .map(|micros| Spin::For(Duration::from_micros(micros)))
            .map_err(|_| LaunchError::Variable {
                variable: variables::SPIN.to_owned(),
                value: text.to_owned(),
                expected: "auto, never, always or a number of microseconds".to_owned(),
            }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_accepts_words_and_microseconds_only() {
        assert_eq!(spin("auto"), Ok(Spin::Auto));
        assert_eq!(spin("never"), Ok(Spin::Never));
        assert_eq!(spin("always"), Ok(Spin::For(Duration::MAX)));
        assert_eq!(spin("250"), Ok(Spin::For(Duration::from_micros(250))));
        for wrong in ["Auto", "-1", "1.5", "5us", "99999999999999999999999"] {
            let said = spin(wrong).unwrap_err().to_string();
            assert!(
                said.starts_with(&format!("MPMD_SPIN={wrong} makes no sense")),
                "{said}"
            );
        }
    }
}
