//! Compares the transformer on CUDA devices with the same on CPUs. The tests use the software
//! driver, or a real one with `MPMD_TEST_GPU=1`.

use std::sync::Arc;

use mpmd::testing::Simulation;
use mpmd::topology::DeviceKind::{self, Cpu, Cuda};
use mpmd_core::device::cuda::{NoCuda, found};
use mpmd_examples::gpt::adamw::WarmupCosine;
use mpmd_examples::gpt::params::Model;
use mpmd_examples::gpt::train::{Config, Trainer, train};
use mpmd_examples::math::random_bits;
use mpmd_train::data::Text;

/// Largest allowed difference between losses of the same steps, relative to values above one. CUDA
/// devices add in another order.
const TOLERANCE: f64 = 1e-4;

const STEPS: u64 = 5;

/// True if the test must return: it was run again with the software driver, or the CUDA back end is
/// not built.
macro_rules! elsewhere {
    () => {
        if matches!(found(), Err(NoCuda::NotBuilt)) {
            eprintln!("skipped: this test was built without the feature `cuda`");
            true
        } else {
            softcuda::again!("MPMD_CUDA_CACHE" = "")
        }
    };
}

fn tiny() -> Config {
    Config {
        model: Model { layers: 4, width: 8, heads: 2, hidden: 12, time: 6 },
        batch: 2,
        microbatches: 3,
        rates: WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 2, total: STEPS },
        // Every step clips, so that the losses depend on the norm.
        clip: 0.5,
        ..Config::default()
    }
}

/// Returns a text with a pattern that can be learnt.
fn text() -> Arc<Text> {
    let words = ["one ", "two ", "three ", "four ", "five ", "six "];
    let text: String =
        (0..12_000).map(|i| words[(random_bits(5, i / 3) % 3 + i % 3) as usize]).collect();
    Arc::new(Text::of_files(&[text.into_bytes()]).unwrap())
}

/// The results of a training, on process 0.
#[derive(Debug, PartialEq)]
struct Trained {
    /// Loss and norm of each step, in turn.
    steps: Vec<f64>,
    held_out: f64,
    /// The model's continuation of a prompt, by the likeliest bytes.
    sample: Vec<u8>,
}

/// Trains for `STEPS` steps in a simulation with one process for each of `kinds`, then evaluates
/// and samples. Returns the results of process 0.
fn trained(config: &Config, kinds: &[DeviceKind]) -> Trained {
    let text = text();
    let simulation = Simulation::new(kinds.len(), config.devices());
    let results = simulation.settings(|settings| settings.device_kinds(kinds)).run(|p| {
        let mut trainer = Trainer::<f32>::new(p, &text, config)?;
        let mut steps = Vec::new();
        let more = |step: u64| (step < STEPS).then(|| config.rates.rate(step + 1));
        train(p, &mut trainer, more, |report| steps.extend([report.loss, report.norm]))?;
        let held_out = trainer.held_out_loss(p, |_, _| true)?;
        let sample = trainer.sample(p, b"one two ", 3, |logits, _| {
            (0..=255u8).max_by(|a, b| logits[usize::from(*a)].total_cmp(&logits[usize::from(*b)]))
        })?;
        Ok((steps, held_out, sample))
    });
    let mut results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
    let (steps, held_out, sample) = results.swap_remove(0);
    assert_eq!(steps.len() as u64, 2 * STEPS);
    Trained { steps, held_out: held_out.expect("some text is held out"), sample }
}

fn assert_near(case: &str, found: &Trained, expected: &Trained) {
    let pairs = found.steps.iter().zip(&expected.steps);
    for (at, (found, expected)) in pairs.chain([(&found.held_out, &expected.held_out)]).enumerate()
    {
        let near = (found - expected).abs() < TOLERANCE * expected.abs().max(1.0);
        assert!(near, "{case}: number {at} is {found}, not {expected}");
    }
}

#[test]
fn losses_are_near_those_of_cpus_for_every_division() {
    if elsewhere!() {
        return;
    }
    let expected = trained(&Config { stages: 1, ..tiny() }, &[Cpu]);
    let mut alone = None;
    for (stages, processes) in [(1, 1), (4, 1), (2, 2), (4, 4)] {
        let config = Config { stages, ..tiny() };
        let found = trained(&config, &vec![Cuda; processes]);
        assert_near(&format!("{stages} stages, {processes} processes"), &found, &expected);
        assert_eq!(found.sample, expected.sample);
        // No sum depends on the order of arrival, or on the division of the blocks.
        let alone = alone.get_or_insert_with(|| trained(&Config { stages: 1, ..tiny() }, &[Cuda]));
        assert_eq!(&found, alone, "{stages} stages, {processes} processes: the same bits");
    }
}

#[test]
fn stages_on_cpus_and_gpus_form_one_pipeline() {
    if elsewhere!() {
        return;
    }
    let expected = trained(&Config { stages: 1, ..tiny() }, &[Cpu]);
    let config = Config { stages: 4, ..tiny() };
    for kinds in [&[Cpu, Cuda][..], &[Cuda, Cpu], &[Cuda, Cpu, Cpu, Cuda]] {
        assert_near(&format!("{kinds:?}"), &trained(&config, kinds), &expected);
    }
}

#[test]
fn split_and_repeated_passes_give_the_same_losses() {
    if elsewhere!() {
        return;
    }
    let tiny = || Config { microbatches: 4, ..tiny() };
    let expected = trained(&Config { stages: 1, ..tiny() }, &[Cpu]);
    let config = Config { stages: 2, recompute: true, ..tiny() };
    assert_near("recompute", &trained(&config, &[Cuda]), &expected);
    let config = Config { stages: 4, chunks: 2, schedule: "zbv".to_owned(), ..tiny() };
    assert_near("zbv", &trained(&config, &[Cuda, Cuda]), &expected);
}

#[test]
fn stages_on_several_devices_give_the_same_losses() {
    if elsewhere!() {
        return;
    }
    let expected = trained(&Config { stages: 1, ..tiny() }, &[Cpu]);
    for (fsdp, tensor_parallel) in [(1, 2), (2, 1), (2, 2)] {
        let config = Config { stages: 2, fsdp, tensor_parallel, ..tiny() };
        for kinds in [&[Cuda][..], &[Cuda, Cuda]] {
            let case = format!("{fsdp} x {tensor_parallel}, {} processes", kinds.len());
            assert_near(&case, &trained(&config, kinds), &expected);
        }
    }
}
