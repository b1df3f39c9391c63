//! The libraries of CUDA: the places where they are looked for, and their functions.
//!
//! Each is loaded at its first use and stays loaded, so one executable runs with and without them.
//! First the dynamic loader looks for the names with a version, in `LD_LIBRARY_PATH` and in its own
//! folders. Then the folders of CUDA toolkits are searched, and the wheels of Python environments.
//! All these places come again for the name without a version. The first library that loads is
//! used.
//!
//! `cudarc` gives the types of CUDA's headers. Its own loader is never used: it knows no names of
//! newer versions, takes a toolkit's stub for the driver, and panics if a function is missing.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::no_cuda::{self, NoCuda};

/// The CUDA driver, found on the loader's own path. A toolkit's stub, for linking programs, also
/// has the name `libcuda.so`.
pub(super) static DRIVER: CudaLibrary =
    CudaLibrary::new("CUDA driver", &["libcuda.so.1", "libcuda.so"], &[]);
pub(super) static NVRTC: CudaLibrary = CudaLibrary::new(
    "NVRTC",
    &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    &["cu13", "cuda_nvrtc"],
)
.with_helper("libnvrtc-builtins.so.");
pub(super) static CUBLAS: CudaLibrary = CudaLibrary::new(
    "cuBLAS",
    &["libcublas.so.13", "libcublas.so.12", "libcublas.so"],
    &["cu13", "cublas"],
);
pub(super) static NCCL: CudaLibrary =
    CudaLibrary::new(no_cuda::NCCL, &["libnccl.so.2", "libnccl.so"], &["nccl"]);

/// A library of CUDA, loaded at its first use.
pub(super) struct CudaLibrary {
    /// The library's name in messages.
    pub(super) name: &'static str,
    /// The library's file names, the preferred one first.
    files: &'static [&'static str],
    /// Folders of Python wheels that contain the library, below `site-packages/nvidia`.
    wheels: &'static [&'static str],
    /// Prefix of the file name of a helper library, which this library later opens by name. The
    /// loader would search only its own path for it. So the helper is loaded beforehand, from this
    /// library's folder.
    helper: Option<&'static str>,
    loaded: OnceLock<Result<libloading::Library, NoCuda>>,
}

/// A function that returns the value of an environment variable: [`std::env::var_os`] except in
/// tests.
type Variable<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl CudaLibrary {
    const fn new(
        name: &'static str,
        files: &'static [&'static str],
        wheels: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            files,
            wheels,
            helper: None,
            loaded: OnceLock::new(),
        }
    }

    const fn with_helper(mut self, helper: &'static str) -> Self {
        self.helper = Some(helper);
        self
    }

    /// Loads the library, unless it is loaded already, and checks that it has all functions in
    /// `symbols`. Never panics.
    ///
    /// # Errors
    ///
    /// If the library is not found or lacks some of the functions.
    pub(super) fn check(&self, symbols: &[&str]) -> Result<(), NoCuda> {
        self.loaded().as_ref().map_err(NoCuda::clone)?;
        self.check_all(symbols, |symbol| self.has(symbol))
    }

    /// Returns true if the library is found and has the function named `symbol`.
    pub(super) fn has(&self, symbol: &str) -> bool {
        // SAFETY: the function is only looked for: nothing is called through this type.
        unsafe { self.function::<unsafe extern "C" fn()>(symbol) }.is_some()
    }

    /// Returns the function named `symbol`; `None` if the library is missing or lacks the function.
    ///
    /// # Safety
    ///
    /// `F` must be the type of a pointer to this function.
    pub(super) unsafe fn function<F: Copy>(&self, symbol: &str) -> Option<F> {
        let library = self.loaded().as_ref().ok()?;
        // SAFETY: the caller guarantees the type. The library is never unloaded.
        unsafe { library.get::<F>(symbol).ok().map(|found| *found) }
    }

    /// Creates the error for a failed call, from its status alone.
    pub(super) fn refused(&self, call: &'static str, answer: u32) -> NoCuda {
        NoCuda::Refused {
            library: self.name,
            call,
            name: format!("error {answer}"),
            text: "no further details".to_owned(),
        }
    }

    fn loaded(&self) -> &Result<libloading::Library, NoCuda> {
        self.loaded
            .get_or_init(|| self.load(&|name| std::env::var_os(name)))
    }

    fn check_all(&self, symbols: &[&str], has: impl Fn(&str) -> bool) -> Result<(), NoCuda> {
        let lacking = symbols.iter().filter(|symbol| !has(symbol));
        let symbols: Vec<String> = lacking.map(|symbol| (*symbol).to_owned()).collect();
        if symbols.is_empty() {
            return Ok(());
        }
        Err(NoCuda::NoSymbols {
            library: self.name,
            symbols,
        })
    }

    fn load(&self, variable: Variable<'_>) -> Result<libloading::Library, NoCuda> {
        let mut failed = Vec::new();
        let toolkits = toolkits(variable);
        let packages = if self.wheels.is_empty() {
            Vec::new()
        } else {
            packages(variable)
        };
        let wheels = packages.iter().map(|packages| packages.join("nvidia"));
        let wheels =
            wheels.flat_map(|nvidia| self.wheels.iter().map(move |wheel| nvidia.join(wheel)));
        let wheels = wheels.map(|wheel| wheel.join("lib"));
        let folders: Vec<PathBuf> = toolkits.iter().cloned().chain(wheels).collect();

        // A name without a version may be that of an old library of the system.
        let (versioned, plain) = self.files.split_at(self.files.len() - 1);
        for files in [versioned, plain] {
            for file in files {
                match open(Path::new(file)) {
                    Ok(library) => return Ok(library),
                    Err(error) => {
                        let why = loader_words(&error);
                        // The loader's words if no folder of its path has the file.
                        if !why.starts_with(&format!("{file}: cannot open shared object")) {
                            failed.push(why);
                        }
                    }
                }
            }

            for folder in &folders {
                let files = files.iter().map(|file| folder.join(file));
                for file in files.filter(|file| file.exists()) {
                    self.open_helpers(folder);
                    match open(&file) {
                        Ok(library) => {
                            tracing::debug!(library = self.name, file = %file.display(), "loaded");
                            return Ok(library);
                        }
                        Err(error) => failed.push(loader_words(&error)),
                    }
                }
            }
        }

        let in_packages = |packages: &PathBuf| match self.wheels {
            [wheel] => packages
                .join("nvidia")
                .join(wheel)
                .join("lib")
                .display()
                .to_string(),
            wheels => format!("{}/nvidia/{{{}}}/lib", packages.display(), wheels.join(",")),
        };

        let toolkits = toolkits.iter().map(|folder| folder.display().to_string());
        Err(NoCuda::NoLibrary {
            library: self.name,
            looked_for: self.files.iter().map(|file| (*file).to_owned()).collect(),
            library_path: variable("LD_LIBRARY_PATH").map(text),
            folders: toolkits.chain(packages.iter().map(in_packages)).collect(),
            failed,
        })
    }

    /// Loads the helper libraries in a folder and never unloads them. Ignores errors: the library
    /// itself will report missing helpers.
    fn open_helpers(&self, folder: &Path) {
        let Some(helper) = self.helper else { return };
        let helpers = entries(folder).into_iter().filter(|file| {
            file.file_name()
                .is_some_and(|name| starts_with(name, helper))
        });
        helpers
            .filter_map(|file| open(&file).ok())
            .for_each(std::mem::forget);
    }
}

/// Loads a library by its path. A bare file name is searched by the loader.
fn open(file: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: loading a library runs its initialisers. Only libraries of NVIDIA have these names,
    // and their initialisers are made to run in any program. A user able to put another file of
    // such a name into these folders controls the process anyway.
    unsafe { libloading::Library::new(file) }
}

/// Returns the loader's message about a file that it cannot load.
fn loader_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the library folders of CUDA toolkits: those named by `CUDA_HOME` and `CUDA_PATH`, then
/// the default one. The folders may not exist.
fn toolkits(variable: Variable<'_>) -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(|name| set(variable, name));

    let mut folders = Vec::new();
    for home in named.chain([PathBuf::from("/usr/local/cuda")]) {
        for folder in ["lib64", "lib"].map(|below| home.join(below)) {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

/// Returns the existing folders of Python packages. Their order is: the active environment, the
/// first `python3` on the path, the user's, the system's, then environments in `/opt`.
fn packages(variable: Variable<'_>) -> Vec<PathBuf> {
    let mut environments: Vec<PathBuf> = set(variable, "VIRTUAL_ENV").into_iter().collect();

    let path = variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|folder| folder.join("python3"));
    if let Some(python) = python.into_iter().find(|python| python.is_file()) {
        // In a virtual environment this is a link to another installation. The environment may have
        // that one's packages too.
        let programs = [Some(python.clone()), fs::canonicalize(&python).ok()];
        let folders = programs.into_iter().flatten();
        environments
            .extend(folders.filter_map(|program| Some(program.parent()?.parent()?.to_owned())));
    }

    environments.extend(set(variable, "HOME").map(|home| home.join(".local")));
    environments.extend(["/usr/local", "/usr"].map(PathBuf::from));

    let optional = entries(Path::new("/opt"));
    environments.extend(
        optional
            .into_iter()
            .flat_map(|folder| [folder.join(".venv"), folder]),
    );

    let mut found = Vec::new();
    for library in environments
        .iter()
        .flat_map(|at| [at.join("lib"), at.join("lib64")])
    {
        let pythons = entries(&library).into_iter().filter(|python| {
            python
                .file_name()
                .is_some_and(|name| starts_with(name, "python3"))
        });
        let packages =
            pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|at| python.join(at)));
        // `lib64` may be a link to `lib`.
        for packages in packages.filter_map(|packages| fs::canonicalize(packages).ok()) {
            if !found.contains(&packages) {
                found.push(packages);
            }
        }
    }
    found
}

/// Returns the paths in a folder: longer names first, and names of one length in reverse
/// alphabetical order. So `python3.12` comes before `python3.9`. Empty if the folder cannot be
/// read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort_unstable_by_key(|path| std::cmp::Reverse((path.as_os_str().len(), path.clone())));
    paths
}

fn starts_with(name: &OsStr, start: &str) -> bool {
    name.as_encoded_bytes().starts_with(start.as_bytes())
}

/// Returns the path in an environment variable; `None` if the variable is not set or empty.
fn set(variable: Variable<'_>, name: &str) -> Option<PathBuf> {
    variable(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Converts the value of an environment variable to text for a message.
pub(super) fn text(value: OsString) -> String {
    value.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A library that no machine has.
    static ABSENT: CudaLibrary =
        CudaLibrary::new("it", &["libmpmd-no.so.2", "libmpmd-no.so"], &["a", "b"]);

    fn why_not(library: &CudaLibrary, variables: &[(&str, &Path)]) -> String {
        let found = library.load(&|name| {
            let set = variables.iter().find(|(other, _)| *other == name);
            set.map(|(_, value)| value.as_os_str().to_owned())
        });
        found.expect_err("no machine has this library").to_string()
    }

    /// Creates the package folders of a Python environment. Returns them with symbolic links
    /// resolved.
    fn environment(at: &Path, pythons: &[&str]) -> Vec<String> {
        let create = |python: &&str| {
            let packages = at.join("lib").join(python).join("site-packages");
            fs::create_dir_all(&packages).unwrap();
            packages.canonicalize().unwrap().display().to_string()
        };
        pythons.iter().map(create).collect()
    }

    #[test]
    fn names_and_folders_are_tried_in_the_stated_order() {
        let folder = tempfile::tempdir().unwrap();
        let [home, active, other, base] =
            ["cuda", "active", "other", "base"].map(|name| folder.path().join(name));
        let [new, old] = environment(&active, &["python3.12", "python3.9"])
            .try_into()
            .unwrap();
        let [seen] = environment(&other, &["python3.11"]).try_into().unwrap();
        let [real] = environment(&base, &["python3.11"]).try_into().unwrap();
        for environment in [&other, &base] {
            fs::create_dir_all(environment.join("bin")).unwrap();
        }
        fs::write(base.join("bin/python3.11"), "").unwrap();
        symlink(base.join("bin/python3.11"), other.join("bin/python3")).unwrap();
        let path = std::env::join_paths([folder.path(), &other.join("bin")]).unwrap();
        let said = why_not(
            &ABSENT,
            &[
                ("CUDA_HOME", &home),
                ("CUDA_PATH", Path::new("")),
                ("LD_LIBRARY_PATH", Path::new("/none")),
                ("VIRTUAL_ENV", &active),
                ("PATH", Path::new(&path)),
            ],
        );
        let home = home.display();
        let expected = format!(
            "no it found: looked for libmpmd-no.so.2, libmpmd-no.so in the loader's own folders, \
             in LD_LIBRARY_PATH (/none), and in {home}/lib64, {home}/lib, /usr/local/cuda/lib64, \
             /usr/local/cuda/lib, {new}/nvidia/{{a,b}}/lib, {old}/nvidia/{{a,b}}/lib, \
             {seen}/nvidia/{{a,b}}/lib, {real}/nvidia/{{a,b}}/lib"
        );
        assert!(said.starts_with(&expected), "{said}\n{expected}");
    }

    #[test]
    fn files_that_do_not_load_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("lib64");
        fs::create_dir_all(&library).unwrap();
        fs::write(library.join("libmpmd-no.so.2"), "no library").unwrap();
        let said = why_not(&ABSENT, &[("CUDA_HOME", folder.path())]);
        let file = library.join("libmpmd-no.so.2").display().to_string();
        assert!(said.contains(&format!("; {file}: ")), "{said}");
    }

    #[test]
    fn missing_functions_are_named() {
        assert_eq!(DRIVER.check_all(&["cuInit", "cuNew"], |_| true), Ok(()));
        let lacking = DRIVER.check_all(&["cuInit", "cuNew"], |symbol| symbol != "cuNew");
        assert_eq!(
            lacking.unwrap_err().to_string(),
            "no CUDA driver found that can be used: the library here has no cuNew"
        );
    }
}
