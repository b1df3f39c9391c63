//! Saving a model as model hubs lay it out, in the same form as the folder that it comes from.

use std::collections::BTreeMap;
use std::path::Path;

use mpmd::aval::DType;
use mpmd::train::tensors;
use mpmd::{MpmdArray, ProcessId, Program, Result};
use serde_json::{Map, Value};

use crate::folder::{CONFIG, Folder};
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
        tensors::replace(&to.join(name), &bytes)?;
    }
    Ok(())
}
