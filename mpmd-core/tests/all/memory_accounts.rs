//! Memory of a device: host values that are put count against its limit, updates of them take their
//! room, and the error of a full device lists its arrays.

use std::time::Duration;

use super::resources::{MIB, is_all, large, memory_falls_to, on};
use super::simulations::simulation;
use crate::common::kernels::add_one;
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, HostArray};
use mpmd_memory::Pool;

/// The bytes of the arrays of [`large`], and of [`zeros`].
const EIGHT: u64 = 8 * MIB as u64;

/// Creates host values of 8 MiB, all 0, that are the whole of their memory: a kernel could write
/// them in place.
fn zeros() -> Result<MpmdArray> {
    let mut bytes = Pool::new("the test's own", None).allocate(8 * MIB).unwrap();
    bytes.fill(0);
    Ok(MpmdArray::from_host(HostArray::from_bytes(
        f32s([2 * MIB]),
        bytes.freeze(),
    )?))
}

/// Runs a program on one process with 12 MiB on each of two devices.
fn with_twelve_mib(program: impl Fn(&mut Program) -> Result<()> + Sync) {
    let simulation = simulation(1, 2).settings(|b| b.device_memory(12 * MIB as u64));
    simulation.run(program).into_iter().for_each(Result::unwrap);
}

fn refused(p: &mut Program, device: u32) -> String {
    large(p, device, 1.0, Duration::ZERO)
        .unwrap()
        .block_until_ready()
        .unwrap_err()
        .to_string()
}

#[test]
fn update_of_donated_host_values_takes_their_room() {
    let _limit = watchdog(60);
    with_twelve_mib(|p| {
        let update = add_one(p, 0)?;
        for kept in [
            MpmdArray::from_slice(&[2 * MIB], &vec![0.0f32; 2 * MIB])?,
            zeros()?,
        ] {
            let x = p.device_put(&kept, on(0))?;
            let y = update.call(p, vec![x])?.remove(0);
            assert!(is_all(&y, 1.0)? && is_all(&kept, 0.0)?);
            memory_falls_to(p, EIGHT);
            assert_eq!((p.memory().live, p.memory().peak), (EIGHT, EIGHT));
            drop(y);
            memory_falls_to(p, 0);
        }
        // Nobody else holds these.
        let x = p.device_put(&zeros()?, on(0))?;
        let y = update.call(p, vec![x])?.remove(0);
        assert!(is_all(&y, 1.0)?);
        assert_eq!((p.memory().live, p.memory().peak), (EIGHT, EIGHT));
        Ok(())
    });
}

#[test]
fn update_takes_the_room_that_another_device_counts() {
    let _limit = watchdog(60);
    with_twelve_mib(|p| {
        let update = add_one(p, 1)?;
        let values = MpmdArray::from_slice(&[2 * MIB], &vec![0.0f32; 2 * MIB])?;
        let x = p.device_put(&values, on(0))?;
        let shared = p.device_put(&x, on(1))?;
        drop(x);
        let beside = large(p, 1, 2.0, Duration::ZERO)?;
        let y = update.call(p, vec![shared])?.remove(0);
        assert!(is_all(&y, 1.0)? && is_all(&beside, 2.0)?);
        memory_falls_to(p, 2 * EIGHT);
        assert_eq!((p.memory().live, p.memory().peak), (2 * EIGHT, 2 * EIGHT));
        Ok(())
    });
}

#[test]
fn host_values_donated_to_a_kernel_are_copied_and_counted() {
    let _limit = watchdog(60);
    let program = |p: &mut Program| -> Result<()> {
        let update = add_one(p, 0)?;
        // The call has returned, and dropped the values, when the kernel starts.
        let slow = large(p, 0, 1.0, Duration::from_millis(100))?;
        drop(slow);
        let y = update.call(p, vec![zeros()?])?.remove(0);
        if !p.is_dry_run() {
            assert!(is_all(&y, 1.0)?);
            memory_falls_to(p, EIGHT);
            assert_eq!(p.memory().live, EIGHT);
        }
        Ok(())
    };
    simulation(1, 1)
        .run(program)
        .into_iter()
        .for_each(Result::unwrap);
    let mut dry_run = Program::builder().devices(1).dry_run(1).unwrap();
    program(&mut dry_run).unwrap();
    let dry_run = dry_run.dry_run().unwrap();
    let memory = dry_run.memory(&dry_run.flow()).devices[0];
    assert_eq!(
        (memory.in_order.bytes, memory.in_order.operation),
        (EIGHT, 1)
    );
    let descriptor = dry_run.descriptor_of(2).unwrap();
    assert_eq!(
        descriptor.results[0][0].memory,
        mpmd_core::dry_run::ShardMemory::Own
    );
}

#[test]
fn values_read_from_a_device_count_there_once() {
    let _limit = watchdog(60);
    with_twelve_mib(|p| {
        let x = large(p, 0, 3.0, Duration::ZERO)?;
        let values = x.to_host()?.expect("this process has it");
        drop(x);
        // They share the device's block.
        let again = p.device_put(&MpmdArray::from_host(values), on(0))?;
        assert!(is_all(&again, 3.0)?);
        assert_eq!((p.memory().live, p.memory().peak), (EIGHT, EIGHT));
        let update = add_one(p, 0)?;
        let y = update.call(p, vec![again])?.remove(0);
        assert!(is_all(&y, 4.0)?);
        assert_eq!((p.memory().live, p.memory().peak), (EIGHT, EIGHT));
        Ok(())
    });
}

#[test]
fn full_device_lists_arrays_of_other_devices_in_its_memory() {
    let _limit = watchdog(60);
    let mut p = Builder::default()
        .devices(2)
        .device_memory(12 * MIB as u64)
        .alone()
        .unwrap();
    let x = large(&mut p, 0, 1.0, Duration::ZERO).unwrap();
    let shared = p.device_put(&x, on(1)).unwrap();
    shared.block_until_ready().unwrap();
    drop(x);
    let text = refused(&mut p, 0);
    assert!(
        text.contains("; 8.0 MiB in f32[2097152] of operation 2"),
        "{text}"
    );
    p.finish().unwrap_err();
}

#[test]
fn full_device_lists_values_that_were_put_twice_twice() {
    let _limit = watchdog(60);
    let mut p = Builder::default()
        .devices(1)
        .device_memory(12 * MIB as u64)
        .alone()
        .unwrap();
    let values = MpmdArray::from_slice(&[4 * MIB], &vec![7u8; 4 * MIB]).unwrap();
    let [first, second] = [(); 2].map(|()| p.device_put(&values, on(0)).unwrap());
    let same = p.device_put(&first, on(0)).unwrap();
    same.block_until_ready().unwrap();
    let text = refused(&mut p, 0);
    assert!(text.contains("8.0 MiB in use"), "{text}");
    assert_eq!(
        text.matches("; 4.0 MiB in u8[4194304] of operation")
            .count(),
        2,
        "{text}"
    );
    drop((first, second));
    p.finish().unwrap_err();
}

#[test]
fn full_device_lists_what_that_device_holds() {
    let _limit = watchdog(60);
    let mut p = Builder::default()
        .devices(2)
        .device_memory(12 * MIB as u64)
        .alone()
        .unwrap();
    let rows = p.mesh(&[("x", 2)]).unwrap().sharding(spec!["x"]);
    // 6 MiB on each device, then 4 MiB on the second device alone. A put there shares the memory.
    let half = p
        .array_from_fn(f32s([3 * MIB]), &rows, |_, mut view| Ok(view.fill(1.0f32)?))
        .unwrap();
    let other = p
        .array_from_fn(f32s([MIB]), on(1), |_, mut view| Ok(view.fill(1.0f32)?))
        .unwrap();
    let same = p.device_put(&half, &rows).unwrap();
    for array in [&half, &other, &same] {
        array.block_until_ready().unwrap();
    }
    let refused = |p: &mut Program, device: u32| {
        large(p, device, 1.0, Duration::ZERO)
            .unwrap()
            .block_until_ready()
            .unwrap_err()
            .to_string()
    };
    let text = refused(&mut p, 0);
    assert!(
        text.contains("of process 0: 8.0 MiB asked for, 6.0 MiB in use"),
        "{text}"
    );
    assert_eq!(text.matches("MiB in f32").count(), 1, "{text}");
    assert!(
        text.contains("; 6.0 MiB in f32[3145728] of operation 1"),
        "{text}"
    );
    let text = refused(&mut p, 1);
    assert!(text.contains("10.0 MiB in use"), "{text}");
    assert_eq!(text.matches("MiB in f32").count(), 2, "{text}");
    let (first, second) = (
        "; 6.0 MiB in f32[3145728]",
        "; 4.0 MiB in f32[1048576] of operation 2",
    );
    assert!(text.contains(first) && text.contains(second), "{text}");
    // The job has failed, as it should.
    p.finish().unwrap_err();
}

#[test]
fn host_values_on_a_device_count_as_its_memory() {
    let _limit = watchdog(60);
    let results = simulation(1, 2)
        .settings(|b| b.device_memory(12 * MIB as u64))
        .run(|p| {
            let eight = 8 * MIB as u64;
            let values = MpmdArray::from_slice(&[8 * MIB], &vec![7u8; 8 * MIB])?;
            let there = Sharding::single_device(DeviceId(0)).with_memory_kind(MemoryKind::Host);
            let (first, second) = (p.device_put(&values, on(0))?, p.device_put(&values, on(1))?);
            assert_eq!(p.memory().live, 2 * eight, "each device has them");
            let beside = p.device_put(&values, &there)?;
            assert_eq!((p.memory().live, p.memory().host_live), (2 * eight, eight));
            // Shares the memory of the first.
            let same = p.device_put(&first, on(0))?;
            assert_eq!(p.memory().live, 2 * eight);
            drop((first, second));
            memory_falls_to(p, eight);
            assert_eq!((p.memory().live, p.memory().peak_live), (eight, 2 * eight));
            drop((same, beside));
            memory_falls_to(p, 0);
            assert_eq!(p.memory().host_live, 0);
            let holder = p.device_put(&values, on(0))?;
            let line = line!() + 1;
            let refused = p.device_put(&values, on(0))?;
            let text = refused.block_until_ready().unwrap_err().to_string();
            assert!(
                text.contains("(device_put of host values u8[8388608]"),
                "{text}"
            );
            assert!(
                text.contains(&format!("memory_accounts.rs:{line}:")),
                "{text}"
            );
            assert!(
                text.contains("; 8.0 MiB in u8[8388608] of operation 5"),
                "{text}"
            );
            drop(holder);
            Ok(())
        });
    for result in results {
        let error = result.expect_err("an operation has failed").to_string();
        assert!(
            error.contains("operation 6 (device_put of host values u8[8388608]"),
            "{error}"
        );
    }
}
