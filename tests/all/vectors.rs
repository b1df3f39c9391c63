//! Jobs whose processes have vectors of different widths: all compute with the narrowest.

use std::time::Duration;

use mpmd_core::launch::variables;
use mpmd_device::cpu::{VectorWidth, processor_width};
use mpmd_tests::{Carrier, Job};

use crate::recovery::{PROCESSES, STEPS, UNTIL_COPIED, expected};

/// Runs the program `products` with these values of `MPMD_SIMD`; `""` leaves a process as it is.
/// Returns the output of each process, and the error output of all.
fn products(limits: &[&str]) -> (Vec<String>, String) {
    let processes = Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), limits.len());
    let mut job = Job::prepare(processes);
    for (process, limit) in limits.iter().enumerate() {
        let mut command = job.command(process);
        command.arg("products").env(variables::SIMD, limit);
        job.spawn(command);
    }
    let ended = job.wait();
    assert!(ended.iter().all(|end| end.code() == 0), "{}", job.report());
    let errors = ended.iter().map(|end| end.stderr.as_str()).collect();
    (ended.into_iter().map(|end| end.stdout).collect(), errors)
}

#[test]
fn narrowest_process_gives_the_width_and_the_bits() {
    let (narrow, errors) = products(&["baseline"; 3]);
    assert_eq!(errors, "");
    assert!(
        narrow
            .iter()
            .all(|said| said.ends_with("baseline vectors\n")),
        "{narrow:?}"
    );

    let (mixed, errors) = products(&["", "baseline", ""]);
    assert_eq!(mixed, narrow);
    let widest = processor_width();
    if widest == VectorWidth::Baseline {
        return;
    }
    let line = "mpmd: all processes compute with baseline vectors, since process 1 on host ";
    assert!(errors.starts_with(line), "{errors}");
    assert!(
        errors.contains(&format!("others have {widest}")),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");

    let (wide, errors) = products(&["", "", ""]);
    assert_eq!(errors, "");
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert!(wide.ends_with(&format!("{widest} vectors\n")), "{wide}");
        assert_ne!(wide.lines().next(), narrow.lines().next());
    }
}

#[test]
fn restarted_process_that_is_narrower_is_refused() {
    if processor_width() == VectorWidth::Baseline {
        return;
    }
    let processes = Carrier::TCP.processes(env!("CARGO_BIN_EXE_recovering"), PROCESSES);
    let mut job = Job::prepare(processes.args([STEPS.to_string()]));
    for process in 0..PROCESSES {
        let command = job.command(process);
        job.spawn(command);
    }
    job.wait_for_output_of(0, " in epoch 1\n").unwrap();
    // Until then a region has one copy, and the loss of a process could end the job.
    std::thread::sleep(UNTIL_COPIED);
    job.kill(1).unwrap();

    let mut command = job.command(1);
    command.env(variables::SIMD, "baseline");
    let refused = job.spawn(command);
    let end = job.wait_for(refused).unwrap();
    assert_eq!(end.code(), 1, "{end:?}");
    let width = processor_width();
    for part in [
        format!("the job has used {width} vectors since its start"),
        "MPMD_SIMD=baseline on all processes".to_owned(),
    ] {
        assert!(end.stderr.contains(&part), "{part} is not in {end:?}");
    }

    let command = job.command(1);
    job.spawn(command);
    let ends = job.wait();
    let sums = ends.iter().filter(|end| end.code() == 0);
    let sums: Vec<&str> = sums.filter_map(|end| end.stdout.lines().last()).collect();
    assert_eq!(sums, expected(STEPS), "{}", job.report());
}

#[test]
fn unknown_width_is_named_by_every_process() {
    let processes = Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), 2);
    let mut job = Job::prepare(processes.peer_timeout(Duration::from_secs(20)));
    for process in 0..2 {
        let mut command = job.command(process);
        command.arg("hello").env(variables::SIMD, "sse9");
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{end:?}");
        let expected = "MPMD_SIMD=sse9";
        assert!(end.stderr.contains(expected), "{}", end.stderr);
        assert!(
            end.stderr.contains("baseline, avx2, avx512"),
            "{}",
            end.stderr
        );
    }
}
