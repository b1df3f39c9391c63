//! Weights that a training publishes while the server answers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use mpmd::aval::{DType, ShapedArray};
use mpmd::launch::Token;
use mpmd::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd::testing::Simulation;
use mpmd::topology::Mesh;
use mpmd::train::{AdamW, Rate, Trainer};
use mpmd::weights::{Publication, Subscribing};
use mpmd::{MpmdArray, ProcessId, Program, Result};
use mpmd_models::{
    Folder, Inference, Room, Sampling, Stages, WeightPublisher, WeightType, merged, save,
};
use mpmd_serve::{
    Engine, QueueLimits, ReplyEvent, RequestQueue, SchedulerSizes, Serving, ServingTurn,
    TextRequest, queue,
};

use crate::engine::{Drain, expected};
use crate::folder::path;

const LONG: Duration = Duration::from_secs(100);
const TIME: usize = 24;

/// A reply: its tokens, the bits of their probabilities, and the labels of its versions.
#[derive(Clone, Debug, PartialEq)]
struct Reply {
    tokens: Vec<u32>,
    probabilities: Vec<u32>,
    versions: Vec<String>,
}

fn ask(queue: &RequestQueue, prompt: &[u32], max_tokens: usize) -> Reply {
    let (prompt, sampling, ends) = (prompt.to_vec(), Sampling::default(), Vec::new());
    let request = TextRequest {
        prompt,
        max_tokens,
        sampling,
        ends,
        logprobs: Some(0),
    };
    let mut stream = queue.submit(request).unwrap();
    let (mut tokens, mut probabilities) = (Vec::new(), Vec::new());
    while let Some(event) = block_on(stream.next()) {
        match event {
            ReplyEvent::Token(token) => {
                tokens.push(token.id);
                probabilities.push(token.logprobs.unwrap().chosen.to_bits());
            }
            ReplyEvent::End(_) => {}
            ReplyEvent::Failed(why) => panic!("{why}"),
        }
    }
    let versions = stream.versions().iter().map(ToString::to_string).collect();
    Reply {
        tokens,
        probabilities,
        versions,
    }
}

/// A model that the first processes serve and the others train.
struct Both {
    serving: Stages,
    training: Stages,
    devices: Vec<usize>,
    sizes: SchedulerSizes,
    /// True if the server holds its matrices in bf16, false if in f32.
    in_half: bool,
}

impl Both {
    fn new(serving: Stages, training: Stages, positions: usize, in_half: bool) -> Self {
        let mut devices = serving.devices(|stage| stage).unwrap();
        let lanes = devices.len();
        let training = training.after(devices.iter().sum());
        devices.extend(training.devices(|stage| stage).unwrap());
        let sizes = SchedulerSizes {
            lanes,
            sequences: 6,
            blocks: 90,
            chunk: 32,
            positions,
        };
        Self {
            serving,
            training,
            devices,
            sizes,
            in_half,
        }
    }

    fn inference(&self, p: &mut Program) -> Result<Inference> {
        let room = Room {
            blocks: self.sizes.blocks,
            sequences: self.sizes.sequences,
        };
        let meshes = self.serving.meshes(|stage| stage)?;
        self.serving.inference(p, &meshes, room, self.in_half)
    }

    /// Runs `program` on all processes, beside `clients`, to whom process 0 gives the queue.
    fn run(
        &self,
        program: impl Fn(&mut Program, Option<&mut Engine>) -> Result<()> + Sync,
        clients: impl FnOnce(&RequestQueue) + Send,
    ) {
        let (queue, arrivals) = queue(QueueLimits::default());
        let engine = Mutex::new(Some(Engine::new(self.sizes, arrivals)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                while queue.phase() == mpmd_serve::ServerPhase::Starting {
                    assert!(start.elapsed() < LONG);
                    std::thread::sleep(Duration::from_millis(1));
                }
                // A failed assertion must end the server, too.
                let drain = Drain(&queue);
                clients(&queue);
                drop(drain);
            });
            let job = Simulation::new(self.devices.len(), self.devices.iter().sum());
            let job = job.settings(|settings| settings.devices_by_process(&self.devices));
            let results = job.run(|p| {
                let own = || engine.lock().unwrap().take();
                let mut own = (p.process() == ProcessId(0)).then(own).flatten();
                program(p, own.as_mut())
            });
            results.into_iter().for_each(|result| result.unwrap());
        });
    }

    /// Publishes the weights of a pipeline, and subscribes an inference to them.
    fn connect(
        &self,
        p: &mut Program,
        pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
        folder: &Folder,
        inference: &Inference,
    ) -> Result<(WeightPublisher, mpmd::weights::Subscription)> {
        let token = Token::new([9; 32]);
        let held = if self.in_half {
            WeightType::Bf16
        } else {
            WeightType::F32
        };
        let publication = Publication::new("model", token.clone());
        let config = folder.config();
        let weights = WeightPublisher::new(p, publication, pipeline, config, None, held)?;
        let address = weights.publisher().address().unwrap().to_string();
        let subscribing = Subscribing::new("model", address, token);
        Ok((weights, inference.subscribe(p, subscribing)?))
    }
}

/// Returns the microbatch of a training step.
fn microbatch(
    p: &mut Program,
    meshes: &[Mesh],
    step: u64,
    vocab: u64,
) -> Result<Microbatch<MpmdArray>> {
    let mut tokens = |mesh: &Mesh, from: u64| {
        let aval = ShapedArray::try_new(&[1, TIME], DType::U32)?;
        p.array_from_fn(aval, mesh.replicated(), move |_, mut view| {
            let to = view.as_mut_slice::<u32>()?.iter_mut().zip(from..);
            to.for_each(|(to, at)| *to = ((at * at * 31 + step * 7 + at) % vocab) as u32);
            Ok(())
        })
    };
    let last = meshes.len() - 1;
    let (inputs, targets) = (tokens(&meshes[0], 0)?, tokens(&meshes[last], 1)?);
    let side = BTreeMap::from([("targets".to_owned(), targets)]);
    Ok(Microbatch::new(inputs).side(last, side))
}

#[test]
fn each_version_gives_the_tokens_of_its_checkpoint() {
    const VERSIONS: u64 = 20;
    let checkpoints = tempfile::tempdir().unwrap();
    let folder = Folder::open(path("plain")).unwrap();
    let prompt = expected("plain").prompt;
    let serving = || {
        Stages::new(&folder, 1, 128)
            .unwrap()
            .tensor_parallel(&[2])
            .unwrap()
    };
    let both = Both::new(
        serving(),
        Stages::new(&folder, 2, TIME).unwrap(),
        128,
        false,
    );
    // The newest version that has answered a request.
    let answered = AtomicU64::new(0);
    let replies = Mutex::new(Vec::new());
    let clients = |queue: &RequestQueue| {
        std::thread::scope(|scope| {
            for client in 0..3 {
                let (prompt, answered, replies) = (&prompt, &answered, &replies);
                scope.spawn(move || {
                    let start = Instant::now();
                    while answered.load(Ordering::SeqCst) < VERSIONS {
                        assert!(start.elapsed() < LONG, "version {answered:?}");
                        let reply = ask(queue, &prompt[..4 + client], 12 + 10 * client);
                        let version = reply.versions[0].parse().unwrap_or(0);
                        answered.fetch_max(version, Ordering::SeqCst);
                        replies.lock().unwrap().push((client, reply));
                    }
                });
            }
        });
    };
    let program = |p: &mut Program, engine: Option<&mut Engine>| {
        let mut inference = both.inference(p)?;
        let meshes = both.training.meshes(|stage| stage)?;
        let pipeline = both.training.training(p, &meshes)?;
        let schedule = Schedule::one_f_one_b(2, 2)?;
        let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
        let mut trainer = trainer.rate(Rate::Constant(0.01));
        let (mut weights, _subscription) =
            both.connect(p, trainer.pipeline(), &folder, &inference)?;
        let mut serving = Serving::start(p, &mut inference, both.sizes.lanes, engine)?;
        loop {
            let step = trainer.steps();
            let is_next = step < VERSIONS && answered.load(Ordering::SeqCst) >= step;
            match serving.turn(p, || is_next.then_some(()))? {
                ServingTurn::Served => continue,
                ServingTurn::Ended => return Ok(()),
                ServingTurn::Other(()) => {}
            }
            let vocab = folder.config().vocab_size as u64;
            let batch = [2 * step, 2 * step + 1].map(|at| microbatch(p, &meshes, at, vocab));
            _ = trainer.step(p, batch.into_iter().collect::<Result<Vec<_>>>()?)?;
            weights.publish(p, step + 1, trainer.pipeline())?;
            let to = checkpoints.path().join((step + 1).to_string());
            p.broadcast_value(ProcessId(0), (), || {
                std::fs::create_dir_all(&to).unwrap();
                Ok(())
            })?;
            let params = merged(p, trainer.pipeline(), None)?;
            save(p, &folder, &params, &to)?;
        }
    };
    both.run(program, clients);
    let replies = replies.into_inner().unwrap();
    let mut checked = 0;
    for version in 0..=VERSIONS {
        let own = |(_, reply): &&(usize, Reply)| {
            reply.versions
                == [if version == 0 {
                    "default".to_owned()
                } else {
                    version.to_string()
                }]
        };
        let own: Vec<&(usize, Reply)> = replies.iter().filter(own).collect();
        let of = match version {
            0 => path("plain"),
            _ => checkpoints.path().join(version.to_string()),
        };
        let expected = replies_of(&of, &both, &prompt);
        for (client, reply) in &own {
            assert_eq!(reply.tokens, expected[*client].tokens, "version {version}");
            assert_eq!(
                reply.probabilities, expected[*client].probabilities,
                "version {version}"
            );
        }
        checked += usize::from(!own.is_empty());
    }
    assert!(
        checked >= VERSIONS as usize,
        "{checked} versions have answered"
    );
}

/// Returns the replies that clients get from a server of `folder`, in the layout of `both`.
fn replies_of(folder: &Path, both: &Both, prompt: &[u32]) -> Vec<Reply> {
    let folder = Folder::open(folder).unwrap();
    let serving = Stages::new(&folder, 1, 128)
        .unwrap()
        .tensor_parallel(&[2])
        .unwrap();
    let training = Stages::new(&folder, 1, TIME).unwrap();
    let alone = Both {
        sizes: both.sizes,
        ..Both::new(serving, training, 128, both.in_half)
    };
    let found = Mutex::new(Vec::new());
    let program = |p: &mut Program, engine: Option<&mut Engine>| {
        let mut inference = alone.inference(p)?;
        mpmd_serve::run(p, &mut inference, alone.sizes.lanes, engine)
    };
    alone.run(program, |queue| {
        for client in 0..3 {
            let reply = ask(queue, &prompt[..4 + client], 12 + 10 * client);
            found.lock().unwrap().push(reply);
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn any_layout_of_the_training_gives_the_servers_bits() {
    // (folder, devices of the server's stages, of the training's, over experts)
    for (name, serving, training, experts) in [
        ("plain", &[2][..], &[1, 1][..], None),
        ("gemma2", &[1, 1], &[1, 1, 1], None),
        ("llama3", &[2], &[1, 2, 1], None),
        ("granite-tied", &[1, 1, 1], &[2], None),
        ("qwen3-window", &[2, 1], &[1], None),
        ("mixtral", &[2], &[1, 1], Some([1, 2])),
        ("qwen2-moe", &[1, 1], &[2], Some([2, 1])),
        ("gpt2", &[1], &[1, 1], None),
    ] {
        // In f32, as in the other test, only the first.
        for in_half in [false, true]
            .into_iter()
            .filter(|half| *half || name == "plain")
        {
            let folder = Folder::open(path(name)).unwrap();
            let stages = |devices: &[usize], experts: Option<usize>, time: usize| {
                let stages = Stages::new(&folder, devices.len(), time).unwrap();
                let stages = stages.tensor_parallel(devices).unwrap();
                match experts {
                    Some(experts) => stages.expert_parallel(&[experts]).unwrap(),
                    None => stages,
                }
            };
            let [own, of_training] = experts.map_or([None; 2], |all| all.map(Some));
            let serving = stages(serving, own, 128);
            let both = Both::new(serving, stages(training, of_training, TIME), 128, in_half);
            let published = Arc::new(AtomicU64::new(0));
            let prompt = expected(name).prompt;
            let program = |p: &mut Program, engine: Option<&mut Engine>| {
                let mut inference = both.inference(p)?;
                let meshes = both.training.meshes(|stage| stage)?;
                let pipeline = both.training.training(p, &meshes)?;
                let (mut weights, _subscription) =
                    both.connect(p, &pipeline, &folder, &inference)?;
                let mut serving = Serving::start(p, &mut inference, both.sizes.lanes, engine)?;
                let mut version = 0;
                loop {
                    let next = published.load(Ordering::SeqCst);
                    match serving.turn(p, || (next > version).then_some(next))? {
                        ServingTurn::Served => {}
                        ServingTurn::Other(next) => {
                            version = next;
                            weights.publish(p, version, &pipeline)?;
                        }
                        ServingTurn::Ended => return Ok(()),
                    }
                }
            };
            both.run(program, |queue| {
                let first = ask(queue, &prompt, 20);
                assert_eq!(first.versions, ["default"]);
                published.store(7, Ordering::SeqCst);
                let start = Instant::now();
                while queue.weights().version != 7 {
                    assert!(start.elapsed() < LONG, "{name}: {:?}", queue.weights());
                    std::thread::sleep(Duration::from_millis(2));
                }
                // Of the folder's weights nothing is left.
                while queue.weights().old.is_some() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let second = ask(queue, &prompt, 20);
                assert_eq!(second.versions, ["7"], "{name}");
                assert_eq!(second.tokens, first.tokens, "{name}");
                assert_eq!(second.probabilities, first.probabilities, "{name}");
            });
        }
    }
}
