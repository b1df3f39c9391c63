//! Saving a model as model hubs lay it out, in the same form as the folder that it comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use mpmd::aval::DType;
use mpmd::pipeline::Pipeline;
use mpmd::train::tensors;
use mpmd::tree::Tree;
use mpmd::{MpmdArray, ProcessId, Program, Result};
use serde_json::{Map, Value, json};

use crate::folder::{CONFIG, Folder};
use crate::lora::{Lora, MATRICES, is_adapter};
use crate::unexpected;

/// Saves parameters by name in a folder of the same form as `source`: with its config and
/// tokenizer, names and dtypes, and in several files if it has several. Blocks until the folder is
/// complete. Every process must call it, and see the same folder.
///
/// # Errors
///
/// If a parameter of the model is missing, an array's operation failed, or a file cannot be
/// written. Every process gets the error.
pub fn save(
    p: &mut Program,
    source: &Folder,
    params: &BTreeMap<String, MpmdArray>,
    to: &Path,
) -> Result<()> {
    let arrays = source.tensors().map(|(name, aval)| match params.get(name) {
        Some(array) => Ok((name.to_owned(), array.clone(), aval.dtype())),
        None => Err(unexpected(to, name, "a parameter of the pipeline", "none")),
    });
    let arrays = arrays.collect::<Result<Vec<(String, MpmdArray, DType)>>>()?;
    // The library `transformers` refuses files without it.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    tensors::save(p, to, &arrays, source.split().unwrap_or(u64::MAX), &metadata)?;
    p.broadcast_value(ProcessId(0), (), || copy_settings(source, to))
}

/// Start of the names in a file of adapters: `peft` wraps the model twice.
const WRAPPED: &str = "base_model.model.";
/// The settings of an adapter.
const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Saves the matrices of LoRA in a folder, as the library `peft` has them: `adapter_config.json`
/// and `adapter_model.safetensors`. Blocks until the folder is complete. Every process must call
/// it, and see the same folder.
///
/// # Errors
///
/// As for [`save`], and if the pipeline has no matrices of this rank.
pub fn save_adapter<In, Out>(
    p: &mut Program,
    source: &Folder,
    pipeline: &Pipeline<In, Out>,
    lora: Lora,
    to: &Path,
) -> Result<()>
where
    In: Tree<Leaf = MpmdArray>,
    Out: Tree<Leaf = MpmdArray>,
{
    let params = (0..pipeline.stages()).flat_map(|stage| pipeline.params(stage));
    let mut arrays: Vec<(String, MpmdArray, DType)> = params
        .filter(|(name, _)| is_adapter(name))
        .map(|(name, array)| (format!("{WRAPPED}{name}"), array.clone(), array.dtype()))
        .collect();
    let ranks = |(name, array, _): &(String, MpmdArray, DType)| {
        name.ends_with(MATRICES[0]) && array.shape().first() != Some(&lora.rank)
    };
    if arrays.is_empty() || arrays.iter().any(ranks) {
        let rank = lora.rank;
        return Err(unexpected(to, "", format!("matrices of LoRA of rank {rank}"), "others"));
    }
    arrays.sort_by(|a, b| a.0.cmp(&b.0));
    // `peft` names the layers by the ends of their names: `q_proj`.
    let layer = |(name, ..): &(String, MpmdArray, DType)| Some(name.rsplit('.').nth(2)?.to_owned());
    let layers: BTreeSet<String> = arrays.iter().filter_map(layer).collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    // They become part of the folder at once and whole. A save that was broken off may have left
    // it.
    let new = to.join("adapter.partial");
    p.broadcast_value(ProcessId(0), (), || Ok(_ = fs::remove_dir_all(&new)))?;
    tensors::save(p, &new, &arrays, u64::MAX, &metadata)?;
    p.broadcast_value(ProcessId(0), (), || {
        let settings = to.join(ADAPTER_CONFIG);
        // Without it, matrices of one save cannot be read with the settings of another.
        _ = fs::remove_file(&settings);
        fs::rename(new.join("model.safetensors"), to.join("adapter_model.safetensors"))
            .map_err(|why| unexpected(to, "", "a folder for an adapter", why))?;
        _ = fs::remove_dir_all(&new);
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": source.path().display().to_string(),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "target_modules": layers,
        });
        tensors::replace(&settings, format!("{config:#}\n").as_bytes())
    })
}

/// Copies the config, the tokenizer and the other companions of the weights. The config says if
/// the saved output is tied.
fn copy_settings(from: &Folder, to: &Path) -> Result<()> {
    for name in from.companions() {
        let path = from.path().join(name);
        let cannot = format!("a file that can be copied to {}", to.display());
        let mut bytes = from.small(name).map_err(|why| unexpected(&path, "", &cannot, why))?;
        if *name == CONFIG {
            let mut map: Map<String, Value> = serde_json::from_slice(&bytes)
                .map_err(|why| unexpected(&path, "", &cannot, why))?;
            let key = "tie_word_embeddings";
            let is_tied = from.config().tie_word_embeddings;
            if map.get(key).is_some_and(|value| *value != is_tied) {
                map.insert(key.to_owned(), is_tied.into());
                bytes = format!("{:#}\n", Value::Object(map)).into_bytes();
            }
        }
        let file = to.join(name);
        file.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .map_err(|why| unexpected(&file, "", &cannot, why))?;
        tensors::replace(&file, &bytes)?;
    }
    Ok(())
}
