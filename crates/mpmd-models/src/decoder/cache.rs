//! The keys and values of the tokens so far, for inference.

use mpmd::candle::nn::{PagedCache, PagedRows};
use mpmd::candle::{Device, Result, Tensor};

use crate::decoder::devices::DeviceDivision;

use crate::config::ModelConfig;

/// The caches of keys and values on one device, one for each layer of a part of the model.
pub(crate) struct Caches(pub(super) Vec<PagedCache>);

impl Caches {
    /// Creates empty caches of `blocks` blocks for `layers` layers.
    pub(crate) fn new(
        config: &ModelConfig,
        layers: usize,
        over: DeviceDivision,
        blocks: usize,
    ) -> Self {
        let heads = config.num_key_value_heads / over.tensor;
        Self(
            (0..layers)
                .map(|_| PagedCache::new(blocks, heads, config.head_dim))
                .collect(),
        )
    }
}

/// The tokens of a pass, sequence after sequence.
pub(crate) struct PassRows {
    pub(crate) sequences: Vec<PagedRows>,
    /// The position of each token in its sequence.
    pub(super) positions: Tensor,
}

impl PassRows {
    /// Creates the rows of a pass on `device` from its sequences.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub(crate) fn new(sequences: Vec<PagedRows>, device: &Device) -> Result<Self> {
        let mut all = Vec::new();
        for PagedRows { start, rows, .. } in &sequences {
            all.extend(*start as u32..(start + rows) as u32);
        }
        let count = all.len();
        Ok(Self {
            sequences,
            positions: Tensor::from_vec(all, count, device)?,
        })
    }
}
