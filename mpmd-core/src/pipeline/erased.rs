//! A stage bound to its mesh, with its type erased. The runner drives stages through the trait
//! `AnyStage`.

use std::sync::Arc;

use super::bundle::Bundle;
use super::kernels::{Backward, BackwardWeight, Forward, Inferred};
use super::param_sharding::{ParamSharding, put_each};
use super::shapes::StageShapes;
use super::stage::{Passes, PlacedShape, SideShapes, Stage, StageSignature};
use crate::api::jit::{Jit, JitBuilder};
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Kernel, Shapes};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};

/// The number of leaves of a tree of shapes that an error lists. The error only counts further
/// ones.
const LISTED: usize = 4;

/// Names for the elements of the input tuple of the input gradient's pass.
const BACKWARD_INPUTS: [&str; 5] =
    ["parameter", "residual", "output gradient", "gradient so far", "state"];

/// Names for the elements of its output tuple.
const BACKWARD_OUTPUTS: [&str; 3] = ["input gradient", "weight residual", "gradient"];

/// The results of a forward pass.
pub(super) struct Forwarded {
    pub(super) y: Bundle,
    /// The declared residuals; `None` if the stage keeps its inputs and side inputs instead.
    pub(super) residual: Option<Bundle>,
    /// Index of the kernel set for these shapes.
    pub(super) kernels: usize,
}

/// The results of a pass that computes the input gradient.
pub(super) struct BackwardOutput {
    /// The gradient of the input; `None` on the first stage.
    pub(super) dx: Option<Bundle>,
    pub(super) weight_residual: Bundle,
    /// The gradients of the parameters, if the pass is fused.
    pub(super) gradient: Option<Bundle>,
}

/// A stage with its type erased, as the runner sees it.
pub(super) trait AnyStage: Send {
    fn name(&self) -> &str;
    fn mesh(&self) -> &Mesh;
    /// The sharding of the inputs on this stage's mesh.
    fn input(&self) -> &Sharding;
    /// The sharding of the outputs and of their gradients.
    fn output(&self) -> &Sharding;
    /// Returns the paths of all parameters, in leaf order, including those that other stages store.
    fn paths(&self) -> Vec<String>;
    fn has_params(&self) -> bool;
    /// Returns the indices of the parameters that the stage stores itself.
    fn own(&self) -> Vec<usize>;
    /// Returns the parameter at leaf index `place` as it is stored, or `None` if another stage
    /// stores it.
    fn param(&self, place: usize) -> Option<&MpmdArray>;
    /// Returns all parameters that the stage stores itself, in leaf order.
    fn params(&self) -> Vec<MpmdArray>;
    fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()>;
    /// Returns the shape and sharding of the parameter at leaf index `place`. The sharding is the
    /// stored one if this stage stores the parameter.
    fn place(&self, place: usize) -> &ParamPlace;
    /// Drops the parameter at leaf index `place`: another stage stores it from now on.
    fn give_up(&mut self, place: usize);
    /// Returns an error if the stage does not take a side input of this structure. `None` stands
    /// for a microbatch without side input.
    fn check_side(&self, side: Option<&Structure>) -> Result<(), TreeError>;
    /// Returns the shapes of all arrays of the stage for inputs `x` and side inputs `side` of these
    /// shapes.
    fn shapes(&self, x: &Bundle<ShapedArray>, side: &Bundle<ShapedArray>) -> Result<StageShapes>;
    /// Sets the object that every pass of the stage has. It must be on the stage's mesh.
    fn set_state(&mut self, state: &MpmdArray) -> Result<()>;
    fn passes(&self) -> Passes;
    /// Sets the shardings in which kernels compute with the parameters. The arrays stay stored as
    /// they are.
    fn store(&mut self, storage: ParamSharding) -> Result<()>;
    /// Returns true if the parameters are available in the shardings that kernels compute with.
    fn is_gathered(&self) -> bool;
    /// Transfers the parameters to the shardings that kernels compute with. The copies stay until
    /// `release`. `tied` are (leaf index, array) of the parameters that other stages store.
    fn gather(&mut self, program: &mut Program, tied: Vec<(usize, MpmdArray)>) -> Result<()>;
    fn release(&mut self);
    fn forward(&mut self, program: &mut Program, x: Bundle, side: Bundle) -> Result<Forwarded>;
    /// Runs the input gradient. With `fused`, the same kernel computes the gradients of the
    /// parameters, and adds them to those so far. `kernels` is the index that the forward pass
    /// returned.
    fn backward(
        &mut self,
        program: &mut Program,
        kernels: usize,
        residual_and_dy: (Bundle, Bundle),
        fused: Option<SoFar>,
    ) -> Result<BackwardOutput>;
    /// Runs the weight gradient. Returns `so_far` plus the gradients of this microbatch.
    fn backward_weight(
        &mut self,
        program: &mut Program,
        kernels: usize,
        weight_residual: Bundle,
        so_far: SoFar,
    ) -> Result<Bundle>;
    /// Returns true if one kernel computes both gradients of a combined backward action.
    fn fuses(&self) -> bool;
}

/// Gradients of a stage's parameters so far; `None` before the first microbatch.
pub(super) type SoFar = Option<Bundle>;

/// Shape and sharding of a parameter.
pub(super) struct ParamPlace {
    pub(super) aval: ShapedArray,
    pub(super) sharding: Sharding,
}

/// A stage on a mesh.
pub(super) struct ErasedStage<S: Stage> {
    stage: Arc<S>,
    mesh: Mesh,
    input: Sharding,
    output: Sharding,
    structure: Structure,
    places: Vec<ParamPlace>,
    /// Parameters as stored, in leaf order; `None` if another stage stores the parameter.
    params: Vec<Option<MpmdArray>>,
    /// Shardings that kernels compute with; `None` if they equal the stored ones.
    storage: Option<ParamSharding>,
    /// Parameters in the shardings that kernels compute with, from `gather` to `release`.
    gathered: Option<Vec<MpmdArray>>,
    first: bool,
    /// The object that every pass of the stage has.
    state: Option<MpmdArray>,
    /// One kernel set for each shape of microbatches, built when the first microbatch of that shape
    /// comes. Shapes of residuals are known only then.
    kernels: Vec<Kernels<S>>,
}

struct Kernels<S: Stage> {
    avals: Vec<ShapedArray>,
    keeps_inputs: bool,
    forward: Jit<Forward<S>>,
    /// The kernels of the separate gradients, if the stage splits them.
    split: Option<Split<S>>,
    /// The kernels of both gradients, if the stage fuses them: for the first microbatch, and for
    /// later ones.
    fused: Option<[Jit<Backward<S>>; 2]>,
}

struct Split<S: Stage> {
    input: Jit<Backward<S>>,
    /// The kernels of the weight gradient: for the first microbatch, and for later ones.
    weight: [Jit<BackwardWeight<S>>; 2],
}

/// Returns the error for a pass that the schedule has and the stage has no kernel for.
fn no_kernel() -> Error {
    Error::kernel("there is no kernel for this backward pass")
}

impl<S: Stage> ErasedStage<S> {
    pub(super) fn new(stage: S, mesh: &Mesh, params: S::Params, first: bool) -> Result<Self> {
        let mut places = Vec::new();
        for (path, param) in params.leaves_with_paths() {
            let here = param.sharding().filter(|sharding| is_on(sharding, mesh));
            let Some(sharding) = here else { return Err(param_not_here(&path, param, mesh)) };
            places.push(ParamPlace { aval: param.aval().clone(), sharding: sharding.clone() });
        }
        Ok(Self {
            mesh: mesh.clone(),
            input: mesh.sharding(stage.input_spec()),
            output: mesh.sharding(stage.output_spec()),
            stage: Arc::new(stage),
            structure: params.structure(),
            places,
            params: params.into_leaves().into_iter().map(Some).collect(),
            storage: None,
            gathered: None,
            first,
            state: None,
            kernels: Vec::new(),
        })
    }

    /// Returns the index of the kernel set for microbatches of these shapes, and builds it if it is
    /// new.
    fn kernels(&mut self, program: &Program, x: &S::In, side: &Bundle) -> Result<usize> {
        let leaves = || x.leaves().into_iter().chain(side.leaves());
        let known = |kernels: &Kernels<S>| leaves().map(MpmdArray::aval).eq(&kernels.avals);
        if let Some(known) = self.kernels.iter().position(known) {
            return Ok(known);
        }
        let kernels =
            self.bind(program, x, side, leaves().map(|leaf| leaf.aval().clone()).collect())?;
        self.kernels.push(kernels);
        Ok(self.kernels.len() - 1)
    }

    fn param_shapes(&self) -> Result<Shapes<S::Params>> {
        let avals = self.places.iter().map(|place| place.aval.clone());
        Ok(Shapes::<S::Params>::from_leaves(&self.structure, avals)?)
    }

    /// Returns the stage's declaration for these shapes. An error of the stage gets the shapes in
    /// its text.
    fn infer(
        &self,
        params: &Shapes<S::Params>,
        x: &Shapes<S::In>,
        side: Bundle<ShapedArray>,
    ) -> Result<StageSignature<Shapes<S::Out>>> {
        let side = SideShapes(side);
        let signature = self.stage.infer(params, x, &side).map_err(|why| {
            let (params, x, side) = (listed(params), listed(x), listed(&side.0));
            let given = format!("parameters ({params}), input ({x}), side input ({side})");
            Error::kernel(format!("its `infer` refuses {given}: {why}"))
        })?;
        let Some(residual) = &signature.residual else {
            return match signature.keeps.first() {
                None => Ok(signature),
                Some((kept, _)) => Err(Error::kernel(format!(
                    "its `infer` keeps residual {kept:?}, and declares no residuals: call \
                     `.residual(…)`"
                ))),
            };
        };
        let kept = |path: &str| {
            let leaves = residual.leaves_with_paths();
            leaves.iter().any(|(leaf, placed)| leaf == path && placed.aval.is_object())
        };
        if let Some((path, _)) = signature.keeps.iter().find(|(path, _)| kept(path)) {
            return Err(Error::kernel(format!(
                "its `infer` keeps the object {path:?}: take it from the residual, and put it into \
                 the weight residual"
            )));
        }
        Ok(signature)
    }

    /// Returns the stored sharding of each parameter, including those that other stages store.
    fn stored(&self) -> Vec<Sharding> {
        self.places.iter().map(|place| place.sharding.clone()).collect()
    }

    fn bind(
        &self,
        program: &Program,
        x: &S::In,
        side: &Bundle,
        avals: Vec<ShapedArray>,
    ) -> Result<Kernels<S>> {
        let params = self.param_shapes()?;
        let x: Shapes<S::In> = x.map_ref(&mut |leaf| leaf.aval().clone());
        let signature = self.infer(&params, &x, side.map_ref(&mut |leaf| leaf.aval().clone()))?;
        let keeps_inputs = signature.residual.is_none();
        let residual = signature.residual.unwrap_or_else(Bundle::empty);
        let places: Vec<Sharding> = match &self.storage {
            Some(storage) => storage.gradients().to_vec(),
            None => self.stored(),
        };
        let gradient =
            PrefixTree::of(&Bundle { structure: self.structure.clone(), leaves: places });
        let [input, output] = [&self.input, &self.output].map(PrefixTree::from);
        let weight_residual = self.shardings(&signature.weight_residual);
        let forward_outputs = PrefixTree::from((output, self.shardings(&residual)));
        let nothing = || PrefixTree::Node(Vec::new());
        let inferred = Arc::new(Inferred {
            params: Bundle::of(params),
            x: Bundle::of(x),
            keeps_inputs,
            weight_residual: signature.weight_residual,
            keeps: signature.keeps,
            backward_input: signature.backward_input,
        });
        let (stage, mesh) = (&self.stage, &self.mesh);
        // Each pass is the last reader of the residuals of the pass before, so it takes them as
        // donations. Inputs that are kept may have other readers.
        let backward = |fused, outputs| {
            let (stage, inferred) = (stage.clone(), inferred.clone());
            let kernel = Backward { stage, inferred, first: self.first, fused };
            donate(program.jit(kernel).on(mesh).outputs(outputs), 1, &residual)
        };
        let split = || {
            let outputs = PrefixTree::from((input.clone(), weight_residual.clone(), nothing()));
            backward(false, outputs)
        };
        let fused = || {
            let outputs = PrefixTree::from((input.clone(), nothing(), gradient.clone()));
            backward(true, outputs)
        };
        let weight = || {
            let kernel = BackwardWeight(stage.clone(), inferred.clone());
            let jit = program.jit(kernel).on(mesh).outputs(gradient.clone());
            donate(jit, 0, &inferred.weight_residual)
        };
        Ok(Kernels {
            avals,
            keeps_inputs,
            forward: program
                .jit(Forward(stage.clone()))
                .on(mesh)
                .outputs(forward_outputs)
                .build()?,
            split: match stage.passes() {
                Passes::Fused => None,
                Passes::Split | Passes::Both => Some(Split {
                    input: split().build()?,
                    weight: [weight().build()?, weight().donate("1").partial_sums("1").build()?],
                }),
            },
            fused: match self.fuses() {
                false => None,
                true => Some([fused().build()?, fused().donate("3").partial_sums("3").build()?]),
            },
        })
    }

    fn shardings(&self, placed: &Bundle<PlacedShape>) -> PrefixTree<Sharding> {
        PrefixTree::of(&placed.map_ref(&mut |leaf| leaf.sharding(&self.mesh)))
    }

    /// Returns the parameters in the shardings that kernels compute with.
    fn for_kernels(&self) -> Result<S::Params> {
        let leaves: Vec<MpmdArray> = match &self.gathered {
            Some(gathered) => gathered.clone(),
            None => self.params.iter().flatten().cloned().collect(),
        };
        Ok(S::Params::from_leaves(&self.structure, leaves)?)
    }

    fn bound(&self, kernels: usize) -> Result<&Kernels<S>> {
        self.kernels
            .get(kernels)
            .ok_or_else(|| Error::kernel("a backward pass before any forward pass"))
    }
}

/// Returns the error for a parameter that is not on all devices of its stage's mesh.
fn param_not_here(path: &str, param: &MpmdArray, mesh: &Mesh) -> Error {
    let value =
        if path.is_empty() { "its parameter".to_owned() } else { format!("parameter {path:?}") };
    not_here(&value, param, mesh)
}

/// Returns the error for an array, called `value`, that is not on all devices of the mesh.
fn not_here(value: &str, array: &MpmdArray, mesh: &Mesh) -> Error {
    let found = array.sharding().map_or_else(|| "host values".to_owned(), ToString::to_string);
    let put =
        if array.aval().is_object() { "make it there" } else { "put it there with `device_put`" };
    Error::kernel(format!("{value} is {found}, and not on its mesh {mesh}: {put}"))
}

/// Returns true if the sharding includes every device of the mesh.
fn is_on(sharding: &Sharding, mesh: &Mesh) -> bool {
    mesh.devices().iter().all(|device| sharding.devices().contains(device))
}

/// Lists the first leaves of a tree of shapes in words, with their paths.
fn listed(tree: &impl Tree<Leaf = ShapedArray>) -> String {
    let leaves = tree.leaves_with_paths();
    let shown = leaves.iter().take(LISTED).map(|(path, aval)| match path.is_empty() {
        true => aval.to_string(),
        false => format!("{path}: {aval}"),
    });
    let mut shown: Vec<String> = shown.collect();
    if let rest @ 1.. = leaves.len().saturating_sub(LISTED) {
        shown.push(format!("and {rest} more"));
    }
    shown.join(", ")
}

/// Replaces the tuple index at the beginning of an error's path by the name of the element. Other
/// errors stay unchanged.
fn in_words(mut error: Error, inputs: &[&str], outputs: &[&str]) -> Error {
    let Error::Issue(issue) = &mut error else { return error };
    let Some(path) = issue.why.path_mut() else { return error };
    let (names, place) =
        path.strip_prefix("output ").map_or((inputs, path.as_str()), |place| (outputs, place));
    let (place, rest) = place.split_once('/').unwrap_or((place, ""));
    if let Some(name) = place.parse().ok().and_then(|place: usize| names.get(place)) {
        *path = format!("{name} {rest}").trim_end().to_owned();
    }
    error
}

/// Donates residuals, which are the input `input` of the kernel, if there are any.
fn donate<K: Kernel>(
    jit: JitBuilder<K>,
    input: usize,
    residual: &Bundle<PlacedShape>,
) -> JitBuilder<K> {
    if residual.leaves.is_empty() { jit } else { jit.donate(input.to_string()) }
}

impl<S: Stage> AnyStage for ErasedStage<S> {
    fn name(&self) -> &str {
        self.stage.name()
    }

    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn input(&self) -> &Sharding {
        &self.input
    }

    fn output(&self) -> &Sharding {
        &self.output
    }

    fn paths(&self) -> Vec<String> {
        self.structure.paths()
    }

    fn has_params(&self) -> bool {
        self.structure.leaves() > 0
    }

    fn own(&self) -> Vec<usize> {
        (0..self.params.len()).filter(|place| self.params[*place].is_some()).collect()
    }

    fn param(&self, place: usize) -> Option<&MpmdArray> {
        self.params.get(place)?.as_ref()
    }

    fn params(&self) -> Vec<MpmdArray> {
        self.params.iter().flatten().cloned().collect()
    }

    fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()> {
        let own = self.own();
        if own.len() != params.len() {
            let (own, found) = (own.len(), params.len());
            let problem = format!(
                "{found} arrays for the {own} parameters that it stores: give one for each, in \
                 leaf order"
            );
            return Err(Error::kernel(problem));
        }
        let elsewhere = |param: &MpmdArray| {
            param.sharding().is_some_and(|sharding| !is_on(sharding, &self.mesh))
        };
        if let Some(index) = params.iter().position(elsewhere) {
            return Err(param_not_here(&self.paths()[own[index]], &params[index], &self.mesh));
        }
        for (place, param) in own.into_iter().zip(params) {
            let known = &mut self.places[place];
            if known.aval != *param.aval() {
                known.aval = param.aval().clone();
                self.kernels.clear();
            }
            if let Some(sharding) = param.sharding()
                && known.sharding != *sharding
            {
                known.sharding = sharding.clone();
                self.kernels.clear();
            }
            self.params[place] = Some(param);
        }
        self.gathered = None;
        Ok(())
    }

    fn place(&self, place: usize) -> &ParamPlace {
        &self.places[place]
    }

    fn give_up(&mut self, place: usize) {
        (self.params[place], self.gathered) = (None, None);
    }

    fn check_side(&self, side: Option<&Structure>) -> Result<(), TreeError> {
        self.stage.side().check(side.unwrap_or(&Structure::sequence([])))
    }

    fn set_state(&mut self, state: &MpmdArray) -> Result<()> {
        if !state.sharding().is_some_and(|sharding| is_on(sharding, &self.mesh)) {
            return Err(not_here("its state", state, &self.mesh));
        }
        self.state = Some(state.clone());
        Ok(())
    }

    fn passes(&self) -> Passes {
        self.stage.passes()
    }

    fn shapes(&self, x: &Bundle<ShapedArray>, side: &Bundle<ShapedArray>) -> Result<StageShapes> {
        let params = self.param_shapes()?;
        let signature = self.infer(&params, &x.clone().into_tree("input")?, side.clone())?;
        let keeps_inputs = signature.residual.is_none();
        let residual = signature.residual.unwrap_or_else(Bundle::empty);
        let stored = self.stored();
        let (compute, gradients) = match &self.storage {
            Some(storage) => (storage.compute(), storage.gradients()),
            None => (&stored[..], &stored[..]),
        };
        let params: Vec<_> = params.leaves().into_iter().cloned().collect();
        let all = |to: &[Sharding]| params.iter().cloned().zip(to.iter().cloned()).collect();
        let placed = |leaf: &PlacedShape| leaf.counted(&self.mesh);
        let kept = residual.leaves_with_paths().into_iter();
        let kept =
            kept.filter(|(path, _)| signature.keeps.iter().any(|(residual, _)| residual == path));
        Ok(StageShapes {
            mesh: self.mesh.clone(),
            params: all(&stored),
            own: self.own(),
            compute: all(compute),
            gradients: all(gradients),
            fuses: self.fuses(),
            keeps_inputs,
            input: x.leaves.iter().map(|aval| (aval.clone(), self.input.clone())).collect(),
            output: signature
                .out
                .leaves()
                .into_iter()
                .map(|aval| (aval.clone(), self.output.clone()))
                .collect(),
            kept_residual: kept.map(|(_, leaf)| placed(leaf)).collect(),
            residual: residual.leaves.iter().map(placed).collect(),
            weight_residual: signature.weight_residual.leaves.iter().map(placed).collect(),
            out: Bundle::of(signature.out),
        })
    }

    fn store(&mut self, storage: ParamSharding) -> Result<()> {
        let avals: Vec<(String, &ShapedArray)> =
            self.paths().into_iter().zip(self.places.iter().map(|place| &place.aval)).collect();
        storage.check(&avals, &self.mesh)?;
        (self.storage, self.gathered) = (Some(storage), None);
        self.kernels.clear();
        Ok(())
    }

    fn is_gathered(&self) -> bool {
        self.gathered.is_some()
            || (self.storage.is_none() && self.params.iter().all(Option::is_some))
    }

    fn gather(&mut self, program: &mut Program, tied: Vec<(usize, MpmdArray)>) -> Result<()> {
        let mut params = self.params.clone();
        tied.into_iter().for_each(|(place, param)| params[place] = Some(param));
        let params: Vec<MpmdArray> = params.into_iter().flatten().collect();
        let stored = self.stored();
        let compute = self.storage.as_ref().map_or(&stored[..], ParamSharding::compute);
        self.gathered = Some(put_each(program, params, compute)?);
        Ok(())
    }

    fn release(&mut self) {
        self.gathered = None;
    }

    fn forward(&mut self, program: &mut Program, x: Bundle, side: Bundle) -> Result<Forwarded> {
        let x: S::In = x.into_tree("input")?;
        let params: S::Params = self.for_kernels()?;
        let index = self.kernels(program, &x, &side)?;
        let kernels = self.bound(index)?;
        let y = kernels.forward.call(program, (params, x, side, self.state.clone()));
        let (y, residual) = y.map_err(|error| {
            in_words(error, &["parameter", "input", "side input", "state"], &["output", "residual"])
        })?;
        let residual = (!kernels.keeps_inputs).then_some(residual);
        Ok(Forwarded { y: Bundle::of(y), residual, kernels: index })
    }

    fn backward(
        &mut self,
        program: &mut Program,
        kernels: usize,
        (residual, dy): (Bundle, Bundle),
        fused: Option<SoFar>,
    ) -> Result<BackwardOutput> {
        let params: S::Params = self.for_kernels()?;
        let kernels = self.bound(kernels)?;
        let jit = match &fused {
            None => kernels.split.as_ref().map(|split| &split.input),
            Some(so_far) => {
                kernels.fused.as_ref().map(|fused| &fused[usize::from(so_far.is_some())])
            }
        };
        let so_far = fused.flatten().map(|so_far| so_far.into_tree("gradient")).transpose()?;
        let dy = dy.into_tree("output gradient")?;
        let inputs = (params, residual, dy, so_far, self.state.clone());
        let y = jit.ok_or_else(no_kernel)?.call(program, inputs);
        let (dx, weight_residual, gradient) =
            y.map_err(|error| in_words(error, &BACKWARD_INPUTS, &BACKWARD_OUTPUTS))?;
        let (dx, gradient) = (dx.map(Bundle::of), gradient.map(Bundle::of));
        Ok(BackwardOutput { dx, weight_residual, gradient })
    }

    fn backward_weight(
        &mut self,
        program: &mut Program,
        kernels: usize,
        weight_residual: Bundle,
        so_far: SoFar,
    ) -> Result<Bundle> {
        let split = self.bound(kernels)?.split.as_ref().ok_or_else(no_kernel)?;
        let jit = &split.weight[usize::from(so_far.is_some())];
        let so_far = so_far.map(|so_far| so_far.into_tree("gradient")).transpose()?;
        let gradient = jit.call(program, (weight_residual, so_far, self.state.clone()));
        let inputs = ["weight residual", "gradient so far", "state"];
        Ok(Bundle::of(gradient.map_err(|error| in_words(error, &inputs, &[]))?))
    }

    fn fuses(&self) -> bool {
        let partial = |storage: &ParamSharding| {
            storage.gradients().iter().any(|gradient| !gradient.unreduced_axes().is_empty())
        };
        match self.stage.passes() {
            Passes::Fused => true,
            Passes::Split => false,
            Passes::Both => !self.storage.as_ref().is_some_and(partial),
        }
    }
}
