//! `mpmd new`: the files that it writes, and the words with which it refuses.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use toml::{Table, Value};

use crate::common::Told;

/// The programs, which this package compiles and tests as examples.
const CANDLE_PROGRAM: &str = include_str!("../../src/new/programs/candle.rs");
const ARRAYS_PROGRAM: &str = include_str!("../../src/new/programs/arrays.rs");
/// The lines that make an edit build fast, with `NAME` in place of a package's name.
const PROFILE: &str = include_str!("../../src/new/profile.toml");

/// Runs `mpmd new` in a folder.
fn new_in(folder: &Path, args: &[&str]) -> Told {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
    let output = command.current_dir(folder).arg("new").args(args).output();
    let output = output.unwrap();
    Told {
        status: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs `mpmd new` in an empty folder, which it must not change. Returns the standard error.
fn refused(args: &[&str], status: i32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let told = new_in(folder.path(), args);
    assert_eq!(
        (told.status, told.stdout.as_str()),
        (Some(status), ""),
        "{args:?}: {}",
        told.stderr
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{args:?}");
    told.stderr
}

/// Runs `mpmd new points` with further arguments, which must succeed. Returns the folder above
/// `points`.
fn written(args: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let told = new_in(folder.path(), &[&["points"], args].concat());
    assert_eq!((told.status, told.stderr.as_str()), (Some(0), ""));
    for line in [
        "cd points",
        "cargo run ",
        "cargo test ",
        "mpmd run -n 2 -- target/debug/points ",
    ] {
        assert!(
            told.stdout.contains(&format!("\n    {line}")),
            "{}",
            told.stdout
        );
    }
    let page = told
        .stdout
        .split_whitespace()
        .find(|word| word.ends_with(".md"));
    let page = root().join(page.expect("a page of the guide"));
    assert!(page.is_file(), "{}", page.display());
    folder
}

fn read(folder: &TempDir, file: &str) -> String {
    fs::read_to_string(folder.path().join("points").join(file)).unwrap()
}

fn manifest(folder: &TempDir) -> Table {
    read(folder, "Cargo.toml").parse().unwrap()
}

/// Returns the files of `points`, sorted.
fn files(folder: &TempDir) -> BTreeSet<String> {
    let points = folder.path().join("points");
    let in_folder = |name: &str| {
        let entries = fs::read_dir(points.join(name)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    };
    let in_source = in_folder("src")
        .into_iter()
        .map(|file| format!("src/{file}"));
    in_folder("").into_iter().chain(in_source).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The root of the repository.
fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

#[test]
fn candle_program_depends_on_the_clone_of_the_command() {
    let folder = written(&[]);
    assert_eq!(
        files(&folder),
        set(&[
            ".gitignore",
            "Cargo.lock",
            "Cargo.toml",
            "src",
            "src/main.rs"
        ])
    );
    assert_eq!(read(&folder, "src/main.rs"), CANDLE_PROGRAM);
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    assert_eq!(read(&folder, "Cargo.lock"), lock);

    let manifest = manifest(&folder);
    assert_eq!(manifest["package"]["name"].as_str(), Some("points"));
    assert_eq!(manifest["package"]["edition"].as_str(), Some("2024"));
    let mut mpmd = Table::new();
    let path = root().join("mpmd").to_str().unwrap().to_owned();
    mpmd.insert("path".to_owned(), Value::String(path));
    mpmd.insert("features".to_owned(), Value::Array(vec!["candle".into()]));
    let only = Table::from_iter([("mpmd".to_owned(), Value::Table(mpmd))]);
    assert_eq!(manifest["dependencies"].as_table(), Some(&only));

    // Without its own workspace, cargo would look for one above it and might refuse the package.
    assert!(manifest.contains_key("workspace"));
    let profile: Table = PROFILE.replace("NAME", "points").parse().unwrap();
    assert_eq!(manifest["profile"], profile["profile"]);
}

#[test]
fn program_of_arrays_takes_no_feature() {
    let folder = written(&["--arrays"]);
    assert_eq!(read(&folder, "src/main.rs"), ARRAYS_PROGRAM);
    let mpmd = manifest(&folder)["dependencies"]["mpmd"].clone();
    let keys: Vec<&String> = mpmd.as_table().unwrap().keys().collect();
    assert_eq!(keys, ["path"]);
}

#[test]
fn path_of_a_clone_or_of_its_crate_is_written_whole() {
    // The name has characters that a manifest must escape.
    let above = tempfile::tempdir().unwrap();
    let clone = above.path().join("a \"clone\"");
    fs::create_dir_all(clone.join("mpmd")).unwrap();
    fs::write(
        clone.join("mpmd/Cargo.toml"),
        "[package]\nname = \"mpmd\"\n",
    )
    .unwrap();
    let package = clone.join("mpmd").canonicalize().unwrap();
    for path in [&clone, &package] {
        let folder = written(&["--path", path.to_str().unwrap()]);
        let written = manifest(&folder)["dependencies"]["mpmd"]["path"].clone();
        assert_eq!(written.as_str(), package.to_str());
        // This clone has no lock file.
        assert!(!files(&folder).contains("Cargo.lock"));
    }
}

#[test]
fn git_address_is_written_as_it_is() {
    let address = "https://example.org/a\"b.git";
    let folder = written(&["--git", address]);
    let mpmd = manifest(&folder)["dependencies"]["mpmd"].clone();
    assert_eq!(mpmd["git"].as_str(), Some(address));
    assert_eq!(
        files(&folder),
        set(&[".gitignore", "Cargo.toml", "src", "src/main.rs"])
    );
}

#[test]
fn existing_folder_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let points = folder.path().join("points");
    for is_file in [false, true] {
        if is_file {
            fs::remove_dir(&points).unwrap();
            fs::write(&points, "mine").unwrap();
        } else {
            fs::create_dir(&points).unwrap();
        }
        let told = new_in(folder.path(), &["points"]);
        assert_eq!((told.status, told.stdout.as_str()), (Some(1), ""));
        assert_eq!(
            told.stderr,
            "mpmd: points exists already: choose another name, or move it away\n"
        );
    }
    assert_eq!(fs::read_to_string(&points).unwrap(), "mine");
}

#[test]
fn folder_that_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // The lock file of this clone is a folder, so that reading it fails after the first files.
    let clone = folder.path().join("clone");
    fs::create_dir_all(clone.join("Cargo.lock")).unwrap();
    fs::create_dir_all(clone.join("mpmd")).unwrap();
    let manifest = "[package]\nname = \"mpmd\"\n";
    fs::write(clone.join("mpmd/Cargo.toml"), manifest).unwrap();
    let told = new_in(folder.path(), &["points", "--path", "clone"]);
    assert_eq!((told.status, told.stdout.as_str()), (Some(1), ""));
    assert!(
        told.stderr.starts_with("mpmd: cannot read ") && told.stderr.contains("Cargo.lock"),
        "{}",
        told.stderr
    );
    assert!(!folder.path().join("points").exists());
}

#[test]
fn wrong_names_and_places_are_refused_with_a_cure() {
    for name in ["Points", "a/b", "match", "mpmd"] {
        let said = refused(&[name], 2);
        assert!(said.contains("name") && said.contains(name), "{said}");
    }
    let said = refused(&["points", "--path", "/nowhere"], 1);
    assert_eq!(
        said,
        "mpmd: --path /nowhere: there is no crate `mpmd` in it: give the folder of a clone of \
         mpmd\n"
    );
    let said = refused(&["points", "--git", ""], 1);
    assert_eq!(
        said,
        "mpmd: --git is empty: give the address of a git repository of mpmd\n"
    );
    refused(&["points", "--git", "a", "--path", "b"], 2);
    refused(&[], 2);
}

/// Tests that a package with `mpmd` as its only dependency can compile the programs.
#[test]
fn programs_name_no_crate_but_mpmd() {
    for program in [CANDLE_PROGRAM, ARRAYS_PROGRAM] {
        let imports: Vec<&str> = program
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("use "))
            .collect();
        assert!(imports.len() > 2);
        assert!(
            imports
                .iter()
                .all(|import| import.starts_with("mpmd::") || import.starts_with("super::")),
            "{imports:?}"
        );
    }
}

#[test]
fn pages_show_the_lines_of_the_profile() {
    let lines = PROFILE.lines().filter(|line| !line.starts_with('#'));
    let lines: Vec<&str> = lines.collect();
    for (page, name) in [
        ("README.md", "my_program"),
        ("docs/guide/new-program.md", "points"),
    ] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let lines = lines.join("\n").replace("NAME", name);
        assert!(text.contains(lines.trim()), "{page} lacks:\n{lines}");
    }
}
