//! Models by their names in the cache of the hub.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::finetune::{FINETUNE, bare};
use crate::folders::{path, text};

/// Scores the model `name` with the hub's cache in `cache`. Returns the exit code and both outputs.
fn score(cache: &Path, name: &str) -> (Option<i32>, String, String) {
    let mut command = bare(FINETUNE);
    command.env("HF_HUB_CACHE", cache).args(["--model", name]);
    command.arg("--score").arg(text()).args(["--tokens", "9"]);
    let output = command.args(["--stages", "2"]).output().unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), stdout, stderr)
}

#[test]
fn cached_model_is_found_by_its_name() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--org--plain");
    let [blobs, snapshot, refs] =
        ["blobs", "snapshots/abc", "refs"].map(|name| repository.join(name));
    for folder in [&blobs, &snapshot, &refs] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(refs.join("main"), "abc").unwrap();
    // The hub's programs keep the files beside the snapshots, and link to them.
    for entry in fs::read_dir(path("plain")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        fs::copy(entry.path(), blobs.join(&name)).unwrap();
        symlink(Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }

    let (code, expected, said) = score(cache.path(), path("plain").to_str().unwrap());
    assert_eq!(code, Some(0), "{said}");
    for name in ["org/plain", "org/plain@main", "org/plain@abc"] {
        let (code, found, said) = score(cache.path(), name);
        assert_eq!((code, &found), (Some(0), &expected), "{name}: {said}");
    }

    let (code, _, said) = score(cache.path(), "org/absent");
    let absent = cache.path().join("models--org--absent");
    let expected = format!(
        "error: --model org/absent: no such folder, and the hub's cache has no {}: fetch it with \
         `hf download org/absent`\n",
        absent.display()
    );
    assert_eq!((code, said), (Some(1), expected));
}
