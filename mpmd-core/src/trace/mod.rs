//! What happened, when, and on whose account: timelines of runs that were traced, and of schedules
//! that were only simulated, in one form.
//!
//! With [`Builder::trace`](crate::Builder::trace), `mpmd run --trace` or `MPMD_TRACE` each process
//! of a job notes what becomes of its operations ([`Event`]s) and writes them to a file
//! ([`ProcessTrace`]). [`Run::merge`] puts the files of a job together; the rest are views of that.

mod align;
mod drawn;
mod event;
mod file;
mod label;
mod measure;
mod merge;
mod perfetto;
mod plan;
mod reasons;
mod record;

#[cfg(test)]
mod tests;

pub use event::{Event, PieceStep, What};
pub(crate) use file::unix_now;
pub use file::{About, Clock, ProcessTrace, TraceError};
pub use label::{Label, Role};
pub use measure::CostsError;
pub use merge::{Kernel, Operation, Piece, Process, Run, Step as RunStep, Wait};
pub use mpmd_schedule::timeline::{Bar, Gap, Kind, Mark, MemoryPoint, Row, Step, Timeline};
pub use plan::PlanError;
pub(crate) use record::Trace;
