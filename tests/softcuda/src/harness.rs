//! Functions with which tests run under this driver. The driver must be in the library path before
//! a process starts, so a test is run again in a new process.

use std::cell::Cell;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of a test that is run again, after which its process is killed.
const DEADLINE: Duration = Duration::from_secs(120);
/// Environment variable that is set in a process started by [`again`](crate::again!).
const MARK: &str = "SOFTCUDA_AGAIN";

/// Settings that change a test's result and that a real driver ignores. With a real driver, tests
/// with one of these settings are skipped.
const TOLD: [&str; 3] = ["SOFTCUDA_FAIL", "SOFTCUDA_MEMORY", "SOFTCUDA_SHARED"];

/// The file names that the driver and the newest packages of CUDA's libraries have. All are links
/// to one file, so that the loader loads one library with one state. Names without a version, of
/// packages for developers, are left out.
const NAMES: [&str; 4] = [
    "libcuda.so.1",
    "libnvrtc.so.13",
    "libcublas.so.13",
    "libnccl.so.2",
];

/// Returns the path of the driver library that cargo built. Looks in the folder of the running
/// program, in its parent folder, and in `deps` in both.
///
/// # Errors
///
/// If the library is not found. The error names the command that builds it.
pub fn library() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().unwrap_or(folder);

    // A test lies in `deps`, a program in the folder above. The library in `deps` is the one built
    // last.
    [
        folder.join("deps"),
        folder.to_owned(),
        above.join("deps"),
        above.to_owned(),
    ]
    .iter()
    .map(|folder| folder.join("libsoftcuda_driver.so"))
    .find(|path| path.is_file())
    .ok_or_else(|| {
        let looked = folder.display();
        let say = format!(
            "libsoftcuda_driver.so is not in {looked} or beside it: run `cargo build -p \
                 softcuda-driver`"
        );
        io::Error::new(io::ErrorKind::NotFound, say)
    })
}

thread_local! {
    /// True in the thread of a test that was registered by [`register`].
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
}

/// Records that this thread's test is registered; see [`registered!`](crate::registered!).
/// `function` is the full name of a function inside the test.
#[doc(hidden)]
#[inline(never)]
pub fn register(function: &'static str) {
    // The name must stay in the executable, where it is looked for.
    std::hint::black_box(function);
    REGISTERED.set(true);
}

/// Links the driver into an existing folder under the names of CUDA's libraries; replaces links
/// that are there. Returns the absolute folder, to be put first into `LD_LIBRARY_PATH`.
///
/// # Errors
///
/// If the driver library is not found, or if a link cannot be replaced.
///
/// # Panics
///
/// In the thread of a test that is not [registered](crate::registered!).
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    assert!(
        REGISTERED.get(),
        "a test that gives programs the driver begins with `softcuda::registered!()`: so the kits \
         for machines with GPUs have it"
    );
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

/// Sets `LD_LIBRARY_PATH` of a command so that it finds the driver in `folder`, where [`install`]
/// put it. Keeps compiled kernels beside the driver for later processes.
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

/// True if tests must use a real CUDA driver (`MPMD_TEST_GPU=1`).
pub fn real() -> bool {
    std::env::var_os("MPMD_TEST_GPU").is_some_and(|value| value == "1")
}

/// Runs the calling test again in a new process that finds the driver; see
/// [`again!`](crate::again!). `function` is the full name of a function inside the test.
///
/// Returns true if the new process passed the test, or if the test is skipped: the caller must then
/// return. Returns false in the new process, and with a real driver unless the test is skipped.
/// Blocks until the new process ends.
///
/// # Panics
///
/// If the test failed in the new process, took longer than two minutes (the process is then
/// killed), or could not be run.
#[doc(hidden)]
#[track_caller]
pub fn run_again(function: &'static str, settings: &[(&str, &str)]) -> bool {
    if std::env::var_os(MARK).is_some() {
        return false;
    }
    if real() {
        let told = settings.iter().find(|(name, _)| TOLD.contains(name));
        if let Some((name, value)) = told {
            println!("SKIPPED: a real driver ignores {name}={value}");
        }
        return told.is_some();
    }

    register(function);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let installed = install(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    run_anew(function, |command| {
        environment(command, &installed);
        command.envs(settings.iter().copied());
    });
    true
}

/// Runs the calling test again in a new process, with or without the driver; see
/// [`anew!`](crate::anew!). `function` is the full name of a function inside the test. `prepare`
/// changes the environment of the process.
///
/// Returns the output of the new process, or `None` if this is the new process. Blocks until the
/// new process ends.
///
/// # Panics
///
/// If the test failed in the new process, took longer than two minutes (the process is then
/// killed), or could not be run.
#[doc(hidden)]
#[track_caller]
pub fn run_anew(function: &str, prepare: impl FnOnce(&mut Command)) -> Option<String> {
    if std::env::var_os(MARK).is_some() {
        return None;
    }

    // The name is `crate::module::test::here`, as the macro defines a function inside the test.
    let name = function
        .split_once("::")
        .and_then(|(_, rest)| rest.rsplit_once("::"))
        .map_or(function, |it| it.0);

    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("output");
    let file = std::fs::File::create(&output).expect("a file for the output");
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args([
        "--exact",
        name,
        "--nocapture",
        "--include-ignored",
        "--test-threads=1",
    ]);

    prepare(&mut command);
    command.env(MARK, "1");
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
    let ended = status.map_or("did not end in time".to_owned(), |status| {
        status.to_string()
    });
    let ran = output.contains("1 passed");
    assert!(
        status.is_some_and(|status| status.success()) && ran,
        "{name}, run in a new process: {ended}\n{output}"
    );
    Some(output)
}

/// Runs the calling test with the driver. It must be the first statement of a test: `if
/// softcuda::again!() { return; }`.
///
/// On the first call, the test runs again in a new process that finds the driver, and has the
/// result of that process. Settings of the driver may be given: `again!("SOFTCUDA_PACE" = "lazy",
/// "SOFTCUDA_DEVICES" = "2")`.
///
/// With `MPMD_TEST_GPU=1` the test runs directly, with the installed driver. Tests that set
/// `SOFTCUDA_FAIL`, `SOFTCUDA_MEMORY` or `SOFTCUDA_SHARED` are then skipped.
#[macro_export]
macro_rules! again {
    ($($name:literal = $value:expr),* $(,)?) => {{
        fn needs_softcuda_driver() {}
        $crate::run_again($crate::name_of(needs_softcuda_driver), &[$(($name, $value)),*])
    }};
}

/// Registers the calling test as one that starts other programs with the driver. Kits for machines
/// with GPUs contain the registered tests. It must be the first statement of a test.
///
/// [`again!`] registers its test, too. Both macros define a function of one name, which stays in
/// the executable. The kits search for that name.
#[macro_export]
macro_rules! registered {
    () => {{
        fn needs_softcuda_driver() {}
        $crate::register($crate::name_of(needs_softcuda_driver))
    }};
}

/// Runs the calling test again in a new process, whose environment `prepare` changes. Its value is
/// the output of that process, or `None` inside that process.
///
/// Unlike [`again!`], it does not set up the driver for the process, and also works with a real
/// driver.
#[macro_export]
macro_rules! anew {
    ($prepare:expr) => {{
        fn here() {}
        $crate::run_anew($crate::name_of(here), $prepare)
    }};
}

/// Returns the full name of a function.
#[doc(hidden)]
pub fn name_of<F>(_: F) -> &'static str {
    std::any::type_name::<F>()
}
