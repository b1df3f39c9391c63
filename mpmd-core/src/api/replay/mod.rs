//! Recording a step once and replaying it: a process then issues the operations in which it takes
//! part, and nothing of the others.
//!
//! Every process issues the operations of the whole job, so a step of a large job costs each of
//! them time for all. What a replay issues is the recorded step's projection on this process. All
//! operations keep their numbers: those of others are skipped, and the rolling hash of each follows
//! from that of the step.

mod recording;
mod span;
mod step;

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) use recording::{Here, Recording};
use step::Step;

use crate::api::program::Program;
use crate::error::{IssueProblem, Result};
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::host_array::HostArray;
use mpmd_layout::tree::{Structure, Tree};

/// What a process does again in an operation in which it takes part.
pub(crate) trait Again: Send + Sync {
    /// Issues this process's part of operation `op`; returns its results. `x` has the array inputs,
    /// of which those that have no part here need not be the operation's own.
    fn again(
        self: Arc<Self>,
        program: &Program,
        x: &[&MpmdArray],
        op: u64,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray>;
}

/// A step that was [recorded](Program::record): takes `T`, gives `U`.
///
/// Keeps the arrays from outside of the step that it uses, and none that it made.
pub struct Recorded<T, U> {
    step: Step,
    results: Structure,
    types: PhantomData<fn(T) -> U>,
}

impl Program {
    /// Runs a step as it is, and records it, so that it can be [replayed](Recorded::replay).
    ///
    /// `step` issues `jit` calls and `device_put`s on the arrays that it is given, and on others
    /// that it has hold of: those are *constants*, the same in every replay, as are host values
    /// made inside. Whatever differs from step to step must be in `x`. A replay runs none of the
    /// step's own code, so nothing in it may depend on values: reads of arrays that the step makes
    /// are refused, as are [`agree`](Program::agree), [`make`](Program::make),
    /// [`microbatches`](MpmdArray::microbatches), cutting and joining along a mesh axis,
    /// [`step_end`](Program::step_end), and steps within steps. `step` gets copies of uncommitted
    /// inputs.
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    ///
    /// let results = mpmd_core::simulate(2, 2, 7, |p| {
    ///     let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
    ///     let x = p.device_put(&MpmdArray::scalar(1.0f32), &stages[0].replicated())?;
    ///     let (y, step) = p.record(x, |p, x| p.device_put(&x, &stages[1].replicated()))?;
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
    /// Where an input was donated or is of another program, where the step issues what cannot be
    /// recorded or donates an array that is no input of it, and whatever `step` fails with. What it
    /// issued before that stays issued.
    #[track_caller]
    pub fn record<T, U>(
        &mut self,
        x: T,
        step: impl FnOnce(&mut Self, T) -> Result<U>,
    ) -> Result<(U, Recorded<T, U>)>
    where
        T: Tree<Leaf = MpmdArray>,
        U: Tree<Leaf = MpmdArray>,
    {
        let at = Location::caller();
        self.refuse_recording(at, "record")?;
        let wrong = |problem: IssueProblem| problem.at(at, "record");
        for (path, leaf) in x.leaves_with_paths() {
            leaf.check_usable(&path).and_then(|()| self.check_own(&path, leaf)).map_err(wrong)?;
        }
        let structure = x.structure();
        let leaves = x.into_leaves().into_iter().map(by_itself).collect::<Result<Vec<_>>>()?;
        let recording = Recording::new(self.operations(), structure.clone(), &leaves, at);
        let x =
            T::from_leaves(&structure, leaves).map_err(|error| wrong(IssueProblem::Tree(error)))?;
        self.runtime.recorded_from.store(self.operations(), Ordering::Relaxed);
        self.recording = Some(Box::new(recording));
        // Who catches a panic of the step finds a program that records no more.
        let result = catch_unwind(AssertUnwindSafe(|| step(self, x)));
        self.runtime.recorded_from.store(u64::MAX, Ordering::Relaxed);
        let recording = self.recording.take();
        let y = result.unwrap_or_else(|panic| resume_unwind(panic))?;
        let Some(recording) = recording else {
            return Err(wrong(IssueProblem::Recording(
                "the step has put another program in place".into(),
            )));
        };
        let results = y.structure();
        let step = recording.finish(&self.runtime, &y.leaves(), self.operations(), self.rolling());
        Ok((y, Recorded { step, results, types: PhantomData }))
    }

    /// Refuses, while a step is recorded, what a replay could not do again.
    pub(crate) fn refuse_recording(
        &self,
        at: &'static Location<'static>,
        call: &str,
    ) -> Result<()> {
        let Some(recording) = &self.recording else { return Ok(()) };
        let problem = format!("not within a step that is recorded (at {})", recording.at());
        Err(IssueProblem::Recording(problem).at(at, call))
    }

    /// Refuses, while a step is recorded, to donate what would be gone when it is replayed.
    pub(crate) fn check_given_up(
        &self,
        leaves: &[(String, &MpmdArray)],
    ) -> std::result::Result<(), IssueProblem> {
        let Some(recording) = &self.recording else { return Ok(()) };
        leaves.iter().try_for_each(|(path, leaf)| recording.check_given_up(path, leaf))
    }

    /// Refuses arrays of other programs.
    fn check_own(&self, path: &str, leaf: &MpmdArray) -> std::result::Result<(), IssueProblem> {
        match &leaf.repr {
            Repr::Placed(placed) if !Arc::ptr_eq(&placed.made.runtime, &self.runtime) => {
                Err(IssueProblem::Foreign { path: path.to_owned() })
            }
            _ => Ok(()),
        }
    }
}

impl<T: Tree<Leaf = MpmdArray>, U: Tree<Leaf = MpmdArray>> Recorded<T, U> {
    /// Issues the step once more, on other inputs: the same operations, of which this process
    /// issues those in which it takes part and skips the others.
    ///
    /// All processes must replay where one does: the rolling hash tells a replay from the same
    /// operations issued one by one, from a replay of another step, and from one on other arrays.
    /// Values, donation, failures and the bounds on running ahead are those of ordinary issuing.
    ///
    /// # Errors
    ///
    /// Where an input has another shape, dtype or sharding than when the step was recorded, where
    /// it was donated or is of another program, where two inputs that the step cannot tell apart,
    /// or of which it donates one, are not the same array as they were, and where an array from
    /// outside that the step uses was donated since: the same on every process, and nothing is
    /// issued.
    #[track_caller]
    pub fn replay(&self, program: &mut Program, x: T) -> Result<U> {
        let at = Location::caller();
        program.refuse_recording(at, "replay")?;
        let wrong = |problem: IssueProblem| problem.at(at, "replay");
        let leaves = x.leaves();
        self.step.check(program, &x.structure(), &leaves).map_err(wrong)?;
        let results = self.step.run(program, &leaves, at);
        U::from_leaves(&self.results, results).map_err(|error| wrong(IssueProblem::Tree(error)))
    }

    /// Whether these are inputs that [`Recorded::replay`] takes.
    pub(crate) fn fits(&self, program: &Program, x: &T) -> bool {
        self.step.check(program, &x.structure(), &x.leaves()).is_ok()
    }

    /// How many operations the step has, on all processes together.
    pub fn operations(&self) -> u64 {
        self.step.operations()
    }

    /// In how many of them this process takes part: what a replay issues.
    pub fn operations_here(&self) -> usize {
        self.step.operations_here()
    }
}

impl<T, U> fmt::Debug for Recorded<T, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorded({})", self.step)
    }
}

/// Host values in memory of their own, by which they are known again.
fn by_itself(leaf: MpmdArray) -> Result<MpmdArray> {
    match &leaf.repr {
        Repr::Placed(_) => Ok(leaf),
        Repr::Host(host) => {
            let bytes = host.bytes().to_vec().into();
            Ok(MpmdArray::from_host(HostArray::from_bytes(host.aval().clone(), bytes)?))
        }
    }
}
