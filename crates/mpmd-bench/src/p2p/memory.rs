//! Reads the available memory of this host.

/// Returns the bytes of host memory that are available without swapping, by the kernel's estimate.
/// `None` if the kernel gives no estimate.
pub(super) fn available() -> Option<u64> {
    available_of(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available_of(meminfo: &str) -> Option<u64> {
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kib.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let meminfo = "MemTotal:       24630148 kB\nMemFree:  1 kB\nMemAvailable:   20480 kB\n";
        assert_eq!(available_of(meminfo), Some(20 << 20));
        assert_eq!(available_of("MemTotal: 1 kB\n"), None);
    }
}
