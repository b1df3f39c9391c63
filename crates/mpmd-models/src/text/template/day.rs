//! The day that a chat template may tell the model.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, NaiveDate, NaiveTime};

/// Form of a day, for errors.
const FORM: &str = "%Y-%m-%d";
/// Largest length of a date in a prompt, in bytes.
const LONGEST: usize = 1000;

/// A day of the Gregorian calendar.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Day(NaiveDate);

/// Error: a text is no day.
#[derive(Clone, Debug, thiserror::Error)]
#[error("expected a day as YYYY-MM-DD, found {0:?}")]
pub struct InvalidDay(String);

impl Day {
    /// Returns the current day in UTC.
    pub fn today() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |now| now.as_secs());
        let time = i64::try_from(seconds).ok();
        let time = time.and_then(|seconds| DateTime::from_timestamp(seconds, 0));
        Self(time.unwrap_or_default().date_naive())
    }

    /// Returns the first moment of the day in the form that `format` describes, as Python's
    /// `strftime` does. `None` if the format is invalid or its result very long.
    pub(super) fn formatted(self, format: &str) -> Option<String> {
        let mut text = String::new();
        let time = self.0.and_time(NaiveTime::MIN).and_utc();
        if format.len() > LONGEST {
            return None;
        }
        // The formatter fails for a format that it does not know.
        write!(text, "{}", time.format(format)).ok()?;
        Some(text).filter(|text| text.len() <= LONGEST)
    }
}

impl FromStr for Day {
    type Err = InvalidDay;

    fn from_str(text: &str) -> Result<Self, InvalidDay> {
        let day = NaiveDate::parse_from_str(text, FORM).ok();
        // Forms such as 26-1-2 are ambiguous.
        let day = day.filter(|day| day.format(FORM).to_string() == text);
        day.map(Self)
            .ok_or_else(|| InvalidDay(text.chars().take(40).collect()))
    }
}

impl std::fmt::Display for Day {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.format(FORM).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_written_as_by_python() {
        let day: Day = "2024-07-04".parse().unwrap();
        for (format, expected) in [
            ("%d %b %Y", "04 Jul 2024"),
            ("%B %d, %Y", "July 04, 2024"),
            ("%Y-%m-%d", "2024-07-04"),
            ("%A, %-d. %B", "Thursday, 4. July"),
            ("%H:%M:%S", "00:00:00"),
            ("%j %U %w %y %%", "186 26 4 24 %"),
            ("no date", "no date"),
        ] {
            assert_eq!(day.formatted(format).as_deref(), Some(expected), "{format}");
        }
        assert_eq!(day.formatted("%"), None);
        assert_eq!(day.formatted(&"%A".repeat(400)), None);
        assert_eq!(day.to_string(), "2024-07-04");
    }

    #[test]
    fn other_texts_are_no_days() {
        for text in [
            "",
            "2024-7-4",
            "2024-02-30",
            "04.07.2024",
            "2024-07-04T00:00",
        ] {
            assert!(text.parse::<Day>().is_err(), "{text}");
        }
    }
}
