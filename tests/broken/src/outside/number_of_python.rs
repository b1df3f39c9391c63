//! The config of a model was written by Python, with a number that JSON lacks.
//!
//! kind: a file that is no JSON
//! found by: issue
//! named: all
//! says: Infinity as the value of "rope_theta", a number that JSON lacks at line

use mpmd::{Program, Result};
use mpmd_models::Folder;

use super::own;

pub(crate) fn run(_: &mut Program) -> Result<()> {
    Folder::open(own("python_number"))?;
    Ok(())
}
