//! Finds the address and the token of a running job.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result, bail};
use mpmd_base::counted;
use mpmd_launch::{JobEnv, variables};
use mpmd_rendezvous::Token;

/// A job whose processes run on this machine.
struct FoundJob {
    /// The lowest id of its processes.
    pid: u32,
    token: Token,
    /// Number of processes of the job.
    processes: usize,
}

/// Returns (address of the rendezvous, token) of a job. `words` is the id of one of its processes
/// or of its launcher, or an address. With `None`, finds the only job of this user on this machine.
pub(super) fn job(words: Option<&str>) -> Result<(String, Token)> {
    let Some(words) = words else {
        return only(all_jobs()).map(|(address, job)| (address, job.token));
    };
    if let Ok(pid) = words.parse() {
        return job_of(pid).map(|(address, job)| (address, job.token));
    }

    if !words.contains(':') {
        bail!("{words:?} is neither a process id nor an address, host:port");
    }

    let token = std::env::var(variables::JOB_TOKEN).with_context(|| {
        format!(
            "the token of the job is needed, in {}; a process id of the job on this machine would \
             do instead of the address",
            variables::JOB_TOKEN
        )
    })?;
    let token = token
        .trim()
        .parse()
        .with_context(|| format!("in {}", variables::JOB_TOKEN))?;
    Ok((words.to_owned(), token))
}

/// Returns a process of the job of `pid`, which is one of its processes or its launcher. With
/// `None`, returns a process of the only job of this user on this machine.
///
/// # Errors
///
/// If there is no job, or there are several. The error lists several.
pub(crate) fn process_of_job(pid: Option<u32>) -> Result<u32> {
    let (_, job) = match pid {
        Some(pid) => job_of(pid)?,
        None => only(all_jobs())?,
    };
    Ok(job.pid)
}

/// Returns the job of a process: the one to which it belongs, or the one that it has started.
fn job_of(pid: u32) -> Result<(String, FoundJob)> {
    if !fs::exists(format!("/proc/{pid}")).unwrap_or(true) {
        bail!(
            "no process {pid} runs on this machine: give the id of a process of the job, its \
             address as host:port, or nothing if it is the only one"
        );
    }
    let env = JobEnv::of_process(pid, None);
    if let Some(env) = env.with_context(|| format!("looking at process {pid}"))? {
        let job = FoundJob {
            pid,
            token: env.token,
            processes: env.processes,
        };
        return Ok((env.coordinator, job));
    }

    // A launcher is of no job, and its processes descend from it.
    let started = jobs(descendants(pid), None);
    if started.is_empty() {
        bail!(
            "process {pid} belongs to no job that can be looked at: a job of one process has \
             nothing to show, and one of several has a launcher, such as mpmd run"
        );
    }
    only(started)
}

/// Returns the only one of these jobs.
fn only(mut jobs: BTreeMap<String, FoundJob>) -> Result<(String, FoundJob)> {
    let found = jobs.len();
    match jobs.pop_first() {
        Some(job) if found == 1 => Ok(job),
        None => bail!("no job of this user runs on this machine"),
        Some(first) => {
            let all = std::iter::once(first).chain(jobs);
            let lines: String = all.map(|(address, job)| line(&address, &job)).collect();
            bail!("{found} jobs run on this machine; name one by a process id:{lines}")
        }
    }
}

/// Describes a job of a list: a process's id and name, the number of processes, the address.
fn line(address: &str, job: &FoundJob) -> String {
    let FoundJob { pid, processes, .. } = job;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!(
        "\n  {pid}  {}, {}, at {address}",
        name.trim_end(),
        counted(*processes, "process")
    )
}

/// Returns the jobs of this user on this machine, by address.
fn all_jobs() -> BTreeMap<String, FoundJob> {
    let user = rustix::process::geteuid().as_raw();
    jobs(pids(), Some(user))
}

/// Returns the jobs of these processes, by address. If `user` is given, skips processes of other
/// users.
fn jobs(pids: impl IntoIterator<Item = u32>, user: Option<u32>) -> BTreeMap<String, FoundJob> {
    let mut jobs = BTreeMap::new();
    for pid in pids {
        // A process that ends meanwhile, or has variables of its own, is none of a job.
        let Ok(Some(env)) = JobEnv::of_process(pid, user) else {
            continue;
        };
        if env.dry_run.is_some() || (env.processes == 1 && !env.hosted) {
            continue;
        }
        let job = jobs.entry(env.coordinator).or_insert(FoundJob {
            pid,
            token: env.token,
            processes: env.processes,
        });
        job.pid = pid.min(job.pid);
    }
    jobs
}

/// Returns the ids of all other processes on this machine.
fn pids() -> impl Iterator<Item = u32> {
    let folders = fs::read_dir("/proc").into_iter().flatten().flatten();
    folders
        .filter_map(|folder| folder.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id())
}

/// Returns the ids of the processes that descend from `ancestor`.
fn descendants(ancestor: u32) -> BTreeSet<u32> {
    let parents: Vec<(u32, u32)> = pids().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = BTreeSet::from([ancestor]);
    loop {
        let before = found.len();
        let children = parents.iter().filter(|(_, parent)| found.contains(parent));
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        found.extend(children);
        if found.len() == before {
            break;
        }
    }
    found.remove(&ancestor);
    found
}

/// Returns the id of a process's parent. `None` if the process has ended.
fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok()
}
