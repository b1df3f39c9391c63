//! Gathers the facts about this machine. `findings` judges them.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;
use std::{fs, io};

use mpmd_core::transports;
use mpmd_launch::{cuda_collectives, device_kinds, variables};
use mpmd_layout::topology::{CudaCollectives, DeviceKind};
use mpmd_transport::{TransportError, shm};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::cuda::Cuda;

/// The time limit for UCX to connect two ends in this process.
const UCX_PATIENCE: Duration = Duration::from_secs(20);

/// The time limit for a TCP connection from this host to itself, and for reading one byte from it.
const LOOPBACK_PATIENCE: Duration = Duration::from_secs(5);

/// All facts that `findings` judges.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Facts {
    /// The requested transport. The name may be unknown.
    pub(super) transport: String,
    /// The requested devices.
    pub(super) device: Option<String>,
    /// True if NCCL is requested for the collectives of CUDA devices.
    pub(super) wants_nccl: bool,
    pub(super) cuda: Cuda,
    pub(super) ucx: Ucx,
    /// The error of a TCP connection from this host to itself; `None` if it works.
    pub(super) loopback_error: Option<String>,
    pub(super) sharing: Sharing,
    /// Bytes that this process may lock in memory, by its soft limit; `None` if there is no limit.
    pub(super) lockable_bytes: Option<u64>,
    /// True if that limit does not apply to this process, because it has CAP_IPC_LOCK.
    pub(super) may_lock: bool,
    /// Names of the RDMA devices.
    pub(super) rdma: Vec<String>,
    /// The size of `/dev/shm`; `None` if it does not exist.
    pub(super) shared_memory: Option<SharedMemory>,
}

/// True if the text of a request for devices names the kind `cuda`.
pub(super) fn wants_cuda(device: Option<&str>) -> bool {
    let kinds = device.and_then(|text| device_kinds(text).ok()).unwrap_or_default();
    kinds.contains(&DeviceKind::Cuda)
}

/// True if the text of a request for collectives of CUDA devices names NCCL.
fn wants_nccl(collectives: Option<&str>) -> bool {
    let way = collectives.map(|text| cuda_collectives(text.trim()));
    way == Some(Ok(CudaCollectives::Nccl))
}

/// The UCX library, as this program can use it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ucx {
    NotCompiledIn,
    Unusable(String),
    Usable {
        version: String,
        library: String,
        resources: Vec<(String, String)>,
        lanes: Vec<String>,
    },
}

/// Facts for the transport `shm`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sharing {
    /// The reason why this process cannot share memory with others; `None` if it can.
    pub(super) error: Option<String>,
    /// The kernel's chosen setting of huge pages for shared memory, such as `advise`, from
    /// `shmem_enabled`. `None` if it cannot be read.
    pub(super) huge_pages: Option<String>,
    /// The hard limit on open files of this process; `None` without limit. Each large shared array
    /// takes one file.
    pub(super) open_files: Option<u64>,
}

/// The size of `/dev/shm` and its free part, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct SharedMemory {
    pub(super) bytes: u64,
    pub(super) free: u64,
}

impl Facts {
    /// Gathers all facts. Blocks for several seconds at times: it opens UCX.
    pub(super) fn gather(transport: String, device: Option<String>) -> Self {
        let limit = getrlimit(Resource::Memlock);
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            transport,
            cuda: Cuda::look(wants_cuda(device.as_deref())),
            device,
            wants_nccl: wants_nccl(std::env::var(variables::CUDA_COLLECTIVES).ok().as_deref()),
            ucx: Ucx::examine(),
            loopback_error: loopback().err().map(|error| error.to_string()),
            sharing: Sharing::look(),
            lockable_bytes: limit.current,
            may_lock: may_lock(&read("/proc/self/status"), &read("/proc/self/uid_map")),
            rdma: names_in("/sys/class/infiniband"),
            shared_memory: SharedMemory::look(),
        }
    }
}

impl Ucx {
    fn examine() -> Self {
        if !transports::HAS_UCX {
            return Self::NotCompiledIn;
        }
        match transports::examine(UCX_PATIENCE) {
            Ok(report) => Self::Usable {
                version: report.version,
                library: report.library.display().to_string(),
                resources: report.resources,
                lanes: report.lanes,
            },
            Err(error) => Self::Unusable(error.to_string()),
        }
    }
}

impl Sharing {
    /// Gathers the facts. Opens shared memory once, as a job's process does when it chooses its
    /// transport.
    fn look() -> Self {
        let error = shm::Opened::open().err().map(|error| match error {
            TransportError::Unavailable { why, .. } => why,
            error => error.to_string(),
        });
        let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        Self {
            error,
            huge_pages: enabled.ok().and_then(|text| Self::chosen(&text)),
            // The hard limit: programs raise their soft limit to it.
            open_files: getrlimit(Resource::Nofile).maximum,
        }
    }

    /// Returns the word in brackets, which is the kernel's chosen setting. `None` if there is none.
    fn chosen(text: &str) -> Option<String> {
        text.split_whitespace()
            .find_map(|word| Some(word.strip_prefix('[')?.strip_suffix(']')?.to_owned()))
    }
}

/// Returns true if limits on locked memory do not apply to this process, by the texts of
/// `/proc/self/status` and `/proc/self/uid_map`.
fn may_lock(status: &str, uid_map: &str) -> bool {
    /// Bit of CAP_IPC_LOCK, see capabilities(7).
    const IPC_LOCK: u64 = 1 << 14;
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(field.unwrap_or_default().trim(), 16).unwrap_or(0);
    // The host's own namespace maps all users to themselves, see user_namespaces(7). The kernel
    // requires the capability in that namespace.
    let mapped: Vec<&str> = uid_map.split_whitespace().collect();
    let is_hosts_own = mapped.is_empty() || mapped == ["0", "0", "4294967295"];
    capabilities & IPC_LOCK != 0 && is_hosts_own
}

impl SharedMemory {
    fn look() -> Option<Self> {
        let system = rustix::fs::statvfs("/dev/shm").ok()?;
        Some(Self {
            bytes: system.f_blocks * system.f_frsize,
            free: system.f_bavail * system.f_frsize,
        })
    }
}

/// Sends a byte over TCP from this host to itself, and receives it. Each wait is limited to
/// `LOOPBACK_PATIENCE`.
fn loopback() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut there = TcpStream::connect_timeout(&listener.local_addr()?, LOOPBACK_PATIENCE)?;
    // The connection is established, so `accept` does not block.
    let (mut here, _) = listener.accept()?;
    here.set_read_timeout(Some(LOOPBACK_PATIENCE))?;
    there.write_all(&[1])?;
    here.read_exact(&mut [0])
}

/// Returns the names of the entries of a folder, sorted. Empty if the folder cannot be read.
fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "         0          0 4294967295\n";

    #[test]
    fn limits_are_lifted_only_in_the_hosts_own_namespace() {
        let capable = "Name:\tmpmd\nCapEff:\t000001fffeffffff\nSeccomp:\t0\n";
        assert!(may_lock(capable, OWN) && may_lock(capable, ""));
        assert!(!may_lock(capable, "0 100000 65536\n"));
        assert!(!may_lock("CapEff:\t0000000000000000\n", OWN) && !may_lock("", ""));
    }

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        let chosen = Sharing::chosen("always within_size advise [never] deny force\n");
        assert_eq!(chosen.as_deref(), Some("never"));
        assert_eq!(Sharing::chosen("never\n"), None);
        // Memory can be shared on every machine that runs the tests.
        assert_eq!(Sharing::look().error, None);
    }

    #[test]
    fn this_machine_can_be_examined() {
        loopback().expect("a host reaches itself");
        let shared = SharedMemory::look();
        assert!(shared.is_none_or(|shared| shared.free <= shared.bytes), "{shared:?}");
    }
}
