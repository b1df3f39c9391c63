//! A kernel's call on one device.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_transport::memory::Reservation;
use mpmd_transport::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::plan::{Bound, CallPlan, Seat};
use crate::array::{MpmdArray, Placed};
use crate::aval::HostArray;
use crate::device_put::panic_text;
use crate::error::{Error, Result};
use crate::kernel::{Context, Kernel, Shapes, View, ViewMut, Views, ViewsMut};
use crate::program::Program;
use crate::region::Region;
use crate::reshard::copy_region;
use crate::runtime::{Exchange, OpGuard, Promises, Runtime, SlotUse, Waits};
use crate::topology::DeviceId;
use crate::tree::Tree;

/// One device's part of a call, waiting in the device's queue.
pub(super) struct DeviceCall<K: Kernel> {
    pub(super) bound: Arc<Bound<K>>,
    pub(super) seat: usize,
    pub(super) op: u64,
    pub(super) at: &'static Location<'static>,
    pub(super) inputs: Vec<Input>,
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
    Slot(SlotUse),
    /// This call gets the memory; later readers hear of it.
    Donated(Arc<Placed>),
}

pub(super) type Fallible<T> = std::result::Result<T, Arc<Failure>>;

impl<K: Kernel> DeviceCall<K> {
    /// Waits for the inputs, runs the kernel, and ends the outputs.
    pub(super) fn run(self) {
        let Self { bound, seat, op, at, inputs, mut promises, memory, guard, leftovers } = self;
        let Bound { kernel, plan } = &*bound;
        let (runtime, seat) = (&plan.runtime, &plan.seats[seat]);
        let device = seat.place.device;
        let exchange = Exchange { runtime: runtime.clone(), guard: guard.clone() };
        let mut context = Context::new(&plan.mesh, &seat.place, exchange, op);
        let result = wait_for_inputs(inputs, device, &runtime.waits).and_then(|inputs| {
            runtime.status.device_starts(seat.local_index, op, seat.what.clone());
            let mut inputs: Vec<Option<SharedBuffer>> = inputs.into_iter().map(Some).collect();
            let mut buffers = prepare_outputs(plan, seat, runtime, op, &mut inputs, memory?)?;
            let ran = catch_unwind(AssertUnwindSafe(|| {
                run_kernel(&**kernel, plan, seat, &mut context, &inputs, &mut buffers)
            }));
            drop(inputs);
            let why = match ran {
                Ok(Ok(())) if context.not_called() == 0 => return Ok(buffers),
                Ok(Ok(())) => {
                    format!("its signature declares {} more collectives than it calls", context.not_called())
                }
                Ok(Err(Error::Failed(failure))) => return Err(failure),
                Ok(Err(error)) => error.to_string(),
                Err(panic) => panic_text(&*panic),
            };
            let message = format!(
                "kernel {} of operation {op} at {at} failed on device {device}: {why}",
                kernel.name()
            );
            Err(Arc::new(Failure::new(FailureKind::Kernel, runtime.me, op, message)))
        });
        runtime.status.device_idle(seat.local_index);
        match result {
            Ok(buffers) => {
                buffers.into_iter().for_each(|buffer| promises.keep_next(Ok(buffer.freeze())));
            }
            Err(failure) => {
                runtime.remember(&failure);
                // Whoever waits for this device in a collective must not wait for ever.
                context.abandon(&failure);
                promises.fail(&failure);
            }
        }
        drop(leftovers);
        drop(context);
        drop(guard);
    }
}

/// Ends: every input is made by an operation with a lower number.
fn wait_for_inputs(inputs: Vec<Input>, device: DeviceId, waits: &Waits) -> Fallible<Vec<SharedBuffer>> {
    inputs
        .into_iter()
        .map(|input| match input {
            Input::Host(bytes) => Ok(bytes),
            Input::Slot(slot) => slot.wait(waits),
            Input::Donated(placed) => {
                let slot = placed.slot(device).expect("the plan has checked that the device has its part");
                drop(waits.wait(slot, None));
                slot.take(placed.donated_failure()).expect("it has ended")
            }
        })
        .collect()
}

/// Memory for the outputs; those that are inputs updated in place hold the inputs' values.
fn prepare_outputs(
    plan: &CallPlan,
    seat: &Seat,
    runtime: &Runtime,
    op: u64,
    inputs: &mut [Option<SharedBuffer>],
    memory: Reservation,
) -> Fallible<Vec<OwnedBuffer>> {
    let pool = &runtime.devices[seat.local_index].pool;
    let failed = |error: mpmd_transport::memory::OutOfMemory| {
        let message = format!("operation {op} ({}): out of memory on {error}", plan.what);
        Arc::new(Failure::new(FailureKind::Memory, runtime.me, op, message))
    };
    let mut reserved = memory.allocate_all(plan.fresh(seat)).map_err(failed)?.into_iter();
    let mut fresh = |bytes: usize| reserved.next().map_or_else(|| pool.allocate(bytes).map_err(failed), Ok);
    plan.outputs
        .iter()
        .zip(&seat.outputs)
        .map(|(output, info)| {
            let takes_over = plan.takes_over(output);
            let input = output.alias.and_then(|index| Some((index, inputs[index].take()?)));
            let Some((index, input)) = input else {
                let buffer = if takes_over {
                    pool.allocate(info.bytes()).map_err(failed)
                } else {
                    fresh(info.bytes())
                };
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
        })
        .collect()
}

fn copy_in(from: &[u8], region: &Region, to: &mut [u8], info: &crate::kernel::ShardInfo) {
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
