//! The program `serve`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{bail, ensure};
use clap::{Args as _, Command};
use mpmd::candle::nn::BLOCK;
use mpmd::job::{Elastic, JobArgs, JobPart, at_least, say};
use mpmd::launch::JobEnv;
use mpmd::topology::Mesh;
use mpmd::train::stop::leave_signals_to_process_0;
use mpmd::weights::Subscribing;
use mpmd::{DeviceId, Error, ProcessId, Program};
use mpmd_base::{bytes_text, parse_bytes, variables};
use mpmd_models::{Folder, HeldBytes, Inference, MOST_TOKENS, Room, Stages};
use mpmd_serve::{Engine, Front, FrontSettings, Model, SchedulerSizes, queue};

use crate::chat::ChatArgs;
use crate::division::{DivisionArgs, named_option};
use crate::front::{self, FrontArgs, ServerEnds};
use crate::model;
use crate::weight_type::WeightTypeArg;
use crate::weights::SubscribeArgs;

/// The folder of the demonstration model in the sources. It is not part of the binary.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/mpmd-demo");
const ABOUT: &str = "mpmd-demo is a tiny demonstration model, trained on the guide of mpmd. It \
                     only shows that serving works; --model DIR serves another.";
/// Largest default of `--max-len`, in tokens.
const POSITIONS: usize = 4096;
/// Default limit on a device's memory for keys and values, in bytes.
const CACHE: u64 = 1 << 30;

/// Serve a model from a folder of a model hub, as a pipeline, with the HTTP interface of OpenAI
#[derive(Debug, clap::Parser)]
#[command(name = "serve", version)]
pub struct Serve {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors, or a GGUF file, or
    /// NAME or NAME@REVISION of a model in the cache of the hub; default: a tiny demonstration
    /// model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Folder of an adapter of LoRA, as the library `peft` has it. It is added to the weights of
    /// --model, not to those of --subscribe and /load_weights
    #[arg(long, value_name = "DIR", requires = "model")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    cut: DivisionArgs,
    #[command(flatten)]
    serving: ServeArgs,
    #[command(flatten)]
    front: FrontArgs,
}

/// Runs a server until it is drained. Returns the exit code of the job.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn serve(args: &Serve) -> anyhow::Result<ExitCode> {
    // Before the front listens, so that the first requests are logged, too.
    Program::log_to_stderr();
    let description = args.model.is_none().then_some(ABOUT);
    let folder = match &args.model {
        Some(model) => model::open(model, args.adapter.as_deref())?,
        None => Folder::open(demo()?)?,
    };
    let settings = args.front.settings(description);
    run(&folder, args, &settings)
}

/// Returns the folder of the demonstration model in the sources.
///
/// # Errors
///
/// If the sources from which this program was built are gone.
fn demo() -> anyhow::Result<&'static Path> {
    let folder = Path::new(DEMO);
    ensure!(
        folder.is_dir(),
        "the demonstration model is no longer in {DEMO}, where this program was built: give \
         --model DIR"
    );
    Ok(folder)
}

/// Arguments of a server.
#[derive(Clone, Debug, clap::Args)]
struct ServeArgs {
    /// Largest number of requests that are answered at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least(1))]
    sequences: usize,
    /// Tokens that a prompt and its reply may have; default: as many as the model has positions, at
    /// most 4096. With the rope types `longrope` and `dynamic` all replies depend on it: positions
    /// are scaled for this length
    #[arg(long, value_name = "N", value_parser = at_least(2))]
    max_len: Option<usize>,
    /// Memory of a device of each stage for keys and values; default: enough for all requests, at
    /// most 1GiB unless one needs more
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    cache: Option<u64>,
    /// Largest number of tokens of a pass; a prompt delays the tokens of others by one pass of this
    /// size. Default: by measurement, the smallest with which a token costs hardly more than with
    /// larger ones
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    chunk: Option<usize>,
    /// Type of the weights in memory; sums are in f32 in any case
    #[arg(long, value_enum, default_value = "f32")]
    dtype: WeightTypeArg,
    /// Go on when a process other than the first is lost: its place goes to a spare, and open
    /// requests are computed again from their tokens so far
    #[arg(long)]
    elastic: bool,
    /// Have the first process only answer clients: there is one process more than stages. With
    /// --elastic every process but this one may be lost
    #[arg(long)]
    front: bool,
    /// Seconds for which requests go on with older weights after new ones have come; then they are
    /// computed again with these, from their tokens so far
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    version_grace: u32,
    /// The subscription to the weights of a training.
    #[command(flatten)]
    subscribe: SubscribeArgs,
}

impl ServeArgs {
    /// True if the server may get new weights while it runs.
    fn changes_weights(&self, settings: &FrontSettings) -> bool {
        self.subscribe.subscribe.is_some() || !settings.weight_folders.is_empty()
    }

    /// Returns the sizes of the scheduler for a model. `block` is the number of bytes that a cache
    /// block takes on a device. `memory` is the limit on the cache of a device in bytes, if it is
    /// known.
    fn sizes(
        &self,
        folder: &Folder,
        stages: usize,
        block: u64,
        memory: Option<u64>,
    ) -> anyhow::Result<SchedulerSizes> {
        let most = folder.config().positions();
        let positions = self.max_len.unwrap_or(most.min(POSITIONS));
        ensure!(
            positions <= most,
            "--max-len: expected at most {most}, the positions of the model, found {positions}"
        );

        if let (Some(cache), Some(memory)) = (self.cache, memory)
            && cache > memory
        {
            bail!(
                "--cache: expected at most {}, the memory of this machine, found {}",
                bytes_text(memory),
                bytes_text(cache)
            );
        }

        let one = positions.div_ceil(BLOCK);
        let least = one as u64 * block;
        let all = (one * self.sequences) as u64 * block;
        let cache = self.cache.unwrap_or(CACHE.max(least)).min(all);
        ensure!(
            cache >= least,
            "--cache: expected at least {}, for one sequence of --max-len {positions} tokens, \
             found {}",
            bytes_text(least),
            bytes_text(cache)
        );
        Ok(SchedulerSizes {
            lanes: stages,
            sequences: self.sequences.max(stages),
            blocks: (cache / block.max(1)) as usize,
            chunk: self.chunk.unwrap_or(MOST_TOKENS),
            positions,
        })
    }
}

/// Checks the folder and the arguments, then starts the processes and serves.
fn run(folder: &Folder, args: &Serve, settings: &FrontSettings) -> anyhow::Result<ExitCode> {
    let Serve {
        serving: options,
        cut,
        job,
        ..
    } = args;
    // The caches of other devices are not in the memory of this machine.
    let is_here = match &job.device {
        Some(kinds) => kinds.is_cpu(),
        None => std::env::var_os(variables::DEVICE).is_none(),
    };
    let memory = is_here.then(host_memory).flatten();
    let server = JobServer::new(folder, options, cut, settings, memory)?;
    let devices = server.devices()?;
    if options.front {
        check_processes(job, options.elastic, devices.len())?;
    }
    if cut.show_sharding {
        print!("{}", server.model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        !options.elastic || !options.changes_weights(settings),
        "--subscribe and --allow-weights: a spare has the weights of the start alone, so leave out \
         --elastic"
    );
    settings.check().map_err(front::named)?;
    if options.elastic {
        // Before clients are told of a server.
        ensure!(
            devices.iter().all(|count| *count == devices[0]),
            "--elastic: all stages need the same number of devices"
        );
        job.check_recovering(devices.len(), devices.iter().sum())?;
    }

    let of_hub = || args.model.as_deref().and_then(model::name_of);
    let name = args.front.model_name.clone().or_else(of_hub);
    let part = job.part(devices.len(), devices.clone())?;
    let own = Mutex::new(server.start(part, name, &args.front.chat)?);
    let program = |p: &mut Program| server.run(p, &own);
    let of_folder = folder.clone();
    let job = &job
        .clone()
        .input(move || of_folder.facts())
        .may_differ(of_front());
    let code = match options.elastic {
        false => mpmd::job::run(job, devices.len(), devices, program),
        true => {
            let processes = devices.len();
            let all_devices: usize = devices.iter().sum();
            let elastic = Elastic::default();
            mpmd::job::run_recovering(job, processes, all_devices, elastic, |p, _| program(p))
        }
    };
    if let Some(own) = own.into_inner().unwrap_or_else(PoisonError::into_inner) {
        own.end();
    }
    code
}

/// Checks the number of processes of a job with a front: that of `--processes`, or of a launcher.
fn check_processes(job: &JobArgs, is_elastic: bool, expected: usize) -> anyhow::Result<()> {
    let Some(env) = JobEnv::from_env()? else {
        let found = job.processes.unwrap_or(expected);
        ensure!(
            found == expected,
            "--processes: with --front expected {expected}, one more than stages, found {found}"
        );
        return Ok(());
    };

    // A launcher that knows no spares starts the spare as one of the processes.
    let has_spare = is_elastic && env.spares.is_none() && env.dry_run.is_none();
    let (expected, parts) = match has_spare {
        true => (
            expected + 1,
            "one more than stages, and a spare for --elastic",
        ),
        false => (expected, "one more than stages"),
    };
    let found = env.processes;
    ensure!(
        found == expected,
        "--front: expected a job of {expected} processes, {parts}, found {found}: start \
         {expected}, by `-n {expected}` or {}={expected}",
        variables::WORLD_SIZE
    );
    Ok(())
}

/// A server job: the same on all of its processes.
struct JobServer<'a> {
    folder: &'a Folder,
    options: &'a ServeArgs,
    settings: &'a FrontSettings,
    model: Stages,
    meshes: Vec<Mesh>,
    sizes: SchedulerSizes,
    subscribing: Option<Subscribing>,
}

impl<'a> JobServer<'a> {
    fn new(
        folder: &'a Folder,
        options: &'a ServeArgs,
        cut: &DivisionArgs,
        settings: &'a FrontSettings,
        memory: Option<u64>,
    ) -> anyhow::Result<Self> {
        let stages = cut.stages();
        // The cut depends on the room for keys and values, and the size of a block on the cut.
        let undivided = cut.stages_of(folder, 1, "--max-len")?;
        let undivided = cut.divide(undivided, HeldBytes::default())?;
        let sizes = options.sizes(folder, stages, undivided.block_bytes(), memory)?;
        let mut held = HeldBytes::inference(folder, room(&sizes), options.dtype.is_half());
        if options.changes_weights(settings) {
            // Two versions at a time.
            held.element *= 2;
        }

        let model = cut.stages_of(folder, sizes.positions, "--max-len")?;
        let model = cut.divide(model, held)?;
        let model = model.after(usize::from(options.front));
        let meshes = model.meshes(|stage| stage)?;
        let subscribing = options.subscribe.subscribing()?;
        Ok(Self {
            folder,
            options,
            settings,
            model,
            meshes,
            sizes,
            subscribing,
        })
    }

    /// Returns the number of devices of each process.
    fn devices(&self) -> anyhow::Result<Vec<usize>> {
        let mut devices = self
            .model
            .devices(|stage| stage)
            .map_err(|invalid| named_option(&invalid))?;
        if self.options.front {
            devices.insert(0, 1);
        }
        Ok(devices)
    }

    /// Starts the front on process 0, before the processes of the job meet, so that clients can
    /// already ask for the server's state. The front stays the same in all epochs of a job that
    /// recovers. Returns `None` on other processes.
    fn start(
        &self,
        part: JobPart,
        name: Option<String>,
        chat: &ChatArgs,
    ) -> anyhow::Result<Option<ServerEnds>> {
        match part {
            JobPart::First => Ok(Some(self.listen(name, chat)?)),
            JobPart::Parent => {
                self.settings.check_resources().map_err(front::named)?;
                Ok(None)
            }
            JobPart::Other => {
                if self.options.elastic {
                    // A spare that waits stays, too: open requests may need it while process 0
                    // drains.
                    leave_signals_to_process_0()?;
                }
                Ok(None)
            }
        }
    }

    /// Starts the front, and returns it with its engine.
    fn listen(&self, name: Option<String>, chat: &ChatArgs) -> anyhow::Result<ServerEnds> {
        let (queue, arrivals) = queue(self.settings.waiting);
        let prompts = chat.prompts(self.folder)?;
        let no_chats = prompts.template_fault().map(ToString::to_string);
        let model = Model::of(self.folder, prompts, name, self.sizes.positions)?;
        let front = Front::listen(self.settings, model, queue).map_err(front::named)?;
        let address = front.address();
        if let Some(why) = no_chats {
            say(&format!("no chats, only completions: {why}"));
        }
        say(&match &self.settings.description {
            Some(description) => format!("{description} Its chat page: http://{address}/"),
            None => format!("listening on http://{address}"),
        });

        let grace = Duration::from_secs(self.options.version_grace.into());
        let engine = Engine::new(self.sizes, arrivals).grace(grace);
        let engine = match self.options.chunk {
            Some(_) => engine,
            None => engine.measure_chunk(),
        };
        Ok(ServerEnds { front, engine })
    }

    /// Serves in one epoch of the job. Process 0 answers clients; the others issue the same passes.
    /// Fails if process 0 is a replacement that has no front.
    fn run(&self, p: &mut Program, own: &Mutex<Option<ServerEnds>>) -> anyhow::Result<()> {
        let served = self.serve_epoch(p, own);
        // The others may be threads of this process, which would wait for the lock.
        if let Err(why) = &served
            && p.process() == ProcessId(0)
            && let Some(why) = why.downcast_ref()
            && let Some(own) = &mut *own.lock().unwrap_or_else(PoisonError::into_inner)
        {
            own.engine.fail_with(why);
        }
        served
    }

    fn serve_epoch(&self, p: &mut Program, own: &Mutex<Option<ServerEnds>>) -> anyhow::Result<()> {
        // A launcher passes the signal on to all processes. The front of process 0 drains; the
        // others stay until it has.
        let is_first = p.process() == ProcessId(0);
        if !is_first {
            leave_signals_to_process_0()?;
        }
        if is_first && !p.is_dry_run() {
            // Locked on process 0 alone, which keeps it while it serves: the others may be threads.
            ensure!(
                own.lock().unwrap_or_else(PoisonError::into_inner).is_some(),
                "the process that answers clients is lost, and no other can: the server ends"
            );
        }

        let mut inference = self.inference(p)?;
        let subscribe = |subscribing| inference.subscribe(p, subscribing);
        let _subscription = self.subscribing.clone().map(subscribe).transpose()?;
        // Until now a signal ends the process.
        p.broadcast_value(ProcessId(0), (), || catch_signals(own))?;

        let lanes = self.sizes.lanes;
        if !is_first || p.is_dry_run() {
            return Ok(mpmd_serve::run(p, &mut inference, lanes, None)?);
        }
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = own.as_mut().map(|own| &mut own.engine);
        Ok(mpmd_serve::run(p, &mut inference, lanes, engine)?)
    }

    /// Issues the loading of the weights. Process 0 prints the devices that compute.
    fn inference(&self, p: &mut Program) -> anyhow::Result<Inference> {
        let in_half = self.options.dtype.is_half();
        let mut inference = self
            .model
            .inference(p, &self.meshes, room(&self.sizes), in_half)?;
        let is_told = p.process() == ProcessId(0) && p.epoch() == 1 && !p.is_dry_run();
        if let Some(line) = inference.computed_by(p).filter(|_| is_told) {
            say(&line);
        }
        if self.options.front {
            inference.read_on(p, &Mesh::new(&[("front", 1)], vec![DeviceId(0)])?)?;
        }
        Ok(inference)
    }
}

/// Returns the memory of this machine in bytes. `None` if the system does not tell it.
fn host_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the capacity of the caches for these sizes.
fn room(sizes: &SchedulerSizes) -> Room {
    Room {
        blocks: sizes.blocks,
        sequences: sizes.sequences,
    }
}

/// Drains the server at [signals](mpmd::launch::stop_signals) from now on. Does nothing on
/// processes without the front.
fn catch_signals(own: &Mutex<Option<ServerEnds>>) -> mpmd::Result<()> {
    let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(own) = own.as_mut() else {
        return Ok(());
    };
    own.front
        .catch_signals()
        .map_err(|why| Error::Environment(format!("SIGTERM: {why}")))
}

/// Returns the ids of options that only process 0 uses, so they may differ between processes.
fn of_front() -> Vec<String> {
    let command = FrontArgs::augment_args(Command::new("front"));
    let ids = command
        .get_arguments()
        .map(|option| option.get_id().as_str());
    // All processes have room for two versions of the weights if there are such folders.
    ids.filter(|id| *id != "allow_weights")
        .map(str::to_owned)
        .collect()
}
