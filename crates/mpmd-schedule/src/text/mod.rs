//! Reads and writes torch's text of a schedule: one line of comma-separated cells for each rank. It
//! is the format of `torch.distributed.pipelining` (as of torch 2.11.0).
//!
//! A cell is an action, as `2F0`; an overlapped pair, as `(2F3;5B1)OVERLAP_F_B`; or empty. There is
//! no header, no version and no escape.

mod parse;

use std::fmt::{self, Write};

pub use parse::{CellFault, CellProblem, TextError};

use super::schedule::{Action, Schedule, ScheduleError};
use super::step::{Step, StepKind};

/// A schedule in torch's text format: the cells of each rank, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ScheduleText {
    /// The dialect, which limits the kinds of cells.
    pub flavour: Dialect,
    /// The cells of each rank.
    pub rows: Vec<Vec<Cell>>,
}

/// The dialect of torch's text format. Torch must be told the dialect when it loads a text.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Dialect {
    /// Computations only; the transfers follow from them. Empty cells are allowed and have no
    /// effect: they only align the rows for readers.
    ComputeOnly,
    /// Computations, sends, receives, and gathers and releases of weights. No cell is empty.
    ComputeComms,
}

/// One cell of a text.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Cell {
    /// The cell is empty: the rank does nothing.
    Empty,
    /// One computation, transfer or operation on weights.
    One(Entry),
    /// An overlapped pair (first, second): a forward and a backward pass, in either order. The rank
    /// runs them at the same time if it can.
    Overlapped(Action, Action),
}

/// The operation of a cell.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Entry {
    /// A computation or a transfer.
    Step(Step),
    /// Gathers the sharded weights of the stage with this number.
    Unshard(u32),
    /// Releases the gathered weights of the stage with this number.
    Reshard(u32),
    /// Reduces the complete weight gradients of the stage with this number to its stored shards.
    ReduceGrad(u32),
}

impl Dialect {
    /// Returns torch's name of the dialect: `compute_only` or `compute_comms`.
    pub fn name(self) -> &'static str {
        match self {
            Self::ComputeOnly => "compute_only",
            Self::ComputeComms => "compute_comms",
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(step) => write!(f, "{step}"),
            Self::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Self::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Self::ReduceGrad(stage) => write!(f, "{stage}REDUCE_GRAD"),
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => Ok(()),
            Self::One(entry) => write!(f, "{entry}"),
            Self::Overlapped(one, other) => write!(f, "({one};{other})OVERLAP_F_B"),
        }
    }
}

impl Cell {
    /// Returns the computations of the cell: zero, one or two actions.
    pub fn actions(self) -> impl Iterator<Item = Action> {
        let actions = match self {
            Self::One(Entry::Step(step)) => [step.action(), None],
            Self::Overlapped(one, other) => [Some(one), Some(other)],
            Self::Empty | Self::One(_) => [None, None],
        };
        actions.into_iter().flatten()
    }
}

impl ScheduleText {
    /// Parses a schedule in torch's text format. If `flavour` is `None`, the dialect is detected:
    /// `compute_comms` if the text has a send, receive, gather or release, else `compute_only`.
    ///
    /// Lines end as in Python's `csv` module: with `\r\n`, `\n` or `\r`. Spaces around cells and
    /// quotes around a whole cell are ignored, as in torch. Any other deviation from the format is
    /// an error, whereas torch sometimes reads a part of a cell and drops the rest.
    ///
    /// # Errors
    ///
    /// If there are no lines, or cells are invalid. The error lists the first 8 faults with line,
    /// column, byte offset and problem, and counts the others.
    pub fn parse(text: &str, flavour: Option<Dialect>) -> Result<Self, TextError> {
        parse::parse(text, flavour)
    }

    /// Formats the text as torch does: one line for each rank, each ending with `\r\n`.
    pub fn to_csv(&self) -> String {
        let mut csv = String::new();
        for row in &self.rows {
            line(row, &mut csv);
            csv.push_str("\r\n");
        }
        csv
    }

    /// Returns one line for each rank, without line ends, for display and pipes.
    pub fn lines(&self) -> Vec<String> {
        let one = |row: &Vec<Cell>| {
            let mut text = String::new();
            line(row, &mut text);
            text
        };
        self.rows.iter().map(one).collect()
    }

    /// Returns a hash of the operations of all ranks in order: 64-bit FNV-1a over torch's form of
    /// the text, without empty cells. It is the same on every machine and in every version of this
    /// crate.
    pub fn hash(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |bytes: &[u8]| {
            for byte in bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };

        for row in &self.rows {
            let full = row.iter().filter(|cell| **cell != Cell::Empty);
            for (at, cell) in full.enumerate() {
                add(if at == 0 { b"" } else { b"," });
                add(cell.to_string().as_bytes());
            }
            add(b"\r\n");
        }

        hash
    }

    /// Converts the text to a schedule of its computations, in order. Drops transfers and
    /// operations on weights, because the runner adds its own.
    ///
    /// # Errors
    ///
    /// The errors of [`Schedule::new`].
    pub fn schedule(&self, name: impl Into<String>) -> Result<Schedule, ScheduleError> {
        let mut rows = Vec::with_capacity(self.rows.len());
        let mut overlaps = Vec::with_capacity(self.rows.len());
        for cells in &self.rows {
            let mut row = Vec::with_capacity(cells.len());
            let mut pairs = Vec::new();
            for cell in cells {
                if matches!(cell, Cell::Overlapped(..)) {
                    pairs.push(row.len());
                }
                row.extend(cell.actions());
            }
            rows.push(row);
            overlaps.push(pairs);
        }
        Schedule::with_overlaps(name, rows, overlaps)
    }

    /// Returns the computations, sends and receives of each rank, in order. Only a `compute_comms`
    /// text has sends and receives.
    pub fn steps(&self) -> Vec<Vec<Step>> {
        let row = |row: &Vec<Cell>| {
            let steps = row.iter().flat_map(|cell| {
                let moved = match cell {
                    Cell::One(Entry::Step(step)) if !matches!(step.kind, StepKind::Compute(_)) => {
                        Some(*step)
                    }
                    _ => None,
                };
                cell.actions().map(Step::of_action).chain(moved)
            });
            steps.collect()
        };
        self.rows.iter().map(row).collect()
    }
}

/// Converts a rank's row of a schedule to cells.
pub(super) fn cells(schedule: &Schedule, rank: usize) -> Vec<Cell> {
    schedule
        .paired(rank)
        .map(|(one, other)| match other {
            Some(other) => Cell::Overlapped(one, other),
            None => Cell::One(Entry::Step(Step::of_action(one))),
        })
        .collect()
}

fn line(row: &[Cell], text: &mut String) {
    if row == [Cell::Empty] {
        // Python's `csv` module does the same, to distinguish this row from a line without cells.
        text.push_str("\"\"");
    }
    for (column, cell) in row.iter().enumerate() {
        let comma = if column == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{cell}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_go_through_text_unchanged() {
        for builtin in crate::Builtin::ALL {
            let schedule = builtin.schedule(3, 6, builtin.default_chunks()).unwrap();
            for flavour in [Dialect::ComputeOnly, Dialect::ComputeComms] {
                let text = ScheduleText::of(&schedule, flavour).unwrap();
                let csv = text.to_csv();
                let read = ScheduleText::parse(&csv, None).unwrap();
                assert_eq!(read, text, "{builtin:?}");
                assert_eq!(read.to_csv(), csv);
                assert_eq!(read.schedule(builtin.name()).unwrap(), schedule);
            }
        }
    }

    #[test]
    fn lines_equal_those_of_pythons_csv_module() {
        let one = |text: &str| ScheduleText::parse(text, None).unwrap();
        assert_eq!(
            one("0F0,,0B0\n,1F0 , 1B0,\n").to_csv(),
            "0F0,,0B0\r\n,1F0,1B0,\r\n"
        );
        assert_eq!(one("\"\"\r\n\"0F0\",0B0").to_csv(), "\"\"\r\n0F0,0B0\r\n");
        assert_eq!(one("0F0\r1F0\r").lines(), ["0F0", "1F0"]);
    }

    #[test]
    fn transfers_are_steps_but_not_in_the_schedule() {
        let text = ScheduleText::parse(
            "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0",
            None,
        );
        let text = text.unwrap();
        assert_eq!(text.flavour, Dialect::ComputeComms);
        let steps = text.steps();
        let said = |row: &Vec<Step>| {
            row.iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(said(&steps[0]), "0F0 0SEND_F0 0RECV_B0 0B0");
        assert_eq!(said(&steps[1]), "1RECV_F0 1F0 1B0 1SEND_B0");
        assert_eq!(text.schedule("x").unwrap().cells(0), ["0F0", "0B0"]);
    }
}
