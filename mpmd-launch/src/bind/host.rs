//! The cores of this host that this process may use, by NUMA node.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::{HostCores, Unbound};

/// The folder in which the kernel describes cores and nodes.
const SYSTEM: &str = "/sys/devices/system";

impl HostCores {
    /// Looks up the cores that this thread may use.
    ///
    /// # Errors
    ///
    /// If the system does not report them, as on hosts with more than 1,024 cores.
    pub fn look() -> Result<Self, Unbound> {
        let allowed =
            sched_getaffinity(None).map_err(|error| Unbound::Unknown { why: error.to_string() })?;
        let allowed = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        // Counts the limits of control groups, too.
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { nodes: by_node(Path::new(SYSTEM), allowed), usable })
    }

    /// Returns the number of hardware threads in each node.
    pub fn node_sizes(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.iter().map(Vec::len).sum()).collect()
    }
}

/// Sorts hardware threads into cores, and cores into nodes, as the folder `system` describes them.
/// Threads that belong to no node form one at the end.
fn by_node(system: &Path, allowed: Vec<usize>) -> Vec<Vec<Vec<usize>>> {
    let mut left = allowed;
    let mut nodes = Vec::new();
    for (_, folder) in numbered(&system.join("node"), "node") {
        let there = cpus(&fs::read_to_string(folder.join("cpulist")).unwrap_or_default());
        let (node, others) = left.into_iter().partition(|cpu| there.contains(cpu));
        left = others;
        nodes.push(node);
    }
    nodes.push(left);
    nodes.retain(|node: &Vec<usize>| !node.is_empty());
    nodes.into_iter().map(|node| by_core(system, &node)).collect()
}

/// Sorts hardware threads into cores, in the order of their first threads.
fn by_core(system: &Path, threads: &[usize]) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for thread in threads {
        let list = system.join(format!("cpu/cpu{thread}/topology/thread_siblings_list"));
        let siblings = cpus(&fs::read_to_string(list).unwrap_or_default());
        let first = siblings.iter().min().unwrap_or(thread);
        cores.entry(*first).or_default().push(*thread);
    }
    cores.into_values().collect()
}

/// Returns the entries of a folder that are `prefix` and a number, by number.
fn numbered(folder: &Path, prefix: &str) -> BTreeMap<usize, std::path::PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix(prefix)?.parse().ok();
    entries.filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path()))).collect()
}

/// Parses the kernel's list format, such as `0-3,8`. Skips parts that are no numbers.
fn cpus(list: &str) -> Vec<usize> {
    let part = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        // The limit keeps a damaged list from taking all memory.
        (last < 1 << 16).then_some(first..=last)
    };
    list.trim().split(',').filter_map(part).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_parsed() {
        assert_eq!(cpus("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(cpus("5\n"), [5]);
        assert!(cpus("\n").is_empty() && cpus("x,3-,-1,0-99999999999").is_empty());
    }

    #[test]
    fn threads_are_sorted_into_cores_and_nodes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/node0/cpulist", "0-1,4-5\n");
        write("node/node1/cpulist", "2-3,6-7\n");
        write("node/possible", "0-1\n");
        for cpu in 0..8 {
            let siblings = format!("{},{}\n", cpu % 4, cpu % 4 + 4);
            write(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &siblings);
        }
        let all = by_node(folder.path(), (0..8).collect());
        assert_eq!(all, [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]);
        let some = by_node(folder.path(), vec![1, 2, 6, 9]);
        assert_eq!(some, [vec![vec![1]], vec![vec![2, 6]], vec![vec![9]]]);
        // Without descriptions all are cores of one node.
        let none = by_node(&folder.path().join("none"), vec![3, 1]);
        assert_eq!(none, [[[1], [3]]]);
    }

    #[test]
    fn cores_of_this_host_are_found() {
        let host = HostCores::look().unwrap();
        let found: usize = host.node_sizes().iter().sum();
        assert!(host.usable >= 1 && found >= host.usable, "{host:?}");
    }
}
