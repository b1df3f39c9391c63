//! Trains a model and serves it, in one program: some processes train, the others serve.
//!
//! `cargo run --release --bin train_and_serve -- --model DIR TEXT`, then ask it at the address that
//! it prints. Each answer names the step whose weights have computed it.
//!
//! The program's own loop is a server's ([`Serving`]): process 0 decides on each step of all
//! processes. Whenever a training step has ended, it has all issue the next one. The processes that
//! serve only count the training's operations, and wait for none of its values. The weights travel
//! beside the program, on threads of the publisher and of the subscription.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::ensure;
use mpmd::job::{JobArgs, JobPart, at_least, say};
use mpmd::launch::Token;
use mpmd::pipeline::Schedule;
use mpmd::topology::Mesh;
use mpmd::train::data::{Data as _, MicrobatchPlace, TextBytes, Windows};
use mpmd::train::stop::leave_signals_to_process_0;
use mpmd::train::{AdamW, Rate, StepHandle, Trainer};
use mpmd::weights::{Publication, Subscribing};
use mpmd::{Error, MpmdArray, ProcessId, Program};
use mpmd_models::{
    Folder, HeldBytes, MOST_TOKENS, Room, Stages, Tokens, WeightPublisher, WeightType,
};
use mpmd_serve::{
    Engine, Front, FrontSettings, Model, SchedulerSizes, Serving, ServingTurn, Waker, queue,
};

use crate::division::{DivisionArgs, SizeOptions, stages_of};
use crate::front::{self, FrontArgs, ServerEnds};
use crate::model;
use crate::weights::PUBLICATION;

/// Largest number of tokens of a prompt and its reply together.
const POSITIONS: usize = 512;
/// Number of steps in `mpmd check`, which has no server to decide on them.
const STEPS_OF_DRY_RUN: u64 = 4;
/// Number of requests that are answered at the same time.
const SEQUENCES: usize = 8;

/// Train a model on texts and serve it at the same time
#[derive(Debug, clap::Parser)]
#[command(name = "train_and_serve", version)]
pub struct TrainAndServe {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors; or a GGUF file; or
    /// NAME or NAME@REVISION of a model in the cache of the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Texts to train on: files and folders
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// Stages of the training, each on a process of its own
    #[arg(long, default_value_t = 2, value_parser = at_least(1))]
    training_stages: usize,
    /// Number of updates; the server goes on after them
    #[arg(long, default_value_t = 100, value_parser = at_least(1))]
    steps: usize,
    /// Updates from one version of the server's weights to the next
    #[arg(long, value_name = "STEPS", default_value_t = 1, value_parser = at_least(1))]
    publish_every: usize,
    /// Learning rate
    #[arg(long, default_value_t = 1e-4)]
    lr: f64,
    /// Tokens of a window of the text
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least(1))]
    time: usize,
    #[command(flatten)]
    cut: DivisionArgs,
    #[command(flatten)]
    front: FrontArgs,
}

/// The training part of the program, on the devices that do not serve.
struct ServedTraining<'a> {
    args: &'a TrainAndServe,
    schedule: &'a Schedule,
    meshes: Vec<Mesh>,
    data: Windows,
    trainer: Trainer<MpmdArray>,
    /// The last step, until it has ended. Read on process 0 only.
    last: Option<StepHandle>,
    /// The error that ended the training. The server continues after it.
    spoiled: Option<Error>,
}

/// The model divided twice: for serving and for training.
struct DividedStages {
    serving: Stages,
    training: Stages,
    sizes: SchedulerSizes,
    schedule: Schedule,
}

/// Trains a model while serving it, until the server is drained. Returns the exit code of the job.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn train_and_serve(args: &TrainAndServe) -> anyhow::Result<ExitCode> {
    // Before the front listens, so that the first requests are logged, too.
    Program::log_to_stderr();
    let folder = model::open(&args.model, None)?;
    folder.check_training()?;
    let parts = DividedStages::new(args, &folder)?;
    let mut devices = parts.serving.devices(|stage| stage)?;
    devices.extend(parts.training.devices(|stage| stage)?);

    let of_folder = folder.clone();
    let job = args.job.clone().input(move || of_folder.facts());
    let settings = args.front.settings(None);

    let own = match job.part(devices.len(), devices.clone())? {
        JobPart::First => Some(listen(args, &folder, &settings, parts.sizes)?),
        JobPart::Parent => {
            settings.check_resources().map_err(front::named)?;
            None
        }
        JobPart::Other => None,
    };

    let own = Mutex::new(own);
    let code = mpmd::job::run(&job, devices.len(), devices, |p| {
        // Locked on process 0 alone, which keeps it while it serves: the others may be threads.
        let is_first = p.process() == ProcessId(0);
        let mut own = is_first.then(|| own.lock().unwrap_or_else(PoisonError::into_inner));
        let own = own.as_mut().and_then(|own| own.as_mut());
        program(p, args, &folder, &parts, own)
    });
    if let Some(own) = own.into_inner().unwrap_or_else(PoisonError::into_inner) {
        own.end();
    }
    code
}

impl DividedStages {
    fn new(args: &TrainAndServe, folder: &Folder) -> anyhow::Result<Self> {
        let stages = args.cut.stages();
        let most = folder.config().positions().min(POSITIONS);
        ensure!(
            args.time <= most,
            "--time: expected at most {most}, found {}",
            args.time
        );
        // The positions are those of the model at most.
        let undivided = args.cut.stages_of(folder, most, "--time")?;
        let serving = args.cut.divide(undivided, HeldBytes::default())?;
        let devices = serving.devices(|stage| stage)?;

        // The processes that train follow those that serve.
        let options = SizeOptions {
            stages: "--training-stages",
            positions: "--time",
        };
        let training = stages_of(folder, args.training_stages, args.time, options)?;
        let training = training.after(devices.iter().sum());
        let microbatches = 2 * args.training_stages;
        let schedule = Schedule::one_f_one_b(args.training_stages, microbatches)?;
        let sizes = SchedulerSizes {
            lanes: stages,
            sequences: SEQUENCES.max(devices.len() + args.training_stages),
            blocks: 2 * SEQUENCES * POSITIONS.div_ceil(16),
            chunk: MOST_TOKENS,
            positions: most,
        };
        Ok(Self {
            serving,
            training,
            sizes,
            schedule,
        })
    }
}

/// Starts the front, and returns it with its engine. Until the engine takes requests, replies say
/// that the server is starting.
fn listen(
    args: &TrainAndServe,
    folder: &Folder,
    settings: &FrontSettings,
    sizes: SchedulerSizes,
) -> anyhow::Result<ServerEnds> {
    let (queue, arrivals) = queue(settings.waiting);
    let name = args.front.model_name.clone();
    let name = name.or_else(|| model::name_of(&args.model));
    let prompts = args.front.chat.prompts(folder)?;
    let model = Model::of(folder, prompts, name, sizes.positions)?;
    let front = Front::listen(settings, model, queue).map_err(front::named)?;
    say(&format!("listening on http://{}", front.address()));
    let engine = Engine::new(sizes, arrivals).measure_chunk();
    Ok(ServerEnds { front, engine })
}

/// Runs training and serving on one process of the job. `own` is `Some` on process 0 only.
fn program(
    p: &mut Program,
    args: &TrainAndServe,
    folder: &Folder,
    parts: &DividedStages,
    mut own: Option<&mut ServerEnds>,
) -> anyhow::Result<()> {
    let done = train_while_serving(p, args, folder, parts, own.as_deref_mut());
    if let (Err(why), Some(own)) = (&done, own)
        && let Some(why) = why.downcast_ref()
    {
        own.engine.fail_with(why);
    }
    done
}

fn train_while_serving(
    p: &mut Program,
    args: &TrainAndServe,
    folder: &Folder,
    parts: &DividedStages,
    own: Option<&mut ServerEnds>,
) -> anyhow::Result<()> {
    let is_first = p.process() == ProcessId(0);
    if !is_first {
        // A signal comes to all processes. Process 0 drains the server; the others wait for that.
        leave_signals_to_process_0()?;
    }
    let sizes = parts.sizes;
    let room = Room {
        blocks: sizes.blocks,
        sequences: sizes.sequences,
    };
    let meshes = parts.serving.meshes(|stage| stage)?;
    let mut inference = parts.serving.inference(p, &meshes, room, true)?;

    let mut training = ServedTraining::new(p, args, folder, parts)?;
    let computed_by = inference
        .computed_by(p)
        .filter(|_| is_first && !p.is_dry_run());
    if let Some(line) = computed_by {
        say(&format!("serving: {line}"));
        say(&format!("training: {}", training.trainer.computed_by(p)));
    }

    // The way of the weights: published as bf16, taken in the server's own layout.
    let token = share_token(p)?;
    let publication = Publication::new(PUBLICATION, token.clone()).changes(false);
    let mut weights = WeightPublisher::new(
        p,
        publication,
        training.trainer.pipeline(),
        folder.config(),
        None,
        WeightType::Bf16,
    )?;
    let address = weights
        .publisher()
        .address()
        .map(|address| address.to_string());
    let subscribing = Subscribing::new(PUBLICATION, address.unwrap_or_default(), token);
    let subscription = inference.subscribe(p, subscribing)?;

    let mut engine = None;
    if let Some(own) = own {
        own.front.catch_signals()?;
        engine = Some(&mut own.engine);
    }
    let waker = engine.as_ref().map(|engine| engine.waker());
    let mut serving = Serving::start(p, &mut inference, sizes.lanes, engine)?;
    loop {
        if is_first {
            training.read_ended()?;
        }
        let next = training.is_next().then_some(());
        let turn = match p.is_dry_run() && training.trainer.steps() < STEPS_OF_DRY_RUN {
            true => ServingTurn::Other(()),
            false => serving.turn(p, || next)?,
        };
        match turn {
            ServingTurn::Ended => break,
            ServingTurn::Served => {}
            ServingTurn::Other(()) => training.step(p, &waker, &mut weights)?,
        }
    }

    drop((subscription, weights));
    training.spoiled.map_or(Ok(()), |why| Err(why.into()))
}

/// Creates a random secret on process 0, and returns it on every process.
fn share_token(p: &mut Program) -> anyhow::Result<Token> {
    let none = Token::new([0; 32]).to_hex();
    let token = p.broadcast_value(ProcessId(0), none, || {
        let token = Token::random().map_err(|why| Error::Environment(why.to_string()))?;
        Ok(token.to_hex())
    })?;
    Ok(token.parse()?)
}

impl<'a> ServedTraining<'a> {
    /// Creates the training. Reads the texts, and issues the loading of the weights.
    fn new(
        p: &mut Program,
        args: &'a TrainAndServe,
        folder: &Folder,
        parts: &'a DividedStages,
    ) -> anyhow::Result<Self> {
        let tokens = Tokens::spread(p, || Tokens::of(&TextBytes::of(&args.texts)?, folder))?;
        let data = Windows::new(&tokens, args.time, 1)?;
        let meshes = parts.training.meshes(|stage| stage)?;
        let pipeline = parts.training.training(p, &meshes)?;
        let trainer = Trainer::new(p, pipeline, parts.schedule.clone(), AdamW::default())?
            .rate(Rate::Constant(args.lr));
        Ok(Self {
            args,
            schedule: &parts.schedule,
            meshes,
            data,
            trainer,
            last: None,
            spoiled: None,
        })
    }

    /// Prints the loss of the last step if it has ended. If it failed, records the error and ends
    /// the training.
    fn read_ended(&mut self) -> anyhow::Result<()> {
        let Some(ended) = self.last.take_if(|last| last.is_complete()) else {
            return Ok(());
        };
        match ended.read() {
            Ok(report) => say(&format!("step {}: loss {:.3}", report.step, report.loss)),
            // Its weights are refused, so the server goes on with those before.
            Err(why @ Error::Kernel(_)) => {
                say(&format!(
                    "error: the training has ended, and the server goes on: {why}"
                ));
                self.spoiled = Some(why);
            }
            Err(why) => return Err(why.into()),
        }
        Ok(())
    }

    /// True if no step is running and a further step is due.
    fn is_next(&self) -> bool {
        let is_done = self.spoiled.is_some() || self.trainer.steps() >= self.args.steps as u64;
        self.last.is_none() && !is_done
    }

    /// Issues a training step, and publishes its weights if they are due. When the step ends, it
    /// wakes the engine.
    fn step(
        &mut self,
        p: &mut Program,
        waker: &Option<Waker>,
        weights: &mut WeightPublisher,
    ) -> anyhow::Result<()> {
        let count = self.schedule.microbatches();
        let number = self.trainer.steps() + 1;
        let at = |microbatch| MicrobatchPlace::new(0, number, microbatch, count);
        let microbatches =
            (0..count).map(|microbatch| self.data.training(p, &self.meshes, at(microbatch)));
        let microbatches = microbatches.collect::<mpmd::Result<Vec<_>>>()?;
        let step = self.trainer.step(p, microbatches)?;
        if let Some(waker) = waker.clone() {
            step.then(move || waker.wake());
        }
        self.last = Some(step);

        if self
            .trainer
            .steps()
            .is_multiple_of(self.args.publish_every as u64)
        {
            weights.publish(p, self.trainer.steps(), self.trainer.pipeline())?;
        }
        Ok(())
    }
}
