//! Errors of this crate. Each names the failure, the line of the program, and the party at fault.

use std::fmt;
use std::io;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use mpmd_device::cuda::{CudaError, NoCuda};
use mpmd_proto::{Failure, FailureKind};
use mpmd_transport::TransportError;

use mpmd_launch::LaunchError;
use mpmd_layout::aval::{AvalError, DType};
use mpmd_layout::reshard::ReshardError;
use mpmd_layout::sharding::rules::RulesError;
use mpmd_layout::sharding::{DimensionMisfit, ShardingConflict, ShardingError};
use mpmd_layout::topology::MeshError;
use mpmd_layout::tree::TreeError;
use mpmd_rendezvous::{RendezvousError, TokenError};
use mpmd_schedule::flow::FlowError;
use mpmd_schedule::{LowerError, ScheduleError, TextError};

/// The result type of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate.
///
/// `Debug` prints the same text for the user, since a `main` that returns an error prints that
/// form. It adds each cause that the message does not contain.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call with wrong arguments, at a line of the program. The caller is at fault. Every process
    /// gets the same error.
    #[error("{0}")]
    Issue(#[from] Box<IssueError>),
    /// An operation could not complete. Operations that depend on it fail with the same failure.
    #[error("{0}")]
    Failed(#[from] Arc<Failure>),
    /// The values of an array cannot be read on this process. The caller is at fault.
    #[error("{at}: {why}")]
    Read {
        /// The line of the read.
        at: &'static Location<'static>,
        /// The requested values, and the reason why they cannot be read.
        why: String,
    },
    /// A wait with a timeout ended before the awaited operation or value was complete.
    #[error("{at}: {subject} is not complete after {waited:?}")]
    TimedOut {
        /// The line of the wait.
        at: &'static Location<'static>,
        /// The operation or value that was not complete.
        subject: String,
        /// The timeout of the wait.
        waited: Duration,
    },
    /// A kernel refused its inputs or failed. Holds the kernel's message.
    #[error("{0}")]
    Kernel(String),
    /// Host values do not fit their shape or dtype.
    #[error(transparent)]
    Aval(#[from] AvalError),
    /// A kernel used a view with a wrong dtype or shape.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The devices do not form the requested mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A sharding does not fit its array or its mesh.
    #[error(transparent)]
    Sharding(#[from] ShardingError),
    /// Sharding rules are invalid, or give some leaves no sharding.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// There is no plan to move an array between two layouts.
    #[error(transparent)]
    Reshard(#[from] ReshardError),
    /// Two trees do not fit each other.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A schedule is invalid, or none exists for the given numbers of stages and microbatches. The
    /// caller is at fault.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The text of a schedule cannot be read. The caller, or the file, is at fault.
    #[error(transparent)]
    ScheduleText(#[from] TextError),
    /// The transfers of a schedule cannot be put in order. The caller is at fault.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// A schedule's rows of steps do not form a pipeline: see [`FlowError`]. The caller is at
    /// fault.
    #[error(transparent)]
    Flow(#[from] FlowError),
    /// This process could not join the job: its rank or the addresses of the peers are missing or
    /// wrong.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The secret token of the job cannot be read or created.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Processes could not be connected.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Devices of kind `cuda` were requested, but there are none. The environment is at fault.
    #[error("this process cannot have its devices of kind cuda: {0}")]
    Cuda(#[from] NoCuda),
    /// A call of a CUDA library or work on a CUDA device failed.
    #[error(transparent)]
    CudaCall(#[from] CudaError),
    /// This machine refused a resource: threads, memory, sockets. Holds the message.
    #[error("{0}")]
    Environment(String),
    /// A file or a stream of the program could not be read or written: an error of
    /// [`std::io`] that the program returns by `?`. The error does not name the file.
    #[error("{0}")]
    Io(Arc<io::Error>),
    /// The epoch of the job ends after a commit, since its processes change: see
    /// [`Program::commit`](crate::Program::commit). Every process gets this error, and the program
    /// should return it. The next epoch calls the program again. If the program returns another
    /// error, the job ends with that error.
    #[error("this epoch of the job is over after the last commit: {why}")]
    EpochOver {
        /// The change of the job's processes, in words.
        why: Arc<str>,
    },
    /// [`Commits::restore`](crate::Commits::restore) finds no commit that is whole: both processes
    /// that had copies of a region are lost. The environment is at fault. Every process gets it.
    #[error(
        "no commit is whole, since both processes that had copies of a region are lost; a \
         checkpoint can help. Lost of {}", .lost.join("; of ")
    )]
    CommitsLost {
        /// The lost regions: for each commit, its step and the arrays that lack regions.
        lost: Vec<String>,
    },
}

/// An unsupported access to a [`View`](crate::kernel::View) or [`ViewMut`](crate::kernel::ViewMut).
/// A bug of the kernel.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The elements of the view have another dtype than the kernel requested.
    #[error("a view of {found} elements was asked for {asked} elements")]
    DType {
        /// The requested dtype.
        asked: DType,
        /// The dtype of the elements.
        found: DType,
    },
    /// The values are in the view of the output that the signature aliases to this input.
    #[error("this input is updated in place: its values are in the output it is aliased to")]
    InPlace,
    /// The bytes are not valid values of this dtype, such as a `bool` that is neither 0 nor 1.
    #[error("the bytes are no valid {0} values")]
    Invalid(DType),
    /// The values are in the memory of a CUDA device, which the host cannot read.
    #[error(
        "the values are in the memory of a CUDA device: a kernel that runs there gives the device \
         work, by \
         `Context::cuda`"
    )]
    OnDevice,
    /// A single value was requested from a view of this number of elements, which is not 1.
    #[error("a single value was asked of a view of {0} elements")]
    NotScalar(usize),
    /// The view holds numbers, not an object, or its object could not be created.
    #[error("the view has no object")]
    NoObject,
    /// The object has another type than the kernel requested.
    #[error("the object is a {found}, and was asked for as {asked}")]
    ObjectType {
        /// The requested type.
        asked: &'static str,
        /// The type of the object.
        found: &'static str,
    },
    /// An earlier call has taken the object out.
    #[error("the object was taken out by an earlier call")]
    ObjectTaken,
    /// The call has the same object as two inputs, or still holds an earlier access to the object.
    #[error("the object is in use: the call has it twice")]
    ObjectInUse,
}

impl Error {
    /// Creates an error of a kernel, with the kernel's own message.
    pub fn kernel(message: impl Into<String>) -> Self {
        Self::Kernel(message.into())
    }

    /// Converts an error of another crate, such as candle's:
    /// `tensor.sum_all().map_err(Error::other)?`. Keeps the messages of the error and of its
    /// causes, not their types.
    pub fn other(error: impl std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self::Kernel(message)
    }

    pub(crate) fn failed(failure: Arc<Failure>) -> Self {
        Self::Failed(failure)
    }

    /// Returns the failure if an operation could not complete (`Error::Failed`); `None` for other
    /// errors.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// True if the cause is a peer process that disappeared.
    pub fn is_peer_failure(&self) -> bool {
        self.failure().is_some_and(Failure::is_peer_failure)
    }

    /// True if the processes were found to run different programs.
    pub fn is_divergence(&self) -> bool {
        self.failure()
            .is_some_and(|failure| failure.kind == FailureKind::Diverged)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl From<RendezvousError> for Error {
    fn from(error: RendezvousError) -> Self {
        Self::Launch(error.into())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(self))
    }
}

/// Returns an error's message. Adds a line for each cause if its message is not part of the text.
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

/// A call with wrong arguments. The error is found when the operation is issued, alike on every
/// process. The call takes no operation number and changes nothing.
#[derive(Clone, Debug)]
pub struct IssueError {
    /// The line of the program that made the call.
    pub at: &'static Location<'static>,
    /// The call: `device_put`, `jit Up`, ….
    pub call: String,
    /// The problem of the call.
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

/// The reason why a call is refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssueProblem {
    /// A sharding does not fit a leaf.
    #[error("{}{why}", leaf(.path))]
    Sharding {
        /// The leaf's path.
        path: String,
        /// The mismatch.
        why: ShardingError,
    },
    /// A tree does not fit its prefix, or a path names no leaf.
    #[error("{0}")]
    Tree(TreeError),
    /// [`JitBuilder::build`](crate::JitBuilder::build) was called without output shardings
    /// for a kernel without a [rule](crate::kernel::Kernel::rule).
    #[error("missing output shardings: call `.outputs(…)` before `.build()`")]
    MissingOutputs,
    /// [`JitBuilder::build`](crate::JitBuilder::build) was called without a mesh, or an output
    /// sharding is on other devices.
    #[error("{0}")]
    Mesh(String),
    /// An input lives on other devices than the kernel's mesh.
    #[error("{}has the sharding {found}, but the kernel runs on {expected}; move it there with \
        device_put", subject(.path))]
    InputMesh {
        /// The input's path.
        path: String,
        /// The kernel's mesh.
        expected: String,
        /// The input's sharding.
        found: String,
    },
    /// An input has another sharding than declared.
    #[error(
        "{}is sharded {found}, but `.inputs(…)` says {expected}; jit never reshards silently, use \
         device_put",
        subject(.path)
    )]
    InputSharding {
        /// The input's path.
        path: String,
        /// The declared sharding.
        expected: String,
        /// The input's sharding.
        found: String,
    },
    /// An input is in host memory or has partial sums, and `.inputs(…)` does not declare exactly
    /// its sharding.
    #[error(
        "{}is sharded {found}; a kernel takes {property} only where `.inputs(…)` declares exactly \
         that sharding",
        subject(.path)
    )]
    InputUndeclared {
        /// The input's path.
        path: String,
        /// The input's sharding.
        found: String,
        /// The undeclared property: host memory or partial sums.
        property: &'static str,
    },
    /// A device has other parts of inputs and outputs than the kernel's
    /// [rule](crate::kernel::Kernel::rule) asks for.
    #[error("{why}: {arrays}. {}", cure(.why))]
    Dimensions {
        /// The misfit.
        why: Box<DimensionMisfit>,
        /// The shardings of all inputs and outputs.
        arrays: String,
    },
    /// No output shardings were declared, and none follow from the inputs by the kernel's
    /// [rule](crate::kernel::Kernel::rule).
    #[error("{why}: {arrays}. Move an input with device_put before, or declare `.outputs(…)`")]
    OutputsByRule {
        /// The conflict.
        why: Box<ShardingConflict>,
        /// The shardings of all inputs.
        arrays: String,
    },
    /// An expression of a function that [`compute`](crate::Program::compute) traces does not fit.
    #[error("{0}")]
    Compute(String),
    /// A sharding with unreduced axes was given for values that are not partial sums.
    #[error("{}{sharding} is of partial sums, which only a kernel writes: make it as \
        {reduced}", leaf(.path))]
    Unreduced {
        /// The leaf's path.
        path: String,
        /// The sharding.
        sharding: String,
        /// The same sharding without unreduced axes.
        reduced: String,
    },
    /// An array that is moved by way of another sharding does not have the source sharding that the
    /// caller gave.
    #[error("{}is sharded {found}, but is said to come from {expected}", subject(.path))]
    SourceSharding {
        /// The leaf's path.
        path: String,
        /// The sharding that the caller gives.
        expected: String,
        /// The array's sharding.
        found: String,
    },
    /// An array was used after it was donated.
    #[error("{}was donated to operation {op} at {donated_at} and cannot be used any \
        more", subject(.path))]
    Donated {
        /// The leaf's path.
        path: String,
        /// The number of the operation that received the array's memory.
        op: u64,
        /// The line of the program that donated the array.
        donated_at: &'static Location<'static>,
    },
    /// An array of another program, or of an earlier epoch of a job that recovers.
    #[error("{}belongs to another program, or to an earlier epoch of this job", subject(.path))]
    Foreign {
        /// The leaf's path.
        path: String,
    },
    /// The kernel refuses the shapes of its inputs.
    #[error("{0}")]
    Infer(Box<Error>),
    /// The kernel's signature contradicts itself or its shardings.
    #[error("{0}")]
    Signature(String),
    /// An input of a replay differs from the input at capture.
    #[error("{}is {found}, but the step was captured with {expected}", leaf(.path))]
    Captured {
        /// The input's path.
        path: String,
        /// The input's properties when the step was captured.
        expected: String,
        /// The input's properties now.
        found: String,
    },
    /// A step cannot be captured or replayed. Holds the reason.
    #[error("{0}")]
    Capture(String),
    /// A dimension or an axis cannot be cut or joined as requested. Holds the reason.
    #[error("{0}")]
    Split(String),
    /// A pipeline's stages, schedule, parameters or microbatches do not fit each other.
    #[error("{0}")]
    Pipeline(Box<Error>),
}

pub(crate) fn leaf(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!("{path:?}: ")
    }
}

/// Names an array at the start of a sentence: by its path, or as the only one.
fn subject(path: &str) -> String {
    match path.is_empty() {
        true => "the array ".to_owned(),
        false => leaf(path),
    }
}

fn cure(why: &DimensionMisfit) -> &'static str {
    match why {
        DimensionMisfit::Divided { .. } => "Leave that dimension whole",
        _ => "Divide them alike: inputs by device_put, outputs by `.outputs(…)`",
    }
}

impl IssueProblem {
    /// Returns the path of the leaf at fault, for changes. `None` if the problem has no such field.
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
            | Self::Captured { path, .. } => Some(path),
            _ => None,
        }
    }

    pub(crate) fn at(self, at: &'static Location<'static>, call: impl Into<String>) -> Error {
        Error::Issue(Box::new(IssueError {
            at,
            call: call.into(),
            why: self,
        }))
    }
}

/// Returns the message in the payload of a caught panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!(
        "panicked: {}",
        text.unwrap_or_else(|| "no message".to_owned())
    )
}

#[cfg(test)]
mod tests {
    use mpmd_base::ProcessId;
    use mpmd_rendezvous::RendezvousError;

    use super::*;
    use crate::exec::array::host_array::HostArray;

    #[test]
    fn errors_of_a_program_convert_by_question_mark() {
        fn of(error: impl Into<Error>) -> String {
            error.into().to_string()
        }

        let missing = io::Error::new(io::ErrorKind::NotFound, "no such file");
        assert_eq!(of(missing), "no such file");
        let wrong = HostArray::from_slice(&[3], &[1.0f32]).unwrap_err();
        let message = wrong.to_string();
        assert_eq!(of(wrong), message);
        let view = ViewError::NotScalar(2);
        assert_eq!(of(view.clone()), view.to_string());
        let malformed = TokenError::Malformed { digits: 3 };
        assert_eq!(of(malformed.clone()), malformed.to_string());

        let cause = io::Error::other(ViewError::NoObject);
        assert_eq!(Error::other(cause).to_string(), "the view has no object");
    }

    #[test]
    fn debug_prints_the_message_once() {
        let at = Location::caller();
        let issue = IssueProblem::MissingOutputs.at(at, "jit Up");
        assert_eq!(format!("{issue:?}"), issue.to_string());
        assert!(
            issue
                .to_string()
                .contains(": jit Up: missing output shardings"),
            "{issue}"
        );
        let failed = Error::failed(Arc::new(Failure::new(
            FailureKind::Memory,
            ProcessId(1),
            7,
            "no memory",
        )));
        assert_eq!(format!("{failed:?} {failed:#?}"), "no memory no memory");
        let gone = TransportError::PeerGone {
            peer: ProcessId(2),
            why: "closed".to_owned(),
        };
        assert_eq!(
            format!("{:?}", Error::from(gone)),
            "process 2 is gone: closed"
        );
        let rendezvous = LaunchError::Rendezvous(RendezvousError::Left);
        assert_eq!(
            format!("{:?}", Error::from(rendezvous)),
            "this process has left the job"
        );
    }

    #[test]
    fn debug_adds_causes_that_the_message_lacks() {
        #[derive(Debug, thiserror::Error)]
        #[error("the plan is cut off")]
        struct CutOff(#[source] RendezvousError);
        let expected = "the plan is cut off\n  caused by: this process has left the job";
        assert_eq!(with_causes(&CutOff(RendezvousError::Left)), expected);
    }
}
