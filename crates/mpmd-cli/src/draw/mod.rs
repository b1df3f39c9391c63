//! The picture of a [`Timeline`]: an HTML page that can be zoomed.

mod colour;
mod data;
mod facts;
mod html;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use mpmd_schedule::timeline::Timeline;

use crate::files::{read_input, write_output};
pub(crate) use html::html;

/// Draw a timeline.
#[derive(Args, Debug)]
pub(crate) struct DrawArgs {
    /// A file with the timeline as JSON; by default, or for `-`, standard input
    file: Option<PathBuf>,
    /// The file to write; by default standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Reads a timeline as JSON and writes its page, as the arguments say.
pub(crate) fn draw(args: &DrawArgs) -> Result<ExitCode> {
    let (_, text) = read_input(args.file.as_deref())?;
    let timeline: Timeline =
        serde_json::from_str(&text).context("this is not a timeline as JSON")?;
    write_output(args.output.as_ref(), &html(&timeline))?;
    Ok(ExitCode::SUCCESS)
}
