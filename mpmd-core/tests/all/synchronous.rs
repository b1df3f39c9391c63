//! Calls that wait for their operations.

use super::simulations::simulation;
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Error, Program};

/// Makes an array on device 1 with values that cannot be computed, and uses it.
fn fails(p: &mut Program) -> Result<u64> {
    let on = Sharding::single_device(DeviceId(1));
    let error = p.array_from_fn(f32s([]), &on, |_, _| Err(Error::kernel("not today")));
    match error.and_then(|x| p.device_put(&x, Sharding::single_device(DeviceId(0)))) {
        Err(error) if error.to_string().contains("not today") => Ok(p.operations()),
        Err(error) => Err(error),
        Ok(_) => Ok(p.operations()),
    }
}

#[test]
fn synchronous_call_returns_the_failure_of_its_operation() {
    let _limit = watchdog(60);
    for (sync, operations) in [(true, 1), (false, 2)] {
        let mut p = Program::builder().devices(2).sync(sync).alone().unwrap();
        assert_eq!(fails(&mut p).unwrap(), operations);
    }
    let results = simulation(2, 2).settings(|program| program.sync(true)).run(|p| {
        let mut x =
            p.device_put(&MpmdArray::scalar(1.0f32), Sharding::single_device(DeviceId(0)))?;
        for step in 0..100u32 {
            x = p.device_put(&x, Sharding::single_device(DeviceId(step % 2)))?;
            assert!(x.is_fully_remote() || x.is_complete(), "{x:?}");
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}
