//! Connects the two processes by the job's rendezvous, as programs do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mpmd_launch::JobEnv;
use mpmd_transport::rendezvous::{JoinConfig, Member, Rendezvous, Server, ServerConfig};
use mpmd_transport::shm::{self, ShmConfig};
use mpmd_transport::tcp::{Listener, TcpConfig};
use mpmd_transport::ucx::{Opened, Spin, UcxConfig};
use mpmd_transport::{Pool, Transport};

use crate::options::Carrier;

/// The epoch of the job; it has only one.
const EPOCH: u64 = 1;

/// The peer timeout if the launcher sets none.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The time that process 0, if it has the rendezvous server, waits for the other process to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// A transport between the two processes, and their membership in the rendezvous.
pub(super) struct Meeting {
    pub(super) transport: Arc<dyn Transport>,
    rendezvous: Rendezvous,
    server: Option<Server>,
}

impl Meeting {
    /// Meets the other process of the job at its rendezvous and connects a transport. Blocks until
    /// both have connected; each wait ends with the peer timeout.
    ///
    /// # Errors
    ///
    /// If the rendezvous or the transport fails, or if the transport does not work between
    /// processes.
    pub(super) fn of(env: &JobEnv, carrier: Carrier, spin: Spin, pool: &Pool) -> Result<Self> {
        mpmd_launch::adopt()?;
        let peer_timeout = env.peer_timeout.unwrap_or(TIME_LIMIT);
        let server = if env.hosted || env.process.index() != 0 {
            None
        } else {
            let config =
                ServerConfig { processes: env.processes, token: env.token.clone(), peer_timeout };
            Some(Server::bind(env.listen_address()?, config)?)
        };
        let rendezvous = Rendezvous::connect(JoinConfig {
            server: env.coordinator.clone(),
            process: env.process,
            processes: env.processes,
            token: env.token.clone(),
            peer_timeout,
        })?;
        let door = OpenTransport::open(carrier, &rendezvous)?;
        let member = Member {
            host: env.host.clone().unwrap_or_else(hostname),
            pid: std::process::id(),
            devices: 0,
            addresses: vec![(carrier.name().to_owned(), door.address())],
            program: "mpmd bench p2p".to_owned(),
            trouble: None,
        };
        let host = member.host.clone();
        let members = rendezvous.join(member)?.members;
        let job = Job {
            env,
            peer_timeout,
            pool,
            spin,
            neighbours: members.iter().filter(|member| member.host == host).count(),
            addresses: members
                .iter()
                .map(|member| member.addresses.iter().find(|(name, _)| name == carrier.name()))
                .map(|found| found.map(|(_, address)| address.clone()))
                .collect::<Option<_>>()
                .with_context(|| {
                    format!("a process of the job has no address for {}", carrier.name())
                })?,
        };
        let transport = door.connect(job)?;
        Ok(Self { transport, rendezvous, server })
    }

    /// Leaves the rendezvous, so that the other process does not report a death. The process with
    /// the server waits up to `LEAVE_WITHIN` for the other. The transport must be shut down before.
    pub(super) fn leave(self) -> Result<()> {
        self.rendezvous.leave()?;
        if let Some(server) = self.server {
            // The server must stay until the other process has left.
            server.wait_empty(LEAVE_WITHIN);
        }
        Ok(())
    }
}

/// The data that every transport needs to connect.
struct Job<'a> {
    env: &'a JobEnv,
    peer_timeout: Duration,
    pool: &'a Pool,
    spin: Spin,
    neighbours: usize,
    addresses: Vec<String>,
}

/// A transport of this process that has an address and is not connected yet.
enum OpenTransport {
    Shm(shm::Opened),
    Tcp(Listener),
    Ucx(Opened),
}

impl OpenTransport {
    fn open(carrier: Carrier, rendezvous: &Rendezvous) -> Result<Self> {
        Ok(match carrier {
            Carrier::Shm => Self::Shm(shm::Opened::open()?),
            Carrier::Tcp => Self::Tcp(Listener::bind(rendezvous.local_address())?),
            Carrier::Ucx => Self::Ucx(Opened::open(2)?),
            Carrier::Inproc => {
                bail!("inproc is within one process, and this is one of a job of several")
            }
        })
    }

    fn address(&self) -> String {
        match self {
            Self::Shm(opened) => opened.address(),
            Self::Tcp(listener) => listener.address().to_string(),
            Self::Ucx(opened) => opened.address().to_owned(),
        }
    }

    fn connect(self, job: Job<'_>) -> Result<Arc<dyn Transport>> {
        let (process, token) = (job.env.process, *job.env.token.bytes());
        let (peer_timeout, pool) = (job.peer_timeout, job.pool.clone());
        Ok(match self {
            Self::Shm(opened) => {
                let peers = job.addresses.into_iter().map(Some).collect();
                opened.connect(&ShmConfig { process, peers, token, epoch: EPOCH, peer_timeout })?
            }
            Self::Tcp(listener) => {
                let peers = job.addresses.iter().map(|address| {
                    address
                        .parse::<SocketAddr>()
                        .with_context(|| format!("{address:?} is no address for tcp"))
                });
                let peers = peers.collect::<Result<_>>()?;
                listener.connect(TcpConfig {
                    process,
                    peers,
                    token,
                    epoch: EPOCH,
                    peer_timeout,
                    pool,
                })?
            }
            Self::Ucx(opened) => opened.connect(UcxConfig {
                process,
                peers: job.addresses,
                token,
                epoch: EPOCH,
                peer_timeout,
                pool,
                spin: job.spin,
                neighbours: job.neighbours,
            })?,
        })
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
