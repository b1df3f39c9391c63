//! Trains a model of two stages on text: `cargo run --release --bin quickstart`. Under `mpmd run
//! -n 2` each stage is in a process of its own.

use mpmd::candle::nn::{self, Mask, Module, loss};
use mpmd::candle::{D, Tensor, stage};
use mpmd::pipeline::{Loss, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::train::{AdamW, Rate, Run, Trainer, data};

const WIDTH: usize = 32;
const TIME: usize = 64;

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
                let start = nn::Init::Randn {
                    mean: 0.0,
                    stdev: 0.1,
                };
                let places = vb.get_with_hints((TIME, WIDTH), "places", start)?;
                let qkv = nn::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?;
                Ok((nn::embedding(256, WIDTH, vb.pp("bytes"))?, places, qkv))
            },
            |(bytes, places, qkv), x: Tensor, _| {
                let x = bytes.forward(&x)?.broadcast_add(places)?;
                let qkv = qkv.forward(&x)?.unsqueeze(1)?.chunk(3, D::Minus1)?;
                x + nn::attention(&qkv[0], &qkv[1], &qkv[2], Mask::Causal, 0.177)?.squeeze(1)?
            },
        )?;
        // Stage 1: two linear layers, the head and the loss.
        let upper = stage(
            |vb| {
                let up = nn::linear(WIDTH, 4 * WIDTH, vb.pp("up"))?;
                let down = nn::linear(4 * WIDTH, WIDTH, vb.pp("down"))?;
                Ok((up, down, nn::linear(WIDTH, 256, vb.pp("head"))?))
            },
            |(up, down, head), x: Tensor, cx| {
                let x = (&x + down.forward(&up.forward(&x)?.gelu()?)?)?;
                let targets = cx.side("targets")?;
                let (sum, weight) = loss::cross_entropy_sum(&head.forward(&x)?, &targets, None)?;
                Ok(Loss::new(sum, weight))
            },
        )?;
        let (a, b) = (lower.init(p, &meshes[0], 0)?, upper.init(p, &meshes[1], 0)?);
        let pipeline = Pipeline::first(lower, &meshes[0], a)?.then(upper, &meshes[1], b)?;

        let windows = data::Windows::new(&data::TextBytes::of_this_repository()?, TIME, 4)?;
        let schedule = Schedule::one_f_one_b(2, 4)?;
        let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
        let run = Run::steps(200).evaluate_every(100);
        let outcome = trainer.rate(Rate::Constant(5e-3)).run(p, run, &windows)?;
        if p.process().index() == 0 {
            println!(
                "{:?} nats per held-out byte after {}",
                outcome.evaluation, outcome.steps
            );
        }
        Ok(())
    })
}
