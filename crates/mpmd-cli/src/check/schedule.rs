//! `mpmd check FILE.csv`, `mpmd check NAME`: proves, simulates and adds up a schedule.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Args;
use mpmd_schedule::check::{Budget, Channel, CheckLimits, Problem, ScheduleReport, check_lowered};
use mpmd_schedule::flow::{Leaves, StepNames};
use mpmd_schedule::simulate::{SimulateError, SimulatedSchedule, simulate_lowered};
use mpmd_schedule::{Builtin, Costs, Lowered, Schedule, lower};

use crate::schedule::{
    built_in, check_numbers, is_file, read_costs, read_text, round, step_length, units,
};

/// Arguments of `mpmd check` on a schedule.
#[derive(Args, Debug)]
pub(crate) struct CheckScheduleArgs {
    /// A file with torch's text of a schedule, or the name of a built-in one: see `mpmd schedule
    /// --help`. If the text has sends and receives, their order is proved, else torch's order
    #[arg(value_name = "FILE|NAME", conflicts_with = "processes")]
    pub(crate) subject: Option<String>,
    /// Number of ranks, of a built-in schedule
    #[arg(long, short = 'p', value_name = "P", requires = "subject")]
    ranks: Option<usize>,
    /// Number of microbatches
    #[arg(long, short = 'm', value_name = "M", requires = "subject")]
    microbatches: Option<usize>,
    /// Number of stages on each rank; by default two if the schedule needs several, else one
    #[arg(long, short = 'v', value_name = "V", requires = "subject")]
    chunks: Option<usize>,
    /// A file with the costs of each stage's passes, as TOML; by default one for each pass (two for
    /// B) and nothing for moves
    #[arg(long, value_name = "FILE.toml", requires = "subject")]
    costs: Option<PathBuf>,
    /// Simulate that each result is sent as soon as it is computed, as this framework's runner
    /// does. By default a rank sends a result only after all its earlier actions have ended, as in
    /// torch
    #[arg(long, requires = "subject")]
    at_once: bool,
}

/// The schedule to check: its name, the steps of each rank, and the costs of its stages if known.
struct Subject {
    name: String,
    rows: Lowered,
    costs: Option<Costs>,
}

/// The results of checking a schedule.
struct Findings {
    name: String,
    names: StepNames,
    unit: String,
    /// The proof or the problems over each requested channel.
    reports: Vec<(Channel, ScheduleReport)>,
    /// The simulation over the channel `tags` with the setting `leaves`. `other` has the opposite
    /// setting. Both are `None` if the rows are not a schedule or do not end.
    simulated: Option<SimulatedSchedule>,
    other: Option<SimulatedSchedule>,
    leaves: Leaves,
    ranks: usize,
}

impl CheckScheduleArgs {
    /// Proves and simulates the schedule `subject`, a file or name, and prints the findings.
    /// Returns failure if a problem is found.
    pub(crate) fn check(
        &self,
        subject: &str,
        budget: Option<Budget>,
        channels: &[Channel],
    ) -> Result<ExitCode> {
        let subject = self.find(subject)?;
        let findings = self.look(subject, budget, channels)?;
        crate::files::say(&findings.text())?;
        Ok(if findings.is_fit() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn look(
        &self,
        subject: Subject,
        budget: Option<Budget>,
        channels: &[Channel],
    ) -> Result<Findings> {
        let Subject { name, rows, costs } = subject;
        let stages = rows
            .steps
            .iter()
            .flatten()
            .map(|step| step.stage as usize + 1)
            .max()
            .unwrap_or(0);

        check_costs(costs.as_ref(), budget, &name, stages)?;

        let (leaves, other) = match self.at_once {
            true => (Leaves::AtOnce, Leaves::InOrder),
            false => (Leaves::InOrder, Leaves::AtOnce),
        };
        let reports: Vec<(Channel, ScheduleReport)> = channels
            .iter()
            .map(|channel| {
                let limits = CheckLimits {
                    channel: *channel,
                    leaves,
                    costs: costs.as_ref(),
                    budget,
                };
                (*channel, check_lowered(&rows, limits))
            })
            .collect();
        let whole = |report: &ScheduleReport| !report.peaks.is_empty();
        let is_schedule = reports.iter().all(|(_, report)| whole(report));

        // A text without moves gets torch's moves.
        let moved = if rows.has_moves() || !is_schedule {
            rows
        } else {
            let (actions, pairs) = rows.actions();
            lower(&Schedule::with_overlaps(name.clone(), actions, pairs)?)?
        };

        // Rows that are no schedule may have any stage numbers.
        let unit_costs =
            costs.unwrap_or_else(|| Costs::units(if is_schedule { stages } else { 0 }));
        let simulated = |leaves| match simulate_lowered(&moved, &unit_costs, leaves, Channel::Tags)
        {
            Ok(simulated) => Ok(Some(simulated)),
            Err(SimulateError::Deadlock(_) | SimulateError::Flow(_)) => Ok(None),
            Err(error) => Err(error),
        };
        let (simulated, other) = if is_schedule {
            (simulated(leaves)?, simulated(other)?)
        } else {
            (None, None)
        };

        Ok(Findings {
            names: StepNames::of_lowered(&moved.steps),
            ranks: moved.steps.len(),
            name,
            unit: unit_costs.unit.clone(),
            reports,
            simulated,
            other,
            leaves,
        })
    }

    fn find(&self, subject: &str) -> Result<Subject> {
        let path = Path::new(subject);
        let mut found = match Builtin::named(subject) {
            None if is_file(path) => self.read(path)?,
            _ => {
                let ranks = self.ranks;
                let microbatches = self.microbatches;
                let schedule = built_in(subject, ranks, microbatches, self.chunks)?;
                Subject {
                    name: schedule.name().to_owned(),
                    rows: lower(&schedule)?,
                    costs: None,
                }
            }
        };
        if let Some(path) = &self.costs {
            found.costs = Some(read_costs(path)?);
        }
        Ok(found)
    }

    fn read(&self, path: &Path) -> Result<Subject> {
        let text = read_text(path, None)?;
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let rows = Lowered::of_text(&text);

        let steps = || rows.steps.iter().flatten();
        let stages = steps()
            .map(|step| step.stage as usize + 1)
            .max()
            .unwrap_or(0);
        let microbatches = steps()
            .map(|step| step.microbatch as usize + 1)
            .max()
            .unwrap_or(0);

        let ranks = rows.steps.len();
        let found = [ranks, microbatches, stages / ranks.max(1)];
        check_numbers(path, [self.ranks, self.microbatches, self.chunks], found)?;
        Ok(Subject {
            name,
            rows,
            costs: None,
        })
    }
}

/// Checks that the costs cover all stages of the schedule, and have what the budget needs.
fn check_costs(
    costs: Option<&Costs>,
    budget: Option<Budget>,
    name: &str,
    stages: usize,
) -> Result<()> {
    if let Some(costs) = costs {
        let found = costs.stage.len();
        ensure!(
            found == stages,
            "the costs are of {found} stages, and {name} has {stages}"
        );
    }

    let says_bytes = costs.is_some_and(Costs::says_bytes);
    if matches!(budget, Some(Budget::Bytes(_))) && !says_bytes {
        bail!(
            "a budget in bytes needs --costs that say how many bytes stages keep; there is \
             --budget 4activations"
        );
    }
    Ok(())
}

impl Findings {
    fn is_fit(&self) -> bool {
        self.reports.iter().all(|(_, report)| report.is_fit())
    }

    /// Returns the problems that occur over every channel.
    fn faults(&self) -> Vec<&Problem> {
        let of = |report: &'_ ScheduleReport, problem: &Problem| report.problems.contains(problem);
        let Some((_, first)) = self.reports.first() else {
            return Vec::new();
        };

        let everywhere =
            |problem: &&Problem| self.reports.iter().all(|(_, report)| of(report, problem));
        first.problems.iter().filter(everywhere).collect()
    }

    /// Returns the problems over some channels only, as (channel, lines of text). They are circles
    /// of waits.
    fn circles(&self) -> Vec<(Channel, Vec<String>)> {
        let faults = self.faults();
        let mut circles = Vec::new();
        for (channel, report) in &self.reports {
            for problem in report
                .problems
                .iter()
                .filter(|problem| !faults.contains(problem))
            {
                circles.push((*channel, problem.lines(&self.names)));
            }
        }
        circles
    }

    fn proved(&self) -> Vec<Channel> {
        self.reports
            .iter()
            .filter(|(_, report)| report.proof.is_some())
            .map(|(channel, _)| *channel)
            .collect()
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let proved: Vec<String> = self.proved().iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "schedule {} of {} ranks", self.name, self.ranks);

        for problem in self.faults() {
            let head = match problem {
                Problem::Deadlock(_) => "fault    it does not come to its end:\n           ",
                _ => "fault    ",
            };
            let _ = writeln!(
                out,
                "{head}{}",
                problem.lines(&self.names).join("\n           ")
            );
        }

        if !proved.is_empty() {
            let _ = writeln!(out, "order    ends over {}", proved.join(", "));
        }
        for (channel, lines) in self.circles() {
            let _ = writeln!(
                out,
                "order    does not end over {channel}:\n           {}",
                lines.join("\n           ")
            );
        }
        let Some((_, report)) = self.reports.first() else {
            return out;
        };

        if let Some(made) = &self.simulated {
            self.step_text(made, &mut out);
        }

        for (rank, peak) in report.peaks.iter().enumerate() {
            let _ = write!(
                out,
                "memory   rank {rank}: {} activations",
                peak.activations
            );
            if peak.bytes > 0 {
                let _ = write!(out, ", {} bytes", peak.bytes);
            }
            let _ = writeln!(out);
        }

        for link in &report.links {
            let _ = write!(
                out,
                "link     rank {} to rank {}: {} transfers",
                link.from, link.to, link.transfers
            );
            if link.bytes > 0 {
                let _ = write!(out, ", {} bytes", link.bytes);
            }
            let _ = writeln!(out);
        }
        out
    }

    fn step_text(&self, made: &SimulatedSchedule, out: &mut String) {
        let found = &made.simulated;
        let unit = &self.unit;
        let _ = writeln!(out, "step     {}", step_length(found, unit));

        let idle: Vec<String> = found
            .lanes
            .iter()
            .map(|lane| round(lane.idle()).to_string())
            .collect();
        let _ = writeln!(
            out,
            "           idle between first and last action, by rank: {}",
            idle.join(" ")
        );

        let unit = units(unit);
        if let Some(other) = &self.other {
            let how = match self.leaves {
                Leaves::InOrder => "if results are sent at once, as by this framework's runner",
                Leaves::AtOnce => "if sends wait for all earlier actions of their row, as in torch",
            };
            let _ = writeln!(
                out,
                "           {} {unit} {how}",
                round(other.simulated.makespan)
            );
        }

        for (channel, makespan) in made.channel_costs() {
            let _ = match makespan {
                Ok(makespan) => {
                    let times = if found.makespan > 0.0 {
                        makespan / found.makespan
                    } else {
                        1.0
                    };
                    writeln!(
                        out,
                        "           over {channel}: {} {unit}, {times:.2}x",
                        round(makespan)
                    )
                }
                Err(_) => writeln!(out, "           over {channel}: never ends"),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn args() -> CheckScheduleArgs {
        CheckScheduleArgs {
            subject: None,
            ranks: Some(2),
            microbatches: Some(2),
            chunks: None,
            costs: None,
            at_once: false,
        }
    }

    #[test]
    fn a_built_in_schedule_is_proved_and_simulated() {
        let args = CheckScheduleArgs {
            ranks: Some(8),
            microbatches: Some(32),
            ..args()
        };
        let subject = args.find("dualpipev").unwrap();
        let findings = args.look(subject, None, &Channel::ALL).unwrap();
        assert!(findings.is_fit());
        let text = findings.text();
        for line in [
            "schedule DualPipeV of 8 ranks\n",
            "order    ends over tags, direction, pair, single\n",
            "step     206 units, of which 14 are beyond the busiest rank's compute time; ranks \
             compute nothing for 6.8 % of the time\n",
            "over single: 298 units, 1.45x\n",
            "memory   rank 0: 17 activations\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn crossed_receives_are_refuted_with_their_circle() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("crossed.csv");
        let text = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n";
        fs::write(&file, text).unwrap();
        let args = args();
        let subject = args.find(file.to_str().unwrap()).unwrap();
        let findings = args.look(subject, None, &Channel::ALL).unwrap();
        assert!(!findings.is_fit());
        let text = findings.text();
        let said = "order    ends over tags\norder    does not end over direction:\n           \
                    rank 0 sends 0SEND_F0 waits for its other side: rank 1 receives 0SEND_F0\n";
        assert!(text.contains(said), "{text}");
    }

    #[test]
    fn faults_of_all_channels_are_printed_once() {
        let args = args();
        let subject = || args.find("gpipe").unwrap();
        let findings = args
            .look(subject(), Some(Budget::Activations(1)), &Channel::ALL)
            .unwrap();
        let text = findings.text();
        let said = "fault    rank 0 keeps 2 activations at 0F1; it may keep 1\n";
        assert_eq!(text.matches(said).count(), 1, "{text}");
        assert!(
            args.look(subject(), Some(Budget::Bytes(1)), &Channel::ALL)
                .is_err()
        );
        assert!(args.find("no such").is_err());
    }
}
