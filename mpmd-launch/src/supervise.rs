//! Watching over the processes of a job until the last of them has ended.

use std::fmt;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;
use mpmd_transport::deadline::after;
use mpmd_transport::rendezvous::{Server, ServerConfig, Token};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, kill_process_group, waitid,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::cause::{Failure, Known};
use super::output::{self, Stream};
use super::spawn::OutputMode;
use super::{Launch, LaunchError};

/// How a job ended.
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct Outcome {
    /// The failure that ended the job, if one did.
    pub first_failure: Option<Failure>,
    /// Each process's exit code; 128 and the signal's number for one that a signal ended.
    pub codes: Vec<i32>,
}

impl Outcome {
    /// The exit code for the job: that of the process at fault, 0 where no process failed.
    pub fn code(&self) -> i32 {
        self.first_failure.as_ref().map_or(0, Failure::code)
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum How {
    /// By itself, with this exit code.
    Exit(i32),
    /// By a signal of this number.
    Signal(i32),
}

impl How {
    /// The exit code a shell would show: 128 and the signal's number for signals.
    pub fn code(self) -> i32 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(number) => 128 + number,
        }
    }

    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exit(code) => write!(f, "it ended with exit code {code}"),
            Self::Signal(number) => {
                write!(f, "it was ended by signal {number}")?;
                const NAMES: [(Signal, &str); 11] = [
                    (Signal::HUP, "SIGHUP"),
                    (Signal::INT, "SIGINT"),
                    (Signal::QUIT, "SIGQUIT"),
                    (Signal::ILL, "SIGILL"),
                    (Signal::ABORT, "SIGABRT"),
                    (Signal::BUS, "SIGBUS"),
                    (Signal::FPE, "SIGFPE"),
                    (Signal::KILL, "SIGKILL"),
                    (Signal::SEGV, "SIGSEGV"),
                    (Signal::PIPE, "SIGPIPE"),
                    (Signal::TERM, "SIGTERM"),
                ];
                let name = NAMES.iter().find(|(signal, _)| signal.as_raw() == number);
                name.map_or(Ok(()), |(_, name)| write!(f, " ({name})"))
            }
        }
    }
}

pub(super) fn run(launch: &Launch) -> Result<Outcome, LaunchError> {
    let processes = launch.processes;
    if processes == 0 || u32::try_from(processes).is_err() {
        return Err(LaunchError::Processes { processes });
    }
    let token = Token::random().map_err(|e| LaunchError::environment("making a job token", e))?;
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let config = ServerConfig { processes, token: token.clone(), patience: launch.patience };
    let server = Server::bind(here, config)?;
    let (events, happened) = mpsc::channel();
    // Before the first process: from then on no signal may end this one and leave others behind.
    let _signals = Signals::forward_to(events.clone())?;
    let mut job = Processes { running: Vec::new(), guard: Guard::start(launch)? };
    for process in 0..processes {
        job.start(process, launch, launch.command(process, &server, &token), &events)?;
    }
    Ok(job.watch(&happened, launch.grace, &server))
}

enum Event {
    Ended(usize),
    /// A signal that asks this process to end.
    Signal(Signal),
    /// SIGTSTP, as Ctrl-Z sends it.
    Stop,
    /// SIGCONT.
    Continue,
}

/// How far the end of a job is.
#[derive(Clone, Copy)]
enum Ending {
    NotYet,
    Grace(Instant),
    Asked(Instant),
    Killed,
}

/// How long processes have between SIGTERM and SIGKILL.
const AFTER_TERM: Duration = Duration::from_secs(2);

/// How long after a first failure another may turn out to be its cause: a process that dies by a
/// signal loses its connections, and the others may have ended over that, before its death is seen
/// here.
const SAME_MOMENT: Duration = Duration::from_millis(500);

/// How long the last output may take once its process has ended: what a process has started may
/// have left its group and still hold its output open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// The processes that were started. Dropped, it leaves none of them.
struct Processes {
    running: Vec<Running>,
    guard: Guard,
}

struct Running {
    child: Child,
    /// Also the number of its process group.
    pid: Pid,
    how: Option<How>,
    output: Vec<Receiver<()>>,
}

impl Processes {
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
        // On this thread: what asks to end with its parent ends with the thread that started it.
        let mut child = command.spawn().map_err(|e| launch.not_started(&e))?;
        let pid = Pid::from_child(&child);
        self.guard.tell('+', pid);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        // From here on the child is ended also where the rest fails.
        self.running.push(Running { child, pid, how: None, output: Vec::new() });
        let prefix = |stream: Stream| {
            let color = launch.color.on(stream.is_terminal());
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
            // Leaves it unreaped: as long as it is, nobody else can get its number.
            let wait = || waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            while matches!(wait(), Err(rustix::io::Errno::INTR)) {}
            // Nobody listens where the launch has failed meanwhile.
            let _ = events.send(Event::Ended(process));
        })?;
        self.running[process].output = output;
        Ok(())
    }

    /// Waits until all have ended, and sees to it that they do once one has failed.
    fn watch(mut self, happened: &Receiver<Event>, grace: Duration, server: &Server) -> Outcome {
        let mut ending = Ending::NotYet;
        let mut first: Option<(ProcessId, How, Instant)> = None;
        let mut interrupted = false;
        while self.running.iter().any(|running| running.how.is_none()) {
            let event = match ending {
                Ending::Grace(until) | Ending::Asked(until) => {
                    happened.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
                // A healthy job may take days, and what was killed ends.
                Ending::NotYet | Ending::Killed => {
                    happened.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
            };
            match event {
                Ok(Event::Ended(process)) => {
                    let how = self.reap(process);
                    let process = ProcessId(process as u32);
                    // A program that was not finished may still end with 0.
                    if how == How::Exit(0)
                        && server.reports().iter().all(|(who, _)| *who != process)
                    {
                        continue;
                    }
                    match (first, ending) {
                        (None, _) => first = Some((process, how, Instant::now())),
                        (Some((_, before, when)), Ending::Grace(_))
                            if !interrupted
                                && when.elapsed() < SAME_MOMENT
                                && matches!((before, how), (How::Exit(_), How::Signal(_))) =>
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
                    // Caught, the signal has stopped nobody. All threads of this process: the
                    // rendezvous service, too, notices afterwards that it was stopped, and finds
                    // nobody silent.
                    let _ = kill_process(getpid(), Signal::STOP);
                }
                Ok(Event::Continue) => {
                    self.signal(Signal::CONT);
                    // Deadlines begin anew: nobody did anything meanwhile.
                    ending = match ending {
                        Ending::Grace(_) => Ending::Grace(Instant::now() + grace),
                        Ending::Asked(_) => Ending::Asked(Instant::now() + AFTER_TERM),
                        other => other,
                    };
                }
                Err(RecvTimeoutError::Timeout) => match ending {
                    // Stopped meanwhile: SIGCONT is about to be heard.
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
                // Cannot be: the signals' thread holds a sender.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let until = Instant::now() + LAST_OUTPUT;
        for output in self.running.iter().flat_map(|running| &running.output) {
            // Ends by disconnection when the output's thread does.
            let _ = output.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
        let ends: Vec<How> =
            self.running.iter().map(|running| running.how.unwrap_or(How::Exit(1))).collect();
        let first_failure = first.map(|(process, how, _)| {
            let (reports, unformed) = (server.reports(), server.failure());
            let first = (process, how);
            Known { first, ends: &ends, reports: &reports, unformed: unformed.as_ref() }.cause()
        });
        Outcome { first_failure, codes: ends.into_iter().map(How::code).collect() }
    }

    /// Ends what a process that has ended has left behind, and finds out how it ended.
    fn reap(&mut self, process: usize) -> How {
        let running = &mut self.running[process];
        let _ = kill_process_group(running.pid, Signal::KILL);
        self.guard.tell('-', running.pid);
        // Where another part of this program has reaped it, nobody knows.
        let how = running.child.wait().map_or(How::Exit(1), How::of);
        running.how = Some(how);
        how
    }

    /// Sends a signal to all that have not ended, and to what they have started.
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

/// Runs `work` on a thread; the receiver hears of its end by disconnection.
fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Receiver<()>, LaunchError> {
    let (ended, end) = mpsc::channel();
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        let _ended: Sender<()> = ended;
        work();
    });
    spawned.map(|_| end).map_err(|e| LaunchError::environment("starting a thread", e))
}

/// The process that ends the job's processes where this one cannot.
struct Guard(Option<Child>);

impl Guard {
    fn start(launch: &Launch) -> Result<Self, LaunchError> {
        let Some((program, args)) = &launch.guard else { return Ok(Self(None)) };
        // A group of its own: what is sent to this process's group must not reach it.
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
            // It ends with its input, having nothing left to end.
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}

/// Makes events of the signals that would end or stop this process.
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
                    // In this order: a stop comes before the SIGCONT that ended it.
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
            // Its only work is above; a panic there has been printed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_say_how_they_came() {
        assert_eq!(How::Exit(3).to_string(), "it ended with exit code 3");
        assert_eq!(How::Signal(9).to_string(), "it was ended by signal 9 (SIGKILL)");
        assert_eq!(How::Signal(15).code(), 143);
    }
}
