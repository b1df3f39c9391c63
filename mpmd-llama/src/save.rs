//! Saving a model as model hubs lay it out, in the same form as the folder that it comes from.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mpmd::aval::DType;
use mpmd::train::tensors;
use mpmd::{Error, MpmdArray, ProcessId, Program, Result};

use crate::folder::Folder;
use crate::unexpected;

/// Ends of the names of files beside the weights that are copied.
const COPIED: [&str; 4] = [".json", ".jinja", ".model", ".txt"];

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
    p.broadcast_value(ProcessId(0), (), || copy_settings(source.path(), to))
}

/// Copies the config, the tokenizer and other small files beside the weights.
fn copy_settings(from: &Path, to: &Path) -> Result<()> {
    let failed = |path: &Path, why| {
        Error::Environment(format!(
            "{}: cannot be copied to {}: {why}",
            path.display(),
            to.display()
        ))
    };
    for entry in fs::read_dir(from).map_err(|why| failed(from, why))? {
        let entry = entry.map_err(|why| failed(from, why))?;
        let (name, path) = (entry.file_name(), entry.path());
        let is_copied = name.to_str().is_some_and(|name| {
            COPIED.iter().any(|end| name.ends_with(end)) && !name.ends_with(".index.json")
        });
        if is_copied && path.is_file() {
            // A copy of the permissions might forbid to save there again.
            let copy = fs::read(&path).and_then(|bytes| fs::write(to.join(name), bytes));
            copy.map_err(|why| failed(&path, why))?;
        }
    }
    Ok(())
}
