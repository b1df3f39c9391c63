//! Supervision of a job's processes: starts them, forwards signals, and waits until all have ended.
//! After a first failure it ends the others, and finds the cause for the `Outcome`.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;
use mpmd_transport::deadline::after;
use mpmd_transport::rendezvous::Server;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, kill_process_group, waitid,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::cause::{ExitKind, Failure, Known};
use super::error::LaunchError;
use super::output::{self, Stream};
use super::replace::{LOOK, Replacing};
use super::spawn::{Launch, OutputMode};

/// The end of a job.
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct Outcome {
    /// The failure that ended the job, if one did.
    pub first_failure: Option<Failure>,
    /// Exit code of each process, by process: 128 plus the signal's number for a process that a
    /// signal ended.
    pub codes: Vec<i32>,
}

impl Outcome {
    /// Returns the exit code for the job: that of the process at fault, or 0 if no process failed.
    pub fn code(&self) -> i32 {
        self.first_failure.as_ref().map_or(0, Failure::code)
    }
}

impl Launch {
    /// Starts the processes and blocks until all of them and their children have ended.
    ///
    /// Forwards SIGINT, SIGTERM and SIGHUP to them; from then on these signals alone no longer end
    /// this process. SIGTSTP (Ctrl-Z) stops the processes and this one, SIGCONT continues them. The
    /// time between does not count for any timeout. The calling thread must not end before the job.
    ///
    /// # Errors
    ///
    /// If the job could not be started; then none of its processes remains. Failures of a started
    /// job are in the [`Outcome`].
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        let (server, token) = self.serve()?;
        let (events, happened) = mpsc::channel();
        // Before the first process starts: from then on no signal may end the launcher and leave
        // processes behind.
        let _signals = Signals::forward_to(events.clone())?;
        let mut job = Processes { running: Vec::new(), guard: Guard::start(self)? };
        let binding = self.binding();
        for process in 0..self.processes + self.spares {
            let mut command = self.command(process, &server, &token);
            // Spares run on any core.
            let binding = binding.as_ref().filter(|_| process < self.processes);
            let bound = binding.map(|binding| binding.enter(process, &mut command));
            let _bound = bound.transpose()?;
            job.start(process, self, command, &events)?;
        }
        let restart = |job: &mut Processes, process: usize| {
            job.start(process, self, self.command(process, &server, &token), &events)
        };
        Ok(job.watch(&happened, self, &server, restart))
    }
}

enum Event {
    Ended(usize),
    /// SIGINT, SIGTERM or SIGHUP, which requests the end of this process.
    Signal(Signal),
    /// SIGTSTP, which Ctrl-Z sends.
    Stop,
    /// SIGCONT.
    Continue,
}

/// The progress of ending a job.
#[derive(Clone, Copy)]
enum Ending {
    NotYet,
    Grace(Instant),
    Asked(Instant),
    Killed,
}

/// The time between SIGTERM and SIGKILL.
const AFTER_TERM: Duration = Duration::from_secs(2);

/// After a first failure by exit, the time in which a death by a signal still counts as its cause.
/// A process that a signal kills closes its connections before the launcher sees its death. Other
/// processes may exit over that first.
const SAME_MOMENT: Duration = Duration::from_millis(500);

/// The longest wait for the rest of a process's output after its end. A grandchild may have left
/// the process group and still hold the output open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// The processes that were started. Dropping it ends all of them.
struct Processes {
    running: Vec<Running>,
    guard: Guard,
}

struct Running {
    child: Child,
    /// Also the id of its process group.
    pid: Pid,
    how: Option<ExitKind>,
    output: Vec<Receiver<()>>,
}

impl Processes {
    /// Starts a process with this number. A process that has died may have had it.
    fn start(
        &mut self,
        process: usize,
        launch: &Launch,
        mut command: Command,
        events: &Sender<Event>,
    ) -> Result<(), LaunchError> {
        let piped = launch.output != OutputMode::Quiet0 || process > 0;
        if piped {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        // On this thread: the kernel ends a child with a parent-death signal when the thread that
        // started it ends.
        let mut child = command
            .spawn()
            .map_err(|e| LaunchError::not_started(&command.get_program().to_string_lossy(), &e))?;
        let pid = Pid::from_child(&child);
        self.guard.tell('+', pid);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        // From here on the child is ended also if a later step fails.
        let place = self.running.len();
        self.running.push(Running { child, pid, how: None, output: Vec::new() });
        let prefix = |stream: Stream| {
            let color = stream.is_coloured();
            if launch.prefix {
                output::prefix(process, launch.processes, color)
            } else {
                String::new()
            }
        };
        let mut output = Vec::new();
        if let Some(stdout) = stdout {
            let prefix = prefix(Stream::Out);
            output.push(thread("mpmd-stdout", move || output::copy(stdout, Stream::Out, &prefix))?);
        }
        if let Some(stderr) = stderr {
            let prefix = prefix(Stream::Err);
            output.push(thread("mpmd-stderr", move || output::copy(stderr, Stream::Err, &prefix))?);
        }
        let events = events.clone();
        thread("mpmd-wait", move || {
            // NOWAIT leaves the process unreaped, so that the system cannot reuse its pid yet.
            let wait = || waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            while matches!(wait(), Err(rustix::io::Errno::INTR)) {}
            // The receiver is gone if the launch has failed meanwhile.
            let _ = events.send(Event::Ended(place));
        })?;
        self.running[place].output = output;
        Ok(())
    }

    /// Waits until all processes have ended. After a first failure or a signal, ends the remaining
    /// ones: `grace`, then SIGTERM, then SIGKILL.
    /// In a job that recovers, `restart` starts new processes in place of lost ones before that.
    fn watch(
        mut self,
        happened: &Receiver<Event>,
        launch: &Launch,
        server: &Server,
        mut restart: impl FnMut(&mut Self, usize) -> Result<(), LaunchError>,
    ) -> Outcome {
        let (grace, mut replacing) = (launch.grace, Replacing::new(launch));
        let mut start_one = |job: &mut Self, number: usize, replacing: &mut Replacing| {
            if replacing.take_one()
                && let Err(error) = restart(job, number)
            {
                eprintln!("mpmd: a lost process cannot be replaced: {error}");
            }
        };
        let mut ending = Ending::NotYet;
        let mut first: Option<(ProcessId, ExitKind, Instant)> = None;
        let mut interrupted = false;
        while self.running.iter().any(|running| running.how.is_none()) {
            let event = match ending {
                Ending::Grace(until) | Ending::Asked(until) => {
                    happened.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
                Ending::NotYet if replacing.must_look() => happened.recv_timeout(LOOK),
                // No timeout: a healthy job may take days, and a killed process ends.
                Ending::NotYet | Ending::Killed => {
                    happened.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
            };
            match event {
                Ok(Event::Ended(process)) => {
                    let how = self.reap(process);
                    let is_ending = interrupted || !matches!(ending, Ending::NotYet);
                    if !is_ending && replacing.bears(how) {
                        let pid = self.running[process].pid.as_raw_nonzero();
                        eprintln!("mpmd: lost the process with pid {pid}: {how}");
                        // Before the job has begun, others wait for this very number.
                        let next = self.running.len();
                        let number = if server.is_complete() { next } else { process };
                        start_one(&mut self, number, &mut replacing);
                        continue;
                    }
                    let process = ProcessId(process as u32);
                    // A process with exit code 0 has failed too if it reported an unfinished
                    // program.
                    if how == ExitKind::Exit(0)
                        && server.reports().iter().all(|(who, _)| *who != process)
                    {
                        if replacing.is_over() && matches!(ending, Ending::NotYet) {
                            // Stopped processes that were replaced would never end.
                            ending = Ending::Grace(after(Instant::now(), grace));
                        }
                        continue;
                    }
                    match (first, ending) {
                        (None, _) => first = Some((process, how, Instant::now())),
                        (Some((_, before, when)), Ending::Grace(_))
                            if !interrupted
                                && when.elapsed() < SAME_MOMENT
                                && matches!(
                                    (before, how),
                                    (ExitKind::Exit(_), ExitKind::Signal(_))
                                ) =>
                        {
                            first = Some((process, how, when));
                        }
                        _ => {}
                    }
                    if matches!(ending, Ending::NotYet) {
                        ending = Ending::Grace(after(Instant::now(), grace));
                    }
                }
                Ok(Event::Signal(signal)) => {
                    interrupted = true;
                    self.signal(signal);
                    if matches!(ending, Ending::NotYet) {
                        ending = Ending::Grace(after(Instant::now(), grace));
                    }
                }
                Ok(Event::Stop) => {
                    self.signal(Signal::STOP);
                    // The launcher catches SIGTSTP, so it must stop itself with SIGSTOP. This stops
                    // all its threads. The rendezvous service then notices that it was stopped, and
                    // does not count any process as silent.
                    let _ = kill_process(getpid(), Signal::STOP);
                }
                Ok(Event::Continue) => {
                    self.signal(Signal::CONT);
                    // Deadlines restart: no process could act while stopped.
                    ending = match ending {
                        Ending::Grace(_) => Ending::Grace(after(Instant::now(), grace)),
                        Ending::Asked(_) => Ending::Asked(Instant::now() + AFTER_TERM),
                        other => other,
                    };
                }
                Err(RecvTimeoutError::Timeout) => match ending {
                    Ending::NotYet => {
                        if replacing.wants_one(server.wanted()) {
                            let next = self.running.len();
                            start_one(&mut self, next, &mut replacing);
                        }
                        let alive = 0..self.running.len();
                        let alive: Vec<usize> =
                            alive.filter(|i| self.running[*i].how.is_none()).collect();
                        if let Some(victim) = replacing.victim(&alive) {
                            eprintln!("mpmd: chaos kills the process that was started as {victim}");
                            let _ = kill_process_group(self.running[victim].pid, Signal::KILL);
                        }
                    }
                    // The deadline passed long ago, so this process was stopped; SIGCONT will be
                    // handled next.
                    Ending::Grace(until) if until.elapsed() > SAME_MOMENT => {
                        ending = Ending::Grace(Instant::now() + SAME_MOMENT);
                    }
                    Ending::Grace(_) => {
                        self.signal(Signal::TERM);
                        ending = Ending::Asked(Instant::now() + AFTER_TERM);
                    }
                    _ => {
                        self.signal(Signal::KILL);
                        ending = Ending::Killed;
                    }
                },
                // Cannot happen: the signals' thread holds a sender.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let until = Instant::now() + LAST_OUTPUT;
        for output in self.running.iter().flat_map(|running| &running.output) {
            // The wait ends by disconnection when the output's thread ends.
            let _ = output.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
        let ends: Vec<ExitKind> =
            self.running.iter().map(|running| running.how.unwrap_or(ExitKind::Exit(1))).collect();
        let first_failure = first.map(|(process, how, _)| {
            let (reports, unformed) = (server.reports(), server.failure());
            let first = (process, how);
            let own = |how: &ExitKind| match replacing.bears(*how) {
                // Reports count places, and this one's has another process now.
                true => ExitKind::Exit(1),
                false => *how,
            };
            let ends: Vec<_> = ends.iter().map(own).collect();
            Known { first, ends: &ends, reports: &reports, unformed: unformed.as_ref() }.cause()
        });
        Outcome { first_failure, codes: ends.into_iter().map(ExitKind::code).collect() }
    }

    /// Kills the rest of an ended process's group, reaps the process and returns the way it ended.
    fn reap(&mut self, process: usize) -> ExitKind {
        let running = &mut self.running[process];
        let _ = kill_process_group(running.pid, Signal::KILL);
        self.guard.tell('-', running.pid);
        // The status is unknown if another part of this program has reaped the process.
        let how = running.child.wait().map_or(ExitKind::Exit(1), ExitKind::of);
        running.how = Some(how);
        how
    }

    /// Sends a signal to the process groups of all processes that have not ended.
    fn signal(&self, signal: Signal) {
        for running in self.running.iter().filter(|running| running.how.is_none()) {
            let _ = kill_process_group(running.pid, signal);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for process in 0..self.running.len() {
            if self.running[process].how.is_none() {
                self.reap(process);
            }
        }
    }
}

/// Runs `work` on a thread. The receiver disconnects when the thread ends.
fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Receiver<()>, LaunchError> {
    let (ended, end) = mpsc::channel();
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        let _ended: Sender<()> = ended;
        work();
    });
    spawned.map(|_| end).map_err(|e| LaunchError::environment("starting a thread", e))
}

/// A helper process that kills the job's processes if the launcher dies before it can.
struct Guard(Option<Child>);

impl Guard {
    fn start(launch: &Launch) -> Result<Self, LaunchError> {
        let Some((program, args)) = &launch.guard else { return Ok(Self(None)) };
        // In its own process group, so that signals to the launcher's group do not reach it.
        let guard = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn();
        match guard {
            Ok(guard) => Ok(Self(Some(guard))),
            Err(e) => Err(LaunchError::environment("starting the job's guard", e)),
        }
    }

    fn tell(&mut self, sign: char, group: Pid) {
        let stdin = self.0.as_mut().and_then(|guard| guard.stdin.as_mut());
        if let Some(stdin) = stdin
            && let Err(error) = writeln!(stdin, "{sign}{}", group.as_raw_nonzero())
        {
            tracing::warn!("the job's guard is gone: {error}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut guard) = self.0.take() {
            // It ends with its input; no process groups are left for it to kill.
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}

/// Turns the signals that would end or stop this process into events, until it is dropped.
struct Signals {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    fn forward_to(events: Sender<Event>) -> Result<Self, LaunchError> {
        let failed = |e: std::io::Error| LaunchError::environment("listening for signals", e);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, mut stopped) = oneshot::channel::<()>();
        let (mut interrupt, mut terminate, mut hang_up, mut stop_asked, mut continued) = {
            let _inside = runtime.enter();
            let listen = |kind| signal(kind).map_err(failed);
            let other = |signal: Signal| SignalKind::from_raw(signal.as_raw());
            (
                listen(SignalKind::interrupt())?,
                listen(SignalKind::terminate())?,
                listen(SignalKind::hangup())?,
                listen(other(Signal::TSTP))?,
                listen(other(Signal::CONT))?,
            )
        };
        let forward = async move {
            loop {
                let event = tokio::select! {
                    // `biased` keeps the order: a stop comes before the SIGCONT that ended it.
                    biased;
                    _ = &mut stopped => break,
                    Some(()) = interrupt.recv() => Event::Signal(Signal::INT),
                    Some(()) = terminate.recv() => Event::Signal(Signal::TERM),
                    Some(()) = hang_up.recv() => Event::Signal(Signal::HUP),
                    Some(()) = stop_asked.recv() => Event::Stop,
                    Some(()) = continued.recv() => Event::Continue,
                };
                if events.send(event).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("mpmd-signals".into())
            .spawn(move || runtime.block_on(forward))
            .map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread only forwards events; a panic of it has been printed.
            let _ = thread.join();
        }
    }
}
