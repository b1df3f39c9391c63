//! Limits on the content of a file. They are far above what real files have, and bound the memory
//! that a damaged file can make the reader allocate.

/// Limit on the bytes before the tensors' values. The longest known headers are those of large
/// vocabularies, with 16 MiB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Limit on the number of tensors in one file. Real files have up to a few thousand.
pub const MAX_TENSORS: u64 = 1 << 16;

/// Limit on the number of metadata keys in one file. Real files have fewer than a hundred.
pub const MAX_KEYS: u64 = 1 << 16;

/// Limit on the bytes of a metadata key, as the format's document has it.
pub const MAX_KEY_BYTES: u64 = u16::MAX as u64;

/// Limit on the bytes of a tensor's name, as the format's document has it. llama.cpp itself
/// accepts at most 63.
pub const MAX_NAME_BYTES: u64 = 64;

/// Limit on the dimensions of a tensor.
pub const MAX_DIMENSIONS: u32 = 4;

/// Limit on the depth of arrays: an array of numbers has depth 1. llama.cpp itself accepts no
/// arrays of arrays.
pub const MAX_ARRAY_DEPTH: u32 = 4;

/// Limit on the number of arrays inside other arrays in one file.
pub const MAX_INNER_ARRAYS: u64 = 1 << 16;

/// Limit on the number of parts of a split file.
pub const MAX_PARTS: u64 = 1000;
