//! The programs on CUDA devices, as a user starts them. The tests use the software driver, or a
//! real one with `MPMD_TEST_GPU=1`.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mpmd_core::device::cuda::{NoCuda, found};

/// Time limit for one program: far more than any of these needs, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(90);

/// True if the test must return: it was run again with the software driver, or the CUDA back end is
/// not built.
macro_rules! elsewhere {
    () => {
        if matches!(found(), Err(NoCuda::NotBuilt)) {
            eprintln!("skipped: this test was built without the feature `cuda`");
            true
        } else {
            softcuda::again!("MPMD_CUDA_CACHE" = "")
        }
    };
}

/// Kills the child process when dropped, and waits for its end. The processes that the child has
/// started end with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if the child has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

fn run(folder: &Path, program: &str, args: &[&str]) -> Ended {
    let file = |name: &str| File::create(folder.join(name)).unwrap();
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
    // A launcher may have started the tests, but these jobs must not inherit its variables.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    // Compiled kernels are cached in the test's folder.
    command.env("MPMD_CUDA_CACHE", folder.join("cache"));
    let (mut child, start) = (Running(command.spawn().unwrap()), Instant::now());
    let code = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status.code();
        }
        assert!(start.elapsed() < DEADLINE, "{program} {args:?} still runs after {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    let [out, err] = ["out", "err"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    Ended { code, out, err }
}

fn count(text: &str, of: &str) -> usize {
    text.lines().filter(|line| line.contains(of)).count()
}

#[test]
fn programs_run_on_gpus_or_report_an_error() {
    if elsewhere!() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (device, processes) in [("cuda", "1"), ("cuda", "2"), ("cpu,cuda", "2")] {
        let args = [
            "--rows",
            "32",
            "--columns",
            "100",
            "--rounds",
            "1",
            "--processes",
            processes,
            "--device",
            device,
        ];
        let Ended { code, out, err } = run(folder.path(), env!("CARGO_BIN_EXE_basic"), &args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert_eq!(
            (count(&out, "a2 is 2.0 everywhere"), count(&out, "b2 is 4.0 everywhere")),
            (1, 1),
            "{out}"
        );
        let args = ["--width", "24", "--processes", processes, "--device", device];
        let Ended { code, out, err } = run(folder.path(), env!("CARGO_BIN_EXE_reshard"), &args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert_eq!(out.matches("values proved").count().to_string(), processes, "{out}");
    }
    let [pipeline, mlp] = [env!("CARGO_BIN_EXE_pipeline"), env!("CARGO_BIN_EXE_train_mlp")];
    for program in [pipeline, mlp, env!("CARGO_BIN_EXE_train_gpt")] {
        let Ended { code, err, .. } = run(folder.path(), program, &["--device", "cuda"]);
        assert_eq!(code, Some(1), "{err}");
        assert_eq!(
            count(&err, "computes only on devices of kind cpu: leave --device out"),
            1,
            "{err}"
        );
        let Ended { code, err, .. } = run(folder.path(), program, &["--device", "cpu,gpu"]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("cpu or cuda"), "{err}");
    }
}
