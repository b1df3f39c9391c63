//! The cause of a deadlock: a cycle of waits, or transfers with a missing end.

use std::collections::VecDeque;

use super::channel::Channel;
use super::engine::FlowEngine;
use super::lists::{NONE, Queues};
use super::names::Names;
use crate::flow::Flow;

/// The error that a flow deadlocks over a channel.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Deadlock {
    /// The channel over which the flow deadlocks.
    pub channel: Channel,
    /// The cycle of waits: each item waits for the next, the last one for the first. Empty if a
    /// send or receive is missing.
    ///
    /// It is a shortest of the cycles through the first unfinished item of a lane or queue. All
    /// later items of the lane or queue wait for that item.
    pub cycle: Vec<CycleWait>,
    /// Transfers that can never happen because their send or receive is missing.
    pub missing: Vec<Missing>,
    /// (number of unfinished nodes, number of unfinished transfers)
    pub undone: (usize, usize),
}

/// An item of a cycle, which waits for the next item.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CycleWait {
    /// The waiting operation.
    pub item: Item,
    /// The process of the operation.
    pub process: u32,
    /// The tag of the operation's node or transfer in the flow.
    pub tag: u32,
    /// The reason that the operation waits for the next item.
    pub why: Why,
}

/// An operation of a process, with the number of its node or transfer in the flow.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Item {
    /// Computes the node of this number.
    Node(u32),
    /// Sends the transfer of this number.
    Send(u32),
    /// Receives the transfer of this number.
    Receive(u32),
}

/// The reason that one item of a cycle waits for the next item.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Why {
    /// The item comes later in its lane than the next item.
    Lane,
    /// The item is a node that needs the next item, a node.
    Need,
    /// The item is a node that takes the transfer which the next item receives.
    Take,
    /// The item is a send or receive that is posted later in the same queue than the next item.
    Queue,
    /// The item is a send, and the next item is the node that computes its data.
    Make,
    /// The item is a send or receive, and the next item is its counterpart.
    Peer,
}

/// A transfer whose send or receive, or both, is not posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Missing {
    /// The number of the transfer.
    pub transfer: u32,
    /// The tag of the transfer in the flow.
    pub tag: u32,
    /// The send of the transfer.
    pub from: TransferEnd,
    /// The receive of the transfer.
    pub to: TransferEnd,
}

/// The send or the receive of a transfer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TransferEnd {
    /// The process that sends or receives.
    pub process: u32,
    /// True if the process posts the send or receive.
    pub is_posted: bool,
}

impl Deadlock {
    /// Describes the deadlock: one line for each waiting item, or for each missing end.
    pub fn lines(&self, names: &dyn Names) -> Vec<String> {
        let missing = self.missing.iter().map(|missing| missing.line(names));
        let next = self.cycle.iter().skip(1).chain(self.cycle.first());
        let waits = self.cycle.iter().zip(next).map(|(wait, next)| {
            let why = match wait.why {
                Why::Lane => "comes after",
                Why::Need => "needs",
                Why::Take => "needs",
                Why::Queue => "is posted behind",
                Why::Make => "waits for",
                Why::Peer => "waits for its other side",
            };
            format!("{} {why}: {}", wait.text(names), next.text(names))
        });
        missing.chain(waits).collect()
    }
}

impl CycleWait {
    /// Describes the operation and its process as text.
    pub fn text(&self, names: &dyn Names) -> String {
        let process = names.process(self.process);
        match self.item {
            Item::Node(_) => format!("{process} computes {}", names.node(self.tag)),
            Item::Send(_) => format!("{process} sends {}", names.transfer(self.tag)),
            Item::Receive(_) => format!("{process} receives {}", names.transfer(self.tag)),
        }
    }
}

impl Missing {
    /// Describes as text which of the send and the receive is missing.
    pub fn line(&self, names: &dyn Names) -> String {
        let transfer = names.transfer(self.tag);
        let from = names.process(self.from.process);
        let to = names.process(self.to.process);
        match (self.from.is_posted, self.to.is_posted) {
            (true, _) => format!("{from} sends {transfer}, which {to} never receives"),
            (false, true) => format!("{to} receives {transfer}, which {from} never sends"),
            (false, false) => {
                format!("{to} needs {transfer}, which {from} never sends and {to} never receives")
            }
        }
    }
}

/// Returns the transfers with a missing send or receive.
pub(super) fn missing(engine: &FlowEngine) -> Vec<Missing> {
    let transfers = engine.flow.transfers.iter().zip(0..);
    let lacking = transfers.filter_map(|(transfer, number)| {
        let send = engine.is_posted(number * 2);
        let receive = engine.is_posted(number * 2 + 1);
        (!(send && receive)).then_some(Missing {
            transfer: number,
            tag: transfer.tag,
            from: TransferEnd {
                process: transfer.from,
                is_posted: send,
            },
            to: TransferEnd {
                process: transfer.to,
                is_posted: receive,
            },
        })
    });

    lacking.collect()
}

/// Maximum number of waits that the search follows. Then it stops with the shortest cycle so far.
const SEARCH: usize = 50_000_000;

/// Returns the shortest cycle of waits. In `engine`, nothing more can begin and no send or receive
/// is missing.
///
/// The first unfinished item of each lane or queue waits for an item that is first itself or is
/// queued behind a first one. So a path leads from every first item to another, and some cycle
/// passes through a first item.
pub(super) fn shortest(engine: &FlowEngine) -> Vec<CycleWait> {
    let graph = WaitGraph::new(engine);
    let count = engine.flow.nodes.len() + engine.flow.transfers.len() * 2;
    // The last search that saw each item; `from` is the item before it.
    let mut seen = vec![NONE; count];
    let mut from = vec![
        WaitEdge {
            item: NONE,
            why: Why::Need
        };
        count
    ];
    let mut best: Vec<WaitEdge> = Vec::new();
    let mut steps = 0;
    let mut edges = Vec::new();

    for (search, start) in graph.fronts().into_iter().enumerate() {
        if steps > SEARCH && !best.is_empty() {
            break;
        }
        let mut queue = VecDeque::from([(start, 1)]);
        seen[start as usize] = search as u32;
        'search: while let Some((item, depth)) = queue.pop_front() {
            if !best.is_empty() && depth >= best.len() {
                break;
            }

            edges.clear();
            graph.edges(item, &mut edges);
            for &WaitEdge { item: to, why } in &edges {
                steps += 1;
                if to == start {
                    best.clear();
                    best.push(WaitEdge { item, why });
                    while best.last().is_some_and(|wait| wait.item != start) {
                        let last = best[best.len() - 1].item;
                        best.push(from[last as usize]);
                    }
                    best.reverse();
                    break 'search;
                }
                if seen[to as usize] != search as u32 {
                    seen[to as usize] = search as u32;
                    from[to as usize] = WaitEdge { item, why };
                    queue.push_back((to, depth + 1));
                }
            }
        }
    }

    best.into_iter()
        .map(|wait| graph.wait(wait.item, wait.why))
        .collect()
}

/// An edge in the graph of waits: the item at its other end, and the reason for the wait.
#[derive(Clone, Copy)]
struct WaitEdge {
    item: u32,
    why: Why,
}

impl WaitEdge {
    fn new(item: u32, why: Why) -> Self {
        Self { item, why }
    }
}

/// The graph of waits. Items are numbered: nodes first, then sends and receives.
struct WaitGraph<'e, 'f> {
    engine: &'e FlowEngine<'f>,
    nodes: u32,
    /// Number of the first unfinished item of each lane, or `NONE`.
    lane_front: Vec<u32>,
    /// Number of the first unfinished item of each queue, or `NONE`.
    queue_front: Vec<u32>,
}

impl<'e, 'f> WaitGraph<'e, 'f> {
    fn new(engine: &'e FlowEngine<'f>) -> Self {
        let mut lane_front = vec![NONE; engine.flow.lanes.len()];
        for (number, node) in engine.flow.nodes.iter().enumerate() {
            let front = &mut lane_front[node.lane as usize];
            if *front == NONE && !engine.ended[number] {
                *front = number as u32;
            }
        }

        let queues = engine.queues.as_ref();
        let first = |queue: u32| {
            let ends = queues.map_or(&[][..], |queues| queues.ends(queue));
            ends.iter()
                .copied()
                .find(|end| !engine.is_sent(*end / 2))
                .unwrap_or(NONE)
        };

        let queue_front = (0..queues.map_or(0, Queues::len)).map(first).collect();
        Self {
            engine,
            nodes: engine.flow.nodes.len() as u32,
            lane_front,
            queue_front,
        }
    }

    fn fronts(&self) -> Vec<u32> {
        let nodes = self.lane_front.iter().copied();
        let ends = self
            .queue_front
            .iter()
            .map(|end| if *end == NONE { NONE } else { self.nodes + end });
        nodes.chain(ends).filter(|item| *item != NONE).collect()
    }

    /// Appends to `edges` the items that an unfinished item waits for, each with the reason.
    fn edges(&self, item: u32, edges: &mut Vec<WaitEdge>) {
        let engine = self.engine;
        let flow: &Flow = self.engine.flow;
        let end = |transfer: u32, receive: u32| self.nodes + transfer * 2 + receive;
        if item < self.nodes {
            let takes = flow
                .takes_of(item)
                .iter()
                .filter(|taken| !engine.is_sent(**taken));
            edges.extend(takes.map(|taken| WaitEdge::new(end(*taken, 1), Why::Take)));

            let needs = flow
                .needs_of(item)
                .iter()
                .filter(|need| !engine.ended[**need as usize]);
            edges.extend(needs.map(|need| WaitEdge::new(*need, Why::Need)));

            let front = self.lane_front[flow.nodes[item as usize].lane as usize];
            if front != item {
                edges.push(WaitEdge::new(front, Why::Lane));
            }
            return;
        }

        let transfer = (item - self.nodes) / 2;
        let is_receive = (item - self.nodes) % 2 == 1;
        if !engine.is_at_front(item - self.nodes) {
            let queues = engine.queues.as_ref();
            let queue = queues.and_then(|queues| queues.queue_of(item - self.nodes));
            let front = queue.map_or(NONE, |queue| self.queue_front[queue as usize]);
            if front != NONE {
                edges.push(WaitEdge::new(self.nodes + front, Why::Queue));
            }
        } else if is_receive {
            edges.push(WaitEdge::new(end(transfer, 0), Why::Peer));
        } else if !engine.is_made(transfer) {
            edges.push(WaitEdge::new(
                flow.transfers[transfer as usize].after,
                Why::Make,
            ));
        } else {
            edges.push(WaitEdge::new(end(transfer, 1), Why::Peer));
        }
    }

    fn wait(&self, item: u32, why: Why) -> CycleWait {
        let flow = self.engine.flow;
        if item < self.nodes {
            let tag = flow.nodes[item as usize].tag;
            return CycleWait {
                item: Item::Node(item),
                process: flow.process_of(item),
                tag,
                why,
            };
        }

        let number = (item - self.nodes) / 2;
        let transfer = flow.transfers[number as usize];
        let (item, process) = match (item - self.nodes) % 2 {
            0 => (Item::Send(number), transfer.from),
            _ => (Item::Receive(number), transfer.to),
        };
        CycleWait {
            item,
            process,
            tag: transfer.tag,
            why,
        }
    }
}
