//! A [`Flow`]: who computes what, in which order, and what goes between them. What is checked and
//! simulated.

use super::costs::Costs;
use super::lower::{LowerError, Lowered, Step, StepKind};
use super::schedule::{ActionKind, Schedule};

/// What all processes do, with numbers for names: nodes that compute, each in the queue of one
/// lane, and transfers between processes.
///
/// A node begins when the one before it in its lane has ended, the nodes that it
/// [needs](Node::needs) have, and the transfers that it [takes](Node::takes) are there. A transfer
/// can begin when its [source](Transfer::after) has ended, and both sides have come to it in the
/// order in which they post: what that means is the channel's affair.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flow {
    /// The process of each lane. A lane is a device, or a rank of a schedule; its nodes run one at
    /// a time, in the order of their numbers.
    pub lanes: Vec<u32>,
    /// Number of processes.
    pub processes: u32,
    /// In one global order: what a node needs of its own process comes before it.
    pub nodes: Vec<Node>,
    /// All transfers.
    pub transfers: Vec<Transfer>,
    /// What nodes need, one after another.
    pub needs: Vec<u32>,
    /// What nodes take, one after another.
    pub takes: Vec<u32>,
    /// For each process, the order in which it posts its ends of transfers.
    pub posts: Vec<Vec<Post>>,
}

/// Something that is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// Where.
    pub lane: u32,
    /// The first of its needs in [`Flow::needs`], and how many: nodes of the same process that must
    /// have ended.
    pub needs: (u32, u32),
    /// The first of what it takes in [`Flow::takes`], and how many.
    pub takes: (u32, u32),
    /// What it is, to who made the flow: the place of an action, or of an operation.
    pub tag: u32,
}

/// Something that goes from one process to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// The process that gives it.
    pub from: u32,
    /// The process that gets it.
    pub to: u32,
    /// The node that makes it; `u32::MAX` where it is there from the beginning.
    pub after: u32,
    /// Its size.
    pub bytes: u64,
    /// What it is, to who made the flow.
    pub tag: u32,
}

/// One end of a transfer, as a process posts it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Post {
    /// Gives transfer number so-and-so.
    Send(u32),
    /// Takes it.
    Receive(u32),
}

impl Flow {
    /// What one node needs of its own process.
    pub fn needs_of(&self, node: u32) -> &[u32] {
        slice(&self.needs, self.nodes[node as usize].needs)
    }

    /// The transfers that one node takes.
    pub fn takes_of(&self, node: u32) -> &[u32] {
        slice(&self.takes, self.nodes[node as usize].takes)
    }

    /// The process that a node is on.
    pub fn process_of(&self, node: u32) -> u32 {
        self.lanes[self.nodes[node as usize].lane as usize]
    }

    /// The flow of a schedule: a lane and a process for each rank, moves posted in the order of
    /// [`lower`](super::lower).
    ///
    /// # Errors
    ///
    /// Where the schedule is too large for tags of 32 bits.
    pub fn of_schedule(schedule: &Schedule) -> Result<Self, FlowError> {
        Self::of_lowered(&super::lower::lower(schedule)?, Leaves::AtOnce)
    }

    /// The flow of ranks that say themselves when they post what. `B` is two nodes. Tags are those
    /// of [`StepNames`].
    ///
    /// What is sent and received by nobody, although another rank needs it, is a transfer without
    /// ends: the check names it.
    ///
    /// # Errors
    ///
    /// Where a step is there twice, moves something that its rank has no part in, moves something
    /// between stages of one rank, or sends what no rank computes.
    pub fn of_lowered(rows: &Lowered, leaves: Leaves) -> Result<Self, FlowError> {
        let flow = Builder::new(&rows.steps)?.flow(&rows.steps)?;
        Ok(if leaves == Leaves::InOrder { flow.in_order(rows) } else { flow })
    }
}

impl Flow {
    /// The same whose sends wait for all nodes before them in their rows, and whose pairs begin
    /// together.
    fn in_order(mut self, rows: &Lowered) -> Self {
        // Nodes and posts have the order of the rows.
        let (mut node, mut row_begins) = (0, 0);
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
                        // A send before what it sends waits for that all the same.
                        *after = (*after).max(node - 1);
                    }
                    continue;
                };
                if let Some(first) = pair.take() {
                    let (own, other) =
                        (self.nodes[first as usize].takes, self.nodes[node as usize].takes);
                    let from = self.takes.len() as u32;
                    for (begin, count) in [own, other] {
                        self.takes.extend_from_within(begin as usize..(begin + count) as usize);
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

fn slice(list: &[u32], (first, count): (u32, u32)) -> &[u32] {
    &list[first as usize..(first + count) as usize]
}

/// When what a rank has computed can leave.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Leaves {
    /// As soon as it is there, the gradient of a `B` before its second half: as this framework's
    /// runner has it.
    #[default]
    AtOnce,
    /// When all that its row computes before the send has ended, a whole `B` too, and both of a
    /// pair that overlaps, which also begin only when both can: as torch has it, whose streams are
    /// in order. The closed forms of the literature are of this.
    InOrder,
}

/// Why rows of steps are no flow. The caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// The moves of a schedule cannot be put in order.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// Stages times microbatches do not fit.
    #[error("{stages} stages of {microbatches} microbatches are more than 2^28")]
    Large {
        /// Number of stages.
        stages: usize,
        /// Number of microbatches.
        microbatches: usize,
    },
    /// A step of a rank cannot be.
    #[error("rank {rank}, step {place}: {step} {problem}")]
    Step {
        /// The rank.
        rank: usize,
        /// Its place on the rank, from 0.
        place: usize,
        /// The step, as in torch's text format.
        step: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// What the tags of a flow of a schedule mean: the step, packed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StepNames {
    microbatches: u32,
}

/// The kinds of steps by their number in a tag. The last is the second half of a `B`.
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
/// Numbers of kinds in a tag.
const RADIX: u32 = 16;

impl StepNames {
    /// Of a flow with this number of microbatches.
    pub fn new(microbatches: usize) -> Self {
        Self { microbatches: u32::try_from(microbatches).unwrap_or(u32::MAX).max(1) }
    }

    /// Of the flow of these rows.
    pub fn of_lowered(rows: &[Vec<Step>]) -> Self {
        Self::new(rows.iter().flatten().map(|step| step.microbatch as usize + 1).max().unwrap_or(0))
    }

    /// The step of a tag, of a node or of a transfer; of a transfer it is the send.
    pub fn step(self, tag: u32) -> Step {
        let (at, kind) = (tag / RADIX, tag % RADIX);
        let kind = KINDS[kind as usize % KINDS.len()];
        Step { stage: at / self.microbatches, kind, microbatch: at % self.microbatches }
    }

    /// Whether a tag is of the weight gradient that ends a `B`; its first half has the same step.
    pub fn is_second_half(self, tag: u32) -> bool {
        tag % RADIX == SECOND_HALF
    }

    /// Gives transfers their bytes.
    pub(crate) fn weigh(self, flow: &mut Flow, costs: &Costs) {
        for transfer in &mut flow.transfers {
            let step = self.step(transfer.tag);
            let Some(stage) = costs.stage.get(step.stage as usize) else { continue };
            let is_forward = step.kind == StepKind::SendForward;
            transfer.bytes = if is_forward { stage.output_bytes } else { stage.gradient_bytes };
        }
    }

    fn tag(self, stage: u32, microbatch: u32, kind: u32) -> u32 {
        (stage * self.microbatches + microbatch) * RADIX + kind
    }
}

const NONE: u32 = u32::MAX;

/// By stage and microbatch: the nodes and the transfers that there are.
struct Builder {
    names: StepNames,
    stages: u32,
    /// Which rank computes a stage.
    rank_of_stage: Vec<u32>,
    forward: Vec<u32>,
    /// `I`, or the first half of `B`.
    input: Vec<u32>,
    /// `W`, or the second half of `B`.
    weight: Vec<u32>,
    /// Of the stage's outputs, and of the gradient of its inputs.
    outputs: Vec<u32>,
    gradient: Vec<u32>,
    flow: Flow,
}

impl Builder {
    fn new(rows: &[Vec<Step>]) -> Result<Self, FlowError> {
        let steps = || rows.iter().flatten();
        let stages = steps().map(|step| step.stage as usize + 1).max().unwrap_or(0);
        let names = StepNames::of_lowered(rows);
        let microbatches = names.microbatches as usize;
        let count = stages.saturating_mul(microbatches);
        if count > 1 << 28 {
            return Err(FlowError::Large { stages, microbatches });
        }
        let mut rank_of_stage = vec![NONE; stages];
        for (rank, row) in rows.iter().enumerate() {
            for step in row.iter().filter(|step| matches!(step.kind, StepKind::Compute(_))) {
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

    fn add_nodes(&mut self, rank: u32, step: Step) -> Result<(), String> {
        let StepKind::Compute(kind) = step.kind else { return Ok(()) };
        let on = self.rank_of_stage[step.stage as usize];
        if on != rank {
            return Err(format!("is of a stage of rank {on}"));
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

    fn add_node(&mut self, lane: u32, step: Step, kind: u32, there: u32) -> Result<u32, String> {
        if there != NONE {
            return Err("computes what has been computed".to_owned());
        }
        let tag = self.names.tag(step.stage, step.microbatch, kind);
        self.flow.nodes.push(Node { lane, needs: (0, 0), takes: (0, 0), tag });
        Ok(self.flow.nodes.len() as u32 - 1)
    }

    /// What one rank makes and another needs.
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
        let (from, to) = (self.flow.process_of(after), self.flow.process_of(needed));
        if from == to {
            return NONE;
        }
        let tag = self.names.tag(stage, microbatch, kind);
        self.flow.transfers.push(Transfer { from, to, after, bytes: 0, tag });
        self.flow.transfers.len() as u32 - 1
    }

    fn add_post(&mut self, rank: u32, step: Step, posted: &mut [[bool; 2]]) -> Result<(), String> {
        let (stage, is_send) = match step.kind {
            StepKind::Compute(_) => return Ok(()),
            StepKind::SendForward | StepKind::SendBackward => (Some(step.stage), true),
            StepKind::ReceiveForward => (step.stage.checked_sub(1), false),
            StepKind::ReceiveBackward => (step.stage.checked_add(1), false),
        };
        let is_forward = matches!(step.kind, StepKind::SendForward | StepKind::ReceiveForward);
        let stage = stage.filter(|stage| *stage < self.stages);
        let list = if is_forward { &self.outputs } else { &self.gradient };
        let number = stage.map_or(NONE, |stage| list[self.at(stage, step.microbatch)]);
        let Some(transfer) = self.flow.transfers.get(number as usize) else {
            return Err(
                "moves what one of its two ranks does not compute, or what stays on one rank"
                    .to_owned(),
            );
        };
        let own = if is_send { transfer.from } else { transfer.to };
        if own != rank {
            return Err(format!("is for rank {own}"));
        }
        if std::mem::replace(&mut posted[number as usize][usize::from(is_send)], true) {
            return Err("is there twice".to_owned());
        }
        let post = if is_send { Post::Send(number) } else { Post::Receive(number) };
        self.flow.posts[rank as usize].push(post);
        Ok(())
    }

    /// What each node needs of its own rank, and takes from others.
    fn add_inputs(&mut self) {
        for node in 0..self.flow.nodes.len() {
            let tag = self.flow.nodes[node].tag;
            let Step { stage, kind, microbatch } = self.names.step(tag);
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

fn wrong(rank: usize, place: usize, step: Step, problem: String) -> FlowError {
    FlowError::Step { rank, place, step: step.to_string(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_becomes_nodes_and_transfers() {
        let schedule = Schedule::one_f_one_b(2, 1).unwrap();
        let flow = Flow::of_schedule(&schedule).unwrap();
        let names = StepNames::new(1);
        let nodes: Vec<String> =
            flow.nodes.iter().map(|node| names.step(node.tag).to_string()).collect();
        assert_eq!(nodes, ["0F0", "0B0", "0B0", "1F0", "1B0", "1B0"]);
        assert!(
            names.is_second_half(flow.nodes[2].tag) && !names.is_second_half(flow.nodes[1].tag)
        );
        // 0F0 goes to rank 1; the gradient leaves after the first half of 1B0.
        let moves: Vec<(u32, u32, u32)> =
            flow.transfers.iter().map(|t| (t.from, t.to, t.after)).collect();
        assert_eq!(moves, [(0, 1, 0), (1, 0, 4)]);
        assert_eq!(names.step(flow.transfers[1].tag).to_string(), "1SEND_B0");
        assert_eq!((flow.takes_of(3), flow.takes_of(1)), (&[0][..], &[1][..]));
        assert_eq!((flow.needs_of(1), flow.needs_of(2)), (&[0][..], &[1][..]));
        assert_eq!(
            flow.posts,
            [vec![Post::Send(0), Post::Receive(1)], vec![Post::Receive(0), Post::Send(1)]]
        );
    }

    #[test]
    fn steps_that_cannot_be_are_named() {
        let schedule = Schedule::one_f_one_b(2, 1).unwrap();
        let lowered = crate::lower(&schedule).unwrap();
        let with = |rank: usize, step: Step| {
            let mut rows = lowered.clone();
            rows.steps[rank].push(step);
            Flow::of_lowered(&rows, Leaves::AtOnce).unwrap_err().to_string()
        };
        let step = |stage, kind| Step { stage, kind, microbatch: 0 };
        use StepKind::{Compute, ReceiveForward, SendForward};
        assert_eq!(with(0, lowered.steps[0][1]), "rank 0, step 4: 0SEND_F0 is there twice");
        assert_eq!(with(1, step(0, SendForward)), "rank 1, step 4: 0SEND_F0 is for rank 0");
        let forward = step(1, Compute(ActionKind::Forward));
        assert_eq!(with(1, forward), "rank 1, step 4: 1F0 computes what has been computed");
        assert_eq!(with(0, forward), "rank 1, step 1: 1F0 is of a stage of rank 0");
        let out = with(1, step(0, ReceiveForward));
        assert!(
            out.starts_with("rank 1, step 4: 0RECV_F0 moves what one of its two ranks"),
            "{out}"
        );
    }
}
