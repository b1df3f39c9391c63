//! The programs on CUDA devices, as a user starts them. The tests use the software driver, or a
//! real one with `MPMD_TEST_GPU=1`.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for one program: far more than any of these needs, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(90);

/// A program that a test has started. Dropping this kills it and waits for its end. The processes
/// that it has started end with it.
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
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(file("out"))
        .stderr(file("err"));
    // A launcher may have started the tests, but these jobs must not inherit its variables.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    let (mut child, start) = (Running(command.spawn().unwrap()), Instant::now());
    let code = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status.code();
        }
        assert!(
            start.elapsed() < DEADLINE,
            "{program} {args:?} still runs after {DEADLINE:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    let [out, err] = ["out", "err"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    Ended { code, out, err }
}

/// Returns the path of a program of this package, in the parent of the running test's folder. It is
/// found there also if both were moved after the build.
fn program(name: &str) -> String {
    let this = std::env::current_exe().unwrap();
    this.ancestors()
        .nth(2)
        .unwrap()
        .join(name)
        .to_str()
        .unwrap()
        .to_owned()
}

fn count(text: &str, of: &str) -> usize {
    text.lines().filter(|line| line.contains(of)).count()
}

#[test]
fn programs_run_on_gpus_or_report_an_error() {
    if softcuda::again!() {
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
        let Ended { code, out, err } = run(folder.path(), &program("basic"), &args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert_eq!(
            (
                count(&out, "a2 is 2.0 everywhere"),
                count(&out, "b2 is 4.0 everywhere")
            ),
            (1, 1),
            "{out}"
        );
        let args = [
            "--width",
            "24",
            "--processes",
            processes,
            "--device",
            device,
        ];
        let Ended { code, out, err } = run(folder.path(), &program("reshard"), &args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        assert_eq!(
            out.matches("values proved").count().to_string(),
            processes,
            "{out}"
        );
    }
    let pipeline = program("pipeline");
    let Ended { code, err, .. } = run(folder.path(), &pipeline, &["--device", "cuda"]);
    assert_eq!(code, Some(1), "{err}");
    let refusal = "computes only on devices of kind cpu: leave --device out";
    assert_eq!(count(&err, refusal), 1, "{err}");
    let Ended { code, err, .. } = run(folder.path(), &pipeline, &["--device", "cpu,gpu"]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("cpu or cuda"), "{err}");
}

/// Tests equality to the bit, because candle stages and optimisers compute in host memory on any
/// device.
#[test]
fn candle_models_train_on_gpus_with_the_bits_of_cpus() {
    if softcuda::again!() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(
        &text,
        "one two three four five six seven eight nine ten ".repeat(400),
    )
    .unwrap();
    let file = folder.path().join("losses");
    let program = program("train_gpt");
    let sizes = "--width 8 --heads 2 --time 8 --microbatches 4 --steps 3 --stages 4 --sample 2";
    let losses = |args: &[&str]| {
        let files = [
            text.to_str().unwrap(),
            "--losses-out",
            file.to_str().unwrap(),
        ];
        let args: Vec<&str> = sizes
            .split(' ')
            .chain(args.iter().copied())
            .chain(files)
            .collect();
        let Ended { code, out, err } = run(folder.path(), &program, &args);
        assert_eq!(code, Some(0), "{program} {args:?}:\n{out}\n{err}");
        std::fs::read_to_string(&file).unwrap()
    };
    let expected = losses(&["--processes", "1"]);
    assert_eq!(expected.lines().count(), 3, "{expected}");
    for (processes, devices, schedule) in [
        ("1", "cuda", "1f1b"),
        ("2", "cuda", "zb-h1"),
        ("2", "cpu,cuda", "interleaved"),
    ] {
        let args = [
            "--processes",
            processes,
            "--device",
            devices,
            "--schedule",
            schedule,
        ];
        assert_eq!(losses(&args), expected, "{program} {args:?}");
    }
}

/// Needs a machine without a real driver, which this test does not hide; otherwise it is skipped.
#[test]
fn training_without_a_driver_reports_it() {
    if mpmd::cuda::gpu_names().is_ok() {
        eprintln!("skipped: this machine has a CUDA driver");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for processes in ["1", "2"] {
        let args = [
            "--device",
            "cuda",
            "--stages",
            "2",
            "--processes",
            processes,
        ];
        let Ended { code, err, .. } = run(folder.path(), &program("train_gpt"), &args);
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains("no CUDA driver found"), "{err}");
        assert!(!err.contains("panicked"), "{err}");
    }
}
