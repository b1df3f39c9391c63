//! A kernel's call on one device: the part that all kinds of devices share, and the execution on
//! CPU devices.

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mpmd_base::block::{now, since};
use mpmd_device::copy::copy_region;
use mpmd_memory::{OutOfMemory, Reservation};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::{Failure, FailureKind};

use super::plan::{Bound, CallPlan, DeviceBinding};
use crate::api::program::Program;
use crate::error::{Error, Result, panic_text};
use crate::exec::array::host_array::HostArray;
use crate::exec::array::object::{NewObject, ObjectCell, ObjectTooLarge};
use crate::exec::array::{ArrayHandle, MpmdArray};
use crate::exec::{
    AsyncBuffer, BufferUse, Job, KernelExchange, OpGuard, Parker, Resolvers, Runtime, Work,
};
use crate::kernel::{Context, Kernel, Shapes, ShardInfo, UntypedKernel, View, ViewMut};
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;
use mpmd_layout::tree::Tree;
use mpmd_record::trace::Label;

/// One device's part of a call, as a job for the device's queue. Later calls of the same [`Bound`]
/// reuse the box and the capacity of its lists.
#[derive(Default)]
pub(super) struct DeviceCall {
    pub(super) inputs: Vec<CallInput>,
    /// Buffers of the inputs that have arrived, in the order of `inputs`. `None` if an output is
    /// initialised from the buffer.
    pub(super) arrived: Vec<Option<SharedBuffer>>,
    pub(super) outputs: Vec<OwnedBuffer>,
    /// Objects that the kernel has made, by output index. Empty if the kernel makes no objects.
    pub(super) made: Vec<Option<NewObject>>,
    /// Reserved memory for new objects with declared bytes, in the plan's order.
    pub(super) held: Vec<Reservation>,
    /// The initial contents of each output, in order. Used only on accelerators, as is `unfilled`:
    /// the inputs that this call took before they were filled.
    pub(super) fills: Vec<Fill>,
    pub(super) unfilled: Vec<Unfilled>,
    /// The objects among the call's inputs. If the call fails, they fail too.
    pub(super) objects: Vec<AsyncBuffer>,
    // Last: if the call never runs, its operation ends after its buffers are freed.
    issued: Option<IssuedCall>,
}

/// The data that one device needs to run its part of an issued call, except the inputs.
pub(super) struct IssuedCall {
    pub(super) bound: Arc<Bound>,
    pub(super) seat: usize,
    pub(super) op: u64,
    /// The source line that issued the call. `label` is the program's label at that time.
    pub(super) at: &'static Location<'static>,
    pub(super) label: Option<Label>,
    pub(super) resolvers: Resolvers,
    /// Memory for the new outputs, reserved when the call was issued, or the failure of the
    /// reservation. Outputs that take over an input's memory need none.
    pub(super) memory: CallResult<Reservation>,
    pub(super) guard: OpGuard,
    /// A handle that all devices of this process share for the call. The last device to drop it
    /// discards collective messages that no device took. `None` without collectives.
    pub(super) leftovers: Option<Arc<Leftovers>>,
}

/// Discards, when dropped, the collective messages of a call that no device took. All devices of
/// this process share it, so it is dropped after the call has ended on each of them.
pub(super) struct Leftovers {
    pub(super) runtime: Arc<Runtime>,
    pub(super) op: u64,
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        self.runtime.forget(self.op);
    }
}

/// The source of an input's values on this device.
pub(super) enum CallInput {
    Host(SharedBuffer),
    AsyncBuffer {
        /// A registered use of the input's async buffer.
        slot: BufferUse,
        /// The number of the operation that fills the buffer.
        op: u64,
    },
    /// An array that is donated to this call. Later uses of the array fail.
    Donated(ArrayHandle),
}

pub(super) type CallResult<T> = std::result::Result<T, Arc<Failure>>;

impl DeviceCall {
    /// Stores the inputs and `issued`, and returns the call as a job for the device's queue. Does
    /// not run the kernel.
    pub(super) fn issue(
        mut self: Box<Self>,
        issued: IssuedCall,
        inputs: impl Iterator<Item = CallInput>,
        objects: impl Iterator<Item = AsyncBuffer>,
    ) -> Job {
        self.inputs.extend(inputs);
        self.objects.extend(objects);
        self.issued = Some(issued);
        self
    }

    /// Blocks until the inputs have arrived, runs the kernel, and leaves the filled outputs in
    /// `self.outputs`. Fails if an input, the memory or the kernel fails.
    fn compute(
        &mut self,
        call: &RunningCall<'_>,
        context: &mut Context<'_>,
        memory: ReservedMemory,
    ) -> CallResult<()> {
        let Self {
            inputs,
            arrived,
            outputs,
            made,
            held,
            ..
        } = self;

        let runtime = call.runtime();
        let seat = call.seat;
        let asked = runtime.trace.now();
        let last = wait_for_inputs(inputs, arrived, seat.place.device, &runtime.parker)?;
        let started = runtime.trace.now();
        let stage = call.label.map(|label| label.stage);
        runtime
            .status
            .device_starts(seat.local_index, call.op, seat.what.clone(), stage);

        prepare_outputs(call, arrived, memory?, held, |mut buffer, fill, info| {
            match fill {
                Fill::Anything => poison(&mut buffer),
                Fill::Own => {}
                Fill::From { input, index } => {
                    copy_in(&input, &seat.inputs[index].region, &mut buffer, info)
                }
            }
            outputs.push(buffer);
        })?;

        runtime.trace_start(seat.local_index, call.op, started, asked, last);
        let span = runtime.enter_kernel(call.op, seat.place.device, "ran");
        let began = runtime.times_kernels.load(Ordering::Relaxed).then(now);
        let ran = call.run(context, arrived, outputs, made);
        if let Some(began) = began {
            runtime
                .kernel_nanos
                .fetch_add(since(began).as_nanos() as u64, Ordering::Relaxed);
        }

        drop(span);
        arrived.clear();
        ran
    }

    /// Runs the call on a CPU device. Blocks for the inputs, runs the kernel, and resolves the
    /// outputs with values or the failure. Then releases this device's guard of the operation.
    fn run_here(mut self: Box<Self>, issued: IssuedCall) {
        let IssuedCall {
            bound,
            seat,
            op,
            at,
            label,
            mut resolvers,
            memory,
            guard,
            leftovers,
        } = issued;
        let call = RunningCall::new(&bound, seat, op, at, label);

        let runtime = call.runtime();
        let seat = call.seat;
        let exchange = KernelExchange {
            runtime: runtime.clone(),
            guard,
            on_thread_of: Some(seat.local_index),
        };
        let mut context = Context::new(&bound.plan.mesh, &seat.place, exchange, op);

        let result = self.compute(&call, &mut context, memory);
        runtime.status.device_ends(seat.local_index, op);
        runtime.trace_end(seat.local_index, op);
        match result {
            Ok(()) => runtime.send_together(|| {
                self.results(&call)
                    .for_each(|buffer| resolvers.keep_next(Ok(buffer)));
            }),
            Err(failure) => {
                // Freed first: threads that wait for memory check it when operations end.
                self.clear();
                poison_objects(&self.objects, &failure);
                runtime.remember(&failure);
                // Devices that wait for this one in a collective must not wait forever.
                context.abandon(&failure);
                resolvers.fail(&failure);
            }
        }

        // The last handle of an object may be here. It goes before the operation ends.
        self.objects.clear();
        bound.keep(self);
        drop(leftovers);
        // This ends the operation.
        drop(context);
    }

    /// Takes the outputs as buffers, in order. A new object becomes a buffer that leads to its
    /// object cell.
    pub(super) fn results<'a>(
        &'a mut self,
        call: &RunningCall<'a>,
    ) -> impl Iterator<Item = SharedBuffer> + 'a {
        let runtime = call.runtime();
        let seat = call.seat;
        let Self {
            outputs,
            made,
            held,
            ..
        } = self;

        let declared = &call.bound.plan.objects.bytes;
        let mut made = made.drain(..);
        let mut held = held.drain(..);
        let mut next = declared.iter().map(|bytes| bytes.output).peekable();
        outputs
            .drain(..)
            .enumerate()
            .map(move |(index, buffer)| match made.next().flatten() {
                None => buffer.freeze(),
                Some(object) => {
                    let memory = next.next_if_eq(&index).and_then(|_| held.next());
                    object.into_cell(memory, runtime, seat.local_index)
                }
            })
    }

    /// Drops all inputs and outputs with their buffers, and keeps the capacity of the lists.
    pub(super) fn clear(&mut self) {
        self.inputs.clear();
        self.arrived.clear();
        self.outputs.clear();
        self.made.clear();
        self.held.clear();
        self.fills.clear();
        self.unfilled.clear();
    }
}

impl Work for DeviceCall {
    fn run(mut self: Box<Self>) {
        let Some(issued) = self.issued.take() else {
            return;
        };
        let plan = &issued.bound.plan;
        match plan.runtime.devices[plan.seats[issued.seat].local_index]
            .accelerator
            .clone()
        {
            None => self.run_here(issued),
            Some(accelerator) => self.run_on_cuda(&accelerator, issued),
        }
    }
}

/// An input that the call took before it was filled. If the work that fills it fails, the call
/// fails too.
pub(super) enum Unfilled {
    Use(BufferUse),
    Donated(ArrayHandle),
}

/// The contents of an output when the kernel begins.
pub(super) enum Fill {
    /// Undefined contents.
    Anything,
    /// The present values of the memory, which the output has taken over from an input.
    Own,
    /// Values copied from an input.
    From {
        input: SharedBuffer,
        /// Index of the input among the call's inputs.
        index: usize,
    },
}

pub(super) type ReservedMemory = CallResult<Reservation>;

/// The reason why a call fails because of an object that its kernel should have made, or that is
/// too large.
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum ObjectError {
    #[error(transparent)]
    TooLarge(#[from] ObjectTooLarge),
    /// The kernel has not made the object that is one of its outputs.
    #[error("it has not made the object of its output {output}")]
    Missing { output: usize },
}

/// A call in progress on one device.
pub(super) struct RunningCall<'a> {
    pub(super) bound: &'a Bound,
    pub(super) seat: &'a DeviceBinding,
    pub(super) op: u64,
    pub(super) at: &'static Location<'static>,
    pub(super) label: Option<Label>,
}

impl<'a> RunningCall<'a> {
    /// Creates the view of a call on the device at index `seat` of the plan's `seats`.
    pub(super) fn new(
        bound: &'a Bound,
        seat: usize,
        op: u64,
        at: &'static Location<'static>,
        label: Option<Label>,
    ) -> Self {
        Self {
            bound,
            seat: &bound.plan.seats[seat],
            op,
            at,
            label,
        }
    }

    pub(super) fn runtime(&self) -> &'a Arc<Runtime> {
        &self.bound.plan.runtime
    }

    /// Runs the kernel on this thread. The call fails if the kernel returns an error, panics, or
    /// leaves out a declared collective. Objects that the kernel makes are left in `made`.
    pub(super) fn run(
        &self,
        context: &mut Context<'_>,
        inputs: &[Option<SharedBuffer>],
        outputs: &mut [OwnedBuffer],
        made: &mut Vec<Option<NewObject>>,
    ) -> CallResult<()> {
        let Bound { kernel, plan, .. } = self.bound;
        let objects = &plan.objects;
        for cell in objects
            .inputs
            .iter()
            .filter_map(|index| cell_of(inputs, *index))
        {
            if let Some(failure) = cell.failure() {
                return Err(failure.clone());
            }
        }
        if !objects.outputs.is_empty() {
            made.resize_with(outputs.len(), || None);
        }

        let ran = catch_unwind(AssertUnwindSafe(|| {
            run_kernel(&**kernel, plan, self.seat, context, inputs, outputs, made)
        }));
        match ran {
            Ok(Ok(())) if context.not_called() == 0 => {}
            Ok(Ok(())) => {
                return Err(self.failure(&format_args!(
                    "its signature declares {} more collectives than it calls",
                    context.not_called()
                )));
            }
            Ok(Err(Error::Failed(failure))) => return Err(failure),
            Ok(Err(error)) => return Err(self.failure(&error)),
            Err(panic) => return Err(self.failure(&panic_text(&*panic))),
        }

        self.check_objects(inputs, made)
            .map_err(|why| self.failure(&why))
    }

    /// Returns an error if the kernel has not made a declared object, or if an object reports more
    /// bytes than declared.
    fn check_objects(
        &self,
        inputs: &[Option<SharedBuffer>],
        made: &[Option<NewObject>],
    ) -> std::result::Result<(), ObjectError> {
        let objects = &self.bound.plan.objects;
        for output in &objects.outputs {
            match &made[*output] {
                Some(object) => object.check(objects.declared(*output).unwrap_or(0))?,
                None => return Err(ObjectError::Missing { output: *output }),
            }
        }
        objects
            .inputs
            .iter()
            .filter_map(|index| cell_of(inputs, *index))
            .try_for_each(ObjectCell::check)?;
        Ok(())
    }

    /// Allocates `bytes` of host staging memory, the source of copies to accelerators. Fails if
    /// there is no memory.
    pub(super) fn staging(&self, bytes: usize) -> CallResult<OwnedBuffer> {
        let runtime = self.runtime();
        runtime
            .staging
            .allocate(bytes)
            .map_err(|error| runtime.out_of_memory(self.op, &error))
    }

    /// Creates the failure of this call for the reason `why`. The message names kernel, operation,
    /// label, source line and device.
    pub(super) fn failure(&self, why: &dyn fmt::Display) -> Arc<Failure> {
        let Self {
            bound,
            seat,
            op,
            at,
            label,
        } = self;

        let kernel = bound.kernel.name();
        let device = seat.place.device;
        let part = label.map_or_else(String::new, |label| format!(" ({label})"));
        let message = format!(
            "kernel {kernel} of operation {op}{part} at {at} failed on device {device}: {why}"
        );
        Arc::new(Failure::new(
            FailureKind::Kernel,
            self.runtime().me,
            *op,
            message,
        ))
    }
}

/// Blocks until all inputs have arrived, and moves their buffers to `arrived`. Returns the
/// operation that filled the last input it had to wait for, or `None` without a wait. Fails with
/// the first failed input.
///
/// The wait always ends, because each input is made by an operation with a lower number.
fn wait_for_inputs(
    inputs: &mut Vec<CallInput>,
    arrived: &mut Vec<Option<SharedBuffer>>,
    device: DeviceId,
    parker: &Parker,
) -> CallResult<Option<u64>> {
    let mut last = None;
    for input in inputs.drain(..) {
        arrived.push(Some(match input {
            CallInput::Host(bytes) => bytes,
            CallInput::AsyncBuffer { slot, op } => {
                if !slot.has_ended() {
                    last = Some(op);
                }
                slot.wait(parker)?
            }
            CallInput::Donated(placed) => {
                let slot = placed
                    .slot(device)
                    .expect("the plan has checked that the device has its part");
                if !slot.has_ended() {
                    last = Some(placed.origin.op);
                }

                drop(parker.wait(slot, None));
                slot.take(placed.donated_failure()).expect("it has ended")?
            }
        }));
    }
    Ok(last)
}

/// Returns the object cell of the input at this index.
fn cell_of(inputs: &[Option<SharedBuffer>], index: usize) -> Option<&ObjectCell> {
    inputs.get(index)?.as_ref().and_then(ObjectCell::of)
}

/// Marks objects as failed with `failure`, so that later calls with them fail with it.
pub(super) fn poison_objects(objects: &[AsyncBuffer], failure: &Arc<Failure>) {
    for object in objects {
        if let Some(Ok(buffer)) = object.peek_issued()
            && let Some(cell) = ObjectCell::of(&buffer)
        {
            cell.poison(failure);
        }
    }
}

/// Allocates the outputs, and passes each to `give`, in order, with its initial contents. Moves the
/// memory for new objects to `held`.
///
/// An output that updates a donated input takes over that input's memory if nothing else uses it.
/// An output that updates another input gets new memory, to be filled from the input. Removes these
/// inputs from `inputs`. Fails if there is no memory.
pub(super) fn prepare_outputs(
    call: &RunningCall<'_>,
    inputs: &mut [Option<SharedBuffer>],
    mut memory: Reservation,
    held: &mut Vec<Reservation>,
    mut give: impl FnMut(OwnedBuffer, Fill, &ShardInfo),
) -> CallResult<()> {
    let RunningCall { seat, op, .. } = *call;
    let plan = &call.bound.plan;
    let runtime = call.runtime();
    let pool = &runtime.devices[seat.local_index].pool;
    held.extend(plan.objects.held().map(|bytes| memory.split_off(bytes)));
    let failed = |error: OutOfMemory| runtime.out_of_memory(op, &error);

    // One fresh output is the usual case; it needs no list.
    let mut one = None;
    let mut several = Vec::new().into_iter();
    match seat.fresh.len() {
        0 => drop(memory),
        1 => one = Some(memory.allocate().map_err(failed)?),
        _ => {
            several = memory
                .allocate_all(seat.fresh.iter().copied())
                .map_err(failed)?
                .into_iter()
        }
    }
    let mut fresh = |bytes: usize| {
        let reserved = one.take().or_else(|| several.next());
        reserved.map_or_else(|| pool.allocate(bytes).map_err(failed), Ok)
    };

    for (output, info) in plan.outputs.iter().zip(&seat.outputs) {
        let takes_over = plan.takes_over(output);
        let (buffer, fill) = match output
            .alias
            .and_then(|index| Some((index, inputs[index].take()?)))
        {
            Some((index, input)) if takes_over => {
                let (buffer, rest) = runtime
                    .take_over(input, pool, op, &*plan.what)
                    .map_err(failed)?;
                let fill = match rest {
                    Some(input) => Fill::From { input, index },
                    None => Fill::Own,
                };
                (buffer, fill)
            }
            input => {
                let bytes = info.bytes();
                let buffer = if takes_over {
                    pool.allocate(bytes).map_err(failed)
                } else {
                    fresh(bytes)
                };
                let fill = match input {
                    Some((index, input)) => Fill::From { input, index },
                    None => Fill::Anything,
                };
                (buffer?, fill)
            }
        };
        give(buffer, fill, info);
    }
    Ok(())
}

pub(super) fn copy_in(from: &[u8], region: &Region, to: &mut [u8], info: &ShardInfo) {
    copy_region(
        from,
        region,
        to,
        &info.region,
        &info.region,
        info.global.dtype().size(),
    );
}

/// The byte that fills outputs before the kernel runs, in debug builds. It makes an output visible
/// that the kernel does not write: all ones is a NaN in every float type.
pub(super) const POISON: Option<u8> = if cfg!(debug_assertions) {
    Some(0xff)
} else {
    None
};

fn poison(buffer: &mut OwnedBuffer) {
    if let Some(byte) = POISON {
        buffer.fill(byte);
    }
}

fn run_kernel(
    kernel: &dyn UntypedKernel,
    plan: &CallPlan,
    seat: &DeviceBinding,
    context: &mut Context<'_>,
    inputs: &[Option<SharedBuffer>],
    outputs: &mut [OwnedBuffer],
    made: &mut [Option<NewObject>],
) -> Result<()> {
    let mut x = plan
        .inputs
        .iter()
        .zip(inputs)
        .zip(&seat.inputs)
        .map(|((input, bytes), info)| match bytes {
            Some(bytes) if info.global.is_object() => View::of_object(ObjectCell::of(bytes), info),
            Some(bytes) if !input.in_place => match bytes.device() {
                Some(place) => View::on_device(place, info),
                None => View::new(bytes, info),
            },
            _ => View::in_place(info),
        });

    let mut made = made.iter_mut();
    let mut y = outputs.iter_mut().zip(&seat.outputs).map(|(bytes, info)| {
        match (made.next(), bytes.device()) {
            (Some(object), _) if info.global.is_object() => ViewMut::of_object(object, info),
            (_, Some(place)) => ViewMut::on_device(place, info),
            (_, None) => ViewMut::new(bytes, info),
        }
    });
    let x = (&plan.input_structure, &mut x as &mut dyn Iterator<Item = _>);
    let y = (
        &plan.output_structure,
        &mut y as &mut dyn Iterator<Item = _>,
    );
    kernel.run(context, x, y)
}

/// Runs a kernel on host values, without a job, on one device that holds all data. For tests and
/// debugging. Blocks until the outputs are ready.
///
/// Collectives run on that one device. So a `permute` between two devices is refused.
///
/// # Errors
///
/// If the kernel refuses the shapes, its signature is contradictory, or it fails.
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
    let bound = program
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;

    let arrays = leaves
        .into_iter()
        .map(|leaf| MpmdArray::from_host(leaf.clone()));
    let y = bound.call(&mut program, K::In::from_leaves(&structure, arrays)?)?;
    let values = y.leaves().into_iter().map(|array| {
        array
            .to_host()
            .map(|values| values.unwrap_or_else(|| HostArray::scalar(0u8)))
    });
    let values = values.collect::<Result<Vec<_>>>()?;

    let result = <<K::Out as Tree>::With<HostArray> as Tree>::from_leaves(&y.structure(), values)?;
    program.finish()?;
    Ok(result)
}
