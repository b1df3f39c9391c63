//! The files of programs that tests start: those of other packages, and those of the system.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::geteuid;

/// Returns the path of a program of the workspace, in the parent of the running test's folder.
/// Builds the program if it is missing, because cargo builds only programs of the test's own
/// package.
///
/// Unlike cargo's variables at compile time, this also finds programs that were moved to another
/// machine together with the tests.
///
/// # Panics
///
/// If the program cannot be built.
pub fn package_program(package: &str, program: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // A failed test in here does not break the others.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let this = std::env::current_exe().expect("a test knows its own file");
    // …/target/debug/deps/test-0123
    let folder = this
        .ancestors()
        .nth(2)
        .expect("a test lies in the target folder");
    let path = folder.join(program);
    if !path.exists() {
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.current_dir(env!("CARGO_MANIFEST_DIR")).args([
            "build",
            "--package",
            package,
            "--bins",
        ]);
        if cfg!(feature = "ucx") {
            build.args(["--features", "ucx"]);
        }
        if folder.ends_with("release") {
            build.arg("--release");
        }
        if let Some(target) = folder.parent() {
            build.arg("--target-dir").arg(target);
        }
        let built = build
            .stdin(Stdio::null())
            .output()
            .expect("cargo can be started");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
    }
    path
}

/// Returns the path of a system program. If it is missing and the user cannot install it, prints
/// that and returns `None`.
///
/// # Panics
///
/// If the program is missing and could be installed. The message names the package.
pub fn system_program(program: &str, package: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Folders that are not in every user's PATH.
    let more = ["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from);
    let found = std::env::split_paths(&path)
        .chain(more)
        .map(|folder| folder.join(program));
    let found = found.into_iter().find(|file| file.is_file());
    if found.is_none() {
        let why = format!("{program} is not installed; Debian has it in the package {package}");
        assert!(
            !geteuid().is_root(),
            "{why}; `cargo xtask test` installs it"
        );
        println!("skipped: {why}");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_system_program_names_its_package() {
        assert!(system_program("sh", "dash").is_some_and(|file| file.is_absolute()));
        let missing =
            std::panic::catch_unwind(|| system_program("no-such-launcher", "some-package"));
        match missing {
            Ok(found) => assert_eq!(found, None),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().expect("a message");
                assert!(
                    said.contains("no-such-launcher") && said.contains("some-package"),
                    "{said}"
                );
            }
        }
    }
}
