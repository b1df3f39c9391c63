//! Process 0 alone asks for the next version, since it alone prints it.
//!
//! kind: an operation that other processes do not issue
//! found by: check
//! named: 0
//! says: process 0 issued

use std::collections::BTreeMap;

use mpmd::{ProcessId, Program, Result};

use super::{leaf, publisher, subscribing, wanted};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let publisher = publisher(p, &tree)?;
    let wanted = wanted(p, "w")?;
    let mut subscription = p.subscribe(subscribing(&publisher), wanted)?;
    if p.process() == ProcessId(0) {
        let newest = subscription.next(p)?; // at fault
        println!("version {:?}", newest.map(|(version, _)| version));
    }
    p.step_end()
}
