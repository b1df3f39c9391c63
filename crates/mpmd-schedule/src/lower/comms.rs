//! Lowers a schedule to all operations of torch's runtime. Beside computations and transfers, these
//! gather and release sharded weights, and reduce their gradients.

use super::{LowerError, LoweredTurns, lower_turns};
use crate::schedule::{Action, ActionKind, Schedule};
use crate::text::{Cell, Dialect, Entry, ScheduleText, cells};

/// Number of stages whose weights a rank keeps gathered: the next ones in its row. Torch uses the
/// same number.
const GATHERED: usize = 3;

/// Returns the cells of each rank with transfers, gathers and reductions added, in the order of
/// torch 2.11.0.
///
/// Before each cell, a rank gathers the weights of the next three stages in its row and releases
/// all others. The gradients of a stage are reduced after its last weight gradient. Each of these
/// operations takes a turn of its rank in the order of transfers: see
/// [`lower_cells`](super::lower_cells).
///
/// # Errors
///
/// The errors of [`lower_cells`](super::lower_cells).
pub(crate) fn lower_comms(schedule: &Schedule) -> Result<Vec<Vec<Cell>>, LowerError> {
    let rows = (0..schedule.ranks()).map(|rank| {
        let gathered = with_gathers(&cells(schedule, rank), schedule.stages());
        with_reductions(gathered, schedule)
    });
    let rows: Vec<Vec<Cell>> = rows.collect();

    let actions: Vec<Vec<Action>> = rows
        .iter()
        .map(|row| row.iter().flat_map(|cell| cell.actions()).collect())
        .collect();

    let slices: Vec<Vec<&[Action]>> = rows
        .iter()
        .zip(&actions)
        .map(|(row, actions)| {
            let mut rest = &actions[..];
            let slice = |cell: &Cell| {
                let (these, others) = rest.split_at(cell.actions().count());
                rest = others;
                these
            };
            row.iter().map(slice).collect()
        })
        .collect();

    let LoweredTurns { steps, turns } = lower_turns(&slices)?;
    let mut lowered = Vec::with_capacity(rows.len());
    for ((row, steps), turns) in rows.iter().zip(&steps).zip(&turns) {
        let mut cells = Vec::with_capacity(row.len() + steps.len());
        let mut next = 0;
        let one = |step| Cell::One(Entry::Step(step));
        for (cell, turn) in row.iter().zip(turns) {
            cells.extend(steps[next..*turn].iter().copied().map(one));
            cells.push(*cell);
            next = turn + cell.actions().count();
        }

        cells.extend(steps[next..].iter().copied().map(one));
        lowered.push(cells);
    }
    Ok(lowered)
}

impl ScheduleText {
    /// Converts a schedule to torch's text format. A `compute_only` text has no empty cells. A
    /// `compute_comms` text equals, byte for byte, the text that torch creates from the same
    /// orders.
    ///
    /// # Errors
    ///
    /// If the transfers cannot be put in order. This does not happen for a valid schedule.
    pub fn of(schedule: &Schedule, flavour: Dialect) -> Result<Self, LowerError> {
        let rows = match flavour {
            Dialect::ComputeOnly => (0..schedule.ranks())
                .map(|rank| cells(schedule, rank))
                .collect(),
            Dialect::ComputeComms => lower_comms(schedule)?,
        };
        Ok(Self { flavour, rows })
    }
}

/// Returns the stages of a cell's actions; only once if two successive actions have the same stage.
fn stages(cell: Cell) -> impl Iterator<Item = u32> {
    let mut last = None;
    cell.actions()
        .map(|action| action.stage as u32)
        .filter(move |stage| last.replace(*stage) != Some(*stage))
}

/// Returns, for each cell, the first three distinct stages of the rank from this cell on, or fewer
/// at the end of the row. They are in the order of the cells; the stages of one cell stay together.
fn next_stages(row: &[Cell]) -> Vec<Vec<u32>> {
    let mut next = Vec::with_capacity(row.len());
    // Runs from the last cell to the first. Each group has the stages of one cell that no earlier
    // cell has.
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for cell in row.iter().rev() {
        let own: Vec<u32> = stages(*cell).collect();
        let mut found = own.len();

        let mut kept = vec![own];
        for group in groups {
            if found >= GATHERED {
                break;
            }
            let others: Vec<u32> = group
                .into_iter()
                .filter(|stage| !kept[0].contains(stage))
                .collect();
            found += others.len();
            if !others.is_empty() {
                kept.push(others);
            }
        }
        next.push(kept.concat());
        groups = kept;
    }

    next.reverse();
    next
}

/// Inserts `UNSHARD` and `RESHARD` between the cells of a rank. `all` is the number of stages of
/// the schedule.
///
/// A rank with more than three stages and overlapped pairs may release several stages at once. Here
/// they are released in ascending order; torch does not define an order.
fn with_gathers(row: &[Cell], all: usize) -> Vec<Cell> {
    let mut active: Vec<u32> = Vec::with_capacity(GATHERED + 1);
    let mut cells = Vec::with_capacity(row.len() + 4 * all.min(row.len()));
    for (cell, next) in row.iter().zip(next_stages(row)) {
        active.sort_unstable();
        active.retain(|stage| {
            let stays = next.contains(stage);
            if !stays {
                cells.push(Cell::One(Entry::Reshard(*stage)));
            }
            stays
        });

        for stage in next {
            if !active.contains(&stage) {
                active.push(stage);
                cells.push(Cell::One(Entry::Unshard(stage)));
            }
        }
        cells.push(*cell);
    }

    active.sort_unstable();
    cells.extend(
        active
            .into_iter()
            .map(|stage| Cell::One(Entry::Reshard(stage))),
    );
    cells
}

/// Inserts `REDUCE_GRAD` after the last weight gradient of each stage in a rank's row.
fn with_reductions(row: Vec<Cell>, schedule: &Schedule) -> Vec<Cell> {
    let mut left = vec![schedule.microbatches(); schedule.stages()];
    let mut cells = Vec::with_capacity(row.len() + schedule.stages().min(row.len()));
    for cell in row {
        cells.push(cell);
        for Action { stage, kind, .. } in cell.actions() {
            if matches!(kind, ActionKind::Backward | ActionKind::BackwardWeight) {
                left[stage] -= 1;
                if left[stage] == 0 {
                    cells.push(Cell::One(Entry::ReduceGrad(stage as u32)));
                }
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathers(line: &str) -> String {
        let text = ScheduleText::parse(line, Some(Dialect::ComputeOnly)).unwrap();
        with_gathers(&text.rows[0], 9)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn the_next_three_stages_are_gathered() {
        assert_eq!(
            gathers("0F0,1F0,2F0,3F0,3B0,0B0"),
            "0UNSHARD 1UNSHARD 2UNSHARD 0F0 0RESHARD 3UNSHARD 1F0 1RESHARD 0UNSHARD 2F0 2RESHARD \
             3F0 3B0 3RESHARD \
             0B0 0RESHARD"
        );
        // A pair that begins within the window is gathered whole.
        assert_eq!(
            gathers("0F0,1F0,(2F0;3B0)OVERLAP_F_B"),
            "0UNSHARD 1UNSHARD 2UNSHARD 3UNSHARD 0F0 0RESHARD 1F0 1RESHARD (2F0;3B0)OVERLAP_F_B \
             2RESHARD 3RESHARD"
        );
    }

    #[test]
    fn gather_window_equals_that_of_looking_ahead() {
        // Torch's algorithm: look ahead from each cell until there are enough stages.
        let ahead = |row: &[Cell]| {
            let mut next: Vec<u32> = Vec::new();
            for cell in row {
                for stage in stages(*cell) {
                    if !next.contains(&stage) {
                        next.push(stage);
                    }
                }
                if next.len() >= GATHERED {
                    break;
                }
            }
            next
        };
        let mut seed = 1_u64;
        for _ in 0..500 {
            let mut random = |below: u64| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (seed >> 33) % below
            };
            let cell = |pair: u64, one: u64, other: u64| match pair {
                0 => format!("({one}F0;{other}B0)OVERLAP_F_B"),
                _ => format!("{one}F0"),
            };
            let line: Vec<String> = (0..12)
                .map(|_| cell(random(3), random(6), random(6)))
                .collect();
            let text = ScheduleText::parse(&line.join(","), None).unwrap();
            let row = &text.rows[0];
            let expected: Vec<Vec<u32>> = (0..row.len()).map(|at| ahead(&row[at..])).collect();
            assert_eq!(next_stages(row), expected, "{line:?}");
        }
    }
}
