//! Trains a model of two stages on text: `cargo run --release --bin quickstart`. Under `mpmd run
//! -n 2` each stage is in a process of its own.

use mpmd::candle::nn::{self, Mask, Module, loss};
use mpmd::candle::{D, Tensor, stage};
use mpmd::pipeline::{Loss, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::train::{AdamW, Rate, Run, Trainer, data};

const WIDTH: usize = 32;

fn main() -> Result<()> {
    if std::env::args().len() > 1 {
        println!("usage: quickstart, without arguments: trains a small model on text");
        return Ok(());
    }
    Program::builder().devices(2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;

        // Stage 0: bytes to vectors, then causal attention.
        let lower = stage(
            |vb| {
                let bytes = nn::embedding(256, WIDTH, vb.pp("bytes"))?;
                Ok((bytes, nn::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?))
            },
            |(bytes, qkv), x: Tensor, _| {
                let x = bytes.forward(&x)?;
                let qkv = qkv.forward(&x)?.unsqueeze(1)?.chunk(3, D::Minus1)?;
                let scale = 1.0 / (WIDTH as f64).sqrt();
                x + nn::attention(&qkv[0], &qkv[1], &qkv[2], Mask::Causal, scale)?.squeeze(1)?
            },
        )?;
        // Stage 1: a hidden layer, the head and the loss.
        let upper = stage(
            |vb| {
                let hidden = nn::linear(WIDTH, 4 * WIDTH, vb.pp("hidden"))?;
                Ok((hidden, nn::linear(4 * WIDTH, 256, vb.pp("head"))?))
            },
            |(hidden, head), x: Tensor, cx| {
                let logits = head.forward(&hidden.forward(&x)?.gelu()?)?;
                let (sum, weight) = loss::cross_entropy_sum(&logits, &cx.side("targets")?, None)?;
                Ok(Loss::new(sum, weight))
            },
        )?;
        let (a, b) = (lower.init(p, &meshes[0], 0)?, upper.init(p, &meshes[1], 0)?);
        let pipeline = Pipeline::first(lower, &meshes[0], a)?.then(upper, &meshes[1], b)?;

        let windows = data::Windows::new(&data::TextBytes::of_this_repository()?, 64, 4)?;
        let trainer = Trainer::new(p, pipeline, Schedule::one_f_one_b(2, 4)?, AdamW::default())?;
        let run = Run::steps(200).evaluate_every(100);
        let outcome = trainer.rate(Rate::Constant(5e-3)).run(p, run, &windows)?;
        if let (0, Some(loss)) = (p.process().index(), outcome.evaluation) {
            println!("held-out loss: {loss} nats per byte");
        }
        Ok(())
    })
}
