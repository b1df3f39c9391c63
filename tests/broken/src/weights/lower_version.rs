//! A training that has gone back to an earlier step publishes a lower version with the same
//! publisher.
//!
//! kind: numbers that must rise and do not
//! found by: issue
//! named: all
//! says: version 3 after version 4

use std::collections::BTreeMap;

use mpmd::{Program, Result};

use super::{leaf, publisher};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let mut publisher = publisher(p, &tree)?;
    publisher.publish(4, &tree)?;
    publisher.publish(3, &tree)?; // at fault
    Ok(())
}
