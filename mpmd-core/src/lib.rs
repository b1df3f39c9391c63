//! Arrays, shardings, `device_put` and `jit` for programs that run different code on different
//! processes.
//!
//! The user writes one ordinary program; every process of the job runs it. A [`Program`] issues
//! operations on [`MpmdArray`]s: [`Program::device_put`] moves an array, [`Program::jit`] runs a
//! [`Kernel`](kernel::Kernel) on the mesh that it is bound to, and each process works out from
//! ownership what its own part is. Nobody writes a send, a receive, a tag or a rank test.
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

// So that `#[derive(Tree)]`, which names this crate from outside, also works inside it.
extern crate self as mpmd;

pub mod backend;
pub mod cuda;
pub mod trace;

mod array;
pub mod device;
mod device_put;
mod error;
mod host_array;
mod jit;
pub mod kernel;
pub mod pipeline;
pub mod plan;
mod program;
mod replay;
mod reshard_tree;
mod runtime;
mod split;
mod warning;

pub use array::{ArrayFuture, MpmdArray, Shard, all_ready};
pub use device_put::PutOptions;
pub use error::{Error, IssueError, IssueProblem, Result};
pub use host_array::HostArray;
pub use jit::{Jit, JitBuilder, run_here};
pub use mpmd_ids::ProcessId;
pub use mpmd_launch as launch;
pub use mpmd_layout::{aval, random, region, reshard, sharding, spec, topology, tree};
pub use mpmd_transport::{Failure, FailureKind};
pub use program::{
    Builder, Holdings, Label, MemoryUse, Metrics, PlanCacheMetrics, Program, Role, Simulation,
    simulate, transports,
};
pub use replay::Recorded;
pub use reshard_tree::ReshardOptions;
pub use split::{Sections, SplitOptions};

/// What nearly every program needs.
pub mod prelude {
    pub use crate::array::MpmdArray;
    pub use crate::error::{Error, Result};
    pub use crate::host_array::HostArray;
    pub use crate::kernel::{Context, Kernel, Reduce, Signature, View, ViewMut};
    pub use crate::program::Program;
    pub use crate::reshard_tree::ReshardOptions;
    pub use crate::split::{Sections, SplitOptions};
    pub use mpmd_layout::aval::{ShapedArray, f32s, f64s, i32s, u8s};
    pub use mpmd_layout::region::Region;
    pub use mpmd_layout::spec;
    pub use mpmd_layout::tree::Tree;
}

/// The README's program, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
