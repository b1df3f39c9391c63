//! Which transport a job runs over: what there is, what each process has opened, and whether all agree on it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use mpmd_transport::rendezvous::Member;
use mpmd_transport::tcp::{Listener, TcpConfig};
use mpmd_transport::ucx::{self, UcxConfig};
use mpmd_transport::{Pool, ProcessId, Transport};

pub use mpmd_transport::probe;
pub use mpmd_transport::ucx::{Report, Spin, examine};

use super::connect::EPOCH;
use crate::error::{Error, Result};
use crate::launch::{JobEnv, LaunchError, variables};

/// The transports between processes, as users name them. What each needs is found when it is opened.
pub const NAMES: [&str; 2] = [DEFAULT, ucx::NAME];

/// The transport where nobody asks for another.
pub const DEFAULT: &str = "tcp";

/// Whether this program was built with the feature `ucx`.
pub const HAS_UCX: bool = cfg!(feature = "ucx");

/// Whether there is a transport of this name.
///
/// # Errors
///
/// [`LaunchError::Variable`] of `MPMD_TRANSPORT`, with the names that there are.
pub fn check(name: &str) -> Result<(), LaunchError> {
    if NAMES.contains(&name) {
        return Ok(());
    }
    Err(LaunchError::Variable {
        variable: variables::TRANSPORT.to_owned(),
        value: name.to_owned(),
        expected: format!("the name of a transport: {}", NAMES.join(" or ")),
    })
}

/// This process's side of the transport asked for: it has an address, but no peers yet.
pub(super) enum Opened {
    Tcp(Listener),
    Ucx(ucx::Opened),
}

impl Opened {
    /// Opens the transport `name` for a job of so many processes; what listens on a network does so at `ip`.
    pub(super) fn open(name: &str, processes: usize, ip: IpAddr) -> Result<Self> {
        check(name)?;
        Ok(if name == ucx::NAME {
            Self::Ucx(ucx::Opened::open(processes)?)
        } else {
            Self::Tcp(Listener::bind(ip)?)
        })
    }

    /// Where peers reach it, in the transport's own words.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Tcp(listener) => listener.address().to_string(),
            Self::Ucx(opened) => opened.address().to_owned(),
        }
    }

    /// Connects to all members, which agree on this transport.
    pub(super) fn connect(
        self,
        env: &JobEnv,
        members: &[Member],
        patience: Duration,
        spin: Spin,
    ) -> Result<Arc<dyn Transport>> {
        let (process, token, epoch) = (env.process, *env.token.bytes(), EPOCH);
        let addresses = members.iter().map(|member| asked(member).1);
        match self {
            Self::Tcp(listener) => {
                let peers =
                    addresses.map(|address| address.parse().ok()).collect::<Option<Vec<SocketAddr>>>();
                let peers = peers.ok_or_else(|| {
                    Error::Environment("a process of the job has no address for tcp".to_owned())
                })?;
                let pool = Pool::new(DEFAULT, None);
                Ok(listener.connect(TcpConfig { process, peers, token, epoch, patience, pool })?)
            }
            Self::Ucx(opened) => {
                let here = members.get(process.index()).map(|member| &member.host);
                let neighbours = members.iter().filter(|member| Some(&member.host) == here).count();
                let peers = addresses.map(str::to_owned).collect();
                let pool = Pool::new(ucx::NAME, None);
                Ok(opened.connect(UcxConfig {
                    process,
                    peers,
                    token,
                    epoch,
                    patience,
                    pool,
                    spin,
                    neighbours,
                })?)
            }
        }
    }
}

/// What a process tells of its transport: the name that it asks for, with the address if it has one.
pub(super) fn told(name: &str, opened: &Result<Opened>) -> Vec<(String, String)> {
    vec![(name.to_owned(), opened.as_ref().map(Opened::address).unwrap_or_default())]
}

/// Whether all members ask for one transport, and have it. The same on every process.
///
/// # Errors
///
/// [`LaunchError::Transports`] where they ask for different ones; else [`LaunchError::NoTransport`] of the
/// first that does not have it.
pub(super) fn agree(members: &[Member]) -> Result<(), LaunchError> {
    let mut who: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (process, member) in members.iter().enumerate() {
        who.entry(asked(member).0).or_default().push(process);
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
        let why = member.trouble.clone()?;
        Some(LaunchError::NoTransport { process: ProcessId(process as u32), host: member.host.clone(), why })
    });
    troubled.map_or(Ok(()), Err)
}

/// The transport that a member asks for, and its address there.
fn asked(member: &Member) -> (&str, &str) {
    member.addresses.first().map_or(("nothing", ""), |(name, address)| (name, address))
}

/// Ascending numbers for people: `0, 2-5 and 7`.
fn listed(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).flat_map(|run| match run {
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

    fn member(name: &str, trouble: Option<&str>) -> Member {
        Member {
            host: "left".into(),
            addresses: vec![(name.into(), "1.2.3.4:5".into())],
            trouble: trouble.map(Into::into),
            ..Member::default()
        }
    }

    fn wrong(members: &[Member]) -> String {
        agree(members).unwrap_err().to_string()
    }

    #[test]
    fn names_are_known_or_listed() {
        assert!(NAMES.iter().all(|name| check(name).is_ok()));
        let said = check("pigeon").unwrap_err().to_string();
        assert!(said.contains("MPMD_TRANSPORT=pigeon") && said.ends_with("tcp or ucx"), "{said}");
    }

    #[test]
    fn members_agree_or_everybody_hears_who_says_what() {
        let (tcp, ucx) = (member("tcp", None), member("ucx", None));
        assert_eq!(agree(&[tcp.clone(), tcp.clone()]), Ok(()));
        let said = wrong(&[tcp.clone(), ucx.clone(), tcp.clone(), tcp.clone(), tcp.clone()]);
        let expected = "processes 0 and 2-4 say tcp, process 1 says ucx; MPMD_TRANSPORT must be the same";
        assert!(said.contains(expected), "{said}");
        // That goes before what only one of them cannot do.
        let without = member("ucx", Some("it has no library"));
        assert!(wrong(&[tcp, without.clone()]).contains("process 0 says tcp, process 1 says ucx"));
        let said = wrong(&[ucx, without.clone(), without]);
        assert_eq!(said, "process 1 on host left has no transport: it has no library");
        assert!(wrong(&[Member::default(), member("tcp", None)]).contains("process 0 says nothing"));
    }

    #[test]
    fn numbers_are_listed_in_runs() {
        assert_eq!(listed(&[3]), "3");
        assert_eq!(listed(&[3, 4]), "3 and 4");
        assert_eq!(listed(&[0, 2, 3, 4, 5, 7]), "0, 2-5 and 7");
        assert_eq!(listed(&[0, 1, 2]), "0-2");
    }

    #[test]
    fn an_opened_transport_tells_its_address_and_a_missing_one_its_name() {
        let ip = std::net::Ipv4Addr::LOCALHOST.into();
        let tcp = Opened::open("tcp", 2, ip);
        let told_of_tcp = told("tcp", &tcp);
        assert!(
            matches!(&told_of_tcp[..], [(name, address)] if name == "tcp" && address.starts_with("127.0.0.1:"))
        );
        let pigeon = Opened::open("pigeon", 2, ip);
        assert!(pigeon.is_err());
        assert_eq!(told("pigeon", &pigeon), [("pigeon".to_owned(), String::new())]);
        #[cfg(not(feature = "ucx"))]
        {
            let said = Opened::open("ucx", 2, ip).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.contains("built without it") && said.contains("--features ucx"), "{said}");
        }
    }
}
