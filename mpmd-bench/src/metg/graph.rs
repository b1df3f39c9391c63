//! Task graphs: rows of points, and the points of the row before on which each point depends.
//!
//! The patterns are those of Task Bench (`core/core.cc` of github.com/StanfordLegion/task-bench).

use std::ops::Range;

use clap::ValueEnum;

/// The dependencies of a graph. The numbers are also those in mpi.c.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Pattern {
    /// No point depends on another.
    Trivial,
    /// A point depends on itself and its two neighbours. The row has two ends.
    Stencil,
    /// A point depends on itself and on the points 1, 2, 4, … away, another distance in each row.
    Fft,
    /// The first row has one point, and each row twice as many, up to the width. Point `i` depends
    /// on point `i / 2`, also in rows of full width.
    Tree,
    /// A point depends on all points.
    AllToAll,
}

impl Pattern {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Trivial => "trivial",
            Self::Stencil => "stencil",
            Self::Fft => "fft",
            Self::Tree => "tree",
            Self::AllToAll => "all-to-all",
        }
    }
}

/// A graph of `rows` rows with at most `width` points.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Graph {
    pub(super) pattern: Pattern,
    pub(super) width: usize,
    pub(super) rows: usize,
}

impl Graph {
    /// Returns the number of points in `row`. They are counted from 0.
    pub(super) fn width_at(&self, row: usize) -> usize {
        match self.pattern {
            Pattern::Tree if row < self.width.ilog2() as usize + 1 => self.width.min(1 << row),
            _ => self.width,
        }
    }

    /// Returns the points of the row before `row` on which `point` depends, in ascending order.
    /// Empty for the first row.
    pub(super) fn dependencies(&self, row: usize, point: usize) -> Vec<usize> {
        let Some(before) = row.checked_sub(1) else { return Vec::new() };
        match self.pattern {
            Pattern::Trivial => Vec::new(),
            Pattern::Stencil => self.near(point, 1),
            Pattern::Fft => {
                // The number of distances: the base-2 logarithm of the width, rounded up.
                let distances = self.width.next_power_of_two().ilog2().max(1) as usize;
                let distance = 1 << (before % distances);
                let near = self.near(point, distance);
                near.into_iter()
                    .filter(|from| from.abs_diff(point).is_multiple_of(distance))
                    .collect()
            }
            Pattern::Tree => vec![point / 2],
            Pattern::AllToAll => (0..self.width).collect(),
        }
    }

    /// Returns the number of tasks of the points `points`, in all rows.
    pub(super) fn tasks(&self, points: &Range<usize>) -> usize {
        let of_row = |row| points.end.min(self.width_at(row)).saturating_sub(points.start);
        (0..self.rows).map(of_row).sum()
    }

    /// Returns the points that are at most `distance` away from `point`.
    fn near(&self, point: usize, distance: usize) -> Vec<usize> {
        (point.saturating_sub(distance)..=(point + distance).min(self.width - 1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: [usize; 8] = [1, 2, 3, 4, 5, 7, 8, 16];
    const ROWS: usize = 11;

    fn graphs() -> impl Iterator<Item = Graph> {
        let of_width = |width| {
            let graph = move |pattern: &Pattern| Graph { pattern: *pattern, width, rows: ROWS };
            Pattern::value_variants().iter().map(graph)
        };
        WIDTHS.into_iter().flat_map(of_width)
    }

    /// True if `to` of row `row` depends on `from` by the definition of the pattern, for rows of
    /// unlimited width.
    fn depends(graph: &Graph, row: usize, from: usize, to: usize) -> bool {
        let (from, to) = (from as i64, to as i64);
        match graph.pattern {
            Pattern::Trivial => false,
            Pattern::Stencil => [to - 1, to, to + 1].contains(&from),
            Pattern::Fft => {
                let mut distances = 0;
                while (1 << distances) < graph.width {
                    distances += 1;
                }
                let k = if distances == 0 { 0 } else { (row - 1) % distances };
                [to - (1 << k), to, to + (1 << k)].contains(&from)
            }
            Pattern::Tree => 2 * from == to || 2 * from + 1 == to,
            Pattern::AllToAll => true,
        }
    }

    #[test]
    fn dependencies_are_those_of_the_definition() {
        for graph in graphs() {
            for row in 1..ROWS {
                for to in 0..graph.width_at(row) {
                    let expected: Vec<usize> = (0..graph.width_at(row - 1))
                        .filter(|from| depends(&graph, row, *from, to))
                        .collect();
                    assert_eq!(graph.dependencies(row, to), expected, "{graph:?} {row} {to}");
                }
            }
            assert!(graph.dependencies(0, 0).is_empty());
        }
    }

    #[test]
    fn tree_doubles_up_to_the_width() {
        let tree = |width| Graph { pattern: Pattern::Tree, width, rows: 6 };
        let widths = |width| (0..6).map(|row| tree(width).width_at(row)).collect::<Vec<_>>();
        assert_eq!(widths(1), [1; 6]);
        assert_eq!(widths(5), [1, 2, 4, 5, 5, 5]);
        assert_eq!(widths(8), [1, 2, 4, 8, 8, 8]);
        assert_eq!(tree(8).tasks(&(0..8)), 31);
        assert_eq!((tree(8).tasks(&(0..1)), tree(8).tasks(&(4..8))), (6, 12));
    }

    #[test]
    fn tasks_of_all_owners_add_up() {
        for graph in graphs() {
            let own = |point| graph.tasks(&(point..point + 1));
            let all: usize = (0..ROWS).map(|row| graph.width_at(row)).sum();
            assert_eq!((0..graph.width).map(own).sum::<usize>(), all, "{graph:?}");
        }
    }
}
