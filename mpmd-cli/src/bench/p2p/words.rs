//! The values of command-line options: levels, transports, sizes, spin times.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use mpmd_transport::ucx::Spin;
use serde::{Deserialize, Serialize};

/// The kind of data that is moved.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Messages, directly over the transport.
    Message,
    /// Arrays, by `device_put`.
    Array,
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Array => "array",
        }
    }
}

/// A case that is measured for each size.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Case {
    /// Half the time of a round trip.
    Latency,
    /// A stream of messages or arrays, until the last has arrived.
    Bandwidth,
    /// A freshly written array, until the receiver can use it; only at level array.
    Handover,
}

impl Case {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Handover => "handover",
        }
    }
}

/// The transport of messages.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(in crate::bench) enum Carrier {
    /// Memory that two processes share.
    Shm,
    /// Sockets between two processes.
    Tcp,
    /// UCX between two processes; needs a build with the feature `ucx`.
    Ucx,
    /// Two threads of one process.
    Inproc,
}

impl Carrier {
    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Inproc => "inproc",
        }
    }
}

/// A number of bytes, at least one, as `8`, `4Ki`, `16Mi`, `1Gi`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::bench) struct Size(pub(in crate::bench) usize);

const UNITS: [(&str, u32); 3] = [("Ki", 10), ("Mi", 20), ("Gi", 30)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
            .unwrap_or((text, 0));
        let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << shift));
        match bytes {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err("not a number of bytes such as 8, 4Ki or 16Mi".to_owned()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().rev().find(|(_, shift)| self.0.trailing_zeros() >= *shift);
        match whole {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// The time that a transport's engine looks for work before it sleeps: `auto`, `never`, `always`,
/// or a number of microseconds.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct SpinWord {
    /// The text from the command line, for `MPMD_SPIN`.
    pub(super) word: String,
    pub(super) spin: Spin,
}

/// Longer than any run, and short enough to be added to a clock.
const ALWAYS: Duration = Duration::from_secs(365 * 24 * 3600);

impl FromStr for SpinWord {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let spin = match word {
            "auto" => Spin::Auto,
            "never" => Spin::Never,
            "always" => Spin::For(ALWAYS),
            number => match number.parse::<u32>() {
                Ok(micros) => Spin::For(Duration::from_micros(micros.into())),
                Err(_) => {
                    return Err(
                        "neither auto, never, always nor a number of microseconds".to_owned()
                    );
                }
            },
        };
        Ok(Self { word: word.to_owned(), spin })
    }
}

impl fmt::Display for SpinWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in
            [("8", 8), ("4Ki", 4096), ("16Mi", 16 << 20), ("1Gi", 1 << 30), ("1025", 1025)]
        {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
            assert_eq!(Size(bytes).to_string(), text);
        }
        for text in ["", "0", "-1", "4K", "Ki", "1.5Mi", "99999999999Gi"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn spinning_is_a_word_or_microseconds() {
        let read = |word: &str| word.parse::<SpinWord>().map(|word| word.spin);
        assert_eq!(read("auto"), Ok(Spin::Auto));
        assert_eq!(read("never"), Ok(Spin::Never));
        assert_eq!(read("25"), Ok(Spin::For(Duration::from_micros(25))));
        assert!(matches!(read("always"), Ok(Spin::For(long)) if long > Duration::from_secs(3600)));
        assert!(read("sometimes").unwrap_err().contains("microseconds"));
    }
}
