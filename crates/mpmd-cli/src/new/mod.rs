//! `mpmd new`: the folder of a new program, which depends on `mpmd`.

mod dependency;
mod package_name;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::files::{say, write};
use dependency::Dependency;
use package_name::PackageName;

/// Source of the program with a candle model. The package compiles and tests it as an example.
const CANDLE_PROGRAM: &str = include_str!("programs/candle.rs");

/// Source of the program with arrays alone. The package compiles and tests it as an example.
const ARRAYS_PROGRAM: &str = include_str!("programs/arrays.rs");

/// Lines of a manifest that make rebuilds after an edit fast. They contain `NAME` in place of the
/// package's name.
const PROFILE: &str = include_str!("profile.toml");

/// Write a small program to begin with: a package of one file, with a test.
///
/// The program trains a candle model of two stages. It is a folder NAME in the current folder,
/// which depends on the crate `mpmd` of a clone. Nothing is downloaded before cargo builds it.
#[derive(Args, Debug)]
pub(crate) struct NewArgs {
    /// The name of the package, and of its folder
    name: PackageName,
    /// A program of arrays and kernels in place of a candle model. It builds in less time
    #[arg(long)]
    arrays: bool,
    /// The folder of a clone of mpmd to depend on; by default the one that this command was built
    /// in
    #[arg(long, value_name = "DIR", conflicts_with = "git")]
    path: Option<PathBuf>,
    /// The address of a git repository of mpmd to depend on
    #[arg(long, value_name = "URL")]
    git: Option<String>,
}

/// Writes the folder of a new program, and prints the commands that run it.
pub(crate) fn new(args: &NewArgs) -> Result<ExitCode> {
    let dependency = Dependency::find(args.path.as_deref(), args.git.as_deref())?;
    let name = args.name.as_str();
    let program = if args.arrays {
        ARRAYS_PROGRAM
    } else {
        CANDLE_PROGRAM
    };

    let folder = NewFolder::create(name)?;
    folder.write("Cargo.toml", &manifest(name, args.arrays, &dependency))?;
    folder.write("src/main.rs", program)?;
    folder.write(".gitignore", "/target\n")?;
    if let Some(versions) = dependency.tested_versions()? {
        folder.write("Cargo.lock", &versions)?;
    }
    folder.keep();

    say(&next_steps(name))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the package's manifest.
fn manifest(name: &str, is_of_arrays: bool, dependency: &Dependency) -> String {
    let features = if is_of_arrays {
        ""
    } else {
        r#", features = ["candle"]"#
    };
    let source = dependency.as_toml();
    let profile = PROFILE.replace("NAME", name);
    format!(
        r#"[package]
name = "{name}"
version = "0.1.0"
edition = "2024"

[dependencies]
mpmd = {{ {source}{features} }}

{profile}
# Cargo takes profiles from the root of a workspace alone. If this package becomes a member of
# another workspace, move the lines above to its root.
[workspace]
"#
    )
}

/// Returns the commands that run the program and its test, and the page that says how to go on.
fn next_steps(name: &str) -> String {
    format!(
        "{name} is written. Next:\n\
         \x20   cd {name}\n\
         \x20   cargo run                                   # in one process\n\
         \x20   cargo test                                  # one and two processes, as threads\n\
         \x20   mpmd run -n 2 -- target/debug/{name}        # in two processes\n\
         The first build takes some minutes. The program is src/main.rs; how to go on says\n\
         docs/guide/new-program.md of mpmd.\n"
    )
}

/// A new folder. Dropping this deletes it, unless [`keep`](Self::keep) was called.
struct NewFolder {
    path: PathBuf,
    is_kept: bool,
}

impl NewFolder {
    /// Creates a folder.
    ///
    /// # Errors
    ///
    /// If a file or folder of that name exists. It stays as it is.
    fn create(name: &str) -> Result<Self> {
        let path = PathBuf::from(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!("{name} exists already: choose another name, or move it away")
            }
            created => created.with_context(|| format!("cannot create the folder {name}"))?,
        }
        Ok(Self {
            path,
            is_kept: false,
        })
    }

    /// Writes a file of the folder, and creates the folders above it.
    fn write(&self, file: &str, content: &str) -> Result<()> {
        let file = self.path.join(file);
        let above = file.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(above)
            .with_context(|| format!("cannot create the folder {}", above.display()))?;
        write(&file, content)
    }

    /// Prevents the deletion of the folder.
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            // The error that ended the command is shown already.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
