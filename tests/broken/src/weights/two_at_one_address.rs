//! Two publications of a program listen at the address that its settings name.
//!
//! kind: an address that is taken
//! found by: run
//! named: 0
//! says: cannot listen at

use std::collections::BTreeMap;
use std::net::TcpListener;

use mpmd::weights::Publication;
use mpmd::{ProcessId, Program, Result};

use super::{leaf, token};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let tree = BTreeMap::from([("w".to_owned(), leaf(p)?)]);
    let free = || Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?);
    let listen = p.broadcast_value(ProcessId(0), ([127, 0, 0, 1], 0).into(), free)?;
    let _policy = p.publisher(Publication::new("policy", token()).listen(listen), &tree)?;
    let critic = Publication::new("critic", token()).listen(listen);
    p.publisher(critic, &tree)?; // at fault
    Ok(())
}
