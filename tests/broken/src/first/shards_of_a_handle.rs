//! Every process reads the shards of an array that lies on process 0 alone.
//!
//! kind: a read of values that are elsewhere
//! found by: issue
//! named: all
//! says: cannot read the shards

use mpmd::prelude::*;
use mpmd::{DeviceId, sharding::Sharding};

use super::ones;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let x = p.device_put(&ones(4)?, Sharding::single_device(DeviceId(0)))?;
    let shards = x.addressable_shards()?; // at fault
    println!("{:?}", shards[0].data.to_vec::<f32>()?);
    p.step_end()
}
