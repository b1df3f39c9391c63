//! The order that a transport imposes on transfers between processes: a [`Channel`].

use std::fmt;
use std::str::FromStr;

/// The way in which a process's sends and receives wait for each other in queues. Sends and
/// receives in one queue go one after the other. A send waits until the data exists and both it and
/// its receive are at the front of their queues. Both are then done together.
///
/// Displayed and parsed as `tags`, `direction`, `pair` and `single`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Channel {
    /// No queues: a send and its receive find each other in any order. The transports of this
    /// framework work this way.
    Tags,
    /// One queue for each peer process and direction: sends and receives wait separately.
    PerDirection,
    /// One queue for each peer process, for sends and receives together.
    PerPair,
    /// A single queue for all sends and receives of a process.
    Single,
}

impl Channel {
    /// All channels, from the fewest to the most waits.
    pub const ALL: [Self; 4] = [Self::Tags, Self::PerDirection, Self::PerPair, Self::Single];
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tags => "tags",
            Self::PerDirection => "direction",
            Self::PerPair => "pair",
            Self::Single => "single",
        })
    }
}

/// The error that a text is not the name of a channel.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is no channel; there are tags, direction, pair and single")]
pub struct NoChannel(String);

impl FromStr for Channel {
    type Err = NoChannel;

    fn from_str(text: &str) -> Result<Self, NoChannel> {
        let found = Self::ALL
            .into_iter()
            .find(|channel| channel.to_string() == text);
        found.ok_or_else(|| NoChannel(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_read_as_they_are_written() {
        for channel in Channel::ALL {
            assert_eq!(channel.to_string().parse(), Ok(channel));
        }
        for wrong in ["", "tag", "tags:1", "pair,eager", "Tags"] {
            assert!(wrong.parse::<Channel>().is_err(), "{wrong}");
        }
    }
}
