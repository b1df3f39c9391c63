//! The arguments of a server's front.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use mpmd::job::at_least;
use mpmd_base::parse_bytes;
use mpmd_serve::{Engine, Front, FrontError, FrontSettings, QueueLimits};

use crate::chat::ChatArgs;

/// The two ends of the queue of requests, on process 0: the HTTP front and the engine.
pub(crate) struct ServerEnds {
    pub(crate) front: Front,
    pub(crate) engine: Engine,
}

impl ServerEnds {
    /// Ends the server. Open requests, which there are after a failure, get an error with the
    /// reason. Blocks until the clients have it, for seconds at most.
    pub(crate) fn end(self) {
        self.engine.end();
        self.front.drain();
        self.front.join();
    }
}

/// Arguments of the front.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FrontArgs {
    /// Address to listen on. Any other than one of this host alone needs --api-key-file or
    /// --no-auth
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0: any that is free
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File with an API key on each line, which only its user may read; every request needs one of
    /// them. Behind a key may stand name=NAME, requests=N (at once), requests-per-minute=N and
    /// tokens-per-minute=N
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve every client that can connect, without a key; also requests that pages of other
    /// servers have a browser send
    #[arg(long, conflicts_with = "api_key_file")]
    pub no_auth: bool,
    /// Origin whose pages may use the server from a browser, such as https://chat.example.org; `*`
    /// for all; may be given several times. Default: all with --api-key-file, else only the
    /// server's own page
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Vec<String>,
    /// File with a key on each line for the endpoints that control the server: /pause, /resume,
    /// /update_weight_version and /load_weights; without it there are none. Only its user may read
    /// it, and it has other keys than --api-key-file
    #[arg(long, value_name = "FILE")]
    pub control_key_file: Option<PathBuf>,
    /// Folder from which /load_weights may load weights, also from folders in it; may be given
    /// several times
    #[arg(long, value_name = "DIR", requires = "control_key_file")]
    pub allow_weights: Vec<PathBuf>,
    /// Name of the model for clients; default: that of its folder
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Seconds for open requests to end after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u32,
    /// Largest number of waiting requests
    #[arg(long, value_name = "N", default_value_t = QueueLimits::default().requests,
        value_parser = at_least(1))]
    pub max_waiting: usize,
    /// Largest number of tokens in waiting prompts
    #[arg(long, value_name = "N", default_value_t = QueueLimits::default().tokens,
        value_parser = at_least(1))]
    pub max_waiting_tokens: usize,
    /// Largest number of new tokens of a request; default: as many as the model has positions
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    pub max_tokens: Option<usize>,
    /// Largest number of connections; beyond them the oldest one without a request ends. The limit
    /// of open files (`ulimit -n`) must have room for them
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least(1))]
    pub max_connections: usize,
    /// Largest body of a request
    #[arg(long, value_name = "BYTES", default_value = "2MiB", value_parser = parse_bytes)]
    pub max_body: u64,
    #[command(flatten)]
    pub chat: ChatArgs,
    /// Do not log a line for each request
    #[arg(long)]
    pub no_request_log: bool,
}

impl FrontArgs {
    /// Returns the settings of the front. `description` is a sentence about the model that all
    /// clients can see.
    pub(crate) fn settings(&self, description: Option<&str>) -> FrontSettings {
        FrontSettings {
            host: self.host.clone(),
            port: self.port,
            api_key_file: self.api_key_file.clone(),
            allow_all: self.no_auth,
            allow_origins: self.allow_origin.clone(),
            control_key_file: self.control_key_file.clone(),
            weight_folders: self.allow_weights.clone(),
            description: description.map(str::to_owned),
            drain: Duration::from_secs(self.drain.into()),
            waiting: QueueLimits {
                requests: self.max_waiting,
                tokens: self.max_waiting_tokens,
            },
            max_tokens: self.max_tokens,
            max_connections: self.max_connections,
            max_body: self.max_body,
            request_log: !self.no_request_log,
        }
    }
}

/// Returns the error with the option at fault named as users write it, and what to do.
pub(crate) fn named(error: FrontError) -> anyhow::Error {
    match error {
        FrontError::Host { host, why } => anyhow!("--host {host}: {why}"),
        FrontError::Unprotected { host } => anyhow!(
            "--host {host}: other hosts can connect, so give --api-key-file FILE, or --no-auth to \
             let everyone in"
        ),
        FrontError::KeysForAll => {
            anyhow!("--api-key-file and --no-auth: expected one of them, found both")
        }
        FrontError::InvalidOrigin { .. } => {
            let error = error.to_string();
            anyhow!("{}", error.replacen("allow_origins", "--allow-origin", 1))
        }
        FrontError::UnreadableKeys { file, why } => {
            let setting = file.setting();
            anyhow!("{}", as_option(setting, &why.to_string()))
        }
        FrontError::InvalidKeys { file, .. } => {
            anyhow!("{}", as_option(file.setting(), &error.to_string()))
        }
        FrontError::SharedKey => anyhow!(
            "--control-key-file and --api-key-file: expected other keys in each, found one in both"
        ),
        FrontError::WeightFolder { path, why } => {
            anyhow!("--allow-weights {}: {why}", path.display())
        }
        FrontError::Descriptors { .. } => {
            anyhow!("{}", as_option("max_connections", &error.to_string()))
        }
        FrontError::Listen { address, why } if why.kind() == ErrorKind::AddrNotAvailable => {
            anyhow!(
                "--host {}: this host has no such address: {why}",
                address.ip()
            )
        }
        FrontError::Listen { .. } => {
            anyhow!("{error}; give another --port, or --port 0 for any")
        }
        error @ FrontError::Start(_) => error.into(),
    }
}

/// Replaces the setting's name at the start of a message by the name of its option.
fn as_option(setting: &str, message: &str) -> String {
    match message.strip_prefix(setting) {
        Some(rest) => format!("--{}{rest}", setting.replace('_', "-")),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use mpmd_serve::KeyFile;

    use super::*;

    #[test]
    fn host_or_port_is_named_by_the_error_of_listening() {
        let said = |why: ErrorKind| {
            let (address, why) = ("192.0.2.1:8000".parse().unwrap(), why.into());
            named(FrontError::Listen { address, why }).to_string()
        };
        let host = said(ErrorKind::AddrNotAvailable);
        assert!(
            host.starts_with("--host 192.0.2.1: this host has no such address"),
            "{host}"
        );
        assert!(!host.contains("--port"), "{host}");
        assert!(said(ErrorKind::AddrInUse).contains("give another --port"));
        assert!(said(ErrorKind::PermissionDenied).contains("give another --port"));
    }

    #[test]
    fn option_is_named_and_paths_stay() {
        let path = "/keys/api_key_file".into();
        let file = KeyFile::Api;
        let invalid = FrontError::InvalidKeys {
            file,
            path,
            expected: "a key on a line".to_owned(),
        };
        let said = named(invalid).to_string();
        assert_eq!(
            said,
            "--api-key-file /keys/api_key_file: expected a key on a line"
        );
        let origin = "allow_origins/".to_owned();
        let said = named(FrontError::InvalidOrigin { origin }).to_string();
        assert!(
            said.starts_with("--allow-origin \"allow_origins/\": expected"),
            "{said}"
        );
    }
}
