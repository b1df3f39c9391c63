//! A kernel's call on one device.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_transport::memory::Reservation;
use mpmd_transport::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::plan::{CallPlan, Seat};
use crate::array::MpmdArray;
use crate::aval::HostArray;
use crate::device_put::panic_text;
use crate::error::{Error, Result};
use crate::kernel::{Context, Kernel, Shapes, View, ViewMut, Views, ViewsMut};
use crate::program::Program;
use crate::region::Region;
use crate::reshard::copy_region;
use crate::runtime::{Exchange, OpGuard, Promise, Runtime, Slot, SlotUse};
use crate::tree::Tree;

/// One device's part of a call, waiting in the device's queue.
pub(super) struct DeviceCall<K: Kernel> {
    pub(super) kernel: Arc<K>,
    pub(super) plan: Arc<CallPlan>,
    pub(super) seat: usize,
    pub(super) op: u64,
    pub(super) at: &'static Location<'static>,
    pub(super) inputs: Vec<Input>,
    pub(super) outputs: Vec<Output>,
    pub(super) runtime: Arc<Runtime>,
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
    Host(HostArray),
    Slot(SlotUse),
    /// This call gets the memory; later readers get the failure.
    Donated(Slot, Arc<Failure>),
}

/// An output on this device.
pub(super) struct Output {
    pub(super) promise: Promise,
    pub(super) memory: Memory,
}

/// Where an output's memory comes from.
pub(super) enum Memory {
    /// Set aside when the call was issued, or why it could not be.
    New(std::result::Result<Reservation, Arc<Failure>>),
    /// From the donated input that it is aliased to.
    TakenOver,
}

type Fallible<T> = std::result::Result<T, Arc<Failure>>;

impl<K: Kernel> DeviceCall<K> {
    /// Waits for the inputs, runs the kernel, and ends the outputs.
    pub(super) fn run(self) {
        let Self { kernel, plan, seat, op, at, inputs, outputs, runtime, guard, leftovers } = self;
        let seat = &plan.seats[seat];
        let device = seat.place.device;
        let exchange = Exchange { runtime: runtime.clone(), guard: guard.clone() };
        let mut context = Context::new(&plan.mesh, &seat.place, exchange, op);
        let (promises, memories): (Vec<Promise>, Vec<Memory>) =
            outputs.into_iter().map(|output| (output.promise, output.memory)).unzip();
        let result = wait_for_inputs(inputs).and_then(|inputs| {
            runtime.status.device_starts(seat.local_index, op, plan.what.clone());
            let mut inputs: Vec<Option<SharedBuffer>> = inputs.into_iter().map(Some).collect();
            let mut buffers = prepare_outputs(&plan, seat, &runtime, op, &mut inputs, memories)?;
            let ran = catch_unwind(AssertUnwindSafe(|| {
                run_kernel(&*kernel, &plan, seat, &mut context, &inputs, &mut buffers)
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
                for (promise, buffer) in promises.into_iter().zip(buffers) {
                    promise.keep(Ok(buffer.freeze()));
                }
            }
            Err(failure) => {
                runtime.remember(&failure);
                // Whoever waits for this device in a collective must not wait for ever.
                context.abandon(&failure);
                promises.into_iter().for_each(|promise| promise.keep(Err(failure.clone())));
            }
        }
        drop(leftovers);
        drop(context);
        drop(guard);
    }
}

/// Ends: every input is made by an operation with a lower number.
fn wait_for_inputs(inputs: Vec<Input>) -> Fallible<Vec<SharedBuffer>> {
    inputs
        .into_iter()
        .map(|input| match input {
            Input::Host(host) => Ok(host.bytes().clone()),
            Input::Slot(slot) => slot.wait(),
            Input::Donated(slot, failure) => {
                drop(slot.wait_until(None));
                slot.take(failure).expect("it has ended")
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
    memories: Vec<Memory>,
) -> Fallible<Vec<OwnedBuffer>> {
    let pool = &runtime.devices[seat.local_index].pool;
    let failed = |error: mpmd_transport::memory::OutOfMemory| {
        let message = format!("operation {op} ({}): out of memory on {error}", plan.what);
        Arc::new(Failure::new(FailureKind::Memory, runtime.me, op, message))
    };
    plan.outputs
        .iter()
        .zip(&seat.outputs)
        .zip(memories)
        .map(|((output, info), memory)| {
            let input = output.alias.and_then(|index| Some((index, inputs[index].take()?)));
            let Some((index, input)) = input else {
                return match memory {
                    Memory::New(reservation) => reservation?.allocate().map_err(failed),
                    Memory::TakenOver => pool.allocate(info.bytes()).map_err(failed),
                }
                .map(poison_fresh);
            };
            let input = match memory {
                Memory::TakenOver if seat.inputs[index].region == info.region => {
                    return runtime.take_over(input, pool, op, &*plan.what).map_err(failed);
                }
                // Host values are seen whole by every device, and an output may be a part of them.
                Memory::TakenOver => input,
                Memory::New(reservation) => {
                    let mut buffer = reservation?.allocate().map_err(failed)?;
                    copy_in(&input, &seat.inputs[index].region, &mut buffer, info);
                    return Ok(buffer);
                }
            };
            let mut buffer = pool.allocate(info.bytes()).map_err(failed)?;
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
