//! The network in which the processes of two ends meet: sockets, or in tests a simulated one.

use std::net::SocketAddr;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_rendezvous::{
    FailureReport, JobObserver, JoinConfig, Rendezvous, RendezvousError, RendezvousServer,
    ServerConfig, Token,
};

#[cfg(test)]
use super::simulated::{Host, LocalService};
use crate::api::program::SimulatedTransport;

type Result<T> = std::result::Result<T, RendezvousError>;

/// The network over which publishers and subscribers meet: sockets, or in tests a simulation.
#[derive(Clone, Debug, Default)]
pub(super) enum Net {
    #[default]
    Sockets,
    #[cfg(test)]
    Simulated(Host),
}

/// A rendezvous service that runs in this process.
pub(super) enum Service {
    Sockets(RendezvousServer),
    #[cfg(test)]
    Simulated(LocalService),
}

impl Net {
    /// Starts a rendezvous service at an address.
    pub(super) fn bind(&self, address: SocketAddr, config: ServerConfig) -> Result<Service> {
        match self {
            Self::Sockets => RendezvousServer::bind(address, config).map(Service::Sockets),
            #[cfg(test)]
            Self::Simulated(host) => host.bind(address, &config).map(Service::Simulated),
        }
    }

    /// Connects to a rendezvous service, which may start later.
    pub(super) fn connect(&self, config: JoinConfig) -> Result<Rendezvous> {
        match self {
            Self::Sockets => Rendezvous::connect(config),
            #[cfg(test)]
            Self::Simulated(host) => host.join(&config).map(|(rendezvous, _)| rendezvous),
        }
    }

    /// Connects to the rendezvous service of a link. If nobody listens, the link is over and the
    /// call fails. Also returns the transport, in a simulation.
    pub(super) fn join_link(
        &self,
        config: JoinConfig,
    ) -> Result<(Rendezvous, Option<SimulatedTransport>)> {
        match self {
            Self::Sockets => Ok((Rendezvous::connect_again(config)?, None)),
            #[cfg(test)]
            Self::Simulated(host) => host
                .join(&config)
                .map(|(rendezvous, over)| (rendezvous, Some(over))),
        }
    }

    /// Connects to a rendezvous service as an observer.
    pub(super) fn observe(
        &self,
        address: &str,
        token: &Token,
        timeout: Duration,
    ) -> Result<JobObserver> {
        match self {
            Self::Sockets => JobObserver::connect(address, token.clone(), timeout),
            #[cfg(test)]
            Self::Simulated(host) => host.observe(address),
        }
    }
}

impl Service {
    pub(super) fn address(&self) -> SocketAddr {
        match self {
            Self::Sockets(server) => server.address(),
            #[cfg(test)]
            Self::Simulated(service) => service.address,
        }
    }

    /// Waits until the service's job has ended. See [`RendezvousServer::wait_end`].
    pub(super) fn wait_end(&self, time: Duration) -> Option<Result<()>> {
        match self {
            Self::Sockets(server) => server.wait_end(time),
            #[cfg(test)]
            Self::Simulated(service) => service.server.wait_end(time),
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::Sockets(server) => server.is_complete(),
            #[cfg(test)]
            Self::Simulated(service) => service.server.is_complete(),
        }
    }

    pub(super) fn reports(&self) -> Vec<(ProcessId, FailureReport)> {
        match self {
            Self::Sockets(server) => server.reports(),
            #[cfg(test)]
            Self::Simulated(service) => service.server.reports(),
        }
    }
}
