//! The shapes of microbatches, and of the stages' inputs that follow from them.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use super::erased_tree::ErasedTree;
use super::graph::StageGraph;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::Shapes;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::tree::Tree;

/// The shapes of one microbatch and its side inputs, for
/// [`Pipeline::probe`](super::Pipeline::probe).
#[derive(Debug)]
pub struct MicrobatchShapes<In> {
    x: ErasedTree<ShapedArray>,
    side: BTreeMap<usize, ErasedTree<ShapedArray>>,
    input: PhantomData<fn(In)>,
}

impl<In> PartialEq for MicrobatchShapes<In> {
    fn eq(&self, other: &Self) -> bool {
        (&self.x, &self.side) == (&other.x, &other.side)
    }
}

impl<In: Tree<Leaf = MpmdArray>> MicrobatchShapes<In> {
    /// Creates the shapes of a microbatch from the global shapes of the pipeline's input.
    pub fn new(x: Shapes<In>) -> Self {
        Self {
            x: ErasedTree::of(x),
            side: BTreeMap::new(),
            input: PhantomData,
        }
    }

    /// Sets the global shapes of the side inputs of stage `stage`.
    #[must_use]
    pub fn side(mut self, stage: usize, side: &impl Tree<Leaf = ShapedArray>) -> Self {
        let leaves = side.leaves().into_iter().cloned().collect();
        self.side.insert(
            stage,
            ErasedTree {
                structure: side.structure(),
                leaves,
            },
        );
        self
    }
}

/// Calls [`Stage::infer`](super::Stage::infer) of each stage with its shapes for one microbatch.
/// Before each call, passes the stage's index and the shapes of its input and side inputs to
/// `before`.
pub(super) fn infer_all<In: Tree<Leaf = MpmdArray>>(
    graph: &StageGraph,
    microbatch: &MicrobatchShapes<In>,
    mut before: impl FnMut(usize, &ErasedTree<ShapedArray>, &ErasedTree<ShapedArray>) -> Result<()>,
) -> Result<()> {
    let sides = microbatch
        .side
        .iter()
        .map(|(stage, side)| (*stage, &side.structure));
    graph
        .check_sides(sides)
        .map_err(|why| Error::kernel(why.to_string()))?;

    let nothing = ErasedTree::empty();
    let mut outputs: Vec<ErasedTree<ShapedArray>> = Vec::with_capacity(graph.stages.len());
    for (index, stage) in graph.stages.iter().enumerate() {
        let feed = &graph.feeds[index];
        let x = if index == 0 {
            microbatch.x.clone()
        } else {
            let mut structures = Vec::new();
            let mut leaves = Vec::new();
            for part in &feed.parts {
                let part = part.of(&outputs[part.stage])?;
                leaves.extend(part.leaves);
                structures.push(part.structure);
            }
            ErasedTree {
                structure: feed.structure(structures),
                leaves,
            }
        };

        let side = microbatch.side.get(&index).unwrap_or(&nothing);
        let inferred =
            before(index, &x, side).and_then(|()| stage.infer(&stage.param_shapes(), &x, side));
        let inferred = inferred.map_err(|why| {
            let from: Vec<usize> = feed.parts.iter().map(|part| part.stage).collect();
            graph.at(index, &with_givers(graph, &from, why))
        })?;
        outputs.push(inferred.out);
    }
    Ok(())
}

/// Adds the stages `from` which the input comes to the error of a stage.
fn with_givers(graph: &StageGraph, from: &[usize], why: Error) -> Error {
    let names = from.iter().map(|stage| graph.named(*stage));
    let names: Vec<String> = names.collect();
    match names.is_empty() {
        true => why,
        false => Error::kernel(format!(
            "{why} (its input comes from {})",
            names.join(" and ")
        )),
    }
}
