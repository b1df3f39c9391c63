//! [`Tree`] for the containers of the standard library.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use super::structure::{build, visit};
use super::{Leaf, Name, Path, Structure, Tree, TreeError};

/// A tree without leaves, for a kernel without inputs or outputs. Unlike `()`, it names its leaf
/// type.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Empty<L>(PhantomData<fn() -> L>);

impl<L> Empty<L> {
    /// Creates the tree without leaves.
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<L> Default for Empty<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: Leaf> Tree for Empty<L> {
    type Leaf = L;
    type With<M: Leaf> = Empty<M>;

    fn structure(&self) -> Structure {
        Structure::sequence([])
    }

    fn visit<'a>(&'a self, _path: &mut Path, _f: &mut dyn FnMut(&Path, &'a L)) {}

    fn each_leaf<'a>(&'a self, _f: &mut dyn FnMut(&'a L)) {}

    fn try_map<M: Leaf, E>(self, _f: &mut dyn FnMut(L) -> Result<M, E>) -> Result<Empty<M>, E> {
        Ok(Empty::new())
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        _f: &mut dyn FnMut(&L) -> Result<M, E>,
    ) -> Result<Empty<M>, E> {
        Ok(Empty::new())
    }

    fn build(
        structure: &Structure,
        _leaves: &mut dyn Iterator<Item = L>,
    ) -> Result<Self, TreeError> {
        structure.elements(Some(0)).map(|_| Self::new())
    }
}

/// Returns true if this is the structure of a sequence with these branches.
fn is_sequence<T: Tree>(sequence: &[T], structure: &Structure) -> bool {
    let Structure::Node(branches) = structure else {
        return false;
    };
    let fits = |(i, (branch, (name, structure))): (usize, (&T, &(Name, Structure)))| {
        name.is_index(i) && branch.has_structure(structure)
    };
    branches.len() == sequence.len() && sequence.iter().zip(branches.iter()).enumerate().all(fits)
}

fn visit_sequence<'a, T: Tree>(
    sequence: &'a [T],
    path: &mut Path,
    f: &mut dyn FnMut(&Path, &'a T::Leaf),
) {
    for (i, branch) in sequence.iter().enumerate() {
        visit(Name::Index(i), branch, path, f);
    }
}

impl<T: Tree> Tree for Vec<T> {
    type Leaf = T::Leaf;
    type With<M: Leaf> = Vec<T::With<M>>;

    fn structure(&self) -> Structure {
        Structure::sequence(self.iter().map(T::structure))
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        is_sequence(self, structure)
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a T::Leaf)) {
        visit_sequence(self, path, f);
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a T::Leaf)) {
        self.iter().for_each(|branch| branch.each_leaf(f));
    }

    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.into_iter().map(|branch| branch.try_map(f)).collect()
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.iter().map(|branch| branch.try_map_ref(f)).collect()
    }

    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = T::Leaf>,
    ) -> Result<Self, TreeError> {
        let branches = structure.elements(None)?;
        let mut built = Self::with_capacity(branches.len());
        for branch in branches {
            built.push(build(branch, leaves)?);
        }
        Ok(built)
    }
}

impl<T: Tree, const N: usize> Tree for [T; N] {
    type Leaf = T::Leaf;
    type With<M: Leaf> = [T::With<M>; N];

    fn structure(&self) -> Structure {
        Structure::sequence(self.iter().map(T::structure))
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        is_sequence(self, structure)
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a T::Leaf)) {
        visit_sequence(self, path, f);
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a T::Leaf)) {
        self.iter().for_each(|branch| branch.each_leaf(f));
    }

    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.into_iter()
            .map(|branch| branch.try_map(f))
            .collect::<Result<Vec<_>, E>>()
            .map(array)
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.iter()
            .map(|branch| branch.try_map_ref(f))
            .collect::<Result<Vec<_>, E>>()
            .map(array)
    }

    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = T::Leaf>,
    ) -> Result<Self, TreeError> {
        let branches = structure.elements(Some(N))?;
        let built = branches.iter().map(|branch| build(branch, leaves));
        built.collect::<Result<Vec<_>, _>>().map(array)
    }
}

/// Converts a vector of `N` elements to an array. Panics if the vector has another length.
fn array<T, const N: usize>(elements: Vec<T>) -> [T; N] {
    let found = elements.len();
    elements
        .try_into()
        .unwrap_or_else(|_| unreachable!("{found} elements made of {N}"))
}

/// `None` has no leaves. `Some` has the leaves of its content, with no extra step in their paths.
/// Therefore [`Tree::build`] cannot tell a nested option from a single one.
impl<T: Tree> Tree for Option<T> {
    type Leaf = T::Leaf;
    type With<M: Leaf> = Option<T::With<M>>;

    fn structure(&self) -> Structure {
        self.as_ref().map_or(Structure::Absent, T::structure)
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        self.as_ref()
            .map_or(*structure == Structure::Absent, |branch| {
                branch.has_structure(structure)
            })
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a T::Leaf)) {
        if let Some(branch) = self {
            branch.visit(path, f);
        }
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a T::Leaf)) {
        self.iter().for_each(|branch| branch.each_leaf(f));
    }

    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.map(|branch| branch.try_map(f)).transpose()
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.as_ref()
            .map(|branch| branch.try_map_ref(f))
            .transpose()
    }

    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = T::Leaf>,
    ) -> Result<Self, TreeError> {
        match structure {
            Structure::Absent => Ok(None),
            present => T::build(present, leaves).map(Some),
        }
    }
}

/// The branches are named by the map's keys. Leaves come in ascending order of the keys.
impl<T: Tree> Tree for BTreeMap<String, T> {
    type Leaf = T::Leaf;
    type With<M: Leaf> = BTreeMap<String, T::With<M>>;

    fn structure(&self) -> Structure {
        Structure::node(
            self.iter()
                .map(|(key, branch)| (Name::Key(key.clone()), branch.structure())),
        )
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        let Structure::Node(branches) = structure else {
            return false;
        };
        let fits = |((key, branch), (name, structure)): ((&String, &T), &(Name, Structure))| {
            name.is(key) && branch.has_structure(structure)
        };
        branches.len() == self.len() && self.iter().zip(branches.iter()).all(fits)
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a T::Leaf)) {
        for (key, branch) in self {
            visit(Name::Key(key.clone()), branch, path, f);
        }
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a T::Leaf)) {
        self.values().for_each(|branch| branch.each_leaf(f));
    }

    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.into_iter()
            .map(|(key, branch)| Ok((key, branch.try_map(f)?)))
            .collect()
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&T::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E> {
        self.iter()
            .map(|(key, branch)| Ok((key.clone(), branch.try_map_ref(f)?)))
            .collect()
    }

    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = T::Leaf>,
    ) -> Result<Self, TreeError> {
        let Structure::Node(branches) = structure else {
            return Err(structure.misfit_text("a map".to_owned()));
        };
        let built = branches
            .iter()
            .map(|branch| Ok((branch.0.text().into_owned(), build(branch, leaves)?)));
        built.collect()
    }
}

macro_rules! tuples {
    ($(($count:literal: $first:ident $zero:tt $(, $rest:ident $index:tt)*))*) => {$(
        impl<$first: Tree $(, $rest: Tree<Leaf = $first::Leaf>)*> Tree for ($first, $($rest,)*) {
            type Leaf = $first::Leaf;
            type With<Q: Leaf> = ($first::With<Q>, $($rest::With<Q>,)*);

            fn structure(&self) -> Structure {
                Structure::sequence([self.$zero.structure() $(, self.$index.structure())*])
            }

            fn has_structure(&self, structure: &Structure) -> bool {
                let Structure::Node(branches) = structure else { return false };
                let fits = |i: usize| branches[i].0.is_index(i);
                branches.len() == $count
                    && fits($zero) && self.$zero.has_structure(&branches[$zero].1)
                    $(&& fits($index) && self.$index.has_structure(&branches[$index].1))*
            }

            fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a Self::Leaf)) {
                visit(Name::Index($zero), &self.$zero, path, f);
                $(visit(Name::Index($index), &self.$index, path, f);)*
            }

            fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a Self::Leaf)) {
                self.$zero.each_leaf(f);
                $(self.$index.each_leaf(f);)*
            }

            fn try_map<Q: Leaf, X>(
                self,
                f: &mut dyn FnMut(Self::Leaf) -> Result<Q, X>,
            ) -> Result<Self::With<Q>, X> {
                Ok((self.$zero.try_map(f)?, $(self.$index.try_map(f)?,)*))
            }

            fn try_map_ref<Q: Leaf, X>(
                &self,
                f: &mut dyn FnMut(&Self::Leaf) -> Result<Q, X>,
            ) -> Result<Self::With<Q>, X> {
                Ok((self.$zero.try_map_ref(f)?, $(self.$index.try_map_ref(f)?,)*))
            }

            fn build(
                structure: &Structure,
                leaves: &mut dyn Iterator<Item = Self::Leaf>,
            ) -> Result<Self, TreeError> {
                let branches = structure.elements(Some($count))?;
                Ok((
                    build(&branches[$zero], leaves)?,
                    $(build(&branches[$index], leaves)?,)*
                ))
            }
        }
    )*};
}

tuples! {
    (1: A 0)
    (2: A 0, B 1)
    (3: A 0, B 1, C 2)
    (4: A 0, B 1, C 2, D 3)
    (5: A 0, B 1, C 2, D 3, E 4)
    (6: A 0, B 1, C 2, D 3, E 4, F 5)
    (7: A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (8: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
    (9: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
    (10: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9)
    (11: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10)
    (12: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that mapping a tree with the identity returns an equal tree. Asserts the same for
    /// rebuilding it from its structure and leaves.
    fn round_trip<T>(tree: T)
    where
        T: Tree<Leaf = u64, With<u64> = T> + Clone + std::fmt::Debug + PartialEq,
    {
        assert_eq!(tree.map_ref(&mut |leaf| *leaf), tree);
        assert_eq!(tree.clone().map(&mut |leaf| leaf), tree);
        let leaves: Vec<u64> = tree.leaves().into_iter().copied().collect();
        assert_eq!(tree.clone().into_leaves(), leaves);
        assert_eq!(T::from_leaves(&tree.structure(), leaves), Ok(tree));
    }

    #[test]
    fn every_container_comes_back() {
        round_trip(5);
        round_trip((1, vec![2, 3], [[4, 5], [6, 7]], (8,)));
        round_trip((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12));
        round_trip(vec![Some(1), None, Some(3)]);
        round_trip(BTreeMap::from([
            ("b".to_owned(), vec![1]),
            ("a".to_owned(), vec![]),
        ]));
        round_trip(Empty::<u64>::new());
        round_trip(Some(Vec::<u64>::new()));
        round_trip(None::<Vec<u64>>);
        round_trip((Empty::new(), 1));
    }

    #[test]
    fn maps_need_names_and_sequences_numbers() {
        let error = BTreeMap::<String, u64>::from_leaves(&Structure::Leaf, [1]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "at the root: expected a map, found a leaf"
        );
        let named = Structure::node([(Name::Field("w"), Structure::Leaf)]);
        assert!(Vec::<u64>::from_leaves(&named, [1]).is_err());
        let map = BTreeMap::<String, u64>::from_leaves(&named, [1]).unwrap();
        assert_eq!(map["w"], 1);
    }
}
