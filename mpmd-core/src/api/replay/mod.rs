//! Capture of a step and its replay. A replay issues only the operations in which this process
//! takes part.
//!
//! Without replay every process issues all operations of the job, so in a large job issuing takes
//! each process a long time. A captured step keeps the operations of this process. All operations
//! keep their numbers: a replay skips those of other processes. The rolling hash of each operation
//! is derived from that of the step.
//!
//! `Program::capture` runs the step as it is. Meanwhile each `jit` call and `device_put` in which
//! this process takes part notes the sources of its arrays (`capture.rs`): an input of the step,
//! an array from outside, or an operation of the step. The result is a list of this process's own
//! operations, with a place for each array for as long as it is needed (`step.rs`).
//!
//! `Captured::replay` checks the inputs, walks through the list, and takes the numbers of all
//! operations of the step. The hashes of other processes' operations are not known then, so all
//! hashes follow from the whole (`span.rs`). The operations before the replay, the hash at which
//! the step was captured, its length and its inputs are mixed once. Each operation's hash adds its
//! place in the step.
//!
//! To the router a replay is a *span*: the history keeps one entry for it. A process that sends,
//! asks or counts inside the span finds the hash of that very operation. A process that issues the
//! same operations one by one has other hashes, so it counts as diverged.
//!
//! A dry run issues all operations of a captured step again, so checks see every operation.
//! `Pipeline::replay` captures and replays training steps.

mod capture;
mod span;
mod step;

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use step::ReplayStep;

use crate::api::program::{Capture, Comparison, Program, RecomputedCall};
use crate::error::{IssueProblem, Result};
use crate::exec::array::host_array::HostArray;
use crate::exec::array::{MpmdArray, Repr};
use mpmd_layout::tree::{Structure, Tree};

/// A step that was [captured](Program::capture), with inputs `T` and results `U`.
///
/// It keeps the arrays from outside the step that its operations use, but no array that the step
/// made.
pub struct Captured<T, U> {
    step: ReplayStep,
    results: Structure,
    /// The calls that the step recomputes. The two output hashes of each call are further results
    /// of the step.
    recomputed: Vec<RecomputedCall>,
    types: PhantomData<fn(T) -> U>,
}

impl Program {
    /// Runs a step once, and captures it so that it can be [replayed](Captured::replay).
    ///
    /// `step` issues `jit` calls and `device_put`s on its inputs and on other arrays. The other
    /// arrays, and host values made inside `step`, are *constants*: every replay uses the same. All
    /// arrays that differ from step to step must be in `x`. `step` gets copies of uncommitted
    /// inputs.
    ///
    /// A replay does not run the code of `step`, so this code must not depend on values. Inside
    /// `step` some calls are refused: reads of arrays that the step makes,
    /// [`broadcast_value`](Program::broadcast_value), [`array_from_fn`](Program::array_from_fn),
    /// [`microbatches`](MpmdArray::microbatches), [`step_end`](Program::step_end), and nested
    /// captures.
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    ///
    /// let results = mpmd_core::simulate(2, 2, 7, |p| {
    ///     let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
    ///     let x = p.device_put(&MpmdArray::scalar(1.0f32), &stages[0].replicated())?;
    ///     let (y, step) = p.capture(x, |p, x| p.device_put(&x, &stages[1].replicated()))?;
    ///     drop(y);
    ///     let x = p.device_put(&MpmdArray::scalar(2.0f32), &stages[0].replicated())?;
    ///     let y = step.replay(p, x)?;
    ///     Ok(y.to_host()?.map(|y| y.to_vec::<f32>()).transpose()?)
    /// });
    /// assert_eq!(results[1].as_ref().unwrap(), &Some(vec![2.0]));
    /// ```
    ///
    /// # Errors
    ///
    /// If an input was donated or is of another program. If the step issues an operation that
    /// cannot be captured, or donates an array from outside that is not an input. Errors of `step`
    /// are returned as they are. Operations that it issued before an error stay issued.
    #[track_caller]
    pub fn capture<T, U>(
        &mut self,
        x: T,
        step: impl FnOnce(&mut Self, T) -> Result<U>,
    ) -> Result<(U, Captured<T, U>)>
    where
        T: Tree<Leaf = MpmdArray>,
        U: Tree<Leaf = MpmdArray>,
    {
        let at = self.caller(Location::caller());
        self.refuse_in_capture(at, "capture")?;
        let wrong = |problem: IssueProblem| problem.at(at, "capture");
        for (path, leaf) in x.leaves_with_paths() {
            leaf.check_usable(&path)
                .and_then(|()| self.check_own(&path, leaf))
                .map_err(wrong)?;
        }

        let structure = x.structure();
        let leaves = x
            .into_leaves()
            .into_iter()
            .map(by_itself)
            .collect::<Result<Vec<_>>>()?;
        let capture = Capture::new(self.operations(), structure.clone(), &leaves, at);
        let x =
            T::from_leaves(&structure, leaves).map_err(|error| wrong(IssueProblem::Tree(error)))?;

        self.runtime
            .capture_from
            .store(self.operations(), Ordering::Relaxed);
        self.capture = Some(Box::new(capture));

        // Catches a panic to end the capture, so that the program stays usable for a caller that
        // catches it.
        let result = catch_unwind(AssertUnwindSafe(|| step(self, x)));
        self.runtime.capture_from.store(u64::MAX, Ordering::Relaxed);
        let capture = self.capture.take();
        let y = result.unwrap_or_else(|panic| resume_unwind(panic))?;
        let Some(mut capture) = capture else {
            return Err(wrong(IssueProblem::Capture(
                "the step has replaced its program by another one".into(),
            )));
        };

        let results = y.structure();
        let comparisons = std::mem::take(&mut capture.comparisons);
        let hashes = comparisons.iter().flat_map(|comparison| &comparison.hashes);
        let leaves: Vec<&MpmdArray> = y.leaves().into_iter().chain(hashes).collect();
        let step = capture.finish(&self.runtime, &leaves, self.operations(), self.rolling());
        let recomputed = comparisons
            .into_iter()
            .map(|comparison| comparison.call)
            .collect();
        Ok((
            y,
            Captured {
                step,
                results,
                recomputed,
                types: PhantomData,
            },
        ))
    }

    /// Returns an error if the array belongs to another program.
    pub(crate) fn check_own(
        &self,
        path: &str,
        leaf: &MpmdArray,
    ) -> std::result::Result<(), IssueProblem> {
        match &leaf.repr {
            Repr::Placed(placed) if !Arc::ptr_eq(&placed.made.runtime, &self.runtime) => {
                Err(IssueProblem::Foreign {
                    path: path.to_owned(),
                })
            }
            _ => Ok(()),
        }
    }
}

impl<T: Tree<Leaf = MpmdArray>, U: Tree<Leaf = MpmdArray>> Captured<T, U> {
    /// Issues the captured operations again, on other inputs. This process issues only the
    /// operations in which it takes part.
    ///
    /// If one process replays, all must replay. The rolling hash of a replay differs from that of
    /// the same operations issued one by one, of another step, and of other inputs. Values,
    /// donation, failures and the run-ahead limits are the same as for single operations. Blocks
    /// only at these limits and while memory is short.
    ///
    /// # Errors
    ///
    /// If an input has another shape, dtype or sharding than at capture. If an input was donated
    /// or is of another program. If two inputs were the same array at capture and are not now. If
    /// two inputs are now the same array, were not, and the step donates one of them. If an array
    /// from outside that the step uses was donated since. The error is the same on every process,
    /// and nothing is issued.
    #[track_caller]
    pub fn replay(&self, program: &mut Program, x: T) -> Result<U> {
        let at = program.caller(Location::caller());
        program.refuse_in_capture(at, "replay")?;
        self.step
            .check(program, &x)
            .map_err(|problem| problem.at(at, "replay"))?;
        self.replay_fitting(program, &x)
    }

    /// True if [`Captured::replay`] accepts these inputs now. Issues nothing.
    pub(crate) fn fits(&self, program: &Program, x: &T) -> bool {
        self.step.check(program, x).is_ok()
    }

    /// Replays the step on inputs that are known to fit. No capture may be in progress.
    #[track_caller]
    pub(crate) fn replay_fitting(&self, program: &mut Program, x: &T) -> Result<U> {
        let at = program.caller(Location::caller());
        let mut results = self.step.run(program, &x.leaves(), at);
        let hashes = results.split_off(self.results.leaves().min(results.len()));
        let pairs = hashes.as_chunks::<2>().0.iter().zip(&self.recomputed);
        program.will_compare(pairs.map(|(hashes, call)| Comparison {
            call: call.clone(),
            hashes: hashes.clone(),
        }));
        program.synced(at)?;
        let wrong = |error| IssueProblem::Tree(error).at(at, "replay");
        U::from_leaves(&self.results, results).map_err(wrong)
    }

    /// Returns the number of operations of the step, on all processes together.
    pub fn operations(&self) -> u64 {
        self.step.operations()
    }

    /// Returns the number of operations in which this process takes part. A replay issues these.
    pub fn operations_here(&self) -> usize {
        self.step.operations_here()
    }
}

impl<T, U> fmt::Debug for Captured<T, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Captured({})", self.step)
    }
}

/// Returns the array. Host values are copied to memory of their own, so that their address
/// identifies them.
fn by_itself(leaf: MpmdArray) -> Result<MpmdArray> {
    match &leaf.repr {
        Repr::Placed(_) => Ok(leaf),
        Repr::Host(host) => {
            let bytes = host.bytes().to_vec().into();
            Ok(MpmdArray::from_host(HostArray::from_bytes(
                host.aval().clone(),
                bytes,
            )?))
        }
    }
}
