//! A [`Flow`]: computations and transfers of all processes with their order. It is the input of the
//! deadlock check and of the simulation.

use super::costs::Costs;
use super::lower::{LowerError, Lowered};
use super::schedule::{ActionKind, Schedule};
use super::step::{Step, StepKind};

/// The work of all processes as a graph: nodes, which are computations, and transfers between
/// processes. Nodes and transfers have numbers instead of names.
///
/// Each node is in the queue of one lane. A node begins after the previous node of its lane and
/// after the nodes that it [needs](Node::needs). It also waits for the transfers that it
/// [takes](Node::takes). A transfer begins after its [source](Transfer::after), once both its
/// processes have reached it in the order of their posts. The [`Channel`](crate::check::Channel)
/// defines when a process has reached a transfer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flow {
    /// The process of each lane, indexed by lane. A lane is a device, or a rank of a schedule. Each
    /// lane runs its nodes one at a time, in the order of their numbers.
    pub lanes: Vec<u32>,
    /// Number of processes of the job.
    pub processes: u32,
    /// All nodes in one global order: each node comes after the nodes that it needs.
    pub nodes: Vec<Node>,
    /// All transfers between processes.
    pub transfers: Vec<Transfer>,
    /// Lists of needed nodes, one list after the other; [`Node::needs`] is the range of a node's
    /// list.
    pub needs: Vec<u32>,
    /// Lists of awaited transfers, one list after the other; [`Node::takes`] is the range of a
    /// node's list.
    pub takes: Vec<u32>,
    /// The sends and receives of each process, in the order in which it posts them.
    pub posts: Vec<Vec<Post>>,
}

/// A node of a [`Flow`]: one computation on a lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// Index in [`Flow::lanes`] of the lane that computes the node.
    pub lane: u32,
    /// (first index, count) in [`Flow::needs`] of the nodes that must end before this node begins.
    /// They belong to the same process.
    pub needs: (u32, u32),
    /// (first index, count) in [`Flow::takes`] of the transfers that must be received before this
    /// node begins.
    pub takes: (u32, u32),
    /// A tag chosen by the creator of the flow: the index of an action or of an operation.
    pub tag: u32,
}

/// A transfer from one process to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// The sending process.
    pub from: u32,
    /// The receiving process.
    pub to: u32,
    /// The number of the node that computes the data. `u32::MAX` if the data exist from the
    /// beginning.
    pub after: u32,
    /// Size of the transfer in bytes.
    pub bytes: u64,
    /// A tag chosen by the creator of the flow.
    pub tag: u32,
}

/// A send or receive of a transfer, posted by a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Post {
    /// Sends the transfer of this number.
    Send(u32),
    /// Receives the transfer of this number.
    Receive(u32),
}

impl Flow {
    /// Returns the numbers of the nodes of the same process that must end before `node` begins.
    pub fn needs_of(&self, node: u32) -> &[u32] {
        slice(&self.needs, self.nodes[node as usize].needs)
    }

    /// Returns the numbers of the transfers that must be received before `node` begins.
    pub fn takes_of(&self, node: u32) -> &[u32] {
        slice(&self.takes, self.nodes[node as usize].takes)
    }

    /// Returns the process that computes a node.
    pub fn process_of(&self, node: u32) -> u32 {
        self.lanes[self.nodes[node as usize].lane as usize]
    }

    /// Builds the flow of a schedule, with a lane and a process for each rank. Transfers are posted
    /// in the order of [`lower`](super::lower).
    ///
    /// # Errors
    ///
    /// If the transfers cannot be put in order, or the schedule is too large for tags of 32 bits.
    pub fn of_schedule(schedule: &Schedule) -> Result<Self, FlowError> {
        Self::of_lowered(&super::lower::lower(schedule)?, Leaves::AtOnce)
    }

    /// Builds the flow of rows that contain sends and receives. A `B` becomes two nodes.
    /// [`StepNames`] decodes the tags.
    ///
    /// If a rank needs data of another rank but the rows lack the send or receive, nobody posts the
    /// transfer. The check then reports the missing send or receive.
    ///
    /// # Errors
    ///
    /// - If a step appears twice.
    /// - If a step transfers data of other ranks, or between stages of one rank.
    /// - If a step sends data that no rank computes.
    pub fn of_lowered(rows: &Lowered, leaves: Leaves) -> Result<Self, FlowError> {
        let flow = FlowBuilder::new(&rows.steps)?.flow(&rows.steps)?;
        Ok(if leaves == Leaves::InOrder {
            flow.in_order(rows)
        } else {
            flow
        })
    }
}

impl Flow {
    /// Makes each send wait for all nodes before it in its row. Makes the two actions of an
    /// overlapped pair begin together.
    fn in_order(mut self, rows: &Lowered) -> Self {
        // Nodes and posts have the order of the rows.
        let mut node = 0;
        let mut row_begins = 0;
        for ((row, pairs), posts) in rows.steps.iter().zip(&rows.pairs).zip(&self.posts) {
            let mut posts = posts.iter();
            let mut pairs = pairs.iter().copied().peekable();
            let mut pair = None;

            for (place, step) in row.iter().enumerate() {
                let StepKind::Compute(kind) = step.kind else {
                    if let Some(Post::Send(transfer)) = posts.next()
                        && node > row_begins
                    {
                        let after = &mut self.transfers[*transfer as usize].after;
                        // A send that comes before its source waits for the source all the same.
                        *after = (*after).max(node - 1);
                    }
                    continue;
                };

                if let Some(first) = pair.take() {
                    let own = self.nodes[first as usize].takes;
                    let other = self.nodes[node as usize].takes;
                    let from = self.takes.len() as u32;
                    for (begin, count) in [own, other] {
                        self.takes
                            .extend_from_within(begin as usize..(begin + count) as usize);
                    }
                    self.nodes[first as usize].takes = (from, own.1 + other.1);
                }

                if pairs.next_if_eq(&place).is_some() {
                    pair = Some(node);
                }
                node += if kind == ActionKind::Backward { 2 } else { 1 };
            }
            row_begins = node;
        }
        self
    }
}

/// Returns the part of `list` given by a node's (first index, count).
fn slice(list: &[u32], part: (u32, u32)) -> &[u32] {
    let (first, count) = part;
    &list[first as usize..(first + count) as usize]
}

/// The moment at which a rank can send its results.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Leaves {
    /// As soon as the result exists. The input gradient of a `B` leaves before the weight gradient
    /// is computed. The runner of this framework sends at this moment.
    #[default]
    AtOnce,
    /// After all computations before the send in its row, including both gradients of a `B`. An
    /// overlapped pair begins when both its actions can begin, and a send after it waits for both.
    /// Torch sends at this moment because its streams are in order. The closed forms in the
    /// literature assume it.
    InOrder,
}

/// An error in the rows of steps. The caller is at fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// The transfers of a schedule cannot be put in order.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The number of stages times microbatches is too large.
    #[error("{stages} stages of {microbatches} microbatches are more than 2^28")]
    Large {
        /// Number of stages.
        stages: usize,
        /// Number of microbatches.
        microbatches: usize,
    },
    /// A step cannot be on its rank, or at its position.
    #[error("rank {rank}, step {place}: {step} {problem}")]
    Step {
        /// The rank whose row has the step.
        rank: usize,
        /// Position of the step in the rank's row, from 0.
        place: usize,
        /// The step, as in torch's text format.
        step: String,
        /// The reason that the step is invalid.
        problem: StepProblem,
    },
}

/// The reason that a step cannot be on its rank. Its text continues a sentence whose subject is the
/// step.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepProblem {
    /// Another rank computes the stage.
    #[error("is of a stage of rank {rank}")]
    ForeignStage {
        /// The rank that computes the stage.
        rank: u32,
    },
    /// The rank computes the same step earlier.
    #[error("is computed twice")]
    ComputedTwice,
    /// No result moves between ranks by this send or receive.
    #[error("moves data that one of its two ranks does not compute, or that stays on one rank")]
    NoTransfer,
    /// A send or a receive is on the wrong rank.
    #[error("is for rank {rank}")]
    ForeignMove {
        /// The rank that must send or receive.
        rank: u32,
    },
    /// The rank has the same send or receive earlier.
    #[error("appears twice")]
    MovedTwice,
}

/// The decoder of tags in the flow of a schedule. A tag is a [`Step`] packed into 32 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StepNames {
    microbatches: u32,
}

/// The kinds of steps, indexed by their number in a tag. The last entry is the weight gradient of a
/// `B`.
const KINDS: [StepKind; 9] = [
    StepKind::Compute(ActionKind::Forward),
    StepKind::Compute(ActionKind::BackwardInput),
    StepKind::Compute(ActionKind::BackwardWeight),
    StepKind::Compute(ActionKind::Backward),
    StepKind::SendForward,
    StepKind::ReceiveForward,
    StepKind::SendBackward,
    StepKind::ReceiveBackward,
    StepKind::Compute(ActionKind::Backward),
];
const SECOND_HALF: u32 = 8;
/// Number of step kinds that a tag can encode.
const RADIX: u32 = 16;

impl StepNames {
    /// Creates the decoder for a flow with `microbatches` microbatches.
    pub fn new(microbatches: usize) -> Self {
        Self {
            microbatches: u32::try_from(microbatches).unwrap_or(u32::MAX).max(1),
        }
    }

    /// Creates the decoder for the flow of these rows.
    pub fn of_lowered(rows: &[Vec<Step>]) -> Self {
        Self::new(
            rows.iter()
                .flatten()
                .map(|step| step.microbatch as usize + 1)
                .max()
                .unwrap_or(0),
        )
    }

    /// Returns the step that a tag of a node or transfer stands for. For a transfer it is the send.
    pub fn step(self, tag: u32) -> Step {
        let at = tag / RADIX;
        let kind = tag % RADIX;
        let kind = KINDS[kind as usize % KINDS.len()];
        Step {
            stage: at / self.microbatches,
            kind,
            microbatch: at % self.microbatches,
        }
    }

    /// Returns true if a tag belongs to the weight gradient of a `B`. The input gradient of the `B`
    /// has another tag that stands for the same step.
    pub fn is_second_half(self, tag: u32) -> bool {
        tag % RADIX == SECOND_HALF
    }

    /// Sets the bytes of each transfer as `costs` gives them. Transfers of stages without costs
    /// stay unchanged.
    pub(crate) fn weigh(self, flow: &mut Flow, costs: &Costs) {
        for transfer in &mut flow.transfers {
            let step = self.step(transfer.tag);
            let Some(stage) = costs.stage.get(step.stage as usize) else {
                continue;
            };
            let is_forward = step.kind == StepKind::SendForward;
            transfer.bytes = if is_forward {
                stage.output_bytes
            } else {
                stage.gradient_bytes
            };
        }
    }

    fn tag(self, stage: u32, microbatch: u32, kind: u32) -> u32 {
        (stage * self.microbatches + microbatch) * RADIX + kind
    }
}

const NONE: u32 = u32::MAX;

/// Builder of a [`Flow`]. Its tables hold numbers of nodes and transfers, indexed by stage and
/// microbatch.
struct FlowBuilder {
    names: StepNames,
    stages: u32,
    /// The rank that computes each stage.
    rank_of_stage: Vec<u32>,
    forward: Vec<u32>,
    /// Nodes of input gradients: each `I`, and the first half of each `B`.
    input: Vec<u32>,
    /// Nodes of weight gradients: each `W`, and the second half of each `B`.
    weight: Vec<u32>,
    /// Transfers of each stage's outputs. `gradient` has the transfers of the gradients of its
    /// inputs.
    outputs: Vec<u32>,
    gradient: Vec<u32>,
    flow: Flow,
}

impl FlowBuilder {
    fn new(rows: &[Vec<Step>]) -> Result<Self, FlowError> {
        let steps = || rows.iter().flatten();
        let stages = steps()
            .map(|step| step.stage as usize + 1)
            .max()
            .unwrap_or(0);

        let names = StepNames::of_lowered(rows);
        let microbatches = names.microbatches as usize;
        let count = stages.saturating_mul(microbatches);
        if count > 1 << 28 {
            return Err(FlowError::Large {
                stages,
                microbatches,
            });
        }

        let mut rank_of_stage = vec![NONE; stages];
        for (rank, row) in rows.iter().enumerate() {
            for step in row
                .iter()
                .filter(|step| matches!(step.kind, StepKind::Compute(_)))
            {
                let on = &mut rank_of_stage[step.stage as usize];
                *on = (*on).min(rank as u32);
            }
        }

        let none = || vec![NONE; count];
        Ok(Self {
            names,
            stages: stages as u32,
            rank_of_stage,
            forward: none(),
            input: none(),
            weight: none(),
            outputs: none(),
            gradient: none(),
            flow: Flow {
                lanes: (0..rows.len() as u32).collect(),
                processes: rows.len() as u32,
                ..Flow::default()
            },
        })
    }

    fn at(&self, stage: u32, microbatch: u32) -> usize {
        (stage * self.names.microbatches + microbatch) as usize
    }

    fn flow(mut self, rows: &[Vec<Step>]) -> Result<Flow, FlowError> {
        for (rank, row) in rows.iter().enumerate() {
            for (place, step) in row.iter().enumerate() {
                self.add_nodes(rank as u32, *step)
                    .map_err(|problem| wrong(rank, place, *step, problem))?;
            }
        }

        self.add_transfers();
        self.flow.posts = rows.iter().map(|_| Vec::new()).collect();
        let mut posted = vec![[false; 2]; self.flow.transfers.len()];

        for (rank, row) in rows.iter().enumerate() {
            for (place, step) in row.iter().enumerate() {
                self.add_post(rank as u32, *step, &mut posted)
                    .map_err(|problem| wrong(rank, place, *step, problem))?;
            }
        }

        self.add_inputs();
        Ok(self.flow)
    }

    fn add_nodes(&mut self, rank: u32, step: Step) -> Result<(), StepProblem> {
        let StepKind::Compute(kind) = step.kind else {
            return Ok(());
        };

        let stage_rank = self.rank_of_stage[step.stage as usize];
        if stage_rank != rank {
            return Err(StepProblem::ForeignStage { rank: stage_rank });
        }

        let at = self.at(step.stage, step.microbatch);
        match kind {
            ActionKind::Forward => {
                self.forward[at] = self.add_node(rank, step, 0, self.forward[at])?
            }
            ActionKind::BackwardInput => {
                self.input[at] = self.add_node(rank, step, 1, self.input[at])?
            }
            ActionKind::BackwardWeight => {
                self.weight[at] = self.add_node(rank, step, 2, self.weight[at])?
            }
            ActionKind::Backward => {
                self.input[at] = self.add_node(rank, step, 3, self.input[at])?;
                self.weight[at] = self.add_node(rank, step, SECOND_HALF, self.weight[at])?;
            }
        }
        Ok(())
    }

    fn add_node(
        &mut self,
        lane: u32,
        step: Step,
        kind: u32,
        there: u32,
    ) -> Result<u32, StepProblem> {
        if there != NONE {
            return Err(StepProblem::ComputedTwice);
        }
        let tag = self.names.tag(step.stage, step.microbatch, kind);
        self.flow.nodes.push(Node {
            lane,
            needs: (0, 0),
            takes: (0, 0),
            tag,
        });
        Ok(self.flow.nodes.len() as u32 - 1)
    }

    /// Adds a transfer for each result that one rank computes and another needs.
    fn add_transfers(&mut self) {
        for stage in 0..self.stages {
            for microbatch in 0..self.names.microbatches {
                let at = self.at(stage, microbatch);
                if stage + 1 < self.stages {
                    let needed = self.forward[self.at(stage + 1, microbatch)];
                    self.outputs[at] =
                        self.add_transfer(self.forward[at], needed, stage, microbatch, 4);
                }
                if stage > 0 {
                    let needed = self.input[self.at(stage - 1, microbatch)];
                    self.gradient[at] =
                        self.add_transfer(self.input[at], needed, stage, microbatch, 6);
                }
            }
        }
    }

    fn add_transfer(
        &mut self,
        after: u32,
        needed: u32,
        stage: u32,
        microbatch: u32,
        kind: u32,
    ) -> u32 {
        if after == NONE || needed == NONE {
            return NONE;
        }

        let from = self.flow.process_of(after);
        let to = self.flow.process_of(needed);
        if from == to {
            return NONE;
        }

        let tag = self.names.tag(stage, microbatch, kind);
        self.flow.transfers.push(Transfer {
            from,
            to,
            after,
            bytes: 0,
            tag,
        });
        self.flow.transfers.len() as u32 - 1
    }

    fn add_post(
        &mut self,
        rank: u32,
        step: Step,
        posted: &mut [[bool; 2]],
    ) -> Result<(), StepProblem> {
        let (stage, is_send) = match step.kind {
            StepKind::Compute(_) => return Ok(()),
            StepKind::SendForward | StepKind::SendBackward => (Some(step.stage), true),
            StepKind::ReceiveForward => (step.stage.checked_sub(1), false),
            StepKind::ReceiveBackward => (step.stage.checked_add(1), false),
        };

        let is_forward = matches!(step.kind, StepKind::SendForward | StepKind::ReceiveForward);
        let stage = stage.filter(|stage| *stage < self.stages);
        let list = if is_forward {
            &self.outputs
        } else {
            &self.gradient
        };
        let number = stage.map_or(NONE, |stage| list[self.at(stage, step.microbatch)]);

        let Some(transfer) = self.flow.transfers.get(number as usize) else {
            return Err(StepProblem::NoTransfer);
        };

        let own = if is_send { transfer.from } else { transfer.to };
        if own != rank {
            return Err(StepProblem::ForeignMove { rank: own });
        }
        if std::mem::replace(&mut posted[number as usize][usize::from(is_send)], true) {
            return Err(StepProblem::MovedTwice);
        }

        let post = if is_send {
            Post::Send(number)
        } else {
            Post::Receive(number)
        };
        self.flow.posts[rank as usize].push(post);
        Ok(())
    }

    /// Fills in the nodes that each node needs and the transfers that it takes.
    fn add_inputs(&mut self) {
        for node in 0..self.flow.nodes.len() {
            let tag = self.flow.nodes[node].tag;
            let Step {
                stage,
                kind,
                microbatch,
            } = self.names.step(tag);

            let at = self.at(stage, microbatch);
            let mut own = [NONE; 2];
            let mut moved = NONE;
            match kind {
                _ if self.names.is_second_half(tag) => own[0] = self.input[at],
                StepKind::Compute(ActionKind::BackwardWeight) => own[0] = self.input[at],
                StepKind::Compute(ActionKind::Forward) if stage > 0 => {
                    let before = self.at(stage - 1, microbatch);
                    (own[0], moved) = (self.forward[before], self.outputs[before]);
                }
                StepKind::Compute(ActionKind::BackwardInput | ActionKind::Backward) => {
                    own[0] = self.forward[at];
                    if stage + 1 < self.stages {
                        let behind = self.at(stage + 1, microbatch);
                        (own[1], moved) = (self.input[behind], self.gradient[behind]);
                    }
                }
                _ => {}
            }

            let lane = self.flow.nodes[node].lane;
            let first = self.flow.needs.len() as u32;
            for need in own {
                if need != NONE && self.flow.nodes[need as usize].lane == lane {
                    self.flow.needs.push(need);
                }
            }

            let first_taken = self.flow.takes.len() as u32;
            self.flow.takes.extend((moved != NONE).then_some(moved));
            let count = self.flow.needs.len() as u32 - first;
            let taken = self.flow.takes.len() as u32 - first_taken;

            let at = &mut self.flow.nodes[node];
            (at.needs, at.takes) = ((first, count), (first_taken, taken));
        }
    }
}

fn wrong(rank: usize, place: usize, step: Step, problem: StepProblem) -> FlowError {
    FlowError::Step {
        rank,
        place,
        step: step.to_string(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_becomes_nodes_and_transfers() {
        let schedule = Schedule::one_f_one_b(2, 1).unwrap();
        let flow = Flow::of_schedule(&schedule).unwrap();
        let names = StepNames::new(1);
        let nodes: Vec<String> = flow
            .nodes
            .iter()
            .map(|node| names.step(node.tag).to_string())
            .collect();
        assert_eq!(nodes, ["0F0", "0B0", "0B0", "1F0", "1B0", "1B0"]);
        assert!(
            names.is_second_half(flow.nodes[2].tag) && !names.is_second_half(flow.nodes[1].tag)
        );
        // 0F0 is sent to rank 1; the gradient leaves after the first half of 1B0.
        let moves: Vec<(u32, u32, u32)> = flow
            .transfers
            .iter()
            .map(|t| (t.from, t.to, t.after))
            .collect();
        assert_eq!(moves, [(0, 1, 0), (1, 0, 4)]);
        assert_eq!(names.step(flow.transfers[1].tag).to_string(), "1SEND_B0");
        assert_eq!((flow.takes_of(3), flow.takes_of(1)), (&[0][..], &[1][..]));
        assert_eq!((flow.needs_of(1), flow.needs_of(2)), (&[0][..], &[1][..]));
        assert_eq!(
            flow.posts,
            [
                vec![Post::Send(0), Post::Receive(1)],
                vec![Post::Receive(0), Post::Send(1)]
            ]
        );
    }

    #[test]
    fn invalid_steps_are_reported() {
        let schedule = Schedule::one_f_one_b(2, 1).unwrap();
        let lowered = crate::lower(&schedule).unwrap();
        let with = |rank: usize, step: Step| {
            let mut rows = lowered.clone();
            rows.steps[rank].push(step);
            Flow::of_lowered(&rows, Leaves::AtOnce)
                .unwrap_err()
                .to_string()
        };
        let step = |stage, kind| Step {
            stage,
            kind,
            microbatch: 0,
        };
        use StepKind::{Compute, ReceiveForward, SendForward};
        assert_eq!(
            with(0, lowered.steps[0][1]),
            "rank 0, step 4: 0SEND_F0 appears twice"
        );
        assert_eq!(
            with(1, step(0, SendForward)),
            "rank 1, step 4: 0SEND_F0 is for rank 0"
        );
        let forward = step(1, Compute(ActionKind::Forward));
        assert_eq!(with(1, forward), "rank 1, step 4: 1F0 is computed twice");
        assert_eq!(
            with(0, forward),
            "rank 1, step 1: 1F0 is of a stage of rank 0"
        );
        let out = with(1, step(0, ReceiveForward));
        assert!(
            out.starts_with("rank 1, step 4: 0RECV_F0 moves data that one of its two ranks"),
            "{out}"
        );
    }
}
