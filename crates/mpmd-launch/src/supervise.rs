//! Supervision of a job's processes: starts them, forwards signals, and waits until all have ended.
//! After a first failure it ends the others, and finds the cause for the `Outcome`.

use std::io::IsTerminal;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_base::deadline::after;
use mpmd_rendezvous::Server;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, kill_process_group, waitid,
};

use super::cause::{ExitKind, JobFailure, Known};
use super::error::LaunchError;
use super::guard::Guard;
use super::log::NO_READER;
use super::output::{self, Stream, say};
use super::replace::{LOOK, Meaning, Replacing, Standing};
use super::signals::{Event, Signals, stop_name};
use super::spawn::{Launch, OutputMode, make_room};
use super::stop::{Stop, is_told};
use super::words::{self, HOLD, LastWords};

/// The end of a job.
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct Outcome {
    /// The failure that ended the job, if one did.
    pub first_failure: Option<JobFailure>,
    /// The signal to the launcher, such as Ctrl-C, by which the user stopped the job, if it ended
    /// over that and not over a failure.
    pub stopped_by: Option<i32>,
    /// Exit code of each process, by process: 128 plus the signal's number for a process that a
    /// signal ended.
    pub codes: Vec<i32>,
}

impl Outcome {
    /// Returns the exit code for the job: that of the process at fault; 128 plus the number of the
    /// signal by which the user stopped it; or 0 if no process failed.
    pub fn code(&self) -> i32 {
        let stopped = self.stopped_by.map_or(0, |signal| 128 + signal);
        self.first_failure
            .as_ref()
            .map_or(stopped, JobFailure::code)
    }
}

impl Launch {
    /// Starts the processes and blocks until all of them and their children have ended.
    ///
    /// Forwards SIGINT, SIGTERM, SIGHUP and SIGUSR1 to them, but for a SIGINT or SIGTERM within two
    /// seconds of another one; from then on these signals alone no longer end this process. SIGHUP
    /// stays ignored if it is, as under `nohup`. SIGTSTP (Ctrl-Z) stops the processes and this one,
    /// SIGCONT continues them. The time between does not count for any timeout. The calling thread
    /// must not end before the job.
    ///
    /// # Errors
    ///
    /// If the job could not be started; then none of its processes remains. Failures of a started
    /// job are in the [`Outcome`].
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        super::env::check_names()?;
        make_room(self.processes + self.spares)?;
        let (server, token) = self.serve()?;
        let server = Arc::new(server);
        let (events, happened) = mpsc::channel();
        // Before the first process starts: from then on no signal may end the launcher and leave
        // processes behind.
        let _signals = Signals::forward_to(events.clone())?;
        let mut job = Processes {
            running: Vec::new(),
            guard: Guard::start(self)?,
        };
        let start = |job: &mut Processes, number: usize| {
            let command = self.command(number, &server, &token);
            job.start(number, self, command, &server, &events)
        };
        for number in 0..self.processes + self.spares {
            start(&mut job, number)?;
        }
        Ok(job.watch(&happened, self, &server, start))
    }
}

impl Launch {
    /// Returns the prefix of the lines of a process.
    fn prefix_of(&self, stream: Stream, process: usize) -> String {
        match self.prefix {
            true => output::prefix(process, self.processes, stream.is_coloured()),
            false => String::new(),
        }
    }

    /// Returns the prefix of the lines of standard output that a process prints from now on. With
    /// [`OutputMode::Quiet0`] the first process has none, also one that has come in its place.
    fn prefix_of_output(
        &self,
        server: &Arc<Server>,
        process: usize,
    ) -> impl Fn() -> String + use<> {
        let is_quiet = self.output == OutputMode::Quiet0;
        // The output may last longer than the job.
        let server: Weak<Server> = Arc::downgrade(server);
        let processes = self.processes;
        let prefix = self.prefix_of(Stream::Out, process);
        let is_first = move || {
            let job = server
                .upgrade()
                .map(|server| Standing::of(&server, processes));
            job.is_some_and(|job| job.place(process) == Some(ProcessId(0)))
        };
        move || {
            if is_quiet && is_first() {
                String::new()
            } else {
                prefix.clone()
            }
        }
    }

    /// Shows errors that were held back, with the numbers of their processes.
    fn show(&self, errors: &[words::Error]) {
        for words::Error { processes, text } in errors {
            let prefix = match processes.as_slice() {
                [process] => self.prefix_of(Stream::Err, *process),
                _ if !self.prefix => String::new(),
                several => {
                    let numbers: Vec<String> = several.iter().map(ToString::to_string).collect();
                    format!("[{}] ", numbers.join(","))
                }
            };
            // There is no other place for an error of writing.
            let _ = Stream::Err.write(&output::prefixed(&prefix, text.as_bytes()));
        }
    }
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
    /// The process number with which it was started. One that has died before may have had it.
    number: usize,
    child: Child,
    /// Also the id of its process group.
    pid: Pid,
    how: Option<ExitKind>,
    output: Vec<Receiver<()>>,
    words: Arc<LastWords>,
}

impl Running {
    /// Waits until all output of an ended process is read, at most until `until`.
    fn wait_for_output(&self, until: Instant) {
        for output in &self.output {
            // The wait ends by disconnection when the output's thread ends.
            let _ = output.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Processes {
    /// Starts a process with this number.
    fn start(
        &mut self,
        process: usize,
        launch: &Launch,
        mut command: Command,
        server: &Arc<Server>,
        events: &Sender<Event>,
    ) -> Result<(), LaunchError> {
        let is_direct = launch.output == OutputMode::Quiet0 && process == 0;
        if !is_direct {
            command.stdout(Stdio::piped());
        }
        // On a terminal the process itself draws its progress.
        if !is_direct || !std::io::stderr().is_terminal() {
            command.stderr(Stdio::piped());
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
        let (number, how, output) = (process, None, Vec::new());
        let words = Arc::<LastWords>::default();
        self.running.push(Running {
            number,
            child,
            pid,
            how,
            output,
            words: words.clone(),
        });
        let mut output = Vec::new();
        if let Some(stdout) = stdout {
            let (prefix, events) = (launch.prefix_of_output(server, process), events.clone());
            // The receiver is gone if the job has ended.
            let failed = move |error| drop(events.send(Event::NoOutput(error)));
            let copy = move || output::copy(stdout, prefix, failed);
            output.push(thread("mpmd-stdout", copy)?);
        }
        if let Some(stderr) = stderr {
            let prefix = match is_direct {
                true => String::new(),
                false => launch.prefix_of(Stream::Err, process),
            };
            let copy = move || output::copy_errors(stderr, &prefix, &words);
            output.push(thread("mpmd-stderr", copy)?);
        }
        let events = events.clone();
        thread("mpmd-wait", move || {
            // NOWAIT leaves the process unreaped, so that the system cannot reuse its pid yet.
            let wait = || {
                waitid(
                    WaitId::Pid(pid),
                    WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
                )
            };
            while matches!(wait(), Err(rustix::io::Errno::INTR)) {}
            // The receiver is gone if the launch has failed meanwhile.
            let _ = events.send(Event::Ended(place));
        })?;
        self.running[place].output = output;
        Ok(())
    }

    /// Waits until all processes have ended. After a first failure or a signal, ends the remaining
    /// ones: `grace`, then SIGTERM, then SIGKILL.
    /// In a job that recovers, `start` starts new processes in place of lost ones before that, by
    /// their number.
    fn watch(
        mut self,
        happened: &Receiver<Event>,
        launch: &Launch,
        server: &Server,
        mut start: impl FnMut(&mut Self, usize) -> Result<(), LaunchError>,
    ) -> Outcome {
        let (grace, mut replacing) = (launch.grace, Replacing::new(launch));
        let first_ones = self.running.len();
        let mut start_one = |job: &mut Self, number: usize| {
            if let Err(error) = start(job, number) {
                say(format!("a lost process cannot be replaced: {error}"));
            }
        };
        let mut ending = Ending::NotYet;
        let mut first: Option<(ProcessId, ExitKind, Instant)> = None;
        let mut stop = Stop::default();
        let mut lost = None;
        // The errors that are held back are shown at the end, or now if that is late.
        let mut show_at: Option<Instant> = None;
        let mut shown: Vec<(usize, Vec<String>)> = Vec::new();
        while self.running.iter().any(|running| running.how.is_none())
            // Its rendezvous service is needed.
            || (matches!(ending, Ending::NotYet) && replacing.recovers() && {
                let ours: Vec<_> = self.running.iter().map(|running| running.number).collect();
                Standing::of(server, launch.processes).goes_on_elsewhere(&ours)
            })
        {
            if replacing.recovers() {
                let job = Standing::of(server, launch.processes);
                let joins =
                    |running: &Running| running.how.is_none() && !job.is_known(running.number);
                server.may_start(replacing.has_left() || self.running.iter().any(joins));
            }
            let event = match ending {
                Ending::Grace(until) | Ending::Asked(until) => {
                    let until = until.min(*show_at.get_or_insert_with(|| Instant::now() + HOLD));
                    happened.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
                Ending::NotYet if replacing.must_look() => happened.recv_timeout(LOOK),
                // No timeout: a healthy job may take days, and a killed process ends.
                Ending::NotYet | Ending::Killed => {
                    happened.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
            };
            match event {
                Err(RecvTimeoutError::Timeout)
                    if shown.is_empty() && show_at.is_some_and(|at| at <= Instant::now()) =>
                {
                    show_at = Some(after(Instant::now(), Duration::MAX));
                    shown = self.take_words();
                    launch.show(&words::merged(&shown));
                }
                Ok(Event::Ended(ended)) => {
                    let how = self.reap(ended);
                    let is_ending = !matches!(ending, Ending::NotYet);
                    let Running { number, pid, .. } = self.running[ended];
                    let job = Standing::of(server, launch.processes);
                    replacing.learn(server.may_shrink());
                    let meaning = replacing.judge(number, how, &job);
                    let goes_on = match meaning {
                        Meaning::Failed(_) | Meaning::FailedAtExit(_) => false,
                        // The others may end by the same cause before they have joined.
                        Meaning::NotNeeded => server.is_complete(),
                        _ => true,
                    };
                    if goes_on {
                        // The end of the job may be far.
                        let words = self.running[ended].words.release();
                        launch.show(&words::merged(&[(number, words)]));
                    }
                    let process = match meaning {
                        Meaning::Nothing => continue,
                        Meaning::NotNeeded => {
                            if !is_ending && server.failure().is_none() {
                                let pid = pid.as_raw_nonzero();
                                say(format!("the job goes on without the spare {pid}: {how}"));
                            }
                            // It had the arguments and the files of all that would follow.
                            if server.refusal(ProcessId(number as u32)).is_some() {
                                replacing.start_no_more();
                            }
                            continue;
                        }
                        Meaning::Lost(_) if !is_ending => {
                            let pid = pid.as_raw_nonzero();
                            say(format!("lost the process with pid {pid}: {how}"));
                            lost = Some(how);
                            if !job.is_over && replacing.take_one() {
                                // If it has never joined, others wait for this very number.
                                let is_new = server.is_complete() || job.is_known(number);
                                let number = if is_new { self.running.len() } else { number };
                                start_one(&mut self, number);
                            }
                            continue;
                        }
                        Meaning::Lost(process) => process,
                        Meaning::FailedAtExit(process) => {
                            // The others have ended their parts too, and may still save them.
                            first.get_or_insert((process, how, Instant::now()));
                            continue;
                        }
                        Meaning::Failed(process) => process,
                    };
                    match (first, ending) {
                        (None, _) => first = Some((process, how, Instant::now())),
                        (Some((_, before, when)), Ending::Grace(_))
                            if stop.signal().is_none()
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
                    let has_failed =
                        first.is_some_and(|(_, _, when)| when.elapsed() >= SAME_MOMENT);
                    stop.ask(signal, has_failed);
                    if stop.is_new(signal, Instant::now()) {
                        self.signal(signal);
                    }
                    if matches!(ending, Ending::NotYet) {
                        ending = Ending::Grace(after(Instant::now(), grace));
                    }
                }
                Ok(Event::NoOutput(error)) => {
                    // A second SIGTERM would end a process that saves.
                    if stop.lose_output(&error, first.is_some()) {
                        self.signal(Signal::TERM);
                    }
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
                        let job = Standing::of(server, launch.processes);
                        let alive = (0..self.running.len())
                            .filter(|i| self.running[*i].how.is_none())
                            .map(|i| (i, self.running[i].number));
                        let alive: Vec<_> = alive.collect();
                        let is_on_its_way = |(i, number): &&(usize, usize)| {
                            *i >= first_ones && !job.is_known(*number)
                        };
                        let on_their_way = alive.iter().filter(is_on_its_way).count();
                        let numbers = alive.iter().map(|(_, number)| *number);
                        if replacing.recovers() && on_their_way == 0 && job.needs_none_of(numbers) {
                            // A stopped process that was replaced would never end.
                            ending = Ending::Grace(after(Instant::now(), grace));
                            continue;
                        }
                        if server.wanted() > on_their_way && replacing.take_one() {
                            let next = self.running.len();
                            start_one(&mut self, next);
                        }
                        let is_at_work = |(_, number): &&(usize, usize)| !job.has_left(*number);
                        let alive: Vec<_> =
                            alive.iter().filter(is_at_work).map(|(i, _)| *i).collect();
                        if let Some(victim) = replacing.victim(&alive) {
                            let number = self.running[victim].number;
                            say(format!(
                                "chaos kills the process that was started as {number}"
                            ));
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
        self.running
            .iter()
            .for_each(|running| running.wait_for_output(until));
        // The last lines of a process are written after its end.
        for event in happened.try_iter() {
            if let Event::NoOutput(error) = event {
                stop.lose_output(&error, first.is_some());
            }
        }
        let ends: Vec<(usize, ExitKind)> = self
            .running
            .iter()
            .map(|running| (running.number, running.how.unwrap_or(ExitKind::Exit(1))))
            .collect();
        let codes = ends.iter().map(|(_, how)| how.code()).collect();
        let job = Standing::of(server, launch.processes);
        let places = || (0..job.places as u32).map(ProcessId);
        let mut by_place: Vec<Option<ExitKind>> = places().map(|_| None).collect();
        let place_of = |number: usize| match replacing.recovers() {
            true => job.place(number),
            false => Some(ProcessId(number as u32)),
        };
        for (number, how) in &ends {
            let place = place_of(*number);
            if let Some(end) = place.and_then(|place| by_place.get_mut(place.index())) {
                *end = Some(*how);
            }
        }
        let unknown = lost.unwrap_or(ExitKind::Exit(1));
        let ours: Vec<usize> = ends.iter().map(|(number, _)| *number).collect();
        let is_elsewhere = |place: ProcessId| job.has_left_elsewhere(place, &ours);
        let by_place = places()
            .zip(by_place)
            .map(|(place, end)| match is_elsewhere(place) {
                true => ExitKind::Exit(0),
                false => end.unwrap_or(unknown),
            });
        let by_place: Vec<_> = by_place.collect();
        let is_open =
            |place: &ProcessId| !is_elsewhere(*place) && !job.is_done(*place, ends.iter().copied());
        let open = places().find(|place| replacing.recovers() && is_open(place));
        // A spare that takes a place while the job ends may have ended well in it.
        let is_replaced =
            |place: ProcessId| replacing.recovers() && by_place[place.index()] == ExitKind::Exit(0);
        let first = first.filter(|(place, ..)| !is_replaced(*place));
        let (first, is_open) = match (first, open) {
            (Some((process, how, _)), _) => (Some((process, how)), false),
            (None, Some(place)) => (Some((place, by_place[place.index()])), true),
            (None, None) => (None, false),
        };
        let (reports, unformed) = (server.reports(), server.failure());
        let is_direct = launch.output == OutputMode::Quiet0;
        if is_direct && ends.contains(&(0, ExitKind::Exit(NO_READER))) {
            stop.ask(Signal::PIPE, false);
        }
        // A job that recovers goes on without a killed process.
        let may_be_killed = matches!(ending, Ending::Killed) || replacing.recovers();
        let is_odd = |place: usize, end: ExitKind| {
            stop.signal().is_some() && !stop.explains(place, end, &reports, may_be_killed)
        };
        let odd = by_place
            .iter()
            .copied()
            .enumerate()
            .find(|(place, end)| is_odd(*place, *end));
        let stopped_by = stop.signal().filter(|signal| {
            (first.is_some() || *signal == Signal::PIPE)
                && odd.is_none()
                && reports
                    .iter()
                    .all(|(_, report)| report.failure.is_peer_failure())
        });
        // A process that has ended as requested is not at fault.
        let first = first.map(|(process, end)| match odd {
            Some((place, odd)) if !is_odd(process.index(), end) => (ProcessId(place as u32), odd),
            _ => (process, end),
        });
        let taken = self.take_words();
        let all: Vec<_> = shown.iter().cloned().chain(taken).collect();
        let errors = words::merged(&all);
        let mut unseen = words::without(errors.clone(), &words::merged(&shown));
        if let Some(signal) = stopped_by {
            let is_told = |number: &usize| {
                place_of(*number).is_some_and(|place| is_told(&reports, place.index()))
            };
            unseen.retain(|error| !error.processes.iter().all(is_told));
            launch.show(&unseen);
            // A program that ends in order says so itself.
            let is_cut = by_place
                .iter()
                .any(|how| matches!(how, ExitKind::Signal(_)));
            if is_cut && signal != Signal::PIPE {
                say(format!("stopped by {}", stop_name(signal.as_raw())));
            }
            let stopped_by = Some(signal.as_raw());
            return Outcome {
                first_failure: None,
                stopped_by,
                codes,
            };
        }
        let first_failure = first.map(|first| {
            let known = Known {
                first,
                ends: &by_place,
                reports: &reports,
                unformed: unformed.as_ref(),
            };
            let mut failure = known.cause();
            if is_open && failure.why.is_none() {
                failure.why = Some("no process has ended the program in its place".to_owned());
            }
            failure.absorb(&errors, &known);
            unseen = failure.without_said(std::mem::take(&mut unseen));
            failure
        });
        launch.show(&unseen);
        if first_failure.is_none() && stop.signal().is_none() && job.has_no_member() {
            say(
                "no process has joined the job: the program does not use mpmd, or has ended \
                 before `Program::run`",
            );
        }
        Outcome {
            first_failure,
            stopped_by: None,
            codes,
        }
    }

    /// Takes the errors of all processes that nobody has shown, by the number of the process.
    fn take_words(&self) -> Vec<(usize, Vec<String>)> {
        self.running
            .iter()
            .map(|running| (running.number, running.words.take()))
            .collect()
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
    let spawned = std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            let _ended: Sender<()> = ended;
            work();
        });
    spawned
        .map(|_| end)
        .map_err(|e| LaunchError::environment("starting a thread", e))
}
