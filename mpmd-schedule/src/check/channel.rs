//! The order that a transport imposes on transfers between processes: a [`Channel`].

use std::fmt;
use std::str::FromStr;

/// Order constraints between posts of a process, and the time at which a send is done.
///
/// Displayed and parsed as `tags`, `tags:4`, `pair`, `direction`, `single`, each optionally
/// followed by `,eager` or `,eager:4`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Channel {
    /// The division of a process's posts into queues. A post waits for the earlier ones of its
    /// queue.
    pub queues: Queues,
    /// The time at which a send is done.
    pub protocol: Protocol,
}

/// The division of a process's ends of transfers into queues. Ends in one queue go one after the
/// other.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Queues {
    /// No queues: matching ends find each other, in any order. This framework's own transports work
    /// so.
    Tags,
    /// Like tags, with a limit: each process has this many ends open at a time, in the order of its
    /// posts. 0 counts as 1.
    TagsBounded(u32),
    /// One queue for each peer process, for sends and receives together.
    PerPair,
    /// One queue for each peer process and direction: sends and receives wait separately.
    PerDirection,
    /// A single queue for all ends of a process.
    Single,
}

/// The time at which a send is done.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Protocol {
    /// A send waits until it and its receive are at the front and the data exists. Both are then
    /// done together.
    Rendezvous,
    /// A send can also be done without its receive, if the receiver has room. Each sender has room
    /// for this many messages that the receiver has not taken. The room is assigned in the order of
    /// the sender's posts.
    ///
    /// If several senders shared room, chance would decide which sender gets it, and so whether
    /// there is a deadlock. Model such a channel by the room that each sender has for certain.
    Eager(u32),
}

impl Channel {
    /// The channel that requires the least order: tags, rendezvous.
    pub const TAGS: Self = Self::rendezvous(Queues::Tags);

    /// The kinds of queues, from the richest channel to the poorest, each with rendezvous.
    pub const RENDEZVOUS: [Self; 4] = [
        Self::TAGS,
        Self::rendezvous(Queues::PerDirection),
        Self::rendezvous(Queues::PerPair),
        Self::rendezvous(Queues::Single),
    ];

    /// Creates a channel with these queues, and sends that wait for their receives.
    pub const fn rendezvous(queues: Queues) -> Self {
        Self { queues, protocol: Protocol::Rendezvous }
    }

    /// Creates a channel with these queues, and room for `messages` messages from each sender.
    pub const fn eager(queues: Queues, messages: u32) -> Self {
        Self { queues, protocol: Protocol::Eager(messages) }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.queues {
            Queues::Tags => f.write_str("tags")?,
            Queues::TagsBounded(most) => write!(f, "tags:{most}")?,
            Queues::PerPair => f.write_str("pair")?,
            Queues::PerDirection => f.write_str("direction")?,
            Queues::Single => f.write_str("single")?,
        }
        match self.protocol {
            Protocol::Rendezvous => Ok(()),
            Protocol::Eager(messages) => write!(f, ",eager:{messages}"),
        }
    }
}

/// An error in the name of a channel, with that name.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{0:?} is no channel; there are tags, tags:K, pair, direction and single, each also with \
     ,eager or ,eager:N"
)]
pub struct NoChannel(String);

impl FromStr for Channel {
    type Err = NoChannel;

    /// Parses the output of [`Display`](fmt::Display). `eager` alone has room for one message. An
    /// unknown word or a limit of 0 is an error.
    fn from_str(text: &str) -> Result<Self, NoChannel> {
        let wrong = || NoChannel(text.to_owned());
        let number = |text: &str| text.parse().ok().filter(|number| *number > 0).ok_or_else(wrong);
        let (queues, protocol) = text.split_once(',').map_or((text, None), |(a, b)| (a, Some(b)));
        let queues = match queues.split_once(':') {
            Some(("tags", most)) => Queues::TagsBounded(number(most)?),
            Some(_) => return Err(wrong()),
            None => match queues {
                "tags" => Queues::Tags,
                "pair" => Queues::PerPair,
                "direction" => Queues::PerDirection,
                "single" => Queues::Single,
                _ => return Err(wrong()),
            },
        };
        let protocol = match protocol {
            None | Some("rendezvous") => Protocol::Rendezvous,
            Some("eager") => Protocol::Eager(1),
            Some(eager) => {
                Protocol::Eager(number(eager.strip_prefix("eager:").ok_or_else(wrong)?)?)
            }
        };
        Ok(Self { queues, protocol })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_channels_are_parsed() {
        for text in ["tags", "tags:4", "pair", "direction,eager:3", "single,eager:1"] {
            assert_eq!(text.parse::<Channel>().unwrap().to_string(), text);
        }
        assert_eq!("single,eager".parse(), Ok(Channel::eager(Queues::Single, 1)));
        assert_eq!("pair,rendezvous".parse(), Ok(Channel::rendezvous(Queues::PerPair)));
        for text in [
            "",
            "fifo",
            "tags:",
            "tags:0",
            "pair:2",
            "tags,eager:0",
            "tags,eager:x",
            "tags,",
            "tags,eager,eager",
        ] {
            assert!(text.parse::<Channel>().is_err(), "{text}");
        }
    }
}
