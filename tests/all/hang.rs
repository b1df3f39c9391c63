//! A kernel that never ends, in the middle of a pipeline: every process reports the chain of waits
//! to that kernel.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    every_process_shows_the_chain_to_the_kernel_that_never_ends
    ended_process_shows_the_chain_too
}

const PROCESSES: usize = 4;

/// The start of the line about the kernel that never ends.
const ROOT: &str = "device 2 is at operation ";

/// Starts a job and waits until each process has printed a report of waits for which `is_enough` is
/// true. Returns the first such report of each.
fn reports(
    carrier: Carrier,
    args: &[&str],
    is_enough: impl Fn(usize, &str) -> bool,
) -> Vec<String> {
    let options = carrier.processes(env!("CARGO_BIN_EXE_named"), PROCESSES);
    let mut job = Job::start(options.peer_timeout(Duration::from_secs(3)), args);
    let find = |job: &mut Job, process: usize| {
        let said = job.error_output(process).unwrap();
        let mut reports = said.split("mpmd: still waiting").skip(1);
        reports
            .find(|report| is_enough(process, report))
            .map(str::to_owned)
    };
    loop {
        let found: Option<Vec<String>> = (0..PROCESSES)
            .map(|process| find(&mut job, process))
            .collect();
        if let Some(found) = found {
            return found;
        }
        assert!(
            Instant::now() < job.deadline(),
            "not every process shows the root:\n{}",
            job.report()
        );
        for process in 0..PROCESSES {
            assert!(!job.has_ended(process).unwrap(), "{}", job.report());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns true if the root cause is named with its stage and microbatch, its line, and its running
/// time.
fn names_the_root(report: &str) -> bool {
    report.lines().any(|line| {
        let Some((_, root)) = line.split_once(ROOT) else {
            return false;
        };
        root.contains("(jit Stuck on ")
            && root.contains("; stage 2, microbatch 1, forward) at tests/src/programs/stuck.rs:")
            && root.contains(", for ")
            && root.contains(" s")
    })
}

fn every_process_shows_the_chain_to_the_kernel_that_never_ends(carrier: Carrier) {
    let links = |process: usize| match process {
        // The gradients come from later stages: process 0 waits for process 1, which waits for the
        // computing process 2.
        0 => vec![
            (
                "process 0: operation ",
                "stage 1, microbatch 0, input gradient on its way",
                "from process 1",
            ),
            (
                "process 1 waits in operation ",
                "stage 2, microbatch 0, input gradient on its way",
                "from process 2",
            ),
        ],
        1 => vec![(
            "process 1: operation ",
            "stage 2, microbatch 0, input gradient on its way",
            "from process 2",
        )],
        3 => vec![(
            "process 3: operation ",
            "stage 2, microbatch 1, outputs on their way",
            "from process 2",
        )],
        _ => vec![("process 2: ", "stuck.rs:", "waits for ")],
    };
    let has_links = |process: usize, report: &str| {
        links(process).into_iter().all(|(start, what, whom)| {
            let link = |line: &str| {
                line.contains(start)
                    && line.contains(what)
                    && line.contains(whom)
                    && line.contains("stuck.rs:")
            };
            report.lines().any(link)
        })
    };
    reports(carrier, &["stuck"], |process, report| {
        names_the_root(report) && has_links(process, report)
    });
}

fn ended_process_shows_the_chain_too(carrier: Carrier) {
    let found = reports(carrier, &["stuck", "sending"], |_, report| {
        names_the_root(report)
    });
    // The first two processes have sent all their data.
    for (process, report) in found[..2].iter().enumerate() {
        let ended = format!("process {process} has ended, and waits for others");
        let finishing = format!("process {process}: finish waits for ");
        assert!(
            report.contains(&ended) || report.contains(&finishing),
            "{report}"
        );
    }
}
