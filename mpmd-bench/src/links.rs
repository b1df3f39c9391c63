//! Measures the costs of the links between devices, for the planner.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use mpmd_base::DeviceId;
use mpmd_core::prelude::Program;
use mpmd_core::{MoveOptions, Simulation};
use mpmd_launch::{Bind, JobEnv};
use mpmd_layout::aval::u8s;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::{Link, LinkClass, Links};
use serde_json::json;

use crate::case::{Case, show, table};
use crate::job::run_as_job;
use crate::memcpy;
use crate::options::Size;

/// Bytes of the array for bandwidths.
const LARGE: usize = 32 << 20;
/// Bytes of the array for latencies.
const SMALL: usize = 8;

#[derive(Args, Clone, Debug)]
pub(crate) struct LinksArgs {
    /// One line of JSON for each case instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of measurements of each link; the median counts.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// The transport of the messages: `shm` or `tcp` between two processes, or `inproc` between two
    /// threads.
    #[arg(long, default_value = "shm")]
    transport: String,
    /// Writes the costs to a file, for the variable `MPMD_LINKS` of later jobs.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Measures links within a device, between two devices of a process, and between two processes.
/// Prints the costs, and writes them to `--out`. The processes are on one host unless a cluster's
/// launcher has started this on two. Other links keep their defaults.
pub(super) fn links(args: &LinksArgs) -> Result<ExitCode> {
    if JobEnv::from_env()?.is_some() {
        let mut p = Program::builder().devices(4).from_env()?;
        anyhow::ensure!(
            p.processes() == 2,
            "links are measured between 2 processes, not {}",
            p.processes()
        );
        let measured = measure(&mut p, args)?;
        if p.process().0 == 0 {
            say(args, &measured)?;
        }
        p.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.transport == "inproc" {
        let mut results = Simulation::new(2, 4).run(|p| measure(p, args));
        say(args, &results.swap_remove(0)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::from(run_as_job(2, &args.transport, Bind::None)?))
}

/// The one-way times of a class of links, for `SMALL` and for `LARGE` bytes.
struct Measured {
    class: LinkClass,
    small: Vec<Duration>,
    large: Vec<Duration>,
}

/// Measures the links from device 0 to devices 0, 1 and 2. Both processes must call this together.
fn measure(p: &mut Program, args: &LinksArgs) -> mpmd_core::Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for other in [0, 1, 2].map(DeviceId) {
        let class = p.topology().link_between(DeviceId(0), other).unwrap_or(LinkClass::Network);
        let small = there_and_back(p, args, other, SMALL, 100)?;
        let large = there_and_back(p, args, other, LARGE, 1)?;
        measured.push(Measured { class, small, large });
    }
    Ok(measured)
}

impl Measured {
    fn link(&self) -> Link {
        let latency = median(self.small.clone());
        let moving = median(self.large.clone()).saturating_sub(latency).as_secs_f64() * 1e6;
        Link {
            latency_ns: u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX),
            bytes_per_us: ((LARGE as f64 / moving.max(1.0)) as u64).max(1),
        }
    }

    fn cases(&self, memcpy: &Case) -> [Case; 2] {
        let (class, small, large) = (self.class.name(), Size(SMALL), Size(LARGE));
        [
            Case::micros("latency", format!("{class}, {small}"), self.small.iter().copied()),
            Case::bandwidth(
                "bandwidth",
                format!("{class}, {large}"),
                LARGE,
                self.large.iter().copied(),
            )
            .beside(memcpy),
        ]
    }
}

/// Returns mean one-way times of an array of `bytes` bytes between device 0 and another. Each is a
/// mean over `rounds` round trips.
fn there_and_back(
    p: &mut Program,
    args: &LinksArgs,
    other: DeviceId,
    bytes: usize,
    rounds: u32,
) -> mpmd_core::Result<Vec<Duration>> {
    let (here, there) = (Sharding::single_device(DeviceId(0)), Sharding::single_device(other));
    let options = MoveOptions::default().may_alias(false);
    let mut x = p.array_from_fn(u8s([bytes]), &here, |_, mut view| Ok(view.fill(1u8)?))?;
    x.block_until_ready()?;
    let mut times = Vec::new();
    for repeat in 0..=args.repeats {
        let start = Instant::now();
        for _ in 0..rounds {
            let y = p.device_put_with(&x, &there, options)?;
            // The receiver also waits, so that the programs on both sides take part in every hop.
            y.block_until_ready()?;
            x = p.device_put_with(&y, &here, options)?;
            x.block_until_ready()?;
        }
        if repeat > 0 {
            times.push(start.elapsed() / (2 * rounds));
        }
    }
    Ok(times)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns the costs of all classes of links, with defaults for those that were not measured.
fn costs(measured: impl IntoIterator<Item = (LinkClass, Link)>) -> Links {
    let mut links = Links::default();
    for (class, link) in measured {
        match class {
            LinkClass::SameDevice => links.same_device = link,
            LinkClass::SameProcess => links.same_process = link,
            LinkClass::SameHost => links.same_host = link,
            LinkClass::Network => links.network = link,
        }
    }
    links
}

fn say(args: &LinksArgs, measured: &[Measured]) -> Result<()> {
    let links = costs(measured.iter().map(|measured| (measured.class, measured.link())));
    if let Some(path) = &args.out {
        let text = serde_json::to_string_pretty(&json!(links))?;
        std::fs::write(path, format!("{text}\n"))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let memcpy = memcpy::plain(LARGE, 1, args.repeats as usize);
    if args.json {
        let mut cases: Vec<Case> =
            measured.iter().flat_map(|measured| measured.cases(&memcpy)).collect();
        cases.push(memcpy);
        show(&cases, true);
        return Ok(());
    }
    let copy = memcpy.quantile(0.5);
    let row = |class: LinkClass| {
        let Link { latency_ns, bytes_per_us } = links.of(class);
        let (latency, rate) = (latency_ns as f64 / 1e3, bytes_per_us as f64 / 1e3);
        let found = measured.iter().any(|measured| measured.class == class);
        vec![
            class.name().to_owned(),
            format!("{latency:.3}"),
            format!("{rate:.3}"),
            format!("{:.2}", rate / copy),
            if found { "measured" } else { "default" }.to_owned(),
        ]
    };
    let rows = LinkClass::ALL.into_iter().map(row).collect();
    println!("{}", table(&["link", "latency us", "GB/s", "of memcpy"], rows, &[0, 4]));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmeasured_links_keep_their_defaults() {
        let link = Link { latency_ns: 7, bytes_per_us: 9 };
        let links = costs([(LinkClass::SameDevice, link), (LinkClass::SameHost, link)]);
        assert_eq!(links, Links { same_device: link, same_host: link, ..Links::default() });
    }
}
