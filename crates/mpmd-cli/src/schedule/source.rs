//! Finds the schedule for the arguments: by name, or from files.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use mpmd_launch::printable;
use mpmd_schedule::{Builtin, Costs, Dialect, Schedule, ScheduleText, by_cost, is_by_cost};

use super::{RequestedDialect, ScheduleArgs, round, units};
use crate::files::{note, read};

/// A schedule to show, with its text and costs.
pub(super) struct ScheduleSource {
    pub(super) schedule: Schedule,
    /// The text of the schedule's file. `None` for a schedule that was found by name.
    pub(super) text: Option<ScheduleText>,
    /// The costs that the arguments give.
    pub(super) costs: Option<Costs>,
}

impl ScheduleSource {
    /// Finds the schedule that the arguments request: by name, file or search. Fails if arguments
    /// or files are wrong.
    pub(super) fn find(args: &ScheduleArgs) -> Result<Self> {
        let path = Path::new(&args.name);
        let costs = args.costs.as_deref().map(read_costs).transpose()?;
        let by_cost = is_by_cost(&args.name);

        ensure!(
            by_cost || args.budget.is_none(),
            "--budget is for ByCost; mpmd check has one for all schedules"
        );

        let mut source = if by_cost {
            Self::by_cost(args, costs.as_ref())?
        } else if Builtin::named(&args.name).is_none() && is_file(path) {
            Self::read(args, path)?
        } else {
            Self::built_in(args)?
        };

        source.costs = costs;
        if let Some(costs) = &source.costs {
            let found = costs.stage.len();
            let expected = source.schedule.stages();
            ensure!(
                found == expected,
                "the costs are of {found} stages, and the schedule has {expected}"
            );
        }
        Ok(source)
    }

    /// Returns the costs of passes. Each pass costs one if the arguments give no costs.
    pub(super) fn costs(&self) -> Costs {
        self.costs
            .clone()
            .unwrap_or_else(|| Costs::units(self.schedule.stages()))
    }

    /// Searches for the order with the shortest step. Prints the step's length, and the lengths for
    /// the built-in orders, to standard error.
    fn by_cost(args: &ScheduleArgs, costs: Option<&Costs>) -> Result<Self> {
        let (Some(ranks), Some(microbatches)) = (args.ranks, args.microbatches) else {
            bail!("ByCost needs --ranks and --microbatches");
        };
        ensure!(
            args.flavour.is_none(),
            "--flavour is for files, and {} is a name",
            args.name
        );

        let found = by_cost(ranks, microbatches, args.chunks, costs, args.budget)?;
        let unit = printable(units(costs.map_or("unit", |costs| &costs.unit)));
        note(&format!(
            "{}: {} {unit}",
            found.schedule.name(),
            round(found.makespan)
        ));

        for (name, makespan) in &found.fixed {
            match makespan {
                Some(makespan) => note(&format!("{name}: {} {unit}", round(*makespan))),
                None => note(&format!("{name}: beyond the budget")),
            }
        }
        Ok(Self {
            schedule: found.schedule,
            text: None,
            costs: None,
        })
    }

    fn built_in(args: &ScheduleArgs) -> Result<Self> {
        let schedule = built_in(&args.name, args.ranks, args.microbatches, args.chunks)?;
        ensure!(
            args.flavour.is_none(),
            "--flavour is for files, and {} is a name",
            args.name
        );
        Ok(Self {
            schedule,
            text: None,
            costs: None,
        })
    }

    fn read(args: &ScheduleArgs, path: &Path) -> Result<Self> {
        let flavour = args.flavour.map(|asked| match asked {
            RequestedDialect::ComputeOnly => Dialect::ComputeOnly,
            RequestedDialect::ComputeComms => Dialect::ComputeComms,
        });

        let here = || path.display().to_string();
        let text = read_text(path, flavour)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let schedule = text.schedule(stem).with_context(here)?;
        let ranks = schedule.ranks();
        let chunks = schedule.stages() / ranks;
        let found = [ranks, schedule.microbatches(), chunks];
        check_numbers(path, [args.ranks, args.microbatches, args.chunks], found)?;
        Ok(Self {
            schedule,
            text: Some(text),
            costs: None,
        })
    }
}

/// Returns a built-in schedule.
///
/// # Errors
///
/// If no schedule has this name, if a number is missing, or if the schedule does not exist for
/// these numbers.
pub(crate) fn built_in(
    name: &str,
    ranks: Option<usize>,
    microbatches: Option<usize>,
    chunks: Option<usize>,
) -> Result<Schedule> {
    // First, so that a wrong name gives its own error.
    if Builtin::named(name).is_none() {
        Schedule::named(name, 1, 1, None)?;
    }

    let (Some(ranks), Some(microbatches)) = (ranks, microbatches) else {
        bail!("a built-in schedule needs --ranks and --microbatches");
    };
    Ok(Schedule::named(name, ranks, microbatches, chunks)?)
}

/// Reads torch's text of a schedule from a file.
///
/// # Errors
///
/// If the file cannot be read, or is not a schedule. For a file of costs, the error names the
/// option that takes it.
pub(crate) fn read_text(path: &Path, flavour: Option<Dialect>) -> Result<ScheduleText> {
    let text = read(path)?;
    let here = path.display();
    ensure!(
        toml::from_str::<Costs>(&text).is_err(),
        "{here} has the costs of stages, and no schedule: name a schedule and give it the costs, \
         as in `1F1B -p P -m M --costs {here}`"
    );
    ensure!(
        !toml::from_str::<toml::Table>(&text).is_ok_and(|table| !table.is_empty()),
        "{here} is TOML, and no text of a schedule: that has a line for each rank, such as 0F0,0B0"
    );
    ScheduleText::parse(&text, flavour).with_context(|| here.to_string())
}

/// Checks the requested numbers of ranks, microbatches and chunks against the numbers in a
/// schedule's file.
pub(crate) fn check_numbers(
    path: &Path,
    asked: [Option<usize>; 3],
    found: [usize; 3],
) -> Result<()> {
    for (name, (asked, found)) in ["ranks", "microbatches", "chunks"]
        .into_iter()
        .zip(asked.into_iter().zip(found))
    {
        if let Some(asked) = asked {
            ensure!(
                asked == found,
                "--{name} is {asked}, and {} has {found}",
                path.display()
            );
        }
    }
    Ok(())
}

/// Reads the costs of stages from a TOML file.
pub(crate) fn read_costs(path: &Path) -> Result<Costs> {
    toml::from_str(&read(path)?).with_context(|| path.display().to_string())
}

/// True if `path` has the form of a path, or if the file exists. Used for arguments that are not
/// names of schedules.
pub(crate) fn is_file(path: &Path) -> bool {
    path.components().count() > 1 || path.extension().is_some() || path.exists()
}
