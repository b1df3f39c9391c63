//! One array on four processes. Each says what it did to move it, and the sum comes back:
//!
//! ```sh
//! cargo run --profile quick -p mpmd --example handles
//! ```

use mpmd::prelude::*;
use mpmd::{DeviceId, sharding::Sharding};

fn main() -> std::process::ExitCode {
    mpmd::job::main(4, 8, program) // 4 processes, with 2 of 8 devices each
}

fn program(p: &mut Program) -> Result<()> {
    // An array in two halves: first on the devices 0 and 2, then on 1 and 4.
    let before = p.mesh_of(&[("half", 2)], &[DeviceId(0), DeviceId(2)])?;
    let after = p.mesh_of(&[("half", 2)], &[DeviceId(1), DeviceId(4)])?;
    let x = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
    let x = p.device_put(&x, before.sharding(spec!["half"]))?;
    let y = p.device_put(&x, after.sharding(spec!["half"]))?;

    // Every process has both handles. It has values only of the halves on its own devices.
    let did = match (local_values(&x)?, local_values(&y)?) {
        (Some(x), Some(_)) => format!("copied {x:?}"),
        (Some(x), None) => format!("sent {x:?}"),
        (None, Some(y)) => format!("received {y:?}"),
        (None, None) => "did nothing".to_owned(),
    };
    mpmd::job::print_in_order(p, did)?;

    // Each device of `after` computes a part of the sum. The move to device 0 adds the parts.
    let sum = kernel(
        |_: &ShapedArray| f32s([]),
        |y: View<f32>, mut sum: ViewMut<f32>| sum[0] = y.iter().sum(),
    );
    let parts = after.replicated().unreduced(&["half"])?;
    let sum = p.jit(sum).on(&after).outputs(parts).build()?;
    let sum = sum.call(p, y)?;
    let sum = p.device_put(&sum, Sharding::single_device(DeviceId(0)))?;
    if let Some(sum) = sum.to_host()? {
        println!("the sum is {:?}", sum.to_vec::<f32>()?);
    }
    Ok(())
}

/// Returns the values of an array on this process. `None` if the array is only a handle here.
fn local_values(x: &MpmdArray) -> Result<Option<Vec<f32>>> {
    match x.is_fully_remote() {
        true => Ok(None),
        false => Ok(Some(x.addressable_shards()?[0].data.to_vec()?)),
    }
}
