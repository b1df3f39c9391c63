//! Trains a model to predict the next byte of a text from the last 16, as a pipeline of any number
//! of stages: `cargo run --release --bin train_mlp -- --processes 2 ~/notes README.md`.

use std::ops::Range;
use std::process::ExitCode;

use clap::Parser;
use mpmd::candle::nn::{self, Embedding, Linear, Module, VarBuilder, loss};
use mpmd::candle::{D, Result, Tensor, stage};
use mpmd::pipeline::{Loss, Pipeline, Schedule};
use mpmd::train::data::{Text, Windows};
use mpmd::train::{AdamW, Run, Trainer};
use mpmd::{ProcessId, Program};
use mpmd_examples::training::{Figures, TrainingArgs};
use mpmd_job::JobArgs;
use mpmd_job::at_least;

/// Number of bytes from which the model predicts the next one.
const CONTEXT: usize = 16;
/// Number of bytes of a window.
const TIME: usize = 64;

/// Train a next-byte model on text, as a pipeline
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    training: TrainingArgs,
    /// Width of a byte's embedding
    #[arg(long, default_value_t = 16, value_parser = at_least(1))]
    width: usize,
    /// Width of the hidden layers
    #[arg(long, default_value_t = 256, value_parser = at_least(1))]
    hidden: usize,
    /// Number of hidden layers, which are divided over the stages
    #[arg(long, default_value_t = 4, value_parser = at_least(1))]
    layers: usize,
    #[command(flatten)]
    job: JobArgs,
}

/// Some layers of the model: those of one stage.
struct Part(Option<Embedding>, Vec<Linear>);

impl Part {
    /// Creates the hidden layers `layers`, and the embedding below layer 0.
    fn new(vb: &VarBuilder, layers: Range<usize>, width: usize, hidden: usize) -> Result<Self> {
        let embedding = (layers.start == 0).then(|| nn::embedding(256, width, vb.pp("bytes")));
        let linear = |i| {
            let inputs = if i == 0 { CONTEXT * width } else { hidden };
            nn::linear(inputs, hidden, vb.pp(format!("layers.{i}")))
        };
        Ok(Self(embedding.transpose()?, layers.map(linear).collect::<Result<_>>()?))
    }

    fn forward(&self, mut x: Tensor) -> Result<Tensor> {
        if let Some(embedding) = &self.0 {
            // The vectors of a byte and of those before it, side by side.
            let bytes = embedding.forward(&x)?.pad_with_zeros(1, CONTEXT - 1, 0)?;
            let shifted = (0..CONTEXT).map(|by| bytes.narrow(1, by, TIME));
            x = Tensor::cat(&shifted.collect::<Result<Vec<_>>>()?, D::Minus1)?;
        }
        self.1.iter().try_fold(x, |x, layer| layer.forward(&x)?.relu())
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let (layers, stages) = (args.layers, args.training.stages);
    anyhow::ensure!(layers >= stages, "--layers {layers} are too few for --stages {stages}");
    // Before any process is started, so that a wrong argument gives one message.
    let (schedule, text) = (args.training.schedule()?, args.training.text()?);
    let ranks = schedule.ranks();
    mpmd_job::run(&args.job, ranks, ranks, |p| train(p, &args, schedule.clone(), &text))
}

fn train(p: &mut Program, args: &Args, schedule: Schedule, text: &Text) -> anyhow::Result<()> {
    let Args { training, width, hidden, layers, .. } = args;
    let (width, hidden, last, seed) = (*width, *hidden, schedule.stages() - 1, training.seed);
    let ranks = p.mesh(&[("rank", schedule.ranks())])?.split("rank")?;
    let mesh = |stage: usize| &ranks[schedule.rank_of(stage)];
    let share = |stage: usize| layers * stage / (last + 1)..layers * (stage + 1) / (last + 1);
    let body = |i: usize| {
        let layers = share(i);
        let new = move |vb| Part::new(&vb, layers.clone(), width, hidden);
        Ok::<_, mpmd::Error>(stage(new, |part, x, _| part.forward(x))?.split_gradients())
    };
    let top = share(last);
    let head = stage(
        move |vb| {
            let head = nn::linear(hidden, 256, vb.pp("head"))?;
            Ok((Part::new(&vb, top.clone(), width, hidden)?, head))
        },
        |(part, head), x, cx| {
            let (logits, targets) = (head.forward(&part.forward(x)?)?, cx.side("targets")?);
            let (sum, weight) = loss::cross_entropy_sum(&logits, &targets, None)?;
            Ok(Loss::new(sum, weight))
        },
    )?;
    let head = head.split_gradients();
    let head_params = head.init(p, mesh(last), seed)?;
    let pipeline = if last == 0 {
        Pipeline::first(head, mesh(0), head_params)?
    } else {
        let part = body(0)?;
        let params = part.init(p, mesh(0), seed)?;
        let mut pipeline = Pipeline::first(part, mesh(0), params)?;
        for i in 1..last {
            let part = body(i)?;
            let params = part.init(p, mesh(i), seed)?;
            pipeline = pipeline.then(part, mesh(i), params)?;
        }
        pipeline.then(head, mesh(last), head_params)?
    };

    let mut trainer =
        Trainer::new(p, pipeline, schedule, AdamW::default())?.rate(training.rate()).seed(seed);
    let first = p.process() == ProcessId(0) && !p.is_dry_run();
    let figures = first.then(|| {
        let windows = (training.rows, TIME);
        Figures::start(p, &trainer, text, windows, training.losses_out.as_ref())
    });
    let mut figures = figures.transpose()?;
    let run = Run::steps(training.steps as u64)
        .on_step(|report| figures.iter_mut().for_each(|figures| figures.step(report)));
    let windows = Windows::new(text, TIME, training.rows)?;
    let outcome = trainer.run(p, run, &windows)?;
    figures.map_or(Ok(()), |figures| figures.finish(text, &outcome))
}
