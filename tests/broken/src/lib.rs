//! Wrong programs, each with labels that say how it is found. See the README of this folder.

mod server;
mod weights;

use mpmd::Program;

/// A wrong program. It runs with two processes of one device each.
pub struct Broken {
    /// Its folder and file, without the ending.
    pub name: &'static str,
    /// The text of the file, with its labels.
    pub source: &'static str,
    /// The program.
    pub run: fn(&mut Program) -> mpmd::Result<()>,
}

impl Broken {
    /// Returns the value of a label. `None` if the program does not have it.
    pub fn label(&self, name: &str) -> Option<&'static str> {
        let lines = self.source.lines().filter_map(|line| line.strip_prefix("//! "));
        let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        values.next()
    }

    /// Returns the line at fault, from 1. `None` if messages name none.
    pub fn line_at_fault(&self) -> Option<usize> {
        let at = self.source.lines().position(|line| line.ends_with("// at fault"))?;
        Some(at + 1)
    }
}

/// Lists programs by folder and file.
macro_rules! programs {
    ($($folder:ident :: $file:ident),* $(,)?) => {
        /// All wrong programs.
        pub const PROGRAMS: &[Broken] = &[$(Broken {
            name: concat!(stringify!($folder), "/", stringify!($file)),
            source: include_str!(concat!(stringify!($folder), "/", stringify!($file), ".rs")),
            run: $folder::$file::run,
        }),*];
    };
}

programs! {
    server::alone_after_a_value,
    server::block_filled_twice,
    server::other_pass_on_each_process,
    server::skipped_position,
    server::stops_by_itself,
    server::token_without_a_row,
    server::version_on_one_process,
    weights::intake_panics,
    weights::leaf_not_published,
    weights::lower_version,
}
