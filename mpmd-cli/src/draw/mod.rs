//! Pictures of a [`Timeline`]: an HTML page that can be zoomed, and an SVG drawing for documents.

mod colour;
mod data;
mod facts;
mod html;
mod sums;
mod svg;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use mpmd_schedule::timeline::Timeline;

use crate::files::{read_input, write_output};
pub(crate) use html::html;
pub(crate) use svg::svg;

/// Draw a timeline.
#[derive(Args, Debug)]
pub(crate) struct DrawArgs {
    /// A file with the timeline as JSON; by default, or for `-`, standard input
    file: Option<PathBuf>,
    /// A page that can be zoomed, or a drawing for documents
    #[arg(long, value_enum, default_value_t = Format::Html)]
    format: Format,
    /// The file to write; by default standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The format of a picture.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Format {
    /// One self-contained HTML page
    Html,
    /// One self-contained SVG drawing
    Svg,
}

impl Format {
    /// Returns the picture of a timeline as the text of a file.
    pub(crate) fn draw(self, timeline: &Timeline) -> String {
        match self {
            Self::Html => html(timeline),
            Self::Svg => svg(timeline),
        }
    }
}

/// Reads a timeline as JSON and writes its picture, as the arguments say.
pub(crate) fn draw(args: &DrawArgs) -> Result<ExitCode> {
    let (_, text) = read_input(args.file.as_deref())?;
    let timeline: Timeline =
        serde_json::from_str(&text).context("this is not a timeline as JSON")?;
    write_output(args.output.as_ref(), &args.format.draw(&timeline))?;
    Ok(ExitCode::SUCCESS)
}
