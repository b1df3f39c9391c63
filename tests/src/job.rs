//! The processes of one job, started by the test itself.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_transport::rendezvous::{Server, ServerConfig, Token};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::carriers::Carrier;
use crate::left::SharedMemory;
use crate::watched::{Ended, Watched, processes_of};

/// Default time limit of a job. No test needs it all, but a slow machine must not look like a hang.
const LONG: Duration = Duration::from_secs(60);

/// Time after which new shared memory is certainly not another job's.
const REMOVED_WITHIN: Duration = Duration::from_secs(10);

/// Settings of a [`Job`].
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// The file of the program `named`: `env!("CARGO_BIN_EXE_named")` in a test.
    pub program: PathBuf,
    /// Number of processes.
    pub processes: usize,
    /// The peer timeout of the processes.
    pub peer_timeout: Duration,
    /// The time limit of the job.
    pub limit: Duration,
    /// The transport between the processes.
    pub carrier: Carrier,
}

impl JobOptions {
    /// Returns options for `processes` times `program` over tcp, with a peer timeout of 30 seconds
    /// and a time limit of 60 seconds.
    pub fn new(program: impl Into<PathBuf>, processes: usize) -> Self {
        Self {
            program: program.into(),
            processes,
            peer_timeout: LONG / 2,
            limit: LONG,
            carrier: Carrier::TCP,
        }
    }

    /// Sets the transport between the processes.
    #[must_use]
    pub fn over(mut self, carrier: Carrier) -> Self {
        self.carrier = carrier;
        self
    }

    /// Sets the peer timeout of the processes.
    #[must_use]
    pub fn peer_timeout(mut self, peer_timeout: Duration) -> Self {
        self.peer_timeout = peer_timeout;
        self
    }

    /// Sets the time limit of the job, counted from [`Job::prepare`].
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// A running job: a rendezvous service in this process, and processes that connect to it.
///
/// Dropping it kills them all, also when the test fails.
pub struct Job {
    /// The processes in the order of their start, mostly by number.
    pub processes: Vec<Watched>,
    options: JobOptions,
    token: Token,
    server: Server,
    deadline: Instant,
    shared_memory: SharedMemory,
    // Declared last: the processes write there.
    folder: TempDir,
}

/// The result of a job in which one process was [injected a fault](Job::inject_fault).
pub struct FaultOutcome {
    /// The results of the other processes, by process number.
    pub ended: Vec<Ended>,
    /// Time from the signal to the end of the last of the other processes.
    pub took: Duration,
    /// The output of all processes.
    pub report: String,
}

impl Job {
    /// Starts the rendezvous service and the time limit of a job, but no process yet.
    ///
    /// # Panics
    ///
    /// If no port or no folder is available.
    pub fn prepare(options: JobOptions) -> Self {
        let token = Token::random().expect("random numbers");
        let config = ServerConfig {
            processes: options.processes,
            token: token.clone(),
            peer_timeout: options.peer_timeout,
        };
        let server =
            Server::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), config).expect("a port");
        let folder = tempfile::tempdir().expect("a folder for the test");
        let deadline = Instant::now() + options.limit;
        let shared_memory = SharedMemory::now();
        Self { processes: Vec::new(), options, token, server, deadline, shared_memory, folder }
    }

    /// Starts all processes of a job, each with these arguments.
    ///
    /// # Panics
    ///
    /// If no port or no folder is available, or a process cannot be started.
    pub fn start(options: JobOptions, args: &[&str]) -> Self {
        let mut job = Self::prepare(options);
        for process in 0..job.options.processes {
            let mut command = job.command(process);
            command.args(args);
            job.spawn(command);
        }
        job
    }

    /// Returns the command by which a launcher would start process `process`, without arguments
    /// yet.
    pub fn command(&self, process: usize) -> Command {
        let mut command = bare_command(&self.options.program);
        self.options.carrier.set(&mut command);
        command
            .current_dir(self.folder.path())
            .env(variables::RANK, process.to_string())
            .env(variables::WORLD_SIZE, self.options.processes.to_string())
            .env(variables::LOCAL_RANK, process.to_string())
            .env(variables::COORDINATOR, self.server.address().to_string())
            .env(variables::HOSTED, "1")
            .env(variables::JOB_TOKEN, self.token.to_hex())
            .env(variables::PEER_TIMEOUT, self.options.peer_timeout.as_secs_f64().to_string())
            .env(variables::LAUNCHER_PID, std::process::id().to_string());
        command
    }

    /// Starts one more process with this command; returns its index in [`Job::processes`].
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn spawn(&mut self, command: Command) -> usize {
        let name = format!("process-{}", self.processes.len());
        self.processes.push(Watched::start(command, self.folder.path(), &name));
        self.processes.len() - 1
    }

    /// Returns the test's own folder, which is deleted with the job.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the time by which the job must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits until every process has printed `text`.
    ///
    /// # Panics
    ///
    /// If one ends without it, or if the job's time is over.
    pub fn wait_for_output(&mut self, text: &str) {
        for process in &mut self.processes {
            process.wait_for_output(text, self.deadline);
        }
    }

    /// Waits for the end of all processes, with any exit codes.
    ///
    /// # Panics
    ///
    /// If one goes on beyond the job's time, or if processes or shared memory of the job are left.
    pub fn wait(&mut self) -> Vec<Ended> {
        while !self.all_have_ended() {
            assert!(
                Instant::now() < self.deadline,
                "the job goes on beyond its time:\n{}",
                self.report()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = processes_of(&self.token.to_hex());
        assert!(left.is_empty(), "processes {left:?} are left:\n{}", self.report());
        self.check_shared_memory();
        let deadline = self.deadline;
        self.processes.iter_mut().map(|process| process.wait(deadline)).collect()
    }

    fn check_shared_memory(&self) {
        let pids: Vec<u32> = self.processes.iter().map(Watched::pid).collect();
        // Named shared memory may belong to another job, which removes it again.
        let until = Instant::now() + REMOVED_WITHIN;
        loop {
            let left = self.shared_memory.left(&pids);
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "shared memory {left:?} is left:\n{}", self.report());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn all_have_ended(&mut self) -> bool {
        // Checks every process: the end of a process is the time at which it was first noticed.
        let running = self.processes.iter_mut().map(|process| usize::from(!process.has_ended()));
        running.sum::<usize>() == 0
    }

    /// Waits for the end of all processes, which must succeed; returns the output of each.
    ///
    /// # Panics
    ///
    /// If a process failed or goes on beyond the job's time, or if processes or shared memory of
    /// the job are left.
    pub fn wait_well(&mut self) -> Vec<String> {
        let ended = self.wait();
        assert!(ended.iter().all(|end| end.code == 0), "a process failed:\n{}", self.report());
        ended.into_iter().map(|end| end.stdout).collect()
    }

    /// Sends process `victim` a signal that kills or stops it, and waits for the end of all others.
    /// Then kills the victim, if it is only stopped.
    ///
    /// # Panics
    ///
    /// If a process goes on beyond the job's time, or if processes or shared memory of the job are
    /// left.
    pub fn inject_fault(&mut self, victim: usize, signal: Signal) -> FaultOutcome {
        let begin = Instant::now();
        self.processes[victim].signal(signal);
        let deadline = self.deadline;
        let all = self.processes.iter_mut().enumerate();
        let others = all.filter(|(process, _)| *process != victim);
        let ended: Vec<Ended> = others.map(|(_, process)| process.wait(deadline)).collect();
        let last = ended.iter().map(|end| end.at).max().unwrap_or(begin);
        // A stopped process does not end by itself.
        self.processes[victim].signal(Signal::KILL);
        // Also checks that nothing is left.
        self.wait();
        FaultOutcome { ended, took: last - begin, report: self.report() }
    }

    /// Returns the output of all processes, for the message of a failed test.
    pub fn report(&self) -> String {
        self.processes.iter().map(Watched::report).collect::<Vec<_>>().join("\n")
    }
}

/// Returns a command for `program` without the variables of launchers and without the user's
/// settings.
pub fn bare_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let others = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "JOB_COMPLETION_INDEX", "UCX_TLS"];
    let prefixes = ["MPMD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "MASTER_", "TORCHELASTIC_"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if others.contains(&&*text) || prefixes.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}
