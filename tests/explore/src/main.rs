//! Runs random programs with random faults on simulated processes, one job for each seed. The seed
//! decides the program, its faults, the order of all events and the time. So a red seed is a bug
//! report: the same seed gives the same run.
//!
//! `cargo xtask explore` builds and runs this. The main process starts workers, one for each core,
//! which run the jobs. A worker that hangs or dies is replaced.

mod case;
mod child;
mod execute;
mod explore;
mod kernels;
mod program;
mod recovery;
mod shrink;
#[cfg(test)]
mod tests;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// The arguments of the program.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpmd-explore", version)]
struct Arguments {
    /// The first seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Run trainings that lose processes and go on
    #[arg(long)]
    recovery: bool,
    /// Run such trainings in jobs that shrink and grow
    #[arg(long, conflicts_with = "recovery")]
    elastic: bool,
    /// Run each job twice, and compare the logs of all events
    #[arg(long)]
    twice: bool,
    /// Make the job of each red seed smaller, as long as it stays red
    #[arg(long)]
    shrink: bool,
    /// End at the first red seed
    #[arg(long)]
    first: bool,
    /// Steps of the program to leave out
    #[arg(long, value_delimiter = ',', value_name = "STEPS")]
    without: Vec<usize>,
    /// Faults to leave out
    #[arg(long, value_delimiter = ',', value_name = "FAULTS")]
    without_faults: Vec<usize>,
    /// Write the log of all events of the last seed to this file
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Run the seeds in this process, and bind it to a core
    #[arg(long, hide = true, value_name = "CORE")]
    worker: Option<usize>,
}

impl Arguments {
    /// Returns the option that selects the kind of jobs, with a blank before it. Empty for random
    /// programs.
    fn kind(&self) -> &'static str {
        match (self.recovery, self.elastic) {
            (true, _) => " --recovery",
            (_, true) => " --elastic",
            _ => "",
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    match arguments.worker {
        Some(core) => worker::work(&arguments, core),
        None => explore::explore(&arguments),
    }
}
