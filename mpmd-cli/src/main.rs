//! The `mpmd` command line.

mod bench;
mod check;
mod doctor;
mod draw;
mod plan;
mod run;
mod schedule;
mod trace;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use mpmd_transport::memory::CountingAllocator;

/// Counts only where `mpmd bench` asks it to.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs programs on many processes.
#[derive(Debug, Parser)]
#[command(name = "mpmd", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program as several processes on this machine
    Run(run::Run),
    /// Ask the planners: layouts, chunks, rules, what goes where
    Plan(plan::PlanArgs),
    /// Read what the processes of a traced run have written: what ran when, and who waited for whom
    Trace(trace::TraceArgs),
    /// Draw what ranks did or will do: a page that can be zoomed and asked, or a drawing
    Draw(draw::DrawArgs),
    /// Prove and add up what a program is to do, before it runs
    Check(check::CheckArgs),
    /// Show a schedule: as torch's text, as a table, as data or as a picture
    Schedule(schedule::ScheduleArgs),
    /// Measure what the framework itself costs
    Bench(bench::BenchArgs),
    /// Look at this machine: what it has for transports, and what to do about it
    Doctor(doctor::DoctorArgs),
    /// Read another process's memory and be read
    #[command(name = doctor::READ_MEMORY, hide = true)]
    ReadMemory { pid: u32, address: u64 },
    /// Become a program that ends with this process's parent
    #[command(name = run::EXEC, hide = true)]
    Exec(run::Exec),
    /// End what a launcher has left behind
    #[command(name = run::GUARD, hide = true)]
    Guard,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(run) => run.run(),
        Command::Plan(args) => plan::plan(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Draw(args) => draw::draw(&args),
        Command::Check(args) => check::check(&args),
        Command::Schedule(args) => schedule::schedule(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::ReadMemory { pid, address } => doctor::answer_reader(pid, address),
        Command::Exec(exec) => exec.run(),
        Command::Guard => {
            mpmd_core::launch::guard(std::io::stdin());
            Ok(ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("mpmd: {error:#}");
        ExitCode::FAILURE
    })
}

/// Writes to standard output. Who reads it may have seen enough, and gone.
fn say(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        done => done.context("cannot write to standard output"),
    }
}
