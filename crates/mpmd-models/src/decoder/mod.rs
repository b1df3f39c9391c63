//! The decoder: layers between an embedding and an output. The values of a [`ModelConfig`] choose
//! its parts.
//!
//! Its parameters have the same names and forms for all families: those of Llama on model hubs.

mod attention;
mod balance;
mod cache;
pub(crate) mod devices;
mod experts;
mod layer;
pub(crate) mod lora;
pub(crate) mod matrix;
mod mlp;
mod norm;
mod routes;

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::Result as CoreResult;
use mpmd::aval::{self, ShapedArray};
use mpmd::candle::candle_core::{DType, Error as CandleError, bail};
use mpmd::candle::nn::{
    Embedding, Linear, Module, PackedLinear, VarBuilder, embedding, linear_no_bias,
};
use mpmd::candle::{Cx, Result, Tensor, stage};

use crate::config::ModelConfig;
use crate::decoder::devices::DeviceDivision;
use crate::decoder::lora::Lora;
use crate::decoder::matrix::{MatrixForm, MatrixLayer, Table};
use crate::rope::{RopeAngles, RopePlaces, RopeRotation};
use attention::SeenKeys;
pub(crate) use balance::Balance;
pub(crate) use cache::{Caches, PassRows};
use layer::{DecoderLayer, scaled};
use norm::NormLayer;

/// Name of the embedding's weight, `[vocab_size, hidden_size]`.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output layer's weight, `[vocab_size, hidden_size]`.
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// A part of a model: some consecutive layers. The first part also has the embedding, the last part
/// also the final norm and the output layer.
pub(crate) struct Decoder {
    embedding: Option<Table>,
    /// The learned position embeddings. `None` if the model or this part has none.
    positions: Option<Embedding>,
    embedding_scale: f64,
    /// The angles of each rotary embedding in [`ModelConfig::ropes`].
    angles: Vec<RopeAngles>,
    layers: Vec<DecoderLayer>,
    head: Option<(NormLayer, MatrixLayer)>,
    vocab_size: usize,
    logits_divisor: f64,
    logits_cap: Option<f64>,
    over: DeviceDivision,
}

/// The values, apart from parameters, from which a [`Decoder`] is built.
#[derive(Clone, Copy)]
pub(crate) struct DecoderPlan<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) lora: Option<Lora>,
    /// The angles of each rotary embedding in [`ModelConfig::ropes`].
    pub(crate) angles: &'a [RopeAngles],
    pub(crate) over: DeviceDivision,
}

/// The caches with the keys and values of earlier tokens, and the rows of the pass that follow
/// them.
struct CachedPass<'a> {
    caches: &'a mut Caches,
    rows: &'a PassRows,
}

impl Decoder {
    /// Creates a part with the layers `layers`, whose parameters `vb` gives by name.
    ///
    /// If embeddings are tied and the part has all layers, it shares the embedding with the output
    /// layer. A last part without the embedding always reads an output weight.
    ///
    /// # Errors
    ///
    /// As for [`VarBuilder::get_with_hints`].
    pub(crate) fn new(
        plan: DecoderPlan<'_>,
        layers: Range<usize>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        Self::with_tables(plan, layers, [None, None], vb)
    }

    /// Creates a part as [`Decoder::new`] does. A given embedding or output is used instead of the
    /// one in `vb`.
    fn with_tables(
        plan: DecoderPlan<'_>,
        layers: Range<usize>,
        [packed, output]: [Option<PackedLinear>; 2],
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let config = plan.config;
        let tokens = config.vocab_size;
        let width = config.hidden_size;
        let model = vb.pp("model");
        let first = layers.start == 0;
        let table = || {
            embedding(
                config.max_position_embeddings,
                width,
                model.pp("embed_positions"),
            )
        };

        let positions = (first && config.learned_positions)
            .then(table)
            .transpose()?;

        let own = || match packed {
            Some(packed) => Ok(Table::Packed(packed)),
            None => embedding(tokens, width, model.pp("embed_tokens")).map(Table::Plain),
        };
        let embedding = first.then(own).transpose()?;

        let head = if layers.end == config.num_hidden_layers {
            let output = match (output, &embedding) {
                (Some(output), _) => MatrixLayer::Packed(output),
                (None, Some(Table::Plain(embedding))) if config.tie_word_embeddings => {
                    MatrixLayer::Plain(Linear::new(embedding.embeddings().clone(), None))
                }
                _ => MatrixLayer::Plain(linear_no_bias(width, tokens, vb.pp("lm_head"))?),
            };
            Some((NormLayer::new(config, width, model.pp("norm"))?, output))
        } else {
            None
        };

        let layer = |layer| DecoderLayer::new(plan, layer, &model.pp("layers").pp(layer));
        Ok(Self {
            embedding,
            positions,
            embedding_scale: config.embedding_scale,
            angles: plan.angles.to_vec(),
            layers: layers.map(layer).collect::<Result<_>>()?,
            head,
            vocab_size: tokens,
            logits_divisor: config.logits_divisor,
            logits_cap: config.logits_cap,
            over: plan.over,
        })
    }

    /// Creates a part as [`Decoder::new`] does, for inference. Packs the weights layer by layer, so
    /// unpacked weights exist for one layer at a time. `table` returns the embedding or the output
    /// by name, and `params` the other parameters of some layers.
    ///
    /// # Errors
    ///
    /// As for [`Decoder::new`].
    pub(crate) fn packed(
        plan: DecoderPlan<'_>,
        layers: Range<usize>,
        in_half: bool,
        table: impl Fn(&str) -> Result<PackedLinear>,
        params: impl Fn(Range<usize>) -> Result<VarBuilder<'static>>,
    ) -> Result<Self> {
        let config = plan.config;
        let embedding = (layers.start == 0).then(|| table(EMBEDDING)).transpose()?;
        let output = match embedding.clone().filter(|_| config.tie_word_embeddings) {
            _ if layers.end < config.num_hidden_layers => None,
            Some(embedding) => Some(embedding),
            None => Some(table(OUTPUT)?),
        };

        let mut whole: Option<Self> = None;
        for layer in layers {
            let own = layer..layer + 1;
            let vb = params(own.clone())?;
            let tables = [embedding.clone(), output.clone()];
            let mut part = Self::with_tables(plan, own, tables, &vb)?;
            drop(vb);

            let form = MatrixForm::Packed { in_half };
            part.layers
                .iter_mut()
                .try_for_each(|layer| layer.pack(form))?;

            match &mut whole {
                None => whole = Some(part),
                Some(whole) => {
                    whole.layers.append(&mut part.layers);
                    whole.head = part.head;
                }
            }
        }
        whole.ok_or_else(|| CandleError::msg("a part without layers"))
    }

    /// Drops the values of all matrices, for a probe. The part then computes zeros.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub(crate) fn hollow(mut self) -> Result<Self> {
        self.layers
            .iter_mut()
            .try_for_each(|layer| layer.pack(MatrixForm::Hollow))?;
        if let Some(Table::Plain(table)) = &self.embedding {
            self.embedding = Some(Table::Hollow {
                rows: table.embeddings().dim(0)?,
                columns: table.hidden_size(),
            });
        }
        self.head
            .iter_mut()
            .try_for_each(|(_, output)| output.pack(MatrixForm::Hollow))?;
        Ok(self)
    }

    /// Computes the layers of this part. `x` has tokens `[batch, time]` for the first part,
    /// otherwise the outputs of the part before.
    ///
    /// `starts` `[batch, time]` has the column at which each token's sequence starts, if a row has
    /// several sequences. Returns `[batch, time, hidden_size]`, also from the last part.
    ///
    /// # Errors
    ///
    /// If a token has no row in the embedding, or shapes do not fit.
    pub(crate) fn forward(
        &self,
        x: Tensor,
        starts: Option<&Tensor>,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        self.run(x, starts, None, None, cx)
    }

    /// Computes the same as [`Decoder::forward`], and adds the part's layers to the sums of the
    /// balancing loss.
    ///
    /// # Errors
    ///
    /// As for [`Decoder::forward`].
    pub(crate) fn balanced(
        &self,
        x: Tensor,
        starts: Option<&Tensor>,
        balance: &mut Balance,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        self.run(x, starts, None, Some(balance), cx)
    }

    /// Computes the layers for tokens that follow those in the caches, and adds their keys and
    /// values to the caches. Shapes are those of [`Decoder::forward`], with a batch of one.
    ///
    /// # Errors
    ///
    /// As for [`Decoder::forward`], and if the rows do not fit `x` or the caches.
    pub(crate) fn follow(
        &self,
        x: Tensor,
        rows: &PassRows,
        caches: &mut Caches,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        self.run(x, None, Some(CachedPass { caches, rows }), None, cx)
    }

    fn run(
        &self,
        x: Tensor,
        starts: Option<&Tensor>,
        mut cached: Option<CachedPass<'_>>,
        mut balance: Option<&mut Balance>,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        let mut x = match &self.embedding {
            Some(table) => scaled(self.embed(table, &x, cx)?, self.embedding_scale)?,
            None => x,
        };
        if let Some(positions) = &self.positions {
            let at = match &cached {
                Some(cached) => cached.rows.positions.clone(),
                None => Tensor::arange(0, x.dim(1)? as u32, x.device())?,
            };
            let at = starts.map_or(Ok(at.clone()), |starts| at.broadcast_sub(starts))?;
            x = x.broadcast_add(&positions.forward(&at)?)?;
        }

        let places = match (&cached, starts) {
            (Some(cached), _) => RopePlaces::At(&cached.rows.positions),
            (None, Some(starts)) => RopePlaces::Packed(starts),
            (None, None) => RopePlaces::Whole(x.dim(1)?),
        };
        let rotations = self
            .angles
            .iter()
            .map(|angles| angles.rotation(places, x.device()));
        let rotations = rotations.collect::<Result<Vec<RopeRotation>>>()?;

        for (at, layer) in self.layers.iter().enumerate() {
            let keys = match &mut cached {
                Some(cached) => SeenKeys::Cached(&mut cached.caches.0[at], cached.rows),
                None => SeenKeys::Own(starts),
            };
            x = layer.forward(&x, keys, &rotations, balance.as_deref_mut(), cx)?;
        }
        Ok(x)
    }

    /// Returns the embedding rows of tokens. If devices divide the table, the rows are summed over
    /// them.
    fn embed(&self, table: &Table, tokens: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let rows = table.rows()?;
        if rows == self.vocab_size {
            return table.forward(tokens);
        }
        let first = self.over.place(cx)? * rows;
        if tokens.device().is_cuda() {
            let own = (tokens.to_dtype(DType::I64)?.to_dtype(DType::F64)? - first as f64)?;
            let is_own = (own.ge(0f64)? * own.lt(rows as f64)?)?;
            let own = (own * is_own.to_dtype(DType::F64)?)?.to_dtype(DType::U32)?;
            return self.over.sum(own_rows(table.forward(&own)?, &is_own)?, cx);
        }

        let all = tokens
            .to_dtype(DType::U32)?
            .flatten_all()?
            .to_vec1::<u32>()?;
        let mut own = Vec::new();
        let mut is_own = Vec::new();
        for token in all {
            if token as usize >= self.vocab_size {
                bail!(
                    "token {token} has no row in an embedding of {} rows",
                    self.vocab_size
                );
            }
            let row = (token as usize)
                .checked_sub(first)
                .filter(|row| *row < rows);
            own.push(row.unwrap_or(0) as u32);
            is_own.push(u8::from(row.is_some()));
        }

        let own = Tensor::from_vec(own, tokens.shape(), tokens.device())?;
        let is_own = Tensor::from_vec(is_own, tokens.shape(), tokens.device())?;
        self.over.sum(own_rows(table.forward(&own)?, &is_own)?, cx)
    }

    /// Computes the logits `[batch, time, vocab_size]` from the outputs of the last layer.
    ///
    /// # Errors
    ///
    /// If this is not the last part.
    pub(crate) fn logits(&self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let Some((norm, output)) = &self.head else {
            bail!("a part of the model without its output");
        };
        let x = norm.forward(x)?;
        let logits = match output.outputs()? == self.vocab_size {
            true => output.forward(&x)?,
            false => self
                .over
                .gathered(output.forward(&self.over.shared(&x, cx)?.inside)?, cx)?,
        };

        let logits = if self.logits_divisor == 1.0 {
            logits
        } else {
            (logits / self.logits_divisor)?
        };
        match self.logits_cap {
            Some(cap) => (logits / cap)?.tanh()? * cap,
            None => Ok(logits),
        }
    }
}

/// Replaces rows by zeros where `is_own` is 0: rows of tokens that other devices hold. Selects
/// instead of multiplying by zero, since zero times infinity or NaN is NaN.
fn own_rows(rows: Tensor, is_own: &Tensor) -> Result<Tensor> {
    let is_own = is_own
        .unsqueeze(is_own.rank())?
        .broadcast_as(rows.shape())?
        .contiguous()?;
    is_own.where_cond(&rows, &rows.zeros_like()?)
}

/// Returns the name and shape of each parameter of a model, all in f32.
///
/// # Errors
///
/// If a shape has too many elements.
pub(crate) fn shapes_of(config: &ModelConfig) -> CoreResult<BTreeMap<String, ShapedArray>> {
    let all = 0..config.num_hidden_layers;
    let owned = config.clone();
    let whole = stage(
        // No parameter depends on the angles. Those of a wrong `head_dim` could take all memory.
        move |vb| {
            let plan = DecoderPlan {
                config: &owned,
                lora: None,
                angles: &[],
                over: DeviceDivision::ONE,
            };
            Decoder::new(plan, all.clone(), &vb)
        },
        |part, x: Tensor, cx| part.forward(x, None, cx),
    )?;

    let shapes = whole.shapes();
    debug_assert!(shapes.values().all(|aval| aval.dtype() == aval::DType::F32));
    Ok(shapes)
}
