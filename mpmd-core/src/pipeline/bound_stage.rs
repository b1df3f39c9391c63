//! A stage on its mesh, as the runner sees it.

use std::sync::Arc;

use super::context::{Extras, Mode};
use super::erased::{ErasedProbe, ErasedStage};
use super::erased_tree::{ErasedTree, put_each};
use super::kernel_set::KernelSet;
use super::param_sharding::{NamedShape, ParamSharding};
use super::prepare::{Freshness, PreparedParams};
use super::stage::{Passes, Stage, StageSignature};
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Structure, Tree, TreeError};

/// Names, for error messages, of the elements of `BackwardKernel`'s input tuple.
const BACKWARD_INPUTS: [&str; 5] = [
    "parameter",
    "residual",
    "output gradient",
    "gradient so far",
    "",
];

/// Names, for error messages, of the elements of `BackwardKernel`'s output tuple.
const BACKWARD_OUTPUTS: [&str; 3] = ["input gradient", "weight residual", "gradient"];

/// The results of a forward pass.
pub(super) struct Forwarded {
    pub(super) y: ErasedTree,
    /// The declared residuals; `None` if the stage keeps its inputs and side inputs instead.
    pub(super) residual: Option<ErasedTree>,
    /// Index of the kernel set that was compiled for the shapes of this microbatch.
    pub(super) kernels: usize,
}

/// The results of a pass that computes the input gradient.
pub(super) struct BackwardOutput {
    /// The gradient of the input; `None` if the stage reads no stage that is trained.
    pub(super) dx: Option<ErasedTree>,
    pub(super) weight_residual: ErasedTree,
    /// The gradients of the parameters, if the pass is fused.
    pub(super) gradient: Option<ErasedTree>,
}

/// The values that all passes of one microbatch through a stage share.
#[derive(Clone, Debug, Default)]
pub(super) struct PassData {
    /// Index of the kernel set compiled for the microbatch's shapes. The forward pass returns it.
    pub(super) kernels: usize,
    /// The random key, if the stage draws random numbers.
    pub(super) key: Option<MpmdArray>,
}

/// Sums of a stage's parameter gradients over the microbatches so far; `None` before the first.
pub(super) type SoFar = Option<ErasedTree>;

/// Shape and sharding of a parameter, or of its gradient.
#[derive(Clone)]
pub(super) struct ParamPlace {
    pub(super) aval: ShapedArray,
    pub(super) sharding: Sharding,
}

/// The array of a parameter that one stage uses and another stage stores.
pub(super) struct TiedParam {
    /// Index of the parameter among the leaves of the using stage's parameters.
    pub(super) place: usize,
    pub(super) array: MpmdArray,
}

/// A stage bound to a mesh and its parameters, with its Rust type erased.
pub(super) struct BoundStage {
    pub(super) stage: Arc<dyn ErasedStage>,
    pub(super) mesh: Mesh,
    pub(super) input: Sharding,
    pub(super) output: Sharding,
    pub(super) structure: Structure,
    places: Vec<ParamPlace>,
    /// Parameters as stored, in leaf order; `None` if another stage stores the parameter.
    params: Vec<Option<MpmdArray>>,
    /// For each parameter, true if it is not trained.
    frozen: Vec<bool>,
    /// Shardings that kernels compute with; `None` if they equal the stored ones.
    storage: Option<ParamSharding>,
    /// Parameters in the shardings that kernels compute with, from `gather` to `release`.
    gathered: Option<Vec<MpmdArray>>,
    /// True if the backward passes compute the gradient of the input.
    pub(super) needs_dx: bool,
    /// The object that every pass of the stage can change, set by `Pipeline::state`.
    state: Option<MpmdArray>,
    pub(super) prepared: PreparedParams,
    /// The kernel sets, one for each shape of microbatches. A set is built at the first microbatch
    /// of its shape, because shapes of residuals are unknown before.
    pub(super) kernels: Vec<KernelSet>,
    /// The dtype that the passes compute in; `None` if it is the dtype of the parameters.
    computes_in: Option<DType>,
}

/// Creates the error for an action of the schedule for which the stage has no kernel.
fn no_kernel() -> Error {
    Error::kernel("there is no kernel for this backward pass")
}

impl BoundStage {
    pub(super) fn new<S: Stage>(stage: S, mesh: &Mesh, params: S::Params) -> Result<Self> {
        Self::of(Arc::new(stage), mesh, ErasedTree::of(params))
    }

    fn of(stage: Arc<dyn ErasedStage>, mesh: &Mesh, params: ErasedTree) -> Result<Self> {
        let mut places = Vec::new();
        for (path, param) in params.leaves_with_paths() {
            let here = param.sharding().filter(|sharding| is_on(sharding, mesh));
            let Some(sharding) = here else {
                return Err(param_not_here(&path, param, mesh));
            };
            places.push(ParamPlace {
                aval: param.aval().clone(),
                sharding: sharding.clone(),
            });
        }

        let structure = params.structure;
        let mut stage = Self {
            mesh: mesh.clone(),
            input: mesh.sharding(stage.input_spec()),
            output: mesh.sharding(stage.output_spec()),
            frozen: structure
                .paths()
                .iter()
                .map(|path| stage.is_frozen(path))
                .collect(),
            stage,
            structure,
            places,
            params: params.leaves.into_iter().map(Some).collect(),
            storage: None,
            gathered: None,
            needs_dx: false,
            state: None,
            prepared: PreparedParams::new(None),
            kernels: Vec::new(),
            computes_in: None,
        };
        stage.forget_shapes()?;
        Ok(stage)
    }

    /// Returns a copy of this stage without kernels, on the same mesh with the same parameters. If
    /// `stage` is given, it replaces the stage's code and all its parameters are frozen.
    pub(super) fn again(&self, stage: Option<Arc<dyn ErasedStage>>) -> Result<Self> {
        let paths = self.structure.paths();
        let is_same = stage.is_none();
        if let Some(stage) = &stage {
            paths.iter().for_each(|path| stage.freeze(path));
            self.computes_in
                .map_or(Ok(()), |dtype| stage.compute_in(dtype))?;
        }
        let stage = stage.unwrap_or_else(|| self.stage.clone());

        let mut again = Self {
            mesh: self.mesh.clone(),
            input: self.mesh.sharding(stage.input_spec()),
            output: self.mesh.sharding(stage.output_spec()),
            frozen: paths.iter().map(|path| stage.is_frozen(path)).collect(),
            stage,
            structure: self.structure.clone(),
            places: self.places.clone(),
            params: self.params.clone(),
            storage: self.storage.clone(),
            gathered: None,
            needs_dx: false,
            state: self.state.clone(),
            prepared: PreparedParams::new(None),
            kernels: Vec::new(),
            computes_in: self.computes_in,
        };
        again.forget_shapes()?;

        // The same stage goes on with the working form of its parameters.
        if is_same {
            again.prepared = self.prepared.shared();
        }
        Ok(again)
    }

    /// Drops gathered parameters, kernels and the working form: they depend on the parameters'
    /// shapes and shardings.
    fn forget_shapes(&mut self) -> Result<()> {
        self.gathered = None;
        self.kernels.clear();

        let mut leaves = Vec::with_capacity(self.places.len());
        for (ParamPlace { aval, .. }, compute) in self.places.iter().zip(self.compute()) {
            leaves.push(self.largest_region(aval, &compute)?);
        }
        let largest = ErasedTree {
            structure: self.structure.clone(),
            leaves,
        };
        self.prepared = PreparedParams::new(self.stage.prepared_bytes(largest)?);
        Ok(())
    }

    /// Returns the shape of the largest region of a parameter on one device of the stage's mesh.
    fn largest_region(&self, aval: &ShapedArray, sharding: &Sharding) -> Result<ShapedArray> {
        let wrong = |why| Error::kernel(format!("parameter {aval}: {why}"));
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;
        let here = layout
            .iter()
            .filter(|(device, _)| self.mesh.devices().contains(device));
        let largest = here
            .map(|(_, region)| region)
            .max_by_key(|region| region.elements());
        let shape = largest.map_or_else(|| aval.shape().to_vec(), |region| region.shape().to_vec());
        Ok(ShapedArray::new(&shape, aval.dtype()))
    }

    /// Returns the index of the kernel set for microbatches of these shapes, and builds it if it is
    /// new.
    fn kernels(&mut self, program: &Program, x: &ErasedTree, side: &ErasedTree) -> Result<usize> {
        let of = |known: &ErasedTree<ShapedArray>, given: &ErasedTree| {
            known.structure == given.structure
                && given.leaves.iter().map(MpmdArray::aval).eq(&known.leaves)
        };
        let known = |kernels: &KernelSet| of(&kernels.x, x) && of(&kernels.side, side);
        if let Some(known) = self.kernels.iter().position(known) {
            return Ok(known);
        }

        let aval = |leaf: &MpmdArray| leaf.aval().clone();
        let kernels = self.bind(
            program,
            x.map_ref(&mut { aval }),
            side.map_ref(&mut { aval }),
        )?;
        self.kernels.push(kernels);
        Ok(self.kernels.len() - 1)
    }

    pub(super) fn param_shapes(&self) -> ErasedTree<ShapedArray> {
        let leaves = self.places.iter().map(|place| place.aval.clone()).collect();
        ErasedTree {
            structure: self.structure.clone(),
            leaves,
        }
    }

    /// Calls the stage's `infer` for these shapes. If it fails, the error message lists the shapes.
    pub(super) fn infer(
        &self,
        params: &ErasedTree<ShapedArray>,
        x: &ErasedTree<ShapedArray>,
        side: &ErasedTree<ShapedArray>,
    ) -> Result<StageSignature<ErasedTree<ShapedArray>>> {
        let signature = self.stage.infer(params, x, side)?;
        let Some(residual) = &signature.residual else {
            return match signature.keeps.first() {
                None => Ok(signature),
                Some(kept) => Err(Error::kernel(format!(
                    "its `infer` keeps residual {:?}, and declares no residuals: call \
                     `.residual(…)`",
                    kept.residual
                ))),
            };
        };

        let is_object = |path: &str| {
            let leaves = residual.leaves_with_paths();
            leaves
                .iter()
                .any(|(leaf, placed)| leaf == path && placed.aval.is_object())
        };
        let mut keeps = signature.keeps.iter();
        if let Some(kept) = keeps.find(|kept| is_object(&kept.residual)) {
            let path = &kept.residual;
            return Err(Error::kernel(format!(
                "its `infer` keeps the object {path:?}: take it from the residual, and put it into \
                 the weight residual"
            )));
        }
        Ok(signature)
    }

    /// Returns the stored sharding of each parameter, including those that other stages store.
    pub(super) fn stored(&self) -> Vec<Sharding> {
        self.places
            .iter()
            .map(|place| place.sharding.clone())
            .collect()
    }

    /// Returns the shardings that kernels compute with, in leaf order.
    pub(super) fn compute(&self) -> Vec<Sharding> {
        self.storage
            .as_ref()
            .map_or_else(|| self.stored(), |storage| storage.compute().to_vec())
    }

    /// Returns the shape and sharding of each parameter's gradient, as the backward passes write
    /// it.
    pub(super) fn gradients(&self) -> Vec<ParamPlace> {
        let shardings = match &self.storage {
            Some(storage) => storage.gradients().to_vec(),
            None => self.stored(),
        };

        let all = self.places.iter().zip(shardings).zip(&self.frozen);
        all.map(|((param, sharding), frozen)| match frozen {
            true => ParamPlace {
                aval: ShapedArray::new(&[0], param.aval.dtype()),
                sharding: self.mesh.replicated(),
            },
            false => ParamPlace {
                aval: param.aval.clone(),
                sharding,
            },
        })
        .collect()
    }

    /// Returns true if one kernel computes both gradients of a combined backward action.
    pub(super) fn fuses(&self) -> bool {
        let partial = |storage: &ParamSharding| {
            storage
                .gradients()
                .iter()
                .any(|gradient| !gradient.unreduced_axes().is_empty())
        };
        match self.stage.passes() {
            Passes::Fused => true,
            Passes::Split => false,
            Passes::Both => !self.storage.as_ref().is_some_and(partial),
        }
    }

    fn extras(&self, key: Option<MpmdArray>) -> Extras<MpmdArray> {
        let prepared = self.prepared.object().cloned();
        Extras {
            state: self.state.clone(),
            prepared,
            key,
        }
    }

    /// Returns the parameters in the shardings that kernels compute with.
    fn for_kernels(&self) -> impl Iterator<Item = &MpmdArray> {
        let stored = self
            .params
            .iter()
            .flatten()
            .filter(|_| self.gathered.is_none());
        self.gathered.iter().flatten().chain(stored)
    }

    fn bound(&self, kernels: usize) -> Result<&KernelSet> {
        self.kernels
            .get(kernels)
            .ok_or_else(|| Error::kernel("a backward pass before any forward pass"))
    }
}

/// Returns the error for a parameter that is not on all devices of its stage's mesh.
fn param_not_here(path: &str, param: &MpmdArray, mesh: &Mesh) -> Error {
    let value = if path.is_empty() {
        "its parameter".to_owned()
    } else {
        format!("parameter {path:?}")
    };
    not_here(&value, param, mesh)
}

/// Returns the error for an array that is not on all devices of the mesh. `value` is its name in
/// the message.
fn not_here(value: &str, array: &MpmdArray, mesh: &Mesh) -> Error {
    let found = array
        .sharding()
        .map_or_else(|| "host values".to_owned(), ToString::to_string);

    let put = if array.aval().is_object() {
        "make it there"
    } else {
        "put it there with `device_put`"
    };
    Error::kernel(format!(
        "{value} is {found}, and not on its mesh {mesh}: {put}"
    ))
}

/// Returns true if the sharding includes every device of the mesh.
fn is_on(sharding: &Sharding, mesh: &Mesh) -> bool {
    mesh.devices()
        .iter()
        .all(|device| sharding.devices().contains(device))
}

/// Replaces the tuple index at the start of an error's path by the element's name in `inputs` or
/// `outputs`. Errors without a path stay unchanged.
fn in_words(mut error: Error, inputs: &[&str], outputs: &[&str]) -> Error {
    let Error::Issue(issue) = &mut error else {
        return error;
    };
    let Some(path) = issue.why.path_mut() else {
        return error;
    };

    let (names, place) = path
        .strip_prefix("output ")
        .map_or((inputs, path.as_str()), |place| (outputs, place));
    let (place, rest) = place.split_once('/').unwrap_or((place, ""));
    if let Some(name) = place.parse().ok().and_then(|place: usize| names.get(place)) {
        *path = format!("{name} {rest}").trim().to_owned();
    }
    error
}

impl BoundStage {
    pub(super) fn name(&self) -> &str {
        self.stage.name()
    }

    pub(super) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the sharding of the inputs on this stage's mesh.
    pub(super) fn input(&self) -> &Sharding {
        &self.input
    }

    /// Returns the sharding of the outputs and of their gradients.
    pub(super) fn output(&self) -> &Sharding {
        &self.output
    }

    /// Returns the paths of all parameters, in leaf order, including those that other stages store.
    pub(super) fn paths(&self) -> Vec<String> {
        self.structure.paths()
    }

    /// Returns the leaf indices of the parameters that this stage stores. Tied parameters stored by
    /// other stages are left out.
    pub(super) fn own(&self) -> Vec<usize> {
        (0..self.params.len())
            .filter(|place| self.params[*place].is_some())
            .collect()
    }

    /// Returns the stored array of the parameter at leaf index `place`, or `None` if another stage
    /// stores it.
    pub(super) fn param(&self, place: usize) -> Option<&MpmdArray> {
        self.params.get(place)?.as_ref()
    }

    /// Returns the arrays of the parameters that this stage stores, in leaf order.
    pub(super) fn params(&self) -> Vec<MpmdArray> {
        self.params.iter().flatten().cloned().collect()
    }

    pub(super) fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()> {
        let own = self.own();
        if own.len() != params.len() {
            let own = own.len();
            let found = params.len();
            let problem = format!(
                "{found} arrays for the {own} parameters that it stores: give one for each, in \
                 leaf order"
            );
            return Err(Error::kernel(problem));
        }
        let elsewhere = |param: &MpmdArray| {
            param
                .sharding()
                .is_some_and(|sharding| !is_on(sharding, &self.mesh))
        };
        if let Some(index) = params.iter().position(elsewhere) {
            return Err(param_not_here(
                &self.paths()[own[index]],
                &params[index],
                &self.mesh,
            ));
        }

        // Kernels are compiled for shapes and shardings, not for values.
        let mut differ = false;
        for (place, param) in own.into_iter().zip(params) {
            let known = &mut self.places[place];
            if known.aval != *param.aval() {
                known.aval = param.aval().clone();
                differ = true;
            }
            if let Some(sharding) = param.sharding()
                && known.sharding != *sharding
            {
                known.sharding = sharding.clone();
                differ = true;
            }
            self.params[place] = Some(param);
        }

        self.gathered = None;
        self.prepared.set_stale(true);
        if differ { self.forget_shapes() } else { Ok(()) }
    }

    /// Returns the shape and sharding of the parameter at leaf index `place`. The sharding is the
    /// stored one if this stage stores the parameter.
    pub(super) fn place(&self, place: usize) -> &ParamPlace {
        &self.places[place]
    }

    /// Drops this stage's copy of the parameter at leaf index `place`, because another stage stores
    /// it from now on. With `frozen`, the parameter is no longer trained.
    pub(super) fn give_up(&mut self, place: usize, frozen: bool) -> Result<()> {
        self.params[place] = None;
        if frozen && !self.frozen[place] {
            self.frozen[place] = true;
            self.stage.freeze(&self.structure.paths()[place]);
        }
        self.forget_shapes()
    }

    /// Returns, for each parameter in leaf order, true if it is not trained.
    pub(super) fn frozen(&self) -> &[bool] {
        &self.frozen
    }

    /// Sets whether the backward passes compute the gradient of the stage's input. Drops the
    /// kernels if this changes.
    pub(super) fn set_needs_dx(&mut self, yes: bool) {
        if self.needs_dx != yes {
            self.needs_dx = yes;
            self.kernels.clear();
        }
    }

    /// Returns true if the passes need a random key in training.
    pub(super) fn draws_random(&self) -> bool {
        self.stage.draws_random()
    }

    /// Returns whether the working form of the parameters is missing, outdated or up to date.
    pub(super) fn freshness(&self) -> Freshness {
        self.prepared.freshness()
    }

    /// Sets whether the values of the parameters have changed since the last call of `prepare`.
    pub(super) fn set_stale(&mut self, stale: bool) {
        self.prepared.set_stale(stale);
    }

    /// Creates or updates the working form of the parameters. The parameters must have been
    /// gathered before.
    pub(super) fn prepare(&mut self, program: &mut Program) -> Result<()> {
        let leaves = self.for_kernels().cloned().collect();
        let params = ErasedTree {
            structure: self.structure.clone(),
            leaves,
        };
        let updated = self
            .prepared
            .update(program, &self.stage, &self.mesh, params);
        updated.map_err(|error| in_words(error, &["parameter", "prepared"], &["prepared"]))
    }

    /// Calls the stage's `probe` for inputs of these shapes. `index` is the stage's index in the
    /// pipeline.
    pub(super) fn probe(
        &self,
        program: &mut Program,
        index: usize,
        x: &ErasedTree<ShapedArray>,
        side: &ErasedTree<ShapedArray>,
    ) -> Result<()> {
        let gradients: Vec<Sharding> = self
            .gradients()
            .into_iter()
            .map(|gradient| gradient.sharding)
            .collect();

        let at = ErasedProbe {
            mesh: &self.mesh,
            params: self.param_shapes(),
            shardings: &self.compute(),
            gradients: &gradients,
            x: x.clone(),
            side: side.clone(),
            needs_dx: self.needs_dx,
            stage: index,
        };
        self.stage.probe(program, at)
    }

    /// Returns an error if the stage does not take a side input of this structure. `None` stands
    /// for a microbatch without side input.
    pub(super) fn check_side(&self, side: Option<&Structure>) -> Result<(), TreeError> {
        self.stage
            .side()
            .check(side.unwrap_or(&Structure::sequence([])))
    }

    /// Sets the object that every pass of the stage can change; it must be on the stage's mesh.
    /// Drops the working form, because a failed pass may have lost it.
    pub(super) fn set_state(&mut self, state: &MpmdArray) -> Result<()> {
        if !state
            .sharding()
            .is_some_and(|sharding| is_on(sharding, &self.mesh))
        {
            return Err(not_here("its state", state, &self.mesh));
        }
        self.state = Some(state.clone());
        self.prepared.forget();
        Ok(())
    }

    pub(super) fn passes(&self) -> Passes {
        self.stage.passes()
    }

    /// Returns true if the passes compute in host memory whatever the kind of their devices.
    pub(super) fn computes_on_host(&self) -> bool {
        self.stage.computes_on_host()
    }

    /// Sets the dtype that the passes compute in.
    pub(super) fn compute_in(&mut self, dtype: DType) -> Result<()> {
        self.stage.compute_in(dtype)?;
        self.computes_in = Some(dtype);
        self.forget_shapes()
    }

    /// Sets the shardings in which kernels compute with the parameters. The arrays stay stored as
    /// they are.
    pub(super) fn store(&mut self, storage: ParamSharding) -> Result<()> {
        let avals = self.places.iter().map(|place| &place.aval);
        let params: Vec<NamedShape<'_>> = self
            .paths()
            .into_iter()
            .zip(avals)
            .map(|(path, aval)| NamedShape { path, aval })
            .collect();
        storage.check(&params, &self.mesh)?;
        self.storage = Some(storage);
        self.forget_shapes()
    }

    /// Returns true if the parameters are available in the shardings that kernels compute with.
    pub(super) fn is_gathered(&self) -> bool {
        self.gathered.is_some()
            || (self.storage.is_none() && self.params.iter().all(Option::is_some))
    }

    /// Transfers the parameters to the shardings that kernels compute with. The copies stay until
    /// `release`. `tied` has the parameters that other stages store.
    pub(super) fn gather(&mut self, program: &mut Program, tied: Vec<TiedParam>) -> Result<()> {
        let mut params = self.params.clone();
        for TiedParam { place, array } in tied {
            params[place] = Some(array);
        }

        let params: Vec<MpmdArray> = params.into_iter().flatten().collect();
        let compute = self.compute();
        self.gathered = Some(put_each(program, params, |place| &compute[place])?);
        Ok(())
    }

    pub(super) fn release(&mut self) {
        self.gathered = None;
    }

    /// Issues the forward pass of a microbatch. `key` is its random key, if the stage draws random
    /// numbers.
    pub(super) fn forward(
        &mut self,
        program: &mut Program,
        x: &ErasedTree,
        side: &ErasedTree,
        mut mode: Mode,
        key: Option<MpmdArray>,
    ) -> Result<Forwarded> {
        let index = self.kernels(program, x, side)?;
        let keeps_inputs = self.kernels[index].keeps_inputs;
        if mode == Mode::Recomputed && keeps_inputs {
            // Without residuals nothing is computed again.
            mode = Mode::Training;
        }
        let kernel = self.forward_kernel(program, index, mode)?;

        let extras = self.extras(key);
        let branches = [
            &self.structure,
            &x.structure,
            &side.structure,
            &extras.structure(),
        ];
        let arrays = self.for_kernels().chain(&x.leaves).chain(&side.leaves);
        let leaves: Vec<&MpmdArray> = arrays.chain(extras.leaves()).collect();

        let jit = &self.kernels[index].forward[kernel].jit;
        let y = ErasedTree::called(jit, program, branches, &leaves).map_err(|error| {
            in_words(
                error,
                &["parameter", "input", "side input", ""],
                &["output", "residual"],
            )
        })?;
        let [y, residual] = y.into_branches().ok_or_else(no_kernel)?;
        let residual = (!keeps_inputs).then_some(residual);
        Ok(Forwarded {
            y,
            residual,
            kernels: index,
        })
    }

    /// Issues the pass that computes the input gradient. With `fused`, the same kernel adds the
    /// gradients of the parameters to `so_far`.
    pub(super) fn backward(
        &mut self,
        program: &mut Program,
        pass: &PassData,
        residual: ErasedTree,
        dy: ErasedTree,
        fused: Option<SoFar>,
    ) -> Result<BackwardOutput> {
        let kernels = self.bound(pass.kernels)?;
        let jit = match &fused {
            None => kernels.split.as_ref().map(|split| &split.input),
            Some(so_far) => kernels
                .fused
                .as_ref()
                .map(|fused| &fused[usize::from(so_far.is_some())]),
        };

        let so_far = fused.flatten().unwrap_or_else(ErasedTree::absent);
        let extras = self.extras(pass.key.clone());
        let [residuals, dys, sums] = [&residual, &dy, &so_far].map(|tree| &tree.structure);
        let branches = [&self.structure, residuals, dys, sums, &extras.structure()];
        let arrays = self.for_kernels().chain(&residual.leaves).chain(&dy.leaves);
        let leaves: Vec<&MpmdArray> = arrays
            .chain(&so_far.leaves)
            .chain(extras.leaves())
            .collect();

        let y = ErasedTree::called(jit.ok_or_else(no_kernel)?, program, branches, &leaves)
            .map_err(|error| in_words(error, &BACKWARD_INPUTS, &BACKWARD_OUTPUTS))?;
        let [dx, weight_residual, gradient] = y.into_branches().ok_or_else(no_kernel)?;
        Ok(BackwardOutput {
            dx: dx.present(),
            weight_residual,
            gradient: gradient.present(),
        })
    }

    /// Issues the pass that computes the weight gradient of one microbatch. Returns `so_far` plus
    /// that gradient.
    pub(super) fn backward_weight(
        &mut self,
        program: &mut Program,
        pass: &PassData,
        weight_residual: ErasedTree,
        so_far: SoFar,
    ) -> Result<ErasedTree> {
        let kernels = self.bound(pass.kernels)?;
        let split = kernels.split.as_ref().ok_or_else(no_kernel)?;
        let jit = &split.weight[usize::from(so_far.is_some())];

        let so_far = so_far.unwrap_or_else(ErasedTree::absent);
        let extras = self.extras(pass.key.clone());
        let branches = [
            &weight_residual.structure,
            &so_far.structure,
            &extras.structure(),
        ];
        let arrays = weight_residual.leaves.iter().chain(&so_far.leaves);
        let leaves: Vec<&MpmdArray> = arrays.chain(extras.leaves()).collect();

        let inputs = ["weight residual", "gradient so far", ""];
        ErasedTree::called(jit, program, branches, &leaves)
            .map_err(|error| in_words(error, &inputs, &[]))
    }
}
