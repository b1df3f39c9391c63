//! Captured and replayed steps: the same values, memory and failures as issued steps.

use std::time::{Duration, Instant};

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{Captured, Jit, ProcessId, Simulation};
use mpmd_memory::Pool;

const STAGES: usize = 4;
const WIDTH: usize = 3;

/// The inputs of a step: (a sum for each stage, which the step donates; the microbatches; the
/// rate).
type Given = (Vec<MpmdArray>, Vec<MpmdArray>, MpmdArray);

/// The results of a step: (the new sums; one of the given microbatches; each microbatch's output,
/// on device 0).
type Results = (Vec<MpmdArray>, MpmdArray, Vec<MpmdArray>);

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

/// A model of several stages. Forward: y = x * w + 1 on each stage. Backward: the gradient times
/// the rate is added to the stage's sum.
struct Model {
    meshes: Vec<Mesh>,
    weights: Vec<MpmdArray>,
    forward: Vec<Jit<Forward>>,
    backward: Vec<Jit<Backward>>,
}

struct Forward;

impl Kernel for Forward {
    type In = (MpmdArray, MpmdArray);
    type Out = (MpmdArray, MpmdArray);

    fn infer(
        &self,
        (_, x): &(ShapedArray, ShapedArray),
    ) -> Result<Signature<(ShapedArray, ShapedArray)>> {
        Ok(Signature::new((x.clone(), x.clone())))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (w, x): (View<'_>, View<'_>),
        (mut y, mut kept): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let (w, x) = (w.as_slice::<f32>()?, x.as_slice::<f32>()?);
        if x[0] < 0.0 {
            return Err(Error::kernel("a negative input"));
        }
        kept.as_mut_slice()?.copy_from_slice(x);
        let y = y.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| y[i] = x[i] * w[i] + 1.0);
        Ok(())
    }
}

struct Backward;

impl Kernel for Backward {
    type In = (MpmdArray, MpmdArray, MpmdArray, MpmdArray);
    type Out = (MpmdArray, MpmdArray);

    fn infer(
        &self,
        (sum, dy, _, _): &(ShapedArray, ShapedArray, ShapedArray, ShapedArray),
    ) -> Result<Signature<(ShapedArray, ShapedArray)>> {
        Ok(Signature::new((sum.clone(), dy.clone())).alias("0", "0"))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (_, dy, kept, rate): (View<'_>, View<'_>, View<'_>, View<'_>),
        (mut sum, mut dx): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let (dy, kept, rate) = (
            dy.as_slice::<f32>()?,
            kept.as_slice::<f32>()?,
            rate.scalar::<f32>()?,
        );
        let (sum, dx) = (sum.as_mut_slice::<f32>()?, dx.as_mut_slice::<f32>()?);
        for i in 0..dy.len() {
            sum[i] += rate * dy[i] * kept[i];
            dx[i] = dy[i] * 0.5 + kept[i];
        }
        Ok(())
    }
}

impl Model {
    fn new(p: &mut Program) -> Result<Self> {
        let meshes = p.mesh(&[("stage", STAGES)])?.split("stage")?;
        let mut weights = Vec::new();
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for (stage, mesh) in meshes.iter().enumerate() {
            let values = [0.5 + stage as f32, 0.25, 1.0 / (1.0 + stage as f32)];
            weights.push(p.device_put(
                &MpmdArray::from_slice(&[WIDTH], &values)?,
                mesh.replicated(),
            )?);
            forward.push(p.jit(Forward).on(mesh).outputs(mesh.replicated()).build()?);
            let jit = p.jit(Backward).on(mesh).outputs(mesh.replicated());
            backward.push(jit.donate("0").donate("2").build()?);
        }
        Ok(Self {
            meshes,
            weights,
            forward,
            backward,
        })
    }

    fn sums(&self, p: &mut Program) -> Result<Vec<MpmdArray>> {
        let zeros = |mesh: &Mesh| {
            p.array_from_fn(f32s([WIDTH]), mesh.replicated(), |_, mut view| {
                Ok(view.fill(0.0f32)?)
            })
        };
        self.meshes.iter().map(zeros).collect()
    }

    fn given(&self, p: &mut Program, sums: Vec<MpmdArray>, step: usize) -> Result<Given> {
        let mut one = |m: usize| {
            let values: Vec<f32> = (0..WIDTH)
                .map(|i| (1 + m + i * step) as f32 * 0.125)
                .collect();
            p.device_put(
                &MpmdArray::from_slice(&[WIDTH], &values)?,
                self.meshes[0].replicated(),
            )
        };
        let xs = (0..5).map(&mut one).collect::<Result<_>>()?;
        Ok((sums, xs, MpmdArray::scalar(0.5f32 + step as f32)))
    }

    /// Issues a step: for one microbatch after the other, forward through all stages and then
    /// backward. Does not wait.
    fn step(&self, p: &mut Program, (mut sums, xs, rate): Given) -> Result<Results> {
        let mut outputs = Vec::new();
        let first = xs[0].clone();
        for x in xs {
            let (mut x, mut kept) = (x, Vec::new());
            for stage in 0..STAGES {
                x = p.device_put(&x, self.meshes[stage].replicated())?;
                let (y, residual) =
                    self.forward[stage].call(p, (self.weights[stage].clone(), x))?;
                kept.push(residual);
                x = y;
            }
            // Through another device, and donated.
            let out = p.device_put(&x, on(1))?;
            outputs.push(p.device_put_with(&out, on(0), MoveOptions::default().donate(true))?);
            for stage in (0..STAGES).rev() {
                let dy = p.device_put(&x, self.meshes[stage].replicated())?;
                let residual = kept.pop().expect("one for each stage");
                let sum = sums[stage].clone();
                let (sum, dx) = self.backward[stage].call(p, (sum, dy, residual, rate.clone()))?;
                sums[stage] = sum;
                x = dx;
            }
        }
        Ok((sums, first, outputs))
    }
}

#[derive(Clone, Copy, PartialEq)]
enum IssueMode {
    Issued,
    Replayed,
}

/// The results of a job on one process: (values read in all steps, number of operations, bytes in
/// use at the end).
type Ran = (Vec<Option<Vec<f32>>>, u64, u64);

fn read(x: &MpmdArray) -> Result<Option<Vec<f32>>> {
    Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)
}

/// Waits up to 20 seconds until `expected` bytes are in use; returns the bytes in use.
fn settled(p: &Program, expected: u64) -> u64 {
    let limit = Instant::now() + Duration::from_secs(20);
    while p.memory().live != expected && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(1));
    }
    p.memory().live
}

fn train(p: &mut Program, how: IssueMode) -> Result<Ran> {
    let model = Model::new(p)?;
    let mut sums = model.sums(p)?;
    let mut values = Vec::new();
    let mut captured: Option<Captured<Given, Results>> = None;
    for step in 0..4 {
        let given = model.given(p, std::mem::take(&mut sums), step)?;
        let donated = given.0[3].clone();
        let (new, first, outputs) = match &captured {
            Some(captured) => captured.replay(p, given)?,
            None if how == IssueMode::Issued => model.step(p, given)?,
            None => {
                let (results, new) = p.capture(given, |p, given| model.step(p, given))?;
                assert_eq!(new.operations(), 5 * 18, "{new:?}");
                captured = Some(new);
                results
            }
        };
        let refused = p.device_put(&donated, on(0)).unwrap_err().to_string();
        assert!(refused.contains("was donated to operation"), "{refused}");
        p.step_end()?;
        for array in new.iter().chain([&first]).chain(&outputs) {
            values.push(read(array)?);
        }
        sums = new;
    }
    let kept = sums.iter().chain(&model.weights);
    let kept_here = kept.filter(|array| !array.is_fully_remote()).count();
    let live = settled(p, kept_here as u64 * Pool::rounded(WIDTH * 4));
    Ok((values, p.operations(), live))
}

#[test]
fn replays_give_the_same_bits_and_leave_the_same_memory() {
    let _limit = watchdog(120);
    for processes in [1, 2, 4] {
        for seed in 0..6 {
            let simulation = Simulation::new(processes, STAGES)
                .delays(seed, Duration::from_millis(2 * (seed % 3)));
            let run = |how| {
                simulation
                    .run(|p| train(p, how))
                    .into_iter()
                    .collect::<Result<Vec<Ran>>>()
                    .unwrap()
            };
            let (issued, replayed) = (run(IssueMode::Issued), run(IssueMode::Replayed));
            assert!(
                issued == replayed,
                "{processes} processes, seed {seed}: {issued:?} {replayed:?}"
            );
            // Sums and weights.
            let bytes = 2 * (STAGES / processes) as u64 * Pool::rounded(WIDTH * 4);
            assert!(
                replayed.iter().all(|(_, _, live)| *live == bytes),
                "{replayed:?}"
            );
        }
    }
}

#[test]
fn a_program_that_may_run_one_operation_ahead_replays() {
    let _limit = watchdog(120);
    let simulation = Simulation::new(2, STAGES).settings(|builder| builder.run_ahead(1, 1 << 30));
    let run = |how| {
        simulation
            .run(|p| train(p, how))
            .into_iter()
            .collect::<Result<Vec<Ran>>>()
            .unwrap()
    };
    assert_eq!(run(IssueMode::Issued), run(IssueMode::Replayed));
}

#[test]
fn each_process_issues_only_its_own_operations() {
    let _limit = watchdog(60);
    let results = Simulation::new(4, STAGES).run(|p| {
        let model = Model::new(p)?;
        let sums = model.sums(p)?;
        let given = model.given(p, sums, 1)?;
        let (_, captured) = p.capture(given, |p, given| model.step(p, given))?;
        Ok((captured.operations(), captured.operations_here()))
    });
    // Forward and backward, moves in and out in each direction, and relayed ones.
    let expected = [(90, 30), (90, 40), (90, 30), (90, 30)];
    let found: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(found, expected);
}

/// Captures a step on four processes. Then replays it once on process 0, while the others run
/// `other`. Returns the text of each process's error; all must have one.
fn diverge(
    other: impl Fn(&mut Program, &Model, &Captured<Given, Results>, Given) -> Result<()> + Sync,
) -> Vec<String> {
    let results = Simulation::new(4, STAGES)
        .delays(3, Duration::from_millis(1))
        .run(|p| {
            let model = Model::new(p)?;
            let sums = model.sums(p)?;
            let given = model.given(p, sums, 0)?;
            let ((sums, ..), captured) = p.capture(given, |p, given| model.step(p, given))?;
            let given = model.given(p, sums, 1)?;
            if p.process() == ProcessId(0) {
                captured.replay(p, given).map(drop)?;
            } else {
                other(p, &model, &captured, given)?;
            }
            p.step_end()
        });
    results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect()
}

#[test]
fn replay_on_one_process_and_issue_on_another_diverge() {
    let _limit = watchdog(120);
    let errors = diverge(|p, model, _, given| model.step(p, given).map(drop));
    for error in &errors {
        assert!(error.contains("diverged"), "{errors:?}");
        assert!(
            error.contains("of the step captured at") && error.contains("replay.rs"),
            "{errors:?}"
        );
    }
}

#[test]
fn replays_of_different_steps_diverge() {
    let _limit = watchdog(120);
    let results = Simulation::new(2, STAGES).run(|p| {
        let model = Model::new(p)?;
        let mut sums = model.sums(p)?;
        let mut steps = Vec::new();
        for _ in 0..2 {
            let given = model.given(p, sums, 0)?;
            let (results, captured) = p.capture(given, |p, given| model.step(p, given))?;
            sums = results.0;
            steps.push(captured);
        }
        let given = model.given(p, sums, 1)?;
        steps[p.process().index()].replay(p, given).map(drop)?;
        p.step_end()
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(error.is_divergence(), "{error}");
    }
}

#[test]
fn replays_on_different_arrays_diverge() {
    let _limit = watchdog(120);
    let errors = diverge(|p, _, captured, (sums, mut xs, rate)| {
        xs.swap(1, 2);
        captured.replay(p, (sums, xs, rate)).map(drop)
    });
    assert!(
        errors.iter().all(|error| error.contains("diverged")),
        "{errors:?}"
    );
    let errors = diverge(|p, _, captured, (sums, xs, _)| {
        captured
            .replay(p, (sums, xs, MpmdArray::scalar(77.0f32)))
            .map(drop)
    });
    assert!(
        errors.iter().all(|error| error.contains("diverged")),
        "{errors:?}"
    );
}

#[test]
fn inputs_of_another_shape_on_one_process_are_an_error_on_all() {
    let _limit = watchdog(120);
    let errors = diverge(|p, _, captured, (sums, xs, rate)| {
        if p.process() != ProcessId(2) {
            return captured.replay(p, (sums, xs, rate)).map(drop);
        }
        let rate = MpmdArray::from_slice(&[1], &[1.0f32])?;
        captured.replay(p, (sums, xs, rate)).map(drop)
    });
    assert!(
        errors[2].contains("\"2\": is f32[1] uncommitted, but the step was captured with f32[]"),
        "{errors:?}"
    );
    assert!(errors.iter().all(|error| !error.is_empty()), "{errors:?}");
}

#[test]
fn a_failure_in_a_replay_names_the_operation_and_its_line() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2)
        .delays(1, Duration::from_millis(1))
        .run(|p| {
            let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
            let refuse = fun("refuse", like_first, |_, x, mut y| {
                let value = x[0].scalar::<f32>()?;
                y[0].fill(value)?;
                if value < 0.0 {
                    Err(Error::kernel("a negative input"))
                } else {
                    Ok(())
                }
            });
            let jits = meshes.iter().map(|mesh| {
                let copy = fun("copy", like_first, |_, x, mut y| {
                    Ok(y[0].fill(x[0].scalar::<f32>()?)?)
                });
                p.jit(copy).on(mesh).outputs(mesh.replicated()).build()
            });
            let jits = jits.collect::<Result<Vec<_>>>()?;
            let refuse = p
                .jit(refuse)
                .on(&meshes[0])
                .outputs(meshes[0].replicated())
                .build()?;
            let x = p.device_put(&MpmdArray::scalar(1.0f32), meshes[0].replicated())?;
            let (y, step) = p.capture(x, |p, x| {
                let x = jits[0].call(p, vec![x])?;
                let x = refuse.call(p, x)?;
                let x = p.device_put(&x, meshes[1].replicated())?;
                jits[1].call(p, x)
            })?;
            if let Some(y) = read(&y[0])? {
                assert_eq!(y, [1.0]);
            }
            let x = p.device_put(&MpmdArray::scalar(-1.0f32), meshes[0].replicated())?;
            let before = p.operations();
            let y = step.replay(p, x)?;
            assert_eq!((before, p.operations()), (6, 10));
            match read(&y[0]) {
                Err(error) => Err(error),
                Ok(_) => p.step_end(),
            }
        });
    // Process 1 waits for data that never comes. Process 0 learns of it no later than its finish.
    for result in results {
        let error = result.unwrap_err();
        let failure = error.failure().expect("of an operation");
        assert_eq!((failure.process, failure.op), (ProcessId(0), 8), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("kernel refuse of operation 8 at") && text.contains("replay.rs"),
            "{text}"
        );
    }
}

#[test]
fn a_process_that_is_lost_in_a_replay_is_an_error_on_all() {
    let _limit = watchdog(120);
    // Lost before the first step, in its capture, and in a replay of 90 operations each.
    for op in [130, 170, 210] {
        let results = Simulation::new(4, STAGES)
            .lose(ProcessId(2), op)
            .run(|p| train(p, IssueMode::Replayed));
        for result in results {
            let error = result.unwrap_err();
            assert!(error.is_peer_failure(), "{op}: {error}");
        }
    }
}

/// Runs a program on two processes, which must succeed. Returns its texts, which must be the same
/// on both.
fn refused(program: impl Fn(&mut Program) -> Result<Vec<String>> + Sync) -> Vec<String> {
    let results = Simulation::new(2, 2).run(program);
    let mut results = results.into_iter().map(Result::unwrap);
    let first = results.next().unwrap();
    assert!(
        results.all(|result| result == first),
        "the same on every process"
    );
    first
}

fn text<T>(result: Result<T>) -> String {
    result
        .err()
        .map_or_else(String::new, |error| error.to_string())
}

#[test]
fn uncapturable_calls_are_refused_and_take_no_number() {
    let _limit = watchdog(60);
    let texts = refused(|p| {
        let both = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
        let x = p.device_put(&MpmdArray::from_slice(&[4], &[1.0f32; 4])?, &both)?;
        let outside = p.device_put(&x, on(1))?;
        let given_up = p.device_put(&x, &both)?;
        let (_, earlier) = p.capture(x.clone(), |_, x| Ok(x))?;
        let before = p.operations();
        let mut texts = Vec::new();
        let donate = MoveOptions::default().donate(true);
        let (_, _) = p.capture(x.clone(), |p, x| {
            texts.push(text(p.array_from_fn(f32s([2]), &both, |_, _| Ok(()))));
            texts.push(text(p.broadcast_value(ProcessId(0), 0, || Ok(1))));
            texts.push(text(x.microbatches(p, 0, 2)));
            texts.push(text(p.step_end()));
            texts.push(text(p.capture(x.clone(), |_, x| Ok(x))));
            texts.push(text(earlier.replay(p, x.clone())));
            assert_eq!(p.operations(), before);
            texts.push(text(p.device_put_with(&outside, on(0), donate)));
            texts.push(text(p.reshard(
                &outside,
                on(0),
                MoveOptions::default().donate(true),
            )));
            let parts = SplitOptions::default().donate(true);
            texts.push(text(p.split_by_mesh_axis(&given_up, "x", 2, parts)));
            let double = p
                .jit(fun("same", like_first, |_, _, _| Ok(())))
                .on(&p.mesh_of(&[("y", 1)], &[DeviceId(1)])?);
            let double = double.outputs(on(1)).donate("0").build()?;
            texts.push(text(double.call(p, vec![outside.clone()])));
            assert_eq!(p.operations(), before);
            let y = p.device_put(&x, on(0))?;
            texts.push(text(y.to_host()));
            assert!(text(y.addressable_shards()).contains("replay reads no values"));
            y.block_until_ready()?;
            assert_eq!(p.operations(), before + 1);
            Ok(Vec::<MpmdArray>::new())
        })?;
        drop(outside.to_host()?);
        assert_eq!(texts.iter().filter(|text| text.is_empty()).count(), 0);
        // The captured step can still be replayed.
        Ok(texts)
    });
    for (found, call) in texts.iter().zip([
        "array_from_fn",
        "broadcast_value",
        "microbatches",
        "step_end",
        "capture",
        "replay",
    ]) {
        assert!(
            found.contains(&format!("{call}: not within a step that is captured (at")),
            "{found}"
        );
    }
    for found in &texts[6..10] {
        assert!(
            found.contains("neither made by it nor an input of it"),
            "{found}"
        );
    }
    assert!(
        texts[10].contains("replay reads no values"),
        "{}",
        texts[10]
    );
    assert_eq!(texts.len(), 11);
}

#[test]
fn step_failing_at_issue_captures_nothing_and_program_goes_on() {
    let _limit = watchdog(60);
    let texts = refused(|p| {
        let x = p.device_put(&MpmdArray::scalar(1.0f32), on(0))?;
        let failed = p.capture(x.clone(), |p, x| -> Result<MpmdArray> {
            drop(p.device_put(&x, on(1))?);
            Err(Error::kernel("not today"))
        });
        let y = p.array_from_fn(f32s([]), on(1), |_, mut view| Ok(view.fill(2.0f32)?))?;
        drop(y.to_host()?);
        Ok(vec![text(failed)])
    });
    assert_eq!(texts, ["not today"]);
}

#[test]
fn changed_inputs_are_refused_and_nothing_is_issued() {
    let _limit = watchdog(60);
    let texts = refused(|p| {
        let donate = MoveOptions::default().donate(true);
        let put = |p: &mut Program, values: &[f32], to: u32| {
            p.device_put(&MpmdArray::from_slice(&[values.len()], values)?, on(to))
        };
        let (a, b) = (put(p, &[1.0, 2.0], 0)?, put(p, &[3.0, 4.0], 0)?);
        let constant = put(p, &[5.0], 1)?;
        let (_, step) = p.capture((a, vec![b]), |p, (a, b)| {
            let used = p.device_put(&constant, on(0))?;
            Ok((
                p.device_put_with(&a, on(1), donate)?,
                p.device_put(&b[0], on(1))?,
                used,
            ))
        })?;
        let x = put(p, &[1.0], 0)?;
        let (_, twice) = p.capture((x.clone(), x), |p, (x, y)| {
            Ok((p.device_put(&x, on(1))?, p.device_put(&y, on(1))?))
        })?;
        let mut texts = Vec::new();
        let (a, b) = (put(p, &[1.0, 2.0], 0)?, put(p, &[3.0, 4.0], 0)?);
        let before = p.operations();
        let short = put(p, &[1.0], 0)?;
        let there = put(p, &[1.0, 2.0], 1)?;
        texts.push(text(step.replay(p, (a.clone(), vec![short.clone()]))));
        texts.push(text(step.replay(p, (there, vec![b.clone()]))));
        texts.push(text(step.replay(
            p,
            (a.clone(), vec![MpmdArray::from_slice(&[2], &[1.0f32; 2])?]),
        )));
        texts.push(text(step.replay(p, (a.clone(), vec![]))));
        texts.push(text(step.replay(p, (a.clone(), vec![a.clone()]))));
        let other = put(p, &[7.0], 0)?;
        texts.push(text(twice.replay(p, (short.clone(), other))));
        assert_eq!(
            p.operations(),
            before + 3,
            "the three puts of this text alone"
        );
        drop(step.replay(p, (a.clone(), vec![b.clone()]))?);
        texts.push(text(step.replay(p, (a, vec![b.clone()]))));
        drop(p.device_put_with(&constant, on(0), donate)?);
        let a = put(p, &[1.0, 2.0], 0)?;
        texts.push(text(step.replay(p, (a, vec![b]))));
        let mut other = Program::builder().devices(2).alone()?;
        texts.push(text(twice.replay(
            &mut other,
            (MpmdArray::scalar(1.0f32), MpmdArray::scalar(1.0f32)),
        )));
        other.finish()?;
        Ok(texts)
    });
    let expected = [
        "\"1/0\": is f32[1] as",
        "\"0\": is f32[2] as",
        "\"1/0\": is f32[2] uncommitted, but the step was captured with f32[2] as",
        "is a tree of 0, but the step was captured with a tree of 0, 1/0",
        "\"1/0\" is the same array as \"0\", and was not when the step was captured, which \
         donates one of them",
        "\"1\" was the same array as \"0\" when the step was captured, and is another one",
        "\"0\": was donated to operation",
        "\"an array from outside of the step\": was donated to operation",
        "belongs to another program",
    ];
    for (found, expected) in texts.iter().zip(expected) {
        assert!(found.contains(expected), "{found}\n{expected}");
    }
    assert_eq!(texts.len(), expected.len());
}

#[test]
fn process_without_work_releases_a_donated_source() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let both = p.mesh(&[("x", 2)])?.replicated();
        let donate = MoveOptions::default().donate(true);
        let make = |p: &mut Program| {
            p.array_from_fn(f32s([1000]), &both, |_, mut view| Ok(view.fill(1.0f32)?))
        };
        let x = make(p)?;
        // Process 0 keeps its part, and process 1 has nothing to do.
        let (y, step) = p.capture(x, |p, x| p.device_put_with(&x, on(0), donate))?;
        drop(y);
        let mut live = Vec::new();
        for _ in 0..3 {
            let x = make(p)?;
            x.block_until_ready()?;
            assert!(p.memory().live >= 4000);
            drop(step.replay(p, x.clone())?);
            // The source has ended for every handle, including this one.
            live.push(settled(p, 0));
            drop(x);
        }
        Ok(live)
    });
    let live: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(live, vec![vec![0; 3]; 2]);
}

#[test]
fn an_output_that_the_step_donates_is_refused_everywhere() {
    let _limit = watchdog(60);
    let results = Simulation::new(3, 3).run(|p| {
        let donate = MoveOptions::default().donate(true);
        let x = p.device_put(&MpmdArray::scalar(1.0f32), on(0))?;
        // Process 0 gives the output. Process 1 has it and alone takes part in its donation.
        // Process 2 does neither.
        let ((y, _), step) = p.capture(x, |p, x| {
            let y = p.device_put(&x, on(1))?;
            let z = p.device_put_with(&y, on(1), donate)?;
            Ok((y, z))
        })?;
        let mut texts = vec![text(p.device_put(&y, on(2)))];
        for _ in 0..2 {
            let x = p.device_put(&MpmdArray::scalar(2.0f32), on(0))?;
            let (y, z) = step.replay(p, x)?;
            texts.push(text(p.device_put(&y, on(2))));
            p.device_put(&z, on(2))?.block_until_ready()?;
        }
        Ok(texts)
    });
    for result in results {
        let texts = result.unwrap();
        for (found, op) in texts.iter().zip([3, 6, 10]) {
            assert!(
                found.contains(&format!("was donated to operation {op} at")),
                "{texts:?}"
            );
        }
    }
}

#[test]
fn dry_run_replays_all_operations_without_executing() {
    let mut p = Program::builder().devices(STAGES).dry_run(STAGES).unwrap();
    let model = Model::new(&mut p).unwrap();
    let sums = model.sums(&mut p).unwrap();
    let given = model.given(&mut p, sums, 0).unwrap();
    let ((sums, _, outputs), step) = p.capture(given, |p, given| model.step(p, given)).unwrap();
    let before = p.operations();
    let given = model.given(&mut p, sums, 1).unwrap();
    let (again, _, others) = step.replay(&mut p, given).unwrap();
    // It lists the operations of all processes, so each of them counts as its own.
    assert_eq!(
        (p.operations() - before, step.operations_here()),
        (5 + 90, 90)
    );
    assert_eq!(others.len(), outputs.len());
    assert!(again.iter().chain(&others).all(MpmdArray::is_fully_remote));
    p.finish().unwrap();
}

/// Cuts an array along its mesh, hands the parts around, joins them, and moves the result by way of
/// an intermediate sharding.
fn turn(p: &mut Program, x: MpmdArray, rows: &Sharding, to: &Sharding) -> Result<MpmdArray> {
    let parts = p.split_by_mesh_axis(&x, "x", Sections::Each, SplitOptions::default())?;
    let places: Vec<Sharding> = parts
        .iter()
        .filter_map(|part| part.sharding().cloned())
        .collect();
    let mut turned = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        turned.push(p.device_put(part, &places[(i + 1) % places.len()])?);
    }
    turned.rotate_right(1);
    let donated = SplitOptions::default().donate(true);
    let joined = p.concatenate_by_mesh_axis(&turned, "x", donated)?;
    let before = p.operations();
    let options = MoveOptions::default().donate(true);
    let moved = p.reshard_with_intermediate_sharding(&joined, rows, to, options)?;
    assert_eq!(p.operations(), before + 3, "by way of an intermediate");
    Ok(moved)
}

#[test]
fn parts_and_intermediates_are_replayed() {
    let _limit = watchdog(60);
    for processes in [1, 2, 6] {
        let results = Simulation::new(processes, 6)
            .delays(3, Duration::from_millis(2))
            .run(|p| {
                let source: Vec<DeviceId> = (0..4).map(DeviceId).collect();
                let rows = p.mesh_of(&[("x", 4)], &source)?.sharding(spec!["x", None]);
                let target = p.mesh_of(&[("x", 2)], &[DeviceId(4), DeviceId(5)])?;
                let to = target.sharding(spec![None, "x"]);
                let put = |p: &mut Program, first: u8| {
                    let values: Vec<f32> = (0..16u8).map(|i| f32::from(first + i)).collect();
                    p.device_put(&MpmdArray::from_slice(&[8, 2], &values)?, &rows)
                };
                let x = put(p, 0)?;
                let (y, step) = p.capture(x, |p, x| turn(p, x, &rows, &to))?;
                let mut found = vec![y];
                for first in [100, 50] {
                    let x = put(p, first)?;
                    let before = p.operations();
                    found.push(step.replay(p, x.clone())?);
                    assert_eq!(p.operations() - before, step.operations());
                    // It was not donated.
                    x.block_until_ready()?;
                }
                for (y, first) in found.into_iter().zip([0u8, 100, 50]) {
                    y.block_until_ready()?;
                    if y.is_fully_remote() {
                        continue;
                    }
                    for shard in y.addressable_shards()? {
                        let column = shard.region.range(1).start as u8;
                        // Part i is that before it.
                        let rows = [6, 7, 0, 1, 2, 3, 4, 5u8];
                        let expected = rows.map(|row| f32::from(first + 2 * row + column));
                        assert_eq!(shard.data.to_vec::<f32>()?, expected);
                    }
                }
                Ok(())
            });
        results.into_iter().for_each(Result::unwrap);
    }
}
