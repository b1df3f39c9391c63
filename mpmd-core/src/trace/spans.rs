//! Spans of `tracing` for a program's log: a step has stages, a stage microbatches, a microbatch
//! operations, and an operation kernels and transfers. A range that the program named has one too.
//!
//! They have the target `mpmd::run` and the level `DEBUG`. While no subscriber takes them, each
//! place costs a branch.

use std::fmt::Display;
use std::panic::Location;

use mpmd_base::ProcessId;
use mpmd_base::block::{Instant, now, since};
use tracing::span::EnteredSpan;
use tracing::{Level, Span, debug, debug_span};

use mpmd_record::trace::{Label, PieceStep};

const TARGET: &str = "mpmd::run";

/// Returns true if a subscriber takes the spans.
#[inline]
pub(crate) fn are_on() -> bool {
    tracing::enabled!(target: TARGET, Level::DEBUG)
}

/// The span of the step that the program is in; `None` until an operation of the step has one.
#[derive(Default)]
pub(crate) struct StepSpan(Option<Span>);

/// An operation that gets a span.
pub(crate) struct TracedOp<'a> {
    pub(crate) op: u64,
    pub(crate) label: Option<Label>,
    pub(crate) what: &'a dyn Display,
    pub(crate) at: &'static Location<'static>,
    /// Bytes of new memory.
    pub(crate) bytes: u64,
}

impl StepSpan {
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// Returns the span of an operation that the program issues in step number `step`.
    pub(crate) fn operation(&mut self, step: u64, issued: &TracedOp<'_>) -> Span {
        let TracedOp {
            op,
            label,
            what,
            at,
            bytes,
        } = issued;

        let step = || debug_span!(target: TARGET, parent: None, "step", number = step);
        let mut parent = self.0.get_or_insert_with(step).clone();
        if let Some(Label {
            stage,
            microbatch,
            role,
        }) = label
        {
            let role = role.name();
            parent = debug_span!(target: TARGET, parent: &parent, "stage", number = stage, role);
            if let Some(number) = microbatch {
                parent = debug_span!(target: TARGET, parent: &parent, "microbatch", number);
            }
        }

        let span = debug_span!(
            target: TARGET, parent: &parent, "operation", number = op, %what, line = %at, bytes
        );
        debug!(target: TARGET, parent: &span, "issued");
        span
    }
}

/// Enters the span of a range that the program named, until it is dropped. It is within the
/// spans of the ranges around it; operations are within their step.
pub(crate) fn annotation(name: &str, at: &'static Location<'static>) -> EnteredSpan {
    debug_span!(target: TARGET, "annotation", name, line = %at).entered()
}

/// The span of a kernel that this thread runs or issues, until it is dropped. Then an event says
/// how long that took.
pub(crate) struct KernelSpan {
    span: EnteredSpan,
    since: Instant,
    said: &'static str,
}

impl KernelSpan {
    /// Enters the span of a kernel on a device, within that of its operation. `said` is the text of
    /// the event at the end: what this thread did.
    pub(crate) fn enter(operation: &Span, device: &dyn Display, said: &'static str) -> Self {
        let span = debug_span!(target: TARGET, parent: operation, "kernel", %device).entered();
        Self {
            span,
            since: now(),
            said,
        }
    }
}

impl Drop for KernelSpan {
    fn drop(&mut self) {
        let microseconds = since(self.since).as_micros() as u64;
        debug!(target: TARGET, parent: &*self.span, microseconds, "{}", self.said);
    }
}

/// Tells the log that a device has run an issued kernel, and for how long if that is known.
pub(crate) fn ran(operation: &Span, device: &dyn Display, microseconds: Option<u64>) {
    debug!(target: TARGET, parent: operation, %device, microseconds, "ran");
}

/// Tells the log of the progress of a piece within an operation.
pub(crate) fn piece(operation: &Span, step: PieceStep, peer: ProcessId, piece: u64, bytes: u64) {
    let said = match step {
        PieceStep::Posted => "sent",
        PieceStep::Taken => "received",
        PieceStep::Offered | PieceStep::Expected | PieceStep::Arrived => return,
    };
    debug!(target: TARGET, parent: operation, %peer, piece, bytes, "{said}");
}
