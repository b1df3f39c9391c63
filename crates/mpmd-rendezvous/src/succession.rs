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

/// A process that can go on with the service of its job.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Heir {
    /// The address at which it listens, as `host:port`.
    pub address: String,
    /// The [mark](super::Identity::mark) of the process.
    pub mark: u128,
    /// The first epoch in which it had a place. The service fills it in.
    pub since: u64,
}

/// The processes that can go on with the service of a job, in their order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Succession {
    /// The identity of the job's run.
    pub(super) run: u128,
    pub(super) addresses: Vec<String>,
    /// The epoch that the service goes on from. `None` on a process that waits for a place.
    pub(super) past: Option<JoinedEpoch>,
}

/// The place where a service goes on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum ServicePlace {
    /// A process listens there.
    At(String),
    /// In this process.
    Here,
    /// No process of the list is left.
    Nowhere,
}

/// A process that listens at the address of a service that it may have to go on with.
#[derive(Debug)]
pub(super) struct Deputy {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
}

/// Limit on the connections that wait for a deputy to serve, if the system allows as many.
const BACKLOG: i32 = 4096;

/// Limit on the addresses that a process is told while it waits for a place.
const MOST_TOLD: usize = 512;

/// Time limit for asking which processes are gone when a service goes on.
const ASK_WITHIN: Duration = Duration::from_secs(2);

impl Succession {
    /// Returns the succession of an epoch. `None` if nobody can go on with the job's service.
    pub fn of(joined: &JoinedEpoch) -> Option<Self> {
        let addresses = in_order(&joined.members);
        let past = Some(joined.clone());
        (!addresses.is_empty()).then_some(Self {
            run: joined.run,
            addresses,
            past,
        })
    }

    /// Creates the succession that a process knows while it waits for a place.
    pub(super) fn told(run: u128, addresses: Vec<String>) -> Self {
        Self {
            run,
            addresses,
            past: None,
        }
    }

    /// Notes that a commit of the epoch is whole on all its processes.
    pub fn commit_is_whole(&mut self) {
        if let Some(past) = &mut self.past {
            past.standing = CommitStanding {
                whole: Some(past.epoch),
                leavers: 0,
            };
        }
    }

    /// The identity of the job's run.
    pub fn run(&self) -> u128 {
        self.run
    }

    /// True if this process only waits for a place.
    pub(super) fn is_of_spare(&self) -> bool {
        self.past.is_none()
    }

    /// True if the list has this address: another process goes on with the service there.
    pub(super) fn contains(&self, address: &str) -> bool {
        self.addresses.iter().any(|known| known == address)
    }

    /// True if the process with this address comes before all others.
    pub(super) fn is_first(&self, own: Option<&str>) -> bool {
        own.is_some() && self.addresses.first().map(String::as_str) == own
    }

    /// Takes over a list that a process has heard while it waited for a place.
    pub(super) fn hear(&mut self, told: Self) {
        // The same list says less if a process has had a place in that epoch.
        if !told.is_of_spare() || !self.addresses.starts_with(&told.addresses) {
            *self = told;
        }
    }

    /// Returns the process that ran the service in the epoch: it is no heir.
    pub fn host(&self) -> Option<ProcessId> {
        let mut members = (0..).zip(&self.past.as_ref()?.members);
        members
            .find(|(_, member)| member.heir.is_none())
            .map(|(process, _)| ProcessId(process))
    }

    /// Returns the place where the service goes on. `own` is the address of this process's deputy.
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

/// Returns the addresses of the members that can go on with a service, the first ones first.
pub(super) fn in_order(members: &[JobMember]) -> Vec<String> {
    let mut heirs: Vec<&Heir> = members
        .iter()
        .filter_map(|member| member.heir.as_ref())
        .collect();
    heirs.sort_by_key(|heir| heir.since);
    heirs.into_iter().map(|heir| heir.address.clone()).collect()
}

/// Returns the first addresses of the list, for a process that waits for a place.
pub(super) fn told(addresses: &[String]) -> Vec<String> {
    addresses[..addresses.len().min(MOST_TOLD)].to_vec()
}

impl Deputy {
    /// Listens at a free port of this address's interface. Fails if the system does not allow it.
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

    /// The address at which it listens, as `host:port`.
    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns for each process of an epoch if it may live: false is certain, true is not. The
    /// process that ran the service lives if `host_lives`.
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
