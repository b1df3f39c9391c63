//! The events that can happen next in a [`Flow`] over a [`Channel`]; shared by the proof and the
//! simulation.
//!
//! One execution decides whether the flow ends. The events are: a node begins or ends; a transfer
//! begins or ends. Some events require that certain others have happened, for instance a node's
//! inputs, or both ends at the front. No event requires that another has *not* happened. So an
//! event that can happen stays possible until it happens.
//!
//! Suppose two executions run until nothing more can happen, and one has events that the other
//! lacks. Let `e` be the first of these. All requirements of `e` came before it, so the other
//! execution has them all. So `e` could happen there: a contradiction. Therefore both have the same
//! events. For the same reason, the earliest time of an event does not depend on the order of
//! events of the same time.

use super::channel::Channel;
use super::lists::{IndexLists, NONE, Queues};
use crate::flow::{Flow, Post};

/// Bits of [`FlowEngine::state`]: the send or the receive is posted.
const SEND_POSTED: u8 = 1;
const RECEIVE_POSTED: u8 = 2;
/// Bits of [`FlowEngine::state`]: the send or the receive is at the front of its queue.
const SEND_FRONT: u8 = 4;
const RECEIVE_FRONT: u8 = 8;
/// Bit of [`FlowEngine::state`]: the data to send has been computed.
const MADE: u8 = 16;
const BEGUN: u8 = 32;
const SENT: u8 = 64;

/// A node or transfer that can begin, by its number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReadyItem {
    Node(u32),
    Transfer(u32),
}

/// The state of a flow's execution. The send of transfer `t` has the number `2 * t`, its receive
/// the number `2 * t + 1`.
#[derive(Debug)]
pub(crate) struct FlowEngine<'a> {
    pub(super) flow: &'a Flow,
    /// Number of events that each node still waits for.
    waits: Vec<u32>,
    pub(super) ended: Vec<bool>,
    /// For each node, the next node of its lane; `NONE` after the last.
    after: Vec<u32>,
    /// For each node, the nodes that need it. `taken_by` has the nodes that take each transfer, and
    /// `makes` the transfers of each node's results.
    needed_by: IndexLists,
    taken_by: IndexLists,
    makes: IndexLists,
    state: Vec<u8>,
    /// The queues of sends and receives; `None` if all of them are at the front at once.
    pub(super) queues: Option<Queues>,
    /// Sends and receives that have come to the front of their queues and are not processed yet.
    fresh: Vec<u32>,
    /// Nodes and transfers that can begin. The caller removes and runs them.
    pub(crate) begins: Vec<ReadyItem>,
    /// The causes of all starts, for the simulation. `None` in the check.
    pub(crate) causes: Option<Causes>,
    pub(crate) nodes_left: usize,
    pub(crate) transfers_left: usize,
}

/// The last event that each node and transfer waited for. Node `n` has the number `n`, transfer `t`
/// the number of nodes plus `t`. The cause of a node's start may be a received transfer, that of a
/// transfer's start an earlier transfer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Causes {
    pub(crate) node: Vec<u32>,
    /// For each transfer, the node or transfer that let it begin.
    pub(crate) transfer: Vec<u32>,
    /// The number of the node or transfer that ends now.
    now: u32,
}

impl<'a> FlowEngine<'a> {
    /// Creates the initial state, with all items that can begin in `begins`.
    ///
    /// # Panics
    ///
    /// If numbers in the flow are out of range, or a send or receive is posted twice.
    pub(crate) fn new(flow: &'a Flow, channel: Channel, with_causes: bool) -> Self {
        let nodes = flow.nodes.len();
        let transfers = flow.transfers.len();

        let mut last = vec![NONE; flow.lanes.len()];
        let mut after = vec![NONE; nodes];
        let mut waits = vec![0; nodes];
        for (number, node) in flow.nodes.iter().enumerate() {
            let before = std::mem::replace(&mut last[node.lane as usize], number as u32);
            waits[number] = node.needs.1 + node.takes.1 + u32::from(before != NONE);
            if before != NONE {
                after[before as usize] = number as u32;
            }
        }

        let all = || 0..nodes as u32;
        let needs =
            all().flat_map(|node| flow.needs_of(node).iter().map(move |need| (*need, node)));
        let takes =
            all().flat_map(|node| flow.takes_of(node).iter().map(move |taken| (*taken, node)));
        let made = flow
            .transfers
            .iter()
            .zip(0..)
            .filter(|(transfer, _)| transfer.after != NONE);

        let causes = with_causes.then(|| Causes {
            node: vec![NONE; nodes],
            transfer: vec![NONE; transfers],
            now: NONE,
        });

        let mut engine = Self {
            flow,
            waits,
            ended: vec![false; nodes],
            after,
            needed_by: IndexLists::new(nodes, needs),
            taken_by: IndexLists::new(transfers, takes),
            makes: IndexLists::new(
                nodes,
                made.map(|(transfer, number)| (transfer.after, number)),
            ),
            state: vec![0; transfers],
            queues: queues(flow, channel),
            fresh: Vec::new(),
            begins: Vec::new(),
            causes,
            nodes_left: nodes,
            transfers_left: transfers,
        };

        engine.start();
        engine
    }

    fn start(&mut self) {
        let flow = self.flow;
        for post in flow.posts.iter().flatten() {
            let (transfer, bit) = match *post {
                Post::Send(transfer) => (transfer, SEND_POSTED),
                Post::Receive(transfer) => (transfer, RECEIVE_POSTED),
            };
            let state = &mut self.state[transfer as usize];
            assert!(
                *state & bit == 0,
                "an end of transfer {transfer} is posted twice"
            );
            *state |= bit;
        }

        for (transfer, state) in flow.transfers.iter().zip(&mut self.state) {
            *state |= if transfer.after == NONE { MADE } else { 0 };
        }

        match &mut self.queues {
            Some(queues) => {
                for queue in 0..queues.len() {
                    self.fresh.extend(queues.advance(queue));
                }
            }
            None => self
                .fresh
                .extend(flow.posts.iter().flatten().map(|post| end_of(*post))),
        }

        for node in 0..self.waits.len() {
            if self.waits[node] == 0 {
                self.begins.push(ReadyItem::Node(node as u32));
            }
        }
        self.settle();
    }

    /// Records that a node has ended. Adds the nodes and transfers that can begin now to `begins`.
    pub(crate) fn end_node(&mut self, node: u32) {
        self.ended[node as usize] = true;
        self.nodes_left -= 1;
        if let Some(causes) = &mut self.causes {
            causes.now = node;
        }

        let after = self.after[node as usize];
        if after != NONE {
            self.has(after, node);
        }

        for at in self.needed_by.range(node) {
            self.has(self.needed_by.items[at], node);
        }

        for at in self.makes.range(node) {
            let transfer = self.makes.items[at];
            self.state[transfer as usize] |= MADE;
            self.try_begin(transfer);
        }
        self.settle();
    }

    /// Records that a transfer has arrived. Adds the nodes and transfers that can begin now to
    /// `begins`.
    pub(crate) fn end_transfer(&mut self, transfer: u32) {
        if let Some(causes) = &mut self.causes {
            causes.now = self.flow.nodes.len() as u32 + transfer;
        }

        self.state[transfer as usize] |= SENT;
        self.transfers_left -= 1;
        if let Some(queues) = &mut self.queues {
            let left = [transfer * 2, transfer * 2 + 1].map(|end| queues.queue_of(end));
            self.fresh.extend(
                left.into_iter()
                    .flatten()
                    .filter_map(|queue| queues.advance(queue)),
            );
        }

        let cause = self.flow.nodes.len() as u32 + transfer;
        for at in self.taken_by.range(transfer) {
            self.has(self.taken_by.items[at], cause);
        }
        self.settle();
    }

    /// Counts one event that `node` waits for as done. If it was the last, records `cause` and lets
    /// the node begin.
    fn has(&mut self, node: u32, cause: u32) {
        let waits = &mut self.waits[node as usize];
        *waits -= 1;
        if *waits == 0 {
            if let Some(causes) = &mut self.causes {
                causes.node[node as usize] = cause;
            }
            self.begins.push(ReadyItem::Node(node));
        }
    }

    fn try_begin(&mut self, transfer: u32) {
        let state = &mut self.state[transfer as usize];
        const NEEDED: u8 = SEND_FRONT | RECEIVE_FRONT | MADE;
        if *state & (NEEDED | BEGUN) == NEEDED {
            *state |= BEGUN;
            if let Some(causes) = &mut self.causes {
                causes.transfer[transfer as usize] = causes.now;
            }
            self.begins.push(ReadyItem::Transfer(transfer));
        }
    }

    /// Processes all sends and receives that have come to the front of their queues.
    fn settle(&mut self) {
        while let Some(end) = self.fresh.pop() {
            let front = if end.is_multiple_of(2) {
                SEND_FRONT
            } else {
                RECEIVE_FRONT
            };
            self.state[end as usize / 2] |= front;
            self.try_begin(end / 2);
        }
    }

    pub(super) fn is_sent(&self, transfer: u32) -> bool {
        self.state[transfer as usize] & SENT != 0
    }

    pub(super) fn is_made(&self, transfer: u32) -> bool {
        self.state[transfer as usize] & MADE != 0
    }

    /// Returns true if the send or receive with the number `end` is posted.
    pub(super) fn is_posted(&self, end: u32) -> bool {
        self.state[end as usize / 2]
            & if end.is_multiple_of(2) {
                SEND_POSTED
            } else {
                RECEIVE_POSTED
            }
            != 0
    }

    pub(super) fn is_at_front(&self, end: u32) -> bool {
        self.state[end as usize / 2]
            & if end.is_multiple_of(2) {
                SEND_FRONT
            } else {
                RECEIVE_FRONT
            }
            != 0
    }
}

/// Returns the number of a send or receive: twice the transfer's number, plus one for a receive.
pub(super) fn end_of(post: Post) -> u32 {
    match post {
        Post::Send(transfer) => transfer * 2,
        Post::Receive(transfer) => transfer * 2 + 1,
    }
}

/// Returns the other process of a posted send or receive.
fn peer_of(flow: &Flow, post: Post) -> u32 {
    match post {
        Post::Send(transfer) => flow.transfers[transfer as usize].to,
        Post::Receive(transfer) => flow.transfers[transfer as usize].from,
    }
}

fn queues(flow: &Flow, channel: Channel) -> Option<Queues> {
    if channel == Channel::Tags {
        return None;
    }

    // Within a process: one queue for all, one for each peer, or two for each peer.
    let key = |post: Post| match (channel, post) {
        (Channel::PerPair, _) => peer_of(flow, post) * 2,
        (Channel::PerDirection, Post::Send(_)) => peer_of(flow, post) * 2,
        (Channel::PerDirection, Post::Receive(_)) => peer_of(flow, post) * 2 + 1,
        _ => 0,
    };

    let QueueNumbers {
        of_processes,
        count,
    } = number_queues(flow, key);
    let ends = all_posts(flow).map(|(process, post)| {
        let ProcessQueues { first, keys } = &of_processes[process];
        (
            first + keys.partition_point(|known| *known < key(post)) as u32,
            end_of(post),
        )
    });
    Some(Queues::new(count, flow.transfers.len() * 2, ends))
}

fn all_posts(flow: &Flow) -> impl Iterator<Item = (usize, Post)> + Clone {
    flow.posts
        .iter()
        .enumerate()
        .flat_map(|(process, posts)| posts.iter().map(move |post| (process, *post)))
}

/// The queues of all processes, numbered by process, then by key.
struct QueueNumbers {
    of_processes: Vec<ProcessQueues>,
    count: u32,
}

/// The queues of one process.
struct ProcessQueues {
    /// Number of the process's first queue.
    first: u32,
    /// The keys of the process's queues, ascending.
    keys: Vec<u32>,
}

/// Numbers the queues: each process has one for each distinct key of its posts.
fn number_queues(flow: &Flow, key: impl Fn(Post) -> u32) -> QueueNumbers {
    let mut count = 0;
    let mut of_processes = Vec::with_capacity(flow.posts.len());
    for posts in &flow.posts {
        let mut keys: Vec<u32> = Vec::new();
        for key in posts.iter().map(|post| key(*post)) {
            if let Err(place) = keys.binary_search(&key) {
                keys.insert(place, key);
            }
        }

        let first = count;
        count += keys.len() as u32;
        of_processes.push(ProcessQueues { first, keys });
    }
    QueueNumbers {
        of_processes,
        count,
    }
}
