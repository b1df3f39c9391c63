//! Finds the address and the token of a running job.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result, bail};
use mpmd_launch::{JobEnv, variables};
use mpmd_rendezvous::Token;

/// Returns (address of the rendezvous, token) of a job. `words` is the id of one of its processes,
/// or an address. With `None`, finds the only job of this user on this machine.
pub(super) fn job(words: Option<&str>) -> Result<(String, Token)> {
    let Some(words) = words else {
        return only_job();
    };
    if let Ok(pid) = words.parse() {
        if !fs::exists(format!("/proc/{pid}")).unwrap_or(true) {
            bail!(
                "no process {pid} runs on this machine: give the id of a process of the job, its \
                 address as host:port, or nothing if it is the only one"
            );
        }
        let env = JobEnv::of_process(pid, None);
        let Some(env) = env.with_context(|| format!("looking at process {pid}"))? else {
            bail!("process {pid} belongs to no job: a job has a launcher, such as mpmd run");
        };
        return Ok((env.coordinator, env.token));
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

fn only_job() -> Result<(String, Token)> {
    only_process().map(|(address, (_, token))| (address, token))
}

/// Returns a process of the only job of this user on this machine.
///
/// # Errors
///
/// If there is no job, or there are several. The error lists several.
pub(crate) fn process_of_only_job() -> Result<u32> {
    only_process().map(|(_, (pid, _))| pid)
}

fn only_process() -> Result<(String, (u32, Token))> {
    let jobs = jobs();
    let mut addresses = jobs.keys();
    let found = jobs.len();
    match (addresses.next(), found) {
        (Some(address), 1) => Ok((address.clone(), jobs[address].clone())),
        (None, _) => bail!("no job of this user runs on this machine"),
        _ => {
            let lines = jobs
                .iter()
                .map(|(address, (pid, _))| format!("\n  {pid}  at {address}"));
            let lines: String = lines.collect();
            bail!("{found} jobs run on this machine; name one by a process id:{lines}")
        }
    }
}

/// Returns the jobs of this user on this machine: by address, (lowest process id, token).
fn jobs() -> BTreeMap<String, (u32, Token)> {
    let user = rustix::process::geteuid().as_raw();
    let folders = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = folders.filter_map(|folder| {
        let pid: u32 = folder.file_name().to_str()?.parse().ok()?;
        (pid != std::process::id()).then_some(pid)
    });

    let mut jobs = BTreeMap::new();
    for pid in pids {
        // A process that ends meanwhile, or has variables of its own, is none of a job.
        let Ok(Some(env)) = JobEnv::of_process(pid, Some(user)) else {
            continue;
        };
        if env.dry_run.is_some() || (env.processes == 1 && !env.hosted) {
            continue;
        }
        let (first, _) = jobs.entry(env.coordinator).or_insert((pid, env.token));
        *first = pid.min(*first);
    }
    jobs
}
