//! Programs that deadlock if a later operation holds a resource that an earlier one needs.

use std::time::Duration;

use mpmd_core::Builder;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use super::parts::{numbered, say_shards, sum};

/// Number of elements of an array that is larger than every buffer of a socket: 32 MiB.
const ELEMENTS: usize = 8 << 20;

/// Delay of a slow array, long enough for all operations that do not wait for it to end.
const SLOW: Duration = Duration::from_millis(400);

/// Returns a function that fills an array as [`numbered`] does, with whole numbers, after a delay
/// of `SLOW`.
fn slowly(salt: u64) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync {
    let fill = numbered(salt);
    move |region, view| {
        std::thread::sleep(SLOW);
        fill(region, view)
    }
}

/// Moves arrays between two devices in both directions at once. The first arrays have late data,
/// the next have data that is ready. Prints the results.
pub(super) fn crossing(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let ends = [
        Sharding::single_device(DeviceId(0)),
        Sharding::single_device(DeviceId(1)),
    ];
    let mut ready = Vec::new();
    for (salt, end) in (0..).zip(&ends) {
        ready.push(p.array_from_fn(f32s([ELEMENTS]), end, numbered(salt))?);
    }
    let mut late = Vec::new();
    for (salt, end) in (2..).zip(&ends) {
        late.push(p.array_from_fn(f32s([ELEMENTS]), end, slowly(salt))?);
    }
    let mut moved = Vec::new();
    for (name, arrays) in [("late", &late), ("ready", &ready)] {
        moved.push((name, p.device_put(&arrays[0], &ends[1])?));
        moved.push((name, p.device_put(&arrays[1], &ends[0])?));
    }
    for (name, x) in &moved {
        say_shards(name, x, say)?;
    }
    Ok(())
}

/// Limits device memory to one and a half times the size of an array, so that two arrays do not
/// fit.
pub(super) fn small_memory(builder: Builder) -> Builder {
    builder.device_memory((ELEMENTS as u64 * 4) * 3 / 2)
}

/// Moves arrays to device 1 from device 0, which is slow, and then from device 2, which is not.
/// Device 1 has memory for one array at a time.
pub(super) fn budget(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let on = |device| Sharding::single_device(DeviceId(device));
    let mesh = p.mesh_of(&[("d", 1)], &[DeviceId(1)])?;
    let sum = p.jit(sum()).on(&mesh).outputs(on(1)).build()?;
    let late = p.array_from_fn(f32s([ELEMENTS]), on(0), slowly(1))?;
    let ready = p.array_from_fn(f32s([ELEMENTS]), on(2), numbered(2))?;
    let mut sums = Vec::new();
    for x in [late, ready] {
        let x = p.device_put(&x, on(1))?;
        sums.push(sum.call(p, x)?);
    }
    for x in &sums {
        say_shards("sum", x, say)?;
    }
    Ok(())
}
