//! The crate `mpmd` that a new program depends on.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use toml::Value;

use crate::files::read;

/// The location of the crate `mpmd`.
#[derive(Debug)]
pub(super) enum Dependency {
    /// A local clone: the absolute paths of the crate's folder, and of the workspace's folder.
    Clone { package: String, clone: PathBuf },
    /// The address of a git repository.
    Git(String),
}

impl Dependency {
    /// Finds the crate: in the clone `path`, in the repository `git`, or else in the clone that
    /// this program was built in.
    ///
    /// # Errors
    ///
    /// If no crate is found. The message says how to name a location.
    pub(super) fn find(path: Option<&Path>, git: Option<&str>) -> Result<Self> {
        if let Some(address) = git {
            if address.trim().is_empty() {
                bail!("--git is empty: give the address of a git repository of mpmd");
            }
            return Ok(Self::Git(address.to_owned()));
        }

        if let Some(path) = path {
            let Some(found) = Self::in_clone(path)? else {
                bail!(
                    "--path {}: there is no crate `mpmd` in it: give the folder of a clone of mpmd",
                    path.display()
                );
            };
            return Ok(found);
        }

        // A copy that cargo keeps of a git repository is no clone to depend on.
        let built_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let is_kept_by_cargo = built_in.join(".cargo-ok").exists();
        let found = if is_kept_by_cargo {
            None
        } else {
            Self::in_clone(&built_in)?
        };
        found.context(
            "the clone that this command was built in is gone: give --path DIR, the folder of a \
             clone of mpmd, or --git URL, the address of one",
        )
    }

    /// Returns the crate in `folder`, which is a clone or the crate's own folder. `None` if the
    /// crate is not there.
    fn in_clone(folder: &Path) -> Result<Option<Self>> {
        let own = [folder.join("mpmd"), folder.to_owned()];
        let Some(package) = own.into_iter().find(|folder| is_mpmd(folder)) else {
            return Ok(None);
        };

        let whole = package
            .canonicalize()
            .with_context(|| format!("cannot find the whole path of {}", package.display()))?;
        let clone = whole.parent().unwrap_or(&whole).to_owned();
        let Some(package) = whole.to_str() else {
            bail!(
                "the path {} is not Unicode, as cargo needs it: move the clone",
                whole.display()
            );
        };
        Ok(Some(Self::Clone {
            package: package.to_owned(),
            clone,
        }))
    }

    /// Returns the entry of a manifest that locates the crate, such as `path = "…"`.
    pub(super) fn as_toml(&self) -> String {
        let (key, value) = match self {
            Self::Clone { package, .. } => ("path", package),
            Self::Git(address) => ("git", address),
        };
        format!("{key} = {}", Value::String(value.clone()))
    }

    /// Returns the lock file of the clone, with the versions of dependencies that the clone was
    /// tested with. `None` if there is no such file.
    pub(super) fn tested_versions(&self) -> Result<Option<String>> {
        match self {
            Self::Clone { clone, .. } => {
                let file = clone.join("Cargo.lock");
                file.exists().then(|| read(&file)).transpose()
            }
            Self::Git(_) => Ok(None),
        }
    }
}

/// True if the folder has the manifest of the crate `mpmd`.
fn is_mpmd(folder: &Path) -> bool {
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
    let manifest: Option<toml::Table> = manifest.parse().ok();
    let name = manifest
        .as_ref()
        .and_then(|manifest| manifest.get("package")?.get("name")?.as_str());
    name == Some("mpmd")
}
