//! Commits and their restoring, in simulated jobs that lose processes.

use std::time::Duration;

use mpmd_base::block::{now, since, thread};
use mpmd_core::aval::{DType, ShapedArray};
use mpmd_core::prelude::*;
use mpmd_core::{Commits, Committed, ProcessId, Simulation};

const STEPS: u64 = 20;

/// Elements of each process: enough for messages that need a grant, so that later small ones arrive
/// before.
const EACH: usize = 32 << 10;

/// A state that knows which half of a step is done.
struct State {
    x: MpmdArray,
    is_half: bool,
}

impl Committed for State {
    fn arrays(&self) -> Vec<MpmdArray> {
        vec![self.x.clone()]
    }

    fn values(&self) -> Vec<u8> {
        vec![u8::from(self.is_half)]
    }

    fn restore(&mut self, mut arrays: Vec<MpmdArray>, values: &[u8]) -> Result<()> {
        (self.x, self.is_half) = (arrays.remove(0), values == [1]);
        Ok(())
    }
}

/// Changes the state in two halves of each step, and commits before each half. Returns the step at
/// which the last epoch began, and the result.
fn train(p: &mut Program, commits: &Commits) -> Result<(u64, Vec<f32>)> {
    let n = p.processes();
    let mesh = p.mesh(&[("x", n)])?;
    let here = mesh.sharding(spec!["x"]);
    let change = |p: &mut Program, by: f32| {
        let change = elementwise(move |x: f32| x * 1.25 + by).with(by.to_bits());
        p.jit(change).on(&mesh).outputs(&here).build()
    };
    let halves = [change(p, 1.0)?, change(p, 2.0)?];
    let x = p.array_from_fn(f32s([n * EACH]), &here, |region, mut values| {
        Ok(values.fill(region.range(0).start as f32)?)
    })?;
    let mut state = State { x, is_half: false };
    let first = commits.restore(p, &mut state)? / 2;
    for step in first..STEPS {
        for half in [false, true] {
            if state.is_half != half {
                continue;
            }
            p.commit(2 * step + u64::from(half), &state)?;
            state.x = halves[usize::from(half)].call(p, state.x)?;
            state.is_half = !half;
            thread::sleep(Duration::from_millis(1));
        }
        p.step_end()?;
        state.x.block_until_ready()?;
    }
    let all = p.device_put(&state.x, mesh.replicated())?.to_host()?;
    Ok((first, all.expect("every process has it").to_vec()?))
}

/// A state is committed again right after it was restored. The process that took the place of a
/// lost one dies too, at many operations of its epoch in turn. So the other one has all regions at
/// all times.
#[test]
fn state_that_is_committed_again_survives_each_loss() {
    let expected = {
        let all = Simulation::new(2, 2).seed(0).run_recovering(1, train).0;
        all[0].as_ref().unwrap().clone().unwrap().1
    };
    for op in (0..90).step_by(2) {
        let simulation = Simulation::new(2, 2).seed(op).lose_in(ProcessId(2), 2, op);
        let simulation = simulation.lose_after(ProcessId(1), Duration::from_millis(30));
        let spares = [Duration::ZERO, Duration::from_millis(31)];
        let simulation = spares.into_iter().fold(simulation, Simulation::spare_after);
        let (results, report) = simulation.run_recovering(1, train);
        assert_eq!(report.left, [""; 0]);
        let (first, found) = results[0].as_ref().unwrap().clone().unwrap();
        assert_eq!(found, expected, "operation {op}");
        assert!(first > 0, "operation {op} goes back to the start");
    }
}

struct Named(Vec<(&'static str, MpmdArray)>);

impl Committed for Named {
    fn arrays(&self) -> Vec<MpmdArray> {
        self.0.iter().map(|(_, array)| array.clone()).collect()
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    fn restore(&mut self, arrays: Vec<MpmdArray>, _: &[u8]) -> Result<()> {
        self.0
            .iter_mut()
            .zip(arrays)
            .for_each(|((_, array), new)| *array = new);
        Ok(())
    }
}

#[test]
fn other_arrays_are_refused_on_every_process() {
    let f32s = |name| (name, DType::F32, 4);
    let cases = [
        (
            vec![("w", DType::I32, 4), f32s("b")],
            "it has w f32[4], and the state has w i32[4]",
        ),
        (
            vec![f32s("w"), ("b", DType::F64, 4)],
            "it has b f32[4], and the state has b f64[4]",
        ),
        (
            vec![f32s("w"), ("b", DType::F32, 2)],
            "it has b f32[4], and the state has b f32[2]",
        ),
        (vec![f32s("w")], "it has 2 arrays, and the state has 1"),
        (
            vec![f32s("w"), f32s("b"), f32s("c")],
            "it has 2 arrays, and the state has 3",
        ),
        (
            vec![f32s("v"), f32s("b")],
            "it has w f32[4], and the state has v f32[4]",
        ),
    ];
    for (other, expected) in cases {
        let program = |p: &mut Program, commits: &Commits| -> Result<String> {
            let here = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
            let made = |p: &mut Program, (name, dtype, n): (&'static str, DType, usize)| {
                let zeros = |_: &_, mut values: mpmd_core::kernel::ViewMut<'_>| {
                    values.as_bytes_mut().fill(0);
                    Ok(())
                };
                Ok((
                    name,
                    p.array_from_fn(ShapedArray::new(&[n], dtype), &here, zeros)?,
                ))
            };
            let arrays = if p.epoch() == 1 {
                vec![f32s("w"), f32s("b")]
            } else {
                other.clone()
            };
            let arrays = arrays.into_iter().map(|array| made(p, array));
            let mut state = Named(arrays.collect::<Result<_>>()?);
            if p.epoch() == 2 {
                let refused = commits.restore(p, &mut state);
                return Ok(refused.map_or_else(|error| error.to_string(), |step| step.to_string()));
            }
            for step in 1.. {
                p.commit(step, &state)?;
                p.step_end()?;
                thread::sleep(Duration::from_millis(1));
            }
            unreachable!("a process is lost");
        };
        let lost = Simulation::new(2, 2).seed(1).spare_after(Duration::ZERO);
        let lost = lost.lose_after(ProcessId(1), Duration::from_millis(30));
        let (results, _) = lost.run_recovering(1, program);
        let found =
            [0, 2].map(|process: usize| results[process].as_ref().unwrap().clone().unwrap());
        assert_eq!(found[0], found[1]);
        assert!(
            found[0].contains("restore") && found[0].ends_with(expected),
            "{}",
            found[0]
        );
    }
}

/// Process 1 gets nothing for a time, so no commit can be known to be whole.
#[test]
fn third_unconfirmed_commit_waits() {
    let (held, time) = (Duration::from_millis(20), Duration::from_millis(500));
    let simulation = Simulation::new(2, 2).seed(3);
    let simulation = simulation.hold_after(ProcessId(0), ProcessId(1), held, time);
    let (results, report) = simulation.run_recovering(1, |p, _| {
        let begin = now();
        let here = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
        let zeros = |_: &_, mut values: mpmd_core::kernel::ViewMut<'_>| Ok(values.fill(0.0f32)?);
        let x = p.array_from_fn(f32s([64]), &here, zeros)?;
        let mut returned = Vec::new();
        for step in 0..60 {
            p.commit(step, &x)?;
            returned.push(since(begin));
            thread::sleep(Duration::from_millis(1));
        }
        Ok(returned)
    });
    assert_eq!(report.left, [""; 0]);
    for returned in results {
        let returned = returned.unwrap().unwrap();
        let margin = Duration::from_millis(5);
        let during = (held + margin)..(time - margin);
        let during = returned.iter().filter(|at| during.contains(at)).count();
        assert!(during <= 2, "{during} commits returned: {returned:?}");
        assert_eq!(returned.len(), 60);
    }
}
