//! The intake of a subscriber panics at its first version.
//!
//! kind: a panic of a user's function on a thread of mpmd
//! found by: run
//! named: all
//! says: the intake panicked: no shelf for version 1

use std::collections::BTreeMap;

use mpmd::weights::{Intake, Received};
use mpmd::{Program, Result};

use super::{leaf, publisher, subscribing, trouble, wanted};

struct Shelf;

impl Intake for Shelf {
    fn has_room(&mut self) -> bool {
        true
    }

    fn take(&mut self, received: &Received) -> std::result::Result<(), String> {
        panic!("no shelf for version {}", received.version)
    }

    fn end(&mut self, _: u64, _: Option<&str>) {}
}

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let mut publisher = publisher(p, &tree)?;
    publisher.publish(1, &tree)?;
    let wanted = wanted(p, "w")?;
    let subscription = p.subscribe_with(subscribing(&publisher), wanted, Box::new(Shelf))?;
    trouble(p, &subscription)
}
