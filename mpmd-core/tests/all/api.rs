//! Thread safety of the public types, dry runs, and kernels without a job.

use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::Mesh;
use mpmd_core::{ArrayFuture, Error, ProcessId, Simulation, run_here};

fn is_shared<T: Clone + Send + Sync + 'static>() {}
fn is_sent<T: Send + 'static>() {}

#[test]
fn handles_are_shared_and_programs_are_sent() {
    is_shared::<MpmdArray>();
    is_shared::<Sharding>();
    is_shared::<Mesh>();
    is_shared::<Error>();
    is_shared::<HostArray>();
    is_sent::<ArrayFuture>();
    // A doc test of `Program` shows that it is not `Sync`.
    is_sent::<Program>();
}

struct Sum;

impl Kernel for Sum {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (a, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(a.clone()).all_reduce("x", a.clone()))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (a, b): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let y = y.as_mut_slice::<f32>()?;
        let sums = a.as_slice::<f32>()?.iter().zip(b.as_slice::<f32>()?);
        y.iter_mut().zip(sums).for_each(|(y, (a, b))| *y = a + b);
        cx.all_reduce("x", y)
    }
}

/// Runs a whole job, also as a dry run. Returns (value broadcast by process 0, values of the last
/// array or `None` on processes without it).
fn job(p: &mut Program) -> Result<(u64, Option<Vec<f32>>)> {
    let stages = p.mesh(&[("stage", 4), ("x", 2)])?.split("stage")?;
    let is_dry_run = p.is_dry_run();
    let mut x = p.array_from_fn(
        f32s([8]),
        stages[0].sharding(spec!["x"]),
        move |_, mut view| {
            assert!(!is_dry_run, "nothing is made in a dry run");
            Ok(view.fill(1.0f32)?)
        },
    )?;
    for stage in stages.iter().cycle().take(12) {
        let sum = p
            .jit(Sum)
            .on(stage)
            .outputs(stage.sharding(spec!["x"]))
            .build()?;
        x = p.device_put(&x, stage.sharding(spec!["x"]))?;
        x = sum.call(p, (x.clone(), x))?;
        x.then(move |_| assert!(!is_dry_run, "nothing is read in a dry run"));
        p.step_end()?;
    }
    let whole = stages[3].replicated();
    let x = p.device_put(&x, whole)?;
    let agreed = p.broadcast_value(ProcessId(0), 7, || Ok(8))?;
    let values = x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?;
    Ok((agreed, values))
}

#[test]
fn dry_run_executes_a_whole_program_without_data() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4, 8] {
        let mut p = Program::builder().devices(8).dry_run(processes).unwrap();
        assert!(p.is_dry_run() && p.processes() == processes);
        assert!(
            p.topology().devices_of(p.process()).is_empty(),
            "it owns nothing"
        );
        let (agreed, values) = job(&mut p).unwrap();
        assert_eq!(
            (agreed, values),
            (7, None),
            "the value for plans, and nothing to read"
        );
        let mesh = p.mesh(&[("x", 8)]).unwrap();
        let x = p
            .device_put(&MpmdArray::scalar(1.0f32), mesh.replicated())
            .unwrap();
        assert!(x.is_fully_remote() && x.is_complete());
        x.block_until_ready().unwrap();
        assert_eq!(p.memory(), mpmd_core::MemoryUse::default());

        let planned = p.operations();
        p.finish().unwrap();
        let results = Simulation::new(processes, 8).run(|p| Ok((job(p)?, p.operations())));
        let mut owners = 0;
        for ((agreed, values), operations) in results.into_iter().map(Result::unwrap) {
            assert_eq!(
                operations + 1,
                planned,
                "the dry run has the operations of the run, and one more"
            );
            assert_eq!(agreed, 8);
            owners += usize::from(values.is_some());
        }
        assert_eq!(
            owners,
            if processes == 8 { 2 } else { 1 },
            "the owners of the last stage"
        );
    }
}

#[test]
fn dry_run_may_be_dropped() {
    let _limit = watchdog(60);
    let mut p = Program::builder().dry_run(3).unwrap();
    let mesh = p.mesh(&[("x", 3)]).unwrap();
    let _x = p
        .device_put(&MpmdArray::scalar(1.0f32), mesh.replicated())
        .unwrap();
    drop(p);
}

#[test]
fn kernels_run_on_host_values_without_a_job() {
    let _limit = watchdog(60);
    let [a, b] =
        [[1.0f32, 2.0], [10.0, 20.0]].map(|values| HostArray::from_slice(&[2], &values).unwrap());
    assert_eq!(
        run_here(Sum, &(a, b)).unwrap().to_vec::<f32>().unwrap(),
        [11.0, 22.0]
    );
}
