//! Sizes of a model's parts, and the array shapes that follow from them.

use mpmd::sharding::{Spec, SpecEntry};
use mpmd::tree::Leaf;

use super::BYTES;
use super::block::{BlockGradients, BlockInputs, BlockInterior, BlockParameters};
use super::embed::EmbedParameters;
use super::head::{HeadGradients, HeadParameters, HeadResiduals};
use super::placement::{DATA_AXIS, MODEL_AXIS};

/// The sizes of a block on one device. Embedding and head use only `batch`, `time` and `width`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockShape {
    /// Number of sequences.
    pub batch: usize,
    /// Length of a sequence, in tokens.
    pub time: usize,
    /// Columns of the activations between blocks: a multiple of `heads_total`.
    pub width: usize,
    /// Attention heads on all devices of the model-parallel group.
    pub heads_total: usize,
    /// This device's heads: `heads_total` divided by the number of devices of the group.
    pub heads: usize,
    /// This device's hidden columns of the MLP.
    pub hidden: usize,
}

/// An array's shape, and the dimensions over which data and tensor parallelism split it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LeafShape {
    /// Sizes of the dimensions.
    pub dims: Vec<usize>,
    /// The dimension that is split over the model-parallel group. `None` if every device has the
    /// whole array.
    pub sharded: Option<usize>,
    /// The dimension of the sequences, which is split over the data-parallel group. `None` for
    /// parameters.
    pub batch: Option<usize>,
}

impl Leaf for LeafShape {}

impl LeafShape {
    /// Returns the shape of an array with sequences along dimension 0. It is not split over the
    /// model-parallel group.
    pub fn of_batch(dims: impl Into<Vec<usize>>) -> Self {
        Self { dims: dims.into(), sharded: None, batch: Some(0) }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Returns the same shape with the sequences along dimension `dim`.
    fn batch_at(self, dim: usize) -> Self {
        Self { batch: Some(dim), ..self }
    }
}

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// The same value everywhere.
    Constant(f64),
    /// Normally distributed with mean 0 and this standard deviation.
    Normal(f64),
}

impl Leaf for Initial {}

impl Initial {
    /// True if weight decay usually applies to the parameter. It applies to matrices and tables,
    /// which start with random values, but not to biases and gains.
    pub fn decays(self) -> bool {
        matches!(self, Self::Normal(_))
    }
}

fn whole<const N: usize>(dims: [usize; N]) -> LeafShape {
    LeafShape { dims: dims.to_vec(), sharded: None, batch: None }
}

fn split<const N: usize>(sharded: usize, dims: [usize; N]) -> LeafShape {
    LeafShape { dims: dims.to_vec(), sharded: Some(sharded), batch: None }
}

/// Returns the spec that shards a leaf over [`DATA_AXIS`] and [`MODEL_AXIS`], by its `batch` and
/// `sharded` dimensions.
pub(super) fn spec_of(leaf: &LeafShape) -> Spec {
    let axis = |dim: usize| match dim {
        dim if leaf.batch == Some(dim) => SpecEntry::from(DATA_AXIS),
        dim if leaf.sharded == Some(dim) => SpecEntry::from(MODEL_AXIS),
        _ => SpecEntry::None,
    };
    let last = leaf.batch.max(leaf.sharded);
    Spec::new((0..last.map_or(0, |last| last + 1)).map(axis).collect::<Vec<_>>())
}

impl BlockShape {
    /// Returns the number of rows of the products: positions of all sequences.
    pub fn rows(&self) -> usize {
        self.batch * self.time
    }

    /// Returns the number of columns of one head.
    ///
    /// # Panics
    ///
    /// Panics if `width` is no multiple of `heads_total`, or either is zero.
    pub fn head_dim(&self) -> usize {
        let Self { width, heads_total, .. } = *self;
        assert!(heads_total > 0 && width > 0, "a block of no heads or no width");
        assert!(
            width.is_multiple_of(heads_total),
            "{width} columns do not divide into {heads_total} heads"
        );
        width / heads_total
    }

    /// Returns the number of columns of this device's heads.
    ///
    /// # Panics
    ///
    /// As [`head_dim`](Self::head_dim).
    pub fn local_width(&self) -> usize {
        self.heads * self.head_dim()
    }

    /// Returns the sizes without tensor parallelism, which give the global shapes.
    ///
    /// # Panics
    ///
    /// Panics if this device has no head.
    pub fn unsplit(&self) -> Self {
        assert!(self.heads > 0, "a device without heads");
        Self {
            heads: self.heads_total,
            hidden: self.hidden * (self.heads_total / self.heads),
            ..*self
        }
    }

    /// Returns the sizes on each of `devices` devices that share this one's heads and hidden
    /// columns.
    ///
    /// # Panics
    ///
    /// Panics if they cannot be divided evenly.
    pub fn split(&self, devices: usize) -> Self {
        let Self { heads, hidden, .. } = *self;
        assert!(
            devices > 0 && heads.is_multiple_of(devices) && hidden.is_multiple_of(devices),
            "{heads} heads and {hidden} hidden columns do not divide among {devices} devices"
        );
        Self { heads: heads / devices, hidden: hidden / devices, ..*self }
    }

    /// Returns the shapes of a block's parameters on this device. It panics as
    /// [`head_dim`](Self::head_dim) does, and so do the next functions.
    pub fn block_parameters(&self) -> BlockParameters<LeafShape> {
        let (width, hidden, local) = (self.width, self.hidden, self.local_width());
        BlockParameters {
            norm1_gain: whole([width]),
            norm1_bias: whole([width]),
            w_qkv: split(2, [width, 3, local]),
            b_qkv: split(1, [3, local]),
            w_out: split(0, [local, width]),
            b_out: whole([width]),
            norm2_gain: whole([width]),
            norm2_bias: whole([width]),
            w_up: split(1, [width, hidden]),
            b_up: split(0, [hidden]),
            w_down: split(0, [hidden, width]),
            b_down: whole([width]),
        }
    }

    /// Returns the shapes of a block's residuals that the weight gradient reads, or both halves of
    /// the backward pass.
    pub fn block_inputs(&self) -> BlockInputs<LeafShape> {
        let Self { batch, time, width, hidden, .. } = *self;
        let rows = LeafShape::of_batch([batch, time, width]);
        BlockInputs {
            norm1_hat: rows.clone(),
            norm1_out: rows.clone(),
            context: split(2, [batch, time, self.local_width()]).batch_at(0),
            norm2_hat: rows.clone(),
            norm2_out: rows,
            activated: split(2, [batch, time, hidden]).batch_at(0),
        }
    }

    /// Returns the shapes of a block's residuals that only the input gradient reads.
    pub fn block_interior(&self) -> BlockInterior<LeafShape> {
        let Self { batch, time, heads, hidden, .. } = *self;
        BlockInterior {
            norm1_inv_std: LeafShape::of_batch([batch, time]),
            qkv: split(2, [3, batch, heads, time, self.head_dim()]).batch_at(1),
            probabilities: split(1, [batch, heads, time, time]).batch_at(0),
            norm2_inv_std: LeafShape::of_batch([batch, time]),
            slope: split(2, [batch, time, hidden]).batch_at(0),
        }
    }

    /// Returns the shapes of a block's weight residuals: the gradients that the input gradient
    /// writes for the weight gradient.
    pub fn block_gradients(&self) -> BlockGradients<LeafShape> {
        let Self { batch, time, width, hidden, .. } = *self;
        let rows = LeafShape::of_batch([batch, time, width]);
        BlockGradients {
            d_norm1: rows.clone(),
            d_qkv: split(3, [batch, time, 3, self.local_width()]).batch_at(0),
            d_attention: rows.clone(),
            d_norm2: rows.clone(),
            d_pre: split(2, [batch, time, hidden]).batch_at(0),
            d_mlp: rows,
        }
    }

    /// Returns the initial values of a block's parameters in a model of `layers` blocks. They are
    /// the same for every split.
    ///
    /// The output weights of a branch become smaller with the number of branches. The variance of
    /// the rows therefore does not grow with depth.
    pub fn block_initial(&self, layers: usize) -> BlockParameters<Initial> {
        let (zeros, ones) = (Initial::Constant(0.0), Initial::Constant(1.0));
        let all = self.unsplit();
        let inward = Initial::Normal((self.width as f64).sqrt().recip());
        let back =
            |inputs: usize| Initial::Normal(((2 * layers.max(1) * inputs) as f64).sqrt().recip());
        BlockParameters {
            norm1_gain: ones,
            norm1_bias: zeros,
            w_qkv: inward,
            b_qkv: zeros,
            w_out: back(self.width),
            b_out: zeros,
            norm2_gain: ones,
            norm2_bias: zeros,
            w_up: inward,
            b_up: zeros,
            w_down: back(all.hidden),
            b_down: zeros,
        }
    }

    /// Returns the shapes of the embedding's parameters.
    pub fn embed_parameters(&self) -> EmbedParameters<LeafShape> {
        EmbedParameters {
            bytes: whole([BYTES, self.width]),
            positions: whole([self.time, self.width]),
        }
    }

    /// Returns the initial values of the embedding's parameters.
    pub fn embed_initial(&self) -> EmbedParameters<Initial> {
        EmbedParameters { bytes: Initial::Normal(0.5), positions: Initial::Normal(0.1) }
    }

    /// Returns the shapes of the head's parameters.
    pub fn head_parameters(&self) -> HeadParameters<LeafShape> {
        let width = self.width;
        HeadParameters {
            norm_gain: whole([width]),
            norm_bias: whole([width]),
            weight: whole([width, BYTES]),
        }
    }

    /// Returns the initial values of the head's parameters. They give logits close to each other.
    pub fn head_initial(&self) -> HeadParameters<Initial> {
        HeadParameters {
            norm_gain: Initial::Constant(1.0),
            norm_bias: Initial::Constant(0.0),
            weight: Initial::Normal(0.1 / (self.width as f64).sqrt()),
        }
    }

    /// Returns the shapes of the head's residuals.
    pub fn head_residuals(&self) -> HeadResiduals<LeafShape> {
        let Self { batch, time, width, .. } = *self;
        HeadResiduals {
            norm_hat: LeafShape::of_batch([batch, time, width]),
            norm_inv_std: LeafShape::of_batch([batch, time]),
            norm_out: LeafShape::of_batch([batch, time, width]),
            probabilities: LeafShape::of_batch([batch, time, BYTES]),
        }
    }

    /// Returns the shapes of the head's weight residuals: the gradients that the input gradient
    /// writes for the weight gradient.
    pub fn head_gradients(&self) -> HeadGradients<LeafShape> {
        let Self { batch, time, width, .. } = *self;
        HeadGradients {
            d_norm: LeafShape::of_batch([batch, time, width]),
            d_logits: LeafShape::of_batch([batch, time, BYTES]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd::tree::Tree as _;

    const SHAPE: BlockShape =
        BlockShape { batch: 2, time: 3, width: 8, heads_total: 4, heads: 4, hidden: 12 };

    #[test]
    fn split_divides_exactly_the_sharded_dimension() {
        let part = SHAPE.split(2);
        assert_eq!((part.heads, part.heads_total, part.hidden), (2, 4, 6));
        assert_eq!(part.unsplit(), SHAPE);
        assert_eq!(part.split(2).unsplit(), SHAPE);
        let leaves = |shape: BlockShape| -> Vec<LeafShape> {
            let mut all = shape.block_parameters().into_leaves();
            all.extend(shape.block_inputs().into_leaves());
            all.extend(shape.block_interior().into_leaves());
            all.extend(shape.block_gradients().into_leaves());
            all
        };
        for (mut global, local) in leaves(SHAPE).into_iter().zip(leaves(part)) {
            if let Some(dim) = global.sharded {
                global.dims[dim] /= 2;
            }
            assert_eq!(global, local);
        }
    }

    #[test]
    fn residuals_shard_over_both_axes_and_parameters_over_one() {
        let spec = |leaf: &LeafShape| spec_of(leaf).to_string();
        let interior = SHAPE.block_interior();
        assert_eq!(spec(&interior.qkv), "P(None, data, model)");
        assert_eq!(spec(&interior.probabilities), "P(data, model)");
        assert_eq!(spec(&interior.norm1_inv_std), "P(data)");
        assert_eq!(spec(&SHAPE.block_gradients().d_qkv), "P(data, None, None, model)");
        assert_eq!(spec(&SHAPE.head_residuals().probabilities), "P(data)");
        assert_eq!(spec(&SHAPE.block_parameters().w_qkv), "P(None, None, model)");
        assert_eq!(spec(&SHAPE.block_parameters().norm1_gain), "P()");
        let residuals =
            SHAPE.block_inputs().into_leaves().into_iter().chain(interior.into_leaves());
        for leaf in residuals.chain(SHAPE.block_gradients().into_leaves()) {
            assert_eq!(leaf.batch.map(|dim| leaf.dims[dim]), Some(SHAPE.batch), "{leaf:?}");
        }
    }

    #[test]
    fn decay_excludes_biases_and_gains() {
        let initial = SHAPE.block_initial(4);
        let decays: Vec<(String, bool)> = initial
            .leaves_with_paths()
            .into_iter()
            .map(|(path, leaf)| (path, leaf.decays()))
            .collect();
        assert!(
            decays.iter().all(|(path, decays)| *decays == path.starts_with("w_")),
            "{decays:?}"
        );
    }

    #[test]
    #[should_panic(expected = "do not divide among 3 devices")]
    fn uneven_split_panics() {
        SHAPE.split(3);
    }
}
