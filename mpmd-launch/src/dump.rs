//! The operation to dump, `MPMD_DUMP`.

use std::path::PathBuf;

use crate::{LaunchError, variables};

/// The folder of a dump that names none.
const FOLDER: &str = "dump";

/// Returns (number of the operation, folder) for a value of [`variables::DUMP`], `OP` or
/// `OP:FOLDER`.
///
/// # Errors
///
/// [`LaunchError::Variable`] for another text. Operations are counted from 1.
pub fn dump(text: &str) -> Result<(u64, PathBuf), LaunchError> {
    let (op, folder) = text.split_once(':').unwrap_or((text, FOLDER));
    match op.parse() {
        Ok(op @ 1..) if !folder.is_empty() => Ok((op, folder.into())),
        _ => Err(LaunchError::Variable {
            variable: variables::DUMP.into(),
            value: text.into(),
            expected: "the number of an operation, from 1, or number:folder".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dump_is_a_number_and_perhaps_a_folder() {
        assert_eq!(dump("12"), Ok((12, "dump".into())));
        assert_eq!(dump("7:/tmp/a:b"), Ok((7, "/tmp/a:b".into())));
        for wrong in ["", "0", "x", "-1", "3:", ":/tmp"] {
            let error = dump(wrong).unwrap_err().to_string();
            assert!(error.contains("the number of an operation"), "{error}");
        }
    }
}
