//! The system packages that the steps need besides Rust: how to find them, their purpose, and
//! Debian's names for them.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;

use crate::commands::{answers, run};

/// A program or library of the system that a test step or a dependency's build needs.
pub(crate) struct Need {
    /// The name of the program or library, for people.
    what: &'static str,
    purpose: &'static str,
    /// Debian's packages that contain the program or library.
    packages: &'static [&'static str],
    probe: NeedProbe,
}

/// A way to find out whether a program or library is installed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum NeedProbe {
    /// Runs the program with `--version`.
    Answers(&'static str),
    /// Looks for the program's file in `PATH` and in `MORE_PROGRAMS`, for programs without
    /// `--version`.
    Lies(&'static str),
    /// Looks for libclang, which reads C headers, together with its own headers.
    Libclang,
}

const LINKS: &str = "links every Rust program";
const LISTS: &str = "tells which files belong to the repository";
const UCX: &str = "builds UCX";
const MPI: &str = "starts programs in the tests of launchers";
const SLURM: &str = "part of the Slurm that the tests of launchers set up";
const ENDS: &str = "ends processes that the tests of launchers start";
const MEMORY: &str = "finds misuse of memory";
const KIT: &str = "packs what runs on machines with GPUs";
const PAGES: &str = "opens the chat page of the server";

/// The programs that every test run needs.
pub(crate) const ALWAYS: &[Need] = &[
    answering("cc", LINKS, &["gcc", "libc6-dev"]),
    answering("git", LISTS, &["git"]),
];

/// Further needs of full test runs, and of builds with the feature `ucx`.
pub(crate) const FULL: &[Need] = &[
    answering("autoconf", UCX, &["autoconf"]),
    answering("automake", UCX, &["automake"]),
    answering("libtoolize", UCX, &["libtool"]),
    answering("make", UCX, &["make"]),
    answering("c++", UCX, &["g++"]),
    Need {
        what: "libclang",
        purpose: "reads UCX's headers",
        packages: &["libclang-dev"],
        probe: NeedProbe::Libclang,
    },
    answering("mpirun", MPI, &["openmpi-bin"]),
    lying("srun", SLURM, &["slurm-client"]),
    lying("slurmctld", SLURM, &["slurmctld"]),
    lying("slurmd", SLURM, &["slurmd"]),
    lying("munged", SLURM, &["munge"]),
    answering("setpriv", ENDS, &["util-linux"]),
    answering("valgrind", MEMORY, &["valgrind"]),
    answering("objdump", KIT, &["binutils"]),
    answering("zstd", KIT, &["zstd"]),
    // The largest package: about 80 MB to download, 400 MB once installed.
    answering("chromium", PAGES, &["chromium"]),
];

const fn answering(
    what: &'static str,
    purpose: &'static str,
    packages: &'static [&'static str],
) -> Need {
    Need {
        what,
        purpose,
        packages,
        probe: NeedProbe::Answers(what),
    }
}

const fn lying(
    what: &'static str,
    purpose: &'static str,
    packages: &'static [&'static str],
) -> Need {
    Need {
        what,
        purpose,
        packages,
        probe: NeedProbe::Lies(what),
    }
}

/// Folders in which clang-sys, for the build of UCX's bindings, looks for libraries. `*` stands for
/// the rest of a name.
const LIBRARY_FOLDERS: &[&str] = &[
    "/usr/local/llvm*/lib*",
    "/usr/local/lib*",
    "/usr/local/lib*/*",
    "/usr/local/lib*/*/*",
    "/usr/lib*",
    "/usr/lib*/*",
    "/usr/lib*/*/*",
];

/// Folders of programs that may be missing in a user's `PATH`.
const MORE_PROGRAMS: &[&str] = &["/usr/sbin", "/usr/local/sbin", "/sbin"];

/// Ensures that all `needs` are met: installs missing packages with apt-get if this user is root.
///
/// # Errors
///
/// If something is missing and this user cannot install it, or if it is still missing after the
/// installation. The error names all missing things.
pub(crate) fn provide(needs: &[Need]) -> anyhow::Result<()> {
    let absent = missing(needs, &is_here);
    if absent.is_empty() {
        let here: Vec<&str> = needs.iter().map(|need| need.what).collect();
        println!("   nothing to install: {} are here", here.join(", "));
        return Ok(());
    }

    for need in &absent {
        let packages = need.packages.join(" ");
        println!(
            "   {} is missing ({}); Debian packages: {packages}",
            need.what, need.purpose
        );
    }

    let packages = packages_of(&absent);
    let is_root = Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|out| out.stdout.trim_ascii() == b"0");
    ensure!(
        is_root && answers("apt-get", &["--version"]),
        "install these with your system's package manager first: {}",
        packages.join(" ")
    );

    let install = ["install", "--yes", "--no-install-recommends"];
    run(Command::new("apt-get").arg("update"))?;
    run(Command::new("apt-get")
        .args(install)
        .args(&packages)
        .env("DEBIAN_FRONTEND", "noninteractive"))?;

    let still: Vec<&str> = missing(needs, &is_here)
        .iter()
        .map(|need| need.what)
        .collect();
    ensure!(
        still.is_empty(),
        "installed, but still not found: {}",
        still.join(", ")
    );
    Ok(())
}

fn missing<'a>(needs: &'a [Need], is_here: &dyn Fn(NeedProbe) -> bool) -> Vec<&'a Need> {
    needs.iter().filter(|need| !is_here(need.probe)).collect()
}

/// Returns the Debian packages of all missing programs and libraries, each once.
fn packages_of(absent: &[&Need]) -> Vec<&'static str> {
    let mut packages: Vec<&str> = Vec::new();
    for package in absent.iter().flat_map(|need| need.packages) {
        if !packages.contains(package) {
            packages.push(package);
        }
    }
    packages
}

fn is_here(probe: NeedProbe) -> bool {
    match probe {
        NeedProbe::Answers(program) => answers(program, &["--version"]),
        NeedProbe::Lies(program) => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let more = MORE_PROGRAMS.iter().map(PathBuf::from);
            std::env::split_paths(&path)
                .chain(more)
                .any(|folder| folder.join(program).is_file())
        }
        NeedProbe::Libclang => has_libclang(Path::new("/"), &|name| std::env::var_os(name)),
    }
}

/// True if the build of UCX's bindings will find libclang. With `LIBCLANG_PATH` it looks only
/// there, otherwise in the usual places below `root`.
fn has_libclang(root: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> bool {
    if let Some(said) = variable("LIBCLANG_PATH") {
        // The variable names the file or its folder. The user is responsible for matching headers.
        let said = Path::new(&said);
        let is_file =
            said.is_file() && said.file_name().is_some_and(|name| is_libclang(name, true));
        return is_file || names_in(said).iter().any(|name| is_libclang(name, true));
    }

    let given = ["LD_LIBRARY_PATH", "LIBRARY_PATH"]
        .into_iter()
        .filter_map(variable);
    let given = given.flat_map(|folders| std::env::split_paths(&folders).collect::<Vec<_>>());
    let usual = LIBRARY_FOLDERS
        .iter()
        .flat_map(|pattern| matching(root, pattern));
    given.chain(usual).any(|folder| {
        names_in(&folder)
            .iter()
            .any(|name| is_libclang(name, false))
    })
}

/// True if a file of this name is libclang. With `run_time_only`, a name with a version behind
/// `.so` also counts; such a file comes without the headers of the developers' package.
fn is_libclang(name: &OsStr, run_time_only: bool) -> bool {
    let Some(rest) = name.to_str().and_then(|name| name.strip_prefix("libclang")) else {
        return false;
    };
    let Some((version, behind)) = rest.split_once(".so") else {
        return false;
    };
    // `libclang-cpp` is another library.
    let named = version.is_empty() || version.starts_with('-') && !version.starts_with("-cpp");
    named && (behind.is_empty() || run_time_only && behind.starts_with('.'))
}

/// Returns the folders below `root` that match `pattern`; `*` stands for the rest of a name.
fn matching(root: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        let below = |folder: PathBuf| match part.strip_suffix('*') {
            None => vec![folder.join(part)],
            Some(begin) => {
                let mut names = names_in(&folder);
                names.retain(|name| name.to_str().is_some_and(|name| name.starts_with(begin)));
                names.into_iter().map(|name| folder.join(name)).collect()
            }
        };
        found = found
            .into_iter()
            .flat_map(below)
            .filter(|path| path.is_dir())
            .collect();
    }
    found
}

/// Returns the names in a folder. Empty if `folder` is not a folder.
fn names_in(folder: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.file_name()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_needs_name_each_package_once() {
        let without = |absent: &'static [NeedProbe]| {
            let needs = missing(FULL, &|probe| !absent.contains(&probe));
            (
                needs.iter().map(|need| need.what).collect::<Vec<_>>(),
                packages_of(&needs),
            )
        };
        assert_eq!(without(&[]), (vec![], vec![]));
        let (what, packages) = without(&[
            NeedProbe::Libclang,
            NeedProbe::Lies("munged"),
            NeedProbe::Answers("libtoolize"),
        ]);
        assert_eq!(what, ["libtoolize", "libclang", "munged"]);
        assert_eq!(packages, ["libtool", "libclang-dev", "munge"]);
        let twice = [&ALWAYS[0], &ALWAYS[1], &ALWAYS[0]];
        assert_eq!(packages_of(&twice), ["gcc", "libc6-dev", "git"]);
    }

    #[test]
    fn programs_are_found_by_answer_or_file() {
        assert!(is_here(NeedProbe::Answers("git")) && is_here(NeedProbe::Lies("git")));
        assert!(
            !is_here(NeedProbe::Answers("no-such-program"))
                && !is_here(NeedProbe::Lies("no-such-program"))
        );
    }

    #[test]
    fn libclang_is_distinguished_from_similar_names() {
        for name in ["libclang.so", "libclang-14.so", "libclang-14.0.6.so"] {
            assert!(is_libclang(name.as_ref(), false), "{name}");
        }
        for name in ["libclang.so.1", "libclang-14.so.14.0.6"] {
            assert!(
                !is_libclang(name.as_ref(), false) && is_libclang(name.as_ref(), true),
                "{name}"
            );
        }
        for name in [
            "libclang-cpp.so.14",
            "libclang-cpp.so",
            "libclangBasic.a",
            "libclang.a",
            "libucp.so",
        ] {
            assert!(!is_libclang(name.as_ref(), true), "{name}");
        }
    }

    #[test]
    fn libclang_is_searched_where_the_builder_looks() {
        let root = Folder::new();
        let nothing = |_: &str| None;
        root.file("usr/lib/llvm-14/lib/libclang.so.1");
        root.file("usr/lib/libclang-cpp.so");
        assert!(
            !has_libclang(&root.0, &nothing),
            "a library without its headers is not enough"
        );
        root.file("usr/lib/llvm-14/lib/libclang.so");
        assert!(has_libclang(&root.0, &nothing));

        // If the user sets the variable, nothing else counts.
        root.file("other/libclang.so.13");
        let said = |path: &'static str| {
            let path = root.0.join(path);
            move |name: &str| (name == "LIBCLANG_PATH").then(|| path.clone().into_os_string())
        };
        assert!(
            has_libclang(&root.0, &said("other"))
                && has_libclang(&root.0, &said("other/libclang.so.13"))
        );
        assert!(!has_libclang(&root.0, &said("elsewhere")));

        root.file("third/libclang.so");
        let given = root.0.join("third").into_os_string();
        let elsewhere = root.0.join("none");
        assert!(has_libclang(&elsewhere, &|name| (name
            == "LD_LIBRARY_PATH")
            .then(|| given.clone())));
    }

    /// A folder that is deleted when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let path = std::env::temp_dir().join(format!("xtask-packages-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn file(&self, path: &str) {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
