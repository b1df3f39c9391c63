//! Gathers the facts about this machine. `findings` judges them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use mpmd_core::transports;
use mpmd_launch::{device_kinds, variables};
use mpmd_layout::topology::DeviceKind;
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
    /// The requested devices. The text may be invalid.
    pub(super) device: Option<String>,
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
    /// CPU cores that this process may use.
    pub(super) cores: usize,
    /// The size of `/dev/shm`; `None` if it does not exist.
    pub(super) shared_memory: Option<SharedMemory>,
    /// All network interfaces, including those that UCX cannot use.
    pub(super) interfaces: Vec<Interface>,
    /// The environment variables `MPMD_*`, `UCX_*` and `CUDA_*`. The job's token is replaced by a
    /// text.
    pub(super) variables: BTreeMap<String, String>,
}

/// True if the text of a request for devices names the kind `cuda`.
pub(super) fn wants_cuda(device: Option<&str>) -> bool {
    let kinds = device.and_then(|text| device_kinds(text).ok()).unwrap_or_default();
    kinds.contains(&DeviceKind::Cuda)
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

/// A network interface.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Interface {
    pub(super) name: String,
    /// True if the interface is up, connected, and either loopback or routed in IPv4. UCX would use
    /// it for TCP.
    pub(super) usable: bool,
    pub(super) loopback: bool,
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
            ucx: Ucx::examine(),
            loopback_error: loopback().err().map(|error| error.to_string()),
            sharing: Sharing::look(),
            lockable_bytes: limit.current,
            may_lock: may_lock(&read("/proc/self/status"), &read("/proc/self/uid_map")),
            rdma: names_in("/sys/class/infiniband"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            shared_memory: SharedMemory::look(),
            interfaces: interfaces(),
            variables: relevant(std::env::vars_os().filter_map(|(name, value)| {
                Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
            })),
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

fn interfaces() -> Vec<Interface> {
    let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
    let with_address = routed(&routes);
    let look = |name: String| {
        let folder = Path::new("/sys/class/net").join(&name);
        let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
        let flags =
            u32::from_str_radix(read("flags").trim().trim_start_matches("0x"), 16).unwrap_or(0);
        // IFF_UP and IFF_LOOPBACK, see netdevice(7).
        let (up, loopback) = (flags & 0x1 != 0, flags & 0x8 != 0);
        let connected = read("carrier").trim() == "1";
        let usable = up && connected && (loopback || with_address.contains(&name));
        Interface { name, usable, loopback }
    };
    names_in("/sys/class/net").into_iter().map(look).collect()
}

/// Returns the names of the interfaces in `routes`, the text of `/proc/net/route`. An interface
/// with an IPv4 address has a route to its own network.
fn routed(routes: &str) -> BTreeSet<String> {
    let names = routes.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    names.map(str::to_owned).collect()
}

/// Returns the names of the entries of a folder, sorted. Empty if the folder cannot be read.
fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Returns the variables `MPMD_*`, `UCX_*` and `CUDA_*`, with the job's token replaced by `(a
/// secret)`.
fn relevant(all: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    let ours = all
        .filter(|(name, _)| ["MPMD_", "UCX_", "CUDA_"].iter().any(|start| name.starts_with(start)));
    let shown = ours.map(|(name, value)| {
        let value = if name == variables::JOB_TOKEN { "(a secret)".to_owned() } else { value };
        (name, value)
    });
    shown.collect()
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
    fn interfaces_with_routes_are_found() {
        let routes =
            "Iface\tDestination\tGateway\neth0\t00000000\t010200C0\neth0\t000200C0\t0\nib0\t0\t0\n";
        assert_eq!(routed(routes).into_iter().collect::<Vec<_>>(), ["eth0", "ib0"]);
        assert!(routed("").is_empty());
    }

    #[test]
    fn other_variables_and_the_secret_stay_out() {
        let all = [
            ("HOME", "/"),
            ("MPMD_JOB_TOKEN", "5ec2e7"),
            ("UCX_TLS", "tcp"),
            ("MPMD_SPIN", "never"),
        ];
        let found =
            relevant(all.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["MPMD_JOB_TOKEN", "MPMD_SPIN", "UCX_TLS"]);
        assert!(!format!("{found:?}").contains("5ec2e7"));
    }

    #[test]
    fn this_machine_can_be_examined() {
        loopback().expect("a host reaches itself");
        let shared = SharedMemory::look();
        assert!(shared.is_none_or(|shared| shared.free <= shared.bytes), "{shared:?}");
        let looked = interfaces();
        assert!(looked.is_sorted_by_key(|interface| &interface.name), "{looked:?}");
    }
}
