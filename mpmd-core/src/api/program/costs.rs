//! The costs of the links between processes. Process 0 reads them from a file and shares them
//! before any plan is made.

use std::path::Path;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_transport::rendezvous::Rendezvous;
use serde::{Deserialize, Serialize};

use mpmd_launch::{LaunchError, variables};
use mpmd_layout::topology::{LinkClass, Links};

/// Returns the rendezvous key under which process 0 publishes the link costs of an epoch, or its
/// error.
fn key(epoch: u64) -> String {
    format!("mpmd.links.{epoch}")
}

/// The result of process 0: the costs, or the error that every process returns.
#[derive(Deserialize, Serialize)]
enum Told {
    Costs(Links),
    Failed { path: String, why: String },
}

/// On process 0, reads the file, if there is one, and publishes the costs or the error.
pub(super) fn tell(
    rendezvous: &Rendezvous,
    process: ProcessId,
    epoch: u64,
    file: Option<&Path>,
) -> Result<(), LaunchError> {
    if process.index() > 0 {
        return Ok(());
    }
    let told = match file.map(|path| (path, read(path))) {
        None => Told::Costs(Links::default()),
        Some((_, Ok(links))) => Told::Costs(links),
        Some((path, Err(why))) => Told::Failed { path: path.display().to_string(), why },
    };
    let told = serde_json::to_vec(&told)
        .map_err(|error| LaunchError::environment("writing down the costs of links", error))?;
    Ok(rendezvous.set(key(epoch), told)?)
}

/// Waits up to `peer_timeout` for the link costs that process 0 publishes. Fails on every process
/// alike if process 0 could not read its file.
pub(super) fn hear(
    rendezvous: &Rendezvous,
    epoch: u64,
    peer_timeout: Duration,
) -> Result<Links, LaunchError> {
    let told = rendezvous.get(key(epoch), peer_timeout)?;
    match serde_json::from_slice(&told) {
        Ok(Told::Costs(links)) => Ok(links),
        Ok(Told::Failed { path, why }) => {
            Err(LaunchError::Links { variable: variables::LINKS, path, why })
        }
        Err(error) => Err(LaunchError::environment("reading the costs of links", error)),
    }
}

/// Reads the link costs from a file, for a process without a rendezvous.
pub(super) fn of(path: &Path) -> Result<Links, LaunchError> {
    let wrong = |why| LaunchError::Links {
        variable: variables::LINKS,
        path: path.display().to_string(),
        why,
    };
    read(path).map_err(wrong)
}

/// Reads link costs from a JSON file in the format of `mpmd bench links --out`. Refuses a cost of 0
/// bytes per microsecond.
fn read(path: &Path) -> Result<Links, String> {
    let text = std::fs::read(path).map_err(|error| error.to_string())?;
    let links: Links = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    match LinkClass::ALL.into_iter().find(|class| links.of(*class).bytes_per_us == 0) {
        Some(class) => Err(format!("{} moves 0 bytes in a microsecond", class.name())),
        None => Ok(links),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::topology::Link;

    fn file(name: &str, text: &str) -> std::path::PathBuf {
        let path =
            std::env::temp_dir().join(format!("mpmd-links-{}-{name}.json", std::process::id()));
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn incomplete_or_zero_link_costs_are_refused() {
        let network = Link { latency_ns: 3, bytes_per_us: 12_500 };
        let mut links = Links { network, ..Links::default() };
        let good = file("good", &serde_json::to_string(&links).unwrap());
        assert_eq!(read(&good), Ok(links));
        links.same_host.bytes_per_us = 0;
        let idle = file("idle", &serde_json::to_string(&links).unwrap());
        assert_eq!(read(&idle), Err("same_host moves 0 bytes in a microsecond".to_owned()));
        let part = file("part", r#"{"network": {"latency_ns": 1, "bytes_per_us": 1}}"#);
        assert!(read(&part).unwrap_err().contains("missing field"), "{:?}", read(&part));
        for path in [good, idle, part] {
            std::fs::remove_file(&path).unwrap();
            assert!(read(&path).is_err());
        }
    }
}
