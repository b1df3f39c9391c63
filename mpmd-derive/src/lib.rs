//! `#[derive(Tree)]` for structures of arrays.
