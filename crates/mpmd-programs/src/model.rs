//! The model that a program loads: a folder, a GGUF file, or a name in the cache of the hub.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use mpmd_models::{Adapter, Folder};

/// The part of a revision's name in front of which `@` stands.
const REVISION: char = '@';
/// The revision of a name without one.
const MAIN: &str = "main";

/// Opens the model that `--model` names, with the adapter of `--adapter`, if there is one.
///
/// # Errors
///
/// As for [`located`], [`Folder::open`] and [`Folder::with_adapter`].
pub(crate) fn open(model: &Path, adapter: Option<&Path>) -> anyhow::Result<Folder> {
    let folder = Folder::open(located("--model", model)?)?;
    match adapter {
        Some(adapter) => Ok(folder.with_adapter(&open_adapter(adapter)?)?),
        None => Ok(folder),
    }
}

/// Opens the adapter that `--adapter` names.
///
/// # Errors
///
/// As for [`located`] and [`Adapter::open`].
pub(crate) fn open_adapter(adapter: &Path) -> anyhow::Result<Adapter> {
    Ok(Adapter::open(located("--adapter", adapter)?)?)
}

/// Returns the folder that the value of `option` names: a folder, or else the snapshot of
/// `NAME` or `NAME@REVISION` in the cache of the hub. Nothing is fetched.
///
/// # Errors
///
/// If the value is neither a folder or file nor the name of a model in the cache. The message for a
/// name has the place in the cache, and the command that fetches it.
pub(crate) fn located(option: &str, value: &Path) -> anyhow::Result<PathBuf> {
    if value.exists() {
        return Ok(value.to_owned());
    }
    let Some((name, revision)) = hub_name(value) else {
        bail!("{option} {}: no such folder or file", value.display());
    };
    let cache = cache(|variable| env::var_os(variable))
        .with_context(|| format!("{option} {name}: no such folder, and HOME is not set"))?;
    snapshot(option, &cache, name, revision)
}

/// Returns the name of the model for clients: the name in the hub, if `value` is one. `None` for a
/// folder.
pub(crate) fn name_of(value: &Path) -> Option<String> {
    let (name, _) = hub_name(value).filter(|_| !value.exists())?;
    Some(name.to_owned())
}

/// Returns the snapshot of a model in the hub's cache: a folder with the files of one commit.
fn snapshot(
    option: &str,
    cache: &Path,
    name: &str,
    revision: Option<&str>,
) -> anyhow::Result<PathBuf> {
    let repository = cache.join(format!("models--{}", name.replace('/', "--")));
    let snapshots = repository.join("snapshots");
    let revision_name = revision.unwrap_or(MAIN);
    let commit = fs::read_to_string(repository.join("refs").join(revision_name));
    let commit = commit.map_or(revision_name.to_owned(), |commit| commit.trim().to_owned());
    let folder = snapshots.join(&commit);
    if is_plain(&commit) && folder.is_dir() {
        return Ok(folder);
    }

    let fetch = match revision {
        Some(revision) => format!("hf download {name} --revision {revision}"),
        None => format!("hf download {name}"),
    };
    ensure!(
        snapshots.is_dir(),
        "{option} {name}: no such folder, and the hub's cache has no {}: fetch it with `{fetch}`",
        repository.display()
    );
    bail!(
        "{option} {name}: the hub's cache has no revision {revision_name} in {}: fetch it with \
         `{fetch}`",
        snapshots.display()
    )
}

/// Splits a value into the name and the revision of a model in the hub. `None` if it cannot be one,
/// or is the name of a GGUF file.
fn hub_name(value: &Path) -> Option<(&str, Option<&str>)> {
    if is_gguf(value) {
        return None;
    }
    let text = value.to_str()?;
    let (name, revision) = match text.split_once(REVISION) {
        Some((name, revision)) => (name, Some(revision)),
        None => (text, None),
    };
    let is_part = |part: &str| {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(is_allowed)
    };
    let parts: Vec<&str> = name.split('/').collect();
    let is_name = parts.len() <= 2 && parts.into_iter().all(is_part);
    let is_revision = revision.is_none_or(is_plain);
    (is_name && is_revision).then_some((name, revision))
}

/// True if a path has the ending of GGUF files.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// True if a path leads only into its folder.
fn is_plain(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    !path.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// Returns the cache of the hub, by the variables that its own programs read. `None` if there is no
/// home folder.
fn cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name| {
        Some(PathBuf::from(
            variable(name).filter(|value| !value.is_empty())?,
        ))
    };
    let home = |name| folder(name).map(|home: PathBuf| home.join("huggingface"));
    let of_user =
        || home("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache/huggingface")));
    folder("HF_HUB_CACHE")
        .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(folder("HF_HOME").or_else(of_user)?.join("hub")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let of = |value: &'static str| hub_name(Path::new(value));
        assert_eq!(of("org/name"), Some(("org/name", None)));
        assert_eq!(of("gpt2"), Some(("gpt2", None)));
        assert_eq!(of("org/name-1.5@v1"), Some(("org/name-1.5", Some("v1"))));
        assert_eq!(of("o/n@refs/pr/1"), Some(("o/n", Some("refs/pr/1"))));
        for path in [
            "/org/name",
            "./name",
            "../name",
            "a/b/c",
            "a/",
            "",
            "a b/c",
            "o/n@../x",
            "o/n@",
            "model.gguf",
            "folder/model.GGUF",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn cache_is_found_by_the_variables_of_the_hub() {
        let of = |set: &[(&str, &str)]| {
            let found = cache(|name| {
                let value = set.iter().find(|(other, _)| *other == name);
                value.map(|(_, value)| OsString::from(value))
            });
            found.map(|path| path.display().to_string())
        };
        let all = [
            ("HF_HUB_CACHE", "/a"),
            ("HF_HOME", "/b"),
            ("XDG_CACHE_HOME", "/c"),
            ("HOME", "/d"),
        ];
        let found: Vec<_> = (0..=all.len()).map(|from| of(&all[from..])).collect();
        let expected = [
            Some("/a"),
            Some("/b/hub"),
            Some("/c/huggingface/hub"),
            Some("/d/.cache/huggingface/hub"),
            None,
        ];
        assert_eq!(found, expected.map(|path| path.map(str::to_owned)));
    }

    #[test]
    fn snapshots_are_found_by_branch_and_commit() {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("models--org--name");
        let find = |revision| snapshot("--model", cache.path(), "org/name", revision);
        let said = find(None).unwrap_err().to_string();
        let absent = format!(
            "--model org/name: no such folder, and the hub's cache has no {}: fetch it with `hf \
             download org/name`",
            repository.display()
        );
        assert_eq!(said, absent);

        fs::create_dir_all(repository.join("refs")).unwrap();
        fs::write(repository.join("refs/main"), "abc\n").unwrap();
        fs::create_dir_all(repository.join("snapshots/abc")).unwrap();
        let folder = repository.join("snapshots/abc");
        assert_eq!(find(None).unwrap(), folder);
        assert_eq!(find(Some("abc")).unwrap(), folder);
        let said = find(Some("v2")).unwrap_err().to_string();
        assert!(said.contains("has no revision v2 in "), "{said}");
        assert!(
            said.ends_with("`hf download org/name --revision v2`"),
            "{said}"
        );

        // A damaged cache leads nowhere else.
        fs::write(repository.join("refs/main"), "../../..").unwrap();
        assert!(find(None).is_err());
    }
}
