//! What happened, when, and on whose account: timelines of runs that were traced, and of schedules that were
//! only simulated, in one form.

mod timeline;

pub use timeline::{Bar, Gap, Kind, Mark, MemoryPoint, Row, Step, Timeline};
