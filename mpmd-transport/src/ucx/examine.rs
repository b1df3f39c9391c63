//! Reports which UCX library and which of its transports this machine has, for checks before a job.

use std::time::{Duration, Instant};

use super::{Opened, Report, Spin, UcxConfig, engine, sys};
use crate::deadline::after;
use crate::memory::Pool;
use crate::transport::{Transport, TransportError};
use mpmd_proto::wire::ProcessId;

/// Reports UCX's version and the resources that it finds on this machine. Opens two ends in this
/// process and connects them, to see the lanes that they use.
///
/// Waits at most `limit` for the two ends to connect. The time that UCX takes to open counts, but
/// cannot be cut short. Closing the ends takes at most `limit` and two seconds more.
///
/// # Errors
///
/// If there is no library, or if UCX cannot be opened or finds nothing that it can use. Also if the
/// two ends do not connect within `limit`.
pub fn examine(limit: Duration) -> Result<Report, TransportError> {
    let until = after(Instant::now(), limit);
    let resources = resources(&engine::worker(2)?.resources());
    let [one, other] = [Opened::open(2)?, Opened::open(2)?];
    let peers = vec![one.address().to_owned(), other.address().to_owned()];
    let config = |process: u32| UcxConfig {
        process: ProcessId(process),
        peers: peers.clone(),
        token: [0; 32],
        epoch: 0,
        peer_timeout: until.saturating_duration_since(Instant::now()),
        pool: Pool::new("ucx", None),
        spin: Spin::Never,
        neighbours: 2,
    };
    let (first, second) = (config(0), config(1));
    let pair = std::thread::scope(|scope| {
        let other = scope.spawn(|| other.connect(second));
        (one.connect(first), other.join())
    });
    let (Ok(one), Ok(Ok(other))) = pair else {
        return Err(pair.0.err().or_else(|| pair.1.ok()?.err()).unwrap_or(TransportError::Closed));
    };
    let lanes = lanes(one.lanes(ProcessId(1)));
    std::thread::scope(|scope| {
        scope.spawn(|| one.shutdown(limit));
        other.shutdown(limit);
    });
    let library = sys::library().map_err(|why| TransportError::Unavailable {
        transport: super::NAME,
        why: why.to_owned(),
    })?;
    Ok(Report { version: library.version(), library: library.path.clone(), resources, lanes })
}

/// Parses the pairs of transport and device from UCX's description of a context.
///
/// A line is `#  resource 3  :  md 4  dev 3  flags -- posix/memory`.
fn resources(words: &str) -> Vec<(String, String)> {
    let lines = words.lines().filter(|line| line.contains("resource "));
    let pairs = lines.filter_map(|line| line.split_whitespace().last()?.split_once('/'));
    pairs.map(|(transport, device)| (transport.to_owned(), device.to_owned())).collect()
}

/// Returns the lines about lanes in UCX's description of an endpoint.
pub(super) fn lanes(words: &str) -> Vec<String> {
    let lines = words.lines().filter(|line| line.contains("lane["));
    lines.map(|line| line.trim_start_matches(['#', ' ']).trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examine_reports_version_resources_and_lanes() {
        let report = examine(Duration::from_secs(20)).expect("UCX is built with this program");
        assert!(report.version.starts_with("1."), "{report:?}");
        assert!(report.library.is_file(), "{report:?}");
        assert!(report.resources.iter().any(|(transport, _)| transport == "tcp"), "{report:?}");
        assert!(!report.lanes.is_empty(), "{report:?}");
        assert!(report.lanes.iter().all(|lane| lane.starts_with("lane[")), "{report:?}");
    }
}
