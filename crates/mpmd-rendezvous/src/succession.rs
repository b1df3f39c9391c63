//! The order in which processes go on with the service of a job after the loss of its process.
//!
//! A process that can take over the service listens at an address of its own, as a [`Deputy`], from
//! the time that it joins. It tells the address with its [`JobMember`]. All members of an epoch
//! know the same list of such addresses, their [`Succession`]. The list begins with the processes
//! that are in the job for longest. So the lists of two epochs have the same order, and a process
//! that knows an older list goes to the same place as the others.
//!
//! The service goes on at the first address of the list that accepts connections. An address that
//! refuses them belongs to a process that has ended: the system accepts connections for a living
//! process even if its program hangs. Nobody replaces a process that is merely silent, since it may
//! serve others. `contact` says which process may go on by itself.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::connect::{ListenerProbe, probe};
use super::{CommitStanding, JobMember, JoinedEpoch, RendezvousError};
use mpmd_base::deadline::after;
use mpmd_proto::wire::ProcessId;

/// A process that can take over the rendezvous service of its job.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Heir {
    /// The address at which the process listens, as `host:port`.
    pub address: String,
    /// The process's [mark](super::Identity::mark), by which others recognise it.
    pub mark: u128,
    /// The first epoch in which the process had a place. The service fills it in.
    pub since: u64,
}

/// The processes that can take over a job's rendezvous service, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Succession {
    /// The identity of the job's run.
    pub(super) run: u128,
    pub(super) addresses: Vec<String>,
    /// The epoch from which the service continues. `None` on a process that waits for a place.
    pub(super) past: Option<JoinedEpoch>,
}

/// The place where a moved service runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum ServicePlace {
    /// The service runs, or will run, in the process that listens at this address.
    At(String),
    /// The service must be taken over by this process.
    Here,
    /// None of the listed processes is left.
    Nowhere,
}

/// A listener of a process that may have to take over the service at its address.
#[derive(Debug)]
pub(super) struct Deputy {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
}

/// Limit on the connections that wait until a deputy takes over; the system may impose a lower one.
const BACKLOG: i32 = 4096;

/// Largest number of addresses that a spare is told.
const MOST_TOLD: usize = 512;

/// Time limit for finding out which processes are gone when the service moves.
const ASK_WITHIN: Duration = Duration::from_secs(2);

impl Succession {
    /// Returns the succession of an epoch. `None` if no process can take over the job's service.
    pub fn of(joined: &JoinedEpoch) -> Option<Self> {
        let addresses = in_order(&joined.members);
        let past = Some(joined.clone());
        (!addresses.is_empty()).then_some(Self {
            run: joined.run,
            addresses,
            past,
        })
    }

    /// Creates the succession that a spare has been told: addresses in order.
    pub(super) fn told(run: u128, addresses: Vec<String>) -> Self {
        Self {
            run,
            addresses,
            past: None,
        }
    }

    /// Records that all processes have completed a commit of the epoch.
    pub fn commit_is_whole(&mut self) {
        if let Some(past) = &mut self.past {
            past.standing = CommitStanding {
                whole: Some(past.epoch),
                leavers: 0,
            };
        }
    }

    /// Returns the identity of the job's run.
    pub fn run(&self) -> u128 {
        self.run
    }

    /// Returns true if this process only waits for a place.
    pub(super) fn is_of_spare(&self) -> bool {
        self.past.is_none()
    }

    /// Returns true if another process of the list can take over the service at this address.
    pub(super) fn contains(&self, address: &str) -> bool {
        self.addresses.iter().any(|known| known == address)
    }

    /// Returns true if the process with the address `own` comes first in the list.
    pub(super) fn is_first(&self, own: Option<&str>) -> bool {
        own.is_some() && self.addresses.first().map(String::as_str) == own
    }

    /// Replaces the list with a newer one that this process was told while it waited for a place.
    pub(super) fn hear(&mut self, told: Self) {
        // The same list says less if a process has had a place in that epoch.
        if !told.is_of_spare() || !self.addresses.starts_with(&told.addresses) {
            *self = told;
        }
    }

    /// Returns the process that ran the service in the epoch, which cannot take it over.
    pub fn host(&self) -> Option<ProcessId> {
        let mut members = (0..).zip(&self.past.as_ref()?.members);
        members
            .find(|(_, member)| member.heir.is_none())
            .map(|(process, _)| ProcessId(process))
    }

    /// Returns where the service continues. `own` is the address of this process's listener.
    pub(super) fn find(&self, own: Option<&str>) -> ServicePlace {
        let is_own = |address: &String| own == Some(address.as_str());
        let until = after(Instant::now(), ASK_WITHIN);
        let lives =
            |address: &&String| is_own(address) || probe(address, until) != ListenerProbe::Refused;

        match self.addresses.iter().find(lives) {
            Some(address) if is_own(address) => ServicePlace::Here,
            Some(address) => ServicePlace::At(address.clone()),
            None => ServicePlace::Nowhere,
        }
    }
}

/// Returns the addresses of the members that can take over a service, in order.
pub(super) fn in_order(members: &[JobMember]) -> Vec<String> {
    let mut heirs: Vec<&Heir> = members
        .iter()
        .filter_map(|member| member.heir.as_ref())
        .collect();
    heirs.sort_by_key(|heir| heir.since);
    heirs.into_iter().map(|heir| heir.address.clone()).collect()
}

/// Returns the addresses at the start of the list, for a process that waits for a place.
pub(super) fn told(addresses: &[String]) -> Vec<String> {
    addresses[..addresses.len().min(MOST_TOLD)].to_vec()
}

impl Deputy {
    /// Listens at a free port of the network interface of `at`. Fails if the system does not allow
    /// it.
    pub(super) fn bind(mut at: SocketAddr) -> Result<Self, RendezvousError> {
        at.set_port(0);
        let bound = || {
            let listener = TcpListener::bind(at)?;
            rustix::net::listen(&listener, BACKLOG)?;
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        };

        bound().map_err(|e: std::io::Error| RendezvousError::Bind {
            address: at.to_string(),
            why: e.to_string(),
        })
    }

    /// Returns the address of the listener, as `host:port`.
    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns false for each process of an epoch that is certainly gone, and true for the others.
    /// The process that ran the service counts as living if `host_lives`.
    pub(super) fn lives(&self, past: &JoinedEpoch, host_lives: bool) -> Vec<bool> {
        let own = self.address();
        let until = after(Instant::now(), ASK_WITHIN);
        let lives = |heir: &Heir| {
            heir.address == own || probe(&heir.address, until) != ListenerProbe::Refused
        };

        past.members
            .iter()
            .map(|member| member.heir.as_ref().map_or(host_lives, lives))
            .collect()
    }
}
