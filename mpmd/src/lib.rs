//! Programs that run different code on different processes (MPMD): pipeline-parallel training and
//! inference first.
//!
//! You write one ordinary program, and every process of the job runs it. An [`MpmdArray`] is a
//! handle. On a process that owns some of its devices it holds local buffers; elsewhere it is fully
//! remote and holds only its shape, its sharding and its completion. Three verbs act on arrays:
//!
//! - [`Program::device_put`] moves an array to other devices. From ownership each process derives
//!   whether it copies, sends, receives or does nothing.
//! - [`Program::jit`] binds a kernel to a mesh. A call runs on the processes that own the mesh.
//! - [`Program::reshard`] moves a whole tree of arrays to new shardings.
//!
//! There are no sends, receives, tags or rank tests in a program:
//!
//! ```
//! use mpmd::prelude::*;
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
//!
//! Started alone, it is a job of one process. `mpmd run -n 4 -- ./program` starts four; the guide
//! shows other launchers.
//!
//! # A pipeline of two stages
//!
//! A stage is made of closures over arrays: one computes the output, the others the gradients. A
//! [`Schedule`](pipeline::Schedule) says in which order each rank runs them. This program trains
//! `loss = (x * w)²`, each stage on a process of its own. [`testing::simulate`] runs both processes
//! in one:
//!
//! ```
//! use mpmd::{pipeline::*, prelude::*, tree::Empty};
//!
//! let results = mpmd::testing::simulate(2, 2, 7, |p| {
//!     let scale = stage(
//!         like_input, // the output y is like the input x
//!         |x: View<f32>, w: View<f32>, mut y: ViewMut<f32>| y[0] = x[0] * w[0],
//!         |_: View<f32>, w: View<f32>, dy: View<f32>, mut dx: ViewMut<f32>| dx[0] = w[0] * dy[0],
//!         |x: View<f32>, _: View<f32>, dy: View<f32>, mut dw: ViewMut<f32>| dw[0] += x[0] * dy[0],
//!     );
//!     let square = loss_stage(
//!         |y: View<f32>, mut sum: ViewMut<f32>| sum[0] = y[0] * y[0],
//!         |y: View<f32>, mut dy: ViewMut<f32>| dy[0] = 2.0 * y[0],
//!     );
//!     let mesh = p.mesh(&[("stage", 2)])?.split("stage")?;
//!     let mut put = |x: f32| p.device_put(&MpmdArray::scalar(x), mesh[0].replicated());
//!     let (w, batch) = (put(3.0)?, vec![Microbatch::new(put(1.0)?), Microbatch::new(put(2.0)?)]);
//!     let mut pipe = Pipeline::first(scale, &mesh[0], w)?.then(square, &mesh[1], Empty::new())?;
//!     let output = pipe.train_step(p, &Schedule::one_f_one_b(2, 2)?, batch)?;
//!     Ok(output.gradients[0][0].1.to_host()?.map(|dw| dw.to_vec::<f32>()).transpose()?)
//! });
//! assert_eq!(results[0].as_ref().unwrap(), &Some(vec![30.0])); // 2 * 3 * 1 + 2 * 6 * 2
//! ```
//!
//! A stage with several parameters, residuals or collectives implements
//! [`Stage`](pipeline::Stage); `mpmd::candle::stage` makes one of a candle model.
//!
//! # Errors
//!
//! A call that makes no sense is an [`Error::Issue`], the same on every process, and names the
//! line. An operation that cannot complete (a kernel fails, memory runs out, a process dies) fails
//! its handle; all that is computed from it fails with the same [`Failure`], on every process.
//! Nothing waits forever: a wait for a silent peer ends after the peer timeout, and its report has
//! the chain of processes that wait for each other.
//!
//! Errors of this crate and [`std::io::Error`] become an [`Error`] by `?`. Others do by
//! `.map_err(Error::other)`; a program that returns an `anyhow::Result` needs neither.
//!
//! # Testing
//!
//! [`testing::simulate`] runs all processes of a job in one, in simulated time.
//! [`testing::Processes`] starts real processes, with a deadline and captured output.
//! `mpmd check -n 4 -- ./program` proves, without running kernels, that the program cannot hang,
//! and shows its memory and its traffic.

#![forbid(unsafe_code)]

pub use mpmd_base::block::Spin;
pub use mpmd_base::{DeviceId, ProcessId};
#[cfg(feature = "candle")]
pub use mpmd_candle as candle;
pub use mpmd_core::{
    ArrayFuture, Builder, Captured, Commits, Committed, Difference, Error, Fact, Failure,
    FailureKind, HostArray, IssueError, IssueProblem, Jit, JitBuilder, Label, MemoryUse,
    MoveOptions, MpmdArray, OnLoss, PlanCacheMetrics, Program, ProgramMetrics, PutVjp,
    RecoveringBuilder, Recovery, Result, Role, Sections, Shard, SplitOptions, all_ready,
};
pub use mpmd_layout::spec;
pub use mpmd_memory::SharedBuffer;
#[cfg(feature = "train")]
pub use mpmd_train as train;
pub use mpmd_transport::TransportError;

#[cfg(feature = "job")]
pub mod job;

pub mod prelude {
    //! Names that nearly every program uses: `use mpmd::prelude::*;`.

    pub use mpmd_core::prelude::*;
}

pub mod aval {
    //! Shapes and dtypes.
    //!
    //! Use the short forms, `f32s([64, 256])`, to write a shape: [`bools`], [`i8s`], [`i16s`],
    //! [`i32s`], [`i64s`], [`u8s`], [`u16s`], [`u32s`], [`u64s`], [`bf16s`], [`f16s`], [`f32s`],
    //! [`f64s`], [`c64s`] and [`c128s`]; [`ShapedArray`] to compute with
    //! one; [`Element`] as the bound of code that is generic over dtypes. An [`AvalError`] says why
    //! shape and dtype make no array.

    pub use mpmd_layout::aval::{
        AvalError, DType, Element, ShapedArray, bf16s, bools, c64s, c128s, f16s, f32s, f64s, i8s,
        i16s, i32s, i64s, u8s, u16s, u32s, u64s,
    };
}

pub mod region {
    //! Boxes of array elements.
    //!
    //! A kernel or a filling function learns from a [`Region`] which elements its device holds.

    pub use mpmd_layout::region::Region;
}

pub mod tree {
    //! Structures of arrays: tuples, vectors, maps and your own structs.
    //!
    //! Derive [`Tree`](trait@Tree) for a struct of arrays to pass it to kernels and reshards as one
    //! value. [`Empty`] is the tree without leaves, [`PrefixTree`] one value for a whole
    //! subtree. Implement [`Leaf`] for a type of your own to have trees of it. A [`Structure`] is a
    //! tree's form without its leaves; the [`Path`] of a leaf is made of [`Name`]s. A [`TreeError`]
    //! says where two trees differ.

    pub use mpmd_layout::tree::{Empty, Leaf, Name, Path, PrefixTree, Structure, Tree, TreeError};
}

pub mod compute {
    //! Functions over sharded arrays: what the closure of
    //! [`Program::compute`](crate::Program::compute) uses.
    //!
    //! It gets an [`Expr`] for each array of its [`ComputeInputs`], and returns [`ComputeResults`].
    //! The other operand of an operation is an [`Operand`]: an expression or a number. Reductions
    //! take [`Dims`]. [`einsum`] and [`concatenate`] take several arrays, and [`number`],
    //! [`uniform`] and [`normal`] make one.

    pub use mpmd_core::compute::{
        ComputeInputs, ComputeResults, Dims, Expr, Operand, concatenate, einsum, normal, number,
        uniform,
    };
}

pub mod topology {
    //! Devices, the processes that own them, and meshes of devices.
    //!
    //! [`Mesh`] arranges devices along named axes; [`Topology`] lists all devices of the job. Use
    //! [`DeviceKind`] and [`CudaCollectives`] to ask for GPUs. [`LinkSpeeds`] has the cost of
    //! each [`LinkClass`], a [`LinkSpeed`], by which planners choose. A [`MeshError`] says why
    //! devices make no mesh.

    pub use mpmd_layout::topology::{
        CudaCollectives, Device, DeviceKind, LinkClass, LinkSpeed, LinkSpeeds, Mesh, MeshError,
        Topology,
    };
}

pub mod sharding {
    //! The regions of an array that each device holds.
    //!
    //! A [`Sharding`] gives these regions for every shape, a [`Layout`] for one shape. A [`Spec`],
    //! written with [`spec!`](crate::spec), divides dimensions over mesh axes; [`MemoryKind`]
    //! chooses device or host memory. A [`ShardingError`] says why a sharding does not fit.
    //!
    //! A [`DimensionRule`] says which dimensions of a kernel's inputs and outputs belong together.
    //! It is parsed from a text, or a [`DimensionRuleError`] says why not. Bound to shapes
    //! ([`BoundRule`]) it compares layouts: the result is [`DeviceParts`], or a [`DimensionMisfit`]
    //! that names a [`RulePlace`] of a [`RuleArray`].
    //!
    //! Its [`DimensionLinks`], with one [`OperandDimension`] for each dimension, infer the
    //! shardings of results from those of operands: [`ComputedShardings`], or a
    //! [`ShardingConflict`]. The [`Linearity`] says which operands may be partial sums.

    pub use mpmd_layout::sharding::{
        BoundRule, ComputedShardings, DeviceParts, DimensionLinks, DimensionMisfit, DimensionRule,
        DimensionRuleError, Layout, Linearity, MemoryKind, OperandDimension, RuleArray, RulePlace,
        Sharding, ShardingConflict, ShardingError, Spec, SpecEntry,
    };

    pub mod rules {
        //! Rules that choose the sharding of each leaf by its name.
        //!
        //! [`infer_sharding`] applies a [`Strategy`] to a tree and returns a tree of shardings. Its
        //! rules are written in the program, or read by [`rules_from_json`].
        //! [`infer`] returns a table with the rule that applies to each leaf:
        //! [`InferredShardings`], with an [`InferredLeaf`] for each. [`LogicalAxes`] names the
        //! dimensions of leaves.
        //!
        //! A [`Registry`] adds ops of your own. One closure gets the [`OpCall`] as it is written,
        //! with its [`Literal`]s, and returns its arguments or an [`ArgumentError`]. The other
        //! divides a leaf through a [`LeafPlacement`], or refuses it with an [`OpError`]. A
        //! [`NamePattern`] is the pattern of a rule, or a [`PatternFault`] if it is wrong. A
        //! [`RulesError`] names the rule that fails; its parts are [`OpFailed`], [`ParseError`] and
        //! [`ErrorKind`].

        pub use mpmd_layout::sharding::rules::{
            ArgumentError, ErrorKind, InferredLeaf, InferredShardings, LeafPlacement, Literal,
            LogicalAxes, NamePattern, OpCall, OpError, OpFailed, ParseError, PatternFault,
            Registry, RulesError, Strategy, infer, infer_sharding,
        };

        /// Reads rules from JSON: `[[".*bias", "replicate"], ["up", "shard_dim(\"model\", 1)"]]`, a
        /// list of pairs of pattern and tactic, for [`Strategy::parse`].
        ///
        /// # Errors
        ///
        /// If `text` is not such a list. The error names the line and column.
        pub fn rules_from_json(text: &str) -> crate::Result<Vec<(String, String)>> {
            serde_json::from_str(text).map_err(crate::Error::other)
        }
    }
}

pub mod reshard {
    //! Plans of the copies that bring an array from one sharding to another.
    //!
    //! [`Program::reshard`](crate::Program::reshard) makes its plans itself. Use [`plan()`] to see
    //! the pieces and bytes of a move without moving them: a [`ReshardPlan`] has each
    //! [`ReshardPiece`] and their [`Summary`]. [`cheapest_intermediate`] finds the [`Intermediate`]
    //! that `Program::reshard_with_intermediate_sharding` moves through.
    //! [`find_intermediate_sharding`] finds one by the rule of pathways-utils, which knows no
    //! shape.

    pub use mpmd_layout::reshard::{
        DeliveryOrigin, Intermediate, NoIntermediate, PieceDelivery, ProcessPart, ReshardError,
        ReshardPiece, ReshardPlan, Summary, WhyNoIntermediate, cheapest_intermediate,
        find_intermediate_sharding, plan,
    };
}

pub mod random {
    //! Random numbers that depend on a key and an element's index alone, so that an array has the
    //! same values under every sharding.
    //!
    //! Derive a [`Key`] for each layer and step with [`Key::fold_in`]. [`uniform_f32`],
    //! [`uniform_f64`], [`normal_f32`] and [`normal_f64`] give the number of one element.
    //! [`permuted`] gives the place of one element in a random order.

    pub use mpmd_layout::random::{
        Key, normal_f32, normal_f64, permuted, uniform_f32, uniform_f64,
    };
}

pub mod kernel {
    //! Kernels: functions on the regions of one device.
    //!
    //! Write a kernel as a closure, in [`elementwise`] or [`kernel()`], and bind it with
    //! [`Program::jit`](crate::Program::jit). Or implement [`Kernel`]: its
    //! [`Signature`] declares outputs, aliases and collectives; [`View`] and [`ViewMut`] are the
    //! values; [`Context`] has the collectives. [`run_here`] runs a kernel without a job, for
    //! tests. A [`ViewError`] says what a view is not. The other names are those in the signatures
    //! of these: bounds for functions of your own that take kernels or closures.

    pub use mpmd_core::kernel::{
        Closures, Context, Elementwise, HostKernel, HostWork, InferShapes, Kernel, Reduce,
        Reducible, RunKernel, Shapes, Signature, Untyped, View, ViewError, ViewMut, Views,
        ViewsMut, elementwise, kernel, like_input,
    };
    pub use mpmd_core::run_here;
}

pub mod object {
    //! Rust values that live on devices.
    //!
    //! [`Program::object`](crate::Program::object) makes an [`MpmdObject`], and
    //! [`Program::method`](crate::Program::method) binds a [`method()`]. A value that implements
    //! [`ObjectBytes`] reports its memory.

    pub use mpmd_core::{
        BoundMethod, MadeObject, Makes, Method, MethodBuilder, MethodClosures, MpmdObject,
        ObjectBytes, ObjectRef, RunMethod, method,
    };
}

pub mod kernels {
    //! The ready kernel [`matmul`], for [`Program::jit`](crate::Program::jit).
    //!
    //! A dimension that it needs whole may not be divided over devices: that is an error, never a
    //! wrong value. On CUDA devices cuBLAS multiplies.

    pub use mpmd_core::kernel::matmul;

    pub mod host {
        //! Products of matrices in host memory, for kernels and stages of your own.
        //!
        //! [`matmul`], [`matmul_nt`] and [`matmul_tn`] multiply row-major slices of a [`Scalar`],
        //! on the calling thread. The same operands give the same bits on every call, and on every
        //! processor of a job. [`width`] is the [`VectorWidth`] that the job computes with.

        pub use mpmd_device::cpu::matmul::{Scalar, matmul, matmul_nt, matmul_tn};
        pub use mpmd_device::cpu::{VectorWidth, width};
    }
}

pub mod cuda {
    //! Work for CUDA devices, from inside a kernel.
    //!
    //! [`Context::cuda`](crate::kernel::Context::cuda) gives a kernel that runs on a CUDA device a
    //! [`Cuda`]. It launches functions of a [`Source`] over a [`Grid`] and multiplies matrices with
    //! [`Gemm`]. An [`Arg`] is an argument of a function. A kernel that uses
    //! [`Gemm`] lists [`CUBLAS`]. [`layers`] has the layers of models: norms, attention, losses.
    //! [`gpu_names`] says which graphics processors this machine has.

    pub use mpmd_core::cuda::{
        Arg, CUBLAS, Cuda, CudaError, CudaPart, CudaVersion, DeviceRoom, ForeignHandle,
        ForeignStream, Gemm, Grid, Math, NoCuda, Scratch, Source, gpu_names, layers,
    };
}

pub mod pipeline {
    //! Pipelines: stages, schedules and training steps.
    //!
    //! Make stages of closures, by [`stage()`] and [`loss_stage`], or implement [`Stage`]. Wire a
    //! [`Pipeline`], choose a [`Schedule`] (for example by [`Builtin`]) and call
    //! [`Pipeline::train_step`]. [`ScheduleText`] reads schedules from files. [`ParamSharding`]
    //! shards parameters over a stage's devices.

    pub use mpmd_core::pipeline::{
        ClosureStage, Gradients, Loss, LossInputs, LossStage, Microbatch, MicrobatchShapes,
        ParamSharding, Passes, Pipeline, PlacedShape, SideInput, SideShapes, Stage, StageContext,
        StageOutput, StageOutputs, StageProbe, StageSignature, StepOutput, loss_stage, stage,
    };
    pub use mpmd_schedule::{
        Action, ActionKind, Builtin, Cell, CellFault, CellProblem, Dialect, Entry, LowerError,
        Lowered, Schedule, ScheduleError, ScheduleText, StagePlacement, Step, StepKind, TextError,
    };
}

pub mod dry_run {
    //! The operations of a program, without devices.
    //!
    //! [`Builder::dry_run`](crate::Builder::dry_run) makes a program that owns no device, and
    //! [`Program::dry_run`](crate::Program::dry_run) returns the [`DryRun`] of its operations so
    //! far. `mpmd check` is made of it.

    pub use mpmd_record::dry_run::{
        Array, Computed, DeviceMemoryUse, Dropped, DryRun, DryRunEnd, DryRunError, DryRunFault,
        DryRunFlow, DryRunMemory, IssuedOperation, MemoryPeak, MessageTotals, OpDescriptor, OpKind,
        OpMessage, Read, ResultShard, RunParting, SentMessages, ShardMemory, StepEnd, TakenArray,
    };
    pub use mpmd_schedule::flow::{Flow, FlowError, Leaves, Node, Post, StepProblem, Transfer};
}

pub mod launch {
    //! Starting the processes of a job from the program itself.
    //!
    //! `mpmd run` is a thin layer over [`Launch`]; its [`JobOutcome`] says how the job ended.
    //! [`JobEnv`] reads the variables of a launcher: the [`Token`] that proves a process to belong
    //! to its job, and a [`DryRunEnv`] for `mpmd check`. [`read_secret`] reads the file of a user's
    //! secret, from which a token can be made; [`read_private`] any file that only its user may
    //! read. [`printable`] escapes the control characters of a text for a terminal.
    //! [`stop_signals`] are the signals that ask a program to end in order.

    pub use mpmd_launch::{
        DryRunEnv, JobEnv, JobFailure, JobOutcome, Launch, LaunchError, OutputMode, device_kinds,
        printable, read_private, read_secret, stop_signals, variables,
    };
    pub use mpmd_rendezvous::{RendezvousError, Token, TokenError};
}

pub mod weights {
    //! Arrays that one program publishes, version by version, and others take in layouts of their
    //! own: [`Program::publisher`](crate::Program::publisher) and
    //! [`Program::subscribe`](crate::Program::subscribe).
    //!
    //! A [`Publisher`] has the settings of a [`Publication`]; a [`Subscription`] those of
    //! [`Subscribing`], and of each [`WantedLeaf`], which may be a view of [`LeafPart`]s. An
    //! [`Intake`] takes what was [`Received`] on each process. A process cannot read regions that
    //! are on another one: [`NotReceived`].

    pub use mpmd_core::weights::{
        Intake, LeafPart, NotReceived, Publication, Publisher, PublisherMetrics, Received,
        Subscribing, Subscription, SubscriptionState, WantedLeaf,
    };
}

pub mod testing {
    //! Tests of whole jobs: inside one process, or as real processes.
    //!
    //! [`simulate`] is the short form for one process; a [`Simulation`] also injects faults.
    //! [`Processes`] starts real processes, which a test can kill and stop. Each [`ProcessEnd`] has
    //! the [`ExitKind`] and the output of a process. Errors are
    //! [`LaunchError`](crate::launch::LaunchError)s.

    pub use mpmd_core::{Simulation, SimulationReport, simulate};
    pub use mpmd_launch::ExitKind;
    pub use mpmd_launch::testing::{ProcessEnd, Processes, RunningProcesses};
}

/// Names that the code generated by `#[derive(Tree)]` uses. Not for programs.
#[doc(hidden)]
pub mod __private {
    pub use mpmd_layout::__private::*;
}

/// The README's programs, compiled. Tests of `mpmd-examples` and of the outside crate run them.
#[cfg(all(doctest, feature = "candle", feature = "job"))]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The guide: one page per task.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../../docs/guide/README.md")]
pub mod guide {
    #[doc = include_str!("../../docs/guide/add-a-family.md")]
    pub mod add_a_family {}

    #[doc = include_str!("../../docs/guide/arrays-and-moves.md")]
    pub mod arrays_and_moves {}

    #[doc = include_str!("../../docs/guide/beside-others.md")]
    pub mod beside_others {}

    #[doc = include_str!("../../docs/guide/benchmarks.md")]
    pub mod benchmarks {}

    #[cfg(feature = "candle")]
    #[doc = include_str!("../../docs/guide/candle-models.md")]
    pub mod candle_models {}

    #[cfg(feature = "candle")]
    #[doc = include_str!("../../docs/guide/checkpoints.md")]
    pub mod checkpoints {}

    #[doc = include_str!("../../docs/guide/collectives.md")]
    pub mod collectives {}

    #[doc = include_str!("../../docs/guide/compute.md")]
    pub mod compute {}

    #[doc = include_str!("../../docs/guide/cuda.md")]
    pub mod cuda {}

    #[doc = include_str!("../../docs/guide/environment.md")]
    pub mod environment {}

    #[doc = include_str!("../../docs/guide/errors-and-hangs.md")]
    pub mod errors_and_hangs {}

    #[doc = include_str!("../../docs/guide/families.md")]
    pub mod families {}

    #[doc = include_str!("../../docs/guide/finetune.md")]
    pub mod finetune {}

    #[doc = include_str!("../../docs/guide/first-program.md")]
    pub mod first_program {}

    #[doc = include_str!("../../docs/guide/from-python.md")]
    pub mod from_python {}

    #[cfg(feature = "candle")]
    #[doc = include_str!("../../docs/guide/from-sockets.md")]
    pub mod from_sockets {}

    #[doc = include_str!("../../docs/guide/generate.md")]
    pub mod generate {}

    #[doc = include_str!("../../docs/guide/gguf.md")]
    pub mod gguf {}

    #[doc = include_str!("../../docs/guide/install.md")]
    pub mod install {}

    #[doc = include_str!("../../docs/guide/kernels.md")]
    pub mod kernels {}

    #[doc = include_str!("../../docs/guide/live-weights.md")]
    pub mod live_weights {}

    #[doc = include_str!("../../docs/guide/new-program.md")]
    pub mod new_program {}

    #[doc = include_str!("../../docs/guide/objects.md")]
    pub mod objects {}

    #[doc = include_str!("../../docs/guide/pipelines.md")]
    pub mod pipelines {}

    #[doc = include_str!("../../docs/guide/plan-json.md")]
    pub mod plan_json {}

    #[doc = include_str!("../../docs/guide/production.md")]
    pub mod production {}

    #[doc = include_str!("../../docs/guide/recovery.md")]
    pub mod recovery {}

    #[doc = include_str!("../../docs/guide/run-on-several-hosts.md")]
    pub mod run_on_several_hosts {}

    #[doc = include_str!("../../docs/guide/schedules.md")]
    pub mod schedules {}

    #[doc = include_str!("../../docs/guide/serve.md")]
    pub mod serve {}

    #[doc = include_str!("../../docs/guide/sharding-and-layouts.md")]
    pub mod sharding_and_layouts {}

    #[doc = include_str!("../../docs/guide/sharding-rules.md")]
    pub mod sharding_rules {}

    #[cfg(feature = "train")]
    #[doc = include_str!("../../docs/guide/stage-by-hand.md")]
    pub mod stage_by_hand {}

    #[doc = include_str!("../../docs/guide/testing.md")]
    pub mod testing {}

    #[doc = include_str!("../../docs/guide/tracing.md")]
    pub mod tracing {}

    #[cfg(feature = "candle")]
    #[doc = include_str!("../../docs/guide/trainer.md")]
    pub mod trainer {}

    #[doc = include_str!("../../docs/guide/train-gpt.md")]
    pub mod train_gpt {}

    #[doc = include_str!("../../docs/guide/transports.md")]
    pub mod transports {}

    #[doc = include_str!("../../docs/guide/which-schedule.md")]
    pub mod which_schedule {}
}
