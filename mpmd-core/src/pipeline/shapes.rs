//! The shapes of microbatches, and of the stages' inputs that follow from them.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use super::bundle::Bundle;
use super::graph::StageGraph;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::Shapes;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::tree::Tree;

/// The shapes of one microbatch, for [`Pipeline::probe`](super::Pipeline::probe).
#[derive(Debug)]
pub struct MicrobatchShapes<In> {
    x: Bundle<ShapedArray>,
    side: BTreeMap<usize, Bundle<ShapedArray>>,
    input: PhantomData<fn(In)>,
}

impl<In> PartialEq for MicrobatchShapes<In> {
    fn eq(&self, other: &Self) -> bool {
        (&self.x, &self.side) == (&other.x, &other.side)
    }
}

impl<In: Tree<Leaf = MpmdArray>> MicrobatchShapes<In> {
    /// Describes a microbatch with these global shapes of the pipeline input.
    pub fn new(x: Shapes<In>) -> Self {
        Self {
            x: Bundle::of(x),
            side: BTreeMap::new(),
            input: PhantomData,
        }
    }

    /// Sets the global shapes of a stage's side inputs.
    #[must_use]
    pub fn side(mut self, stage: usize, side: &impl Tree<Leaf = ShapedArray>) -> Self {
        let leaves = side.leaves().into_iter().cloned().collect();
        self.side.insert(
            stage,
            Bundle {
                structure: side.structure(),
                leaves,
            },
        );
        self
    }
}

/// Has each stage infer its shapes for one microbatch. Calls `before` for each stage with its index
/// and the shapes of its input and side inputs, before that.
pub(super) fn infer_all<In: Tree<Leaf = MpmdArray>>(
    graph: &StageGraph,
    microbatch: &MicrobatchShapes<In>,
    mut before: impl FnMut(usize, &Bundle<ShapedArray>, &Bundle<ShapedArray>) -> Result<()>,
) -> Result<()> {
    let sides = microbatch
        .side
        .iter()
        .map(|(stage, side)| (*stage, &side.structure));
    graph.check_sides(sides).map_err(Error::kernel)?;
    let nothing = Bundle::empty();
    let mut outputs: Vec<Bundle<ShapedArray>> = Vec::with_capacity(graph.stages.len());
    for (index, stage) in graph.stages.iter().enumerate() {
        let feed = &graph.feeds[index];
        let x = if index == 0 {
            microbatch.x.clone()
        } else {
            let (mut structures, mut leaves) = (Vec::new(), Vec::new());
            for part in &feed.parts {
                let part = part.of(&outputs[part.stage])?;
                leaves.extend(part.leaves);
                structures.push(part.structure);
            }
            Bundle {
                structure: feed.structure(structures),
                leaves,
            }
        };
        let side = microbatch.side.get(&index).unwrap_or(&nothing);
        let inferred =
            before(index, &x, side).and_then(|()| stage.infer(&stage.param_shapes(), &x, side));
        outputs.push(inferred.map_err(|why| graph.at(index, &why))?.out);
    }
    Ok(())
}
