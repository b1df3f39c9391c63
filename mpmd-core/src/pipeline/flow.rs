//! A [`Flow`]: who computes what, in which order, and what goes between them. What is checked and simulated.

/// What all processes do, with numbers for names: nodes that compute, each in the queue of one lane, and
/// transfers between processes.
///
/// A node begins when the one before it in its lane has ended, the nodes that it [needs](Node::needs) have, and
/// the transfers that it [takes](Node::takes) are there. A transfer can begin when its [source](Transfer::after)
/// has ended, and both sides have come to it in the order in which they post: what that means is the channel's
/// affair.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flow {
    /// The process of each lane. A lane is a device, or a rank of a schedule; its nodes run one at a time, in the
    /// order of their numbers.
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
    /// The first of its needs in [`Flow::needs`], and how many: nodes of the same process that must have ended.
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
