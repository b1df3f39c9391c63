//! Devices that are out of memory: what one allocator keeps, the other one gets.

use candle_core::{DType as CandleType, Result as CandleResult, Tensor};
use mpmd_candle::function;
use mpmd_core::Result;
use mpmd_core::prelude::*;
use mpmd_layout::topology::{DeviceKind, Mesh};

const MIB: usize = 1 << 20;

/// Puts an array of so many MiB on the device, and drops it once it is there.
fn put(p: &mut Program, mesh: &Mesh, mib: usize) -> Result<()> {
    let values = vec![1u8; mib * MIB];
    let array = p.device_put(
        &MpmdArray::from_slice(&[mib * MIB], &values)?,
        mesh.replicated(),
    )?;
    array.block_until_ready()?;
    Ok(())
}

/// Has candle allocate so many MiB in a pass, and reads a number that is computed from them.
fn compute(p: &mut Program, mesh: &Mesh, mib: usize) -> Result<f32> {
    let f = function(move |x: Tensor| -> CandleResult<Tensor> {
        let large = Tensor::zeros(mib * MIB, CandleType::U8, x.device())?;
        x + large.narrow(0, 0, 1)?.to_dtype(CandleType::F32)?
    });
    let jit = p
        .jit(f.like_input().with(mib))
        .on(mesh)
        .outputs(mesh.replicated())
        .build()?;
    let x = p.device_put(&MpmdArray::from_slice(&[1], &[5f32])?, mesh.replicated())?;
    let y = jit.call(p, x)?;
    let host = y
        .to_host()?
        .ok_or_else(|| Error::kernel("no values here"))?;
    Ok(host.to_vec::<f32>()?[0])
}

fn on_device<R>(program: impl FnOnce(&mut Program, &Mesh) -> Result<R>) -> Result<R> {
    let mut p = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let result = program(&mut p, &mesh);
    // A failure is reported a second time here.
    let _ = p.finish();
    result
}

#[test]
fn memory_that_arrays_leave_is_there_for_candle() {
    if softcuda::again!("SOFTCUDA_MEMORY" = "268435456") {
        return;
    }
    let found = on_device(|p, mesh| {
        put(p, mesh, 150)?;
        compute(p, mesh, 150)
    });
    assert_eq!(found.unwrap(), 5.0);
}

#[test]
fn memory_that_candle_leaves_is_there_for_arrays() {
    if softcuda::again!("SOFTCUDA_MEMORY" = "268435456") {
        return;
    }
    let found = on_device(|p, mesh| {
        compute(p, mesh, 150)?;
        put(p, mesh, 150)?;
        compute(p, mesh, 150)
    });
    assert_eq!(found.unwrap(), 5.0);
}

#[test]
fn shortage_is_reported_with_the_holdings_of_both_allocators() {
    if softcuda::again!("SOFTCUDA_MEMORY" = "268435456") {
        return;
    }
    let both = |said: &str| {
        assert!(said.contains("OUT_OF_MEMORY"), "{said}");
        assert!(
            said.contains("the driver's pool, from which candle allocates, has "),
            "{said}"
        );
        assert!(
            said.contains("of the device's 256.0 MiB are free"),
            "{said}"
        );
    };
    let said = on_device(|p, mesh| compute(p, mesh, 300))
        .unwrap_err()
        .to_string();
    both(&said);
    assert!(said.contains("arrays and scratch hold "), "{said}");
    let said = on_device(|p, mesh| put(p, mesh, 300))
        .unwrap_err()
        .to_string();
    both(&said);
    assert!(said.contains("300.0 MiB asked for"), "{said}");
}
