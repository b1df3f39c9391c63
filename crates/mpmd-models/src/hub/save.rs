//! Saving a model as model hubs lay it out, in the same form as the folder that it comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use mpmd::aval::{DType, f32s};
use mpmd::candle::{Result as CandleResult, Tensor, function};
use mpmd::pipeline::Pipeline;
use mpmd::sharding::Sharding;
use mpmd::train::tensors::{self, read_json};
use mpmd::tree::Tree;
use mpmd::{Error, MpmdArray, ProcessId, Program, Result};
use serde_json::{Map, Value, json};

use crate::decoder::lora::{Lora, MATRICES, WEIGHT};
use crate::error::unexpected;
use crate::family::{ParameterSource, TensorRows};
use crate::hub::adapter::{ADAPTER_CONFIG, ADAPTER_MODEL, WRAPPED};
use crate::hub::folder::{CONFIG, Folder};

/// Saves parameters, given by name, as a folder of the same form as `source`. The form covers
/// config, tokenizer, names, dtypes, and if there are several weight files.
///
/// Blocks until the folder is complete. Every process must call it, and see the same folder.
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
    let mut arrays = Vec::new();
    for (name, parts) in parts(source) {
        let place = parts[0].1;
        let stacked = parts[0].1.stacked.is_some();
        let found = parts
            .into_iter()
            .map(|(name, source)| match params.get(name) {
                Some(array) => Ok((array.clone(), source.rows)),
                None => Err(unexpected(to, name, "a parameter of the pipeline", "none")),
            });
        let mut found = found.collect::<Result<Vec<_>>>()?;

        let array = match stacked {
            // The files have a tensor for each index of its first dimension.
            true => found.swap_remove(0).0,
            false => fused(p, found, place.is_transposed, false)?,
        };
        arrays.push((name.to_owned(), array, source.dtype(place)));
    }

    // The library `transformers` refuses files without it.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    tensors::save(
        p,
        to,
        &arrays,
        source.split().unwrap_or(u64::MAX),
        &metadata,
    )?;
    p.broadcast_value(ProcessId(0), (), || copy_settings(source, to))
}

/// Returns for each tensor of the folder's files its parameters, with their names and sources.
fn parts(source: &Folder) -> BTreeMap<&str, Vec<(&str, &ParameterSource)>> {
    let mut parts = BTreeMap::<&str, Vec<_>>::new();
    for (name, source) in source.sources() {
        parts.entry(&source.name).or_default().push((name, source));
    }
    parts
}

/// Issues the computation of a stored tensor from the parameters that are rows of it. If `spreads`,
/// each parameter has columns of its own in the tensor, and zeros in the columns of the others.
fn fused(
    p: &mut Program,
    parts: Vec<(MpmdArray, TensorRows)>,
    is_transposed: bool,
    spreads: bool,
) -> Result<MpmdArray> {
    let (arrays, rows): (Vec<MpmdArray>, Vec<TensorRows>) = parts.into_iter().unzip();

    let mut shape = arrays[0].shape().to_vec();
    if rows[..] == [TensorRows::block(0, shape[0])] && !is_transposed {
        return Ok(arrays[0].clone());
    }

    // (row in the tensor, index of the parameter, its row, number of rows)
    let mut pieces = Vec::new();
    for (index, rows) in rows.into_iter().enumerate() {
        let places = rows.places();
        pieces.extend(places.map(|(first, rows)| (rows.start, index, first, rows.len())));
    }
    pieces.sort_unstable();

    shape[0] = pieces.iter().map(|piece| piece.3).sum();
    let parts = arrays.len();
    let own = shape.last().copied().unwrap_or(1);
    if spreads {
        shape[1] = parts * own;
    }
    if is_transposed {
        shape.reverse();
    }

    let captured = format!("{pieces:?} {spreads} {is_transposed}");
    let fuse = function(move |params: Vec<Tensor>| {
        let rows = pieces.iter().map(|(_, index, first, rows)| {
            let rows = params[*index].narrow(0, *first, *rows)?;
            match spreads {
                true => rows.pad_with_zeros(1, index * own, (parts - 1 - index) * own),
                false => Ok(rows),
            }
        });
        let whole = Tensor::cat(&rows.collect::<CandleResult<Vec<_>>>()?, 0)?;
        if is_transposed {
            whole.t()?.contiguous()
        } else {
            Ok(whole)
        }
    });

    let Some(mesh) = arrays[0].sharding().and_then(Sharding::mesh).cloned() else {
        let expected = "parameters over the mesh of a stage";
        return Err(Error::kernel(format!(
            "{expected}, not {:?}",
            arrays[0].sharding()
        )));
    };

    let whole = |array: &MpmdArray| p.device_put(array, mesh.replicated());
    let arrays = arrays.iter().map(whole).collect::<Result<Vec<_>>>()?;
    let fuse = fuse
        .outputs(move |_| Ok(f32s(shape.clone())))
        .with(captured);
    p.jit(fuse)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?
        .call(p, arrays)
}

/// Saves the matrices of LoRA in a folder, in the format of the library `peft`:
/// `adapter_config.json` and `adapter_model.safetensors`. Blocks until the folder is complete.
/// Every process must call it, and see the same folder.
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
    let params: BTreeMap<String, MpmdArray> = params.collect();

    let mut arrays = Vec::new();
    let mut layers = BTreeSet::new();
    let mut ranks = Map::new();
    let mut alphas = Map::new();
    for (tensor, parts) in parts(source) {
        let matrices = |which: usize| {
            let matrix = |(name, _): &(&str, _)| {
                params
                    .get(&format!(
                        "{}{}",
                        name.strip_suffix(WEIGHT)?,
                        MATRICES[which]
                    ))
                    .cloned()
            };
            parts.iter().map(matrix).collect::<Option<Vec<MpmdArray>>>()
        };

        let (Some(a), Some(b)) = (matrices(0), matrices(1)) else {
            continue;
        };
        if a.iter().any(|a| a.shape()[0] != lora.rank) {
            let expected = format!("matrices of LoRA of rank {}", lora.rank);
            return Err(unexpected(to, tensor, expected, a[0].shape()[0]));
        }

        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        // `peft` names the layers by the ends of their names: `q_proj`.
        let layer = module.rsplit('.').next().unwrap_or(module).to_owned();
        let count = parts.len();
        let rank = lora.rank;
        if count > 1 {
            // The factor of each part stays `alpha / rank`.
            ranks.insert(layer.clone(), (count * rank).into());
            alphas.insert(layer.clone(), (count as f64 * lora.alpha).into());
        }
        layers.insert(layer);

        // One below the other; and for B one beside the other, in the rows of its outputs.
        let stacked = (0..count).map(|at| TensorRows::block(at * rank, rank));
        let a = a.into_iter().zip(stacked).collect();
        let b = b
            .into_iter()
            .zip(parts.iter().map(|(_, source)| source.rows))
            .collect();
        for (parts, spreads, end) in [(a, false, MATRICES[0]), (b, true, MATRICES[1])] {
            let array = fused(p, parts, false, spreads)?;
            arrays.push((format!("{WRAPPED}{module}.{end}"), array, DType::F32));
        }
    }

    if arrays.is_empty() {
        let rank = lora.rank;
        return Err(unexpected(
            to,
            "",
            format!("matrices of LoRA of rank {rank}"),
            "others",
        ));
    }

    arrays.sort_by(|a, b| a.0.cmp(&b.0));
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.path().display().to_string(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": parts(source).values().flatten().any(|(_, part)| part.is_transposed),
        "inference_mode": true,
        "target_modules": layers,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    });
    write_adapter(p, to, &arrays, &config)
}

/// Writes the files of an adapter. Each file replaces an older one only when it is complete.
fn write_adapter(
    p: &mut Program,
    to: &Path,
    arrays: &[(String, MpmdArray, DType)],
    config: &Value,
) -> Result<()> {
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    // A save that was broken off may have left it.
    let new = to.join("adapter.partial");
    p.broadcast_value(ProcessId(0), (), || Ok(_ = fs::remove_dir_all(&new)))?;
    tensors::save(p, &new, arrays, u64::MAX, &metadata)?;
    p.broadcast_value(ProcessId(0), (), || {
        let settings = to.join(ADAPTER_CONFIG);
        // Without it, matrices of one save cannot be read with the settings of another.
        _ = fs::remove_file(&settings);
        fs::rename(new.join("model.safetensors"), to.join(ADAPTER_MODEL))
            .map_err(|why| unexpected(to, "", "a folder for an adapter", why))?;
        _ = fs::remove_dir_all(&new);
        tensors::replace(&settings, format!("{config:#}\n").as_bytes())
    })
}

/// Copies the config, the tokenizer and other files beside the weights. Sets `tie_word_embeddings`
/// of the copied config, if the key is there, to the state of the saved model.
fn copy_settings(from: &Folder, to: &Path) -> Result<()> {
    for name in from.companions() {
        let path = from.file(name);
        let cannot = format!("a file that can be copied to {}", to.display());
        // A training does not end without its model since such a file has changed.
        let mut bytes = from
            .current(name)
            .map_err(|why| unexpected(&path, "", &cannot, why))?;
        if let Err(why) = from.check(name, &bytes) {
            tracing::warn!("{}: {why}; the present one is copied", path.display());
        }

        if *name == CONFIG {
            let mut map: Map<String, Value> =
                read_json(&bytes).map_err(|why| unexpected(&path, "", &cannot, why))?;
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
