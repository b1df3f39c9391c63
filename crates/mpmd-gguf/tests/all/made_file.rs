//! Bytes of files, field by field, also of files that contradict themselves.

use std::fs;

use mpmd_gguf::{GgufError, GgufFile, GgufFlaw};

/// The bytes of a file that is being made.
#[derive(Clone, Debug, Default)]
pub(crate) struct MadeFile {
    pub(crate) bytes: Vec<u8>,
}

impl MadeFile {
    /// Begins a file of version 3 with numbers of tensors and keys.
    pub(crate) fn new(tensors: u64, keys: u64) -> Self {
        Self::default().raw(b"GGUF").u32(3).u64(tensors).u64(keys)
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn text(self, text: &[u8]) -> Self {
        self.u64(text.len() as u64).raw(text)
    }

    /// Appends a key and a value of type u32.
    pub(crate) fn key_u32(self, key: &str, value: u32) -> Self {
        self.text(key.as_bytes()).u32(4).u32(value)
    }

    /// Appends the start of an array: its key, and the type and number of its elements.
    pub(crate) fn key_array(self, key: &str, element_type: u32, count: u64) -> Self {
        self.text(key.as_bytes())
            .u32(9)
            .u32(element_type)
            .u64(count)
    }

    /// Appends the entry of a tensor. `shape` has the innermost dimension first.
    pub(crate) fn tensor(self, name: &str, shape: &[u64], block_type: u32, offset: u64) -> Self {
        let begun = self.text(name.as_bytes()).u32(shape.len() as u32);
        let shaped = shape.iter().fold(begun, |made, size| made.u64(*size));
        shaped.u32(block_type).u64(offset)
    }

    /// Appends zeros up to a multiple of 32 bytes, and `bytes` more.
    pub(crate) fn values(mut self, bytes: usize) -> Self {
        let end = self.bytes.len().next_multiple_of(32) + bytes;
        self.bytes.resize(end, 0);
        self
    }

    /// Opens the bytes as a file.
    pub(crate) fn open(&self) -> Result<GgufFile, GgufError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made.gguf");
        fs::write(&path, &self.bytes).unwrap();
        GgufFile::open(path)
    }

    /// Opens the bytes as a file, and returns the flaw for which it is refused.
    ///
    /// # Panics
    ///
    /// If it is not refused.
    pub(crate) fn flaw(&self) -> GgufFlaw {
        match self.open().unwrap_err() {
            GgufError::Refused { flaw, .. } => flaw,
            other => panic!("{other}"),
        }
    }
}
