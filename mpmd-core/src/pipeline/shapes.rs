//! Computes, from shapes and shardings, the bytes that each device of a stage holds.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use mpmd_base::ProcessId;
use mpmd_device::copy::contiguous_bytes;
use mpmd_transport::Pool;

use super::bundle::Bundle;
use super::graph::StageGraph;
use super::stage_shapes::{Places, StageShapes};
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::Shapes;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceId;
use mpmd_layout::tree::Tree;
use mpmd_schedule::Schedule;
use mpmd_schedule::StageBytes;
use mpmd_schedule::holds::{Input, OnDevice, Output};

/// The shapes of one microbatch, for [`Pipeline::memory`](super::Pipeline::memory) and
/// [`Pipeline::probe`](super::Pipeline::probe).
#[derive(Debug)]
pub struct MicrobatchShapes<In> {
    x: Bundle<ShapedArray>,
    side: BTreeMap<usize, Bundle<ShapedArray>>,
    stays: bool,
    input: PhantomData<fn(In)>,
}

impl<In> PartialEq for MicrobatchShapes<In> {
    fn eq(&self, other: &Self) -> bool {
        (&self.x, &self.side, self.stays) == (&other.x, &other.side, other.stays)
    }
}

impl<In: Tree<Leaf = MpmdArray>> MicrobatchShapes<In> {
    /// Describes a microbatch with these global shapes of the pipeline input.
    pub fn new(x: Shapes<In>) -> Self {
        Self { x: Bundle::of(x), side: BTreeMap::new(), stays: false, input: PhantomData }
    }

    /// Sets the global shapes of a stage's side inputs.
    #[must_use]
    pub fn side(mut self, stage: usize, side: &impl Tree<Leaf = ShapedArray>) -> Self {
        let leaves = side.leaves().into_iter().cloned().collect();
        self.side.insert(stage, Bundle { structure: side.structure(), leaves });
        self
    }

    /// Declares that the caller keeps the arrays of all microbatches. Then they count all the time,
    /// not only until the pass that reads them.
    #[must_use]
    pub fn kept(mut self) -> Self {
        self.stays = true;
        self
    }
}

/// Returns, for each stage, the memory of each of its devices. Each array counts with its largest
/// size in any of the microbatches. `counts` maps the size of a buffer in its pool, in bytes, to
/// the size that counts here.
pub(super) fn stage_bytes<In: Tree<Leaf = MpmdArray>>(
    graph: &StageGraph,
    program: &Program,
    schedule: &Schedule,
    microbatches: &[MicrobatchShapes<In>],
    beside: &[MpmdArray],
    counts: &mut dyn FnMut(u64) -> u64,
) -> Result<Vec<BTreeMap<DeviceId, OnDevice>>> {
    graph.check_stages(schedule)?;
    let mut all: Option<Vec<BTreeMap<DeviceId, OnDevice>>> = None;
    for microbatch in microbatches {
        let found = bytes_of(graph, program, schedule.microbatches(), microbatch, beside, counts)?;
        match &mut all {
            None => all = Some(found),
            Some(all) => {
                let devices = all.iter_mut().flat_map(BTreeMap::values_mut);
                devices
                    .zip(found.iter().flat_map(BTreeMap::values))
                    .for_each(|(all, one)| all.widen(one));
            }
        }
    }
    all.ok_or_else(|| Error::kernel("the shapes of no microbatch"))
}

/// Returns the shapes of all stages for one microbatch. Calls `before` for each stage with its
/// index and the shapes of its input and side inputs, before the stage infers its own shapes.
pub(super) fn shapes_of<In: Tree<Leaf = MpmdArray>>(
    graph: &StageGraph,
    microbatch: &MicrobatchShapes<In>,
    mut before: impl FnMut(usize, &Bundle<ShapedArray>, &Bundle<ShapedArray>) -> Result<()>,
) -> Result<Vec<StageShapes>> {
    let sides = microbatch.side.iter().map(|(stage, side)| (*stage, &side.structure));
    graph.check_sides(sides).map_err(Error::kernel)?;
    let nothing = Bundle::empty();
    let mut shapes: Vec<StageShapes> = Vec::with_capacity(graph.stages.len());
    for (index, stage) in graph.stages.iter().enumerate() {
        let feed = &graph.feeds[index];
        let x = if index == 0 {
            microbatch.x.clone()
        } else {
            let (mut structures, mut leaves) = (Vec::new(), Vec::new());
            for part in &feed.parts {
                let part = part.of(&shapes[part.stage].out)?;
                leaves.extend(part.leaves);
                structures.push(part.structure);
            }
            Bundle { structure: feed.structure(structures), leaves }
        };
        let side = microbatch.side.get(&index).unwrap_or(&nothing);
        let of_stage = before(index, &x, side).and_then(|()| stage.shapes(&x, side));
        shapes.push(of_stage.map_err(|why| graph.at(index, &why))?);
    }
    Ok(shapes)
}

fn bytes_of<In: Tree<Leaf = MpmdArray>>(
    graph: &StageGraph,
    program: &Program,
    count: usize,
    microbatch: &MicrobatchShapes<In>,
    beside: &[MpmdArray],
    counts: &mut dyn FnMut(u64) -> u64,
) -> Result<Vec<BTreeMap<DeviceId, OnDevice>>> {
    let shapes = shapes_of(graph, microbatch, |_, _, _| Ok(()))?;
    let beside: Places = beside
        .iter()
        .filter_map(|array| Some((array.aval().clone(), array.sharding()?.clone())))
        .collect();
    // A device may have several stages: count the caller's arrays only once.
    let mut charged = BTreeSet::new();
    let mut found = Vec::with_capacity(shapes.len());
    for (index, stage) in shapes.iter().enumerate() {
        let params = Params::new(graph, &shapes, index);
        let mut devices = BTreeMap::new();
        let on =
            |device, counts: &mut dyn FnMut(u64) -> u64, places: &[(ShapedArray, Sharding)]| {
                on(device, counts, places).map_err(|why| graph.at(index, &why))
            };
        for device in stage.mesh.devices().iter().copied() {
            let mut bytes = StageBytes {
                kept: on(device, counts, &params.kept)?,
                gathered: on(device, counts, &params.gathered)?,
                gradients: on(device, counts, &stage.gradients)?,
                reduced: on(device, counts, &params.reduced)?,
                residual: on(device, counts, &stage.residual)?,
                unkept_residual: on(device, counts, &stage.unkept_residual)?,
                kept_residual: on(device, counts, &stage.kept_residual)?,
                weight_residual: on(device, counts, &stage.weight_residual)?,
                recomputes: graph.recomputes[index] && !stage.keeps_inputs,
                keeps_inputs: stage.keeps_inputs,
                fuses: stage.fuses,
                forward_only: !graph.trains[index],
                ..StageBytes::default()
            };
            if charged.insert(device) {
                bytes.kept += on(device, counts, &beside)?;
            }
            if index == 0 {
                bytes.brought += on(device, counts, &stage.input)?;
            }
            if let Some(side) = microbatch.side.get(&index) {
                // The caller's sharding is unknown. Assume that of the stage's input, if it divides
                // the shape.
                let sharding = stage.input.first().map(|(_, sharding)| sharding.clone());
                let place = |aval: ShapedArray| {
                    let fits = sharding.clone().filter(|input| input.layout(aval.shape()).is_ok());
                    (aval, fits.unwrap_or_else(|| stage.mesh.replicated()))
                };
                bytes.brought += on(
                    device,
                    counts,
                    &side.leaves.iter().cloned().map(place).collect::<Vec<_>>(),
                )?;
            }
            if microbatch.stays {
                bytes.kept += bytes.brought * count as u64;
                bytes.brought = 0;
            }
            let mut tied = Vec::with_capacity(params.tied.len());
            for (user, place) in &params.tied {
                tied.push((*user, on(device, counts, std::slice::from_ref(place))?));
            }
            devices.insert(
                device,
                OnDevice {
                    bytes,
                    moved_gradients: on(device, counts, &params.moved)?,
                    inputs: inputs(graph, program, &shapes, (index, device), counts)?,
                    outputs: outputs(graph, program, &shapes, (index, device), counts)?,
                    tied,
                },
            );
        }
        found.push(devices);
    }
    Ok(found)
}

/// Shapes and shardings that a step makes of a stage's parameters and of their gradients.
struct Params {
    kept: Places,
    gathered: Places,
    /// Gradients that are transferred to the stored shardings. The next list has the results that
    /// stay on this stage's devices.
    moved: Places,
    reduced: Places,
    /// (using stage, shape and sharding of its gradient here) for each tied parameter that this
    /// stage stores.
    tied: Vec<(usize, (ShapedArray, Sharding))>,
}

impl Params {
    fn new(graph: &StageGraph, shapes: &[StageShapes], index: usize) -> Self {
        let stage = &shapes[index];
        let owner_of = |place: usize| {
            let tie = graph.ties.iter().find(|tie| tie.user == (index, place))?;
            Some(&shapes[tie.owner.0].params[tie.owner.1].1)
        };
        let mut params =
            Self { kept: vec![], gathered: vec![], moved: vec![], reduced: vec![], tied: vec![] };
        for (place, (aval, stored)) in stage.params.iter().enumerate() {
            let compute = &stage.compute[place].1;
            // The gradient of a frozen parameter has no elements to move.
            let gradient = (!stage.frozen[place]).then_some(&stage.gradients[place].1);
            // Arrays that have the sharding already are not copied.
            let stored = if stage.own.contains(&place) {
                params.kept.push((aval.clone(), stored.clone()));
                if gradient.is_some_and(|gradient| gradient != stored) {
                    params.reduced.push((aval.clone(), stored.clone()));
                }
                Some(stored)
            } else {
                owner_of(place)
            };
            if stored.is_some_and(|stored| stored != compute) {
                params.gathered.push((aval.clone(), compute.clone()));
            }
            if let (Some(stored), Some(gradient)) = (stored, gradient)
                && stored != gradient
            {
                params.moved.push((aval.clone(), gradient.clone()));
            }
        }
        params.kept.extend(stage.prepared.clone());
        for tie in graph.ties.iter().filter(|tie| tie.owner.0 == index) {
            let (aval, stored) = &stage.params[tie.owner.1];
            let user = &shapes[tie.user.0];
            if !user.frozen[tie.user.1] && user.gradients[tie.user.1].1 != *stored {
                params.tied.push((tie.user.0, (aval.clone(), stored.clone())));
            }
        }
        params
    }
}

/// Returns the bytes on device `device` for each part of the input of stage `index`, and for its
/// gradient.
fn inputs(
    graph: &StageGraph,
    program: &Program,
    shapes: &[StageShapes],
    (index, device): (usize, DeviceId),
    counts: &mut dyn FnMut(u64) -> u64,
) -> Result<Vec<Input>> {
    let mut first = 0;
    let mut found = Vec::new();
    for part in &graph.feeds[index].parts {
        let giver = &shapes[part.stage];
        let given = &giver.output[part.places(&giver.out.structure)?];
        let here = &shapes[index].input[first..first + given.len()];
        first += given.len();
        found.push(Input {
            from: part.stage,
            bytes: taken(program, device, counts, here, given)?,
            gradient: if graph.stages[index].needs_dx() { on(device, counts, here)? } else { 0 },
            lends: lends(program, device, given, here)?,
        });
    }
    Ok(found)
}

/// Returns the bytes on device `device` for each output of stage `index`, and for the gradients of
/// its readers.
fn outputs(
    graph: &StageGraph,
    program: &Program,
    shapes: &[StageShapes],
    (index, device): (usize, DeviceId),
    counts: &mut dyn FnMut(u64) -> u64,
) -> Result<Vec<Output>> {
    let stage = &shapes[index];
    let mut all = Vec::with_capacity(stage.output.len());
    for output in &stage.output {
        let bytes = on(device, counts, std::slice::from_ref(output))?;
        all.push(Output { bytes, takers: Vec::new(), gradients: Vec::new() });
    }
    for (reader, part) in graph.readers[index].iter().copied() {
        let places = |part: usize| {
            graph.feeds[reader].parts[part]
                .places(&shapes[graph.feeds[reader].parts[part].stage].out.structure)
        };
        let first = (0..part).map(|part| Ok(places(part)?.len())).sum::<Result<usize>>()?;
        for (nth, place) in places(part)?.enumerate() {
            let there = std::slice::from_ref(&shapes[reader].input[first + nth]);
            let here = std::slice::from_ref(&stage.output[place]);
            all[place].takers.push((reader, lends(program, device, there, here)?));
            all[place].gradients.push((reader, taken(program, device, counts, here, there)?));
        }
    }
    Ok(all)
}

/// Returns the bytes of the arrays' shards on a device, as its pool and then `counts` count them.
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
    if region.is_empty() {
        0
    } else {
        counts(Pool::rounded(region.elements() * aval.dtype().size()))
    }
}

fn region(device: DeviceId, aval: &ShapedArray, sharding: &Sharding) -> Result<Option<Region>> {
    let layout =
        sharding.layout(aval.shape()).map_err(|why| Error::kernel(format!("{aval}: {why}")))?;
    Ok(layout.region_of(device).cloned())
}

/// Returns the bytes that a device needs to receive arrays from the shardings `from` in the
/// shardings `to`. Zero-copy transfers and shards already in place need none.
fn taken(
    program: &Program,
    device: DeviceId,
    counts: &mut dyn FnMut(u64) -> u64,
    to: &[(ShapedArray, Sharding)],
    from: &[(ShapedArray, Sharding)],
) -> Result<u64> {
    let mut bytes = 0;
    for ((aval, to), (_, from)) in to.iter().zip(from) {
        if to == from {
            continue;
        }
        let Some(region) = region(device, aval, to)? else { continue };
        if giver(program, device, aval, &region, from)?.is_none() {
            bytes += counted(&region, aval, counts);
        }
    }
    Ok(bytes)
}

/// Returns true if a device of `to` uses a shard of `device` in place.
fn lends(
    program: &Program,
    device: DeviceId,
    to: &[(ShapedArray, Sharding)],
    from: &[(ShapedArray, Sharding)],
) -> Result<bool> {
    for ((aval, to), (_, from)) in to.iter().zip(from) {
        if to == from {
            return Ok(true);
        }
        for taker in to.devices() {
            let Some(region) = region(*taker, aval, to)? else { continue };
            if giver(program, *taker, aval, &region, from)? == Some(device) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Returns the device that sends region `wanted` to `taker` by zero-copy transfer, or `None`.
/// Transfers inside a process are copies. A region that is not contiguous in one shard is assembled
/// from pieces.
fn giver(
    program: &Program,
    taker: DeviceId,
    aval: &ShapedArray,
    wanted: &Region,
    from: &Sharding,
) -> Result<Option<DeviceId>> {
    let process = |device| program.topology().process_of(device);
    let (Some(me), true) = (process(taker), !wanted.is_empty()) else { return Ok(None) };
    let layout =
        from.layout(aval.shape()).map_err(|why| Error::kernel(format!("{aval}: {why}")))?;
    let holds = |region: &Region| contiguous_bytes(region, wanted, aval.dtype().size()).is_some();
    let givers: Vec<DeviceId> =
        layout.iter().filter(|(_, region)| holds(region)).map(|(device, _)| device).collect();
    if givers.iter().any(|device| process(*device) == Some(me)) {
        return Ok(None);
    }
    let gives = |device: &DeviceId| {
        process(*device).is_some_and(|giver| program.zero_copy_between(giver, me))
    };
    Ok(givers.into_iter().find(gives))
}

impl Program {
    /// Returns true if the two processes use zero-copy transfers. If neither is this process,
    /// returns false.
    fn zero_copy_between(&self, giver: ProcessId, taker: ProcessId) -> bool {
        let me = self.process();
        (giver == me && self.runtime.zero_copy(taker))
            || (taker == me && self.runtime.zero_copy(giver))
    }
}
