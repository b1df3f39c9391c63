//! The subscriber asks for another publication than the one at the address.
//!
//! kind: two programs that do not fit each other
//! found by: run
//! named: all
//! says: publishes policy, not critic

use std::collections::BTreeMap;

use mpmd::weights::Subscribing;
use mpmd::{Program, Result};

use super::{leaf, publisher, token, trouble_of_process_0, wanted};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let publisher = publisher(p, &tree)?;
    let address = publisher.address().map(|address| address.to_string());
    let critic = Subscribing::new("critic", address.unwrap_or_default(), token());
    let wanted = wanted(p, "w")?;
    let subscription = p.subscribe(critic, wanted)?;
    // Process 0 alone looks for the publisher.
    trouble_of_process_0(p, &subscription)
}
