//! The variables of each launcher.

use super::address::{address, derived_port, first_host};
use super::vars::LauncherVars;
use crate::{LaunchError, variables as ours};

/// A description of the job from the variables of one launcher.
pub(super) struct LauncherJob {
    pub(super) source: &'static str,
    pub(super) process: u32,
    pub(super) processes: usize,
    pub(super) local_process: Option<usize>,
    /// The rendezvous address to use if `MPMD_COORDINATOR` is not set.
    pub(super) coordinator: DefaultCoordinator,
    pub(super) hosted: bool,
    /// Text that identifies the job and the attempt at running it. Empty if the launcher gives
    /// none.
    pub(super) job: String,
}

/// The rendezvous address that a launcher's variables imply.
pub(super) enum DefaultCoordinator {
    /// The address, in the form `host:port`.
    At(String),
    /// The variables do not determine an address; the named ones are missing.
    Needs(String),
}

/// Reads the variables of each launcher in turn and returns the first job description. `None` if no
/// launcher has set its variables. Fails if a launcher's variables are incomplete or invalid.
pub(super) fn ask(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    for find in [
        ours_says,
        torchrun_says,
        open_mpi_says,
        slurm_says,
        pmix_says,
        pmi_says,
        kubernetes_says,
    ] {
        if let Some(said) = find(vars)? {
            return Ok(Some(said));
        }
    }
    Ok(None)
}

fn ours_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    const SOURCE: &str = "mpmd";
    if vars.get(ours::RANK).is_none() {
        return Ok(None);
    }
    let processes = vars.needed(SOURCE, ours::WORLD_SIZE)?;
    Ok(Some(LauncherJob {
        source: SOURCE,
        process: vars.needed(SOURCE, ours::RANK)?,
        processes,
        local_process: vars.number(ours::LOCAL_RANK)?,
        coordinator: if processes == 1 {
            DefaultCoordinator::At("127.0.0.1:0".into())
        } else {
            DefaultCoordinator::Needs(ours::COORDINATOR.into())
        },
        hosted: vars.get(ours::HOSTED).is_some_and(|value| value == "1"),
        job: String::new(),
    }))
}

fn torchrun_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    const SOURCE: &str = "torchrun";
    if vars.get("RANK").is_none() {
        return Ok(None);
    }

    let processes = vars.needed(SOURCE, "WORLD_SIZE")?;
    let local_process = vars.number("LOCAL_RANK")?;
    let coordinator = match (vars.get("MASTER_ADDR"), vars.number::<u16>("MASTER_PORT")?) {
        (Some(host), Some(port)) => {
            // torchrun's agent serves its own store at this port, so the next one is used.
            let taken = vars
                .get("TORCHELASTIC_USE_AGENT_STORE")
                .is_some_and(|v| v.eq_ignore_ascii_case("true"));
            DefaultCoordinator::At(address(
                &host,
                if taken {
                    port.checked_add(1).unwrap_or(u16::MAX - 1)
                } else {
                    port
                },
            ))
        }
        (None, _) => DefaultCoordinator::Needs(format!("MASTER_ADDR or {}", ours::COORDINATOR)),
        (Some(_), None) => {
            DefaultCoordinator::Needs(format!("MASTER_PORT or {}", ours::COORDINATOR))
        }
    };

    // Each host's agent counts only the restarts that its own workers caused. So the count is
    // common to the job only on one host.
    let attempt = match vars.number::<usize>("LOCAL_WORLD_SIZE")? {
        Some(local) if local == processes => {
            vars.get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default()
        }
        _ => String::new(),
    };

    Ok(Some(LauncherJob {
        source: SOURCE,
        process: vars.needed(SOURCE, "RANK")?,
        processes,
        local_process,
        coordinator,
        hosted: false,
        job: format!(
            "{} {attempt}",
            vars.get("TORCHELASTIC_RUN_ID").unwrap_or_default()
        ),
    }))
}

/// Reads Open MPI's variables. Must run before `slurm_says`: in a Slurm allocation, `mpirun` starts
/// its daemons by `srun`. So the processes inherit Slurm variables that describe the daemons.
fn open_mpi_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    const SOURCE: &str = "Open MPI";
    if vars.get("OMPI_COMM_WORLD_RANK").is_none() {
        return Ok(None);
    }

    let processes: usize = vars.needed(SOURCE, "OMPI_COMM_WORLD_SIZE")?;
    let local = vars.number::<usize>("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let (coordinator, job) = match local {
        Some(local) if local < processes => (
            DefaultCoordinator::Needs(format!(
                "{} (the job spans several hosts)",
                ours::COORDINATOR
            )),
            vars.namespace(),
        ),
        _ => vars.on_this_host(),
    };

    Ok(Some(LauncherJob {
        source: SOURCE,
        process: vars.needed(SOURCE, "OMPI_COMM_WORLD_RANK")?,
        processes,
        local_process: vars.number("OMPI_COMM_WORLD_LOCAL_RANK")?,
        coordinator,
        hosted: false,
        job: job.unwrap_or_default(),
    }))
}

/// Reads Slurm's variables, but only inside a step (`srun`). A batch script has a rank too, but is
/// only one process.
fn slurm_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    const SOURCE: &str = "Slurm";
    let Some(nodes) = vars.get("SLURM_STEP_NODELIST") else {
        return Ok(None);
    };
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
    // A requeued job keeps its number.
    let attempt = vars
        .number::<u64>("SLURM_RESTART_COUNT")?
        .unwrap_or_default();

    Ok(Some(LauncherJob {
        source: SOURCE,
        process: vars.needed(SOURCE, "SLURM_PROCID")?,
        processes,
        local_process: vars.number("SLURM_LOCALID")?,
        // Steps of an allocation may run at the same time. This stride gives them different ports,
        // and avoids the ports of jobs with nearby numbers.
        coordinator: DefaultCoordinator::At(address(
            &host,
            derived_port(job.wrapping_add(step.wrapping_mul(257))),
        )),
        hosted: false,
        job: format!("{job}.{step}.{attempt}"),
    }))
}

fn pmix_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    // PMIx gives the size only to its own library.
    on_this_host_says(
        vars,
        "PMIx",
        ["PMIX_RANK", ours::WORLD_SIZE, "PMIX_LOCAL_RANK"],
    )
}

fn pmi_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    on_this_host_says(vars, "PMI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"])
}

/// Reads the variables of a launcher that does not give the hosts of a job.
fn on_this_host_says(
    vars: &LauncherVars<'_>,
    source: &'static str,
    [rank, size, local_rank]: [&str; 3],
) -> Result<Option<LauncherJob>, LaunchError> {
    if vars.get(rank).is_none() {
        return Ok(None);
    }
    let processes = vars.needed(source, size)?;
    let (coordinator, job) = vars.on_this_host();

    Ok(Some(LauncherJob {
        source,
        process: vars.needed(source, rank)?,
        processes,
        local_process: vars.number(local_rank)?,
        coordinator,
        hosted: false,
        job: job.unwrap_or_default(),
    }))
}

fn kubernetes_says(vars: &LauncherVars<'_>) -> Result<Option<LauncherJob>, LaunchError> {
    const SOURCE: &str = "Kubernetes";
    if vars.get("JOB_COMPLETION_INDEX").is_none() {
        return Ok(None);
    }
    Ok(Some(LauncherJob {
        source: SOURCE,
        process: vars.needed(SOURCE, "JOB_COMPLETION_INDEX")?,
        processes: vars.needed(SOURCE, ours::WORLD_SIZE)?,
        local_process: None,
        coordinator: DefaultCoordinator::Needs(ours::COORDINATOR.into()),
        hosted: false,
        job: String::new(),
    }))
}
