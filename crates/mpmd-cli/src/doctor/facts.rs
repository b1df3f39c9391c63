//! Gathers the facts about this machine. `findings` judges them.

use std::fs;

use mpmd_core::transports;
use mpmd_launch::{cuda_collectives, device_kinds, reach_loopback, variables};
use mpmd_layout::topology::{CudaCollectives, DeviceKind};
use mpmd_transport::{TransportError, shm};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::cuda::CudaFacts;

/// All facts that `findings` judges.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DoctorFacts {
    /// The requested transport. The name may be unknown.
    pub(super) transport: String,
    /// The requested devices.
    pub(super) device: Option<String>,
    /// True if NCCL is requested for the collectives of CUDA devices.
    pub(super) wants_nccl: bool,
    pub(super) cuda: CudaFacts,
    pub(super) ucx: UcxFacts,
    /// The error of a TCP connection from this host to itself; `None` if it works.
    pub(super) loopback_error: Option<String>,
    pub(super) sharing: SharingFacts,
    /// The limit on the address space of this process in bytes; `None` without limit.
    pub(super) address_space: Option<u64>,
}

/// True if `device`, the text of a request for devices, names the kind `cuda`.
pub(super) fn wants_cuda(device: Option<&str>) -> bool {
    let kinds = device
        .and_then(|text| device_kinds(text).ok())
        .unwrap_or_default();
    kinds.contains(&DeviceKind::Cuda)
}

/// True if `collectives`, the text of a request for collectives of CUDA devices, names NCCL.
fn wants_nccl(collectives: Option<&str>) -> bool {
    let way = collectives.map(|text| cuda_collectives(text.trim()));
    way == Some(Ok(CudaCollectives::Nccl))
}

/// The state of the UCX library for this program.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum UcxFacts {
    NotCompiledIn,
    Unusable(String),
    Usable { version: String, library: String },
}

/// Facts that the transport `shm` depends on.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SharingFacts {
    /// The reason why this process cannot share memory with others; `None` if it can.
    pub(super) error: Option<String>,
    /// The kernel's chosen setting of huge pages for shared memory, such as `advise`, from
    /// `shmem_enabled`. `None` if it cannot be read.
    pub(super) huge_pages: Option<String>,
    /// The hard limit on open files of this process; `None` without limit. Each large shared array
    /// takes one file.
    pub(super) open_files: Option<u64>,
}

impl DoctorFacts {
    /// Gathers all facts. Opens UCX, which may block for seconds.
    pub(super) fn gather(transport: String, device: Option<String>) -> Self {
        Self {
            transport,
            cuda: CudaFacts::look(wants_cuda(device.as_deref())),
            device,
            wants_nccl: wants_nccl(std::env::var(variables::CUDA_COLLECTIVES).ok().as_deref()),
            ucx: UcxFacts::examine(),
            loopback_error: reach_loopback().err().map(|error| error.to_string()),
            sharing: SharingFacts::look(),
            address_space: getrlimit(Resource::As).current,
        }
    }
}

impl UcxFacts {
    fn examine() -> Self {
        if !transports::HAS_UCX {
            return Self::NotCompiledIn;
        }
        match transports::examine() {
            Ok(report) => Self::Usable {
                version: report.version,
                library: report.library.display().to_string(),
            },
            Err(error) => Self::Unusable(error.to_string()),
        }
    }
}

impl SharingFacts {
    /// Gathers the facts. Opens shared memory once, as a job's process does when it chooses its
    /// transport.
    fn look() -> Self {
        let error = shm::OpenedShm::open().err().map(|error| match error {
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

    /// Returns the word in brackets in `text`: the setting that the kernel has chosen. `None` if no
    /// word is in brackets.
    fn chosen(text: &str) -> Option<String> {
        text.split_whitespace()
            .find_map(|word| Some(word.strip_prefix('[')?.strip_suffix(']')?.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        let chosen = SharingFacts::chosen("always within_size advise [never] deny force\n");
        assert_eq!(chosen.as_deref(), Some("never"));
        assert_eq!(SharingFacts::chosen("never\n"), None);
        // Memory can be shared on every machine that runs the tests.
        assert_eq!(SharingFacts::look().error, None);
    }
}
