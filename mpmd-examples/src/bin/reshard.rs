//! Moves a tree of parameters between two meshes with different shapes and numbers of devices. It
//! prints the bytes moved over each kind of link, and checks every value: `cargo run --release
//! --bin reshard`.

use std::process::ExitCode;

use clap::Parser;
use mpmd::DeviceId;
use mpmd::ProcessId;
use mpmd::job::JobArgs;
use mpmd::prelude::*;
use mpmd::random::{Key, uniform_f32};
use mpmd::reshard::{self, Summary};
use mpmd::sharding::Sharding;
use mpmd::sharding::rules::{Registry, Strategy, infer_sharding};
use mpmd::topology::LinkClass;
use mpmd::tree::PrefixTree;

/// Number of devices of the job.
const DEVICES: usize = 8;

/// Move a tree of parameters between two meshes, there and back.
#[derive(Parser)]
#[command(name = "reshard", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Rows and columns of the square matrices; a multiple of 12
    #[arg(long, default_value_t = 1536)]
    width: usize,
}

/// One value `L` for each parameter of a layer: a shape, a sharding or an array.
#[derive(Tree)]
struct TransformerLayer<L> {
    bias: L,
    down: L,
    scale: L,
    up: L,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    mpmd::job::run(&args.job, 4, DEVICES, |p| program(p, &args))
}

fn program(p: &mut Program, args: &Args) -> Result<()> {
    let devices = |range: std::ops::Range<u32>| range.map(DeviceId).collect::<Vec<_>>();
    // Trained on six devices, with shards on all of them. Used on the last four, as two replicas of
    // two devices.
    let train = p.mesh_of(&[("data", 2), ("fsdp", 3)], &devices(0..6))?;
    let serve = p.mesh_of(&[("replica", 2), ("model", 2)], &devices(4..8))?;

    let trained = rules(&[(".*", r#"fsdp(["data", "fsdp"], min_size_to_shard_mb=0)"#)])?;
    let served = rules(&[
        ("up", r#"shard_dim("model", 1)"#),
        ("down|bias", r#"shard_dim("model", 0)"#),
        (".*", "replicate"),
    ])?;

    let shapes = TransformerLayer {
        bias: f32s([args.width]),
        down: f32s([args.width, args.width]),
        scale: f32s([]),
        up: f32s([args.width, args.width]),
    };
    let from = infer_sharding(&shapes, &trained, &train)?;
    let to = infer_sharding(&shapes, &served, &serve)?;
    if p.process() == ProcessId(0) {
        println!("from {train} on devices 0 to 5 to {serve} on devices 4 to 7, bytes by link:");
        print!("{}", report(p, &shapes, &from, &to)?);
    }

    let mut places = shapes.leaves_with_paths().into_iter().zip(from.leaves());
    let layer: TransformerLayer<MpmdArray> = shapes.try_map_ref(&mut |shape: &ShapedArray| {
        let ((path, _), sharding) = places
            .next()
            .ok_or_else(|| Error::kernel("fewer shardings than shapes"))?;
        let key = key(&path);
        p.array_from_fn(shape.clone(), sharding, move |region, mut view| {
            let places = elements(region, view.global().shape());
            view.as_mut_slice::<f32>()?
                .iter_mut()
                .zip(places)
                .for_each(|(x, i)| *x = uniform_f32(key, i));
            Ok(())
        })
    })?;

    let options = MoveOptions::default().donate(true);
    let layer = p.reshard(&layer, PrefixTree::of(&to), options)?;
    let there = proved(&layer)?;
    let layer = p.reshard(&layer, PrefixTree::of(&from), options)?;
    let back = proved(&layer)?;

    println!(
        "process {}: {there} values proved on the second mesh, {back} back on the first",
        p.process()
    );
    Ok(())
}

fn rules(rules: &[(&str, &str)]) -> Result<Strategy> {
    Ok(Strategy::parse(rules, &Registry::default())?)
}

/// Returns a table of the move from `from` to `to`: for each leaf, the number of pieces, and the
/// bytes by class of link.
fn report(
    p: &Program,
    shapes: &TransformerLayer<ShapedArray>,
    from: &TransformerLayer<Sharding>,
    to: &TransformerLayer<Sharding>,
) -> Result<String> {
    let mut text = format!(
        "{:<6} {:<14} {:<24} {:<24} {:>6}",
        "leaf", "shape", "from", "to", "pieces"
    );
    for class in LinkClass::ALL {
        text += &format!(" {:>13}", class.to_string());
    }
    text.push('\n');

    let mut total = [0; 4];
    for (((path, aval), from), to) in shapes
        .leaves_with_paths()
        .into_iter()
        .zip(from.leaves())
        .zip(to.leaves())
    {
        let src = from.layout(aval.shape())?;
        let dst = to.layout(aval.shape())?;
        let plan = reshard::plan(&src, &dst, aval.dtype().size(), p.topology())?;
        let Summary { pieces, bytes, .. } = plan.summary();

        let spec = |sharding: &Sharding| {
            sharding
                .spec()
                .map_or_else(String::new, ToString::to_string)
        };
        text += &format!(
            "{path:<6} {:<14} {:<24} {:<24} {pieces:>6}",
            aval.to_string(),
            spec(from),
            spec(to)
        );
        for (total, bytes) in total.iter_mut().zip(bytes) {
            *total += bytes;
            text += &format!(" {bytes:>13}");
        }
        text.push('\n');
    }

    text += &format!("{:<78}", "bytes in all");
    total
        .iter()
        .for_each(|bytes| text += &format!(" {bytes:>13}"));
    Ok(text + "\n")
}

/// Waits for the arrays, and compares every element on this process with its initial value. Returns
/// the number of elements compared.
///
/// An element that differs is an error.
fn proved(layer: &TransformerLayer<MpmdArray>) -> Result<usize> {
    let mut proved = 0;
    for (path, array) in layer.leaves_with_paths() {
        array.block_until_ready()?;
        if array.is_fully_remote() {
            continue;
        }

        for shard in array.addressable_shards()? {
            let values = shard.data.to_vec::<f32>()?;
            for (value, i) in values.iter().zip(elements(&shard.region, array.shape())) {
                let expected = uniform_f32(key(&path), i);
                if value.to_bits() != expected.to_bits() {
                    let problem = format!(
                        "{path}: element {i} on device {} is {value}, not {expected}",
                        shard.device
                    );
                    return Err(Error::kernel(problem));
                }
            }
            proved += values.len();
        }
    }
    Ok(proved)
}

/// Returns the random key of the leaf at `path`, derived from the bytes of `path`.
fn key(path: &str) -> Key {
    path.bytes()
        .fold(Key(0), |key, byte| key.fold_in(u64::from(byte)))
}

/// Returns the row-major indices of a region's elements in the whole array of shape `shape`, in the
/// region's row-major order.
fn elements(region: &Region, shape: &[usize]) -> Vec<u64> {
    let dims = region.ranges().zip(shape);
    dims.fold(vec![0], |outer, (range, size)| {
        let inner = |base: &u64| {
            let first = base * *size as u64;
            range.clone().map(move |i| first + i as u64)
        };
        outer.iter().flat_map(inner).collect()
    })
}
