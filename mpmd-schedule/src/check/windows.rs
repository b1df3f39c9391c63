//! Lists of items with a limited window: only a fixed number of unfinished items is open at a time.

/// Marks an item that is in no list.
pub(super) const NONE: u32 = u32::MAX;

/// Lists of items. The first unfinished items of each list are open; `width` is the limit for their
/// number.
#[derive(Debug, Default)]
pub(super) struct Windows {
    width: u32,
    /// All lists, concatenated. `bounds` has the start of each, and the total at the end.
    items: Vec<u32>,
    bounds: Vec<u32>,
    /// The list of each item.
    list_of: Vec<u32>,
    /// For each list, the index in `items` of its first unopened item. `open` has the number of
    /// open unfinished items of each list.
    next: Vec<u32>,
    open: Vec<u32>,
}

impl Windows {
    /// Creates lists for `count` items. `order` yields (item, list) in the order of the items;
    /// other items are in no list.
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

    /// Returns the items of a list, in order.
    pub(super) fn list(&self, list: usize) -> &[u32] {
        &self.items[self.bounds[list] as usize..self.bounds[list + 1] as usize]
    }

    /// Returns the list of an item; `None` if the item is in no list.
    pub(super) fn list_of(&self, item: u32) -> Option<usize> {
        self.list_of.get(item as usize).filter(|list| **list != NONE).map(|list| *list as usize)
    }

    /// Opens items of a list while fewer than `width` are open. Calls `enter` for each; `enter`
    /// returns true if the item is already finished.
    pub(super) fn fill(&mut self, list: usize, mut enter: impl FnMut(u32) -> bool) {
        while self.open[list] < self.width && self.next[list] < self.bounds[list + 1] {
            let item = self.items[self.next[list] as usize];
            self.next[list] += 1;
            self.open[list] += u32::from(!enter(item));
        }
    }

    /// Frees the place of a finished item in a list. The caller then calls [`fill`](Self::fill).
    pub(super) fn free(&mut self, list: usize) {
        self.open[list] -= 1;
    }
}
