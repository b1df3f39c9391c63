//! Addresses of the rendezvous, derived from the hosts and job ids of launchers.

use crate::{LaunchError, variables as ours};

/// Returns `host:port`, with brackets around an IPv6 address.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Returns the error that `coordinator` has not the form `host:port`.
pub(super) fn no_address(coordinator: &str) -> LaunchError {
    LaunchError::Variable {
        variable: ours::COORDINATOR.into(),
        value: coordinator.into(),
        expected: "host:port".into(),
    }
}

/// Returns a port from 61440 to 65535, above Linux's ephemeral ports. The port depends only on
/// `job`, a number that all processes of a job share.
pub(super) fn derived_port(job: u64) -> u16 {
    61440 + (job % 4096) as u16
}

/// Computes the FNV-1a hash of `text`. All processes of a job must get the same value, even from
/// different builds.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns the first host of a Slurm node list: `node03` for `node[03-05,7],other`. `None` if the
/// list is malformed.
pub(super) fn first_host(nodes: &str) -> Option<String> {
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

    #[test]
    fn first_host_of_a_slurm_list() {
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
