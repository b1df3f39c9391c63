//! Where processes meet, from what launchers say of hosts and jobs.

use crate::{LaunchError, variables as ours};

/// `host:port`, in brackets where the host is an address of IPv6.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Host, without brackets, and port.
pub(super) fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty()).then_some((host, port.parse().ok()?))
}

/// The error of a coordinator that is no `host:port`.
pub(super) fn no_address(coordinator: &str) -> LaunchError {
    LaunchError::Variable {
        variable: ours::COORDINATOR.into(),
        value: coordinator.into(),
        expected: "host:port".into(),
    }
}

/// A port above those that systems hand out by themselves, the same in all processes of a job.
pub(super) fn derived_port(job: u64) -> u16 {
    61440 + (job % 4096) as u16
}

/// FNV-1a: all processes of a job must find the same, whatever they were built by.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The first host of a Slurm list: `node[03-05,7],other` begins with `node03`.
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
