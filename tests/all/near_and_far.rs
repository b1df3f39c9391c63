//! The default transport: shared memory between processes of one host that can share it, otherwise
//! sockets.

use mpmd_core::launch::variables;
use mpmd_tests::programs::simulated;
use mpmd_tests::{Carrier, Job, bare_command};

const PROCESSES: usize = 4;

fn prepare(processes: usize) -> Job {
    Job::prepare(Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), processes))
}

/// Runs a job with one process per host name. Returns the output of each process, and all error
/// output.
fn on_hosts(hosts: &[&str], program: &str) -> (Vec<String>, String) {
    let mut job = prepare(hosts.len());
    for (process, host) in hosts.iter().enumerate() {
        let mut command = job.command(process);
        command
            .arg(program)
            .env_remove(variables::TRANSPORT)
            .env(variables::HOST, host);
        job.spawn(command);
    }
    let ended = job.wait();
    assert!(ended.iter().all(|end| end.code() == 0), "{}", job.report());
    let errors = ended.iter().map(|end| end.stderr.as_str()).collect();
    (ended.into_iter().map(|end| end.stdout).collect(), errors)
}

#[test]
fn default_is_shared_memory_per_host_and_sockets_between() {
    for (hosts, expected) in [
        (["here"; PROCESSES], ["shm"; PROCESSES]),
        (["left", "left", "right", "right"], ["shm+tcp"; PROCESSES]),
        (
            ["left", "right", "left", "left"],
            ["shm+tcp", "tcp", "shm+tcp", "shm+tcp"],
        ),
        (["a", "b", "c", "d"], ["tcp"; PROCESSES]),
    ] {
        let (said, errors) = on_hosts(&hosts, "transport");
        assert_eq!(
            said,
            expected.map(|name| format!("over {name}\n")),
            "{hosts:?}"
        );
        assert_eq!(errors, "", "{hosts:?}: as it should be");
    }
}

#[test]
fn results_do_not_depend_on_hosts() {
    for program in ["transfers", "eager_limit", "jit_and_transfer"] {
        let expected = simulated(program, PROCESSES, &[]);
        for hosts in [
            ["here"; PROCESSES],
            ["left", "left", "right", "right"],
            ["left", "right", "left", "left"],
        ] {
            assert_eq!(
                on_hosts(&hosts, program).0,
                expected,
                "{program} on {hosts:?}"
            );
        }
    }
}

/// Returns a command for a process with a low limit on file sizes. It cannot make memory that
/// others can map.
fn with_short_files(job: &Job, process: usize) -> std::process::Command {
    let mut command = bare_command("sh");
    command.args([
        "-c",
        r#"ulimit -f 4 && exec "$0" "$@""#,
        env!("CARGO_BIN_EXE_named"),
    ]);
    let like = job.command(process);
    let variables = like
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command.envs(variables).env_remove(variables::TRANSPORT);
    command.current_dir(job.folder());
    command
}

#[test]
fn process_without_shared_memory_uses_tcp_and_warns_once() {
    let mut job = prepare(3);
    for process in 0..3 {
        let mut command = if process == 1 {
            with_short_files(&job, 1)
        } else {
            job.command(process)
        };
        command.arg("transport").env_remove(variables::TRANSPORT);
        job.spawn(command);
    }
    let ended = job.wait();
    let said: Vec<&str> = ended.iter().map(|end| end.stdout.as_str()).collect();
    assert_eq!(
        said,
        ["over shm+tcp\n", "over tcp\n", "over shm+tcp\n"],
        "{}",
        job.report()
    );
    let errors: Vec<&str> = ended.iter().flat_map(|end| end.stderr.lines()).collect();
    let [line] = errors[..] else {
        panic!("one line for the job\n{}", job.report())
    };
    for part in [
        "processes 0 and 1 are on host",
        "talk over tcp",
        "memfd_create",
        "ulimit -f",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

#[test]
fn requested_but_missing_shared_memory_ends_the_job() {
    let mut job = prepare(2);
    for process in 0..2 {
        let mut command = if process == 1 {
            with_short_files(&job, 1)
        } else {
            job.command(process)
        };
        command.arg("hello").env(variables::TRANSPORT, "shm");
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{end:?}");
        for part in ["the transport shm is not available", "ulimit -f"] {
            assert!(end.stderr.contains(part), "{part} is not in {}", end.stderr);
        }
    }
}
