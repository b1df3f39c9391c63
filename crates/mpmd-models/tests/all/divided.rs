//! Layers that are divided over several devices compute what whole ones do, and each device reads
//! its parts.

use mpmd::aval::{DType, ShapedArray};
use mpmd::pipeline::{Microbatch, Schedule};
use mpmd::testing::Simulation;
use mpmd::topology::Mesh;
use mpmd::train::{Rate, Run};
use mpmd::{Program, Result};
use mpmd_models::score::nats_per_token;
use mpmd_models::{Folder, Sampling, Stages, merged, save, trainer};

use crate::folders::{ALL, expected, open, path, read_all, tokens};
use crate::given::{Given, args, set_lora};

/// The number of devices of each stage, and the number of devices of each process.
type Job = (&'static [usize], &'static [usize]);

/// Jobs with one stage on two devices, and with stages of different sizes. The processes have one
/// device each or different numbers.
const JOBS: [Job; 3] = [(&[2], &[1, 1]), (&[2, 1], &[2, 1]), (&[1, 2], &[1, 1, 1])];

/// Returns the folders whose heads two devices can divide, each with the jobs to test.
fn jobs() -> impl Iterator<Item = (&'static str, Job)> {
    let fits = |name: &&str| {
        Stages::new(&open(name), 1, 1)
            .unwrap()
            .tensor_parallel(&[2])
            .is_ok()
    };
    let pairs: Vec<&str> = ALL.into_iter().filter(fits).collect();
    let families = |names: &[&str]| {
        let mut families: Vec<_> = names
            .iter()
            .map(|name| open(name).config().family)
            .collect();
        families.sort_unstable();
        families.dedup();
        families
    };
    assert_eq!(families(&pairs), families(&ALL), "each family");
    let all = pairs
        .into_iter()
        .flat_map(|name| JOBS.map(|job| (name, job)));
    // Four heads of keys; two, each on two devices; one, on all four.
    let four =
        ["plain", "llama3", "stablelm-parallel", "bf16"].map(|name| (name, (&[4][..], &[4][..])));
    all.chain(four)
}

/// Runs a program on the devices of a divided model. Returns the value of the process that returned
/// one.
pub(crate) fn divided<T: Send>(
    model: &Stages,
    processes: &[usize],
    program: impl Fn(&mut Program, &[Mesh]) -> Result<Option<T>> + Sync,
) -> T {
    let job = Simulation::new(processes.len(), processes.iter().sum());
    let job = job.settings(|settings| settings.devices_by_process(processes));
    let results = job.run(|p| program(p, &model.meshes(|stage| stage)?));
    let values = results.into_iter().filter_map(|result| result.unwrap());
    values.last().expect("one process returns a value")
}

pub(crate) fn model(folder: &Folder, devices: &[usize], positions: usize) -> Stages {
    let model = Stages::new(folder, devices.len(), positions).unwrap();
    model.tensor_parallel(devices).unwrap()
}

#[test]
fn logits_equal_those_of_transformers() {
    for (name, (devices, processes)) in jobs() {
        let (folder, expected) = (open(name), expected(name));
        let model = model(&folder, devices, expected.tokens.len());
        let found = divided(&model, processes, |p, meshes| {
            let mut pipeline = model.logits(p, meshes)?;
            let ids = expected.tokens.clone();
            let aval = ShapedArray::new(&[1, ids.len()], DType::U32);
            let x = p.array_from_fn(aval, meshes[0].replicated(), move |_, mut view| {
                view.as_mut_slice::<u32>()?.copy_from_slice(&ids);
                Ok(())
            })?;
            let microbatch = Microbatch::new(x);
            pipeline.probe(p, &microbatch.shapes())?;
            let logits = pipeline.forward(p, microbatch)?;
            Ok(logits
                .to_host()?
                .map(|logits| logits.to_vec::<f32>())
                .transpose()?)
        });
        let vocabulary = folder.config().vocab_size;
        for (position, expected) in &expected.logits {
            let row = &found[position * vocabulary..][..vocabulary];
            let off = row
                .iter()
                .zip(expected)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(
                off < 1e-4,
                "{name} over {devices:?}, position {position}: {off}"
            );
        }
    }
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for (name, (devices, processes)) in jobs() {
        let (folder, expected) = (open(name), expected(name));
        let most = expected.greedy.len();
        let model = model(&folder, devices, expected.prompt.len() + most);
        let greedy = divided(&model, processes, |p, meshes| {
            let mut generator = model.generator(p, meshes, false)?;
            let sampling = Sampling::default();
            generator
                .generate(p, &expected.prompt, &sampling, most, |_, _| Ok(false))
                .map(Some)
        });
        assert_eq!(greedy, expected.greedy, "{name} over {devices:?}");
    }
}

#[test]
fn scores_of_long_texts_equal_those_of_transformers() {
    for name in ["plain", "grouped", "gpt2-hub"] {
        let (folder, nats) = (open(name), expected(name).nats_in_f32);
        let model = model(&folder, &[2, 1], 700);
        let found = divided(&model, &[1, 1, 1], |p, meshes| {
            nats_per_token(p, &model, meshes, &tokens(&folder).first(700))
        });
        let off = (found - nats[&700]).abs();
        assert!(off < 1e-5, "{name}: {found}, not {}", nats[&700]);
    }
}

#[test]
fn steps_of_adamw_equal_those_of_torch() {
    for lora in ["", "--lora 2 --alpha 6"] {
        for (name, (devices, processes)) in jobs() {
            let (folder, expected) = (open(name), expected(name));
            let args = args(&format!("--weight-decay {} {lora}", expected.decay));
            let given = Given(expected.windows);
            let model = model(&folder, devices, given.0[0][0][0].len()).lora(args.lora(), 0);
            let losses = divided(&model, processes, |p, meshes| {
                let name = if devices.len() > 1 { "zb-h1" } else { "1f1b" };
                let schedule = Schedule::named(name, devices.len(), given.0[0].len(), None)?;
                let trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
                let mut trainer = trainer.rate(Rate::Constant(expected.rate));
                set_lora(p, trainer.pipeline_mut())?;
                let mut losses = Vec::new();
                let run = Run::steps(given.0.len() as u64).progress(false);
                trainer.run(p, run.on_step(|report| losses.push(report.loss)), &given)?;
                Ok(Some(losses))
            });
            let expected = if lora.is_empty() {
                &expected.losses
            } else {
                &expected.lora_losses
            };
            assert_eq!(losses.len(), expected.len());
            for (step, (found, expected)) in losses.iter().zip(expected).enumerate() {
                let off = (found - expected).abs();
                assert!(
                    off < 1e-3,
                    "{name} over {devices:?}, step {step}: {found}: {expected}"
                );
            }
        }
    }
}

#[test]
fn models_are_saved_with_equal_bits() {
    for (name, (devices, processes)) in jobs() {
        if devices.len() == 2 || name == "gpt2-hub" {
            continue;
        }
        let (folder, to) = (open(name), tempfile::tempdir().unwrap());
        let model = model(&folder, devices, 1);
        divided(&model, processes, |p, meshes| {
            let pipeline = model.training(p, meshes)?;
            let params = merged(p, &pipeline, None)?;
            save(p, &folder, &params, to.path()).map(Some)
        });
        assert!(
            read_all(to.path()) == read_all(&path(name)),
            "{name} over {devices:?}"
        );
    }
}

#[test]
fn saved_weights_compute_what_the_trained_ones_do() {
    // Without LoRA the norms are trained too: one of each kind for queries and keys.
    for (name, lora) in [
        ("grouped", "--lora 3"),
        ("phi3-window", "--lora 3"),
        ("qwen3-window", ""),
        ("stablelm-parallel", ""),
        ("olmo2-wide", ""),
    ] {
        let (folder, to) = (open(name), tempfile::tempdir().unwrap());
        let (args, given) = (
            args(&format!("--lr 2e-2 {lora}")),
            Given(expected(name).windows),
        );
        let of = |folder: &Folder, devices: &[usize], steps: u64| {
            let lora = args.lora().filter(|_| steps > 0);
            let model = model(folder, devices, 16).lora(lora, 0);
            divided(&model, devices, |p, meshes| {
                let schedule = Schedule::named("1f1b", devices.len(), 2, None)?;
                let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
                trainer.run(p, Run::steps(steps).progress(false), &given)?;
                let at = mpmd::train::data::MicrobatchPlace::new(0, 20, 0, 1);
                let microbatch = mpmd::train::data::Data::training(&given, p, meshes, at)?;
                let loss = trainer.evaluate(p, vec![microbatch])?.read()?.loss();
                let params = merged(p, trainer.pipeline(), lora)?;
                if steps > 0 {
                    save(p, folder, &params, to.path())?;
                }
                Ok(Some(loss))
            })
        };
        let trained = of(&folder, &[2, 1], 5);
        let saved = of(&Folder::open(to.path()).unwrap(), &[1], 0);
        assert!(
            (trained - saved).abs() < 1e-5,
            "{name}: {trained}, saved {saved}"
        );
    }
}

#[test]
fn devices_read_their_parts_alone() {
    // Norms and some biases are on both; learned positions, and a vocabulary of an odd number, too.
    for (name, share) in [
        ("plain", 0.52),
        ("llama3", 0.52),
        ("phi3-window", 0.7),
        ("gpt2-hub", 0.75),
    ] {
        let model = |folder: &Folder| model(folder, &[2], 8);
        let results = Simulation::new(2, 2).run(|p| {
            // A folder of its own for each process, as in real ones.
            let folder = open(name);
            let model = model(&folder);
            let mut generator = model.generator(p, &model.meshes(|stage| stage)?, false)?;
            generator.generate(p, &[5, 7], &Sampling::default(), 1, |_, _| Ok(false))?;
            Ok(folder.bytes_read())
        });
        let read: Vec<u64> = results.into_iter().map(|result| result.unwrap()).collect();
        let whole: usize = open(name).tensors().map(|(_, aval)| aval.bytes()).sum();
        let most = whole as f64 * share;
        assert!(
            read.iter().all(|read| *read as f64 <= most),
            "{name}: {read:?} of {whole}"
        );
        assert!(
            read.iter().sum::<u64>() >= whole as u64,
            "{name}: {read:?} of {whole}"
        );
    }
}

#[test]
fn devices_that_do_not_divide_a_model_are_refused() {
    for (name, devices, expected) in [
        (
            "plain",
            &[3][..],
            "num_attention_heads: expected a multiple of 3, the tensor",
        ),
        (
            "grouped",
            &[3],
            "num_key_value_heads: expected a divisor or a multiple of 3, the te",
        ),
        (
            "mistral",
            &[3],
            "intermediate_size: expected a multiple of 3, the tensor",
        ),
        (
            "gpt2",
            &[5],
            "n_head: expected a multiple of 5, the tensor parallel devices, f",
        ),
        (
            "plain",
            &[2, 2],
            "tensor_parallel: expected 1 numbers, one for each stage, or one for",
        ),
    ] {
        let model = Stages::new(&open(name), 1, 1).unwrap();
        let said = model.tensor_parallel(devices).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
    let model = model(&open("plain"), &[2, 1, 1, 2], 1);
    let said = model.devices(|stage| stage % 2).unwrap_err().to_string();
    assert!(
        said.contains("expected 2 for stage 2, as for others of rank 0, found 1"),
        "{said}"
    );
}
