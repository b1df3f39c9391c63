//! Requests get the same tokens whatever else is computed.

use std::path::Path;
use std::sync::{Mutex, OnceLock};

use futures::executor::block_on;
use mpmd::ProcessId;
use mpmd::random::Key;
use mpmd::testing::Simulation;
use mpmd_models::{
    Folder, InferencePass, PassChunk, Room, Sampling, Stages, Unchosen, WeightVersions,
};
use mpmd_serve::{
    Engine, Finish, QueueLimits, ReplyEvent, ReplyStream, RequestQueue, SchedulerSizes,
    TextRequest, queue, run,
};
use serde::Deserialize;

use crate::folder::{path, with_overflowing_token};

/// The prompt of a model folder, and the results of `transformers`.
#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
}

pub(crate) fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(path(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn request(prompt: &[u32], max_tokens: usize, seed: Option<u64>) -> TextRequest {
    let greedy = Sampling::default();
    let sampling = seed.map_or(greedy, |seed| Sampling {
        temperature: 0.8,
        top_p: 0.95,
        frequency_penalty: 0.3,
        seed,
        ..greedy
    });
    TextRequest {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling,
        ends: Vec::new(),
        logprobs: None,
    }
}

/// Returns all tokens of a reply.
fn tokens(mut stream: ReplyStream) -> Vec<u32> {
    let mut tokens = Vec::new();
    while let Some(event) = block_on(stream.next()) {
        match event {
            ReplyEvent::Token(token) => tokens.push(token.id),
            ReplyEvent::End(finish) => assert_eq!(finish, Finish::Length),
            ReplyEvent::Failed(why) => panic!("{why}"),
        }
    }
    tokens
}

/// Serves a test model over stages with these numbers of devices, while `clients` runs.
fn serve(
    name: &str,
    devices: &[usize],
    sizes: SchedulerSizes,
    clients: impl Fn(&RequestQueue) + Send + Sync,
) {
    serve_folder(&path(name), devices, sizes, |queue, _| clients(queue));
}

/// Serves a folder over stages with these numbers of devices, while `clients` runs.
fn serve_folder(
    folder: &Path,
    devices: &[usize],
    sizes: SchedulerSizes,
    clients: impl Fn(&RequestQueue, &WeightVersions) + Send + Sync,
) {
    let folder = Folder::open(folder).unwrap();
    let versions = OnceLock::new();
    let model = Stages::new(&folder, devices.len(), sizes.positions).unwrap();
    let model = model.tensor_parallel(devices).unwrap();
    let (queue, arrivals) = queue(QueueLimits::default());
    let engine = Mutex::new(Some(Engine::new(sizes, arrivals)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while queue.phase() == mpmd_serve::ServerPhase::Starting {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            // A failed assertion must end the server, too.
            let drain = Drain(&queue);
            clients(&queue, versions.get().expect("the server has begun"));
            drop(drain);
        });
        let job = Simulation::new(devices.len(), devices.iter().sum());
        let job = job.settings(|settings| settings.devices_by_process(devices));
        let results = job.run(|p| {
            let meshes = model.meshes(|stage| stage)?;
            let room = Room {
                blocks: sizes.blocks,
                sequences: sizes.sequences,
            };
            let mut inference = model.inference(p, &meshes, room, false)?;
            let own = || engine.lock().unwrap().take();
            let mut own = (p.process() == ProcessId(0)).then(own).flatten();
            if own.is_some() {
                versions.get_or_init(|| inference.versions().clone());
            }
            inference.warm_up(p, |tokens, _| tokens >= sizes.chunk)?;
            let plans = p.metrics().plan_cache.misses;
            run(p, &mut inference, devices.len(), own.as_mut())?;
            if queue.metrics().contains("mpmd_failed_passes_total 0") {
                assert_eq!(
                    p.metrics().plan_cache.misses,
                    plans,
                    "no request needs a new plan"
                );
            }
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    });
}

/// Drains a server when dropped, also after a failed assertion.
pub(crate) struct Drain<'a>(pub(crate) &'a RequestQueue);

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        self.0.drain();
    }
}

const SIZES: SchedulerSizes = SchedulerSizes {
    lanes: 1,
    sequences: 16,
    blocks: 60,
    chunk: 24,
    positions: 128,
};

#[test]
fn greedy_tokens_equal_those_of_transformers_among_others() {
    for name in ["plain", "qwen3-window", "gemma2", "gpt2", "mixtral"] {
        let Expected { prompt, greedy } = expected(name);
        for devices in [&[1][..], &[1, 1], &[1, 1, 1, 1]] {
            let sizes = SchedulerSizes {
                lanes: devices.len(),
                ..SIZES
            };
            serve(name, devices, sizes, |queue| {
                let alone = tokens(queue.submit(request(&prompt, greedy.len(), None)).unwrap());
                assert_eq!(alone, greedy, "{name} over {devices:?}, alone");
                std::thread::scope(|scope| {
                    for client in 0..12u64 {
                        let (prompt, greedy) = (&prompt, &greedy);
                        scope.spawn(move || {
                            for round in 0..4 {
                                let random = Key(client).fold_in(round);
                                let submit = |request| queue.submit(request).unwrap();
                                if client % 3 == 0 {
                                    let found = submit(request(prompt, greedy.len(), None));
                                    assert_eq!(tokens(found), *greedy, "{name} over {devices:?}");
                                    continue;
                                }
                                // Others, of which some leave early.
                                let len = 1 + (random.0 % 60) as usize;
                                let other: Vec<u32> = (0..len as u64)
                                    .map(|at| (random.fold_in(at).0 % 300) as u32)
                                    .collect();
                                let count = 1 + (random.fold_in(7).0 % 40) as usize;
                                let mut stream = submit(request(&other, count, Some(random.0)));
                                if random.0.is_multiple_of(4) {
                                    block_on(stream.next());
                                } else {
                                    assert_eq!(tokens(stream).len(), count);
                                }
                            }
                        });
                    }
                });
            });
        }
    }
}

#[test]
fn drawn_tokens_depend_on_request_and_seed_alone() {
    let Expected { prompt, .. } = expected("llama3");
    let found = Mutex::new(Vec::new());
    for (devices, sequences, blocks, chunk) in [
        (&[1][..], 16, 60, 24),
        (&[1, 1], 16, 9, 3),
        (&[1, 1, 1], 100_000, 60, 512),
        (&[2, 1], 16, 60, 24),
    ] {
        let sizes = SchedulerSizes {
            lanes: devices.len(),
            sequences,
            blocks,
            chunk,
            ..SIZES
        };
        serve("llama3", devices, sizes, |queue| {
            let drawn = |seed| request(&prompt, 50, Some(seed));
            // Some have to give up their places, where there are few blocks.
            let streams: Vec<ReplyStream> = (0..6)
                .map(|seed| queue.submit(drawn(seed)).unwrap())
                .collect();
            let texts: Vec<Vec<u32>> = streams.into_iter().map(tokens).collect();
            assert_ne!(texts[0], texts[1]);
            found.lock().unwrap().push(texts);
        });
    }
    let found = found.into_inner().unwrap();
    for (at, texts) in found.iter().enumerate().take(3) {
        assert_eq!(*texts, found[0], "job {at}");
    }
    // Two devices add up in another order.
    assert_eq!(found[3].len(), 6);
}

#[test]
fn texts_end_at_end_tokens_and_tell_probabilities() {
    let Expected { prompt, greedy } = expected("plain");
    let end = greedy[20];
    let until = greedy.iter().position(|token| *token == end).unwrap();
    serve(
        "plain",
        &[1, 1],
        SchedulerSizes { lanes: 2, ..SIZES },
        |queue| {
            let mut request = request(&prompt, 64, None);
            (request.ends, request.logprobs) = (vec![end, 9999], Some(2));
            let mut stream = queue.submit(request).unwrap();
            let (mut found, mut finish) = (Vec::new(), None);
            while let Some(event) = block_on(stream.next()) {
                match event {
                    ReplyEvent::Token(token) => {
                        let logprobs = token.logprobs.unwrap();
                        assert_eq!(logprobs.top.len(), 2);
                        assert_eq!(logprobs.top[0], (token.id, logprobs.chosen), "greedy");
                        assert!(logprobs.chosen <= 0.0 && logprobs.top[1].1 <= logprobs.chosen);
                        found.push(token.id);
                    }
                    ReplyEvent::End(why) => finish = Some(why),
                    ReplyEvent::Failed(why) => panic!("{why}"),
                }
            }
            assert_eq!(
                (found, finish),
                (greedy[..=until].to_vec(), Some(Finish::Stop))
            );
        },
    );
}

#[test]
fn long_sequences_need_no_plans_after_a_warm_up_with_few_tokens() {
    let folder = Folder::open(path("plain")).unwrap();
    let model = Stages::new(&folder, 2, SIZES.positions).unwrap();
    let results = Simulation::new(2, 2).run(|p| {
        let room = Room {
            blocks: SIZES.blocks,
            sequences: SIZES.sequences,
        };
        let meshes = model.meshes(|stage| stage)?;
        let mut inference = model.inference(p, &meshes, room, false)?;
        inference.warm_up(p, |tokens, _| tokens >= 8)?;
        let plans = p.metrics().plan_cache.misses;
        let mut last = None;
        for count in [1, 600, 3000, 5000] {
            let (given, blocks) = (vec![1], vec![0; count]);
            let chunk = PassChunk {
                slot: 0,
                start: 0,
                given,
                samples: false,
                blocks,
                new: None,
            };
            last = Some(inference.pass(
                p,
                &InferencePass {
                    version: 0,
                    chunks: vec![chunk],
                },
                last.as_ref(),
            )?);
            p.sync()?;
            assert_eq!(p.metrics().plan_cache.misses, plans, "{count} blocks");
        }
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn logits_that_are_not_finite_end_their_request() {
    let Expected { prompt, .. } = expected("plain");
    for (token, devices) in [(7, &[1][..]), (7, &[1, 1, 1]), (0, &[2, 1]), (160, &[2])] {
        let folder = with_overflowing_token("plain", token);
        let sizes = SchedulerSizes {
            lanes: devices.len(),
            ..SIZES
        };
        serve_folder(folder.path(), devices, sizes, |queue, _| {
            let submit =
                |prompt: &[u32], tokens| queue.submit(request(prompt, tokens, None)).unwrap();
            let alone = tokens(submit(&prompt, 64));
            assert!(!prompt.contains(&token) && !alone.contains(&token));
            let others: Vec<ReplyStream> = (0..4).map(|_| submit(&prompt, alone.len())).collect();
            for round in 0..3 {
                let mut bad = submit(&[token], 20);
                let Some(ReplyEvent::Failed(why)) = block_on(bad.next()) else {
                    panic!("no error")
                };
                assert!(why.contains("logits are not finite"), "{round}: {why}");
            }
            for other in others {
                assert_eq!(tokens(other), alone, "{devices:?}");
            }
            let metrics = queue.metrics();
            assert!(metrics.contains("mpmd_failed_passes_total 0"), "{metrics}");
        });
    }
}

#[test]
fn failed_pass_has_its_requests_computed_alone() {
    let Expected { prompt, greedy } = expected("plain");
    for devices in [&[1][..], &[1, 1, 1]] {
        let sizes = SchedulerSizes {
            lanes: devices.len(),
            ..SIZES
        };
        serve_folder(&path("plain"), devices, sizes, |queue, versions| {
            let submit = |tokens| queue.submit(request(&prompt, tokens, None)).unwrap();
            let mut others: Vec<ReplyStream> = (0..4).map(|_| submit(greedy.len())).collect();
            let begun = others.iter_mut().map(|other| block_on(other.next()));
            let firsts: Vec<Option<ReplyEvent>> = begun.collect();
            // Its weights are nowhere, so its passes fail.
            versions.arrive(9);
            while !queue.metrics().contains("mpmd_weight_version 9") {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let bad: Vec<ReplyStream> = (0..3).map(|_| submit(4)).collect();
            for mut bad in bad {
                let Some(ReplyEvent::Failed(why)) = block_on(bad.next()) else {
                    panic!("no error")
                };
                assert!(why.contains("the model has failed"), "{why}");
            }
            for (other, first) in others.into_iter().zip(firsts) {
                let Some(ReplyEvent::Token(first)) = first else {
                    panic!("no token")
                };
                let found = [vec![first.id], tokens(other)].concat();
                assert_eq!(found, greedy, "over {devices:?}");
            }
            let metrics = queue.metrics();
            assert!(!metrics.contains("mpmd_failed_passes_total 0"), "{metrics}");
        });
    }
}

#[test]
fn token_without_a_row_ends_its_request() {
    let Expected { prompt, greedy } = expected("plain");
    serve(
        "plain",
        &[1, 1],
        SchedulerSizes { lanes: 2, ..SIZES },
        |queue| {
            let submit =
                |prompt: &[u32], tokens| queue.submit(request(prompt, tokens, None)).unwrap();
            let other = submit(&prompt, greedy.len());
            let mut wrong = submit(&[1_000_000], 4);
            let Some(ReplyEvent::Failed(why)) = block_on(wrong.next()) else {
                panic!("no error")
            };
            assert!(why.contains("token 1000000 has no row"), "{why}");
            assert_eq!(tokens(other), greedy);
            let metrics = queue.metrics();
            assert!(metrics.contains("mpmd_failed_passes_total 0"), "{metrics}");
        },
    );
}

#[test]
fn invalid_chunks_are_refused_before_issue() {
    let folder = Folder::open(path("plain")).unwrap();
    let model = Stages::new(&folder, 2, SIZES.positions).unwrap();
    let results = Simulation::new(2, 2).run(|p| {
        let room = Room {
            blocks: SIZES.blocks,
            sequences: SIZES.sequences,
        };
        let meshes = model.meshes(|stage| stage)?;
        let mut inference = model.inference(p, &meshes, room, false)?;
        let good = PassChunk {
            slot: 0,
            start: 0,
            given: vec![1, 2],
            samples: true,
            blocks: vec![3],
            new: None,
        };
        let wrong = [
            (
                PassChunk {
                    slot: 16,
                    ..good.clone()
                },
                "place 16 of 16",
            ),
            (
                PassChunk {
                    start: 127,
                    blocks: vec![0; 9],
                    ..good.clone()
                },
                "129 tokens, where 128",
            ),
            (
                PassChunk {
                    start: 15,
                    ..good.clone()
                },
                "1 blocks for 17 tokens",
            ),
            (
                PassChunk {
                    blocks: vec![60],
                    ..good.clone()
                },
                "block 60 of 60",
            ),
            (
                PassChunk {
                    blocks: vec![4],
                    ..good.clone()
                },
                "two chunks for place 0",
            ),
            (
                PassChunk {
                    given: vec![1, 9999],
                    ..good.clone()
                },
                "token 9999 has no row",
            ),
        ];
        for (chunk, expected) in wrong {
            let pass = InferencePass {
                version: 0,
                chunks: vec![good.clone(), chunk],
            };
            let said = inference.pass(p, &pass, None).unwrap_err().to_string();
            assert!(said.contains(expected), "{said}");
        }
        // Nothing was issued: the job goes on. A sequence that never began is a value.
        let choices = inference.pass(
            p,
            &InferencePass {
                version: 0,
                chunks: vec![good],
            },
            None,
        )?;
        if let Some(choices) = inference.read(&choices)? {
            let choice = &choices[&0];
            assert_eq!(choice.token, Err(Unchosen::OutOfOrder));
        }
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn prompts_without_room_fail_alone() {
    let Expected { prompt, greedy } = expected("plain");
    serve("plain", &[1], SIZES, |queue| {
        let mut long = queue.submit(request(&[1; 128], 1, None)).unwrap();
        let Some(ReplyEvent::Failed(why)) = block_on(long.next()) else {
            panic!("no room")
        };
        assert!(
            why.contains("a prompt of 128 tokens: from 1 to 127 have room"),
            "{why}"
        );
        // As many as there are positions.
        assert_eq!(
            tokens(queue.submit(request(&[1; 100], 64, None)).unwrap()).len(),
            28
        );
        let found = tokens(queue.submit(request(&prompt, 64, None)).unwrap());
        assert_eq!(found, greedy);
    });
}
