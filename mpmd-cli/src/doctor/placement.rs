//! Examines the places of processes on this machine's cores, and measures the gain of binding them.

use std::io::Read as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use mpmd_launch::testing::bare_command;
use mpmd_launch::{Bind, Binding, HostCores};
use serde::Serialize;
use serde_json::Value;

use super::verdict::{Finding, Verdict, finding};

/// Number of processes of the job that serves as an example.
const PROCESSES: usize = 2;

/// The time limit for one measurement, which takes a fraction of a second.
const TIME_LIMIT: Duration = Duration::from_secs(4);

/// Interval between two checks of a measurement.
const LOOK: Duration = Duration::from_millis(5);

/// The facts about cores, for jobs of two processes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Placement {
    /// The number of cores in each NUMA node that this process may use. Empty if it is unknown.
    pub(super) nodes: Vec<usize>,
    /// The cores of each process under `--bind core`, or the reason why there are none.
    pub(super) core: Result<String, String>,
    /// The same for `--bind numa`.
    pub(super) numa: Result<String, String>,
    /// The latency of a small array. `None` if processes cannot be bound to cores, or if the
    /// measurement failed or took too long.
    pub(super) latency: Option<Latency>,
}

/// One-way times of an array of 8 bytes between two processes, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Latency {
    pub(super) unbound_us: f64,
    pub(super) bound_us: f64,
}

impl Placement {
    /// Gathers the facts. Measures for about a second if binding has an effect here.
    pub(super) fn look() -> Self {
        let host = HostCores::look();
        let by = |bind| {
            let binding = host.as_ref().map_err(Clone::clone);
            let binding = binding.and_then(|host| Binding::on(host, bind, PROCESSES));
            binding.map(|binding| binding.to_string()).map_err(|why| why.to_string())
        };
        let core = by(Bind::Core);
        Self {
            nodes: host.as_ref().map(HostCores::node_sizes).unwrap_or_default(),
            latency: core.is_ok().then(Latency::measure).flatten(),
            core,
            numa: by(Bind::Numa),
        }
    }
}

impl Latency {
    /// Measures both in turns, twice, and takes the better of two. `None` if a run fails.
    fn measure() -> Option<Self> {
        let pair = || Some([latency("none")?, latency("core")?]);
        let (first, second) = (pair()?, pair()?);
        Some(Self { unbound_us: first[0].min(second[0]), bound_us: first[1].min(second[1]) })
    }
}

/// Runs the benchmark of a small array in processes of its own. Returns the latency in
/// microseconds, or `None` if it fails or takes too long.
fn latency(bind: &str) -> Option<f64> {
    let mut command = bare_command(std::env::current_exe().ok()?);
    command.args(["bench", "p2p", "--json", "--case", "latency"]);
    command.args(["--sizes", "8", "--repeats", "10", "--sample-us", "2000", "--bind", bind]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let until = Instant::now() + TIME_LIMIT;
    // The output has two lines, less than a pipe's buffer.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
            _ => {
                // The benchmark's processes end with it.
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = String::new();
    child.stdout.take()?.read_to_string(&mut text).ok()?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut cases = lines.filter(|line| line["name"] == "latency");
    cases.next().filter(|_| status.success())?["median"].as_f64()
}

/// Returns a finding for the facts.
pub(super) fn judge(placement: &Placement) -> Finding {
    let Placement { nodes, core, numa, latency } = placement;
    let sizes: Vec<String> = nodes.iter().map(usize::to_string).collect();
    let there = match &nodes[..] {
        [] => "unknown cores".to_owned(),
        [one] => format!("{one} cores in one NUMA node"),
        several => format!("{} cores in {} NUMA nodes", sizes.join(" + "), several.len()),
    };
    let option = |name: &str, shares: &Result<String, String>| match shares {
        Ok(shares) => format!("--bind {name} with {PROCESSES} processes: {shares}"),
        Err(why) => format!("--bind {name} has no effect: {why}"),
    };
    let value = [there, option("core", core), option("numa", numa)].join("\n");
    let advice = match latency {
        Some(Latency { unbound_us, bound_us }) => format!(
            "8 bytes between two processes: {unbound_us:.1} us, bound to cores {bound_us:.1} us; \
             memory is placed at the node of the core that first writes to it"
        ),
        None if core.is_ok() => "its gain was not measured: the machine is too busy".to_owned(),
        None => String::new(),
    };
    finding("binding", value, Verdict::Ok, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binding_is_shown_with_its_gain() {
        let two = Placement {
            nodes: vec![4, 4],
            core: Ok("0: cores 0-3; 1: cores 4-7".to_owned()),
            numa: Ok("0: cores 0-3; 1: cores 4-7".to_owned()),
            latency: Some(Latency { unbound_us: 2.5, bound_us: 1.25 }),
        };
        let said = judge(&two);
        assert!(said.value.starts_with("4 + 4 cores in 2 NUMA nodes\n--bind core with 2"));
        assert!(said.advice.contains("2.5 us, bound to cores 1.2 us"), "{}", said.advice);
        let busy = judge(&Placement { latency: None, ..two });
        assert!(busy.advice.contains("not measured"), "{}", busy.advice);
    }

    #[test]
    fn missing_effect_has_its_reason() {
        let one = Placement {
            nodes: vec![1],
            core: Err("2 processes are more than the 1 cores here".to_owned()),
            numa: Err("the cores here belong to one NUMA node".to_owned()),
            latency: None,
        };
        let said = judge(&one);
        assert!(said.value.contains("--bind core has no effect: 2 processes"), "{}", said.value);
        assert!(said.value.ends_with(
            "--bind numa has no effect: the cores here belong to one \
            NUMA node"
        ));
        assert!(said.advice.is_empty());
    }
}
