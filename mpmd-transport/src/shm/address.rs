//! The address that a process publishes. From two addresses it follows if the processes can share
//! memory, and if not, why.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;

use super::NAME;

/// The version of the shared memory protocol. Two processes need the same version to share memory.
pub(super) const VERSION: u16 = 4;

/// Length in bytes of the random name of a process's socket.
const NAME_BYTES: usize = 16;

/// The published address of a process. It decides if another process can share memory with it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ShmAddress {
    pub(super) version: u16,
    /// Boot id of the running system. Different ids mean different machines.
    boot: String,
    /// Inode of the network namespace. Socket names are known only within it.
    network: u64,
    /// Inode of the process namespace. Process ids are known only within it.
    processes: u64,
    user: u32,
    name: [u8; NAME_BYTES],
}

/// The reason why a published text is not an address of shared memory.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum ShmAddressError {
    /// The process has published this reason instead of an address.
    #[error("{0}")]
    None(String),
    /// The text is neither an address nor a reason.
    #[error("{0:?} is no address of shared memory")]
    Unreadable(String),
}

impl ShmAddress {
    /// Returns this process's address, with a new random name.
    pub(super) fn of_this_process() -> std::io::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
            .trim()
            .to_owned();

        let mut name = [0; NAME_BYTES];
        std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut name)?;

        let namespace = |which| {
            Ok::<_, std::io::Error>(std::fs::metadata(format!("/proc/self/ns/{which}"))?.ino())
        };

        Ok(Self {
            version: VERSION,
            boot,
            network: namespace("net")?,
            processes: namespace("pid")?,
            user: rustix::process::getuid().as_raw(),
            name,
        })
    }

    /// Returns the name of the socket at which the process listens.
    pub(super) fn socket_name(&self) -> Vec<u8> {
        format!("mpmd-{}", hex(&self.name)).into_bytes()
    }

    /// Returns the reason why the processes of the two addresses cannot share memory; `None` if
    /// they can. The order of the two makes no difference.
    fn apart_from(&self, other: &Self) -> Option<&'static str> {
        if self.version != other.version {
            Some("they run different builds")
        } else if self.boot != other.boot {
            Some("they are on different machines")
        } else if self.user != other.user {
            Some("they belong to different users")
        } else if self.network != other.network {
            Some(
                "they are in different network namespaces, where a name of one means nothing to \
                 the other",
            )
        } else if self.processes != other.processes {
            Some(
                "they are in different process namespaces, where a number of one means nothing to \
                 the other",
            )
        } else {
            None
        }
    }
}

/// Returns the reason why two processes with the addresses `a` and `b` cannot share memory, or
/// `None` if they can.
pub fn why_apart(a: &str, b: &str) -> Option<String> {
    let read = |text: &str| text.parse::<ShmAddress>();
    match (read(a), read(b)) {
        (Ok(a), Ok(b)) => a.apart_from(&b).map(str::to_owned),
        (Err(error), _) | (_, Err(error)) => Some(error.to_string()),
    }
}

/// Returns the text that a process publishes instead of an address. `why` is the reason.
pub fn no_address(why: &str) -> String {
    format!("!{why}")
}

impl fmt::Display for ShmAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            version,
            boot,
            network,
            processes,
            user,
            name,
        } = self;
        write!(
            f,
            "{NAME}/{version}/{boot}/{network}/{processes}/{user}/{}",
            hex(name)
        )
    }
}

impl FromStr for ShmAddress {
    type Err = ShmAddressError;

    fn from_str(text: &str) -> Result<Self, ShmAddressError> {
        if let Some(why) = text.strip_prefix('!') {
            return Err(ShmAddressError::None(why.to_owned()));
        }

        let unreadable = || ShmAddressError::Unreadable(text.to_owned());
        let fields: Vec<&str> = text.split('/').collect();
        let [NAME, version, boot, network, processes, user, name] = fields[..] else {
            return Err(unreadable());
        };

        let parse = || {
            Some(Self {
                version: version.parse().ok()?,
                boot: boot.to_owned(),
                network: network.parse().ok()?,
                processes: processes.parse().ok()?,
                user: user.parse().ok()?,
                name: unhex(name)?,
            })
        };
        parse().ok_or_else(unreadable)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; NAME_BYTES]> {
    let mut bytes = [0; NAME_BYTES];
    if text.len() != 2 * NAME_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }

    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_are_unique() {
        let (one, other) = (
            ShmAddress::of_this_process().unwrap(),
            ShmAddress::of_this_process().unwrap(),
        );
        assert_eq!(one.to_string().parse(), Ok(one.clone()));
        assert_ne!(one, other);
        assert_eq!(why_apart(&one.to_string(), &other.to_string()), None);
        for wrong in [
            "",
            "shm",
            "shm/1/a/2/3/4",
            "tcp/1/a/2/3/4/00",
            "shm/1/a/2/3/4/xyz",
            "1.2.3.4:5",
        ] {
            assert!(wrong.parse::<ShmAddress>().is_err(), "{wrong}");
        }
        let signed = format!("shm/1/a/2/3/4/+1{}", "0".repeat(30));
        assert!(signed.parse::<ShmAddress>().is_err(), "a sign is no digit");
        let tampered = format!("{one}0");
        assert!(
            why_apart(&tampered, &one.to_string())
                .unwrap()
                .contains("no address of shared memory")
        );
    }

    #[test]
    fn fuzz_shm_address() {
        let here = ShmAddress::of_this_process().unwrap();
        let samples = [here.to_string(), no_address("not allowed")].map(String::into_bytes);
        mpmd_fuzz::bytes("shm-address", &samples, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let apart = why_apart(&text, &here.to_string());
            assert_eq!(why_apart(&here.to_string(), &text), apart);
            if let Ok(address) = text.parse::<ShmAddress>() {
                assert_eq!(address.to_string().parse(), Ok(address));
            }
        });
    }

    #[test]
    fn why_apart_is_symmetric_and_names_the_reason() {
        let here = ShmAddress::of_this_process().unwrap();
        for (other, why) in [
            (
                ShmAddress {
                    version: VERSION + 1,
                    ..here.clone()
                },
                "different builds",
            ),
            (
                ShmAddress {
                    boot: "elsewhere".into(),
                    ..here.clone()
                },
                "different machines",
            ),
            (
                ShmAddress {
                    user: here.user + 1,
                    ..here.clone()
                },
                "different users",
            ),
            (
                ShmAddress {
                    network: 1,
                    ..here.clone()
                },
                "network namespaces",
            ),
            (
                ShmAddress {
                    processes: 1,
                    ..here.clone()
                },
                "process namespaces",
            ),
        ] {
            let found = why_apart(&here.to_string(), &other.to_string()).unwrap();
            assert!(found.contains(why), "{found}");
            assert_eq!(
                why_apart(&other.to_string(), &here.to_string()),
                Some(found)
            );
        }
        let without = no_address("memfd_create is not allowed");
        assert_eq!(
            why_apart(&here.to_string(), &without).unwrap(),
            "memfd_create is not allowed"
        );
    }
}
