//! Files that contradict themselves, each refused with its flaw.

use std::fs;
use std::io::ErrorKind;

use mpmd_gguf::{GgufError, GgufFile, GgufFlaw, limits};

use crate::golden::golden;
use crate::made_file::MadeFile;

const F32: u32 = 0;
const Q8_0: u32 = 8;

fn in_key(key: &str) -> String {
    format!("metadata {key:?}")
}

#[test]
fn other_files_and_versions_are_refused() {
    let lfs = MadeFile::default().raw(b"version https://git-lfs.github.com/spec/v1");
    assert_eq!(lfs.flaw(), GgufFlaw::NotGguf(b"vers".to_vec()));
    assert!(lfs.open().unwrap_err().to_string().contains("Git LFS"));
    for version in [0, 1, 4, 1 << 31] {
        let made = MadeFile::default().raw(b"GGUF").u32(version).u64(0).u64(0);
        assert_eq!(made.flaw(), GgufFlaw::Version(version));
    }

    for version in [2u32, 3] {
        let big_endian = MadeFile::default().raw(b"GGUF").raw(&version.to_be_bytes());
        assert_eq!(big_endian.flaw(), GgufFlaw::BigEndian);
        let made = MadeFile::default().raw(b"GGUF").u32(version).u64(0).u64(0);
        assert_eq!(made.open().unwrap().tensors().len(), 0);
    }
}

#[test]
fn counts_beyond_the_file_are_refused() {
    for [tensors, keys] in [[u64::MAX, 0], [0, u64::MAX], [4, 0], [0, 8]] {
        let flaw = MadeFile::new(tensors, keys).values(64).flaw();
        assert!(matches!(flaw, GgufFlaw::BeyondEnd { .. }), "{flaw:?}");
    }
}

#[test]
fn counts_beyond_the_limits_are_refused() {
    let flaw = MadeFile::new(limits::MAX_TENSORS + 1, 0)
        .values(2 << 20)
        .flaw();
    assert!(
        matches!(
            flaw,
            GgufFlaw::TooMany {
                limit: limits::MAX_TENSORS,
                ..
            }
        ),
        "{flaw:?}"
    );
    let flaw = MadeFile::new(0, limits::MAX_KEYS + 1)
        .values(2 << 20)
        .flaw();
    assert!(
        matches!(
            flaw,
            GgufFlaw::TooMany {
                limit: limits::MAX_KEYS,
                ..
            }
        ),
        "{flaw:?}"
    );
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    let key = MadeFile::new(0, 1).u64(1000).values(64);
    let text = MadeFile::new(0, 1)
        .text(b"k")
        .u32(8)
        .u64(1 << 40)
        .values(64);
    let array = MadeFile::new(0, 1).key_array("k", 12, 1 << 61).values(64);
    let texts = MadeFile::new(0, 1).key_array("k", 8, 10).values(64);
    let arrays = MadeFile::new(0, 1).key_array("k", 9, 1 << 60).values(64);
    let last = MadeFile::new(0, 1).text(b"key").u32(10);
    for made in [key, text, array, texts, arrays, last] {
        let flaw = made.flaw();
        assert!(matches!(flaw, GgufFlaw::BeyondEnd { .. }), "{flaw:?}");
    }
}

#[test]
fn long_headers_are_refused() {
    // The file has holes in place of the array's elements.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    let count = limits::MAX_HEADER_BYTES;
    fs::write(&path, MadeFile::new(0, 1).key_array("k", 0, count).bytes).unwrap();
    let file = fs::File::options().append(true).open(&path).unwrap();
    file.set_len(2 * count).unwrap();
    let refused = GgufFile::open(&path).unwrap_err();
    assert!(
        matches!(&refused, GgufError::Refused { flaw: GgufFlaw::HeaderTooLong(place), .. }
            if *place == in_key("k")),
        "{refused}"
    );
}

#[test]
fn keys_are_unique_texts() {
    let twice = MadeFile::new(0, 2).key_u32("same", 1).key_u32("same", 2);
    assert_eq!(twice.flaw(), GgufFlaw::KeyTwice("same".to_owned()));
    let empty = MadeFile::new(0, 1).key_u32("", 1).values(0);
    assert_eq!(empty.flaw(), GgufFlaw::EmptyKey);
    let long = MadeFile::new(0, 1).key_u32(&"k".repeat(65_536), 1);
    assert!(matches!(
        long.flaw(),
        GgufFlaw::TooMany { found: 65_536, .. }
    ));
    let invalid = MadeFile::new(0, 1).text(b"\xff").u32(4).u32(0);
    assert_eq!(
        invalid.flaw(),
        GgufFlaw::NotUtf8("metadata key 0".to_owned())
    );
}

#[test]
fn invalid_values_are_refused() {
    let key = "k".to_owned();
    for id in [13, 256, u32::MAX] {
        let plain = MadeFile::new(0, 1).text(b"k").u32(id).u64(0);
        let array = MadeFile::new(0, 1).key_array("k", id, 1).u64(0);
        for made in [plain, array] {
            assert_eq!(
                made.flaw(),
                GgufFlaw::ValueType {
                    key: key.clone(),
                    id
                }
            );
        }
    }
    let plain = MadeFile::new(0, 1).text(b"k").u32(7).raw(&[2]);
    let array = MadeFile::new(0, 1).key_array("k", 7, 2).raw(&[1, 2]);
    for made in [plain, array] {
        assert_eq!(
            made.flaw(),
            GgufFlaw::NotBool {
                key: key.clone(),
                found: 2
            }
        );
    }

    let text = MadeFile::new(0, 1).text(b"k").u32(8).text(b"\xc3(");
    assert_eq!(text.flaw(), GgufFlaw::NotUtf8(in_key("k")));
    let texts = MadeFile::new(0, 1)
        .key_array("k", 8, 2)
        .text("ü".as_bytes())
        .text(b"\xc3");
    assert_eq!(
        texts.flaw(),
        GgufFlaw::NotUtf8(format!("{}[1]", in_key("k")))
    );
}

#[test]
fn arrays_are_nested_within_limits() {
    let nested = |depth: u32| {
        let outer = (1..depth).fold(MadeFile::new(0, 1).text(b"k").u32(9), |made, _| {
            made.u32(9).u64(1)
        });
        outer.u32(0).u64(1).raw(&[7])
    };
    nested(limits::MAX_ARRAY_DEPTH).open().unwrap();
    for depth in [limits::MAX_ARRAY_DEPTH + 1, 100_000] {
        assert_eq!(nested(depth).flaw(), GgufFlaw::ArrayDepth("k".to_owned()));
    }

    let many = limits::MAX_INNER_ARRAYS + 1;
    let inner = MadeFile::default()
        .u32(0)
        .u64(0)
        .bytes
        .repeat(many as usize);
    let flaw = MadeFile::new(0, 1)
        .key_array("k", 9, many)
        .raw(&inner)
        .flaw();
    assert!(
        matches!(
            flaw,
            GgufFlaw::TooMany {
                limit: limits::MAX_INNER_ARRAYS,
                ..
            }
        ),
        "{flaw:?}"
    );
}

#[test]
fn invalid_alignments_are_refused() {
    for value in [0, 3, 48, u32::MAX] {
        let made = MadeFile::new(0, 1).key_u32("general.alignment", value);
        assert_eq!(made.flaw(), GgufFlaw::Alignment(value.to_string()));
    }
    let wide = MadeFile::new(0, 1)
        .text(b"general.alignment")
        .u32(10)
        .u64(32);
    assert_eq!(wide.flaw(), GgufFlaw::Alignment("u64".to_owned()));
    let largest = MadeFile::new(1, 1)
        .key_u32("general.alignment", 1 << 31)
        .tensor("t", &[8], F32, 0)
        .values(64);
    assert!(matches!(largest.flaw(), GgufFlaw::TensorBeyondEnd { .. }));
}

#[test]
fn names_are_unique_and_short() {
    let longest = "n".repeat(limits::MAX_NAME_BYTES as usize);
    MadeFile::new(1, 0)
        .tensor(&longest, &[8], F32, 0)
        .values(32)
        .open()
        .unwrap();
    let long = MadeFile::new(1, 0)
        .tensor(&(longest + "n"), &[8], F32, 0)
        .values(32);
    assert!(matches!(
        long.flaw(),
        GgufFlaw::TooMany {
            found: 65,
            limit: 64,
            ..
        }
    ));
    let empty = MadeFile::new(1, 0).tensor("", &[8], F32, 0).values(32);
    assert_eq!(empty.flaw(), GgufFlaw::EmptyName);
    let twice = MadeFile::new(2, 0)
        .tensor("t", &[8], F32, 0)
        .tensor("t", &[8], F32, 32)
        .values(64);
    assert_eq!(twice.flaw(), GgufFlaw::NameTwice("t".to_owned()));
    let invalid = MadeFile::new(1, 0).text(b"\xff\xfe").values(64);
    assert_eq!(
        invalid.flaw(),
        GgufFlaw::NotUtf8("the name of tensor 0".to_owned())
    );
}

#[test]
fn invalid_shapes_are_refused() {
    let name = "t".to_owned();
    let made = |shape: &[u64], id| MadeFile::new(1, 0).tensor("t", shape, id, 0).values(1024);
    assert!(matches!(
        made(&[1; 5], F32).flaw(),
        GgufFlaw::TooMany {
            found: 5,
            limit: 4,
            ..
        }
    ));
    assert!(
        matches!(made(&[3, 0], F32).flaw(), GgufFlaw::NoElements { shape, .. }
        if shape == [0, 3])
    );
    let too_large: [&[u64]; 4] = [
        &[1 << 32, 1 << 32],
        &[1 << 63],
        &[1 << 62],
        &[32, u64::MAX, u64::MAX, u64::MAX],
    ];
    for shape in too_large {
        assert!(
            matches!(made(shape, F32).flaw(), GgufFlaw::TooLarge { .. }),
            "{shape:?}"
        );
    }
    let partial = GgufFlaw::PartialBlock {
        name,
        columns: 48,
        type_name: "Q8_0",
        elements: 32,
    };
    assert_eq!(made(&[48, 2], Q8_0).flaw(), partial);
    assert_eq!(made(&[], F32).open().unwrap().tensors()["t"].elements(), 1);
}

#[test]
fn types_without_decoder_are_refused_by_name() {
    let made = |id| MadeFile::new(1, 0).tensor("t", &[256], id, 0).values(1024);
    for (id, type_name) in [(16, "IQ2_XXS"), (26, "I32"), (5, "q4_3"), (40, "NVFP4")] {
        let name = "t".to_owned();
        assert_eq!(
            made(id).flaw(),
            GgufFlaw::UnreadableType { name, type_name }
        );
    }
    for id in [42, u32::MAX] {
        let name = "t".to_owned();
        assert_eq!(made(id).flaw(), GgufFlaw::UnknownType { name, id });
    }
}

#[test]
fn offsets_outside_of_the_rules_are_refused() {
    let made = |offsets: [u64; 2]| {
        let first = MadeFile::new(2, 0).tensor("a", &[16], F32, offsets[0]);
        first.tensor("b", &[16], F32, offsets[1]).values(128)
    };
    // The order is free, and gaps are allowed.
    for offsets in [[0, 64], [64, 0]] {
        made(offsets).open().unwrap();
    }

    let unaligned = GgufFlaw::Unaligned {
        name: "b".to_owned(),
        offset: 68,
        alignment: 32,
    };
    assert_eq!(made([0, 68]).flaw(), unaligned);
    for (offsets, first, second) in [([0, 32], "a", "b"), ([32, 0], "b", "a"), ([0, 0], "a", "b")] {
        let [first, second] = [first, second].map(str::to_owned);
        assert_eq!(made(offsets).flaw(), GgufFlaw::Overlap { first, second });
    }
    for offset in [96, 1 << 40, u64::MAX - 31] {
        let flaw = made([0, offset]).flaw();
        assert!(matches!(flaw, GgufFlaw::TensorBeyondEnd { .. }), "{flaw:?}");
    }
}

#[test]
fn file_cut_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    fs::copy(golden("metadata.gguf"), &path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let whole = file.metadata().unwrap().len();
    // The values of the last tensor end before the padding, which may be missing.
    let values_end = GgufFile::open(&path)
        .unwrap()
        .tensor_bytes("one")
        .unwrap()
        .range
        .end;
    assert_eq!(whole - values_end, 28);
    for end in (0..whole).rev() {
        file.set_len(end).unwrap();
        let opened = GgufFile::open(&path);
        assert_eq!(opened.is_ok(), end >= values_end, "cut at {end} of {whole}");
    }
}

#[test]
fn only_regular_files_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let refused = GgufFile::open(folder.path()).unwrap_err();
    assert!(matches!(refused, GgufError::NotRegular { .. }), "{refused}");
    let missing = GgufFile::open(folder.path().join("none.gguf")).unwrap_err();
    assert!(
        matches!(&missing, GgufError::Io { source, .. } if source.kind() == ErrorKind::NotFound),
        "{missing}"
    );
    // It would wait for a writer.
    let pipe = folder.path().join("pipe.gguf");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let refused = GgufFile::open(&pipe).unwrap_err();
    assert!(matches!(refused, GgufError::NotRegular { .. }), "{refused}");
}
