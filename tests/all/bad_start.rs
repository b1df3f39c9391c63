//! Jobs that cannot be formed: every process that was started soon ends and reports the cause.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_rendezvous::Token;
use mpmd_tests::{Carrier, Job, ProcessEnd, Processes, Sandbox};

/// The peer timeout of these jobs.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// Far more than the job takes, and far less than the default peer timeout.
const PROMPT: Duration = Duration::from_secs(20);

fn options(processes: usize) -> Processes {
    Carrier::TCP
        .processes(env!("CARGO_BIN_EXE_named"), processes)
        .peer_timeout(TIME_LIMIT)
}

/// Runs a process without a launcher, with these variables.
fn alone(vars: &[(&str, &str)]) -> ProcessEnd {
    let site = Sandbox::new().unwrap();
    let mut command = site.command(env!("CARGO_BIN_EXE_named"));
    command.arg("hello").envs(vars.iter().copied());
    site.start(command, "process")
        .unwrap()
        .wait(Instant::now() + PROMPT)
        .unwrap()
}

fn refused(vars: &[(&str, &str)], expected: &[&str]) {
    let end = alone(vars);
    assert_eq!(end.code(), 1, "{end:?}");
    for expected in expected {
        assert!(
            end.stderr.contains(expected),
            "{expected:?} is not in: {}",
            end.stderr
        );
    }
    assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
}

fn hello(mut command: Command) -> Command {
    command.arg("hello");
    command
}

#[test]
fn job_of_one_process_needs_no_variables() {
    let end = alone(&[]);
    assert_eq!(
        (end.code(), end.stdout.as_str()),
        (0, "hello from process 0 of 1: 42\n"),
        "{}",
        end.stderr
    );
}

#[test]
fn process_0_hosts_the_rendezvous_without_a_launcher() {
    let mut hosts = vec!["127.0.0.1".to_owned()];
    hosts.extend(ipv6_hosts());
    for host in hosts {
        hosted_by_process_0(&host);
    }
}

/// Returns IPv6 addresses of this host: that of the loopback interface, and one with a zone. Empty
/// on a host without IPv6.
fn ipv6_hosts() -> Vec<String> {
    let interfaces = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let link_local = interfaces.lines().find(|line| line.starts_with("fe80"));
    let link_local = link_local.map(|line| {
        let name = line.split_whitespace().last().unwrap();
        let bits = u128::from_str_radix(&line[..32], 16).unwrap();
        format!("[{}%{name}]", std::net::Ipv6Addr::from_bits(bits))
    });
    let loopback = interfaces
        .lines()
        .any(|line| line.ends_with(" lo"))
        .then(|| "[::1]".to_owned());
    loopback.into_iter().chain(link_local).collect()
}

fn hosted_by_process_0(host: &str) {
    // Free a moment ago; nothing else here takes ports of its own choice.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|taken| taken.local_addr());
    let coordinator = format!("{host}:{}", port.expect("a port").port());
    let mut job = Job::prepare(options(3).peer_timeout(PROMPT));
    // The process that the others look for comes last.
    for process in [2, 1, 0] {
        let mut command = hello(job.command(process));
        command
            .env_remove(variables::HOSTED)
            .env(variables::COORDINATOR, &coordinator);
        job.spawn(command);
    }
    let said = job.wait_well().concat();
    for process in 0..3 {
        let expected = format!("hello from process {process} of 3: 42\n");
        assert!(said.contains(&expected), "{coordinator}: {said}");
    }
}

#[test]
fn taken_port_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let token = Token::random().expect("random numbers").to_hex();
    let vars = [
        (variables::RANK, "0"),
        (variables::WORLD_SIZE, "2"),
        (variables::COORDINATOR, &address),
        (variables::JOB_TOKEN, &token),
        (variables::PEER_TIMEOUT, "2"),
    ];
    refused(
        &vars,
        &["cannot listen at", &address, variables::COORDINATOR],
    );
}

#[test]
fn host_without_an_address_is_named_with_its_variable() {
    // Too long for a name, so no resolver is asked.
    let address = format!("{}:29500", "x".repeat(64));
    let token = Token::random().expect("random numbers").to_hex();
    for (rank, warning) in [
        ("0", "MPMD_COORDINATOR: the host of xx"),
        ("1", "MPMD_COORDINATOR"),
    ] {
        let vars = [
            (variables::RANK, rank),
            (variables::WORLD_SIZE, "2"),
            (variables::COORDINATOR, &address),
            (variables::JOB_TOKEN, &token),
            (variables::PEER_TIMEOUT, "1"),
        ];
        let reason = "(the address is that of MPMD_COORDINATOR)";
        refused(&vars, &[warning, reason]);
    }
}

#[test]
fn wrong_token_is_refused_and_the_job_goes_on() {
    let mut job = Job::prepare(options(2).peer_timeout(PROMPT));
    let first = hello(job.command(0));
    job.spawn(first);
    let mut stranger = hello(job.command(1));
    stranger.env(
        variables::JOB_TOKEN,
        Token::random().expect("random numbers").to_hex(),
    );
    let place = job.spawn(stranger);
    let end = job.wait_for(place).unwrap();
    assert_eq!(end.code(), 1, "{end:?}");
    assert!(
        end.stderr.contains("the job token is probably wrong"),
        "{}",
        end.stderr
    );
    let second = hello(job.command(1));
    job.spawn(second);
    let codes: Vec<i32> = job.wait().iter().map(|end| end.code()).collect();
    assert_eq!(codes, [0, 1, 0], "{}", job.report());
}

#[test]
fn missing_processes_are_named_by_all_others() {
    let mut job = Job::prepare(options(4));
    for process in [0, 2] {
        let command = hello(job.command(process));
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{end:?}");
        assert!(
            end.stderr
                .contains("processes 1 and 3 of 4 have not joined after 2s"),
            "{}",
            end.stderr
        );
    }
}

#[test]
fn unreachable_rendezvous_error_names_the_address() {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|taken| taken.local_addr());
    let address = free.expect("a port").to_string();
    let token = Token::random().expect("random numbers").to_hex();
    let vars = [
        (variables::RANK, "1"),
        (variables::WORLD_SIZE, "2"),
        (variables::COORDINATOR, &address),
        (variables::JOB_TOKEN, &token),
        (variables::PEER_TIMEOUT, "2"),
    ];
    refused(&vars, &["could not be reached within 2s", &address]);
}

#[test]
fn duplicate_process_is_refused_and_the_job_goes_on() {
    let mut job = Job::prepare(options(2).peer_timeout(PROMPT));
    let first = hello(job.command(0));
    job.spawn(first);
    // Either of the two may join first.
    let deadline = job.deadline();
    let second = hello(job.command(0));
    job.spawn(second);
    while !(0..2).any(|process| job.has_ended(process).unwrap()) {
        assert!(
            Instant::now() < deadline,
            "neither is refused\n{}",
            job.report()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let refused = usize::from(job.has_ended(1).unwrap());
    let end = job.wait_for(refused).unwrap();
    assert_eq!(end.code(), 1, "{end:?}");
    assert!(
        end.stderr.contains("process 0 is already in the job"),
        "{}",
        end.stderr
    );
    let pid = format!("with pid {}", job.pids()[1 - refused]);
    assert!(end.stderr.contains(&pid), "{pid}: {}", end.stderr);
    let other = hello(job.command(1));
    job.spawn(other);
    let mut codes: Vec<i32> = job.wait().iter().map(|end| end.code()).collect();
    codes.sort();
    assert_eq!(codes, [0, 0, 1], "{}", job.report());
}

#[test]
fn process_with_another_job_size_is_refused() {
    let mut job = Job::prepare(options(2));
    let mut other = hello(job.command(1));
    other.env(variables::WORLD_SIZE, "3");
    job.spawn(other);
    let end = job.wait().remove(0);
    assert_eq!(end.code(), 1, "{end:?}");
    assert!(
        end.stderr
            .contains("was started for a job of 3 processes, but this job has 2"),
        "{}",
        end.stderr
    );
}

#[test]
fn incomplete_variables_are_named() {
    refused(
        &[(variables::RANK, "0")],
        &[variables::WORLD_SIZE, "is not set", "MPMD_RANK=0"],
    );
    refused(
        &[(variables::WORLD_SIZE, "2")],
        &[variables::RANK, "is not set"],
    );
    let no_coordinator = [(variables::RANK, "0"), (variables::WORLD_SIZE, "2")];
    refused(&no_coordinator, &[variables::COORDINATOR, "is not set"]);
    refused(
        &[("RANK", "0"), ("WORLD_SIZE", "2")],
        &["torchrun", "MASTER_ADDR", "is not set"],
    );
}

#[test]
fn invalid_values_are_shown() {
    let token = Token::random().expect("random numbers").to_hex();
    let with = |name: &'static str, value: &'static str| {
        let mut vars = vec![
            (variables::RANK, "0"),
            (variables::WORLD_SIZE, "2"),
            (variables::COORDINATOR, "127.0.0.1:1"),
            (variables::JOB_TOKEN, token.as_str()),
            (variables::PEER_TIMEOUT, "2"),
        ];
        vars.retain(|(known, _)| *known != name);
        vars.push((name, value));
        vars
    };
    for (name, value) in [
        (variables::RANK, "first"),
        (variables::WORLD_SIZE, "-2"),
        (variables::COORDINATOR, "nowhere"),
        (variables::PEER_TIMEOUT, "soon"),
        (variables::DEVICES_PER_PROCESS, "many"),
        (variables::SPIN, "often"),
    ] {
        refused(&with(name, value), &[name, value]);
    }
    for (name, value) in [(variables::RANK, "2"), (variables::WORLD_SIZE, "0")] {
        refused(
            &with(name, value),
            &[variables::RANK, "below the number of processes"],
        );
    }
    refused(&with(variables::JOB_TOKEN, "abc"), &[variables::JOB_TOKEN]);
}

#[test]
fn unknown_transport_is_named_by_every_process() {
    let mut job = Job::prepare(options(2));
    for process in 0..2 {
        let mut command = hello(job.command(process));
        command.env(variables::TRANSPORT, "pigeon");
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code(), 1, "{end:?}");
        assert!(
            end.stderr.contains("MPMD_TRANSPORT=pigeon"),
            "{}",
            end.stderr
        );
    }
}

/// Runs a job with one process for each transport name. The rendezvous service is the launcher's if
/// `hosted`, otherwise process 0's.
fn with_transports(names: &[&str], hosted: bool) -> Vec<ProcessEnd> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|taken| taken.local_addr());
    let coordinator = port.expect("a port").to_string();
    // Longer than the job's own limit: no test waits for it.
    let mut job = Job::prepare(options(names.len()).peer_timeout(Duration::from_secs(600)));
    for (process, name) in names.iter().enumerate() {
        let mut command = hello(job.command(process));
        command.env(variables::TRANSPORT, name);
        if !hosted {
            command
                .env_remove(variables::HOSTED)
                .env(variables::COORDINATOR, &coordinator);
        }
        job.spawn(command);
    }
    job.wait()
}

#[test]
fn different_transports_are_reported_by_all() {
    for hosted in [true, false] {
        for end in with_transports(&["tcp", "ucx", "tcp"], hosted) {
            assert_eq!(end.code(), 1, "{end:?}");
            let expected =
                "processes 0 and 2 say tcp, process 1 says ucx; MPMD_TRANSPORT must be the same";
            assert!(end.stderr.contains(expected), "{}", end.stderr);
        }
        for end in with_transports(&["shm", "auto", "shm", "tcp"], hosted) {
            assert_eq!(end.code(), 1, "{end:?}");
            let expected = "process 1 says auto, processes 0 and 2 say shm, process 3 says tcp";
            assert!(end.stderr.contains(expected), "{}", end.stderr);
        }
        for end in with_transports(&["pigeon", "tcp"], hosted) {
            assert_eq!(end.code(), 1, "{end:?}");
            assert!(
                end.stderr
                    .contains("process 0 says pigeon, process 1 says tcp"),
                "{}",
                end.stderr
            );
        }
    }
}

#[cfg(not(feature = "ucx"))]
#[test]
fn a_transport_that_is_not_compiled_in_ends_the_job_at_once() {
    for hosted in [true, false] {
        for end in with_transports(&["ucx", "ucx", "ucx"], hosted) {
            assert_eq!(end.code(), 1, "{end:?}");
            for expected in ["the transport ucx is not available", "--features ucx"] {
                assert!(
                    end.stderr.contains(expected),
                    "{expected:?} is not in: {}",
                    end.stderr
                );
            }
        }
    }
}

/// Makes a copy of the tests' program with another build id, or with one more byte if it has no
/// build id.
fn another_build(folder: &std::path::Path) -> std::path::PathBuf {
    let mut bytes = std::fs::read(env!("CARGO_BIN_EXE_named")).expect("the program is there");
    let note = [3, 0, 0, 0, b'G', b'N', b'U', 0];
    match bytes[..64 << 10]
        .windows(note.len())
        .position(|found| found == note)
    {
        Some(at) => bytes[at + note.len()] ^= 1,
        None => bytes.push(1),
    }
    let path = folder.join("named");
    std::fs::write(&path, bytes).expect("the folder is ours");
    let program = std::fs::metadata(env!("CARGO_BIN_EXE_named")).expect("the program is there");
    std::fs::set_permissions(&path, program.permissions()).expect("the file is ours");
    path
}

#[test]
fn another_build_or_device_count_is_reported_by_all() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let other = another_build(folder.path());
    for by_build in [true, false] {
        let mut job = Job::prepare(options(3).peer_timeout(PROMPT));
        for process in 0..3 {
            let mut command = hello(job.command(process));
            if process == 1 && by_build {
                let vars: Vec<_> = command
                    .get_envs()
                    .map(|(k, v)| (k.to_owned(), v.map(ToOwned::to_owned)))
                    .collect();
                let place = command
                    .get_current_dir()
                    .map(ToOwned::to_owned)
                    .expect("the job's folder");
                command = hello(Command::new(&other));
                command.current_dir(place);
                for (name, value) in vars {
                    match value {
                        Some(value) => command.env(name, value),
                        None => command.env_remove(name),
                    };
                }
            } else if process == 1 {
                command.env(variables::DEVICES_PER_PROCESS, "2");
            }
            job.spawn(command);
        }
        let ended = job.wait();
        for end in &ended {
            assert_eq!(end.code(), 1, "{end:?}");
            assert_eq!(
                end.stderr.matches("named, build ").count(),
                2,
                "{}",
                end.stderr
            );
            assert!(end.stderr.contains("process 1 on host "), "{}", end.stderr);
            let both = end.stderr.contains(", 3 devices\"") && end.stderr.contains(", 6 devices\"");
            assert_eq!(both, !by_build, "{}", end.stderr);
        }
    }
}
