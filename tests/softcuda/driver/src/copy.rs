//! Copies between host and devices and within them, and fills of device memory.

use std::sync::Arc;

use crate::counters::{self, Moved};
use crate::device::memory::space;
use crate::device::races::{self, Use};
use crate::device::stream::{Stream, Work, own_stream};
use crate::entry::{In, api};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::handles::Handle;
use crate::host::{HostBlock, pinned};
use crate::settings::CallKind;

/// One side of a copy: the position of its first row in memory, and the distances of rows.
#[derive(Clone, Copy)]
struct CopyEnd {
    address: u64,
    /// Bytes from one row to the next. `slice` is the number of bytes from one slice to the next.
    pitch: u64,
    slice: u64,
    /// The kind of memory that the called function requires on this side.
    required: RequiredMemory,
}

impl CopyEnd {
    fn flat(address: u64, required: RequiredMemory) -> CopyEnd {
        CopyEnd {
            address,
            pitch: 0,
            slice: 0,
            required,
        }
    }
}

/// The size of a copy: bytes per row, rows per slice, number of slices.
#[derive(Clone, Copy)]
struct Extent {
    width: u64,
    height: u64,
    depth: u64,
}

impl Extent {
    fn flat(bytes: usize) -> Extent {
        Extent {
            width: bytes as u64,
            height: 1,
            depth: 1,
        }
    }

    fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    /// Returns the number of bytes from the first accessed byte at `place` to the last, inclusive.
    /// The copy must have at least one byte.
    fn reach(&self, place: &CopyEnd) -> u64 {
        (self.depth - 1) * place.slice + (self.height - 1) * place.pitch + self.width
    }

    /// Returns the byte offsets of each row, as (offset in `from`, offset in `to`).
    fn rows(self, from: CopyEnd, to: CopyEnd) -> impl Iterator<Item = (u64, u64)> {
        (0..self.depth).flat_map(move |z| {
            (0..self.height)
                .map(move |y| (z * from.slice + y * from.pitch, z * to.slice + y * to.pitch))
        })
    }
}

/// The kind of memory on one side of a copy, determined when the copy is issued.
enum Side {
    Device,
    /// Pinned host memory; the block is held until the copy is done.
    Pinned {
        _block: Arc<HostBlock>,
    },
    Pageable,
}

impl Side {
    fn of(place: &CopyEnd, extent: &Extent) -> Side {
        if space().covers(place.address) {
            return Side::Device;
        }
        pinned(place.address, extent.reach(place))
            .map_or(Side::Pageable, |_block| Side::Pinned { _block })
    }
}

/// The kind of memory that the called function requires on one side of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RequiredMemory {
    Host,
    Device,
    Any,
}

/// The kind of a copy call. A synchronous call also waits for copies between a device and the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Synchronous,
    Asynchronous,
}

/// Issues a copy in a stream. Blocks until the copy is done if CUDA does so for these kinds of
/// memory. Reads pageable source memory before it returns. Fails with `CUDA_ERROR_INVALID_VALUE`
/// for a wrong kind of memory.
fn copy(stream: &Arc<Stream>, to: CopyEnd, from: CopyEnd, extent: Extent, when: When) -> Result {
    if extent.bytes() == 0 {
        return Ok(());
    }
    if to.address == 0 || from.address == 0 {
        return Err(Code::INVALID_VALUE);
    }

    for place in [&to, &from] {
        let on_device = space().covers(place.address);
        // Pinned memory is valid where a device address is required, as addresses are unified.
        let fits = match place.required {
            RequiredMemory::Any => true,
            RequiredMemory::Host => !on_device,
            RequiredMemory::Device => {
                on_device || pinned(place.address, extent.reach(place)).is_some()
            }
        };
        if !fits {
            return Err(Code::INVALID_VALUE);
        }
    }

    let target = Side::of(&to, &extent);
    let source = Side::of(&from, &extent);
    let kind = match (&source, &target) {
        (Side::Device, Side::Device) => Moved::DeviceToDevice,
        (Side::Pinned { .. }, Side::Device) => Moved::PinnedToDevice,
        (Side::Pageable, Side::Device) => Moved::PageableToDevice,
        (Side::Device, Side::Pinned { .. }) => Moved::DeviceToPinned,
        (Side::Device, Side::Pageable) => Moved::DeviceToPageable,
        _ => Moved::HostToHost,
    };

    counters::moved(kind, extent.bytes() as usize);
    let uses = [
        use_of(&from, &extent, &source, false),
        use_of(&to, &extent, &target, true),
    ];
    let uses: Vec<Use> = uses.into_iter().flatten().collect();

    // Pageable host memory is read before the call returns; pinned memory is read later.
    let staged = match (&source, &target) {
        (Side::Pageable, Side::Device) => Some(stage(&from, &extent)),
        _ => None,
    };

    let keep = [source, target];
    let number = stream.issue(
        Work::new("a copy", move || {
            meet(CallKind::Copy)?;
            let _keep = &keep;
            match staged {
                Some(bytes) => {
                    let packed = CopyEnd {
                        address: bytes.as_ptr() as u64,
                        pitch: extent.width,
                        slice: extent.width * extent.height,
                        required: RequiredMemory::Any,
                    };
                    move_rows(&to, &packed, extent)
                }
                None => move_rows(&to, &from, extent),
            }
        }),
        &uses,
    );

    let waits = match kind {
        // The host never waits for copies within devices, not even in the synchronous calls.
        Moved::DeviceToDevice => false,
        Moved::DeviceToPageable | Moved::HostToHost => true,
        Moved::PinnedToDevice | Moved::PageableToDevice | Moved::DeviceToPinned => {
            when == When::Synchronous
        }
    };

    if waits {
        let clock = races::now(stream);
        stream.wait_for(number);
        races::host_saw(&clock);
        stream.context.check()?;
    }
    Ok(())
}

fn use_of(place: &CopyEnd, extent: &Extent, side: &Side, write: bool) -> Option<Use> {
    matches!(side, Side::Device).then(|| Use {
        address: place.address,
        bytes: extent.reach(place),
        write,
    })
}

/// Copies the rows of pageable host memory into a contiguous buffer.
fn stage(from: &CopyEnd, extent: &Extent) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(extent.bytes() as usize);
    for (at, _) in extent.rows(*from, CopyEnd::flat(0, RequiredMemory::Any)) {
        let row = (from.address + at) as *const u8;
        // SAFETY: the caller of the copy promised host memory of this extent, for as long as the
        // call takes.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(row, extent.width as usize) });
    }
    bytes
}

/// Copies the rows in the calling thread, which is the thread of a stream.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` if the device bytes of one side are not all in one live allocation.
fn move_rows(to: &CopyEnd, from: &CopyEnd, extent: Extent) -> Result {
    // The spans keep device memory mapped while the bytes move.
    let span = |place: &CopyEnd| {
        space()
            .covers(place.address)
            .then(|| space().span(place.address, extent.reach(place)))
            .transpose()
    };

    let target = span(to)?;
    let source = span(from)?;
    let target = target
        .as_ref()
        .map_or(to.address as *mut u8, |span| span.pointer());
    let source = source
        .as_ref()
        .map_or(from.address as *mut u8, |span| span.pointer());

    for (read, write) in extent.rows(*from, *to) {
        // SAFETY: the spans keep device bytes mapped. The caller that issued the copy promised that
        // host bytes are there until it is done. The rows may overlap, which `copy_to` allows.
        unsafe {
            source
                .add(read as usize)
                .copy_to(target.add(write as usize), extent.width as usize);
        }
    }
    Ok(())
}

fn flat(to: CopyEnd, from: CopyEnd, bytes: usize, stream: Option<Handle>) -> Result {
    let when = if stream.is_some() {
        When::Asynchronous
    } else {
        When::Synchronous
    };
    let stream = own_stream(stream.unwrap_or(0))?;
    copy(&stream, to, from, Extent::flat(bytes), when)
}

api! {
    /// Copies from host to device and waits for the copy.
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) {
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Host);
        flat(to, from, bytes, None)
    }
}

api! {
    /// Copies from device to host and waits for the copy.
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) {
        let to = CopyEnd::flat(to, RequiredMemory::Host);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, None)
    }
}

api! {
    /// Copies within a device or between two devices, in the default stream. As in CUDA, the host
    /// does not wait for the copy.
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, None)
    }
}

api! {
    /// Copies between any two addresses, host or device, and waits for the copy unless both are
    /// device addresses.
    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        let to = CopyEnd::flat(to, RequiredMemory::Any);
        let from = CopyEnd::flat(from, RequiredMemory::Any);
        flat(to, from, bytes, None)
    }
}

api! {
    /// Copies from host to device, in a stream. Does not wait: pageable memory is read before the
    /// return, pinned memory when the copy runs.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Host);
        flat(to, from, bytes, Some(stream))
    }
}

api! {
    /// Copies from device to host, in a stream. Waits for the copy only if the host memory is
    /// pageable.
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let to = CopyEnd::flat(to, RequiredMemory::Host);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, Some(stream))
    }
}

api! {
    /// Copies within a device or between two devices, in a stream, without waiting.
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, Some(stream))
    }
}

api! {
    /// Copies between any two addresses, in a stream. Waits for the copy if the target is pageable
    /// memory or both are host memory.
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle) {
        let to = CopyEnd::flat(to, RequiredMemory::Any);
        let from = CopyEnd::flat(from, RequiredMemory::Any);
        flat(to, from, bytes, Some(stream))
    }
}

api! {
    /// Copies from one context's device to another's, in the default stream. As in CUDA, the host
    /// does not wait for the copy.
    fn cuMemcpyPeer(to: u64, to_context: Handle, from: u64, from_context: Handle, bytes: usize) {
        of_context(to, to_context)?;
        of_context(from, from_context)?;
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, None)
    }
}

api! {
    /// Copies from one context's device to another's, in a stream, without waiting.
    fn cuMemcpyPeerAsync(
        to: u64,
        to_context: Handle,
        from: u64,
        from_context: Handle,
        bytes: usize,
        stream: Handle,
    ) {
        of_context(to, to_context)?;
        of_context(from, from_context)?;
        let to = CopyEnd::flat(to, RequiredMemory::Device);
        let from = CopyEnd::flat(from, RequiredMemory::Device);
        flat(to, from, bytes, Some(stream))
    }
}

/// Checks that an address belongs to a context's device. Fails with `CUDA_ERROR_INVALID_VALUE` if
/// its allocation is on another device. Fails with `CUDA_ERROR_INVALID_CONTEXT` for an unknown
/// context.
fn of_context(address: u64, context: Handle) -> Result {
    let device = crate::device::context(context)
        .map_err(|_| Code::INVALID_CONTEXT)?
        .device;
    match space().find(address) {
        Some(found) if found.device != device => Err(Code::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// One side of `CUDA_MEMCPY2D`, in C's layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side2D {
    x: usize,
    y: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2D {
    from: Side2D,
    to: Side2D,
    width: usize,
    height: usize,
}

/// One side of `CUDA_MEMCPY3D`, in C's layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side3D {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Copy3D {
    from: Side3D,
    to: Side3D,
    width: usize,
    height: usize,
    depth: usize,
}

/// The base address of one side of a copy, and the kind of memory that it must be in.
struct BaseAddress {
    address: u64,
    required: RequiredMemory,
}

impl BaseAddress {
    fn new(address: u64, required: RequiredMemory) -> Self {
        Self { address, required }
    }
}

/// Returns the base address that CUDA's number of a memory type selects. Fails for arrays, which
/// are unsupported.
fn base(memory_type: u32, host: u64, device: u64) -> Result<BaseAddress> {
    match memory_type {
        1 => Ok(BaseAddress::new(host, RequiredMemory::Host)),
        2 => Ok(BaseAddress::new(device, RequiredMemory::Device)),
        4 => Ok(BaseAddress::new(device, RequiredMemory::Any)),
        _ => Err(Code::INVALID_VALUE),
    }
}

impl Side2D {
    fn place(&self, copy: &Copy2D) -> Result<CopyEnd> {
        let base = base(self.memory_type, self.host, self.device)?;
        // A single row needs no pitch.
        if self.x + copy.width > self.pitch && (self.pitch != 0 || copy.height > 1) {
            return Err(Code::INVALID_VALUE);
        }
        let address = base.address + (self.y * self.pitch + self.x) as u64;
        Ok(CopyEnd {
            address,
            pitch: self.pitch as u64,
            slice: 0,
            required: base.required,
        })
    }
}

impl Side3D {
    fn place(&self, copy: &Copy3D) -> Result<CopyEnd> {
        let base = base(self.memory_type, self.host, self.device)?;
        let pitch_short =
            self.x + copy.width > self.pitch && (self.pitch != 0 || copy.height * copy.depth > 1);
        let height_short =
            self.y + copy.height > self.height && (self.height != 0 || copy.depth > 1);
        if pitch_short || height_short || self.lod != 0 {
            return Err(Code::INVALID_VALUE);
        }

        let slice = self.pitch * self.height;
        let address = base.address + (self.z * slice + self.y * self.pitch + self.x) as u64;
        Ok(CopyEnd {
            address,
            pitch: self.pitch as u64,
            slice: slice as u64,
            required: base.required,
        })
    }
}

fn copy_2d(args: &In<Copy2D>, stream: Handle, when: When) -> Result {
    let args = args.get()?;
    let extent = Extent {
        width: args.width as u64,
        height: args.height as u64,
        depth: 1,
    };
    copy(
        &own_stream(stream)?,
        args.to.place(&args)?,
        args.from.place(&args)?,
        extent,
        when,
    )
}

fn copy_3d(args: &In<Copy3D>, stream: Handle, when: When) -> Result {
    let args = args.get()?;
    let extent = Extent {
        width: args.width as u64,
        height: args.height as u64,
        depth: args.depth as u64,
    };
    copy(
        &own_stream(stream)?,
        args.to.place(&args)?,
        args.from.place(&args)?,
        extent,
        when,
    )
}

api! {
    /// Copies `height` rows of `width` bytes, with a pitch on each side. Waits as `cuMemcpy` does.
    fn cuMemcpy2D_v2(args: In<Copy2D>) {
        copy_2d(&args, 0, When::Synchronous)
    }
}

api! {
    /// Copies `height` rows of `width` bytes, with a pitch on each side, in a stream. Waits as
    /// `cuMemcpyAsync` does.
    fn cuMemcpy2DAsync_v2(args: In<Copy2D>, stream: Handle) {
        copy_2d(&args, stream, When::Asynchronous)
    }
}

api! {
    /// Copies `depth` slices of rows. Waits as `cuMemcpy` does.
    fn cuMemcpy3D_v2(args: In<Copy3D>) {
        copy_3d(&args, 0, When::Synchronous)
    }
}

api! {
    /// Copies `depth` slices of rows, in a stream. Waits as `cuMemcpyAsync` does.
    fn cuMemcpy3DAsync_v2(args: In<Copy3D>, stream: Handle) {
        copy_3d(&args, stream, When::Asynchronous)
    }
}

/// Issues a fill of device memory with `count` copies of a pattern of one, two or four bytes. The
/// host does not wait for it.
fn fill(to: u64, pattern: &[u8], count: usize, stream: Handle) -> Result {
    let stream = own_stream(stream)?;

    let pattern = pattern.to_vec();
    let bytes = (count as u64)
        .checked_mul(pattern.len() as u64)
        .ok_or(Code::INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(());
    }
    if !space().covers(to) || !to.is_multiple_of(pattern.len() as u64) {
        return Err(Code::INVALID_VALUE);
    }

    let uses = [Use {
        address: to,
        bytes,
        write: true,
    }];

    stream.issue(
        Work::new("a fill", move || {
            meet(CallKind::Copy)?;
            let span = space().span(to, bytes)?;
            // SAFETY: the span says that these bytes are mapped while it is held.
            let target = unsafe { std::slice::from_raw_parts_mut(span.pointer(), bytes as usize) };
            for part in target.chunks_exact_mut(pattern.len()) {
                part.copy_from_slice(&pattern);
            }
            Ok(())
        }),
        &uses,
    );
    Ok(())
}

api! {
    /// Fills `count` bytes of device memory with a byte, in the default stream, without waiting.
    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        fill(to, &[value], count, 0)
    }
}

api! {
    /// Fills `count` 2-byte elements of device memory with a value, in the default stream, without
    /// waiting.
    fn cuMemsetD16_v2(to: u64, value: u16, count: usize) {
        fill(to, &value.to_ne_bytes(), count, 0)
    }
}

api! {
    /// Fills `count` 4-byte elements of device memory with a value, in the default stream, without
    /// waiting.
    fn cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        fill(to, &value.to_ne_bytes(), count, 0)
    }
}

api! {
    /// Fills `count` bytes of device memory with a byte, in a stream, without waiting.
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) {
        fill(to, &[value], count, stream)
    }
}

api! {
    /// Fills `count` 2-byte elements of device memory with a value, in a stream, without waiting.
    fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: Handle) {
        fill(to, &value.to_ne_bytes(), count, stream)
    }
}

api! {
    /// Fills `count` 4-byte elements of device memory with a value, in a stream, without waiting.
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) {
        fill(to, &value.to_ne_bytes(), count, stream)
    }
}
