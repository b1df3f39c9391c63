//! Buffers are dropped right after the last action that needs them. Checks the memory in use after
//! each action of a step, one at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Action, ActionKind, Loss, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;
use parking_lot::{Condvar, Mutex};

use crate::blank_stages::{Blank, Residuals, write};

/// Elements of every array except the losses; `UNIT` is the bytes of such an array.
const ELEMENTS: usize = 16 << 10;
const UNIT: u64 = 4 * ELEMENTS as u64;
const MICROBATCHES: usize = 4;
/// Time limit of each wait; far longer than any wait takes, on any machine.
const LONG: Duration = Duration::from_secs(60);

/// Holds back the passes of each stage until `open` lets a number of them run; `passes` counts
/// those left, by stage.
#[derive(Default)]
struct Gate {
    passes: Mutex<Vec<usize>>,
    opened: Condvar,
}

impl Gate {
    fn open(&self, stage: usize, passes: usize) {
        self.passes.lock()[stage] += passes;
        self.opened.notify_all();
    }

    fn pass(&self, stage: usize) -> Result<()> {
        let deadline = Instant::now() + LONG;
        let mut passes = self.passes.lock();
        while passes[stage] == 0 {
            if self.opened.wait_until(&mut passes, deadline).timed_out() {
                return Err(Error::kernel(format!("nobody let stage {stage} pass")));
            }
        }
        passes[stage] -= 1;
        Ok(())
    }
}

fn unit() -> ShapedArray {
    f32s([ELEMENTS])
}

/// Of two residuals one stays and one is released, and one is added.
const RESIDUALS: Residuals = Residuals {
    forward: 2,
    weight: 2,
    kept: 1,
};

/// Returns a stage whose passes wait for the gate.
fn gated<O>(gate: &Arc<Gate>, stage: usize) -> Blank<impl Fn(u64) -> Result<()> + use<O>, O> {
    let gate = gate.clone();
    Blank::new(move |_| gate.pass(stage), ELEMENTS, Some(RESIDUALS))
}

/// Returns the change in the number of arrays in use on all ranks, caused by one action. Updates
/// `first_weight`, which is true for stages without a gradient yet.
fn change(action: Action, last: usize, first_weight: &mut [bool], recomputes: bool) -> i64 {
    let Action { stage, kind, .. } = action;
    let brought = i64::from(stage == 0) + i64::from(stage == last);
    let edge = |here: bool| i64::from(!here);
    // Adds the output for the next stage; releases the input, which came from the stage before, and
    // the arrays of the batch. If the pass is recomputed, inputs stay until then and there are no
    // residuals.
    let forward = if recomputes {
        edge(stage == last)
    } else {
        2 + edge(stage == last) - edge(stage == 0) - brought
    };
    // Of two residuals one is released, one stays, and another is added.
    let input = edge(stage == 0) - edge(stage == last)
        + if recomputes {
            2 - edge(stage == 0) - brought
        } else {
            0
        };
    let mut weight = || -2 + i64::from(std::mem::take(&mut first_weight[stage]));
    match kind {
        ActionKind::Forward => forward,
        ActionKind::BackwardInput => input,
        ActionKind::BackwardWeight => weight(),
        _ => input + weight(),
    }
}

fn passes_of(kind: ActionKind, recomputes: bool) -> usize {
    let again = usize::from(recomputes);
    match kind {
        ActionKind::Forward | ActionKind::BackwardWeight => 1,
        ActionKind::BackwardInput => 1 + again,
        _ => 2 + again,
    }
}

/// Returns the number of result arrays that are allocated before their pass runs: those of each
/// rank's next action, if its inputs are ready.
fn taken(schedule: &Schedule, done: &[Action], recomputes: bool) -> i64 {
    let last = schedule.stages() - 1;
    let is_done = |stage: usize, kinds: &[ActionKind], microbatch: usize| {
        done.iter()
            .any(|a| a.stage == stage && a.microbatch == microbatch && kinds.contains(&a.kind))
    };
    let of = |row: &Vec<Action>| {
        let Some(Action {
            stage,
            kind,
            microbatch,
        }) = row.iter().find(|action| !done.contains(action)).copied()
        else {
            return 0;
        };
        let forward = 2 + i64::from(stage != last);
        match kind {
            ActionKind::Forward
                if stage == 0 || is_done(stage - 1, &[ActionKind::Forward], microbatch) =>
            {
                forward
            }
            ActionKind::Forward => 0,
            ActionKind::BackwardWeight => {
                let weights = [ActionKind::BackwardWeight, ActionKind::Backward];
                let first =
                    (0..MICROBATCHES).all(|microbatch| !is_done(stage, &weights, microbatch));
                i64::from(first)
            }
            // The inputs of recomputation have been ready since the first forward pass.
            _ if recomputes => forward,
            _ => {
                let inputs = [ActionKind::BackwardInput, ActionKind::Backward];
                let ready = stage == last || is_done(stage + 1, &inputs, microbatch);
                if ready { 1 + i64::from(stage != 0) } else { 0 }
            }
        }
    };
    schedule.rows().iter().map(of).sum()
}

fn one_at_a_time(p: &mut Program, schedule: &Schedule, recomputes: bool) -> Result<()> {
    let last = schedule.stages() - 1;
    let gate = Arc::new(Gate::default());
    *gate.passes.lock() = vec![0; schedule.stages()];
    let meshes = p.mesh(&[("rank", schedule.ranks())])?.split("rank")?;
    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
    let made = |p: &mut Program, stage: usize| {
        p.array_from_fn(unit(), mesh(stage).replicated(), |_, mut view| {
            write(&mut view)
        })
    };
    let mut front = Pipeline::first(gated(&gate, 0), mesh(0), made(p, 0)?)?;
    for stage in 1..last {
        front = front.then(gated(&gate, stage), mesh(stage), made(p, stage)?)?;
    }
    let mut pipeline = front.then(
        gated::<Loss<MpmdArray>>(&gate, last),
        mesh(last),
        made(p, last)?,
    )?;
    (0..=last).for_each(|stage| pipeline.recompute(stage, recomputes));
    let mut batch = Vec::new();
    for _ in 0..MICROBATCHES {
        batch.push(Microbatch::new(made(p, 0)?).side(last, made(p, last)?));
    }
    // Everything is issued, and nothing runs.
    let output = pipeline.train_step(p, schedule, batch)?;
    let mut units = (last + 1 + 2 * MICROBATCHES) as i64;
    let mut first_weight = vec![true; last + 1];
    // Losses are small.
    let settled = |p: &Program, units: i64, moment: &str| {
        let (start, now) = (Instant::now(), || (p.memory().live / UNIT) as i64);
        // A pass changes the number several times, so it must stay as it is.
        let stays = || {
            now() == units && {
                std::thread::sleep(Duration::from_millis(1));
                now() == units
            }
        };
        while !stays() {
            assert!(
                start.elapsed() < LONG,
                "{moment}: {} arrays, not {units}",
                now()
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let mut done = Vec::new();
    settled(
        p,
        units + taken(schedule, &done, recomputes),
        "before the step",
    );
    for action in schedule.global_order().expect("an order") {
        gate.open(action.stage, passes_of(action.kind, recomputes));
        units += change(action, last, &mut first_weight, recomputes);
        done.push(action);
        settled(
            p,
            units + taken(schedule, &done, recomputes),
            &format!("{} after {action}", schedule.name()),
        );
    }
    assert_eq!(
        units,
        2 * (last as i64 + 1),
        "parameters and their gradients"
    );
    drop(output);
    p.step_end()
}

#[test]
fn buffers_are_dropped_after_their_last_use() {
    for (name, ranks, chunks) in [
        ("1f1b", 3, 1),
        ("zb-h1", 3, 1),
        ("interleaved", 2, 2),
        ("zbv", 2, 2),
    ] {
        let schedule = Schedule::named(name, ranks, MICROBATCHES, Some(chunks)).unwrap();
        for recomputes in [false, true] {
            for result in Simulation::new(1, ranks).run(|p| one_at_a_time(p, &schedule, recomputes))
            {
                result.unwrap();
            }
        }
    }
}
