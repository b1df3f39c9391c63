//! The report on the dry run of a program.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use mpmd_base::{bytes_text, counted};
use mpmd_record::dry_run::{
    DryRun, DryRunEnd, DryRunFlow, DryRunMemory, MemoryPeak, MessageTotals, OpKind,
};
use mpmd_schedule::check::{self, Channel, Deadlock, Names, Proof};

use super::other_processes::OtherProcesses;

/// Maximum number of listed links. The links with most bytes are listed.
const MOST_LINKS: usize = 16;

/// Maximum number of listed source lines at which the program reads values.
const MOST_READS: usize = 8;

/// The proofs about a program's dry run, and its sums of memory and traffic, for printing.
pub(crate) struct ProgramReport<'a> {
    dry_run: &'a DryRun,
    others: &'a OtherProcesses,
    dry_run_flow: DryRunFlow,
    verdicts: Vec<Result<Proof, Deadlock>>,
    memory: DryRunMemory,
    budget: Option<u64>,
}

impl<'a> ProgramReport<'a> {
    /// Proves over each channel that the operations of process 0 end, and adds up memory. `budget`
    /// is the limit in bytes per device.
    pub(crate) fn new(
        dry_run: &'a DryRun,
        others: &'a OtherProcesses,
        budget: Option<u64>,
        channels: &[Channel],
    ) -> Self {
        let dry_run_flow = dry_run.flow();
        let verdicts = channels
            .iter()
            .map(|channel| check::check(&dry_run_flow.flow, *channel))
            .collect();
        let memory = dry_run.memory(&dry_run_flow);
        Self {
            dry_run,
            others,
            dry_run_flow,
            verdicts,
            memory,
            budget,
        }
    }

    /// True if no process is known to issue other operations than process 0, and these end over
    /// every channel within the budget.
    pub(crate) fn is_good(&self) -> bool {
        self.others.issue_the_same()
            && self.verdicts.iter().all(Result::is_ok)
            && self.over_budget().next().is_none()
    }

    /// Returns (device, peak memory) of each device that exceeds the budget. Empty if there is no
    /// budget.
    fn over_budget(&self) -> impl Iterator<Item = (u32, MemoryPeak)> {
        let most =
            |one: MemoryPeak, other: MemoryPeak| if other.bytes > one.bytes { other } else { one };
        let peaks = self
            .memory
            .devices
            .iter()
            .map(move |d| (d.device, most(d.in_order, d.in_time)));
        peaks.filter(|(_, peak)| self.budget.is_some_and(|budget| peak.bytes > budget))
    }

    /// Returns (operation numbers, name of the range). The range is the last step, which stands for
    /// later steps; without steps it is all operations.
    fn typical(&self) -> (Range<u64>, &'static str) {
        let last = self
            .dry_run
            .steps
            .len()
            .checked_sub(1)
            .and_then(|last| self.dry_run.step(last));
        match last {
            Some(step) if !step.is_empty() => (step, "in the last step"),
            _ => (1..self.dry_run.operations.len() as u64 + 1, "in all"),
        }
    }

    fn size_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DryRun {
            processes,
            devices,
            operations,
            steps,
            end,
            ..
        } = self.dry_run;
        writeln!(
            f,
            "dry run  {} of {} with {}",
            counted(operations.len(), "operation"),
            counted(*processes as usize, "process"),
            counted(devices.len(), "device")
        )?;

        let count = steps.len();
        match end {
            DryRunEnd::Steady => {
                let step = self.dry_run.step(count - 1).unwrap_or_default();
                let length = step.end - step.start;
                writeln!(
                    f,
                    "steps    {} and {count} are equal, {length} operations each; later steps \
                     are assumed to be equal too\n         \
                     what follows is not examined: --steps K runs K steps, or to the program's \
                     end\n         \
                     if it writes files, read \"Dry run\" in docs/guide/testing.md before that",
                    count - 1
                )
            }
            DryRunEnd::Steps => {
                writeln!(
                    f,
                    "steps    {count} run, no two in succession equal at the end"
                )
            }
            _ => writeln!(f, "steps    {count}, to the end of the program"),
        }
    }

    fn proof_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let proved: Vec<String> = self
            .verdicts
            .iter()
            .flatten()
            .map(|proof| proof.channel.to_string())
            .collect();
        if !proved.is_empty() {
            let flow = &self.dry_run_flow.flow;
            let nodes = flow.nodes.len();
            let transfers = flow.transfers.len();
            let over = proved.join(", ");
            writeln!(
                f,
                "order    ends over {over}: {nodes} nodes, {transfers} transfers"
            )?;
        }

        let named = Named(self);
        for deadlock in self
            .verdicts
            .iter()
            .filter_map(|verdict| verdict.as_ref().err())
        {
            let (nodes, transfers) = deadlock.undone;
            let channel = &deadlock.channel;
            writeln!(
                f,
                "order    does not end over {channel}: {nodes} nodes, {transfers} transfers are \
                 left"
            )?;
            for line in deadlock.lines(&named) {
                writeln!(f, "           {line}")?;
            }
        }
        Ok(())
    }

    fn memory_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (process, peak) in self.memory.processes.iter().enumerate() {
            let at = self.dry_run.describe(peak.operation);
            write!(
                f,
                "memory   process {process}: {} at most",
                bytes_text(peak.bytes)
            )?;
            if peak.bytes > 0 {
                write!(f, ", in {at}")?;
            }
            writeln!(f)?;

            let devices = self
                .memory
                .devices
                .iter()
                .filter(|device| device.process as usize == process);
            for device in devices {
                let time = bytes_text(device.in_time.bytes);
                let order = bytes_text(device.in_order.bytes);
                writeln!(
                    f,
                    "           device {}: {time}; in the order of issue {order}",
                    device.device
                )?;
            }
        }

        for (device, peak) in self.over_budget() {
            let bytes = bytes_text(peak.bytes);
            let budget = bytes_text(self.budget.unwrap_or_default());
            let at = self.dry_run.describe(peak.operation);
            writeln!(
                f,
                "memory   device {device} takes {bytes}, above the budget of {budget}, in {at}"
            )?;
        }
        Ok(())
    }

    fn link_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operations, when) = self.typical();
        let links = self.dry_run.links(operations);
        if links.is_empty() {
            return writeln!(f, "links    nothing goes between processes {when}");
        }

        let total: u64 = links.values().map(|link| link.bytes).sum();
        writeln!(f, "links    {} between processes {when}", bytes_text(total))?;

        let mut listed: Vec<(&(u32, u32), &MessageTotals)> = links.iter().collect();
        listed.sort_by_key(|(_, link)| std::cmp::Reverse(link.bytes));
        let rest = listed.len().saturating_sub(MOST_LINKS);
        listed.truncate(MOST_LINKS);
        listed.sort_by_key(|(between, _)| **between);
        for ((from, to), MessageTotals { messages, bytes }) in listed {
            writeln!(
                f,
                "           {from} to {to}: {} in {}",
                bytes_text(*bytes),
                counted(usize::try_from(*messages).unwrap_or(usize::MAX), "message")
            )?;
        }

        match rest {
            0 => Ok(()),
            rest => writeln!(f, "           and {rest} more with less each"),
        }
    }

    /// Writes the source lines at which the program reads values. The proof holds only if the
    /// program does not branch on them.
    fn read_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forms = (1..=self.dry_run.operations.len() as u64)
            .filter_map(|operation| self.dry_run.descriptor_of(operation));
        let agreed = forms
            .filter(|form| matches!(form.kind, OpKind::BroadcastValue { .. }))
            .count();
        if agreed > 0 {
            writeln!(
                f,
                "values   the proof takes the program's own values for {agreed} broadcasts"
            )?;
        }

        let mut lines: BTreeMap<u32, ReadLine> = BTreeMap::new();
        for read in self.dry_run.reads.iter().filter(|read| read.values) {
            let line = lines.entry(read.line).or_insert(ReadLine {
                first: read.after,
                times: 0,
            });
            line.first = read.after.min(line.first);
            line.times += 1;
        }
        let Some(first) = lines.values().map(|line| line.first).min() else {
            return Ok(());
        };
        writeln!(
            f,
            "values   the proof holds up to operation {first}; beyond it, only if no process \
             branches on values that it reads"
        )?;

        let rest = lines.len().saturating_sub(MOST_READS);
        for (line, ReadLine { first, times }) in lines.into_iter().take(MOST_READS) {
            let at = self
                .dry_run
                .lines
                .get(line as usize)
                .map_or("nowhere", String::as_str);
            writeln!(
                f,
                "           read at {at}, {times} times, first after operation {first}"
            )?;
        }

        match rest {
            0 => Ok(()),
            rest => writeln!(f, "           and at {rest} more lines"),
        }
    }
}

impl fmt::Display for ProgramReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.size_lines(f)?;
        write!(f, "{}", self.others)?;
        self.proof_lines(f)?;
        self.memory_lines(f)?;
        self.link_lines(f)?;
        self.read_lines(f)
    }
}

/// The reads of values at one source line of the program.
struct ReadLine {
    /// Number of operations that were issued before the first read.
    first: u64,
    times: u64,
}

/// Names the nodes and transfers of a proof after operations of the dry run, by label, kind and
/// line.
struct Named<'a>(&'a ProgramReport<'a>);

impl Names for Named<'_> {
    fn node(&self, tag: u32) -> String {
        self.0.dry_run_flow.describe(self.0.dry_run, tag)
    }

    fn transfer(&self, tag: u32) -> String {
        let sent = self.0.dry_run_flow.transfers.get(tag as usize);
        sent.map_or_else(
            || format!("transfer {tag}"),
            |sent| self.0.dry_run.describe(sent.operation),
        )
    }
}
