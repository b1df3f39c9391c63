//! Issuing of operations. [`Program::issue_op`] is the only way: every operation gets a number and
//! a hash, and is listed, traced and counted there.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::block::now;
use mpmd_base::deadline::after;
use mpmd_proto::router::{OpRecord, OpSpan};

use super::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::dry_run::{KnownDescriptor, OperationNote};
use crate::exec::{Doing, OpCounts, OpGuard, Rolling, Runtime};
use crate::trace::spans;
use mpmd_record::dry_run::OpDescriptor;
use mpmd_record::trace::Label;

/// The properties of an operation that is about to be issued.
pub(crate) struct NewOp<'a> {
    /// Returns the description of the operation for messages.
    pub(crate) what: &'a dyn Fn() -> Arc<dyn fmt::Display + Send + Sync>,
    pub(crate) at: &'static Location<'static>,
    pub(crate) part: OpPart,
    /// The arrays that the operation takes as inputs.
    pub(crate) takes: &'a [&'a MpmdArray],
    /// False if none of the arrays in `takes` has host values.
    pub(crate) takes_host_values: bool,
    /// Returns true if the operation donates the array at this index of `takes`.
    pub(crate) donates: &'a dyn Fn(usize) -> bool,
    /// For traces: the number of the operation that made the array, if the operation moves one.
    pub(crate) source: Option<u64>,
    /// Returns the descriptor for a dry run. Called only in a dry run.
    pub(crate) descriptor: &'a dyn Fn() -> OpDescriptor,
    /// Cache of the descriptor's index in the dry run, so that `descriptor` is called only once.
    pub(crate) known: Option<&'a KnownDescriptor>,
    /// Returns the object that issues the operation again in a replay. Called while a step is
    /// captured. `None` if this process has no part in the operation.
    pub(crate) again: &'a dyn Fn() -> Option<Arc<dyn Again>>,
    /// Number and hash of the operation if a replay issues it; `None` for a new operation.
    pub(crate) replayed: Option<Replayed<'a>>,
}

/// An operation after it was issued.
pub(crate) struct IssuedOp {
    /// The operation's number.
    pub(crate) op: u64,
    /// A guard that keeps the operation in flight. `None` unless this process has
    /// [work](OpPart::Work) to do.
    pub(crate) guard: Option<OpGuard>,
}

/// This process's part in an operation.
#[derive(Clone, Copy)]
pub(crate) enum OpPart {
    /// This process has no part in the operation.
    Idle,
    /// The program of this process computes a value or waits for one. No device works, so the
    /// operation is only traced.
    Program,
    /// Devices or copy workers of this process do work, which needs this many bytes of new memory.
    /// Issuing blocks while the program is too far ahead. The operation counts as in flight until
    /// the work has ended.
    Work(u64),
}

/// The number of a replayed operation, and the span that computes its hash.
#[derive(Clone, Copy)]
pub(crate) struct Replayed<'a> {
    pub(crate) op: u64,
    pub(crate) span: &'a Arc<dyn OpSpan>,
}

/// A captured operation of this process that a replay can issue again.
pub(crate) trait Again: Send + Sync {
    /// Issues this process's part of a replayed operation and appends its results to `made`. `x`
    /// has the array inputs. For an input without a shard on this process it may have a placeholder
    /// of the same shape and sharding.
    fn again(
        self: Arc<Self>,
        program: &mut Program,
        x: &[&MpmdArray],
        replayed: Replayed<'_>,
        at: &'static Location<'static>,
        made: &mut Vec<MpmdArray>,
    );
}

/// A function that is called with each operation's number and the runtime, before the router learns
/// of the operation.
pub(super) type IssueHook = Box<dyn Fn(u64, &Arc<Runtime>) + Send>;

impl<'a> NewOp<'a> {
    /// Creates a description with the defaults: the operation takes no arrays, and this process has
    /// no part in it.
    pub(crate) fn new(
        at: &'static Location<'static>,
        what: &'a dyn Fn() -> Arc<dyn fmt::Display + Send + Sync>,
        descriptor: &'a dyn Fn() -> OpDescriptor,
    ) -> Self {
        Self {
            what,
            at,
            part: OpPart::Idle,
            takes: &[],
            takes_host_values: true,
            donates: &|_| false,
            source: None,
            descriptor,
            known: None,
            again: &|| None,
            replayed: None,
        }
    }
}

impl Program {
    /// Issues an operation. If this process has [work](OpPart::Work) to do, blocks while the
    /// program is too far ahead.
    ///
    /// `words` contain every property of the operation that must be equal on all processes, except
    /// the host values among the arrays that it takes. A replayed operation does not use them.
    pub(crate) fn issue_op(
        &mut self,
        words: impl IntoIterator<Item = u64>,
        new: NewOp<'_>,
    ) -> IssuedOp {
        let NewOp {
            what,
            at,
            takes,
            donates,
            ..
        } = new;

        if let OpPart::Work(_) = new.part {
            self.admit(at);
        }
        // invariant: issue-errors-are-pure
        match new.replayed {
            Some(Replayed { op, span }) => self.advance(op, span),
            None => {
                let hosts = if new.takes_host_values { takes } else { &[] };
                self.take_number(words, hosts, what(), at);
            }
        }

        // The step's capture and the dry run see the operation before it is in flight.
        let op = self.count;
        if let Some(capture) = &mut self.capture {
            capture.note(op, self.label, &new);
        }
        if let Some(dry_run) = &self.runtime.dry_run {
            let takes = takes
                .iter()
                .enumerate()
                .map(|(i, array)| (*array, donates(i)));
            let note = OperationNote {
                label: self.label,
                at,
                hash: self.hash.word(),
            };
            dry_run.operation(note, takes, new.known, new.descriptor);
        }

        let guard = match new.part {
            OpPart::Work(bytes) => Some(self.runtime.in_flight.begin(op, self.hash_at_last, bytes)),
            OpPart::Program => None,
            OpPart::Idle => return IssuedOp { op, guard: None },
        };

        if spans::are_on() {
            let bytes = if let OpPart::Work(bytes) = new.part {
                bytes
            } else {
                0
            };
            let issued = spans::TracedOp {
                op,
                label: self.label,
                what: &*what(),
                at,
                bytes,
            };
            let span = self.step_span.operation(self.steps + 1, &issued);
            self.runtime.in_flight.set_span(op, span);
        }

        self.runtime
            .trace
            .issued(op, self.label, at, new.source, what);
        IssuedOp { op, guard }
    }

    /// Takes the next operation number, mixes `words` and the host values among `takes` into the
    /// rolling hash, and reports the operation to the router.
    fn take_number(
        &mut self,
        words: impl IntoIterator<Item = u64>,
        takes: &[&MpmdArray],
        what: Arc<dyn fmt::Display + Send + Sync>,
        at: &'static Location<'static>,
    ) {
        let values = self.hash_values(takes);
        self.count += 1;
        let (hash, values) = words
            .into_iter()
            .fold(self.hash, Rolling::mix)
            .mix_values(values);
        self.hash = hash;
        self.hash_at_last = hash.value();

        if let Some(hook) = &self.on_issue {
            hook(self.count, &self.runtime);
        }
        self.runtime.issue(OpRecord {
            op: self.count,
            hash: self.hash_at_last,
            what,
            values,
            note: self.label.map(Label::note),
            at,
        });
    }

    /// Advances the operation count to `op` in a replayed step, past operations that this process
    /// skips. Reports these to the router with the hashes of `span`. Does nothing if the count is
    /// `op` already.
    pub(crate) fn advance(&mut self, op: u64, span: &Arc<dyn OpSpan>) {
        if op == self.count {
            return;
        }

        if let Some(hook) = &self.on_issue {
            (self.count + 1..=op).for_each(|op| hook(op, &self.runtime));
        }

        self.count = op;
        self.hash_at_last = span.hash_at(op);
        self.runtime.issue_span(op, span);
    }

    /// Returns the rolling hash at the operation that was issued last. Peers compare this value.
    pub(crate) fn hash_at_last(&self) -> u128 {
        self.hash_at_last
    }

    /// Returns the rolling hash of all operations issued so far.
    pub(crate) fn rolling(&self) -> Rolling {
        self.hash
    }

    /// Sets the rolling hash to its value at the end of a replayed step.
    pub(crate) fn set_rolling(&mut self, hash: Rolling) {
        self.hash = hash;
    }

    /// Blocks while this process is at its run-ahead limits. These count operations in flight and
    /// payloads that peers have not taken. Reports a hang after the peer timeout, then at growing
    /// intervals.
    ///
    /// Waits only for operations issued before. These do not depend on later operations, so there
    /// is no deadlock.
    pub(super) fn admit(&self, at: &'static Location<'static>) {
        let runtime = &self.runtime;
        let ops = runtime.config.run_ahead_ops;
        let bytes = runtime.config.run_ahead_bytes;
        // invariant: lower-only
        // The bounds need no lock: most calls end here.
        let (most_ops, most_bytes) = runtime.in_flight.at_most();
        if most_ops < ops && most_bytes < bytes {
            return;
        }

        let is_room = |counts: &OpCounts| {
            let ahead = counts.ahead();
            ahead.ops == 0 || (ahead.ops < ops && ahead.bytes < bytes)
        };
        if is_room(&runtime.in_flight.counts()) {
            return;
        }
        runtime.ask_for_left();
        self.wait_for_operations("running ahead", at, is_room);
    }

    /// With [`Builder::sync`](super::Builder::sync), blocks until this process's operations have
    /// ended. Called at the end of kernel calls, moves, replays and new arrays. Splits and
    /// microbatches do not call it, because they only give parts of arrays new handles.
    ///
    /// # Errors
    ///
    /// If an operation of this process has failed, or the job.
    #[inline]
    pub(crate) fn synced(&self, at: &'static Location<'static>) -> Result<()> {
        if self.runtime.config.sync {
            self.wait_until_idle("a synchronous call", at)
        } else {
            Ok(())
        }
    }

    /// Blocks until all operations that this process has issued so far have ended: its kernels and
    /// moves, and the transfers to receivers of its sends. Use it before the program measures time.
    /// [`Builder::sync`](super::Builder::sync) does the same after each call.
    ///
    /// Operations of other processes may still run. Reports a hang after the peer timeout, then at
    /// growing intervals.
    ///
    /// # Errors
    ///
    /// If an operation of this process has failed, or the job.
    #[track_caller]
    pub fn sync(&self) -> Result<()> {
        self.wait_until_idle("`Program::sync`", Location::caller())
    }

    /// Lets the program continue after failures of kernels or memory in operations that were issued
    /// so far. They do not end the job, even if they happen later. Call it on every process, at the
    /// same position in the order of operations.
    ///
    /// Operations that depend on a failed one fail, too. Drop the objects and arrays that took part
    /// in a failed operation, and make new ones.
    pub fn forgive_failures(&mut self) {
        self.runtime.forgive(self.count);
    }

    fn wait_until_idle(&self, what: &'static str, at: &'static Location<'static>) -> Result<()> {
        if let Some(dry_run) = &self.runtime.dry_run {
            dry_run.sync(at);
        }

        self.runtime.ask_taken(self.count);
        self.wait_for_operations(what, at, |counts| counts.ops == 0);
        self.runtime
            .trouble()
            .map_or(Ok(()), |failure| Err(Error::failed(failure)))
    }

    /// Blocks until `enough` returns true for the operations in flight. Reports a hang after the
    /// peer timeout, then at growing intervals.
    fn wait_for_operations(
        &self,
        what: &'static str,
        at: &'static Location<'static>,
        enough: impl Fn(&OpCounts) -> bool,
    ) {
        let runtime = &self.runtime;
        let _doing = runtime.status.enter(Doing::Waiting(what, at));
        let _waiting = runtime.trace.wait(what, at);

        loop {
            let deadline = after(now(), runtime.config.peer_timeout);
            if runtime.in_flight.wait_until(deadline, &enough) {
                return;
            }
            runtime.report_hang(&format!(
                "process {}: {at} waits for {} operations issued before it; {}",
                runtime.me,
                runtime.in_flight.counts().ahead().ops,
                runtime.doing_and_why()
            ));
        }
    }
}
