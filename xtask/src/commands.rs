//! Commands of cargo and of the system.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

/// True if a program is installed and runs with these arguments.
pub(crate) fn answers(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns the path of the cargo that started this program.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns cargo's target folder, which has this program's folder in it.
pub(crate) fn target() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program")?;
    let folder = this
        .parent()
        .and_then(Path::parent)
        .context("this program lies in no folder of cargo's")?;
    Ok(folder.to_owned())
}

pub(crate) fn cargo_in(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(cargo());
    command.current_dir(root).args(arguments);
    command
}

/// Returns a command as a user would type it.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let arguments = command
        .get_args()
        .map(|argument| argument.to_string_lossy());
    std::iter::once(program)
        .chain(arguments)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Prints and runs a command; fails if it cannot be started or ends with an error.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let line = shown(command);
    println!("   $ {line}");
    let status = command
        .status()
        .with_context(|| format!("`{line}` cannot be started"))?;
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_and_missing_programs_are_detected() {
        assert!(answers("git", &["--version"]));
        assert!(!answers("git", &["no-such-command"]));
        assert!(!answers("no-such-program-anywhere", &[]));
        assert!(run(Command::new("git").arg("--version").stdout(Stdio::null())).is_ok());
        let error = run(Command::new("git")
            .arg("no-such-command")
            .stderr(Stdio::null()))
        .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`git no-such-command` ended with"),
            "{error}"
        );
    }
}
