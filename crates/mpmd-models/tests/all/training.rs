//! Training equals torch's, and LoRA trains only its matrices.

use mpmd::pipeline::Schedule;
use mpmd::train::data::{Data, MicrobatchPlace, PackedSequences, Sequence};
use mpmd::train::{Rate, Run};
use mpmd_models::{Folder, Stages, trainer};

use crate::folders::{ALL, Expected, change_config, copy, expected, open, run, simulate};
use crate::given::{Given, args, set_lora};

/// Trains a folder's model on the expected windows, and returns the losses.
fn losses(name: &str, (processes, stages): (usize, usize), schedule: &str, lora: &str) -> Vec<f64> {
    let (folder, expected) = (open(name), expected(name));
    let decay = expected.decay;
    let args = args(&format!("--weight-decay {decay} {lora}"));
    let given = Given(expected.windows);
    simulate(processes, stages, |p, meshes| {
        let schedule = Schedule::named(schedule, stages, given.0[0].len(), None)?;
        let model = Stages::new(&folder, stages, given.0[0][0][0].len())?.lora(args.lora(), 0);
        let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?
            .rate(Rate::Constant(expected.rate));
        set_lora(p, trainer.pipeline_mut())?;
        let mut losses = Vec::new();
        let run = Run::steps(given.0.len() as u64).progress(false);
        trainer.run(p, run.on_step(|report| losses.push(report.loss)), &given)?;
        Ok(Some(losses))
    })
}

/// Checks that the losses of each folder differ from the expected ones by at most 1e-3.
fn compare(lora: &str, expected_of: impl Fn(&Expected) -> &Vec<f64>) {
    let mut learned = 0.0;
    for name in ALL {
        let all = expected(name);
        let expected = expected_of(&all);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        learned += mean(&expected[..5]) - mean(&expected[15..]);
        for (job, schedule) in [((1, 1), "1f1b"), ((2, 2), "zb-h1"), ((3, 3), "1f1b")] {
            let losses = losses(name, job, schedule, lora);
            assert_eq!(losses.len(), 20);
            for (step, (found, expected)) in losses.iter().zip(expected).enumerate() {
                let off = (found - expected).abs();
                assert!(
                    off < 1e-3,
                    "{name} {job:?}, step {step}: {found}, not {expected}"
                );
            }
        }
    }
    assert!(learned > 0.1 * ALL.len() as f64, "the models learn");
}

#[test]
fn twenty_steps_of_adamw_equal_those_of_torch() {
    compare("", |expected| &expected.losses);
}

#[test]
fn families_train_in_bf16_over_f32_weights() {
    for name in ALL {
        let expected = expected(name).losses;
        for lora in ["", "--lora 2"]
            .iter()
            .take(if name == ALL[0] { 2 } else { 1 })
        {
            let [one, two] = [((1, 1), "1f1b"), ((2, 2), "zb-h1")].map(|(job, schedule)| {
                losses(name, job, schedule, &format!("{lora} --compute bf16"))
            });
            assert_eq!(one, two, "{name} {lora}: the same bits in stages");
            assert_ne!(one, expected, "{name}");
            if lora.is_empty() {
                let far = |(found, expected): (&f64, &f64)| (found - expected).abs();
                let worst = one.iter().zip(&expected).map(far).fold(0.0, f64::max);
                assert!(worst < 0.05, "{name}: {worst} from torch's losses in f32");
            }
        }
    }
}

#[test]
fn ten_steps_with_balanced_experts_equal_those_of_torch() {
    let has_experts = |name: &&str| !expected(name).balanced_losses.is_empty();
    let names: Vec<&str> = ALL.into_iter().filter(has_experts).collect();
    assert_eq!(names.len(), 6);
    for name in names {
        let (folder, expected) = (copy(name), expected(name));
        change_config(folder.path(), |config| {
            config["output_router_logits"] = true.into();
            config["router_aux_loss_coef"] = 0.5.into();
        });
        let folder = Folder::open(folder.path()).unwrap();
        let args = args(&format!("--weight-decay {}", expected.decay));
        let given = Given(expected.windows);
        let is_tied = folder.config().tie_word_embeddings;
        let mut alone = None;
        let is_even = folder.config().experts.unwrap().count.is_multiple_of(2);
        let devices = if is_even { 2 } else { 1 };
        for (stages, schedule, experts) in [
            (1, "1f1b", 1),
            (1, "1f1b", devices),
            (2, "zb-h1", 1),
            (2, "1f1b", devices),
            (3, "gpipe", 1),
        ] {
            let model = Stages::new(&folder, stages, given.0[0][0][0].len()).unwrap();
            let model = model.expert_parallel(&[experts]).unwrap();
            let (losses, evaluated) = run(stages, stages * experts, |p| {
                let meshes = model.meshes(|stage| stage)?;
                let schedule = Schedule::named(schedule, stages, given.0[0].len(), None)?;
                let mut trainer = trainer(p, &model, &meshes, schedule, &args.settings)?
                    .rate(Rate::Constant(expected.rate));
                let mut losses = Vec::new();
                let steps = expected.balanced_losses.len() as u64;
                let run = Run::steps(steps).progress(false);
                let first = given.training(p, &meshes, MicrobatchPlace::new(0, 1, 0, 2))?;
                let evaluated = trainer.evaluate(p, vec![first])?.read()?.loss();
                trainer.run(p, run.on_step(|report| losses.push(report.loss)), &given)?;
                Ok(Some((losses, evaluated)))
            });
            let case = format!("{name} on {stages} stages over {experts}");
            for (step, (found, expected)) in
                losses.iter().zip(&expected.balanced_losses).enumerate()
            {
                let off = (found - expected).abs();
                assert!(off < 1e-3, "{case}, step {step}: {found}, not {expected}");
            }
            assert_eq!(losses.len(), expected.balanced_losses.len());
            let (same, first) = alone.get_or_insert((losses.clone(), evaluated));
            // A tied output adds up its gradients in an order of its own in each number of stages.
            if !is_tied || stages == 1 {
                assert_eq!(losses, *same, "{case}: other bits");
            }
            assert_eq!(evaluated, *first, "{case}: other bits of the evaluation");
            assert!(
                losses[0] - evaluated > 0.4,
                "{case}: evaluated {evaluated} without the loss"
            );
        }
    }
}

#[test]
fn twenty_steps_of_lora_equal_those_of_torch() {
    compare("--lora 2 --alpha 6", |expected| &expected.lora_losses);
}

#[test]
fn only_lora_matrices_are_trained() {
    for stages in [1, 3] {
        let folder = open("grouped");
        let (args, given) = (
            args("--lora 2 --lr 1e-2"),
            Given(expected("grouped").windows),
        );
        let (trained, losses) = simulate(1, stages, |p, meshes| {
            let schedule = Schedule::named("1f1b", stages, 2, None)?;
            let model = Stages::new(&folder, stages, 16)?.lora(args.lora(), 3);
            let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
            let mut losses = Vec::new();
            let run = Run::steps(20).progress(false);
            trainer.run(p, run.on_step(|report| losses.push(report.loss)), &given)?;
            let pipeline = trainer.pipeline();
            let trained = (0..stages).flat_map(|stage| {
                let params = pipeline
                    .params(stage)
                    .into_iter()
                    .zip(pipeline.trainable(stage));
                params
                    .filter(|(_, trained)| *trained)
                    .map(|((name, _), _)| name)
            });
            Ok(Some((trained.collect::<Vec<_>>(), losses)))
        });
        // Two matrices for each of seven projections.
        assert_eq!(trained.len(), 2 * 7 * folder.config().num_hidden_layers);
        assert!(
            trained.iter().all(|name| name.contains(".lora_")),
            "{trained:?}"
        );
        // B is zero at first, so the first loss is that of the model alone.
        let expected = expected("grouped").losses;
        assert!(
            (losses[0] - expected[0]).abs() < 1e-5,
            "{} not {}",
            losses[0],
            expected[0]
        );
        assert!(losses[0] - losses[19] > 0.3, "{losses:?}");
    }
}

#[test]
fn sequences_of_one_row_train_as_alone() {
    let sequences: Vec<Sequence> = expected("plain").windows[0]
        .iter()
        .flatten()
        .zip([11, 8])
        .map(|(row, tokens)| row[..tokens].iter().map(|token| (*token, true)).collect())
        .collect();
    let args = args("");
    for name in ALL {
        // The rows are no longer than the shortest context that scales with the length.
        let losses = |time: usize, rows: usize| {
            simulate(1, 2, |p, meshes| {
                let data = PackedSequences::new(sequences.clone(), None, time, 1)?;
                assert_eq!(data.training_rows(), rows);
                let schedule = Schedule::one_f_one_b(2, rows)?;
                let model = Stages::new(&open(name), 2, time)?.packed(true);
                let trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
                let (mut trainer, mut losses) = (trainer.rate(Rate::Constant(3e-3)), Vec::new());
                let run = Run::steps(3).progress(false);
                trainer.run(p, run.on_step(|report| losses.push(report.loss)), &data)?;
                Ok(Some(losses))
            })
        };
        for (one, alone) in losses(18, 1).iter().zip(losses(10, 2)) {
            assert!(
                (one - alone).abs() < 1e-3,
                "{name}: {one} in one row, {alone} alone"
            );
        }
    }
}
