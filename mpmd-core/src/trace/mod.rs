//! The events of this process, recorded into a file while the program runs.
//!
//! The types of events and files, and all views of them, are in [`mpmd_record::trace`].

mod record;

pub use mpmd_record::trace::*;

pub(crate) use mpmd_record::trace::file::unix_now;
pub(crate) use record::Trace;
