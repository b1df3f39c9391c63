//! The two ends have other names for their leaves.
//!
//! kind: two programs that do not fit each other
//! found by: run
//! named: all
//! says: the publisher has no leaf weight

use std::collections::BTreeMap;

use mpmd::{Program, Result};

use super::{leaf, publisher, subscribing, trouble, wanted};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let publisher = publisher(p, &tree)?;
    let wanted = wanted(p, "weight")?;
    let subscription = p.subscribe(subscribing(&publisher), wanted)?;
    trouble(p, &subscription)
}
