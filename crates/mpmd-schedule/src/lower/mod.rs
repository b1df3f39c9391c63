//! Lowers a schedule to [`Step`]s: the computations of each rank with the transfers between ranks.
//!
//! The order is torch's, so that its text format can be written and read. All ranks take turns. A
//! receive is placed where the sender reaches its send, not where the receiving rank needs the
//! data.

mod comms;

use super::schedule::{Action, ActionKind, Schedule};
use super::step::{Step, StepKind};
use super::text::{Cell, Entry, ScheduleText};

pub(crate) use comms::lower_comms;

/// An error in ordering the transfers of a schedule. The caller's schedule is at fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LowerError {
    /// The ranks wait for each other in a cycle, or for an action that does not exist.
    #[error("the moves cannot be put in order: {}", .heads.join("; "))]
    Stuck {
        /// For each unfinished rank, as text: its next action, and the action that it waits for.
        heads: Vec<String>,
    },
}

/// The steps of each rank, in order: computations and transfers.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Lowered {
    /// The steps of each rank.
    pub steps: Vec<Vec<Step>>,
    /// For each rank, the positions of the steps that overlap with the rank's next step, ascending.
    pub pairs: Vec<Vec<usize>>,
}

impl From<Vec<Vec<Step>>> for Lowered {
    /// Creates lowered rows without overlapped pairs.
    fn from(steps: Vec<Vec<Step>>) -> Self {
        let pairs = vec![Vec::new(); steps.len()];
        Self { steps, pairs }
    }
}

impl Lowered {
    /// Converts the rows of a text unchanged. The result has transfers only if the text does.
    pub fn of_text(text: &ScheduleText) -> Self {
        Self::of_cells(&text.rows)
    }

    fn of_cells(rows: &[Vec<Cell>]) -> Self {
        let mut lowered = Self::default();
        for row in rows {
            let mut steps = Vec::with_capacity(row.len());
            let mut pairs = Vec::new();

            for cell in row {
                match *cell {
                    Cell::One(Entry::Step(step)) => steps.push(step),
                    Cell::Overlapped(one, other) => {
                        pairs.push(steps.len());
                        steps.extend([Step::of_action(one), Step::of_action(other)]);
                    }
                    _ => {}
                }
            }

            lowered.steps.push(steps);
            lowered.pairs.push(pairs);
        }
        lowered
    }

    /// Returns true if any step is a send or a receive.
    pub fn has_moves(&self) -> bool {
        self.steps
            .iter()
            .flatten()
            .any(|step| !matches!(step.kind, StepKind::Compute(_)))
    }

    /// Returns (actions, pairs), both indexed by rank. `actions` are the computations in order.
    /// `pairs` are the indices in `actions` at which overlapped pairs begin, ascending.
    pub fn actions(&self) -> (Vec<Vec<Action>>, Vec<Vec<usize>>) {
        let rows = self.steps.iter().zip(&self.pairs).map(|(row, pairs)| {
            let mut actions = Vec::with_capacity(row.len());
            let mut places = Vec::new();
            let mut pairs = pairs.iter().copied().peekable();
            for (place, step) in row.iter().enumerate() {
                if pairs.next_if_eq(&place).is_some() {
                    places.push(actions.len());
                }
                actions.extend(step.action());
            }
            (actions, places)
        });
        rows.unzip()
    }
}

/// Converts a schedule to the steps of each rank: computations, sends and receives, in torch's
/// order.
///
/// Ranks take turns as `lower_cells` describes. In torch's order each gather and release of weights
/// between the steps also counts as a turn of its rank. The sends of an overlapped pair come after
/// both its actions.
///
/// # Errors
///
/// If the ranks wait for each other in a cycle. Overlapped pairs can cause that.
pub fn lower(schedule: &Schedule) -> Result<Lowered, LowerError> {
    let has_pairs = (0..schedule.ranks()).any(|rank| !schedule.overlaps(rank).is_empty());
    if has_pairs || schedule.stages() > schedule.ranks() {
        return Ok(Lowered::of_cells(&lower_comms(schedule)?));
    }

    // With one stage on each rank, weights are gathered before all else. The turns are the same
    // without gathering.
    let cells = |row| Vec::from_iter(<[Action]>::iter(row).map(std::slice::from_ref));
    Ok(lower_cells(
        &schedule
            .rows()
            .iter()
            .map(|row| cells(row))
            .collect::<Vec<_>>(),
    )?
    .into())
}

/// Converts rows of cells to steps, in torch's order. Rows are indexed by rank. Each cell takes one
/// turn of its rank. It has several actions if these overlap, and none for an operation on weights.
///
/// Ranks take turns in order, one cell each. A rank loses its turn if its next cell needs data that
/// does not exist yet. Otherwise the cell's actions are appended to the rank's steps. Then each
/// result that another rank needs gets its send, and the receive is appended to the other rank's
/// steps. Later ranks can use the results in the same round.
///
/// # Errors
///
/// If the ranks wait for each other in a cycle, or for an action that no rank has.
fn lower_cells(rows: &[Vec<&[Action]>]) -> Result<Vec<Vec<Step>>, LowerError> {
    Ok(lower_turns(rows)?.steps)
}

/// The steps that [`lower_turns`] creates, and the turn of each cell.
pub(super) struct LoweredTurns {
    /// The steps of each rank.
    pub(super) steps: Vec<Vec<Step>>,
    /// For each rank and cell, the number of steps that the rank had before the cell's turn.
    pub(super) turns: Vec<Vec<usize>>,
}

/// Converts rows of cells to steps like [`lower_cells`], and also returns the turns.
///
/// # Errors
///
/// The errors of [`lower_cells`].
pub(super) fn lower_turns(rows: &[Vec<&[Action]>]) -> Result<LoweredTurns, LowerError> {
    let mut there = MadePasses::new(rows);
    let mut next = vec![0; rows.len()];

    let moves = |row: &Vec<&[Action]>| {
        Vec::with_capacity(row.iter().map(|cell| cell.len()).sum::<usize>() * 3)
    };
    let mut steps: Vec<Vec<Step>> = rows.iter().map(moves).collect();
    let mut turns: Vec<Vec<usize>> = rows
        .iter()
        .map(|row| Vec::with_capacity(row.len()))
        .collect();

    let mut open: Vec<usize> = (0..rows.len())
        .filter(|rank| !rows[*rank].is_empty())
        .collect();
    while !open.is_empty() {
        let mut progress = false;
        for &rank in &open {
            let cell = rows[rank][next[rank]];
            if !cell.iter().all(|action| there.is_ready(*action)) {
                continue;
            }

            progress = true;
            next[rank] += 1;
            turns[rank].push(steps[rank].len());
            steps[rank].extend(cell.iter().map(|action| Step::of_action(*action)));

            for action in cell {
                there.done(*action);
                let Some(StepMove { send, receive }) = there.moves(*action) else {
                    continue;
                };
                steps[rank].push(send);
                steps[there.rank_of_stage[receive.stage as usize] as usize].push(receive);
            }
        }

        if !progress {
            return Err(there.stuck(rows, &next));
        }

        open.retain(|rank| next[*rank] < rows[*rank].len());
    }
    Ok(LoweredTurns { steps, turns })
}

/// Converts the actions of each rank to steps. Each send comes right after its computation, and
/// each receive right before the computation that needs it. Over channels that keep order this
/// mostly deadlocks, so [`lower`] uses another order.
///
/// Accepts any rows. There is no receive for data that no rank computes, and no send for data that
/// no rank needs.
pub(crate) fn lower_late(rows: &[Vec<Action>]) -> Vec<Vec<Step>> {
    let cells: Vec<Vec<&[Action]>> = rows
        .iter()
        .map(|row| row.iter().map(std::slice::from_ref).collect())
        .collect();

    let mut all = MadePasses::new(&cells);
    rows.iter().flatten().for_each(|action| all.done(*action));

    let late = |row: &Vec<Action>| {
        let mut steps = Vec::with_capacity(row.len() * 3);
        for action in row {
            steps.extend(all.receive_of(*action));
            steps.push(Step::of_action(*action));
            if let Some(StepMove { send, receive }) = all.moves(*action)
                && all.is_wanted(receive)
            {
                steps.push(send);
            }
        }
        steps
    };
    rows.iter().map(late).collect()
}

/// Rank number of a stage that is on no rank.
const NOWHERE: u32 = u32::MAX;
/// Bits of [`MadePasses::done`], one for each kind of pass.
const FORWARD: u8 = 1;
const INPUT: u8 = 2;

/// The rank of each stage, and the passes that have been lowered so far.
struct MadePasses {
    microbatches: usize,
    rank_of_stage: Vec<u32>,
    /// Bits of the lowered passes, indexed by stage and microbatch.
    done: Vec<u8>,
}

/// A pass of another stage that an action needs.
struct NeededPass {
    stage: usize,
    /// The kind of pass, as a bit of [`MadePasses::done`]: `FORWARD` or `INPUT`.
    bit: u8,
}

/// The send and the receive that move a result between ranks.
struct StepMove {
    send: Step,
    receive: Step,
}

impl MadePasses {
    fn new(rows: &[Vec<&[Action]>]) -> Self {
        let actions = || rows.iter().flatten().flat_map(|cell| cell.iter());
        let stages = actions().map(|action| action.stage + 1).max().unwrap_or(0);
        let microbatches = actions()
            .map(|action| action.microbatch + 1)
            .max()
            .unwrap_or(0);

        let mut rank_of_stage = vec![NOWHERE; stages];
        for (rank, row) in rows.iter().enumerate() {
            for action in row.iter().flat_map(|cell| cell.iter()) {
                let on = &mut rank_of_stage[action.stage];
                *on = (*on).min(rank as u32);
            }
        }

        Self {
            microbatches,
            rank_of_stage,
            done: vec![0; stages * microbatches],
        }
    }

    fn at(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.microbatches + microbatch
    }

    fn done(&mut self, action: Action) {
        let at = self.at(action.stage, action.microbatch);
        self.done[at] |= match action.kind {
            ActionKind::Forward => FORWARD,
            ActionKind::BackwardInput | ActionKind::Backward => INPUT,
            ActionKind::BackwardWeight => 0,
        };
    }

    /// Returns the pass of another stage that an action needs, or `None` if it needs none.
    fn need(&self, action: Action) -> Option<NeededPass> {
        match action.kind {
            ActionKind::Forward => Some(NeededPass {
                stage: action.stage.checked_sub(1)?,
                bit: FORWARD,
            }),
            ActionKind::BackwardInput | ActionKind::Backward => {
                let stage = action.stage + 1;
                (stage < self.rank_of_stage.len()).then_some(NeededPass { stage, bit: INPUT })
            }
            ActionKind::BackwardWeight => None,
        }
    }

    fn is_ready(&self, action: Action) -> bool {
        self.need(action)
            .is_none_or(|need| self.done[self.at(need.stage, action.microbatch)] & need.bit != 0)
    }

    /// Returns the send and receive of an action's result, or `None` if no other rank needs the
    /// result.
    fn moves(&self, action: Action) -> Option<StepMove> {
        let (to, send, receive) = match action.kind {
            ActionKind::Forward => (
                action.stage + 1,
                StepKind::SendForward,
                StepKind::ReceiveForward,
            ),
            ActionKind::BackwardInput | ActionKind::Backward => (
                action.stage.checked_sub(1)?,
                StepKind::SendBackward,
                StepKind::ReceiveBackward,
            ),
            ActionKind::BackwardWeight => return None,
        };

        let rank = *self.rank_of_stage.get(to)?;
        if rank == NOWHERE || rank == self.rank_of_stage[action.stage] {
            return None;
        }

        let step = Step::of_action(action);
        Some(StepMove {
            send: Step { kind: send, ..step },
            receive: Step {
                kind: receive,
                stage: to as u32,
                ..step
            },
        })
    }

    /// Returns the receive that an action needs. `None` if no other rank computes the data.
    fn receive_of(&self, action: Action) -> Option<Step> {
        let NeededPass { stage: from, bit } = self.need(action)?;
        let here = self.rank_of_stage[action.stage];
        let there = self.rank_of_stage[from];

        let made = there != here && self.done[self.at(from, action.microbatch)] & bit != 0;
        let kind = if bit == FORWARD {
            StepKind::ReceiveForward
        } else {
            StepKind::ReceiveBackward
        };

        made.then_some(Step {
            kind,
            ..Step::of_action(action)
        })
    }

    /// Returns true if a rank has the action that needs the received data.
    fn is_wanted(&self, receive: Step) -> bool {
        let bit = if receive.kind == StepKind::ReceiveForward {
            FORWARD
        } else {
            INPUT
        };
        self.done[self.at(receive.stage as usize, receive.microbatch as usize)] & bit != 0
    }

    fn stuck(&self, rows: &[Vec<&[Action]>], next: &[usize]) -> LowerError {
        let heads = rows
            .iter()
            .zip(next)
            .enumerate()
            .filter_map(|(rank, (row, next))| {
                let cell = row.get(*next)?;
                let action = *cell.iter().find(|action| !self.is_ready(**action))?;
                let NeededPass { stage, bit } = self.need(action)?;
                let letter = if bit == FORWARD { 'F' } else { 'I' };
                let on = match self.rank_of_stage[stage] {
                    NOWHERE => "no rank".to_owned(),
                    rank => format!("rank {rank}"),
                };
                Some(format!(
                    "rank {rank} is at {action}, which waits for {stage}{letter}{} on {on}",
                    action.microbatch
                ))
            });

        LowerError::Stuck {
            heads: heads.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(rows: &[Vec<Step>]) -> Vec<String> {
        let row = |row: &Vec<Step>| {
            row.iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        };
        rows.iter().map(row).collect()
    }

    #[test]
    fn receive_is_placed_when_sender_reaches_its_send() {
        let schedule = Schedule::one_f_one_b(2, 2).unwrap();
        // Round 1: 0F0, 1F0 (its input is there already). Round 2: 0F1, 1B0. Round 3: 0B0, 1F1.
        // Then 0B1 loses one turn.
        let rows = lower(&schedule).unwrap().steps;
        assert_eq!(
            text(&rows),
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
            ]
        );
    }

    #[test]
    fn late_receives_come_right_before_their_use() {
        let schedule = Schedule::one_f_one_b(2, 2).unwrap();
        assert_eq!(
            text(&lower_late(schedule.rows())),
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
            ]
        );
    }

    #[test]
    fn stages_of_one_rank_send_nothing_to_each_other() {
        let a = |stage, kind| Action {
            stage,
            kind,
            microbatch: 0,
        };
        use ActionKind::{Backward, Forward};
        // A V: stages 0 and 3 on rank 0, 1 and 2 on rank 1.
        let rows = vec![
            vec![a(0, Forward), a(3, Forward), a(3, Backward), a(0, Backward)],
            vec![a(1, Forward), a(2, Forward), a(2, Backward), a(1, Backward)],
        ];
        let schedule = Schedule::new("v", rows).unwrap();
        assert_eq!(
            text(&lower(&schedule).unwrap().steps),
            [
                "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
                "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"
            ]
        );
    }

    #[test]
    fn overlapped_actions_take_one_turn_and_turns_may_be_empty() {
        let a = |stage, kind, microbatch| Action {
            stage,
            kind,
            microbatch,
        };
        use ActionKind::{Backward, Forward};
        let (f0, f1) = ([a(0, Forward, 0)], [a(0, Forward, 1)]);
        let (b0, b1) = ([a(0, Backward, 0)], [a(0, Backward, 1)]);
        let pair = [a(1, Forward, 1), a(1, Backward, 0)];
        let (head, tail) = ([a(1, Forward, 0)], [a(1, Backward, 1)]);
        let rows: Vec<Vec<&[Action]>> =
            vec![vec![&f0, &f1, &b0, &b1], vec![&[], &head, &pair, &tail]];
        assert_eq!(
            text(&lower_cells(&rows).unwrap()),
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
            ]
        );
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let a = |stage, kind, microbatch| Action {
            stage,
            kind,
            microbatch,
        };
        use ActionKind::{Backward, Forward};
        let rows = [
            [
                [a(0, Forward, 0)],
                [a(0, Backward, 0)],
                [a(0, Forward, 1)],
                [a(0, Backward, 1)],
            ],
            [
                [a(1, Forward, 0)],
                [a(1, Forward, 1)],
                [a(1, Backward, 0)],
                [a(1, Backward, 1)],
            ],
        ];
        let cells: Vec<Vec<&[Action]>> = rows
            .iter()
            .map(|row| row.iter().map(|cell| &cell[..]).collect())
            .collect();
        let stuck = lower_cells(&cells).unwrap_err().to_string();
        assert!(
            stuck.contains("rank 0 is at 0B0, which waits for 1I0 on rank 1"),
            "{stuck}"
        );
        assert!(
            stuck.contains("rank 1 is at 1F1, which waits for 0F1 on rank 0"),
            "{stuck}"
        );
    }
}
