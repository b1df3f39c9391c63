//! `cargo xtask`: the commands for users in the README, and for CI.

#![forbid(unsafe_code)]

mod bench;
mod candle_cuda;
mod commands;
mod explore;
mod fuzz;
mod gpu;
mod packages;
mod program_output;
mod soak;
mod steps;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};

const USAGE: &str = "\
cargo xtask test [--quick]   everything that has to pass, with UCX and without; --quick: format, \
tidy, clippy
                             and unit tests only, without UCX
cargo xtask tidy             the rules on sources alone
cargo xtask fuzz [--inputs N] [--target T]
                             parsers and state machines on N generated inputs (20,000), each \
                             target in a process
                             of its own; T is one of the targets that it prints
cargo xtask explore [--seeds N] [--from S] [--recovery | --elastic] [--shrink] [--twice] [--planted]
                             N random programs with random faults (1,000), each in a \
simulated world that
                             its seed decides; --recovery: trainings that lose processes and go \
on; --elastic: and that
                             shrink and grow; --shrink: makes red ones smaller; \
--twice: compares two runs of each; \
--planted: checks that planted
                             bugs are found
cargo xtask soak --minutes N  long jobs over every transport, whose memory must stay flat; \
then tests of
                             deaths, stops, training and transfers round after round
cargo xtask gpu [--software] [--stage NAME,...] [--limit SECONDS]
                             what needs a graphics processor, in stages with time limits: builds, \
and runs them here;
                             --software: the same on the tests' own driver, small, to try the \
command itself
cargo xtask gpu --pack FOLDER [--candle]
                             builds, and packs programs, tests and this program for a machine \
without cargo; --candle:
                             those with candle's build for CUDA, by the machine's CUDA toolkit
xtask gpu --prebuilt FOLDER [--software] [--stage NAME,...] [--limit SECONDS]
                             runs the stages there, without cargo; results in $OUT, else \
FOLDER/out
xtask gpu --list             the stages and their limits
cargo xtask candle-cuda [ARGUMENTS OF cargo test]
                             candle on CUDA devices: builds it with the tests' own CUDA, and \
runs its tests there
cargo xtask candle-cuda --real
                             builds train_gpt with it by the machine's CUDA toolkit \
(CUDA_HOME, CUDA_COMPUTE_CAP)
cargo xtask bench [--against REV | --peers [--python FILE]] [--pairs N] [--only NAME,...] [--list]
                  [--json FILE] [--at-most RATIO] [--record]
                             a fixed set of measurements; with REV in turns with those of that \
commit, which it
                             builds; --peers: in turns with Open MPI, and with torch and llama.cpp \
if the Python FILE has them; --at-most: exit code 1 if the ratio of a figure is above it, \
also its p10; --record: writes docs/performance.md
cargo xtask help             this text";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => root().and_then(|root| steps::test(root, steps::TestExtent::All)),
        ["test", "--quick"] => root().and_then(|root| steps::test(root, steps::TestExtent::Quick)),
        ["tidy"] => root().and_then(tidy::check),
        ["fuzz", ref rest @ ..] => {
            let Some(options) = fuzz::FuzzOptions::parse(rest) else {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            };
            return ended(root().and_then(|root| fuzz::fuzz(root, &options)));
        }
        ["explore", ref rest @ ..] => {
            return ended(root().and_then(|root| explore::explore(root, rest)));
        }
        ["soak", ref rest @ ..] => {
            let Some(time) = soak::parse(rest) else {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            };
            return ended(root().and_then(|root| soak::soak(root, time)));
        }
        ["gpu", ref rest @ ..] => match gpu::GpuOptions::parse(rest) {
            Ok(options) => return ended(gpu::gpu(root, &options)),
            Err(why) => {
                eprintln!("{why}\n\n{USAGE}");
                return ExitCode::from(2);
            }
        },
        ["candle-cuda", ref rest @ ..] => {
            root().and_then(|root| candle_cuda::candle_cuda(root, rest))
        }
        ["bench", ref rest @ ..] => match bench::BenchOptions::parse(rest) {
            Ok(options) => return ended(root().and_then(|root| bench::bench(root, &options))),
            Err(why) => {
                eprintln!("{why}\n\n{USAGE}");
                return ExitCode::from(2);
            }
        },
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };

    ended(result.map(|()| ExitCode::SUCCESS))
}

fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("\nfailed: {error:#}");
        ExitCode::FAILURE
    })
}

/// Returns the workspace that this program was built from.
fn root() -> anyhow::Result<&'static Path> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask has no folder above it")?;
    if !root.join("Cargo.lock").is_file() {
        bail!(
            "{} is not the workspace any more: run through `cargo xtask`",
            root.display()
        );
    }
    Ok(root)
}
