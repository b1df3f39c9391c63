//! The parameters of a device as candle's variables, and the models over them.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{Device, Tensor, TensorId};
use mpmd_core::kernel::{Context, View, ViewMut};
use mpmd_core::pipeline::{Stage, StageContext};
use mpmd_core::{Error, Result};
use mpmd_layout::aval::DType;

use super::CandleStage;
use crate::bridge::{self, Place};
use crate::cuda::OnCuda;
use crate::params;
use crate::pass::Gradient;
use crate::tensors::Tensors;
use crate::threads;

/// The models that are prepared from a stage's parameters on one device.
pub(super) struct PreparedStage<M> {
    /// The models; `None` while a pass uses them.
    models: Option<Models<M>>,
}

/// The models over one device's parameters.
pub(super) struct Models<M> {
    pub(super) weights: Arc<StageWeights>,
    /// The model over variables, which records autograd graphs.
    trained: M,
    /// The model over the same memory without variables, created at its first use.
    plain: Option<M>,
}

/// The parameters as tensors, in the order of their paths. Trainable ones are variables.
pub(super) struct StageWeights {
    device: Device,
    tensors: BTreeMap<String, Tensor>,
    places: HashMap<TensorId, usize>,
    /// For each parameter, true if it is trainable and stored in f32. Layers add to its gradient
    /// directly.
    singles: Vec<bool>,
}

/// A parameter's tensor, and the dtype of its array.
pub(super) struct ParamTensor {
    /// The dtype of the array.
    pub(super) stored: DType,
    pub(super) tensor: Tensor,
}

impl StageWeights {
    pub(super) fn new(device: Device, tensors: BTreeMap<String, ParamTensor>) -> Self {
        let singles = tensors.values();
        let singles = singles
            .map(|param| param.stored == DType::F32 && param.tensor.is_variable())
            .collect();

        let tensors: BTreeMap<_, _> = tensors
            .into_iter()
            .map(|(path, param)| (path, param.tensor))
            .collect();

        let places = tensors.values().enumerate();
        let places = places.map(|(place, tensor)| (tensor.id(), place)).collect();

        Self {
            device,
            tensors,
            places,
            singles,
        }
    }

    /// Returns the trainable parameters that are stored in f32.
    pub(super) fn singles(&self) -> impl Iterator<Item = &Tensor> {
        let tensors = self.tensors.values().zip(&self.singles);
        tensors.filter_map(|(tensor, single)| single.then_some(tensor))
    }

    /// Returns (path, tensor) of the parameters.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.tensors.iter()
    }

    /// Returns the index, in the order of paths, of the parameter with this id.
    pub(super) fn place(&self, id: TensorId) -> Option<usize> {
        self.places.get(&id).copied()
    }

    /// Returns the gradients to which layers add directly, by the id of the parameter.
    ///
    /// # Errors
    ///
    /// If a gradient is not in the memory of `place`.
    pub(super) fn gradients<'v>(
        &self,
        views: &'v mut [ViewMut<'_>],
        place: Place<'v>,
    ) -> Result<HashMap<TensorId, Gradient<'v>>> {
        let mut gradients = HashMap::with_capacity(views.len());
        for ((tensor, single), view) in self.tensors.values().zip(&self.singles).zip(views) {
            if *single {
                gradients.insert(tensor.id(), gradient(view, place)?);
            }
        }
        Ok(gradients)
    }

    /// Returns the parameters as tensors without gradients that share the variables' memory.
    fn detached(&self) -> BTreeMap<String, Tensor> {
        self.tensors
            .iter()
            .map(|(path, tensor)| (path.clone(), tensor.detach()))
            .collect()
    }
}

/// Returns the f32 output `view` as the gradient of a parameter.
pub(super) fn gradient<'v>(view: &'v mut ViewMut<'_>, place: Place<'v>) -> Result<Gradient<'v>> {
    Ok(match place {
        Some(on) => Gradient::Cuda(on.gradient(view)),
        None => Gradient::Host(view.as_mut_slice::<f32>()?),
    })
}

impl<M> Models<M> {
    /// Returns the model that records graphs.
    pub(super) fn trained(&self) -> &M {
        &self.trained
    }
}

impl<M: Send + 'static, X: Tensors, Y: Tensors> CandleStage<M, X, Y> {
    /// Creates a device's variables, or updates them in place, and creates the model over them.
    pub(super) fn run_prepare(
        &self,
        cx: &Context<'_>,
        params: &BTreeMap<String, View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        let on = OnCuda::enter(cx)?;
        let on = on.as_ref();

        let before = prepared
            .take()
            .and_then(|before| before.downcast::<PreparedStage<M>>().ok());

        let weights = match before.and_then(|before| before.models) {
            Some(Models { weights, .. }) => {
                for ((_, tensor), view) in weights.iter().zip(params.values()) {
                    bridge::refresh(tensor, view, on)?;
                }
                weights
            }
            None => {
                let tensors = params.iter().map(|(path, view)| {
                    let stored = view.global().dtype();
                    let trainable = !self.is_frozen(path);
                    let tensor = bridge::tensor_in(view, self.working(stored), trainable, on)?;
                    Ok((path.clone(), ParamTensor { stored, tensor }))
                });
                let device = on.map_or(Device::Cpu, OnCuda::device);
                Arc::new(StageWeights::new(device, tensors.collect::<Result<_>>()?))
            }
        };

        let models = Some(self.models(weights)?);
        *prepared = Some(Box::new(PreparedStage { models }));
        Ok(())
    }

    /// Runs the constructor over the parameters of a device.
    pub(super) fn models(&self, weights: Arc<StageWeights>) -> Result<Models<M>> {
        let trained = (self.new)(params::builder(weights.tensors.clone(), &weights.device));
        Ok(Models {
            trained: trained.map_err(|why| self.failed(why))?,
            weights,
            plain: None,
        })
    }

    /// Returns the model that records no graphs.
    pub(super) fn plain<'m>(&self, models: &'m mut Models<M>) -> Result<&'m M> {
        let plain = match models.plain.take() {
            Some(plain) => plain,
            None => (self.new)(params::builder(
                models.weights.detached(),
                &models.weights.device,
            ))
            .map_err(|why| self.failed(why))?,
        };
        Ok(models.plain.insert(plain))
    }

    /// Calls `f` with the models of this device.
    pub(super) fn with_models<R>(
        &self,
        cx: &mut StageContext<'_, '_>,
        f: impl FnOnce(&mut StageContext<'_, '_>, &mut Models<M>) -> Result<R>,
    ) -> Result<R> {
        threads::enter_pool();
        let mut models = cx
            .prepared::<PreparedStage<M>>()?
            .models
            .take()
            .ok_or_else(|| Error::kernel("an earlier pass on this device panicked"))?;

        let result = f(cx, &mut models);
        cx.prepared::<PreparedStage<M>>()?.models = Some(models);
        result
    }
}
