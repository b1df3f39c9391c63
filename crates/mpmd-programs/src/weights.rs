//! Weights that a training publishes and a server takes: the arguments of both ends.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use mpmd::job::at_least;
use mpmd::launch::{Token, read_secret};
use mpmd::weights::{Publication, Subscribing};

use crate::weight_type::WeightTypeArg;

/// The name under which a training publishes a model's weights.
pub(crate) const PUBLICATION: &str = "model";

/// Arguments of a training that publishes its weights.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PublishArgs {
    /// Publish the weights while the model is trained, for servers that subscribe to this address,
    /// HOST:PORT
    #[arg(long, value_name = "ADDRESS", requires = "weights_secret")]
    pub publish: Option<String>,
    /// Updates from one published version to the next
    #[arg(long, value_name = "STEPS", default_value_t = 1, requires = "publish",
        value_parser = at_least(1))]
    pub publish_every: usize,
    /// Type in which the weights are published: that of the servers, --dtype of `serve`
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "publish")]
    pub publish_as: WeightTypeArg,
    /// File with a secret of at least 32 bytes, the same as that of the servers; no other user may
    /// read it
    #[arg(long, value_name = "FILE", requires = "publish")]
    pub weights_secret: Option<PathBuf>,
}

/// Arguments of a server that takes the weights of a training.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SubscribeArgs {
    /// Take new versions of the weights from the training that publishes them at this address,
    /// HOST:PORT
    #[arg(long, value_name = "ADDRESS", requires = "weights_secret")]
    pub subscribe: Option<String>,
    /// Take only the elements that have changed, where these are fewer bytes; each process keeps
    /// the last version once more
    #[arg(long, requires = "subscribe")]
    pub subscribe_changes: bool,
    /// File with a secret of at least 32 bytes, the same as that of the training; no other user may
    /// read it
    #[arg(long, value_name = "FILE", requires = "subscribe")]
    pub weights_secret: Option<PathBuf>,
}

impl PublishArgs {
    /// Returns the settings of the publication. `None` without `--publish`.
    ///
    /// # Errors
    ///
    /// If the address or the file of the secret is invalid.
    pub(crate) fn publication(&self) -> anyhow::Result<Option<Publication>> {
        let (Some(address), Some(secret)) = (&self.publish, &self.weights_secret) else {
            return Ok(None);
        };
        let found = address
            .to_socket_addrs()
            .with_context(|| format!("--publish {address}"))?;
        let listen: SocketAddr = found
            .into_iter()
            .next()
            .with_context(|| format!("--publish {address}: no address"))?;
        Ok(Some(
            Publication::new(PUBLICATION, token(secret)?).listen(listen),
        ))
    }
}

impl SubscribeArgs {
    /// Returns the settings of the subscription. `None` without `--subscribe`.
    ///
    /// # Errors
    ///
    /// If the file of the secret is invalid.
    pub(crate) fn subscribing(&self) -> anyhow::Result<Option<Subscribing>> {
        let (Some(address), Some(secret)) = (&self.subscribe, &self.weights_secret) else {
            return Ok(None);
        };
        let subscribing = Subscribing::new(PUBLICATION, address, token(secret)?);
        Ok(Some(subscribing.changes(self.subscribe_changes)))
    }
}

fn token(secret: &Path) -> anyhow::Result<Token> {
    let path = secret
        .to_str()
        .context("--weights-secret: expected a path in UTF-8")?;
    Ok(Token::of_secret(
        &read_secret(path, "--weights-secret")?,
        PUBLICATION,
    ))
}
