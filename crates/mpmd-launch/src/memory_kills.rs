//! Processes that the system kills when memory is full, as their control group counts them.

use std::path::{Path, PathBuf};

/// The count of kills in this process's control group, which its child processes share.
pub(super) struct MemoryKills {
    /// The file with the count. `None` if the system has none.
    file: Option<PathBuf>,
    /// Number of kills that were there at first, or have been taken.
    taken: u64,
}

impl MemoryKills {
    /// Finds the count for this process. Kills up to now do not count.
    pub(super) fn of_this_process() -> Self {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let found = places(&groups).find(|file| kills(file).is_some());
        Self::of(found)
    }

    fn of(file: Option<PathBuf>) -> Self {
        let taken = file.as_deref().and_then(kills).unwrap_or(0);
        Self { file, taken }
    }

    /// Takes one kill from the count. Returns false if all are taken. The system counts a kill
    /// before the process ends.
    pub(super) fn take_one(&mut self) -> bool {
        let now = self.file.as_deref().and_then(kills).unwrap_or(0);
        let is_new = now > self.taken;
        self.taken += u64::from(is_new);
        is_new
    }
}

/// Returns the files that may have the count of a process. `groups` is the text of its
/// `/proc/PID/cgroup`, with lines `number:controllers:path`.
fn places(groups: &str) -> impl Iterator<Item = PathBuf> {
    groups.lines().filter_map(|line| {
        let (_, group) = line.split_once(':')?;
        let (controllers, path) = group.split_once(':')?;
        let path = path.trim_start_matches('/');
        match controllers {
            "" => Some(Path::new("/sys/fs/cgroup").join(path).join("memory.events")),
            "memory" => {
                let folder = Path::new("/sys/fs/cgroup/memory").join(path);
                Some(folder.join("memory.oom_control"))
            }
            _ => None,
        }
    })
}

/// Returns the number in the line `oom_kill` of a file. `None` if there is none.
fn kills(file: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill "))?;
    count.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_both_kinds_of_control_groups_are_found() {
        let of = |groups: &str| places(groups).collect::<Vec<_>>();
        let new = Path::new("/sys/fs/cgroup/user.slice/a:b/memory.events");
        assert_eq!(of("0::/user.slice/a:b\n"), [new]);
        let old = "4:memory:/job/1\n3:cpu,cpuacct:/\n";
        let file = Path::new("/sys/fs/cgroup/memory/job/1/memory.oom_control");
        assert_eq!(of(old), [file]);
        assert_eq!(of("text\n1:name=systemd:/\n"), Vec::<PathBuf>::new());
    }

    #[test]
    fn each_kill_is_taken_once_and_earlier_ones_never() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("memory.events");
        let write = |kills: u64| {
            let text = format!("low 7\noom 9\noom_kill {kills}\noom_group_kill 8\n");
            std::fs::write(&file, text).unwrap();
        };
        write(3);
        let mut count = MemoryKills::of(Some(file.clone()));
        assert!(!count.take_one());
        write(5);
        assert!(count.take_one() && count.take_one() && !count.take_one());
        assert!(!MemoryKills::of(None).take_one());
    }
}
