//! Two jobs, of which one publishes versions and the other takes them. Processes are killed: the
//! other job goes on, and no version is ever half of one and half of another.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use mpmd_tests::{Job, Processes, rng_of_this_run};

/// Kills, unless `MPMD_TEST_KILLS` says another number.
const KILLS: usize = 6;
const SOON: Duration = Duration::from_secs(40);

struct Ends {
    address: String,
    transport: &'static str,
    how: &'static str,
    kills: u32,
}

impl Ends {
    fn job(&self, args: &[&str]) -> Job {
        let deadline = Duration::from_secs(120) + self.kills * Duration::from_secs(20);
        let job = Processes::new(2, env!("CARGO_BIN_EXE_named")).deadline(deadline);
        Job::start(job.peer_timeout(Duration::from_secs(10)), args)
    }

    fn publisher(&self, first: u64) -> Job {
        self.job(&["publishing", &self.address, &first.to_string()])
    }

    fn subscriber(&self) -> Job {
        self.job(&["subscribing", &self.address, self.transport, self.how])
    }
}

/// Returns the last number that a process has said after this word.
fn last(job: &mut Job, process: usize, word: &str) -> u64 {
    let output = job.output(process).unwrap();
    let said = output
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(word)?.trim().parse().ok());
    said.unwrap_or(0)
}

/// Waits until both processes of a job have said a number from `least` on after this word.
fn wait_for(job: &mut Job, word: &str, least: u64) {
    let start = Instant::now();
    while (0..2).any(|process| last(job, process, word) < least) {
        let gone = (0..2).any(|process| job.has_ended(process).unwrap());
        assert!(
            !gone && start.elapsed() < SOON,
            "{word} {least}:\n{}",
            job.report()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn kill_at_random(transport: &'static str, how: &'static str) {
    let kills = std::env::var("MPMD_TEST_KILLS")
        .ok()
        .and_then(|kills| kills.parse().ok());
    let kills = kills.unwrap_or(KILLS);
    let mut random = rng_of_this_run();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let address = format!("127.0.0.1:{port}");
    let ends = Ends {
        address,
        transport,
        how,
        kills: kills as u32,
    };
    let mut first = 1;
    let (mut publisher, mut subscriber) = (ends.publisher(first), ends.subscriber());
    wait_for(&mut subscriber, "version", first);
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(random.u64(..120)));
        let victim = random.usize(..2);
        if random.bool() {
            publisher.kill(victim).unwrap();
            wait_for_link(&mut subscriber, false);
            publisher.end();
            first += 1_000_000;
            publisher = ends.publisher(first);
        } else {
            subscriber.kill(victim).unwrap();
            subscriber.end();
            let before = last(&mut publisher, 0, "published");
            wait_for(&mut publisher, "published", before + 3);
            subscriber = ends.subscriber();
        }
        let least = first.max(last(&mut publisher, 0, "published"));
        wait_for(&mut subscriber, "version", least);
    }
    publisher.end();
    subscriber.end();
}

/// Waits until both processes know that there is no link.
fn wait_for_link(job: &mut Job, is_linked: bool) {
    let start = Instant::now();
    let said = format!("linked {is_linked}");
    let lacks = |job: &mut Job, process: usize| {
        let output = job.output(process).unwrap();
        output.lines().rfind(|line| line.starts_with("linked")) != Some(&*said)
    };
    while (0..2).any(|process| lacks(job, process)) {
        assert!(start.elapsed() < SOON, "{said}:\n{}", job.report());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn killed_ends_leave_whole_versions_over_shm() {
    kill_at_random("shm", "whole");
}

#[test]
fn killed_ends_leave_whole_versions_by_changes_over_tcp() {
    kill_at_random("tcp", "changes");
}
