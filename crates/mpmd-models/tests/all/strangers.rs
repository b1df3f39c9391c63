//! Folders from strangers: links, pipes, devices and wild numbers are refused before anything waits
//! or takes memory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use mpmd_models::{Folder, Stages, merged, save, tokenizer};
use tempfile::TempDir;

use crate::folders::{change_config, copy, path, read_all, simulate};

/// Returns the error of opening a folder and its tokenizer, without the folder's path.
fn refused(folder: &Path) -> String {
    let error = Folder::open(folder)
        .and_then(|folder| tokenizer(&folder))
        .unwrap_err();
    error
        .to_string()
        .replace(&format!("{}/", folder.display()), "")
}

/// Replaces a file of a folder: `make` creates the new one at the same path.
fn replace(folder: &Path, name: &str, make: impl FnOnce(&Path)) {
    let file = folder.join(name);
    let _ = fs::remove_file(&file);
    make(&file);
}

fn pipe(file: &Path) {
    assert!(Command::new("mkfifo").arg(file).status().unwrap().success());
}

/// Sets a number in the config of a copy of `plain`, and returns the error of opening it.
fn refused_with(key: &str, number: u64) -> String {
    let folder = copy("plain");
    change_config(folder.path(), |config| config[key] = number.into());
    refused(folder.path())
}

#[test]
fn pipes_devices_and_links_out_of_the_folder_are_refused() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    for name in [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "merges.txt",
    ] {
        let folder = copy("plain");
        replace(folder.path(), name, pipe);
        let said = refused(folder.path());
        assert!(
            said.starts_with(name) && said.ends_with("no regular file"),
            "{said}"
        );
        replace(folder.path(), name, |file| fs::create_dir(file).unwrap());
        let said = refused(folder.path());
        assert!(
            said.starts_with(name) && said.ends_with("no regular file"),
            "{said}"
        );
        fs::remove_dir(folder.path().join(name)).unwrap();
        for outside in ["/dev/zero", "/dev/null", secret.path().to_str().unwrap()] {
            replace(folder.path(), name, |file| symlink(outside, file).unwrap());
            let said = refused(folder.path());
            assert!(
                said.starts_with(name) && said.contains("a link out of the folder"),
                "{said}"
            );
        }
        replace(folder.path(), name, |file| {
            symlink("nothing", file).unwrap()
        });
        assert!(
            refused(folder.path()).contains("No such file"),
            "a link to nothing"
        );
    }
    let folder = copy("grouped");
    for name in [
        "model.safetensors.index.json",
        "model-00003-of-00007.safetensors",
    ] {
        let before = fs::read(folder.path().join(name)).unwrap();
        replace(folder.path(), name, pipe);
        assert!(refused(folder.path()).contains("no regular file"));
        replace(folder.path(), name, |file| fs::write(file, before).unwrap());
    }
    Folder::open(folder.path()).unwrap();
}

#[test]
fn pointers_of_git_lfs_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 4976698672\n";
    let write = |file: &Path| fs::write(file, pointer).unwrap();
    let expected = "a pointer of Git LFS in place of the file: fetch it with `git lfs pull`";
    for name in [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "tokenizer.model",
    ] {
        let folder = copy("plain");
        replace(folder.path(), name, write);
        let said = refused(folder.path());
        assert!(said.starts_with(name) && said.ends_with(expected), "{said}");
    }
    for name in [
        "model.safetensors.index.json",
        "model-00003-of-00007.safetensors",
    ] {
        let folder = copy("grouped");
        replace(folder.path(), name, write);
        let said = refused(folder.path());
        assert!(said.ends_with(expected), "{said}");
    }
    // The first bytes of another file may be the same.
    let folder = copy("plain");
    let long = |file: &Path| fs::write(file, pointer.repeat(20)).unwrap();
    replace(folder.path(), "chat_template.jinja", long);
    Folder::open(folder.path()).unwrap();
}

#[test]
fn wild_numbers_are_refused_by_the_headers() {
    let large = (1 << 31) - 2;
    for (key, tensor) in [
        ("head_dim", "self_attn"),
        ("vocab_size", "lm_head.weight"),
        ("intermediate_size", "mlp.down_proj.weight"),
    ] {
        let said = refused_with(key, large);
        assert!(
            said.starts_with("model.safetensors: ") && said.contains(tensor),
            "{key}: {said}"
        );
        assert!(
            said.contains("expected f32, bf16 or f16 ["),
            "{key}: {said}"
        );
    }
    let said = refused_with("hidden_size", (1 << 31) - 4);
    assert!(said.contains("expected"), "{said}");
    let said = refused_with("num_hidden_layers", 10_000);
    assert!(
        said.contains("model.layers.10.") && said.contains("no such tensor"),
        "{said}"
    );
    let folder = copy("plain");
    let file = fs::File::options()
        .write(true)
        .open(folder.path().join("config.json"))
        .unwrap();
    file.set_len(1 << 40).unwrap();
    let said = refused(folder.path());
    assert!(
        said.starts_with("config.json: ") && said.contains("more than 1048576"),
        "{said}"
    );
}

/// Creates a cache in the layout of model hubs with the files of a test folder. Returns the cache
/// and the model's folder, which is `inner` inside the folder of the revision.
fn cached(name: &str, inner: &str) -> (TempDir, PathBuf) {
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--a--b");
    let (blobs, snapshot) = (
        model.join("blobs"),
        model.join("snapshots/1f2e").join(inner),
    );
    [&blobs, &snapshot]
        .into_iter()
        .for_each(|folder| fs::create_dir_all(folder).unwrap());
    for (number, entry) in fs::read_dir(path(name)).unwrap().enumerate() {
        let entry = entry.unwrap();
        let blob = format!("{number:040x}");
        fs::copy(entry.path(), blobs.join(&blob)).unwrap();
        let up = if inner.is_empty() {
            "../.."
        } else {
            "../../.."
        };
        symlink(
            format!("{up}/blobs/{blob}"),
            snapshot.join(entry.file_name()),
        )
        .unwrap();
    }
    (cache, snapshot)
}

/// Saves the parameters of a folder's model without training.
fn save_to(folder: &Folder, to: &Path) {
    simulate(1, 1, |p, meshes| {
        let pipeline = Stages::new(folder, 1, 1)?.training(p, meshes)?;
        let params = merged(p, &pipeline, None)?;
        save(p, folder, &params, to).map(Some)
    });
}

#[test]
fn cache_of_a_hub_is_read_and_its_blobs_never_written() {
    for (name, inner) in [("plain", ""), ("grouped", "checkpoint-5")] {
        let (cache, snapshot) = cached(name, inner);
        let folder = Folder::open(&snapshot).unwrap();
        tokenizer(&folder).unwrap();
        let to = tempfile::tempdir().unwrap();
        save_to(&folder, to.path());
        assert!(read_all(to.path()) == read_all(&path(name)), "{name}");
        let blobs = || {
            let blobs = fs::read_dir(cache.path().join("models--a--b/blobs")).unwrap();
            let mut blobs: Vec<_> = blobs
                .map(|blob| fs::read(blob.unwrap().path()).unwrap())
                .collect();
            blobs.sort();
            blobs
        };
        let before = blobs();
        // Another model is saved over the links.
        let zeros = copy(name);
        for entry in fs::read_dir(zeros.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            if entry.extension().is_some_and(|end| end == "safetensors") {
                let mut bytes = fs::read(&entry).unwrap();
                bytes.iter_mut().rev().take(100).for_each(|byte| *byte = 0);
                fs::write(&entry, bytes).unwrap();
            }
        }
        save_to(&Folder::open(zeros.path()).unwrap(), &snapshot);
        assert!(blobs() == before, "{name}: a blob is changed");
        assert!(!snapshot.join("config.json").is_symlink());
        Folder::open(&snapshot).unwrap();
    }
}

#[test]
fn only_known_companions_are_copied() {
    let folder = copy("plain");
    let secret = tempfile::NamedTempFile::new().unwrap();
    fs::write(secret.path(), "a private key").unwrap();
    symlink(secret.path(), folder.path().join("notes.txt")).unwrap();
    fs::write(folder.path().join("other.json"), "{}").unwrap();
    fs::write(folder.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let more = "additional_chat_templates";
    fs::create_dir(folder.path().join(more)).unwrap();
    for name in ["tool_use.jinja", "other.jinja"] {
        fs::write(folder.path().join(more).join(name), "{{ tools }}").unwrap();
    }
    let to = tempfile::tempdir().unwrap();
    save_to(&Folder::open(folder.path()).unwrap(), to.path());
    let names = |folder: &Path| {
        let names = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let expected = [
        more,
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(names(to.path()), expected);
    assert_eq!(names(&to.path().join(more)), ["tool_use.jinja"]);
    // A link in its place leads out of the folder.
    fs::remove_dir_all(folder.path().join(more)).unwrap();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("tool_use.jinja"), "a private key").unwrap();
    symlink(outside.path(), folder.path().join(more)).unwrap();
    assert!(refused(folder.path()).contains("a link out of the folder"));
}
