//! The regions of an array and their holders.

use std::collections::BTreeMap;

use mpmd_layout::region::Region;
use mpmd_layout::sharding::Layout;

/// The regions of an array and their holders. A holder is a device or a rank.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    /// A heading that describes the array and its sharding.
    pub(super) title: String,
    /// The word for a holder: `device` or `rank`.
    pub(super) holder: &'static str,
    /// The regions with elements, ordered by their first corner.
    pub(super) tiles: Vec<Tile>,
    /// The holders of empty regions, ascending.
    pub(super) empty: Vec<u32>,
}

/// A region and its holders, ascending.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub(super) region: Region,
    pub(super) holders: Vec<u32>,
}

impl Holding {
    /// Collects the regions of an array from (holder, region) pairs. The regions of two
    /// holders must be equal or disjoint.
    pub(super) fn new(
        title: String,
        holder: &'static str,
        held: impl Iterator<Item = (usize, Region)>,
    ) -> Self {
        let mut by_region: BTreeMap<Region, Vec<u32>> = BTreeMap::new();
        let mut empty = Vec::new();
        for (holder, region) in held {
            let holders =
                if region.is_empty() { &mut empty } else { by_region.entry(region).or_default() };
            holders.push(holder as u32);
        }
        empty.sort_unstable();
        let tile = |(region, mut holders): (Region, Vec<u32>)| {
            holders.sort_unstable();
            Tile { region, holders }
        };
        let tiles = by_region.into_iter().map(tile).collect();
        Self { title, holder, tiles, empty }
    }

    /// Collects the regions of the devices of a layout. `holder` is the word for a device.
    pub(super) fn of_layout(title: String, holder: &'static str, layout: &Layout) -> Self {
        let held = layout.iter().map(|(device, region)| (device.0 as usize, region.clone()));
        Self::new(title, holder, held)
    }
}

/// Formats ascending numbers, with runs of three and more as ranges, as `0-3, 8`.
pub(super) fn numbers(sorted: &[u32]) -> String {
    let mut texts = Vec::new();
    let mut rest = sorted;
    while let Some(first) = rest.first() {
        let run = rest
            .iter()
            .zip(u64::from(*first)..)
            .take_while(|(n, next)| u64::from(**n) == *next)
            .count();
        // A run of two is written as two numbers.
        let run = if run == 2 { 1 } else { run };
        texts.push(if run == 1 { first.to_string() } else { format!("{first}-{}", rest[run - 1]) });
        rest = &rest[run..];
    }
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_three_and_more_are_ranges() {
        assert_eq!(numbers(&[]), "");
        assert_eq!(numbers(&[0, 1, 2, 3, 5, 7, 8, 10, 11, 12]), "0-3, 5, 7, 8, 10-12");
        assert_eq!(numbers(&[u32::MAX - 2, u32::MAX - 1, u32::MAX]), "4294967293-4294967295");
    }
}
