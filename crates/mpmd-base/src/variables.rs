//! The environment variables that our launcher sets for its processes.

/// The number of this process, from 0.
pub const RANK: &str = "MPMD_RANK";
/// Number of processes in the job.
pub const WORLD_SIZE: &str = "MPMD_WORLD_SIZE";
/// Number of processes beyond the job's, which wait for the place of one that is lost.
pub const SPARES: &str = "MPMD_SPARES";
/// `1` in a process that was added to a running job: it has a number beyond all others, and may
/// make the job larger than it was at first.
pub const ADDED: &str = "MPMD_ADDED";
/// The number of this process among those on its host, from 0.
pub const LOCAL_RANK: &str = "MPMD_LOCAL_RANK";
/// The address of the rendezvous, `host:port`. It overrides the address from any other
/// launcher.
pub const COORDINATOR: &str = "MPMD_COORDINATOR";
/// `1` if the launcher runs the rendezvous service; else process 0 must.
pub const HOSTED: &str = "MPMD_HOSTED";
/// The job's secret, 64 hexadecimal digits.
pub const JOB_TOKEN: &str = "MPMD_JOB_TOKEN";
/// A file with a secret of the user, from which the tokens of all his jobs are derived. It is
/// used if [`JOB_TOKEN`] is not set. It is a regular file of this user or of root, with mode
/// 0600 or 0400, the same on all hosts. It has 32 to 4096 bytes of any kind; white space at its
/// ends does not count.
pub const JOB_TOKEN_FILE: &str = "MPMD_JOB_TOKEN_FILE";
/// The transport to use: `auto`, `shm`, `tcp` or `ucx`. The same on all processes.
pub const TRANSPORT: &str = "MPMD_TRANSPORT";
/// With `0`, processes of one host do not lend each other memory of their CUDA devices; for
/// comparisons. If one of two processes sets it, neither lends to the other.
pub const CUDA_IPC: &str = "MPMD_CUDA_IPC";
/// The time for which a transport polls for work before it sleeps: `auto`, `never`, `always`,
/// or microseconds.
pub const SPIN: &str = "MPMD_SPIN";
/// Number of cores that the job's processes on this host have together, if each is bound to
/// some of them. Without it a process counts the cores that it may use.
pub const CORES: &str = crate::block::CORES;
/// Number of devices that each process owns. A program that asks for another number
/// does not start.
pub const DEVICES_PER_PROCESS: &str = "MPMD_DEVICES_PER_PROCESS";
/// The kinds of the job's devices: `cpu` or `cuda`, or a comma-separated list of them by
/// process. The last kind in the list also applies to all further processes. The same on all
/// processes.
pub const DEVICE: &str = "MPMD_DEVICE";
/// The path of collectives of CUDA devices in kernels: `host`, or `nccl` for the cases that
/// NCCL supports. The same on all processes.
pub const CUDA_COLLECTIVES: &str = "MPMD_CUDA_COLLECTIVES";
/// The peer timeout: how long processes wait for each other, in seconds, more than zero.
pub const PEER_TIMEOUT: &str = "MPMD_PEER_TIMEOUT";
/// The name of this process's host, if it differs from the system's name: in containers, and in
/// tests that simulate several hosts. The planner treats processes with the same name as
/// neighbours.
pub const HOST: &str = "MPMD_HOST";
/// Additional checks, with a comma between two. With `uncommitted`, the processes compare host
/// values of any size whole at every call; otherwise release builds compare those of more than
/// 4 KiB by samples at most calls. With `replicas`, devices compare the replicas of each
/// kernel's outputs. With `replay:N`, one kernel call in `N` is recomputed on another process
/// and the bits are compared. The same on all processes.
pub const CHECK: &str = "MPMD_CHECK";
/// The file to which this process writes its dry run. The process joins no job and owns no
/// devices. It is a dry run: it runs the program only to list the operations of a job's
/// processes. Overrides the variables of any
/// launcher.
pub const DRY_RUN: &str = "MPMD_DRY_RUN";
/// The number of processes in the job of the dry run.
pub const DRY_RUN_PROCESSES: &str = "MPMD_DRY_RUN_PROCESSES";
/// The process that the program takes itself for in the dry run. By default a
/// number beyond those of the job.
pub const DRY_RUN_PROCESS: &str = "MPMD_DRY_RUN_PROCESS";
/// The largest number of steps to run, 16 by default. The dry run ends earlier after two equal
/// steps.
pub const DRY_RUN_STEPS: &str = "MPMD_DRY_RUN_STEPS";
/// The folder in which each process writes its trace. Without it there is no trace.
pub const TRACE: &str = "MPMD_TRACE";
/// With `1`, each call of this process's program waits until its operations have ended, and
/// returns their failure.
pub const SYNC: &str = "MPMD_SYNC";
/// The launcher's pid. The processes that it started end with it.
pub const LAUNCHER_PID: &str = "MPMD_LAUNCHER_PID";
