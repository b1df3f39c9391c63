//! Arrays of CUDA devices between real processes that share a device: transferred without copies,
//! opened once, and lost with their owner.
//!
//! The tests use the software CUDA driver, unless `MPMD_TEST_GPU=1` says that there is a real one.

use std::time::Duration;

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, FaultOutcome, Job, package_program};
use rustix::process::Signal;

/// Time limit for the end of all processes after a death.
const SOON: Duration = Duration::from_secs(10);

/// Starts a job of the program `handing`, with a CUDA device for each process. The returned folder
/// holds the driver and must live as long as the job.
fn start(processes: usize, args: &[&str], settings: &[(&str, &str)]) -> (Job, tempfile::TempDir) {
    start_with(processes, Duration::from_secs(30), args, |_| settings)
}

/// Starts a job as [`start`] does, with settings for each process.
fn start_with<'a>(
    processes: usize,
    peer_timeout: Duration,
    args: &[&str],
    settings: impl Fn(usize) -> &'a [(&'a str, &'a str)],
) -> (Job, tempfile::TempDir) {
    let options = Carrier::SHM
        .processes(package_program("mpmd-tests", "named"), processes)
        .peer_timeout(peer_timeout)
        .deadline(Duration::from_secs(120));
    let folder = tempfile::tempdir().expect("a folder for the driver");
    let driver =
        (!softcuda::real()).then(|| softcuda::install(folder.path()).expect("the driver is built"));
    let mut job = Job::prepare(options);
    for process in 0..processes {
        let mut command = job.command(process);
        command
            .arg("handing")
            .args(args)
            .env(variables::DEVICE, "cuda")
            .env("RUST_LOG", "mpmd::transport=warn")
            .envs(settings(process).iter().copied());
        if let Some(driver) = &driver {
            softcuda::environment(&mut command, driver);
        }
        job.spawn(command);
    }
    (job, folder)
}

/// Returns the number that a process printed for `name` at its end.
fn figure(said: &str, name: &str) -> u64 {
    let line = said
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {said}"))
}

#[test]
fn whole_shards_are_not_copied_and_memory_is_opened_once() {
    softcuda::registered!();
    let pace = |pace| vec![("SOFTCUDA_PACE", pace)];
    // Blocks of the driver that hold several segments, and no interprocess events at all.
    let sharing = vec![("SOFTCUDA_BLOCK", "16777216"), ("SOFTCUDA_IPC_EVENTS", "0")];
    for (processes, settings) in [
        (2, pace("eager")),
        (3, pace("seed:7")),
        (2, pace("lazy:20")),
        (3, sharing),
    ] {
        let (mut job, _folder) = start(processes, &["whole", "100"], &settings);
        for said in job.wait_well() {
            if softcuda::real() {
                continue;
            }
            assert_eq!(figure(&said, "bytes copied on the device"), 0, "{said}");
            // Each process opens a sample of each other process, and the few segments that hold the
            // arrays, for any number of arrays.
            let (opened, others) = (figure(&said, "memory opened"), processes as u64 - 1);
            assert!(opened > others && opened <= 5 * others, "{said}");
        }
    }
}

#[test]
fn parts_of_shards_are_copied_once() {
    softcuda::registered!();
    for processes in [2, 3] {
        let (mut job, _folder) = start(processes, &["parts"], &[("SOFTCUDA_PACE", "seed:3")]);
        for said in job.wait_well() {
            if softcuda::real() {
                continue;
            }
            // Of three arrays, the last one whole on each process: every piece is copied once, from
            // any source.
            let whole = 96 * 48 * 4;
            let part = whole / processes as u64;
            assert_eq!(
                figure(&said, "bytes copied on the device"),
                2 * part + whole,
                "{said}"
            );
        }
    }
}

#[test]
fn many_arrays_are_lent_and_relent_at_once() {
    softcuda::registered!();
    for processes in [2, 3] {
        let (mut job, _folder) = start(processes, &["at-once"], &[]);
        for said in job.wait_well() {
            assert!(
                softcuda::real() || figure(&said, "bytes copied on the device") == 0,
                "{said}"
            );
        }
    }
}

/// Starts a job, kills process `victim` after step 25, and waits for the end of the others.
fn inject_fault(processes: usize, victim: usize, pace: &str) -> FaultOutcome {
    let (mut job, _folder) = start(processes, &["steps"], &[("SOFTCUDA_PACE", pace)]);
    job.wait_for_output("step 25\n").unwrap();
    job.inject_fault(victim, Signal::KILL)
}

#[test]
fn killed_process_with_lent_memory_is_named_by_the_others() {
    softcuda::registered!();
    for (processes, victim, pace) in [
        (2, 0, "eager"),
        (2, 1, "seed:5"),
        (3, 1, "eager"),
        (3, 2, "seed:9"),
    ] {
        let FaultOutcome {
            ended,
            took,
            report,
        } = inject_fault(processes, victim, pace);
        for end in ended {
            assert_eq!(end.code(), 1, "{report}");
            // With three processes, one may first hear that the other has left because of the
            // death. It then ends with that error.
            let others = (0..processes).filter(|process| *process != victim);
            let left = others.map(|process| format!("process {process} is gone (it has left)"));
            let named = left
                .chain([format!("process {victim} is gone")])
                .any(|words| end.stderr.contains(&words));
            assert!(named, "{report}");
            assert!(!end.stderr.contains("panicked"), "{report}");
        }
        assert!(
            took <= SOON,
            "{processes} processes without {victim}: {took:?}\n{report}"
        );
    }
}

/// Values that the dead process's device never finishes fail at the others, whose own devices go
/// on. No device waits for another process's device: such a wait may never end.
#[test]
fn device_of_survivor_works_after_unfinished_loan() {
    softcuda::registered!();
    for orphans in ["end", "hang"] {
        let settings = [("SOFTCUDA_ORPHANS", orphans)];
        let (mut job, _folder) = start(2, &["unfinished"], &settings);
        job.wait_for_output("issued\n").unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let FaultOutcome {
            ended,
            took,
            report,
        } = job.inject_fault(0, Signal::KILL);
        assert!(
            ended[0].stdout.contains("the device works: true"),
            "{report}"
        );
        assert!(took <= SOON, "{took:?}\n{report}");
    }
}

/// A process is silent while its driver makes the first context, which may take longer than the
/// peer timeout. Later first uses are slow, too.
#[test]
fn slow_first_uses_of_a_device_lose_no_process() {
    softcuda::registered!();
    // Process 0 has a CPU device, or a CUDA device that starts quickly.
    for kinds in ["cpu,cuda", "cuda"] {
        let settings = [(variables::DEVICE, kinds), ("SOFTCUDA_FIRST", "4000")];
        let settings = |process: usize| &settings[..=process];
        let (mut job, _folder) = start_with(2, Duration::from_secs(2), &["whole", "10"], settings);
        job.wait_well();
    }
}

#[test]
fn stop_shorter_than_peer_timeout_is_no_failure() {
    softcuda::registered!();
    let (mut job, _folder) = start(2, &["steps"], &[]);
    job.wait_for_output("step 5\n").unwrap();
    job.stop(1).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    job.resume(1).unwrap();
    let steps = job.output(0).unwrap().lines().count();
    job.wait_for_output(&format!("step {}\n", steps + 10))
        .unwrap();
    job.end();
}

/// Runs a job whose processes do not lend each other device memory: arrays go through host memory.
/// Returns what each process wrote to standard error.
fn run_apart<'a>(settings: impl Fn(usize) -> &'a [(&'a str, &'a str)]) -> Vec<String> {
    let (mut job, _folder) = start_with(2, Duration::from_secs(30), &["whole", "5"], settings);
    let ended = job.wait();
    for end in &ended {
        assert_eq!(end.code(), 0, "{}", job.report());
        assert_eq!(
            figure(&end.stdout, "memory opened later"),
            0,
            "{}",
            end.stdout
        );
    }
    ended.into_iter().map(|end| end.stderr).collect()
}

const REFUSED: &str = "do not lend each other memory of their devices: ";

#[test]
fn without_ipc_handles_arrays_go_through_the_host() {
    softcuda::registered!();
    if softcuda::real() {
        println!("skipped: a real driver does not fail at will");
        return;
    }
    for said in run_apart(|_| &[(variables::CUDA_IPC, "0")]) {
        assert!(!said.contains(REFUSED), "the user has asked for it: {said}");
    }
}

/// A driver refuses handles for instance between containers. Both processes warn, with the reason.
#[test]
fn refused_ipc_handles_are_reported_once_with_reason_and_cost() {
    softcuda::registered!();
    if softcuda::real() {
        println!("skipped: a real driver does not fail at will");
        return;
    }
    let refused = [("SOFTCUDA_FAIL", "cuIpcOpenMemHandle_v2:1")];
    for said in run_apart(|process| &refused[..process]) {
        assert_eq!(said.matches(REFUSED).count(), 1, "{said}");
        let (_, why) = said.split_once(REFUSED).expect("found above");
        assert!(
            why.starts_with("opening memory of another process's CUDA device"),
            "{said}"
        );
        assert!(why.contains("copied through host memory"), "{said}");
    }
    let off = [(variables::CUDA_IPC, "0")];
    let said = run_apart(|process| &off[..process]);
    assert!(
        said[0].contains("MPMD_CUDA_IPC=0 turns it off"),
        "the other has not: {said:?}"
    );
}
