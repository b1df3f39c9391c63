//! The weights of a model under training, as versions that servers take.

use std::collections::BTreeMap;

use mpmd::pipeline::{Loss, Pipeline};
use mpmd::tree::Tree;
use mpmd::weights::{Publication, Publisher};
use mpmd::{MpmdArray, Program, Result};

use crate::config::ModelConfig;
use crate::decoder::OUTPUT;
use crate::decoder::lora::{Lora, merged};
use crate::inference::weight_store::{WeightType, held_as};

/// Publishes the parameters of a training pipeline as versions. LoRA's matrices are merged into
/// their weights.
pub struct WeightPublisher {
    publisher: Publisher,
    lora: Option<Lora>,
    is_tied: bool,
}

impl WeightPublisher {
    /// Begins the publication of a pipeline's parameters. `held` has the dtypes of the inferences
    /// that subscribe. Every process must call it.
    ///
    /// # Errors
    ///
    /// As for [`Program::publisher`].
    pub fn new<In: Tree<Leaf = MpmdArray>>(
        p: &mut Program,
        publication: Publication,
        pipeline: &Pipeline<In, Loss<MpmdArray>>,
        config: &ModelConfig,
        lora: Option<Lora>,
        held: WeightType,
    ) -> Result<Self> {
        let is_tied = config.tie_word_embeddings;
        let in_half = held == WeightType::Bf16;
        let publication = publication.dtype_of(move |name, aval| held_as(name, aval, in_half));
        let params = params(p, pipeline, lora, is_tied)?;
        Ok(Self {
            publisher: p.publisher(publication, &params)?,
            lora,
            is_tied,
        })
    }

    /// Publishes the current parameters as version `version`. Every process must call it.
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

    /// Returns the underlying publisher.
    pub fn publisher(&self) -> &Publisher {
        &self.publisher
    }
}

fn params<In: Tree<Leaf = MpmdArray>>(
    p: &mut Program,
    pipeline: &Pipeline<In, Loss<MpmdArray>>,
    lora: Option<Lora>,
    is_tied: bool,
) -> Result<BTreeMap<String, MpmdArray>> {
    let mut params = merged(p, pipeline, lora)?;
    if is_tied {
        // The copy of the embedding.
        params.remove(OUTPUT);
    }
    Ok(params)
}
