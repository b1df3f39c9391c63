//! The files of a model's folder, which may come from a stranger: which there are, and which may be
//! read.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use mpmd::train::tensors::{TensorFile, read_json, read_regular, refuse_pointer};
use mpmd::{Error, Result};
use serde::Deserialize;

use crate::error::unexpected;

/// Name of the file with the model's config.
pub(crate) const CONFIG: &str = "config.json";
/// Name of the file with the settings for generating text.
pub(crate) const GENERATION: &str = "generation_config.json";
/// Name of the file with the tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Names of the files that a folder may have beside its weights. A saved model gets copies of them.
pub(crate) const COMPANIONS: [&str; 13] = [
    CONFIG,
    TOKENIZER,
    "additional_chat_templates/tool_use.jinja",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];
/// Limit on the size of the index and of each file beside the weights, in bytes.
pub(crate) const LARGEST_FILE: u64 = 256 << 20;

/// Name of the file with the weights, if a folder has only one.
const SINGLE: &str = "model.safetensors";
/// Name of the file that maps tensors to files, if the weights are in several files.
const INDEX: &str = "model.safetensors.index.json";

/// The tensors in the weight files of a folder.
pub(crate) struct FolderTensors {
    /// The path of the file that lists the tensors: the index, or the only weight file.
    pub(crate) list: PathBuf,
    /// The weight file of each tensor, by the tensor's name.
    pub(crate) files: BTreeMap<String, TensorFile>,
    /// The size of the largest weight file, in bytes. `None` if there is only one file.
    pub(crate) split: Option<u64>,
}

/// The content of [`INDEX`].
#[derive(Deserialize)]
struct Index {
    /// The name of the weight file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Returns the path of a file in a folder from an untrusted source. Checks that it is a regular
/// file of at most `most` bytes, and no pointer file of Git LFS.
///
/// A symbolic link may only lead to files of the folder, or from `snapshots/REV` of a hub cache to
/// the `blobs` beside `snapshots`.
pub(crate) fn checked(folder: &Path, name: &str, most: u64) -> io::Result<PathBuf> {
    let path = folder.join(name);
    let real = path.canonicalize()?;
    let root = folder.canonicalize()?;

    let snapshots = root
        .ancestors()
        .skip(1)
        .find(|above| above.ends_with("snapshots"));
    let blobs = snapshots
        .and_then(Path::parent)
        .map(|cache| cache.join("blobs"));
    if !real.starts_with(&root) && !blobs.is_some_and(|blobs| real.starts_with(blobs)) {
        let real = real.display();
        return Err(io::Error::other(format!(
            "a link out of the folder, to {real}: copy the file"
        )));
    }

    let found = real.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("no regular file"));
    }
    if found.len() > most {
        let bytes = found.len();
        return Err(io::Error::other(format!(
            "a file of {bytes} bytes, more than {most}"
        )));
    }
    refuse_pointer(&path, found.len())?;
    Ok(path)
}

/// Returns the names of the [`COMPANIONS`] that a folder has.
pub(crate) fn companions(folder: &Path) -> Result<Vec<&'static str>> {
    let has = |name: &&str| folder.join(name).symlink_metadata().is_ok();
    let found = COMPANIONS.into_iter().filter(has);
    let check = |name| match checked(folder, name, LARGEST_FILE) {
        Ok(_) => Ok(name),
        Err(why) => Err(unexpected(
            &folder.join(name),
            "",
            "a file beside the weights",
            why,
        )),
    };
    found.map(check).collect()
}

/// Returns the reason why a file of a folder cannot be read. If it is missing and the folder has
/// GGUF files, the text says how to name one.
pub(crate) fn with_hint(folder: &Path, why: &io::Error) -> String {
    let files = folder.read_dir().into_iter().flatten().flatten();
    let is_gguf = |file: &PathBuf| file.extension().is_some_and(|end| end == "gguf");
    let first = files.map(|entry| entry.path()).filter(is_gguf).min();
    match first.filter(|_| why.kind() == io::ErrorKind::NotFound) {
        Some(file) => format!(
            "{why}; name one of its GGUF files, such as {}",
            file.display()
        ),
        None => why.to_string(),
    }
}

/// Opens the weight files of a folder, and finds the file of each tensor.
///
/// # Errors
///
/// If a file is missing or damaged.
pub(crate) fn find(folder: &Path) -> Result<FolderTensors> {
    let single = folder.join(SINGLE);
    let index = folder.join(INDEX);
    let open = |name: &str| {
        let path = folder.join(name);
        match checked(folder, name, u64::MAX) {
            Ok(path) => TensorFile::open(path),
            Err(why) => Err(Error::Environment(format!("{}: {why}", path.display()))),
        }
    };

    if single.symlink_metadata().is_ok() {
        let file = open(SINGLE)?;
        let files = file
            .names()
            .into_iter()
            .map(|name| (name, file.clone()))
            .collect();
        return Ok(FolderTensors {
            list: single,
            files,
            split: None,
        });
    }

    let expected = format!("{SINGLE} or {INDEX}");
    let text = checked(folder, INDEX, LARGEST_FILE)
        .and_then(|path| read_regular(&path, LARGEST_FILE))
        .map_err(|why| unexpected(folder, "", expected, with_hint(folder, &why)))?;
    let Index { weight_map } =
        read_json(&text).map_err(|why| unexpected(&index, "", "the files of all tensors", why))?;

    let mut opened = BTreeMap::<&str, TensorFile>::new();
    let mut files = BTreeMap::new();
    let mut largest = 0;
    for (name, file) in &weight_map {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(unexpected(
                &index,
                name,
                "the name of a file",
                format!("{file:?}"),
            ));
        }

        if !opened.contains_key(file.as_str()) {
            opened.insert(file, open(file)?);
            let path = folder.join(file);
            largest = largest.max(path.metadata().map_or(0, |found| found.len()));
        }
        files.insert(name.clone(), opened[file.as_str()].clone());
    }
    Ok(FolderTensors {
        list: index,
        files,
        split: Some(largest),
    })
}
