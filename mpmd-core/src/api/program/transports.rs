//! The transport of a job: its name, this process's open endpoint, and the check that all processes
//! use the same one.
//!
//! A process opens its endpoint, tells the rendezvous the addresses, checks all members with
//! `agree`, and then connects.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_memory::Pool;
use mpmd_rendezvous::{JobMember, JoinedEpoch};
use mpmd_transport::mixed::Mixed;
use mpmd_transport::shm::{self, ShmConfig};
use mpmd_transport::tcp::{PeerListener, TcpConfig};
use mpmd_transport::ucx::{self, UcxConfig};
use mpmd_transport::{Transport, TransportError};

pub use mpmd_base::block::Spin;
pub use mpmd_launch::{TRANSPORTS as NAMES, check_transport as check};
pub use mpmd_transport::ucx::{UcxReport, examine};

use crate::error::{Error, Result};
use crate::warning::warn_user;
use mpmd_launch::{LaunchError, variables};

/// The default transport: shared memory between processes that can share it, else TCP.
pub const DEFAULT: &str = AUTO;

const AUTO: &str = "auto";
const SIMULATED: &str = "simulated";
const TCP: &str = "tcp";

/// True if this program was built with the feature `ucx`.
pub const HAS_UCX: bool = cfg!(feature = "ucx");

/// This process's open endpoint of the requested transport: it has an address, but no peers yet.
pub(super) enum OpenedTransport {
    Auto {
        /// The endpoint in shared memory, or the reason why this process cannot share memory.
        shm: std::result::Result<shm::OpenedShm, TransportError>,
        tcp: PeerListener,
    },
    Shm(shm::OpenedShm),
    Tcp(PeerListener),
    Ucx(ucx::OpenedUcx),
    /// The transport of a simulated process.
    Simulated(SimulatedEndpoint),
}

/// A function that returns the transport of a simulated process, or an error if that process was
/// killed.
pub(super) type SimulatedEndpoint =
    Box<dyn FnOnce(&JoinedEpoch) -> Result<Arc<dyn Transport>> + Send>;

impl OpenedTransport {
    /// Opens the transport `name` for a job of `processes`. Network sockets listen at the IP
    /// address in `at`.
    pub(super) fn open(name: &str, processes: usize, at: SocketAddr) -> Result<Self> {
        check(name)?;
        Ok(match name {
            shm::NAME => Self::Shm(shm::OpenedShm::open()?),
            TCP => Self::Tcp(PeerListener::bind(at)?),
            ucx::NAME => Self::Ucx(ucx::OpenedUcx::open(processes)?),
            _ => Self::Auto {
                shm: shm::OpenedShm::open(),
                tcp: PeerListener::bind(at)?,
            },
        })
    }

    /// Returns (transport, address) pairs at which peers reach this process, the requested
    /// transport first. Each transport has its own format of addresses.
    pub(super) fn addresses(&self) -> Vec<(String, String)> {
        let pairs = match self {
            Self::Auto { shm, tcp } => vec![
                (AUTO, String::new()),
                (
                    shm::NAME,
                    match shm {
                        Ok(opened) => opened.address(),
                        Err(TransportError::Unavailable { why, .. }) => shm::no_address(why),
                        Err(error) => shm::no_address(&error.to_string()),
                    },
                ),
                (TCP, tcp.address().to_string()),
            ],
            Self::Shm(opened) => vec![(shm::NAME, opened.address())],
            Self::Tcp(listener) => vec![(TCP, listener.address().to_string())],
            Self::Ucx(opened) => vec![(ucx::NAME, opened.address().to_owned())],
            Self::Simulated(_) => vec![(SIMULATED, String::new())],
        };

        pairs
            .into_iter()
            .map(|(name, address)| (name.to_owned(), address))
            .collect()
    }

    /// Connects to all members and returns the transport. The members must have passed `agree`.
    /// Warns the user if processes on one host cannot share memory under `auto`.
    pub(super) fn connect(
        self,
        token: [u8; 32],
        joined: &JoinedEpoch,
        peer_timeout: Duration,
        spin: Spin,
    ) -> Result<Arc<dyn Transport>> {
        let JoinedEpoch {
            process,
            epoch,
            ref members,
            ..
        } = *joined;
        let connect_tcp = |listener: PeerListener| -> Result<Arc<dyn Transport>> {
            let peers = members
                .iter()
                .map(|member| address(member, TCP).and_then(|text| text.parse().ok()));
            let peers = peers.collect::<Option<Vec<SocketAddr>>>().ok_or_else(|| {
                Error::Environment("a process of the job has no address for tcp".to_owned())
            })?;
            let pool = Pool::new(TCP, None);
            Ok(listener.connect(TcpConfig {
                process,
                peers,
                token,
                epoch,
                peer_timeout,
                pool,
            })?)
        };
        let connect_shm = |opened: shm::OpenedShm,
                           is_near: &[bool]|
         -> Result<Arc<dyn Transport>> {
            let own_address = |member| address(member, shm::NAME).unwrap_or_default().to_owned();
            let pairs = members.iter().zip(is_near);
            let peers = pairs.map(|(member, near)| near.then(|| own_address(member)));
            let peers = peers.collect();
            Ok(opened.connect(&ShmConfig {
                process,
                peers,
                token,
                epoch,
                peer_timeout,
            })?)
        };

        match self {
            Self::Simulated(endpoint) => endpoint(joined),
            Self::Tcp(listener) => connect_tcp(listener),
            Self::Shm(opened) => connect_shm(opened, &vec![true; members.len()]),
            Self::Auto {
                shm: opened,
                tcp: listener,
            } => {
                if let Some(line) = fallback(members, process) {
                    warn_user(&line);
                }

                let near = near(members, process);
                let here = near.iter().filter(|near| **near).count();
                let others = members.len() - 1;
                match opened {
                    Ok(opened) if here == others => connect_shm(opened, &near),
                    Ok(opened) if here > 0 => {
                        let close = connect_shm(opened, &near)?;
                        let far = connect_tcp(listener)?;
                        Ok(Arc::new(Mixed::new("shm+tcp", close, far, near)))
                    }
                    _ => connect_tcp(listener),
                }
            }
            Self::Ucx(opened) => {
                let here = members.get(process.index()).map(|member| &member.host);
                let neighbours = members
                    .iter()
                    .filter(|member| Some(&member.host) == here)
                    .count();
                let peers = members
                    .iter()
                    .map(|member| asked_address(member).to_owned())
                    .collect();
                let pool = Pool::new(ucx::NAME, None);
                Ok(opened.connect(UcxConfig {
                    process,
                    peers,
                    token,
                    epoch,
                    peer_timeout,
                    pool,
                    spin,
                    neighbours,
                })?)
            }
        }
    }
}

/// Returns, for each member, true if `process` shares memory with it under transport `auto`. The
/// result is symmetric: both processes of a pair agree.
fn near(members: &[JobMember], process: ProcessId) -> Vec<bool> {
    let Some(me) = members.get(process.index()) else {
        return vec![false; members.len()];
    };
    let all = members.iter().enumerate();
    all.map(|(i, member)| i != process.index() && why_not_near(me, member).is_none())
        .collect()
}

/// Returns the reason why two members do not share memory, or `None` if they do. Members with
/// different host names count as being on different hosts, even if `MPMD_HOST` set the names.
fn why_not_near(one: &JobMember, other: &JobMember) -> Option<String> {
    if one.host != other.host {
        return Some("they are on different hosts".to_owned());
    }
    let of = |member| address(member, shm::NAME).unwrap_or_default();
    shm::why_apart(of(one), of(other))
}

/// Returns a warning about the first pair of processes on one host that cannot share memory. Only
/// the first process of the pair gets the warning, so the job prints it once.
fn fallback(members: &[JobMember], process: ProcessId) -> Option<String> {
    let mut pairs = (0..members.len()).flat_map(|a| (a + 1..members.len()).map(move |b| (a, b)));
    let (one, other, why) = pairs.find_map(|(a, b)| {
        let on_one_host = members[a].host == members[b].host;
        let why = why_not_near(&members[a], &members[b]).filter(|_| on_one_host)?;
        Some((a, b, why))
    })?;
    (one == process.index()).then(|| {
        let host = &members[one].host;
        format!("processes {one} and {other} are on host {host}, but talk over tcp: {why}")
    })
}

/// Returns the (transport, address) pairs that this process reports to the rendezvous. If the
/// transport could not be opened, the result has its name without an address.
pub(super) fn told(name: &str, opened: &Result<OpenedTransport>) -> Vec<(String, String)> {
    opened.as_ref().map_or_else(
        |_| vec![(name.to_owned(), String::new())],
        OpenedTransport::addresses,
    )
}

/// Checks that all members request the same transport and have it. The result is the same on every
/// process.
///
/// # Errors
///
/// - [`LaunchError::Transports`] if the members request different transports.
/// - Else [`LaunchError::Lacking`] of the first member that lacks the transport or its devices.
/// - Else [`LaunchError::Apart`] of the first two members that cannot share memory but must.
pub(super) fn agree(members: &[JobMember]) -> Result<(), LaunchError> {
    let mut who: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (process, member) in members.iter().enumerate() {
        who.entry(asked_transport(member))
            .or_default()
            .push(process);
    }

    if who.len() > 1 {
        let said = who.iter().map(|(name, processes)| match &processes[..] {
            [one] => format!("process {one} says {name}"),
            several => format!("processes {} say {name}", listed(several)),
        });
        return Err(LaunchError::Transports {
            said: said.collect::<Vec<_>>().join(", "),
            variable: variables::TRANSPORT,
        });
    }

    let troubled = members.iter().enumerate().find_map(|(process, member)| {
        let lack = member.trouble.clone()?;
        Some(LaunchError::Lacking {
            process: ProcessId(process as u32),
            host: member.host.clone(),
            lack,
        })
    });
    if let Some(troubled) = troubled {
        return Err(troubled);
    }

    if !who.contains_key(shm::NAME) {
        return Ok(());
    }
    // A comparison with the first member is enough: sharing memory is transitive.
    let apart = members
        .iter()
        .enumerate()
        .skip(1)
        .find_map(|(other, member)| {
            let why = shm::why_apart(asked_address(&members[0]), asked_address(member))?;
            let other = ProcessId(other as u32);
            Some(LaunchError::Apart {
                one: ProcessId(0),
                other,
                why,
                variable: variables::TRANSPORT,
            })
        });
    apart.map_or(Ok(()), Err)
}

/// Returns the address at which a member is reached over a transport, or `None` if it has no such
/// address.
fn address<'a>(member: &'a JobMember, transport: &str) -> Option<&'a str> {
    let found = member.addresses.iter().find(|(name, _)| name == transport);
    found.map(|(_, address)| address.as_str())
}

/// Returns the name of the transport that a member requests.
fn asked_transport(member: &JobMember) -> &str {
    member
        .addresses
        .first()
        .map_or("nothing", |(name, _)| name.as_str())
}

/// Returns the address of a member at the transport that it requests.
fn asked_address(member: &JobMember) -> &str {
    member
        .addresses
        .first()
        .map_or("", |(_, address)| address.as_str())
}

/// Formats ascending numbers with ranges, for a message: `0, 2-5 and 7`.
pub(super) fn listed(numbers: &[usize]) -> String {
    let runs = numbers
        .chunk_by(|a, b| a + 1 == *b)
        .flat_map(|run| match run {
            [first, .., last] if run.len() > 2 => vec![format!("{first}-{last}")],
            _ => run.iter().map(ToString::to_string).collect(),
        });
    let mut runs: Vec<String> = runs.collect();
    match runs.pop() {
        Some(last) if !runs.is_empty() => format!("{} and {last}", runs.join(", ")),
        last => last.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, trouble: Option<&str>) -> JobMember {
        JobMember {
            host: "left".into(),
            addresses: vec![(name.into(), "1.2.3.4:5".into())],
            trouble: trouble.map(Into::into),
            ..JobMember::default()
        }
    }

    fn wrong(members: &[JobMember]) -> String {
        agree(members).unwrap_err().to_string()
    }

    #[test]
    fn names_are_those_of_the_transports() {
        assert_eq!(NAMES, [AUTO, shm::NAME, TCP, ucx::NAME]);
    }

    #[test]
    fn members_with_different_transports_get_an_error() {
        let (tcp, ucx) = (member("tcp", None), member("ucx", None));
        assert_eq!(agree(&[tcp.clone(), tcp.clone()]), Ok(()));
        let said = wrong(&[
            tcp.clone(),
            ucx.clone(),
            tcp.clone(),
            tcp.clone(),
            tcp.clone(),
        ]);
        let expected =
            "processes 0 and 2-4 say tcp, process 1 says ucx; MPMD_TRANSPORT must be the same";
        assert!(said.contains(expected), "{said}");
        // A difference in names is reported before a process that lacks its transport.
        let without = member("ucx", Some("no transport: it has no library"));
        assert!(wrong(&[tcp, without.clone()]).contains("process 0 says tcp, process 1 says ucx"));
        let said = wrong(&[ucx, without.clone(), without]);
        assert_eq!(
            said,
            "process 1 on host left has no transport: it has no library"
        );
        assert!(
            wrong(&[JobMember::default(), member("tcp", None)]).contains("process 0 says nothing")
        );
    }

    #[test]
    fn auto_shares_memory_on_a_host_or_warns_once() {
        let at = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let here = |host: &str| {
            let addresses = told(DEFAULT, &OpenedTransport::open(DEFAULT, 3, at));
            JobMember {
                host: host.into(),
                addresses,
                ..JobMember::default()
            }
        };
        let mut members = [here("left"), here("left"), here("right")];
        assert_eq!(agree(&members), Ok(()));
        let near_all = |members: &[JobMember]| [0, 1, 2].map(|i| near(members, ProcessId(i)));
        assert_eq!(
            near_all(&members),
            [[false, true, false], [true, false, false], [false; 3]]
        );
        let says = |members: &[JobMember]| [0, 1, 2].map(|i| fallback(members, ProcessId(i)));
        assert_eq!(
            says(&members),
            [None, None, None],
            "other hosts are no reason to say anything"
        );
        members[1].addresses[1].1 = shm::no_address("memfd_create is not allowed");
        members[2].host = "left".into();
        assert_eq!(
            near_all(&members),
            [[false, false, true], [false; 3], [true, false, false]]
        );
        let [first, second, third] = says(&members);
        let expected =
            "processes 0 and 1 are on host left, but talk over tcp: memfd_create is not allowed";
        assert_eq!(
            (first.as_deref(), second, third),
            (Some(expected), None, None)
        );
        // With `shm` requested by name, the same is an error on every process.
        let shm = |address: &str| JobMember {
            addresses: vec![("shm".into(), address.into())],
            ..JobMember::default()
        };
        let address = members[0].addresses[1].1.clone();
        assert_eq!(agree(&[shm(&address), shm(&address)]), Ok(()));
        let elsewhere = address.replacen('-', "x", 1);
        let said = wrong(&[shm(&address), shm(&address), shm(&elsewhere)]);
        assert!(
            said.starts_with(
                "processes 0 and 2 cannot share memory: they are on different machines"
            ),
            "{said}"
        );
    }

    #[test]
    fn numbers_are_listed_in_runs() {
        assert_eq!(listed(&[3]), "3");
        assert_eq!(listed(&[3, 4]), "3 and 4");
        assert_eq!(listed(&[0, 2, 3, 4, 5, 7]), "0, 2-5 and 7");
        assert_eq!(listed(&[0, 1, 2]), "0-2");
    }

    #[test]
    fn told_gives_the_address_or_only_the_name() {
        let at = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let tcp = OpenedTransport::open("tcp", 2, at);
        let told_of_tcp = told("tcp", &tcp);
        assert!(matches!(
            &told_of_tcp[..],
            [(name, at)] if name == "tcp" && at.starts_with("127.0.0.1:")
        ));
        let pigeon = OpenedTransport::open("pigeon", 2, at);
        assert!(pigeon.is_err());
        assert_eq!(
            told("pigeon", &pigeon),
            [("pigeon".to_owned(), String::new())]
        );
        #[cfg(not(feature = "ucx"))]
        {
            let said = OpenedTransport::open("ucx", 2, at)
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default();
            assert!(
                said.contains("built without it") && said.contains("--features ucx"),
                "{said}"
            );
        }
    }
}
