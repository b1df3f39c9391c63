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

/// Returns true if the program's log records these spans.
#[inline]
pub(crate) fn are_on() -> bool {
    tracing::enabled!(target: TARGET, Level::DEBUG)
}

/// The span of the program's current step. `None` until the step issues an operation with a span.
#[derive(Default)]
pub(crate) struct StepSpan(Option<Span>);

/// The properties of an operation that its span records.
pub(crate) struct TracedOp<'a> {
    pub(crate) op: u64,
    pub(crate) label: Option<Label>,
    pub(crate) what: &'a dyn Display,
    pub(crate) at: &'static Location<'static>,
    /// Bytes of new memory that the operation takes.
    pub(crate) bytes: u64,
}

impl StepSpan {
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }

    /// Returns a new span for an operation that the program issues in step number `step`.
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

/// Enters the span of a range that the program named, until the result is dropped. Its parent is
/// the enclosing range; operations stay below their step.
pub(crate) fn annotation(name: &str, at: &'static Location<'static>) -> EnteredSpan {
    debug_span!(target: TARGET, "annotation", name, line = %at).entered()
}

/// The span of a kernel that this thread runs or issues. Dropping it logs the time that this took.
pub(crate) struct KernelSpan {
    span: EnteredSpan,
    since: Instant,
    said: &'static str,
}

impl KernelSpan {
    /// Enters the span of a kernel on a device, as a child of its operation's span. `said` is the
    /// text of the event at the end, such as "ran".
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

/// Logs that a device has run an issued kernel, with the time that it took if that is known.
pub(crate) fn ran(operation: &Span, device: &dyn Display, microseconds: Option<u64>) {
    debug!(target: TARGET, parent: operation, %device, microseconds, "ran");
}

/// Logs that a piece of an operation was sent or received. Other steps are not logged.
pub(crate) fn piece(operation: &Span, step: PieceStep, peer: ProcessId, piece: u64, bytes: u64) {
    let said = match step {
        PieceStep::Posted => "sent",
        PieceStep::Taken => "received",
        PieceStep::Offered | PieceStep::Expected | PieceStep::Arrived => return,
    };
    debug!(target: TARGET, parent: operation, %peer, piece, bytes, "{said}");
}
