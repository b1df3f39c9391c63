//! Moves arrays between two stages on two meshes: `cargo run -p mpmd-examples --no-default-features
//! --bin basic`, which builds no candle. With `--device cuda` the arrays are on GPUs, but its
//! closures still compute on the host.

use std::process::ExitCode;

use clap::Parser;
use mpmd::prelude::*;

/// Add one on devices 0 to 3, double on devices 4 to 7, and print the results of each process.
#[derive(Parser)]
#[command(name = "basic", version)]
struct Args {
    #[command(flatten)]
    job: mpmd::job::JobArgs,
    /// Rows of the arrays, a multiple of 4
    #[arg(long, default_value_t = 512)]
    rows: usize,
    /// Columns of the arrays
    #[arg(long, default_value_t = 4096)]
    columns: usize,
    /// Number of repetitions
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    mpmd::job::run(&args.job, 2, 8, |p| program(p, &args))
}

fn program(p: &mut Program, args: &Args) -> Result<()> {
    let stages = p.mesh(&[("stage", 2), ("data", 4)])?.split("stage")?;
    let [front, back] = [&stages[0], &stages[1]].map(|mesh| mesh.sharding(spec!["data"]));
    let add_one = p
        .jit(elementwise(|x: f32| x + 1.0))
        .on(&stages[0])
        .outputs(&front)
        .build()?;
    let double = p
        .jit(elementwise(|x: f32| x * 2.0))
        .on(&stages[1])
        .outputs(&back)
        .build()?;

    let shape = f32s([args.rows, args.columns]);
    let a = p.array_from_fn(shape.clone(), &front, |_, mut a| Ok(a.fill(0.0f32)?))?;
    let b = p.array_from_fn(shape, &front, |_, mut b| Ok(b.fill(1.0f32)?))?;

    for round in 0..args.rounds {
        // Both chains are issued before the program waits: `b` is computed while `a` is moving.
        let mut both_stages = |x: &MpmdArray| {
            let x = add_one.call(p, x.clone())?;
            let x = p.device_put(&x, &back)?;
            double.call(p, x)
        };
        let a2 = both_stages(&a)?;
        let b2 = both_stages(&b)?;
        println!(
            "process {}, round {round}: a2 {}",
            p.process(),
            equal(&a2, 2.0)?
        );
        println!(
            "process {}, round {round}: b2 {}",
            p.process(),
            equal(&b2, 4.0)?
        );
        p.step_end()?;
    }
    Ok(())
}

/// Waits for an array, and checks that every element on this process equals `expected`. An element
/// that differs is an error.
///
/// Returns a description of the rows on this process, or says that the array is on other processes.
fn equal(x: &MpmdArray, expected: f32) -> Result<String> {
    if x.is_fully_remote() {
        return Ok(format!("is a handle: {} on other processes", x.aval()));
    }

    let mut places = Vec::new();
    for shard in x.addressable_shards()? {
        let place = format!(
            "rows {:?} on device {}",
            shard.region.range(0),
            shard.device
        );
        if let Some(value) = shard
            .data
            .as_slice::<f32>()?
            .iter()
            .find(|value| **value != expected)
        {
            return Err(Error::kernel(format!(
                "{place}: {value} instead of {expected}"
            )));
        }
        places.push(place);
    }

    Ok(format!(
        "is {expected:?} everywhere in {}",
        places.join(", ")
    ))
}
