//! The trainer of a model.

use mpmd::aval::DType;
use mpmd::pipeline::Schedule;
use mpmd::topology::Mesh;
use mpmd::train::{AdamW, Rate, Sgd, Trainer};
use mpmd::{MpmdArray, Program, Result};

use crate::stages::Stages;

/// The settings of training with AdamW. The learning rate rises linearly from zero in the first
/// `warmup` updates, then falls linearly to a tenth of its maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerSettings {
    /// Number of updates.
    pub steps: u64,
    /// Maximum of the learning rate.
    pub learning_rate: f64,
    /// Number of updates in which the learning rate rises from zero.
    pub warmup: u64,
    /// Weight decay. Only matrices decay.
    pub weight_decay: f64,
    /// Largest norm of the mean gradient. Larger gradients are scaled down to it. `None` without a
    /// limit.
    pub clip: Option<f64>,
    /// Dtype of the model's computation. Parameters, their gradients and losses stay f32.
    pub compute: DType,
    /// Seed of the order of the training data.
    pub seed: u64,
}

impl Default for TrainerSettings {
    /// Returns the defaults of the program `finetune`.
    fn default() -> Self {
        Self {
            steps: 100,
            learning_rate: 2e-5,
            warmup: 0,
            weight_decay: 0.01,
            clip: None,
            compute: DType::F32,
            seed: 0,
        }
    }
}

/// Creates a trainer of the model. Its updates are those of `torch.optim.AdamW` with default
/// settings, except that only matrices decay.
///
/// # Errors
///
/// As for [`Stages::training`] and [`Trainer::new`].
pub fn trainer(
    p: &mut Program,
    model: &Stages,
    meshes: &[Mesh],
    schedule: Schedule,
    settings: &TrainerSettings,
) -> Result<Trainer<MpmdArray>> {
    let pipeline = model.training(p, meshes)?;
    let decay = settings.weight_decay;
    let adamw = AdamW {
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        decay,
    };
    let rate = Rate::WarmupLinear {
        peak: settings.learning_rate,
        floor: settings.learning_rate / 10.0,
        warmup: settings.warmup,
        total: settings.steps,
    };
    let mut trainer = Trainer::new(p, pipeline, schedule, adamw)?
        .rate(rate)
        .seed(settings.seed);
    if settings.compute != DType::F32 {
        trainer = trainer.compute(settings.compute)?;
    }
    if let Some(clip) = settings.clip {
        trainer = trainer.clip(clip);
    }
    Ok(trainer)
}

/// Creates a trainer that only evaluates: nothing is trained, and the optimiser has no state. Its
/// [`run`](Trainer::run) of 0 steps returns the loss of all held-out data. The model computes in
/// `compute`.
///
/// # Errors
///
/// As for [`Stages::losses`] and [`Trainer::new`].
pub fn evaluator(
    p: &mut Program,
    model: &Stages,
    meshes: &[Mesh],
    schedule: Schedule,
    compute: DType,
) -> Result<Trainer<MpmdArray>> {
    let pipeline = model.losses(p, meshes)?;
    let evaluator = Trainer::new(p, pipeline, schedule, Sgd::default())?;
    match compute {
        DType::F32 => Ok(evaluator),
        _ => evaluator.compute(compute),
    }
}
