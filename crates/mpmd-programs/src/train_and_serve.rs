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
use mpmd::train::data::{At, Data as _, Text, Windows};
use mpmd::train::stop::wait_for_process_0;
use mpmd::train::{AdamW, Rate, StepHandle, Trainer};
use mpmd::weights::{Publication, Subscribing};
use mpmd::{Error, ProcessId, Program};
use mpmd_models::{Folder, Held, MOST_TOKENS, Room, Stages, Tokens, WeightPublisher, WeightType};
use mpmd_serve::{Engine, Front, FrontSettings, Model, Serving, Sizes, Turn, queue};

use crate::division::DivisionArgs;
use crate::front::{self, FrontArgs};
use crate::weights::PUBLICATION;

/// Tokens of a prompt and its reply.
const POSITIONS: usize = 512;
/// Steps of `mpmd check`, which has no server to decide on them.
const STEPS_OF_DRY_RUN: u64 = 4;
/// Requests that are answered at a time.
const SEQUENCES: usize = 8;

/// Train a model on texts and serve it at the same time
#[derive(Debug, clap::Parser)]
#[command(name = "train_and_serve", version)]
pub struct TrainAndServe {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors
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

/// The stages of a model for both uses.
struct Parts {
    serving: Stages,
    training: Stages,
    sizes: Sizes,
    schedule: Schedule,
}

/// Trains a model and serves it until the server is drained. Returns the exit code of the job.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn train_and_serve(args: &TrainAndServe) -> anyhow::Result<ExitCode> {
    let folder = Folder::open(&args.model)?;
    folder.check_training()?;
    let parts = Parts::new(args, &folder)?;
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
    mpmd::job::run(&job, devices.len(), devices, |p| {
        let is_first = p.process() == ProcessId(0);
        let own = is_first.then(|| own.lock().unwrap_or_else(PoisonError::into_inner).take());
        program(p, args, &folder, &parts, own.flatten())
    })
}

impl Parts {
    fn new(args: &TrainAndServe, folder: &Folder) -> anyhow::Result<Self> {
        let stages = args.cut.stages();
        let most = folder.config().positions().min(POSITIONS);
        ensure!(args.time <= most, "--time: expected at most {most}");
        let serving = args
            .cut
            .divide(Stages::new(folder, stages, most)?, Held::default())?;
        let devices = serving.devices(|stage| stage)?;
        // The processes that train follow those that serve.
        let training =
            Stages::new(folder, args.training_stages, args.time)?.after(devices.iter().sum());
        let microbatches = 2 * args.training_stages;
        let schedule = Schedule::one_f_one_b(args.training_stages, microbatches)?;
        let sizes = Sizes {
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

/// Starts the server's front, whose answers are requests of a queue. It says that it starts until
/// the engine takes them.
fn listen(
    args: &TrainAndServe,
    folder: &Folder,
    settings: &FrontSettings,
    sizes: Sizes,
) -> anyhow::Result<(Front, Engine)> {
    let (queue, arrivals) = queue(settings.waiting);
    let model = Model::of(folder, args.front.model_name.clone(), sizes.positions)?;
    let front = Front::listen(settings, model, queue).map_err(front::named)?;
    say(&format!("listening on http://{}", front.address()));
    Ok((front, Engine::new(sizes, arrivals).measure_chunk()))
}

fn program(
    p: &mut Program,
    args: &TrainAndServe,
    folder: &Folder,
    parts: &Parts,
    own: Option<(Front, Engine)>,
) -> anyhow::Result<()> {
    let is_first = p.process() == ProcessId(0);
    if !is_first {
        // A signal comes to all processes. Process 0 drains the server; the others wait for that.
        wait_for_process_0()?;
    }
    let Parts {
        serving,
        training,
        sizes,
        schedule,
    } = parts;
    let room = Room {
        blocks: sizes.blocks,
        sequences: sizes.sequences,
    };
    let meshes = serving.meshes(|stage| stage)?;
    let mut inference = serving.inference(p, &meshes, room, true)?;

    // The training, on the other devices.
    let tokens = Tokens::spread(p, || Tokens::of(&Text::of(&args.texts)?, folder))?;
    let data = Windows::new(&tokens, args.time, 1)?;
    let meshes: Vec<Mesh> = training.meshes(|stage| stage)?;
    let pipeline = training.training(p, &meshes)?;
    let mut trainer = Trainer::new(p, pipeline, schedule.clone(), AdamW::default())?
        .rate(Rate::Constant(args.lr));
    let computed_by = inference
        .computed_by(p)
        .filter(|_| is_first && !p.is_dry_run());
    if let Some(line) = computed_by {
        say(&format!("serving: {line}"));
        say(&format!("training: {}", trainer.computed_by(p)));
    }

    // The way of the weights: published as bf16, taken in the server's own layout.
    let none = Token::new([0; 32]).to_hex();
    let token = p.broadcast_value(ProcessId(0), none, || {
        let token = Token::random().map_err(|why| Error::Environment(why.to_string()))?;
        Ok(token.to_hex())
    })?;
    let token: Token = token.parse()?;
    let publication = Publication::new(PUBLICATION, token.clone()).changes(false);
    let mut weights = WeightPublisher::new(
        p,
        publication,
        trainer.pipeline(),
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

    let (mut front, mut engine) = own.unzip();
    if let Some(front) = &mut front {
        front.catch_signals()?;
    }
    let waker = engine.as_ref().map(Engine::waker);
    let mut serving = Serving::start(p, &mut inference, sizes.lanes, engine.as_mut())?;
    // The last step, on process 0 until it has ended.
    let mut last: Option<StepHandle> = None;
    // The reason why there is no further step.
    let mut spoiled: Option<Error> = None;
    loop {
        if let Some(ended) = last.take_if(|last| is_first && last.is_complete()) {
            match ended.read() {
                Ok(report) => say(&format!("step {}: loss {:.3}", report.step, report.loss)),
                // Its weights are refused, so the server goes on with those before.
                Err(why @ Error::Kernel(_)) => {
                    say(&format!(
                        "error: the training has ended, and the server goes on: {why}"
                    ));
                    spoiled = Some(why);
                }
                Err(why) => return Err(why.into()),
            }
        }
        let is_done = spoiled.is_some() || trainer.steps() >= args.steps as u64;
        let is_next = last.is_none() && !is_done;
        let next = is_next.then_some(());
        let turn = match p.is_dry_run() && trainer.steps() < STEPS_OF_DRY_RUN {
            true => Turn::Other(()),
            false => serving.turn(p, || next)?,
        };
        match turn {
            Turn::Ended => break,
            Turn::Served => continue,
            Turn::Other(()) => {}
        }
        let count = schedule.microbatches();
        let at = |microbatch| At::new(0, trainer.steps() + 1, microbatch, count);
        let microbatches = (0..count).map(|microbatch| data.training(p, &meshes, at(microbatch)));
        let microbatches = microbatches.collect::<mpmd::Result<Vec<_>>>()?;
        let step = trainer.step(p, microbatches)?;
        if let Some(waker) = waker.clone() {
            step.then(move || waker.wake());
        }
        last = Some(step);
        if trainer.steps().is_multiple_of(args.publish_every as u64) {
            weights.publish(p, trainer.steps(), trainer.pipeline())?;
        }
    }
    drop((subscription, weights));
    if let Some(front) = front {
        front.drain();
        front.join();
    }
    spoiled.map_or(Ok(()), |why| Err(why.into()))
}
