//! `mpmd doctor`: examines this machine, and says how to fix anything that would stop a job.
//!
//! [`facts`] gathers facts, by experiment if necessary. [`findings`] judges them without any I/O.
//! [`show`] prints the findings.

mod cuda;
mod facts;
mod findings;
mod show;
mod verdict;

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use mpmd_core::transports;
use mpmd_launch::{device_kinds, variables};

use crate::{files, run};
use facts::DoctorFacts;
use verdict::Verdict;

/// Examine this machine.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// The transport that jobs are to use here; by default that of MPMD_TRANSPORT, else auto
    #[arg(long, value_name = "NAME", value_parser = transports::NAMES)]
    transport: Option<String>,
    /// The devices that jobs are to have here, as for `mpmd run --device`; by default those of
    /// MPMD_DEVICE, else cpu
    #[arg(long, value_name = "KIND[,KIND...]", value_parser = run::kinds)]
    device: Option<String>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Gathers the facts about this machine, judges them and prints the findings. The exit code is a
/// failure if a finding is a problem.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let asked = |argument: &Option<String>, variable| {
        let asked = argument.clone().or_else(|| std::env::var(variable).ok());
        asked
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
    };

    let transport = asked(&args.transport, variables::TRANSPORT);
    let transport = transport.unwrap_or_else(|| transports::DEFAULT.to_owned());
    let device = asked(&args.device, variables::DEVICE);
    device.as_deref().map(device_kinds).transpose()?;

    let facts = DoctorFacts::gather(transport, device);
    let findings = findings::judge(&facts);
    let text = if args.json {
        show::json(&facts, &findings)?
    } else {
        show::text(&facts, &findings)
    };
    files::say(&text)?;

    let problems = findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Problem);
    Ok(if problems {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
