//! Models on CUDA devices. `cargo xtask candle-cuda` runs these tests on the driver in software.

#![cfg(feature = "candle-cuda")]

#[path = "all/folders.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod folders;
#[path = "all/given.rs"]
mod given;

use mpmd::pipeline::Schedule;
use mpmd::prelude::*;
use mpmd::topology::{DeviceKind, Mesh};
use mpmd::train::Rate;
use mpmd::train::data::Data as _;
use mpmd::train::data::MicrobatchPlace;
use mpmd_models::{Sampling, Stages, trainer};

use folders::{expected, open};
use given::{Given, args, set_lora};

/// Test folders of families without experts. Together they have all other parts of a decoder.
const DENSE: [&str; 8] = [
    "plain",
    "llama3",
    "qwen3-window",
    "gemma2",
    "olmo2",
    "phi3-window",
    "gpt2",
    "stablelm",
];
/// Number of training steps. It is small since the CUDA driver in software is slow.
const STEPS: u64 = 3;

/// Runs a program on two CUDA devices, one for each of two stages.
fn on_cuda<T>(program: impl FnOnce(&mut Program, &[Mesh]) -> Result<T>) -> T {
    let mut p = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .devices(2)
        .alone()
        .unwrap();
    let meshes = p.mesh(&[("stage", 2)]).unwrap().split("stage").unwrap();
    let value = program(&mut p, &meshes).unwrap();
    p.finish().unwrap();
    value
}

/// Returns the losses of the first steps of a training.
fn losses(name: &str, more: &str) -> Vec<f64> {
    let (folder, expected) = (open(name), expected(name));
    let args = args(&format!("--weight-decay {} {more}", expected.decay));
    let given = Given(expected.windows);
    on_cuda(|p, meshes| {
        let schedule = Schedule::named("zb-h1", 2, given.0[0].len(), None)?;
        let model = Stages::new(&folder, 2, given.0[0][0][0].len())?.lora(args.lora(), 0);
        let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?
            .rate(Rate::Constant(expected.rate));
        assert_eq!(trainer.computed_by(p), "CUDA devices compute all passes");
        set_lora(p, trainer.pipeline_mut())?;
        let mut losses = Vec::new();
        for step in 1..=STEPS {
            let one = |m| {
                given.training(
                    p,
                    meshes,
                    MicrobatchPlace::new(0, step, m, given.0[0].len()),
                )
            };
            let microbatches = (0..given.0[0].len()).map(one).collect::<Result<Vec<_>>>()?;
            losses.push(trainer.step(p, microbatches)?.read()?.loss);
        }
        Ok(losses)
    })
}

fn compare(name: &str, found: &[f64], expected: &[f64], far: f64) {
    assert_eq!(found.len() as u64, STEPS);
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() < far,
            "{name}, step {step}: {found}, not {expected}"
        );
    }
}

#[test]
fn training_on_cuda_devices_equals_that_of_torch() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    for name in DENSE {
        compare(name, &losses(name, ""), &expected(name).losses, 1e-3);
    }
    let lora = losses("plain", "--lora 2 --alpha 6");
    compare(
        "plain with LoRA",
        &lora,
        &expected("plain").lora_losses,
        1e-3,
    );
}

#[test]
fn training_in_bf16_on_cuda_devices_is_near() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    for name in ["plain", "gemma2", "gpt2"] {
        compare(
            name,
            &losses(name, "--compute bf16"),
            &expected(name).losses,
            0.05,
        );
    }
}

/// Generates tokens greedily on two CUDA devices.
fn generated(name: &str, most: usize, in_half: bool) -> Vec<u32> {
    let (folder, prompt) = (open(name), expected(name).prompt);
    on_cuda(|p, meshes| {
        let stages = Stages::new(&folder, 2, prompt.len() + most)?;
        let mut generator = stages.generator(p, meshes, in_half)?;
        generator.generate(p, &prompt, &Sampling::default(), most, |_, _| Ok(false))
    })
}

#[test]
fn tokens_of_cuda_devices_equal_those_of_transformers() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let products = || softcuda::calls("cublasGemmStridedBatchedEx").unwrap_or(0);
    for name in DENSE {
        let before = products();
        assert_eq!(
            generated(name, 12, false),
            expected(name).greedy[..12],
            "{name}"
        );
        assert!(products() > before, "{name}: the devices multiply");
    }
    // Experts are computed on the host.
    assert_eq!(
        generated("mixtral", 4, false),
        expected("mixtral").greedy[..4]
    );
    let halves = generated("plain", 4, true);
    assert_eq!(
        halves[0],
        expected("plain").greedy[0],
        "the first token in bf16"
    );
}

/// Returns the line with the devices that a generator reports, with `devices` devices for a stage.
fn computed_by(name: &str, devices: usize) -> Option<String> {
    let folder = open(name);
    let builder = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .devices(devices);
    let mut p = builder.alone().unwrap();
    let stages = Stages::new(&folder, 1, 8)
        .unwrap()
        .tensor_parallel(&[devices])
        .unwrap();
    let meshes = stages.meshes(|stage| stage).unwrap();
    let line = stages
        .generator(&mut p, &meshes, false)
        .unwrap()
        .computed_by(&p);
    p.finish().unwrap();
    line
}

#[test]
fn stages_that_compute_on_the_host_say_so_with_the_reason() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    assert_eq!(
        computed_by("plain", 1).unwrap(),
        "CUDA devices compute all passes"
    );
    let on_host = "CUDA devices compute the passes of 0 of 1 stages; the others compute on the \
                   host, and those with CUDA devices copy their values there and back; ";
    let divided = "passes of a stage that is divided over several devices are for CPUs";
    assert_eq!(
        computed_by("plain", 2).unwrap(),
        format!("{on_host}{divided}")
    );
    let experts = "passes with experts are for CPUs";
    assert_eq!(
        computed_by("mixtral", 1).unwrap(),
        format!("{on_host}{experts}")
    );
}
