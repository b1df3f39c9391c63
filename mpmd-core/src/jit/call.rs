//! A kernel's call on one device.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_transport::memory::Reservation;
use mpmd_transport::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::plan::{Bound, CallPlan, OutputPlan, Seat};
use crate::array::{Handle, MpmdArray};
use crate::aval::HostArray;
use crate::device_put::panic_text;
use crate::error::{Error, Result};
use crate::kernel::{Context, Kernel, Shapes, ShardInfo, View, ViewMut, Views, ViewsMut};
use crate::program::Program;
use crate::region::Region;
use crate::reshard::copy_region;
use crate::runtime::{Exchange, Job, OpGuard, Promises, Runtime, SlotUse, Waits, Work};
use crate::topology::DeviceId;
use crate::tree::Tree;

/// One device's part of a call, waiting in the device's queue. The box, and the room in its lists, are used
/// again by a later call.
pub(super) struct DeviceCall<K: Kernel> {
    inputs: Vec<Input>,
    /// The inputs once they are there.
    arrived: Vec<Option<SharedBuffer>>,
    outputs: Vec<OwnedBuffer>,
    // Last, so that where it never runs its operation ends after its buffers are gone.
    issued: Option<Issued<K>>,
}

/// What one device's part of a call is, but for its inputs.
pub(super) struct Issued<K: Kernel> {
    pub(super) bound: Arc<Bound<K>>,
    pub(super) seat: usize,
    pub(super) op: u64,
    pub(super) at: &'static Location<'static>,
    pub(super) promises: Promises,
    /// For all outputs that do not take an input's memory over: set aside when the call was issued, or why
    /// it could not be.
    pub(super) memory: Fallible<Reservation>,
    pub(super) guard: OpGuard,
    /// Dropped by the last device of this process that ends the call.
    pub(super) leftovers: Option<Arc<Leftovers>>,
}

/// What arrived for a call's collectives and was not picked up: it goes when the call has ended on
/// every device of this process, and not before, since the devices take what is theirs at their own
/// pace.
pub(super) struct Leftovers {
    pub(super) runtime: Arc<Runtime>,
    pub(super) op: u64,
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        self.runtime.forget(self.op);
    }
}

/// Where an input's values on this device come from.
pub(super) enum Input {
    Host(SharedBuffer),
    /// What an operation makes, or has made.
    Slot(SlotUse, u64),
    /// This call gets the memory; later readers hear of it.
    Donated(Handle),
}

pub(super) type Fallible<T> = std::result::Result<T, Arc<Failure>>;

impl<K: Kernel> DeviceCall<K> {
    /// Makes it ready for a device's queue.
    pub(super) fn issue(mut self: Box<Self>, issued: Issued<K>, inputs: impl Iterator<Item = Input>) -> Job {
        self.inputs.extend(inputs);
        self.issued = Some(issued);
        self
    }

    /// Waits for the inputs, runs the kernel: then the outputs are filled.
    fn compute(&mut self, call: &Call<'_, K>, context: &mut Context<'_>, memory: Memory) -> Fallible<()> {
        let Self { inputs, arrived, outputs, .. } = self;
        let Call { bound, seat, op, at } = call;
        let Bound { kernel, plan, .. } = bound;
        let (runtime, device) = (&plan.runtime, seat.place.device);
        let since = runtime.trace.now();
        let last = wait_for_inputs(inputs, arrived, device, &runtime.waits)?;
        let started = runtime.trace.now();
        runtime.status.device_starts(seat.local_index, *op, seat.what.clone());
        prepare_outputs(plan, seat, runtime, *op, arrived, outputs, memory?)?;
        runtime.trace_start(seat.local_index, *op, started, since, last);
        let ran =
            catch_unwind(AssertUnwindSafe(|| run_kernel(&**kernel, plan, seat, context, arrived, outputs)));
        arrived.clear();
        let why = match ran {
            Ok(Ok(())) if context.not_called() == 0 => return Ok(()),
            Ok(Ok(())) => {
                format!("its signature declares {} more collectives than it calls", context.not_called())
            }
            Ok(Err(Error::Failed(failure))) => return Err(failure),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic_text(&*panic),
        };
        let message =
            format!("kernel {} of operation {op} at {at} failed on device {device}: {why}", kernel.name());
        Err(Arc::new(Failure::new(FailureKind::Kernel, runtime.me, *op, message)))
    }
}

impl<K: Kernel> Work for DeviceCall<K> {
    /// Computes, and ends the outputs.
    fn run(mut self: Box<Self>) {
        let Some(issued) = self.issued.take() else { return };
        let Issued { bound, seat, op, at, mut promises, memory, guard, leftovers } = issued;
        let (runtime, seat) = (&bound.plan.runtime, &bound.plan.seats[seat]);
        let exchange = Exchange { runtime: runtime.clone(), guard };
        let mut context = Context::new(&bound.plan.mesh, &seat.place, exchange, op);
        let result = self.compute(&Call { bound: &bound, seat, op, at }, &mut context, memory);
        runtime.status.device_idle(seat.local_index);
        runtime.trace_end(seat.local_index, op);
        match result {
            Ok(()) => self.outputs.drain(..).for_each(|buffer| promises.keep_next(Ok(buffer.freeze()))),
            Err(failure) => {
                // Whoever waits for memory looks when operations end.
                self.inputs.clear();
                self.arrived.clear();
                self.outputs.clear();
                runtime.remember(&failure);
                // Whoever waits for this device in a collective must not wait for ever.
                context.abandon(&failure);
                promises.fail(&failure);
            }
        }
        bound.keep(self);
        drop(leftovers);
        // With it the operation ends.
        drop(context);
    }
}

impl<K: Kernel> Default for DeviceCall<K> {
    fn default() -> Self {
        Self { issued: None, inputs: Vec::new(), arrived: Vec::new(), outputs: Vec::new() }
    }
}

type Memory = Fallible<Reservation>;

/// Which call runs on which device.
struct Call<'a, K: Kernel> {
    bound: &'a Bound<K>,
    seat: &'a Seat,
    op: u64,
    at: &'static Location<'static>,
}

/// Ends: every input is made by an operation with a lower number. Returns the one that was waited for last, if
/// any was: of those that come after it all were there by then.
fn wait_for_inputs(
    inputs: &mut Vec<Input>,
    arrived: &mut Vec<Option<SharedBuffer>>,
    device: DeviceId,
    waits: &Waits,
) -> Fallible<Option<u64>> {
    let mut last = None;
    for input in inputs.drain(..) {
        arrived.push(Some(match input {
            Input::Host(bytes) => bytes,
            Input::Slot(slot, op) => {
                if !slot.has_ended() {
                    last = Some(op);
                }
                slot.wait(waits)?
            }
            Input::Donated(placed) => {
                let slot = placed.slot(device).expect("the plan has checked that the device has its part");
                if !slot.has_ended() {
                    last = Some(placed.origin.op);
                }
                drop(waits.wait(slot, None));
                slot.take(placed.donated_failure()).expect("it has ended")?
            }
        }));
    }
    Ok(last)
}

/// Memory for the outputs; those that are inputs updated in place hold the inputs' values.
fn prepare_outputs(
    plan: &CallPlan,
    seat: &Seat,
    runtime: &Runtime,
    op: u64,
    inputs: &mut [Option<SharedBuffer>],
    buffers: &mut Vec<OwnedBuffer>,
    memory: Reservation,
) -> Fallible<()> {
    let pool = &runtime.devices[seat.local_index].pool;
    let failed = |error: mpmd_transport::memory::OutOfMemory| {
        let message =
            format!("operation {op} ({}): out of memory on {error}{}", plan.what, runtime.on_loan());
        Arc::new(Failure::new(FailureKind::Memory, runtime.me, op, message))
    };
    // One, as most kernels have, takes no list.
    let (mut one, mut several) = (None, Vec::new().into_iter());
    match plan.fresh(seat).count() {
        0 => drop(memory),
        1 => one = Some(memory.allocate().map_err(failed)?),
        _ => several = memory.allocate_all(plan.fresh(seat)).map_err(failed)?.into_iter(),
    }
    let mut fresh = |bytes: usize| {
        let reserved = one.take().or_else(|| several.next());
        reserved.map_or_else(|| pool.allocate(bytes).map_err(failed), Ok)
    };
    let mut buffer = |output: &OutputPlan, info: &ShardInfo| {
        let takes_over = plan.takes_over(output);
        let input = output.alias.and_then(|index| Some((index, inputs[index].take()?)));
        let Some((index, input)) = input else {
            let buffer =
                if takes_over { pool.allocate(info.bytes()).map_err(failed) } else { fresh(info.bytes()) };
            return buffer.map(poison_fresh);
        };
        // Host values are seen whole by every device, and an output may be a part of them.
        if takes_over && seat.inputs[index].region == info.region {
            return runtime.take_over(input, pool, op, &*plan.what).map_err(failed);
        }
        let mut buffer =
            if takes_over { pool.allocate(info.bytes()).map_err(failed)? } else { fresh(info.bytes())? };
        copy_in(&input, &seat.inputs[index].region, &mut buffer, info);
        Ok(buffer)
    };
    for (output, info) in plan.outputs.iter().zip(&seat.outputs) {
        buffers.push(buffer(output, info)?);
    }
    Ok(())
}

fn copy_in(from: &[u8], region: &Region, to: &mut [u8], info: &ShardInfo) {
    copy_region(from, region, to, &info.region, &info.region, info.global.dtype().size());
}

/// In debug builds an output that the kernel does not fill shows: all ones is a NaN in every float.
fn poison_fresh(mut buffer: OwnedBuffer) -> OwnedBuffer {
    if cfg!(debug_assertions) {
        buffer.fill(0xff);
    }
    buffer
}

fn run_kernel<K: Kernel>(
    kernel: &K,
    plan: &CallPlan,
    seat: &Seat,
    context: &mut Context<'_>,
    inputs: &[Option<SharedBuffer>],
    outputs: &mut [OwnedBuffer],
) -> Result<()> {
    let views = plan.inputs.iter().zip(inputs).zip(&seat.inputs).map(|((input, bytes), info)| match bytes {
        Some(bytes) if !input.in_place => View::new(bytes, info),
        _ => View::in_place(info),
    });
    let x = <Views<'_, K::In> as Tree>::from_leaves(&plan.input_structure, views)?;
    let views = outputs.iter_mut().zip(&seat.outputs).map(|(bytes, info)| ViewMut::new(bytes, info));
    let y = <ViewsMut<'_, K::Out> as Tree>::from_leaves(&plan.output_structure, views)?;
    kernel.run(context, x, y)
}

/// Runs a kernel on host values, without a job: on one device that sees everything. For tests and for
/// debugging; collectives go among the one device, so a `permute` by a pair of two devices, or a `broadcast`
/// from another than the first, is refused.
///
/// # Errors
///
/// Where the kernel refuses the shapes, its signature contradicts itself, or it fails.
pub fn run_here<K: Kernel>(
    kernel: K,
    x: &<K::In as Tree>::With<HostArray>,
) -> Result<<K::Out as Tree>::With<HostArray>> {
    let structure = x.structure();
    let leaves = x.leaves();
    let avals = leaves.iter().map(|leaf| leaf.aval().clone());
    let signature = kernel.infer(&<Shapes<K::In> as Tree>::from_leaves(&structure, avals)?)?;
    let mut axes: Vec<(&str, usize)> = vec![("here", 1)];
    for collective in &signature.collectives {
        if axes.iter().all(|(axis, _)| *axis != collective.axis) {
            axes.push((&collective.axis, 1));
        }
    }
    let mut program = Program::builder().alone()?;
    let mesh = program.mesh(&axes)?;
    let bound = program.jit(kernel).on(&mesh).outputs(mesh.replicated()).build()?;
    let arrays = leaves.into_iter().map(|leaf| MpmdArray::from_host(leaf.clone()));
    let y = bound.call(&mut program, K::In::from_leaves(&structure, arrays)?)?;
    let values = y
        .leaves()
        .into_iter()
        .map(|array| array.to_host().map(|values| values.unwrap_or_else(|| HostArray::scalar(0u8))));
    let values = values.collect::<Result<Vec<_>>>()?;
    let result = <<K::Out as Tree>::With<HostArray> as Tree>::from_leaves(&y.structure(), values)?;
    program.finish()?;
    Ok(result)
}
