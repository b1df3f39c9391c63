//! Lists of which only so many are let in at a time.

/// Marks what is in no list.
pub(super) const NONE: u32 = u32::MAX;

/// Lists of items. Of each list the first items that are not done are in, so many as the width
/// says.
#[derive(Debug, Default)]
pub(super) struct Windows {
    width: u32,
    /// All lists, one after another, and where each begins; one more at the end.
    items: Vec<u32>,
    bounds: Vec<u32>,
    /// The list of each item.
    list_of: Vec<u32>,
    /// For each list the place of the first that is not in, and how many are in and not done.
    next: Vec<u32>,
    open: Vec<u32>,
}

impl Windows {
    /// `list_of` says for each of `count` items that come in `order` the list, or [`NONE`].
    pub(super) fn new(
        width: u32,
        lists: u32,
        count: usize,
        order: impl Iterator<Item = (u32, u32)> + Clone,
    ) -> Self {
        let mut bounds = vec![0; lists as usize + 1];
        let mut list_of = vec![NONE; count];
        for (item, list) in order.clone() {
            bounds[list as usize + 1] += 1;
            list_of[item as usize] = list;
        }
        for list in 0..lists as usize {
            bounds[list + 1] += bounds[list];
        }
        let mut next = bounds[..lists as usize].to_vec();
        let mut items = vec![NONE; bounds[lists as usize] as usize];
        for (item, list) in order {
            items[next[list as usize] as usize] = item;
            next[list as usize] += 1;
        }
        next.copy_from_slice(&bounds[..lists as usize]);
        Self { width, items, bounds, list_of, next, open: vec![0; lists as usize] }
    }

    pub(super) fn lists(&self) -> usize {
        self.next.len()
    }

    /// The items of a list, in order.
    pub(super) fn list(&self, list: usize) -> &[u32] {
        &self.items[self.bounds[list] as usize..self.bounds[list + 1] as usize]
    }

    /// The list of an item.
    pub(super) fn list_of(&self, item: u32) -> Option<usize> {
        self.list_of.get(item as usize).filter(|list| **list != NONE).map(|list| *list as usize)
    }

    /// Lets in what there is room for: `enter` is called with each item, and says whether it is
    /// already done.
    pub(super) fn fill(&mut self, list: usize, mut enter: impl FnMut(u32) -> bool) {
        while self.open[list] < self.width && self.next[list] < self.bounds[list + 1] {
            let item = self.items[self.next[list] as usize];
            self.next[list] += 1;
            self.open[list] += u32::from(!enter(item));
        }
    }

    /// An item that is in has been done: its place is free. [`fill`](Self::fill) is next.
    pub(super) fn free(&mut self, list: usize) {
        self.open[list] -= 1;
    }
}
