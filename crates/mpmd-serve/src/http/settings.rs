//! The settings of a front, and their checks.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use mpmd::launch::LaunchError;

use super::access::Access;
use super::bind;
use super::connection::reserve_descriptors;
use crate::queue::QueueLimits;

/// The settings of a [`Front`](super::Front).
#[derive(Clone, Debug)]
pub struct FrontSettings {
    /// Address to listen on, or a name of it. Any other than one of this host alone needs
    /// `api_key_file` or `allow_all`. Default: 127.0.0.1.
    pub host: String,
    /// Port to listen on; 0: any that is free. Default: 8000.
    pub port: u16,
    /// File with an API key on each line, which only its user may read. Every request needs one of
    /// them.
    pub api_key_file: Option<PathBuf>,
    /// Serve every client that can connect, without a key.
    pub allow_all: bool,
    /// File with a key on each line for the endpoints that control the server: without it there are
    /// none. Only its user may read it, and it has other keys than `api_key_file`.
    pub control_key_file: Option<PathBuf>,
    /// Folders from which `/load_weights` may load weights, also from folders in them.
    pub weight_folders: Vec<PathBuf>,
    /// A sentence about the model that everyone is to see: in `/v1/models` and on the page.
    pub description: Option<String>,
    /// Time for open requests to end after SIGTERM. Default: 30 s.
    pub drain: Duration,
    /// Limits on the waiting line.
    pub waiting: QueueLimits,
    /// Largest number of new tokens of a request. Default: as many as the model has positions.
    pub max_tokens: Option<usize>,
    /// Largest number of connections. Beyond them the oldest one without a request ends, or the
    /// new one waits. Default: 512.
    pub max_connections: usize,
    /// Bytes of the largest body of a request. Default: 2 MiB.
    pub max_body: u64,
}

impl Default for FrontSettings {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_key_file: None,
            allow_all: false,
            control_key_file: None,
            weight_folders: Vec::new(),
            description: None,
            drain: Duration::from_secs(30),
            waiting: QueueLimits::default(),
            max_tokens: None,
            max_connections: 512,
            max_body: 2 << 20,
        }
    }
}

/// One of the two files of keys.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KeyFile {
    /// That of all requests.
    Api,
    /// That of the endpoints that control the server.
    Control,
}

impl KeyFile {
    /// Returns the name of the field of [`FrontSettings`].
    pub fn setting(self) -> &'static str {
        match self {
            Self::Api => "api_key_file",
            Self::Control => "control_key_file",
        }
    }
}

/// A front cannot start. The settings or the environment are at fault.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The host has no address.
    #[error("host {host}: {why}")]
    Host {
        /// The host.
        host: String,
        /// The reason.
        why: io::Error,
    },
    /// Other hosts could connect, and no setting says that they may.
    #[error("host {host}: other hosts can connect, so keys are needed, or everyone must be let in")]
    Unprotected {
        /// The host.
        host: String,
    },
    /// A file of keys cannot be read, or others can read it.
    #[error("{why}")]
    UnreadableKeys {
        /// The file.
        file: KeyFile,
        /// The reason, which names the setting and the path.
        why: LaunchError,
    },
    /// A file of keys has no keys, or some that cannot be sent.
    #[error("{} {}: expected {expected}", .file.setting(), .path.display())]
    InvalidKeys {
        /// The file.
        file: KeyFile,
        /// Its path.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
    },
    /// Both files have the same key.
    #[error("control_key_file and api_key_file: expected other keys in each, found one in both")]
    SharedKey,
    /// There is no folder for weights.
    #[error("weight_folders {}: {why}", .path.display())]
    WeightFolder {
        /// The folder.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// The process may have too few open files for the connections.
    #[error(
        "max_connections: {connections} connections need {needed} open files, {others} of them \
         for other purposes, and the limit is {limit}: raise it (`ulimit -n`), or give fewer \
         connections"
    )]
    Descriptors {
        /// Largest number of connections.
        connections: usize,
        /// Number of open files that they and all else need.
        needed: u64,
        /// Number of open files beside the connections.
        others: u64,
        /// The limit of the process.
        limit: u64,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        why: io::Error,
    },
    /// The system gives no threads or signals, or does not tell its limits.
    #[error("starting the server: {0}")]
    Start(io::Error),
}

/// The ways into a server.
pub(super) struct Doors {
    pub(super) address: SocketAddr,
    pub(super) access: Access,
    /// The clients that may control the server, if any may.
    pub(super) control: Option<Access>,
    /// The folders of weights that may be loaded, without symbolic links.
    pub(super) weights: Vec<PathBuf>,
}

impl FrontSettings {
    /// Checks the address, the keys and the folders, before processes are started.
    ///
    /// # Errors
    ///
    /// As for [`Front::start`](super::Front::start), except that the address may be in use.
    pub fn check(&self) -> Result<(), FrontError> {
        self.doors().map(drop)
    }

    /// Checks that the address is free, and that the process may have descriptors for all
    /// connections.
    ///
    /// # Errors
    ///
    /// If it is not so.
    pub fn check_resources(&self) -> Result<(), FrontError> {
        let address = self.address()?;
        reserve_descriptors(self.max_connections)?;
        bind(address).map(drop)
    }

    /// Reads the keys, and finds the address and the folders.
    pub(super) fn doors(&self) -> Result<Doors, FrontError> {
        let address = self.address()?;
        let access = self.access(address)?;
        let control = self.control_key_file.as_deref();
        let control = control
            .map(|path| Access::keys(KeyFile::Control, path))
            .transpose()?;
        if control
            .as_ref()
            .is_some_and(|control| control.shares_a_key_with(&access))
        {
            return Err(FrontError::SharedKey);
        }

        let mut weights = Vec::new();
        for path in &self.weight_folders {
            let failed = |why| FrontError::WeightFolder {
                path: path.clone(),
                why,
            };
            weights.push(path.canonicalize().map_err(failed)?);
        }
        Ok(Doors {
            address,
            access,
            control,
            weights,
        })
    }

    /// Returns the address to listen on.
    fn address(&self) -> Result<SocketAddr, FrontError> {
        let failed = |why| FrontError::Host {
            host: self.host.clone(),
            why,
        };
        let mut found = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .map_err(failed)?;
        let none = || io::Error::new(io::ErrorKind::NotFound, "it has no address");
        found.next().ok_or_else(|| failed(none()))
    }

    /// Returns the clients that may come in.
    fn access(&self, address: SocketAddr) -> Result<Access, FrontError> {
        if let Some(path) = &self.api_key_file {
            Access::keys(KeyFile::Api, path)
        } else if address.ip().is_loopback() {
            Ok(Access::ThisHost)
        } else if self.allow_all {
            Ok(Access::All)
        } else {
            Err(FrontError::Unprotected {
                host: self.host.clone(),
            })
        }
    }
}
