//! The programs as a user starts them: as processes and as threads.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mpmd::testing::Processes;

/// Time limit for one program: far more than any of these needs, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(240);

struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

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

fn run(program: &str, args: &str) -> Run {
    run_with_threads(program, args, None)
}

/// Runs a program, of which each process computes candle models with `threads` threads.
fn run_with_threads(program: &str, args: &str, threads: Option<&str>) -> Run {
    let mut command = Command::new(program);
    command
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // A launcher may have started the tests, but these jobs must not inherit its variables.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    if let Some(threads) = threads {
        command.env("RAYON_NUM_THREADS", threads);
    }
    let mut child = Running(command.spawn().unwrap());
    let (out, err) = (
        child.0.stdout.take().unwrap(),
        child.0.stderr.take().unwrap(),
    );
    let readers = [
        Box::new(out) as Box<dyn std::io::Read + Send>,
        Box::new(err),
    ]
    .map(|mut stream| {
        std::thread::spawn(move || {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        })
    });
    let start = Instant::now();
    let code = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status.code();
        }
        assert!(
            start.elapsed() < DEADLINE,
            "{program} {args} still runs after {DEADLINE:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    let [out, err] = readers.map(|reader| reader.join().unwrap());
    Run { code, out, err }
}

fn count(text: &str, of: &str) -> usize {
    text.lines().filter(|line| line.contains(of)).count()
}

const PIPELINE: &str = env!("CARGO_BIN_EXE_pipeline");
const BASIC: &str = env!("CARGO_BIN_EXE_basic");
const RESHARD: &str = env!("CARGO_BIN_EXE_reshard");
const QUICKSTART: &str = env!("CARGO_BIN_EXE_quickstart");
const TRAIN_GPT: &str = env!("CARGO_BIN_EXE_train_gpt");

#[test]
fn check_passes_as_processes_and_as_threads() {
    for args in [
        "",
        "--processes 1",
        "--processes 2",
        "--processes 8",
        "--processes 8 --transport inproc",
    ] {
        let Run { code, out, err } = run(PIPELINE, &format!("--check {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        // Printed only once, by process 0.
        assert_eq!(
            (count(&out, " ok"), count(&out, "OFF")),
            (32, 0),
            "{args}:\n{out}"
        );
    }
}

#[test]
fn failed_check_exits_with_1_and_names_the_first_figure() {
    for args in ["--processes 4", "--processes 8", "--processes 1"] {
        let Run { code, out, err } =
            run(PIPELINE, &format!("--check --learning-rate 0.0404 {args}"));
        assert_eq!(code, Some(1), "{args}: {err}");
        assert!(count(&out, "OFF") > 0, "{out}");
        assert_eq!(
            count(
                &err,
                "a number is off: f32, each microbatch the whole batch: losses, step 1"
            ),
            1
        );
    }
}

#[test]
fn training_prints_the_loss_once() {
    for args in [
        "--processes 4",
        "--processes 2 --transport inproc --dtype f64",
    ] {
        let Run { code, out, err } =
            run(PIPELINE, &format!("--width 64 --batch 16 --steps 3 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        assert_eq!(count(&out, "in the first step"), 1, "{out}");
    }
}

#[test]
fn loss_is_the_same_on_any_number_of_processes() {
    let loss = |args: &str| {
        let Run { code, out, err } =
            run(PIPELINE, &format!("--width 32 --batch 8 --steps 4 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        let line = out.lines().find(|line| line.starts_with("loss")).unwrap();
        line.split(';').next().unwrap().to_owned()
    };
    let alone = loss("--processes 1");
    assert_eq!(loss("--processes 8"), alone);
    assert_eq!(loss("--processes 4 --transport inproc"), alone);
}

#[test]
fn mismatched_sizes_are_reported_with_an_exit_code() {
    let Run { code, err, .. } = run(PIPELINE, "--processes 3");
    assert_eq!(code, Some(2));
    let expected = "error: 8 devices cannot be spread evenly over 3 processes; --processes may be \
                    1, 2, 4, 8";
    assert_eq!(err.trim_end(), expected);
    let Run { code, err, .. } = run(PIPELINE, "--width 7 --processes 4");
    assert_eq!(code, Some(1));
    // A process may hear of the end of another before it comes to the same error.
    let (others, said) = err
        .trim_end()
        .rsplit_once('\n')
        .unwrap_or(("", err.trim_end()));
    let is_effect = |line: &str| line.ends_with(" is gone: its process has ended");
    let is_shared = said.starts_with("all 4 processes failed with exit code 1: ");
    let is_first = said.contains(" failed first: it ended with exit code 1; ");
    assert!(
        if others.is_empty() {
            is_shared || is_first
        } else {
            is_first
        },
        "{err}"
    );
    assert!(
        others.lines().all(is_effect) && count(&err, "[7, 7]") == 1,
        "{err}"
    );
}

#[test]
fn variables_reach_jobs_that_programs_start() {
    let with = |args: &str, name: &str, value: &str| {
        let mut command = Command::new(BASIC);
        command
            .args(args.split_whitespace())
            .args(["--rows", "8", "--columns", "8"]);
        let output = command.env(name, value).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        (output.status.code(), out, err)
    };
    for args in ["--processes 2", "--processes 1"] {
        for (name, value) in [
            ("MPMD_TRANSPORT", "pigeon"),
            ("MPMD_PEER_TIMEOUT", "0"),
            ("MPMD_SPIN", "often"),
            ("MPMD_DEVICE", "gpu"),
        ] {
            let (code, out, err) = with(args, name, value);
            let expected = format!("{name}={value} makes no sense: it must be");
            assert_eq!(
                (code, out.as_str(), count(&err, &expected)),
                (Some(1), "", 1),
                "{err}"
            );
        }
        let (code, _, err) = with(args, "MPMD_X_SERVICE_HOST", "10.0.0.1");
        let expected = "there is no variable MPMD_X_SERVICE_HOST; it has no effect";
        assert_eq!((code, count(&err, expected)), (Some(0), 1), "{err}");
    }
    // Threads have the devices that the variable asks for, too.
    for args in ["--processes 2", "--processes 2 --transport inproc"] {
        let (code, out, err) = with(args, "MPMD_DEVICE", "cpu,cpu,cpu");
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.contains("kinds"), "{err}");
    }
}

#[test]
fn closed_output_ends_a_program_quietly_and_a_full_disk_loudly() {
    let run_to = |stdout: Stdio, args: &str| {
        let mut command = Command::new(BASIC);
        command
            .args(args.split_whitespace())
            .args(["--rows", "8", "--columns", "8"]);
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let threads = "--processes 2 --transport inproc";
    for args in ["--processes 1", "--processes 2", threads] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(
            run_to(writer.into(), args),
            (Some(141), String::new()),
            "{args}"
        );
    }
    for args in ["--processes 1", threads] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let (code, err) = run_to(full.into(), args);
        let expected = "error: cannot write to standard output: No space left on device";
        assert_eq!((code, count(&err, expected)), (Some(1), 1), "{args}: {err}");
        assert!(!err.contains("panicked"), "{args}: {err}");
    }
}

#[test]
fn quickstart_with_arguments_trains_nothing() {
    let Run { code, out, .. } = run(QUICKSTART, "--help");
    assert_eq!(
        (code, count(&out, "usage: quickstart"), count(&out, "nats")),
        (Some(0), 1, 0)
    );
}

#[test]
fn basic_prints_the_results_of_each_process() {
    for (args, processes) in [
        ("", 2),
        ("--processes 4", 4),
        ("--processes 8 --transport inproc", 8),
        ("--processes 1", 1),
    ] {
        let Run { code, out, err } = run(BASIC, &format!("--rows 32 --columns 100 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        let owners = if processes == 1 { 1 } else { processes / 2 };
        // Three rounds, by default.
        assert_eq!(count(&out, "a2 is 2.0 everywhere"), 3 * owners, "{out}");
        assert_eq!(count(&out, "b2 is 4.0 everywhere"), 3 * owners, "{out}");
        assert_eq!(
            count(&out, "2 is a handle"),
            2 * 3 * (processes - owners),
            "{out}"
        );
    }
}

#[test]
fn reshard_prints_the_plan_and_checks_every_value() {
    for (args, processes) in [
        ("", 4),
        ("--processes 1", 1),
        ("--processes 8 --transport inproc", 8),
    ] {
        let Run { code, out, err } = run(RESHARD, &format!("--width 24 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        let plan = |leaf: &str| {
            out.lines()
                .filter(|line| line.starts_with(leaf))
                .collect::<Vec<_>>()
        };
        assert_eq!((plan("bias").len(), plan("up").len()), (1, 1), "{out}");
        // The second mesh has two replicas, each sharded in halves. On the first mesh only the
        // scalar is replicated, six times.
        let leaves = 2 * 24 * 24 + 24;
        let proved = |after: &str| -> usize {
            let values = out.lines().filter_map(|line| {
                let (before, _) = line.split_once(after)?;
                before.split_whitespace().last()?.parse::<usize>().ok()
            });
            values.sum()
        };
        assert_eq!(out.matches("values proved").count(), processes, "{out}");
        assert_eq!(
            proved(" values proved on the second"),
            2 * leaves + 4,
            "{out}"
        );
        assert_eq!(proved(" back on the first"), leaves + 6, "{out}");
    }
}

#[test]
fn quickstart_learns_the_same_in_one_process_and_in_two() {
    let Run { code, out, err } = run(QUICKSTART, "");
    assert_eq!(code, Some(0), "{err}");
    let loss = out
        .strip_prefix("held-out loss: ")
        .and_then(|rest| rest.split(' ').next())
        .and_then(|loss| loss.parse::<f64>().ok());
    // All bytes are equally likely at a loss of 5.5 nats.
    assert!(loss.is_some_and(|loss| loss < 4.0), "{out}");
    let ends = Processes::new(2, QUICKSTART)
        .deadline(DEADLINE)
        .start()
        .unwrap()
        .wait()
        .unwrap();
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    assert_eq!([&ends[0].stdout, &ends[1].stdout], [&out, ""]);
}

#[test]
fn readme_shows_the_quickstart() {
    let source = include_str!("../../src/bin/quickstart.rs");
    let (_, program) = source.split_once("\n\n").unwrap();
    assert!(
        include_str!("../../../README.md").contains(program),
        "the README has another program"
    );
}

#[test]
fn training_losses_do_not_depend_on_threads_or_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let [text, file] =
        ["text", "losses"].map(|name| folder.path().join(name).display().to_string());
    let line = |i: usize| format!("line {i} says {} and {}\n", i * i % 97, i * 31 % 89);
    fs::write(&text, (0..4000).map(line).collect::<String>()).unwrap();
    let losses = |threads: &str, args: &str| {
        let sizes = "--steps 4 --layers 6 --width 8 --heads 2 --time 16 --sample 0";
        let args = format!("{sizes} {args} --losses-out {file} {text}");
        let Run { code, out, err } = run_with_threads(TRAIN_GPT, &args, Some(threads));
        assert_eq!(code, Some(0), "{args}: {err}");
        assert_eq!(
            (count(&out, "held-out loss"), count(&out, " -")),
            (1, 0),
            "{out}"
        );
        fs::read_to_string(&file).unwrap()
    };
    let alone = losses("1", "--processes 1");
    assert_eq!(alone.lines().count(), 4, "{alone}");
    for (threads, args) in [
        ("2", "--processes 1"),
        ("4", "--processes 2"),
        ("1", "--processes 4 --schedule gpipe"),
        ("2", "--processes 2 --schedule zb-h1"),
        ("4", "--processes 2 --schedule interleaved"),
        ("2", "--processes 3 --stages 3 --transport inproc"),
        ("2", "--processes 1 --stages 1"),
    ] {
        assert_eq!(losses(threads, args), alone, "{threads} threads, {args}");
    }
}

#[test]
fn stages_that_do_not_divide_are_refused_once() {
    let Run { code, err, .. } = run(TRAIN_GPT, "--stages 5 --schedule interleaved");
    let message = "schedule interleaved has 2 stages on each rank: give a multiple of 2, not 5";
    assert_eq!((code, count(&err, message)), (Some(1), 1), "{err}");
}

/// Writes a small text to a folder and returns its path.
fn small_text(folder: &std::path::Path) -> String {
    let text = folder.join("text").display().to_string();
    let line = |i: usize| format!("line {i} says {}\n", i * i % 97);
    fs::write(&text, (0..2000).map(line).collect::<String>()).unwrap();
    text
}

/// The arguments of a small model, without a text.
const SMALL: &str = "--layers 4 --width 8 --heads 2 --time 16 --sample 0 --processes 1 --steps 2";

#[test]
fn losses_go_through_links_and_a_full_disk_keeps_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let text = small_text(folder.path());
    let at = |name: &str| folder.path().join(name);
    let train = |to: &std::path::Path| {
        let args = format!("{SMALL} --losses-out {} {text}", to.display());
        run(TRAIN_GPT, &args)
    };
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
    link("losses", "link");
    link("/dev/null", "null");
    link("/dev/full", "full");

    for name in ["link", "null"] {
        let Run { code, err, .. } = train(&at(name));
        assert_eq!(code, Some(0), "{name}: {err}");
        assert!(at(name).is_symlink(), "{name} is replaced");
    }
    let losses = fs::read_to_string(at("losses")).unwrap();
    assert_eq!(losses.lines().count(), 2, "{losses}");

    let Run { code, out, err } = train(&at("full"));
    assert_eq!(code, Some(1), "{err}");
    assert_eq!(count(&out, "held-out loss"), 1, "{out}");
    assert_eq!(count(&err, "No space left on device"), 1, "{err}");

    let Run { code, out, err } = train(&at("none/losses"));
    assert_eq!((code, count(&out, "held-out loss")), (Some(1), 0), "{err}");
    assert_eq!(count(&err, "cannot write"), 1, "{err}");
}

#[test]
fn mistakes_are_named_by_their_options() {
    let folder = tempfile::tempdir().unwrap();
    let text = small_text(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (empty, saved) = (at("empty"), at("saved"));
    fs::write(&empty, "").unwrap();
    let Run { code, err, .. } = run(TRAIN_GPT, &format!("{SMALL} --save {saved} {text}"));
    assert_eq!(code, Some(0), "{err}");

    let wider = SMALL.replace("--width 8", "--width 16");
    for (args, expected) in [
        (
            format!("{wider} --load {saved} {text}"),
            &["--load", "the checkpoint is of another model"][..],
        ),
        (format!("{SMALL} {empty}"), &[&empty, "--time 16"]),
        (
            format!("--heads 5 {text}"),
            &["--width 128 does not divide by --heads 5"],
        ),
        (
            format!("{SMALL} --elastic --memory 1KiB --processes 4 {text}")
                .replace("--processes 1 ", ""),
            &["--memory: a process needs"],
        ),
    ] {
        let Run { code, err, .. } = run(TRAIN_GPT, &args);
        assert_eq!(code, Some(1), "{args}: {err}");
        for expected in expected {
            assert_eq!(count(&err, expected), 1, "{args}: {err}");
        }
        assert_eq!(count(&err, "step 1/"), 0, "{args}: {err}");
    }
}
