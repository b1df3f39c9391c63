//! Copies of regions from, to and between devices.
//!
//! A region is copied by as few calls as its shape allows: one where it is a run, or rows, or a block of rows, in
//! both buffers. Where a buffer is the host's, the device reads and writes it by itself if it is pinned. If it is not, CUDA
//! may keep the calling thread until it has read all of it, or has written it: callers that must not wait see to
//! pinned memory.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::error::CudaError;
use super::gpu::cuda;
use super::line::{Line, Stream};
use super::{Part, Then};
use crate::reshard::copy::{Loop, Loops};

/// The widest rows of a copy by rows, which the driver counts with signed 32 bits.
const MOST_PITCH: usize = i32::MAX as usize;

/// Where bytes are read, or written.
#[derive(Clone, Copy)]
enum End {
    Device { ordinal: u32, address: u64 },
    Host(*mut c_void),
}

impl Line {
    /// Copies a part of `from`, which is of the host or of any device of this process, to its place in `to`, in the
    /// memory of this line's device.
    ///
    /// It comes after what makes `from` and what uses `to`. Both stay until it is over: it is a read of the one, and makes
    /// the other. `then` hears how it ended.
    ///
    /// # Panics
    ///
    /// Where a buffer's length is not that of its region, the piece is not within both regions, or `to` is the host's.
    pub(crate) fn copy_in(&self, from: &SharedBuffer, to: &mut OwnedBuffer, part: Part<'_>, then: Then) {
        let place = to.device().expect("copies go into a device's memory");
        let loops = part.loops(from.len(), place.bytes);
        let ends = (End::of(from), End::Device { ordinal: place.device, address: place.address });
        let mut reached = false;
        let work = |stream: &Stream| {
            reached = true;
            // SAFETY: `loops` was checked against both lengths. `from` never changes once it is made, which this comes after,
            // and the read that is added below keeps its memory; `to` is this caller's alone, what used it comes before, and
            // the fence that is added below keeps it.
            loops.map_or(Ok(()), |loops| unsafe { stream.copy_all(&loops, ends.0, ends.1) })
        };
        let fence = self.submit(&[from.ready(), to.fences()], work, then);
        from.add_read(fence.clone());
        if reached {
            to.clear_fences();
        }
        to.add_fence(fence);
    }

    /// Copies a part of `from`, in a device's memory, to its place in `to`, in the host's.
    ///
    /// It comes after what makes `from`, which stays until it is over. `then` gets the buffer back, or why the copy failed.
    ///
    /// # Panics
    ///
    /// Where a buffer's length is not that of its region, the piece is not within both regions, or `to` is a device's.
    pub(crate) fn copy_out(
        &self,
        from: &SharedBuffer,
        mut to: OwnedBuffer,
        part: Part<'_>,
        then: impl FnOnce(Result<OwnedBuffer, CudaError>) + Send + 'static,
    ) {
        let loops = part.loops(from.len(), to.len());
        let ends = (End::of(from), End::Host(to.as_mut_ptr().cast()));
        let before = to.fences().clone();
        // SAFETY: `loops` was checked against both lengths. `from` never changes once it is made, which this comes after,
        // and the read that is added below keeps its memory. `to` is with `done` from here on, where nobody looks at
        // it until the copy is over.
        let work = |stream: &Stream| {
            loops.map_or(Ok(()), |loops| unsafe { stream.copy_all(&loops, ends.0, ends.1) })
        };
        let done = move |result: Result<(), CudaError>| {
            then(result.map(|()| {
                to.clear_fences();
                to
            }));
        };
        let fence = self.submit(&[from.ready(), &before], work, Box::new(done));
        from.add_read(fence);
    }

    /// Sets all bytes of `to`, in the memory of this line's device, to zero, after what uses it.
    ///
    /// # Panics
    ///
    /// Where `to` is the host's.
    pub(crate) fn zero(&self, to: &mut OwnedBuffer, then: Then) {
        let place = to.device().expect("a device's memory is set by its own work");
        let work = |stream: &Stream| {
            // SAFETY: the range is the buffer's, which is this caller's alone; what used it comes before, and the fence that is
            // added below keeps it.
            let set = unsafe { sys::cuMemsetD8Async(place.address, 0, place.bytes, stream.raw) };
            set.result().map_err(|error| cuda("clearing memory of a CUDA device", error))
        };
        let fence = self.submit(&[to.fences()], work, then);
        to.add_fence(fence);
    }
}

impl Part<'_> {
    fn loops(&self, from: usize, to: usize) -> Option<Loops> {
        Loops::checked((from, to), self.from, self.to, self.piece, self.item_bytes)
    }
}

impl Stream {
    /// Issues the copy of all runs.
    ///
    /// # Safety
    ///
    /// The runs lie within memory that `src` and `dst` begin, which stays, and is used by nobody in other ways than the stream's
    /// order and its fences allow, until the stream is past them.
    unsafe fn copy_all(&self, loops: &Loops, src: End, dst: End) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        unsafe { self.copy_loops(&loops.dims, loops.run, src.plus(loops.src), dst.plus(loops.dst)) }
    }

    /// # Safety
    ///
    /// As [`Stream::copy_all`].
    unsafe fn copy_loops(&self, dims: &[Loop], run: usize, src: End, dst: End) -> Result<(), CudaError> {
        match dims {
            // SAFETY: as the caller says; in the other arms too.
            [] => unsafe { self.copy_run(run, src, dst) },
            [rows] if rows.fits(run) => unsafe { self.copy_rows(*rows, run, src, dst) },
            [blocks, rows] if rows.fits(run) && blocks.is_of(rows) => unsafe {
                self.copy_blocks(*blocks, *rows, run, src, dst)
            },
            [outer, inner @ ..] => (0..outer.count).try_for_each(|i| unsafe {
                self.copy_loops(inner, run, src.plus(i * outer.src_step), dst.plus(i * outer.dst_step))
            }),
        }
    }

    /// # Safety
    ///
    /// As [`Stream::copy_all`].
    unsafe fn copy_run(&self, bytes: usize, src: End, dst: End) -> Result<(), CudaError> {
        // SAFETY: as the caller says. Between devices the driver tells by the addresses whose they are.
        let copied = unsafe {
            match (src, dst) {
                (End::Host(src), End::Device { address, .. }) => {
                    sys::cuMemcpyHtoDAsync_v2(address, src, bytes, self.raw)
                }
                (End::Device { address, .. }, End::Host(dst)) => {
                    sys::cuMemcpyDtoHAsync_v2(dst, address, bytes, self.raw)
                }
                (End::Device { address: src, ordinal: a }, End::Device { address: dst, ordinal: b })
                    if a == b =>
                {
                    sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, self.raw)
                }
                (End::Device { address: src, .. }, End::Device { address: dst, .. }) => {
                    sys::cuMemcpyAsync(dst, src, bytes, self.raw)
                }
                (End::Host(_), End::Host(_)) => {
                    return Err(CudaError::new("copying", "", "no device takes part"));
                }
            }
        };
        copied.result().map_err(|error| cuda(doing(src, dst), error))
    }

    /// # Safety
    ///
    /// As [`Stream::copy_all`].
    unsafe fn copy_rows(&self, rows: Loop, run: usize, src: End, dst: End) -> Result<(), CudaError> {
        let types = memory_types(src, dst);
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: types.0,
            srcHost: src.host(),
            srcDevice: src.address(),
            srcArray: null_mut(),
            srcPitch: rows.src_step,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: types.1,
            dstHost: dst.host(),
            dstDevice: dst.address(),
            dstArray: null_mut(),
            dstPitch: rows.dst_step,
            WidthInBytes: run,
            Height: rows.count,
        };
        // SAFETY: as the caller says; the description is read before this returns.
        let copied = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw) };
        copied.result().map_err(|error| cuda(doing(src, dst), error))
    }

    /// # Safety
    ///
    /// As [`Stream::copy_all`].
    unsafe fn copy_blocks(
        &self,
        blocks: Loop,
        rows: Loop,
        run: usize,
        src: End,
        dst: End,
    ) -> Result<(), CudaError> {
        let types = memory_types(src, dst);
        let copy = sys::CUDA_MEMCPY3D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: types.0,
            srcHost: src.host(),
            srcDevice: src.address(),
            srcArray: null_mut(),
            reserved0: null_mut(),
            srcPitch: rows.src_step,
            srcHeight: blocks.src_step / rows.src_step,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: types.1,
            dstHost: dst.host(),
            dstDevice: dst.address(),
            dstArray: null_mut(),
            reserved1: null_mut(),
            dstPitch: rows.dst_step,
            dstHeight: blocks.dst_step / rows.dst_step,
            WidthInBytes: run,
            Height: rows.count,
            Depth: blocks.count,
        };
        // SAFETY: as the caller says; the description is read before this returns.
        let copied = unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, self.raw) };
        copied.result().map_err(|error| cuda(doing(src, dst), error))
    }
}

impl Loop {
    /// Whether its runs are rows that one call can copy.
    fn fits(&self, run: usize) -> bool {
        let fits = |step: usize| (run..=MOST_PITCH).contains(&step);
        fits(self.src_step) && fits(self.dst_step)
    }

    /// Whether it steps over whole blocks of such rows.
    fn is_of(&self, rows: &Self) -> bool {
        let whole =
            |step: usize, row: usize| step.is_multiple_of(row) && (rows.count..).contains(&(step / row));
        whole(self.src_step, rows.src_step) && whole(self.dst_step, rows.dst_step)
    }
}

impl End {
    fn of(buffer: &SharedBuffer) -> Self {
        match buffer.device() {
            Some(place) => Self::Device { ordinal: place.device, address: place.address },
            // Only ever read through.
            None => Self::Host(buffer.as_ptr().cast_mut().cast()),
        }
    }

    /// So many bytes on.
    fn plus(self, bytes: usize) -> Self {
        match self {
            Self::Device { ordinal, address } => Self::Device { ordinal, address: address + bytes as u64 },
            Self::Host(start) => Self::Host(start.wrapping_byte_add(bytes)),
        }
    }

    fn host(self) -> *mut c_void {
        match self {
            Self::Device { .. } => null_mut(),
            Self::Host(start) => start,
        }
    }

    fn address(self) -> u64 {
        match self {
            Self::Device { address, .. } => address,
            Self::Host(_) => 0,
        }
    }
}

/// What the driver is told of both ends. Between two devices it finds out by itself whose the addresses are.
fn memory_types(src: End, dst: End) -> (sys::CUmemorytype, sys::CUmemorytype) {
    use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED};
    match (src, dst) {
        (End::Device { ordinal: a, .. }, End::Device { ordinal: b, .. }) if a != b => {
            (CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED)
        }
        _ => {
            let of = |end| match end {
                End::Device { .. } => CU_MEMORYTYPE_DEVICE,
                End::Host(_) => CU_MEMORYTYPE_HOST,
            };
            (of(src), of(dst))
        }
    }
}

fn doing(src: End, dst: End) -> &'static str {
    match (src, dst) {
        (End::Host(_), _) => "copying to a CUDA device",
        (_, End::Host(_)) => "copying from a CUDA device",
        _ => "copying between CUDA devices",
    }
}
