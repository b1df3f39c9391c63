//! `JobEnv`: this process's rank and job, from the variables of its launcher.
//!
//! `launchers` reads the variables of each launcher. `complete` adds the `MPMD_*` variables that
//! count under every launcher, and checks the values.

mod address;
mod device;
mod launchers;
mod secret;
mod spin;
#[cfg(test)]
mod tests;
mod timeout;
mod transport;
mod unknown_variables;
mod vars;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mpmd_base::{ProcessId, VectorWidth};
use mpmd_rendezvous::{Token, split_address};

pub use device::{cuda_collectives, device_kinds, kinds_by_process, process_counts};
pub use secret::{read_private, read_secret};
pub use spin::spin;
pub use timeout::peer_timeout;
pub use transport::{TRANSPORTS, check_transport};
pub(super) use unknown_variables::check as check_names;
pub use unknown_variables::{UnknownVariable, unknown_variables_here};

use address::no_address;
use launchers::{DefaultCoordinator, LauncherJob};
use vars::LauncherVars;

use super::{LaunchError, variables as ours};
use mpmd_base::block::Spin;
use mpmd_layout::topology::{CudaCollectives, DeviceKind};

/// Maximum number of processes of a job; a dry run has the same limit. It keeps a bad value from
/// exhausting memory.
const MOST_PROCESSES: usize = 1 << 20;

/// Maximum number of devices of a process. It keeps a bad value from exhausting memory.
const MOST_DEVICES: usize = 1 << 20;

/// The job, rank and settings of this process, as its launcher gives them in environment variables.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct JobEnv {
    /// The number of this process in the job.
    pub process: ProcessId,
    /// Number of processes in the job, without spares.
    pub processes: usize,
    /// Number of spares, or `None` if the launcher does not give it. Spares are processes with
    /// numbers from `processes` on, each of which waits to replace a lost process.
    pub spares: Option<usize>,
    /// Number of processes that the launcher may start in all for the places of lost ones.
    pub restarts: usize,
    /// True if this process was added to a running job.
    pub is_added: bool,
    /// The number of this process among the processes of its host, from 0. `None` if the launcher
    /// does not give it.
    pub local_process: Option<usize>,
    /// The address of the rendezvous service, in the form `host:port`.
    pub coordinator: String,
    /// The source of `coordinator`, for messages: a variable, or a launcher's variables.
    pub coordinator_source: String,
    /// True if the launcher runs the rendezvous service; otherwise process 0 must run it.
    pub hosted: bool,
    /// The job's secret: `MPMD_JOB_TOKEN`, or a token derived from the secret in
    /// `MPMD_JOB_TOKEN_FILE` and the launcher's job number and attempt. Without either variable,
    /// the token is derived from job number and attempt alone.
    pub token: Token,
    /// True if the token is derived only from the launcher's job number and attempt. Such a token
    /// separates jobs, but other users can guess it.
    pub token_is_guessable: bool,
    /// The requested transport, such as `tcp`, if set.
    pub transport: Option<String>,
    /// The time for which the transport polls for work before it sleeps, if set.
    pub spin: Option<Spin>,
    /// Number of devices of each process, if set.
    pub devices_per_process: Option<usize>,
    /// Device kind of each process, if set.
    pub device_kinds: Option<Vec<DeviceKind>>,
    /// The path of collectives between CUDA devices (through the host or NCCL), if set.
    pub cuda_collectives: Option<CudaCollectives>,
    /// The peer timeout, if set: the maximum time for which processes wait for each other.
    pub peer_timeout: Option<Duration>,
    /// The name of this process's host, if it must differ from the name that the system gives.
    pub host: Option<String>,
    /// True if the processes compare host values of any size.
    pub check_uncommitted: bool,
    /// True if the replicas of each kernel's outputs are compared with each other.
    pub check_replicas: bool,
    /// Sampling interval `n`, if set: one in `n` kernel calls is recomputed on another process and
    /// compared. At least 1.
    pub check_replay: Option<u64>,
    /// The settings of a dry run, if this process performs one. The field `process` is then the
    /// process that the dry run imitates, or a number beyond the job.
    pub dry_run: Option<DryRunEnv>,
    /// The name of the launcher that set the variables, for messages.
    pub source: &'static str,
}

/// The settings of a dry run.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct DryRunEnv {
    /// The file that the dry run writes.
    pub file: PathBuf,
    /// Maximum number of steps to run, if set.
    pub steps: Option<u64>,
}

impl JobEnv {
    /// Reads the settings of this process from its environment variables. Returns `None` if no
    /// launcher has started the process; it is then a job of one process.
    ///
    /// Looks for the variables of these launchers, in this order: mpmd itself, torchrun, Open MPI,
    /// Slurm, PMIx, PMI, and Kubernetes indexed jobs. `MPMD_COORDINATOR`, `MPMD_JOB_TOKEN`,
    /// `MPMD_JOB_TOKEN_FILE`, `MPMD_TRANSPORT`, `MPMD_SPIN`, `MPMD_DEVICES_PER_PROCESS`,
    /// `MPMD_CORES`, `MPMD_SIMD`, `MPMD_DEVICE`, `MPMD_CUDA_COLLECTIVES`, `MPMD_PEER_TIMEOUT`,
    /// `MPMD_HOST` and `MPMD_CHECK` count under every launcher.
    ///
    /// If `MPMD_DRY_RUN` is set, launchers' variables are ignored. The process is then a dry run of
    /// a job of `MPMD_DRY_RUN_PROCESSES` processes. It imitates process `MPMD_DRY_RUN_PROCESS`, or
    /// one with a number beyond the job.
    ///
    /// # Errors
    ///
    /// If a launcher's variables are incomplete, or a value is invalid. The error names every
    /// variable that was read, or the invalid one. Also if a variable's name is a misspelt name of
    /// one of mpmd's variables.
    pub fn from_env() -> Result<Option<Self>, LaunchError> {
        unknown_variables::check()?;
        // A variable that is not Unicode counts as unset. But a process with an unreadable
        // `MPMD_DRY_RUN` must fail, not run the program.
        if let Some(file) = std::env::var_os(ours::DRY_RUN)
            && file.to_str().is_none_or(|name| name.trim() != name)
        {
            return Err(LaunchError::Variable {
                variable: ours::DRY_RUN.to_owned(),
                value: file.to_string_lossy().into_owned(),
                expected: "a file name in Unicode, without blanks at its ends".to_owned(),
            });
        }
        Self::from_vars(&|name| std::env::var(name).ok(), &secret::owners())
    }

    /// Returns the settings of a process that is a job by itself, without a launcher. Reads only
    /// the variables that count under every launcher.
    ///
    /// # Errors
    ///
    /// If a value is invalid.
    #[doc(hidden)]
    pub fn alone() -> Result<Self, LaunchError> {
        Self::settings(&|name| std::env::var(name).ok(), 1)
    }

    /// Returns the settings of a job of `processes` before it starts, without rendezvous address
    /// and token. Reads only the variables that count under every launcher.
    ///
    /// # Errors
    ///
    /// If a value is invalid.
    pub(super) fn settings(
        look: &dyn Fn(&str) -> Option<String>,
        processes: usize,
    ) -> Result<Self, LaunchError> {
        const OTHERS: [&str; 5] = [
            ours::COORDINATOR,
            ours::SPARES,
            ours::ADDED,
            ours::JOB_TOKEN,
            ours::JOB_TOKEN_FILE,
        ];
        let look = |name: &str| {
            if OTHERS.contains(&name) {
                None
            } else {
                look(name)
            }
        };

        let said = LauncherJob {
            source: "mpmd",
            process: 0,
            processes,
            local_process: None,
            coordinator: DefaultCoordinator::At("127.0.0.1:1".into()),
            hosted: false,
            job: String::new(),
        };

        let env = complete(&LauncherVars::new(&look, &[]), said)?;
        // A process joins first, so that all hear of its wrong name.
        env.transport.as_deref().map_or(Ok(()), check_transport)?;
        Ok(env)
    }

    /// Reads the environment that the process `pid` was started with, otherwise like
    /// [`from_env`](Self::from_env). Returns `None` if no launcher has started that process. If
    /// `user` is given and the process runs as another user, returns `None` without reading
    /// variables.
    ///
    /// Another user may have chosen these variables. So the file of `MPMD_JOB_TOKEN_FILE` is read
    /// only if it belongs to the user of process `pid`.
    ///
    /// # Errors
    ///
    /// If the variables cannot be read, or the process changes its user, as `sudo` does. Also the
    /// errors of [`from_env`](Self::from_env).
    pub fn of_process(pid: u32, user: Option<u32>) -> Result<Option<Self>, LaunchError> {
        let failed = |error: std::io::Error| {
            LaunchError::environment(format!("reading the variables of process {pid}"), error)
        };

        let owner = user_of(pid).map_err(failed)?;
        if user.is_some_and(|user| user != owner) {
            return Ok(None);
        }

        let variables = variables_of(pid, owner).map_err(failed)?;
        let look = |name: &str| variables.get(name).cloned();
        Self::from_vars(&look, &[owner])
    }

    /// Returns the (name, value) variables for a process that joins the running job of process
    /// `pid`. They are the framework's variables of `pid`, with a rank beyond all others of the
    /// job. `index` must differ between the processes that the caller adds.
    ///
    /// # Errors
    ///
    /// If the variables cannot be read, or the process belongs to no job.
    pub fn for_added(pid: u32, index: u32) -> Result<Vec<(String, String)>, LaunchError> {
        let doing = || format!("reading the variables of process {pid}");
        let failed = |error: std::io::Error| LaunchError::environment(doing(), error);

        if Self::of_process(pid, None)?.is_none() {
            return Err(failed(std::io::Error::other("it belongs to no job")));
        }
        let owner = user_of(pid).map_err(failed)?;
        let found = variables_of(pid, owner).map_err(failed)?;

        let own = [
            ours::LOCAL_RANK,
            ours::RANK,
            ours::SPARES,
            ours::LAUNCHER_PID,
            ours::ADDED,
        ];
        let is_of_job = |name: &String| name.starts_with("MPMD_") && !own.contains(&name.as_str());

        let mut variables: Vec<_> = found
            .into_iter()
            .filter(|(name, _)| is_of_job(name))
            .collect();

        let this = std::process::id();
        let number = ADDED_FROM + (this % (1 << 16)) * (1 << 8) + index % (1 << 8);
        variables.extend(
            [
                (ours::RANK, number.to_string()),
                (ours::SPARES, "0".to_owned()),
                (ours::ADDED, "1".to_owned()),
                (ours::LAUNCHER_PID, this.to_string()),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        Ok(variables)
    }

    /// Reads the settings from the variables that `look` returns. A file with a secret must belong
    /// to one of `owners`.
    fn from_vars(
        look: &dyn Fn(&str) -> Option<String>,
        owners: &[u32],
    ) -> Result<Option<Self>, LaunchError> {
        let vars = LauncherVars::new(look, owners);
        if let Some(file) = vars.get(ours::DRY_RUN) {
            return dry_run(&vars, file).map(Some);
        }
        if let Some(said) = launchers::ask(&vars)? {
            return complete(&vars, said).map(Some);
        }

        // Some of our variables are set, but no launcher gives a rank.
        for name in [ours::WORLD_SIZE, ours::COORDINATOR, ours::LOCAL_RANK] {
            if vars.get(name).is_some() {
                return Err(vars.half_set("mpmd", ours::RANK));
            }
        }
        Ok(None)
    }
}

/// The first number of processes that are added to a running job.
const ADDED_FROM: u32 = 1 << 30;

/// Returns the variables that the process `pid`, owned by user `owner`, was started with.
fn variables_of(pid: u32, owner: u32) -> std::io::Result<HashMap<String, String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ"))?;
    // The number may belong to a new process by now.
    if user_of(pid)? != owner {
        return Err(std::io::Error::other("the process has ended"));
    }

    let text = String::from_utf8_lossy(&bytes);
    let variables = text
        .split('\0')
        .filter_map(|variable| variable.split_once('='));
    Ok(variables
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}

impl JobEnv {
    /// Makes the last `spares` processes of the job spares, unless the launcher gives a number of
    /// spares. A dry run has none.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Processes`] if no process would be left.
    pub fn with_spares(mut self, spares: usize) -> Result<Self, LaunchError> {
        if self.spares.is_none() && self.dry_run.is_none() {
            let processes = self.processes.saturating_sub(spares);
            if processes == 0 {
                return Err(LaunchError::Processes { processes });
            }
            self.processes = processes;
            self.spares = Some(spares);
        }
        Ok(self)
    }

    /// Returns the address at which process 0 must listen if it runs the rendezvous service. The
    /// port is the coordinator's. If the coordinator is on the loopback interface, so is the
    /// address; otherwise it covers all interfaces. A service at `[::]` can be reached by IPv4 too.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Variable`] if the coordinator has no port.
    pub fn listen_address(&self) -> Result<SocketAddr, LaunchError> {
        let (host, port) =
            split_address(&self.coordinator).ok_or_else(|| no_address(&self.coordinator))?;
        let ip = match host.parse() {
            Ok(ip) if ip.is_loopback() => ip,
            Ok(IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
            Err(_) if host == "localhost" => Ipv4Addr::LOCALHOST.into(),
            // A name may have addresses of both kinds, or of one.
            Ok(IpAddr::V6(_)) | Err(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Ok(SocketAddr::new(ip, port))
    }
}

/// Returns the user of the process `pid`. Fails unless the process runs as one user alone. Does not
/// use the owner of the folder in `/proc`, which is root for a process that nobody may trace.
fn user_of(pid: u32) -> std::io::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let users = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .unwrap_or_default();
    let mut users = users.split_whitespace().map(str::parse);
    match users.next() {
        Some(Ok(user)) if users.all(|other| other == Ok(user)) => Ok(user),
        _ => Err(std::io::Error::other("it does not run as one user alone")),
    }
}

/// Returns the settings of a dry run that writes to `file`, with the variables that count under
/// every launcher.
fn dry_run(vars: &LauncherVars<'_>, file: String) -> Result<JobEnv, LaunchError> {
    const SOURCE: &str = "mpmd check";
    let processes = vars.needed(SOURCE, ours::DRY_RUN_PROCESSES)?;
    if processes == 0 {
        return Err(LaunchError::Processes { processes });
    }

    let steps = vars.number(ours::DRY_RUN_STEPS)?;
    let process: Option<u32> = vars.number(ours::DRY_RUN_PROCESS)?;
    if let Some(beyond) = process.filter(|process| *process as usize >= processes) {
        return Err(LaunchError::Variable {
            variable: ours::DRY_RUN_PROCESS.to_owned(),
            value: beyond.to_string(),
            expected: format!("below the number of processes, {processes}"),
        });
    }

    let said = LauncherJob {
        source: SOURCE,
        process: 0,
        processes,
        local_process: None,
        coordinator: DefaultCoordinator::At("127.0.0.1:1".into()),
        hosted: true,
        job: String::new(),
    };
    let env = complete(vars, said)?;
    // Without a number the dry run is not a process of the job. So it skips code that the program
    // runs on one process only.
    let process = process.unwrap_or_else(|| u32::try_from(processes).unwrap_or(u32::MAX));
    Ok(JobEnv {
        process: ProcessId(process),
        dry_run: Some(DryRunEnv {
            file: file.into(),
            steps,
        }),
        ..env
    })
}

/// Completes a launcher's job description by the variables that count under every launcher. Fails
/// if a value is missing or invalid.
fn complete(vars: &LauncherVars<'_>, said: LauncherJob) -> Result<JobEnv, LaunchError> {
    let LauncherJob {
        source,
        process,
        processes,
        local_process,
        coordinator,
        hosted,
        job,
    } = said;
    if processes > MOST_PROCESSES {
        return Err(LaunchError::Variable {
            variable: match source {
                "mpmd" => ours::WORLD_SIZE.to_owned(),
                "mpmd check" => ours::DRY_RUN_PROCESSES.to_owned(),
                other => format!("the number of processes of {other}"),
            },
            value: processes.to_string(),
            expected: format!("at most {MOST_PROCESSES}"),
        });
    }

    let spares = vars.number::<usize>(ours::SPARES)?;
    let is_added = vars.get(ours::ADDED).is_some_and(|added| added == "1");
    if !is_added && process as usize >= processes + spares.unwrap_or(0).min(MOST_PROCESSES) {
        return Err(LaunchError::Variable {
            variable: match source {
                "mpmd" => ours::RANK.to_owned(),
                other => format!("the process number of {other}"),
            },
            value: process.to_string(),
            expected: format!("below the number of processes, {processes}"),
        });
    }

    let (coordinator, coordinator_source) = match (vars.get(ours::COORDINATOR), coordinator) {
        (Some(given), _) => (given, ours::COORDINATOR.to_owned()),
        (None, DefaultCoordinator::At(address)) => (address, format!("the variables of {source}")),
        (None, DefaultCoordinator::Needs(missing)) => {
            return Err(vars.half_set(source, &missing));
        }
    };
    match split_address(&coordinator) {
        Some((_, 1..)) => {}
        // For a job of one process any port will do.
        Some((_, 0)) if processes == 1 => {}
        _ => return Err(no_address(&coordinator)),
    }

    let job_name = format!("{source} {job} {coordinator}");
    let JobToken {
        token,
        is_guessable: token_is_guessable,
    } = read_token(vars, &job_name)?;
    let devices_per_process = read_devices_per_process(vars)?;
    check_cores(vars)?;
    check_vectors(vars)?;
    let kinds = vars
        .get(ours::DEVICE)
        .map(|text| kinds_by_process(&text, processes));
    let checks = read_checks(vars)?;

    Ok(JobEnv {
        process: ProcessId(process),
        processes,
        spares,
        restarts: vars.number(ours::RESTARTS)?.unwrap_or(0),
        is_added,
        local_process,
        coordinator,
        coordinator_source,
        hosted,
        token,
        token_is_guessable,
        transport: vars.get(ours::TRANSPORT),
        spin: vars.get(ours::SPIN).map(|text| spin(&text)).transpose()?,
        devices_per_process,
        device_kinds: kinds.transpose()?,
        cuda_collectives: vars
            .get(ours::CUDA_COLLECTIVES)
            .map(|text| cuda_collectives(&text))
            .transpose()?,
        peer_timeout: vars
            .get(ours::PEER_TIMEOUT)
            .map(|text| peer_timeout(&text))
            .transpose()?,
        host: vars.get(ours::HOST),
        check_uncommitted: checks.uncommitted,
        check_replicas: checks.replicas,
        check_replay: checks.replay,
        dry_run: None,
        source,
    })
}

/// The secret of a job, and whether others can guess it.
struct JobToken {
    token: Token,
    /// True if other users can guess the secret, because only the job's name determines it.
    is_guessable: bool,
}

/// Reads the job's secret, or derives it from `job_name`, which differs between jobs.
fn read_token(vars: &LauncherVars<'_>, job_name: &str) -> Result<JobToken, LaunchError> {
    let hex = vars.get(ours::JOB_TOKEN);
    let file = vars.get(ours::JOB_TOKEN_FILE);
    if let Some(hex) = hex {
        let token = hex.parse().map_err(|error| LaunchError::Token {
            variable: ours::JOB_TOKEN,
            error,
        })?;
        return Ok(JobToken {
            token,
            is_guessable: false,
        });
    }

    let Some(file) = file else {
        return Ok(JobToken {
            token: Token::derived(job_name),
            is_guessable: true,
        });
    };
    let secret = secret::read(&file, ours::JOB_TOKEN_FILE, vars.owners())?;
    Ok(JobToken {
        token: Token::of_secret(&secret, job_name),
        is_guessable: false,
    })
}

fn read_devices_per_process(vars: &LauncherVars<'_>) -> Result<Option<usize>, LaunchError> {
    let devices_per_process = vars.number(ours::DEVICES_PER_PROCESS)?;
    if let Some(devices) = devices_per_process
        && !(1..=MOST_DEVICES).contains(&devices)
    {
        return Err(LaunchError::Variable {
            variable: ours::DEVICES_PER_PROCESS.into(),
            value: devices.to_string(),
            expected: if devices == 0 {
                "at least 1".into()
            } else {
                format!("at most {MOST_DEVICES}")
            },
        });
    }
    Ok(devices_per_process)
}

fn check_cores(vars: &LauncherVars<'_>) -> Result<(), LaunchError> {
    if vars.number::<usize>(ours::CORES)? == Some(0) {
        return Err(LaunchError::Variable {
            variable: ours::CORES.into(),
            value: "0".into(),
            expected: "at least 1".into(),
        });
    }
    Ok(())
}

/// Checks the value of `MPMD_SIMD`, which the kernels themselves read.
fn check_vectors(vars: &LauncherVars<'_>) -> Result<(), LaunchError> {
    match vars.get(ours::SIMD) {
        Some(value) if VectorWidth::named(&value).is_none() => Err(LaunchError::Variable {
            variable: ours::SIMD.into(),
            value,
            expected: VectorWidth::ALL.map(VectorWidth::name).join(", "),
        }),
        _ => Ok(()),
    }
}

/// The additional checks that `MPMD_CHECK` requests.
#[derive(Default)]
struct RequestedChecks {
    uncommitted: bool,
    replicas: bool,
    replay: Option<u64>,
}

fn read_checks(vars: &LauncherVars<'_>) -> Result<RequestedChecks, LaunchError> {
    let mut checks = RequestedChecks::default();
    for check in vars
        .get(ours::CHECK)
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
    {
        match check {
            "" => {}
            "uncommitted" => checks.uncommitted = true,
            "replicas" => checks.replicas = true,
            other => match other.strip_prefix("replay:").map(str::parse) {
                Some(Ok(every @ 1..)) => checks.replay = Some(every),
                _ => {
                    return Err(LaunchError::Variable {
                        variable: ours::CHECK.into(),
                        value: other.into(),
                        expected: "uncommitted, replicas, replay:N with a number N above 0, or \
                                   several with commas"
                            .into(),
                    });
                }
            },
        }
    }
    Ok(checks)
}
