//! The division of a stage's parameters over its devices, as rules for their names.

use std::collections::BTreeMap;

use mpmd::aval::ShapedArray;
use mpmd::sharding::Sharding;
use mpmd::sharding::rules::{InferredShardings, Registry, Strategy, infer};
use mpmd::topology::Mesh;
use mpmd::{Error, Result};

use crate::config::{HeadNorm, ModelConfig};
use crate::decoder::devices::DeviceDivision;
use crate::error::{DivisionError, InvalidSetting, unexpected};
use crate::hub::folder::{CONFIG, Folder};

/// Pairs (regular expression for names of parameters, sharding tactic). Names have the same meaning
/// in all families, so all share these rules.
const RULES: [(&str, &str); 5] = [
    (
        r".*\.experts\.(gate|up)_proj\.weight",
        r#"shard_dim("expert", 0)|shard_dim(["tensor", "repeat"], 1)"#,
    ),
    (
        r".*\.experts\.down_proj\.weight",
        r#"shard_dim("expert", 0)|shard_dim(["tensor", "repeat"], 2)"#,
    ),
    (
        r".*\.(q|gate|up)_proj\.(weight|bias|lora_B\.weight)",
        r#"shard_dim(["tensor", "repeat"], 0)"#,
    ),
    (
        r".*\.[kv]_proj\.(weight|bias|lora_B\.weight)",
        r#"shard_dim("tensor", 0)"#,
    ),
    (
        r".*\.(o|down)_proj\.(weight|lora_A\.weight)",
        r#"shard_dim(["tensor", "repeat"], 1)"#,
    ),
];

/// Returns the rules for a model's parameters. The first rule whose pattern matches a name applies.
fn rules(config: &ModelConfig, over: DeviceDivision) -> Vec<(&'static str, &'static str)> {
    let mut rules = RULES.to_vec();
    let all = r#"shard_dim(["tensor", "repeat"], 0)"#;
    if config.head_norm == Some(HeadNorm::Width) {
        rules.extend([
            (r".*\.q_norm\.weight", all),
            (r".*\.k_norm\.weight", r#"shard_dim("tensor", 0)"#),
        ]);
    }
    if over.divides(config.vocab_size) {
        rules.push((r"(model\.embed_tokens|lm_head)\.weight", all));
    }
    rules.push((".*", "replicate"));
    rules
}

/// Returns the division of a stage's parameters over the devices of its mesh.
///
/// # Errors
///
/// If the mesh has only some of the axes of [`DeviceDivision`], or its devices do not divide a
/// parameter evenly.
pub(crate) fn divided(
    config: &ModelConfig,
    mesh: &Mesh,
    params: impl IntoIterator<Item = (String, ShapedArray)>,
) -> Result<InferredShardings> {
    let over = DeviceDivision::of(mesh)?;
    let rules = match over {
        DeviceDivision::ONE => vec![(".*", "replicate")],
        _ => rules(config, over),
    };

    let failed = |why: &dyn std::fmt::Display| Error::kernel(format!("the parameters: {why}"));
    let strategy = Strategy::parse(&rules, &Registry::default()).map_err(|why| failed(&why))?;
    let leaves: Vec<_> = params.into_iter().collect();
    let inferred = infer(&leaves, &strategy, mesh).map_err(|why| failed(&why))?;
    match inferred.leaves().iter().find(|leaf| leaf.uneven) {
        None => Ok(inferred),
        Some(leaf) => {
            let name = &leaf.name;
            let aval = &leaf.aval;
            Err(failed(&format!(
                "{name} {aval} does not divide evenly over {mesh}"
            )))
        }
    }
}

/// Returns the sharding of each parameter of a stage, by name.
///
/// # Errors
///
/// As for [`divided`].
pub(crate) fn shardings(
    config: &ModelConfig,
    mesh: &Mesh,
    params: impl IntoIterator<Item = (String, ShapedArray)>,
) -> Result<BTreeMap<String, Sharding>> {
    let divided = divided(config, mesh, params)?;
    let names = divided.leaves().iter().map(|leaf| leaf.name.clone());
    Ok(names.zip(divided.shardings()).collect())
}

/// Returns the division of a layer over `devices` devices by tensor parallelism.
///
/// # Errors
///
/// If `devices` does not divide the heads or the MLPs evenly. The message names the key of the
/// config.
pub(crate) fn over(folder: &Folder, devices: usize) -> Result<DeviceDivision> {
    let config = folder.config();
    let refused = |key, expected: String, found: usize| {
        let file = folder.file(CONFIG);
        Err(unexpected(&file, folder.key(key), expected, found))
    };

    let multiple = format!("a multiple of {devices}, the tensor parallel devices");
    let heads = config.num_attention_heads;
    let groups = config.num_key_value_heads;
    if !heads.is_multiple_of(devices) {
        return refused("num_attention_heads", multiple, heads);
    }
    let tensor = match (
        groups.is_multiple_of(devices),
        devices.is_multiple_of(groups),
    ) {
        (true, _) => devices,
        (_, true) => groups,
        _ => {
            let expected = format!("a divisor or {multiple}");
            return refused("num_key_value_heads", expected, groups);
        }
    };

    let has_mlp = config.layers.iter().any(|layer| !layer.has_experts);
    if has_mlp && !config.intermediate_size.is_multiple_of(devices) {
        return refused("intermediate_size", multiple, config.intermediate_size);
    }
    if let Some(experts) = config.experts {
        let shared = experts
            .shared
            .map(|width| ("shared_expert_intermediate_size", width));
        let mut widths = [("moe_intermediate_size", experts.width)]
            .into_iter()
            .chain(shared);
        if let Some((key, width)) = widths.find(|(_, width)| !width.is_multiple_of(devices)) {
            return refused(key, multiple, width);
        }
    }
    Ok(DeviceDivision {
        expert: 1,
        tensor,
        repeat: devices / tensor,
    })
}

/// Checks that `devices` devices can divide the model's experts, and returns `devices`.
///
/// # Errors
///
/// If the model has no experts, or `devices` is not a power of two that divides the number of
/// experts.
pub(crate) fn over_experts(folder: &Folder, devices: usize) -> Result<usize, DivisionError> {
    let refused =
        |expected: &str| Err(InvalidSetting::new("expert_parallel", expected, devices).into());
    match folder.config().experts {
        _ if devices == 1 => Ok(1),
        None => refused("1: the model has no experts"),
        // Their results are added in the order of a binary tree.
        Some(_) if !devices.is_power_of_two() => refused("1, 2, 4 or a higher power of two"),
        Some(experts) if !experts.count.is_multiple_of(devices) => {
            let file = folder.file(CONFIG);
            let expected = format!("a multiple of {devices}, the expert parallel devices");
            Err(unexpected(&file, folder.key("num_experts"), expected, experts.count).into())
        }
        Some(_) => Ok(devices),
    }
}
