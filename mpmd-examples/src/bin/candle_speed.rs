//! Measures candle stages: against candle alone, and ZB-H1 against 1F1B.
//!
//! ```sh
//! cargo run --release --bin candle_speed
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mpmd::candle::nn::{self, Linear, Module};
use mpmd::candle::{self, CandleStage, DType, Device, Tensor, Var, VarBuilder, stage};
use mpmd::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::topology::Mesh;

/// Layers of a stage, their width, and the rows of a microbatch.
const LAYERS: usize = 4;
const WIDTH: usize = 512;
const ROWS: usize = 64;
/// Repetitions; medians are printed.
const ROUNDS: usize = 41;

fn layers(vb: &VarBuilder<'_>) -> candle::Result<Vec<Linear>> {
    (0..LAYERS).map(|layer| nn::linear(WIDTH, WIDTH, vb.pp(layer))).collect()
}

/// Layers of candle_nn itself.
fn plain_layers(vb: &VarBuilder<'_>) -> candle::Result<Vec<candle_nn::Linear>> {
    (0..LAYERS).map(|layer| candle_nn::linear(WIDTH, WIDTH, vb.pp(layer))).collect()
}

fn forward<L: Module>(layers: &[L], x: &Tensor) -> candle::Result<Tensor> {
    layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())
}

fn loss(y: &Tensor) -> candle::Result<Loss<Tensor>> {
    let sum = y.sqr()?.sum_all()?;
    Ok(Loss { weight: sum.ones_like()?.detach(), sum })
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Returns a function that computes loss and gradients with candle alone, with layers of either
/// kind.
fn alone(ours: bool) -> candle::Result<impl FnMut() -> candle::Result<f32>> {
    let vars = candle_nn::VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (own, plain) = (layers(&vb)?, plain_layers(&vb)?);
    let values: Vec<f32> = (0..ROWS * WIDTH).map(|i| (i % 17) as f32 / 17.0).collect();
    Ok(move || {
        // A step gets its inputs as values, and needs their gradient.
        let x = Var::from_slice(&values, (ROWS, WIDTH), &Device::Cpu)?;
        let y = if ours { forward(&own, &x)? } else { forward(&plain, &x)? };
        let sum = loss(&y)?.sum;
        let store = sum.backward()?;
        assert!(vars.all_vars().iter().all(|var| store.get(var).is_some()));
        sum.to_scalar()
    })
}

/// Makes a last stage with layers of either kind.
fn last<L: Module + Send + 'static>(
    new: fn(&VarBuilder<'_>) -> candle::Result<Vec<L>>,
) -> Result<CandleStage<Vec<L>, Tensor, Loss<Tensor>>> {
    stage(move |vb| new(&vb), |layers, x: Tensor, _| loss(&forward(layers, &x)?))
}

type Model = Pipeline<MpmdArray, Loss<MpmdArray>>;

/// Runs a step of `microbatches` microbatches, and waits for its gradients.
fn step(p: &mut Program, model: &mut Model, schedule: &Schedule) -> Result<Duration> {
    let mesh = model.mesh(0).clone();
    let make = |p: &mut Program| {
        let fill = |_: &Region, mut view: ViewMut<'_>| {
            let values = view.as_mut_slice::<f32>()?;
            values.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 17) as f32 / 17.0);
            Ok(())
        };
        p.array_from_fn(f32s([ROWS, WIDTH]), &mesh.replicated(), fill)
    };
    let batch = (0..schedule.microbatches()).map(|_| Ok(Microbatch::new(make(p)?)));
    let batch = batch.collect::<Result<Vec<_>>>()?;
    // Every step follows an update.
    for stage in 0..model.stages() {
        let params = model.params(stage).into_iter().map(|(_, param)| param).collect();
        model.set_params(stage, params)?;
    }
    let start = Instant::now();
    let output = model.train_step(p, schedule, batch)?;
    for (_, gradient) in output.gradients.iter().flatten() {
        gradient.block_until_ready()?;
    }
    let took = start.elapsed();
    p.step_end()?;
    Ok(took)
}

fn shapes() -> MicrobatchShapes<MpmdArray> {
    MicrobatchShapes::new(f32s([ROWS, WIDTH]))
}

fn one<L: Module + Send + 'static>(
    p: &mut Program,
    mesh: &Mesh,
    new: fn(&VarBuilder<'_>) -> candle::Result<Vec<L>>,
) -> Result<Model> {
    // A first stage that passes its input on, so that the measured one has an input gradient.
    let first = stage(
        |vb: VarBuilder<'static>| vb.get(1, "shift"),
        |shift, x: Tensor, _| x.broadcast_add(shift),
    )?;
    let last = last(new)?;
    let (a, b) = (first.init(p, mesh, 0)?, last.init(p, mesh, 0)?);
    let mut model = Pipeline::first(first, mesh, a)?.then(last, mesh, b)?;
    model.probe(p, &shapes())?;
    Ok(model)
}

/// Compares stages with candle alone, `MICROBATCHES` at a time so that the copies of the parameters
/// count once a step, as in training.
fn overhead() -> Result<()> {
    const MICROBATCHES: usize = 8;
    let mut p = Program::builder().alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let mut models = [one(&mut p, &mesh, plain_layers)?, one(&mut p, &mesh, layers)?];
    let failed = |why: candle::candle_core::Error| Error::kernel(why.to_string());
    let (mut plain, mut ours) = (alone(false).map_err(failed)?, alone(true).map_err(failed)?);
    let schedule = Schedule::named("1f1b", 2, MICROBATCHES, None)?;
    let mut times: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..MICROBATCHES).try_for_each(|_| plain().map(drop)).map_err(failed)?;
        times.entry("candle alone").or_default().push(start.elapsed());
        let start = Instant::now();
        (0..MICROBATCHES).try_for_each(|_| ours().map(drop)).map_err(failed)?;
        times.entry("candle alone, layers of mpmd::candle::nn").or_default().push(start.elapsed());
        let [with_plain, with_ours] = &mut models;
        let took = step(&mut p, with_plain, &schedule)?;
        times.entry("stage").or_default().push(took);
        let took = step(&mut p, with_ours, &schedule)?;
        times.entry("stage, layers of mpmd::candle::nn").or_default().push(took);
    }
    println!("{LAYERS} layers of width {WIDTH}, {ROWS} rows, {MICROBATCHES} microbatches:");
    let base = median(times["candle alone"].clone());
    for (name, times) in times {
        let time = median(times);
        println!("{name:42} {time:8.2} ms  {:.3}", time / base);
    }
    p.finish()
}

/// Compares ZB-H1 with 1F1B on two devices.
fn schedules() -> Result<()> {
    const MICROBATCHES: usize = 8;
    let mut p = Program::builder().devices(2).alone()?;
    let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
    let first = stage(|vb| layers(&vb), |layers, x: Tensor, _| forward(layers, &x))?;
    let (first, last) = (first.split_gradients(), last(layers)?.split_gradients());
    let (a, b) = (first.init(&mut p, &meshes[0], 0)?, last.init(&mut p, &meshes[1], 0)?);
    let mut model = Pipeline::first(first, &meshes[0], a)?.then(last, &meshes[1], b)?;
    model.probe(&mut p, &shapes())?;
    let names = ["1f1b", "zb-h1"];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (name, times) in names.iter().zip(&mut times) {
            let schedule = Schedule::named(name, 2, MICROBATCHES, None)?;
            times.push(step(&mut p, &mut model, &schedule)?);
        }
    }
    let [one, zero] = times.map(median);
    println!("2 stages, {MICROBATCHES} microbatches: 1F1B {one:.2} ms, ZB-H1 {zero:.2} ms");
    println!("ratio {:.3}", zero / one);
    p.finish()
}

fn main() -> Result<()> {
    overhead()?;
    schedules()
}
