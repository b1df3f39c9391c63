//! Shared memory that processes may leave behind: it outlives them unless it is removed.

use std::collections::BTreeSet;
use std::path::Path;

/// Folder of named shared memory.
const NAMED: &str = "/dev/shm";

/// File that lists shared memory without names, one segment per line.
const NUMBERED: &str = "/proc/sysvipc/shm";

/// The names of the shared memory that existed before a test.
///
/// A name does not tell the owner. So it has only names that transports of this library would
/// choose.
pub(crate) struct SharedMemory {
    before: BTreeSet<String>,
}

impl SharedMemory {
    /// Records the names of the shared memory that exists now.
    pub(crate) fn now() -> Self {
        Self {
            before: named(Path::new(NAMED)),
        }
    }

    /// Returns the shared memory that is left: new named segments, and segments without names that
    /// these processes have created.
    pub(crate) fn left(&self, pids: &[u32]) -> Vec<String> {
        let mut left: Vec<String> = named(Path::new(NAMED))
            .difference(&self.before)
            .cloned()
            .collect();
        left.extend(numbered(
            &std::fs::read_to_string(NUMBERED).unwrap_or_default(),
            pids,
        ));
        left
    }
}

fn named(folder: &Path) -> BTreeSet<String> {
    // A system without the folder has no named shared memory.
    let Ok(all) = std::fs::read_dir(folder) else {
        return BTreeSet::new();
    };
    let names =
        all.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    names
        .filter(|name| name.starts_with("ucx_shm") || name.starts_with("mpmd"))
        .collect()
}

/// Returns the lines of `table` for shared memory that these processes have created.
fn numbered(table: &str, pids: &[u32]) -> Vec<String> {
    let mut lines = table.lines();
    let head = lines.next().unwrap_or_default();
    let Some(maker) = head.split_whitespace().position(|column| column == "cpid") else {
        return Vec::new();
    };
    let made_by = |line: &&str| {
        line.split_whitespace()
            .nth(maker)
            .and_then(|pid| pid.parse().ok())
    };
    let theirs = lines.filter(|line| made_by(line).is_some_and(|pid| pids.contains(&pid)));
    theirs.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_or_own_shared_memory_counts() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["ucx_shm_posix_7", "mpmd-1", "pulse-shm"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let names: Vec<String> = named(folder.path()).into_iter().collect();
        assert_eq!(names, ["mpmd-1", "ucx_shm_posix_7"]);
        assert!(named(&folder.path().join("none")).is_empty());
        let table = "key shmid perms size cpid lpid\n  0  1 600 4096 71 71\n  0 71 600 4096 72 9\n";
        assert_eq!(numbered(table, &[71]), ["  0  1 600 4096 71 71"]);
        assert!(numbered("", &[71]).is_empty());
        assert!(SharedMemory::now().left(&[]).is_empty());
    }
}
