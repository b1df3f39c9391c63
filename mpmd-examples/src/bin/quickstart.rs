//! Trains a candle model of two stages on text, and evaluates it: `cargo run --release --bin
//! quickstart`. Under `mpmd run -n 2` each stage is in a process of its own.

use mpmd::candle::nn::{self, Module, loss};
use mpmd::candle::{Tensor, stage};
use mpmd::pipeline::{Loss, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::train::data::{Text, Windows};
use mpmd::train::{AdamW, Rate, Run, Trainer};

/// Bytes from which the model predicts the next one.
const CONTEXT: usize = 16;
const WIDTH: usize = 128;

fn main() -> Result<()> {
    Program::builder().devices(2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let lower = stage(
            |vb| {
                let embedding = nn::embedding(256, 16, vb.pp("embedding"))?;
                Ok((embedding, nn::linear(CONTEXT * 16, WIDTH, vb.pp("lower"))?))
            },
            |(embedding, linear), bytes: Tensor, _| {
                linear.forward(&embedding.forward(&bytes)?.flatten_from(1)?)?.relu()
            },
        )?;
        let upper = stage(
            |vb| {
                let linear = nn::linear(WIDTH, WIDTH, vb.pp("upper"))?;
                Ok((linear, nn::linear(WIDTH, 256, vb.pp("head"))?))
            },
            |(linear, head), x: Tensor, cx| {
                let logits = head.forward(&linear.forward(&x)?.relu()?)?;
                let (sum, weight) = loss::cross_entropy_sum(&logits, &cx.side("targets")?, None)?;
                Ok(Loss { sum, weight })
            },
        )?;
        let (a, b) = (lower.init(p, &meshes[0], 0)?, upper.init(p, &meshes[1], 0)?);
        let pipeline = Pipeline::first(lower, &meshes[0], a)?.then(upper, &meshes[1], b)?;

        let text = Text::read(&["README.md", "docs/guide"])?;
        let data = Windows::last_byte(&text, CONTEXT, 64)?;
        let schedule = Schedule::one_f_one_b(2, 4)?;
        let mut trainer =
            Trainer::new(p, pipeline, schedule, AdamW::default())?.rate(Rate::Constant(3e-3));
        let outcome = trainer.run(p, &Run::steps(300).evaluate_every(100), &data)?;
        if p.process().index() == 0 {
            println!("held-out loss: {:.4} nats per byte", outcome.evaluation.unwrap_or(f64::NAN));
        }
        Ok(())
    })
}
