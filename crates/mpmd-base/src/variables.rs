//! The environment variables that our launcher sets for its processes.

/// The number of this process in the job, from 0.
pub const RANK: &str = "MPMD_RANK";
/// Number of processes in the job.
pub const WORLD_SIZE: &str = "MPMD_WORLD_SIZE";
/// Number of spare processes beyond those of the job. A spare waits for the place of a lost
/// process.
pub const SPARES: &str = "MPMD_SPARES";
/// Number of processes that the launcher may start in all for the places of lost ones.
pub const RESTARTS: &str = "MPMD_RESTARTS";
/// `1` in a process that was added to a running job. Its number is beyond all others, and it may
/// make the job larger than at its start.
pub const ADDED: &str = "MPMD_ADDED";
/// The number of this process among the job's processes on its host, from 0.
pub const LOCAL_RANK: &str = "MPMD_LOCAL_RANK";
/// The address of the rendezvous, `host:port`. It overrides the address from any other
/// launcher.
pub const COORDINATOR: &str = "MPMD_COORDINATOR";
/// `1` if the launcher runs the rendezvous service. Otherwise process 0 must run it.
pub const HOSTED: &str = "MPMD_HOSTED";
/// The job's secret token: 64 hexadecimal digits.
pub const JOB_TOKEN: &str = "MPMD_JOB_TOKEN";
/// A file with a secret of the user, from which the tokens of all the user's jobs are derived. It
/// is read if [`JOB_TOKEN`] is not set. It must be a regular file of this user or of root, with
/// mode 0600 or 0400, the same on all hosts. It contains 32 to 4096 bytes; white space at its start
/// and end is ignored.
pub const JOB_TOKEN_FILE: &str = "MPMD_JOB_TOKEN_FILE";
/// The transport to use: `auto`, `shm`, `tcp` or `ucx`. The same on all processes.
pub const TRANSPORT: &str = "MPMD_TRANSPORT";
/// With `0`, processes of one host do not lend each other memory of their CUDA devices, for
/// comparisons. If one of two processes sets it, neither lends to the other.
pub const CUDA_IPC: &str = "MPMD_CUDA_IPC";
/// The time for which a transport polls for work before it sleeps: `auto`, `never`, `always`,
/// or microseconds.
pub const SPIN: &str = "MPMD_SPIN";
/// The widest vector instructions that this process may compute with: `baseline`, `avx2` or
/// `avx512`. All processes of a job compute with the narrowest width among them.
pub const SIMD: &str = "MPMD_SIMD";
/// Number of cores of the job's processes on this host together, if each process is bound to some
/// of them. Without it, a process counts the cores that it may use itself.
pub const CORES: &str = crate::block::CORES;
/// Number of devices that each process owns. A program that requests another number does not start.
pub const DEVICES_PER_PROCESS: &str = "MPMD_DEVICES_PER_PROCESS";
/// The kinds of the job's devices: `cpu` or `cuda`, or a comma-separated list of them by
/// process. The last kind in the list also applies to all further processes. The same on all
/// processes.
pub const DEVICE: &str = "MPMD_DEVICE";
/// The method by which collectives in kernels move data between CUDA devices: `host`, or `nccl` for
/// the cases that NCCL supports. The same on all processes.
pub const CUDA_COLLECTIVES: &str = "MPMD_CUDA_COLLECTIVES";
/// The peer timeout: how long processes wait for each other, in seconds, more than zero.
pub const PEER_TIMEOUT: &str = "MPMD_PEER_TIMEOUT";
/// The name of this process's host, if it differs from the system's host name. It is needed in
/// containers, and in tests that simulate several hosts. Processes with the same name count as
/// being on one host.
pub const HOST: &str = "MPMD_HOST";
/// Additional checks, separated by commas; the same on all processes. `uncommitted`: the processes
/// compare all host values at every call. Without it, release builds compare values above 4 KiB by
/// samples at most calls. `replicas`: devices compare the replicas of each kernel's outputs.
/// `replay:N`: one kernel call in `N` is recomputed on another process and the bits are compared.
pub const CHECK: &str = "MPMD_CHECK";
/// The file to which this process writes its dry run. A dry run runs the program only to list the
/// operations of a job's processes. The process joins no job and owns no devices. The variable
/// overrides the variables of any launcher.
pub const DRY_RUN: &str = "MPMD_DRY_RUN";
/// The number of processes of the job in the dry run.
pub const DRY_RUN_PROCESSES: &str = "MPMD_DRY_RUN_PROCESSES";
/// The process number that the program sees in the dry run. By default it is beyond those of the
/// job.
pub const DRY_RUN_PROCESS: &str = "MPMD_DRY_RUN_PROCESS";
/// The largest number of steps in the dry run, 16 by default. The dry run ends earlier after two
/// equal steps.
pub const DRY_RUN_STEPS: &str = "MPMD_DRY_RUN_STEPS";
/// The folder in which each process writes its trace. Without it, no trace is written.
pub const TRACE: &str = "MPMD_TRACE";
/// With `1`, each call of this process's program waits until its operations have ended, and returns
/// their failure.
pub const SYNC: &str = "MPMD_SYNC";
/// The launcher's process id in the operating system. The processes that it started end with it.
pub const LAUNCHER_PID: &str = "MPMD_LAUNCHER_PID";
