//! Copies of regions from, to and between devices.
//!
//! A region is copied with as few driver calls as its shape allows. One call is enough if the
//! region is a run, a set of rows, or a block of rows in both buffers.
//!
//! If a host buffer is pinned, the device accesses it directly and the call returns at once. If it
//! is not, CUDA may block the calling thread until it has read or written the whole buffer. Callers
//! that must not block use pinned memory.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;
use mpmd_memory::{OwnedBuffer, SharedBuffer};

use super::calls;
use super::context::cuda;
use super::error::CudaError;
use super::stream::{RawStream, Stream};
use super::{RegionCopy, Then};
use crate::copy::{Loop, Loops};

/// The largest row pitch in bytes that the driver accepts, a signed 32-bit number.
const MOST_PITCH: usize = i32::MAX as usize;

/// The source or target address of a copy.
#[derive(Clone, Copy)]
enum CopyAddress {
    Device { ordinal: u32, address: u64 },
    Host(*mut c_void),
}

impl Stream {
    /// Copies a region of `from` into `to`, which is in the memory of this stream's device. `from`
    /// may be on the host or on any device of this process.
    ///
    /// Returns before the copy ends. The copy runs after the work that fills `from` and after
    /// earlier uses of `to`. Fences keep the memory of both buffers allocated until it ends. `then`
    /// receives the result.
    ///
    /// # Panics
    ///
    /// If a buffer's length does not match its region, the piece is not within both regions, or
    /// `to` is on the host.
    pub fn copy_in(
        &self,
        from: &SharedBuffer,
        to: &mut OwnedBuffer,
        part: RegionCopy<'_>,
        then: Then,
    ) {
        let place = to.device().expect("copies go into a device's memory");
        let loops = part.loops(from.len(), place.bytes);
        let src = CopyAddress::of(from);
        let dst = CopyAddress::Device {
            ordinal: place.device,
            address: place.address,
        };

        let mut reached = false;
        let work = |stream: &RawStream| {
            reached = true;
            // SAFETY: `loops` was checked against both lengths. `from` never changes once it is
            // filled; this work runs after that, and the read added below keeps its memory. `to` is
            // borrowed exclusively. Its earlier uses come before this work, and the fence added
            // below keeps it.
            loops.map_or(Ok(()), |loops| unsafe { stream.copy_all(&loops, src, dst) })
        };

        let fence = self.submit(&[from.ready(), to.fences()], work, then);
        from.add_read(fence.clone());
        if reached {
            to.clear_fences();
        }
        to.add_fence(fence);
    }

    /// Copies a region of `from`, in a device's memory, into `to` on the host.
    ///
    /// Returns before the copy ends. The copy runs after the work that fills `from`. A fence keeps
    /// the memory of `from` allocated until it ends. `then` receives the buffer `to`, or the error
    /// if the copy failed.
    ///
    /// # Panics
    ///
    /// If a buffer's length does not match its region, the piece is not within both regions, or
    /// `to` is on a device.
    pub fn copy_out(
        &self,
        from: &SharedBuffer,
        mut to: OwnedBuffer,
        part: RegionCopy<'_>,
        then: impl FnOnce(Result<OwnedBuffer, CudaError>) + Send + 'static,
    ) {
        let loops = part.loops(from.len(), to.len());
        let src = CopyAddress::of(from);
        let dst = CopyAddress::Host(to.as_mut_ptr().cast());
        let before = to.fences().clone();
        let work = |stream: &RawStream| {
            // SAFETY: `loops` was checked against both lengths. `from` never changes once it is
            // filled; this work runs after that, and the read added below keeps its memory. `done`
            // owns `to` from here on and does not touch it until the copy is over.
            loops.map_or(Ok(()), |loops| unsafe { stream.copy_all(&loops, src, dst) })
        };

        let done = move |result: Result<(), CudaError>| {
            match result {
                Ok(()) => {
                    to.clear_fences();
                    then(Ok(to));
                }
                Err(error) => {
                    if error.is_lost() {
                        // The copy may still write to the buffer, so it is never freed.
                        std::mem::forget(to);
                    }
                    then(Err(error));
                }
            }
        };

        let fence = self.submit(&[from.ready(), &before], work, Box::new(done));
        from.add_read(fence);
    }

    /// Issues work that fills `to` with copies of `element`, as [`RawStream::fill`] does, after
    /// earlier uses of `to`. The buffer is in the memory of this stream's device. Does not wait for
    /// the device. `then` receives the result.
    ///
    /// # Panics
    ///
    /// If `to` is on the host.
    pub fn fill(&self, to: &mut OwnedBuffer, element: &[u8], then: Then) {
        let place = to
            .device()
            .expect("a device's memory is set by its own work");
        // The range is that of the buffer, which is borrowed exclusively. Its earlier uses come
        // before this work, and the fence added below keeps it.
        let work = |stream: &RawStream| {
            let filled = stream.fill(place, element);
            filled.map_err(|error| stream.context.fails(error))
        };

        let fence = self.submit(&[to.fences()], work, then);
        to.add_fence(fence);
    }
}

impl RegionCopy<'_> {
    fn loops(&self, from: usize, to: usize) -> Option<Loops> {
        Loops::checked(from, to, self.from, self.to, self.piece, self.item_bytes)
    }
}

impl RawStream {
    /// Issues the copies of all runs to this stream. If that fails, marks the device as failed.
    ///
    /// # Safety
    ///
    /// All runs are within the memory that begins at `src` and `dst`. This memory stays allocated
    /// until the stream has finished the copies. Until then it has no other uses but those that the
    /// stream's order and fences allow.
    unsafe fn copy_all(
        &self,
        loops: &Loops,
        src: CopyAddress,
        dst: CopyAddress,
    ) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        let issued = unsafe {
            self.copy_loops(
                &loops.dims,
                loops.run,
                src.plus(loops.src),
                dst.plus(loops.dst),
            )
        };
        // Later work relies on this copy, so the whole device counts as failed.
        issued.map_err(|error| self.context.fails(error))
    }

    /// Issues the copies of all runs of the loops `dims`, each of `run` bytes.
    ///
    /// # Safety
    ///
    /// The requirements of [`RawStream::copy_all`] apply.
    unsafe fn copy_loops(
        &self,
        dims: &[Loop],
        run: usize,
        src: CopyAddress,
        dst: CopyAddress,
    ) -> Result<(), CudaError> {
        match dims {
            // SAFETY: as the caller says.
            [] => unsafe { self.copy_run(run, src, dst) },
            // SAFETY: as the caller says.
            [rows] if rows.fits(run) => unsafe { self.copy_rows(*rows, run, src, dst) },
            [blocks, rows] if rows.fits(run) && blocks.is_of(rows) => {
                // SAFETY: as the caller says.
                unsafe { self.copy_blocks(*blocks, *rows, run, src, dst) }
            }
            [outer, inner @ ..] => (0..outer.count).try_for_each(|i| {
                let src = src.plus(i * outer.src_step);
                let dst = dst.plus(i * outer.dst_step);
                // SAFETY: as the caller says: these runs are some of all.
                unsafe { self.copy_loops(inner, run, src, dst) }
            }),
        }
    }

    /// Issues the copy of one run of `bytes` bytes.
    ///
    /// # Safety
    ///
    /// The requirements of [`RawStream::copy_all`] apply.
    unsafe fn copy_run(
        &self,
        bytes: usize,
        src: CopyAddress,
        dst: CopyAddress,
    ) -> Result<(), CudaError> {
        // SAFETY: as the caller says. Between devices the driver tells by the addresses on which
        // device each of them is.
        let copied = unsafe {
            match (src, dst) {
                (CopyAddress::Host(src), CopyAddress::Device { address, .. }) => {
                    calls::cuMemcpyHtoDAsync_v2(address, src, bytes, self.raw)
                }
                (CopyAddress::Device { address, .. }, CopyAddress::Host(dst)) => {
                    calls::cuMemcpyDtoHAsync_v2(dst, address, bytes, self.raw)
                }
                (
                    CopyAddress::Device {
                        address: src,
                        ordinal: a,
                    },
                    CopyAddress::Device {
                        address: dst,
                        ordinal: b,
                    },
                ) if a == b => calls::cuMemcpyDtoDAsync_v2(dst, src, bytes, self.raw),
                (
                    CopyAddress::Device { address: src, .. },
                    CopyAddress::Device { address: dst, .. },
                ) => calls::cuMemcpyAsync(dst, src, bytes, self.raw),
                (CopyAddress::Host(_), CopyAddress::Host(_)) => {
                    return Err(CudaError::new("copying", "", "no device takes part"));
                }
            }
        };

        copied
            .result()
            .map_err(|error| cuda(doing(src, dst), error))
    }

    /// Issues the copy of `rows.count` rows of `run` bytes with one driver call.
    ///
    /// # Safety
    ///
    /// The requirements of [`RawStream::copy_all`] apply.
    unsafe fn copy_rows(
        &self,
        rows: Loop,
        run: usize,
        src: CopyAddress,
        dst: CopyAddress,
    ) -> Result<(), CudaError> {
        let (src_type, dst_type) = memory_types(src, dst);
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: src_type,
            srcHost: src.host(),
            srcDevice: src.address(),
            srcArray: null_mut(),
            srcPitch: rows.src_step,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: dst_type,
            dstHost: dst.host(),
            dstDevice: dst.address(),
            dstArray: null_mut(),
            dstPitch: rows.dst_step,
            WidthInBytes: run,
            Height: rows.count,
        };

        // SAFETY: as the caller says; the description is read before this returns.
        let copied = unsafe { calls::cuMemcpy2DAsync_v2(&raw const copy, self.raw) };
        copied
            .result()
            .map_err(|error| cuda(doing(src, dst), error))
    }

    /// Issues the copy of `blocks.count` blocks of `rows.count` rows, each of `run` bytes, with one
    /// driver call.
    ///
    /// # Safety
    ///
    /// The requirements of [`RawStream::copy_all`] apply.
    unsafe fn copy_blocks(
        &self,
        blocks: Loop,
        rows: Loop,
        run: usize,
        src: CopyAddress,
        dst: CopyAddress,
    ) -> Result<(), CudaError> {
        let (src_type, dst_type) = memory_types(src, dst);
        let copy = sys::CUDA_MEMCPY3D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: src_type,
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
            dstMemoryType: dst_type,
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
        let copied = unsafe { calls::cuMemcpy3DAsync_v2(&raw const copy, self.raw) };
        copied
            .result()
            .map_err(|error| cuda(doing(src, dst), error))
    }
}

impl Loop {
    /// Returns true if one driver call can copy this loop's runs as rows: both steps are at least
    /// `run` bytes and at most `MOST_PITCH`.
    fn fits(&self, run: usize) -> bool {
        let fits = |step: usize| (run..=MOST_PITCH).contains(&step);
        fits(self.src_step) && fits(self.dst_step)
    }

    /// Returns true if this loop's iterations are blocks of `rows`: each step is a whole number of
    /// row steps, and at least `rows.count` of them.
    fn is_of(&self, rows: &Self) -> bool {
        let whole = |step: usize, row: usize| {
            step.is_multiple_of(row) && (rows.count..).contains(&(step / row))
        };
        whole(self.src_step, rows.src_step) && whole(self.dst_step, rows.dst_step)
    }
}

impl CopyAddress {
    fn of(buffer: &SharedBuffer) -> Self {
        match buffer.device() {
            Some(place) => Self::Device {
                ordinal: place.device,
                address: place.address,
            },
            // Used only for reading.
            None => Self::Host(buffer.as_ptr().cast_mut().cast()),
        }
    }

    /// Returns the address that is `bytes` bytes after this one.
    fn plus(self, bytes: usize) -> Self {
        match self {
            Self::Device { ordinal, address } => Self::Device {
                ordinal,
                address: address + bytes as u64,
            },
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

/// Returns the driver's memory types (source, destination). Both are "unified" for a copy between
/// two devices: the driver finds the devices from the addresses.
fn memory_types(src: CopyAddress, dst: CopyAddress) -> (sys::CUmemorytype, sys::CUmemorytype) {
    use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED};
    match (src, dst) {
        (CopyAddress::Device { ordinal: a, .. }, CopyAddress::Device { ordinal: b, .. })
            if a != b =>
        {
            (CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED)
        }
        _ => {
            let of = |end| match end {
                CopyAddress::Device { .. } => CU_MEMORYTYPE_DEVICE,
                CopyAddress::Host(_) => CU_MEMORYTYPE_HOST,
            };
            (of(src), of(dst))
        }
    }
}

fn doing(src: CopyAddress, dst: CopyAddress) -> &'static str {
    match (src, dst) {
        (CopyAddress::Host(_), _) => "copying to a CUDA device",
        (_, CopyAddress::Host(_)) => "copying from a CUDA device",
        _ => "copying between CUDA devices",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use mpmd_base::block::mpsc::{Receiver, channel};
    use mpmd_base::block::{Instant, thread};
    use mpmd_memory::Arena;
    use mpmd_memory::Pool;
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::copy::copy_region;
    use crate::copy::tests::nested;
    use crate::cuda::Gpu;
    use mpmd_layout::region::Region;

    /// A device, with a pool of its memory and a pool of pinned host memory.
    struct CopyEnd {
        gpu: Arc<Gpu>,
        memory: Pool,
        pinned: Pool,
    }

    impl CopyEnd {
        fn open(ordinal: u32) -> Self {
            let gpu = Gpu::open(ordinal).unwrap();
            let memory = Pool::in_arena("device", None, &Arena::device(gpu.allocator()));
            let arena = Arena::private();
            arena.on_map(gpu.pin());
            Self {
                gpu,
                memory,
                pinned: Pool::in_arena("pinned", None, &arena),
            }
        }

        fn host(&self, bytes: &[u8], pinned: bool) -> OwnedBuffer {
            if !pinned {
                return bytes.to_vec().into();
            }
            let mut buffer = self.pinned.allocate(bytes.len()).unwrap();
            buffer.copy_from_slice(bytes);
            assert!(buffer.is_pinned());
            buffer
        }

        /// Returns a buffer in the device's memory that these bytes are being copied to.
        fn on_device(&self, bytes: &[u8]) -> OwnedBuffer {
            let mut to = self.memory.allocate(bytes.len()).unwrap();
            let whole = Region::full(&[bytes.len()]);
            let from = self.host(bytes, true).freeze();
            let (then, _) = ended();
            self.gpu.inward().copy_in(&from, &mut to, all(&whole), then);
            to
        }

        fn read(&self, from: &SharedBuffer) -> Vec<u8> {
            let whole = Region::full(&[from.len()]);
            let (send, read) = channel();
            let to = self.host(&vec![0; from.len()], true);
            let then = move |read: Result<OwnedBuffer, CudaError>| send.send(read).unwrap();
            self.gpu.outward().copy_out(from, to, all(&whole), then);
            read.recv_timeout(SOON).unwrap().unwrap().to_vec()
        }
    }

    const SOON: Duration = Duration::from_secs(20);

    fn all(whole: &Region) -> RegionCopy<'_> {
        RegionCopy {
            from: whole,
            to: whole,
            piece: whole,
            item_bytes: 1,
        }
    }

    fn ended() -> (Then, Receiver<Result<(), CudaError>>) {
        let (send, receive) = channel();
        // Some tests drop the receiver.
        (
            Box::new(move |result| send.send(result).unwrap_or_default()),
            receive,
        )
    }

    #[test]
    fn device_copies_match_host_copies() {
        if softcuda::again!("SOFTCUDA_DEVICES" = "2", "SOFTCUDA_PACE" = "seed:3") {
            return;
        }
        let places = [
            CopyEnd::open(0),
            CopyEnd::open(if softcuda::real() { 0 } else { 1 }),
        ];
        let items = prop::sample::select(vec![1usize, 2, 4, 8, 16]);
        let strategy = (nested(5, 4), items, any::<bool>());
        let mut runner = TestRunner::new(ProptestConfig {
            cases: 200,
            ..Default::default()
        });
        let ran = runner.run(&strategy, |((piece, from, to), item_bytes, pinned)| {
            let bytes = |region: &Region| region.elements() * item_bytes;
            if bytes(&from) == 0 || bytes(&to) == 0 {
                return Ok(());
            }
            let source: Vec<u8> = (0..bytes(&from)).map(|i| (i % 251) as u8).collect();
            let before = vec![255; bytes(&to)];
            let mut expected = before.clone();
            copy_region(&source, &from, &mut expected, &to, &piece, item_bytes);
            let part = RegionCopy {
                from: &from,
                to: &to,
                piece: &piece,
                item_bytes,
            };
            let [here, there] = &places;

            let mut inward = here.on_device(&before);
            let (then, end) = ended();
            here.gpu.inward().copy_in(
                &here.host(&source, pinned).freeze(),
                &mut inward,
                part,
                then,
            );
            prop_assert_eq!(here.read(&inward.freeze()), &expected[..], "into a device");
            prop_assert!(end.recv_timeout(SOON).unwrap().is_ok());

            let on_device = here.on_device(&source).freeze();
            let (send, read) = channel();
            let then = move |read: Result<OwnedBuffer, CudaError>| send.send(read).unwrap();
            here.gpu
                .outward()
                .copy_out(&on_device, here.host(&before, pinned), part, then);
            let outward = read.recv_timeout(SOON).unwrap().unwrap();
            prop_assert_eq!(&outward[..], &expected[..], "out of a device");

            for place in [here, there] {
                let mut between = place.on_device(&before);
                place
                    .gpu
                    .inward()
                    .copy_in(&on_device, &mut between, part, ended().0);
                prop_assert_eq!(
                    place.read(&between.freeze()),
                    &expected[..],
                    "between devices"
                );
            }
            Ok(())
        });
        ran.unwrap();
        drop(places);
    }

    #[test]
    fn filled_memory_returns_to_its_pool() {
        if softcuda::again!("SOFTCUDA_PACE" = "lazy") {
            return;
        }
        let place = CopyEnd::open(0);
        let wide: Vec<u8> = (1..=16).collect();
        for element in [1, 2, 4, 8, 16].map(|width| &wide[..width]) {
            let mut buffer = place.on_device(&[77; 1008]);
            let (then, end) = ended();
            place.gpu.inward().fill(&mut buffer, element, then);
            let expected: Vec<u8> = element.iter().copied().cycle().take(1008).collect();
            assert_eq!(place.read(&buffer.freeze()), expected);
            assert!(end.recv_timeout(SOON).unwrap().is_ok());
        }
        let buffer = place.on_device(&[7; 1000]).freeze();
        let read = place.read(&buffer);
        drop(buffer);
        assert_eq!(read.len(), 1000);
        // The memory goes back once the driver's thread has noticed the end of the read.
        let until = Instant::now() + SOON;
        while place.memory.stats().live > 0 {
            assert!(Instant::now() < until, "{:?}", place.memory.stats());
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn rows_and_blocks_for_one_call_are_recognised() {
        let step = |count, step| Loop {
            count,
            src_step: step,
            dst_step: step,
        };
        assert!(step(4, 64).fits(64) && !step(4, 64).fits(65) && !step(2, 1 << 31).fits(1));
        assert!(step(2, 256).is_of(&step(4, 64)) && step(2, 320).is_of(&step(4, 64)));
        assert!(
            !step(2, 192).is_of(&step(4, 64)),
            "rows of two blocks would overlap"
        );
        assert!(
            !step(2, 300).is_of(&step(4, 64)),
            "blocks begin between rows"
        );
    }
}
