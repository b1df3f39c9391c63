//! What launchers say to the processes they start.

mod address;
mod launchers;
mod secret;
#[cfg(test)]
mod tests;
mod vars;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mpmd_ids::ProcessId;
use mpmd_transport::rendezvous::Token;

use address::{no_address, split_address};
use launchers::Said;
use vars::Vars;

use super::{LaunchError, cuda_collectives, kinds_by_process, spin, variables as ours};
use mpmd_ids::block::Spin;
use mpmd_layout::topology::{CudaCollectives, DeviceKind};

/// The most processes of a job: as many as a plan can tell apart. So that a number cannot take all
/// memory.
const MOST_PROCESSES: usize = 1 << 20;

/// The most devices of a process, for the same reason.
const MOST_DEVICES: usize = 1 << 20;

/// Which process of which job this is, as its launcher says.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct JobEnv {
    /// Which process of the job this is.
    pub process: ProcessId,
    /// Number of processes in the job.
    pub processes: usize,
    /// Which of the processes on this host this is, from 0, where the launcher says.
    pub local_process: Option<usize>,
    /// Where the processes meet, `host:port`.
    pub coordinator: String,
    /// True where the launcher runs the rendezvous service; else process 0 must.
    pub hosted: bool,
    /// The job's secret: `MPMD_JOB_TOKEN`, or a token derived from the secret in
    /// `MPMD_JOB_TOKEN_FILE` and the launcher's job number and attempt. Without either variable,
    /// derived from number and attempt alone.
    pub token: Token,
    /// True if the token follows from the job's number alone. Such a token keeps jobs apart, but
    /// not people who guess the number.
    pub token_is_guessable: bool,
    /// The transport asked for.
    pub transport: Option<String>,
    /// How long the transport is to look for work before it sleeps, where said.
    pub spin: Option<Spin>,
    /// Number of devices each process is to have.
    pub devices_per_process: Option<usize>,
    /// Of which kind the devices of each process are to be, where said.
    pub device_kinds: Option<Vec<DeviceKind>>,
    /// Which way collectives of CUDA devices are to go, where said.
    pub cuda_collectives: Option<CudaCollectives>,
    /// How long to wait for the other processes, where said.
    pub patience: Option<Duration>,
    /// The name of this process's host, where it is not the system's.
    pub host: Option<String>,
    /// The file with the costs of links. Only what process 0 is told counts.
    pub links: Option<PathBuf>,
    /// True where the processes are to compare host values of any size.
    pub check_uncommitted: bool,
    /// Where this process is to write its plan, and do nothing else: then it is one beyond those of
    /// the job.
    pub plan: Option<PlanEnv>,
    /// Who said so, for people.
    pub source: &'static str,
}

/// What is asked of a process that only plans.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct PlanEnv {
    /// Where the plan goes.
    pub file: PathBuf,
    /// The most steps that are recorded, where said.
    pub steps: Option<u64>,
}

impl JobEnv {
    /// Reads this process's environment; `None` where no launcher has started it: a job of one.
    ///
    /// Looks for variables of, in this order, our own launcher, torchrun, Open MPI, Slurm, PMIx,
    /// PMI, and Kubernetes indexed jobs. `MPMD_COORDINATOR`, `MPMD_JOB_TOKEN`,
    /// `MPMD_JOB_TOKEN_FILE`, `MPMD_TRANSPORT`, `MPMD_SPIN`, `MPMD_DEVICES_PER_PROCESS`,
    /// `MPMD_DEVICE`, `MPMD_CUDA_COLLECTIVES`, `MPMD_PATIENCE`, `MPMD_HOST`, `MPMD_LINKS` and
    /// `MPMD_CHECK` count under every launcher. Where `MPMD_PLAN` is set none of them is asked: the
    /// process plans a job of `MPMD_PLAN_PROCESSES` processes as number `MPMD_PLAN_PROCESS` of
    /// them, or as one beyond them.
    ///
    /// # Errors
    ///
    /// Where a launcher's variables are there only in part (names every variable looked at), or
    /// where one makes no sense.
    pub fn from_env() -> Result<Option<Self>, LaunchError> {
        // A value that is not Unicode is none of ours; but who is to plan must not run.
        if let Some(file) = std::env::var_os(ours::PLAN)
            && file.to_str().is_none_or(|name| name.trim() != name)
        {
            return Err(LaunchError::Variable {
                variable: ours::PLAN.to_owned(),
                value: file.to_string_lossy().into_owned(),
                expected: "a file whose name is Unicode, without blanks at its ends".to_owned(),
            });
        }
        Self::from_vars(&|name| std::env::var(name).ok())
    }

    /// Like [`from_env`](Self::from_env), from the variables that `look` finds.
    ///
    /// # Errors
    ///
    /// Like those of [`from_env`](Self::from_env).
    pub fn from_vars(look: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, LaunchError> {
        let vars = Vars::new(look);
        if let Some(file) = vars.get(ours::PLAN) {
            return planning(&vars, file).map(Some);
        }
        if let Some(said) = launchers::ask(&vars)? {
            return complete(&vars, said).map(Some);
        }
        // A part of ours with nobody's rank to go with it.
        for name in [ours::WORLD_SIZE, ours::COORDINATOR, ours::LOCAL_RANK] {
            if vars.get(name).is_some() {
                return Err(vars.half_set("mpmd", ours::RANK));
            }
        }
        Ok(None)
    }
}

impl JobEnv {
    /// Where process 0 must listen, where it runs the rendezvous service: the coordinator's port,
    /// on all interfaces unless all processes are on this host.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Variable`] where the coordinator has no port.
    pub fn listen_address(&self) -> Result<SocketAddr, LaunchError> {
        let (host, port) =
            split_address(&self.coordinator).ok_or_else(|| no_address(&self.coordinator))?;
        let ip = match host.parse() {
            Ok(ip) if ip.is_loopback() => ip,
            Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            Err(_) if host == "localhost" => Ipv4Addr::LOCALHOST.into(),
            Ok(IpAddr::V4(_)) | Err(_) => Ipv4Addr::UNSPECIFIED.into(),
        };
        Ok(SocketAddr::new(ip, port))
    }
}

/// A process that only plans, with what counts under every launcher.
fn planning(vars: &Vars<'_>, file: String) -> Result<JobEnv, LaunchError> {
    const SOURCE: &str = "mpmd check";
    let processes = vars.needed(SOURCE, ours::PLAN_PROCESSES)?;
    if processes == 0 {
        return Err(LaunchError::Processes { processes });
    }
    let steps = vars.number(ours::PLAN_STEPS)?;
    let process: Option<u32> = vars.number(ours::PLAN_PROCESS)?;
    if let Some(beyond) = process.filter(|process| *process as usize >= processes) {
        return Err(LaunchError::Variable {
            variable: ours::PLAN_PROCESS.to_owned(),
            value: beyond.to_string(),
            expected: format!("below the number of processes, {processes}"),
        });
    }
    let said = Said {
        source: SOURCE,
        process: 0,
        processes,
        local_process: None,
        coordinator: Ok("127.0.0.1:1".into()),
        hosted: true,
        job: String::new(),
    };
    let env = complete(vars, said)?;
    // Without a number the dry run is no process of the job: it does nothing that a program does on
    // one process alone.
    let process = process.unwrap_or_else(|| u32::try_from(processes).unwrap_or(u32::MAX));
    Ok(JobEnv {
        process: ProcessId(process),
        plan: Some(PlanEnv { file: file.into(), steps }),
        ..env
    })
}

/// A job from what its launcher has said and what counts under every launcher.
fn complete(vars: &Vars<'_>, said: Said) -> Result<JobEnv, LaunchError> {
    let Said { source, process, processes, local_process, coordinator, hosted, job } = said;
    if processes > MOST_PROCESSES {
        return Err(LaunchError::Variable {
            variable: match source {
                "mpmd" => ours::WORLD_SIZE.to_owned(),
                "mpmd check" => ours::PLAN_PROCESSES.to_owned(),
                other => format!("the number of processes of {other}"),
            },
            value: processes.to_string(),
            expected: format!("at most {MOST_PROCESSES}"),
        });
    }
    if process as usize >= processes {
        return Err(LaunchError::Variable {
            variable: match source {
                "mpmd" => ours::RANK.to_owned(),
                other => format!("the process number of {other}"),
            },
            value: process.to_string(),
            expected: format!("below the number of processes, {processes}"),
        });
    }
    let coordinator = match vars.get(ours::COORDINATOR) {
        Some(given) => given,
        None => coordinator.map_err(|needed| vars.half_set(source, &needed))?,
    };
    match split_address(&coordinator) {
        Some((_, 1..)) => {}
        // Alone, any port will do.
        Some((_, 0)) if processes == 1 => {}
        _ => return Err(no_address(&coordinator)),
    }
    let known = format!("{source} {job} {coordinator}");
    let (token, token_is_guessable) =
        match (vars.get(ours::JOB_TOKEN), vars.get(ours::JOB_TOKEN_FILE)) {
            (Some(hex), _) => {
                let token = hex
                    .parse()
                    .map_err(|error| LaunchError::Token { variable: ours::JOB_TOKEN, error })?;
                (token, false)
            }
            (None, Some(file)) => (Token::of_secret(&secret::read(&file)?, &known), false),
            (None, None) => (Token::derived(&known), true),
        };
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
    let kinds = vars.get(ours::DEVICE).map(|text| kinds_by_process(&text, processes));
    let check_uncommitted = match vars.get(ours::CHECK).as_deref() {
        None => false,
        Some("uncommitted") => true,
        Some(other) => {
            return Err(LaunchError::Variable {
                variable: ours::CHECK.into(),
                value: other.into(),
                expected: "uncommitted".into(),
            });
        }
    };
    let patience = match vars.number::<f64>(ours::PATIENCE)? {
        None => None,
        // More than a duration can hold, as `Duration::MAX` is once it is written in decimals.
        Some(seconds) if seconds >= u64::MAX as f64 => Some(Duration::MAX),
        Some(seconds) => {
            Some(Duration::try_from_secs_f64(seconds).map_err(|_| LaunchError::Variable {
                variable: ours::PATIENCE.into(),
                value: seconds.to_string(),
                expected: "a number of seconds".into(),
            })?)
        }
    };
    Ok(JobEnv {
        process: ProcessId(process),
        processes,
        local_process,
        coordinator,
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
        patience,
        host: vars.get(ours::HOST),
        links: vars.get(ours::LINKS).map(PathBuf::from),
        check_uncommitted,
        plan: None,
        source,
    })
}
