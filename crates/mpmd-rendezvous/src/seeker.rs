//! A process that finds the service of its job again: where it was, or where it goes on.

use std::net::SocketAddr;

use super::connect::{is_gone, is_heard};
use super::contact::{ContactDoubt, system_time};
use super::succession::{Deputy, ServicePlace};
use super::{
    Heir, Identity, JoinConfig, Rendezvous, RendezvousError, RendezvousServer, ServerConfig,
    ServiceParting, Succession,
};

/// A process's knowledge of the place of its job's service, over the epochs of the job.
#[derive(Debug)]
pub struct ServiceSeeker {
    service: String,
    /// True if the process at `service` runs it no more, or runs that of another job.
    is_left: bool,
    /// True if the process that ran the service leaves the job, and comes to the next place.
    host_lives: bool,
    /// `None` on a process that runs the service, and on one that cannot go on with it.
    deputy: Option<Deputy>,
    succession: Option<Succession>,
    /// The end of the last contact with the service. `None` before the first.
    parting: Option<ServiceParting>,
}

impl ServiceSeeker {
    /// Creates the knowledge of a process that starts: the address of the service.
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

    /// Notes the end of this process's contact with the service. It decides if this process may go
    /// on with the service itself.
    pub fn part(&mut self, parting: ServiceParting) {
        let parting = parting.after(self.parting.take());
        self.parting = Some(if self.is_left {
            parting.handed_over()
        } else {
            parting
        });
    }

    /// Notes the processes that can go on with the service. A list from an epoch in which this
    /// process had a place has priority over one that it got while waiting for a place.
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

    /// Notes that the service is no longer where it was, though a process may listen there. Returns
    /// false if there is no other place.
    pub fn leaves(&mut self) -> bool {
        let elsewhere = |succession: &Succession| !succession.contains(&self.service);
        self.is_left = self.succession.as_ref().is_some_and(elsewhere);
        if self.is_left {
            self.parting = self.parting.take().map(ServiceParting::handed_over);
        }
        self.is_left
    }

    /// Notes that the process which runs the service leaves the job, and looks for the next place
    /// of the service like all others.
    pub fn hands_over(&mut self) {
        self.host_lives = self.leaves();
    }

    /// Listens at an address of the interface `at`, unless it does so already, so that this process
    /// can go on with the service. Returns the address and mark that the others need. `None` if
    /// this process runs the service.
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

    /// Connects to the service. If its process is gone, connects to the one that goes on with it.
    /// That may be this process: then it puts the service into `server`. `config` is that of the
    /// job's start; its server counts for nothing. A process that [hands over](Self::hands_over)
    /// the service stops it once it has found the next place, and keeps it if there is none.
    ///
    /// Waits for a process that is to go on with the service, but has not come to it, at most for
    /// the peer timeout. One that waits for a place waits for as long as that process lives.
    ///
    /// # Errors
    ///
    /// The errors of [`Rendezvous::connect`], and of [`RendezvousServer::bind`] if this process
    /// goes on with the service. [`Outlived`](RendezvousError::Outlived) if it is the only one
    /// left, and the others may have ended the job: since it was stopped or cut off for the peer
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

    /// Checks that this process may go on with the service: the others cannot have ended the job.
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

    /// Finds the place where the service goes on: at the earlier one, if that is `here`, should no
    /// other be left.
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
