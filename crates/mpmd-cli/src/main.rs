//! The `mpmd` command line.

#![forbid(unsafe_code)]

mod add;
mod check;
mod doctor;
mod draw;
mod files;
mod new;
mod plan;
mod run;
mod schedule;
mod top;
mod trace;
mod trace_events;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mpmd_programs::{finetune, generate, serve, train_and_serve};

/// Runs programs on many processes.
#[derive(Debug, Parser)]
#[command(name = "mpmd", version)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Write a small program to begin with: a package of one file, with a test
    New(new::NewArgs),
    /// Run a program as several processes on this machine
    Run(run::RunArgs),
    /// Show the activity of the processes of a running job, refreshed every second, or trace them
    Top(top::TopArgs),
    /// Ask the planners: layouts, chunks, rules, resharding
    Plan(plan::PlanArgs),
    /// Read the files of a traced run: the time of each operation, and the waits between processes
    Trace(trace::TraceArgs),
    /// Draw the losses of trainings over their steps, from their files of metrics
    Draw(draw::DrawArgs),
    /// Prove that a program is correct and add up its costs, before it runs
    Check(check::CheckArgs),
    /// Show a schedule: as torch's text, as a table, as data or for Perfetto
    Schedule(schedule::ScheduleArgs),
    /// Measure the costs of the framework itself
    Bench(mpmd_bench::BenchArgs),
    /// Examine this machine: the transports that it supports, and how to fix those that fail
    Doctor(doctor::DoctorArgs),
    /// Train or score a model from a folder of a model hub, as a pipeline
    Finetune(Box<finetune::Finetune>),
    /// Continue a text by a model from a folder of a model hub, as a pipeline
    Generate(Box<generate::Generate>),
    /// Serve a model from a folder of a model hub, as a pipeline, with the HTTP interface of OpenAI
    Serve(Box<serve::Serve>),
    /// Train a model on texts and serve it at the same time
    TrainAndServe(Box<train_and_serve::TrainAndServe>),
    /// Become a program that ends with this process's parent
    #[command(name = mpmd_launch::EXEC, hide = true)]
    Exec(run::Exec),
    /// End the processes that a launcher has left behind
    #[command(name = run::GUARD, hide = true)]
    Guard,
}

fn main() -> ExitCode {
    mpmd_launch::log_to_stderr();
    mpmd_launch::end_with_stdout();

    let done = match Cli::parse().command {
        CliCommand::New(args) => new::new(&args),
        CliCommand::Run(run) => run.run(top::find::process_of_job),
        CliCommand::Top(args) => top::top(&args),
        CliCommand::Plan(args) => plan::plan(&args),
        CliCommand::Trace(args) => trace::trace(&args),
        CliCommand::Draw(args) => draw::draw(&args),
        CliCommand::Check(args) => check::check(&args),
        CliCommand::Schedule(args) => schedule::schedule(&args),
        CliCommand::Bench(args) => mpmd_bench::bench(&args),
        CliCommand::Doctor(args) => doctor::doctor(&args),
        CliCommand::Finetune(args) => finetune::finetune(&args),
        CliCommand::Generate(args) => generate::generate(&args),
        CliCommand::Serve(args) => serve::serve(&args),
        CliCommand::TrainAndServe(args) => train_and_serve::train_and_serve(&args),
        CliCommand::Exec(exec) => exec.run(),
        CliCommand::Guard => {
            mpmd_launch::guard(std::io::stdin());
            Ok(ExitCode::SUCCESS)
        }
    };

    done.unwrap_or_else(|error| {
        files::complain(&error);
        ExitCode::FAILURE
    })
}
