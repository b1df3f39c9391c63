//! Torch's text of a schedule: one line of comma-separated cells for each rank, the format of
//! `torch.distributed.pipelining` (as of torch 2.11.0), read and written.
//!
//! A cell is an action, as `2F0`; a pair that overlaps, as `(2F3;5B1)OVERLAP_F_B`; or empty. There
//! is no header, no version and no escape: what the text does not say goes into a
//! [`Sidecar`](super::Sidecar).

mod parse;

use std::fmt::{self, Write};

pub use parse::{CellFault, TextError};

use super::lower::{LowerError, Step, StepKind};
use super::lower_comms::lower_comms;
use super::schedule::{Action, Schedule, ScheduleError};

/// A schedule as text has it: for each rank its cells, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Text {
    /// What the cells may be.
    pub flavour: Flavour,
    /// By rank.
    pub rows: Vec<Vec<Cell>>,
}

/// Which of the two formats a text is in. Torch is told which when it loads one.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Flavour {
    /// What is computed; the moves follow from it. Cells may be empty: the rank waits, in a world
    /// where every action takes the same time.
    ComputeOnly,
    /// Also sends, receives, and when weights are gathered and let go. No cell is empty.
    ComputeComms,
}

/// One cell.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Cell {
    /// Nothing is done.
    Empty,
    /// One thing is done.
    One(Entry),
    /// A forward and a backward pass, at the same time where the runtime can.
    Overlapped(Action, Action),
}

/// What a cell says is done.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Entry {
    /// Something is computed or moved.
    Step(Step),
    /// The weights of the stage are gathered from where they are stored.
    Unshard(u32),
    /// The gathered weights of the stage are let go.
    Reshard(u32),
    /// The gradients of the stage's weights, which are complete, are reduced to where they are
    /// stored.
    ReduceGrad(u32),
}

impl Flavour {
    /// Torch's name of it: `compute_only` or `compute_comms`.
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
    /// What is computed in it: no, one or two actions.
    pub fn actions(self) -> impl Iterator<Item = Action> {
        let actions = match self {
            Self::One(Entry::Step(step)) => [step.action(), None],
            Self::Overlapped(one, other) => [Some(one), Some(other)],
            Self::Empty | Self::One(_) => [None, None],
        };
        actions.into_iter().flatten()
    }
}

impl Text {
    /// Reads a text, of the flavour that is asked for or, with `None`, that it turns out to be:
    /// `compute_comms` where anything is sent, received, gathered or let go, else `compute_only`.
    ///
    /// Lines end as Python's `csv` module has it: with `\r\n`, `\n` or `\r`. Spaces around cells
    /// and quotes around a whole cell are read past, as torch does. Everything else that is not in
    /// the format is an error, also where torch reads a part of the cell and drops the rest.
    ///
    /// # Errors
    ///
    /// Names the first cells that are not in the format, with line, column and byte, and what is
    /// wrong with each.
    pub fn parse(text: &str, flavour: Option<Flavour>) -> Result<Self, TextError> {
        parse::parse(text, flavour)
    }

    /// The text of a schedule. As `compute_only` it has no empty cells; as `compute_comms` it is,
    /// to the byte, what torch makes of the same orders.
    ///
    /// # Errors
    ///
    /// Where the moves cannot be put in order, which is not so for a schedule that exists.
    pub fn of(schedule: &Schedule, flavour: Flavour) -> Result<Self, LowerError> {
        let rows = match flavour {
            Flavour::ComputeOnly => {
                (0..schedule.ranks()).map(|rank| cells(schedule, rank)).collect()
            }
            Flavour::ComputeComms => lower_comms(schedule)?,
        };
        Ok(Self { flavour, rows })
    }

    /// As torch writes it: each line ends with `\r\n`.
    pub fn to_csv(&self) -> String {
        let mut csv = String::new();
        for row in &self.rows {
            line(row, &mut csv);
            csv.push_str("\r\n");
        }
        csv
    }

    /// The lines for people and for pipes: without line ends.
    pub fn lines(&self) -> Vec<String> {
        let one = |row: &Vec<Cell>| {
            let mut text = String::new();
            line(row, &mut text);
            text
        };
        self.rows.iter().map(one).collect()
    }

    /// A hash of what the ranks do and in which order: FNV-1a of 64 bits over the text as torch
    /// writes it, without empty cells. The same on every machine and in every version.
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

    /// The schedule in the text: what is computed, in order. Moves, and what is done about weights,
    /// are left out: the runner has its own.
    ///
    /// # Errors
    ///
    /// As [`Schedule::new`].
    pub fn schedule(&self, name: impl Into<String>) -> Result<Schedule, ScheduleError> {
        let mut rows = Vec::with_capacity(self.rows.len());
        let mut overlaps = Vec::with_capacity(self.rows.len());
        for cells in &self.rows {
            let (mut row, mut pairs) = (Vec::with_capacity(cells.len()), Vec::new());
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

    /// What each rank computes, sends and receives, in order: of a `compute_comms` text all its
    /// moves.
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

/// A rank's row of a schedule as cells.
pub(super) fn cells(schedule: &Schedule, rank: usize) -> Vec<Cell> {
    let cell = |(one, other): (Action, Option<Action>)| match other {
        Some(other) => Cell::Overlapped(one, other),
        None => Cell::One(Entry::Step(Step::of_action(one))),
    };
    schedule.paired(rank).map(cell).collect()
}

fn line(row: &[Cell], text: &mut String) {
    if row == [Cell::Empty] {
        // As Python's `csv` module writes it: else it could not be told from a line without cells.
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
            for flavour in [Flavour::ComputeOnly, Flavour::ComputeComms] {
                let text = Text::of(&schedule, flavour).unwrap();
                let csv = text.to_csv();
                let read = Text::parse(&csv, None).unwrap();
                assert_eq!(read, text, "{builtin:?}");
                assert_eq!(read.to_csv(), csv);
                assert_eq!(read.schedule(builtin.name()).unwrap(), schedule);
            }
        }
    }

    #[test]
    fn lines_are_as_pythons_csv_module_writes_them() {
        let one = |text: &str| Text::parse(text, None).unwrap();
        assert_eq!(one("0F0,,0B0\n,1F0 , 1B0,\n").to_csv(), "0F0,,0B0\r\n,1F0,1B0,\r\n");
        assert_eq!(one("\"\"\r\n\"0F0\",0B0").to_csv(), "\"\"\r\n0F0,0B0\r\n");
        assert_eq!(one("0F0\r1F0\r").lines(), ["0F0", "1F0"]);
    }

    #[test]
    fn moves_are_steps_and_the_schedule_is_without_them() {
        let text = Text::parse(
            "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0",
            None,
        );
        let text = text.unwrap();
        assert_eq!(text.flavour, Flavour::ComputeComms);
        let steps = text.steps();
        let said =
            |row: &Vec<Step>| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(said(&steps[0]), "0F0 0SEND_F0 0RECV_B0 0B0");
        assert_eq!(said(&steps[1]), "1RECV_F0 1F0 1B0 1SEND_B0");
        assert_eq!(text.schedule("x").unwrap().cells(0), ["0F0", "0B0"]);
    }
}
