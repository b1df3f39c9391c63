//! `mpmd doctor`: what this machine has, what that means for a job, and what to do about it.
//!
//! [`facts`] looks, and tries where looking does not tell; [`findings`] judges what was seen and does nothing
//! else; [`show`] writes it down.

mod facts;
mod findings;
mod memory;
mod show;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use mpmd_core::launch::variables;
use mpmd_core::transports;

use facts::Facts;
use findings::Verdict;

pub(crate) use memory::{READ_MEMORY, answer_reader};

/// Look at this machine.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// The transport that jobs are to use here; by default what MPMD_TRANSPORT says, else auto
    #[arg(long, value_name = "NAME", value_parser = transports::NAMES)]
    transport: Option<String>,
    /// JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Looks, judges and prints; fails where something stands in the way of the transport.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let asked = args.transport.clone().or_else(|| std::env::var(variables::TRANSPORT).ok());
    let asked = asked.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let facts = Facts::gather(asked.unwrap_or_else(|| transports::DEFAULT.to_owned()));
    let findings = findings::judge(&facts);
    let text = if args.json { show::json(&facts, &findings)? } else { show::text(&facts, &findings) };
    std::io::stdout().write_all(text.as_bytes())?;
    let problems = findings.iter().any(|finding| finding.verdict == Verdict::Problem);
    Ok(if problems { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
