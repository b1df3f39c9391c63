//! Checks for a CUDA driver before anything is built, and installs the tests' own driver under
//! CUDA's names.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

/// The names of the driver's library on Linux.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Folders that loaders search by default.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib",
];

/// The libraries that the tests' own driver replaces.
const STANDS_FOR: [&str; 5] =
    ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libcublas.so", "libnccl.so.2"];

/// Returns the reason why there is certainly no driver, or `None` if there may be one. The programs
/// check it later; this only avoids a useless build.
pub(super) fn why_none() -> Option<String> {
    let path = std::env::var_os("LD_LIBRARY_PATH");
    let mut folders: Vec<PathBuf> =
        path.iter().flat_map(|path| std::env::split_paths(path)).collect();
    folders.extend(FOLDERS.map(PathBuf::from));
    let known =
        Command::new("ldconfig").arg("-p").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let known =
        known.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default();
    why_none_in(&folders, &known)
}

/// Returns the reason why neither these folders nor this output of `ldconfig -p` have a driver, or
/// `None` if one of them has.
fn why_none_in(folders: &[PathBuf], known: &str) -> Option<String> {
    let is_there = |name: &&str| {
        // The loader's list has a library's name, then blanks and details of its build.
        folders.iter().any(|folder| folder.join(name).exists())
            || known.lines().any(|line| line.split_whitespace().next() == Some(*name))
    };
    if NAMES.iter().any(is_there) {
        return None;
    }
    Some(format!(
        "no CUDA driver found: looked for {} in LD_LIBRARY_PATH, in the loader's list and in the \
         system's folders",
        NAMES.join(" and ")
    ))
}

/// Links the driver that was built in `built` into `folder` under CUDA's names.
///
/// # Errors
///
/// If it was not built, or if the folder cannot be written.
pub(super) fn install(built: &Path, folder: &Path) -> anyhow::Result<()> {
    let library = built.join("libsoftcuda.so");
    ensure!(library.is_file(), "{} was not built", library.display());
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for name in STANDS_FOR {
        let link = folder.join(name);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("replacing {}", link.display()));
            }
            _ => symlink(&library, &link).with_context(|| format!("making {}", link.display()))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_is_searched_by_both_names_in_all_places() {
        let folder = std::env::temp_dir().join(format!("mpmd-xtask-driver-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let empty =
            why_none_in(std::slice::from_ref(&folder), "\tlibcudart.so.12 (libc6,x86-64) => /x\n");
        let listed =
            why_none_in(&[], "1 libs found\n\tlibcuda.so.1 (libc6,x86-64) => /x/libcuda.so.1\n");
        fs::write(folder.join("libcuda.so"), "").unwrap();
        let there = why_none_in(std::slice::from_ref(&folder), "");
        fs::remove_dir_all(&folder).unwrap();
        assert!(empty.is_some_and(|why| {
            why.starts_with("no CUDA driver found: looked for libcuda.so.1 and")
        }));
        assert_eq!((listed, there), (None, None));
    }

    #[test]
    fn driver_is_installed_under_every_name_repeatedly() {
        let folder =
            std::env::temp_dir().join(format!("mpmd-xtask-install-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let missing = install(&folder, &folder.join("names")).unwrap_err().to_string();
        fs::write(folder.join("libsoftcuda.so"), "it").unwrap();
        let twice = [0, 1].map(|_| install(&folder, &folder.join("names")).is_ok());
        let read = STANDS_FOR
            .map(|name| fs::read_to_string(folder.join("names").join(name)).unwrap_or_default());
        fs::remove_dir_all(&folder).unwrap();
        assert!(missing.contains("libsoftcuda.so was not built"), "{missing}");
        assert_eq!((twice, read), ([true, true], ["it"; STANDS_FOR.len()].map(str::to_owned)));
    }
}
