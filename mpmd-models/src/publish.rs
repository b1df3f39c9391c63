//! Weights that a training publishes and a server takes: the arguments of both ends.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use mpmd::launch::{Token, read_secret};
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::tree::Tree;
use mpmd::weights::{Publication, Publisher, Subscribing};
use mpmd::{MpmdArray, Program, Result};
use mpmd_job::at_least;

use crate::config::Config;
use crate::decoder::OUTPUT;
use crate::generate::WeightType;
use crate::load::held_as;
use crate::lora::{Lora, merged};

/// The name of the publication of a model's weights.
const NAME: &str = "model";

/// Arguments of a training that publishes its weights.
#[derive(Clone, Debug, clap::Args)]
pub struct PublishArgs {
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
    pub publish_as: WeightType,
    /// File with a secret of at least 32 bytes, the same as that of the servers; no other user may
    /// read it
    #[arg(long, value_name = "FILE", requires = "publish")]
    pub weights_secret: Option<PathBuf>,
}

/// Arguments of a server that takes the weights of a training.
#[derive(Clone, Debug, clap::Args)]
pub struct SubscribeArgs {
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
    /// Returns the settings of the publication, if there is one.
    ///
    /// # Errors
    ///
    /// If the address or the file of the secret is invalid.
    pub fn publication(&self) -> anyhow::Result<Option<Publication>> {
        let (Some(address), Some(secret)) = (&self.publish, &self.weights_secret) else {
            return Ok(None);
        };
        let found = address.to_socket_addrs().with_context(|| format!("--publish {address}"))?;
        let listen: SocketAddr =
            found.into_iter().next().with_context(|| format!("--publish {address}: no address"))?;
        Ok(Some(Publication::new(NAME, token(secret)?).listen(listen)))
    }
}

impl SubscribeArgs {
    /// Returns the settings of the subscription, if there is one.
    ///
    /// # Errors
    ///
    /// If the file of the secret is invalid.
    pub fn subscribing(&self) -> anyhow::Result<Option<Subscribing>> {
        let (Some(address), Some(secret)) = (&self.subscribe, &self.weights_secret) else {
            return Ok(None);
        };
        let subscribing = Subscribing::new(NAME, address, token(secret)?);
        Ok(Some(subscribing.changes(self.subscribe_changes)))
    }
}

fn token(secret: &Path) -> anyhow::Result<Token> {
    let path = secret.to_str().context("--weights-secret: expected a path in UTF-8")?;
    Ok(Token::of_secret(&read_secret(path, "--weights-secret")?, NAME))
}

/// Publishes the parameters of a pipeline, those of LoRA merged with the weights that they change.
pub struct Weights {
    publisher: Publisher,
    lora: Option<Lora>,
    is_tied: bool,
}

impl Weights {
    /// Begins the publication of a pipeline's parameters, in the dtypes of an inference with
    /// weights of this type: with `bf16` vectors stay `f32`. Every process must call it.
    ///
    /// # Errors
    ///
    /// As for [`Program::publish`].
    pub fn new<In: Tree<Leaf = MpmdArray>>(
        p: &mut Program,
        publication: Publication,
        pipeline: &Pipeline<In, Loss<MpmdArray>>,
        (config, lora): (&Config, Option<Lora>),
        held: WeightType,
    ) -> Result<Self> {
        let is_tied = config.tie_word_embeddings;
        let in_half = held == WeightType::Bf16;
        let publication = publication.dtype_of(move |name, aval| held_as(name, aval, in_half));
        let params = params(p, pipeline, lora, is_tied)?;
        Ok(Self { publisher: p.publish(publication, &params)?, lora, is_tied })
    }

    /// Publishes the parameters as a version. Every process must call it.
    ///
    /// # Errors
    ///
    /// As for [`Publisher::publish`].
    pub fn publish<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        version: u64,
        pipeline: &Pipeline<In, Loss<MpmdArray>>,
    ) -> Result<()> {
        let params = params(p, pipeline, self.lora, self.is_tied)?;
        self.publisher.publish(version, &params)
    }

    /// Returns the publisher.
    pub fn publisher(&self) -> &Publisher {
        &self.publisher
    }
}

fn params<In: Tree<Leaf = MpmdArray>>(
    p: &mut Program,
    pipeline: &Pipeline<In, Loss<MpmdArray>>,
    lora: Option<Lora>,
    is_tied: bool,
) -> Result<std::collections::BTreeMap<String, MpmdArray>> {
    let mut params = merged(p, pipeline, lora)?;
    if is_tied {
        // The copy of the embedding.
        params.remove(OUTPUT);
    }
    Ok(params)
}
