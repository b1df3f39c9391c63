//! The kernel of a traced function: computes its nodes on the part of each device.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::Location;
use std::sync::Arc;

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::DeviceId;

use super::eval::{Block, Evaluation};
use super::node::{Node, NodeId, Op};
use super::segments::KernelNodes;
use crate::error::{Error, Result};
use crate::exec::Rolling;
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut};

/// The nodes of one kernel.
pub(super) struct ComputeKernel {
    name: String,
    inputs: Vec<ShapedArray>,
    outputs: Vec<ShapedArray>,
    steps: Vec<Step>,
    /// For each output, its place among inputs and steps.
    gives: Vec<usize>,
    statics: Vec<u64>,
}

/// The computation of one node.
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) aval: ShapedArray,
    /// The layout of the result. `None` if each device has the whole.
    layout: Option<Arc<Layout>>,
    pub(super) operands: Vec<StepOperand>,
}

/// An operand of a step.
pub(super) struct StepOperand {
    /// Its place among the inputs, and behind them the steps.
    pub(super) place: usize,
    pub(super) aval: ShapedArray,
    /// The layouts of the operand, and of the part that the step needs, if they differ.
    cut: Option<[Option<Arc<Layout>>; 2]>,
    /// True if no later step needs it.
    pub(super) is_last_use: bool,
}

impl Step {
    /// Returns the region of the result that a device computes.
    pub(super) fn region(&self, device: DeviceId) -> Region {
        region(self.layout.as_ref(), self.aval.shape(), device)
    }
}

impl StepOperand {
    /// Returns (the region that a device has, the region that the step needs), if they differ.
    pub(super) fn cut(&self, device: DeviceId) -> Option<(Region, Region)> {
        let [own, part] = self.cut.as_ref()?;
        let shape = self.aval.shape();
        let both = (
            region(own.as_ref(), shape, device),
            region(part.as_ref(), shape, device),
        );
        (both.0 != both.1).then_some(both)
    }
}

fn region(layout: Option<&Arc<Layout>>, shape: &[usize], device: DeviceId) -> Region {
    let found = layout.and_then(|layout| layout.region_of(device));
    found.cloned().unwrap_or_else(|| Region::full(shape))
}

impl ComputeKernel {
    /// Makes the kernel of some nodes of a function. `at` is the line of the call.
    pub(super) fn new(
        nodes: &[Node],
        part: &KernelNodes,
        at: &'static Location<'static>,
    ) -> Result<Self> {
        let order: Vec<NodeId> = part.inputs.iter().chain(&part.computed).copied().collect();
        let places: BTreeMap<NodeId, usize> = order
            .iter()
            .enumerate()
            .map(|(place, id)| (*id, place))
            .collect();
        let place = |id: NodeId| places.get(&id).copied().unwrap_or(0);
        let layout = |sharding: Option<&Sharding>, shape: &[usize]| {
            let layout = sharding.map(|sharding| sharding.layout(shape)).transpose();
            layout.map_err(|why| Error::kernel(why.to_string()))
        };

        let mut steps = Vec::with_capacity(part.computed.len());
        let mut text = String::new();
        for id in &part.computed {
            let node = &nodes[*id];
            let mut operands = Vec::with_capacity(node.operands.len());
            for (index, operand) in node.operands.iter().enumerate() {
                let own = &nodes[*operand];
                let shape = own.aval.shape();
                let has = layout(own.sharding.as_ref(), shape)?;
                let needs = layout(node.parts.get(index), shape)?;
                operands.push(StepOperand {
                    place: place(*operand),
                    aval: own.aval.clone(),
                    cut: (has != needs).then_some([has, needs]),
                    is_last_use: false,
                });
            }
            let places: Vec<usize> = operands.iter().map(|operand| operand.place).collect();
            let sharding = node.sharding.as_ref().map(Sharding::fingerprint);
            // Writing to a text cannot fail.
            let _ = write!(text, "{:?} {places:?} {} {sharding:?};", node.op, node.aval);
            steps.push(Step {
                op: node.op.clone(),
                aval: node.aval.clone(),
                layout: layout(node.sharding.as_ref(), node.aval.shape())?,
                operands,
            });
        }
        note_last_uses(&mut steps);

        let avals = |ids: &[NodeId]| ids.iter().map(|id| nodes[*id].aval.clone()).collect();
        let gives: Vec<usize> = part.outputs.iter().map(|id| place(*id)).collect();
        let _ = write!(text, "{gives:?}");
        Ok(Self {
            name: format!("compute at {}:{}", at.file(), at.line()),
            inputs: avals(&part.inputs),
            outputs: avals(&part.outputs),
            steps,
            gives,
            statics: vec![Rolling::default().mix_bytes(text.as_bytes()).word()],
        })
    }
}

/// Marks the last use of each value, after which its memory is free.
fn note_last_uses(steps: &mut [Step]) {
    let mut seen = std::collections::BTreeSet::new();
    for step in steps.iter_mut().rev() {
        for operand in step.operands.iter_mut().rev() {
            operand.is_last_use = seen.insert(operand.place);
        }
    }
}

impl Kernel for ComputeKernel {
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, x: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
        match *x == self.inputs {
            true => Ok(Signature::new(self.outputs.clone())),
            false => Err(Error::kernel(
                "the inputs of a traced function have changed",
            )),
        }
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, y: Vec<ViewMut<'_>>) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |cx, x, y| {
            let device = cx.device();
            let inputs = x.iter().map(Block::of_view);
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let mut evaluation = Evaluation::new(device, inputs, &self.gives);
            for step in &self.steps {
                evaluation.run(step)?;
            }
            for (mut y, place) in y.into_iter().zip(&self.gives) {
                evaluation.value(*place)?.copy_to(&mut y)?;
            }
            Ok(())
        })
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn statics(&self) -> Vec<u64> {
        self.statics.clone()
    }
}
