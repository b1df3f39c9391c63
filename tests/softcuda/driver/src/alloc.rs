//! CUDA's functions on device memory: allocation, release and pointer attributes.

use std::sync::atomic::Ordering;

use crate::device::memory::{Origin, space};
use crate::device::races::Use;
use crate::device::stream::{Work, own_stream};
use crate::device::{current, initialized};
use crate::entry::{In, Out, api};
use crate::error::{Code, Result};
use crate::faults::{First, first, meet};
use crate::handles::Handle;
use crate::host::pinned;
use crate::settings::CallKind;

api! {
    /// Allocates memory on the current context's device, filled with `0xCD`. The memory can be
    /// exported to other processes. Fails with `CUDA_ERROR_INVALID_VALUE` for 0 bytes.
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        let context = current()?;
        context.check()?;
        address.required()?;
        meet(CallKind::Alloc)?;
        first(First::Alloc);
        address.set(space().allocate(context.device, bytes as u64, Origin::Alloc)?.address)
    }
}

api! {
    /// Frees memory that this process allocated, given its first address; 0 is ignored. Unlike a
    /// GPU's driver, it does not wait for work that still uses the memory: such work then fails.
    fn cuMemFree_v2(address: u64) {
        current()?.check()?;
        if address == 0 {
            return Ok(());
        }
        let found = space().begins(address).ok_or(Code::INVALID_VALUE)?;
        if found.origin == Origin::Import || found.leaving.load(Ordering::Relaxed) {
            return Err(Code::INVALID_VALUE);
        }
        space().free(address).map(drop)
    }
}

api! {
    /// Allocates memory on the stream's device. The address is valid at once, but only work ordered
    /// after the call on `stream` may use it. The memory cannot be exported to other processes.
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: Handle) {
        let stream = own_stream(stream)?;
        address.required()?;
        meet(CallKind::Alloc)?;
        let made = space().allocate(stream.context.device, bytes as u64, Origin::Pool)?;
        stream.issue(
            Work::new("an allocation", || Ok(())),
            &[Use { address: made.address, bytes: made.bytes, write: true }],
        );
        address.set(made.address)
    }
}

api! {
    /// Frees memory when the work issued earlier on `stream` is done. Does not wait. `address` is
    /// the first address of an allocation of this process, or 0, which is ignored.
    fn cuMemFreeAsync(address: u64, stream: Handle) {
        let stream = own_stream(stream)?;
        if address == 0 {
            return Ok(());
        }
        let found = space().begins(address).ok_or(Code::INVALID_VALUE)?;
        if found.origin == Origin::Import || found.leaving.swap(true, Ordering::Relaxed) {
            return Err(Code::INVALID_VALUE);
        }
        let uses = [Use { address, bytes: found.bytes, write: true }];
        let release = Work::always("a release of memory", move || drop(space().free(address)));
        stream.issue(release, &uses);
        Ok(())
    }
}

api! {
    /// Returns the free and the total bytes of the current context's device. Memory of other
    /// processes does not count as used.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = current()?;
        context.check()?;
        let (left, all) = space().free_and_total(context.device);
        free.set(left as usize)?;
        total.set(all as usize)
    }
}

api! {
    /// Returns the start and the length in bytes of the allocation that contains an address. Fails
    /// with `CUDA_ERROR_NOT_FOUND` if there is none.
    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        current()?.check()?;
        let found = space().find(address).ok_or(Code::NOT_FOUND)?;
        base.set_if_wanted(found.address);
        size.set_if_wanted(found.bytes as usize);
        Ok(())
    }
}

/// Writes an attribute of an address to `data`, in the width that CUDA defines for that attribute.
///
/// # Errors
///
/// `CUDA_ERROR_INVALID_VALUE` for an address that is neither device nor pinned memory, and for an
/// unknown attribute.
fn pointer_attribute(data: u64, attribute: u32, address: u64) -> Result {
    let out32 = |value: u32| out(data).set(value);
    let out64 = |value: u64| out(data).set(value);
    if let Some(found) = space().find(address) {
        return match attribute {
            1 => out64(crate::device::primary(found.device)?.handle),
            2 => out32(2),
            3 => out64(address),
            6 | 8 => out32(0),
            7 => out64(found.number),
            9 => out32(found.device),
            10 => out32(u32::from(found.origin == Origin::Alloc)),
            11 => out64(found.address),
            12 => out64(found.bytes),
            13 => out32(1),
            _ => Err(Code::INVALID_VALUE),
        };
    }

    let found = pinned(address, 1).ok_or(Code::INVALID_VALUE)?;
    match attribute {
        2 => out32(1),
        3 | 4 => out64(address),
        8 | 10 => out32(0),
        11 => out64(found.address),
        12 => out64(found.bytes),
        13 => out32(1),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Converts an address that C passed to an output pointer to a `T`.
fn out<T>(address: u64) -> Out<T> {
    Out::untyped(address)
}

api! {
    /// Writes an attribute of an address to `data`. The address is in device or pinned memory,
    /// otherwise the call fails with `CUDA_ERROR_INVALID_VALUE`.
    fn cuPointerGetAttribute(data: u64, attribute: u32, address: u64) {
        initialized()?;
        pointer_attribute(data, attribute, address)
    }
}

api! {
    /// Writes several attributes of an address, each to its own pointer in `data`. An unknown
    /// attribute is written as zero (-2 for the device number), without an error.
    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, data: In<u64>, address: u64) {
        initialized()?;
        for at in 0..count as usize {
            let attribute = attributes.at(at)?;
            let data = data.at(at)?;
            if pointer_attribute(data, attribute, address).is_err() {
                match attribute {
                    1 | 3 | 4 | 7 | 11 | 12 => out(data).set(0_u64)?,
                    9 => out(data).set(-2_i32)?,
                    _ => out(data).set(0_u32)?,
                }
            }
        }
        Ok(())
    }
}

api! {
    /// Accepts attribute 6, which makes copies of device memory synchronous; it changes nothing
    /// here. Fails with `CUDA_ERROR_INVALID_VALUE` for other attributes, and for addresses outside
    /// of device allocations.
    fn cuPointerSetAttribute(value: In<u32>, attribute: u32, address: u64) {
        initialized()?;
        value.get()?;
        if attribute != 6 || space().find(address).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        Ok(())
    }
}

/// The handle of the default pool of device 0. The pool of device n has this handle plus n.
const POOL: Handle = 1;

api! {
    /// Returns the handle of a device's default pool, which holds the memory of `cuMemAllocAsync`.
    fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, dev: i32) {
        pool.set(POOL + Handle::from(crate::device::device(dev)?))
    }
}

/// Returns the device to which a default pool belongs.
fn device_of(pool: Handle) -> Result<u32> {
    let device = pool
        .checked_sub(POOL)
        .and_then(|device| i32::try_from(device).ok());
    crate::device::device(device.ok_or(Code::INVALID_VALUE)?).map_err(|_| Code::INVALID_VALUE)
}

api! {
    /// Sets an attribute of a default pool. Only attribute 4 has an effect: the number of freed
    /// bytes that the pool may hold. Further freed memory goes back to the device, here at once.
    fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: In<u64>) {
        let device = device_of(pool)?;
        let value = value.get()?;
        match attribute {
            1..=3 => Ok(()),
            4 => {
                space().with_usage(device, |usage| usage.threshold = value);
                Ok(())
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

api! {
    /// Returns an attribute of a default pool, in bytes: its limit on held memory (4), its memory
    /// (5), or its live allocations (7).
    fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: Out<u64>) {
        let usage = space().with_usage(device_of(pool)?, |usage| *usage);
        value.set(match attribute {
            4 => usage.threshold,
            5 => usage.in_pool + usage.kept,
            7 => usage.in_pool,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

api! {
    /// Returns freed memory of a default pool to the device, until the pool has at most `least`
    /// bytes.
    fn cuMemPoolTrimTo(pool: Handle, least: usize) {
        space().with_usage(device_of(pool)?, |usage| usage.trim(least as u64));
        Ok(())
    }
}
