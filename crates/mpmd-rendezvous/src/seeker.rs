//! A process that finds the service of its job again: where it was, or where it goes on.

use std::net::SocketAddr;

use super::connect::{is_gone, is_heard};
use super::contact::{ContactDoubt, system_time};
use super::succession::{Deputy, ServicePlace};
use super::{
    Heir, Identity, JoinConfig, Rendezvous, RendezvousError, RendezvousServer, ServerConfig,
    ServiceParting, Succession,
};

/// Finds a job's rendezvous service again when it moves to another process.
#[derive(Debug)]
pub struct ServiceSeeker {
    service: String,
    /// True if the process at `service` no longer runs the service of this job.
    is_left: bool,
    /// True if the process that ran the service leaves the job, and connects to the service's next
    /// place.
    host_lives: bool,
    /// This process's listener, for taking over the service. `None` on the process that runs the
    /// service, and on a process that cannot take it over.
    deputy: Option<Deputy>,
    succession: Option<Succession>,
    /// The record of this process's last contact with the service. `None` before the first.
    parting: Option<ServiceParting>,
}

impl ServiceSeeker {
    /// Creates the seeker of a process that starts. `service` is the address of the service.
    pub fn new(service: String) -> Self {
        Self {
            service,
            is_left: false,
            host_lives: false,
            deputy: None,
            succession: None,
            parting: None,
        }
    }

    /// Records how this process's contact with the service ended. It decides if this process may
    /// take over the service.
    pub fn part(&mut self, parting: ServiceParting) {
        let parting = parting.after(self.parting.take());
        self.parting = Some(if self.is_left {
            parting.handed_over()
        } else {
            parting
        });
    }

    /// Records the processes that can take over the service. A list from an epoch in which this
    /// process had a place has priority over a list for spares.
    pub fn hear(&mut self, succession: Option<Succession>) {
        match (&mut self.succession, succession) {
            (Some(known), Some(told)) => known.hear(told),
            (known, told) => *known = told.or(known.take()),
        }
    }

    /// Returns the identity of the job's run, as far as this process knows it.
    pub fn run(&self) -> Option<u128> {
        self.succession.as_ref().map(Succession::run)
    }

    /// Records that the service is no longer at its address, although a process may listen there.
    /// Returns false if there is no other process that can take the service over.
    pub fn leaves(&mut self) -> bool {
        let elsewhere = |succession: &Succession| !succession.contains(&self.service);
        self.is_left = self.succession.as_ref().is_some_and(elsewhere);
        if self.is_left {
            self.parting = self.parting.take().map(ServiceParting::handed_over);
        }
        self.is_left
    }

    /// Records that the process which runs the service leaves the job. That process then looks for
    /// the service's next place like all others.
    pub fn hands_over(&mut self) {
        self.host_lives = self.leaves();
    }

    /// Starts to listen on the network interface of `at`, unless this process already listens, so
    /// that it can take over the service. Returns the address and mark that the others need. `None`
    /// if this process runs the service.
    ///
    /// # Errors
    ///
    /// [`RendezvousError::Bind`] if the system allows no listener.
    pub fn heir(
        &mut self,
        at: SocketAddr,
        identity: &Identity,
        server: Option<&RendezvousServer>,
    ) -> Result<Option<Heir>, RendezvousError> {
        if server.is_some() {
            return Ok(None);
        }

        let deputy = match self.deputy.take() {
            Some(deputy) => deputy,
            None => Deputy::bind(at)?,
        };
        let address = self.deputy.insert(deputy).address();
        Ok(Some(Heir {
            address,
            mark: identity.mark(),
            since: 0,
        }))
    }

    /// Connects to the service. If the process that ran it is gone, connects to the process that
    /// takes it over. If that is this process, starts the service in `server`. `config` is the
    /// configuration from the start of the job; its server address is ignored. A process that
    /// [hands over](Self::hands_over) the service stops it once it has found the next place, and
    /// keeps it if there is none.
    ///
    /// Waits up to the peer timeout for a process that should take over the service but has not
    /// begun. A spare waits for as long as that process lives.
    ///
    /// # Errors
    ///
    /// The errors of [`Rendezvous::connect`], and of [`RendezvousServer::bind`] if this process
    /// takes over the service. [`Outlived`](RendezvousError::Outlived) if only this process is left
    /// and the others may have ended the job, because it was stopped or cut off for the peer
    /// timeout.
    pub fn connect(
        &mut self,
        config: &JoinConfig,
        server: &mut Option<RendezvousServer>,
    ) -> Result<Rendezvous, RendezvousError> {
        let own = server.is_some().then(|| self.service.clone());
        loop {
            if std::mem::take(&mut self.is_left) {
                self.find(config, server, own.as_ref())?;
            }

            let config = JoinConfig {
                server: self.service.clone(),
                ..config.clone()
            };
            let is_here = server.is_some() && own.as_ref().is_none_or(|own| *own == self.service);
            let Some(succession) = self.succession.as_ref().filter(|_| !is_here) else {
                return Rendezvous::connect(config);
            };

            match Rendezvous::connect_again(config) {
                Err(_) if is_gone(&self.service) => self.is_left = true,
                Err(RendezvousError::Unreachable { .. })
                    if succession.is_of_spare() && is_heard(&self.service) => {}
                connected => {
                    *server = None;
                    return connected;
                }
            }
        }
    }

    /// Checks that this process may take over the service: the others cannot have ended the job.
    fn may_go_on(&self, is_first: bool) -> Result<(), RendezvousError> {
        let parted = match &self.parting {
            Some(parting) => parting.check(is_first, system_time()),
            None => Err(ContactDoubt::NoContact),
        };
        parted.map_err(|doubt| RendezvousError::Outlived {
            server: self.service.clone(),
            why: doubt.to_string(),
        })
    }

    /// Finds the process that takes over the service. Stays with the service at `here`, if given,
    /// when no other process is left.
    fn find(
        &mut self,
        config: &JoinConfig,
        server: &mut Option<RendezvousServer>,
        here: Option<&String>,
    ) -> Result<(), RendezvousError> {
        let own = self.deputy.as_ref().map(Deputy::address);
        let place = self
            .succession
            .as_ref()
            .map(|succession| succession.find(own.as_deref()));

        match (place, &self.succession) {
            (Some(ServicePlace::At(address)), _) => self.service = address,
            (Some(ServicePlace::Here), Some(succession)) => {
                self.may_go_on(succession.is_first(own.as_deref()))?;
                let JoinConfig {
                    processes,
                    ref token,
                    peer_timeout,
                    ..
                } = *config;
                let config = ServerConfig {
                    processes,
                    token: token.clone(),
                    peer_timeout,
                };

                let deputy = self.deputy.take();
                let host_lives = std::mem::take(&mut self.host_lives);
                let resumed = match deputy {
                    Some(deputy) => Some(RendezvousServer::resume(
                        deputy, succession, host_lives, config,
                    )?),
                    None => None,
                };
                self.service = own.unwrap_or_default();
                *server = resumed;
            }
            _ if let Some(here) = here => self.service.clone_from(here),
            _ => {
                return Err(RendezvousError::ServerGone {
                    server: self.service.clone(),
                    why: "its process has ended, and so have all that could go on with it".into(),
                });
            }
        }
        Ok(())
    }
}
