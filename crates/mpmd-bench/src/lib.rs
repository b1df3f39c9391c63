//! `mpmd bench`: measures the costs of the framework itself on this machine.
//!
//! Every case is repeated. The median is the figure to quote; p10 and p90 show the noise of the
//! machine.

#![forbid(unsafe_code)]

mod case;
mod direct;
mod dispatch;
mod host;
mod job;
mod memcpy;
mod model;
mod options;
mod p2p;
mod reshard;
mod serve;
mod weights;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure the costs of the framework.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// The time to issue a `jit` call: empty, with 64 leaves, and on a process without a part in
    /// it.
    Dispatch(dispatch::DispatchArgs),
    /// Arrays between two processes: latency and bandwidth, 8 bytes to 256 MiB.
    P2p(p2p::P2pArgs),
    /// `device_put` between shardings over four devices each, in one process and over several.
    Reshard(reshard::ReshardArgs),
    /// Versions of arrays from two processes to two others, in another layout and as bf16.
    Weights(weights::WeightsArgs),
    /// A server of a language model with the interface of OpenAI: tokens per second, times to the
    /// first token and between tokens.
    Serve(serve::BenchServeArgs),
    /// A language model by the server's engine, without HTTP: the rates of a prompt and of replies.
    Model(model::ModelArgs),
    /// Facts of a CUDA driver, without the framework: times of memory, events and copies, and the
    /// objects that another process can open.
    Probe(direct::ProbeArgs),
}

/// Runs a benchmark and prints its figures. Benchmarks of several processes start the running
/// program again, as `mpmd bench` with the same arguments.
///
/// # Errors
///
/// If the options do not fit together, or a measurement fails.
pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    match &args.what {
        BenchCommand::Dispatch(args) => dispatch::dispatch(args),
        BenchCommand::P2p(args) => p2p::p2p(args),
        BenchCommand::Reshard(args) => reshard::reshard(args),
        BenchCommand::Weights(args) => weights::weights(args),
        BenchCommand::Serve(args) => serve::serve(args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Model(args) => model::model(args),
        BenchCommand::Probe(args) => direct::probe(args).map(|()| ExitCode::SUCCESS),
    }
}
