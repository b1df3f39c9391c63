//! The processes of one end, as the other end calls them: a rendezvous of their own, at which they
//! stay for as long as they publish or subscribe.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use mpmd_launch::LaunchError;
use mpmd_layout::topology::{DeviceId, Topology};
use mpmd_proto::control;
use mpmd_transport::rendezvous::{
    JoinConfig, Member, Observer, Rendezvous, RendezvousError, Server, ServerConfig, Token,
};
use serde::{Deserialize, Serialize};

use crate::api::program::{Program, join_beside};
use crate::error::{Error, Result};
use mpmd_base::ProcessId;
use mpmd_base::block::thread;

/// Longest peer timeout of a link: one that is lost is soon replaced by another.
pub(super) const LONGEST: Duration = Duration::from_secs(15);

/// A call to all processes of an end.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Call {
    /// Asks for the publication of this name.
    Hello(String),
    /// Joins a link.
    Join(Invitation),
}

/// A link to be joined.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Invitation {
    /// The name of the publication.
    pub(super) name: String,
    /// The rendezvous of the link, and its token as hexadecimal digits.
    pub(super) server: String,
    pub(super) token: String,
    /// Number of processes of the publisher. They are the first ones of the link.
    pub(super) publishers: usize,
    /// Number of devices of each process of the link.
    pub(super) devices: Vec<usize>,
    pub(super) transport: String,
}

impl Invitation {
    /// Joins the link as this process of it. Blocks until all have.
    pub(super) fn join(&self, process: usize, peer_timeout: Duration) -> Result<Program> {
        let token = self.token.parse();
        let token: Token = token.map_err(|_| {
            Error::Environment("the subscriber's invitation has no valid token".to_owned())
        })?;
        let process = ProcessId(process as u32);
        let how = (&self.devices[..], &*self.transport);
        join_beside(&self.server, token, process, how, peer_timeout.min(LONGEST))
    }
}

/// The answer of a process to a call.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum Answer {
    /// The number of its devices.
    Here(usize),
    /// It publishes something of another name.
    Other(String),
}

/// The processes of an end: those of its job that have devices of its arrays. In a link, their
/// devices are numbered anew.
#[derive(Clone, Debug)]
pub(super) struct Members {
    processes: Vec<ProcessId>,
    /// Number of devices of each of them.
    pub(super) devices: Vec<usize>,
    numbers: HashMap<DeviceId, u32>,
}

impl Members {
    /// Returns the processes of these devices, and `also`.
    pub(super) fn of(
        topology: &Topology,
        used: impl IntoIterator<Item = DeviceId>,
        also: Option<ProcessId>,
    ) -> Self {
        let owner = |device: DeviceId| topology.process_of(device);
        let all: BTreeSet<ProcessId> = used.into_iter().filter_map(owner).chain(also).collect();
        let processes: Vec<ProcessId> = all.into_iter().collect();
        let devices = processes.iter().map(|process| topology.devices_of(*process).len()).collect();
        let all = processes.iter().flat_map(|process| topology.devices_of(*process));
        let numbers = all.enumerate().map(|(number, device)| (*device, number as u32)).collect();
        Self { processes, devices, numbers }
    }

    /// Returns the number of a process among them.
    pub(super) fn place_of(&self, process: ProcessId) -> Option<usize> {
        self.processes.iter().position(|member| *member == process)
    }

    /// Returns the number of a device among theirs.
    pub(super) fn number_of(&self, device: DeviceId) -> u32 {
        self.numbers.get(&device).copied().unwrap_or(u32::MAX)
    }
}

/// This process's part of an end. Dropping it leaves the rendezvous.
pub(super) struct Group {
    rendezvous: Rendezvous,
    server: Option<Server>,
}

impl Group {
    /// Opens the rendezvous on the first member, at `listen` or any free port, and joins it. Blocks
    /// until all members have. `answer` is called for each call, on a thread that must not block.
    /// All processes must call it. Returns the address, and the group on members.
    pub(super) fn open(
        p: &mut Program,
        members: &Members,
        listen: Option<SocketAddr>,
        token: Token,
        answer: impl Fn(Call) -> Answer + Send + Sync + 'static,
    ) -> Result<(SocketAddr, Option<Self>)> {
        let (processes, peer_timeout) = (members.processes.len(), p.runtime.config.peer_timeout);
        let first = members.processes.first().copied().unwrap_or(ProcessId(0));
        let ip = p.local_ip();
        let mut server = None;
        let config = ServerConfig { processes, token: token.clone(), peer_timeout };
        let bind = || {
            let at = listen.unwrap_or(SocketAddr::new(ip, 0));
            let bound = server.insert(Server::bind(at, config).map_err(wrong)?).address();
            // The other processes cannot connect to the address of all interfaces.
            let ip = if bound.ip().is_unspecified() { ip } else { bound.ip() };
            Ok(SocketAddr::new(ip, bound.port()).to_string())
        };
        let text: String = p.broadcast_value(first, String::new(), bind)?;
        let address = text
            .parse()
            .map_err(|_| Error::Environment(format!("{text} is no address of a publication")))?;
        let Some(place) = members.place_of(p.process()) else { return Ok((address, None)) };
        let process = ProcessId(place as u32);
        let config = JoinConfig { server: text, process, processes, token, peer_timeout };
        let rendezvous = Rendezvous::connect(config).map_err(wrong)?;
        rendezvous.on_look(move |words| {
            let answered = control::decode::<Call>(words).map(&answer);
            answered.ok().and_then(|answer| control::encode(&answer).ok()).unwrap_or_default()
        });
        rendezvous.join(Member::default()).map_err(wrong)?;
        Ok((address, Some(Self { rendezvous, server })))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = self.rendezvous.leave() {
            tracing::debug!(%error, "leaving the processes of a publication");
        }
        if let Some(server) = &self.server {
            // Short: the others may stay longer than this process.
            server.wait_empty(Duration::from_millis(200));
        }
    }
}

/// Calls all processes of the end at an address. Returns their answers, by process.
///
/// # Errors
///
/// Why the end cannot be reached, or a process of it has not answered.
pub(super) fn call(
    address: &str,
    token: &Token,
    call: &Call,
    timeout: Duration,
) -> std::result::Result<(Vec<Answer>, IpAddr), String> {
    let said = |error: RendezvousError| match error {
        RendezvousError::Token { server } => format!(
            "the publisher at {server} has another secret or another name: give both ends the same"
        ),
        RendezvousError::Stranger { server } => {
            format!("the program that listens at {server} is no publisher of mpmd")
        }
        RendezvousError::Unreachable { server, why, .. } => {
            format!("no publisher answers at {server}: {why}")
        }
        other => other.to_string(),
    };
    let observer = Observer::connect(address, token.clone(), timeout).map_err(said)?;
    let words = control::encode(call).map_err(|error| error.to_string())?;
    let answers = observer.look(&words, timeout).map_err(said)?;
    let read = |(process, status): (ProcessId, std::result::Result<Vec<u8>, String>)| {
        let bytes = status.map_err(|why| format!("process {process} at {address}: {why}"))?;
        control::decode(&bytes).map_err(|_| format!("process {process} at {address}: no answer"))
    };
    let answers = answers.into_iter().map(read).collect::<Result<Vec<_>, String>>()?;
    Ok((answers, observer.local_address().ip()))
}

impl Program {
    /// Returns the address of this process in the network of its job.
    fn local_ip(&self) -> IpAddr {
        self.rendezvous_address().map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
    }
}

/// Starts a thread of an end.
pub(super) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(run).map_err(|error| {
        Error::Environment(format!("the thread {name} could not be started: {error}"))
    })
}

pub(super) fn wrong(error: RendezvousError) -> Error {
    Error::Launch(LaunchError::Rendezvous(error))
}
