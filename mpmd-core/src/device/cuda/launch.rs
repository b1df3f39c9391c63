//! Work that kernels give a device: launches, copies within its memory, values that are set.
//!
//! All of it is issued to a stream whose context is the calling thread's current one, as
//! [`Line::submit`](super::Line::submit) has it.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys;
use mpmd_transport::memory::DevicePlace;

use super::asked::RawArg;
use super::calls::{self, DriverError};
use super::error::CudaError;
use super::gpu::{Gpu, cuda};
use super::line::Stream;
use crate::device::cuda::{source::Source, work::Grid};

/// Arguments that need no list of their own.
const FEW: usize = 16;

impl Gpu {
    /// Launches a function; its source is compiled first where nobody has done so.
    ///
    /// # Errors
    ///
    /// Where the source cannot be had, it has no such function, the arguments are not as many or as
    /// long as the function's, or the driver refuses.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        source: &'static Source,
        function: &str,
        grid: Grid,
        args: &[RawArg],
    ) -> Result<(), CudaError> {
        self.modules().with_function(source, function, |found| {
            found.check(source, function, args)?;
            found
                .allow_shared(grid.shared_bytes)
                .map_err(|error| failed(source, function, error))?;
            note_uses(stream, args);
            let pointer = |arg: &RawArg| arg.bytes.as_ptr().cast::<c_void>().cast_mut();
            let mut few = [std::ptr::null_mut(); FEW];
            let mut many = Vec::new();
            let pointers: &mut [*mut c_void] = if args.len() <= FEW {
                few.iter_mut().zip(args).for_each(|(at, arg)| *at = pointer(arg));
                &mut few
            } else {
                many.extend(args.iter().map(pointer));
                &mut many
            };
            // SAFETY: function and stream are of the context that is bound, and alive as long as it
            // is. The arguments are as many as the function's where the driver tells their number;
            // each pointer is to the bytes of one, which the driver copies before it returns. What
            // the function does with memory is its author's matter.
            unsafe {
                let ((x, y, z), (threads_x, threads_y, threads_z)) = (grid.blocks, grid.threads);
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

impl Stream {
    /// The stream as other libraries take it.
    pub(crate) fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Sets memory to the first `width` bytes (1, 2 or 4) of `pattern`, again and again. Its
    /// address is a multiple of them.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub(crate) fn fill(
        &self,
        to: DevicePlace,
        pattern: [u8; 4],
        width: usize,
    ) -> Result<(), CudaError> {
        let [first, second, ..] = pattern;
        let count = to.bytes / width;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the place is memory of the device's that this call may write; the stream is alive
        // and its context bound.
        let set = unsafe {
            match width {
                1 => calls::cuMemsetD8Async(to.address, first, count, self.raw),
                2 => {
                    let short = u16::from_ne_bytes([first, second]);
                    calls::cuMemsetD16Async(to.address, short, count, self.raw)
                }
                _ => calls::cuMemsetD32Async(
                    to.address,
                    u32::from_ne_bytes(pattern),
                    count,
                    self.raw,
                ),
            }
        };
        set.result().map_err(|error| cuda("setting memory of a CUDA device", error))
    }

    /// Copies within the memory of the device: as many bytes as `to` has.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub(crate) fn copy(&self, from: DevicePlace, to: DevicePlace) -> Result<(), CudaError> {
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

    /// Copies bytes of the device's to the host, as many as `to` has. The caller keeps `to`, and
    /// looks at it, only when the work is over.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub(crate) fn download(&self, from: DevicePlace, to: &mut [u8]) -> Result<(), CudaError> {
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

    /// Copies the host's bytes to the device, where there is room at `to`. The caller keeps them
    /// until the work is over.
    ///
    /// # Errors
    ///
    /// Where the driver refuses.
    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
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

/// What a function uses, told to a driver that checks the order of work and asks for it: one in
/// software, for tests.
type NoteUse = unsafe extern "C" fn(sys::CUstream, sys::CUdeviceptr, usize, i32);

fn note_uses(stream: &Stream, args: &[RawArg]) {
    static NOTE_USE: OnceLock<Option<NoteUse>> = OnceLock::new();
    let note = NOTE_USE.get_or_init(|| {
        // SAFETY: whoever has a `Gpu` has a driver. No other than the one in software has a symbol
        // of this name, whose type is the one above.
        unsafe { sys::culib().get::<NoteUse>(b"softcuda_note_use").ok().map(|found| *found) }
    });
    let Some(note) = note else { return };
    for (place, writes) in args.iter().filter_map(|arg| arg.uses) {
        // SAFETY: it takes any figures; the stream is alive.
        unsafe { note(stream.raw, place.address, place.bytes, i32::from(writes)) }
    }
}
