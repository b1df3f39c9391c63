//! What tests call to run with the driver: it has to be in the library path before a process
//! starts.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test that is run again may take.
const DEADLINE: Duration = Duration::from_secs(120);
/// Set in a process that [`again`](crate::again!) started.
const MARK: &str = "SOFTCUDA_AGAIN";

/// Settings without which a test shows nothing.
const TOLD: [&str; 2] = ["SOFTCUDA_FAIL", "SOFTCUDA_MEMORY"];

/// CUDA's libraries, under the names by which they are looked for. All are links to one file, so
/// that the loader has one library, which knows the state of all of them.
const NAMES: [&str; 8] = [
    "libcuda.so",
    "libcuda.so.1",
    "libnvrtc.so",
    "libnvrtc.so.12",
    "libcublas.so",
    "libcublas.so.12",
    "libnccl.so",
    "libnccl.so.2",
];

/// Where the driver was built, found beside the running program.
///
/// # Errors
///
/// An error that names the command which builds it, where it is not found.
pub fn library() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().unwrap_or(folder);
    // A test lies in `deps`, a program above it. What is in `deps` is what cargo built last.
    [folder.join("deps"), folder.to_owned(), above.join("deps"), above.to_owned()]
        .iter()
        .map(|folder| folder.join("libsoftcuda.so"))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            let looked = folder.display();
            let say = format!(
                "libsoftcuda.so is not in {looked} or beside it: run `cargo build -p softcuda`"
            );
            io::Error::new(io::ErrorKind::NotFound, say)
        })
}

/// Puts the driver into a folder, under the names of CUDA's libraries, and gives the folder back:
/// what `LD_LIBRARY_PATH` has to begin with.
///
/// # Errors
///
/// That of [`library`], or the file system's.
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    let library = library()?;
    for name in NAMES {
        let link = folder.join(name);
        match std::fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => symlink(&library, &link)?,
        }
    }
    folder.canonicalize()
}

/// Makes a command find the driver in `folder`, where [`install`] put it, and keep compiled kernels
/// beside the built driver for later processes.
pub fn environment(command: &mut Command, folder: &Path) {
    let mut path = OsString::from(folder);
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
        path.push(":");
        path.push(more);
    }
    command.env("LD_LIBRARY_PATH", path);
    if let Ok(library) = library() {
        command.env("SOFTCUDA_CACHE", library.with_file_name("softcuda-kernels"));
    }
}

/// Whether tests are to use a real CUDA driver (`MPMD_TEST_GPU=1`).
pub fn real() -> bool {
    std::env::var_os("MPMD_TEST_GPU").is_some_and(|value| value == "1")
}

/// Runs the test again that calls it, in a process that finds the driver; see
/// [`again!`](crate::again!).
///
/// True if it ran there, and the caller has nothing left to do; false in that process.
///
/// # Panics
///
/// Where the test failed there, took longer than two minutes, or could not be run.
#[doc(hidden)]
#[track_caller]
pub fn run_again(function: &str, settings: &[(&str, &str)]) -> bool {
    if std::env::var_os(MARK).is_some() {
        return false;
    }
    if real() {
        let told = settings.iter().find(|(name, _)| TOLD.contains(name));
        if let Some((name, value)) = told {
            println!("SKIPPED: a real driver is not told to fail ({name}={value})");
        }
        return told.is_some();
    }
    // `crate::module::test::here`, as the macro names a function inside of the test.
    let name = function
        .split_once("::")
        .and_then(|(_, rest)| rest.rsplit_once("::"))
        .map_or(function, |it| it.0);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let installed = install(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    let output = folder.path().join("output");
    let file = std::fs::File::create(&output).expect("a file for the output");
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["--exact", name, "--nocapture", "--include-ignored", "--test-threads=1"]);
    environment(&mut command, &installed);
    command.env(MARK, "1").envs(settings.iter().copied());
    let errors = file.try_clone().expect("the file once more");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .spawn()
        .expect("this program again");
    let start = Instant::now();
    let status = loop {
        match child.try_wait().expect("the state of a child") {
            Some(status) => break Some(status),
            None if start.elapsed() > DEADLINE => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let output = String::from_utf8_lossy(&std::fs::read(&output).unwrap_or_default()).into_owned();
    let ended = status.map_or("did not end in time".to_owned(), |status| status.to_string());
    let ran = output.contains("1 passed");
    assert!(
        status.is_some_and(|status| status.success()) && ran,
        "{name}, run with the driver: {ended}\n{output}"
    );
    true
}

/// To be called first in a test that needs the driver: `if softcuda::again!() { return; }`.
///
/// The first time, the test is run again in a process of its own that finds the driver, and has
/// passed if it passes there. Settings of the driver may be given: `again!("SOFTCUDA_PACE" =
/// "lazy", "SOFTCUDA_DEVICES" = "2")`. With `MPMD_TEST_GPU=1` the test just runs, with whatever
/// driver there is, unless it needs one that fails when it is told to.
#[macro_export]
macro_rules! again {
    ($($name:literal = $value:expr),* $(,)?) => {{
        fn here() {}
        fn name_of<T>(_: T) -> &'static str {
            ::std::any::type_name::<T>()
        }
        $crate::run_again(name_of(here), &[$(($name, $value)),*])
    }};
}
