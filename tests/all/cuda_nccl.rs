//! Collectives of CUDA devices of real processes by NCCL, and the failure of processes that wait
//! for a dead one.
//!
//! The tests use the software CUDA driver and NCCL: a real NCCL needs a GPU for each process.

use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, FaultOutcome, Job, ProcessEnd, package_program};
use rustix::process::Signal;

/// Time limit for the end of all processes after a death or a wrong setting.
const SOON: Duration = Duration::from_secs(15);

/// Starts a job of the program `joining`, with a CUDA device for each process if there are enough.
/// `ways` sets each process's method for collectives. The returned folder holds the driver and must
/// live as long as the job.
fn start(
    carrier: Carrier,
    ways: &[&str],
    args: &[&str],
    settings: &[(&str, &str)],
) -> (Job, tempfile::TempDir) {
    let processes = ways.len();
    let options = carrier.processes(package_program("mpmd-tests", "named"), processes);
    let options = options
        .peer_timeout(Duration::from_secs(30))
        .deadline(Duration::from_secs(100));
    let folder = tempfile::tempdir().expect("a folder for the driver");
    let driver = softcuda::install(folder.path()).expect("the driver is built");
    let mut job = Job::prepare(options);
    for (process, way) in ways.iter().enumerate() {
        let mut command = job.command(process);
        command
            .arg("joining")
            .args(args)
            .env(variables::DEVICE, "cuda")
            .env(variables::CUDA_COLLECTIVES, way);
        softcuda::environment(&mut command, &driver);
        command
            .env("SOFTCUDA_DEVICES", processes.to_string())
            .envs(settings.iter().copied());
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

/// Waits for the end of all processes, which must come within [`SOON`]. Returns their results and
/// the output of all processes.
fn ends(job: &mut Job) -> (Vec<ProcessEnd>, String) {
    let begin = Instant::now();
    let ended = job.wait();
    let report = job.report();
    assert!(begin.elapsed() <= SOON, "{:?}\n{report}", begin.elapsed());
    (ended, report)
}

#[test]
fn nccl_works_over_every_transport() {
    softcuda::registered!();
    for (carrier, pace) in [(Carrier::SHM, "eager"), (Carrier::TCP, "seed:6")] {
        let (mut job, _folder) = start(
            carrier,
            &["nccl"; 3],
            &["sums", "12"],
            &[("SOFTCUDA_PACE", pace)],
        );
        for said in job.wait_well() {
            assert_eq!(figure(&said, "groups joined"), 1, "{said}");
            assert_eq!(figure(&said, "reductions by NCCL"), 33, "{said}");
        }
    }
}

#[test]
fn processes_that_share_a_gpu_use_the_host() {
    softcuda::registered!();
    for (ways, gpus) in [(["nccl"; 3], "2"), (["host"; 3], "3")] {
        let (mut job, _folder) = start(
            Carrier::SHM,
            &ways,
            &["sums", "3"],
            &[("SOFTCUDA_DEVICES", gpus)],
        );
        for said in job.wait_well() {
            assert_eq!(
                figure(&said, "groups joined") + figure(&said, "reductions by NCCL"),
                0,
                "{said}"
            );
        }
    }
}

#[test]
fn killed_process_is_named_by_those_waiting_in_nccl() {
    softcuda::registered!();
    for (processes, victim, carrier) in [
        (2, 0, Carrier::SHM),
        (3, 2, Carrier::SHM),
        (3, 1, Carrier::TCP),
    ] {
        // The victim's device is slow, so that the others' devices wait for it when it is killed.
        let args = ["steps", &victim.to_string()];
        let (mut job, _folder) = start(carrier, &vec!["nccl"; processes], &args, &[]);
        job.wait_for_output("step 2\n").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let FaultOutcome {
            ended,
            took,
            report,
        } = job.inject_fault(victim, Signal::KILL);
        for end in ended {
            assert_eq!(end.code(), 1, "{report}");
            assert!(
                end.stderr.contains(&format!("process {victim} is gone")),
                "{report}"
            );
            assert!(!end.stderr.contains("panicked"), "{report}");
        }
        assert!(
            took <= SOON,
            "{processes} processes without {victim}: {took:?}\n{report}"
        );
    }
}

#[test]
fn different_or_unknown_collectives_setting_is_an_error() {
    softcuda::registered!();
    let (mut job, _folder) = start(Carrier::SHM, &["nccl", "host"], &["sums", "1"], &[]);
    let (ended, report) = ends(&mut job);
    for end in ended {
        assert!(
            end.code() == 1
                && end
                    .stderr
                    .contains("2 devices of kind cuda, collectives by nccl"),
            "{report}"
        );
    }
    let (mut job, _folder) = start(Carrier::SHM, &["gloo"; 2], &["sums", "1"], &[]);
    let (ended, report) = ends(&mut job);
    for end in ended {
        let said = "MPMD_CUDA_COLLECTIVES=gloo makes no sense: it must be host or nccl";
        assert!(end.code() == 1 && end.stderr.contains(said), "{report}");
    }
}

#[test]
fn process_without_nccl_is_named_by_all() {
    softcuda::registered!();
    if let Ok(version) = mpmd_device::cuda::nccl() {
        println!("SKIPPED: NCCL {version} is installed on this machine, for all processes");
        return;
    }
    let poor = tempfile::tempdir().expect("a folder");
    let driver = softcuda::install(poor.path()).expect("the driver is built");
    std::fs::remove_file(driver.join("libnccl.so.2")).expect("it was put there");
    let options = Carrier::SHM
        .processes(package_program("mpmd-tests", "named"), 2)
        .deadline(Duration::from_secs(60));
    let mut job = Job::prepare(options);
    let rich = tempfile::tempdir().expect("a folder");
    let rich = (
        softcuda::install(rich.path()).expect("the driver is built"),
        rich,
    );
    for process in 0..2 {
        let mut command = job.command(process);
        command
            .args(["joining", "sums", "1"])
            .env(variables::DEVICE, "cuda")
            .env(variables::CUDA_COLLECTIVES, "nccl");
        softcuda::environment(&mut command, if process == 1 { &driver } else { &rich.0 });
        job.spawn(command);
    }
    let (ended, report) = ends(&mut job);
    assert!(ended.iter().all(|end| end.code() == 1), "{report}");
    assert!(
        ended[1]
            .stderr
            .contains("no NCCL found: looked for libnccl.so"),
        "{report}"
    );
    let named = [
        "process 1 on host ",
        "has no NCCL, which was asked for: no NCCL found: looked for libnccl.so",
    ];
    assert!(
        named.iter().all(|part| ended[0].stderr.contains(part)),
        "{report}"
    );
}
