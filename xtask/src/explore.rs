//! `cargo xtask explore`: random programs with random faults in simulated worlds, one for each
//! seed; see the package `mpmd-explore`.

use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context as _, bail};

use crate::commands::{cargo_in, shown};

/// The folder with patches. Each plants one bug that the exploration must find.
const PLANTED: &str = "tests/explore/planted";

/// Number of seeds in which each planted bug must be found.
const SEEDS: &str = "10000";

/// Builds the exploration and runs it with these arguments. With `--planted` alone it checks
/// instead that each planted bug is found.
pub(crate) fn explore(root: &Path, arguments: &[&str]) -> anyhow::Result<ExitCode> {
    if arguments == ["--planted"] {
        return planted(root);
    }
    let mut command = cargo_run(root);
    let status = run(command.args(arguments))?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the command that runs the exploration. It uses the test profile, which has checks that a
/// release build leaves out.
fn cargo_run(root: &Path) -> Command {
    cargo_in(root, &["run", "--quiet", "--package", "mpmd-explore", "--"])
}

/// Plants each bug in a copy of the last commit, and explores that copy until a seed fails.
fn planted(root: &Path) -> anyhow::Result<ExitCode> {
    let copy = root.join("target/planted");
    let git = |folder: &Path, arguments: &[&str]| {
        let mut git = Command::new("git");
        match run(git.arg("-C").arg(folder).args(arguments))?.success() {
            true => Ok(()),
            false => bail!("`{}` failed", shown(&git)),
        }
    };

    let files = std::fs::read_dir(root.join(PLANTED))?;
    let mut patches = files
        .map(|file| Ok(file?.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    patches.sort();

    if !copy.is_dir() {
        let to = copy.to_str().context("a path in UTF-8")?;
        git(
            root,
            &["worktree", "add", "--quiet", "--force", "--detach", to],
        )?;
    }

    let mut missed = Vec::new();
    for patch in &patches {
        let name = patch
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        println!("{name}:");

        git(&copy, &["reset", "--quiet", "--hard"])?;
        git(
            &copy,
            &["apply", patch.to_str().context("a path in UTF-8")?],
        )?;

        let mut command = cargo_run(&copy);
        command.env("CARGO_TARGET_DIR", root.join("target/planted-build"));
        command
            .args(["--seeds", SEEDS, "--first"])
            .stderr(std::process::Stdio::null());
        if run(&mut command)?.success() {
            missed.push(name);
        }
    }

    git(
        root,
        &[
            "worktree",
            "remove",
            "--force",
            copy.to_str().context("a path in UTF-8")?,
        ],
    )?;

    if !missed.is_empty() {
        bail!("not found within {SEEDS} seeds: {}", missed.join(", "));
    }
    println!("{} planted bugs, all found", patches.len());
    Ok(ExitCode::SUCCESS)
}

fn run(command: &mut Command) -> anyhow::Result<ExitStatus> {
    command
        .status()
        .with_context(|| format!("cannot run `{}`", shown(command)))
}
