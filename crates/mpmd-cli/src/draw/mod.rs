//! `mpmd draw`: the losses of trainings over their steps, as a picture.

mod axis;
mod chart;
mod loss_history;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Args;

use crate::files::{note, read, write_output};
use axis::AxisScale;
use chart::LossChart;
use loss_history::LossHistory;

/// Maximum number of files of a picture, since there are only as many colours.
const MOST_FILES: usize = chart::COLOURS.len();

/// Arguments of `mpmd draw`.
#[derive(Args, Debug)]
pub(crate) struct DrawArgs {
    /// The files of metrics, at most 8: one for each training, with the lines that `--metrics FILE`
    /// of a training writes
    #[arg(required = true, value_name = "METRICS")]
    files: Vec<PathBuf>,
    /// The SVG file to write; by default standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Draw the losses on a logarithmic scale
    #[arg(long)]
    log: bool,
    /// The title of the picture
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

/// Draws the losses of files of metrics. Names skipped lines on standard error.
pub(crate) fn draw(args: &DrawArgs) -> Result<ExitCode> {
    ensure!(
        args.files.len() <= MOST_FILES,
        "a picture has at most {MOST_FILES} files, and {} are given",
        args.files.len()
    );
    let scale = match args.log {
        true => AxisScale::Logarithmic,
        false => AxisScale::Linear,
    };

    let mut histories = Vec::new();
    for file in &args.files {
        let name = file.display().to_string();
        let mut history = LossHistory::parse(&name, &read(file)?);
        if args.log {
            history.skip_losses_without_logarithm();
        }
        history.skipped.iter().for_each(|skipped| note(skipped));

        if history.training.is_empty() && history.held_out.is_empty() {
            bail!(
                "{name} has no losses to draw: it needs lines such as \
                 {{\"step\":1,\"loss\":2.5}} or {{\"step\":1,\"evaluation\":2.5}}"
            );
        }
        histories.push(history);
    }

    let chart = LossChart::new(histories, scale, args.title.clone());
    write_output(args.output.as_ref(), &chart.to_svg())?;
    Ok(ExitCode::SUCCESS)
}
