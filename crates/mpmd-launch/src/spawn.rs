//! [`Launch`]: the settings of a job on this machine, and the environment of its processes.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use mpmd_rendezvous::{RendezvousServer, ServerConfig, Token};
use rustix::process::{
    Pid, Resource, Signal, getppid, getrlimit, kill_process_group, set_parent_process_death_signal,
    setrlimit, test_kill_process,
};

use super::{JobEnv, LaunchError, reach_loopback, variables};

/// A job whose processes all run on this machine. [`run`](Self::run) starts them and waits until
/// they have ended.
///
/// The launcher runs the job's rendezvous service. `MPMD_*` variables tell each process the address
/// of the service, see [`variables`]. Each process has its own process group, and its standard
/// input is empty. Unless the user has set `UCX_HANDLE_ERRORS` and `UCX_ERROR_SIGNALS`, they are
/// set so that UCX leaves faults to the program.
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `run`"]
pub struct Launch {
    pub(super) processes: usize,
    pub(super) spares: usize,
    pub(super) restarts: usize,
    pub(super) chaos: Option<Duration>,
    program: OsString,
    args: Vec<OsString>,
    transport: Option<String>,
    devices_per_process: Option<usize>,
    device: Option<String>,
    variables: Vec<(OsString, OsString)>,
    pub(super) prefix: bool,
    peer_timeout: Option<Duration>,
    grace: Option<Duration>,
    pub(super) output: OutputMode,
    pub(super) guard: Option<GuardCommand>,
}

/// The command line of the program that runs beside a job as its guard.
#[derive(Clone, Debug)]
pub(super) struct GuardCommand {
    pub(super) program: OsString,
    pub(super) args: Vec<OsString>,
}

/// The destination of the processes' output.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum OutputMode {
    /// To this process's output, line by line, with the process number before each line.
    #[default]
    Prefixed,
    /// As with `Prefixed`, but process 0 writes directly to this process's output. For programs
    /// that draw a progress bar there.
    Quiet0,
}

impl Launch {
    /// Creates a job that runs `program` in `processes` processes. The program is looked up in
    /// `PATH`.
    pub fn new(processes: usize, program: impl Into<OsString>) -> Self {
        Self {
            processes,
            spares: 0,
            restarts: 0,
            chaos: None,
            program: program.into(),
            args: Vec::new(),
            transport: None,
            devices_per_process: None,
            device: None,
            variables: Vec::new(),
            prefix: true,
            peer_timeout: None,
            grace: None,
            output: OutputMode::Prefixed,
            guard: None,
        }
    }

    /// Creates a job that runs this program again, with the same arguments, in `processes`
    /// processes.
    ///
    /// # Errors
    ///
    /// If the operating system does not report this program's path.
    pub fn this_program_again(processes: usize) -> Result<Self, LaunchError> {
        let program = std::env::current_exe()
            .map_err(|e| LaunchError::environment("finding this program", e))?;
        Ok(Self::new(processes, program).args(std::env::args_os().skip(1)))
    }

    /// Starts `spares` more processes, each of which waits until it can replace a lost process. The
    /// program must support recovery: see `Builder::spares` of `mpmd-core`.
    pub fn spares(mut self, spares: usize) -> Self {
        self.spares = spares;
        self
    }

    /// Allows up to `restarts` new processes to be started to replace lost ones. The program must
    /// support recovery.
    pub fn restarts(mut self, restarts: usize) -> Self {
        self.restarts = restarts;
        self
    }

    /// Kills a random process repeatedly, on average after each interval `every`. Stops when no
    /// replacement may be started. For tests of a program's recovery.
    pub fn chaos(mut self, every: Option<Duration>) -> Self {
        self.chaos = every;
        self
    }

    /// True if the job can lose processes and go on.
    pub(super) fn recovers(&self) -> bool {
        self.spares + self.restarts > 0
    }

    /// Adds arguments for the program.
    pub fn args<T: Into<OsString>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets the transport of the processes, and overrides [`variables::TRANSPORT`]. By default the
    /// processes choose it.
    pub fn transport(mut self, transport: Option<String>) -> Self {
        self.transport = transport;
        self
    }

    /// Sets the number of devices of each process, and overrides
    /// [`variables::DEVICES_PER_PROCESS`]. By default the program chooses it.
    pub fn devices_per_process(mut self, devices: Option<usize>) -> Self {
        self.devices_per_process = devices;
        self
    }

    /// Sets the kinds of the processes' devices, and overrides [`variables::DEVICE`], whose format
    /// it has. By default the program chooses them.
    pub fn device(mut self, device: Option<String>) -> Self {
        self.device = device;
        self
    }

    /// Sets an environment variable for the processes, in addition to the inherited ones. The
    /// launcher's own variables override it.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets whether each line of output starts with its process number. The default is `true`.
    pub fn prefix(mut self, prefix: bool) -> Self {
        self.prefix = prefix;
        self
    }

    /// Sets the peer timeout: the maximum time for which processes wait for each other. The default
    /// is the value of [`variables::PEER_TIMEOUT`], else 60 seconds.
    pub fn peer_timeout(mut self, peer_timeout: Duration) -> Self {
        self.peer_timeout = Some(peer_timeout);
        self
    }

    /// Sets how long processes may continue after the first failure of one, to report their own
    /// errors, and after a signal that the launcher has passed on to them, to end their work. The
    /// default is 6 seconds after a failure, and 60 after a signal. Then they get SIGTERM, and 2
    /// seconds later SIGKILL.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = Some(grace);
        self
    }

    pub(super) fn grace_after_failure(&self) -> Duration {
        self.grace.unwrap_or(Duration::from_secs(6))
    }

    /// Enough for a last step with its checkpoint, or for a server's open requests.
    pub(super) fn grace_after_signal(&self) -> Duration {
        self.grace.unwrap_or(Duration::from_secs(60))
    }

    /// Sets the destination of the processes' output.
    pub fn output(mut self, output: OutputMode) -> Self {
        self.output = output;
        self
    }

    /// Makes `run` start `program` with `args` beside the job; this program must call [`guard`]. If
    /// the launcher dies before it can end the job's processes, the guard kills them and their
    /// children.
    ///
    /// Without a guard, the processes still end with the launcher if they call [`adopt`].
    pub fn guarded_by<T: Into<OsString>>(
        mut self,
        program: impl Into<OsString>,
        args: impl IntoIterator<Item = T>,
    ) -> Self {
        self.guard = Some(GuardCommand {
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
        });
        self
    }

    pub(super) fn command(
        &self,
        process: usize,
        server: &RendezvousServer,
        token: &Token,
    ) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .envs(self.settings())
            .env(variables::RANK, process.to_string())
            .env(variables::WORLD_SIZE, self.processes.to_string())
            .env(variables::RESTARTS, self.restarts.to_string())
            .env(variables::LOCAL_RANK, process.to_string())
            .env(
                variables::SPARES,
                self.spares
                    .max((process + 1).saturating_sub(self.processes))
                    .to_string(),
            )
            .env(variables::COORDINATOR, server.address().to_string())
            .env(variables::HOSTED, "1")
            .env(variables::JOB_TOKEN, token.to_hex())
            .env(variables::LAUNCHER_PID, std::process::id().to_string())
            .stdin(Stdio::null())
            .process_group(0);

        for (name, value) in UCX {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        command
    }

    /// Returns the (name, value) variables for the settings that the caller has made. Processes
    /// inherit all other variables.
    fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        let timeout = self
            .peer_timeout
            .map(|timeout| timeout.as_secs_f64().to_string());
        let settings = [
            (variables::PEER_TIMEOUT, timeout),
            (variables::TRANSPORT, self.transport.clone()),
            (
                variables::DEVICES_PER_PROCESS,
                self.devices_per_process.map(|n| n.to_string()),
            ),
            (variables::DEVICE, self.device.clone()),
        ];
        settings
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
    }

    /// Reads the settings as the processes will read them. Fails if one is invalid. So the user
    /// gets the error once, before any process starts.
    fn read_settings(&self) -> Result<JobEnv, LaunchError> {
        let settings: Vec<_> = self.settings().collect();
        let look = |name: &str| {
            let set = settings
                .iter()
                .find(|(of, _)| *of == name)
                .map(|(_, value)| value.clone());
            let added = || self.variables.iter().rev().find(|(of, _)| of == name);
            let added = || added().map(|(_, value)| value.to_string_lossy().into_owned());
            set.or_else(added).or_else(|| std::env::var(name).ok())
        };

        JobEnv::settings(&look, self.processes)
    }

    /// Starts the rendezvous service of the job on this machine.
    pub(super) fn serve(&self) -> Result<(RendezvousServer, Token), LaunchError> {
        let processes = self.processes;
        if processes == 0 || u32::try_from(processes).is_err() {
            return Err(LaunchError::Processes { processes });
        }
        let token =
            Token::random().map_err(|e| LaunchError::environment("making a job token", e))?;

        // Otherwise each process would try to connect until the peer timeout.
        reach_loopback().map_err(|error| LaunchError::NoLoopback {
            why: error.to_string(),
        })?;
        let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let peer_timeout = self
            .read_settings()?
            .peer_timeout
            .unwrap_or(DEFAULT_PEER_TIMEOUT);
        let config = ServerConfig {
            processes,
            token: token.clone(),
            peer_timeout,
        };
        Ok((RendezvousServer::bind(here, config)?, token))
    }
}

/// Raises this process's limit of open files to the number that a job of `processes` needs. Each
/// process takes two pipes and one connection.
///
/// # Errors
///
/// If the system does not allow that many.
pub(super) fn make_room(processes: usize) -> Result<(), LaunchError> {
    let needed = 64 + 4 * processes as u64;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }

    let refused = |why: String| {
        LaunchError::environment(format!("preparing the start of {processes} processes"), why)
    };
    if let Some(most) = limit.maximum.filter(|most| *most < needed) {
        return Err(refused(format!(
            "the launcher needs {needed} open files and may have {most}: raise the limit \
             (ulimit -n), or start fewer processes"
        )));
    }

    limit.current = Some(needed);
    setrlimit(Resource::Nofile, limit).map_err(|error| refused(error.to_string()))
}

/// Peer timeout of a job that sets none.
pub const DEFAULT_PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// Default variables for UCX: it must leave faults to the program, and catch no signals. UCX reads
/// them when it is loaded, before `main` runs.
const UCX: [(&str, &str); 2] = [("UCX_HANDLE_ERRORS", "none"), ("UCX_ERROR_SIGNALS", "")];

/// Name of the hidden subcommand of `mpmd` that calls [`adopt`] and then executes another program.
pub const EXEC: &str = "__exec";

/// Makes the system kill this process when its parent ends, if [`Launch`] started this process.
/// Otherwise does nothing. The request survives `exec`, but is not inherited by `fork`.
///
/// # Errors
///
/// [`LaunchError::Orphaned`] if the launcher has already ended; the caller should exit. Other
/// errors if the launcher's pid is invalid or the system refuses.
pub fn adopt() -> Result<(), LaunchError> {
    let Some(launcher) = std::env::var(variables::LAUNCHER_PID)
        .ok()
        .filter(|pid| !pid.is_empty())
    else {
        return Ok(());
    };
    let pid = launcher
        .parse()
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| LaunchError::Variable {
            variable: variables::LAUNCHER_PID.into(),
            value: launcher.clone(),
            expected: "a process number".into(),
        })?;

    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| LaunchError::environment("asking to end with the launcher", e))?;
    // The launcher may have died before the request. If a shell or a debugger is in between, that
    // is the parent. Then the launcher only has to be alive.
    if getppid() == Some(pid) || test_kill_process(pid) != Err(rustix::io::Errno::SRCH) {
        return Ok(());
    }
    Err(LaunchError::Orphaned { launcher })
}

/// Runs the guard of [`Launch::guarded_by`]. Reads the job's process groups from `launcher`, the
/// guard's standard input, and blocks until it ends. Then kills the groups that the launcher has
/// not ended.
pub fn guard(launcher: impl Read) {
    let mut groups: Vec<Pid> = Vec::new();
    for line in BufReader::new(launcher).lines().map_while(Result::ok) {
        let Some((sign, pid)) = line.split_at_checked(1) else {
            continue;
        };
        let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) else {
            continue;
        };

        groups.retain(|&group| group != pid);
        if sign == "+" {
            groups.push(pid);
        }
    }
    for group in groups {
        // Groups that ended with the launcher no longer exist; the error is ignored.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep")
            .arg("60")
            .process_group(0)
            .spawn()
            .unwrap()
    }

    #[test]
    fn set_variables_override_inherited_but_not_own_ones() {
        let launch = Launch::new(2, "true")
            .env("HOME", "first")
            .env("HOME", "last")
            .env(variables::RANK, "7");
        let (server, token) = launch.serve().unwrap();
        let command = launch.command(1, &server, &token);
        let set = |name: &str| {
            let found = command.get_envs().find(|(other, _)| *other == name);
            found.and_then(|(_, value)| value?.to_str().map(str::to_owned))
        };
        assert_eq!(set("HOME").as_deref(), Some("last"));
        assert_eq!(set(variables::RANK).as_deref(), Some("1"));
    }

    #[test]
    fn guard_kills_only_the_remaining_groups() {
        let (mut left, mut ended) = (sleeper(), sleeper());
        let told = format!(
            "+{}\n+{}\nnonsense\n-{}\n",
            left.id(),
            ended.id(),
            ended.id()
        );
        guard(told.as_bytes());
        assert!(!left.wait().unwrap().success());
        assert!(ended.try_wait().unwrap().is_none());
        ended.kill().unwrap();
        ended.wait().unwrap();
    }
}
