//! A list of wanted leaves has one of them twice.
//!
//! kind: two leaves of one name
//! found by: issue
//! named: all
//! says: w is wanted twice

use std::collections::BTreeMap;

use mpmd::{Program, Result};

use super::{leaf, publisher, subscribing, wanted};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let publisher = publisher(p, &tree)?;
    let mut leaves = wanted(p, "w")?;
    leaves.extend(wanted(p, "w")?);
    p.subscribe(subscribing(&publisher), leaves)?;
    Ok(())
}
