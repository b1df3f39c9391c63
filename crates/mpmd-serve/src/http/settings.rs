//! The settings of a front, and their checks.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use mpmd::launch::LaunchError;

use super::access::Access;
use super::bind;
use super::connection::reserve_descriptors;
use super::origins::AllowedOrigins;
use crate::queue::QueueLimits;

/// The settings of a [`Front`](super::Front).
#[derive(Clone, Debug)]
pub struct FrontSettings {
    /// IP address to listen on, or a host name. Addresses other than loopback need `api_key_file`
    /// or `allow_all`. Default: 127.0.0.1.
    pub host: String,
    /// Port to listen on. With 0 the system chooses a free port. Default: 8000.
    pub port: u16,
    /// File with an API key on each line, readable by its owner only. Every request must have one
    /// of the keys. Behind a key may stand `name=NAME`, `requests=N` (requests at once),
    /// `requests-per-minute=N` and `tokens-per-minute=N`.
    pub api_key_file: Option<PathBuf>,
    /// True to serve every client that can connect, without a key. On a loopback address this
    /// includes requests that pages of other servers have a browser send. Contradicts
    /// `api_key_file`.
    pub allow_all: bool,
    /// Origins whose pages may use the server from a browser, such as `https://chat.example.org`.
    /// `*` allows all. If empty, all are allowed with `api_key_file`, since a page needs a key
    /// then, and otherwise only the server's own page.
    pub allow_origins: Vec<String>,
    /// File with a key on each line for the endpoints that control the server, perhaps with
    /// `name=NAME` behind it. `None` disables these endpoints. The file must be readable by its
    /// owner only, and share no key with `api_key_file`.
    pub control_key_file: Option<PathBuf>,
    /// Folders from which `/load_weights` may load weights. Folders inside them are allowed, too.
    pub weight_folders: Vec<PathBuf>,
    /// A sentence about the model that all clients can see, in `/v1/models` and on the page.
    pub description: Option<String>,
    /// Time limit for open requests to end after SIGTERM. Default: 30 s.
    pub drain: Duration,
    /// Limits on the queue of waiting requests.
    pub waiting: QueueLimits,
    /// Largest number of new tokens of a request. Default: the number of the model's positions.
    pub max_tokens: Option<usize>,
    /// Largest number of connections. When it is reached, the longest idle connection is closed for
    /// a new one; if none is idle, the new one waits. Default: 512.
    pub max_connections: usize,
    /// Largest size of a request's body, in bytes. Default: 2 MiB.
    pub max_body: u64,
    /// True to log a line for each request, as a `tracing` event of the level info and the target
    /// `mpmd::serve`. Default: true.
    pub request_log: bool,
}

impl Default for FrontSettings {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_key_file: None,
            allow_all: false,
            allow_origins: Vec::new(),
            control_key_file: None,
            weight_folders: Vec::new(),
            description: None,
            drain: Duration::from_secs(30),
            waiting: QueueLimits::default(),
            max_tokens: None,
            max_connections: 512,
            max_body: 2 << 20,
            request_log: true,
        }
    }
}

/// A file of keys: the one for all requests or the one for control.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KeyFile {
    /// The file of [`FrontSettings::api_key_file`].
    Api,
    /// The file of [`FrontSettings::control_key_file`].
    Control,
}

impl KeyFile {
    /// Returns the name of the file's field in [`FrontSettings`].
    pub fn setting(self) -> &'static str {
        match self {
            Self::Api => "api_key_file",
            Self::Control => "control_key_file",
        }
    }
}

/// Error: a front cannot start. The settings or the environment are at fault.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The host name has no address.
    #[error("host {host}: {why}")]
    Host {
        /// The value of [`FrontSettings::host`].
        host: String,
        /// The error of the name lookup.
        why: io::Error,
    },
    /// Clients of other hosts could connect, but the settings have no keys and do not allow all
    /// clients.
    #[error("host {host}: other hosts can connect, so keys are needed, or everyone must be let in")]
    Unprotected {
        /// The value of [`FrontSettings::host`].
        host: String,
    },
    /// Keys are demanded, and clients without keys are let in.
    #[error("api_key_file and allow_all: expected one of them, found both")]
    KeysForAll,
    /// A text of [`FrontSettings::allow_origins`] is no origin.
    #[error(
        "allow_origins {origin:?}: expected a scheme, a host and perhaps a port, such as \
         https://chat.example.org, or *"
    )]
    InvalidOrigin {
        /// The text.
        origin: String,
    },
    /// A file of keys cannot be read, or users other than its owner can read it.
    #[error("{why}")]
    UnreadableKeys {
        /// The setting of the file.
        file: KeyFile,
        /// The error, which names the setting and the path.
        why: LaunchError,
    },
    /// A file of keys has no keys, or an invalid line.
    #[error("{} {}: expected {expected}", .file.setting(), .path.display())]
    InvalidKeys {
        /// The setting of the file.
        file: KeyFile,
        /// The path of the file.
        path: PathBuf,
        /// The content that was expected.
        expected: String,
    },
    /// Both files of keys have the same key.
    #[error("control_key_file and api_key_file: expected other keys in each, found one in both")]
    SharedKey,
    /// A folder of [`FrontSettings::weight_folders`] does not exist.
    #[error("weight_folders {}: {why}", .path.display())]
    WeightFolder {
        /// The path of the folder.
        path: PathBuf,
        /// The error of the system.
        why: io::Error,
    },
    /// The process may not open enough files for the connections.
    #[error(
        "max_connections: {connections} connections need {needed} open files, {others} of them \
         for other purposes, and the limit is {limit}: raise it (`ulimit -n`), or give fewer \
         connections"
    )]
    Descriptors {
        /// Largest number of connections.
        connections: usize,
        /// Number of open files that the connections and all other uses need.
        needed: u64,
        /// Number of open files for other uses than connections.
        others: u64,
        /// The process's limit on open files.
        limit: u64,
    },
    /// The server cannot listen on the address.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        why: io::Error,
    },
    /// The system does not provide threads or signals, or does not tell its limits.
    #[error("starting the server: {0}")]
    Start(io::Error),
}

/// The address of a server, and who may use and control it.
pub(super) struct Doors {
    pub(super) address: SocketAddr,
    pub(super) access: Access,
    /// The origins whose pages may use the server from a browser.
    pub(super) origins: AllowedOrigins,
    /// The clients that may control the server. `None` if nobody may.
    pub(super) control: Option<Access>,
    /// The folders from which weights may be loaded, as paths without symbolic links.
    pub(super) weights: Vec<PathBuf>,
}

impl FrontSettings {
    /// Checks the address, the keys and the folders. Does not try to listen.
    ///
    /// # Errors
    ///
    /// As for [`Front::start`](super::Front::start), but an address in use or too few descriptors
    /// are not found.
    pub fn check(&self) -> Result<(), FrontError> {
        self.doors().map(drop)
    }

    /// Checks that the address is free, and that the process may open enough descriptors for all
    /// connections.
    ///
    /// # Errors
    ///
    /// If the address is in use, or the limit of descriptors is too low.
    pub fn check_resources(&self) -> Result<(), FrontError> {
        let address = self.address()?;
        reserve_descriptors(self.max_connections)?;
        bind(address).map(drop)
    }

    /// Reads the keys, resolves the address, and finds the folders.
    pub(super) fn doors(&self) -> Result<Doors, FrontError> {
        let address = self.address()?;
        let origins = self.origins()?;
        let access = self.access(address, &origins)?;
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
            origins,
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

    /// Returns the origins whose pages may use the server.
    fn origins(&self) -> Result<AllowedOrigins, FrontError> {
        if self.allow_origins.is_empty() && self.api_key_file.is_some() {
            return Ok(AllowedOrigins::Any);
        }
        AllowedOrigins::of(&self.allow_origins)
            .map_err(|origin| FrontError::InvalidOrigin { origin })
    }

    /// Returns the clients that may use a server on `address`.
    fn access(&self, address: SocketAddr, origins: &AllowedOrigins) -> Result<Access, FrontError> {
        match &self.api_key_file {
            Some(_) if self.allow_all => Err(FrontError::KeysForAll),
            Some(path) => Access::keys(KeyFile::Api, path),
            None if self.allow_all => Ok(Access::All),
            None if address.ip().is_loopback() => Ok(Access::ThisHost(origins.clone())),
            None => Err(FrontError::Unprotected {
                host: self.host.clone(),
            }),
        }
    }
}
