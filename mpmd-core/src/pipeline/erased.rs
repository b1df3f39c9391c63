//! A stage bound to its mesh, with its type erased. The runner drives stages through the trait
//! `AnyStage`.

use std::sync::Arc;

use super::kernels::{
    AddBackwardWeight, BackwardFirst, BackwardInput, BackwardWeight, Flat, Forward, FusedBackward,
    Inferred,
};
use super::param_sharding::{ParamSharding, put_each};
use super::shapes::{ShapeBundle, StageShapes};
use super::stage::{Declared, PlacedShape, Stage};
use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::Shapes;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};

/// The number of leaves of a tree of shapes that an error lists. The error only counts further
/// ones.
const LISTED: usize = 4;

/// Names for the elements of the input tuple of the input gradient's pass.
const BACKWARD_INPUTS: [&str; 3] = ["parameter", "residual", "output gradient"];

/// A tree of arrays without its type. Only the stage knows the type.
#[derive(Clone)]
pub(super) struct Bundle {
    pub(super) structure: Structure,
    pub(super) leaves: Vec<MpmdArray>,
}

impl Bundle {
    pub(super) fn of<T: Tree<Leaf = MpmdArray>>(tree: T) -> Self {
        Self { structure: tree.structure(), leaves: tree.into_leaves() }
    }

    /// Returns the arrays as a tree of type `T`. An error calls the tree by the given name.
    pub(super) fn into_tree<T: Tree<Leaf = MpmdArray>>(self, value: &str) -> Result<T> {
        let wrong =
            |why| Error::kernel(format!("its {value} is not the tree that its type takes: {why}"));
        T::from_leaves(&self.structure, self.leaves).map_err(wrong)
    }

    /// Transfers all arrays to the sharding `to`. Arrays that have it already cost nothing.
    pub(super) fn put(self, program: &mut Program, to: &Sharding) -> Result<Self> {
        let to = vec![to.clone(); self.leaves.len()];
        Ok(Self { structure: self.structure, leaves: put_each(program, self.leaves, &to)? })
    }
}

/// Gradients of a stage: (of its input, `None` on the first stage; of its parameters).
pub(super) type Both = (Option<Bundle>, Bundle);

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
    fn shapes(&self, x: &ShapeBundle, side: &ShapeBundle) -> Result<StageShapes>;
    /// Sets the shardings in which kernels compute with the parameters. The arrays stay stored as
    /// they are.
    fn store(&mut self, storage: ParamSharding) -> Result<()>;
    /// Returns true if the parameters are available in the shardings that kernels compute with.
    fn is_gathered(&self) -> bool;
    /// Transfers the parameters to the shardings that kernels compute with. The copies stay until
    /// `release`. `tied` are (leaf index, array) of the parameters that other stages store.
    fn gather(&mut self, program: &mut Program, tied: Vec<(usize, MpmdArray)>) -> Result<()>;
    fn release(&mut self);
    /// Runs the forward pass. Returns (outputs, residuals, index of the kernel set for these
    /// shapes).
    fn forward(
        &mut self,
        program: &mut Program,
        x: Bundle,
        side: Bundle,
    ) -> Result<(Bundle, Bundle, usize)>;
    /// Runs the input gradient. Returns (input gradients, weight residuals); the first is `None` on
    /// the first stage.
    fn backward_input(
        &mut self,
        program: &mut Program,
        kernels: usize,
        residual: Bundle,
        dy: Bundle,
    ) -> Result<(Option<Bundle>, Bundle)>;
    /// Runs the weight gradient. Returns `so_far` plus the gradients of this microbatch. `kernels`
    /// is the index that the forward pass returned.
    fn backward_weight(
        &mut self,
        program: &mut Program,
        kernels: usize,
        weight_residual: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Bundle>;
    /// Returns true if one kernel computes both gradients of a combined backward action.
    fn fuses(&self) -> bool;
    /// Runs the kernel that computes both gradients. The gradients of the parameters are added to
    /// `so_far`.
    fn backward(
        &mut self,
        program: &mut Program,
        kernels: usize,
        residual: Bundle,
        dy: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Both>;
}

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
    /// The error for a missing side input; `None` if the stage needs none.
    needs_side: Option<TreeError>,
    /// One kernel set for each shape of microbatches, built when the first microbatch of that shape
    /// comes. Shapes of residuals are known only then.
    kernels: Vec<Kernels<S>>,
}

struct Kernels<S: Stage> {
    avals: Vec<ShapedArray>,
    forward: Jit<Forward<S>>,
    backward: Backward<S>,
    weight: Jit<BackwardWeight<S>>,
    add_weight: Jit<AddBackwardWeight<S>>,
    /// (for the first microbatch, for later ones), if the stage fuses its backward passes.
    fused: Option<[Jit<FusedBackward<S>>; 2]>,
}

enum Backward<S: Stage> {
    First(Jit<BackwardFirst<S>>),
    Later(Jit<BackwardInput<S>>),
}

impl<S: Stage> ErasedStage<S> {
    pub(super) fn new(stage: S, mesh: &Mesh, params: S::Params, first: bool) -> Result<Self> {
        let mut places = Vec::new();
        for (path, param) in params.leaves_with_paths() {
            let here = param.sharding().filter(|sharding| is_on(sharding, mesh));
            let Some(sharding) = here else { return Err(not_here(&path, param, mesh)) };
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
            needs_side: fits::<S::Side>(&Structure::sequence([])).err(),
            kernels: Vec::new(),
        })
    }

    /// Returns the index of the kernel set for microbatches of these shapes, and builds it if it is
    /// new.
    fn kernels(&mut self, program: &Program, x: &S::In, side: &S::Side) -> Result<usize> {
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
        side: &Shapes<S::Side>,
    ) -> Result<Declared<S>> {
        self.stage.infer(params, x, side).map_err(|why| {
            let (params, x, side) = (listed(params), listed(x), listed(side));
            let given = format!("parameters ({params}), input ({x}), side input ({side})");
            Error::kernel(format!("its `infer` refuses {given}: {why}"))
        })
    }

    /// Returns the stored sharding of each parameter, including those that other stages store.
    fn stored(&self) -> Vec<Sharding> {
        self.places.iter().map(|place| place.sharding.clone()).collect()
    }

    fn bind(
        &self,
        program: &Program,
        x: &S::In,
        side: &S::Side,
        avals: Vec<ShapedArray>,
    ) -> Result<Kernels<S>> {
        let params = self.param_shapes()?;
        let x: Shapes<S::In> = x.map_ref(&mut |leaf| leaf.aval().clone());
        let side: Shapes<S::Side> = side.map_ref(&mut |leaf| leaf.aval().clone());
        let signature = self.infer(&params, &x, &side)?;
        let residual = self.shardings(&signature.residual);
        let weight_residual = self.shardings(&signature.weight_residual);
        let places: Vec<Sharding> = match &self.storage {
            Some(storage) => storage.gradients().to_vec(),
            None => self.stored(),
        };
        let partial = places.iter().any(|place| !place.unreduced_axes().is_empty());
        let places = <S::Params as Tree>::With::<Sharding>::from_leaves(&self.structure, places)?;
        let gradient = PrefixTree::of(&places);
        // Each pass is the last reader of the residuals of the pass before, so it takes them as
        // donations.
        let residuals = donated(&signature.residual, "1");
        let weights = donated(&signature.weight_residual, "");
        let inferred = Arc::new(Inferred {
            params: Flat::of(&params),
            x: Flat::of(&x),
            weight_residual: Flat::of_placed(&signature.weight_residual),
            keeps: signature.keeps,
            backward_input: signature.backward_input,
        });
        let [input, output] = [&self.input, &self.output].map(PrefixTree::from);
        let pair = |first: &PrefixTree<Sharding>, second: &PrefixTree<Sharding>| {
            PrefixTree::Node(vec![
                ("0".to_owned(), first.clone()),
                ("1".to_owned(), second.clone()),
            ])
        };
        let (stage, mesh) = (&self.stage, &self.mesh);
        let forward = program
            .jit(Forward(stage.clone()))
            .on(mesh)
            .outputs(pair(&output, &residual))
            .build()?;
        let backward = if self.first {
            let jit = program.jit(BackwardFirst(stage.clone(), inferred.clone()));
            let jit = jit.on(mesh).outputs(weight_residual.clone());
            Backward::First(residuals.iter().fold(jit, |jit, path| jit.donate(*path)).build()?)
        } else {
            let jit = program.jit(BackwardInput(stage.clone(), inferred.clone()));
            let jit = jit.on(mesh).outputs(pair(&input, &weight_residual));
            Backward::Later(residuals.iter().fold(jit, |jit, path| jit.donate(*path)).build()?)
        };
        let fused = if self.fuses() {
            let fused = || {
                let kernel = FusedBackward {
                    stage: stage.clone(),
                    inferred: inferred.clone(),
                    first: self.first,
                };
                let jit = program.jit(kernel).on(mesh).outputs(pair(&input, &gradient));
                residuals.iter().fold(jit, |jit, path| jit.donate(*path))
            };
            Some([fused().build()?, fused().donate("3").build()?])
        } else {
            None
        };
        let weight =
            program.jit(BackwardWeight(stage.clone(), inferred)).on(mesh).outputs(gradient.clone());
        let weight = weights.iter().fold(weight, |jit, path| jit.donate(*path)).build()?;
        let mut add_weight = program.jit(AddBackwardWeight(stage.clone())).on(mesh).donate("");
        if partial {
            // The accumulator holds partial sums. A kernel accepts these only if its inputs are
            // declared so.
            add_weight = add_weight.inputs(pair(&weight_residual, &gradient));
        }
        let add_weight = add_weight.outputs(gradient).build()?;
        Ok(Kernels { avals, forward, backward, weight, add_weight, fused })
    }

    fn shardings(&self, placed: &impl Tree<Leaf = PlacedShape>) -> PrefixTree<Sharding> {
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
fn not_here(path: &str, param: &MpmdArray, mesh: &Mesh) -> Error {
    let found = param.sharding().map_or_else(|| "host values".to_owned(), ToString::to_string);
    let param =
        if path.is_empty() { "its parameter".to_owned() } else { format!("parameter {path:?}") };
    Error::kernel(format!(
        "{param} is {found}, and not on its mesh {mesh}: put it there with `device_put`"
    ))
}

/// Returns true if the sharding includes every device of the mesh.
fn is_on(sharding: &Sharding, mesh: &Mesh) -> bool {
    mesh.devices().iter().all(|device| sharding.devices().contains(device))
}

/// Returns an error if no tree of type `T` has the structure.
fn fits<T: Tree>(structure: &Structure) -> Result<(), TreeError> {
    let leaves = std::iter::repeat_n(false, structure.leaves());
    T::With::<bool>::from_leaves(structure, leaves).map(drop)
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

/// Returns the path, to be donated, if there is a leaf below it; else `None`.
fn donated(placed: &impl Tree<Leaf = PlacedShape>, path: &'static str) -> Option<&'static str> {
    (!placed.leaves().is_empty()).then_some(path)
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
            return Err(not_here(&self.paths()[own[index]], &params[index], &self.mesh));
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
        match side {
            Some(structure) => fits::<S::Side>(structure),
            None => self.needs_side.clone().map_or(Ok(()), Err),
        }
    }

    fn shapes(&self, x: &ShapeBundle, side: &ShapeBundle) -> Result<StageShapes> {
        let params = self.param_shapes()?;
        let signature = self.infer(&params, &x.tree::<S::In>()?, &side.tree::<S::Side>()?)?;
        let stored = self.stored();
        let (compute, gradients) = match &self.storage {
            Some(storage) => (storage.compute(), storage.gradients()),
            None => (&stored[..], &stored[..]),
        };
        let params: Vec<_> = params.leaves().into_iter().cloned().collect();
        let all = |to: &[Sharding]| params.iter().cloned().zip(to.iter().cloned()).collect();
        let placed = |leaf: &PlacedShape| (leaf.aval.clone(), leaf.sharding(&self.mesh));
        let kept = signature.residual.leaves_with_paths().into_iter();
        let kept =
            kept.filter(|(path, _)| signature.keeps.iter().any(|(residual, _)| residual == path));
        Ok(StageShapes {
            mesh: self.mesh.clone(),
            params: all(&stored),
            own: self.own(),
            compute: all(compute),
            gradients: all(gradients),
            fuses: self.fuses(),
            input: x.avals().map(|aval| (aval, self.input.clone())).collect(),
            output: signature
                .out
                .leaves()
                .into_iter()
                .map(|aval| (aval.clone(), self.output.clone()))
                .collect(),
            out: ShapeBundle::of(&signature.out),
            kept_residual: kept.map(|(_, leaf)| placed(leaf)).collect(),
            residual: signature.residual.leaves().into_iter().map(placed).collect(),
            weight_residual: signature.weight_residual.leaves().into_iter().map(placed).collect(),
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

    fn forward(
        &mut self,
        program: &mut Program,
        x: Bundle,
        side: Bundle,
    ) -> Result<(Bundle, Bundle, usize)> {
        let (x, side): (S::In, S::Side) = (x.into_tree("input")?, side.into_tree("side input")?);
        let params: S::Params = self.for_kernels()?;
        let kernels = self.kernels(program, &x, &side)?;
        let y = self.bound(kernels)?.forward.call(program, (params, x, side));
        let (y, residual) = y.map_err(|error| {
            in_words(error, &["parameter", "input", "side input"], &["output", "residual"])
        })?;
        Ok((Bundle::of(y), Bundle::of(residual), kernels))
    }

    fn backward_input(
        &mut self,
        program: &mut Program,
        kernels: usize,
        residual: Bundle,
        dy: Bundle,
    ) -> Result<(Option<Bundle>, Bundle)> {
        let params: S::Params = self.for_kernels()?;
        let inputs = (params, residual.into_tree("residual")?, dy.into_tree("output gradient")?);
        let wrong =
            |error| in_words(error, &BACKWARD_INPUTS, &["input gradient", "weight residual"]);
        match &self.bound(kernels)?.backward {
            Backward::First(jit) => {
                Ok((None, Bundle::of(jit.call(program, inputs).map_err(wrong)?)))
            }
            Backward::Later(jit) => {
                let (dx, weight_residual) = jit.call(program, inputs).map_err(wrong)?;
                Ok((Some(Bundle::of(dx)), Bundle::of(weight_residual)))
            }
        }
    }

    fn backward_weight(
        &mut self,
        program: &mut Program,
        kernels: usize,
        weight_residual: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Bundle> {
        let weight_residual: S::WeightResidual = weight_residual.into_tree("weight residual")?;
        let kernels = self.bound(kernels)?;
        let gradient = match so_far {
            None => kernels.weight.call(program, weight_residual)?,
            Some(so_far) => kernels
                .add_weight
                .call(program, (weight_residual, so_far.into_tree("gradient")?))?,
        };
        Ok(Bundle::of(gradient))
    }

    fn fuses(&self) -> bool {
        let partial = |storage: &ParamSharding| {
            storage.gradients().iter().any(|gradient| !gradient.unreduced_axes().is_empty())
        };
        self.stage.fuses_backward() && !self.storage.as_ref().is_some_and(partial)
    }

    fn backward(
        &mut self,
        program: &mut Program,
        kernels: usize,
        residual: Bundle,
        dy: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Both> {
        let params: S::Params = self.for_kernels()?;
        let none = || Error::kernel("there is no kernel for both gradients");
        let jit =
            &self.bound(kernels)?.fused.as_ref().ok_or_else(none)?[usize::from(so_far.is_some())];
        let so_far = so_far.map(|so_far| so_far.into_tree::<S::Params>("gradient")).transpose()?;
        let inputs =
            (params, residual.into_tree("residual")?, dy.into_tree("output gradient")?, so_far);
        let y = jit.call(program, inputs);
        let (dx, gradient) =
            y.map_err(|error| in_words(error, &BACKWARD_INPUTS, &["input gradient", "gradient"]))?;
        Ok((dx.map(Bundle::of), Bundle::of(gradient)))
    }
}
