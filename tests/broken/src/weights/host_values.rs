//! A host value is published, which no device has.
//!
//! kind: an array without a device
//! found by: issue
//! named: all
//! says: w: is uncommitted: device_put it first

use std::collections::BTreeMap;

use mpmd::prelude::*;
use mpmd::weights::Publication;

use super::token;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let host = MpmdArray::from_slice(&[4], &[1.0f32; 4])?;
    let tree = BTreeMap::from([("w".to_owned(), host)]);
    p.publisher(Publication::new("policy", token()), &tree)?; // at fault
    Ok(())
}
