//! The config of a model has a key that mpmd does not know.
//!
//! kind: a setting that may change results
//! found by: issue
//! named: all
//! says: config.json: use_magic: expected no such key

use mpmd::{Program, Result};
use mpmd_models::Folder;

use super::own;

pub(crate) fn run(_: &mut Program) -> Result<()> {
    Folder::open(own("unknown_key"))?;
    Ok(())
}
