//! Experts that are divided over several devices compute what whole ones do, to the bit, and each
//! device reads its own.

use std::collections::BTreeMap;

use mpmd::aval::ShapedArray;
use mpmd::pipeline::Schedule;
use mpmd::testing::Simulation;
use mpmd::topology::Mesh;
use mpmd::train::{Rate, Run};
use mpmd::{Program, Result};
use mpmd_models::score::nats_per_token;
use mpmd_models::{Division, HeldBytes, Sampling, Stages, merged, save, trainer};

use crate::folders::{expected, open, path, read_all, tokens};
use crate::given::{Given, args};

/// The number of devices that divide the experts of each stage, and the number of processes.
type Job = (&'static [usize], usize);

/// Folders, the number of devices that divide other matrices, and the jobs to test.
const CASES: [(&str, usize, &[Job]); 6] = [
    (
        "mixtral",
        1,
        &[(&[2], 2), (&[4], 1), (&[1, 2], 1), (&[2, 4], 2)],
    ),
    ("mixtral", 2, &[(&[2], 4), (&[4], 2)]),
    ("qwen2-moe", 2, &[(&[4], 2)]),
    ("qwen2-moe-sparse", 1, &[(&[2, 1], 1)]),
    ("qwen3-moe", 1, &[(&[2], 2), (&[2, 1], 1)]),
    ("qwen3-moe-sparse", 1, &[(&[4], 2), (&[4, 2], 3)]),
];

fn model(name: &str, tensor: usize, experts: &[usize], positions: usize) -> Stages {
    let model = Stages::new(&open(name), experts.len(), positions).unwrap();
    model
        .tensor_parallel(&[tensor])
        .unwrap()
        .expert_parallel(experts)
        .unwrap()
}

/// Runs a program on the devices of a model. Returns the value of the process that returned one.
fn run<T: Send>(
    model: &Stages,
    processes: usize,
    program: impl Fn(&mut Program, &[Mesh]) -> Result<Option<T>> + Sync,
) -> T {
    let devices = model.devices(|stage| stage).unwrap().iter().sum();
    crate::folders::run(processes, devices, |p| {
        program(p, &model.meshes(|stage| stage)?)
    })
}

/// The results of one job, which must be equal for all jobs of a model.
struct Results {
    losses: Vec<f64>,
    trained: BTreeMap<String, (ShapedArray, Vec<u8>)>,
    score: f64,
    generated: Vec<u32>,
}

fn results(name: &str, tensor: usize, (experts, processes): Job) -> Results {
    let (folder, expected, to) = (open(name), expected(name), tempfile::tempdir().unwrap());
    let (args, given) = (args("--weight-decay 0.1"), Given(expected.windows));
    let training = model(name, tensor, experts, 16);
    let losses = run(&training, processes, |p, meshes| {
        let schedule = if experts.len() > 1 { "zb-h1" } else { "1f1b" };
        let schedule = Schedule::named(schedule, experts.len(), 2, None)?;
        let mut trainer = trainer(p, &training, meshes, schedule, &args.settings)?
            .rate(Rate::Constant(expected.rate));
        let mut losses = Vec::new();
        let run = Run::steps(5).progress(false);
        trainer.run(p, run.on_step(|report| losses.push(report.loss)), &given)?;
        let params = merged(p, trainer.pipeline(), None)?;
        save(p, &folder, &params, to.path())?;
        Ok(Some(losses))
    });
    for (step, (found, expected)) in losses.iter().zip(&expected.losses).enumerate() {
        let off = (found - expected).abs();
        assert!(
            off < 1e-3,
            "{name} over {experts:?}, step {step}: {found}, not {expected}"
        );
    }
    let scoring = model(name, tensor, experts, 200);
    let score = run(&scoring, processes, |p, meshes| {
        nats_per_token(p, &scoring, meshes, &tokens(&folder).first(200))
    });
    let (prompt, most) = (&expected.prompt, 24);
    let generating = model(name, tensor, experts, prompt.len() + most);
    let generated = run(&generating, processes, |p, meshes| {
        let mut generator = generating.generator(p, meshes, false)?;
        generator
            .generate(p, prompt, &Sampling::default(), most, |_, _| Ok(false))
            .map(Some)
    });
    assert_eq!(
        generated,
        expected.greedy[..most],
        "{name} over {experts:?}"
    );
    Results {
        losses,
        trained: read_all(to.path()),
        score,
        generated,
    }
}

#[test]
fn divided_experts_give_the_bits_of_whole_ones() {
    for (name, tensor, jobs) in CASES {
        // A tied output adds up its gradients in an order of its own in each number of stages.
        let whole = [&[1][..], &[1, 1]].map(|experts| results(name, tensor, (experts, 1)));
        for (experts, processes) in jobs {
            let whole = &whole[experts.len() - 1];
            let found = results(name, tensor, (experts, *processes));
            let case = format!("{name} over {experts:?} and {tensor}");
            assert_eq!(found.losses, whole.losses, "{case}");
            assert_eq!(found.score, whole.score, "{case}");
            assert_eq!(found.generated, whole.generated, "{case}");
            for (tensor, values) in &whole.trained {
                assert!(
                    found.trained[tensor] == *values,
                    "{case}: {tensor} has other bits"
                );
            }
        }
    }
}

#[test]
fn divided_experts_are_saved_with_equal_bits() {
    for (name, tensor, jobs) in CASES {
        let (folder, to) = (open(name), tempfile::tempdir().unwrap());
        let (experts, processes) = jobs[jobs.len() - 1];
        let model = model(name, tensor, experts, 1);
        run(&model, processes, |p, meshes| {
            let pipeline = model.training(p, meshes)?;
            let params = merged(p, &pipeline, None)?;
            save(p, &folder, &params, to.path()).map(Some)
        });
        assert!(
            read_all(to.path()) == read_all(&path(name)),
            "{name} over {experts:?}"
        );
    }
}

#[test]
fn devices_read_their_experts_alone() {
    for name in ["mixtral", "qwen3-moe", "qwen3-moe-sparse"] {
        let results = Simulation::new(2, 2).run(|p| {
            // A folder of its own for each process, as in real ones.
            let folder = open(name);
            let model = Stages::new(&folder, 1, 8)?.expert_parallel(&[2])?;
            let mut generator = model.generator(p, &model.meshes(|stage| stage)?, false)?;
            generator.generate(p, &[5, 7], &Sampling::default(), 1, |_, _| Ok(false))?;
            Ok(folder.bytes_read() as usize)
        });
        let folder = open(name);
        let bytes = |of_experts: bool| -> usize {
            let own = folder
                .tensors()
                .filter(|(name, _)| name.contains("experts.") == of_experts);
            own.map(|(_, aval)| aval.bytes()).sum()
        };
        for read in results {
            assert_eq!(read.unwrap(), bytes(false) + bytes(true) / 2, "{name}");
        }
    }
}

#[test]
fn experts_that_cannot_be_divided_are_refused() {
    let said = |name: &str, experts: &[usize]| {
        let model = Stages::new(&open(name), 2, 1).unwrap();
        model.expert_parallel(experts).unwrap_err().to_string()
    };
    for (name, experts, expected) in [
        (
            "plain",
            &[2][..],
            "expert_parallel: expected 1: the model has no experts, found 2",
        ),
        (
            "qwen3-moe",
            &[3],
            "expert_parallel: expected 1, 2, 4 or a higher power of two, found 3",
        ),
        (
            "qwen3-moe",
            &[4],
            "num_experts: expected a multiple of 4, the expert parallel devices, f",
        ),
        (
            "mixtral",
            &[8],
            "num_local_experts: expected a multiple of 8, the expert",
        ),
        (
            "mixtral",
            &[2, 2, 2],
            "expert_parallel: expected 2 numbers, one for each stage, or",
        ),
    ] {
        let said = said(name, experts);
        assert!(said.contains(expected), "{said}");
    }
    // Layers 1 and 5 have experts.
    let cut = |cut: &[std::ops::Range<usize>], experts: &[usize]| {
        let division = Division {
            layers: cut.to_vec(),
            expert_parallel: experts.to_vec(),
            ..Division::default()
        };
        let model = Stages::new(&open("qwen3-moe-sparse"), cut.len(), 1).unwrap();
        model.divide(&division, HeldBytes::FROZEN)
    };
    cut(&[0..4, 4..6], &[4, 2]).unwrap();
    let said = cut(&[0..2, 2..5, 5..6], &[2]).unwrap_err().to_string();
    let expected = "expert_parallel: expected 1 for stage 1, whose layers have no experts, found 2";
    assert!(said.contains(expected), "{said}");
    let said = model("mixtral", 2, &[1], 1)
        .tensor_parallel(&[8])
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("num_attention_heads: expected a multiple of 8"),
        "{said}"
    );
}
