//! [`Launch`]: which processes to start, and how each finds out what it is.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use mpmd_transport::rendezvous::{Server, Token};
use rustix::process::{
    Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal, test_kill_process,
};

use super::output::Color;
use super::{LaunchError, Outcome, supervise, variables};

/// Starts all processes of a job on this machine and sees them to their end.
///
/// The launcher runs the job's rendezvous service; each process is told of it by `MPMD_*`
/// variables, see [`variables`], and has a process group of its own. Its standard input is empty.
/// Where the user has not set them, `UCX_HANDLE_ERRORS` and `UCX_ERROR_SIGNALS` are set so that UCX
/// leaves faults to the program.
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `run`"]
pub struct Launch {
    pub(super) processes: usize,
    program: OsString,
    args: Vec<OsString>,
    transport: Option<String>,
    devices_per_process: Option<usize>,
    device: Option<String>,
    variables: Vec<(OsString, OsString)>,
    pub(super) prefix: bool,
    pub(super) color: Color,
    pub(super) patience: Duration,
    pub(super) grace: Duration,
    pub(super) output: OutputMode,
    pub(super) guard: Option<(OsString, Vec<OsString>)>,
}

/// Where the processes' output goes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum OutputMode {
    /// Line by line to this process's output, each line with its process's number.
    #[default]
    Prefixed,
    /// The same, but process 0 writes to this process's output itself: for programs that draw a
    /// progress bar there.
    Quiet0,
}

impl Launch {
    /// A job of `processes` times `program`, which is looked for like a shell does.
    pub fn new(processes: usize, program: impl Into<OsString>) -> Self {
        Self {
            processes,
            program: program.into(),
            args: Vec::new(),
            transport: None,
            devices_per_process: None,
            device: None,
            variables: Vec::new(),
            prefix: true,
            color: Color::Auto,
            patience: Duration::from_secs(60),
            grace: Duration::from_secs(6),
            output: OutputMode::Prefixed,
            guard: None,
        }
    }

    /// A job of `processes` times the program that is running, with the same arguments.
    ///
    /// # Errors
    ///
    /// Where the operating system does not say which program this is.
    pub fn this_program_again(processes: usize) -> Result<Self, LaunchError> {
        let program = std::env::current_exe()
            .map_err(|e| LaunchError::environment("finding this program", e))?;
        Ok(Self::new(processes, program).args(std::env::args_os().skip(1)))
    }

    /// Adds arguments for the program.
    pub fn args<T: Into<OsString>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// The transport that the processes should use; by default what they choose.
    pub fn transport(mut self, transport: Option<String>) -> Self {
        self.transport = transport;
        self
    }

    /// The number of devices of each process; by default what it chooses.
    pub fn devices_per_process(mut self, devices: Option<usize>) -> Self {
        self.devices_per_process = devices;
        self
    }

    /// Of which kind the processes' devices are, as [`variables::DEVICE`] says it; by default what
    /// they choose.
    pub fn device(mut self, device: Option<String>) -> Self {
        self.device = device;
        self
    }

    /// Sets an environment variable for the processes, beside what they inherit. Those by which the
    /// launcher itself speaks to them go before.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Whether each line of output says whose it is. By default it does.
    pub fn prefix(mut self, prefix: bool) -> Self {
        self.prefix = prefix;
        self
    }

    /// Whether prefixes are coloured. By default on terminals.
    pub fn color(mut self, color: Color) -> Self {
        self.color = color;
        self
    }

    /// How long the processes wait for each other; 60 seconds by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How long the others may go on once one has failed, to say themselves what became of them; 6
    /// seconds by default. After it they get SIGTERM, and after 2 more seconds SIGKILL.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Where output goes.
    pub fn output(mut self, output: OutputMode) -> Self {
        self.output = output;
        self
    }

    /// Starts `program` beside the job, which must call [`guard`]: it ends the processes, and those
    /// that they have started, where this one dies without having been able to.
    ///
    /// Without a guard the processes themselves still end, if they call [`adopt`].
    pub fn guarded_by<T: Into<OsString>>(
        mut self,
        program: impl Into<OsString>,
        args: impl IntoIterator<Item = T>,
    ) -> Self {
        self.guard = Some((program.into(), args.into_iter().map(Into::into).collect()));
        self
    }

    /// Starts the processes and waits until all have ended, and what they started with them.
    ///
    /// Forwards SIGINT, SIGTERM and SIGHUP to them, and from then on this process no longer ends by
    /// those signals on its own. SIGTSTP (Ctrl-Z) stops the processes and this one, SIGCONT
    /// continues them. The time between counts for nobody's patience. Must be called on a thread
    /// that is not to end before the job.
    ///
    /// # Errors
    ///
    /// Where the job could not be started; then nothing is left of it. What becomes of a job that
    /// has started is said by the [`Outcome`].
    pub fn run(&self) -> Result<Outcome, LaunchError> {
        supervise::run(self)
    }

    pub(super) fn command(&self, process: usize, server: &Server, token: &Token) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(variables::RANK, process.to_string())
            .env(variables::WORLD_SIZE, self.processes.to_string())
            .env(variables::LOCAL_RANK, process.to_string())
            .env(variables::COORDINATOR, server.address().to_string())
            .env(variables::HOSTED, "1")
            .env(variables::JOB_TOKEN, token.to_hex())
            .env(variables::PATIENCE, self.patience.as_secs_f64().to_string())
            .env(variables::LAUNCHER_PID, std::process::id().to_string())
            .stdin(Stdio::null())
            .process_group(0);
        for (name, value) in UCX {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        if let Some(transport) = &self.transport {
            command.env(variables::TRANSPORT, transport);
        }
        if let Some(devices) = self.devices_per_process {
            command.env(variables::DEVICES_PER_PROCESS, devices.to_string());
        }
        if let Some(device) = &self.device {
            command.env(variables::DEVICE, device);
        }
        command
    }

    /// Why `program` could not be started.
    pub(super) fn not_started(&self, error: &std::io::Error) -> LaunchError {
        let program = self.program.to_string_lossy().into_owned();
        match error.kind() {
            ErrorKind::NotFound => LaunchError::NotFound { program },
            _ => LaunchError::environment(format!("starting {program}"), error),
        }
    }
}

/// What UCX is told unless the user says otherwise. It reads these when it is loaded, before a
/// program can say anything: leave faults to Rust, catch no signals.
const UCX: [(&str, &str); 2] = [("UCX_HANDLE_ERRORS", "none"), ("UCX_ERROR_SIGNALS", "")];

/// Makes this process end when its parent does, where a launcher of ours has started it; else does
/// nothing. Survives `exec`, not `fork`.
///
/// # Errors
///
/// [`LaunchError::Orphaned`] where the launcher is gone already: this process should end too.
pub fn adopt() -> Result<(), LaunchError> {
    let Some(launcher) = std::env::var(variables::LAUNCHER_PID).ok().filter(|pid| !pid.is_empty())
    else {
        return Ok(());
    };
    let pid =
        launcher.parse().ok().and_then(Pid::from_raw).ok_or_else(|| LaunchError::Variable {
            variable: variables::LAUNCHER_PID.into(),
            value: launcher.clone(),
            expected: "a process number".into(),
        })?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| LaunchError::environment("asking to end with the launcher", e))?;
    // It may have died before the request. Where something stands between (a shell, a debugger),
    // that is the parent, and the launcher just has to be alive.
    if getppid() == Some(pid) || test_kill_process(pid) != Err(rustix::io::Errno::SRCH) {
        return Ok(());
    }
    Err(LaunchError::Orphaned { launcher })
}

/// The work of a program started by [`Launch::guarded_by`]: reads from `launcher`, its standard
/// input, which process groups there are, and ends them when the launcher has gone without ending
/// them.
pub fn guard(launcher: impl Read) {
    let mut groups: Vec<Pid> = Vec::new();
    for line in BufReader::new(launcher).lines().map_while(Result::ok) {
        let Some((sign, pid)) = line.split_at_checked(1) else { continue };
        let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) else { continue };
        groups.retain(|&group| group != pid);
        if sign == "+" {
            groups.push(pid);
        }
    }
    for group in groups {
        // Those that ended with the launcher are no longer there.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;

    use mpmd_transport::rendezvous::ServerConfig;

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").process_group(0).spawn().unwrap()
    }

    #[test]
    fn a_variable_that_is_set_goes_before_an_inherited_one_and_after_ours() {
        let token = Token::new([1; 32]);
        let config =
            ServerConfig { processes: 2, token: token.clone(), patience: Duration::from_secs(1) };
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), config).unwrap();
        let launch = Launch::new(2, "true")
            .env("HOME", "first")
            .env("HOME", "last")
            .env(variables::RANK, "7");
        let command = launch.command(1, &server, &token);
        let set = |name: &str| {
            let found = command.get_envs().find(|(other, _)| *other == name);
            found.and_then(|(_, value)| value?.to_str().map(str::to_owned))
        };
        assert_eq!(set("HOME").as_deref(), Some("last"));
        assert_eq!(set(variables::RANK).as_deref(), Some("1"));
    }

    #[test]
    fn a_guard_ends_the_groups_it_was_left_with_and_no_others() {
        let (mut left, mut ended) = (sleeper(), sleeper());
        let told = format!("+{}\n+{}\nnonsense\n-{}\n", left.id(), ended.id(), ended.id());
        guard(told.as_bytes());
        assert!(!left.wait().unwrap().success());
        assert!(ended.try_wait().unwrap().is_none());
        ended.kill().unwrap();
        ended.wait().unwrap();
    }
}
