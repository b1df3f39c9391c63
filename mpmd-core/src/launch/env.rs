//! What launchers say to the processes they start.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use mpmd_transport::ProcessId;
use mpmd_transport::rendezvous::Token;

use super::{LaunchError, spin, variables as ours};
use crate::transports::Spin;

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
    /// The job's secret. Worked out from the launcher's job number where `MPMD_JOB_TOKEN` is not set:
    /// that keeps jobs apart, but not whoever can guess the number.
    pub token: Token,
    /// The transport asked for.
    pub transport: Option<String>,
    /// How long the transport is to look for work before it sleeps, where said.
    pub spin: Option<Spin>,
    /// Number of devices each process is to have.
    pub devices_per_process: Option<usize>,
    /// How long to wait for the other processes, where said.
    pub patience: Option<Duration>,
    /// The name of this process's host, where it is not the system's.
    pub host: Option<String>,
    /// The file with the costs of links. Only what process 0 is told counts.
    pub links: Option<PathBuf>,
    /// Where this process is to write its plan, and do nothing else: then it is one beyond those of the job.
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
    /// Looks for variables of, in this order, our own launcher, torchrun, Open MPI, Slurm, PMIx, PMI,
    /// and Kubernetes indexed jobs. `MPMD_COORDINATOR`, `MPMD_JOB_TOKEN`, `MPMD_TRANSPORT`,
    /// `MPMD_SPIN`, `MPMD_DEVICES_PER_PROCESS`, `MPMD_PATIENCE`, `MPMD_HOST` and `MPMD_LINKS` count under every
    /// launcher. Where `MPMD_PLAN` is set none of them is asked: the process is one beyond the `MPMD_PLAN_PROCESSES`
    /// of the job that it plans.
    ///
    /// # Errors
    ///
    /// Where a launcher's variables are there only in part (names every variable looked at), or where
    /// one makes no sense.
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
        let vars = Vars { look, looked: RefCell::new(BTreeMap::new()) };
        if let Some(file) = vars.get(ours::PLAN) {
            return vars.planning(file).map(Some);
        }
        for find in
            [ours_says, torchrun_says, open_mpi_says, slurm_says, pmix_says, pmi_says, kubernetes_says]
        {
            if let Some(said) = find(&vars)? {
                return vars.complete(said).map(Some);
            }
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
    /// Where process 0 must listen, where it runs the rendezvous service: the coordinator's port, on
    /// all interfaces unless all processes are on this host.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Variable`] where the coordinator has no port.
    pub fn listen_address(&self) -> Result<SocketAddr, LaunchError> {
        let (host, port) = split_address(&self.coordinator).ok_or_else(|| no_address(&self.coordinator))?;
        let ip = match host.parse() {
            Ok(ip) if ip.is_loopback() => ip,
            Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            Err(_) if host == "localhost" => Ipv4Addr::LOCALHOST.into(),
            Ok(IpAddr::V4(_)) | Err(_) => Ipv4Addr::UNSPECIFIED.into(),
        };
        Ok(SocketAddr::new(ip, port))
    }
}

/// What one launcher has said.
struct Said {
    source: &'static str,
    process: u32,
    processes: usize,
    local_process: Option<usize>,
    /// Without `MPMD_COORDINATOR`; `Err` says what would be needed for one.
    coordinator: Result<String, String>,
    hosted: bool,
    /// What tells this job from others, where the launcher says.
    job: String,
}

fn ours_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "mpmd";
    if vars.get(ours::RANK).is_none() {
        return Ok(None);
    }
    let processes = vars.needed(SOURCE, ours::WORLD_SIZE)?;
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, ours::RANK)?,
        processes,
        local_process: vars.number(ours::LOCAL_RANK)?,
        coordinator: if processes == 1 { Ok("127.0.0.1:0".into()) } else { Err(ours::COORDINATOR.into()) },
        hosted: vars.get(ours::HOSTED).is_some_and(|value| value == "1"),
        job: String::new(),
    }))
}

fn torchrun_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "torchrun";
    if vars.get("RANK").is_none() {
        return Ok(None);
    }
    let processes = vars.needed(SOURCE, "WORLD_SIZE")?;
    let local_process = vars.number("LOCAL_RANK")?;
    let coordinator = match (vars.get("MASTER_ADDR"), vars.number::<u16>("MASTER_PORT")?) {
        (Some(host), Some(port)) => {
            // The port itself is then in use: torchrun's agent serves its own store there.
            let taken =
                vars.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
            Ok(address(&host, if taken { port.checked_add(1).unwrap_or(port - 1) } else { port }))
        }
        (None, _) => Err(format!("MASTER_ADDR or {}", ours::COORDINATOR)),
        (Some(_), None) => Err(format!("MASTER_PORT or {}", ours::COORDINATOR)),
    };
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "RANK")?,
        processes,
        local_process,
        coordinator,
        hosted: false,
        job: vars.get("TORCHELASTIC_RUN_ID").unwrap_or_default(),
    }))
}

/// Comes before Slurm: inside an allocation `mpirun` starts its daemons by `srun`, and their Slurm
/// variables, which count daemons, are inherited by the processes.
fn open_mpi_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "Open MPI";
    if vars.get("OMPI_COMM_WORLD_RANK").is_none() {
        return Ok(None);
    }
    let processes: usize = vars.needed(SOURCE, "OMPI_COMM_WORLD_SIZE")?;
    let local = vars.number::<usize>("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let (coordinator, job) = match local {
        Some(local) if local < processes => {
            (Err(format!("{} (the job spans several hosts)", ours::COORDINATOR)), vars.namespace())
        }
        _ => vars.on_this_host(),
    };
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "OMPI_COMM_WORLD_RANK")?,
        processes,
        local_process: vars.number("OMPI_COMM_WORLD_LOCAL_RANK")?,
        coordinator,
        hosted: false,
        job: job.unwrap_or_default(),
    }))
}

/// Only inside a step (`srun`): a batch script has a rank too, but is one process.
fn slurm_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "Slurm";
    let Some(nodes) = vars.get("SLURM_STEP_NODELIST") else { return Ok(None) };
    let processes = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(processes) => processes,
        None => vars.needed(SOURCE, "SLURM_NTASKS")?,
    };
    let host = first_host(&nodes).ok_or_else(|| LaunchError::Variable {
        variable: "SLURM_STEP_NODELIST".into(),
        value: nodes,
        expected: "a list of hosts such as node[03-05,7]".into(),
    })?;
    let job: u64 = vars.needed(SOURCE, "SLURM_JOB_ID")?;
    let step = vars.number::<u64>("SLURM_STEP_ID")?.unwrap_or_default();
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "SLURM_PROCID")?,
        processes,
        local_process: vars.number("SLURM_LOCALID")?,
        // Steps of an allocation may run at once. By such a stride they find ports of their own, and none
        // that a job of about the same number would.
        coordinator: Ok(address(&host, derived_port(job.wrapping_add(step.wrapping_mul(257))))),
        hosted: false,
        job: format!("{job}.{step}"),
    }))
}

fn pmix_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "PMIx";
    if vars.get("PMIX_RANK").is_none() {
        return Ok(None);
    }
    // PMIx tells the size to its own library only.
    let processes = vars.needed(SOURCE, ours::WORLD_SIZE)?;
    let (coordinator, job) = vars.on_this_host();
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "PMIX_RANK")?,
        processes,
        local_process: vars.number("PMIX_LOCAL_RANK")?,
        coordinator,
        hosted: false,
        job: job.unwrap_or_default(),
    }))
}

fn pmi_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "PMI";
    if vars.get("PMI_RANK").is_none() {
        return Ok(None);
    }
    let processes = vars.needed(SOURCE, "PMI_SIZE")?;
    let (coordinator, job) = vars.on_this_host();
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "PMI_RANK")?,
        processes,
        local_process: vars.number("MPI_LOCALRANKID")?,
        coordinator,
        hosted: false,
        job: job.unwrap_or_default(),
    }))
}

fn kubernetes_says(vars: &Vars<'_>) -> Result<Option<Said>, LaunchError> {
    const SOURCE: &str = "Kubernetes";
    if vars.get("JOB_COMPLETION_INDEX").is_none() {
        return Ok(None);
    }
    Ok(Some(Said {
        source: SOURCE,
        process: vars.needed(SOURCE, "JOB_COMPLETION_INDEX")?,
        processes: vars.needed(SOURCE, ours::WORLD_SIZE)?,
        local_process: None,
        coordinator: Err(ours::COORDINATOR.into()),
        hosted: false,
        job: String::new(),
    }))
}

/// Remembers what was looked at, for errors.
struct Vars<'a> {
    look: &'a dyn Fn(&str) -> Option<String>,
    looked: RefCell<BTreeMap<String, Option<String>>>,
}

impl Vars<'_> {
    /// An empty variable counts as none.
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.look)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        self.looked.borrow_mut().insert(name.to_owned(), value.clone());
        value
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.parse().map_err(|_| LaunchError::Variable {
            variable: name.into(),
            value,
            expected: format!("a number of type {}", std::any::type_name::<T>()),
        });
        number.map(Some)
    }

    fn needed<T: FromStr>(&self, source: &'static str, name: &str) -> Result<T, LaunchError> {
        self.number(name)?.ok_or_else(|| self.half_set(source, name))
    }

    fn half_set(&self, source_name: &'static str, missing: &str) -> LaunchError {
        let show = |(name, value): (&String, &Option<String>)| match value {
            // The one secret among them.
            Some(_) if name == ours::JOB_TOKEN => format!("{name} is set"),
            Some(value) => format!("{name}={value}"),
            None => format!("{name} is not set"),
        };
        let found: Vec<String> = self.looked.borrow().iter().map(show).collect();
        let (missing, found) = (missing.to_owned(), format!("looked at: {}", found.join(", ")));
        LaunchError::HalfSet { source_name, missing, found }
    }

    /// What tells an MPI job from others.
    fn namespace(&self) -> Option<String> {
        ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PMI_JOBID", "PMI_KVSNAME"]
            .iter()
            .find_map(|name| self.get(name))
    }

    /// Where the processes of an MPI job on one host meet, and what tells the job from others.
    fn on_this_host(&self) -> (Result<String, String>, Option<String>) {
        let job = self.namespace();
        let coordinator = match &job {
            Some(job) => Ok(address("127.0.0.1", derived_port(hash(job)))),
            None => Err(format!("{} (or PMIX_NAMESPACE, to derive one)", ours::COORDINATOR)),
        };
        (coordinator, job)
    }

    /// A process that only plans: nobody's, with what counts under every launcher.
    fn planning(&self, file: String) -> Result<JobEnv, LaunchError> {
        const SOURCE: &str = "mpmd check";
        let processes = self.needed(SOURCE, ours::PLAN_PROCESSES)?;
        if processes == 0 {
            return Err(LaunchError::Processes { processes });
        }
        let steps = self.number(ours::PLAN_STEPS)?;
        let said = Said {
            source: SOURCE,
            process: 0,
            processes,
            local_process: None,
            coordinator: Ok("127.0.0.1:1".into()),
            hosted: true,
            job: String::new(),
        };
        let env = self.complete(said)?;
        // The number of nobody: what a program does on one process alone is not done here.
        let process = ProcessId(u32::try_from(processes).unwrap_or(u32::MAX));
        Ok(JobEnv { process, plan: Some(PlanEnv { file: file.into(), steps }), ..env })
    }

    fn complete(&self, said: Said) -> Result<JobEnv, LaunchError> {
        let Said { source, process, processes, local_process, coordinator, hosted, job } = said;
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
        let coordinator = match self.get(ours::COORDINATOR) {
            Some(given) => given,
            None => coordinator.map_err(|needed| self.half_set(source, &needed))?,
        };
        match split_address(&coordinator) {
            Some((_, 1..)) => {}
            // Alone, any port will do.
            Some((_, 0)) if processes == 1 => {}
            _ => return Err(no_address(&coordinator)),
        }
        let token = match self.get(ours::JOB_TOKEN) {
            Some(hex) => {
                hex.parse().map_err(|error| LaunchError::Token { variable: ours::JOB_TOKEN, error })?
            }
            None => Token::derived(&format!("{source} {job} {coordinator}")),
        };
        let devices_per_process = self.number(ours::DEVICES_PER_PROCESS)?;
        if devices_per_process == Some(0) {
            return Err(LaunchError::Variable {
                variable: ours::DEVICES_PER_PROCESS.into(),
                value: "0".into(),
                expected: "at least 1".into(),
            });
        }
        let patience = match self.number::<f64>(ours::PATIENCE)? {
            None => None,
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
            transport: self.get(ours::TRANSPORT),
            spin: self.get(ours::SPIN).map(|text| spin(&text)).transpose()?,
            devices_per_process,
            patience,
            host: self.get(ours::HOST),
            links: self.get(ours::LINKS).map(PathBuf::from),
            plan: None,
            source,
        })
    }
}

fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Host, without brackets, and port.
fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty()).then_some((host, port.parse().ok()?))
}

fn no_address(coordinator: &str) -> LaunchError {
    LaunchError::Variable {
        variable: ours::COORDINATOR.into(),
        value: coordinator.into(),
        expected: "host:port".into(),
    }
}

/// A port above those that systems hand out by themselves, the same in all processes of a job.
fn derived_port(job: u64) -> u16 {
    61440 + (job % 4096) as u16
}

/// FNV-1a: all processes of a job must find the same, whatever they were built by.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The first host of a Slurm list: `node[03-05,7],other` begins with `node03`.
fn first_host(nodes: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = nodes.trim();
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        if rest.as_bytes()[at] == b',' {
            rest = "";
            break;
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        host.push_str(inside.split([',', '-']).next()?);
        rest = after;
    }
    host.push_str(rest);
    let plausible = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    (!host.is_empty() && host.chars().all(plausible)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<JobEnv>, LaunchError> {
        JobEnv::from_vars(&|name| {
            vars.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn job(vars: &[(&str, &str)]) -> JobEnv {
        read(vars).unwrap().unwrap()
    }

    fn who(env: &JobEnv) -> (u32, usize, Option<usize>, &str, &str) {
        (env.process.0, env.processes, env.local_process, &env.coordinator, env.source)
    }

    #[test]
    fn without_variables_it_is_a_job_of_one() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("HOME", "/"), ("MPMD_TRANSPORT", "tcp"), ("MPMD_RANK", " ")]), Ok(None));
        // A batch script is one process, whatever its allocation.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")]), Ok(None));
    }

    #[test]
    fn every_launcher_is_read() {
        let token = Token::new([5; 32]);
        let ours = job(&[
            ("MPMD_RANK", "1"),
            ("MPMD_WORLD_SIZE", "4"),
            ("MPMD_LOCAL_RANK", "1"),
            ("MPMD_COORDINATOR", "10.0.0.1:77"),
            ("MPMD_HOSTED", "1"),
            ("MPMD_JOB_TOKEN", &token.to_hex()),
            ("MPMD_TRANSPORT", "tcp"),
            ("MPMD_SPIN", "never"),
            ("MPMD_DEVICES_PER_PROCESS", "2"),
            ("MPMD_PATIENCE", "1.5"),
            ("MPMD_HOST", "left"),
            ("MPMD_LINKS", "links.json"),
            // Ours goes first.
            ("RANK", "3"),
            ("SLURM_STEP_NODELIST", "x"),
        ]);
        assert_eq!(who(&ours), (1, 4, Some(1), "10.0.0.1:77", "mpmd"));
        assert_eq!((ours.token, ours.hosted), (token, true));
        assert_eq!(ours.patience, Some(Duration::from_millis(1500)));
        assert_eq!((ours.host.as_deref(), ours.links), (Some("left"), Some(PathBuf::from("links.json"))));
        assert_eq!(ours.spin, Some(Spin::Never));
        assert_eq!((ours.transport.as_deref(), ours.devices_per_process), (Some("tcp"), Some(2)));

        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "fd00::7"),
            ("MASTER_PORT", "29500"),
        ];
        assert_eq!(who(&job(&torchrun)), (5, 8, Some(1), "[fd00::7]:29500", "torchrun"));
        let with_store = [&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(job(&with_store).coordinator, "[fd00::7]:29501");

        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "6"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_ID", "8195"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "node[03-05,7],login"),
        ];
        assert_eq!(who(&job(&slurm)), (3, 6, Some(0), "node03:61443", "Slurm"));
        // `srun` twice at once, in one allocation.
        let second = [&[("SLURM_STEP_ID", "1")], &slurm[..]].concat();
        assert_eq!(job(&second).coordinator, "node03:61700");

        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-host-17@1"),
            ("PMIX_RANK", "1"),
        ];
        let inside_slurm = [&slurm[..], &open_mpi].concat();
        for env in [job(&open_mpi), job(&inside_slurm)] {
            let (process, processes, local, coordinator, source) = who(&env);
            assert_eq!((process, processes, local, source), (1, 2, Some(1), "Open MPI"));
            let port: u16 = coordinator.strip_prefix("127.0.0.1:").unwrap().parse().unwrap();
            assert!(port >= 61440);
        }
        let pmix = [("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "n"), ("MPMD_WORLD_SIZE", "2")];
        assert_eq!(job(&pmix).source, "PMIx");
        let pmi =
            [("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALRANKID", "2"), ("MPMD_COORDINATOR", "h:9")];
        assert_eq!(who(&job(&pmi)), (2, 3, Some(2), "h:9", "PMI"));
        let kubernetes =
            [("JOB_COMPLETION_INDEX", "2"), ("MPMD_WORLD_SIZE", "3"), ("MPMD_COORDINATOR", "job-0.svc:9")];
        assert_eq!(who(&job(&kubernetes)), (2, 3, None, "job-0.svc:9", "Kubernetes"));
    }

    #[test]
    fn who_plans_is_one_beyond_the_job_whatever_launchers_say() {
        let planning = job(&[
            ("MPMD_PLAN", "/tmp/plan.json"),
            ("MPMD_PLAN_PROCESSES", "4"),
            ("MPMD_DEVICES_PER_PROCESS", "2"),
            ("MPMD_RANK", "1"),
            ("RANK", "0"),
        ]);
        assert_eq!((planning.process, planning.processes), (ProcessId(4), 4));
        assert_eq!(planning.devices_per_process, Some(2));
        let plan = PlanEnv { file: "/tmp/plan.json".into(), steps: None };
        assert_eq!(planning.plan, Some(plan));
        let steps = [("MPMD_PLAN", "p"), ("MPMD_PLAN_PROCESSES", "1"), ("MPMD_PLAN_STEPS", "3")];
        assert_eq!(job(&steps).plan.unwrap().steps, Some(3));
        let none = read(&[("MPMD_PLAN", "p"), ("MPMD_PLAN_PROCESSES", "0")]);
        assert_eq!(none, Err(LaunchError::Processes { processes: 0 }));
        let half = read(&[("MPMD_PLAN", "p")]).unwrap_err().to_string();
        assert!(half.contains("mpmd check, but MPMD_PLAN_PROCESSES is not set"), "{half}");
    }

    #[test]
    fn half_a_launcher_is_an_error_that_names_what_was_looked_at() {
        for (vars, missing) in [
            (&[("MPMD_RANK", "0")][..], "MPMD_WORLD_SIZE"),
            (&[("MPMD_RANK", "0"), ("MPMD_WORLD_SIZE", "2")], "MPMD_COORDINATOR"),
            (&[("MPMD_WORLD_SIZE", "2")], "MPMD_RANK"),
            (&[("MPMD_COORDINATOR", "h:1")], "MPMD_RANK"),
            (&[("RANK", "0")], "WORLD_SIZE"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")], "MASTER_PORT"),
            (&[("SLURM_STEP_NODELIST", "n1"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "1")], "SLURM_PROCID"),
            (&[("OMPI_COMM_WORLD_RANK", "0")], "OMPI_COMM_WORLD_SIZE"),
            (&[("PMIX_RANK", "0")], "MPMD_WORLD_SIZE"),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MPMD_COORDINATOR"),
            (&[("JOB_COMPLETION_INDEX", "0"), ("MPMD_WORLD_SIZE", "2")], "MPMD_COORDINATOR"),
        ] {
            let error = read(vars).unwrap_err().to_string();
            assert!(error.contains(&format!("{missing} ")), "{vars:?}: {error}");
            for (name, value) in vars {
                assert!(error.contains(&format!("{name}={value}")), "{vars:?}: {error}");
            }
        }
        let several = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "n"),
        ];
        assert!(read(&several).unwrap_err().to_string().contains("spans several hosts"));
    }

    #[test]
    fn senseless_values_are_errors_that_name_the_variable() {
        let base = [("MPMD_RANK", "0"), ("MPMD_WORLD_SIZE", "2"), ("MPMD_COORDINATOR", "h:1")];
        for (name, value) in [
            ("MPMD_RANK", "two"),
            ("MPMD_WORLD_SIZE", "-1"),
            ("MPMD_COORDINATOR", "h"),
            ("MPMD_COORDINATOR", "h:0"),
            ("MPMD_COORDINATOR", "h:99999"),
            ("MPMD_JOB_TOKEN", "secret"),
            ("MPMD_DEVICES_PER_PROCESS", "0"),
            ("MPMD_PATIENCE", "-3"),
            ("MPMD_SPIN", "often"),
            ("MPMD_LOCAL_RANK", "x"),
        ] {
            let vars = [&[(name, value)], &base[..]].concat();
            let error = read(&vars).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        let beyond = [("MPMD_RANK", "2"), ("MPMD_WORLD_SIZE", "2"), ("MPMD_COORDINATOR", "h:1")];
        assert!(read(&beyond).unwrap_err().to_string().contains("below the number of processes, 2"));
    }

    #[test]
    fn processes_of_one_job_find_one_token_and_other_jobs_another() {
        let slurm = |process, job| {
            let vars = [
                ("SLURM_PROCID", process),
                ("SLURM_NTASKS", "2"),
                ("SLURM_JOB_ID", job),
                ("SLURM_STEP_NODELIST", "a,b"),
            ];
            super::tests::job(&vars).token
        };
        assert_eq!(slurm("0", "7"), slurm("1", "7"));
        // The same port, but another job.
        assert_ne!(slurm("0", "7"), slurm("0", "4103"));
    }

    #[test]
    fn process_0_listens_where_all_can_reach_it() {
        for (coordinator, listens) in [
            ("127.0.0.1:9", "127.0.0.1:9"),
            ("localhost:9", "127.0.0.1:9"),
            ("[::1]:9", "[::1]:9"),
            ("node03:61443", "0.0.0.0:61443"),
            ("10.0.0.1:9", "0.0.0.0:9"),
            ("[fd00::7]:9", "[::]:9"),
        ] {
            let vars = [("MPMD_RANK", "0"), ("MPMD_WORLD_SIZE", "2"), ("MPMD_COORDINATOR", coordinator)];
            assert_eq!(job(&vars).listen_address().unwrap().to_string(), listens);
        }
    }

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("node7", Some("node7")),
            ("a,b[1-2]", Some("a")),
            ("node[03-05,7]", Some("node03")),
            ("node[12],other", Some("node12")),
            ("r[1-2]n[08,9]-x,z", Some("r1n08-x")),
            ("tux[0-1].cluster.org", Some("tux0.cluster.org")),
            ("", None),
            ("node[1", None),
            ("[1-2", None),
            ("a b", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
