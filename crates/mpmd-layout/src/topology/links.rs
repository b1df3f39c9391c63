//! The costs of links between devices. Planners compare routes by them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The distance between two devices: the kind of link between them. Ordered from nearest to
/// farthest.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkClass {
    /// Both ends are the same device.
    SameDevice,
    /// Two devices of one process.
    SameProcess,
    /// Devices of two processes on one host.
    SameHost,
    /// Devices on two hosts.
    Network,
}

/// The cost of a message over one link.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct LinkSpeed {
    /// Nanoseconds that every message takes in addition to the time for its bytes.
    pub latency_ns: u64,
    /// Bytes per microsecond, which is megabytes (10^6) per second.
    pub bytes_per_us: u64,
}

/// The costs of all classes of links.
///
/// They are the same on every process of a job: plans depend on them, and all processes must make
/// the same plans.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct LinkSpeeds {
    /// Cost of a copy within one device's memory.
    pub same_device: LinkSpeed,
    /// Cost between two devices of a process.
    pub same_process: LinkSpeed,
    /// Cost between two processes on a host.
    pub same_host: LinkSpeed,
    /// Cost between two hosts.
    pub network: LinkSpeed,
}

impl LinkClass {
    /// All classes, nearest first.
    pub const ALL: [Self; 4] = [
        Self::SameDevice,
        Self::SameProcess,
        Self::SameHost,
        Self::Network,
    ];

    /// Returns the class's name in JSON: `same_device`, `same_process`, `same_host` or `network`.
    pub fn name(self) -> &'static str {
        match self {
            Self::SameDevice => "same_device",
            Self::SameProcess => "same_process",
            Self::SameHost => "same_host",
            Self::Network => "network",
        }
    }
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().replace('_', " "))
    }
}

impl LinkSpeed {
    /// Returns the nanoseconds that a message of `bytes` bytes takes: latency plus the time for the
    /// bytes. Saturates at `u64::MAX`.
    pub fn nanos(&self, bytes: u64) -> u64 {
        let moving = u128::from(bytes) * 1000 / u128::from(self.bytes_per_us.max(1));
        self.latency_ns
            .saturating_add(u64::try_from(moving).unwrap_or(u64::MAX))
    }
}

impl LinkSpeeds {
    /// Returns the cost of a link of this class.
    pub fn of(&self, class: LinkClass) -> LinkSpeed {
        match class {
            LinkClass::SameDevice => self.same_device,
            LinkClass::SameProcess => self.same_process,
            LinkClass::SameHost => self.same_host,
            LinkClass::Network => self.network,
        }
    }
}

/// Rounded costs of a common machine with a network of 10 Gbit/s. The costs of other machines often
/// lead to similar plans.
impl Default for LinkSpeeds {
    fn default() -> Self {
        Self {
            same_device: LinkSpeed {
                latency_ns: 500,
                bytes_per_us: 8_000,
            },
            same_process: LinkSpeed {
                latency_ns: 2_000,
                bytes_per_us: 8_000,
            },
            same_host: LinkSpeed {
                latency_ns: 25_000,
                bytes_per_us: 4_000,
            },
            network: LinkSpeed {
                latency_ns: 50_000,
                bytes_per_us: 1_200,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_costs_its_latency_and_its_bytes() {
        let link = LinkSpeed {
            latency_ns: 100,
            bytes_per_us: 1_000,
        };
        assert_eq!(
            (link.nanos(0), link.nanos(5), link.nanos(1 << 20)),
            (100, 105, 100 + (1 << 20))
        );
        assert!(
            LinkSpeed {
                latency_ns: 0,
                bytes_per_us: 0
            }
            .nanos(u64::MAX)
                > 0,
            "no division by nothing"
        );
    }

    #[test]
    fn names_are_those_of_the_machine_interface() {
        for class in LinkClass::ALL {
            assert_eq!(serde_json::to_value(class).unwrap(), class.name());
        }
        let links = serde_json::to_value(LinkSpeeds::default()).unwrap();
        let mut names: Vec<_> = links
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["network", "same_device", "same_host", "same_process"]
        );
    }
}
