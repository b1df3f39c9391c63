//! Errors: what went wrong, where in the program, and whose fault it is.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use mpmd_transport::TransportError;
use mpmd_transport::{Failure, FailureKind};

use crate::device::cuda::{CudaError, NoCuda};
use mpmd_launch::LaunchError;
use mpmd_layout::aval::{AvalError, DType};
use mpmd_layout::reshard::ReshardError;
use mpmd_layout::sharding::ShardingError;
use mpmd_layout::sharding::rules::RulesError;
use mpmd_layout::topology::MeshError;
use mpmd_layout::tree::TreeError;
use mpmd_schedule::ScheduleError;

/// The result of nearly everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
///
/// Its `Debug` form is for people too, since a `main` that returns an error has that printed: the
/// message, and its causes where they say more.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call that makes no sense, at this line of the program: the caller's fault, and the same on
    /// every process.
    #[error("{0}")]
    Issue(#[from] Box<IssueError>),
    /// An operation that could not complete; what waits for it fails with the same failure.
    #[error("{0}")]
    Failed(#[from] Arc<Failure>),
    /// The values of an array were asked for where they are not. The caller's fault.
    #[error("{at}: {why}")]
    Read {
        /// The asking line.
        at: &'static Location<'static>,
        /// What was asked for, and why it cannot be had.
        why: String,
    },
    /// A wait with a time-out ran into it.
    #[error("{at}: {what} is not complete after {waited:?}")]
    TimedOut {
        /// The waiting line.
        at: &'static Location<'static>,
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
    },
    /// A kernel refuses its inputs or cannot go on.
    #[error("{0}")]
    Kernel(String),
    /// Host values that do not fit their shape or type.
    #[error(transparent)]
    Aval(#[from] AvalError),
    /// A kernel's view that was asked for something it is not.
    #[error(transparent)]
    View(#[from] ViewError),
    /// Devices that do not form the mesh asked for.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A sharding that does not fit.
    #[error(transparent)]
    Sharding(#[from] ShardingError),
    /// Sharding rules that are wrong, or give these leaves no shardings.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// Layouts between which there is no plan.
    #[error(transparent)]
    Reshard(#[from] ReshardError),
    /// Trees that do not fit each other.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A schedule that is none, or does not exist for these numbers. The caller's fault.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The job could not be formed: who is in it, and how to reach the others.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Processes could not be connected.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Devices of kind `cuda` were asked for where there are none. The environment's fault.
    #[error("this process cannot have its devices of kind cuda: {0}")]
    Cuda(#[from] NoCuda),
    /// A call of one of CUDA's libraries failed, or work of a CUDA device did.
    #[error(transparent)]
    CudaCall(#[from] CudaError),
    /// This machine refused something: threads, memory, sockets.
    #[error("{0}")]
    Environment(String),
}

/// A view that was asked for something it is not. The kernel's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The elements have another type.
    #[error("a view of {found} elements was asked for {asked} elements")]
    DType {
        /// What was asked for.
        asked: DType,
        /// What the elements are.
        found: DType,
    },
    /// The values are in the output that the signature aliases to this input.
    #[error("this input is updated in place: its values are in the output it is aliased to")]
    InPlace,
    /// The bytes are not valid values of the type (a `bool` that is neither 0 nor 1).
    #[error("the bytes are no valid {0} values")]
    Invalid(DType),
    /// The values are in the memory of a device that is none of the host's processors.
    #[error(
        "the values are in the memory of a CUDA device: a kernel that runs there gives the device \
         work, by \
         `Context::cuda`"
    )]
    OnDevice,
    /// The region has more or less than one element.
    #[error("a single value was asked of a view of {0} elements")]
    NotScalar(usize),
}

impl Error {
    /// An error of a kernel's own.
    pub fn kernel(message: impl Into<String>) -> Self {
        Self::Kernel(message.into())
    }

    pub(crate) fn failed(failure: Arc<Failure>) -> Self {
        Self::Failed(failure)
    }

    /// The root failure, where an operation could not complete.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// Whether another process is at fault by having disappeared.
    pub fn is_peer_failure(&self) -> bool {
        self.failure().is_some_and(Failure::is_peer_failure)
    }

    /// Whether the processes were found to run different programs.
    pub fn is_divergence(&self) -> bool {
        self.failure().is_some_and(|failure| failure.kind == FailureKind::Diverged)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(self))
    }
}

/// Returns an error's message, with a line for each cause whose message is not part of it.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text += "\n  caused by: ";
            text += &message;
        }
        cause = error.source();
    }
    text
}

/// A call that makes no sense. Found when the operation is issued, on every process alike; it takes
/// no number and changes nothing.
#[derive(Clone, Debug)]
pub struct IssueError {
    /// The line of the program.
    pub at: &'static Location<'static>,
    /// The call: `device_put`, `jit Up`, ….
    pub call: String,
    /// What is wrong with it.
    pub why: IssueProblem,
}

impl fmt::Display for IssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.at, self.call, self.why)
    }
}

impl std::error::Error for IssueError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.why)
    }
}

/// What is wrong with a call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssueProblem {
    /// A sharding does not fit a leaf.
    #[error("{}{why}", leaf(.path))]
    Sharding {
        /// The leaf's path.
        path: String,
        /// What does not fit.
        why: ShardingError,
    },
    /// A tree does not fit its prefix, or a path names no leaf.
    #[error("{0}")]
    Tree(TreeError),
    /// `build` was called without `outputs`.
    #[error("missing output shardings: call `.outputs(…)` before `.build()`")]
    MissingOutputs,
    /// `build` was called without `on`, or an output sharding is on other devices.
    #[error("{0}")]
    Mesh(String),
    /// An input lives on other devices than the kernel's mesh.
    #[error("{}is on {found}, but the kernel runs on {expected}; move it there with \
        device_put", leaf(.path))]
    InputMesh {
        /// The input's path.
        path: String,
        /// The kernel's mesh.
        expected: String,
        /// The input's sharding.
        found: String,
    },
    /// An input is sharded otherwise than declared.
    #[error(
        "{}is sharded {found}, but the kernel declares {expected}; jit never reshards silently, \
         use device_put",
        leaf(.path)
    )]
    InputSharding {
        /// The input's path.
        path: String,
        /// The declared sharding.
        expected: String,
        /// The input's sharding.
        found: String,
    },
    /// An input that a kernel takes only where it says so: in host memory, or partial sums.
    #[error(
        "{}is sharded {found}; a kernel takes {what} only where `.inputs(…)` declares exactly \
         that sharding",
        leaf(.path)
    )]
    InputUndeclared {
        /// The input's path.
        path: String,
        /// The input's sharding.
        found: String,
        /// What it is.
        what: &'static str,
    },
    /// Values that were to be partial sums.
    #[error("{}{sharding} is of partial sums, which only a kernel writes: make it as \
        {reduced}", leaf(.path))]
    Unreduced {
        /// The leaf's path.
        path: String,
        /// The sharding.
        sharding: String,
        /// The same without unreduced axes.
        reduced: String,
    },
    /// An array that is moved by way of another sharding is not sharded as the caller says.
    #[error("{}is sharded {found}, but is said to come from {expected}", leaf(.path))]
    SourceSharding {
        /// The leaf's path.
        path: String,
        /// What the caller says.
        expected: String,
        /// The array's sharding.
        found: String,
    },
    /// An array was used after its memory was given away.
    #[error("{}was donated to operation {op} at {donated_at} and cannot be used any \
        more", leaf(.path))]
    Donated {
        /// The leaf's path.
        path: String,
        /// The operation that got its memory.
        op: u64,
        /// The line that donated it.
        donated_at: &'static Location<'static>,
    },
    /// An array of another job.
    #[error("{}belongs to another program", leaf(.path))]
    Foreign {
        /// The leaf's path.
        path: String,
    },
    /// The kernel refuses these shapes.
    #[error("{0}")]
    Infer(Box<Error>),
    /// The kernel's signature contradicts itself or its shardings.
    #[error("{0}")]
    Signature(String),
    /// What a recorded step is replayed on is not what it was recorded with.
    #[error("{}is {found}, but the step was recorded with {expected}", leaf(.path))]
    Recorded {
        /// The input's path.
        path: String,
        /// What it was when the step was recorded.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A step that cannot be recorded, or not be replayed.
    #[error("{0}")]
    Recording(String),
    /// A dimension that cannot be cut that way.
    #[error("{0}")]
    Split(String),
    /// A pipeline's stages, schedule, parameters or microbatches do not fit each other.
    #[error("{0}")]
    Pipeline(Box<Error>),
}

pub(crate) fn leaf(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path:?}: ") }
}

impl IssueProblem {
    /// The path of the leaf that the problem is with, where it has one.
    pub(crate) fn path_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Sharding { path, .. }
            | Self::InputMesh { path, .. }
            | Self::InputSharding { path, .. }
            | Self::InputUndeclared { path, .. }
            | Self::Unreduced { path, .. }
            | Self::SourceSharding { path, .. }
            | Self::Donated { path, .. }
            | Self::Foreign { path }
            | Self::Recorded { path, .. } => Some(path),
            _ => None,
        }
    }

    pub(crate) fn at(self, at: &'static Location<'static>, call: impl Into<String>) -> Error {
        Error::Issue(Box::new(IssueError { at, call: call.into(), why: self }))
    }
}

#[cfg(test)]
mod tests {
    use mpmd_ids::ProcessId;
    use mpmd_transport::rendezvous::RendezvousError;

    use super::*;

    #[test]
    fn debug_prints_the_message_once() {
        let at = Location::caller();
        let issue = IssueProblem::MissingOutputs.at(at, "jit Up");
        assert_eq!(format!("{issue:?}"), issue.to_string());
        assert!(issue.to_string().contains(": jit Up: missing output shardings"), "{issue}");
        let failed = Error::failed(Arc::new(Failure::new(
            FailureKind::Memory,
            ProcessId(1),
            7,
            "no memory",
        )));
        assert_eq!(format!("{failed:?} {failed:#?}"), "no memory no memory");
        let gone = TransportError::PeerGone { peer: ProcessId(2), why: "closed".to_owned() };
        assert_eq!(format!("{:?}", Error::from(gone)), "process 2 is gone: closed");
        let rendezvous = LaunchError::Rendezvous(RendezvousError::Left);
        assert_eq!(format!("{:?}", Error::from(rendezvous)), "this process has left the job");
    }

    #[test]
    fn causes_that_the_message_leaves_out_follow_it() {
        #[derive(Debug, thiserror::Error)]
        #[error("the plan is cut off")]
        struct CutOff(#[source] RendezvousError);
        let expected = "the plan is cut off\n  caused by: this process has left the job";
        assert_eq!(with_causes(&CutOff(RendezvousError::Left)), expected);
    }
}
