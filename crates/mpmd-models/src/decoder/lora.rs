//! LoRA: a trained product of two thin matrices beside each frozen weight (Hu et al., 2021).

use std::collections::{BTreeMap, HashMap};

use mpmd::aval::ShapedArray;
use mpmd::candle::nn::{Init, Linear, Module, VarBuilder, linear_b};
use mpmd::candle::{Cx, Result as CandleResult, Tensor, function};
use mpmd::pipeline::Pipeline;
use mpmd::random::{Key, normal_f32};
use mpmd::sharding::Sharding;
use mpmd::tree::Tree;
use mpmd::{MpmdArray, Program, Result};

use crate::decoder::devices::SharedInput;
use crate::decoder::matrix::{MatrixForm, MatrixLayer};

/// The suffixes of the names of the matrices A `[rank, inputs]` and B `[outputs, rank]`, as in the
/// library `peft`.
pub(crate) const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
/// The suffix of the name of a weight.
pub(crate) const WEIGHT: &str = "weight";

/// Regular expression for the names of LoRA's matrices, the only parameters that are trained.
pub(crate) const TRAINED: &str = r"\.lora_[AB]\.weight$";

/// The settings of LoRA: a layer computes `W x + alpha / rank B A x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Number of rows of A, and of columns of B.
    pub rank: usize,
    /// Factor of the product `B A`, which is also divided by the rank.
    pub alpha: f64,
}

impl Lora {
    fn scale(self) -> f64 {
        self.alpha / self.rank as f64
    }
}

/// A linear layer, with LoRA's matrices if the model has them.
pub(crate) struct Projection {
    base: MatrixLayer,
    /// The matrices A and B, and the factor of their product. `None` without LoRA.
    lora: Option<(Linear, Linear, f64)>,
}

impl Projection {
    pub(crate) fn new(
        inputs: usize,
        outputs: usize,
        bias: bool,
        lora: Option<Lora>,
        vb: &VarBuilder<'_>,
    ) -> CandleResult<Self> {
        let base = MatrixLayer::Plain(linear_b(inputs, outputs, bias, vb.clone())?);
        let Some(lora) = lora else {
            return Ok(Self { base, lora: None });
        };

        let matrix = |shape, name| {
            let weight = vb.get_with_hints(shape, name, Init::Const(0.0))?;
            CandleResult::Ok(Linear::new(weight, None))
        };
        let a = matrix((lora.rank, inputs), MATRICES[0])?;
        let b = matrix((outputs, lora.rank), MATRICES[1])?;
        Ok(Self {
            base,
            lora: Some((a, b, lora.scale())),
        })
    }

    /// Converts the weight to a form for inference, as [`MatrixLayer::pack`] does.
    pub(crate) fn pack(&mut self, form: MatrixForm) -> CandleResult<()> {
        self.base.pack(form)
    }

    /// Computes this device's part of the outputs. The device holds some rows of the weight and of
    /// B.
    pub(crate) fn part(&self, x: &SharedInput<'_>) -> CandleResult<Tensor> {
        let y = self.base.forward(&x.inside)?;
        match &self.lora {
            None => Ok(y),
            Some((a, b, scale)) => y + (b.forward(&x.product(a)?)? * *scale)?,
        }
    }

    /// Computes all outputs if the devices along `axes` divide the inputs. Each device holds some
    /// columns of the weight and of A.
    pub(crate) fn whole(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> CandleResult<Tensor> {
        let y = self.base.forward_over(x, cx, axes)?;
        match &self.lora {
            None => Ok(y),
            Some((a, b, scale)) => y + (b.forward(&a.forward_over(x, cx, axes)?)? * *scale)?,
        }
    }
}

/// Creates a matrix of LoRA as an array on the devices of `sharding`. `None` if `name` is another
/// parameter.
///
/// A has normal values with variance `1 / inputs`, which depend only on the seed, the name and the
/// element's index. B is zero, so the model is unchanged before the first step.
pub(crate) fn initial(
    p: &mut Program,
    name: &str,
    aval: &ShapedArray,
    sharding: &Sharding,
    seed: u64,
) -> Option<Result<MpmdArray>> {
    let is_a = name.ends_with(MATRICES[0]);
    if !is_a && !name.ends_with(MATRICES[1]) {
        return None;
    }

    let key = name
        .bytes()
        .fold(Key(seed), |key, byte| key.fold_in(u64::from(byte)));
    let shape = aval.shape().to_vec();
    let size = (shape[1] as f32).sqrt().recip();
    Some(
        p.array_from_fn(aval.clone(), sharding, move |region, mut view| {
            let elements = region.indices(&shape);
            for (value, element) in view.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
                *value = if is_a {
                    size * normal_f32(key, element)
                } else {
                    0.0
                };
            }
            Ok(())
        }),
    )
}

/// Creates an array with the values `values` on the devices of `sharding`.
pub(crate) fn array_of(
    p: &mut Program,
    aval: &ShapedArray,
    sharding: &Sharding,
    values: Vec<f32>,
) -> Result<MpmdArray> {
    let shape = aval.shape().to_vec();
    p.array_from_fn(aval.clone(), sharding, move |region, mut view| {
        let elements = region.indices(&shape);
        for (value, element) in view.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
            *value = values[element as usize];
        }
        Ok(())
    })
}

/// Returns the parameters of all stages by name. With LoRA, issues the sums `W + alpha / rank B A`,
/// and returns them instead of the weights and matrices.
///
/// # Errors
///
/// As for [`Jit::call`](mpmd::Jit::call).
pub fn merged<In, Out>(
    p: &mut Program,
    pipeline: &Pipeline<In, Out>,
    lora: Option<Lora>,
) -> Result<BTreeMap<String, MpmdArray>>
where
    In: Tree<Leaf = MpmdArray>,
    Out: Tree<Leaf = MpmdArray>,
{
    let mut all = BTreeMap::new();
    for stage in 0..pipeline.stages() {
        let mut params: HashMap<_, _> = pipeline.params(stage).into_iter().collect();
        if let Some(lora) = lora {
            let scale = lora.scale();
            let mesh = pipeline.mesh(stage);
            let starts = params
                .keys()
                .filter_map(|name| name.strip_suffix(MATRICES[0]));
            // In one order on every process.
            let mut starts: Vec<String> = starts.map(str::to_owned).collect();
            starts.sort();
            for start in starts {
                let mut take = |end| params.remove(&format!("{start}{end}"));
                if let (Some(w), Some(a), Some(b)) =
                    (take(WEIGHT), take(MATRICES[0]), take(MATRICES[1]))
                {
                    let add = move |w: Tensor, a: Tensor, b: Tensor| w + (b.matmul(&a)? * scale)?;
                    let add = p.jit(function(add).like_input().with(scale)).on(mesh);
                    let sum = w.sharding().map_or(mesh.replicated(), Sharding::clone);
                    let sum = add.outputs(sum).build()?.call(p, (w, a, b))?;
                    params.insert(format!("{start}{WEIGHT}"), sum);
                }
            }
        }
        all.extend(params);
    }
    Ok(all)
}
