//! Trainings on given windows.

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::named;
use mpmd::pipeline::{Loss, Microbatch, Pipeline};
use mpmd::topology::Mesh;
use mpmd::train::data::{Data, MicrobatchPlace};
use mpmd::{MpmdArray, Program, Result};
use mpmd_models::{Lora, TrainerSettings};

/// The settings of a training, read from text.
pub(crate) struct Args {
    pub(crate) settings: TrainerSettings,
    lora: Option<Lora>,
}

impl Args {
    pub(crate) fn lora(&self) -> Option<Lora> {
        self.lora
    }
}

/// Reads settings such as `--lr 1e-2 --lora 2`.
pub(crate) fn args(text: &str) -> Args {
    let mut settings = TrainerSettings::default();
    let mut rank = None;
    let mut alpha = None;
    let words: Vec<&str> = text.split_whitespace().collect();
    for pair in words.chunks(2) {
        match pair {
            ["--weight-decay", value] => settings.weight_decay = value.parse().unwrap(),
            ["--lr", value] => settings.learning_rate = value.parse().unwrap(),
            ["--lora", value] => rank = Some(value.parse::<usize>().unwrap()),
            ["--compute", "bf16"] => settings.compute = DType::Bf16,
            ["--compute", "f16"] => settings.compute = DType::F16,
            ["--alpha", value] => alpha = Some(value.parse().unwrap()),
            other => panic!("{other:?}"),
        }
    }
    let lora = rank.map(|rank| Lora {
        rank,
        alpha: alpha.unwrap_or(2.0 * rank as f64),
    });
    Args { settings, lora }
}

/// Training data that is given as tokens: the rows of each step and microbatch.
pub(crate) struct Given(pub(crate) Vec<Vec<Vec<Vec<u32>>>>);

impl Given {
    fn array(
        &self,
        p: &mut Program,
        mesh: &Mesh,
        at: MicrobatchPlace,
        skip: usize,
    ) -> Result<MpmdArray> {
        let rows = &self.0[at.step as usize - 1][at.microbatch];
        let time = rows[0].len() - 1;
        let aval = ShapedArray::new(&[rows.len(), time], DType::U32);
        let tokens: Vec<u32> = rows
            .iter()
            .flat_map(|row| &row[skip..skip + time])
            .copied()
            .collect();
        p.array_from_fn(aval, mesh.replicated(), move |_, mut view| {
            view.as_mut_slice::<u32>()?.copy_from_slice(&tokens);
            Ok(())
        })
    }
}

impl Data<MpmdArray> for Given {
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        let last = meshes.len() - 1;
        let (x, targets) = (
            self.array(p, &meshes[0], at, 0)?,
            self.array(p, &meshes[last], at, 1)?,
        );
        Ok(Microbatch::new(x).side(last, named([("targets", targets)])))
    }
}

/// Replaces LoRA's matrices A by `0.5 cos(i)`, where `i` is the index of the element.
pub(crate) fn set_lora(
    p: &mut Program,
    pipeline: &mut Pipeline<MpmdArray, Loss<MpmdArray>>,
) -> Result<()> {
    for stage in 0..pipeline.stages() {
        let mut params = Vec::new();
        for (name, array) in pipeline.params(stage) {
            params.push(if name.ends_with("lora_A.weight") {
                let (aval, sharding) = (array.aval().clone(), array.sharding().cloned());
                let shape = aval.shape().to_vec();
                p.array_from_fn(aval, sharding.unwrap(), move |region, mut view| {
                    let elements = region.indices(&shape);
                    for (value, i) in view.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
                        *value = (0.5 * (i as f64).cos()) as f32;
                    }
                    Ok(())
                })?
            } else {
                array
            });
        }
        pipeline.set_params(stage, params)?;
    }
    Ok(())
}
