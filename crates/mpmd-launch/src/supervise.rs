//! Supervision of a job's processes: starts them, forwards signals, and waits until all have ended.
//! After a first failure it ends the others, and finds the cause for the `JobOutcome`.

use std::io::IsTerminal;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_base::deadline::after;
use mpmd_rendezvous::{FailureReport, RendezvousServer};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, kill_process_group, waitid,
};

use super::error::LaunchError;
use super::guard::JobGuard;
use super::job_failure::{ExitKind, FailedJob, JobFailure, PlaceEnd};
use super::job_stop::{JobStop, is_told};
use super::last_words::{self, HOLD, LastWords, PrintedError};
use super::log::NO_READER;
use super::memory_kills::MemoryKills;
use super::output::{self, OutputStream, say};
use super::replacement::{EndMeaning, JobStanding, LOOK, ProcessReplacement};
use super::signals::{JobEvent, SignalForwarder, stop_name};
use super::spawn::{Launch, OutputMode, make_room};

/// The result of running a job.
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use]
pub struct JobOutcome {
    /// The failure that ended the job; `None` if no process failed.
    pub first_failure: Option<JobFailure>,
    /// Number of the signal by which the user stopped the job, such as that of Ctrl-C. `None` if
    /// the job ended otherwise.
    pub stopped_by: Option<i32>,
    /// Exit code of each process, in the order of starts. For a process that a signal ended, 128
    /// plus the signal's number.
    pub codes: Vec<i32>,
}

impl JobOutcome {
    /// Returns the exit code for the job. It is that of the process at fault, or 128 plus the
    /// number of the signal by which the user stopped the job. Otherwise it is 0.
    pub fn code(&self) -> i32 {
        let stopped = self.stopped_by.map_or(0, |signal| 128 + signal);
        self.first_failure
            .as_ref()
            .map_or(stopped, JobFailure::code)
    }
}

impl Launch {
    /// Starts the job's processes and blocks until all of them and their children have ended.
    ///
    /// Forwards [`stop_signals`](crate::stop_signals) to the processes, except a SIGINT or SIGTERM
    /// within two seconds of another one. From then on these signals alone no longer end this
    /// process. SIGHUP stays ignored if it is, as under `nohup`.
    ///
    /// SIGTSTP (Ctrl-Z) stops the processes and this one, and SIGCONT continues them. The time in
    /// between does not count for any timeout. The calling thread must not end before the job.
    ///
    /// # Errors
    ///
    /// If the job could not be started; then none of its processes remains. If a process of a
    /// started job fails, the [`JobOutcome`] has the failure.
    pub fn run(&self) -> Result<JobOutcome, LaunchError> {
        super::env::check_names()?;
        make_room(self.processes + self.spares)?;

        let (server, token) = self.serve()?;
        let server = Arc::new(server);

        let (events, happened) = mpsc::channel();
        // Before the first process starts: from then on no signal may end the launcher and leave
        // processes behind.
        let _signals = SignalForwarder::forward_to(events.clone())?;
        let mut job = StartedProcesses {
            running: Vec::new(),
            guard: JobGuard::start(self)?,
            memory_kills: MemoryKills::of_this_process(),
        };

        let start = |job: &mut StartedProcesses, number: usize| {
            let command = self.command(number, &server, &token);
            job.start(number, self, command, &server, &events)
        };
        for number in 0..self.processes + self.spares {
            start(&mut job, number)?;
        }
        Ok(JobWatch::new(job, self, &server, start).run(&happened))
    }
}

impl Launch {
    /// Returns the prefix of the lines that a process prints to `stream`.
    fn prefix_of(&self, stream: OutputStream, process: usize) -> String {
        match self.prefix {
            true => output::prefix(process, self.processes, stream.is_coloured()),
            false => String::new(),
        }
    }

    /// Returns a function that gives the current prefix for a process's lines of standard output.
    /// With [`OutputMode::Quiet0`], the process that now holds place 0 has none.
    fn prefix_of_output(
        &self,
        server: &Arc<RendezvousServer>,
        process: usize,
    ) -> impl Fn() -> String + use<> {
        let is_quiet = self.output == OutputMode::Quiet0;
        // The output may last longer than the job.
        let server: Weak<RendezvousServer> = Arc::downgrade(server);
        let processes = self.processes;
        let prefix = self.prefix_of(OutputStream::Out, process);

        let is_first = move || {
            let job = server
                .upgrade()
                .map(|server| JobStanding::of(&server, processes));
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

    /// Prints errors that were held back, with the numbers of the processes that printed them.
    fn show(&self, errors: &[PrintedError]) {
        for PrintedError { processes, text } in errors {
            let prefix = match processes.as_slice() {
                [process] => self.prefix_of(OutputStream::Err, *process),
                _ if !self.prefix => String::new(),
                several => {
                    let numbers: Vec<String> = several.iter().map(ToString::to_string).collect();
                    format!("[{}] ", numbers.join(","))
                }
            };
            // There is no other place for an error of writing.
            let _ = OutputStream::Err.write(&output::prefixed(&prefix, text.as_bytes()));
        }
    }
}

/// The phases of ending a job.
#[derive(Clone, Copy)]
enum EndingPhase {
    NotYet,
    Grace(Instant),
    Asked(Instant),
    Killed,
}

/// Time from SIGTERM to SIGKILL.
const AFTER_TERM: Duration = Duration::from_secs(2);

/// Time after a first exit with a failure in which a death by a signal still counts as its cause. A
/// process that a signal kills closes its connections before the launcher sees its death. Other
/// processes may exit over that first.
const SAME_MOMENT: Duration = Duration::from_millis(500);

/// Maximum wait for the remaining output of a process after its end. A grandchild may have left the
/// process group and still hold the output open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// The processes of a job. Dropping this value ends all of them.
struct StartedProcesses {
    running: Vec<StartedProcess>,
    guard: JobGuard,
    memory_kills: MemoryKills,
}

/// A process that the launcher started. It may have ended.
struct StartedProcess {
    /// The number that the process was started with. An earlier process that died may have had the
    /// same number.
    number: usize,
    child: Child,
    /// The pid of the process, and the id of its process group.
    pid: Pid,
    /// True once the launcher has sent SIGKILL.
    is_killed: bool,
    how: Option<ExitKind>,
    output: Vec<Receiver<()>>,
    words: Arc<LastWords>,
}

impl StartedProcess {
    /// Sends SIGKILL to the process group of the process.
    fn kill(&mut self) {
        self.is_killed = true;
        let _ = kill_process_group(self.pid, Signal::KILL);
    }

    /// Waits until all output of an ended process is read, but not beyond time `until`.
    fn wait_for_output(&self, until: Instant) {
        for output in &self.output {
            // The wait ends by disconnection when the output's thread ends.
            let _ = output.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl StartedProcesses {
    /// Starts the process with the number `process`.
    fn start(
        &mut self,
        process: usize,
        launch: &Launch,
        mut command: Command,
        server: &Arc<RendezvousServer>,
        events: &Sender<JobEvent>,
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
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();

        // From here on the child is ended also if a later step fails.
        let place = self.running.len();
        let words = Arc::<LastWords>::default();
        self.running.push(StartedProcess {
            number: process,
            child,
            pid,
            is_killed: false,
            how: None,
            output: Vec::new(),
            words: words.clone(),
        });

        let mut output = Vec::new();
        if let Some(stdout) = stdout {
            let prefix = launch.prefix_of_output(server, process);
            let events = events.clone();
            // The receiver is gone if the job has ended.
            let failed = move |error| drop(events.send(JobEvent::NoOutput(error)));
            let copy = move || output::copy(stdout, prefix, failed);
            output.push(thread("mpmd-stdout", copy)?);
        }
        if let Some(stderr) = stderr {
            let prefix = match is_direct {
                true => String::new(),
                false => launch.prefix_of(OutputStream::Err, process),
            };
            let copy = move || output::copy_errors(stderr, &prefix, &words);
            output.push(thread("mpmd-stderr", copy)?);
        }

        let events = events.clone();
        thread("mpmd-wait", move || report_end(pid, place, &events))?;

        self.running[place].output = output;
        Ok(())
    }

    fn is_any_alive(&self) -> bool {
        self.running.iter().any(|running| running.how.is_none())
    }

    /// Removes the held errors of all processes. Returns them with the numbers of their processes.
    fn take_words(&self) -> Vec<(usize, Vec<String>)> {
        self.running
            .iter()
            .map(|running| (running.number, running.words.take()))
            .collect()
    }

    /// Kills the remaining group of an ended process and reaps the process. Returns the way in
    /// which it ended.
    fn reap(&mut self, process: usize) -> ExitKind {
        let running = &mut self.running[process];
        let _ = kill_process_group(running.pid, Signal::KILL);
        self.guard.tell('-', running.pid);
        // The status is unknown if another part of this program has reaped the process.
        let how = match running.child.wait().map_or(ExitKind::Exit(1), ExitKind::of) {
            how if running.is_killed && how.code() == ExitKind::Killed.code() => ExitKind::Killed,
            ExitKind::Signal(signal) if signal == Signal::KILL.as_raw() => {
                match self.memory_kills.take_one() {
                    true => ExitKind::MemoryFull,
                    false => ExitKind::Signal(signal),
                }
            }
            how => how,
        };
        running.how = Some(how);
        how
    }

    /// Sends SIGKILL to the process groups of all processes that have not ended.
    fn kill_all(&mut self) {
        self.running
            .iter_mut()
            .filter(|running| running.how.is_none())
            .for_each(StartedProcess::kill);
    }

    /// Sends a signal to the process groups of all processes that have not ended.
    fn signal(&self, signal: Signal) {
        for running in self.running.iter().filter(|running| running.how.is_none()) {
            let _ = kill_process_group(running.pid, signal);
        }
    }
}

/// The first failure of a process, which ends the job.
#[derive(Clone, Copy)]
struct FirstFailure {
    place: ProcessId,
    how: ExitKind,
    at: Instant,
}

/// The launcher's state while it watches a running job.
///
/// After a first failure or a signal it ends the remaining processes: a grace period, then SIGTERM,
/// then SIGKILL. In a job that recovers, it first tries to replace lost processes.
struct JobWatch<'a, F> {
    job: StartedProcesses,
    launch: &'a Launch,
    server: &'a RendezvousServer,
    /// Function that starts the process with a given number.
    start: F,
    replacing: ProcessReplacement,
    /// Number of processes that were started with the job.
    first_ones: usize,
    ending: EndingPhase,
    /// Length of the grace period, once it has begun.
    grace: Duration,
    first: Option<FirstFailure>,
    stop: JobStop,
    /// The way in which the most recently lost process ended.
    lost: Option<ExitKind>,
    /// The time at which held errors are shown if the job has not ended by then; `None` until the
    /// job begins to end.
    show_at: Option<Instant>,
    /// The errors shown before the end of the job, by the number of the process.
    shown: Vec<(usize, Vec<String>)>,
}

impl<'a, F> JobWatch<'a, F>
where
    F: FnMut(&mut StartedProcesses, usize) -> Result<(), LaunchError>,
{
    fn new(
        job: StartedProcesses,
        launch: &'a Launch,
        server: &'a RendezvousServer,
        start: F,
    ) -> Self {
        Self {
            first_ones: job.running.len(),
            job,
            launch,
            server,
            start,
            replacing: ProcessReplacement::new(launch),
            ending: EndingPhase::NotYet,
            grace: Duration::ZERO,
            first: None,
            stop: JobStop::default(),
            lost: None,
            show_at: None,
            shown: Vec::new(),
        }
    }

    /// Handles events until all processes have ended. Returns the result of the job.
    fn run(mut self, happened: &Receiver<JobEvent>) -> JobOutcome {
        while self.must_wait() {
            self.tell_if_processes_may_start();
            match self.next_event(happened) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) if self.is_late_for_errors() => {
                    self.show_held_errors();
                }
                Err(RecvTimeoutError::Timeout) => self.handle_timeout(),
                // Cannot happen: the signals' thread holds a sender.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }

        let until = Instant::now() + LAST_OUTPUT;
        self.job
            .running
            .iter()
            .for_each(|running| running.wait_for_output(until));
        // The last lines of a process are written after its end.
        for event in happened.try_iter() {
            if let JobEvent::NoOutput(error) = event {
                self.stop.lose_output(&error, self.first.is_some());
            }
        }
        self.outcome()
    }

    /// True while a process runs. Also true while processes of other launchers keep the job going,
    /// because they need this launcher's rendezvous service.
    fn must_wait(&self) -> bool {
        if self.job.is_any_alive() {
            return true;
        }
        if !matches!(self.ending, EndingPhase::NotYet) || !self.replacing.recovers() {
            return false;
        }
        let ours: Vec<_> = self
            .job
            .running
            .iter()
            .map(|running| running.number)
            .collect();
        self.standing().goes_on_elsewhere(&ours)
    }

    fn standing(&self) -> JobStanding {
        JobStanding::of(self.server, self.launch.processes)
    }

    /// Tells the rendezvous service how many processes may still come for free places: replacements
    /// not started yet, and processes that have not joined yet. Before the job is complete, the
    /// processes that it was started with have places of their own.
    fn tell_if_processes_may_start(&self) {
        if !self.replacing.recovers() {
            return;
        }
        let job = self.standing();
        let placed = match self.server.is_complete() {
            true => 0,
            false => self.launch.processes,
        };
        let joins =
            |running: &&StartedProcess| running.how.is_none() && !job.is_known(running.number);
        let others = self.job.running.iter().skip(placed);
        let joining = others.filter(joins).count();
        self.server
            .may_start(self.replacing.left().saturating_add(joining));
    }

    /// Waits for an event, but not beyond the next deadline.
    fn next_event(&mut self, happened: &Receiver<JobEvent>) -> Result<JobEvent, RecvTimeoutError> {
        match self.ending {
            EndingPhase::Grace(until) | EndingPhase::Asked(until) => {
                let show_at = *self.show_at.get_or_insert_with(|| Instant::now() + HOLD);
                let until = until.min(show_at);
                happened.recv_timeout(until.saturating_duration_since(Instant::now()))
            }
            EndingPhase::NotYet if self.replacing.must_look() => happened.recv_timeout(LOOK),
            // No timeout: a healthy job may take days, and a killed process ends.
            EndingPhase::NotYet | EndingPhase::Killed => {
                happened.recv().map_err(|_| RecvTimeoutError::Disconnected)
            }
        }
    }

    fn is_late_for_errors(&self) -> bool {
        self.shown.is_empty() && self.show_at.is_some_and(|at| at <= Instant::now())
    }

    /// Shows the errors that processes have printed. If none has printed one, says which process
    /// has failed and that the others are still awaited.
    fn show_held_errors(&mut self) {
        self.show_at = Some(after(Instant::now(), Duration::MAX));
        self.shown = self.job.take_words();
        self.launch.show(&last_words::merged(&self.shown));

        let mut running = self.job.running.iter();
        let is_silent = !running.any(|running| running.words.has_error());
        if let (EndingPhase::Grace(until), Some(FirstFailure { place, how, .. })) =
            (self.ending, self.first)
            && is_silent
        {
            let left = until
                .saturating_duration_since(Instant::now())
                .as_secs_f64();
            say(format!(
                "process {place} has failed: {how}. The others have up to {left:.0} s to end"
            ));
        }
    }

    fn handle(&mut self, event: JobEvent) {
        match event {
            JobEvent::Ended(ended) => self.handle_end(ended),
            JobEvent::Signal(signal) => {
                let has_failed = self
                    .first
                    .is_some_and(|first| first.at.elapsed() >= SAME_MOMENT);
                self.stop.ask(signal, has_failed);
                if self.stop.is_new(signal, Instant::now()) {
                    self.job.signal(signal);
                }
                self.begin_grace(self.launch.grace_after_signal());
            }
            JobEvent::NoOutput(error) => {
                // A second SIGTERM would end a process that saves.
                if self.stop.lose_output(&error, self.first.is_some()) {
                    self.job.signal(Signal::TERM);
                }
                self.begin_grace(self.launch.grace_after_signal());
            }
            JobEvent::Stop => {
                self.job.signal(Signal::STOP);
                // The launcher catches SIGTSTP, so it must stop itself with SIGSTOP. This stops
                // all its threads. The rendezvous service then notices that it was stopped, and
                // does not count any process as silent.
                let _ = kill_process(getpid(), Signal::STOP);
            }
            JobEvent::Continue => {
                self.job.signal(Signal::CONT);
                // Deadlines restart: no process could act while stopped.
                self.ending = match self.ending {
                    EndingPhase::Grace(_) => EndingPhase::Grace(after(Instant::now(), self.grace)),
                    EndingPhase::Asked(_) => EndingPhase::Asked(Instant::now() + AFTER_TERM),
                    other => other,
                };
            }
        }
    }

    /// Starts the grace period that ends the job, unless the job is ending already. No process is
    /// started any more, so those that go on must not wait for one.
    fn begin_grace(&mut self, grace: Duration) {
        self.replacing.start_no_more();
        if matches!(self.ending, EndingPhase::NotYet) {
            self.grace = grace;
            self.ending = EndingPhase::Grace(after(Instant::now(), grace));
        }
    }

    /// Handles the end of a process. `ended` is its index in the order of starts.
    fn handle_end(&mut self, ended: usize) {
        let how = self.job.reap(ended);
        let is_ending = !matches!(self.ending, EndingPhase::NotYet);
        let StartedProcess { number, pid, .. } = self.job.running[ended];
        let job = self.standing();
        self.replacing.learn(self.server.may_shrink());
        let meaning = self.replacing.judge(number, how, &job);

        let goes_on = match meaning {
            EndMeaning::Failed(_) | EndMeaning::FailedAtExit(_) => false,
            // The others may end by the same cause before they have joined.
            EndMeaning::NotNeeded => self.server.is_complete(),
            _ => true,
        };
        if goes_on {
            // The end of the job may be far.
            let words = self.job.running[ended].words.release();
            self.launch.show(&last_words::merged(&[(number, words)]));
        }

        let place = match meaning {
            EndMeaning::Nothing => {
                if !is_ending && let Some(place) = job.place(number) {
                    // Those that have joined need not wait for it.
                    let number = ProcessId(number as u32);
                    self.server.place_is_free(number, place, how.to_string());
                }
                return;
            }
            EndMeaning::NotNeeded => {
                if !is_ending && self.server.failure().is_none() {
                    let pid = pid.as_raw_nonzero();
                    say(format!("the job goes on without the spare {pid}: {how}"));
                }
                // It had the arguments and the files of all that would follow.
                if self.server.refusal(ProcessId(number as u32)).is_some() {
                    self.replacing.start_no_more();
                }
                return;
            }
            EndMeaning::Lost(place) if !is_ending => {
                let pid = pid.as_raw_nonzero();
                say(format!("lost the process with pid {pid}: {how}"));
                self.lost = Some(how);
                if !self.replace(number, &job) && self.has_no_spare(&job) {
                    say("no spare is left for its place: give more with --restart or --spares");
                }
                self.tell_if_processes_may_start();
                let number = ProcessId(number as u32);
                self.server.place_is_free(number, place, how.to_string());
                return;
            }
            EndMeaning::FailedAtExit(place) => {
                // The others have ended their parts too, and may still save them.
                let at = Instant::now();
                self.first.get_or_insert(FirstFailure { place, how, at });
                return;
            }
            EndMeaning::Lost(place) | EndMeaning::Failed(place) => place,
        };
        self.note_failure(place, how);
        if !is_ending {
            // Those that wait for it need not.
            self.server.is_not_replaced(place, how.to_string());
        }
        self.begin_grace(self.launch.grace_after_failure());
    }

    /// True if no process that this launcher has started can take a free place, and the job needs
    /// all of its places.
    fn has_no_spare(&self, job: &JobStanding) -> bool {
        let mut alive = self.job.running.iter().filter(|one| one.how.is_none());
        let all_have_places = alive.all(|one| job.place(one.number).is_some());
        all_have_places && !job.is_over && !self.server.may_shrink()
    }

    /// Replaces the lost process `number` by a new one, if one may still be started and the job
    /// goes on. Returns true if it has started one.
    fn replace(&mut self, number: usize, job: &JobStanding) -> bool {
        if job.is_over || !self.replacing.take_one() {
            return false;
        }
        // If it has never joined, others wait for this very number.
        let is_new = self.server.is_complete() || job.is_known(number);
        let number = if is_new {
            self.job.running.len()
        } else {
            number
        };
        self.start_one(number);
        true
    }

    fn start_one(&mut self, number: usize) {
        if let Err(error) = (self.start)(&mut self.job, number) {
            say(format!("a lost process cannot be replaced: {error}"));
        }
    }

    /// Records a failure if it is the first, or if it caused the first: see [`SAME_MOMENT`].
    fn note_failure(&mut self, place: ProcessId, how: ExitKind) {
        match (self.first, self.ending) {
            (None, _) => {
                let at = Instant::now();
                self.first = Some(FirstFailure { place, how, at });
            }
            (Some(before), EndingPhase::Grace(_))
                if self.stop.signal().is_none()
                    && before.at.elapsed() < SAME_MOMENT
                    && matches!(before.how, ExitKind::Exit(_))
                    && matches!(how, ExitKind::Signal(_) | ExitKind::MemoryFull) =>
            {
                let at = before.at;
                self.first = Some(FirstFailure { place, how, at });
            }
            _ => {}
        }
    }

    fn handle_timeout(&mut self) {
        match self.ending {
            EndingPhase::NotYet => self.look_at_places(),
            // The deadline passed long ago, so this process was stopped; SIGCONT will be
            // handled next.
            EndingPhase::Grace(until) if until.elapsed() > SAME_MOMENT => {
                self.ending = EndingPhase::Grace(Instant::now() + SAME_MOMENT);
            }
            EndingPhase::Grace(_) => {
                self.job.signal(Signal::TERM);
                self.ending = EndingPhase::Asked(Instant::now() + AFTER_TERM);
            }
            EndingPhase::Asked(_) | EndingPhase::Killed => {
                self.job.kill_all();
                self.ending = EndingPhase::Killed;
            }
        }
    }

    /// Starts a process if a place of the job is free. Ends a job that no longer needs its living
    /// processes. Kills a process if the user asked for chaos.
    fn look_at_places(&mut self) {
        let job = self.standing();
        let alive: Vec<(usize, usize)> = (0..self.job.running.len())
            .filter(|i| self.job.running[*i].how.is_none())
            .map(|i| (i, self.job.running[i].number))
            .collect();
        let on_their_way = alive
            .iter()
            .filter(|(i, number)| *i >= self.first_ones && !job.is_known(*number))
            .count();
        let numbers = alive.iter().map(|(_, number)| *number);
        if self.replacing.recovers() && on_their_way == 0 && job.needs_none_of(numbers) {
            // A stopped process that was replaced would never end.
            self.begin_grace(self.launch.grace_after_failure());
            return;
        }

        if self.server.wanted() > on_their_way && self.replacing.take_one() {
            self.start_one(self.job.running.len());
        }

        let at_work: Vec<_> = alive
            .iter()
            .filter(|(_, number)| !job.has_left(*number))
            .map(|(i, _)| *i)
            .collect();
        if let Some(victim) = self.replacing.victim(&at_work) {
            let number = self.job.running[victim].number;
            say(format!(
                "chaos kills the process that was started as {number}"
            ));
            self.job.running[victim].kill();
        }
    }

    /// Determines the failure that ended the job. Prints the held errors that this failure does not
    /// contain.
    fn outcome(mut self) -> JobOutcome {
        let recovers = self.replacing.recovers();
        let ended = EndedJob::of(&self.job.running, self.standing(), recovers, self.lost);
        let codes = ended.ends.iter().map(|(_, how)| how.code()).collect();
        let (first, is_open) = self.first_end(&ended);
        let reports = self.server.reports();
        let unformed = self.server.failure();
        let is_direct = self.launch.output == OutputMode::Quiet0;
        if is_direct && ended.ends.contains(&(0, ExitKind::Exit(NO_READER))) {
            self.stop.ask(Signal::PIPE, false);
        }

        let odd = (0..)
            .zip(&ended.by_place)
            .map(|(place, how)| PlaceEnd {
                place: ProcessId(place),
                how: *how,
            })
            .find(|end| self.is_odd(*end, &reports));
        let stopped_by = self.stop.signal().filter(|signal| {
            (first.is_some() || *signal == Signal::PIPE)
                && odd.is_none()
                && reports
                    .iter()
                    .all(|(_, report)| report.failure.is_peer_failure())
        });
        // A process that has ended as requested is not at fault.
        let first = first.map(|first| match odd {
            Some(odd) if !self.is_odd(first, &reports) => odd,
            _ => first,
        });

        let taken = self.job.take_words();
        let all: Vec<_> = self.shown.iter().cloned().chain(taken).collect();
        let errors = last_words::merged(&all);
        let mut unseen = last_words::without(errors.clone(), &last_words::merged(&self.shown));
        if let Some(signal) = stopped_by {
            self.show_stop(signal, &ended, &reports, unseen);
            return JobOutcome {
                first_failure: None,
                stopped_by: Some(signal.as_raw()),
                codes,
            };
        }

        let first_failure = first.map(|first| {
            let known = FailedJob {
                first,
                ends: &ended.by_place,
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
        self.launch.show(&unseen);
        let is_stopped = self.stop.signal().is_some();
        if first_failure.is_none() && !is_stopped && ended.standing.has_no_member() {
            say(
                "no process has joined the job: the program does not use mpmd, or has ended \
                 before `Program::run`",
            );
        }
        JobOutcome {
            first_failure,
            stopped_by: None,
            codes,
        }
    }

    /// Returns the end of the process that made the job fail first. The flag is true if no process
    /// failed but none has ended the program at that place.
    fn first_end(&self, ended: &EndedJob) -> (Option<PlaceEnd>, bool) {
        let open = ended.open_place();
        let first = self
            .first
            .filter(|first| !ended.has_ended_well_instead(first.place));
        match (first, open) {
            (Some(FirstFailure { place, how, .. }), _) => (Some(PlaceEnd { place, how }), false),
            (None, Some(place)) => {
                let how = ended.by_place[place.index()];
                (Some(PlaceEnd { place, how }), true)
            }
            (None, None) => (None, false),
        }
    }

    /// True if the user has stopped the job but this end has another reason.
    fn is_odd(&self, end: PlaceEnd, reports: &[(ProcessId, FailureReport)]) -> bool {
        // A job that recovers goes on without a killed process.
        let may_be_killed = matches!(self.ending, EndingPhase::Killed) || self.replacing.recovers();
        self.stop.signal().is_some()
            && !self
                .stop
                .explains(end.place.index(), end.how, reports, may_be_killed)
    }

    /// Prints the errors of a job that the user has stopped. Omits those of processes that only
    /// report the end of other processes.
    fn show_stop(
        &self,
        signal: Signal,
        ended: &EndedJob,
        reports: &[(ProcessId, FailureReport)],
        mut unseen: Vec<PrintedError>,
    ) {
        let is_told = |number: &usize| {
            ended
                .place_of(*number)
                .is_some_and(|place| is_told(reports, place.index()))
        };
        unseen.retain(|error| !error.processes.iter().all(is_told));
        self.launch.show(&unseen);

        // A program that ends in order says so itself.
        let is_cut = ended
            .by_place
            .iter()
            .any(|how| !matches!(how, ExitKind::Exit(_)));
        if is_cut && signal != Signal::PIPE {
            say(format!("stopped by {}", stop_name(signal.as_raw())));
        }
    }
}

/// A job all of whose processes have ended.
struct EndedJob {
    standing: JobStanding,
    recovers: bool,
    /// (number, way in which the process ended) of each process, in the order of starts.
    ends: Vec<(usize, ExitKind)>,
    /// The numbers of the processes that this launcher started.
    ours: Vec<usize>,
    /// The way in which the last process at each place (rank) ended.
    by_place: Vec<ExitKind>,
}

impl EndedJob {
    /// Determines the end at each place. A place without a known end counts as ended like `lost`,
    /// the most recently lost process.
    fn of(
        running: &[StartedProcess],
        standing: JobStanding,
        recovers: bool,
        lost: Option<ExitKind>,
    ) -> Self {
        let ends: Vec<(usize, ExitKind)> = running
            .iter()
            .map(|running| (running.number, running.how.unwrap_or(ExitKind::Exit(1))))
            .collect();
        let mut ended = Self {
            standing,
            recovers,
            ours: ends.iter().map(|(number, _)| *number).collect(),
            ends,
            by_place: Vec::new(),
        };

        let mut known: Vec<Option<ExitKind>> = vec![None; ended.standing.places];
        for (number, how) in &ended.ends {
            let place = ended.place_of(*number);
            if let Some(end) = place.and_then(|place| known.get_mut(place.index())) {
                *end = Some(*how);
            }
        }
        let unknown = lost.unwrap_or(ExitKind::Exit(1));
        ended.by_place = ended
            .places()
            .zip(known)
            .map(|(place, end)| match ended.has_left_elsewhere(place) {
                true => ExitKind::Exit(0),
                false => end.unwrap_or(unknown),
            })
            .collect();
        ended
    }

    fn places(&self) -> impl Iterator<Item = ProcessId> + use<> {
        (0..self.standing.places as u32).map(ProcessId)
    }

    /// Returns the place of the process that was started as `number`.
    fn place_of(&self, number: usize) -> Option<ProcessId> {
        match self.recovers {
            true => self.standing.place(number),
            false => Some(ProcessId(number as u32)),
        }
    }

    fn has_left_elsewhere(&self, place: ProcessId) -> bool {
        self.standing.has_left_elsewhere(place, &self.ours)
    }

    /// Returns the first place at which no process has ended the program, if the job recovers.
    fn open_place(&self) -> Option<ProcessId> {
        let ends = || self.ends.iter().copied();
        self.places().find(|place| {
            self.recovers
                && !self.has_left_elsewhere(*place)
                && !self.standing.is_done(*place, ends())
        })
    }

    /// True if a process has ended successfully at `place` after another failed there: a spare took
    /// the place while the job ended.
    fn has_ended_well_instead(&self, place: ProcessId) -> bool {
        self.recovers && self.by_place[place.index()] == ExitKind::Exit(0)
    }
}

impl Drop for StartedProcesses {
    fn drop(&mut self) {
        for process in 0..self.running.len() {
            if self.running[process].how.is_none() {
                self.reap(process);
            }
        }
    }
}

/// Waits for the end of a process and sends it as an event. `place` is the process's index in the
/// order of starts.
fn report_end(pid: Pid, place: usize, events: &Sender<JobEvent>) {
    // NOWAIT leaves the process unreaped, so that the system cannot reuse its pid yet.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(
        waitid(WaitId::Pid(pid), options),
        Err(rustix::io::Errno::INTR)
    ) {}
    // The receiver is gone if the launch has failed meanwhile.
    let _ = events.send(JobEvent::Ended(place));
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
