//! Trainings of a pipeline.

use mpmd_core::Result;
use mpmd_core::cuda::{Grid, Source};
use mpmd_core::pipeline::{Schedule, StepOutput};
use mpmd_core::prelude::*;
use mpmd_layout::topology::DeviceKind;

use crate::model::{self, Settings, microbatches, pipeline};

const MICROBATCHES: usize = 4;
const STEPS: u64 = 10;

/// The way in which a training runs.
#[derive(Clone, Copy)]
struct Run {
    settings: Settings,
    schedule: &'static str,
    recompute: bool,
}

const PLAIN: Run = Run {
    settings: Settings {
        stages: 2,
        dropout: 0.0,
        split: false,
    },
    schedule: "1f1b",
    recompute: false,
};

static DESCEND: Source = Source::cuda(
    "descend.cu",
    r#"
    extern "C" __global__ void descend(unsigned long long n, float *w, const float *g) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n) w[i] = w[i] - 0.002f * g[i];
    }
    "#,
);

/// Plain gradient descent, in place.
struct Descend;

impl Kernel for Descend {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (w, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(w.clone()).alias("0", ""))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (_, g): (View<'_>, View<'_>),
        mut w: ViewMut<'_>,
    ) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            let n = g.region().elements();
            let args = [n.into(), (&mut w).into(), (&g).into()];
            return cuda.launch(&DESCEND, "descend", Grid::over(n), &args);
        }
        for (w, g) in w
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(g.as_slice::<f32>()?)
        {
            *w -= 0.002 * g;
        }
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&DESCEND]
    }
}

/// Updates the parameters of all stages.
pub(crate) fn update(p: &mut Program, model: &mut model::Model, output: StepOutput) -> Result<()> {
    for (stage, gradients) in output.gradients.into_iter().enumerate() {
        let mesh = model.mesh(stage).clone();
        let descend = p
            .jit(Descend)
            .on(&mesh)
            .outputs(mesh.replicated())
            .donate("0")
            .build()?;
        let mut params = Vec::new();
        for ((_, param), (_, gradient)) in model.params(stage).into_iter().zip(gradients) {
            params.push(descend.call(p, (param, gradient))?);
        }
        model.set_params(stage, params)?;
    }
    Ok(())
}

/// Returns the losses of some steps, with the losses of an evaluation at the end.
fn losses(kind: DeviceKind, run: Run) -> Vec<f32> {
    let Run {
        settings,
        schedule,
        recompute,
    } = run;
    let stages = settings.stages;
    let mut p = Program::builder()
        .device_kinds(&[kind])
        .devices(stages)
        .alone()
        .unwrap();
    let mut train = || -> Result<Vec<f32>> {
        let p = &mut p;
        let mut model = pipeline(p, settings)?;
        (0..stages).for_each(|stage| model.recompute(stage, recompute));
        let schedule = Schedule::named(schedule, stages, MICROBATCHES, None)?;
        let ends = [model.mesh(0).clone(), model.mesh(stages - 1).clone()];
        let ends = [&ends[0], &ends[1]];
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let batch = microbatches(p, ends, stages, (step, MICROBATCHES))?;
            let output = model.train_step(p, &schedule, batch)?;
            losses.push(output.loss.sum.clone());
            update(p, &mut model, output)?;
            p.step_end()?;
        }
        let batch = microbatches(p, ends, stages, (STEPS, MICROBATCHES))?;
        let outputs = model.forward_all(p, &schedule, batch)?;
        losses.extend(outputs.into_iter().map(|loss| loss.sum));
        let read = |loss: &MpmdArray| Ok(loss.to_host()?.map(|host| host.to_vec::<f32>()));
        let found = losses.iter().map(read).collect::<Result<Vec<_>>>()?;
        let found = found
            .into_iter()
            .flatten()
            .collect::<std::result::Result<Vec<_>, _>>();
        Ok(found?.concat())
    };
    let found = train().unwrap();
    p.finish().unwrap();
    assert_eq!(found.len(), STEPS as usize + MICROBATCHES, "{found:?}");
    assert_eq!(
        softcuda::driver().map_or(0, |driver| driver.races()),
        0,
        "races"
    );
    found
}

#[track_caller]
fn assert_equal(run: Run) {
    let (found, expected) = (losses(DeviceKind::Cuda, run), losses(DeviceKind::Cpu, run));
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let off = (found - expected).abs() / expected.abs().max(1.0);
        assert!(off < 1e-5, "loss {step}: {found}, not {expected}: {off}");
    }
}

#[test]
fn losses_equal_those_of_cpus() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        assert_equal(PLAIN);
    }
}

#[test]
fn split_gradients_equal_those_of_cpus() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        let settings = Settings {
            split: true,
            ..PLAIN.settings
        };
        assert_equal(Run {
            settings,
            schedule: "zb-h1",
            ..PLAIN
        });
    }
}

#[test]
fn dropout_masks_equal_those_of_cpus() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        let settings = Settings {
            dropout: 0.3,
            ..PLAIN.settings
        };
        assert_equal(Run {
            settings,
            recompute: true,
            ..PLAIN
        });
    }
}
