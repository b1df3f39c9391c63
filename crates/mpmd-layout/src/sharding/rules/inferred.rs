//! The result of a strategy: shardings of leaves, bytes per device, and a table of them.

use std::fmt;

use super::error::RulesError;
use crate::aval::ShapedArray;
use crate::sharding::{Sharding, Spec, SpecEntry};
use crate::topology::Mesh;
use mpmd_base::bytes_text;

/// Maximum width of a column of the displayed table, in characters. A longer name widens only its
/// own row.
const WIDEST: usize = 200;

/// Maximum number of leaves that [`RulesError::OverBudget`] lists.
const LARGEST: usize = 5;

/// The shardings that a strategy gives to leaves. `Display` writes them as a table.
#[derive(Clone, Debug)]
pub struct InferredShardings {
    mesh: Mesh,
    leaves: Vec<InferredLeaf>,
    patterns: Vec<String>,
    budget: Option<u64>,
}

/// One leaf and its sharding.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InferredLeaf {
    /// The leaf's name.
    pub name: String,
    /// The leaf's shape and dtype.
    pub aval: ShapedArray,
    /// The axes that divide each dimension: one entry for every dimension.
    pub spec: Spec,
    /// The index of the rule that applies to the leaf, or `None` if no pattern matches the leaf's
    /// name.
    pub rule: Option<usize>,
    /// Bytes that the leaf takes on each device. If a dimension does not divide evenly, its parts
    /// are rounded up.
    pub bytes_per_device: u64,
    /// True if some dimension does not divide evenly. Then [`Sharding::layout`] fails for the
    /// leaf's shape.
    pub uneven: bool,
    /// Remarks on the leaf, for example that `fsdp` finds no dimension to divide, or that a
    /// dimension does not divide evenly.
    pub notes: Vec<String>,
}

impl InferredShardings {
    pub(super) fn new(mesh: &Mesh, leaves: Vec<InferredLeaf>, patterns: Vec<String>) -> Self {
        Self {
            mesh: mesh.clone(),
            leaves,
            patterns,
            budget: None,
        }
    }

    /// Returns the mesh over which the leaves are divided.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the leaves with their specs, in the order given to `infer`.
    pub fn leaves(&self) -> &[InferredLeaf] {
        &self.leaves
    }

    /// Returns the sharding of each leaf, in the order given to `infer`. All are in device memory.
    pub fn shardings(&self) -> impl Iterator<Item = Sharding> {
        self.leaves
            .iter()
            .map(|leaf| self.mesh.sharding(leaf.spec.clone()))
    }

    /// Returns the bytes that all leaves together need on each device. Saturates at `u64::MAX`.
    pub fn bytes_per_device(&self) -> u64 {
        self.leaves.iter().fold(0, |sum: u64, leaf| {
            sum.saturating_add(leaf.bytes_per_device)
        })
    }

    /// Returns the indices of the rules that apply to no leaf, ascending.
    pub fn idle_rules(&self) -> Vec<usize> {
        let idle = |rule: &usize| self.leaves.iter().all(|leaf| leaf.rule != Some(*rule));
        (0..self.patterns.len()).filter(idle).collect()
    }

    /// Checks that the leaves together need at most `budget` bytes on each device. Returns the same
    /// shardings; their table then also shows the budget.
    ///
    /// # Errors
    ///
    /// If the leaves need more bytes. The error lists the largest leaves.
    pub fn within(mut self, budget: u64) -> Result<Self, RulesError> {
        let needed = self.bytes_per_device();
        if needed <= budget {
            self.budget = Some(budget);
            return Ok(self);
        }

        let mut largest: Vec<(String, u64)> = self
            .leaves
            .iter()
            .map(|leaf| (leaf.name.clone(), leaf.bytes_per_device))
            .collect();
        // The sort is stable: equal leaves stay in the order given.
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        largest.truncate(LARGEST);

        Err(RulesError::OverBudget {
            needed,
            budget,
            largest,
            leaves: self.leaves.len(),
        })
    }
}

impl InferredLeaf {
    /// Creates a leaf and computes its bytes per device. `entries` has one entry for each
    /// dimension. `mesh` must have all axes of the entries, and each axis may be used once.
    pub(super) fn new(
        name: String,
        aval: ShapedArray,
        entries: Vec<SpecEntry>,
        rule: Option<usize>,
        mut notes: Vec<String>,
        mesh: &Mesh,
    ) -> Self {
        let mut bytes_per_device = aval.dtype().size() as u64;
        let mut uneven = false;

        for (dim, (size, entry)) in aval.shape().iter().zip(&entries).enumerate() {
            let parts: usize = entry
                .axes()
                .iter()
                .filter_map(|axis| mesh.axis_size(axis).ok())
                .product();
            if !size.is_multiple_of(parts) {
                uneven = true;
                notes.push(format!(
                    "dimension {dim} of {size} does not divide evenly by {parts} ({entry})"
                ));
            }
            bytes_per_device *= size.div_ceil(parts) as u64;
        }

        Self {
            name,
            aval,
            spec: Spec::new(entries),
            rule,
            bytes_per_device,
            uneven,
            notes,
        }
    }
}

impl fmt::Display for InferredShardings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![["leaf", "array", "spec", "per device", "rule", ""].map(str::to_owned)];
        rows.extend(self.leaves.iter().map(|leaf| self.row(leaf)));

        let all: u64 = self
            .leaves
            .iter()
            .fold(0, |sum, leaf| sum.saturating_add(leaf.aval.bytes() as u64));
        let budget = self.budget.map_or(String::new(), |budget| {
            format!("of {} allowed", bytes_text(budget))
        });
        let needed = bytes_text(self.bytes_per_device());
        rows.push([
            "total".to_owned(),
            bytes_text(all),
            String::new(),
            needed,
            budget,
            String::new(),
        ]);

        let mut widths = [0; 6];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count()).min(WIDEST);
            }
        }

        for (i, row) in rows.iter().enumerate() {
            let cell = |(column, (cell, width)): (usize, (&String, &usize))| match column {
                // Numbers are right-aligned.
                3 => format!("{cell:>width$}"),
                _ => format!("{cell:<width$}"),
            };
            let line: Vec<String> = row.iter().zip(&widths).enumerate().map(cell).collect();
            if i > 0 {
                f.write_str("\n")?;
            }
            f.write_str(line.join("  ").trim_end())?;
        }

        for rule in self.idle_rules() {
            write!(
                f,
                "\nrule {rule} ({:?}) counts for no leaf",
                self.patterns[rule]
            )?;
        }
        Ok(())
    }
}

impl InferredShardings {
    fn row(&self, leaf: &InferredLeaf) -> [String; 6] {
        let name = if leaf.name.is_empty() {
            "(root)".to_owned()
        } else {
            leaf.name.clone()
        };
        let rule = leaf.rule.map_or("none".to_owned(), |rule| {
            format!("{rule} {:?}", self.patterns[rule])
        });

        let aval = leaf.aval.to_string();
        let spec = leaf.spec.to_string();
        [
            name,
            aval,
            spec,
            bytes_text(leaf.bytes_per_device),
            rule,
            leaf.notes.join("; "),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ErrorKind, Registry, Strategy, infer};
    use super::*;
    use crate::aval::{f32s, i32s};
    use crate::topology::DeviceId;

    fn inferred() -> InferredShardings {
        let mesh = Mesh::new(&[("data", 8)], (0..8).map(DeviceId).collect()).unwrap();
        let rules = [
            ("bias|step", "shard_dim('data', 0, True)"),
            ("x", "replicate"),
            (".*w.*", "fsdp('data')"),
        ];
        let strategy = Strategy::parse(&rules, &Registry::default()).unwrap();
        let leaves = [
            ("bias", f32s([15])),
            ("w", f32s([1024, 4096])),
            ("odd_w", f32s([2049, 1023])),
            ("rest", f32s([])),
            ("step", i32s([])),
        ];
        infer(
            &leaves.map(|(name, aval)| (name.to_owned(), aval)),
            &strategy,
            &mesh,
        )
        .unwrap()
    }

    #[test]
    fn the_table_shows_every_leaf_and_the_total() {
        let expected = concat!(
            r#"
leaf   array           spec           per device  rule
bias   f32[15]         P(data)               8 B  0 "bias|step"        dimension 0 "#,
            r#"of 15 does not divide evenly by 8 (data)
w      f32[1024,4096]  P(None, data)     2.0 MiB  2 ".*w.*"
odd_w  f32[2049,1023]  P(None, None)     8.0 MiB  2 ".*w.*"            `fsdp("#,
            r#"'data')` fits no dimension: none that is still whole divides evenly by 8 (data)
rest   f32[]           P()                   4 B  none
step   i32[]           P()                   4 B  0 "bias|step"        `shard_dim("#,
            r#"'data', 0, True)` does nothing: the leaf has 0 dimensions, and the absolute "#,
            r#"value of `dim` must be below that
total  24.0 MiB                         10.0 MiB  of 16.0 MiB allowed
rule 1 ("x") counts for no leaf"#
        );
        let table = inferred().within(16 << 20).unwrap().to_string();
        assert_eq!(table, expected.trim_start(), "\n{table}");
    }

    #[test]
    fn the_budget_is_checked_to_the_byte() {
        let inferred = inferred();
        let needed = inferred.bytes_per_device();
        assert_eq!(needed, 8 + (2 << 20) + 2049 * 1023 * 4 + 4 + 4);
        assert!(inferred.clone().within(needed).is_ok());
        let over = inferred.within(needed - 1).unwrap_err();
        assert_eq!(over.kind(), ErrorKind::Value);
        assert_eq!(
            over.to_string(),
            format!(
                "the leaves need {needed} bytes of each device, the budget is {}; \
                 largest: `odd_w` 8384508, `w` 2097152, `bias` 8, `rest` 4, `step` 4",
                needed - 1
            )
        );
    }

    #[test]
    fn an_uneven_leaf_has_a_sharding_but_no_layout() {
        let inferred = inferred();
        let shardings: Vec<Sharding> = inferred.shardings().collect();
        for (leaf, sharding) in inferred.leaves().iter().zip(&shardings) {
            assert_eq!(
                sharding.layout(leaf.aval.shape()).is_err(),
                leaf.uneven,
                "{}",
                leaf.name
            );
        }
        assert!(inferred.leaves()[0].uneven);
        assert_eq!(inferred.idle_rules(), [1]);
    }
}
