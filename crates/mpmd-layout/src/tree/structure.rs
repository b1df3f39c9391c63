//! The structure of a tree, without its leaves.

use std::fmt;
use std::sync::Arc;

use super::{Name, Path, Tree, TreeError};

/// The names of a tree's branches, down to the leaves.
///
/// Trees of different types have equal structures if the names are the same, for example a pair and
/// a vector of two. Clones share their branches, and comparing them takes no time.
#[derive(Clone, Debug, Eq)]
pub enum Structure {
    /// The tree is a leaf.
    Leaf,
    /// The tree is an option that is `None`: it has no leaves.
    Absent,
    /// The (name, structure) of each branch of the tree, in order; possibly none.
    Node(Arc<[(Name, Structure)]>),
}

impl PartialEq for Structure {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Leaf, Self::Leaf) | (Self::Absent, Self::Absent) => true,
            (Self::Node(own), Self::Node(others)) => Arc::ptr_eq(own, others) || own == others,
            _ => false,
        }
    }
}

impl Structure {
    /// Creates a node with these (name, structure) branches.
    pub fn node(branches: impl IntoIterator<Item = (Name, Self)>) -> Self {
        Self::Node(branches.into_iter().collect())
    }

    /// Creates a node with branches that are named 0, 1, 2 and so on.
    pub fn sequence(branches: impl IntoIterator<Item = Self>) -> Self {
        Self::node(
            branches
                .into_iter()
                .enumerate()
                .map(|(i, branch)| (Name::Index(i), branch)),
        )
    }

    /// Returns the number of leaves.
    pub fn leaves(&self) -> usize {
        match self {
            Self::Leaf => 1,
            Self::Absent => 0,
            Self::Node(branches) => branches.iter().map(|(_, branch)| branch.leaves()).sum(),
        }
    }

    /// Returns the path of each leaf (`blocks/3/w`), in the order of the leaves.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.add_paths(&mut Path::default(), &mut paths);
        paths
    }

    /// Returns the indices of the leaves at or below `path`, such as `blocks/3`. The root has the
    /// path `""`. A name that contains `/` is one name.
    pub fn leaves_at(&self, path: &str) -> Vec<usize> {
        let mut found = Vec::new();
        self.add_leaves_at(Some(path).filter(|path| !path.is_empty()), 0, &mut found);
        found
    }

    /// Adds the indices of the leaves at or below `path`, or of all leaves if it is `None`. `first`
    /// is the index of the first leaf of this structure.
    fn add_leaves_at(&self, path: Option<&str>, first: usize, found: &mut Vec<usize>) {
        let Some(path) = path else {
            found.extend(first..first + self.leaves());
            return;
        };
        let Self::Node(branches) = self else { return };
        let mut first = first;
        for (name, branch) in branches.iter() {
            let rest = path.strip_prefix(&*name.text());
            match rest.map(|rest| (rest, rest.strip_prefix('/'))) {
                Some(("", _)) => branch.add_leaves_at(None, first, found),
                Some((_, Some(rest))) => branch.add_leaves_at(Some(rest), first, found),
                _ => {}
            }
            first += branch.leaves();
        }
    }

    /// Returns the (name, structure) branches of this node if they are numbered from 0. If `count`
    /// is given, there must be `count` of them. For implementations of [`Tree::build`].
    ///
    /// # Errors
    ///
    /// If this structure has no such branches. The path in the error is the root.
    pub fn elements(&self, count: Option<usize>) -> Result<&[(Name, Self)], TreeError> {
        let numbered = |branches: &[(Name, Self)]| {
            branches
                .iter()
                .enumerate()
                .all(|(i, (name, _))| name.is_index(i))
        };

        match self {
            Self::Node(branches)
                if count.is_none_or(|count| count == branches.len()) && numbered(branches) =>
            {
                Ok(branches)
            }
            _ => Err(match count {
                Some(count) => self.misfit(&Self::sequence((0..count).map(|_| Self::Leaf))),
                None => self.misfit_text("a sequence".to_owned()),
            }),
        }
    }

    /// Returns the (name, structure) branches of this node if their names are `names`, in order.
    /// For implementations of [`Tree::build`].
    ///
    /// # Errors
    ///
    /// If this structure has no such branches. The path in the error is the root.
    pub fn fields(&self, names: &[&'static str]) -> Result<&[(Name, Self)], TreeError> {
        match self {
            Self::Node(branches)
                if branches.len() == names.len()
                    && branches
                        .iter()
                        .zip(names)
                        .all(|((name, _), expected)| name.is(expected)) =>
            {
                Ok(branches)
            }
            _ => Err(self.misfit_text(format!("[{}]", names.join(", ")))),
        }
    }

    /// Creates the error for a tree type that needs the structure `expected` at the root but was
    /// given this structure.
    pub(super) fn misfit(&self, expected: &Self) -> TreeError {
        self.misfit_text(expected.to_string())
    }

    pub(super) fn misfit_text(&self, expected: String) -> TreeError {
        TreeError::Structure {
            path: String::new(),
            expected,
            found: self.to_string(),
        }
    }

    fn add_paths(&self, path: &mut Path, paths: &mut Vec<String>) {
        match self {
            Self::Leaf => paths.push(path.to_string()),
            Self::Absent => {}
            Self::Node(branches) => {
                for (name, branch) in branches.iter() {
                    path.push(name.clone());
                    branch.add_paths(path, paths);
                    path.pop();
                }
            }
        }
    }
}

/// Writes the outermost level only: `a leaf`, `nothing`, or the names of the branches in brackets.
impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaf => f.write_str("a leaf"),
            Self::Absent => f.write_str("nothing"),
            Self::Node(branches) => {
                let names: Vec<_> = branches.iter().map(|(name, _)| name.label()).collect();
                write!(f, "[{}]", names.join(", "))
            }
        }
    }
}

/// Calls `branch.visit` with `name` appended to `path`, and removes `name` again. For
/// implementations of [`Tree::visit`].
pub(super) fn visit<'a, T: Tree>(
    name: Name,
    branch: &'a T,
    path: &mut Path,
    f: &mut dyn FnMut(&Path, &'a T::Leaf),
) {
    path.push(name);
    branch.visit(path, f);
    path.pop();
}

/// Builds a branch from its (name, structure) and the next leaves. For implementations of
/// [`Tree::build`].
#[inline]
pub(super) fn build<T: Tree>(
    (name, structure): &(Name, Structure),
    leaves: &mut dyn Iterator<Item = T::Leaf>,
) -> Result<T, TreeError> {
    T::build(structure, leaves).map_err(|error| error.below(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_compared_by_names_not_by_types() {
        assert_eq!((1u64, 2u64).structure(), vec![1u64, 2].structure());
        assert_eq!((1u64, 2u64).structure(), [1u64, 2].structure());
        assert_ne!(vec![1u64].structure(), 1u64.structure());
        assert_ne!(Vec::<u64>::new().structure(), None::<u64>.structure());
        assert_eq!(Some(1u64).structure(), Structure::Leaf);
    }

    #[test]
    fn sequences_and_fields_are_checked_by_name() {
        let pair = Structure::sequence([Structure::Leaf, Structure::Leaf]);
        assert!(pair.elements(None).is_ok() && pair.elements(Some(2)).is_ok());
        assert!(pair.elements(Some(3)).is_err());
        assert!(pair.fields(&["0", "1"]).is_ok() && pair.fields(&["1", "0"]).is_err());
        let error = Structure::Leaf.elements(None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "at the root: expected a sequence, found a leaf"
        );
    }

    #[test]
    fn leaves_are_found_by_whole_names() {
        let names = ["a", "a/b", "ab", "b"].map(str::to_owned);
        let map = std::collections::BTreeMap::from(names.map(|name| (name, (0u64, 1u64))));
        let structure = map.structure();
        assert_eq!(structure.leaves_at(""), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(structure.leaves_at("a"), [0, 1]);
        assert_eq!(structure.leaves_at("a/b"), [2, 3]);
        assert_eq!(structure.leaves_at("a/1"), [1]);
        assert_eq!(structure.leaves_at("a/b/0"), [2]);
        assert_eq!(structure.leaves_at("a/2"), Vec::<usize>::new());
        assert_eq!(structure.leaves_at("c"), Vec::<usize>::new());
    }
}
