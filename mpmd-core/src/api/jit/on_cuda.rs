//! A kernel's call on a CUDA device. The device's thread issues it and never waits for the device.
//!
//! An input is taken as soon as the work that fills it is issued: the call's own work is ordered
//! behind it on the device. The outputs are issued in the same way before they are filled. They end
//! when the device has passed the call, on the thread of its compute stream.

use std::sync::Arc;

use mpmd_device::cuda::{CudaError, Gpu, RawStream, StreamTurn, WorkEnding, WorkOutcome};
use mpmd_memory::{OwnedBuffer, SharedBuffer};

use super::call::{
    CallInput, CallResult, DeviceCall, Fill, IssuedCall, POISON, ReservedMemory, RunningCall,
    Unfilled,
};
use super::call::{copy_in, poison_objects, prepare_outputs};
use crate::exec::array::object::ObjectCell;
use crate::exec::{AsyncBuffer, KernelExchange, Parker, Resolvers};
use crate::kernel::cuda::{CallMemory, Cuda};
use crate::kernel::{Context, CudaAccess};
use mpmd_layout::topology::DeviceId;
use mpmd_proto::Failure;

impl DeviceCall {
    /// Issues the call's work on the device's stream, and returns without waiting for the work.
    /// Another thread resolves the outputs when the work is over.
    ///
    /// Blocks until the inputs are issued (inputs on the host: filled) and the kernel's code is
    /// compiled. Blocks for memory only as calls on CPU devices do. A failure resolves the outputs
    /// as failed.
    pub(super) fn run_on_cuda(mut self: Box<Self>, gpu: &Arc<Gpu>, issued: IssuedCall) {
        let IssuedCall {
            bound,
            seat,
            op,
            at,
            label,
            resolvers,
            memory,
            guard,
            leftovers,
        } = issued;
        let objects = std::mem::take(&mut self.objects);
        let call = RunningCall::new(&bound, seat, op, at, label);
        let runtime = call.runtime();
        let place = &call.seat.place;
        let local_index = call.seat.local_index;
        let call_memory = CallMemory::new(&runtime.devices[local_index].pool, &runtime.staging);
        let exchange = KernelExchange {
            runtime: runtime.clone(),
            guard,
            on_thread_of: None,
        };
        let mut context = Context::new(&bound.plan.mesh, place, exchange, op);

        let since = runtime.trace.now();
        let last = match self.prepare(gpu, &call, memory) {
            Ok(last) => last,
            Err(failure) => {
                // Nothing was issued, as on a CPU device if an input fails.
                self.fail(&call, &objects, &mut context, resolvers, &failure);
                bound.keep(self);
                drop(leftovers);
                return drop(context);
            }
        };

        let stage = label.map(|label| label.stage);
        runtime
            .status
            .device_starts(local_index, op, call.seat.what.clone(), stage);
        let issuing = runtime.trace.now();
        let span = runtime.enter_kernel(op, place.device, "issued");
        let (result, ending) = self.issue_work(gpu, &call, &call_memory, &mut context);
        drop(span);
        let unfilled: Vec<Unfilled> = self.unfilled.drain(..).collect();
        let issued = match result {
            Ok(()) => {
                let issued = resolvers.issue(self.results(&call));
                if unfilled.is_empty() && objects.is_empty() && !context.has_joined() {
                    issued.end_with_their_work();
                }
                Ok(issued)
            }
            Err(failure) => {
                self.fail(&call, &objects, &mut context, resolvers, &failure);
                Err(())
            }
        };

        bound.keep(self);
        drop(leftovers);
        let (guard, joined) = context.into_guard();
        call_memory.end(gpu.spare(), &ending.fence());
        let bound = bound.clone();
        let trace = WorkTrace {
            since,
            issuing,
            last,
        };
        ending.then(Box::new(move |ended: WorkOutcome| {
            let call = RunningCall::new(&bound, seat, op, at, label);
            let runtime = call.runtime().clone();
            trace.record(&call, &ended);
            runtime.status.device_ends(local_index, op);

            let result = ended.result.map_err(|error| call.failure(&error));
            let result = joined.end(&runtime, result, |why| call.failure(why));
            settle(unfilled, call.seat.place.device, result, move |result| {
                // An earlier call with the same object may have failed since this one was issued.
                let result = result.and_then(|()| objects.iter().try_for_each(check_object));
                if let Ok(resolvers) = issued {
                    if let Err(failure) = &result {
                        poison_objects(&objects, failure);
                        runtime.remember(failure);
                    }
                    resolvers.end(result);
                }
                drop(objects);
                // This ends the operation.
                drop(guard);
            });
        }));
    }

    /// Fails the call's outputs, later calls with its objects, and devices that wait for this one
    /// in a collective.
    fn fail(
        &mut self,
        call: &RunningCall<'_>,
        objects: &[AsyncBuffer],
        context: &mut Context<'_>,
        resolvers: Resolvers,
        failure: &Arc<Failure>,
    ) {
        // Freed first: threads that wait for memory check it when operations end.
        self.clear();
        poison_objects(objects, failure);
        call.runtime().remember(failure);
        context.abandon(failure);
        resolvers.fail(failure);
    }

    /// Blocks until each input is issued (inputs on the host: filled), and moves its buffer to
    /// `arrived`. Returns the operation of the last input that was not filled then, or `None`.
    /// Fails with the first failed input.
    fn take_inputs(&mut self, gpu: &Gpu, call: &RunningCall<'_>) -> CallResult<Option<u64>> {
        let Self {
            inputs,
            arrived,
            unfilled,
            ..
        } = self;
        let parker = &call.runtime().parker;
        let mut last = None;
        for input in inputs.drain(..) {
            let (buffer, unfilled_by) = match input {
                CallInput::Host(bytes) => (bytes, None),
                CallInput::AsyncBuffer { slot, op } => {
                    let ended = slot.has_ended();
                    let buffer =
                        on_device_or_filled(slot.wait_issued(parker)?, slot.slot(), parker)?;
                    let by = UnfilledBy {
                        op,
                        alone: slot.slot().ends_with_its_work(),
                        unfilled: Unfilled::Use(slot),
                    };
                    (buffer, (!ended).then_some(by))
                }
                CallInput::Donated(placed) => {
                    let slot = placed
                        .slot(call.seat.place.device)
                        .expect("the plan has checked that the device has its part");
                    let ended = slot.has_ended();
                    let alone = slot.ends_with_its_work();
                    on_device_or_filled(parker.wait_issued(slot)?, slot, parker)?;
                    let buffer = slot
                        .take_issued(placed.donated_failure())
                        .expect("it is issued")?;
                    let by = UnfilledBy {
                        op: placed.origin.op,
                        alone,
                        unfilled: Unfilled::Donated(placed),
                    };
                    (buffer, (!ended).then_some(by))
                }
            };

            if let Some(by) = unfilled_by {
                last = Some(by.op);
                // Work issued earlier on the same stream reports its end before this call does, and
                // a device that fails does nothing more. So only an input that may end otherwise
                // than its work needs to be checked later.
                if !(by.alone && gpu.compute().has_issued_all(buffer.ready())) {
                    unfilled.push(by.unfilled);
                }
            }
            arrived.push(Some(buffer));
        }
        Ok(last)
    }

    /// Takes the inputs, allocates the outputs, and waits for the kernel's code. Returns the
    /// operation of the last input that was not filled when it was taken, or `None`.
    fn prepare(
        &mut self,
        gpu: &Gpu,
        call: &RunningCall<'_>,
        memory: ReservedMemory,
    ) -> CallResult<Option<u64>> {
        let last = self.take_inputs(gpu, call)?;
        self.allocate_outputs(call, memory)?;
        call.bound
            .warm
            .result(call.seat.local_index)
            .map_err(|error| call.failure(&error))?;
        Ok(last)
    }

    fn allocate_outputs(
        &mut self,
        call: &RunningCall<'_>,
        memory: ReservedMemory,
    ) -> CallResult<()> {
        let Self {
            arrived,
            outputs,
            held,
            fills,
            ..
        } = self;
        prepare_outputs(call, arrived, memory?, held, |buffer, fill, _| {
            outputs.push(buffer);
            fills.push(fill);
        })
    }

    /// Issues all work of the call on the compute stream: the outputs' initial contents, then the
    /// kernel. Returns (result of issuing, end of the issued work). Fences keep all memory that the
    /// work uses until the work is over.
    fn issue_work<'a>(
        &mut self,
        gpu: &'a Arc<Gpu>,
        call: &RunningCall<'_>,
        memory: &'a CallMemory,
        context: &mut Context<'a>,
    ) -> (CallResult<()>, WorkEnding) {
        let Self {
            arrived,
            outputs,
            made,
            fills,
            ..
        } = self;
        let mut staged = Vec::new();
        let mut turn = gpu.compute().turn();
        let begun = come_after(&turn, arrived, outputs, fills).and_then(|()| turn.begin());
        let result = begun
            .map_err(|error| call.failure(&error))
            .and_then(|stream| {
                // The stream now orders all of that before the work below, and so before its fence.
                outputs.iter_mut().for_each(OwnedBuffer::clear_fences);
                fill(call, stream, outputs, fills, &mut staged)?;
                Ok(stream)
            });

        let result = match result {
            Err(failure) => Err(failure),
            Ok(stream) => {
                context.enter(CudaAccess {
                    cuda: Cuda::new(gpu, stream, memory),
                    turn,
                });
                let ran = call.run(context, arrived, outputs, made);
                turn = context.leave().turn;
                ran
            }
        };

        let ending = turn.end(Ok(()));
        let fence = ending.fence();
        let read = fills.drain(..).filter_map(|fill| match fill {
            Fill::From { input, .. } => Some(input),
            Fill::Anything | Fill::Own => None,
        });
        for input in arrived.drain(..).flatten().chain(read) {
            // An object is dropped after the work of the last call that had it.
            if input.device().is_some() || input.is_pinned() || input.value().is_some() {
                input.add_read(fence.clone());
            }
        }

        outputs
            .iter_mut()
            .chain(&mut staged)
            .for_each(|buffer| buffer.add_fence(fence.clone()));
        (result, ending)
    }
}

/// An input that the call took before it was filled.
struct UnfilledBy {
    /// The number of the operation that fills the input.
    op: u64,
    /// True if the input's buffer completes exactly when the work that fills it ends.
    alone: bool,
    unfilled: Unfilled,
}

/// The times of a call for the trace, on the host's clock.
struct WorkTrace {
    /// The time at which the call began to wait for its inputs.
    since: u64,
    /// The time at which the call began to issue its work.
    issuing: u64,
    /// The operation of the last input that was not filled when it was taken.
    last: Option<u64>,
}

impl WorkTrace {
    /// Records the execution of the call's work in the log and in the trace.
    fn record(&self, call: &RunningCall<'_>, ended: &WorkOutcome) {
        let runtime = call.runtime();
        let local_index = call.seat.local_index;
        let op = call.op;
        runtime.log_ran(
            op,
            call.seat.place.device,
            ended
                .times
                .as_ref()
                .map(|times| times.end.saturating_sub(times.begin)),
        );

        if let Some(times) = &ended.times {
            let times = [times.before.max(self.since), times.begin, times.end];
            runtime.trace_ran(local_index, op, times, self.last);
        } else if ended.result.is_ok() {
            // The device keeps time only if it is traced from its start on.
            runtime.trace_seen(local_index, op, self.issuing, self.last);
        }
    }
}

/// Returns an input's buffer. A buffer in device memory may still be unfilled. If the buffer is in
/// host memory, blocks until it is filled, since the kernel may read it on the host.
fn on_device_or_filled(
    buffer: SharedBuffer,
    slot: &AsyncBuffer,
    parker: &Parker,
) -> CallResult<SharedBuffer> {
    match buffer.device() {
        Some(_) => Ok(buffer),
        None => parker.wait(slot, None).expect("no deadline was set"),
    }
}

/// Makes the stream's next work wait for the work that fills the inputs and the sources of `fills`.
/// It also waits for all work on the outputs' memory. Does not block the thread.
fn come_after(
    turn: &StreamTurn<'_>,
    inputs: &[Option<SharedBuffer>],
    outputs: &[OwnedBuffer],
    fills: &[Fill],
) -> Result<(), CudaError> {
    inputs
        .iter()
        .flatten()
        .try_for_each(|input| turn.come_after(input.ready()))?;
    outputs
        .iter()
        .try_for_each(|output| turn.come_after(output.fences()))?;
    fills.iter().try_for_each(|fill| match fill {
        Fill::From { input, .. } => turn.come_after(input.ready()),
        Fill::Anything | Fill::Own => Ok(()),
    })
}

/// Issues the fills and copies that give the outputs their initial contents. Adds staging buffers
/// to `staged`; the caller keeps them until the work is over.
fn fill(
    call: &RunningCall<'_>,
    stream: &RawStream,
    outputs: &[OwnedBuffer],
    fills: &[Fill],
    staged: &mut Vec<OwnedBuffer>,
) -> CallResult<()> {
    for ((output, fill), info) in outputs.iter().zip(fills).zip(&call.seat.outputs) {
        let Some(place) = output.device() else {
            continue;
        };

        let filled = match fill {
            Fill::Own => Ok(()),
            Fill::Anything => POISON.map_or(Ok(()), |byte| stream.fill(place, &[byte])),
            Fill::From { input, index } => match input.device() {
                // On a device both have the output's region.
                Some(from) => stream.copy(from, place),
                None => {
                    let mut bytes = call.staging(info.bytes())?;
                    copy_in(input, &call.seat.inputs[*index].region, &mut bytes, info);
                    let copied = stream.upload(&bytes, place.address);
                    staged.push(bytes);
                    copied
                }
            },
        };
        filled.map_err(|error| call.failure(&error))?;
    }
    Ok(())
}

/// Returns the failure of an earlier call with this object, if there is one.
fn check_object(object: &AsyncBuffer) -> CallResult<()> {
    let Some(Ok(buffer)) = object.peek_issued() else {
        return Ok(());
    };
    let failure = ObjectCell::of(&buffer).and_then(ObjectCell::failure);
    failure.map_or(Ok(()), |failure| Err(failure.clone()))
}

/// Calls `then` once all of `unfilled` have ended. Passes `result`, or if that is a success, a
/// failure among them. Does not block; `then` may run on another thread, which ends an input.
fn settle<F: FnOnce(CallResult<()>) + Send + 'static>(
    mut unfilled: Vec<Unfilled>,
    device: DeviceId,
    result: CallResult<()>,
    then: F,
) {
    let Some(next) = unfilled.pop() else {
        return then(result);
    };
    let filled = move |filled| settle(unfilled, device, result.and(filled), then);
    match &next {
        Unfilled::Use(slot) => slot.slot().on_completion(filled),
        Unfilled::Donated(placed) => match placed.slot(device) {
            Some(slot) => slot.on_completion(filled),
            // Never: the plan has checked that this device holds a shard of the donated array.
            None => filled(Ok(())),
        },
    }
}
