//! Folders of model hubs: config, tokenizer and weights, read and written. GGUF files, read as
//! such folders.

pub(crate) mod adapter;
pub(crate) mod adapter_matrices;
pub(crate) mod content;
pub(crate) mod files;
pub(crate) mod folder;
pub(crate) mod gguf;
pub(crate) mod initial;
pub(crate) mod save;
pub(crate) mod stored_tensor;
