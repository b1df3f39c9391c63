//! The `mpmd` command line.
fn main() {}
