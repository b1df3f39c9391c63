//! The parameters of a model: their names, shapes and initial values.
//!
//! The model's constructor runs over a `VarBuilder` that records the requests, and later over
//! one that gives it the parameters of a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::init::{Init, NormalOrUniform};
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use half::{bf16, f16};
use mpmd_base::block::Mutex;
use mpmd_core::Result as CoreResult;
use mpmd_core::kernel::ViewMut;
use mpmd_layout::aval::{DType as ArrayType, ShapedArray};
use mpmd_layout::random::{Key, normal_f64, uniform_f64};
use mpmd_layout::region::Region;

use crate::dtypes::array_type;

/// The initial values of a parameter, as the model's constructor requests them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InitialValues {
    init: Init,
}

/// The shape, dtype and initial values of a parameter, as the model's constructor requests them.
pub(crate) struct ParamRequest {
    pub(crate) aval: ShapedArray,
    pub(crate) initial: InitialValues,
}

/// The requested parameters of a model, by path.
pub(crate) type Params = BTreeMap<String, ParamRequest>;

/// Runs a model's constructor once, over zeros without memory. Returns the parameters that the
/// constructor requests.
///
/// # Errors
///
/// If the constructor fails, or requests one parameter with two shapes or dtypes.
pub(crate) fn record<M>(new: impl FnOnce(VarBuilder<'static>) -> Result<M>) -> Result<Params> {
    let found = Arc::new(Mutex::new(Params::new()));
    let backend = Box::new(RequestRecorder(found.clone()));
    drop(new(VarBuilder::from_backend(
        backend,
        DType::F32,
        Device::Cpu,
    ))?);
    let params = std::mem::take(&mut *found.lock());
    Ok(params)
}

/// Creates a `VarBuilder` that returns `tensors` by path. A tensor's shape may differ from the
/// requested shape, since it may be one device's region of a parameter.
pub fn parts_builder(tensors: BTreeMap<String, Tensor>) -> VarBuilder<'static> {
    builder(tensors, &Device::Cpu)
}

/// Does the same as [`parts_builder`] for parameters on `device`.
pub(crate) fn builder(tensors: BTreeMap<String, Tensor>, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(GivenParams(tensors)), DType::F32, device.clone())
}

struct RequestRecorder(Arc<Mutex<Params>>);

impl SimpleBackend for RequestRecorder {
    fn get(&self, s: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let aval = array_type(dtype).map_err(candle_core::Error::wrap)?;
        let aval = ShapedArray::try_new(s.dims(), aval).map_err(candle_core::Error::wrap)?;
        let mut params = self.0.lock();

        if let Some(ParamRequest { aval: known, .. }) = params.get(name)
            && *known != aval
        {
            bail!("parameter {name:?} is asked for as {known}, and again as {aval}");
        }

        let initial = InitialValues { init };
        params.insert(name.to_owned(), ParamRequest { aval, initial });
        Tensor::zeros((), dtype, &Device::Cpu)?.broadcast_as(s)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("parameter {name:?} is asked for without a shape: call `get` with one")
    }

    /// Returns false: optional parameters do not exist before training.
    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

struct GivenParams(BTreeMap<String, Tensor>);

impl SimpleBackend for GivenParams {
    /// Returns the tensor of this path, in the shape of the device's region. Ignores the requested
    /// shape.
    fn get(&self, _: Shape, name: &str, _: Init, _: DType, _: &Device) -> Result<Tensor> {
        match self.0.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => bail!(
                "the constructor asks for parameter {name:?}, and did not when it was recorded: it \
                 must ask for the same parameters each time"
            ),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.get(Shape::from(()), name, Init::default(), dtype, device)
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

/// Returns the random key of the parameter at `path`: a hash of `seed` and `path`.
pub(crate) fn key_of(seed: u64, path: &str) -> Key {
    let words = path.as_bytes().chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    words.fold(Key(seed).fold_in(path.len() as u64), Key::fold_in)
}

impl InitialValues {
    /// Fills `view` with the initial values of `region` of a parameter of global shape `aval`. The
    /// values depend only on the key and on each element's index in the whole parameter.
    ///
    /// # Errors
    ///
    /// If the parameter's dtype is no float type.
    pub(crate) fn fill(
        self,
        key: Key,
        aval: &ShapedArray,
        region: &Region,
        mut view: ViewMut<'_>,
    ) -> CoreResult<()> {
        let value = self.values(key, aval);
        let elements = region.indices(aval.shape());
        macro_rules! fill {
            ($type:ty, $from:expr) => {
                for (out, element) in view.as_mut_slice::<$type>()?.iter_mut().zip(elements) {
                    *out = $from(value(element));
                }
            };
        }

        match aval.dtype() {
            ArrayType::F64 => fill!(f64, |value| value),
            ArrayType::F16 => fill!(f16, f16::from_f64),
            ArrayType::Bf16 => fill!(bf16, bf16::from_f64),
            _ => fill!(f32, |value| value as f32),
        }
        Ok(())
    }

    /// Returns a function that maps an element's index in the whole parameter to its value.
    fn values(self, key: Key, aval: &ShapedArray) -> Box<dyn Fn(u64) -> f64> {
        let uniform = move |lo: f64, up: f64| -> Box<dyn Fn(u64) -> f64> {
            Box::new(move |element| lo + (up - lo) * uniform_f64(key, element))
        };
        let normal = move |mean: f64, stdev: f64| -> Box<dyn Fn(u64) -> f64> {
            Box::new(move |element| mean + stdev * normal_f64(key, element))
        };

        match self.init {
            Init::Const(value) => Box::new(move |_| value),
            Init::Randn { mean, stdev } => normal(mean, stdev),
            Init::Uniform { lo, up } => uniform(lo, up),
            Init::Kaiming {
                dist,
                fan,
                non_linearity,
            } => {
                // As `Init::var` of candle_nn computes it.
                let fan = fan.for_shape(&Shape::from(aval.shape())) as f64;
                let stdev = non_linearity.gain() / fan.sqrt();
                match dist {
                    NormalOrUniform::Uniform => uniform(-3f64.sqrt() * stdev, 3f64.sqrt() * stdev),
                    NormalOrUniform::Normal => normal(0.0, stdev),
                }
            }
        }
    }
}
