//! Tests on whole files, and on vectors made by the format's own package.

mod golden;
mod made_file;
mod parts;
mod refusals;
mod regions;
mod written;
