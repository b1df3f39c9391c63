//! What carries transfers between processes, as far as order is concerned: a [`Channel`].

use std::fmt;
use std::str::FromStr;

/// How what a process posts waits for what it has posted before, and when a send is done.
///
/// Shown and read as `tags`, `tags:4`, `pair`, `direction`, `single`, each with `,eager` or
/// `,eager:4` behind it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Channel {
    /// What waits for what was posted before it.
    pub queues: Queues,
    /// When a send is done.
    pub protocol: Protocol,
}

/// Which of a process's ends of transfers go one after the other.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Queues {
    /// None: what belongs together finds itself, in any order. What this framework's own transports
    /// do.
    Tags,
    /// As tags, but of each process only so many ends that are not done at a time, in the order in
    /// which it posts them. 0 counts as 1.
    TagsBounded(u32),
    /// Those with the same other process, in both directions.
    PerPair,
    /// Those with the same other process in the same direction.
    PerDirection,
    /// All of them.
    Single,
}

/// When a send is done.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Protocol {
    /// When it and its receive are both at the front and what is sent is there: both are done
    /// together.
    Rendezvous,
    /// Also without its receive, where the receiver has room: for each sender so many messages that
    /// it has not taken yet, given in the order in which the sender posts.
    ///
    /// Room that several senders share would make it a matter of luck which of them gets it, and so
    /// whether there is a deadlock; such a channel is as good as one with the room that is left to
    /// each for certain.
    Eager(u32),
}

impl Channel {
    /// What needs the least order: tags, rendezvous.
    pub const TAGS: Self = Self::rendezvous(Queues::Tags);

    /// The kinds of queues, from the richest channel to the poorest, each with rendezvous.
    pub const RENDEZVOUS: [Self; 4] = [
        Self::TAGS,
        Self::rendezvous(Queues::PerDirection),
        Self::rendezvous(Queues::PerPair),
        Self::rendezvous(Queues::Single),
    ];

    /// With these queues, and sends that wait for their receives.
    pub const fn rendezvous(queues: Queues) -> Self {
        Self { queues, protocol: Protocol::Rendezvous }
    }

    /// With these queues, and room for so many messages from each sender.
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

/// Not the name of a channel.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{0:?} is no channel; there are tags, tags:K, pair, direction and single, each also with \
     ,eager or ,eager:N"
)]
pub struct NoChannel(String);

impl FromStr for Channel {
    type Err = NoChannel;

    /// Reads what [`Display`](fmt::Display) shows; `eager` alone has room for one message.
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
    fn what_is_shown_is_read() {
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
