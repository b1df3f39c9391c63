//! Scoring of a text: the mean loss of its tokens under a model.

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::named;
use mpmd::pipeline::Microbatch;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::train::data::TokenSource;
use mpmd::{MpmdArray, Program, Result};

use crate::stages::Stages;
use crate::text::tokens::Tokens;

/// Returns the mean loss of a text's tokens as one sequence, without the first token, in nats.
/// `None` on processes that do not own the first device, and in a dry run.
///
/// # Errors
///
/// As for [`Stages::losses`]. If a file cannot be read, or an operation fails.
pub fn nats_per_token(
    p: &mut Program,
    model: &Stages,
    meshes: &[Mesh],
    tokens: &Tokens,
) -> Result<Option<f64>> {
    tokens.compare(p)?;
    let mut pipeline = model.losses(p, meshes)?;
    let time = tokens.ids().len().saturating_sub(1);
    // The stages declare their shapes, so a probe of one token is enough for one device. Several
    // have more collectives for more tokens.
    let is_divided = meshes.iter().any(|mesh| mesh.devices().len() > 1);
    let first = microbatch(p, meshes, tokens, if is_divided { time } else { 1 })?;
    pipeline.probe(p, &first.shapes())?;
    let microbatch = microbatch(p, meshes, tokens, time)?;
    let loss = pipeline.forward(p, microbatch)?;
    let device = p.topology().device_ids()[0];
    let loss = p.device_put(&loss, Sharding::single_device(device))?;
    let (Some(sum), Some(weight)) = (loss.sum.to_host()?, loss.weight.to_host()?) else {
        return Ok(None);
    };
    let [sum, weight] = [sum.as_slice::<f32>()?[0], weight.as_slice::<f32>()?[0]];
    Ok(Some(f64::from(sum) / f64::from(weight)))
}

/// Issues the creation of a microbatch: one sequence of `time` tokens, and the token after each.
fn microbatch(
    p: &mut Program,
    meshes: &[Mesh],
    tokens: &Tokens,
    time: usize,
) -> Result<Microbatch<MpmdArray>> {
    let mut array = |mesh: &Mesh, start: usize| {
        let tokens = tokens.clone();
        let aval = ShapedArray::try_new(&[1, time], DType::U32)?;
        p.array_from_fn(aval, mesh.replicated(), move |region, mut view| {
            tokens.read(start + region.range(1).start, view.as_mut_slice()?)
        })
    };
    let last = meshes.len() - 1;
    let inputs = array(&meshes[0], 0)?;
    let targets = array(&meshes[last], 1)?;
    Ok(Microbatch::new(inputs).side(last, named([("targets", targets)])))
}
