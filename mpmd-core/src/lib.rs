//! Arrays and their execution. Programs depend on the crate `mpmd`, which shows the part of this
//! one that users need.
//!
//! The user writes one ordinary program; every process of the job runs it. A [`Program`] issues
//! operations on [`MpmdArray`]s: [`Program::device_put`] moves an array, and [`Program::jit`] runs
//! a [`Kernel`](kernel::Kernel) on its mesh. Each process derives its own part of an operation from
//! the ownership of regions. The user writes no send, no receive, no tag and no test of a rank.
//!
//! [`Program::run`] joins the job, runs the program and finishes it:
//!
//! ```
//! use mpmd_core::prelude::*;
//!
//! fn main() -> Result<()> {
//!     Program::run(|p| {
//!         let mesh = p.mesh(&[("all", p.topology().device_ids().len())])?;
//!         let x = p.device_put(&MpmdArray::from_slice(&[2], &[1.0f32, 2.0])?, mesh.replicated())?;
//!         if let Some(x) = x.to_host()? {
//!             println!("process {} has {:?}", p.process(), x.to_vec::<f32>()?);
//!         }
//!         Ok(())
//!     })
//! }
//! ```

#![forbid(unsafe_code)]

// `#[derive(Tree)]` names this crate from outside. With this name it also works inside the crate.
extern crate self as mpmd;

mod api;
mod error;
mod exec;
mod files;
pub mod kernel;
pub mod pipeline;
pub mod trace;
mod warning;

pub use api::compute;
pub use api::jit::{Jit, JitBuilder, run_here};
pub use api::object::{
    BoundMethod, MadeObject, Makes, Method, MethodBuilder, MethodClosures, MethodResult,
    MpmdObject, ObjectBytes, RunMethod, method,
};
pub use api::program::{
    Builder, MemoryUse, PlanCacheMetrics, Program, ProgramMetrics, Simulation, SimulationReport,
    simulate, transports,
};
pub use api::put::{MoveOptions, PutVjp};
pub use api::recover::{Commits, Committed, OnLoss, RecoveringBuilder, Recovery};
pub use api::replay::Captured;
pub use api::split::{Sections, SplitOptions};
pub use api::weights;
pub use error::{Error, IssueError, IssueProblem, Result, ViewError};
#[doc(hidden)]
pub use exec::array::host_array::HostArray;
pub use exec::array::object::ObjectRef;
pub use exec::array::{ArrayFuture, MpmdArray, Shard, all_ready};
#[doc(hidden)]
pub use files::{file_note, hash_samples, open_regular, read_regular};
pub use kernel::cuda;
pub use mpmd_base::ProcessId;
pub use mpmd_launch as launch;
#[doc(hidden)]
pub use mpmd_layout::__private;
pub use mpmd_layout::{aval, random, region, reshard, sharding, spec, topology, tree};
pub use mpmd_proto::{Failure, FailureKind};
pub use mpmd_record::dry_run;
pub use mpmd_rendezvous::{Difference, Fact};
pub use trace::{Label, Role};

/// Names that nearly every program needs.
pub mod prelude {
    pub use mpmd_layout::aval::{DType, ShapedArray, f32s, f64s, i32s, u8s, u32s};
    pub use mpmd_layout::region::Region;
    pub use mpmd_layout::spec;
    pub use mpmd_layout::tree::Tree;

    pub use crate::api::program::Program;
    pub use crate::api::put::MoveOptions;
    pub use crate::api::split::{Sections, SplitOptions};
    pub use crate::error::{Error, Result};
    pub use crate::exec::array::MpmdArray;
    pub use crate::exec::array::host_array::HostArray;
    pub use crate::kernel::{
        Context, Kernel, Signature, View, ViewMut, elementwise, kernel, like_input,
    };
    pub use mpmd_device::collective::Reduce;
}
