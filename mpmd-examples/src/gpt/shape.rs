//! Sizes of a model's parts, and the shapes that follow from them.

use mpmd::sharding::{Spec, SpecEntry};
use mpmd::tree::Leaf;

use super::BYTES;
use super::block::{BlockGradients, BlockInputs, BlockInterior, BlockParameters};
use super::embed::EmbedParameters;
use super::head::{HeadGradients, HeadParameters, HeadResiduals};
use super::placement::{DATA_AXIS, MODEL_AXIS};

/// The sizes of a block as one device sees it. Embedding and head read `batch`, `time` and `width`
/// alone.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct BlockShape {
    /// Sequences.
    pub batch: usize,
    /// Places of a sequence.
    pub time: usize,
    /// Columns of the rows that go from block to block: a multiple of `heads_total`.
    pub width: usize,
    /// Attention heads on all devices of the model-parallel group.
    pub heads_total: usize,
    /// This device's heads: `heads_total` over the devices of the group.
    pub heads: usize,
    /// This device's columns inside the MLP.
    pub hidden: usize,
}

/// An array's shape, and how data and tensor parallelism split it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LeafShape {
    /// Sizes of the dimensions.
    pub dims: Vec<usize>,
    /// The dimension that is split over the model-parallel group; none where every device has the
    /// same.
    pub sharded: Option<usize>,
    /// The dimension of the sequences, which is split over the data-parallel group; none for
    /// parameters.
    pub batch: Option<usize>,
}

impl Leaf for LeafShape {}

impl LeafShape {
    /// What belongs to the places of sequences: none of it is split over the model-parallel group.
    pub fn of_batch(dims: impl Into<Vec<usize>>) -> Self {
        Self { dims: dims.into(), sharded: None, batch: Some(0) }
    }

    /// How many elements there are.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// The same with the sequences along dimension `dim`.
    fn batch_at(self, dim: usize) -> Self {
        Self { batch: Some(dim), ..self }
    }
}

/// What a parameter starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// The same value everywhere.
    Constant(f64),
    /// Normally distributed with mean 0 and this standard deviation.
    Normal(f64),
}

impl Leaf for Initial {}

impl Initial {
    /// Whether weight decay customarily applies to the parameter: to matrices and tables, which
    /// start at random; not to biases and gains, which start even.
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

/// The spec that shards a leaf of a model over [`DATA_AXIS`] and [`MODEL_AXIS`] as it says.
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
    /// Rows of the products: places of all sequences.
    pub fn rows(&self) -> usize {
        self.batch * self.time
    }

    /// Columns of one head.
    ///
    /// # Panics
    ///
    /// Panics where `width` is no multiple of `heads_total`, or either is zero.
    pub fn head_dim(&self) -> usize {
        let Self { width, heads_total, .. } = *self;
        assert!(heads_total > 0 && width > 0, "a block of no heads or no width");
        assert!(
            width.is_multiple_of(heads_total),
            "{width} columns do not divide into {heads_total} heads"
        );
        width / heads_total
    }

    /// Columns of this device's heads.
    ///
    /// # Panics
    ///
    /// As [`head_dim`](Self::head_dim).
    pub fn local_width(&self) -> usize {
        self.heads * self.head_dim()
    }

    /// The sizes without tensor parallelism, whose shapes are the global ones.
    ///
    /// # Panics
    ///
    /// Panics where this device has no head.
    pub fn unsplit(&self) -> Self {
        assert!(self.heads > 0, "a device without heads");
        Self {
            heads: self.heads_total,
            hidden: self.hidden * (self.heads_total / self.heads),
            ..*self
        }
    }

    /// The sizes on each of `devices` among which this one's heads and hidden columns are divided.
    ///
    /// # Panics
    ///
    /// Panics where they cannot be divided evenly.
    pub fn split(&self, devices: usize) -> Self {
        let Self { heads, hidden, .. } = *self;
        assert!(
            devices > 0 && heads.is_multiple_of(devices) && hidden.is_multiple_of(devices),
            "{heads} heads and {hidden} hidden columns do not divide among {devices} devices"
        );
        Self { heads: heads / devices, hidden: hidden / devices, ..*self }
    }

    /// Parameters of a block. This and the next ones panic as [`head_dim`](Self::head_dim) does.
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

    /// Residuals of a block that both halves of the backward pass or the second one read.
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

    /// Residuals of a block that only the first half of the backward pass reads.
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

    /// Weight residuals of a block.
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

    /// What a block's parameters start from in a model of `layers` blocks, the same for every
    /// split.
    ///
    /// What a branch adds to the rows is scaled down with the number of branches, so that the rows'
    /// variance does not grow with depth.
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

    /// Parameters of the embedding.
    pub fn embed_parameters(&self) -> EmbedParameters<LeafShape> {
        EmbedParameters {
            bytes: whole([BYTES, self.width]),
            positions: whole([self.time, self.width]),
        }
    }

    /// What the embedding's parameters start from.
    pub fn embed_initial(&self) -> EmbedParameters<Initial> {
        EmbedParameters { bytes: Initial::Normal(0.5), positions: Initial::Normal(0.1) }
    }

    /// Parameters of the head.
    pub fn head_parameters(&self) -> HeadParameters<LeafShape> {
        let width = self.width;
        HeadParameters {
            norm_gain: whole([width]),
            norm_bias: whole([width]),
            weight: whole([width, BYTES]),
        }
    }

    /// What the head's parameters start from: logits near each other.
    pub fn head_initial(&self) -> HeadParameters<Initial> {
        HeadParameters {
            norm_gain: Initial::Constant(1.0),
            norm_bias: Initial::Constant(0.0),
            weight: Initial::Normal(0.1 / (self.width as f64).sqrt()),
        }
    }

    /// Residuals of the head.
    pub fn head_residuals(&self) -> HeadResiduals<LeafShape> {
        let Self { batch, time, width, .. } = *self;
        HeadResiduals {
            norm_hat: LeafShape::of_batch([batch, time, width]),
            norm_inv_std: LeafShape::of_batch([batch, time]),
            norm_out: LeafShape::of_batch([batch, time, width]),
            probabilities: LeafShape::of_batch([batch, time, BYTES]),
        }
    }

    /// Weight residuals of the head.
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
    fn splitting_divides_exactly_the_sharded_dimension() {
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
    fn residuals_divide_over_both_axes_and_parameters_over_one() {
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
    fn decay_spares_biases_and_gains() {
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
    fn an_uneven_split_is_refused() {
        SHAPE.split(3);
    }
}
