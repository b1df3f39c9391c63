//! Trains a byte-level transformer on text as a pipeline, by default with four stages in four
//! processes.
//!
//! ```sh
//! cargo run --release --bin train_gpt                       # on the text of this repository
//! cargo run --release --bin train_gpt -- --stages 2 --processes 2 --steps 100 ~/notes README.md
//! ```
//!
//! Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end the program after the current step of training,
//! evaluation or sampling. It saves the checkpoint of `--save` and the file of `--losses-out`. Its
//! exit code is then 128 plus the signal's number.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Context as _;
use clap::Parser;
use mpmd::aval::DType;
use mpmd::candle::nn::loss::cross_entropy_sum;
use mpmd::candle::{self, CandleStage, Cx, Tensor, Tensors, VarBuilder, stage};
use mpmd::cuda::Math;
use mpmd::job::{Elastic, JobArgs, at_least, not_negative, parse_bytes, say};
use mpmd::pipeline::{Loss, Microbatch, MicrobatchShapes, ParamSharding, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd::sharding::rules::{InferredShardings, Registry, Strategy, infer, rules_from_json};
use mpmd::topology::Mesh;
use mpmd::train::data::{SEPARATOR, TextBytes, Windows};
use mpmd::train::stop::{StopFlag, exit_code, stop_name};
use mpmd::train::{AdamW, Checkpoints, Rate, Run, Trainer};
use mpmd::{Commits, DeviceId, Fact, ProcessId};
use mpmd_examples::kernel_gpt;
use mpmd_examples::layout::Layouts;
use mpmd_examples::sample::{next_byte, printable};
use mpmd_examples::training::{self, TrainingFigures, WindowShape};
use mpmd_examples::transformer::{BYTES, DATA_AXIS, MODEL_AXIS, ModelPart, ModelSizes};

/// Train a byte-level transformer on text, as a pipeline
#[derive(Parser)]
#[command(name = "train_gpt", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Files and folders to train on; default: the text of this repository
    paths: Vec<PathBuf>,
    #[command(flatten)]
    sizes: ModelSizes,
    /// Sequences of a microbatch
    #[arg(long, default_value_t = 2, value_parser = at_least(1))]
    batch: usize,
    /// Microbatches of a step [default: 8, or the number in the schedule's file]
    #[arg(long, value_parser = at_least(1))]
    microbatches: Option<usize>,
    /// Number of updates
    #[arg(long, default_value_t = 800, value_parser = at_least(1))]
    steps: usize,
    /// Train for this many seconds instead; the learning rate then follows the time, so losses
    /// differ from run to run
    #[arg(long, conflicts_with = "steps")]
    seconds: Option<f64>,
    /// Highest learning rate
    #[arg(long = "lr", id = "lr", default_value_t = 3e-3, value_parser = not_negative)]
    learning_rate: f64,
    /// Seed of the initial weights, the sequences of each step, and the sampled text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Order of the passes: a built-in schedule (gpipe, 1f1b, eager, interleaved, bfs, zb-h1, zb1p,
    /// zbv, dualpipev), or a file in torch's text format
    #[arg(long, value_name = "NAME|FILE", default_value = "1f1b")]
    schedule: String,
    /// Stages of each rank [default: 2 for schedules with several stages per rank, else 1]
    #[arg(long, value_name = "V", value_parser = at_least(1))]
    chunks: Option<usize>,
    /// Stages of the pipeline on all ranks together; surplus stages get no blocks [default: enough
    /// for four ranks, or the number in the schedule's file]
    #[arg(long, value_parser = at_least(1))]
    stages: Option<usize>,
    /// Keep no residuals between a stage's passes; compute the forward pass again before the
    /// backward pass
    #[arg(long)]
    recompute: bool,
    /// Devices of each rank that share the sequences of a microbatch; each stores about 1/F of the
    /// stage's parameters and optimiser state, and gathers the parameters for each step
    #[arg(long, value_name = "F", default_value_t = 1, value_parser = at_least(1))]
    fsdp: usize,
    /// Devices over which a stage's matrices are sharded, for each of the --fsdp devices
    #[arg(
        long,
        value_name = "T",
        alias = "model-parallel",
        default_value_t = 1,
        value_parser = at_least(1)
    )]
    tensor_parallel: usize,
    /// Sharding rules for the stored parameters and the optimiser's state, in place of those that
    /// follow from --fsdp: JSON, [["pattern", "tactic"], …]
    #[arg(long, value_name = "FILE")]
    strategy: Option<PathBuf>,
    /// Print the stored and the computed shardings of each stage's parameters, then exit
    #[arg(long)]
    show_sharding: bool,
    /// Train with stages of CUDA kernels in place of candle's: with --device cuda
    #[arg(long, conflicts_with_all = ["fsdp", "tensor_parallel"])]
    kernels: bool,
    /// Numbers that the stages compute with; parameters, gradients and losses stay f32. With tf32,
    /// for --kernels alone, only products of matrices are rounded, on tensor cores
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    compute: Compute,
    /// Text for the model to continue after the training
    #[arg(long, default_value = "/// The ")]
    prompt: String,
    /// Number of bytes to sample after the prompt
    #[arg(long, default_value_t = 200)]
    sample: usize,
    /// Sampling temperature; 0 always takes the likeliest byte
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Stop after this update; --save and --load can continue the training later
    #[arg(long, value_name = "STEP")]
    stop_after: Option<u64>,
    /// Save parameters and the optimiser's state to this folder of checkpoints at the end
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
    /// Save also each time the number of updates is a multiple of this
    #[arg(long, value_name = "STEPS", requires = "save")]
    save_every: Option<u64>,
    /// Continue from the newest checkpoint in a folder of --save, with any number of stages and
    /// processes
    #[arg(long, value_name = "FOLDER")]
    load: Option<PathBuf>,
    /// Write each step's number, its loss, and the bits of the loss in hexadecimal to this file
    #[arg(long, value_name = "FILE")]
    losses_out: Option<PathBuf>,
    /// Go on when a process is lost: its place goes to a spare, or the processes that are left take
    /// over its devices, or the stages are cut anew for them. It continues from the last step that
    /// two processes have of each region, and takes in processes that come later. SIGTERM,
    /// SIGUSR1 and SIGUSR2 end one process in order
    #[arg(long, conflicts_with = "seconds")]
    elastic: bool,
    /// Memory of a process for parameters, gradients and the optimiser's state, as in 8GiB: with
    /// --elastic, the training does not go on with processes that need more
    #[arg(long, value_name = "BYTES", requires = "elastic", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Drop a process whose kernels have become slower than the others' by more than this factor
    #[arg(long, value_name = "FACTOR", requires = "elastic", value_parser = not_negative)]
    drop_slow: Option<f64>,
}

/// The numbers that stages compute with.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Compute {
    F32,
    Tf32,
    Bf16,
}

/// A sharding rule, as (pattern of parameter paths, tactic): see [`mpmd::sharding::rules`].
type RuleText = (String, String);

/// Sharding rules for computation: each device of the axis `model` computes some attention heads
/// and some hidden columns.
const COMPUTE: [(&str, &str); 3] = [
    (r".*\.(qkv|up)\..*", r#"shard_dim("model", 0)"#),
    (r".*\.(out|down)\.weight", r#"shard_dim("model", 1)"#),
    (".*", "replicate"),
];

/// A pipeline from bytes to outputs of type `Y`.
type Model<Y> = Pipeline<MpmdArray, Y>;

/// The parameters of each stage, by their paths.
type Params = Vec<BTreeMap<String, MpmdArray>>;

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    // Before any process is started, so that a wrong argument gives one message.
    let plan = TrainingPlan::new(&args)?;
    if args.show_sharding {
        print!("{}", plan.sharding_tables()?);
        return Ok(ExitCode::SUCCESS);
    }

    let text = match &args.paths[..] {
        [] => TextBytes::of_this_repository(),
        paths => TextBytes::of(paths),
    }?;
    let needed = args.sizes.time + 1;
    anyhow::ensure!(
        text.bytes().len() >= needed,
        "{}: the text has {} bytes, and a window of --time {} and one more are needed",
        names_of(&args.paths),
        text.bytes().len(),
        args.sizes.time
    );
    let fact = Fact::new("the text", format!("hash {:016x}", text.fingerprint()));
    let job = args.job.clone().input(move || vec![fact.clone()]);
    // Process 0 alone writes them.
    let job = job.may_differ(["metrics", "losses_out"]);

    // Set if this process is one of the job's. A launcher learns of the signal from their exit
    // codes.
    let stopped = OnceLock::new();

    let each = args.fsdp * args.tensor_parallel;
    let devices = plan.schedule.ranks() * each;
    let program = |p: &mut Program, commits: Option<&Commits>| {
        let schedule = match p.epoch() {
            1 => {
                let fits = plan.layouts()?.check_first(p.processes());
                fits.map_err(|why| anyhow::anyhow!("--memory: {why}"))?;
                plan.schedule.clone()
            }
            _ => plan
                .layouts()?
                .of(p.processes())
                .map_err(|why| anyhow::anyhow!(why))?,
        };

        let plan = TrainingPlan {
            args: &args,
            schedule,
            strategy: plan.strategy.clone(),
        };
        let signal = run(p, &args, &plan, &text, commits)?;
        signal
            .into_iter()
            .for_each(|signal| _ = stopped.set(exit_code(signal)));
        anyhow::Ok(())
    };

    let processes = devices.min(4);
    let code = match args.elastic {
        true => {
            let layouts = plan.layouts()?;
            // A process beyond the ranks has a device and no stage.
            let layout: mpmd::job::Layout = Box::new(move |processes| {
                let devices = layouts.of(processes)?.ranks() * each;
                Ok(devices.max(processes))
            });
            let elastic = Elastic {
                layout: Some(layout),
                drop_slow: args.drop_slow,
            };
            mpmd::job::run_recovering(&job, processes, devices, elastic, |p, commits| {
                program(p, Some(commits))
            })
        }
        false => mpmd::job::run(&job, processes, devices, |p| program(p, None)),
    }?;

    let ended = stopped.get().filter(|_| code == ExitCode::SUCCESS);
    Ok(ended.map_or(code, |code| ExitCode::from(*code)))
}

/// Names the option whose folder an error is about. Other errors stay as they are.
fn of_option(option: &str, error: Error) -> Error {
    match error {
        Error::Environment(why) => Error::Environment(format!("{option}: {why}")),
        other => other,
    }
}

/// Returns the names of the files and folders of the text.
fn names_of(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    match names.is_empty() {
        true => "this repository".to_owned(),
        false => names.join(" "),
    }
}

/// Trains, saves, evaluates and samples. In a job that recovers, continues from `commits`. Returns
/// the signal that ended the run early, or `None`.
fn run(
    p: &mut Program,
    args: &Args,
    plan: &TrainingPlan<'_>,
    text: &TextBytes,
    commits: Option<&Commits>,
) -> anyhow::Result<Option<i32>> {
    let first = p.process() == ProcessId(0) && !p.is_dry_run();
    let meshes = plan.meshes(p)?;
    let stop = StopFlag::install().context("cannot watch for Ctrl-C")?;

    let mut trainer = plan.trainer(p, &meshes)?.stop_on(&stop);
    plan.restore(p, &mut trainer, commits)?;

    let time = args.sizes.time;
    let data = Windows::new(text, time, args.batch)?
        .bytes()
        .sharded(spec![DATA_AXIS]);
    let windows = WindowShape {
        rows: args.batch,
        time,
    };
    let figures =
        first.then(|| TrainingFigures::start(p, &trainer, text, windows, args.losses_out.as_ref()));
    let mut figures = figures.transpose()?;

    let steps = plan
        .steps()
        .on_step(|report| figures.iter_mut().for_each(|figures| figures.step(report)));
    let outcome = trainer.run(p, steps, &data)?;
    if let Some(figures) = figures {
        if let Some(folder) = &args.save {
            println!(
                "saved after step {} to {}",
                trainer.steps(),
                folder.display()
            );
        }
        figures.finish(&outcome)?;
    }
    if outcome.stopped.is_some() {
        return Ok(outcome.stopped);
    }

    let params = (0..meshes.len()).map(|i| trainer.pipeline().params(i).into_iter().collect());
    let model = plan.pipeline(p, &meshes, Some(params.collect()), |part, x, cx| {
        part.logits(x, cx)
    })?;
    let continuation = sample(p, model, args, &stop)?;
    let signal = stop.agree(p)?;
    if let (true, Some(signal)) = (first, signal) {
        say(&format!(
            "stopped by {} after step {}",
            stop_name(signal),
            trainer.steps()
        ));
    }
    if first && signal.is_none() {
        println!("\n{}{}\n", args.prompt, printable(&continuation));
    }
    Ok(signal)
}

/// Computes the loss of the last stage, summed over all devices.
fn loss(part: &ModelPart, x: Tensor, cx: &mut Cx<'_>) -> candle::Result<Loss<Tensor>> {
    let (sum, weight) = cross_entropy_sum(&part.logits(x, cx)?, &cx.side("targets")?, None)?;
    let [sum, weight] = [sum, weight].map(|value| cx.all_reduce(&value, DATA_AXIS));
    Ok(Loss::new(sum?, weight?))
}

/// The arguments, and the contents of the files that they name.
struct TrainingPlan<'a> {
    args: &'a Args,
    schedule: Schedule,
    strategy: Option<Vec<RuleText>>,
}

impl<'a> TrainingPlan<'a> {
    fn new(args: &'a Args) -> anyhow::Result<Self> {
        let Args {
            sizes: ModelSizes { width, heads, .. },
            batch,
            fsdp,
            tensor_parallel,
            ..
        } = args;
        for (whole, size, divisor, parts) in [
            ("--width", width, "--heads", heads),
            ("--heads", heads, "--tensor-parallel", tensor_parallel),
            ("--batch", batch, "--fsdp", fsdp),
        ] {
            anyhow::ensure!(
                size.is_multiple_of(*parts),
                "{whole} {size} does not divide by {divisor} {parts}"
            );
        }

        let wrong = args.compute == Compute::Tf32 && !args.kernels;
        anyhow::ensure!(!wrong, "--compute tf32 needs --kernels");
        let strategy = args.strategy.as_deref().map(read_strategy).transpose()?;
        let Args {
            schedule,
            chunks,
            stages,
            microbatches,
            ..
        } = args;

        let schedule = training::schedule(schedule, *chunks, *stages, *microbatches)?;
        let plan = Self {
            args,
            schedule,
            strategy,
        };
        plan.sharding_tables()?;
        Ok(plan)
    }

    /// Returns the mesh of each stage.
    fn meshes(&self, p: &Program) -> anyhow::Result<Vec<Mesh>> {
        let ranks = self.schedule.ranks();
        let Args {
            fsdp,
            tensor_parallel,
            ..
        } = *self.args;
        let axes = [
            ("rank", ranks),
            (DATA_AXIS, fsdp),
            (MODEL_AXIS, tensor_parallel),
        ];
        // An epoch with more processes than devices has further devices.
        let devices = &p.topology().device_ids()[..ranks * fsdp * tensor_parallel];
        let by_rank = p.mesh_of(&axes, devices)?.split("rank")?;

        let ranks_of_stages = self.schedule.ranks_of_stages().iter();
        Ok(ranks_of_stages.map(|rank| by_rank[*rank].clone()).collect())
    }

    /// Creates a trainer with initial parameters.
    fn trainer(&self, p: &mut Program, meshes: &[Mesh]) -> anyhow::Result<Trainer<MpmdArray>> {
        let args = self.args;
        let total = args.steps as u64;
        let peak = args.learning_rate;
        let rate = Rate::WarmupCosine {
            peak,
            floor: 0.05 * peak,
            warmup: 40.min(total / 4),
            total,
        };

        let pipeline = match args.kernels {
            true => self.kernel_pipeline(p, meshes)?,
            false => self.pipeline(p, meshes, None, loss)?,
        };
        let trainer = Trainer::new(p, pipeline, self.schedule.clone(), AdamW::default())?;
        let trainer = match args.compute {
            Compute::Bf16 => trainer.compute(DType::Bf16)?,
            Compute::F32 | Compute::Tf32 => trainer,
        };
        Ok(trainer.rate(rate).clip(1.0).seed(args.seed))
    }

    fn checkpoints(&self, folder: &Path) -> Checkpoints {
        Checkpoints::new(folder).setting("heads", self.args.sizes.heads)
    }

    /// Restores the state of an earlier epoch or run, if there is one.
    fn restore(
        &self,
        p: &mut Program,
        trainer: &mut Trainer<MpmdArray>,
        commits: Option<&Commits>,
    ) -> anyhow::Result<()> {
        let args = self.args;
        let load = args.load.as_ref().map(|folder| self.checkpoints(folder));
        let mut step = 0;
        if let Some(commits) = commits {
            // A later epoch may find newer checkpoints of its own.
            let own = args
                .save
                .as_ref()
                .filter(|_| p.epoch() > 1)
                .map(|folder| self.checkpoints(folder));
            let option = if own.is_some() { "--save" } else { "--load" };
            let given = own.as_ref().or(load.as_ref());
            step = trainer
                .resume(p, commits, given)
                .map_err(|error| match given {
                    Some(_) => of_option(option, error),
                    None => error,
                })?;
        }

        if let Some(load) = load.as_ref().filter(|_| step == 0) {
            let restored = trainer.restore(p, load);
            step = restored
                .map_err(|error| of_option("--load", error))?
                .unwrap_or(0);
        }
        // A dry run reads no file.
        if let Some(folder) = args.load.as_ref().filter(|_| step == 0 && !p.is_dry_run()) {
            anyhow::bail!("--load {}: it has no checkpoint", folder.display());
        }
        Ok(())
    }

    /// Returns the number of steps, the time limit and the checkpoints of the training.
    fn steps(&self) -> Run<'_> {
        let args = self.args;
        let end = if args.seconds.is_some() {
            u64::MAX
        } else {
            args.steps as u64
        };
        let mut steps = Run::steps(end.min(args.stop_after.unwrap_or(end)));
        if let Some(seconds) = args.seconds {
            steps = steps.seconds(seconds);
        }
        if let Some(folder) = &args.save {
            steps = steps.checkpoints(self.checkpoints(folder));
        }
        if let Some(every) = args.save_every {
            steps = steps.save_every(every);
        }
        steps
    }

    /// Returns the inputs for choosing a schedule when the number of processes changes.
    fn layouts(&self) -> anyhow::Result<Layouts> {
        let Args {
            sizes,
            schedule,
            chunks,
            fsdp,
            tensor_parallel,
            memory,
            ..
        } = self.args;

        let mut elements = 0;
        for i in 0..self.schedule.stages() {
            let part = stage(self.part(i), |part, x, cx| part.forward(x, cx))?;
            elements += part
                .shapes()
                .values()
                .map(ShapedArray::elements)
                .sum::<usize>();
        }

        Ok(Layouts {
            schedule: schedule.clone(),
            chunks: *chunks,
            first: self.schedule.clone(),
            layers: sizes.layers,
            devices: fsdp * tensor_parallel,
            // Each parameter, its gradient, and two moments, in f32.
            bytes: 16 * elements as u64,
            memory: *memory,
        })
    }

    /// Creates the pipeline with `params`, or with initial parameters if that is `None`. `last`
    /// computes the outputs of the last stage.
    fn pipeline<Y: Tensors>(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        params: Option<Params>,
        last: impl Fn(&ModelPart, Tensor, &mut Cx<'_>) -> candle::Result<Y> + Send + Sync + 'static,
    ) -> Result<Model<Y::Arrays>> {
        let end = meshes.len() - 1;
        let mut given = params.into_iter().flatten();
        let mut front: Option<Model<MpmdArray>> = None;
        for (i, mesh) in meshes[..end].iter().enumerate() {
            let part = stage(self.part(i), |part, x, cx| part.forward(x, cx))?;
            let part = part.named(format!("part {i}")).input_spec(spec![DATA_AXIS]);
            let part = part.output_spec(spec![DATA_AXIS]).split_gradients();
            let params = self.params(p, &part, mesh, given.next())?;
            front = Some(match front {
                None => Pipeline::first(part, mesh, params)?,
                Some(front) => front.then(part, mesh, params)?,
            });
        }

        let part = stage(self.part(end), last)?.named(format!("part {end}"));
        let part = part.input_spec(spec![DATA_AXIS]).split_gradients();
        let params = self.params(p, &part, &meshes[end], given.next())?;
        let mut pipeline = match front {
            None => Pipeline::first(part, &meshes[end], params)?,
            Some(front) => front.then(part, &meshes[end], params)?,
        };

        for (i, mesh) in meshes.iter().enumerate() {
            pipeline.recompute(i, self.args.recompute);
            let params = pipeline.params(i).into_iter();
            let leaves = params
                .map(|(path, array)| (path, array.aval().clone()))
                .collect();
            let Some([compute, stored]) = self.shardings(leaves, mesh)? else {
                continue;
            };

            let storage = ParamSharding::new(compute.shardings().collect());
            if self.args.fsdp > 1 {
                pipeline.store(i, storage.partial_over(&[DATA_AXIS])?)?;
            } else if !compute.shardings().eq(stored.shardings()) {
                pipeline.store(i, storage)?;
            }
        }
        Ok(pipeline)
    }

    /// Creates the pipeline from stages that launch CUDA kernels, with the same initial parameters
    /// as the stages of candle.
    fn kernel_pipeline(&self, p: &mut Program, meshes: &[Mesh]) -> Result<Model<Loss<MpmdArray>>> {
        let math = match self.args.compute {
            Compute::Tf32 => Math::Tf32,
            Compute::F32 | Compute::Bf16 => Math::F32,
        };

        let end = meshes.len() - 1;
        let mut front = None::<Model<MpmdArray>>;
        let name = |i: usize| format!("part {i}");
        let sizes = self.args.sizes;
        let blocks = |i| self.blocks(i);
        for (i, mesh) in meshes[..end].iter().enumerate() {
            // Both kinds of stages have the same parameters.
            let part = stage(self.part(i), |part, x, cx| part.forward(x, cx))?;
            let params = part.init(p, mesh, self.args.seed)?;
            let part = kernel_gpt::FrontStage::new(name(i), sizes, blocks(i), i == 0, math);
            front = Some(match front {
                None => Pipeline::first(part, mesh, params)?,
                Some(front) => front.then(part, mesh, params)?,
            });
        }

        let part = stage(self.part(end), loss)?;
        let params = part.init(p, &meshes[end], self.args.seed)?;
        let part = kernel_gpt::LastStage::new(name(end), sizes, blocks(end), end == 0, math);
        Ok(match front {
            None => Pipeline::first(part, &meshes[end], params)?,
            Some(front) => front.then(part, &meshes[end], params)?,
        })
    }

    /// Returns the range of transformer blocks in a stage.
    fn blocks(&self, stage: usize) -> Range<usize> {
        let bound = |stage: usize| stage * self.args.sizes.layers / self.schedule.stages();
        bound(stage)..bound(stage + 1)
    }

    /// Returns a function that constructs a stage's part of the model.
    fn part(
        &self,
        stage: usize,
    ) -> impl Fn(VarBuilder<'static>) -> candle::Result<ModelPart> + use<> {
        let sizes = self.args.sizes;
        let stages = self.schedule.stages();
        let blocks = self.blocks(stage);
        move |vb| {
            ModelPart::new(
                &vb,
                sizes,
                blocks.clone(),
                [stage == 0, stage + 1 == stages],
            )
        }
    }

    /// Returns `given`, or else makes the initial parameters of a stage in their stored shardings.
    fn params<Y: Tensors>(
        &self,
        p: &mut Program,
        part: &CandleStage<ModelPart, Tensor, Y>,
        mesh: &Mesh,
        given: Option<BTreeMap<String, MpmdArray>>,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let shardings = self.shardings(part.shapes().into_iter().collect(), mesh)?;
        let stored = shardings.iter().flat_map(|[_, stored]| stored.shardings());
        let by_path: BTreeMap<String, Sharding> = part.shapes().into_keys().zip(stored).collect();
        given.map_or_else(
            || part.init_as(p, self.args.seed, |path, _| by_path[path].clone()),
            Ok,
        )
    }

    /// Returns the shardings of a stage's parameters, as `[computation, storage]`. `None` if the
    /// stage has no parameters.
    fn shardings(
        &self,
        leaves: Vec<(String, ShapedArray)>,
        mesh: &Mesh,
    ) -> Result<Option<[InferredShardings; 2]>> {
        if leaves.is_empty() {
            return Ok(None);
        }
        let inferred = |rules: &[RuleText]| {
            let wrong = |why: &dyn std::fmt::Display| {
                Error::kernel(format!("the sharding of parameters: {why}"))
            };
            let strategy =
                Strategy::parse(rules, &Registry::default()).map_err(|why| wrong(&why))?;
            let inferred = infer(&leaves, &strategy, mesh).map_err(|why| wrong(&why))?;
            match inferred.leaves().iter().find(|leaf| leaf.uneven) {
                None => Ok(inferred),
                Some(leaf) => Err(wrong(&format!(
                    "{} {} does not divide evenly as {} on {mesh}",
                    leaf.name, leaf.aval, leaf.spec
                ))),
            }
        };

        let compute = COMPUTE.map(|(pattern, tactic)| (pattern.to_owned(), tactic.to_owned()));
        // In addition, each device of the axis `data` stores a part of the largest dimension.
        let divided = compute
            .clone()
            .map(|(pattern, tactic)| match tactic.as_str() {
                "replicate" => (pattern, r#"fsdp("data", 0)"#.to_owned()),
                _ => (pattern, format!(r#"{tactic}|fsdp("data", 0)"#)),
            });

        let stored = match &self.strategy {
            Some(strategy) => strategy,
            None if self.args.fsdp > 1 => &divided[..],
            None => &compute,
        };
        Ok(Some([inferred(&compute)?, inferred(stored)?]))
    }

    /// Returns a text that lists, for each stage, the shardings in which its parameters are stored,
    /// and those with which they are computed.
    fn sharding_tables(&self) -> anyhow::Result<String> {
        let axes = [self.args.fsdp, self.args.tensor_parallel];
        let mut text = String::new();
        let devices = (0..(axes[0] * axes[1]) as u32).map(DeviceId).collect();
        let mesh = Mesh::new(&[(DATA_AXIS, axes[0]), (MODEL_AXIS, axes[1])], devices)?;

        for i in 0..self.schedule.stages() {
            let part = stage(self.part(i), |part, x, cx| part.forward(x, cx))?;
            match self.shardings(part.shapes().into_iter().collect(), &mesh)? {
                None => text += &format!("stage {i} has no parameters\n"),
                Some([compute, stored]) => {
                    text += &format!("stage {i}, as its parameters are stored:\n{stored}\n");
                    text += &format!("stage {i}, as they are computed with:\n{compute}\n");
                }
            }
        }
        Ok(text)
    }
}

/// Reads sharding rules, ordered pairs of pattern and tactic, from a JSON file.
fn read_strategy(path: &Path) -> anyhow::Result<Vec<RuleText>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    rules_from_json(&text).with_context(|| {
        format!(
            "{}: no list of pairs [\"pattern\", \"tactic\"]",
            path.display()
        )
    })
}

/// Continues the prompt by up to `--sample` bytes, and returns the new bytes on every process. Ends
/// early if `stop` is set on process 0.
fn sample(
    p: &mut Program,
    mut model: Model<MpmdArray>,
    args: &Args,
    stop: &StopFlag,
) -> Result<Vec<u8>> {
    let time = args.sizes.time;
    let rows = model.mesh(0).sharding(spec![DATA_AXIS]);
    let shape = ShapedArray::new(&[args.fsdp, time], DType::U8);
    let first = Sharding::single_device(p.topology().devices_of(ProcessId(0))[0]);
    model.probe(p, &MicrobatchShapes::new(shape.clone()))?;
    let mut bytes = args.prompt.clone().into_bytes();
    if bytes.is_empty() {
        bytes.push(SEPARATOR);
    }

    let start = bytes.len();
    for number in 0..args.sample as u64 {
        let context = bytes[bytes.len().saturating_sub(time)..].to_vec();
        let last = context.len() - 1;
        // Attention is causal, so the zeros after the context have no effect.
        let x = p.array_from_fn(shape.clone(), &rows, move |_, mut tokens| {
            tokens.zero();
            for row in tokens.as_mut_slice::<u8>()?.chunks_exact_mut(time) {
                row[..context.len()].copy_from_slice(&context);
            }
            Ok(())
        })?;

        let logits = model.forward(p, Microbatch::new(x))?;
        let logits = p.device_put(&logits, &first)?;
        let byte = p.broadcast_value(ProcessId(0), Some(0), || {
            let missing = || Error::kernel("the logits are on another process");
            let logits = logits.to_host()?.ok_or_else(missing)?;
            let row = &logits.as_slice::<f32>()?[last * BYTES..][..BYTES];
            let byte = next_byte(row, args.temperature, args.seed, number);
            Ok((!stop.is_set()).then_some(byte))
        })?;

        let Some(byte) = byte else { break };
        bytes.push(byte);
    }
    Ok(bytes.split_off(start))
}
