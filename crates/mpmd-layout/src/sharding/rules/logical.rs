//! Logical axes: names for a leaf's dimensions, and rules that map these names to axes of a mesh.

use std::collections::BTreeMap;

use super::error::{OpError, RulesError};
use super::pattern::NamePattern;
use crate::sharding::SpecEntry;

/// The logical names of leaves' dimensions, and ordered rules that map logical names to mesh axes.
/// Empty by default.
///
/// The op `logical_partitioning()` applies the rules, in order, to each leaf whose dimensions have
/// logical names. A rule divides the dimension with its logical name over its axes. The rule is
/// skipped if the leaf already uses one of the axes, or if an earlier rule or op decided the
/// dimension. Dimensions without a matching rule stay whole. Leaves without logical names do not
/// change.
///
/// ```
/// use mpmd_layout::sharding::rules::LogicalAxes;
///
/// let logical = LogicalAxes::default()
///     .leaf("embed", &[Some("vocabulary"), Some("embed")])
///     .pattern("blocks/[0-9]+/mlp/w", &[Some("embed"), Some("mlp")])?
///     .rule("embed", &["fsdp"])
///     .rule("mlp", &["replica"]);
/// # let _ = logical;
/// # Ok::<(), mpmd_layout::sharding::rules::RulesError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct LogicalAxes {
    names: BTreeMap<String, Vec<Option<String>>>,
    /// Names given by pattern, in the order of the calls of [`LogicalAxes::pattern`].
    patterns: Vec<NamedPattern>,
    rules: Vec<LogicalRule>,
}

/// The logical names of the dimensions of all leaves that match a pattern.
#[derive(Clone, Debug)]
struct NamedPattern {
    /// The pattern, which matches whole names of leaves only.
    pattern: NamePattern,
    names: Vec<Option<String>>,
}

/// The mesh axes over which dimensions with a logical name are divided.
#[derive(Clone, Debug)]
struct LogicalRule {
    name: String,
    axes: Vec<String>,
}

impl LogicalAxes {
    /// Gives logical names to the dimensions of the leaf `leaf`; `None` for a dimension without a
    /// logical name. Replaces earlier names of the same leaf. Has no effect if the leaf does not
    /// exist.
    #[must_use]
    pub fn leaf(mut self, leaf: impl Into<String>, names: &[Option<&str>]) -> Self {
        self.names.insert(leaf.into(), owned(names));
        self
    }

    /// Gives logical names to the dimensions of all leaves whose whole name matches `pattern`. The
    /// pattern is a regular expression as in a [`Strategy`](super::Strategy). Names given by
    /// [`leaf`](Self::leaf) win over patterns. If several patterns match, the first one counts.
    ///
    /// # Errors
    ///
    /// If `pattern` is not a regular expression.
    pub fn pattern(mut self, pattern: &str, names: &[Option<&str>]) -> Result<Self, RulesError> {
        let whole = NamePattern::whole(pattern).map_err(|fault| RulesError::BadLogicalPattern {
            pattern: pattern.to_owned(),
            position: fault.position,
            message: fault.message,
        })?;
        self.patterns.push(NamedPattern {
            pattern: whole,
            names: owned(names),
        });
        Ok(self)
    }

    /// Appends a rule that divides dimensions with the logical name `name` over `axes`, major to
    /// minor. If `axes` is empty, the rule keeps these dimensions whole.
    #[must_use]
    pub fn rule(mut self, name: impl Into<String>, axes: &[&str]) -> Self {
        self.rules.push(LogicalRule {
            name: name.into(),
            axes: axes.iter().map(|axis| (*axis).to_owned()).collect(),
        });
        self
    }

    /// Returns the logical names of a leaf's dimensions, or `None` if the leaf has none. Fails if a
    /// pattern with look-around or back references takes too many steps on the leaf's name.
    pub(super) fn names_of(&self, leaf: &str) -> Result<Option<&[Option<String>]>, OpError> {
        if let Some(names) = self.names.get(leaf) {
            return Ok(Some(names));
        }

        for NamedPattern { pattern, names } in &self.patterns {
            let matches = pattern.matches(leaf).map_err(|error| {
                OpError::Refused(format!(
                    "pattern {:?} of logical names: {error}",
                    pattern.as_str()
                ))
            })?;
            if matches {
                return Ok(Some(names));
            }
        }
        Ok(None)
    }

    /// Returns (dimension, axes) for each dimension that the rules divide, in the order of the
    /// rules. Fails if the numbers of names and of dimensions differ, or if a name is used twice.
    pub(super) fn assign(
        &self,
        names: &[Option<String>],
        entries: &[SpecEntry],
    ) -> Result<Vec<(usize, Vec<String>)>, OpError> {
        if names.len() != entries.len() {
            return Err(OpError::LogicalNames {
                names: names.to_vec(),
                ndim: entries.len(),
            });
        }

        for (dim, name) in names.iter().enumerate() {
            if let Some(text) = name
                && names[..dim].contains(name)
            {
                return Err(OpError::DuplicateLogicalName {
                    name: text.clone(),
                    names: names.to_vec(),
                });
            }
        }

        let mut decided: Vec<bool> = entries
            .iter()
            .map(|entry| *entry != SpecEntry::None)
            .collect();
        let mut used: Vec<&String> = entries.iter().flat_map(SpecEntry::axes).collect();
        let mut assigned = Vec::new();

        for LogicalRule { name, axes } in &self.rules {
            let Some(dim) = names.iter().position(|known| known.as_ref() == Some(name)) else {
                continue;
            };
            if decided[dim] || axes.iter().any(|axis| used.contains(&axis)) {
                continue;
            }
            decided[dim] = true;
            used.extend(axes);
            if !axes.is_empty() {
                assigned.push((dim, axes.clone()));
            }
        }

        Ok(assigned)
    }
}

fn owned(names: &[Option<&str>]) -> Vec<Option<String>> {
    names.iter().map(|name| name.map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<Option<String>> {
        names
            .iter()
            .map(|name| Some((*name).to_owned()).filter(|name| name != "-"))
            .collect()
    }

    fn rules(rules: &[(&str, &[&str])]) -> LogicalAxes {
        rules
            .iter()
            .fold(LogicalAxes::default(), |all, (name, axes)| {
                all.rule(*name, axes)
            })
    }

    fn assign(logical: &LogicalAxes, of: &[&str]) -> Vec<(usize, Vec<String>)> {
        logical
            .assign(&names(of), &vec![SpecEntry::None; of.len()])
            .unwrap()
    }

    #[test]
    fn the_first_rule_with_free_axes_decides() {
        let logical = rules(&[
            ("embed", &["fsdp"]),
            ("mlp", &["replica"]),
            ("embed", &["replica"]),
        ]);
        let (fsdp, replica) = (vec!["fsdp".to_owned()], vec!["replica".to_owned()]);
        assert_eq!(
            assign(&logical, &["embed", "mlp"]),
            [(0, fsdp.clone()), (1, replica.clone())]
        );
        assert_eq!(assign(&logical, &["-", "mlp", "-"]), [(1, replica.clone())]);
        assert_eq!(assign(&logical, &["heads"]), []);
        assert_eq!(assign(&LogicalAxes::default(), &["embed"]), []);
        let logical = rules(&[
            ("a", &["fsdp"]),
            ("b", &["fsdp", "replica"]),
            ("b", &["replica"]),
        ]);
        assert_eq!(assign(&logical, &["b", "a"]), [(1, fsdp), (0, replica)]);
    }

    #[test]
    fn a_rule_without_axes_keeps_the_dimension_whole() {
        assert_eq!(assign(&rules(&[("a", &[]), ("a", &["x"])]), &["a"]), []);
    }

    #[test]
    fn earlier_divisions_count_as_decided_and_used() {
        let logical = rules(&[("a", &["x"]), ("b", &["x"]), ("b", &["y"])]);
        let entries = [SpecEntry::from("x"), SpecEntry::None];
        let assigned = logical.assign(&names(&["a", "b"]), &entries).unwrap();
        assert_eq!(assigned, [(1, vec!["y".to_owned()])]);
    }

    #[test]
    fn a_leaf_goes_before_patterns_and_the_first_pattern_counts() {
        let logical = LogicalAxes::default()
            .pattern("a/.*", &[Some("x")])
            .and_then(|all| all.pattern("(a|b)/[0-9]+", &[Some("y")]))
            .unwrap()
            .leaf("a/1", &[None]);
        let of = |leaf| logical.names_of(leaf).unwrap().map(<[_]>::to_vec);
        assert_eq!(of("a/1"), Some(names(&["-"])));
        assert_eq!(
            (of("a/2"), of("b/2")),
            (Some(names(&["x"])), Some(names(&["y"])))
        );
        assert_eq!(
            (of("b/2/c"), of("c")),
            (None, None),
            "patterns match whole names"
        );
        let wrong = LogicalAxes::default()
            .pattern("a)(b", &[])
            .unwrap_err()
            .to_string();
        assert!(
            wrong.starts_with("logical names: pattern \"a)(b\", position 1"),
            "{wrong}"
        );
        let slow = LogicalAxes::default()
            .pattern(r"(?:(x+)*)*\1y", &[])
            .unwrap();
        assert!(
            slow.names_of(&"x".repeat(40))
                .unwrap_err()
                .to_string()
                .contains("logical names")
        );
    }

    #[test]
    fn double_or_mismatched_names_are_refused() {
        let logical = rules(&[]);
        let error = |of: &[&str], ndim| {
            logical
                .assign(&names(of), &vec![SpecEntry::None; ndim])
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(&["a", "-", "a"], 3),
            "logical name `a` comes twice in (a, None, a)"
        );
        assert_eq!(
            error(&["a"], 2),
            "its logical names are (a), but it has 2 dimensions"
        );
        assert!(
            logical
                .assign(&names(&["-", "-"]), &[SpecEntry::None, SpecEntry::None])
                .is_ok()
        );
    }
}
