//! The process that runs the rendezvous service is lost, as under a launcher that runs none.
//! Another one goes on with it, and the results have the bits of an undisturbed job.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Sandbox, Watched, over_each_carrier};
use rustix::process::Signal;

use crate::recovery::{LONG, PROCESSES, STEPS, UNTIL_COPIED, expected};

over_each_carrier! {
    each_process_that_runs_the_service_is_killed
    job_shrinks_without_the_process_that_runs_the_service
    process_that_wakes_after_the_end_runs_nothing
}

/// The peer timeout in seconds.
const PEER_TIMEOUT: &str = "10";

/// The processes of a job, by the numbers with which they were started.
struct Ranks {
    ranks: Vec<Watched>,
    until: Instant,
    site: Sandbox,
}

impl Ranks {
    /// Starts the program with these spares. Process 0 runs the rendezvous service.
    fn start(carrier: Carrier, spares: usize, steps: usize, args: &[&str]) -> Self {
        let site = Sandbox::new().unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let coordinator = free.local_addr().expect("it is bound").to_string();
        drop(free);
        let start = |rank: usize| {
            let mut command = site.command(env!("CARGO_BIN_EXE_recovering"));
            command.arg(steps.to_string()).args(args);
            carrier.set(&mut command);
            command.env(variables::RANK, rank.to_string());
            command.env(variables::WORLD_SIZE, PROCESSES.to_string());
            command.env(variables::SPARES, spares.to_string());
            command.env(variables::COORDINATOR, &coordinator);
            command.env(variables::JOB_TOKEN, "5".repeat(64));
            command.env(variables::PEER_TIMEOUT, PEER_TIMEOUT);
            site.start(command, &format!("rank-{rank}")).unwrap()
        };
        let ranks: Vec<Watched> = (0..PROCESSES + spares).map(start).collect();
        Self {
            ranks,
            until: Instant::now() + LONG * (steps / STEPS) as u32,
            site,
        }
    }

    fn said(&self) -> String {
        let said = |rank: &Watched| rank.output() + &rank.error_output();
        self.ranks
            .iter()
            .map(said)
            .collect::<Vec<_>>()
            .join("\n--\n")
    }

    /// Waits until some process has said this.
    fn wait_for(&self, text: &str) {
        while !self.said().contains(text) {
            assert!(Instant::now() < self.until, "{text}: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(UNTIL_COPIED);
    }

    /// Returns the process that is longest in the job, which runs the service: of those with the
    /// same first epoch the one with the lowest place.
    fn longest(&mut self) -> usize {
        let said = self.said();
        let first = |pid: u32| {
            let has = format!(" has pid {pid} in epoch ");
            let (before, after) = said.split_once(&has)?;
            let place: u32 = before.rsplit(' ').next()?.parse().ok()?;
            Some((after.lines().next()?.parse::<u64>().ok()?, place))
        };
        let alive = self
            .ranks
            .iter_mut()
            .enumerate()
            .filter_map(|(rank, process)| {
                let since = first(process.pid()).filter(|_| !process.has_ended())?;
                Some((since, rank))
            });
        alive
            .min()
            .map(|(_, rank)| rank)
            .expect("some are in the job")
    }

    /// Kills a process, and waits until the others are in this epoch.
    fn kill(&mut self, rank: usize, epoch: u64) {
        assert!(!self.ranks[rank].has_ended(), "{}", self.said());
        self.ranks[rank].signal(Signal::KILL).unwrap();
        self.wait_for(&format!("epoch {epoch} goes on after step "));
    }

    /// Waits for the end of all processes. Returns the sums of those that end well.
    fn sums(mut self) -> (Vec<String>, String) {
        let until = self.until;
        let ends: Vec<_> = self
            .ranks
            .iter_mut()
            .map(|rank| rank.wait(until).unwrap())
            .collect();
        let said = self.said();
        assert_eq!(self.site.processes(), [0; 0], "nothing is left");
        let well = ends.iter().filter(|end| end.code() == 0);
        let sums = well.flat_map(|end| end.stdout.lines().filter(|line| line.starts_with("sum ")));
        (sums.map(str::to_owned).collect(), said)
    }
}

/// With as many kills as processes only spares are left at the end. MPMD_TEST_KILLS sets their
/// number.
fn each_process_that_runs_the_service_is_killed(carrier: Carrier) {
    let kills = std::env::var("MPMD_TEST_KILLS")
        .ok()
        .and_then(|text| text.parse().ok());
    let kills: usize = kills.unwrap_or(PROCESSES);
    let steps = STEPS * kills.div_ceil(PROCESSES);
    let mut job = Ranks::start(carrier, kills, steps, &[]);
    job.wait_for(" in epoch 1\n");
    for epoch in (2..).take(kills) {
        let longest = job.longest();
        job.kill(longest, epoch);
    }
    let (sums, said) = job.sums();
    assert_eq!(sums, expected(steps), "{said}");
}

fn job_shrinks_without_the_process_that_runs_the_service(carrier: Carrier) {
    let mut job = Ranks::start(carrier, 0, STEPS, &["shrink"]);
    job.wait_for(" in epoch 1\n");
    job.kill(0, 2);
    job.kill(1, 3);
    let (sums, said) = job.sums();
    assert_eq!(sums, expected(STEPS)[..1], "{said}");
}

/// Nobody listens any more when it wakes, as if all others had died.
fn process_that_wakes_after_the_end_runs_nothing(carrier: Carrier) {
    let mut job = Ranks::start(carrier, 0, STEPS, &["shrink"]);
    job.wait_for(" in epoch 1\n");
    let mut sleeper = job.ranks.remove(PROCESSES - 1);
    sleeper.signal(Signal::STOP).unwrap();
    for rank in &mut job.ranks {
        let end = rank.wait(job.until).unwrap();
        assert_eq!(end.code(), 0, "{end:?}");
        assert!(end.stdout.contains(&expected(STEPS)[0]), "{end:?}");
    }
    sleeper.signal(Signal::CONT).unwrap();
    let end = sleeper.wait(job.until).unwrap();
    assert_eq!(end.code(), 1, "{end:?}");
    assert!(
        end.stderr.contains("they may have ended the job"),
        "{end:?}"
    );
    assert!(!end.stdout.contains("sum "), "{end:?}");
    assert_eq!(job.site.processes(), [0; 0], "nothing is left");
}

/// The process that runs the service is killed while another one leaves, which then runs it.
#[test]
fn process_that_leaves_goes_on_with_the_service() {
    let job = Ranks::start(Carrier::TCP, 0, STEPS, &["hold"]);
    let (sums, said) = job.sums();
    assert!(said.contains("it was not needed"), "{said}");
    assert_eq!(sums, expected(STEPS)[..1], "{said}");
}

/// Another process runs the service as soon as the first has left, and is lost later.
#[test]
fn process_that_runs_the_service_leaves() {
    let mut job = Ranks::start(Carrier::TCP, 1, STEPS, &["leave"]);
    job.wait_for("epoch 2 goes on after step ");
    job.kill(1, 3);
    let (sums, said) = job.sums();
    assert!(said.contains("it was not needed"), "{said}");
    assert_eq!(sums, expected(STEPS)[..2], "{said}");
}
