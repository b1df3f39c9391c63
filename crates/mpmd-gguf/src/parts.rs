//! The parts of a split file: their names, and that they belong together.

use std::path::{Path, PathBuf};

use crate::error::{GgufError, GgufFlaw};
use crate::limits::MAX_PARTS;
use crate::metadata::Metadata;

/// Key of a part's index, from 0.
const INDEX_KEY: &str = "split.no";
/// Key of the number of parts.
const COUNT_KEY: &str = "split.count";
/// Key of the number of tensors in all parts.
const TENSORS_KEY: &str = "split.tensors.count";

/// The name of a part: `NAME-00001-of-00003.gguf`.
#[derive(Clone, Debug, Eq, PartialEq)]
struct PartName {
    /// The text before the numbers.
    stem: String,
    /// Number of the part, from 1.
    number: u64,
    count: u64,
}

impl PartName {
    fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (name, count) = name.rsplit_once("-of-")?;
        let (stem, number) = name.rsplit_once('-')?;
        Some(Self {
            stem: stem.to_owned(),
            number: parse_number(number)?,
            count: parse_number(count)?,
        })
    }

    fn file_name(&self) -> String {
        let Self {
            stem,
            number,
            count,
        } = self;
        format!("{stem}-{number:05}-of-{count:05}.gguf")
    }
}

/// Parses a number of exactly five digits.
fn parse_number(digits: &str) -> Option<u64> {
    let valid = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
    valid.then(|| digits.parse().ok())?
}

/// Returns the number of parts that a file says it has. A file that is not split has one.
pub(crate) fn part_count(metadata: &Metadata) -> Result<u64, GgufError> {
    let count = metadata.optional(COUNT_KEY, Metadata::u64)?;
    Ok(count.unwrap_or(1).max(1))
}

/// Returns the paths of all `count` parts, given the path of any one.
pub(crate) fn part_paths(path: &Path, count: u64) -> Result<Vec<PathBuf>, GgufFlaw> {
    if count > MAX_PARTS {
        return Err(GgufFlaw::TooMany {
            what: "parts".to_owned(),
            found: count,
            limit: MAX_PARTS,
        });
    }
    let mut name = PartName::parse(path)
        .filter(|name| name.count == count && (1..=count).contains(&name.number))
        .ok_or(GgufFlaw::PartName { parts: count })?;
    let paths = (1..=count).map(|number| {
        name.number = number;
        path.with_file_name(name.file_name())
    });
    Ok(paths.collect())
}

/// Checks that the metadata of the part at `index` fit its place among `count` parts.
pub(crate) fn check_part(
    metadata: &Metadata,
    path: &Path,
    index: u64,
    count: u64,
) -> Result<(), GgufError> {
    let expected = [(INDEX_KEY, index), (COUNT_KEY, count)];
    for (key, expected) in expected {
        check_value(metadata, path, key, expected)?;
    }
    Ok(())
}

/// Checks the number of tensors of all parts, if the first part's metadata have it.
pub(crate) fn check_tensor_count(
    metadata: &Metadata,
    path: &Path,
    tensors: usize,
) -> Result<(), GgufError> {
    match metadata.contains(TENSORS_KEY) {
        true => check_value(metadata, path, TENSORS_KEY, tensors as u64),
        false => Ok(()),
    }
}

fn check_value(
    metadata: &Metadata,
    path: &Path,
    key: &'static str,
    expected: u64,
) -> Result<(), GgufError> {
    let found = metadata.u64(key)?;
    match found == expected {
        true => Ok(()),
        false => Err(GgufError::Refused {
            path: path.to_owned(),
            flaw: GgufFlaw::PartMismatch {
                key,
                found,
                expected,
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_beside_the_given_one() {
        let paths = part_paths(Path::new("a/b-of-c-00002-of-00003.gguf"), 3).unwrap();
        let names = [1, 2, 3].map(|number| format!("a/b-of-c-0000{number}-of-00003.gguf"));
        assert_eq!(paths, names.map(PathBuf::from));
    }

    #[test]
    fn other_names_are_refused() {
        let names = [
            "m.gguf",
            "m-00001-of-00002.gguf",
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-1-of-3.gguf",
            "m-00001-of-00003.bin",
            "m-0000+-of-00003.gguf",
        ];
        for name in names {
            let refused = part_paths(Path::new(name), 3);
            assert_eq!(refused, Err(GgufFlaw::PartName { parts: 3 }), "{name}");
        }
        assert!(matches!(
            part_paths(Path::new("m-00001-of-01001.gguf"), 1001),
            Err(GgufFlaw::TooMany { limit: 1000, .. })
        ));
    }
}
