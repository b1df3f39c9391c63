//! Measures versions of arrays from two processes, each with some of the leaves, to two others,
//! each with a half of every leaf, as bf16; beside plain copies of as many bytes as arrive.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use mpmd_base::{DeviceId, ProcessId};
use mpmd_core::MpmdArray;
use mpmd_core::prelude::{Program, spec};
use mpmd_core::weights::{Publication, Subscribing, WantedLeaf};
use mpmd_launch::JobEnv;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::Sharding;
use mpmd_rendezvous::Token;

use crate::case::{BenchOutput, Case};
use crate::job::run_as_job;
use crate::memcpy;
use crate::options::BenchOptions;

/// Number of processes of the job: two publish, and two subscribe.
const PROCESSES: usize = 4;
/// Shape of a leaf.
const SHAPE: [usize; 2] = [1024, 2048];
/// Time limit for a version to arrive.
const LONGEST: Duration = Duration::from_secs(120);

#[derive(Args, Clone, Debug)]
pub(crate) struct WeightsArgs {
    #[command(flatten)]
    options: BenchOptions,
    /// The transport of the versions: `shm` or `tcp`.
    #[arg(long, default_value = "shm")]
    transport: String,
    /// Size of all f32 arrays in MiB, a multiple of 16.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Share of the elements that change from version to version, where only these are sent.
    #[arg(long)]
    changed: Option<f64>,
}

/// Measures the time from the call that publishes a version until all processes have the whole
/// version. Starts the job if this process is not in one.
pub(super) fn weights(args: &WeightsArgs) -> Result<ExitCode> {
    ensure!(
        args.mib > 0 && args.mib.is_multiple_of(16),
        "--mib: expected a multiple of 16"
    );
    if JobEnv::from_env()?.is_none() {
        return Ok(ExitCode::from(run_as_job(PROCESSES, "auto")?));
    }
    let mut p = Program::builder().devices(PROCESSES).from_env()?;
    measure(&mut p, args)?;
    p.finish()?;
    Ok(ExitCode::SUCCESS)
}

fn measure(p: &mut Program, args: &WeightsArgs) -> Result<()> {
    let token = p.broadcast_value(ProcessId(0), String::new(), || {
        let token = Token::random().map_err(|why| mpmd_core::Error::kernel(why.to_string()))?;
        Ok(token.to_hex())
    })?;
    let token: Token = token.parse()?;

    let count = args.mib >> 3;
    let leaves = tree(p, count, 0, args.changed)?;
    let publication = Publication::new("bench", token.clone()).dtype(DType::Bf16);
    let mut publisher = p.publisher(publication.changes(args.changed.is_some()), &leaves)?;
    let address = publisher.address().context("no address")?.to_string();

    let halves = p.mesh_of(&[("tensor", 2)], &[DeviceId(2), DeviceId(3)])?;
    let wanted = (0..count).map(|leaf| {
        let spec = if leaf % 2 == 0 {
            spec!["tensor"]
        } else {
            spec![None, "tensor"]
        };
        let aval = ShapedArray::new(&SHAPE, DType::Bf16);
        WantedLeaf::new(leaf.to_string(), aval, halves.sharding(spec))
    });

    let subscribing = Subscribing::new("bench", address, token)
        .transport(&args.transport)
        .changes(args.changed.is_some());
    let mut subscription = p.subscribe(subscribing, wanted.collect())?;
    let mut times = Vec::new();
    let mut bytes = 0;
    // The first versions find new memory.
    for version in 1..=args.options.repeats as u64 + 3 {
        let leaves = tree(p, count, version, args.changed)?;
        leaves
            .iter()
            .try_for_each(|leaf| leaf.block_until_ready().map(drop))?;

        // All processes begin together.
        p.broadcast_value(ProcessId(0), (), || Ok(()))?;
        let start = Instant::now();
        publisher.publish(version, &leaves)?;
        let whole = || Ok(subscription.wait(version, LONGEST).is_some());
        let arrived = p.broadcast_value(ProcessId(0), false, whole)?;
        let time = start.elapsed();
        ensure!(arrived, "version {version}: {:?}", subscription.state());

        if version > 3 {
            times.push(time);
        }
        _ = subscription.next(p)?;
        bytes = subscription.state().bytes;
    }

    // Those of the subscriber's processes: the last two.
    let on_all: u64 = p.gather_value(0, || Ok(bytes))?[2..].iter().sum();

    if p.process() == ProcessId(0) {
        show(args, on_all, times);
    }

    // The others wait while process 0 copies.
    p.broadcast_value(ProcessId(0), (), || Ok(()))?;
    drop((subscription, publisher));
    Ok(())
}

/// Prints the times of versions beside those of a memory copy. `moved` is the number of bytes of a
/// version that the subscribers have received.
fn show(args: &WeightsArgs, moved: u64, times: Vec<Duration>) {
    let all = (args.mib << 20) / 2;
    let percent = 100.0 * moved as f64 / all as f64;
    let what = format!(
        "{} MiB of f32 as bf16, {}, {percent:.1} % of its bytes",
        args.mib,
        { &args.transport }
    );
    let one = memcpy::plain(64 << 20, 1, args.options.repeats);

    let mut cases = BenchOutput::new(args.options.json);
    cases.push(Case::bandwidth("version", what, all, times).beside(&one));
    cases.push(one);
    cases.push(memcpy::plain(64 << 20, 2, args.options.repeats));
    cases.end();
}

/// Returns the leaves of a version: even ones on the first device, odd ones on the second.
fn tree(
    p: &mut Program,
    count: usize,
    version: u64,
    changed: Option<f64>,
) -> mpmd_core::Result<Vec<MpmdArray>> {
    let most = changed.map(|share| (share * f64::from(u32::MAX)) as u32);
    let leaf = |leaf: usize| {
        let on = Sharding::single_device(DeviceId((leaf % 2) as u32));
        p.array_from_fn(
            ShapedArray::new(&SHAPE, DType::F32),
            on,
            move |_, mut view| {
                for (place, value) in view.as_mut_slice::<f32>()?.iter_mut().enumerate() {
                    *value = element((leaf * SHAPE[0] * SHAPE[1] + place) as u64, version, most);
                }
                Ok(())
            },
        )
    };
    (0..count).map(leaf).collect()
}

/// Returns the value of an element in a version. With `most`, the element changes in a version only
/// if a hash of its index and the version is below `most`.
fn element(place: u64, version: u64, most: Option<u32>) -> f32 {
    let mixed = |version: u64| {
        let x = (place ^ version << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
    };
    let is_own = |version: &u64| most.is_none_or(|most| mixed(*version) < most);
    let version = (1..=version).rev().find(is_own).unwrap_or(0);
    f32::from_bits(0x3f80_0000 | mixed(version ^ 0x55) >> 9)
}
