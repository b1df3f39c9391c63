//! From shapes and shardings to the bytes that each device of a stage holds.

use std::collections::BTreeMap;

use mpmd_transport::{Pool, ProcessId};

use super::memory::StageBytes;
use super::schedule::Schedule;
use super::wired::AnyStage;
use crate::array::MpmdArray;
use crate::aval::ShapedArray;
use crate::error::{Error, Result};
use crate::kernel::Shapes;
use crate::program::Program;
use crate::region::Region;
use crate::reshard::contiguous_bytes;
use crate::sharding::Sharding;
use crate::topology::{DeviceId, Mesh};
use crate::tree::{Empty, Structure, Tree, TreeError};

/// The shapes of one microbatch: for [`Pipeline::memory`](super::Pipeline::memory).
pub struct MicrobatchShapes<In: Tree<Leaf = MpmdArray>> {
    x: Shapes<In>,
    side: BTreeMap<usize, ShapeBundle>,
    stays: bool,
}

/// Shapes with their tree's type erased.
pub(super) struct ShapeBundle {
    structure: Structure,
    avals: Vec<ShapedArray>,
}

/// The shapes of a microbatch with its type erased.
pub(super) struct ShapeParts<'a> {
    x: ShapeBundle,
    side: &'a BTreeMap<usize, ShapeBundle>,
    stays: bool,
}

/// Shapes and their shardings.
type Places = Vec<(ShapedArray, Sharding)>;

/// What a stage has and makes.
pub(super) struct StageShapes {
    pub(super) mesh: Mesh,
    pub(super) params: Places,
    pub(super) gathered: Places,
    pub(super) gradients: Places,
    pub(super) reduced: Places,
    pub(super) input: Places,
    pub(super) output: Places,
    /// The output's shapes, for the stage after.
    pub(super) out: ShapeBundle,
    pub(super) residual: Places,
    /// Those of them that are weight residuals as they are.
    pub(super) kept_residual: Places,
    pub(super) weight_residual: Places,
}

impl<In: Tree<Leaf = MpmdArray>> MicrobatchShapes<In> {
    /// A microbatch whose input to the pipeline has these global shapes.
    pub fn new(x: Shapes<In>) -> Self {
        Self { x, side: BTreeMap::new(), stays: false }
    }

    /// The global shapes of a stage's side inputs.
    #[must_use]
    pub fn side(mut self, stage: usize, side: &impl Tree<Leaf = ShapedArray>) -> Self {
        self.side.insert(stage, ShapeBundle::of(side));
        self
    }

    /// The caller keeps the arrays of all microbatches, so they are there all the time, and not until the pass
    /// that reads them.
    #[must_use]
    pub fn kept(mut self) -> Self {
        self.stays = true;
        self
    }

    pub(super) fn parts(&self) -> ShapeParts<'_> {
        ShapeParts { x: ShapeBundle::of(&self.x), side: &self.side, stays: self.stays }
    }
}

impl ShapeBundle {
    pub(super) fn of(tree: &impl Tree<Leaf = ShapedArray>) -> Self {
        Self { structure: tree.structure(), avals: tree.leaves().into_iter().cloned().collect() }
    }

    pub(super) fn tree<T: Tree>(&self) -> Result<Shapes<T>, TreeError> {
        Shapes::<T>::from_leaves(&self.structure, self.avals.iter().cloned())
    }

    pub(super) fn avals(&self) -> impl Iterator<Item = ShapedArray> + '_ {
        self.avals.iter().cloned()
    }
}

/// For each stage and each of its devices, what it holds; `counts` says what a buffer that its pool counts with so
/// many bytes counts with here.
pub(super) fn stage_bytes(
    stages: &[Box<dyn AnyStage>],
    program: &Program,
    schedule: &Schedule,
    microbatch: ShapeParts<'_>,
    beside: &[MpmdArray],
    counts: &mut dyn FnMut(u64) -> u64,
) -> Result<Vec<BTreeMap<DeviceId, StageBytes>>> {
    if schedule.stages() != stages.len() {
        return Err(Error::kernel(format!(
            "schedule {} is for {} stages; the pipeline has {}",
            schedule.name(),
            schedule.stages(),
            stages.len()
        )));
    }
    let ShapeParts { mut x, side, stays } = microbatch;
    let nothing = ShapeBundle::of(&Empty::<ShapedArray>::new());
    let mut shapes = Vec::with_capacity(stages.len());
    for (index, stage) in stages.iter().enumerate() {
        let of_stage = stage.shapes(&x, side.get(&index).unwrap_or(&nothing))?;
        x = ShapeBundle { structure: of_stage.out.structure.clone(), avals: of_stage.out.avals.clone() };
        shapes.push(of_stage);
    }
    let beside: Places =
        beside.iter().filter_map(|array| Some((array.aval().clone(), array.sharding()?.clone()))).collect();
    // A device may have several stages: what the caller keeps is there once.
    let mut charged = Vec::new();
    let mut found = Vec::with_capacity(shapes.len());
    for (index, stage) in shapes.iter().enumerate() {
        let mut devices = BTreeMap::new();
        for device in stage.mesh.devices().iter().copied() {
            let mut bytes = StageBytes {
                kept: on(device, counts, &stage.params)?,
                gathered: on(device, counts, &stage.gathered)?,
                gradients: on(device, counts, &stage.gradients)?,
                reduced: on(device, counts, &stage.reduced)?,
                output: on(device, counts, &stage.output)?,
                residual: on(device, counts, &stage.residual)?,
                kept_residual: on(device, counts, &stage.kept_residual)?,
                weight_residual: on(device, counts, &stage.weight_residual)?,
                ..StageBytes::default()
            };
            if !charged.contains(&device) {
                bytes.kept += on(device, counts, &beside)?;
                charged.push(device);
            }
            if index == 0 {
                bytes.brought += on(device, counts, &stage.input)?;
            } else {
                bytes.input_gradient = on(device, counts, &stage.input)?;
                bytes.input = taken(program, device, counts, &stage.input, &shapes[index - 1].output)?;
                bytes.lends_input_gradient = lends(program, device, &shapes[index - 1].output, &stage.input)?;
            }
            if let Some(side) = side.get(&index) {
                // How the caller will place them is not known: as the stage's input, where that is possible.
                let sharding = stage.input.first().map(|(_, sharding)| sharding.clone());
                let place = |aval: ShapedArray| {
                    let fits = sharding.clone().filter(|input| input.layout(aval.shape()).is_ok());
                    (aval, fits.unwrap_or_else(|| stage.mesh.replicated()))
                };
                bytes.brought += on(device, counts, &side.avals().map(place).collect::<Vec<_>>())?;
            }
            if let Some(after) = shapes.get(index + 1) {
                bytes.output_gradient = taken(program, device, counts, &stage.output, &after.input)?;
                bytes.lends_output = lends(program, device, &after.input, &stage.output)?;
            }
            if stays {
                bytes.kept += bytes.brought * schedule.microbatches() as u64;
                bytes.brought = 0;
            }
            devices.insert(device, bytes);
        }
        found.push(devices);
    }
    Ok(found)
}

/// Bytes that a device has of arrays, as its pool counts them.
fn on(
    device: DeviceId,
    counts: &mut dyn FnMut(u64) -> u64,
    places: &[(ShapedArray, Sharding)],
) -> Result<u64> {
    places.iter().try_fold(0, |sum, (aval, sharding)| {
        Ok(sum + region(device, aval, sharding)?.map_or(0, |region| counted(&region, aval, counts)))
    })
}

fn counted(region: &Region, aval: &ShapedArray, counts: &mut dyn FnMut(u64) -> u64) -> u64 {
    if region.is_empty() { 0 } else { counts(Pool::rounded(region.elements() * aval.dtype().size())) }
}

fn region(device: DeviceId, aval: &ShapedArray, sharding: &Sharding) -> Result<Option<Region>> {
    let layout = sharding.layout(aval.shape()).map_err(|why| Error::kernel(format!("{aval}: {why}")))?;
    Ok(layout.region_of(device).cloned())
}

/// Bytes that a device needs for what it is given: none for what it is handed over.
fn taken(
    program: &Program,
    device: DeviceId,
    counts: &mut dyn FnMut(u64) -> u64,
    to: &[(ShapedArray, Sharding)],
    from: &[(ShapedArray, Sharding)],
) -> Result<u64> {
    let mut bytes = 0;
    for ((aval, to), (_, from)) in to.iter().zip(from) {
        let Some(region) = region(device, aval, to)? else { continue };
        if giver(program, device, aval, &region, from)?.is_none() {
            bytes += counted(&region, aval, counts);
        }
    }
    Ok(bytes)
}

/// Whether what a device gives is used where it is by one that it is given to.
fn lends(
    program: &Program,
    device: DeviceId,
    to: &[(ShapedArray, Sharding)],
    from: &[(ShapedArray, Sharding)],
) -> Result<bool> {
    for ((aval, to), (_, from)) in to.iter().zip(from) {
        for taker in to.devices() {
            let Some(region) = region(*taker, aval, to)? else { continue };
            if giver(program, *taker, aval, &region, from)? == Some(device) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// The device of another process that hands a whole shard over, if one does. What is in the taker's own process
/// is copied, and what is no run of one shard is put together from pieces.
fn giver(
    program: &Program,
    taker: DeviceId,
    aval: &ShapedArray,
    wanted: &Region,
    from: &Sharding,
) -> Result<Option<DeviceId>> {
    let process = |device| program.topology().process_of(device);
    let (Some(me), true) = (process(taker), !wanted.is_empty()) else { return Ok(None) };
    let layout = from.layout(aval.shape()).map_err(|why| Error::kernel(format!("{aval}: {why}")))?;
    let holds = |region: &Region| contiguous_bytes(region, wanted, aval.dtype().size()).is_some();
    let givers: Vec<DeviceId> =
        layout.iter().filter(|(_, region)| holds(region)).map(|(device, _)| device).collect();
    if givers.iter().any(|device| process(*device) == Some(me)) {
        return Ok(None);
    }
    let gives =
        |device: &DeviceId| process(*device).is_some_and(|giver| program.hands_over_between(giver, me));
    Ok(givers.into_iter().find(gives))
}

impl Program {
    /// Whether arrays go from one process to the other as memory that stays where it is; known where one of
    /// them is this process.
    fn hands_over_between(&self, giver: ProcessId, taker: ProcessId) -> bool {
        let me = self.process();
        (giver == me && self.runtime.hands_over(taker)) || (taker == me && self.runtime.hands_over(giver))
    }
}
