//! The model of [`transformer`](crate::transformer) as stages that are written by hand: each pass
//! issues CUDA kernels and products of matrices, and nothing waits for the device.
//!
//! A worked example of [`Stage`] on CUDA devices. The parameters have the names, the shapes and the
//! initial values of the candle model, so both train alike. What the backward pass needs is kept in
//! arrays, the residuals, so the memory of a step is known before it runs.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use mpmd::aval::DType;
use mpmd::cuda::layers::{
    self, ActivationCurve, CudaAttention, CudaCrossEntropy, CudaEmbedding, CudaNorm, Heads,
    MatrixShape, activate, activate_backward, add_bias, add_to, sum_rows,
};
use mpmd::cuda::{CUBLAS, Cuda, CudaPart, Gemm, Math, Scratch, Source};
use mpmd::kernel::{Views, ViewsMut};
use mpmd::pipeline::{
    Loss, PlacedShape, SideInput, SideShapes, Stage, StageContext, StageSignature,
};
use mpmd::prelude::*;

use crate::transformer::{BYTES, ModelSizes};

/// Epsilon of the layer norms: the number added to a row's variance.
const EPS: f32 = 1e-5;

/// A stage of consecutive transformer blocks; the first stage also has the embedding. `Out` is
/// `MpmdArray`, or `Loss<MpmdArray>` on the last stage.
pub struct KernelStage<Out> {
    name: String,
    sizes: ModelSizes,
    blocks: Range<usize>,
    embeds: bool,
    math: Math,
    /// The dtype of activations, and of the parameters inside kernels. The default is f32.
    dtype: OnceLock<DType>,
    out: PhantomData<fn() -> Out>,
}

/// A stage before the last one, which returns activations.
pub type FrontStage = KernelStage<MpmdArray>;
/// The last stage, which returns the loss.
pub type LastStage = KernelStage<Loss<MpmdArray>>;

impl<Out> KernelStage<Out> {
    /// Creates a stage with the blocks in the range `blocks`, and with the embedding if `embeds` is
    /// true. `math` is the precision of products of f32 matrices.
    pub fn new(
        name: String,
        sizes: ModelSizes,
        blocks: Range<usize>,
        embeds: bool,
        math: Math,
    ) -> Self {
        Self {
            name,
            sizes,
            blocks,
            embeds,
            math,
            dtype: OnceLock::new(),
            out: PhantomData,
        }
    }

    fn dtype(&self) -> DType {
        self.dtype.get().copied().unwrap_or(DType::F32)
    }

    fn set_dtype(&self, dtype: DType) -> Result<()> {
        let known = matches!(dtype, DType::F32 | DType::Bf16);
        match known && *self.dtype.get_or_init(|| dtype) == dtype {
            true => Ok(()),
            false => Err(Error::kernel(format!(
                "{} cannot compute in {dtype}",
                self.name
            ))),
        }
    }

    fn sources(&self) -> Vec<&'static Source> {
        [
            layers::sources(self.dtype(), self.sizes.width / self.sizes.heads),
            vec![&CUBLAS],
        ]
        .concat()
    }

    /// Returns the shape of the stage's input or output activations: `[batch, time, width]`.
    fn rows_of(&self, x: &ShapedArray) -> Result<ShapedArray> {
        match x.shape() {
            [batch, time, ..] => Ok(ShapedArray::new(
                &[*batch, *time, self.sizes.width],
                self.dtype(),
            )),
            _ => Err(Error::kernel(format!("{x}: expected [batch, time, …]"))),
        }
    }

    /// Returns the layers and products for a microbatch of the shape `[batch, time]`. Fails unless
    /// the device is a CUDA device.
    fn work<'c>(&self, cx: &StageContext<'_, 'c>, tokens: &[usize]) -> Result<KernelWork<'c>> {
        let cuda = cx.cuda().ok_or_else(|| {
            Error::kernel(format!("{} has kernels for CUDA devices alone", self.name))
        })?;

        let batch = tokens[0];
        let time = tokens[1];
        let ModelSizes { width, heads, .. } = self.sizes;
        let attention = CudaAttention::causal(batch, heads, time, width / heads);
        let rows = batch * time;
        let norm = CudaNorm {
            rows,
            width,
            eps: EPS,
            remove_mean: true,
        };

        let math = self.math;
        let dtype = self.dtype();
        Ok(KernelWork {
            cuda,
            dtype,
            math,
            rows,
            time,
            width,
            norm,
            attention,
        })
    }

    /// Returns the shapes of the residuals: first the embedding's, then each block's, then the
    /// head's if `head` is true.
    fn residuals(&self, x: &ShapedArray, head: bool) -> Vec<PlacedShape> {
        let rows = x.shape()[0] * x.shape()[1];
        let ModelSizes { width, heads, .. } = self.sizes;
        let matrix = |columns: usize| ShapedArray::new(&[rows, columns], self.dtype());
        let figures = |columns: usize| f32s([rows, columns]);
        let bytes = ShapedArray::new(&x.shape()[..2], DType::U8);

        let mut kept = Vec::new();
        if self.embeds {
            kept.push(bytes.clone());
        }
        for _ in self.blocks.clone() {
            let [one, three, four] = [1, 3, 4].map(|times| matrix(times * width));
            let pairs = figures(2);
            let of_heads = figures(2 * heads);
            kept.extend([
                one.clone(),
                pairs.clone(),
                one.clone(),
                three,
                of_heads,
                one.clone(),
            ]);
            kept.extend([one.clone(), pairs, one, four.clone(), four]);
        }

        if head {
            kept.extend([
                matrix(width),
                figures(2),
                matrix(width),
                matrix(BYTES),
                figures(2),
                bytes,
            ]);
        }
        kept.into_iter().map(PlacedShape::replicated).collect()
    }

    /// Runs the embedding and the blocks, and writes their residuals to the arrays that it takes
    /// from `kept`. Returns the last of these arrays, the activations after the last block.
    fn run_blocks<'v>(
        &self,
        work: &KernelWork<'_>,
        params: &NamedMap<CudaPart<'v>>,
        x: &View<'v>,
        kept: &mut impl Iterator<Item = CudaPart<'v>>,
    ) -> Result<CudaPart<'v>> {
        let mut next = || {
            kept.next()
                .ok_or_else(|| Error::kernel("too few residuals"))
        };

        let cuda = &work.cuda;
        let mut rows = match self.embeds {
            true => {
                let tokens = next()?;
                let rows = next()?;
                cuda.copy(x, tokens)?;
                let positions = Some((part(params, "embed.positions")?, work.time));
                work.embedding().forward(
                    cuda,
                    part(params, "embed.bytes")?,
                    tokens,
                    positions,
                    rows,
                )?;
                rows
            }
            false => {
                let rows = next()?;
                cuda.copy(x, rows)?;
                rows
            }
        };

        for block in self.blocks.clone() {
            let mut array = || next();
            let [pairs, norm1, qkv, of_heads, context] =
                [array()?, array()?, array()?, array()?, array()?];
            let [middle, pairs2, norm2, up, hidden, after] =
                [array()?, array()?, array()?, array()?, array()?, array()?];
            let of = |name: &str| part(params, &format!("blocks.{block}.{name}"));
            let width = work.width;

            work.norm(rows, [of("norm1.weight")?, of("norm1.bias")?], norm1, pairs)?;
            work.times(norm1, of("qkv.weight")?, qkv, [3 * width, width])?;
            let bias = Some(of("qkv.bias")?);
            add_bias(
                cuda,
                MatrixShape::new(work.rows, 3 * width),
                qkv,
                bias,
                None,
                qkv,
            )?;
            work.attention
                .forward(cuda, work.heads(qkv), work.joined(context), of_heads)?;
            work.times(context, of("out.weight")?, middle, [width, width])?;
            let bias = Some(of("out.bias")?);
            add_bias(
                cuda,
                MatrixShape::new(work.rows, width),
                middle,
                bias,
                Some(rows),
                middle,
            )?;

            work.norm(
                middle,
                [of("norm2.weight")?, of("norm2.bias")?],
                norm2,
                pairs2,
            )?;
            work.times(norm2, of("up.weight")?, up, [4 * width, width])?;
            let bias = Some(of("up.bias")?);
            activate(
                cuda,
                ActivationCurve::Gelu,
                MatrixShape::new(work.rows, 4 * width),
                up,
                bias,
                hidden,
            )?;
            work.times(hidden, of("down.weight")?, after, [width, 4 * width])?;
            let bias = Some(of("down.bias")?);
            add_bias(
                cuda,
                MatrixShape::new(work.rows, width),
                after,
                bias,
                Some(middle),
                after,
            )?;
            rows = after;
        }
        Ok(rows)
    }

    /// Adds the gradients of the parameters of the blocks and the embedding to `sums`. On entry `d`
    /// is the gradient of the last block's output; on return it is that of the first block's input.
    /// `kept` are the residuals without the head's.
    fn run_blocks_backward<'v>(
        &self,
        work: &KernelWork<'_>,
        params: &NamedMap<CudaPart<'v>>,
        kept: &[CudaPart<'v>],
        d: CudaPart<'v>,
        sums: &NamedMap<CudaPart<'v>>,
    ) -> Result<()> {
        let cuda = &work.cuda;
        let width = work.width;
        let rows = work.rows;

        let skip = usize::from(self.embeds);
        let wide = cuda.scratch(work.dtype, rows * 4 * width)?;
        let narrow = cuda.scratch(work.dtype, rows * width)?;
        let wide: CudaPart<'_> = (&wide).into();
        let narrow: CudaPart<'_> = (&narrow).into();
        for (at, block) in self.blocks.clone().enumerate().rev() {
            let [
                x,
                pairs,
                norm1,
                qkv,
                of_heads,
                context,
                middle,
                pairs2,
                norm2,
                up,
                hidden,
            ] = kept[skip + 11 * at..]
                .first_chunk()
                .copied()
                .ok_or_else(too_few)?;

            let of = |name: &str| part(params, &format!("blocks.{block}.{name}"));
            let sum = |name: &str| {
                let sum = sums.get(&format!("blocks.{block}.{name}"));
                sum.copied().ok_or_else(|| missing(name))
            };

            sum_rows(
                cuda,
                MatrixShape::new(rows, width),
                d,
                add_to(sum("down.bias")?),
            )?;
            work.times_turned(d, hidden, sum("down.weight")?, [width, 4 * width])?;
            work.times_back(d, of("down.weight")?, wide, [width, 4 * width])?;
            let bias = Some(of("up.bias")?);
            activate_backward(
                cuda,
                ActivationCurve::Gelu,
                MatrixShape::new(rows, 4 * width),
                up,
                bias,
                wide,
                wide,
            )?;
            sum_rows(
                cuda,
                MatrixShape::new(rows, 4 * width),
                wide,
                add_to(sum("up.bias")?),
            )?;
            work.times_turned(wide, norm2, sum("up.weight")?, [4 * width, width])?;
            work.times_back(wide, of("up.weight")?, narrow, [4 * width, width])?;
            let weights = [sum("norm2.weight")?, sum("norm2.bias")?];
            work.norm_backward(middle, pairs2, of("norm2.weight")?, narrow, weights, d)?;

            sum_rows(
                cuda,
                MatrixShape::new(rows, width),
                d,
                add_to(sum("out.bias")?),
            )?;
            work.times_turned(d, context, sum("out.weight")?, [width, width])?;
            work.times_back(d, of("out.weight")?, narrow, [width, width])?;
            let results = [work.joined(context), work.joined(narrow)];
            let gradients = work.heads(wide);
            work.attention
                .backward(cuda, work.heads(qkv), results, of_heads, gradients)?;
            sum_rows(
                cuda,
                MatrixShape::new(rows, 3 * width),
                wide,
                add_to(sum("qkv.bias")?),
            )?;
            work.times_turned(wide, norm1, sum("qkv.weight")?, [3 * width, width])?;
            work.times_back(wide, of("qkv.weight")?, narrow, [3 * width, width])?;
            let weights = [sum("norm1.weight")?, sum("norm1.bias")?];
            work.norm_backward(x, pairs, of("norm1.weight")?, narrow, weights, d)?;
        }

        if self.embeds {
            let sum = |name: &str| sums.get(name).copied().ok_or_else(|| missing(name));
            let tokens = kept.first().copied().ok_or_else(too_few)?;
            work.embedding()
                .backward(cuda, tokens, d, add_to(sum("embed.bytes")?))?;
            let each = MatrixShape::new(rows / work.time, work.time * width);
            sum_rows(cuda, each, d, add_to(sum("embed.positions")?))?;
        }
        Ok(())
    }
}

/// The matrix products and layers for one microbatch on one device.
struct KernelWork<'a> {
    cuda: Cuda<'a>,
    dtype: DType,
    math: Math,
    rows: usize,
    time: usize,
    width: usize,
    norm: CudaNorm,
    attention: CudaAttention<'static>,
}

impl<'a> KernelWork<'a> {
    /// Converts the parameters to the dtype in which the stage computes. Returns an empty map if
    /// that is f32.
    fn converted(&self, params: &NamedMap<View<'_>>) -> Result<NamedMap<Scratch<'a>>> {
        let mut converted = NamedMap::new();
        for (name, param) in params.iter().filter(|_| self.dtype != DType::F32) {
            let elements = param.region().elements();
            let to = self.cuda.scratch(self.dtype, elements)?;
            layers::convert(&self.cuda, elements, param, &to)?;
            converted.insert(name.clone(), to);
        }
        Ok(converted)
    }

    fn embedding(&self) -> CudaEmbedding {
        CudaEmbedding {
            tokens: self.rows,
            entries: BYTES,
            width: self.width,
        }
    }

    fn gemm(&self, m: usize, n: usize, k: usize) -> Gemm {
        Gemm::new(m, n, k).math(self.math)
    }

    /// Computes `y = x wᵀ`. The shape of `w` is `[outputs, inputs]`.
    fn times(
        &self,
        x: CudaPart<'_>,
        w: CudaPart<'_>,
        y: CudaPart<'_>,
        [outputs, inputs]: [usize; 2],
    ) -> Result<()> {
        self.cuda
            .gemm(self.gemm(self.rows, outputs, inputs).transpose_b(), x, w, y)
    }

    /// Computes `d_x = d_y w`. The shape of `w` is `[outputs, inputs]`.
    fn times_back(
        &self,
        d_y: CudaPart<'_>,
        w: CudaPart<'_>,
        d_x: CudaPart<'_>,
        [outputs, inputs]: [usize; 2],
    ) -> Result<()> {
        self.cuda
            .gemm(self.gemm(self.rows, inputs, outputs), d_y, w, d_x)
    }

    /// Computes `d_w += d_yᵀ x`. The shape of `d_w` is `[outputs, inputs]`.
    fn times_turned(
        &self,
        d_y: CudaPart<'_>,
        x: CudaPart<'_>,
        d_w: CudaPart<'_>,
        [outputs, inputs]: [usize; 2],
    ) -> Result<()> {
        let gemm = self
            .gemm(outputs, inputs, self.rows)
            .transpose_a()
            .beta(1.0);
        self.cuda.gemm(gemm, d_y, x, d_w)
    }

    fn norm(
        &self,
        x: CudaPart<'_>,
        [w, bias]: [CudaPart<'_>; 2],
        y: CudaPart<'_>,
        pairs: CudaPart<'_>,
    ) -> Result<()> {
        self.norm.forward(&self.cuda, x, w, Some(bias), y, pairs)
    }

    /// Adds the gradients of a norm's parameters to `d_weight` and `d_bias`, and the gradient of
    /// its input to `d_x`.
    fn norm_backward(
        &self,
        x: CudaPart<'_>,
        pairs: CudaPart<'_>,
        weight: CudaPart<'_>,
        d_y: CudaPart<'_>,
        [d_weight, d_bias]: [CudaPart<'_>; 2],
        d_x: CudaPart<'_>,
    ) -> Result<()> {
        let d_bias = Some(add_to(d_bias));
        self.norm
            .backward_weight(&self.cuda, x, d_y, pairs, add_to(d_weight), d_bias)?;
        self.norm
            .backward(&self.cuda, x, weight, d_y, pairs, add_to(d_x))
    }

    /// Returns views of query, key and value in `qkv`, where the three lie side by side for each
    /// head.
    fn heads<'p>(&self, qkv: CudaPart<'p>) -> [Heads<'p>; 3] {
        let dim = self.attention.dim;
        let at = |offset: usize| {
            Heads::in_rows(qkv.at(offset * dim), self.time, 3 * self.width, 3 * dim)
        };
        [0, 1, 2].map(at)
    }

    /// Returns a view of the heads' results in `context`, where they lie side by side in each row.
    fn joined<'p>(&self, context: CudaPart<'p>) -> Heads<'p> {
        Heads::in_rows(context, self.time, self.width, self.attention.dim)
    }
}

type NamedMap<T> = BTreeMap<String, T>;

/// Returns the parameters for the kernels: `converted`, or `params` if `converted` is empty.
fn parts<'v>(
    params: &'v NamedMap<View<'_>>,
    converted: &'v NamedMap<Scratch<'_>>,
) -> NamedMap<CudaPart<'v>> {
    match converted.is_empty() {
        true => params
            .iter()
            .map(|(name, param)| (name.clone(), param.into()))
            .collect(),
        false => converted
            .iter()
            .map(|(name, param)| (name.clone(), param.into()))
            .collect(),
    }
}

fn part<'v>(params: &NamedMap<CudaPart<'v>>, name: &str) -> Result<CudaPart<'v>> {
    params.get(name).copied().ok_or_else(|| missing(name))
}

fn missing(name: &str) -> Error {
    Error::kernel(format!("there is no parameter {name}"))
}

fn too_few() -> Error {
    Error::kernel("too few residuals")
}

impl Stage for FrontStage {
    type Params = NamedMap<MpmdArray>;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &NamedMap<ShapedArray>,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        let out = self.rows_of(x)?;
        Ok(StageSignature::new(out).residual(self.residuals(x, false)))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: NamedMap<View<'_>>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let mut kept: Vec<ViewMut<'_>> = cx.residual_mut()?;
        let work = self.work(cx, x.shape())?;
        let converted = work.converted(&params)?;
        let params = parts(&params, &converted);
        let mut kept = kept
            .iter_mut()
            .map(CudaPart::from)
            .chain([CudaPart::from(&mut y)]);
        self.run_blocks(&work, &params, &x, &mut kept).map(drop)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: NamedMap<View<'_>>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        mut gradient: NamedMap<ViewMut<'_>>,
    ) -> Result<()> {
        let kept: Vec<View<'_>> = cx.residual()?;
        let kept: Vec<CudaPart<'_>> = kept.iter().map(CudaPart::from).collect();

        let work = self.work(cx, dy.shape())?;
        let converted = work.converted(&params)?;
        let params = parts(&params, &converted);
        let sums = gradient
            .iter_mut()
            .map(|(name, sum)| (name.clone(), CudaPart::from(sum)))
            .collect();

        let d = work.cuda.scratch(work.dtype, work.rows * work.width)?;
        work.cuda.copy(&dy, &d)?;
        self.run_blocks_backward(&work, &params, &kept, (&d).into(), &sums)?;
        dx.map_or(Ok(()), |mut dx| work.cuda.copy(&d, &mut dx))
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn compute_in(&self, dtype: DType) -> Result<()> {
        self.set_dtype(dtype)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.sources()
    }
}

impl Stage for LastStage {
    type Params = NamedMap<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &NamedMap<ShapedArray>,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        self.rows_of(x)?;
        let loss = Loss::new(f32s([]), f32s([]));
        Ok(StageSignature::new(loss).residual(self.residuals(x, true)))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Views<'_, Self::Params>,
        x: View<'_>,
        mut y: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let mut kept: Vec<ViewMut<'_>> = cx.residual_mut()?;
        let side: NamedMap<View<'_>> = cx.side()?;
        let work = self.work(cx, x.shape())?;
        let converted = work.converted(&params)?;
        let params = parts(&params, &converted);

        let cuda = &work.cuda;
        let mut kept = kept.iter_mut().map(CudaPart::from);
        let rows = self.run_blocks(&work, &params, &x, &mut kept)?;
        let kept: Vec<CudaPart<'_>> = kept.collect();

        let [pairs, norm, logits, normalizers, targets] =
            kept.first_chunk().copied().ok_or_else(too_few)?;
        let weights = [
            part(&params, "head.norm.weight")?,
            part(&params, "head.norm.bias")?,
        ];
        work.norm(rows, weights, norm, pairs)?;
        work.times(
            norm,
            part(&params, "head.weight")?,
            logits,
            [BYTES, work.width],
        )?;

        let given = side.get("targets").ok_or_else(|| missing("targets"))?;
        cuda.copy(given, targets)?;

        let total = cuda.scratch(DType::F32, 2)?;
        let loss = CudaCrossEntropy {
            rows: work.rows,
            classes: BYTES,
            targets,
            weights: None,
        };
        loss.forward(cuda, logits, &total, normalizers)?;
        cuda.copy(total.at(0).first(1), &mut y.sum)?;
        cuda.copy(total.at(1), &mut y.weight)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Views<'_, Self::Params>,
        dy: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        mut gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()> {
        let kept: Vec<View<'_>> = cx.residual()?;
        let tokens = kept.last().ok_or_else(too_few)?.shape();
        let kept: Vec<CudaPart<'_>> = kept.iter().map(CudaPart::from).collect();

        let (kept, head) = kept
            .split_at_checked(kept.len().wrapping_sub(6))
            .ok_or_else(too_few)?;
        let [x, pairs, norm, logits, normalizers, targets] =
            head.first_chunk().copied().ok_or_else(too_few)?;

        let work = self.work(cx, tokens)?;
        let converted = work.converted(&params)?;
        let params = parts(&params, &converted);
        let cuda = &work.cuda;
        let rows = work.rows;
        let width = work.width;

        let sums: NamedMap<CudaPart<'_>> = gradient
            .iter_mut()
            .map(|(name, sum)| (name.clone(), CudaPart::from(sum)))
            .collect();
        let sum = |name: &str| sums.get(name).copied().ok_or_else(|| missing(name));

        let d_logits = cuda.scratch(work.dtype, rows * BYTES)?;
        let loss = CudaCrossEntropy {
            rows,
            classes: BYTES,
            targets,
            weights: None,
        };

        // A number of the host needs no copy to the device.
        let (scale, d_loss) = match dy.sum.scalar::<f32>() {
            Ok(number) => (number, None),
            Err(_) => (1.0, Some(CudaPart::from(&dy.sum))),
        };
        loss.backward(cuda, logits, normalizers, scale, d_loss, &d_logits)?;

        let d_logits = CudaPart::from(&d_logits);
        work.times_turned(d_logits, norm, sum("head.weight")?, [BYTES, width])?;
        let [d_norm, d] = [
            cuda.scratch(work.dtype, rows * width)?,
            cuda.scratch(work.dtype, rows * width)?,
        ];
        work.times_back(
            d_logits,
            part(&params, "head.weight")?,
            (&d_norm).into(),
            [BYTES, width],
        )?;

        cuda.zero(&d)?;
        let weights = [sum("head.norm.weight")?, sum("head.norm.bias")?];
        let weight = part(&params, "head.norm.weight")?;
        work.norm_backward(x, pairs, weight, (&d_norm).into(), weights, (&d).into())?;
        drop(d_norm);

        self.run_blocks_backward(&work, &params, kept, (&d).into(), &sums)?;
        dx.map_or(Ok(()), |mut dx| cuda.copy(&d, &mut dx))
    }

    /// Declares the side input: named arrays, which contain the targets.
    fn side(&self) -> SideInput {
        SideInput::of::<NamedMap<MpmdArray>>()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn compute_in(&self, dtype: DType) -> Result<()> {
        self.set_dtype(dtype)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.sources()
    }
}
