//! The parameters of each stage: names, shapes, shardings and initial values.
//!
//! A parameter's name (`blocks.3.w_qkv`) counts blocks over the whole model and does not contain
//! the stage. Initial values depend on that name. The model is therefore the same to the bit for
//! every division into stages.

use mpmd::aval::Element;
use mpmd::prelude::*;
use mpmd::random::{Key, normal_f64};
use mpmd::sharding::Sharding;

use super::block::BlockParameters;
use super::embed::EmbedParameters;
use super::head::HeadParameters;
use super::{BlockShape, Initial, LeafShape};
use crate::math::Real;

/// The sizes of a model.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Model {
    /// Number of blocks.
    pub layers: usize,
    /// Columns of the activations between blocks.
    pub width: usize,
    /// Attention heads of a block.
    pub heads: usize,
    /// Hidden columns of a block's MLP.
    pub hidden: usize,
    /// Limit on the length of a sequence, in tokens.
    pub time: usize,
}

/// The part of a model on one stage: consecutive blocks. The first stage also has the embedding,
/// and the last stage the head.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Part {
    /// The whole model.
    pub model: Model,
    /// Index of the stage's first block in the whole model.
    pub first_block: usize,
    /// Number of blocks on the stage.
    pub blocks: usize,
    /// True if the stage has the embedding.
    pub entrance: bool,
    /// True if the stage has the head.
    pub exit: bool,
}

/// One value for each of a stage's parameters: the parameters themselves, or for instance their
/// shapes.
#[derive(Clone, Debug, Tree)]
pub struct StageParams<L> {
    /// The embedding's parameters. Only the first stage has them.
    pub embed: Option<EmbedParameters<L>>,
    /// The stage's blocks, in order.
    pub blocks: Vec<BlockParameters<L>>,
    /// The head's parameters. Only the last stage has them.
    pub head: Option<HeadParameters<L>>,
}

impl Model {
    /// Returns the sizes of the model's blocks for `batch` sequences of `time` tokens, all on one
    /// device.
    pub fn shape(&self, batch: usize, time: usize) -> BlockShape {
        let Self { width, heads, hidden, .. } = *self;
        BlockShape { batch, time, width, heads_total: heads, heads, hidden }
    }

    /// Divides the model into `stages` parts, as evenly as whole blocks allow. With more stages
    /// than blocks, some parts have no block.
    ///
    /// # Errors
    ///
    /// If a size is zero, or the heads do not divide the width.
    pub fn parts(&self, stages: usize) -> Result<Vec<Part>> {
        let Self { layers, width, heads, hidden, time } = *self;
        if [layers, width, heads, hidden, time, stages].contains(&0) {
            return Err(Error::kernel(format!("a size of zero: {self:?} in {stages} stages")));
        }
        if !width.is_multiple_of(heads) {
            return Err(Error::kernel(format!("{width} columns do not divide into {heads} heads")));
        }
        let part = |stage: usize| {
            let (first_block, end) = (stage * layers / stages, (stage + 1) * layers / stages);
            let (entrance, exit) = (stage == 0, stage + 1 == stages);
            Part { model: *self, first_block, blocks: end - first_block, entrance, exit }
        };
        Ok((0..stages).map(part).collect())
    }

    /// Returns the number of parameters of the whole model.
    ///
    /// # Panics
    ///
    /// Panics if the heads do not divide the width.
    pub fn parameters(&self) -> usize {
        let all =
            Part { model: *self, first_block: 0, blocks: self.layers, entrance: true, exit: true };
        all.shapes().leaves().into_iter().map(LeafShape::elements).sum()
    }
}

impl Part {
    /// Returns the shapes of the stage's parameters over all devices, with the dimensions that
    /// tensor parallelism splits.
    pub fn shapes(&self) -> StageParams<LeafShape> {
        let shape = self.model.shape(1, self.model.time);
        StageParams {
            embed: self.entrance.then(|| shape.embed_parameters()),
            blocks: (0..self.blocks).map(|_| shape.block_parameters()).collect(),
            head: self.exit.then(|| shape.head_parameters()),
        }
    }

    /// Returns the distributions of the initial values of the stage's parameters.
    pub fn initial(&self) -> StageParams<Initial> {
        let shape = self.model.shape(1, self.model.time);
        StageParams {
            embed: self.entrance.then(|| shape.embed_initial()),
            blocks: (0..self.blocks).map(|_| shape.block_initial(self.model.layers)).collect(),
            head: self.exit.then(|| shape.head_initial()),
        }
    }

    /// Returns the parameters' names, in the order of the leaves.
    pub fn names(&self) -> Vec<String> {
        self.shapes().structure().paths().iter().map(|path| self.name(path)).collect()
    }

    /// Returns the name in the whole model of the parameter at a path of [`StageParams`]:
    /// `blocks.3.w_qkv` for `blocks/0/w_qkv` if the stage starts at block 3.
    fn name(&self, path: &str) -> String {
        let mut steps = path.split('/').map(str::to_owned).collect::<Vec<_>>();
        if let [kind, number, ..] = steps.as_mut_slice()
            && kind == "blocks"
            && let Ok(block) = number.parse::<usize>()
        {
            *number = (self.first_block + block).to_string();
        }
        steps.join(".")
    }

    /// Issues the making of the stage's parameters with their initial values, and returns without
    /// waiting. `shardings` are in the order of the leaves. Each owner makes its own part.
    ///
    /// # Errors
    ///
    /// If a sharding does not divide its parameter.
    pub fn make<T: Real + Element>(
        &self,
        p: &mut Program,
        shardings: &[Sharding],
        seed: u64,
    ) -> Result<StageParams<MpmdArray>> {
        let shapes = self.shapes();
        let initial = self.initial().into_leaves();
        let mut leaves = Vec::with_capacity(initial.len());
        let places = shapes.leaves().into_iter().zip(shardings);
        for (name, (initial, (shape, sharding))) in
            self.names().iter().zip(initial.into_iter().zip(places))
        {
            let key = name.bytes().fold(Key(seed), |key, byte| key.fold_in(byte.into()));
            leaves.push(make::<T>(p, shape, sharding, initial, key)?);
        }
        Ok(StageParams::from_leaves(&shapes.structure(), leaves)?)
    }

    /// Issues the making of zeros for each of the stage's parameters, and returns without waiting.
    /// `shardings` are in the order of the leaves.
    ///
    /// # Errors
    ///
    /// As [`Part::make`].
    pub fn zeros<T: Real + Element>(
        &self,
        p: &mut Program,
        shardings: &[Sharding],
    ) -> Result<Vec<MpmdArray>> {
        let shapes = self.shapes();
        let leaves = shapes.leaves().into_iter().zip(shardings);
        leaves
            .map(|(shape, sharding)| make::<T>(p, shape, sharding, Initial::Constant(0.0), Key(0)))
            .collect()
    }
}

fn make<T: Real + Element>(
    p: &mut Program,
    shape: &LeafShape,
    sharding: &Sharding,
    initial: Initial,
    key: Key,
) -> Result<MpmdArray> {
    let dims = shape.dims.clone();
    p.array_from_fn(ShapedArray::new(&shape.dims, T::DTYPE), sharding, move |region, mut values| {
        let values = values.as_mut_slice::<T>()?;
        match initial {
            Initial::Constant(value) => values.fill(T::of(value)),
            Initial::Normal(deviation) => values
                .iter_mut()
                .zip(region.indices(&dims))
                .for_each(|(value, element)| *value = T::of(deviation * normal_f64(key, element))),
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MODEL: Model = Model { layers: 5, width: 8, heads: 2, hidden: 12, time: 4 };

    #[test]
    fn names_are_unique_and_independent_of_stages() {
        let names = |stages| -> Vec<String> {
            MODEL.parts(stages).unwrap().iter().flat_map(Part::names).collect()
        };
        let one = names(1);
        assert_eq!(one.len(), 2 + 5 * 12 + 3);
        assert_eq!((one[0].as_str(), one[62].as_str()), ("embed.bytes", "head.norm_gain"));
        assert!(one.contains(&"blocks.3.w_qkv".to_owned()), "{one:?}");
        assert_eq!(one.iter().collect::<BTreeSet<_>>().len(), one.len());
        (2..=9).for_each(|stages| assert_eq!(names(stages), one, "{stages} stages"));
    }

    #[test]
    fn blocks_are_divided_evenly_and_sizes_checked() {
        let blocks = |stages| {
            MODEL
                .parts(stages)
                .map(|parts| parts.iter().map(|part| part.blocks).collect::<Vec<_>>())
        };
        assert_eq!(blocks(2).unwrap(), [2, 3]);
        assert_eq!(blocks(5).unwrap(), [1; 5]);
        assert_eq!(blocks(8).unwrap(), [0, 1, 0, 1, 1, 0, 1, 1]);
        assert!(blocks(0).is_err());
        let odd = Model { heads: 3, ..MODEL };
        assert!(odd.parts(1).unwrap_err().to_string().contains("3 heads"));
    }

    #[test]
    fn usual_model_has_about_a_million_parameters() {
        let usual = Model { layers: 4, width: 128, heads: 4, hidden: 512, time: 128 };
        assert_eq!(usual.parameters(), 875_264);
    }
}
