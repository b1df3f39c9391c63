//! The program `serve`.

use std::process::ExitCode;

use anyhow::ensure;
use mpmd::candle::nn::BLOCK;
use mpmd::train::stop::StopFlag;
use mpmd::{ProcessId, Result};
use mpmd_base::{bytes_text, parse_bytes};
use mpmd_job::{JobArgs, at_least, say};
use mpmd_models::generate::WeightType;
use mpmd_models::{CutArgs, Folder, Held, Room, Stages};

use crate::engine::{self, Engine};
use crate::http::{Front, HttpArgs};
use crate::model::Model;
use crate::queue::queue;
use crate::scheduler::Sizes;

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
    /// most 4096
    #[arg(long, value_name = "N", value_parser = at_least(2))]
    pub max_len: Option<usize>,
    /// Memory of a device of each stage for keys and values; default: enough for all requests, at
    /// most 1GiB unless one needs more
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub cache: Option<u64>,
    /// Largest number of tokens of a pass; a prompt delays the tokens of others by one pass of this
    /// size
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least(1))]
    pub chunk: usize,
    /// Type of the weights in memory; sums are in f32 in any case
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: WeightType,
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
        Ok(Sizes { lanes: stages, sequences, blocks, chunk: self.chunk, positions })
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
    let model = model.cut(cut, Held::inference(folder, room, in_half))?;
    let (devices, meshes) = (model.devices(|stage| stage)?, model.meshes(|stage| stage)?);
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    http.check()?;
    mpmd_job::run(job, stages, devices, |p| {
        // A launcher passes the signal on to all processes. The front of process 0 drains; the others
        // stay until it has.
        if p.process() != ProcessId(0) {
            StopFlag::install()?;
        }
        let mut inference = model.inference(p, &meshes, room, in_half)?;
        let mut own = None;
        let start = || {
            let (queue, arrivals) = queue(http.limits());
            let facts = Model::of(folder, http.model_name.clone(), sizes.positions)
                .and_then(|model| Front::start(http, model, queue));
            let front = facts.map_err(|why| mpmd::Error::Environment(format!("{why:#}")))?;
            say(&format!("listening on http://{}", front.address()));
            own = Some((front, Engine::new(sizes, arrivals)));
            Ok(())
        };
        p.broadcast_value(ProcessId(0), (), start)?;
        let engine = own.as_mut().map(|(_, engine)| engine);
        let result: Result<()> = engine::run(p, &mut inference, stages, engine);
        if let Some((front, engine)) = own {
            // If it has failed, open requests do, too.
            drop(engine);
            front.drain();
            front.join();
        }
        anyhow::Ok(result?)
    })
}
