//! The types of metadata, with their numbers in files and their names in messages.

/// A type of metadata.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

/// All types, each at the index that is its number in files: the name of a value, and the name of
/// an array of such values.
const TYPES: [(ValueType, &str, &str); 13] = [
    (ValueType::U8, "u8", "array of u8"),
    (ValueType::I8, "i8", "array of i8"),
    (ValueType::U16, "u16", "array of u16"),
    (ValueType::I16, "i16", "array of i16"),
    (ValueType::U32, "u32", "array of u32"),
    (ValueType::I32, "i32", "array of i32"),
    (ValueType::F32, "f32", "array of f32"),
    (ValueType::Bool, "bool", "array of bool"),
    (ValueType::Text, "text", "array of text"),
    (ValueType::Array, "array", "array of arrays"),
    (ValueType::U64, "u64", "array of u64"),
    (ValueType::I64, "i64", "array of i64"),
    (ValueType::F64, "f64", "array of f64"),
];

impl ValueType {
    /// Returns the type of this number. `None` if the format has none.
    pub(crate) fn of(id: u32) -> Option<Self> {
        let found = TYPES.get(usize::try_from(id).ok()?);
        found.map(|(found, ..)| *found)
    }

    /// Returns the number in files.
    pub(crate) fn id(self) -> u32 {
        // The variants are declared in the order of the numbers.
        self as u32
    }

    pub(crate) fn name(self) -> &'static str {
        TYPES[self as usize].1
    }

    pub(crate) fn array_name(self) -> &'static str {
        TYPES[self as usize].2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_at_their_numbers() {
        for (id, (known, ..)) in (0..).zip(TYPES) {
            assert_eq!((known.id(), ValueType::of(id)), (id, Some(known)));
        }
        assert_eq!(ValueType::of(13), None);
        assert_eq!(ValueType::of(u32::MAX), None);
    }
}
