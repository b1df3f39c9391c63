//! Lists of numbers in one allocation, and queues made of them.

/// Marks an item that is in no list.
pub(super) const NONE: u32 = u32::MAX;

/// Lists of numbers, one for each index.
#[derive(Debug)]
pub(super) struct IndexLists {
    bounds: Vec<u32>,
    pub(super) items: Vec<u32>,
}

impl IndexLists {
    /// Creates `count` lists. `pairs` yields (list, item).
    pub(super) fn new(count: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Self {
        let mut bounds = vec![0; count + 1];
        for (of, _) in pairs.clone() {
            bounds[of as usize + 1] += 1;
        }
        for at in 0..count {
            bounds[at + 1] += bounds[at];
        }

        let mut next = bounds.clone();
        let mut items = vec![0; bounds[count] as usize];
        for (of, item) in pairs {
            items[next[of as usize] as usize] = item;
            next[of as usize] += 1;
        }
        Self { bounds, items }
    }

    /// Returns the range in `items` of the list with index `of`.
    pub(super) fn range(&self, of: u32) -> std::ops::Range<usize> {
        self.bounds[of as usize] as usize..self.bounds[of as usize + 1] as usize
    }
}

/// Queues of sends and receives. Only the first unfinished one of each queue is at its front.
#[derive(Debug)]
pub(super) struct Queues {
    lists: IndexLists,
    /// The queue of each send or receive; `NONE` if it is not posted.
    queue_of: Vec<u32>,
    /// For each queue, how many sends and receives have come to its front so far.
    entered: Vec<u32>,
}

impl Queues {
    /// Creates queues for `ends` sends and receives. `pairs` yields (queue, number of the send or
    /// receive).
    pub(super) fn new(
        count: u32,
        ends: usize,
        pairs: impl Iterator<Item = (u32, u32)> + Clone,
    ) -> Self {
        let mut queue_of = vec![NONE; ends];
        pairs
            .clone()
            .for_each(|(queue, end)| queue_of[end as usize] = queue);
        let lists = IndexLists::new(count as usize, pairs);
        Self {
            lists,
            queue_of,
            entered: vec![0; count as usize],
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.entered.len() as u32
    }

    /// Returns the numbers of a queue's sends and receives, in order.
    pub(super) fn ends(&self, queue: u32) -> &[u32] {
        &self.lists.items[self.lists.range(queue)]
    }

    /// Returns the queue of a send or receive; `None` if it is not posted.
    pub(super) fn queue_of(&self, end: u32) -> Option<u32> {
        self.queue_of
            .get(end as usize)
            .copied()
            .filter(|queue| *queue != NONE)
    }

    /// Moves the next send or receive of a queue to its front, and returns its number.
    pub(super) fn advance(&mut self, queue: u32) -> Option<u32> {
        let entered = self.entered[queue as usize];
        self.entered[queue as usize] += 1;
        self.ends(queue).get(entered as usize).copied()
    }
}
