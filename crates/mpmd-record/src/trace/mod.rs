//! Traces and timelines: of runs that were traced, and of schedules that were only simulated, in
//! the same form.
//!
//! With `Builder::trace`, `mpmd run --trace` or `MPMD_TRACE`, each process
//! records the progress of its operations ([`Event`]s) in a file ([`ProcessTrace`]). [`Run::merge`]
//! combines the files of a job. The other items are views of the merged run.

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

pub use event::{Event, PieceStep, What};
pub use file::{About, Clock, ProcessTrace, TraceError};
pub use label::{Label, Role};
pub use measure::CostsError;
pub use merge::{Annotation, Kernel, Operation, Piece, Process, Run, RunStep, Wait};
pub use mpmd_schedule::timeline::{Bar, Gap, Kind, Mark, MemoryPoint, Row, Timeline, TimelineStep};
pub use plan::NoPlan;
