//! Starting the processes of a job, and finding out which of them this one is.
//!
//! - [`JobEnv`] reads what a launcher says to a process: ours, torchrun, Slurm, Open MPI, PMIx,
//!   PMI, Kubernetes. There is no scheduler here: on clusters the existing launchers start
//!   processes.
//! - [`Launch`] starts all processes of a job on this machine, and leaves none behind. `mpmd run`
//!   is a thin layer over it; programs that start themselves use it directly:
//!
//! ```no_run
//! use mpmd_launch::{JobEnv, Launch};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     if JobEnv::from_env()?.is_none() {
//!         let outcome = Launch::this_program_again(4)?.run()?;
//!         if let Some(failure) = &outcome.first_failure {
//!             eprintln!("{failure}");
//!         }
//!         std::process::exit(outcome.code());
//!     }
//!     // One of the four processes.
//!     Ok(())
//! }
//! ```

mod cause;
mod device;
mod env;
mod error;
mod output;
mod spawn;
mod spin;
mod supervise;

pub use cause::Failure;
#[doc(hidden)]
pub use device::kinds_by_process;
pub use device::{cuda_collectives, device_kinds};
pub use env::{JobEnv, PlanEnv};
pub use error::LaunchError;
pub use output::Color;
pub use spawn::{Launch, OutputMode, adopt, guard};
pub use spin::spin;
pub use supervise::{How, Outcome};

/// The variables by which our launcher speaks to the processes it starts.
pub mod variables {
    /// Which process this is, from 0.
    pub const RANK: &str = "MPMD_RANK";
    /// Number of processes in the job.
    pub const WORLD_SIZE: &str = "MPMD_WORLD_SIZE";
    /// Which of the processes on this host this is, from 0.
    pub const LOCAL_RANK: &str = "MPMD_LOCAL_RANK";
    /// Where the processes meet, `host:port`. Goes before what any other launcher says on it.
    pub const COORDINATOR: &str = "MPMD_COORDINATOR";
    /// `1` where the launcher itself runs the rendezvous service; else process 0 must.
    pub const HOSTED: &str = "MPMD_HOSTED";
    /// The job's secret, 64 hexadecimal digits.
    pub const JOB_TOKEN: &str = "MPMD_JOB_TOKEN";
    /// A file with a secret of the user's, from which the tokens of all his jobs follow: for where
    /// nobody sets [`JOB_TOKEN`]. A regular file of this user or of root, mode 0600 or 0400, with
    /// 32 to 4096 bytes of any kind; white space at its ends does not count. The same on all hosts.
    pub const JOB_TOKEN_FILE: &str = "MPMD_JOB_TOKEN_FILE";
    /// The transport to use, one of [`transports::NAMES`](crate::transports::NAMES); the same on
    /// all processes.
    pub const TRANSPORT: &str = "MPMD_TRANSPORT";
    /// With `0` processes of one host do not lend each other memory of their CUDA devices; for
    /// comparisons. Where one of two says so, neither does.
    pub const CUDA_IPC: &str = "MPMD_CUDA_IPC";
    /// How long a transport looks for work before it sleeps: `auto`, `never`, `always`, or
    /// microseconds.
    pub const SPIN: &str = "MPMD_SPIN";
    /// Number of devices that each process owns. A program that asks for [another
    /// number](crate::Builder::devices) does not start.
    pub const DEVICES_PER_PROCESS: &str = "MPMD_DEVICES_PER_PROCESS";
    /// Of which kind the devices of the job are: `cpu` or `cuda`, or one of them for each process
    /// in order, with commas between them, where the last counts for all that follow. The same on
    /// all processes.
    pub const DEVICE: &str = "MPMD_DEVICE";
    /// Which way collectives of CUDA devices go in kernels: `host`, or `nccl` where NCCL can. The
    /// same on all processes.
    pub const CUDA_COLLECTIVES: &str = "MPMD_CUDA_COLLECTIVES";
    /// How long processes wait for each other, in seconds.
    pub const PATIENCE: &str = "MPMD_PATIENCE";
    /// The name of this process's host, where it is not the system's: in containers, and in tests
    /// that act as several hosts. Processes of one name are neighbours to the planner.
    pub const HOST: &str = "MPMD_HOST";
    /// A file with what the links between devices cost, as `mpmd bench links --out` writes it. Read
    /// by process 0, which tells the others.
    pub const LINKS: &str = "MPMD_LINKS";
    /// With `uncommitted` the processes compare host values of any size, not only those of up to 64
    /// bytes as release builds do. The same on all processes.
    pub const CHECK: &str = "MPMD_CHECK";
    /// Where this process is to write its plan: it joins no job, owns nothing, and runs the program
    /// only to record what the processes of a job would do
    /// ([`Program::plan`](crate::Program::plan)). Goes before what any launcher says.
    pub const PLAN: &str = "MPMD_PLAN";
    /// Number of processes of the job that is planned.
    pub const PLAN_PROCESSES: &str = "MPMD_PLAN_PROCESSES";
    /// The number of the process of that job that [`Program::process`](crate::Program::process)
    /// says. By default one beyond those of the job.
    pub const PLAN_PROCESS: &str = "MPMD_PLAN_PROCESS";
    /// The most steps that are recorded, 16 by default: before that it ends with two equal steps.
    pub const PLAN_STEPS: &str = "MPMD_PLAN_STEPS";
    /// The folder in which each process writes its trace; none where it is not set.
    pub const TRACE: &str = "MPMD_TRACE";
    /// The launcher's process number; what it started ends with it.
    pub const LAUNCHER_PID: &str = "MPMD_LAUNCHER_PID";
}
