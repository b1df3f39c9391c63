//! The passes of a stage: they run the model, keep its graph, and compute gradients from it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Tensor};
use mpmd_core::kernel::{Context, View, ViewMut, Views, ViewsMut};
use mpmd_core::pipeline::StageContext;
use mpmd_core::{Error, Result};
use mpmd_layout::aval::DType as ArrayType;
use mpmd_layout::tree::Tree;

use super::CandleStage;
use super::model::{Models, StageWeights, gradient};
use crate::bridge::{self, Place};
use crate::cuda::OnCuda;
use crate::cx::{Cx, SideValues};
use crate::dtypes;
use crate::pass::{self, Deferred, Gradient, PassState};
use crate::tensors::{TensorLeaf, Tensors, Values};
use crate::threads;

/// The autograd graph of a microbatch, from the forward to the backward pass.
pub(super) struct MicrobatchGraph {
    /// The inputs. An input with a gradient is a variable.
    pub(super) x: Vec<Tensor>,
    pub(super) y: Vec<Tensor>,
    pub(super) weights: Arc<StageWeights>,
}

/// The weight gradients of a microbatch that are deferred to the weight pass.
struct Postponed {
    weights: Arc<StageWeights>,
    work: Vec<Deferred>,
    /// Gradients that are computed already, since their layers cannot defer.
    computed: Vec<ComputedGradient>,
}

struct ComputedGradient {
    /// The index of the parameter.
    place: usize,
    gradient: Tensor,
}

impl<M: Send + 'static, X: Tensors, Y: Tensors> CandleStage<M, X, Y> {
    /// Runs the model on one microbatch. Saves the graph if there will be a backward pass.
    pub(super) fn run_forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        x: Views<'_, X::Arrays>,
        y: ViewsMut<'_, Y::Arrays>,
    ) -> Result<()> {
        let training = cx.is_training();
        let on = enter(cx, training)?;
        let place = on.as_ref();
        let records = training && cx.keeps_residuals();
        let key = if training && self.draws_random_keys() {
            Some(cx.key()?)
        } else {
            None
        };

        let side = SideValues::Values(cx.side()?);
        let state = cx.state_view();
        let with_gradient = records && self.needs_dx();

        let structure = x.structure();
        let x = x.into_leaves();
        let x = x
            .iter()
            .map(|view| self.input(view, with_gradient, place))
            .collect::<Result<Vec<_>>>()?;
        let mut graph: Option<ViewMut<'_>> = cx.residual_mut().ok();
        let tree = values::<X>(&structure, &x)?;

        let (out, weights) = self.with_models(cx, |cx, models| {
            let mut pass = PassState {
                key,
                exchange: Some(&mut **cx),
                cuda: place,
                ..PassState::default()
            };
            let cx = Cx {
                training,
                side,
                state,
                place,
            };
            let out = self.call(models, records, &mut pass, tree, cx)?;
            Ok((out, models.weights.clone()))
        })?;

        let expected = y.structure();
        let found = out.structure();
        if expected != found {
            return Err(self.failed("its outputs have another structure than in its probe"));
        }
        let out: Vec<Tensor> = out.into_leaves().into_iter().map(|value| value.0).collect();
        for (tensor, view) in out.iter().zip(&mut y.into_leaves()) {
            bridge::write(tensor, view, place).map_err(|why| self.failed(why))?;
        }

        if let Some(graph) = &mut graph {
            let (x, y) = if records {
                (x, out)
            } else {
                (Vec::new(), Vec::new())
            };
            graph.put_object(MicrobatchGraph { x, y, weights })?;
        }
        Ok(())
    }

    /// Calls the forward function. If `records` is true, uses the model that records a graph.
    pub(super) fn call(
        &self,
        models: &mut Models<M>,
        records: bool,
        pass: &mut PassState<'_>,
        x: Values<X::Arrays>,
        mut cx: Cx<'_>,
    ) -> Result<Values<Y::Arrays>> {
        let model = if records {
            models.trained()
        } else {
            self.plain(models)?
        };

        let x = X::from_values(x);
        let y = pass::enter(pass, || (self.forward)(model, x, &mut cx));
        let y = y.map_err(|why| self.failed(why))?.into_values();
        // A loss is f32, also if the model computes in another dtype.
        let leaves = y.structure();
        let is_half = self.working(ArrayType::F32) != ArrayType::F32;
        let wide = |TensorLeaf(leaf)| match (leaf.rank(), leaf.dtype()) {
            (0, DType::F16 | DType::BF16) if is_half => leaf.to_dtype(DType::F32),
            _ => Ok(leaf),
        };

        let wide = y
            .into_leaves()
            .into_iter()
            .map(|leaf| Ok(TensorLeaf(wide(leaf)?)));
        let wide = wide
            .collect::<candle_core::Result<Vec<_>>>()
            .map_err(|why| self.failed(why))?;
        Ok(Tree::from_leaves(&leaves, wide)?)
    }

    /// Computes all gradients of a microbatch. Adds the parameters' gradients to `gradient`.
    pub(super) fn run_backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        dy: Views<'_, Y::Arrays>,
        dx: Option<ViewsMut<'_, X::Arrays>>,
        mut gradient: Vec<ViewMut<'_>>,
    ) -> Result<()> {
        let on = enter(cx, true)?;
        let place = on.as_ref();
        let graph = cx
            .residual::<View<'_>>()?
            .take_object::<MicrobatchGraph>()?;
        let gradients = graph.weights.gradients(&mut gradient, place)?;

        let mut pass = PassState {
            gradients,
            exchange: Some(&mut **cx),
            cuda: place,
            ..PassState::default()
        };

        let mut store = self.backpropagate(&graph, dy.into_leaves(), &mut pass)?;
        drop(pass);

        for ((_, tensor), view) in graph.weights.iter().zip(&mut gradient) {
            if let Some(more) = store.as_mut().and_then(|store| store.remove(tensor)) {
                bridge::add(&more, view, place)?;
            }
        }
        write_dx(cx, &graph, &store, dx, place)
    }

    /// Computes the gradients of the inputs. Saves the deferred work for weight gradients, and the
    /// weight gradients of layers that cannot defer.
    pub(super) fn run_backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        dy: Views<'_, Y::Arrays>,
        dx: Option<ViewsMut<'_, X::Arrays>>,
    ) -> Result<()> {
        let on = enter(cx, true)?;
        let place = on.as_ref();
        let graph = cx
            .residual::<View<'_>>()?
            .take_object::<MicrobatchGraph>()?;
        let mut later: ViewMut<'_> = cx.weight_residual_mut()?;

        let mut pass = PassState {
            exchange: Some(&mut **cx),
            cuda: place,
            ..deferring(&graph.weights)
        };
        let mut store = self.backpropagate(&graph, dy.into_leaves(), &mut pass)?;
        let work = pass.deferred.take().unwrap_or_default();
        drop(pass);
        // candle computes gradients of constants too.
        let trained = graph
            .weights
            .iter()
            .enumerate()
            .filter(|(_, (_, one))| one.is_variable());
        let computed = trained
            .filter_map(|(place, (_, tensor))| {
                let gradient = store.as_mut().and_then(|store| store.remove(tensor))?;
                Some(ComputedGradient { place, gradient })
            })
            .collect();

        later.put_object(Postponed {
            weights: graph.weights.clone(),
            work,
            computed,
        })?;
        write_dx(cx, &graph, &store, dx, place)
    }

    /// Adds the weight gradients of a microbatch to `gradients`.
    pub(super) fn run_backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        mut gradients: Vec<ViewMut<'_>>,
    ) -> Result<()> {
        let on = enter(cx, true)?;
        let place = on.as_ref();
        let Postponed {
            weights,
            work,
            computed,
        } = cx
            .weight_residual::<View<'_>>()?
            .take_object::<Postponed>()?;

        threads::enter_pool();
        for Deferred { weight, add } in work {
            let view = weights
                .place(weight)
                .and_then(|place| gradients.get_mut(place));
            let view = view.ok_or_else(|| Error::kernel("a gradient of an unknown parameter"))?;
            add(&mut gradient(view, place)?).map_err(|why| self.failed(why))?;
        }
        // In the order of a pass that computes all gradients: those of a graph come last.
        for computed in computed {
            let view = gradients.get_mut(computed.place);
            bridge::add(
                &computed.gradient,
                view.ok_or_else(|| Error::kernel("an unknown parameter"))?,
                place,
            )?;
        }
        Ok(())
    }

    /// Returns an input as a tensor. It is a variable if `with_gradient` is true and its dtype is a
    /// float type.
    fn input(&self, view: &View<'_>, with_gradient: bool, place: Place<'_>) -> Result<Tensor> {
        let dtype = self.working(view.global().dtype());
        let float = dtypes::candle_type(dtype)?.is_float();
        bridge::tensor_in(view, dtype, with_gradient && float, place)
    }

    /// Runs candle's backward pass from the gradients `dy` of the outputs.
    pub(super) fn backpropagate(
        &self,
        graph: &MicrobatchGraph,
        dy: Vec<View<'_>>,
        pass: &mut PassState<'_>,
    ) -> Result<Option<GradStore>> {
        let mut seeds = Vec::with_capacity(dy.len());
        for (y, dy) in graph.y.iter().zip(&dy) {
            seeds.push(if y.track_op() {
                Some(bridge::tensor_of(dy, pass.cuda)?)
            } else {
                None
            });
        }
        self.backpropagate_from(&graph.y, seeds, pass)
    }

    /// Runs candle's backward pass from the gradients `seeds` of the outputs `y`. A seed is `None`
    /// for an output without gradient. Returns `None` if no output has one.
    pub(super) fn backpropagate_from(
        &self,
        y: &[Tensor],
        seeds: Vec<Option<Tensor>>,
        pass: &mut PassState<'_>,
    ) -> Result<Option<GradStore>> {
        let mut total: Option<Tensor> = None;
        let add = |y: &Tensor, dy: Tensor, total: Option<Tensor>| {
            let one = y.apply_op1(Seed(dy))?;
            total.map_or(Ok(one.clone()), |total| total + one)
        };
        for (y, dy) in y.iter().zip(seeds) {
            let Some(dy) = dy else { continue };
            total = Some(add(y, dy, total).map_err(|why| self.failed(why))?);
        }
        let Some(total) = total else { return Ok(None) };

        let store = pass::enter(pass, || total.backward());
        store
            .map(Some)
            .map_err(|why| self.failed(replacement(&why)))
    }
}

/// Enters the CUDA device of a pass, if it runs on one. In training, lets candle cache its uploads.
fn enter<'c>(cx: &Context<'c>, is_training: bool) -> Result<Option<OnCuda<'c>>> {
    let mut on = OnCuda::enter(cx)?;
    if let Some(on) = on.as_mut().filter(|_| is_training) {
        on.keep_uploads();
    }
    Ok(on)
}

/// Returns the state of a pass that defers the gradients of all trainable f32 parameters.
pub(super) fn deferring(weights: &StageWeights) -> PassState<'static> {
    let gradients: HashMap<_, Gradient<'static>> = weights
        .singles()
        .map(|tensor| (tensor.id(), Gradient::Host(&mut [])))
        .collect();
    PassState {
        gradients,
        deferred: Some(Vec::new()),
        ..PassState::default()
    }
}

/// Builds a tree of tensors with this structure.
pub(super) fn values<T: Tensors>(
    structure: &mpmd_layout::tree::Structure,
    tensors: &[Tensor],
) -> Result<Values<T::Arrays>> {
    Ok(Tree::from_leaves(
        structure,
        tensors.iter().cloned().map(TensorLeaf),
    )?)
}

/// Writes the gradients of the inputs to `dx`, and zeros for inputs without a gradient.
fn write_dx<'v, T: Tree<Leaf = ViewMut<'v>>>(
    cx: &Context<'_>,
    graph: &MicrobatchGraph,
    store: &Option<GradStore>,
    dx: Option<T>,
    place: Place<'_>,
) -> Result<()> {
    let Some(dx) = dx else { return Ok(()) };
    for (x, mut view) in graph.x.iter().zip(dx.into_leaves()) {
        match store.as_ref().and_then(|store| store.get(x)) {
            Some(gradient) => bridge::write_gradient(gradient, &mut view, place)?,
            None => cx.zero(&mut view)?,
        }
    }
    Ok(())
}

/// Describes an error of the backward pass. For an operation without gradient, names a replacement.
fn replacement(why: &candle_core::Error) -> String {
    let candle_core::Error::BackwardNotSupported { op } = why else {
        return why.to_string();
    };
    let instead = match *op {
        "softmax-last-dim" => "`mpmd::candle::nn::ops::softmax_last_dim`",
        "rms-norm" => "`RmsNorm` or `ops::rms_norm` of `mpmd::candle::nn`",
        "layer-norm" => "`LayerNorm` or `ops::layer_norm` of `mpmd::candle::nn`",
        "rotary-emb" | "rotary-emb-int" | "rotary-emb-thd" => "`mpmd::candle::nn::rotary_emb`",
        "sdpa" => "`mpmd::candle::nn::ops::sdpa`",
        _ => "an operation that has a gradient, or `detach` its result",
    };
    format!("candle's operation {op:?} has no backward pass: use {instead}")
}

/// A custom operation that starts a backward pass. Its gradient is the given tensor.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "output gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, y: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let shape = Shape::from(());
        Ok((y.device().zeros_impl(&shape, DType::F32)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// Values by the name of a side input or the path of a parameter.
pub(super) type Named<T> = BTreeMap<String, T>;
