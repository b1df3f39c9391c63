//! The division of a model over stages and devices, and its checks.

pub(crate) mod costs;
pub(crate) mod rules;

use std::ops::Range;

use mpmd::topology::Mesh;
use mpmd::{DeviceId, Result};
use mpmd_base::bytes_text;

use crate::decoder::devices::DeviceDivision;
use crate::decoder::{EMBEDDING, OUTPUT};
use crate::division::costs::{Cost, HeldBytes, Layers, ModelCosts, TooLittle};
use crate::error::{DivisionError, InvalidSetting};
use crate::hub::folder::Folder;

/// The requested division of a model over stages and devices. By default each stage has one device,
/// and memory has no limit.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Division {
    /// The layers of each stage. If empty, layers are divided by their computation.
    pub layers: Vec<Range<usize>>,
    /// Number of devices that share each layer of a stage: one number for all stages, or one for
    /// each. If empty, 1.
    pub tensor_parallel: Vec<usize>,
    /// Number of devices that share the experts of a stage: one number for all stages, or one for
    /// each. If empty, 1.
    pub expert_parallel: Vec<usize>,
    /// Memory of one device of each stage, in bytes. If empty, memory has no limit.
    pub memory: Vec<u64>,
}

/// Divides the layers over the stages so that the largest work of a stage is least.
///
/// # Errors
///
/// If a stage has too little memory.
pub(crate) fn by_work(
    costs: &ModelCosts,
    limits: &[u64],
) -> Result<Vec<Range<usize>>, DivisionError> {
    costs
        .cut(limits)
        .map_err(|TooLittle { stage, needs }| DivisionError::Memory {
            stage,
            needed: needs,
            limit: limits.get(stage).copied().unwrap_or_default(),
        })
}

/// Checks that the given ranges contain each layer of the model exactly once.
pub(crate) fn check_layers(
    ranges: &[Range<usize>],
    layers: usize,
    stages: usize,
) -> Result<(), InvalidSetting> {
    if ranges.len() != stages {
        let expected = format!("{stages} ranges, one for each stage");
        return Err(InvalidSetting::new("layers", expected, ranges.len()));
    }

    let mut end = 0;
    for (stage, range) in ranges.iter().enumerate() {
        if range.is_empty() {
            let expected = format!("a layer or more for stage {stage}");
            return Err(InvalidSetting::new(
                "layers",
                expected,
                format!("{range:?}"),
            ));
        }
        if range.start != end {
            let expected = format!("stage {stage} to begin at layer {end}");
            return Err(InvalidSetting::new(
                "layers",
                expected,
                format!("{range:?}"),
            ));
        }
        end = range.end;
    }
    if end != layers {
        return Err(InvalidSetting::new(
            "layers",
            format!("{layers} layers in all"),
            end,
        ));
    }
    Ok(())
}

/// Checks that the layers of each stage fit into the memory of its devices, `limits`.
pub(crate) fn check_memory(
    costs: &ModelCosts,
    ranges: &[Range<usize>],
    limits: &[u64],
) -> Result<(), InvalidSetting> {
    for (stage, (range, limit)) in ranges.iter().zip(limits).enumerate() {
        let bytes = costs.cost(range.clone(), stage).bytes;
        if bytes > *limit {
            let expected = format!("{} for stage {stage}", bytes_text(bytes));
            return Err(InvalidSetting::new("memory", expected, bytes_text(*limit)));
        }
    }
    Ok(())
}

/// Returns the costs of the model's layers for each stage. `over` has the division of each stage
/// over its devices.
pub(crate) fn costs(
    folder: &Folder,
    over: &[DeviceDivision],
    held: HeldBytes,
) -> Result<ModelCosts> {
    let stages = over.len();
    let mut known: Vec<(DeviceDivision, Layers)> = Vec::new();
    for over in over.iter().copied() {
        let same = known.iter().find(|(other, _)| *other == over);
        let costs = match same {
            Some((_, costs)) => costs.clone(),
            None => costs_on(folder, over, stages, held)?,
        };
        known.push((over, costs));
    }
    Ok(ModelCosts(
        known.into_iter().map(|(_, costs)| costs).collect(),
    ))
}

/// Returns the costs of the model's layers for one of `stages` stages that is divided by `over`.
///
/// The work of a layer is the number of its parameters; of the experts only those that a token
/// takes count. The embedding has no work, since a token only reads a row.
///
/// An inference (`held.layer` is not 0) computes no logits for tokens of prompts. These are assumed
/// to be a third of all tokens.
fn costs_on(
    folder: &Folder,
    over: DeviceDivision,
    stages: usize,
    held: HeldBytes,
) -> Result<Layers> {
    let config = folder.config();
    let mesh = Mesh::new(
        &over.axes(),
        (0..over.devices() as u32).map(DeviceId).collect(),
    )?;

    let params = folder
        .params()
        .map(|(name, aval)| (name.to_owned(), aval.clone()));
    let cache = held.layer.div_ceil(over.tensor as u64);

    let mut layers = vec![
        Cost {
            work: 0,
            bytes: cache
        };
        config.num_hidden_layers
    ];
    let mut first = Cost::default();
    let mut last = Cost::default();
    for leaf in rules::divided(config, &mesh, params)?.leaves() {
        let name = &*leaf.name;
        let elements = leaf.bytes_per_device / size_of::<f32>() as u64;
        let cost = |work: u64| Cost {
            work,
            bytes: elements * held.element,
        };
        let logits = if held.layer > 0 {
            2 * elements / 3
        } else {
            elements
        };

        let index = name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next());
        let layer = index.and_then(|index| layers.get_mut(index.parse::<usize>().ok()?));
        let taken = match config.experts {
            Some(experts) if name.contains(".experts.") => {
                elements * experts.per_token as u64 / experts.count as u64
            }
            _ => elements,
        };

        let (work, to) = match (layer, name) {
            (Some(layer), _) => (taken, layer),
            (None, OUTPUT) => (logits, &mut last),
            (None, name) if name.starts_with("model.embed") => (0, &mut first),
            _ => (0, &mut last),
        };
        *to = to.and(cost(work));

        if name == EMBEDDING && config.tie_word_embeddings {
            // A copy, unless it is in the same stage.
            let bytes = if stages > 1 { cost(elements).bytes } else { 0 };
            last = last.and(Cost {
                work: logits,
                bytes,
            });
        }
    }
    Ok(Layers::new(&layers, first, last))
}
