//! The work that kernels issue to a device: launches, copies within its memory, fills, and copies
//! from and to the host.
//!
//! All of it goes to a raw stream, the context of which is current on the calling thread. See
//! [`Stream::submit`](super::Stream::submit).

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys;
use mpmd_memory::DevicePlace;

use super::calls::{self, DriverError};
use super::context::cuda;
use super::descriptions::{RawArg, UsedMemory};
use super::error::CudaError;
use super::gpu::Gpu;
use super::library::DRIVER;
use super::stream::RawStream;
use crate::cuda::{source::Source, work::Grid};

/// The largest number of arguments for which a launch needs no heap allocation.
const FEW: usize = 16;

impl Gpu {
    /// Issues a launch of the function named `function` to `stream`. Does not wait for the device.
    /// Compiles and loads the function's source if that was not done before.
    ///
    /// # Errors
    ///
    /// If the source cannot be compiled or loaded, has no such function, or the driver refuses the
    /// launch. Also if the number or sizes of the arguments differ from the function's parameters.
    pub fn launch(
        &self,
        stream: &RawStream,
        source: &'static Source,
        function: &str,
        grid: Grid,
        args: &[RawArg],
    ) -> Result<(), CudaError> {
        self.modules().with_function(source, function, |found| {
            found.check(source, function, args)?;
            found.allow_shared(source, grid.shared_bytes, self.shared_bytes())?;
            note_uses(stream, args);

            let pointer = |arg: &RawArg| arg.bytes.as_ptr().cast::<c_void>().cast_mut();
            let mut few = [std::ptr::null_mut(); FEW];
            let mut many = Vec::new();
            let pointers: &mut [*mut c_void] = if args.len() <= FEW {
                few.iter_mut()
                    .zip(args)
                    .for_each(|(at, arg)| *at = pointer(arg));
                &mut few
            } else {
                many.extend(args.iter().map(pointer));
                &mut many
            };

            // SAFETY: function and stream are of the context that is bound, and alive as long as it
            // is. The arguments are as many as the function's where the driver tells their number;
            // each pointer is to the bytes of one, which the driver copies before it returns. The
            // function's author answers for its accesses to memory.
            unsafe {
                let (x, y, z) = grid.blocks;
                let (threads_x, threads_y, threads_z) = grid.threads;
                calls::cuLaunchKernel(
                    found.raw(),
                    x,
                    y,
                    z,
                    threads_x,
                    threads_y,
                    threads_z,
                    grid.shared_bytes,
                    stream.raw,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .result()
            .map_err(|error| failed(source, function, error))
        })
    }
}

impl RawStream {
    /// Returns the stream as a `CUstream`, for use by other libraries.
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Issues work that fills `to` with copies of `element`. The length of an element is 1, 2, or a
    /// multiple of 4 bytes. The address must be a multiple of it. Bytes after the last whole
    /// element do not change.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn fill(&self, to: DevicePlace, element: &[u8]) -> Result<(), CudaError> {
        match *element {
            [byte] => self.set(to, 1, |at, count| {
                // SAFETY: as `set` says.
                unsafe { calls::cuMemsetD8Async(at, byte, count, self.raw) }
            }),
            [low, high] => self.set(to, 2, |at, count| {
                let short = u16::from_ne_bytes([low, high]);
                // SAFETY: as `set` says.
                unsafe { calls::cuMemsetD16Async(at, short, count, self.raw) }
            }),
            [a, b, c, d] => self.set_words(to, [a, b, c, d]),
            _ => self.fill_wide(to, element),
        }
    }

    fn set_words(&self, to: DevicePlace, word: [u8; 4]) -> Result<(), CudaError> {
        self.set(to, 4, |at, count| {
            // SAFETY: as `set` says.
            unsafe { calls::cuMemsetD32Async(at, u32::from_ne_bytes(word), count, self.raw) }
        })
    }

    /// Calls one of the driver's memsets with the address of `to`, and the number of elements of
    /// `width` bytes in it. `to` is memory of the device's that this call may write; the stream is
    /// alive and its context bound.
    fn set(
        &self,
        to: DevicePlace,
        width: usize,
        memset: impl FnOnce(u64, usize) -> calls::CallStatus,
    ) -> Result<(), CudaError> {
        match to.bytes / width {
            0 => Ok(()),
            count => memset(to.address, count)
                .result()
                .map_err(|error| cuda("setting memory of a CUDA device", error)),
        }
    }

    /// Fills memory with an element that is too wide for the driver's memset. Sets the words of the
    /// first element, then issues copies that double the filled part until all is filled.
    fn fill_wide(&self, to: DevicePlace, element: &[u8]) -> Result<(), CudaError> {
        const WORD: usize = 4;
        let bytes = to.bytes - to.bytes % element.len();
        if bytes == 0 {
            return Ok(());
        }

        let part = |from: usize, bytes: usize| DevicePlace {
            address: to.address + from as u64,
            bytes,
            ..to
        };
        for (index, word) in element.as_chunks::<WORD>().0.iter().enumerate() {
            self.set_words(part(index * WORD, WORD), *word)?;
        }
        let mut filled = element.len();
        while filled < bytes {
            let next = filled.min(bytes - filled);
            self.copy(part(0, next), part(filled, next))?;
            filled += next;
        }
        Ok(())
    }

    /// Issues a copy of `to.bytes` bytes from `from` to `to`, both in the memory of the device.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn copy(&self, from: DevicePlace, to: DevicePlace) -> Result<(), CudaError> {
        debug_assert!(from.bytes >= to.bytes);
        if to.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both are memory of the device's that this call may read and write; the stream is
        // alive and its context bound.
        unsafe { calls::cuMemcpyDtoDAsync_v2(to.address, from.address, to.bytes, self.raw) }
            .result()
            .map_err(|error| cuda("copying in a CUDA device", error))
    }

    /// Issues a copy of `to.len()` bytes from the device to the host. The caller must keep `to`
    /// alive, and not read it, until the work has ended.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn download(&self, from: DevicePlace, to: &mut [u8]) -> Result<(), CudaError> {
        debug_assert!(from.bytes >= to.len());
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller keeps `to` until the copy is over, and the place is memory of the
        // device's that this call may read; the stream is alive and its context bound.
        unsafe {
            calls::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address, to.len(), self.raw)
        }
        .result()
        .map_err(|error| cuda("copying values from a CUDA device", error))
    }

    /// Issues a copy of `from` to device memory at address `to`, which must have at least its
    /// length. The caller must keep `from` alive until the work has ended.
    ///
    /// # Errors
    ///
    /// If the driver returns an error.
    pub fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller keeps `from` until the copy is over and owns the memory at `to`; the
        // stream is alive and its context bound.
        unsafe { calls::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.raw) }
            .result()
            .map_err(|error| cuda("copying values to a CUDA device", error))
    }
}

fn failed(source: &Source, function: &str, error: DriverError) -> CudaError {
    cuda(format!("launching {function} of {}", source.name()), error)
}

/// A function of the software driver for tests, which checks the order of work. Its arguments
/// describe memory that a launched function uses: (stream, address, bytes, 1 if written or else 0).
type NoteUse = unsafe extern "C" fn(sys::CUstream, sys::CUdeviceptr, usize, i32);

fn note_uses(stream: &RawStream, args: &[RawArg]) {
    static NOTE_USE: OnceLock<Option<NoteUse>> = OnceLock::new();
    let note = NOTE_USE.get_or_init(|| {
        // SAFETY: there is a driver, as there is a `Gpu`. Only the software driver has a symbol of
        // this name, and its type is the one above.
        unsafe { DRIVER.function::<NoteUse>("softcuda_note_use") }
    });
    let Some(note) = note else { return };

    for UsedMemory { place, writes } in args.iter().filter_map(|arg| arg.uses) {
        // SAFETY: it takes any numbers; the stream is alive.
        unsafe { note(stream.raw, place.address, place.bytes, i32::from(writes)) }
    }
}
