//! Microbatches: the data that each pass of a pipeline gets from the caller.

use std::collections::{BTreeMap, HashMap};

use super::erased_tree::ErasedTree;
use super::graph::StageGraph;
use super::shapes::MicrobatchShapes;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::random::Key;
use mpmd_layout::tree::Tree;

/// One microbatch: the input of the pipeline, and the side inputs of its stages.
pub struct Microbatch<In> {
    x: In,
    side: HashMap<usize, ErasedTree>,
    key: Option<Key>,
}

/// A microbatch without its Rust type: input and side inputs are erased trees.
pub(super) struct ErasedMicrobatch {
    pub(super) x: ErasedTree,
    pub(super) side: HashMap<usize, ErasedTree>,
    pub(super) key: Option<Key>,
    /// The random key of each stage that draws random numbers, by stage. Empty until `fold_keys`
    /// has run.
    pub(super) keys: BTreeMap<usize, MpmdArray>,
}

impl<In: Tree<Leaf = MpmdArray>> Microbatch<In> {
    /// Creates a microbatch with this input, which must be on the first stage's mesh.
    pub fn new(x: In) -> Self {
        Self {
            x,
            side: HashMap::new(),
            key: None,
        }
    }

    /// Sets the side inputs of stage `stage`, which must be on the mesh of that stage. Replaces
    /// side inputs set before.
    #[must_use]
    pub fn side<T: Tree<Leaf = MpmdArray>>(mut self, stage: usize, side: T) -> Self {
        self.side.insert(stage, ErasedTree::of(side));
        self
    }

    /// Sets the random key of the microbatch. A training step needs the key if a stage [draws
    /// random numbers](super::Stage::draws_random); evaluation does not use it.
    ///
    /// The key of each stage is derived from this key and the index of the stage. Give each
    /// microbatch of each step another key: `key.fold_in(step).fold_in(microbatch)`.
    #[must_use]
    pub fn key(mut self, key: Key) -> Self {
        self.key = Some(key);
        self
    }

    /// Returns the shapes of the microbatch, for [`Pipeline::probe`](super::Pipeline::probe).
    pub fn shapes(&self) -> MicrobatchShapes<In> {
        let shapes = MicrobatchShapes::new(self.x.map_ref(&mut |leaf| leaf.aval().clone()));
        let shape = |side: &ErasedTree| side.map_ref(&mut |leaf| leaf.aval().clone());
        self.side.iter().fold(shapes, |shapes, (stage, side)| {
            shapes.side(*stage, &shape(side))
        })
    }

    pub(super) fn into_parts(self) -> ErasedMicrobatch {
        ErasedMicrobatch {
            x: ErasedTree::of(self.x),
            side: self.side,
            key: self.key,
            keys: BTreeMap::new(),
        }
    }
}

/// Checks that each microbatch has exactly the side inputs that the stages take.
pub(super) fn check_sides(graph: &StageGraph, microbatches: &[ErasedMicrobatch]) -> Result<()> {
    for (number, parts) in microbatches.iter().enumerate() {
        let sides = parts
            .side
            .iter()
            .map(|(stage, side)| (*stage, &side.structure));
        graph
            .check_sides(sides)
            .map_err(|problem| Error::kernel(format!("microbatch {number}: {problem}")))?;
    }
    Ok(())
}

/// Derives the key of each stage that draws random numbers from the key of each microbatch. A
/// missing key is an error.
pub(super) fn fold_keys(graph: &StageGraph, microbatches: &mut [ErasedMicrobatch]) -> Result<()> {
    let stages = graph.stages.iter().enumerate();
    for (stage, _) in stages.filter(|(_, stage)| stage.draws_random()) {
        for (number, parts) in microbatches.iter_mut().enumerate() {
            let key = parts.key.ok_or_else(|| {
                let named = graph.named(stage);
                Error::kernel(format!(
                    "{named} draws random numbers, and microbatch {number} has no key: give it \
                     one with `Microbatch::key`"
                ))
            })?;
            let key = MpmdArray::scalar(key.fold_in(stage as u64).0);
            parts.keys.insert(stage, key);
        }
    }
    Ok(())
}
