//! The probe of a stage: its owner runs the model once on zeros, and tells all processes the shapes
//! of the outputs, the bytes of the graph and the collectives.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use mpmd_base::DeviceId;
use mpmd_core::kernel::Shapes;
use mpmd_core::pipeline::{Passes, SideShapes, Stage, StageProbe};
use mpmd_core::{Error, Program, Result};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::random::Key;
use mpmd_layout::sharding::{Sharding, Spec, SpecEntry};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::Tree;
use serde::{Deserialize, Serialize};

use super::CandleStage;
use super::model::{ParamTensor, StageWeights};
use super::passes::{MicrobatchGraph, Named, deferring, values};
use crate::bridge;
use crate::collectives::{self, CollectiveRecorder};
use crate::cx::{Cx, SideValues};
use crate::dtypes;
use crate::pass::PassState;
use crate::tensors::Tensors;
use crate::threads;
use crate::tree_form::TreeForm;

/// The result of a probe for inputs of shapes `x` and side inputs of shapes `side`.
pub(super) struct Probed {
    x: Vec<ShapedArray>,
    side: Named<ShapedArray>,
    found: ProbeFacts,
}

/// The facts that a probe finds.
#[derive(Clone, Deserialize, Serialize)]
pub(super) struct ProbeFacts {
    /// The outputs' global shapes.
    out: TreeForm,
    /// The bytes of a microbatch's autograd graph on a device.
    pub(super) graph_bytes: u64,
    /// Parameters of layers that cannot defer. Their gradients are computed together with the input
    /// gradients, although the stage splits its backward pass.
    at_once: Vec<String>,
    /// The bytes of the `at_once` gradients on a device.
    pub(super) at_once_bytes: u64,
    pub(super) forward: Vec<collectives::FoundCollective>,
    pub(super) backward: Vec<collectives::FoundCollective>,
    draws: bool,
    needs_dx: bool,
    /// The head dimensions of the model's attentions.
    heads: BTreeSet<usize>,
}

/// A weight gradient on a device that is computed together with the input gradients.
struct AtOnceGradient {
    path: String,
    bytes: u64,
}

impl Probed {
    /// Returns true if the model draws random keys.
    pub(super) fn draws(&self) -> bool {
        self.found.draws
    }

    /// Returns the head dimensions of the model's attentions.
    pub(super) fn heads(&self) -> &BTreeSet<usize> {
        &self.found.heads
    }
}

impl<M: Send + 'static, X: Tensors, Y: Tensors> CandleStage<M, X, Y> {
    /// Returns true if the model draws random keys in training.
    pub(super) fn draws_random_keys(&self) -> bool {
        self.probed.lock().iter().any(Probed::draws)
    }

    /// Returns true if earlier stages need the gradient of the inputs, or if nothing was probed
    /// yet.
    pub(super) fn needs_dx(&self) -> bool {
        let probed = self.probed.lock();
        probed.is_empty() || probed.iter().any(|probed| probed.found.needs_dx)
    }

    /// Returns the outputs' shapes and the other probed facts for inputs of shapes `x`.
    ///
    /// # Errors
    ///
    /// If no inputs of these shapes were probed. With declared outputs, a probe of other shapes is
    /// enough.
    pub(super) fn found(
        &self,
        x: &Shapes<X::Arrays>,
        side: &SideShapes,
    ) -> Result<(Shapes<Y::Arrays>, ProbeFacts)> {
        let side: Named<ShapedArray> = side.tree()?;
        let probed = self.probed.lock();
        let leaves = x.leaves();
        let same =
            |probed: &&Probed| probed.x.iter().eq(leaves.iter().copied()) && probed.side == side;
        if let Some(Probed { found, .. }) = probed.iter().find(same) {
            return Ok((found.out.shapes()?, found.clone()));
        }

        let Some((outputs, probed)) = self.outputs.as_ref().zip(probed.first()) else {
            return Err(Error::kernel(format!(
                "the output shapes of the stage made at {} are unknown for these inputs: call \
                 `Pipeline::probe` with a microbatch of these shapes before, or declare them with \
                 `outputs`",
                self.at
            )));
        };

        let elements = |avals: &mut dyn Iterator<Item = usize>| avals.sum::<usize>().max(1) as u64;
        let here = elements(&mut leaves.iter().map(|aval| aval.elements()));
        let there = elements(&mut probed.x.iter().map(ShapedArray::elements));
        // Activations grow with the inputs.
        let graph_bytes = probed.found.graph_bytes.saturating_mul(here) / there;
        let grown = |found: &[collectives::FoundCollective]| {
            found
                .iter()
                .map(|found| found.scaled(here, there))
                .collect::<Vec<_>>()
        };
        let [forward, backward] = [&probed.found.forward, &probed.found.backward];
        let forward = grown(forward);
        let backward = grown(backward);

        Ok((
            outputs(x)?,
            ProbeFacts {
                graph_bytes,
                forward,
                backward,
                ..probed.found.clone()
            },
        ))
    }

    /// Probes the stage for the inputs of `at`, unless that was done before.
    pub(super) fn run_probe(&self, program: &mut Program, at: &StageProbe<'_, Self>) -> Result<()> {
        threads::share_cores(program);
        let side: Named<ShapedArray> = at.side.tree()?;
        let x: Vec<ShapedArray> = at.x.leaves().into_iter().cloned().collect();

        let known = |probed: &Probed| {
            probed.x == x && probed.side == side && probed.found.needs_dx == at.needs_dx
        };
        if self.probed.lock().iter().any(known) {
            return Ok(());
        }

        let Some(device) = at.mesh.devices().first().copied() else {
            return Ok(());
        };
        let owner = program.topology().process_of(device);
        let owner = owner.ok_or_else(|| Error::kernel(format!("device {device} has no owner")))?;

        let run = || {
            self.try_out(at, &side, device)
                .map_err(|why| why.to_string())
        };
        // A dry run learns the shapes in the same way as the owner.
        let in_dry_run = if program.is_dry_run() {
            run()
        } else {
            Err(String::new())
        };

        let found = program
            .broadcast_value(owner, in_dry_run, || Ok(run()))?
            .map_err(Error::kernel)?;
        self.check_gradients(at, &found)?;
        // Small vectors, such as weights of norms, take no time worth a word.
        let all: u64 = at.params.values().map(|aval| aval.bytes() as u64).sum();
        if found.at_once_bytes * 100 > all && program.process() == owner {
            let stage = &self.name;
            let parameters = found.at_once.join(", ");
            tracing::warn!(
                stage,
                at = %self.at,
                "`split_gradients`: the gradients of {parameters} are computed with that of the \
                 input, since their layers cannot defer them. See `mpmd::candle::nn` for layers \
                 that can, with f32 parameters"
            );
        }

        let mut probed = self.probed.lock();
        probed.retain(|probed| probed.x != x || probed.side != side);
        probed.push(Probed { x, side, found });
        Ok(())
    }

    /// Returns an error if a gradient is declared to be complete, although each device sums it over
    /// its own part of the batch only.
    fn check_gradients(&self, at: &StageProbe<'_, Self>, found: &ProbeFacts) -> Result<()> {
        for axis in self.specs[0].entries().iter().flat_map(SpecEntry::axes) {
            // After a gather, all devices may compute the same.
            let gathers = found
                .forward
                .iter()
                .any(|collective| collective.gathers(axis));
            if gathers || at.mesh.axis_size(axis)? == 1 {
                continue;
            }

            let params = at.params.keys().zip(at.shardings).zip(at.gradients);
            for ((path, sharding), gradient) in params {
                let divides = |spec: &Spec| spec.entries().iter().any(|e| e.axes().contains(axis));
                let divided = sharding.spec().is_some_and(divides);
                let partial = gradient.unreduced_axes().contains(axis);
                if !divided && !partial && !self.is_frozen(path) {
                    return Err(Error::kernel(format!(
                        "the input of the stage made at {} is divided over axis {axis:?}, so each \
                         device has only its own part of the gradient of {path:?}: store the \
                         parameters by `Pipeline::store(stage, \
                         ParamSharding::new(shardings).partial_over(&[{axis:?}])?)`",
                        self.at
                    )));
                }
            }
        }
        Ok(())
    }

    /// Runs the model's forward and backward pass on zeros, in the shapes of `device`'s regions.
    fn try_out(
        &self,
        at: &StageProbe<'_, Self>,
        side: &Named<ShapedArray>,
        device: DeviceId,
    ) -> Result<ProbeFacts> {
        let input = at.mesh.sharding(self.specs[0].clone());
        let weights = StageWeights::new(Device::Cpu, self.zero_params(at, device)?);
        let mut models = self.models(Arc::new(weights))?;
        let x = self.zero_inputs(at, &input, device)?;
        let parts = side_parts(side, &input, device);

        let mut recorder = CollectiveRecorder {
            mesh: at.mesh,
            found: Vec::new(),
        };
        let tree = values::<X>(&at.x.structure(), &x)?;
        let cx = Cx {
            training: true,
            side: SideValues::Shapes(parts),
            state: None,
            place: None,
        };
        let mut pass = PassState {
            key: Some(Key(0)),
            exchange: Some(&mut recorder),
            ..PassState::default()
        };
        let out = self.call(&mut models, true, &mut pass, tree, cx)?;
        let draws = pass.draws > 0;
        let kept_bytes = pass.kept_bytes;
        let heads = std::mem::take(&mut pass.heads);
        let forward = std::mem::take(&mut recorder.found);
        let structure = out.structure();
        let y: Vec<Tensor> = out.into_leaves().into_iter().map(|value| value.0).collect();

        let graph = MicrobatchGraph {
            x,
            y,
            weights: models.weights.clone(),
        };
        let graph_bytes = bytes_of(&graph) + kept_bytes;
        let at_once = self.try_out_backward(&graph, &mut recorder)?;

        Ok(ProbeFacts {
            out: TreeForm::of(&structure, &graph.y, |part| {
                whole_of(&part, &self.specs[1], at.mesh)
            })?,
            graph_bytes,
            at_once_bytes: at_once.iter().map(|one| one.bytes).sum(),
            at_once: at_once.into_iter().map(|one| one.path).collect(),
            forward,
            backward: recorder.found,
            draws,
            needs_dx: at.needs_dx,
            heads,
        })
    }

    /// Returns zeros in the shapes of the device's regions of the parameters.
    fn zero_params(
        &self,
        at: &StageProbe<'_, Self>,
        device: DeviceId,
    ) -> Result<Named<ParamTensor>> {
        let mut params = Named::new();
        for ((path, aval), sharding) in at.params.iter().zip(at.shardings) {
            let part = part_of(aval, sharding, device)?;
            let zeros = bridge::zeros(&self.working_form(&part), !self.is_frozen(path))?;
            let param = ParamTensor {
                stored: part.dtype(),
                tensor: zeros,
            };
            params.insert(path.clone(), param);
        }
        Ok(params)
    }

    /// Returns zeros in the shapes of the device's regions of the inputs.
    fn zero_inputs(
        &self,
        at: &StageProbe<'_, Self>,
        sharding: &Sharding,
        device: DeviceId,
    ) -> Result<Vec<Tensor>> {
        let mut x = Vec::new();
        for aval in at.x.leaves() {
            let float = dtypes::candle_type(aval.dtype())?.is_float();
            let part = self.working_form(&part_of(aval, sharding, device)?);
            x.push(bridge::zeros(&part, at.needs_dx && float)?);
        }
        Ok(x)
    }

    /// Runs the backward pass on zeros. If the stage splits its backward pass, returns the weight
    /// gradients that are not deferred.
    fn try_out_backward(
        &self,
        graph: &MicrobatchGraph,
        recorder: &mut CollectiveRecorder<'_>,
    ) -> Result<Vec<AtOnceGradient>> {
        let seed = |y: &Tensor| -> Result<Option<Tensor>> {
            match y.track_op() {
                true => Ok(Some(y.zeros_like().map_err(dtypes::refused)?.detach())),
                false => Ok(None),
            }
        };
        let seeds = graph.y.iter().map(seed).collect::<Result<Vec<_>>>()?;

        let splits = self.passes != Passes::Fused;
        let pass = if splits {
            deferring(&graph.weights)
        } else {
            PassState::default()
        };
        let mut pass = PassState {
            exchange: Some(recorder),
            ..pass
        };

        let store = self.backpropagate_from(&graph.y, seeds, &mut pass)?;
        let deferred = pass.deferred.take().unwrap_or_default();
        drop(pass);
        let gradient = |tensor: &Tensor| store.as_ref().and_then(|store| store.get(tensor));
        let trained = graph
            .weights
            .iter()
            .filter(|(_, tensor)| splits && tensor.is_variable());
        let at_once = trained
            .filter_map(|(path, tensor)| {
                Some(AtOnceGradient {
                    path: path.clone(),
                    bytes: bridge::memory_of(gradient(tensor)?).bytes,
                })
            })
            .collect();

        let has = |tensor: &Tensor| {
            gradient(tensor).is_some()
                || deferred
                    .iter()
                    .any(|deferred| deferred.weight == tensor.id())
        };
        let lost = |tensor: &Tensor| tensor.is_variable() && !has(tensor);
        if let Some((path, _)) = graph.weights.iter().find(|(_, tensor)| lost(tensor)) {
            return Err(self.failed(format!(
                "parameter {path:?} gets no gradient. {WITHOUT_GRADIENT} If the model does not use \
                 it, freeze it with `trainable`"
            )));
        }

        let mut inputs = graph.x.iter().filter(|x| x.is_variable()).peekable();
        if inputs.peek().is_some() && inputs.all(lost) {
            return Err(self.failed(format!("its input gets no gradient. {WITHOUT_GRADIENT}")));
        }
        Ok(at_once)
    }
}

/// Advice for errors about missing gradients: it names operations without gradient.
const WITHOUT_GRADIENT: &str = "An operation after it may have none: `detach`, or `layer_norm`, \
                                `rms_norm`, `softmax_last_dim`, `rope` and `sdpa` of candle_nn. \
                                Take these from `mpmd::candle::nn`.";

/// Returns the shapes of a device's side inputs. As in the estimate of memory, a side input is
/// divided like the inputs if its shape allows that.
fn side_parts(
    side: &Named<ShapedArray>,
    sharding: &Sharding,
    device: DeviceId,
) -> Named<ShapedArray> {
    let mut parts = Named::new();
    for (name, aval) in side {
        let part = part_of(aval, sharding, device).unwrap_or_else(|_| aval.clone());
        parts.insert(name.clone(), part);
    }
    parts
}

/// Returns the shape of the device's region of an array.
fn part_of(aval: &ShapedArray, sharding: &Sharding, device: DeviceId) -> Result<ShapedArray> {
    let layout = sharding.layout(aval.shape())?;
    let region = layout.region_of(device);
    let region = region.ok_or_else(|| Error::kernel(format!("{aval} is not on {device}")))?;
    Ok(ShapedArray::try_new(&region.shape(), aval.dtype())?)
}

/// Returns the global shape of an array with a part of shape `part` on each device of a mesh.
fn whole_of(part: &ShapedArray, spec: &Spec, mesh: &Mesh) -> Result<ShapedArray> {
    let mut dims = part.shape().to_vec();
    for (dim, entry) in dims.iter_mut().zip(spec.entries()) {
        for axis in entry.axes() {
            *dim *= mesh.axis_size(axis)?;
        }
    }
    Ok(ShapedArray::try_new(&dims, part.dtype())?)
}

/// Returns the bytes that the graph holds, without the parameters.
fn bytes_of(graph: &MicrobatchGraph) -> u64 {
    let mut seen: BTreeSet<usize> = graph
        .weights
        .iter()
        .map(|(_, tensor)| bridge::memory_of(tensor).address)
        .collect();

    let nodes = graph.y.iter().flat_map(|y| y.sorted_nodes());
    let held = graph.x.iter().chain(&graph.y).chain(nodes);
    let new = held
        .map(bridge::memory_of)
        .filter(|memory| seen.insert(memory.address));
    new.map(|memory| memory.bytes).sum()
}
