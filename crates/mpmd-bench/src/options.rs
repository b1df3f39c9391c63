//! Options that several benchmarks have.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use mpmd_layout::topology::DeviceKind;

/// Options of every benchmark.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct BenchOptions {
    /// Print one line of JSON for each case instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Number of measurements of each case.
    #[arg(long, default_value_t = 30)]
    pub(crate) repeats: usize,
}

/// The option of benchmarks that also run on GPUs.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct DeviceOption {
    /// The kind of the devices: cpu, or cuda for graphics processors, one for each process as far
    /// as there are enough.
    #[arg(long, value_name = "KIND", default_value_t = DeviceKind::Cpu, value_parser = kind)]
    pub(crate) device: DeviceKind,
}

fn kind(name: &str) -> anyhow::Result<DeviceKind> {
    DeviceKind::named(name).with_context(|| {
        let names = DeviceKind::ALL.map(DeviceKind::name);
        format!("no kind of devices: there are {}", names.join(" and "))
    })
}

/// The transport of messages.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Carrier {
    /// Memory that two processes share.
    Shm,
    /// Sockets between two processes.
    Tcp,
    /// UCX between two processes; needs a build with the feature `ucx`.
    Ucx,
    /// Two threads of one process.
    Inproc,
}

impl Carrier {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Inproc => "inproc",
        }
    }
}

/// A number of bytes, at least one, as `8`, `4Ki`, `16Mi`, `1Gi`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Size(pub(crate) usize);

const UNITS: [(&str, u32); 3] = [("Ki", 10), ("Mi", 20), ("Gi", 30)];

impl FromStr for Size {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
            .unwrap_or((text, 0));
        let bytes = number
            .parse::<usize>()
            .ok()
            .and_then(|number| number.checked_mul(1 << shift));
        match bytes {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => bail!("not a number of bytes such as 8, 4Ki or 16Mi"),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS
            .iter()
            .rev()
            .find(|(_, shift)| self.0.trailing_zeros() >= *shift);
        match whole {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [
            ("8", 8),
            ("4Ki", 4096),
            ("16Mi", 16 << 20),
            ("1Gi", 1 << 30),
            ("1025", 1025),
        ] {
            assert_eq!(text.parse::<Size>().unwrap(), Size(bytes), "{text}");
            assert_eq!(Size(bytes).to_string(), text);
        }
        for text in ["", "0", "-1", "4K", "Ki", "1.5Mi", "99999999999Gi"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
