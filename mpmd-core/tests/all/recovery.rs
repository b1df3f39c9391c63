//! Jobs that lose a process and go on, in simulated time.

use std::time::Duration;

use mpmd_base::block::thread;
use mpmd_core::prelude::*;
use mpmd_core::{Commits, ProcessId, Simulation};

const STEPS: u64 = 20;

/// More than three peer timeouts.
const LONG: Duration = Duration::from_secs(200);

/// Adds 1 in each step. In the first epoch, the program of process 2 does something else for a long
/// time. Returns the step from which it went on, and the values.
fn count(p: &mut Program, commits: &Commits) -> Result<(u64, Option<Vec<f32>>)> {
    let mesh = p.mesh(&[("x", 3)])?;
    let here = mesh.sharding(spec!["x"]);
    let mut x = p.array_from_fn(f32s([3]), &here, |region, mut values| {
        Ok(values.fill(region.range(0).start as f32)?)
    })?;
    let first = commits.restore(p, &mut x)?;
    let add = p
        .jit(elementwise(|x: f32| x + 1.0))
        .on(&mesh)
        .outputs(here.clone())
        .build()?;
    for step in first..STEPS {
        x = add.call(p, x)?;
        p.step_end()?;
        p.commit(step + 1, &x)?;
        x.block_until_ready()?;
        let is_busy = (p.epoch(), p.process(), step) == (1, ProcessId(2), 9);
        thread::sleep(if is_busy {
            LONG
        } else {
            Duration::from_millis(1)
        });
    }
    let all = p.device_put(&x, mesh.replicated())?.to_host()?;
    Ok((first, all.map(|all| all.to_vec()).transpose()?))
}

/// With its copies and those of process 1, which is lost, the commits would be lost too.
#[test]
fn busy_survivor_keeps_its_place_and_copies() {
    for seed in 0..5 {
        let job = Simulation::new(3, 3)
            .seed(seed)
            .lose_after(ProcessId(1), LONG / 20);
        let job = job.spare_after(Duration::ZERO).spare_after(Duration::ZERO);
        let (results, report) = job.run_recovering(1, count);
        let [zero, one, two, spares @ ..] = &results[..] else {
            panic!("{results:?}")
        };
        assert!(one.is_err());
        for survivor in [zero, two] {
            let (first, values) = survivor.as_ref().unwrap().as_ref().expect("it has a place");
            assert!(*first > 0, "it goes on from a commit");
            assert_eq!(values.as_deref(), Some(&[20.0, 21.0, 22.0][..]));
        }
        let used = spares
            .iter()
            .filter(|spare| spare.as_ref().unwrap().is_some());
        assert_eq!(used.count(), 1);
        assert!(report.time > LONG && report.left.is_empty(), "{report:?}");
    }
}
