//! The machine on which figures were measured, and the date.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// The properties of the machine that measured figures depend on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: u64,
    kernel: String,
    /// The system's average load over the last minute, read before the first measurement.
    load: String,
}

impl Machine {
    pub(super) fn look() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu(&read("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib(&read("/proc/meminfo")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .unwrap_or("?")
                .to_owned(),
        }
    }

    /// Returns a description of the machine in one line.
    pub(super) fn text(&self) -> String {
        let Self {
            cpu,
            cores,
            memory_gib,
            kernel,
            load,
        } = self;

        let cores = if *cores == 1 {
            "1 core".to_owned()
        } else {
            format!("{cores} cores")
        };

        format!("{cpu}, {cores}, {memory_gib} GiB, Linux {kernel}, load {load} before")
    }

    pub(super) fn json(&self) -> Value {
        let Self {
            cpu,
            cores,
            memory_gib,
            kernel,
            load,
        } = self;
        json!({
            "cpu": cpu,
            "cores": cores,
            "memory_gib": memory_gib,
            "kernel": kernel,
            "load_before": load,
        })
    }
}

/// Returns the processor's name from the text of `/proc/cpuinfo`. Without a name there, returns the
/// architecture.
fn cpu(info: &str) -> String {
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let name = line.and_then(|line| line.trim_start().strip_prefix(':'));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |name| name.trim().to_owned(),
    )
}

/// Returns the rounded size of the memory in GiB, from the text of `/proc/meminfo`.
fn memory_gib(info: &str) -> u64 {
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    (kib.unwrap_or(0) + (1 << 19)) >> 20
}

/// Returns the current time in UTC, as `2026-11-23T12:00:00Z`.
pub(super) fn now() -> String {
    let said = Command::new("date")
        .args(["-u", "+%FT%TZ"])
        .stdin(Stdio::null())
        .output();
    let said = said.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned());
    said.ok()
        .filter(|date| !date.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_and_memory_are_read() {
        let info = "processor\t: 0\nmodel name\t: AMD EPYC 9005\nmodel name\t: AMD EPYC 9005\n";
        assert_eq!(cpu(info), "AMD EPYC 9005");
        assert_eq!(cpu("CPU part\t: 0xd40\n"), std::env::consts::ARCH);
        assert_eq!(
            memory_gib("MemTotal:       24596524 kB\nMemFree: 1 kB\n"),
            23
        );
        assert_eq!(memory_gib(""), 0);
    }

    #[test]
    fn date_has_the_form_of_file_names() {
        let date = now();
        let form: String = date
            .chars()
            .map(|c| if c.is_ascii_digit() { '0' } else { c })
            .collect();
        assert_eq!(form, "0000-00-00T00:00:00Z");
    }
}
