//! Prefixes: values given once for whole branches of a tree.

use std::collections::BTreeMap;

use super::{Leaf, Name, Path, Structure, Tree, TreeError};

/// The upper part of a tree. Each leaf stands for everything below it: one sharding for all arrays
/// of a layer, or for all arrays at once.
///
/// `from` makes a prefix from a leaf, a reference to one, or a struct that derives
/// [`Tree`](trait@Tree). Tuples, vectors, arrays and maps of these convert too.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PrefixTree<L> {
    /// One value for every leaf at or below this position in the tree.
    Leaf(L),
    /// Each branch at this position as (name, prefix).
    Node(Vec<(Name, PrefixTree<L>)>),
}

impl<L: Leaf + Clone> PrefixTree<L> {
    /// Creates the prefix that has the structure of `tree` and clones of its leaves.
    pub fn of(tree: &impl Tree<Leaf = L>) -> Self {
        Self::of_structure(&tree.structure(), &mut tree.leaves().into_iter())
    }

    /// Returns one value for each leaf of a tree of `structure`, in the order of the leaves. A leaf
    /// of the prefix is cloned for all leaves of the tree below it.
    ///
    /// # Errors
    ///
    /// If this is not a prefix of `structure`. The error has the path of the first mismatch.
    pub fn broadcast(&self, structure: &Structure) -> Result<Vec<L>, TreeError> {
        let mut leaves = Vec::new();
        self.add_leaves(structure, &mut Path::default(), &mut leaves)?;
        Ok(leaves)
    }

    fn of_structure<'a>(structure: &Structure, leaves: &mut impl Iterator<Item = &'a L>) -> Self
    where
        L: 'a,
    {
        match structure {
            Structure::Leaf => Self::Leaf(
                leaves
                    .next()
                    .expect("a tree's structure has its leaves")
                    .clone(),
            ),
            Structure::Absent => Self::Node(Vec::new()),
            Structure::Node(branches) => Self::Node(
                branches
                    .iter()
                    .map(|(name, branch)| (name.clone(), Self::of_structure(branch, leaves)))
                    .collect(),
            ),
        }
    }

    fn add_leaves(
        &self,
        structure: &Structure,
        path: &mut Path,
        leaves: &mut Vec<L>,
    ) -> Result<(), TreeError> {
        match (self, structure) {
            (Self::Leaf(leaf), _) => {
                leaves.extend(std::iter::repeat_n(leaf, structure.leaves()).cloned());
                Ok(())
            }
            (Self::Node(own), Structure::Node(branches)) if own.len() == branches.len() => {
                for (i, (name, branch)) in branches.iter().enumerate() {
                    // Usually at the same index; a map may have another order.
                    let named = |(own, _): &&(Name, Self)| own == name;
                    let found = own.get(i).filter(named).or_else(|| own.iter().find(named));
                    let Some((_, prefix)) = found else {
                        return Err(self.misfit(structure, path));
                    };
                    path.push(name.clone());
                    prefix.add_leaves(branch, path, leaves)?;
                    path.pop();
                }
                Ok(())
            }
            (Self::Node(own), Structure::Absent) if own.is_empty() => Ok(()),
            _ => Err(self.misfit(structure, path)),
        }
    }

    fn misfit(&self, structure: &Structure, path: &Path) -> TreeError {
        let found = match self {
            Self::Leaf(_) => "a leaf".to_owned(),
            Self::Node(own) => {
                let names: Vec<_> = own.iter().map(|(name, _)| name.label()).collect();
                format!("[{}]", names.join(", "))
            }
        };
        TreeError::Prefix {
            path: path.to_string(),
            expected: structure.to_string(),
            found,
        }
    }
}

impl<L: Leaf> From<L> for PrefixTree<L> {
    fn from(leaf: L) -> Self {
        Self::Leaf(leaf)
    }
}

impl<L: Leaf + Clone> From<&L> for PrefixTree<L> {
    fn from(leaf: &L) -> Self {
        Self::Leaf(leaf.clone())
    }
}

impl<L, T: Into<PrefixTree<L>>> From<Vec<T>> for PrefixTree<L> {
    fn from(branches: Vec<T>) -> Self {
        numbered(branches.into_iter().map(T::into))
    }
}

impl<L, T: Into<PrefixTree<L>>, const N: usize> From<[T; N]> for PrefixTree<L> {
    fn from(branches: [T; N]) -> Self {
        numbered(branches.into_iter().map(T::into))
    }
}

impl<L, T: Into<PrefixTree<L>>> From<BTreeMap<String, T>> for PrefixTree<L> {
    fn from(branches: BTreeMap<String, T>) -> Self {
        Self::Node(
            branches
                .into_iter()
                .map(|(key, branch)| (Name::Key(key), branch.into()))
                .collect(),
        )
    }
}

fn numbered<L>(branches: impl IntoIterator<Item = PrefixTree<L>>) -> PrefixTree<L> {
    let branches = branches.into_iter().enumerate();
    PrefixTree::Node(
        branches
            .map(|(i, branch)| (Name::Index(i), branch))
            .collect(),
    )
}

macro_rules! from_tuples {
    ($(($($name:ident $index:tt),+))*) => {$(
        impl<Q, $($name: Into<PrefixTree<Q>>),+> From<($($name,)+)> for PrefixTree<Q> {
            fn from(branches: ($($name,)+)) -> Self {
                numbered([$(branches.$index.into()),+])
            }
        }
    )*};
}

from_tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;
    use crate::topology::DeviceId;

    #[derive(Tree, Clone)]
    struct Layer<L> {
        w: L,
        bias: Option<L>,
    }

    fn tree() -> (Vec<Layer<u64>>, u64) {
        (
            vec![
                Layer {
                    w: 1,
                    bias: Some(2),
                },
                Layer { w: 3, bias: None },
            ],
            4,
        )
    }

    fn broadcast(prefix: impl Into<PrefixTree<usize>>) -> Result<Vec<usize>, TreeError> {
        prefix.into().broadcast(&tree().structure())
    }

    #[test]
    fn a_leaf_stands_for_everything_below() {
        assert_eq!(broadcast(7), Ok(vec![7; 4]));
        assert_eq!(broadcast((7, 8)), Ok(vec![7, 7, 7, 8]));
        assert_eq!(broadcast((vec![5, 6], 8)), Ok(vec![5, 5, 6, 8]));
        let layer = Layer {
            w: 5,
            bias: Some(6),
        };
        assert_eq!(
            broadcast(([PrefixTree::from(&layer), 7.into()], 8)),
            Ok(vec![5, 6, 7, 8])
        );
        let by_name = BTreeMap::from([("bias".to_owned(), 6), ("w".to_owned(), 5)]);
        assert_eq!(
            broadcast(([by_name.into(), PrefixTree::from(7)], 8)),
            Ok(vec![5, 6, 7, 8])
        );
    }

    #[test]
    fn a_tree_is_a_prefix_of_itself() {
        let tree = tree();
        let all = PrefixTree::of(&tree).broadcast(&tree.structure());
        assert_eq!(all, Ok(vec![1, 2, 3, 4]));
    }

    #[test]
    fn misfits_name_the_place_and_both_sides() {
        let text = |prefix: PrefixTree<usize>| broadcast(prefix).unwrap_err().to_string();
        assert_eq!(
            text((1, 2, 3).into()),
            "not a prefix: at the root the tree has [0, 1], the prefix [0, 1, 2]"
        );
        assert_eq!(
            text((1, [2]).into()),
            "not a prefix: at `1` the tree has a leaf, the prefix [0]"
        );
        let wrong = BTreeMap::from([("w".to_owned(), 1), ("scale".to_owned(), 2)]);
        assert_eq!(
            text(([PrefixTree::from(wrong), 1.into()], 2).into()),
            "not a prefix: at `0/0` the tree has [w, bias], the prefix [scale, w]"
        );
        let absent: Layer<usize> = Layer { w: 1, bias: None };
        assert_eq!(
            text((vec![absent.clone(), absent], 2).into()),
            "not a prefix: at `0/0/bias` the tree has a leaf, the prefix []"
        );
    }

    #[test]
    fn list_is_no_prefix_of_a_map_with_the_same_names() {
        let keys = ["0", "1"].map(str::to_owned);
        let map = BTreeMap::from(keys.clone().map(|key| (key, 1u64)));
        let list = PrefixTree::from([7usize, 8]);
        let error = list.broadcast(&map.structure()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "not a prefix: at the root the tree has [\"0\", \"1\"], the prefix [0, 1]"
        );
        let prefix = PrefixTree::from(BTreeMap::from(keys.map(|key| (key, 7usize))));
        assert_eq!(prefix.broadcast(&map.structure()), Ok(vec![7, 7]));
        assert!(prefix.broadcast(&[1u64, 2].structure()).is_err());
        assert_ne!(map.structure(), [1u64, 2].structure());
    }

    #[test]
    fn values_for_absent_branches_are_not_used() {
        let present = Layer {
            w: 1,
            bias: Some(2),
        };
        assert_eq!(
            broadcast((vec![present.clone(), present], 3)),
            Ok(vec![1, 2, 1, 3])
        );
    }

    #[test]
    fn shardings_are_given_by_value_or_reference() {
        let sharding = Sharding::single_device(DeviceId(1));
        let take =
            |prefix: PrefixTree<Sharding>| prefix.broadcast(&(1u64, 2u64).structure()).unwrap();
        assert_eq!(take((&sharding).into()), take(sharding.clone().into()));
        assert_eq!(
            take((&sharding, &sharding).into()),
            [sharding.clone(), sharding]
        );
    }
}
