//! The transformer as a pipeline: gradients, stages, processes and memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd::pipeline::{Action, ActionKind, Builtin};
use mpmd::prelude::*;
use mpmd::{MemoryUse, ProcessId, testing::Simulation};
use mpmd_examples::gpt::adamw::WarmupCosine;
use mpmd_examples::gpt::params::Model;
use mpmd_examples::gpt::train::{Config, StepReport, Trainer, train};
use mpmd_examples::math::random_bits;
use mpmd_train::data::Text;

fn tiny() -> Config {
    Config {
        model: Model { layers: 4, width: 8, heads: 2, hidden: 12, time: 6 },
        batch: 2,
        microbatches: 5,
        rates: WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 2, total: 6 },
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

/// Trains in a simulation. Returns the bits of each step's loss and norm, in turn, and then of the
/// held-out loss, from process 0.
fn losses(config: &Config, processes: usize, steps: u64) -> Vec<u64> {
    let text = text();
    let simulation =
        Simulation::new(processes, config.devices()).delays(7, Duration::from_millis(1));
    let results = simulation.run(|p| {
        let mut trainer = Trainer::<f32>::new(p, &text, config)?;
        let mut reports: Vec<StepReport> = Vec::new();
        let more = |step: u64| (step < steps).then(|| config.rates.rate(step + 1));
        train(p, &mut trainer, more, |report| reports.push(report))?;
        let held_out = trainer.held_out_loss(p, |_, _| true)?;
        let mut bits: Vec<u64> = reports
            .iter()
            .flat_map(|report| [report.loss.to_bits(), report.norm.to_bits()])
            .collect();
        bits.extend(held_out.map(f64::to_bits));
        Ok(bits)
    });
    let mut all: Vec<Vec<u64>> = results.into_iter().map(|result| result.unwrap()).collect();
    assert!(all[1..].iter().all(Vec::is_empty), "losses are known to process 0 alone");
    all.swap_remove(0)
}

#[test]
fn losses_are_the_same_bits_for_every_division() {
    let reference = losses(&Config { stages: 1, ..tiny() }, 1, 6);
    assert_eq!(reference.len(), 2 * 6 + 1);
    let loss = |index: usize| f64::from_bits(reference[index]);
    assert!((loss(0) - 256f64.ln()).abs() < 0.5, "{}", loss(0));
    assert!(loss(10) < loss(0) && loss(12) < loss(0), "{} {} {}", loss(0), loss(10), loss(12));
    assert!((0..6).all(|step| loss(2 * step + 1) > 0.5), "every step clips");
    for stages in [1, 2, 4] {
        for schedule in ["gpipe", "1f1b"] {
            let config = Config { stages, schedule: schedule.to_owned(), ..tiny() };
            for processes in [1, 2, 4].into_iter().filter(|processes| *processes <= stages) {
                let found = losses(&config, processes, 6);
                assert_eq!(found, reference, "{stages} stages, {schedule}, {processes} processes");
            }
        }
    }
}

/// With more stages than blocks, some stages have no block.
#[test]
fn losses_are_the_same_bits_with_every_schedule() {
    let tiny = || Config { microbatches: 8, ..tiny() };
    let reference = losses(&Config { stages: 1, ..tiny() }, 1, 4);
    for builtin in Builtin::ALL {
        let chunks = builtin.default_chunks();
        for recompute in [false, true] {
            let schedule = builtin.name().to_owned();
            let config = Config { stages: 4 * chunks, chunks, schedule, recompute, ..tiny() };
            let Ok(order) = config.schedule() else {
                assert_eq!(builtin, Builtin::ForwardOnly);
                continue;
            };
            let adds =
                |a: &&Action| matches!(a.kind, ActionKind::Backward | ActionKind::BackwardWeight);
            let mut next = vec![0; order.stages()];
            let ascends = order.rows().iter().flatten().filter(adds).all(|action| {
                next[action.stage] += 1;
                action.microbatch + 1 == next[action.stage]
            });
            for processes in [2, 4] {
                let found = losses(&config, processes, 4);
                let case =
                    format!("{}, {processes} processes, recompute: {recompute}", builtin.name());
                if ascends {
                    assert_eq!(found, reference, "{case}");
                    continue;
                }
                for (found, expected) in found.iter().zip(&reference) {
                    let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
                    assert!(
                        (found - expected).abs() < 1e-6 * expected.abs().max(1.0),
                        "{case}: {found} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn fsdp_and_tensor_parallel_losses_are_near_plain_ones() {
    const STEPS: u64 = 10;
    let rates = WarmupCosine { total: STEPS, ..tiny().rates };
    let plain = Config { stages: 2, rates, ..tiny() };
    let reference = losses(&plain, 1, STEPS);
    for (fsdp, tensor_parallel) in [(2, 1), (1, 2), (2, 2)] {
        let config = Config { fsdp, tensor_parallel, ..plain.clone() };
        let mut alone = None;
        // A stage's mesh spans two of four processes, or one of two, or shares the only one.
        for processes in [1, 2, 4] {
            let found = losses(&config, processes, STEPS);
            assert_eq!(found.len(), reference.len());
            for (found, expected) in found.iter().zip(&reference) {
                let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
                let near = (found - expected).abs() < 1e-5 * expected.abs().max(1.0);
                assert!(near, "{fsdp} x {tensor_parallel}: {found} {expected}");
            }
            let alone = alone.get_or_insert_with(|| found.clone());
            assert_eq!(
                &found, alone,
                "{fsdp} x {tensor_parallel} in {processes} processes: the same bits"
            );
        }
    }
}

/// Computes in doubles, so that a difference of losses has enough digits. The error of a central
/// difference with this step is about 1e-8 for gradients of about 1.
#[test]
fn gradients_agree_with_finite_differences() {
    const STEP: f64 = 1e-4;
    let text = text();
    let config = Config { stages: 2, microbatches: 2, ..tiny() };
    let run = |(fsdp, tensor_parallel): (usize, usize), nudged: Option<(String, usize, f64)>| {
        let config = Config { fsdp, tensor_parallel, ..config.clone() };
        let results = Simulation::new(1, config.devices()).run(|p| {
            let mut trainer = Trainer::<f64>::new(p, &text, &config)?;
            if let Some((nudged, element, by)) = &nudged {
                let state: Vec<(String, MpmdArray)> = trainer.state();
                trainer.set_state(p, 0, |p, name, aval, sharding| {
                    let (_, array) =
                        state.iter().find(|(known, _)| known == name).expect("a known name");
                    let host = array.to_host()?.expect("one process");
                    let mut values = host.to_vec::<f64>()?;
                    if name == nudged {
                        values[*element] += by;
                    }
                    p.device_put(&MpmdArray::from_slice(aval.shape(), &values)?, sharding.clone())
                })?;
            }
            let output = trainer.gradients(p)?;
            let loss = output.loss.sum.to_host()?.expect("one process").as_slice::<f64>()?[0];
            let mut gradients = Vec::new();
            for (_, gradient) in output.gradients.iter().flatten() {
                gradients.push(gradient.to_host()?.expect("one process").to_vec::<f64>()?);
            }
            let names = trainer.state().into_iter().map(|(name, _)| name);
            let names: Vec<String> = names.filter(|name| !name.starts_with("optimizer")).collect();
            Ok((loss, names, gradients))
        });
        results.into_iter().next().unwrap().unwrap()
    };
    for grid in [(1, 1), (1, 2), (2, 1)] {
        let (_, names, gradients) = run(grid, None);
        assert_eq!(names.len(), gradients.len());
        let mut compared = 0;
        for (name, gradient) in names.iter().zip(&gradients) {
            // For bytes that do not occur, the gradient is zero. The largest element is compared.
            let largest = (0..gradient.len())
                .max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs()));
            let element = largest.expect("a parameter has elements");
            let loss = |by| run(grid, Some((name.clone(), element, by))).0;
            let expected = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            let found = gradient[element];
            let tolerance = 1e-5 * expected.abs().max(1e-2);
            assert!(
                (found - expected).abs() < tolerance,
                "{name}[{element}]: {found}, not {expected}"
            );
            compared += 1;
        }
        assert_eq!(compared, 2 + 4 * 12 + 3);
    }
}

/// Waits until every process has finished all issued work and this process's memory use is steady.
/// Returns that use.
fn memory_at_rest(p: &mut Program, trainer: &Trainer<f32>) -> MemoryUse {
    for (_, array) in trainer.state() {
        array.block_until_ready().unwrap();
    }
    for process in 0..p.processes() as u32 {
        p.broadcast_value(ProcessId(process), (), || Ok(())).unwrap();
    }
    // Arrays are freed a moment after their last read.
    let (start, mut since, mut last) = (Instant::now(), Instant::now(), p.memory());
    while since.elapsed() < Duration::from_millis(300) && start.elapsed() < Duration::from_secs(20)
    {
        std::thread::sleep(Duration::from_millis(10));
        let now = p.memory();
        if now.live != last.live {
            (since, last) = (Instant::now(), now);
        }
    }
    p.memory()
}

#[test]
fn memory_is_flat_over_the_steps() {
    let (text, config) = (text(), tiny());
    for processes in [1, 4] {
        let results = Simulation::new(processes, config.devices()).run(|p| {
            let mut trainer = Trainer::<f32>::new(p, &text, &config)?;
            let mut at_rest = Vec::new();
            for until in [20, 60, 4000] {
                train(p, &mut trainer, |step| (step < until).then_some(1e-3), |_| {})?;
                at_rest.push(memory_at_rest(p, &trainer).live);
            }
            Ok(at_rest)
        });
        for (process, at_rest) in results.into_iter().enumerate() {
            let at_rest = at_rest.unwrap();
            assert!(at_rest[0] > 0);
            assert!(
                at_rest.iter().all(|live| *live == at_rest[0]),
                "process {process} of {processes}: {at_rest:?}"
            );
        }
    }
}

#[test]
fn state_resumes_on_another_number_of_stages() {
    let (text, config) = (text(), tiny());
    let whole = losses(&config, 1, 6);
    let run = |stages: usize, fsdp: usize, from: Option<Vec<(String, Vec<f32>)>>, until: u64| {
        let config = Config { stages, fsdp, ..config.clone() };
        let results = Simulation::new(1, config.devices()).run(|p| {
            let mut trainer = Trainer::<f32>::new(p, &text, &config)?;
            if let Some(from) = &from {
                trainer.set_state(p, 3, |p, name, aval, sharding| {
                    let (_, values) =
                        from.iter().find(|(known, _)| known == name).expect("a known name");
                    p.device_put(&MpmdArray::from_slice(aval.shape(), values)?, sharding.clone())
                })?;
            }
            let mut bits = Vec::new();
            let more = |step: u64| (step < until).then(|| config.rates.rate(step + 1));
            train(p, &mut trainer, more, |r| bits.extend([r.loss.to_bits(), r.norm.to_bits()]))?;
            let mut state = Vec::new();
            for (name, array) in trainer.state() {
                state.push((name, array.to_host()?.expect("one process").to_vec::<f32>()?));
            }
            Ok((bits, state))
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let (first, state) = run(4, 1, None, 3);
    let (second, _) = run(2, 1, Some(state), 6);
    assert_eq!([first, second].concat(), whole[..12]);
    // Stored in halves, then whole: loading gives the saved bits.
    let (first, state) = run(2, 2, None, 3);
    let (second, _) = run(1, 1, Some(state.clone()), 6);
    for (found, expected) in first.into_iter().chain(second).zip(&whole) {
        let (found, expected) = (f64::from_bits(found), f64::from_bits(*expected));
        assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{found} {expected}");
    }
    let (_, again) = run(1, 1, Some(state.clone()), 3);
    assert_eq!(again, state);
}

#[test]
fn each_device_keeps_only_its_part_of_the_state() {
    let text = text();
    let at_rest = |fsdp: usize, strategy: Option<Vec<(String, String)>>| -> Vec<u64> {
        let model = Model { width: 16, hidden: 32, ..tiny().model };
        let config = Config { model, stages: 2, fsdp, batch: 4, strategy, ..tiny() };
        // One process for each device.
        let results = Simulation::new(config.devices(), config.devices()).run(|p| {
            let mut trainer = Trainer::<f32>::new(p, &text, &config)?;
            train(p, &mut trainer, |step| (step < 3).then_some(1e-3), |_| {})?;
            let memory = memory_at_rest(p, &trainer);
            let (mut shards, mut counted) = (0, 0);
            for (_, array) in
                trainer.state().into_iter().filter(|(_, array)| !array.is_fully_remote())
            {
                for shard in array.addressable_shards()? {
                    shards += shard.data.bytes().len() as u64;
                    // Buffers are counted with the padding that aligns the next one.
                    counted += shard.data.bytes().len().next_multiple_of(64) as u64;
                }
            }
            Ok((memory.live, shards, counted))
        });
        let results = results.into_iter().map(|result| result.unwrap());
        results
            .map(|(live, shards, counted)| {
                // A few scalars may remain beside the state.
                assert!(
                    (counted..counted + 1024).contains(&live),
                    "{live} bytes, {counted} of the state"
                );
                shards
            })
            .collect()
    };
    let whole = at_rest(1, None);
    for fsdp in [2, 4] {
        for (device, found) in at_rest(fsdp, None).into_iter().enumerate() {
            let part = whole[device / fsdp] as f64 / fsdp as f64;
            assert!(
                found as f64 >= part && (found as f64) < 1.1 * part,
                "{found} bytes, {part} expected"
            );
        }
    }
    let replicated = vec![(".*".to_owned(), "replicate".to_owned())];
    let found = at_rest(2, Some(replicated));
    assert_eq!(found, [whole[0], whole[0], whole[1], whole[1]], "a strategy of the user counts");
}

#[test]
fn samples_are_the_same_on_any_number_of_processes_and_stages() {
    let text = text();
    let sample = |stages: usize, fsdp: usize, processes: usize| {
        let config = Config { stages, fsdp, ..tiny() };
        let results = Simulation::new(processes, config.devices()).run(|p| {
            let mut trainer = Trainer::<f32>::new(p, &text, &config)?;
            train(p, &mut trainer, |step| (step < 3).then_some(1e-2), |_| {})?;
            // Picks a different rank in each step, so that the same byte does not repeat forever.
            trainer.sample(p, b"one two three", 9, |logits, number| {
                let order =
                    |a: &u8, b: &u8| logits[usize::from(*a)].total_cmp(&logits[usize::from(*b)]);
                let mut bytes: Vec<u8> = (0..=255).collect();
                bytes.sort_by(order);
                Some(bytes[255 - number as usize])
            })
        });
        let mut samples: Vec<Vec<u8>> = results.into_iter().map(|result| result.unwrap()).collect();
        assert!(samples.iter().all(|sample| *sample == samples[0]));
        samples.swap_remove(0)
    };
    let reference = sample(1, 1, 1);
    assert_eq!(reference.len(), 9);
    assert_eq!(sample(2, 1, 2), reference);
    assert_eq!(sample(4, 1, 4), reference);
    assert_eq!(sample(2, 2, 2), reference);
}

#[test]
fn evaluation_and_sampling_stop_when_process_0_decides() {
    let (text, config) = (text(), Config { stages: 2, ..tiny() });
    let results = Simulation::new(2, config.devices()).run(|p| {
        let mut trainer = Trainer::<f32>::new(p, &text, &config)?;
        let mut asked = Vec::new();
        let stopped = trainer.held_out_loss(p, |done, all| {
            asked.push((done, all));
            asked.len() < 3
        })?;
        let mut last = (0, 0);
        let whole = trainer.held_out_loss(p, |done, all| {
            last = (done, all);
            true
        })?;
        let sample = trainer.sample(p, b"one", 9, |_, number| (number < 4).then_some(b'x'))?;
        Ok((asked, stopped, last, whole, sample, trainer.sequences().held_out_len()))
    });
    let step = config.batch * config.microbatches;
    for (process, result) in results.into_iter().enumerate() {
        let (asked, stopped, last, whole, sample, count) = result.unwrap();
        assert!(stopped.is_none() && count > 3 * step, "{count}");
        assert_eq!(sample, b"xxxx");
        assert_eq!(whole.is_some(), process == 0);
        if process == 0 {
            assert_eq!(asked, [(0, count), (step, count), (2 * step, count)]);
            assert_eq!(last, (count, count));
        } else {
            assert!(asked.is_empty() && last == (0, 0));
        }
    }
}

#[test]
fn mismatched_sizes_are_errors() {
    let text = text();
    let cases = [
        (Config { stages: 5, chunks: 2, ..tiny() }, "5 stages do not divide among ranks of 2"),
        (Config { schedule: "forward".to_owned(), ..tiny() }, "no backward passes"),
        (Config { tensor_parallel: 4, ..tiny() }, "divide among 4"),
        (Config { fsdp: 4, ..tiny() }, "2 sequences of a microbatch do not divide among 4 devices"),
        (Config { batch: 0, ..tiny() }, "size of zero"),
        (Config { schedule: "zigzag".to_owned(), ..tiny() }, "zigzag"),
    ];
    for (config, expected) in cases {
        let results = Simulation::new(1, config.devices())
            .run(|p| Trainer::<f32>::new(p, &text, &config).map(|_| ()));
        let error = results.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
