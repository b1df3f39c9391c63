//! Probes of stages, and collectives of stages beside all-reduce.

use std::sync::Arc;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{
    Loss, Microbatch, MicrobatchShapes, ParamSharding, Pipeline, PlacedShape, Schedule, SideShapes,
    Stage, StageContext, StageProbe, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Spec;
use parking_lot::Mutex;

use crate::common::watchdog;
use crate::stages::{Rows, Scale, Square, WIDTH, label, read, value, weights};

const ROWS: usize = 4;

/// A stage that repeats the sum of all rows, times w, in each row. Rows are divided over `data`.
/// Its w is frozen. Notes its calls of `probe` and `infer` in a log.
#[derive(Clone, Default)]
struct SumRows {
    refuses: bool,
    log: Arc<Mutex<Vec<String>>>,
}

impl SumRows {
    /// Returns the sums of the columns of some rows, times w.
    fn sums(w: &[f32], rows: &[f32]) -> Vec<f32> {
        let column = |c: usize| w[c] * rows.iter().skip(c).step_by(w.len()).sum::<f32>();
        (0..w.len()).map(column).collect()
    }
}

impl Stage for SumRows {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        self.log.lock().push(format!("infer {x}"));
        let signature = StageSignature::new(x.clone());
        // One declaration for each collective: later ones are added.
        Ok(signature
            .residual(Vec::<PlacedShape>::new())
            .forward_collectives(Signature::new(()).all_gather("data", x.clone()))
            .forward_collectives(Signature::new(()).all_reduce("data", f32s([1])))
            .backward_collectives(Signature::new(()).reduce_scatter("data", x.clone())))
    }

    fn probe(&self, program: &mut Program, at: &StageProbe<'_, Self>) -> Result<()> {
        if self.refuses {
            return Err(Error::kernel("no such shapes"));
        }
        assert_eq!(
            (at.mesh, at.params),
            (at.shardings[0].mesh().unwrap(), &f32s([WIDTH]))
        );
        self.log
            .lock()
            .push(format!("probe {} of {}, {}", at.stage, at.x, at.needs_dx));
        program
            .device_put(&MpmdArray::scalar(1.0f32), at.mesh.replicated())
            .map(drop)
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let (w, x) = (w.as_slice::<f32>()?, x.as_slice::<f32>()?);
        let mut all = vec![0.0; x.len() * cx.axis_size("data")?];
        cx.all_gather("data", x, &mut all)?;
        let mut one = [1.0f32];
        cx.all_reduce("data", &mut one)?;
        assert_eq!(one[0] as usize * x.len(), all.len());
        let sums = Self::sums(w, &all);
        let y = y.as_mut_slice::<f32>()?;
        y.chunks_mut(w.len())
            .for_each(|row| row.copy_from_slice(&sums));
        Ok(())
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        _: ViewMut<'_>,
    ) -> Result<()> {
        let (w, dy) = (w.as_slice::<f32>()?, dy.as_slice::<f32>()?);
        let all = Self::sums(w, dy).repeat(dy.len() / w.len() * cx.axis_size("data")?);
        let mut own = vec![0.0f32; dy.len()];
        cx.reduce_scatter("data", &all, &mut own)?;
        if let Some(mut dx) = dx {
            dx.as_mut_slice()?.copy_from_slice(&own);
        }
        Ok(())
    }

    fn is_frozen(&self, _: &str) -> bool {
        true
    }

    fn input_spec(&self) -> Spec {
        spec!["data"]
    }

    fn output_spec(&self) -> Spec {
        spec!["data"]
    }
}

/// Creates a pipeline of [`Scale`], `sum` and [`Square`] on all devices, which divide the rows.
fn pipeline(p: &mut Program, sum: SumRows) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let mesh = p.mesh(&[("data", p.topology().device_ids().len())])?;
    let mut params = |stage: usize| {
        let w = MpmdArray::from_slice(&[WIDTH], &weights(stage))?;
        p.device_put(&w, mesh.replicated())
    };
    let scale = Scale::of(Rows::Part);
    let front = Pipeline::first(scale, &mesh, params(0)?)?.then(sum, &mesh, params(1)?)?;
    let mut all = front.then(Square(Rows::Part), &mesh, params(2)?)?;
    for stage in [0, 2] {
        let partial = ParamSharding::new(vec![mesh.replicated()]).partial_over(&["data"])?;
        all.store(stage, partial)?;
    }
    Ok(all)
}

#[test]
fn stages_may_gather_and_scatter() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(1, 2).unwrap();
    let rows = schedule.rows()[0].clone();
    let three = |action: &mpmd_core::pipeline::Action| {
        let stages: Vec<usize> = match action.kind {
            mpmd_core::pipeline::ActionKind::Forward => vec![0, 1, 2],
            _ => vec![2, 1, 0],
        };
        stages
            .into_iter()
            .map(|stage| mpmd_core::pipeline::Action { stage, ..*action })
            .collect()
    };
    let row = rows
        .iter()
        .flat_map(|action| -> Vec<_> { three(action) })
        .collect();
    let schedule = Schedule::new("three", vec![row]).unwrap();
    let run = |processes: usize, devices: usize| {
        let results = Simulation::new(processes, devices).run(|p| {
            let mut pipeline = pipeline(p, SumRows::default())?;
            let to = pipeline.mesh(0).sharding(spec!["data"]);
            let mut put = |of: fn(usize, usize) -> f32, m: usize| {
                let values: Vec<f32> = (0..ROWS * WIDTH).map(|i| of(m, i)).collect();
                p.device_put(&MpmdArray::from_slice(&[ROWS, WIDTH], &values)?, &to)
            };
            let one = |m: usize| Ok(Microbatch::new(put(value, m)?).side(2, put(label, m)?));
            let batch = (0..2).map(one).collect::<Result<Vec<_>>>()?;
            let output = pipeline.train_step(p, &schedule, batch)?;
            p.step_end()?;
            assert!(output.gradients[1].is_empty(), "it is frozen");
            let values = [
                &output.loss.sum,
                &output.gradients[0][0].1,
                &output.gradients[2][0].1,
            ]
            .map(read);
            values.into_iter().collect::<Result<Option<Vec<_>>>>()
        });
        results
            .into_iter()
            .next()
            .unwrap()
            .unwrap()
            .unwrap()
            .concat()
    };
    let expected = run(1, 1);
    for processes in [1, 2] {
        let found = run(processes, 2);
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs().max(1.0);
        assert!(
            found.iter().zip(&expected).all(close),
            "{found:?}, {expected:?}"
        );
    }
}

#[test]
fn probes_come_before_the_shapes_that_later_stages_read() {
    let _limit = watchdog(60);
    for result in Simulation::new(2, 2).run(|p| {
        let sum = SumRows::default();
        let mut pipeline = pipeline(p, sum.clone())?;
        let shape = || f32s([ROWS, WIDTH]);
        let before = p.operations();
        pipeline.probe(p, &MicrobatchShapes::new(shape()).side(2, &shape()))?;
        assert_eq!(p.operations(), before + 1, "the probe issues one operation");
        let log = std::mem::take(&mut *sum.log.lock());
        assert_eq!(log, ["probe 1 of f32[4,3], true", "infer f32[4,3]"]);
        let given = Microbatch::<MpmdArray>::new(MpmdArray::from_slice(
            &[ROWS, WIDTH],
            &[1.0f32; ROWS * WIDTH],
        )?);
        let error = pipeline.probe(p, &given.shapes()).unwrap_err().to_string();
        assert!(error.contains("pipeline_probes.rs:"), "{error}");
        let part = "Pipeline::probe: stage 2 `Square` needs a side input: call `.side(2, …)`";
        assert!(error.contains(part), "{error}");
        Ok(())
    }) {
        result.unwrap();
    }
}

#[test]
fn refused_probe_names_stage_and_line() {
    let _limit = watchdog(60);
    for result in Simulation::new(2, 2).run(|p| {
        let mut pipeline = pipeline(
            p,
            SumRows {
                refuses: true,
                ..SumRows::default()
            },
        )?;
        let shape = || f32s([ROWS, WIDTH]);
        let shapes = MicrobatchShapes::new(shape()).side(2, &shape());
        let error = pipeline.probe(p, &shapes).unwrap_err().to_string();
        for part in [
            "pipeline_probes.rs:",
            "Pipeline::probe: stage 1 `SumRows`: no such shapes",
        ] {
            assert!(error.contains(part), "{error}\n  lacks {part}");
        }
        Ok(())
    }) {
        result.unwrap();
    }
}
