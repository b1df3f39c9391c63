//! The types of blocks that tensors consist of.

/// The packing of a tensor's elements: blocks of a fixed number of elements and bytes, each inside
/// one row. The names are those of the format.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names are those of the format")]
#[expect(non_camel_case_types, reason = "the names are those of the format")]
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// Facts of a block type.
struct BlockFacts {
    name: &'static str,
    /// Number in files.
    id: u32,
    elements: usize,
    bytes: usize,
}

/// Types in files that have no decoder here, with their numbers. Those in lower case are no longer
/// written by anyone.
const UNREADABLE: &[(u32, &str)] = &[
    (4, "q4_2"),
    (5, "q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "q4_0_4_4"),
    (32, "q4_0_4_8"),
    (33, "q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "iq4_nl_4_4"),
    (37, "iq4_nl_4_8"),
    (38, "iq4_nl_8_8"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl BlockType {
    /// All block types.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// Returns the type with a number of files; `None` if it is unknown or has no decoder.
    pub(crate) fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.id() == id)
    }

    /// Returns the type's number in files.
    pub(crate) const fn id(self) -> u32 {
        self.facts().id
    }

    /// Returns the name of the type, as GGUF's tools write it.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the number of elements in a block.
    pub const fn elements(self) -> usize {
        self.facts().elements
    }

    /// Returns the number of bytes in a block.
    pub const fn bytes(self) -> usize {
        self.facts().bytes
    }

    /// Returns true if the blocks are more than single floating-point numbers.
    pub const fn is_quantized(self) -> bool {
        self.elements() > 1
    }

    const fn facts(self) -> BlockFacts {
        match self {
            Self::F32 => BlockFacts::new("F32", 0, 1, 4),
            Self::F16 => BlockFacts::new("F16", 1, 1, 2),
            Self::BF16 => BlockFacts::new("BF16", 30, 1, 2),
            Self::Q4_0 => BlockFacts::new("Q4_0", 2, 32, 18),
            Self::Q4_1 => BlockFacts::new("Q4_1", 3, 32, 20),
            Self::Q5_0 => BlockFacts::new("Q5_0", 6, 32, 22),
            Self::Q5_1 => BlockFacts::new("Q5_1", 7, 32, 24),
            Self::Q8_0 => BlockFacts::new("Q8_0", 8, 32, 34),
            Self::Q2_K => BlockFacts::new("Q2_K", 10, 256, 84),
            Self::Q3_K => BlockFacts::new("Q3_K", 11, 256, 110),
            Self::Q4_K => BlockFacts::new("Q4_K", 12, 256, 144),
            Self::Q5_K => BlockFacts::new("Q5_K", 13, 256, 176),
            Self::Q6_K => BlockFacts::new("Q6_K", 14, 256, 210),
            Self::IQ4_NL => BlockFacts::new("IQ4_NL", 20, 32, 18),
            Self::IQ4_XS => BlockFacts::new("IQ4_XS", 23, 256, 136),
            Self::MXFP4 => BlockFacts::new("MXFP4", 39, 32, 17),
        }
    }
}

impl BlockFacts {
    const fn new(name: &'static str, id: u32, elements: usize, bytes: usize) -> Self {
        Self {
            name,
            id,
            elements,
            bytes,
        }
    }
}

/// Returns the name of a type that has no decoder here; `None` for unknown numbers.
pub(crate) fn unreadable_name(id: u32) -> Option<&'static str> {
    let found = UNREADABLE.iter().find(|(known, _)| *known == id);
    found.map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_means_one_type() {
        for id in 0..64 {
            let readable = BlockType::ALL.into_iter().filter(|known| known.id() == id);
            let unreadable = UNREADABLE.iter().filter(|(known, _)| *known == id);
            let count = readable.count() + unreadable.count();
            assert_eq!(count, usize::from(id <= 41), "{id}");
        }
    }
}
