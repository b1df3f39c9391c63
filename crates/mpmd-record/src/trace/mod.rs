//! Traces and timelines: of runs that were traced, and of schedules that were only simulated, in
//! the same form.
//!
//! With `Builder::trace`, `mpmd run --trace` or `MPMD_TRACE`, each process
//! records the progress of its operations ([`TraceEvent`]s) in a file ([`ProcessTrace`]).
//! [`TracedRun::merge`] combines the files of a job. The other items are views of the merged run.

mod align;
mod drawn;
mod event;
#[doc(hidden)]
pub mod file;
mod label;
mod measure;
mod merge;
mod plan;
mod reasons;

#[cfg(test)]
mod tests;

pub use event::{PieceStep, TraceEvent, TraceEventKind};
pub use file::{ClockSample, ProcessTrace, TraceError, TraceFault, TraceHeader};
pub use label::{Label, Role};
pub use measure::CostsError;
pub use merge::{
    Annotation, CollectiveWait, KernelRun, ProgramWait, RunStep, TracedOperation, TracedPiece,
    TracedProcess, TracedRun,
};
pub use mpmd_schedule::timeline::{
    Bar, BarKind, MemoryPoint, Timeline, TimelineGap, TimelineMark, TimelineRow, TimelineStep,
};
pub use plan::NoPlan;
