//! Files in several parts.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use mpmd_gguf::{BlockType, GgufError, GgufFile, GgufFlaw, GgufWriter};

use crate::golden::golden;

fn part(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("m-{number:05}-of-00003.gguf"))
}

/// Metadata of a part.
struct PartFacts {
    no: u16,
    count: u16,
    tensors: i32,
    /// Name of the one tensor.
    name: &'static str,
}

fn write_part(path: &Path, facts: &PartFacts) {
    let mut header = GgufWriter::new();
    header.set("split.no", facts.no).unwrap();
    header.set("split.count", facts.count).unwrap();
    header.set("split.tensors.count", facts.tensors).unwrap();
    header.declare(facts.name, BlockType::F32, &[1]).unwrap();
    let mut tensors = header.write(File::create(path).unwrap()).unwrap();
    tensors.write(&f32::from(facts.no).to_le_bytes()).unwrap();
    tensors.finish().unwrap();
}

/// Writes three parts, after `change` has changed the facts of the second one.
fn write_parts(folder: &Path, change: impl FnOnce(&mut PartFacts)) {
    let mut facts = ["a", "b", "c"].map(|name| PartFacts {
        no: u16::from(name.as_bytes()[0] - b'a'),
        count: 3,
        tensors: 3,
        name,
    });
    change(&mut facts[1]);
    for (number, facts) in (1..).zip(&facts) {
        write_part(&part(folder, number), facts);
    }
}

#[test]
fn any_part_opens_all_parts_of_the_package() {
    for number in 1..=3 {
        let given = golden(&format!("split-0000{number}-of-00003.gguf"));
        let file = GgufFile::open(given).unwrap();
        assert_eq!(file.parts().len(), 3);
        assert_eq!(
            file.metadata().text("general.architecture").unwrap(),
            "example"
        );
        for index in 0..5 {
            let name = format!("blk.{index}.weight");
            let mut values = [0.0; 8];
            file.read_rows(&name, 0..2, 0..4, &mut values).unwrap();
            assert_eq!(values, [index as f32; 8]);
            let part = golden(&format!("split-0000{}-of-00003.gguf", index / 2 + 1));
            assert_eq!(file.path_of(&name).unwrap(), part);
        }
        for part in file.parts() {
            assert_eq!(fs::metadata(part.path()).unwrap().len(), part.bytes());
        }
    }
}

#[test]
fn first_part_may_have_only_metadata() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |_| ());
    let mut header = GgufWriter::new();
    header.set("split.no", 0u16).unwrap();
    header.set("split.count", 3u16).unwrap();
    header.set("split.tensors.count", 2).unwrap();
    header.set("general.name", "n").unwrap();
    let first = File::create(part(folder.path(), 1)).unwrap();
    header.write(first).unwrap().finish().unwrap();

    let file = GgufFile::open(part(folder.path(), 2)).unwrap();
    assert_eq!(file.metadata().text("general.name").unwrap(), "n");
    let names: Vec<&String> = file.tensors().keys().collect();
    assert_eq!(names, ["b", "c"]);
}

#[test]
fn missing_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |_| ());
    fs::remove_file(part(folder.path(), 2)).unwrap();
    for given in [1, 3] {
        let missing = GgufFile::open(part(folder.path(), given)).unwrap_err();
        assert!(
            matches!(&missing, GgufError::MissingPart { path, parts: 3 }
                if *path == part(folder.path(), 2)),
            "{missing}"
        );
    }
}

#[test]
fn renamed_part_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |_| ());
    let renamed = folder.path().join("model.gguf");
    fs::rename(part(folder.path(), 1), &renamed).unwrap();
    let refused = GgufFile::open(&renamed).unwrap_err();
    assert!(
        matches!(
            refused,
            GgufError::Refused {
                flaw: GgufFlaw::PartName { parts: 3 },
                ..
            }
        ),
        "{refused}"
    );
}

#[test]
fn parts_of_different_files_are_refused() {
    type Change = fn(&mut PartFacts);
    let mismatches: [(&str, Change); 3] = [
        ("split.no", |facts| facts.no = 2),
        ("split.count", |facts| facts.count = 4),
        ("split.count", |facts| facts.count = 1),
    ];
    for (expected, change) in mismatches {
        let folder = tempfile::tempdir().unwrap();
        write_parts(folder.path(), change);
        let refused = GgufFile::open(part(folder.path(), 1)).unwrap_err();
        assert!(
            matches!(&refused, GgufError::Refused { path, flaw: GgufFlaw::PartMismatch { key, .. } }
                if *path == part(folder.path(), 2) && *key == expected),
            "{refused}"
        );
    }

    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |facts| facts.name = "a");
    let refused = GgufFile::open(part(folder.path(), 1)).unwrap_err();
    assert!(
        matches!(&refused, GgufError::Refused { flaw: GgufFlaw::NameTwice(name), .. }
            if name == "a"),
        "{refused}"
    );
}

#[test]
fn missing_tensors_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |_| ());
    let facts = PartFacts {
        no: 0,
        count: 3,
        tensors: 4,
        name: "a",
    };
    write_part(&part(folder.path(), 1), &facts);
    let refused = GgufFile::open(part(folder.path(), 3)).unwrap_err();
    let expected = GgufFlaw::PartMismatch {
        key: "split.tensors.count",
        found: 4,
        expected: 3,
    };
    assert!(
        matches!(&refused, GgufError::Refused { flaw, .. } if *flaw == expected),
        "{refused}"
    );
}
