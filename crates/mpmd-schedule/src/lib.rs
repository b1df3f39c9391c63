//! Pipeline schedules as data: the built-in ones, torch's text for them, proofs that they cannot
//! hang, simulation, search for a better order, and costs.
//!
//! Everything here is a pure function of its arguments: no clock, no I/O, no threads. A
//! [`Schedule`] lists the actions of each rank. [`lower()`] adds its sends and receives, [`check`]
//! decides whether the result can run over a channel, [`simulate`] says when each step of it runs
//! by given [`Costs`], and [`timeline`] is the form in which the result is drawn.

// invariant: planners-are-pure
#![forbid(unsafe_code)]

mod backward_fusion;
pub mod check;
mod costs;
pub mod flow;
mod lower;
mod schedule;
mod search;
pub mod simulate;
mod step;
mod text;
pub mod timeline;
mod weight_order;

#[doc(hidden)]
pub use backward_fusion::fused;
pub use costs::{Costs, StageCosts};
pub use lower::{LowerError, Lowered, lower};
pub use schedule::{
    Action, ActionKind, Builtin, PlacedAction, RowPlace, Schedule, ScheduleError, ScheduleFault,
    StagePlacement,
};
pub use search::{SearchOptions, SearchResult, by_cost, is_by_cost, search};
pub use step::{Step, StepKind};
pub use text::{Cell, CellFault, CellProblem, Dialect, Entry, ScheduleText, TextError};
#[doc(hidden)]
pub use weight_order::ascending;
