//! A stage bound to its mesh, with its type erased: what the runner drives.

use std::sync::Arc;

use super::kernels::{
    AddBackwardWeight, BackwardFirst, BackwardInput, BackwardWeight, Flat, Forward, Inferred,
};
use super::shapes::{ShapeBundle, StageShapes};
use super::stage::{PlacedShape, Stage};
use super::storage::{Storage, put_each};
use crate::array::MpmdArray;
use crate::error::{Error, Result};
use crate::jit::Jit;
use crate::kernel::Shapes;
use crate::program::Program;
use crate::sharding::Sharding;
use crate::topology::Mesh;
use crate::tree::{PrefixTree, Structure, Tree};

/// A tree of arrays whose type is known only to its stage.
#[derive(Clone)]
pub(super) struct Bundle {
    pub(super) structure: Structure,
    pub(super) leaves: Vec<MpmdArray>,
}

impl Bundle {
    pub(super) fn of<T: Tree<Leaf = MpmdArray>>(tree: T) -> Self {
        Self { structure: tree.structure(), leaves: tree.into_leaves() }
    }

    pub(super) fn into_tree<T: Tree<Leaf = MpmdArray>>(self) -> Result<T> {
        Ok(T::from_leaves(&self.structure, self.leaves)?)
    }

    /// The same arrays, somewhere else.
    #[track_caller]
    pub(super) fn put(self, program: &mut Program, to: &Sharding) -> Result<Self> {
        let leaves = program.device_put(&self.leaves, to)?;
        Ok(Self { structure: self.structure, leaves })
    }
}

/// What the runner asks of a stage.
pub(super) trait AnyStage: Send {
    fn name(&self) -> &str;
    fn mesh(&self) -> &Mesh;
    /// How what comes from the stage before is sharded here.
    fn input(&self) -> &Sharding;
    /// How outputs are sharded, and their gradients, which come from the stage after.
    fn output(&self) -> &Sharding;
    /// As they are stored.
    fn params(&self) -> Bundle;
    fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()>;
    /// What the stage has and makes for inputs of these shapes.
    fn shapes(&self, x: &ShapeBundle, side: &ShapeBundle) -> Result<StageShapes>;
    /// Has the kernels compute with parameters in other shardings than the stored ones.
    fn store(&mut self, storage: Storage) -> Result<()>;
    /// Has the parameters in the shardings that kernels compute with, until they are released.
    fn gather(&mut self, program: &mut Program) -> Result<()>;
    fn release(&mut self);
    /// Finished gradients in the shardings of the stored parameters.
    fn reduce(&self, program: &mut Program, gradients: Bundle) -> Result<Bundle>;
    /// Outputs and residuals.
    fn forward(&mut self, program: &mut Program, x: Bundle, side: Bundle) -> Result<(Bundle, Bundle)>;
    /// Input gradients (none on the first stage) and weight residuals.
    fn backward_input(
        &mut self,
        program: &mut Program,
        residual: Bundle,
        dy: Bundle,
    ) -> Result<(Option<Bundle>, Bundle)>;
    /// Gradients: `so_far` with this microbatch's added.
    fn backward_weight(
        &mut self,
        program: &mut Program,
        weight_residual: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Bundle>;
}

/// A stage on a mesh.
pub(super) struct Wired<S: Stage> {
    stage: Arc<S>,
    mesh: Mesh,
    input: Sharding,
    output: Sharding,
    /// As they are stored.
    params: Bundle,
    /// How kernels see them, where that is otherwise.
    storage: Option<Storage>,
    /// The parameters as kernels see them, while a step uses them.
    gathered: Option<Vec<MpmdArray>>,
    first: bool,
    /// Made when the first microbatch comes: residuals have shapes only then.
    kernels: Option<Kernels<S>>,
}

struct Kernels<S: Stage> {
    x: Vec<crate::aval::ShapedArray>,
    forward: Jit<Forward<S>>,
    backward: Backward<S>,
    weight: Jit<BackwardWeight<S>>,
    add_weight: Jit<AddBackwardWeight<S>>,
}

enum Backward<S: Stage> {
    First(Jit<BackwardFirst<S>>),
    Later(Jit<BackwardInput<S>>),
}

impl<S: Stage> Wired<S> {
    pub(super) fn new(stage: S, mesh: &Mesh, params: S::Params, first: bool) -> Result<Self> {
        for (path, param) in params.leaves_with_paths() {
            let here = param.sharding().is_some_and(|sharding| {
                mesh.devices().iter().all(|device| sharding.devices().contains(device))
            });
            if !here {
                return Err(Error::kernel(format!(
                    "parameter {path:?} of stage {} is not on the stage's mesh {mesh}",
                    stage.name()
                )));
            }
        }
        Ok(Self {
            mesh: mesh.clone(),
            input: mesh.sharding(stage.input_spec()),
            output: mesh.sharding(stage.output_spec()),
            stage: Arc::new(stage),
            params: Bundle::of(params),
            storage: None,
            gathered: None,
            first,
            kernels: None,
        })
    }

    /// The kernels for microbatches of these shapes.
    fn kernels(&mut self, program: &Program, x: &S::In, side: &S::Side) -> Result<&Kernels<S>> {
        let avals: Vec<_> = x.leaves().into_iter().map(|leaf| leaf.aval().clone()).collect();
        if self.kernels.as_ref().is_none_or(|kernels| kernels.x != avals) {
            self.kernels = Some(self.bind(program, x, side, avals)?);
        }
        self.kernels.as_ref().ok_or_else(|| Error::kernel("the kernels were just made"))
    }

    fn bind(
        &self,
        program: &Program,
        x: &S::In,
        side: &S::Side,
        avals: Vec<crate::aval::ShapedArray>,
    ) -> Result<Kernels<S>> {
        let params = self.params.leaves.iter().map(|leaf| leaf.aval().clone());
        let params = Shapes::<S::Params>::from_leaves(&self.params.structure, params)?;
        let x: Shapes<S::In> = x.map_ref(&mut |leaf| leaf.aval().clone());
        let side: Shapes<S::Side> = side.map_ref(&mut |leaf| leaf.aval().clone());
        let signature = self.stage.infer(&params, &x, &side)?;
        let residual = self.shardings(&signature.residual);
        let weight_residual = self.shardings(&signature.weight_residual);
        let places: Vec<Sharding> = match &self.storage {
            Some(storage) => storage.gradients().to_vec(),
            None => self.params.leaves.iter().filter_map(|leaf| leaf.sharding().cloned()).collect(),
        };
        let partial = places.iter().any(|place| !place.unreduced_axes().is_empty());
        let places = <S::Params as Tree>::With::<Sharding>::from_leaves(&self.params.structure, places)?;
        let gradient = PrefixTree::of(&places);
        // Each pass is the last to read what the one before it left, where there is anything.
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
            PrefixTree::Node(vec![("0".to_owned(), first.clone()), ("1".to_owned(), second.clone())])
        };
        let (stage, mesh) = (&self.stage, &self.mesh);
        let forward =
            program.jit(Forward(stage.clone())).on(mesh).outputs(pair(&output, &residual)).build()?;
        let backward = if self.first {
            let jit = program.jit(BackwardFirst(stage.clone(), inferred.clone()));
            let jit = jit.on(mesh).outputs(weight_residual.clone());
            Backward::First(residuals.iter().fold(jit, |jit, path| jit.donate(*path)).build()?)
        } else {
            let jit = program.jit(BackwardInput(stage.clone(), inferred.clone()));
            let jit = jit.on(mesh).outputs(pair(&input, &weight_residual));
            Backward::Later(residuals.iter().fold(jit, |jit, path| jit.donate(*path)).build()?)
        };
        let weight = program.jit(BackwardWeight(stage.clone(), inferred)).on(mesh).outputs(gradient.clone());
        let weight = weights.iter().fold(weight, |jit, path| jit.donate(*path)).build()?;
        let mut add_weight = program.jit(AddBackwardWeight(stage.clone())).on(mesh).donate("");
        if partial {
            // What it adds to are partial sums, which a kernel takes only where it says so.
            add_weight = add_weight.inputs(pair(&weight_residual, &gradient));
        }
        let add_weight = add_weight.outputs(gradient).build()?;
        Ok(Kernels { x: avals, forward, backward, weight, add_weight })
    }

    fn shardings(&self, placed: &impl Tree<Leaf = PlacedShape>) -> PrefixTree<Sharding> {
        PrefixTree::of(&placed.map_ref(&mut |leaf| leaf.sharding(&self.mesh)))
    }

    /// The parameters as kernels see them.
    fn for_kernels(&self) -> Result<S::Params> {
        let Bundle { structure, leaves } = &self.params;
        let leaves = self.gathered.as_ref().unwrap_or(leaves);
        Ok(S::Params::from_leaves(structure, leaves.iter().cloned())?)
    }

    fn bound(&self) -> Result<&Kernels<S>> {
        self.kernels.as_ref().ok_or_else(|| {
            Error::kernel(format!("stage {}: a backward pass before any forward", self.name()))
        })
    }
}

/// The path to donate, where there is a leaf below it.
fn donated(placed: &impl Tree<Leaf = PlacedShape>, path: &'static str) -> Option<&'static str> {
    (!placed.leaves().is_empty()).then_some(path)
}

impl<S: Stage> AnyStage for Wired<S> {
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

    fn params(&self) -> Bundle {
        self.params.clone()
    }

    fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()> {
        S::Params::from_leaves(&self.params.structure, params.iter().cloned())?;
        self.params.leaves = params;
        self.gathered = None;
        Ok(())
    }

    fn shapes(&self, x: &ShapeBundle, side: &ShapeBundle) -> Result<StageShapes> {
        let params = self.params.leaves.iter().map(|leaf| leaf.aval().clone());
        let params = Shapes::<S::Params>::from_leaves(&self.params.structure, params)?;
        let signature = self.stage.infer(&params, &x.tree::<S::In>()?, &side.tree::<S::Side>()?)?;
        let stored: Vec<_> = self.params.leaves.iter().filter_map(|leaf| leaf.sharding().cloned()).collect();
        let (compute, gradients) = match &self.storage {
            Some(storage) => (storage.compute(), storage.gradients()),
            None => (&stored[..], &stored[..]),
        };
        let params: Vec<_> = params.leaves().into_iter().cloned().collect();
        // Those that are there already are left alone.
        let moved = |now: &[Sharding], to: &[Sharding]| {
            let all = params.iter().zip(now.iter().zip(to)).filter(|(_, (now, to))| now != to);
            all.map(|(aval, (_, to))| (aval.clone(), to.clone())).collect()
        };
        let all = |to: &[Sharding]| params.iter().cloned().zip(to.iter().cloned()).collect();
        let placed = |leaf: &PlacedShape| (leaf.aval.clone(), leaf.sharding(&self.mesh));
        let kept = signature.residual.leaves_with_paths().into_iter();
        let kept = kept.filter(|(path, _)| signature.keeps.iter().any(|(residual, _)| residual == path));
        Ok(StageShapes {
            mesh: self.mesh.clone(),
            params: all(&stored),
            gathered: moved(&stored, compute),
            gradients: all(gradients),
            reduced: moved(gradients, &stored),
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

    fn store(&mut self, storage: Storage) -> Result<()> {
        storage.check(self.name(), &self.params, &self.mesh)?;
        (self.storage, self.gathered, self.kernels) = (Some(storage), None, None);
        Ok(())
    }

    fn gather(&mut self, program: &mut Program) -> Result<()> {
        if let (Some(storage), None) = (&self.storage, &self.gathered) {
            self.gathered = Some(put_each(program, self.params.leaves.clone(), storage.compute())?);
        }
        Ok(())
    }

    fn release(&mut self) {
        self.gathered = None;
    }

    fn reduce(&self, program: &mut Program, gradients: Bundle) -> Result<Bundle> {
        if self.storage.is_none() {
            return Ok(gradients);
        }
        let stored = self.params.leaves.iter().map(|leaf| {
            leaf.sharding().cloned().ok_or_else(|| {
                Error::kernel(format!("stage {}: a parameter that was never placed", self.name()))
            })
        });
        let stored = stored.collect::<Result<Vec<_>>>()?;
        let Bundle { structure, leaves } = gradients;
        Ok(Bundle { structure, leaves: put_each(program, leaves, &stored)? })
    }

    fn forward(&mut self, program: &mut Program, x: Bundle, side: Bundle) -> Result<(Bundle, Bundle)> {
        let (x, side): (S::In, S::Side) = (x.into_tree()?, side.into_tree()?);
        let params: S::Params = self.for_kernels()?;
        let kernels = self.kernels(program, &x, &side)?;
        let (y, residual) = kernels.forward.call(program, (params, x, side))?;
        Ok((Bundle::of(y), Bundle::of(residual)))
    }

    fn backward_input(
        &mut self,
        program: &mut Program,
        residual: Bundle,
        dy: Bundle,
    ) -> Result<(Option<Bundle>, Bundle)> {
        let params: S::Params = self.for_kernels()?;
        let inputs = (params, residual.into_tree()?, dy.into_tree()?);
        match &self.bound()?.backward {
            Backward::First(jit) => Ok((None, Bundle::of(jit.call(program, inputs)?))),
            Backward::Later(jit) => {
                let (dx, weight_residual) = jit.call(program, inputs)?;
                Ok((Some(Bundle::of(dx)), Bundle::of(weight_residual)))
            }
        }
    }

    fn backward_weight(
        &mut self,
        program: &mut Program,
        weight_residual: Bundle,
        so_far: Option<Bundle>,
    ) -> Result<Bundle> {
        let weight_residual: S::WeightResidual = weight_residual.into_tree()?;
        let kernels = self.bound()?;
        let gradient = match so_far {
            None => kernels.weight.call(program, weight_residual)?,
            Some(so_far) => kernels.add_weight.call(program, (weight_residual, so_far.into_tree()?))?,
        };
        Ok(Bundle::of(gradient))
    }
}
