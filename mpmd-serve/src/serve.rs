//! The program `serve`.

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::ensure;
use clap::{Args as _, Command};
use mpmd::candle::nn::BLOCK;
use mpmd::topology::Mesh;
use mpmd::train::stop::StopFlag;
use mpmd::{DeviceId, Error, ProcessId, Program};
use mpmd_base::{bytes_text, parse_bytes};
use mpmd_job::{Elastic, JobArgs, JobPart, at_least, say};
use mpmd_models::generate::WeightType;
use mpmd_models::{CutArgs, Folder, Held, MOST_TOKENS, Room, Stages, SubscribeArgs};

use crate::engine::Engine;
use crate::http::{Front, HttpArgs};
use crate::model::Model;
use crate::queue::queue;
use crate::request::reason;
use crate::scheduler::Sizes;
use crate::serving;

/// Most positions of a sequence, where nothing else is said.
const POSITIONS: usize = 4096;
/// Memory for keys and values, where nothing else is said.
const CACHE: u64 = 1 << 30;

/// Arguments of a server.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Largest number of requests that are answered at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least(1))]
    pub sequences: usize,
    /// Tokens that a prompt and its reply may have; default: as many as the model has positions, at
    /// most 4096. With the rope types `longrope` and `dynamic` all replies depend on it: positions
    /// are scaled for this length
    #[arg(long, value_name = "N", value_parser = at_least(2))]
    pub max_len: Option<usize>,
    /// Memory of a device of each stage for keys and values; default: enough for all requests, at
    /// most 1GiB unless one needs more
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub cache: Option<u64>,
    /// Largest number of tokens of a pass; a prompt delays the tokens of others by one pass of this
    /// size. Default: by measurement, the smallest with which a token costs hardly more than with
    /// larger ones
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    pub chunk: Option<usize>,
    /// Type of the weights in memory; sums are in f32 in any case
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: WeightType,
    /// Go on when a process other than the first is lost: its place goes to a spare, and open
    /// requests are computed again from their tokens so far
    #[arg(long)]
    pub elastic: bool,
    /// Have the first process only answer clients: there is one process more than stages. With
    /// --elastic every process but this one may be lost
    #[arg(long)]
    pub front: bool,
    /// Seconds for which requests go on with older weights after new ones have come; then they are
    /// computed again with these, from their tokens so far
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub version_grace: u32,
    /// The subscription to the weights of a training.
    #[command(flatten)]
    pub subscribe: SubscribeArgs,
}

impl ServeArgs {
    /// Returns the sizes for a model. A block takes `block` bytes on a device.
    fn sizes(&self, folder: &Folder, stages: usize, block: u64) -> anyhow::Result<Sizes> {
        let most = folder.config().positions();
        let positions = self.max_len.unwrap_or(most.min(POSITIONS));
        ensure!(
            positions <= most,
            "--max-len: expected at most {most}, the positions of the model, found {positions}"
        );
        let one = positions.div_ceil(BLOCK);
        let (least, all) = (one as u64 * block, (one * self.sequences) as u64 * block);
        let cache = self.cache.unwrap_or(CACHE.max(least)).min(all);
        ensure!(
            cache >= least,
            "--cache: expected at least {}, for one sequence of --max-len {positions} tokens, \
             found {}",
            bytes_text(least),
            bytes_text(cache)
        );
        let sequences = self.sequences.max(stages);
        let blocks = (cache / block.max(1)) as usize;
        let chunk = self.chunk.unwrap_or(MOST_TOKENS);
        Ok(Sizes { lanes: stages, sequences, blocks, chunk, positions })
    }
}

/// Serves a model until the server is drained. Checks the folder and the arguments before a process
/// is started.
///
/// # Errors
///
/// If the folder is invalid, the arguments do not fit it or each other, or the job could not be
/// started.
pub fn run(
    folder: &Folder,
    args: &ServeArgs,
    cut: &CutArgs,
    http: &HttpArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let (stages, in_half) = (cut.stages(), args.dtype == WeightType::Bf16);
    // The cut depends on the room for keys and values, and the size of a block on the cut.
    let undivided = Stages::new(folder, stages, 1)?.cut(cut, Held::default())?;
    let sizes = args.sizes(folder, stages, undivided.block_bytes())?;
    let room = Room { blocks: sizes.blocks, sequences: sizes.sequences };
    let model = Stages::new(folder, stages, sizes.positions)?;
    let changes = args.subscribe.subscribe.is_some() || !http.allow_weights.is_empty();
    let mut held = Held::inference(folder, room, in_half);
    // Two versions at a time.
    held.element *= if changes { 2 } else { 1 };
    let model = model.cut(cut, held)?;
    let model = model.after(usize::from(args.front));
    let (mut devices, meshes) = (model.devices(|stage| stage)?, model.meshes(|stage| stage)?);
    if args.front {
        devices.insert(0, 1);
        ensure!(
            job.processes.is_none_or(|processes| processes == devices.len()),
            "--processes: with --front expected {}, one more than stages",
            devices.len()
        );
    }
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        !args.elastic || !changes,
        "--subscribe and --allow-weights: a spare has the weights of the start alone, so leave out \
         --elastic"
    );
    http.check()?;
    let subscribing = args.subscribe.subscribing()?;
    // Clients can ask for the state of the server before the processes of the job meet. It stays
    // from epoch to epoch of a job that recovers.
    let own = match job.part(devices.len(), devices.clone())? {
        JobPart::First => {
            let (front, engine) = started(folder, http, sizes)?;
            let engine = engine.grace(Duration::from_secs(args.version_grace.into()));
            let engine = if args.chunk.is_none() { engine.measure_chunk() } else { engine };
            Some((front, engine))
        }
        JobPart::Parent => {
            http.check_resources()?;
            None
        }
        JobPart::Other => {
            if args.elastic {
                // A spare that waits stays, too: open requests may need it while process 0 drains.
                StopFlag::install()?;
            }
            None
        }
    };
    let own = Mutex::new(own);
    let program = |p: &mut Program| {
        // A launcher passes the signal on to all processes. The front of process 0 drains; the
        // others stay until it has.
        let is_first = p.process() == ProcessId(0);
        if !is_first {
            StopFlag::install()?;
        }
        let mut inference = model.inference(p, &meshes, room, in_half)?;
        let computed_by = inference.computed_by(p).filter(|_| is_first && p.epoch() == 1);
        if let Some(line) = computed_by.filter(|_| !p.is_dry_run()) {
            say(&line);
        }
        if args.front {
            inference.read_on(p, &Mesh::new(&[("front", 1)], vec![DeviceId(0)])?)?;
        }
        let subscribe = |subscribing| inference.subscribe(p, subscribing);
        let _subscription = subscribing.clone().map(subscribe).transpose()?;
        // Until now a signal ends the process.
        let catch_signals = || {
            let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
            let caught = own.as_mut().map(|(front, _)| front.catch_signals()).transpose();
            caught.map(drop).map_err(|why| Error::Environment(format!("SIGTERM: {why}")))
        };
        p.broadcast_value(ProcessId(0), (), catch_signals)?;
        if !is_first || p.is_dry_run() {
            return anyhow::Ok(serving::run(p, &mut inference, stages, None)?);
        }
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = own.as_mut().map(|(_, engine)| engine);
        let result = serving::run(p, &mut inference, stages, engine);
        if let (Err(why), Some((_, engine))) = (&result, &mut *own) {
            engine.failed = Some(format!("the server has failed: {}", reason(why)).into());
        }
        Ok(result?)
    };
    let of_folder = folder.clone();
    let job = &job.clone().input(move || of_folder.facts()).may_differ(of_front());
    let code = match args.elastic {
        false => mpmd_job::run(job, devices.len(), devices, program),
        true => {
            ensure!(
                devices.iter().all(|count| *count == devices[0]),
                "--elastic: all stages need the same number of devices"
            );
            let (processes, devices) = (devices.len(), devices.iter().sum());
            mpmd_job::run_recovering(job, processes, devices, Elastic::default(), |p, _| program(p))
        }
    };
    if let Some((front, engine)) = own.into_inner().unwrap_or_else(PoisonError::into_inner) {
        engine.end();
        front.drain();
        front.join();
    }
    code
}

/// Returns the ids of the options that process 0 alone uses.
fn of_front() -> Vec<String> {
    let command = HttpArgs::augment_args(Command::new("front"));
    let ids = command.get_arguments().map(|option| option.get_id().as_str());
    // All processes have room for two versions of the weights if there are such folders.
    ids.filter(|id| *id != "allow_weights").map(str::to_owned).collect()
}

/// Starts the front, and returns it with the engine behind it.
fn started(folder: &Folder, http: &HttpArgs, sizes: Sizes) -> anyhow::Result<(Front, Engine)> {
    let (queue, arrivals) = queue(http.limits());
    let model = Model::of(folder, http.model_name.clone(), sizes.positions)?;
    let front = Front::listen(http, model, queue)?;
    let address = front.address();
    say(&match http.description {
        Some(description) => format!("{description} Its chat page: http://{address}/"),
        None => format!("listening on http://{address}"),
    });
    Ok((front, Engine::new(sizes, arrivals)))
}
