//! `mpmd plan`: runs the planners on a case. The answer is JSON.
//!
//! The fields of cases and answers are those of the golden files in the tests. They stay the same
//! from version to version. Unknown fields of a case are refused.

mod case;
mod chunk;
mod field;
mod intermediate;
mod job;
mod layout;
mod placement;
mod refusal;
mod reshard;
mod rules;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;

use crate::files;
use field::{Field, Malformed};
use refusal::CaseRefusal;

/// The exit status if the input has the wrong form.
const MALFORMED: u8 = 2;

/// Ask the planners.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    what: PlanCommand,
}

/// The planners. Each reads one case as JSON, or a list of cases, and gives one answer per case.
#[derive(Debug, Subcommand)]
enum PlanCommand {
    /// Prints the region of an array that each device holds. Fields of a case: {sharding, shape}
    Layout(CaseInput),
    /// Prints the sharding between a source and a smaller target. Fields: {src, dst}; for one array
    /// also those of reshard
    Intermediate(CaseInput),
    /// Prints the front-loaded chunks of a dimension, by rank. Fields: {shape, dim, placements,
    /// names?}
    Chunk(CaseInput),
    /// Prints the specs that a strategy gives to the leaves of a tree. Fields: {mesh, params,
    /// strategy}
    Rules(CaseInput),
    /// Prints the pieces that move between two shardings. Fields: {shape, dtype, src, dst,
    /// process_of?, host_of?}
    Reshard(CaseInput),
}

/// The source of the cases.
#[derive(Args, Debug)]
struct CaseInput {
    /// A file with the case or a list of cases as JSON; by default, or for `-`, standard input
    file: Option<PathBuf>,
}

/// Reads the cases, and prints the answers. If the input has the wrong form, prints the error and
/// returns the exit status 2.
pub(crate) fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let (PlanCommand::Layout(input)
    | PlanCommand::Intermediate(input)
    | PlanCommand::Chunk(input)
    | PlanCommand::Rules(input)
    | PlanCommand::Reshard(input)) = &args.what;
    let value = match read(input.file.as_deref()) {
        Ok(value) => value,
        Err(error) => return Ok(malformed(&error)),
    };

    let done = match &args.what {
        PlanCommand::Layout(_) => answers(
            &value,
            &layout::LayoutCase::FIELDS,
            layout::LayoutCase::read,
            layout::LayoutCase::answer,
        ),
        PlanCommand::Intermediate(_) => answers(
            &value,
            &intermediate::IntermediateCase::FIELDS,
            intermediate::IntermediateCase::read,
            intermediate::IntermediateCase::answer,
        ),
        PlanCommand::Chunk(_) => answers(
            &value,
            &chunk::ChunkCase::FIELDS,
            chunk::ChunkCase::read,
            chunk::ChunkCase::answer,
        ),
        PlanCommand::Rules(_) => answers(
            &value,
            &rules::RulesCase::FIELDS,
            rules::RulesCase::read,
            rules::RulesCase::answer,
        ),
        PlanCommand::Reshard(_) => answers(
            &value,
            &reshard::ReshardCase::FIELDS,
            reshard::ReshardCase::read,
            reshard::ReshardCase::answer,
        ),
    };

    let answers = match done {
        Ok(answers) => answers,
        Err(error) => return Ok(malformed(&error)),
    };

    let text = match value.is_array() {
        false => answers.concat(),
        true if answers.is_empty() => "[]".to_owned(),
        true => format!("[\n{}\n]", answers.join(",\n")),
    };
    files::say(&format!("{text}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns a value as one line of JSON. Panics if the value has a map whose keys are neither texts
/// nor numbers.
fn json_text<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value)
        .expect("structs of texts and numbers, with texts and numbers as keys")
}

fn malformed(error: &anyhow::Error) -> ExitCode {
    files::complain(error);
    ExitCode::from(MALFORMED)
}

fn read(file: Option<&Path>) -> Result<Value> {
    let (name, text) = files::read_input(file)?;
    serde_json::from_str(&text).with_context(|| format!("{name} is no JSON"))
}

/// Returns the answer or the refusal of each case as one line of JSON, the same for equal cases.
/// `value` is a case or a list of cases. Fails before any answer if a case has the wrong form, or a
/// field that is not in `fields`. A case may contain its answer, as in the golden files.
fn answers<C>(
    value: &Value,
    fields: &[&str],
    read: impl Fn(&Field<'_>) -> Result<C, Malformed>,
    answer: impl Fn(C) -> Result<String, CaseRefusal>,
) -> Result<Vec<String>> {
    let values = value
        .as_array()
        .map_or(std::slice::from_ref(value), Vec::as_slice);

    let mut cases = Vec::with_capacity(values.len());
    for (i, value) in values.iter().enumerate() {
        let field = Field::case(value);
        let known = [fields, &["error", "message"]].concat();
        match field.only(&known).and_then(|()| read(&field)) {
            Ok(case) => cases.push(case),
            Err(error) => bail!("case {i}: {error}"),
        }
    }

    let answer = |case| answer(case).unwrap_or_else(|refusal| json_text(&refusal));
    Ok(cases.into_iter().map(answer).collect())
}
