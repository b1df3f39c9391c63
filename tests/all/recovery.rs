//! Processes die in the middle of a job, and others take their places. The results have the bits of
//! an undisturbed job.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Job, Sandbox, Watched, over_each_carrier, package_program};
use rustix::process::{Pid, Signal, kill_process};

over_each_carrier! {
    killed_processes_are_replaced
    process_that_leaves_is_called_back_by_a_death
    stopped_process_is_replaced_and_changes_nothing_when_it_wakes
    added_process_without_a_device_waits_and_ends_nothing
}

pub(crate) const PROCESSES: usize = 3;
pub(crate) const STEPS: usize = 1500;

/// Elements of each process in the program.
const EACH: usize = 64 << 10;

/// Time in which all regions have two copies again: until then a region may have one.
pub(crate) const UNTIL_COPIED: Duration = Duration::from_millis(600);

/// The longest time for a job.
pub(crate) const LONG: Duration = Duration::from_secs(100);

/// Starts the program under `mpmd run` with these options.
fn start(carrier: Carrier, site: &Sandbox, options: &[&str]) -> Watched {
    let mut command = site.command(package_program("mpmd-cli", "mpmd"));
    command
        .args(["run", "-n", &PROCESSES.to_string(), "--no-prefix"])
        .args(options);
    command.args(["--", env!("CARGO_BIN_EXE_recovering"), &STEPS.to_string()]);
    carrier.set(&mut command);
    site.start(command, "launcher").unwrap()
}

/// Waits for the end of a job that ends well. Returns its sums and its output.
fn wait(launcher: &mut Watched, site: &Sandbox) -> (Vec<String>, String) {
    let end = launcher.wait(Instant::now() + LONG).unwrap();
    assert_eq!(end.code(), 0, "{end:?}");
    assert_eq!(site.processes(), [0; 0], "nothing is left");
    let sums = end.stdout.lines().filter(|line| line.starts_with("sum "));
    (sums.map(str::to_owned).collect(), end.stderr)
}

/// Returns the sums that the program prints, computed without it.
pub(crate) fn expected(steps: usize) -> Vec<String> {
    let last =
        |process: usize| (0..steps).fold((process * EACH) as f32, |value, _| value * 1.001 + 0.5);
    let values = (0..PROCESSES).flat_map(|process| std::iter::repeat_n(last(process), EACH));
    let sum: f64 = values.map(f64::from).sum();
    vec![format!("sum {sum:?}"); PROCESSES]
}

fn killed_processes_are_replaced(carrier: Carrier) {
    let site = Sandbox::new().unwrap();
    let mut launcher = start(carrier, &site, &["--restart", "3"]);
    kill_in_turn(&mut launcher, &site, "recovering", 3);
    let (sums, errors) = wait(&mut launcher, &site);
    assert_eq!(sums, expected(STEPS), "{errors}");
}

/// The process that leaves has the only copies of the regions of the one that is killed.
fn process_that_leaves_is_called_back_by_a_death(carrier: Carrier) {
    let site = Sandbox::new().unwrap();
    let mut command = site.command(package_program("mpmd-cli", "mpmd"));
    command.args(["run", "-n", &PROCESSES.to_string(), "--no-prefix"]);
    command.args([
        "--",
        env!("CARGO_BIN_EXE_recovering"),
        &STEPS.to_string(),
        "hold",
    ]);
    carrier.set(&mut command);
    let (sums, errors) = wait(&mut site.start(command, "launcher").unwrap(), &site);
    assert_eq!(sums, expected(STEPS)[..1], "{errors}");
    assert!(errors.contains("epoch 3 goes on after step "), "{errors}");
}

/// The program's arrays have the size of the devices of the start.
fn added_process_without_a_device_waits_and_ends_nothing(carrier: Carrier) {
    let site = Sandbox::new().unwrap();
    let mpmd = |options: &[&str]| {
        let mut command = site.command(package_program("mpmd-cli", "mpmd"));
        command.arg("run").args(options).arg("--no-prefix");
        command.args([
            "--",
            env!("CARGO_BIN_EXE_recovering"),
            &STEPS.to_string(),
            "shrink",
        ]);
        carrier.set(&mut command);
        command
    };
    let job = mpmd(&["-n", &PROCESSES.to_string()]);
    let mut launcher = site.start(job, "launcher").unwrap();
    launcher
        .wait_for_output(" in epoch 1\n", Instant::now() + LONG)
        .unwrap();
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    let is_one = |pid: &u32| name(*pid).is_ok_and(|name| name.trim() == "recovering");
    let one = site
        .processes()
        .into_iter()
        .find(is_one)
        .expect("the job runs");
    let added = mpmd(&["--add", "1", "--job", &one.to_string()]);
    let mut added = site.start(added, "added").unwrap();
    let ends = [&mut launcher, &mut added].map(|one| one.wait(Instant::now() + LONG).unwrap());
    let [job, end] = &ends;
    assert_eq!([job.code(), end.code()], [0, 0], "{ends:?}");
    let sums: Vec<&str> = job
        .stdout
        .lines()
        .filter(|line| line.starts_with("sum "))
        .collect();
    assert_eq!(sums, expected(STEPS), "{job:?}");
    assert!(end.stdout.contains("it was not needed"), "{end:?}");
    assert!(end.stderr.contains("at most 3 processes"), "{end:?}");
    assert_eq!(site.processes(), [0; 0], "nothing is left");
}

/// A second kill could hit the process with the only copies.
#[test]
fn chaos_kills_a_process_and_the_job_goes_on() {
    let site = Sandbox::new().unwrap();
    let options = ["--restart", "1", "--chaos", "0.5"];
    let (sums, errors) = wait(&mut start(Carrier::SHM, &site, &options), &site);
    assert!(errors.contains("chaos kills"), "{errors}");
    assert!(errors.contains("epoch 2 goes on after step "), "{errors}");
    assert_eq!(sums, expected(STEPS), "{errors}");
}

/// As under a launcher that starts a lost rank again, with the same variables.
#[test]
fn restarted_rank_takes_its_place_again() {
    let processes = Carrier::TCP.processes(env!("CARGO_BIN_EXE_recovering"), PROCESSES);
    let mut job = Job::prepare(processes.args([STEPS.to_string()]));
    let start = |job: &mut Job, process| {
        let command = job.command(process);
        job.spawn(command)
    };
    for process in 0..PROCESSES {
        start(&mut job, process);
    }
    job.wait_for_output_of(0, " in epoch 1\n").unwrap();
    std::thread::sleep(UNTIL_COPIED);
    for (epoch, lost) in [(2, 1), (3, 2)] {
        job.kill(lost).unwrap();
        start(&mut job, lost);
        let goes_on = format!("epoch {epoch} goes on after step ");
        while !job.error_output(0).unwrap().contains(&goes_on) {
            assert!(Instant::now() < job.deadline(), "{}", job.report());
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(UNTIL_COPIED);
    }
    let ends = job.wait();
    let sums = ends.iter().filter(|end| end.code() == 0);
    let sums: Vec<&str> = sums.filter_map(|end| end.stdout.lines().last()).collect();
    assert_eq!(sums, expected(STEPS), "{}", job.report());
}

/// Kills processes of a job with this program, each after the job has gone on without the one
/// before.
pub(crate) fn kill_in_turn(launcher: &mut Watched, site: &Sandbox, program: &str, kills: u64) {
    let until = Instant::now() + LONG;
    let waits = |launcher: &mut Watched, text: &str| {
        while !launcher.error_output().contains(text) {
            let report = launcher.report();
            assert!(
                Instant::now() < until && !launcher.has_ended(),
                "{text}: {report}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(UNTIL_COPIED);
    };
    launcher.wait_for_output("\n", until).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    for kill in 0..kills {
        kill_one(site, program, kill as usize);
        waits(launcher, &format!("epoch {} goes on after step ", kill + 2));
    }
}

/// Kills one of the processes of a program: the one with this index, counted around.
pub(crate) fn kill_one(site: &Sandbox, program: &str, index: usize) {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    let is_one = |pid: &u32| name(*pid).is_ok_and(|name| name.trim() == program);
    let pids: Vec<u32> = site.processes().into_iter().filter(is_one).collect();
    let victim = pids[index % pids.len()];
    let victim = Pid::from_raw(victim.cast_signed()).expect("no pid is 0");
    kill_process(victim, Signal::KILL).unwrap();
}

/// The launcher knows how many it may start, the processes know that the job needs all.
#[test]
fn loss_that_no_spare_replaces_is_said_at_once() {
    for (options, replaced, expected) in [
        (&["--restart", "1"][..], 1, "no spare is left for its place"),
        (&[], 0, "the program does not go on with 2 of 3"),
    ] {
        let site = Sandbox::new().unwrap();
        let options = [options, &["--peer-timeout", "3", "--grace", "20"]].concat();
        let mut launcher = start(Carrier::TCP, &site, &options);
        kill_in_turn(&mut launcher, &site, "recovering", replaced);
        kill_one(&site, "recovering", 1);
        let end = launcher.wait(Instant::now() + LONG).unwrap();
        assert_ne!(end.code(), 0, "{end:?}");
        assert_eq!(end.stderr.matches(expected).count(), 1, "{}", end.stderr);
        assert!(
            end.stderr.contains("--restart or --spares"),
            "{}",
            end.stderr
        );
    }
}

/// The copies of commits are no loans, and memory that was lent in an epoch is freed with it.
#[test]
fn memory_of_an_epoch_ends_with_it() {
    const LOSSES: u64 = 5;
    let site = Sandbox::new().unwrap();
    let mut launcher = start(Carrier::SHM, &site, &["--restart", &LOSSES.to_string()]);
    let until = Instant::now() + LONG;
    for epoch in 1..=LOSSES {
        let waits = format!("epoch {epoch}: ");
        while launcher.output().matches(&waits).count() < PROCESSES {
            let report = launcher.report();
            assert!(
                Instant::now() < until && !launcher.has_ended(),
                "{waits}: {report}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        // Processes 0 and 1 are in all epochs.
        let said = launcher.output();
        let mut last = said
            .lines()
            .filter_map(|line| line.strip_prefix("process 2 has pid "));
        let pid = last
            .next_back()
            .and_then(|rest| rest.split(' ').next()?.parse().ok());
        let pid = Pid::from_raw(pid.expect("the line is whole")).expect("no pid is 0");
        kill_process(pid, Signal::KILL).unwrap();
    }
    let end = launcher.wait(until).unwrap();
    assert_eq!(end.code(), 0, "{end:?}");
    let most = |epoch: u64| {
        let prefix = format!("epoch {epoch}: ");
        let lines = end
            .stdout
            .lines()
            .filter_map(|line| line.strip_prefix(&prefix));
        lines
            .filter_map(|line| line.split(' ').next()?.parse::<u64>().ok())
            .max()
            .unwrap()
    };
    let mapped: Vec<u64> = (1..=LOSSES + 1).map(most).collect();
    assert!(mapped[LOSSES as usize] <= 2 * mapped[1], "{mapped:?}");
}

fn stopped_process_is_replaced_and_changes_nothing_when_it_wakes(carrier: Carrier) {
    let site = Sandbox::new().unwrap();
    let mut launcher = start(carrier, &site, &["--spares", "1", "--peer-timeout", "2"]);
    let until = Instant::now() + LONG;
    launcher.wait_for_output(" in epoch 1\n", until).unwrap();
    let said = launcher.output();
    let stopped = said
        .lines()
        .find_map(|line| line.strip_suffix(" in epoch 1"));
    let pid = stopped.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    let pid = Pid::from_raw(pid.expect("the line is whole")).expect("no pid is 0");
    kill_process(pid, Signal::STOP).unwrap();
    launcher.wait_for_output(" in epoch 2\n", until).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    let (sums, errors) = wait(&mut launcher, &site);
    assert_eq!(sums, expected(STEPS), "{errors}");
}
