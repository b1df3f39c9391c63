//! `mpmd run` while a process of the job is killed, and while the launcher itself is stopped
//! (Ctrl-Z), at random moments.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Sandbox, Watched, over_each_carrier, package_program, rng_of_this_run};
use rustix::process::{Pid, Signal, kill_process};

over_each_carrier! {
    killed_process_is_named_first_and_nothing_is_left
    stopped_launcher_stops_and_continues_its_job
}

const PROCESSES: usize = 4;

/// The longest time from a death to the end of the launcher.
const SOON: Duration = Duration::from_secs(5);

/// The longest time for anything else.
const LONG: Duration = Duration::from_secs(60);

/// The latest moment of a fault after the processes' sixth step, in microseconds.
const WITHIN_MICROS: usize = 200_000;

/// A program that runs until it is ended, under `mpmd run` in a folder of its own.
struct Launched {
    launcher: Watched,
    /// The folder of all processes of the job.
    site: Sandbox,
}

impl Launched {
    fn start(carrier: Carrier, options: &[&str], mode: &str) -> Self {
        let site = Sandbox::new().unwrap();
        let mut command = site.command(package_program("mpmd-cli", "mpmd"));
        command.args(["run", "-n", "4"]).args(options);
        command.args(["--", env!("CARGO_BIN_EXE_named"), "looping", mode]);
        carrier.set(&mut command);
        let mut launcher = site.start(command, "launcher").unwrap();
        let deadline = Instant::now() + LONG;
        for process in 0..PROCESSES {
            launcher
                .wait_for_output(&format!("[{process}] step 6\n"), deadline)
                .unwrap();
        }
        Self { launcher, site }
    }

    /// Returns the pids of the job's processes, by process number.
    fn pids(&self) -> Vec<u32> {
        let all = self.site.processes();
        let find = |process: usize| {
            let variable = format!("MPMD_RANK={process}");
            all.iter()
                .find(|pid| has_variable(**pid, &variable))
                .copied()
        };
        let pids = (0..PROCESSES).map(find);
        pids.map(|pid| pid.unwrap_or_else(|| panic!("not all of the job is in {all:?}")))
            .collect()
    }

    fn steps(&self, process: usize) -> usize {
        let start = format!("[{process}] step ");
        self.launcher
            .output()
            .lines()
            .filter(|line| line.starts_with(&start))
            .count()
    }
}

/// Returns the number of faults in a test: `few`, or the value of `MPMD_TESTS_FAULTS`.
fn faults(few: usize) -> usize {
    let many = std::env::var("MPMD_TESTS_FAULTS").ok();
    many.map_or(few, |text| {
        text.parse().expect("MPMD_TESTS_FAULTS is a number")
    })
}

fn killed_process_is_named_first_and_nothing_is_left(carrier: Carrier) {
    let mut random = rng_of_this_run();
    let (mut unnamed, times) = (0, faults(if carrier.is_thorough() { 6 } else { 2 }));
    for time in 0..times {
        let mode = ["reading", "running-ahead", "large"][time % 3];
        let mut job = Launched::start(carrier, &[], mode);
        let victim = random.usize(..PROCESSES);
        let delay = Duration::from_micros(random.usize(..WITHIN_MICROS) as u64);
        let pid = job.pids()[victim];
        std::thread::sleep(delay);
        let begin = Instant::now();
        send(pid, Signal::KILL);
        let end = job.launcher.wait(begin + LONG).unwrap();
        let report = format!(
            "{mode}, process {victim} after {delay:?}\n{}",
            job.launcher.report()
        );
        assert_eq!(end.code(), 128 + Signal::KILL.as_raw(), "{report}");
        assert!(
            end.ended_at - begin <= SOON,
            "the launcher ended after {:?}\n{report}",
            end.ended_at - begin
        );
        let first = format!("process {victim} failed first: it was ended by signal 9 (SIGKILL)");
        assert!(end.stderr.contains(&first), "{report}");
        for process in (0..PROCESSES).filter(|process| *process != victim) {
            // An error that several processes print is shown once: `[0,2] …`.
            let is_of = |line: &&str| {
                let numbers = line
                    .strip_prefix('[')
                    .and_then(|line| line.split_once("] "));
                numbers.is_some_and(|(numbers, _)| {
                    numbers
                        .split(',')
                        .any(|number| number == process.to_string())
                })
            };
            let said: String = end.stderr.lines().filter(is_of).collect();
            assert!(
                said.contains(&format!("process {victim} is gone")),
                "process {process}:\n{report}"
            );
            unnamed += usize::from(!said.contains("tests/src/programs/looping.rs:"));
        }
        let left = job.site.processes();
        assert!(left.is_empty(), "processes {left:?} are left\n{report}");
    }
    // A process that waits for nothing at the moment of the death has no operation to name.
    assert!(
        unnamed < times * (PROCESSES - 1),
        "no error names the operation that waited"
    );
}

fn stopped_launcher_stops_and_continues_its_job(carrier: Carrier) {
    let mut random = rng_of_this_run();
    for _ in 0..faults(1) {
        let mut job = Launched::start(carrier, &["--peer-timeout", "2"], "reading");
        let pids = job.pids();
        std::thread::sleep(Duration::from_micros(random.usize(..WITHIN_MICROS) as u64));
        job.launcher.signal(Signal::TSTP).unwrap();
        let all: Vec<u32> = pids.iter().copied().chain([job.launcher.pid()]).collect();
        wait_until(&job, "the job and its launcher are stopped", || {
            all.iter().all(|pid| is_stopped(*pid))
        });
        // Longer than the peer timeout: the time of a stop must not count.
        std::thread::sleep(Duration::from_millis(2500));
        let before: Vec<usize> = (0..PROCESSES).map(|process| job.steps(process)).collect();
        job.launcher.signal(Signal::CONT).unwrap();
        wait_until(&job, "all processes go on", || {
            (0..PROCESSES).all(|process| job.steps(process) > before[process] + 20)
        });
        job.launcher.signal(Signal::INT).unwrap();
        let end = job.launcher.wait(Instant::now() + LONG).unwrap();
        let report = job.launcher.report();
        assert_eq!(end.code(), 128 + Signal::INT.as_raw(), "{report}");
        assert!(
            !end.stderr.contains("is gone"),
            "a healthy job was lost\n{report}"
        );
        let left = job.site.processes();
        assert!(left.is_empty(), "processes {left:?} are left\n{report}");
    }
}

fn wait_until(job: &Launched, awaited: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "not so in time: {awaited}\n{}",
            job.launcher.report()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(pid: u32, signal: Signal) {
    kill_process(
        Pid::from_raw(pid.cast_signed()).expect("no pid is 0"),
        signal,
    )
    .expect("it is running");
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

fn has_variable(pid: u32, variable: &str) -> bool {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment
        .split(|byte| *byte == 0)
        .any(|found| found == variable.as_bytes())
}
