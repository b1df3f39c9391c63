//! The commands of the README and the guide: each names a program and options that exist, and those
//! that can run do so. A block with the prompt `$` shows the command's output, figures aside.

mod blocks;
mod known;
mod runs;
mod shell_words;
