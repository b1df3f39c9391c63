//! candle models as stages of a pipeline.
//!
//! The data path of a stage: [`params`](crate::params) finds the parameters; `probe` finds the
//! shapes of its outputs; `model` keeps the parameters of a device as candle's variables;
//! `passes` runs the model, and its gradients.

mod model;
mod passes;
mod probe;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

use candle_nn::VarBuilder;
use mpmd_base::block::Mutex;
use mpmd_core::cuda::Source;
use mpmd_core::kernel::{Context, Shapes, View, ViewMut, Views, ViewsMut};
use mpmd_core::pipeline::{
    Passes, PlacedShape, SideInput, SideShapes, Stage, StageContext, StageProbe, StageSignature,
};
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::rules::{NamePattern, PatternFault};
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;

use crate::collectives;
use crate::cx::Cx;
use crate::params::{self, ParamRequest, Params};
use crate::shortage::with_shortage;
use crate::tensors::Tensors;
use probe::Probed;

/// A candle model as a stage of a pipeline. Created by [`stage`].
///
/// [`init`](CandleStage::init) creates the parameters: arrays by path.
/// [`Pipeline::probe`](mpmd_core::pipeline::Pipeline::probe) determines the shapes of the outputs.
pub struct CandleStage<M, X: Tensors, Y: Tensors> {
    name: String,
    at: &'static Location<'static>,
    new: Box<NewModel<M>>,
    forward: Box<Forward<M, X, Y>>,
    params: Params,
    /// The paths of the frozen parameters, which have no gradient.
    frozen: Mutex<BTreeSet<String>>,
    passes: Passes,
    on_host: bool,
    specs: [Spec; 2],
    outputs: Option<Box<OutputShapes<X, Y>>>,
    probed: Mutex<Vec<Probed>>,
    /// The dtype in which the model computes with f32 parameters and inputs; `None` for f32.
    computes_in: Mutex<Option<DType>>,
}

type NewModel<M> = dyn Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync;
type Forward<M, X, Y> = dyn Fn(&M, X, &mut Cx<'_>) -> candle_core::Result<Y> + Send + Sync;
type OutputShapes<X, Y> =
    dyn Fn(&Shapes<<X as Tensors>::Arrays>) -> Result<Shapes<<Y as Tensors>::Arrays>> + Send + Sync;

/// Creates a stage from a model's constructor and its forward function.
///
/// `new` creates the model from a `VarBuilder`, as candle's layers do. This function calls it on
/// every process, over zeros without memory, to learn the parameters' names and shapes. Processes
/// that own devices of the stage call it again after each update. So `new` may compute values from
/// parameters, but must not keep state. If several stages have equal layers, add the layer's index
/// in the whole model to the path.
///
/// `forward` computes the outputs from the inputs: one [`Tensor`](candle_core::Tensor) each, or
/// other [`Tensors`]. The last stage returns a [`Loss`](mpmd_core::pipeline::Loss). Integers pass
/// between stages without gradients.
///
/// Values that the closures capture must be the same on all processes.
///
/// The autograd graph of a microbatch stays on its device from the forward to the backward pass.
///
/// # Errors
///
/// If `new` fails, or requests one parameter with two shapes.
#[track_caller]
pub fn stage<M, X, Y, N, F>(new: N, forward: F) -> Result<CandleStage<M, X, Y>>
where
    M: Send + 'static,
    X: Tensors,
    Y: Tensors,
    N: Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync + 'static,
    F: Fn(&M, X, &mut Cx<'_>) -> candle_core::Result<Y> + Send + Sync + 'static,
{
    let at = Location::caller();
    let name = format!("candle stage at {}:{}", at.file(), at.line());
    let params = params::record(&new)
        .map_err(|why| Error::kernel(format!("the constructor of the {name} fails: {why}")))?;

    Ok(CandleStage {
        name,
        at,
        new: Box::new(new),
        forward: Box::new(forward),
        params,
        frozen: Mutex::new(BTreeSet::new()),
        passes: Passes::Fused,
        on_host: cfg!(not(feature = "cuda")),
        specs: Default::default(),
        outputs: None,
        probed: Mutex::new(Vec::new()),
        computes_in: Mutex::new(None),
    })
}

impl<M, X: Tensors, Y: Tensors> CandleStage<M, X, Y> {
    /// Sets the name of the stage, for messages and drawings.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Trains only some parameters. The regular expression `pattern` is searched in their paths, as
    /// Python's `re.search` does: `"lora"` trains every parameter with these letters in its path,
    /// `"^lora$"` only the one with this path. The others are frozen: they have no gradient and no
    /// state of an optimiser. There is no backward pass below the first trainable layer.
    ///
    /// # Errors
    ///
    /// If the pattern is no regular expression, or Python's `re` reads it in another way. If it is
    /// found in no path, or takes too many steps to be found.
    pub fn trainable(mut self, pattern: &str) -> Result<Self> {
        let wrong = |fault: PatternFault| Error::kernel(format!("pattern {pattern:?}: {fault}"));
        let compiled = NamePattern::anywhere(pattern).map_err(wrong)?;
        let mut frozen = BTreeSet::new();
        for path in self.params.keys() {
            if !compiled.matches(path).map_err(wrong)? {
                frozen.insert(path.clone());
            }
        }

        if frozen.len() == self.params.len() && !self.params.is_empty() {
            let paths: Vec<&String> = self.params.keys().collect();
            return Err(Error::kernel(format!(
                "{pattern:?} matches no parameter of the {}, which are {paths:?}",
                self.name
            )));
        }

        self.frozen = Mutex::new(frozen);
        Ok(self)
    }

    /// Freezes all parameters: see [`CandleStage::trainable`].
    #[must_use]
    pub fn frozen(mut self) -> Self {
        self.frozen = Mutex::new(self.params.keys().cloned().collect());
        self
    }

    /// Computes weight gradients separately from input gradients, if the schedule has separate
    /// actions for them. Zero-bubble schedules need this.
    ///
    /// Layers that can defer their weight gradients do so: see the table of [`nn`](crate::nn).
    /// Weight gradients of other layers are computed together with the input gradients. The probe
    /// then logs a warning with the names of these parameters.
    #[must_use]
    pub fn split_gradients(mut self) -> Self {
        self.passes = Passes::Both;
        self
    }

    /// Computes in host memory even if the stage's devices are CUDA devices: all values are copied
    /// to the host and back. For a model that creates tensors of its own on the CPU. Without the
    /// feature `cuda`, all stages compute in host memory.
    #[must_use]
    pub fn on_host(mut self) -> Self {
        self.on_host = true;
        self
    }

    /// Sets the sharding of the inputs over the stage's mesh. Default: replicated.
    #[must_use]
    pub fn input_spec(mut self, spec: Spec) -> Self {
        self.specs[0] = spec;
        self
    }

    /// Sets the sharding of the outputs over the stage's mesh. Default: replicated.
    #[must_use]
    pub fn output_spec(mut self, spec: Spec) -> Self {
        self.specs[1] = spec;
        self
    }

    /// Declares the outputs' global shapes as a function of the inputs' global shapes. Inputs whose
    /// shapes differ from the probed ones then need no further probe.
    #[must_use]
    pub fn outputs(
        mut self,
        shapes: impl Fn(&Shapes<X::Arrays>) -> Result<Shapes<Y::Arrays>> + Send + Sync + 'static,
    ) -> Self {
        self.outputs = Some(Box::new(shapes));
        self
    }

    /// Returns the global shape of each parameter by path, for example for sharding rules.
    pub fn shapes(&self) -> BTreeMap<String, ShapedArray> {
        self.params
            .iter()
            .map(|(path, param)| (path.clone(), param.aval.clone()))
            .collect()
    }

    /// Creates the parameters with their initial values, replicated over the mesh. The values
    /// depend only on the seed, the path and the element's index. Each owner fills its own regions,
    /// without communication.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Program::array_from_fn`].
    #[track_caller]
    pub fn init(
        &self,
        p: &mut Program,
        mesh: &Mesh,
        seed: u64,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let sharding = mesh.replicated();
        self.init_as(p, seed, |_, _| sharding.clone())
    }

    /// Creates the parameters as [`CandleStage::init`] does, in the shardings that `sharding`
    /// returns for each path and shape.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Program::array_from_fn`].
    #[track_caller]
    pub fn init_as(
        &self,
        p: &mut Program,
        seed: u64,
        sharding: impl Fn(&str, &ShapedArray) -> Sharding,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let mut arrays = BTreeMap::new();
        for (path, ParamRequest { aval, initial }) in &self.params {
            let key = params::key_of(seed, path);
            let initial = *initial;
            let shape = aval.clone();
            let array =
                p.array_from_fn(aval.clone(), sharding(path, aval), move |region, view| {
                    initial.fill(key, &shape, region, view)
                })?;
            arrays.insert(path.clone(), array);
        }
        Ok(arrays)
    }

    /// Returns the dtype in which the model gets values that are stored in dtype `stored`.
    fn working(&self, stored: DType) -> DType {
        let computes_in = *self.computes_in.lock();
        computes_in
            .filter(|_| stored == DType::F32)
            .unwrap_or(stored)
    }

    /// Returns the shape of `stored` with the dtype in which the model gets its values.
    fn working_form(&self, stored: &ShapedArray) -> ShapedArray {
        ShapedArray::new(stored.shape(), self.working(stored.dtype()))
    }

    /// Creates an error of the model that names the line where the stage was made.
    fn failed(&self, why: impl std::fmt::Display) -> Error {
        // candle puts each part of a message on a line of its own.
        let why = with_shortage(why.to_string().replace(":\n", ": "));
        Error::kernel(format!(
            "the model of the stage made at {} fails: {why}",
            self.at
        ))
    }
}

/// Returns the side inputs of a stage by name: `microbatch.side(1, named([("labels", labels)]))`.
pub fn named<const N: usize>(arrays: [(&str, MpmdArray); N]) -> BTreeMap<String, MpmdArray> {
    arrays.map(|(name, array)| (name.to_owned(), array)).into()
}

impl<M: Send + 'static, X: Tensors, Y: Tensors> Stage for CandleStage<M, X, Y> {
    type Params = BTreeMap<String, MpmdArray>;
    type In = X::Arrays;
    type Out = Y::Arrays;

    fn infer(
        &self,
        _: &BTreeMap<String, ShapedArray>,
        x: &Shapes<X::Arrays>,
        side: &SideShapes,
    ) -> Result<StageSignature<Shapes<Y::Arrays>>> {
        let (out, found) = self.found(x, side)?;
        let graph = PlacedShape::object_of_bytes(found.graph_bytes);
        let signature = StageSignature::new(out)
            .residual(graph)
            .forward_collectives(collectives::declared(&found.forward))
            .backward_collectives(collectives::declared(&found.backward));

        match self.passes {
            Passes::Fused => Ok(signature),
            _ => Ok(signature.weight_residual(PlacedShape::object_of_bytes(
                found.graph_bytes.saturating_add(found.at_once_bytes),
            ))),
        }
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: BTreeMap<String, View<'_>>,
        x: Views<'_, X::Arrays>,
        y: ViewsMut<'_, Y::Arrays>,
    ) -> Result<()> {
        self.run_forward(cx, x, y)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: BTreeMap<String, View<'_>>,
        dy: Views<'_, Y::Arrays>,
        dx: Option<ViewsMut<'_, X::Arrays>>,
        gradient: BTreeMap<String, ViewMut<'_>>,
    ) -> Result<()> {
        self.run_backward(cx, dy, dx, gradient.into_values().collect())
    }

    fn passes(&self) -> Passes {
        self.passes
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: BTreeMap<String, View<'_>>,
        dy: Views<'_, Y::Arrays>,
        dx: Option<ViewsMut<'_, X::Arrays>>,
    ) -> Result<()> {
        self.run_backward_input(cx, dy, dx)
    }

    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: BTreeMap<String, ViewMut<'_>>,
    ) -> Result<()> {
        self.run_backward_weight(cx, gradient.into_values().collect())
    }

    fn probe(&self, program: &mut Program, at: &StageProbe<'_, Self>) -> Result<()> {
        self.run_probe(program, at)
    }

    fn prepared_bytes(&self, params: &BTreeMap<String, ShapedArray>) -> Option<u64> {
        Some(
            params
                .values()
                .map(|aval| self.working_form(aval).bytes() as u64)
                .sum(),
        )
    }

    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: BTreeMap<String, View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        self.run_prepare(cx, &params, prepared)
    }

    /// Sets the dtype in which the model gets f32 parameters and inputs. Side inputs keep their
    /// dtype. Losses of [`nn`](crate::nn) are always f32.
    fn compute_in(&self, dtype: DType) -> Result<()> {
        if !matches!(dtype, DType::F32 | DType::Bf16 | DType::F16) {
            return Err(Error::kernel(format!(
                "{} is to compute in {dtype}: candle stages compute in f32, bf16 or f16",
                self.name
            )));
        }
        *self.computes_in.lock() = Some(dtype);
        self.probed.lock().clear();
        Ok(())
    }

    fn is_frozen(&self, path: &str) -> bool {
        self.frozen.lock().contains(path)
    }

    fn freeze(&self, path: &str) {
        self.frozen.lock().insert(path.to_owned());
    }

    fn computes_on_host(&self) -> bool {
        self.on_host
    }

    fn cuda(&self) -> Vec<&'static Source> {
        let probed = self.probed.lock();
        let heads = probed.iter().flat_map(Probed::heads).copied();
        let dtypes = self.params.values().map(|param| param.aval.dtype());
        crate::cuda_layers::kernels(dtypes.flat_map(|dtype| [dtype, self.working(dtype)]), heads)
    }

    fn draws_random(&self) -> bool {
        self.probed.lock().iter().any(Probed::draws)
    }

    /// Declares the side inputs as arrays by name.
    fn side(&self) -> SideInput {
        SideInput::of::<BTreeMap<String, MpmdArray>>()
    }

    fn input_spec(&self) -> Spec {
        self.specs[0].clone()
    }

    fn output_spec(&self) -> Spec {
        self.specs[1].clone()
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// Returns numbers that identify the stage: its line, the paths and shapes of its parameters,
    /// and its compute dtype.
    fn statics(&self) -> Vec<u64> {
        let text = |text: &str| params::key_of(0, text).0;
        let place = [
            text(self.at.file()),
            self.at.line().into(),
            self.at.column().into(),
        ];

        let params = self.params.iter().flat_map(|(path, param)| {
            std::iter::once(text(path)).chain(param.aval.shape().iter().map(|size| *size as u64))
        });
        let computes_in = self
            .computes_in
            .lock()
            .map_or(0, |dtype| text(dtype.name()));

        place
            .into_iter()
            .chain(params)
            .chain([computes_in])
            .collect()
    }
}
