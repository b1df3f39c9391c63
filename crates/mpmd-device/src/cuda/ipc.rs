//! Sharing of device memory between the processes of one host, with CUDA IPC.
//!
//! A description ([`Words`]) that travels between processes is a CUDA handle of 64 bytes, the UUID
//! of the device, and the memory's [`IpcOrigin`]. CUDA cannot open a handle in the process that
//! created it, so this process looks up its own handles in a table ([`ShownMemory`]).
//!
//! A driver may keep several allocations in one block. The handle of one of them then opens the
//! whole block, and the handle of another one is refused (`CUDA_ERROR_ALREADY_MAPPED`). So open
//! blocks are kept in a table, and found by the origin of their memory ([`OpenedBlocks`]).
//!
//! [`Words`]: super::ipc_tables::Words
//! [`IpcOrigin`]: super::ipc_tables::IpcOrigin
//! [`ShownMemory`]: super::ipc_tables::ShownMemory
//! [`OpenedBlocks`]: super::ipc_tables::OpenedBlocks
//!
//! If this process uses the device that holds the memory, the memory is opened in that device's
//! context and used like local memory. Otherwise it is opened in the context of this process's
//! first device, provided the machine has a link between the two. Then the memory can only be
//! [copied](DeviceMemory::is_far).
//!
//! Events are not shared. A device that waits for an event of a process which has died may wait for
//! ever, and its driver with it. So memory is lent only after the work on it has ended, as its
//! owner's host sees it. Drivers have only a limited number of such events, too.

use std::ffi::c_char;
use std::io;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use mpmd_memory::{DeviceMemory, DeviceSharing};

use super::calls;
use super::context::{DeviceContext, cuda};
use super::error::CudaError;
use super::gpu::Gpu;
use super::ipc_tables::{Description, HANDLE, MemoryRange, ShownRange, close, parts};
use super::library::DRIVER;
use mpmd_base::variables;

/// Driver functions that sharing by CUDA IPC needs.
const SYMBOLS: [&str; 3] = [
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
];

/// Returns an object that exports memory of these devices to other processes, and opens memory of
/// other processes. Returns `None` if there are no devices.
pub fn sharing(gpus: Vec<Arc<Gpu>>) -> Option<Arc<dyn DeviceSharing>> {
    if gpus.is_empty() {
        return None;
    }
    let contexts = gpus.iter().map(|gpu| gpu.context().clone()).collect();
    Some(Arc::new(CudaSharing {
        gpus,
        contexts,
        samples: OnceLock::new(),
    }))
}

struct CudaSharing {
    gpus: Vec<Arc<Gpu>>,
    contexts: Vec<Arc<DeviceContext>>,
    /// Memory that peers try to open at the start, to test whether sharing works. It is kept as
    /// long as this object.
    samples: OnceLock<Result<Vec<Box<dyn DeviceMemory>>, NoSharing>>,
}

/// The reason why this process's devices cannot share memory.
#[derive(Clone, Debug, thiserror::Error)]
enum NoSharing {
    /// The user has turned sharing off.
    #[error("{}=0 turns it off", variables::CUDA_IPC)]
    TurnedOff,
    #[error("the CUDA driver has no {symbol}")]
    NoSymbol { symbol: &'static str },
    /// There is no device memory left for the samples.
    #[error(transparent)]
    NoMemory(Arc<io::Error>),
    #[error("the CUDA driver shows no memory to other processes")]
    NotShown,
}

/// Memory of this process that it has exported to other processes.
struct OwnMemory<'a> {
    context: &'a Arc<DeviceContext>,
    range: ShownRange,
}

impl CudaSharing {
    /// Returns the context of the device with this UUID; `None` if this process does not use the
    /// device.
    fn near(&self, uuid: &[u8]) -> Option<&Arc<DeviceContext>> {
        self.contexts.iter().find(|context| context.uuid() == uuid)
    }

    /// Returns memory of this process that it has exported under `handle`. Returns `None` if the
    /// handle belongs to another process.
    fn own(&self, uuid: &[u8], handle: [u8; HANDLE]) -> Option<OwnMemory<'_>> {
        let mut same = self
            .contexts
            .iter()
            .filter(|context| context.uuid() == uuid);
        same.find_map(|context| {
            let range = context.shown().memory.lock().get(&handle).copied()?;
            Some(OwnMemory { context, range })
        })
    }

    fn make_samples(&self) -> Result<Vec<Box<dyn DeviceMemory>>, NoSharing> {
        if self.is_turned_off() {
            return Err(NoSharing::TurnedOff);
        }
        if let Some(symbol) = SYMBOLS.into_iter().find(|name| !DRIVER.has(name)) {
            return Err(NoSharing::NoSymbol { symbol });
        }

        let mut samples = Vec::new();
        for gpu in &self.gpus {
            let memory = gpu
                .allocator()
                .allocate(1)
                .map_err(|error| NoSharing::NoMemory(Arc::new(error)))?;
            memory.export().ok_or(NoSharing::NotShown)?;
            samples.push(memory);
        }
        Ok(samples)
    }
}

impl DeviceSharing for CudaSharing {
    fn samples(&self) -> io::Result<Vec<Vec<u8>>> {
        match self.samples.get_or_init(|| self.make_samples()) {
            Ok(samples) => {
                let words = samples.iter().filter_map(|sample| sample.export());
                Ok(words.map(<[u8]>::to_vec).collect())
            }
            Err(error) => Err(io::Error::other(error.clone())),
        }
    }

    fn is_turned_off(&self) -> bool {
        std::env::var_os(variables::CUDA_IPC).is_some_and(|value| value == "0")
    }

    fn try_sample(&self, sample: &[u8]) -> io::Result<()> {
        self.open(sample, 1).map(drop)
    }

    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        let description = parts(words).map_err(io::Error::other)?;
        let opened = match self.own(description.uuid, description.handle) {
            Some(OwnMemory { context, range }) => OpenedMemory {
                context: context.clone(),
                address: range.address,
                bytes,
                open_bytes: Some(range.bytes as u64),
                is_far: false,
                block: None,
            },
            None => {
                let near = self.near(description.uuid);
                let context = near.unwrap_or(&self.contexts[0]);
                OpenedMemory::open(context, &description, bytes, near.is_none())
                    .map_err(io::Error::other)?
            }
        };

        if opened.open_bytes.is_some_and(|open| open < bytes as u64) {
            return Err(io::Error::other(
                "memory of a device is shorter than its owner says",
            ));
        }
        Ok(Box::new(opened))
    }
}

/// Opened device memory of another process, or of this process if its own description came back.
struct OpenedMemory {
    context: Arc<DeviceContext>,
    address: u64,
    bytes: usize,
    /// Number of open bytes from `address` on; `None` if the driver does not report it.
    open_bytes: Option<u64>,
    is_far: bool,
    /// Address of the opened block that contains the memory. `None` for memory of this process,
    /// which needs no closing.
    block: Option<u64>,
}

impl OpenedMemory {
    /// Opens memory of another process in `context`. `is_far` is true if the memory is on another
    /// device than `context`.
    fn open(
        context: &Arc<DeviceContext>,
        description: &Description<'_>,
        bytes: usize,
        is_far: bool,
    ) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let handle = sys::CUipcMemHandle {
            reserved: description.handle.map(|byte| byte as c_char),
        };
        let origin = description.origin;

        // The only flag that exists, and it is required. For remote memory it enables access
        // between the devices.
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

        // The table is not locked during calls of the driver: closing may wait for the device, and
        // the thread that opens also takes all messages. So a block may be closed in between.
        let mut tries = 3;
        let found = loop {
            let mut address = 0;
            // SAFETY: a handle is plain bytes, which the driver validates; there is room for the
            // address.
            let answer = unsafe { calls::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) };
            let is_open = answer.is(sys::CUresult::CUDA_ERROR_ALREADY_MAPPED);
            if is_open && let Some(found) = context.foreign().join(origin, bytes) {
                break found;
            }

            match answer.result() {
                Ok(()) => break context.foreign().add(address, origin),
                Err(_) if is_open && tries > 0 => tries -= 1,
                Err(error) => {
                    let doing = "opening memory of another process's CUDA device";
                    return Err(cuda(doing, error));
                }
            }
        };

        let address = found.address;
        let MemoryRange { start, length } = found.range;
        Ok(Self {
            context: context.clone(),
            address,
            bytes,
            open_bytes: (length > 0).then(|| length - (address - start)),
            is_far,
            block: Some(found.block),
        })
    }
}

impl DeviceMemory for OpenedMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn device(&self) -> u32 {
        self.context.ordinal()
    }

    fn is_far(&self) -> bool {
        self.is_far
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        let Some(address) = self.block else { return };
        if self.context.foreign().leave(address) {
            let Ok(_visit) = self.context.visit() else {
                return;
            };
            close(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::mpsc::{Receiver, channel};
    use mpmd_memory::{Fence as _, Fences, Landing};

    use super::*;

    const TIME_LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn own_handles_are_found_again_and_bad_ones_refused() {
        if softcuda::again!() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let sharing = sharing(vec![gpu.clone()]).unwrap();
        assert!(super::sharing(Vec::new()).is_none());
        let memory = gpu.allocator().allocate(4096).unwrap();
        let words = memory.export().unwrap().to_vec();
        assert_eq!(memory.export().unwrap(), words);
        let again = sharing.open(&words, 4096).unwrap();
        assert_eq!(
            (again.address(), again.bytes(), again.is_far()),
            (memory.address(), 4096, false)
        );
        assert!(
            sharing
                .open(&words, 4097)
                .map(drop)
                .unwrap_err()
                .to_string()
                .contains("shorter")
        );
        drop((again, memory));
        assert!(sharing.open(&words, 4096).is_err(), "it is no more");
        for nonsense in [&[][..], &[7; 79], &[7; 80], &[7; 96]] {
            assert!(sharing.open(nonsense, 4096).is_err());
        }
        for sample in [&b""[..], b"?", b"M", &[7; 96]] {
            assert!(sharing.try_sample(sample).is_err());
        }
        let samples = sharing.samples().unwrap();
        assert_eq!(
            (samples.len(), sharing.samples().unwrap()),
            (1, samples.clone())
        );
        sharing.try_sample(&samples[0]).unwrap();
    }

    #[test]
    fn failed_work_of_a_lender_fails_work_behind_it() {
        if softcuda::again!() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let heard = Arc::<Landing>::default();
        let after = Fences::of([heard.clone() as _]);
        let told = issued(&gpu, &after, Ok(()));
        assert_eq!(
            told.recv_timeout(TIME_LIMIT).unwrap(),
            Ok(()),
            "the lender's work is over"
        );
        assert!(!heard.is_over(), "only its owner reports the end");
        heard.pass(Some("it fell over".to_owned()));
        assert_eq!(
            (heard.is_over(), heard.failure().as_deref()),
            (true, Some("it fell over"))
        );
        let told = issued(
            &gpu,
            &after,
            Err(CudaError::new("its input is never made", "", "")),
        );
        let error = told.recv_timeout(TIME_LIMIT).unwrap().unwrap_err();
        assert!(error.to_string().contains("it fell over"), "{error}");
    }

    type Told = Receiver<Result<(), CudaError>>;

    /// Issues work behind `after` that ends with `result` as it is issued.
    fn issued(gpu: &Gpu, after: &Fences, result: Result<(), CudaError>) -> Told {
        let (said, told) = channel();
        let then = Box::new(move |result| said.send(result).unwrap());
        gpu.inward().submit(&[after], |_| result, then);
        told
    }
}
