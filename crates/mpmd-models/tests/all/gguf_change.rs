//! Changed copies of GGUF files.

use std::fs;

use mpmd_gguf::{BlockType, GgufFile, GgufWriter, MetadataValue, TensorInfo};

use crate::gguf::path;

/// A change of a GGUF file.
#[derive(Default)]
pub(crate) struct Change<'a> {
    /// Keys that are set, or removed.
    pub(crate) keys: Vec<(&'a str, Option<MetadataValue>)>,
    /// Tensors that are left out.
    pub(crate) without: Vec<&'a str>,
    /// Tensors that are added: a name and a shape.
    pub(crate) with: Vec<(&'a str, Vec<usize>)>,
    /// Tensors that get another name.
    pub(crate) renamed: Vec<(&'a str, &'a str)>,
}

/// Writes a changed copy of a file. The alignment stays the usual one.
pub(crate) fn changed(file: &str, change: &Change<'_>) -> tempfile::NamedTempFile {
    let from = GgufFile::open(path(file)).unwrap();
    let mut header = GgufWriter::new();
    for (key, value) in from.metadata().iter() {
        if !change.keys.iter().any(|(other, _)| *other == key) {
            header.set(key, value.clone()).unwrap();
        }
    }
    for (key, value) in &change.keys {
        if let Some(value) = value {
            header.set(key, value.clone()).unwrap();
        }
    }
    let kept = from
        .tensors()
        .values()
        .filter(|tensor| !change.without.contains(&tensor.name()));
    let kept: Vec<_> = kept.collect();
    for tensor in &kept {
        let other = change
            .renamed
            .iter()
            .find(|(name, _)| *name == tensor.name());
        let name = other.map_or(tensor.name(), |(_, name)| name);
        header
            .declare(name, tensor.block_type(), tensor.shape())
            .unwrap();
    }
    for (name, shape) in &change.with {
        header.declare(name, BlockType::F32, shape).unwrap();
    }

    let mut bytes = Vec::new();
    let mut writer = header.write(&mut bytes).unwrap();
    for tensor in &kept {
        writer.write(&blocks_of(&from, tensor)).unwrap();
    }
    for (_, shape) in &change.with {
        let ones = vec![1.0f32; shape.iter().product()];
        let blocks: Vec<u8> = ones.into_iter().flat_map(f32::to_le_bytes).collect();
        writer.write(&blocks).unwrap();
    }
    writer.finish().unwrap();
    let to = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    fs::write(to.path(), bytes).unwrap();
    to
}

/// Returns all blocks of a tensor.
pub(crate) fn blocks_of(file: &GgufFile, tensor: &TensorInfo) -> Vec<u8> {
    let mut blocks = vec![0; tensor.bytes() as usize];
    file.read_blocks(tensor.name(), 0..tensor.bytes(), &mut blocks)
        .unwrap();
    blocks
}

pub(crate) fn key<'a>(name: &'a str, value: impl Into<MetadataValue>) -> Change<'a> {
    Change {
        keys: vec![(name, Some(value.into()))],
        ..Change::default()
    }
}

pub(crate) fn without_key(name: &str) -> Change<'_> {
    Change {
        keys: vec![(name, None)],
        ..Change::default()
    }
}
