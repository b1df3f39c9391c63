//! Measures a language model: the rates of a prompt and of replies, or of training.

mod replies;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use mpmd_base::ProcessId;
use mpmd_core::prelude::Program;
use mpmd_launch::JobEnv;
use mpmd_models::Folder;
use serde_json::json;

use crate::case::BenchOutput;
use crate::job::run_as_job;
use crate::options::BenchOptions;

#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    options: BenchOptions,
    /// Folder of a model; default: a Llama of 124 million random weights.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Number of stages, one device each.
    #[arg(long, default_value_t = 1)]
    stages: usize,
    /// Number of processes: one, or as many as stages.
    #[arg(long, default_value_t = 1)]
    processes: usize,
    /// Keep the weights as bf16; sums are in f32.
    #[arg(long)]
    half: bool,
    /// Measure steps of training, in place of prompts and replies.
    #[arg(long, conflicts_with_all = ["half", "prompt", "reply", "clients"])]
    train: bool,
    /// Number of tokens in the prompt that is measured.
    #[arg(long, default_value_t = 512)]
    prompt: usize,
    /// Number of tokens in each reply.
    #[arg(long, default_value_t = 64)]
    reply: usize,
    /// Numbers of clients that are answered at the same time.
    #[arg(long, value_delimiter = ',', default_value = "1,8,16,64")]
    clients: Vec<usize>,
}

/// Measures a model. Starts the job if there are several processes and this one is not in a job.
pub(super) fn model(args: &ModelArgs) -> Result<ExitCode> {
    ensure!(args.stages > 0, "--stages: expected at least 1");
    ensure!(
        args.processes == 1 || args.processes == args.stages,
        "--processes: expected 1 or --stages"
    );
    ensure!(
        args.prompt > 0 && args.reply > 1 && args.clients.iter().all(|clients| *clients > 0),
        "--prompt, --reply, --clients: expected at least 1, and 2 tokens of a reply"
    );
    if args.processes > 1 && JobEnv::from_env()?.is_none() {
        return Ok(ExitCode::from(run_as_job(args.processes, "auto")?));
    }

    let mut p = Program::builder().devices(args.stages).from_env()?;
    run(&mut p, args)?;
    p.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Measures in a job. Process 0 prints the figures.
fn run(p: &mut Program, args: &ModelArgs) -> Result<()> {
    let random = tempfile::tempdir()?;
    let folder = match &args.model {
        Some(path) => Folder::open(path)?,
        None => {
            std::fs::write(random.path().join("config.json"), llama().to_string())?;
            Folder::untrained(random.path(), 0)?
        }
    };
    let cases = match args.train {
        true => training::run(p, &folder, args)?,
        false => replies::run(p, &folder, args)?,
    };
    if p.process() == ProcessId(0) {
        let mut output = BenchOutput::new(args.options.json);
        cases.into_iter().for_each(|case| output.push(case));
        output.end();
    }
    Ok(())
}

/// Returns the config of a Llama of 124 million parameters.
fn llama() -> serde_json::Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "vocab_size": 50257,
    })
}
