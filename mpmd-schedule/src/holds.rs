//! The buffers that each device holds in a step, and the passes between which it holds them.

use super::pace::{MOVE, Pace, Pass, PassKind};

/// Memory that a device of a stage holds for one microbatch, or for the parameters. All sizes are
/// bytes as its pool counts them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StageBytes {
    /// Bytes that exist all the time: the stored parameters, and the arrays that the caller keeps
    /// beside them.
    pub kept: u64,
    /// Bytes of the arrays that each microbatch brings: the pipeline's input on the first stage,
    /// and side inputs.
    pub brought: u64,
    /// Bytes of the parameters in the shardings that kernels compute with; 0 if these equal the
    /// stored ones.
    pub gathered: u64,
    /// Bytes of the gradients that weight passes add to.
    pub gradients: u64,
    /// Bytes of the gradients in the stored shardings; 0 if gradients are not transferred there.
    pub reduced: u64,
    /// Bytes of the inputs copied from the stage before. 0 on the first stage, and for zero-copy
    /// transfers.
    pub input: u64,
    /// Bytes of the outputs of the forward pass.
    pub output: u64,
    /// Bytes of all residuals of the forward pass, `kept_residual` included.
    pub residual: u64,
    /// Bytes of `residual` that a forward pass does not take if its residuals are dropped at once,
    /// because it is computed again or has no backward pass.
    pub unkept_residual: u64,
    /// Residuals that become weight residuals without a copy.
    pub kept_residual: u64,
    /// Bytes of all weight residuals, `kept_residual` included.
    pub weight_residual: u64,
    /// Bytes of the gradient of the inputs, which is sent to the stage before. 0 on the first
    /// stage.
    pub input_gradient: u64,
    /// Bytes of the copy of the gradient of the outputs. 0 on the last stage, and for zero-copy
    /// transfers.
    pub output_gradient: u64,
    /// True if the outputs leave by zero-copy transfer, and so stay until the next stage has read
    /// them.
    pub lends_output: bool,
    /// True if the gradient of the inputs leaves by zero-copy transfer, and so stays until the
    /// stage before has read it.
    pub lends_input_gradient: bool,
    /// True if the forward pass keeps no residuals and is computed again for the backward pass. Its
    /// inputs stay until then.
    pub recomputes: bool,
    /// True if the inputs stay until the input gradient, which reads them in place of residuals.
    pub keeps_inputs: bool,
    /// True if one kernel computes both gradients of a combined backward action, which then has no
    /// weight residuals.
    pub fuses: bool,
    /// True if the stage runs no backward passes, whatever the schedule has: neither its parameters
    /// nor those of the stages that it reads are trained.
    pub forward_only: bool,
}

/// Memory that a device of a stage holds in a step.
#[derive(Clone, Debug, Default)]
pub struct OnDevice {
    /// Bytes of parameters, inputs, outputs and residuals.
    pub bytes: StageBytes,
    /// Bytes of the gradients that are freed once they are transferred to the stored shardings.
    pub moved_gradients: u64,
    /// Inputs that come from other stages.
    pub inputs: Vec<Input>,
    /// Outputs, with the stages that read them.
    pub outputs: Vec<Output>,
    /// (stage, bytes) of the gradients of tied parameters that other stages send.
    pub tied: Vec<(usize, u64)>,
}

/// A part of a stage's input: outputs of another stage.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// The stage that computes the input.
    pub from: usize,
    /// Bytes of the copy on this device; 0 if it arrives by zero-copy transfer.
    pub bytes: u64,
    /// Bytes of the gradient of these inputs.
    pub gradient: u64,
    /// True if the gradient leaves by zero-copy transfer.
    pub lends: bool,
}

/// An output of a stage, with the stages that read it.
#[derive(Clone, Debug)]
pub struct Output {
    /// Bytes of the output.
    pub bytes: u64,
    /// (stage, lends) for each reader; `lends` is true for a zero-copy transfer.
    pub takers: Vec<(usize, bool)>,
    /// (stage, bytes) of the gradients that the readers send; 0 bytes for a zero-copy transfer.
    pub gradients: Vec<(usize, u64)>,
}

impl OnDevice {
    /// Returns the memory of a stage that takes all outputs of the stage before. `last` is true for
    /// the last stage of the chain.
    pub(crate) fn in_chain(bytes: StageBytes, stage: usize, last: bool) -> Self {
        let input = Input {
            from: stage.saturating_sub(1),
            bytes: bytes.input,
            gradient: bytes.input_gradient,
            lends: bytes.lends_input_gradient,
        };
        let (takers, gradients) = if last {
            (Vec::new(), Vec::new())
        } else {
            (vec![(stage + 1, bytes.lends_output)], vec![(stage + 1, bytes.output_gradient)])
        };
        Self {
            bytes,
            moved_gradients: if bytes.reduced > 0 { bytes.gradients } else { 0 },
            inputs: if stage > 0 { vec![input] } else { Vec::new() },
            outputs: vec![Output { bytes: bytes.output, takers, gradients }],
            tied: Vec::new(),
        }
    }
}

impl OnDevice {
    /// Raises each size in bytes to that of `other` if it is larger. Both must be of the same
    /// stage.
    pub fn widen(&mut self, other: &Self) {
        let StageBytes {
            recomputes,
            keeps_inputs,
            fuses,
            forward_only,
            lends_output,
            lends_input_gradient,
            ..
        } = self.bytes;
        let (a, b) = (self.bytes, other.bytes);
        self.bytes = StageBytes {
            kept: a.kept.max(b.kept),
            brought: a.brought.max(b.brought),
            gathered: a.gathered.max(b.gathered),
            gradients: a.gradients.max(b.gradients),
            reduced: a.reduced.max(b.reduced),
            input: a.input.max(b.input),
            output: a.output.max(b.output),
            residual: a.residual.max(b.residual),
            unkept_residual: a.unkept_residual.min(b.unkept_residual),
            kept_residual: a.kept_residual.max(b.kept_residual),
            weight_residual: a.weight_residual.max(b.weight_residual),
            input_gradient: a.input_gradient.max(b.input_gradient),
            output_gradient: a.output_gradient.max(b.output_gradient),
            lends_output,
            lends_input_gradient,
            recomputes,
            keeps_inputs,
            fuses,
            forward_only,
        };
        for (mine, other) in self.inputs.iter_mut().zip(&other.inputs) {
            (mine.bytes, mine.gradient) =
                (mine.bytes.max(other.bytes), mine.gradient.max(other.gradient));
        }
        for (mine, other) in self.outputs.iter_mut().zip(&other.outputs) {
            mine.bytes = mine.bytes.max(other.bytes);
            for ((_, mine), (_, other)) in mine.gradients.iter_mut().zip(&other.gradients) {
                *mine = (*mine).max(*other);
            }
        }
    }
}

/// Bytes that a device holds from one moment until the last of several others.
pub(super) struct Hold {
    pub(super) bytes: u64,
    from: From,
    until: Vec<Until>,
}

#[derive(Clone, Copy)]
enum From {
    Start,
    /// A pass of this device begins.
    Begin(Pass),
    /// A pass of this device ends.
    End(Pass),
    /// The result of another stage's pass has arrived on this device.
    Come(Pass),
}

#[derive(Clone, Copy)]
enum Until {
    /// A pass of this device has ended.
    End(Pass),
    /// The result of the first pass has been copied to the device that runs the second pass.
    Sent(Pass, Pass),
    /// The memory that was lent to the pass has been returned.
    Back(Pass),
    /// The bytes may be freed after this pass, but need not be.
    Perhaps(Pass),
    Never,
}

impl Hold {
    /// Returns the expected (time of allocation, time of release), in the unit of [`Pace`].
    pub(super) fn expected(&self, pace: &Pace) -> (u64, u64) {
        let (begin, end) = (|pass| pace.times(pass).0, |pass| pace.times(pass).1);
        let from = match self.from {
            From::Start => 0,
            From::Begin(pass) => begin(pass),
            From::End(pass) => end(pass),
            From::Come(pass) => end(pass) + MOVE,
        };
        let until = self.until.iter().map(|until| match *until {
            Until::End(pass) => end(pass),
            Until::Sent(pass, _) => end(pass) + 2 * MOVE,
            Until::Back(pass) | Until::Perhaps(pass) => end(pass) + MOVE,
            Until::Never => u64::MAX,
        });
        (from, until.max().unwrap_or(u64::MAX))
    }

    /// Returns (first, end) of the lane's actions during which the bytes may exist; `end` is
    /// exclusive.
    pub(super) fn at_most(&self, pace: &Pace, lane: usize) -> (usize, usize) {
        let from = match self.from {
            From::Start => 0,
            From::Begin(pass) | From::End(pass) | From::Come(pass) => pace.may_begin(pass, lane),
        };
        let until = self.until.iter().map(|until| match *until {
            Until::End(pass) | Until::Sent(_, pass) | Until::Back(pass) => pace.is_over(pass, lane),
            Until::Perhaps(_) | Until::Never => usize::MAX,
        });
        (from, until.max().unwrap_or(usize::MAX).min(pace.actions(lane)))
    }
}

/// Returns all that a device holds for a stage in a step of `count` microbatches, except the memory
/// that it holds all the time.
pub(super) fn holds(
    pace: &Pace,
    stage: usize,
    device: &OnDevice,
    count: usize,
    fuses: bool,
) -> Vec<Hold> {
    use PassKind::{Again, Forward, Input as InputPass, Weight};
    let OnDevice { bytes, moved_gradients, inputs, outputs, tied } = device;
    let mut all = Vec::new();
    let mut hold = |bytes: u64, from: From, until: Vec<Until>| {
        if bytes > 0 {
            all.push(Hold { bytes, from, until });
        }
    };
    for microbatch in 0..count {
        let of = |stage, kind| Pass { stage, kind, microbatch };
        let mine = |kind| of(stage, kind);
        let trains = pace.has(mine(InputPass));
        let again = pace.has(mine(Again));
        let read = pace.last_reader(stage, microbatch);
        hold(bytes.brought, From::Start, vec![Until::End(read)]);
        for input in inputs {
            hold(input.bytes, From::Come(of(input.from, Forward)), vec![Until::End(read)]);
            if trains {
                let taker = of(input.from, InputPass);
                let gone = if !pace.has(taker) {
                    Until::End(mine(InputPass))
                } else if !input.lends {
                    Until::Sent(mine(InputPass), taker)
                } else if pace.lane(input.from) == pace.lane(stage) {
                    Until::End(taker)
                } else {
                    Until::Back(taker)
                };
                hold(input.gradient, From::Begin(mine(InputPass)), vec![gone]);
            }
        }
        for output in outputs {
            let gone = output.takers.iter().map(|(taker, lends)| {
                let reads = pace.last_reader(*taker, microbatch);
                match lends {
                    false => Until::Sent(mine(Forward), of(*taker, Forward)),
                    true if pace.lane(*taker) == pace.lane(stage) => Until::End(reads),
                    true => Until::Back(reads),
                }
            });
            let gone: Vec<Until> =
                if output.takers.is_empty() { vec![Until::Never] } else { gone.collect() };
            hold(output.bytes, From::Begin(mine(Forward)), gone);
            if again {
                hold(output.bytes, From::Begin(mine(Again)), vec![Until::End(mine(Again))]);
            }
            for (from, gradient) in output.gradients.iter().filter(|_| trains) {
                hold(
                    *gradient,
                    From::Come(of(*from, InputPass)),
                    vec![Until::End(mine(InputPass))],
                );
            }
        }
        let together = fuses && pace.times(mine(InputPass)) == pace.times(mine(Weight));
        if again || !trains {
            let residual = bytes.residual - bytes.unkept_residual;
            hold(residual, From::Begin(mine(Forward)), vec![Until::End(mine(Forward))]);
        }
        if !trains {
            continue;
        }
        let from = From::Begin(read);
        hold(bytes.residual - bytes.kept_residual, from, vec![Until::End(mine(InputPass))]);
        hold(bytes.kept_residual, from, vec![Until::End(mine(Weight))]);
        if !together {
            let weight = bytes.weight_residual - bytes.kept_residual;
            hold(weight, From::Begin(mine(InputPass)), vec![Until::End(mine(Weight))]);
        }
    }
    let passes = |kinds: &[PassKind], stage| {
        let all = kinds
            .iter()
            .flat_map(|kind| (0..count).map(|microbatch| Pass { stage, kind: *kind, microbatch }));
        all.filter(|pass| pace.has(*pass)).collect::<Vec<_>>()
    };
    if let Some(read) =
        passes(&[Forward, InputPass], stage).into_iter().max_by_key(|pass| pace.times(*pass).1)
    {
        hold(bytes.gathered, From::Start, vec![Until::Perhaps(read)]);
    }
    let last_weight =
        |stage| passes(&[Weight], stage).into_iter().max_by_key(|pass| pace.times(*pass).1);
    let first = passes(&[Weight], stage).into_iter().min_by_key(|pass| pace.times(*pass).0);
    if let (Some(first), Some(last)) = (first, last_weight(stage)) {
        let moved = (*moved_gradients).min(bytes.gradients);
        hold(bytes.gradients - moved, From::Begin(first), vec![Until::Never]);
        hold(moved, From::Begin(first), vec![Until::Perhaps(last)]);
        hold(bytes.reduced, From::End(last), vec![Until::Never]);
    }
    for (user, bytes) in tied {
        if let Some(last) = last_weight(*user) {
            hold(*bytes, From::Come(last), vec![Until::Never]);
        }
    }
    all
}
