//! Sharing a value that only one process can know, so that all processes can branch on it.

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::now;
use mpmd_base::deadline::after;
use mpmd_proto::control;
use mpmd_proto::router::{Failure, FailureKind, PieceSize};
use mpmd_proto::wire::MAX_CONTROL_BYTES;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{IssuedOp, NewOp, OpPart, Program};
use crate::error::{Error, IssueProblem, Result};
use crate::exec::{AsyncBuffer, Doing, Outgoing, Waiter};
use mpmd_record::dry_run::{OpDescriptor, OpKind};
use mpmd_record::trace::TraceEventKind;

/// The description of a `broadcast_value` operation for messages.
struct ValueBroadcast {
    from: ProcessId,
    value_type: &'static str,
}

impl fmt::Display for ValueBroadcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "broadcast_value of a {} from process {}",
            self.value_type, self.from
        )
    }
}

impl Program {
    /// Computes a value with `f` on process `from`, and returns it on every process.
    ///
    /// Use it if a fact known to only one process, such as a loss or a request, decides which
    /// operations the program issues. There is no other safe way. The other processes block until
    /// the value has arrived. Process `from` waits only if it is too far ahead. In a [dry
    /// run](Program::is_dry_run) the call returns `in_dry_run` and does not run `f`.
    ///
    /// # Errors
    ///
    /// If the job has no process `from`, or the call is within a captured step. If `f` fails or
    /// panics, on every process. If `from` is gone, or the encoded value is larger than 1 MiB.
    #[track_caller]
    pub fn broadcast_value<T: Serialize + DeserializeOwned>(
        &mut self,
        from: ProcessId,
        in_dry_run: T,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.broadcast_value_at(from, in_dry_run, f, Location::caller())
    }

    /// Broadcasts a value. `at` is the source line of the call.
    fn broadcast_value_at<T: Serialize + DeserializeOwned>(
        &mut self,
        from: ProcessId,
        in_dry_run: T,
        f: impl FnOnce() -> Result<T>,
        at: &'static Location<'static>,
    ) -> Result<T> {
        self.refuse_in_capture(at, "broadcast_value")?;
        if from.index() >= self.processes() {
            let problem = format!("there is no process {from} among {}", self.processes());
            return Err(IssueProblem::Mesh(problem).at(at, "broadcast_value"));
        }
        if from == self.process() {
            // Bounds how far a process that only sends values runs ahead of the receivers.
            self.admit(at);
        }

        let what = Arc::new(ValueBroadcast {
            from,
            value_type: std::any::type_name::<T>(),
        });
        let descriptor = || {
            let bytes = control::encode(&in_dry_run).map_or(0, |bytes| bytes.len() as u64);
            let kind = OpKind::BroadcastValue {
                from: from.0,
                bytes,
            };
            OpDescriptor::local(&what, kind, Vec::new())
        };
        let words = [0xa6ee, u64::from(from.0)];
        let IssuedOp { op, .. } = self.issue_op(
            words,
            NewOp {
                part: OpPart::Program,
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );

        if self.is_dry_run() {
            return Ok(in_dry_run);
        }
        if from == self.runtime.me {
            return self.broadcast_own(op, at, f);
        }
        self.receive_value(from, op, at)
    }

    /// Computes a value with `f` on each process, and returns the values of all processes on every
    /// process, indexed by process.
    ///
    /// Use it if a decision depends on a fact of each process, such as its free memory or the
    /// contents of its own files. It issues one [`broadcast_value`](Self::broadcast_value) for each
    /// process, one after another. So it takes time in proportion to the number of processes. In a
    /// [dry run](Program::is_dry_run) each value is `in_dry_run`, and `f` does not run.
    ///
    /// # Errors
    ///
    /// As for [`broadcast_value`](Self::broadcast_value). If `f` fails or panics on several
    /// processes, every process gets the error of the one with the lowest number.
    #[track_caller]
    pub fn gather_value<T: Clone + Serialize + DeserializeOwned>(
        &mut self,
        in_dry_run: T,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<Vec<T>> {
        let at = Location::caller();
        let mut own = Some(f);
        let mut values = Vec::with_capacity(self.processes());
        let mut first_error = None;

        // All issue every operation, also after a failed one: operations stay alike.
        for from in (0..self.processes() as u32).map(ProcessId) {
            let run = || own.take().map_or_else(|| Ok(in_dry_run.clone()), |f| f());
            match self.broadcast_value_at(from, in_dry_run.clone(), run, at) {
                Ok(value) => values.push(value),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(values), Err)
    }

    /// Computes the value of operation `op` with `f`, and sends it to all other processes. A
    /// failure of `f` fails the operation on all processes.
    fn broadcast_own<T: Serialize>(
        &self,
        op: u64,
        at: &'static Location<'static>,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let runtime = self.runtime.clone();
        let from = runtime.me;
        let value = match catch_unwind(AssertUnwindSafe(f)) {
            Ok(value) => value,
            Err(_) => Err(Error::kernel("the closure panicked")),
        };
        let bytes = value.as_ref().map_err(Clone::clone).and_then(|value| {
            control::encode(value).map_err(|error| Error::kernel(error.to_string()))
        });
        let failure = bytes.as_ref().err().map(|error| match error {
            Error::Failed(failure) => failure.clone(),
            error => {
                let message = format!(
                    "broadcast_value (operation {op}) at {at} failed on process {from}: {error}"
                );
                Arc::new(Failure::new(FailureKind::Kernel, from, op, message))
            }
        });

        let size = bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
        let guard = runtime.in_flight.begin(op, self.hash_at_last(), size);
        for to in (0..self.processes() as u32)
            .map(ProcessId)
            .filter(|to| *to != from)
        {
            let key = (op, u64::from(to.0));
            match (&bytes, &failure) {
                (Ok(bytes), _) => {
                    let buffer = bytes.clone().into();
                    let bytes = bytes.len() as u64;
                    let outgoing = Outgoing {
                        buffer,
                        bytes,
                        guard: guard.clone(),
                    };
                    runtime.with_router(|router| {
                        router.announce(to, key, guard.hash(), bytes, outgoing)
                    });
                }
                (Err(_), Some(failure)) => {
                    runtime.with_router(|router| router.poison(to, op, key.1, failure))
                }
                (Err(_), None) => {}
            }
        }

        match failure {
            Some(failure) => {
                runtime.remember(&failure);
                Err(Error::failed(failure))
            }
            None => value,
        }
    }

    /// Waits for the value that process `from` sends for operation `op`.
    fn receive_value<T: DeserializeOwned>(
        &self,
        from: ProcessId,
        op: u64,
        at: &'static Location<'static>,
    ) -> Result<T> {
        let runtime = self.runtime.clone();
        let (resolver, slot) = AsyncBuffer::new();
        let key = (op, u64::from(runtime.me.0));
        let hash = self.hash_at_last();
        runtime.with_router(|router| {
            router.expect_any_size(
                from,
                key,
                hash,
                PieceSize {
                    likely: 0,
                    most: MAX_CONTROL_BYTES,
                },
                Waiter::Bytes {
                    resolver,
                    from,
                    op,
                    piece: key.1,
                },
                runtime.now(),
            );
        });

        let _doing = runtime.status.enter(Doing::Waiting("broadcast_value", at));
        let _waiting = runtime.trace.wait("broadcast_value", at);
        let outcome = loop {
            // The router reports a silent sender. This timeout only wakes this process's wait.
            let deadline = after(now(), runtime.config.peer_timeout);
            if let Some(outcome) = runtime.parker.wait(&slot, Some(deadline)) {
                break outcome;
            }
        };
        runtime.trace.note(|| TraceEventKind::Over { op });

        let bytes = outcome.map_err(|failure| {
            runtime.remember(&failure);
            Error::failed(failure)
        })?;
        control::decode(&bytes).map_err(|error| {
            let message = format!("broadcast_value (operation {op}) at {at}: {error}");
            let failure = Arc::new(Failure::new(FailureKind::Transport, from, op, message));
            runtime.remember(&failure);
            Error::failed(failure)
        })
    }
}
