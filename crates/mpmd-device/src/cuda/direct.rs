//! CUDA without the framework: memory, copies, launches, events and IPC by single calls of the
//! driver, on one stream and one thread.
//!
//! Benchmarks measure these beside the framework, and `mpmd bench probe` asks a driver for its
//! facts with them. Nothing else uses them. An error of the driver comes back as it is: nothing is
//! tried again.

use std::ffi::{c_char, c_void};
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::sys;
use mpmd_memory::{Arena, OwnedBuffer, Pool};

use super::calls::{self, CallStatus};
use super::context::cuda;
use super::error::CudaError;
use super::found;
use super::gpu::Gpu;
use super::source::Source;
use super::stream::WAIT_DEFAULT;

/// A CUDA IPC handle of device memory or of an event.
pub type Handle = [u8; 64];

/// A CUDA device with one stream, used by single calls of the driver. Clones share both.
#[derive(Clone)]
pub struct Direct(Rc<DirectState>);

struct DirectState {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
    /// The event that [`Direct::wait`] records behind all issued work.
    end: sys::CUevent,
}

/// Memory of the device or of the host, for copies. Dropping it waits for all work of the stream,
/// then frees, closes or unpins the memory.
pub struct DirectMemory {
    direct: Direct,
    address: u64,
    bytes: usize,
    origin: MemoryOrigin,
}

enum MemoryOrigin {
    Allocated,
    Opened,
    /// Host memory. While this value exists, only the buffer's address is used.
    Host {
        is_pinned: bool,
        _memory: OwnedBuffer,
    },
}

/// A CUDA event of this process, or an opened event of another process.
pub struct DirectEvent {
    direct: Direct,
    raw: sys::CUevent,
}

/// How the host waits for an event, and whether other processes can open the event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EventWait {
    /// The waiting thread spins.
    Spinning,
    /// The waiting thread sleeps.
    Blocking,
    /// The waiting thread sleeps, and other processes can open the event.
    Interprocess,
}

/// A function of a module that is loaded on the device.
pub struct DirectFunction {
    direct: Direct,
    raw: sys::CUfunction,
}

impl Direct {
    /// Opens the device with driver number `ordinal` and creates a stream.
    ///
    /// # Errors
    ///
    /// If there is no driver or no such device, or the device cannot be used.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        found().map_err(|error| CudaError::new("using CUDA directly", "", error.to_string()))?;
        let gpu = Gpu::open(ordinal)?;
        gpu.context().bind()?;

        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING;
        // SAFETY: the context is bound, and there is room for the stream.
        said("creating a CUDA stream directly", unsafe {
            calls::cuStreamCreate(&raw mut stream, flags as u32)
        })?;

        let end = create_event(EventWait::Spinning);
        if end.is_err() {
            // SAFETY: created above, and nothing was issued to it.
            let _ = unsafe { calls::cuStreamDestroy_v2(stream) };
        }

        Ok(Self(Rc::new(DirectState {
            gpu,
            stream,
            end: end?,
        })))
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.0.gpu.context().bind()
    }

    /// Allocates device memory with `cuMemAlloc`. Its content is arbitrary.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn allocate(&self, bytes: usize) -> Result<DirectMemory, CudaError> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: there is room for the address.
        said("allocating memory directly", unsafe {
            calls::cuMemAlloc_v2(&raw mut address, bytes)
        })?;
        Ok(DirectMemory {
            direct: self.clone(),
            address,
            bytes,
            origin: MemoryOrigin::Allocated,
        })
    }

    /// Allocates host memory, with 1 in every byte. If `shared` is true, the memory is a sealed
    /// memory file, like the framework's own segments; else it is anonymous.
    ///
    /// # Errors
    ///
    /// If the system cannot provide the memory.
    pub fn host(&self, bytes: usize, shared: bool) -> Result<DirectMemory, CudaError> {
        let none = |error: &dyn ToString| {
            CudaError::new("allocating memory of the host", "", error.to_string())
        };

        let arena = if shared {
            Arena::shared()
        } else {
            Ok(Arena::private())
        };
        let pool = Pool::in_arena("direct", None, &arena.map_err(|error| none(&error))?);
        let mut memory = pool.allocate(bytes).map_err(|error| none(&error))?;

        memory.fill(1);
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let origin = MemoryOrigin::Host {
            is_pinned: false,
            _memory: memory,
        };
        Ok(DirectMemory {
            direct: self.clone(),
            address,
            bytes,
            origin,
        })
    }

    /// Opens `bytes` bytes of memory that another process has exported by [`DirectMemory::handle`].
    ///
    /// # Errors
    ///
    /// If the driver refuses the handle.
    pub fn open_memory(&self, handle: Handle, bytes: usize) -> Result<DirectMemory, CudaError> {
        self.bind()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| byte as c_char),
        };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

        let mut address = 0;
        // SAFETY: a handle is plain bytes, which the driver validates; there is room for the
        // address.
        said("opening memory directly", unsafe {
            calls::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags)
        })?;
        Ok(DirectMemory {
            direct: self.clone(),
            address,
            bytes,
            origin: MemoryOrigin::Opened,
        })
    }

    /// Issues a copy of the first `bytes` bytes, or fewer if `from` or `to` is shorter. Does not
    /// wait, unless host memory is not pinned.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn copy(
        &self,
        from: &DirectMemory,
        to: &DirectMemory,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let bytes = bytes.min(from.bytes).min(to.bytes);
        // SAFETY: both have these bytes, and are dropped only after all work of the stream.
        said("copying directly", unsafe {
            calls::cuMemcpyAsync(to.address, from.address, bytes, self.0.stream)
        })
    }

    /// Issues work that sets every byte of device memory to `value`.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn fill(&self, to: &DirectMemory, value: u8) -> Result<(), CudaError> {
        // SAFETY: the memory has these bytes, and is dropped only after all work of the stream.
        said("filling memory directly", unsafe {
            calls::cuMemsetD8Async(to.address, value, to.bytes, self.0.stream)
        })
    }

    /// Blocks until the stream has ended all issued work. The thread spins.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.bind()?;
        record(self.0.end, self.0.stream)?;
        synchronize(self.0.end)
    }

    /// Creates an event that records no times.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn event(&self, waiting: EventWait) -> Result<DirectEvent, CudaError> {
        self.bind()?;
        Ok(DirectEvent {
            direct: self.clone(),
            raw: create_event(waiting)?,
        })
    }

    /// Opens an event that another process has exported by [`DirectEvent::handle`].
    ///
    /// # Errors
    ///
    /// If the driver refuses the handle.
    pub fn open_event(&self, handle: Handle) -> Result<DirectEvent, CudaError> {
        self.bind()?;
        let handle = sys::CUipcEventHandle {
            reserved: handle.map(|byte| byte as c_char),
        };

        let mut raw = std::ptr::null_mut();
        // SAFETY: a handle is plain bytes, which the driver validates; there is room for the event.
        said("opening an event directly", unsafe {
            calls::cuIpcOpenEventHandle(&raw mut raw, handle)
        })?;
        Ok(DirectEvent {
            direct: self.clone(),
            raw,
        })
    }

    /// Makes later work of the stream wait, on the device, for the last record of the event.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn come_after(&self, event: &DirectEvent) -> Result<(), CudaError> {
        // SAFETY: stream and event are alive.
        said("waiting for an event on the device", unsafe {
            calls::cuStreamWaitEvent(self.0.stream, event.raw, WAIT_DEFAULT)
        })
    }

    /// Compiles and loads `source`, as the framework does, and returns its function `name`.
    ///
    /// # Errors
    ///
    /// If NVRTC is missing, the source does not compile, or it has no such function.
    pub fn function(
        &self,
        source: &'static Source,
        name: &str,
    ) -> Result<DirectFunction, CudaError> {
        self.bind()?;
        let modules = self.0.gpu.modules();
        modules.make_ready(source)?;
        modules.with_function(source, name, |found| {
            Ok(DirectFunction {
                direct: self.clone(),
                raw: found.raw(),
            })
        })
    }
}

impl Drop for DirectState {
    fn drop(&mut self) {
        if self.gpu.context().bind_failed().is_err() {
            return;
        }
        // SAFETY: both were created in `open` and are destroyed once; CUDA lets the work in the
        // stream come to its end.
        unsafe {
            let _ = calls::cuEventDestroy_v2(self.end);
            let _ = calls::cuStreamDestroy_v2(self.stream);
        }
    }
}

impl DirectMemory {
    /// Returns the address of the memory's first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Pins host memory until this value is dropped. Does nothing with device memory.
    ///
    /// # Errors
    ///
    /// If the driver returns an error. The memory can still be copied.
    pub fn pin(&mut self) -> Result<(), CudaError> {
        self.direct.bind()?;
        let MemoryOrigin::Host { is_pinned, .. } = &mut self.origin else {
            return Ok(());
        };
        // SAFETY: these pages stay mapped until this is dropped, which unpins them first.
        said("pinning memory directly", unsafe {
            let at = std::ptr::with_exposed_provenance_mut(self.address as usize);
            calls::cuMemHostRegister_v2(at, self.bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })?;
        *is_pinned = true;
        Ok(())
    }

    /// Returns a handle with which other processes can open the memory.
    ///
    /// # Errors
    ///
    /// If the driver returns an error, as for memory that this process has opened itself.
    pub fn handle(&self) -> Result<Handle, CudaError> {
        self.direct.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: there is room for the handle.
        said("showing memory directly", unsafe {
            calls::cuIpcGetMemHandle(&raw mut handle, self.address)
        })?;
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Returns (address, bytes) of the driver's memory range that contains this memory. The range
    /// may be larger than the requested memory.
    ///
    /// # Errors
    ///
    /// If the driver has no such attributes.
    pub fn range(&self) -> Result<(u64, u64), CudaError> {
        use sys::CUpointer_attribute_enum as Attribute;
        self.direct.bind()?;

        let ask = |attribute| {
            let mut found = 0u64;
            // SAFETY: both attributes are numbers of the size of `found`.
            let answer = unsafe {
                calls::cuPointerGetAttribute((&raw mut found).cast(), attribute, self.address)
            };
            said("asking for the range of memory", answer).map(|()| found)
        };

        Ok((
            ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?,
            ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?,
        ))
    }

    /// Returns the first byte of the memory. Waits for all work of the stream.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn first_byte(&self) -> Result<u8, CudaError> {
        self.direct.bind()?;
        let mut byte = 0u8;
        // SAFETY: there is room for the byte until the wait below has ended.
        let copied = said("reading memory directly", unsafe {
            calls::cuMemcpyDtoHAsync_v2(
                (&raw mut byte).cast(),
                self.address,
                1,
                self.direct.0.stream,
            )
        });

        self.direct.wait().and(copied)?;
        Ok(byte)
    }
}

impl Drop for DirectMemory {
    fn drop(&mut self) {
        // A failed device does no more work.
        let _ = self.direct.wait();
        if self.direct.0.gpu.context().bind_failed().is_err() {
            return;
        }

        // SAFETY: it was allocated, opened or pinned once, and no work uses it any more.
        let _ = unsafe {
            match &self.origin {
                MemoryOrigin::Allocated => calls::cuMemFree_v2(self.address),
                MemoryOrigin::Opened => calls::cuIpcCloseMemHandle(self.address),
                MemoryOrigin::Host {
                    is_pinned: false, ..
                } => return,
                MemoryOrigin::Host { .. } => calls::cuMemHostUnregister(
                    std::ptr::with_exposed_provenance_mut(self.address as usize),
                ),
            }
        };
    }
}

impl DirectEvent {
    /// Records the event behind all work that was issued to the stream.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn record(&self) -> Result<(), CudaError> {
        record(self.raw, self.direct.0.stream)
    }

    /// Blocks until the device has reached the last record of the event.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        synchronize(self.raw)
    }

    /// Returns a handle with which other processes can open the event.
    ///
    /// # Errors
    ///
    /// If the driver returns an error, as for events that are not [`EventWait::Interprocess`].
    pub fn handle(&self) -> Result<Handle, CudaError> {
        self.direct.bind()?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: the event is alive; there is room for the handle.
        said("showing an event directly", unsafe {
            calls::cuIpcGetEventHandle(&raw mut handle, self.raw)
        })?;
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }
}

impl Drop for DirectEvent {
    fn drop(&mut self) {
        if self.direct.0.gpu.context().bind_failed().is_ok() {
            // SAFETY: created or opened once, and destroyed once; CUDA lets waits for it come to
            // their end.
            let _ = unsafe { calls::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl DirectFunction {
    /// Issues a launch of one block of 32 threads, with the addresses of `x` and `y` as arguments.
    /// The function may use only the memory of `x` and `y`. Does not wait.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn launch(&self, x: &DirectMemory, y: &DirectMemory) -> Result<(), CudaError> {
        let pointer = |of: &DirectMemory| (&raw const of.address).cast_mut().cast::<c_void>();
        let mut arguments = [pointer(x), pointer(y)];
        let stream = self.direct.0.stream;
        let extra = std::ptr::null_mut();

        // SAFETY: module and stream are alive. The driver reads two addresses before it returns;
        // the memory is dropped only after all work of the stream.
        said("launching directly", unsafe {
            let arguments = arguments.as_mut_ptr();
            calls::cuLaunchKernel(self.raw, 1, 1, 1, 32, 1, 1, 0, stream, arguments, extra)
        })
    }
}

fn create_event(waiting: EventWait) -> Result<sys::CUevent, CudaError> {
    use sys::CUevent_flags_enum as Flags;
    let mut event = std::ptr::null_mut();
    let no_times = Flags::CU_EVENT_DISABLE_TIMING as u32;
    let more = match waiting {
        EventWait::Spinning => 0,
        EventWait::Blocking => Flags::CU_EVENT_BLOCKING_SYNC as u32,
        EventWait::Interprocess => {
            Flags::CU_EVENT_BLOCKING_SYNC as u32 | Flags::CU_EVENT_INTERPROCESS as u32
        }
    };
    // SAFETY: the context is bound, and there is room for the event.
    let answer = unsafe { calls::cuEventCreate(&raw mut event, no_times | more) };
    said("creating an event directly", answer).map(|()| event)
}

fn record(event: sys::CUevent, stream: sys::CUstream) -> Result<(), CudaError> {
    // SAFETY: the callers hold both.
    said("recording an event directly", unsafe {
        calls::cuEventRecord(event, stream)
    })
}

fn synchronize(event: sys::CUevent) -> Result<(), CudaError> {
    // SAFETY: the callers hold it.
    said("waiting for an event directly", unsafe {
        calls::cuEventSynchronize(event)
    })
}

fn said(doing: &'static str, answer: CallStatus) -> Result<(), CudaError> {
    answer.result().map_err(|error| cuda(doing, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_from_host_to_device_and_back() {
        if softcuda::again!() {
            return;
        }
        let direct = Direct::open(0).unwrap();
        let mut host = [false, true].map(|shared| direct.host(1 << 20, shared).unwrap());
        host[1].pin().unwrap();
        let device = [5, 6].map(|value| {
            let memory = direct.allocate(1 << 20).unwrap();
            direct.fill(&memory, value).unwrap();
            memory
        });
        assert_eq!(device[1].first_byte(), Ok(6));
        direct.copy(&device[0], &device[1], usize::MAX).unwrap();
        assert_eq!(device[1].first_byte(), Ok(5));
        for host in &host {
            direct.fill(&device[0], 9).unwrap();
            direct.copy(host, &device[0], 1 << 20).unwrap();
            assert_eq!(device[0].first_byte(), Ok(1));
        }
        let (start, bytes) = device[0].range().unwrap();
        assert!(start <= device[0].address() && bytes >= 1 << 20);
        assert!(direct.open_memory([7; 64], 1).is_err() && direct.open_event([7; 64]).is_err());
        let events = [
            EventWait::Spinning,
            EventWait::Blocking,
            EventWait::Interprocess,
        ];
        for waiting in events {
            let event = direct.event(waiting).unwrap();
            event.record().and_then(|()| event.wait()).unwrap();
            assert_eq!(event.handle().is_ok(), waiting == EventWait::Interprocess);
        }
        assert!(device[0].handle().is_ok());
    }
}
