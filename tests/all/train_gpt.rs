//! The training of the transformer as a user starts it.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Sandbox, Watched, over_each_carrier, package_program, rng_of_this_run};
use rustix::process::{Pid, Signal, kill_process};

use crate::recovery::{kill_in_turn, kill_one};

over_each_carrier! {
    losses_are_bit_identical_at_any_schedule_and_carrier
}

/// No run takes this long, on any machine.
const LONG: Duration = Duration::from_secs(150);

/// A model that is small, but has every part.
const SIZES: [&str; 16] = [
    "--layers",
    "4",
    "--width",
    "16",
    "--heads",
    "2",
    "--time",
    "16",
    "--batch",
    "2",
    "--microbatches",
    "4",
    "--sample",
    "4",
    "--seed",
    "5",
];

/// Creates a folder with a text of its own: the losses must not depend on files of the repository.
fn folder() -> Sandbox {
    let folder = Sandbox::new().unwrap();
    let line = |i: usize| format!("line {i} says {} and {}\n", i * i % 97, i * 31 % 89);
    let text: String = (0..4000).map(line).collect();
    std::fs::write(folder.path().join("text"), text).expect("the test's own folder");
    folder
}

fn start(carrier: Carrier, folder: &Sandbox, args: &[&str]) -> Watched {
    let mut command = folder.command(package_program("mpmd-examples", "train_gpt"));
    carrier.set(command.args(SIZES).args(args).arg("text"));
    folder.start(command, "train_gpt").unwrap()
}

/// Runs the training over tcp to its end, checks that nothing is left, and returns its output.
fn run(folder: &Sandbox, args: &[&str]) -> String {
    run_over(Carrier::TCP, folder, args)
}

/// Runs the training over `carrier` to its end, checks that nothing is left, and returns its
/// output.
fn run_over(carrier: Carrier, folder: &Sandbox, args: &[&str]) -> String {
    let mut process = start(carrier, folder, args);
    let end = process.wait(Instant::now() + LONG).unwrap();
    assert_eq!(end.code(), 0, "{args:?}:\n{}\n{}", end.stdout, end.stderr);
    let left = folder.processes();
    assert!(
        left.is_empty(),
        "processes {left:?} are left\n{}",
        process.report()
    );
    end.stdout
}

/// Returns the losses of each step over tcp, with all their bits.
fn losses(folder: &Sandbox, args: &[&str]) -> Vec<String> {
    losses_over(Carrier::TCP, folder, args)
}

fn losses_over(carrier: Carrier, folder: &Sandbox, args: &[&str]) -> Vec<String> {
    run_over(
        carrier,
        folder,
        &[args, &["--losses-out", "losses"]].concat(),
    );
    let losses =
        std::fs::read_to_string(folder.path().join("losses")).expect("the program writes them");
    losses.lines().map(str::to_owned).collect()
}

const STEPS: [&str; 2] = ["--steps", "5"];

fn losses_are_bit_identical_at_any_schedule_and_carrier(carrier: Carrier) {
    let folder = folder();
    let alone = losses(&folder, &[&STEPS[..], &["--processes", "1"]].concat());
    assert_eq!(alone.len(), 5, "{alone:?}");
    let schedules = if carrier.is_thorough() {
        &["gpipe", "1f1b"][..]
    } else {
        &["1f1b"]
    };
    for processes in ["2", "4"] {
        for schedule in schedules {
            let transport = ["--transport", carrier.transport];
            let args = ["--processes", processes, "--schedule", schedule];
            let found = losses_over(carrier, &folder, &[&STEPS[..], &transport, &args].concat());
            assert_eq!(found, alone, "{processes} processes, {schedule}");
        }
    }
}

#[test]
fn losses_match_as_threads_and_nearly_in_tensor_parallel() {
    let folder = folder();
    let with = |args: &[&str]| losses(&folder, &[&STEPS[..], args].concat());
    let alone = with(&["--processes", "1"]);
    for processes in ["2", "4"] {
        for schedule in ["gpipe", "1f1b"] {
            let found = with(&[
                "--processes",
                processes,
                "--transport",
                "inproc",
                "--schedule",
                schedule,
            ]);
            assert_eq!(found, alone, "{processes} processes as threads, {schedule}");
        }
    }
    // Tensor-parallel blocks add in another order.
    let values = |losses: &[String]| -> Vec<f64> {
        let value = |line: &String| line.split(' ').nth(1).and_then(|value| value.parse().ok());
        losses.iter().filter_map(value).collect()
    };
    for flags in [
        &["--model-parallel", "2"][..],
        &["--fsdp", "2", "--tensor-parallel", "2", "--stages", "2"],
    ] {
        let split = with(&[flags, &["--processes", "4"]].concat());
        for (split, alone) in values(&split).into_iter().zip(values(&alone)) {
            assert!(
                (split - alone).abs() < 1e-5 * alone,
                "{flags:?}: {split} {alone}"
            );
        }
        assert_eq!(values(&split).len(), 5);
    }
}

/// Uses built-in schedules with two stages on each process, and a user's schedule in torch's text
/// format.
#[test]
fn losses_match_with_several_stages_and_user_schedules() {
    let folder = folder();
    let with = |args: &[&str]| losses(&folder, &[&STEPS[..], args].concat());
    let alone = with(&["--processes", "1"]);
    for flags in [
        "--schedule zbv",
        "--schedule interleaved --recompute",
        "--schedule 1f1b --stages 2",
        "--schedule eager --transport inproc",
        "--schedule zb-h1 --recompute --transport inproc",
        "--schedule zb1p --transport inproc",
    ] {
        let flags: Vec<&str> = flags.split(' ').collect();
        assert_eq!(with(&flags), alone, "{flags:?}");
    }
    // Two stages on the first rank, one on the second.
    let rows = "0F0,1F0,0F1,1F1,1B0,0B0,0F2,1F2,1B1,0B1,0F3,1F3,1B2,0B2,1B3,0B3\r\n\
                ,,2F0,2B0,2F1,2B1,2F2,2I2,2W2,2F3,2B3\r\n";
    std::fs::write(folder.path().join("mine.csv"), rows).expect("the test's own folder");
    assert_eq!(with(&["--schedule", "mine.csv", "--processes", "2"]), alone);
}

#[test]
fn training_saved_sharded_resumes_unsharded() {
    let folder = folder();
    let whole = losses(&folder, &["--steps", "6", "--processes", "1"]);
    let save = ["--steps", "6", "--stop-after", "3", "--save", "saved"];
    let first = losses(
        &folder,
        &[
            &save[..],
            &["--stages", "2", "--fsdp", "2", "--processes", "2"],
        ]
        .concat(),
    );
    let load = [
        "--steps",
        "6",
        "--stages",
        "1",
        "--processes",
        "1",
        "--load",
        "saved",
    ];
    let second = losses(&folder, &load);
    let value = |line: &String| -> f64 {
        line.split(' ')
            .nth(1)
            .expect("a loss")
            .parse()
            .expect("a number")
    };
    assert_eq!((first.len(), second.len()), (3, 3));
    for (found, expected) in first.iter().chain(&second).zip(&whole) {
        let (found, expected) = (value(found), value(expected));
        assert!(
            (found - expected).abs() < 1e-5 * expected,
            "{found} {expected}"
        );
    }
}

#[test]
fn sharding_is_shown_and_user_strategy_is_read() {
    let folder = folder();
    let table = run(
        &folder,
        &["--fsdp", "2", "--tensor-parallel", "2", "--show-sharding"],
    );
    let has = |words: [&str; 2]| {
        table
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word)))
    };
    assert!(
        has(["blocks.3.qkv.weight", "P(model, data)"]) && has(["head.weight", "P(data, None)"]),
        "{table}"
    );
    assert!(
        table.contains("stage 3, as its parameters are stored"),
        "{table}"
    );
    std::fs::write(folder.path().join("rules.json"), r#"[[".*", "replicate"]]"#)
        .expect("the test's folder");
    let table = run(
        &folder,
        &["--fsdp", "2", "--strategy", "rules.json", "--show-sharding"],
    );
    assert!(
        table.contains("blocks.3.qkv.weight") && !table.contains("P(data"),
        "{table}"
    );
}

#[test]
fn training_saved_at_four_stages_resumes_at_two() {
    let folder = folder();
    let whole = losses(&folder, &["--steps", "8"]);
    let first = losses(
        &folder,
        &["--steps", "8", "--stop-after", "4", "--save", "saved"],
    );
    assert_eq!(first, whole[..4]);
    let loaded = [
        "--steps",
        "8",
        "--stages",
        "2",
        "--processes",
        "2",
        "--load",
        "saved",
    ];
    assert_eq!(losses(&folder, &loaded), whole[4..]);
}

/// Starts the training of a small model as four processes, by `mpmd run` or by itself. Its text
/// sample is too long to wait for.
fn start_without_end(folder: &Sandbox, by_launcher: bool, args: &[&str]) -> Watched {
    let program = package_program("mpmd-examples", "train_gpt");
    let mut command = folder.command(&program);
    if by_launcher {
        command = folder.command(package_program("mpmd-cli", "mpmd"));
        command
            .args(["run", "-n", "4", "--grace", "60"])
            .arg(&program);
    }
    command.args([
        "--width",
        "16",
        "--heads",
        "2",
        "--time",
        "8",
        "--sample",
        "100000000",
    ]);
    command.args(args).arg("text");
    folder.start(command, "train_gpt").unwrap()
}

/// Sends `signal` once `is_time` is true for the output, waits for the end, and checks that nothing
/// is left. Returns (standard output, exit code).
fn stopped(
    mut process: Watched,
    folder: &Sandbox,
    is_time: impl Fn(&str) -> bool,
    signal: Signal,
) -> (String, i32) {
    let deadline = Instant::now() + LONG;
    while !is_time(&process.report()) {
        assert!(
            Instant::now() < deadline && !process.has_ended(),
            "too early\n{}",
            process.report()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    process.signal(signal).unwrap();
    let end = process.wait(Instant::now() + LONG).unwrap();
    assert!(folder.processes().is_empty(), "{}", process.report());
    let code = end.code();
    (end.stdout, code)
}

/// Returns true if an evaluation has ended, so that the program samples.
fn is_evaluated(report: &str) -> bool {
    report.contains("evaluation after step ")
}

#[test]
fn signal_while_training_saves_and_skips_what_follows() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let folder = folder();
        let args = [
            "--steps",
            "1000000",
            "--save",
            "saved",
            "--losses-out",
            "losses",
        ];
        let process = start_without_end(&folder, false, &args);
        let is_time = |report: &str| report.contains("step 1/1000000");
        let (stdout, found) = stopped(process, &folder, is_time, signal);
        assert_eq!(found, code, "{stdout}");
        assert!(
            stdout.contains("saved after step ") && !stdout.contains("held-out loss"),
            "{stdout}"
        );
        assert!(folder.path().join("saved").is_dir());
        let losses =
            std::fs::read_to_string(folder.path().join("losses")).expect("they are written");
        assert!(losses.starts_with("1 "), "{losses}");
    }
}

#[test]
fn second_request_ends_at_once_and_each_has_one_line() {
    let folder = folder();
    let args = ["--steps", "1000000", "--microbatches", "64", "--time", "64"];
    let mut command = folder.command(package_program("mpmd-examples", "train_gpt"));
    // One step takes longer than the request's two seconds.
    command.args(["--width", "256", "--layers", "16", "--processes", "1"]);
    command.args(args).args(["--batch", "64", "text"]);
    let mut process = folder.start(command, "train_gpt").unwrap();
    let deadline = Instant::now() + LONG;
    let wait_for = |process: &mut Watched, said: &str| {
        while !process.report().contains(said) {
            assert!(
                Instant::now() < deadline && !process.has_ended(),
                "{said}\n{}",
                process.report()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for(&mut process, "CPUs compute");
    process.signal(Signal::INT).unwrap();
    let first = "Ctrl-C: ends after this step; once more ends at once";
    wait_for(&mut process, first);
    // Signals within two seconds of the first are the same request.
    let again = Instant::now() + Duration::from_millis(2100);
    std::thread::sleep(again.saturating_duration_since(Instant::now()));
    process.signal(Signal::INT).unwrap();
    let end = process.wait(deadline).unwrap();
    assert_eq!(end.code(), 130, "{}", end.stderr);
    let count = |said: &str| end.stderr.matches(said).count();
    assert_eq!(count(first), 1, "{}", end.stderr);
    assert_eq!(count("Ctrl-C once more: ends at once"), 1, "{}", end.stderr);
}

#[test]
fn failed_save_after_a_signal_fails_the_job() {
    let folder = folder();
    let mut process = start_without_end(&folder, true, &["--steps", "1000000", "--save", "saved"]);
    let deadline = Instant::now() + LONG;
    while !process.report().contains("step 1/1000000") {
        assert!(
            Instant::now() < deadline && !process.has_ended(),
            "{}",
            process.report()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let saved = folder.path().join("saved");
    std::fs::remove_dir_all(&saved).unwrap();
    std::fs::write(&saved, "").unwrap();
    process.signal(Signal::INT).unwrap();
    let end = process.wait(Instant::now() + LONG).unwrap();
    let expected = "mpmd: all 4 processes failed with exit code 1: ";
    let last = end.stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(expected) && last.contains("saved"),
        "{}",
        process.report()
    );
    assert_eq!(end.code(), 1, "{}", process.report());
    assert!(folder.processes().is_empty(), "{}", process.report());
}

#[test]
fn signal_while_evaluating_or_sampling_sets_exit_code() {
    // The evaluation follows the last step.
    let evaluates = |report: &str| report.contains("step 1/1 ");
    for (is_time, signal, code) in [
        (&evaluates as &dyn Fn(&str) -> bool, Signal::TERM, 143),
        (&is_evaluated, Signal::INT, 130),
    ] {
        let folder = folder();
        let args = ["--steps", "1", "--microbatches", "1", "--save", "saved"];
        let process = start_without_end(&folder, false, &args);
        let (stdout, found) = stopped(process, &folder, is_time, signal);
        assert_eq!(found, code, "{stdout}");
        assert!(stdout.contains("saved after step 1 "), "{stdout}");
    }
}

#[test]
fn launcher_and_threads_pass_the_code_of_a_signal_on() {
    for (by_launcher, args) in [
        (true, &["--steps", "1"][..]),
        (false, &["--steps", "1", "--transport", "inproc"]),
    ] {
        let folder = folder();
        let process = start_without_end(&folder, by_launcher, args);
        let (stdout, found) = stopped(process, &folder, is_evaluated, Signal::TERM);
        assert_eq!(found, 143, "by the launcher: {by_launcher}\n{stdout}");
    }
}

/// The training goes on when processes are killed, and its file of losses is the same.
#[test]
fn elastic_training_has_the_same_losses_when_processes_are_killed() {
    let folder = folder();
    let steps = ["--steps", "400"];
    let expected = losses(&folder, &steps);
    assert_eq!(expected.len(), 400);
    let mut command = folder.command(package_program("mpmd-cli", "mpmd"));
    command.args(["run", "-n", "4", "--restart", "3", "--no-prefix", "--"]);
    command
        .arg(package_program("mpmd-examples", "train_gpt"))
        .args(SIZES)
        .args(steps);
    command.args(["--elastic", "--losses-out", "losses of survivors", "text"]);
    Carrier::SHM.set(&mut command);
    let mut launcher = folder.start(command, "elastic").unwrap();
    kill_in_turn(&mut launcher, &folder, "train_gpt", 3);
    let end = launcher.wait(Instant::now() + LONG).unwrap();
    assert_eq!(end.code(), 0, "{end:?}");
    let found = std::fs::read_to_string(folder.path().join("losses of survivors")).unwrap();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected, "{end:?}");
}

/// Kills one process of a job that cannot go on without it, and returns the end of the job.
#[test]
fn job_that_lacks_memory_for_a_loss_says_so_before_it_ends() {
    let folder = folder();
    let mut command = folder.command(package_program("mpmd-cli", "mpmd"));
    command.args(["run", "-n", "2", "--grace", "6", "--"]);
    command.arg(package_program("mpmd-examples", "train_gpt"));
    command
        .args(SIZES)
        .args(["--steps", "1000000", "--stages", "2"]);
    // Enough for half of the blocks, not for all.
    command.args(["--elastic", "--memory", "250KiB", "text"]);
    Carrier::TCP.set(&mut command);
    let mut launcher = folder.start(command, "elastic").unwrap();
    let until = Instant::now() + LONG;
    while !launcher.report().contains("step 1/1000000") {
        let report = launcher.report();
        assert!(Instant::now() < until && !launcher.has_ended(), "{report}");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_one(&folder, "train_gpt", 1);
    let end = launcher.wait(until).unwrap();
    assert_ne!(end.code(), 0, "{end:?}");
    for said in [
        "is lost, and the program does not go on with 1 of 2: a process needs",
        "with --restart or --spares",
    ] {
        assert!(end.stderr.contains(said), "{}", end.stderr);
    }
}

/// Waits until the job has so many processes, in an epoch after `epoch`, and sets `epoch` to that.
/// `commands` are the one that started the job and those that added processes: process 0, which
/// says it, may be of any of them.
fn wait_for_size(commands: &mut [Watched], processes: usize, epoch: &mut usize) {
    let until = Instant::now() + LONG;
    let has = format!("; it has {processes} processes, ");
    let epoch_of = |line: &str| -> Option<usize> {
        let (_, said) = line.split_once("mpmd: epoch ")?;
        said.contains(&has)
            .then(|| said.split(' ').next()?.parse().ok())?
    };
    loop {
        let said: Vec<String> = commands.iter().map(Watched::error_output).collect();
        let newest = said
            .iter()
            .flat_map(|said| said.lines())
            .filter_map(epoch_of)
            .max();
        if let Some(newest) = newest.filter(|newest| *newest > *epoch) {
            *epoch = newest;
            break;
        }
        let is_over = Instant::now() >= until || commands[0].has_ended();
        assert!(
            !is_over,
            "{processes} after epoch {epoch}:\n{}",
            said.join("\n")
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    // A process is lost only after the state has two copies again.
    std::thread::sleep(Duration::from_millis(400));
}

/// The processes of a training die, leave and come at random, from 4 to 2 of them, without a
/// restart. Two devices share each microbatch, whichever processes have them. MPMD_TEST_CHANGES
/// sets the number of changes.
#[test]
fn elastic_training_keeps_its_losses_as_processes_go_and_come() {
    let changes = std::env::var("MPMD_TEST_CHANGES")
        .ok()
        .and_then(|text| text.parse().ok());
    let changes: usize = changes.unwrap_or(5);
    let folder = folder();
    let count = (800 + 250 * changes).to_string();
    let steps = [
        "--steps",
        &count,
        "--schedule",
        "1f1b",
        "--stages",
        "2",
        "--fsdp",
        "2",
    ];
    let expected = losses(&folder, &[&steps[..], &["--processes", "1"]].concat());
    let program = package_program("mpmd-examples", "train_gpt");
    let mpmd = |args: &[&str]| {
        let mut command = folder.command(package_program("mpmd-cli", "mpmd"));
        command
            .arg("run")
            .args(args)
            .arg("--")
            .arg(&program)
            .args(SIZES)
            .args(steps);
        command.args(["--elastic", "--losses-out", "losses of survivors", "text"]);
        Carrier::SHM.set(&mut command);
        command
    };
    let mut launcher = folder
        .start(mpmd(&["-n", "4", "--no-prefix"]), "elastic")
        .unwrap();
    launcher
        .wait_for_output("\n", Instant::now() + LONG)
        .unwrap();
    let (mut commands, mut epoch) = (vec![launcher], 1);
    std::thread::sleep(Duration::from_millis(300));
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    let pids = || {
        let is_one = |pid: &u32| name(*pid).is_ok_and(|name| name.trim() == "train_gpt");
        folder
            .processes()
            .into_iter()
            .filter(is_one)
            .collect::<Vec<u32>>()
    };
    let mut random = rng_of_this_run();
    let (mut size, mut done) = (4, 0);
    while done < changes {
        let all = pids();
        let chosen = all[random.usize(..all.len())];
        let victim = Pid::from_raw(chosen.cast_signed()).expect("no pid is 0");
        let new = random.usize(2..=4);
        size = if new > size {
            let (more, job) = ((new - size).to_string(), chosen.to_string());
            let command = mpmd(&["--add", &more, "--job", &job, "--no-prefix"]);
            commands.push(folder.start(command, "added").unwrap());
            new
        } else if size > 2 {
            kill_process(victim, [Signal::KILL, Signal::USR1][random.usize(..2)]).unwrap();
            size - 1
        } else {
            continue;
        };
        done += 1;
        // Two that are added may come in two epochs.
        wait_for_size(&mut commands, size, &mut epoch);
    }
    let ends = commands
        .iter_mut()
        .map(|command| command.wait(Instant::now() + LONG).unwrap());
    let ends: Vec<_> = ends.collect();
    assert_eq!(ends[0].code(), 0, "{ends:?}");
    // A command whose process was killed ends with 1.
    assert!(
        ends.iter().all(|end| [0, 1].contains(&end.code())),
        "{ends:?}"
    );
    let found = std::fs::read_to_string(folder.path().join("losses of survivors")).unwrap();
    let wrong = found
        .lines()
        .zip(&expected)
        .find(|(found, expected)| found != expected);
    assert_eq!(
        (wrong, found.lines().count()),
        (None, expected.len()),
        "{ends:?}"
    );
    assert!(folder.processes().is_empty());
}
