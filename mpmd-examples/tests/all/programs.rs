//! The programs as a user starts them: as processes of their own, and as threads.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Far above what any of these needs, also on a machine that does other things.
const DEADLINE: Duration = Duration::from_secs(60);

struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Ends the child where a test ends before it does; the processes it has started end with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail where it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, args: &str) -> Run {
    let mut command = Command::new(program);
    command
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // Whatever launcher may have started the tests, these are jobs of their own.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    let mut child = Running(command.spawn().unwrap());
    let (out, err) = (child.0.stdout.take().unwrap(), child.0.stderr.take().unwrap());
    let readers =
        [Box::new(out) as Box<dyn std::io::Read + Send>, Box::new(err)].map(|mut stream| {
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
        assert!(start.elapsed() < DEADLINE, "{program} {args} still runs after {DEADLINE:?}");
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
const OVERLAP: &str = env!("CARGO_BIN_EXE_overlap");
const RESHARD: &str = env!("CARGO_BIN_EXE_reshard");

#[test]
fn the_check_passes_as_processes_and_as_threads() {
    for args in
        ["", "--processes 1", "--processes 2", "--processes 8", "--processes 8 --transport inproc"]
    {
        let Run { code, out, err } = run(PIPELINE, &format!("--check {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        // Printed once, by process 0.
        assert_eq!((count(&out, " ok"), count(&out, "OFF")), (32, 0), "{args}:\n{out}");
    }
}

#[test]
fn a_check_that_is_off_ends_every_process_with_1_and_names_the_first_number() {
    for args in ["--processes 4", "--processes 8", "--processes 1"] {
        let Run { code, out, err } =
            run(PIPELINE, &format!("--check --learning-rate 0.0101 {args}"));
        assert_eq!(code, Some(1), "{args}: {err}");
        assert!(count(&out, "OFF") > 0, "{out}");
        assert_eq!(
            count(&err, "a number is off: f32, each microbatch the whole batch: losses, step 1"),
            1
        );
    }
}

#[test]
fn training_shows_the_loss_and_where_time_went_by_process() {
    for args in ["--processes 4 --slice", "--processes 2 --transport inproc --dtype f64"] {
        let Run { code, out, err } =
            run(PIPELINE, &format!("--width 64 --batch 16 --steps 3 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        assert_eq!(count(&out, "in the first step"), 1, "{out}");
        let processes = if args.contains("inproc") { 2 } else { 4 };
        assert_eq!(count(&out, "%"), processes, "{out}");
    }
}

#[test]
fn the_loss_is_the_same_on_any_number_of_processes() {
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
fn what_does_not_fit_is_said_once_and_ends_with_an_exit_code() {
    let Run { code, err, .. } = run(PIPELINE, "--processes 3");
    assert_eq!(code, Some(2));
    assert_eq!(err.trim_end(), "error: 8 devices cannot be spread evenly over 3 processes");
    let Run { code, err, .. } = run(PIPELINE, "--width 7 --processes 4");
    assert_eq!(code, Some(1));
    for process in 0..4 {
        assert_eq!(count(&err, &format!("process {process}: error: ")), 1, "{err}");
    }
    // By each process, and by the launcher, which names the cause.
    assert_eq!(count(&err, "[7, 7]"), 5, "{err}");
}

#[test]
fn basic_says_what_arrived_where() {
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
        assert_eq!(count(&out, "2 is a handle"), 2 * 3 * (processes - owners), "{out}");
    }
}

#[test]
fn overlap_gives_the_same_output_on_any_number_of_processes() {
    let outputs = |args: &str| {
        let Run { code, out, err } =
            run(OVERLAP, &format!("--width 64 --batch 32 --steps 3 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        let mut sizes: Vec<_> = out
            .lines()
            .filter_map(|line| line.split_once("root mean square "))
            .map(|(_, size)| size.to_owned())
            .collect();
        let here = sizes.len();
        sizes.dedup();
        assert_eq!(sizes.len(), 1, "{out}");
        (here, count(&out, "is a handle"), sizes.remove(0))
    };
    let (here, remote, size) = outputs("--processes 1");
    assert_eq!((here, remote), (1, 0));
    assert_eq!(outputs(""), (1, 3, size.clone()));
    assert_eq!(outputs("--processes 2 --transport inproc"), (1, 1, size.clone()));
    // Both devices of the first stage have it, in processes 0 and 1.
    assert_eq!(outputs("--processes 8"), (2, 6, size));
}

#[test]
fn reshard_shows_the_plan_and_proves_every_value() {
    for (args, processes) in
        [("", 4), ("--processes 1", 1), ("--processes 8 --transport inproc", 8)]
    {
        let Run { code, out, err } = run(RESHARD, &format!("--width 24 {args}"));
        assert_eq!(code, Some(0), "{args}: {err}");
        let plan =
            |leaf: &str| out.lines().filter(|line| line.starts_with(leaf)).collect::<Vec<_>>();
        assert_eq!((plan("bias").len(), plan("up").len()), (1, 1), "{out}");
        // Two replicas of halves on the second mesh; on the first only the scalar is there six
        // times.
        let leaves = 2 * 24 * 24 + 24;
        let proved = |after: &str| -> usize {
            let values = out.lines().filter_map(|line| {
                let (before, _) = line.split_once(after)?;
                before.split_whitespace().last()?.parse::<usize>().ok()
            });
            values.sum()
        };
        assert_eq!(out.matches("values proved").count(), processes, "{out}");
        assert_eq!(proved(" values proved on the second"), 2 * leaves + 4, "{out}");
        assert_eq!(proved(" back on the first"), leaves + 6, "{out}");
    }
}
