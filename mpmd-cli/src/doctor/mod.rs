//! `mpmd doctor`: what this machine has, what that means for a job, and what to do about it.
//!
//! [`facts`] looks, and tries where looking does not tell; [`findings`] judges what was seen and
//! does nothing else; [`show`] writes it down.

mod cuda;
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

use crate::run;
use facts::Facts;
use findings::Verdict;

pub(crate) use memory::{READ_MEMORY, answer_reader};

/// Look at this machine.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// The transport that jobs are to use here; by default what MPMD_TRANSPORT says, else auto
    #[arg(long, value_name = "NAME", value_parser = transports::NAMES)]
    transport: Option<String>,
    /// The devices that jobs are to have here, as `mpmd run --device` takes them; by default what
    /// MPMD_DEVICE says, else cpu
    #[arg(long, value_name = "KIND[,KIND...]", value_parser = run::kinds)]
    device: Option<String>,
    /// JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Looks, judges and prints; fails where something stands in the way of the transport.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let asked = |argument: &Option<String>, variable| {
        let asked = argument.clone().or_else(|| std::env::var(variable).ok());
        asked.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
    };
    let transport = asked(&args.transport, variables::TRANSPORT);
    let transport = transport.unwrap_or_else(|| transports::DEFAULT.to_owned());
    let facts = Facts::gather(transport, asked(&args.device, variables::DEVICE));
    let findings = findings::judge(&facts);
    let text =
        if args.json { show::json(&facts, &findings)? } else { show::text(&facts, &findings) };
    std::io::stdout().write_all(text.as_bytes())?;
    let problems = findings.iter().any(|finding| finding.verdict == Verdict::Problem);
    Ok(if problems { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
