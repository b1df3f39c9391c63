//! Structures of arrays: tuples, vectors, maps, options and user structs with leaves of one type.
//!
//! A [`Tree`] of arrays has the same structure as the tree of their shapes, of their shardings, or
//! of views of them on one device. [`Tree::With`] is the same structure with other leaves. Leaves
//! have [paths](Path) for messages. A [`PrefixTree`] gives one value for several leaves at once.
//!
//! ```
//! # extern crate mpmd_layout as mpmd;
//! use mpmd_layout::tree::Tree;
//!
//! #[derive(Tree)]
//! struct Mlp<L> {
//!     wa: L,
//!     wb: Vec<L>,
//! }
//!
//! let sizes = Mlp { wa: 3usize, wb: vec![4, 5] };
//! assert_eq!(sizes.structure().paths(), ["wa", "wb/0", "wb/1"]);
//! let doubled: Mlp<f32> = sizes.map_ref(&mut |size| 2.0 * *size as f32);
//! assert_eq!(doubled.leaves(), [&6.0, &8.0, &10.0]);
//! ```

mod containers;
mod path;
mod prefix;
mod structure;

use std::convert::Infallible;

pub use containers::Empty;
/// Implements [`Tree`](trait@Tree) for a struct with one type parameter, the leaf.
///
/// Fields may be leaves (`L`), containers of them (`Vec<L>`, `(L, L)`) and other such structs
/// (`Other<L>`). Leaves come in the order of the fields. The struct and references to it also
/// convert into a [`PrefixTree`].
pub use mpmd_derive::Tree;
pub use path::{Name, Path};
pub use prefix::PrefixTree;
pub use structure::Structure;

/// A type that can be a tree's leaf. Declare it with `impl Leaf for Bias {}`.
///
/// Every leaf is a [`Tree`](trait@Tree) of itself. So a type that is a tree of other leaves cannot
/// be a leaf.
pub trait Leaf: Sized {}

/// A structure of leaves of one type.
///
/// Implemented for leaves, tuples up to 12, `Vec`, `Option`, arrays and `BTreeMap<String, _>`, and
/// by `#[derive(Tree)]`.
///
/// In generic code the compiler does not know that `T::With<M>::With<N>` is `T::With<N>`, though it
/// is. There, take the [`structure`](Self::structure) of one tree and build the other from its
/// leaves: `T::With::<N>::from_leaves(&tree.structure(), leaves)`.
pub trait Tree: Sized {
    /// The type of the leaves.
    type Leaf: Leaf;

    /// The same tree type with leaves of type `M`. `T::With<M>::With<N>` is `T::With<N>`, and
    /// `T::With<T::Leaf>` is `T`.
    type With<M: Leaf>: Tree<Leaf = M>;

    /// Returns the names of the tree's branches, down to the leaves, without the leaves' values.
    fn structure(&self) -> Structure;

    /// True if [`structure`](Self::structure) equals `structure`. Cheaper than creating and
    /// comparing a [`Structure`].
    fn has_structure(&self, structure: &Structure) -> bool {
        self.structure() == *structure
    }

    /// Calls `f` with the path and a reference of every leaf, in order. `path` is the path from the
    /// root to this tree; each leaf's path starts with it. `path` is unchanged afterwards.
    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a Self::Leaf));

    /// Calls `f` with a reference of every leaf, in order. Cheaper than [`visit`](Self::visit).
    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a Self::Leaf)) {
        self.visit(&mut Path::default(), &mut |_, leaf| f(leaf));
    }

    /// Applies `f` to every leaf, in order, and returns the tree of the results.
    ///
    /// # Errors
    ///
    /// Stops at the first leaf for which `f` fails, with its error.
    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(Self::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E>;

    /// Applies `f` to a reference to every leaf, in order, and returns the tree of the results.
    ///
    /// # Errors
    ///
    /// Stops at the first leaf for which `f` fails, with its error.
    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&Self::Leaf) -> Result<M, E>,
    ) -> Result<Self::With<M>, E>;

    /// Builds a tree of `structure` from the next leaves of an iterator. Programs call
    /// [`from_leaves`](Self::from_leaves) instead.
    ///
    /// # Errors
    ///
    /// If no tree of this type has the structure, or the leaves end early. The error's path starts
    /// at this tree; a tree that contains it adds the branch with [`TreeError::below`].
    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = Self::Leaf>,
    ) -> Result<Self, TreeError>;

    /// Applies `f` to every leaf, in order, and returns the tree of the results.
    ///
    /// `Option` and arrays have their own `map`, which takes precedence. For these types, write
    /// `Tree::map(x, f)`.
    fn map<M: Leaf>(self, f: &mut dyn FnMut(Self::Leaf) -> M) -> Self::With<M> {
        let Ok(tree) = self.try_map::<M, Infallible>(&mut |leaf| Ok(f(leaf)));
        tree
    }

    /// Applies `f` to a reference to every leaf, in order, and returns the tree of the results.
    fn map_ref<M: Leaf>(&self, f: &mut dyn FnMut(&Self::Leaf) -> M) -> Self::With<M> {
        let Ok(tree) = self.try_map_ref::<M, Infallible>(&mut |leaf| Ok(f(leaf)));
        tree
    }

    /// Returns references to the leaves, in order.
    fn leaves(&self) -> Vec<&Self::Leaf> {
        let mut leaves = Vec::new();
        self.each_leaf(&mut |leaf| leaves.push(leaf));
        leaves
    }

    /// Returns (path, reference) of each leaf, in order, with paths like `blocks/3/w`. The path of
    /// a tree that is a leaf is empty.
    fn leaves_with_paths(&self) -> Vec<(String, &Self::Leaf)> {
        let mut leaves = Vec::new();
        self.visit(&mut Path::default(), &mut |path, leaf| {
            leaves.push((path.to_string(), leaf))
        });
        leaves
    }

    /// Returns the leaves by value, in order.
    fn into_leaves(self) -> Vec<Self::Leaf> {
        let mut leaves = Vec::new();
        let Ok(_) = self.try_map::<TakenLeaf, Infallible>(&mut |leaf| {
            leaves.push(leaf);
            Ok(TakenLeaf)
        });
        leaves
    }

    /// Builds a tree of `structure` from these leaves, in order.
    ///
    /// # Errors
    ///
    /// If no tree of this type has the structure, or there are more or fewer leaves than the
    /// structure has.
    fn from_leaves(
        structure: &Structure,
        leaves: impl IntoIterator<Item = Self::Leaf>,
    ) -> Result<Self, TreeError> {
        let mut leaves = leaves.into_iter();
        let tree = Self::build(structure, &mut leaves)?;
        match leaves.next() {
            None => Ok(tree),
            Some(_) => Err(TreeError::TooManyLeaves {
                expected: structure.leaves(),
            }),
        }
    }
}

/// The reason that a tree does not match a structure, a prefix or a list of leaves. Always the
/// caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// A tree of the requested type cannot have the given structure.
    #[error("at {}: expected {expected}, found {found}", place(path))]
    Structure {
        /// Path in the tree of the first mismatch; empty at the root.
        path: String,
        /// The structure that the type has at `path`, as text.
        expected: String,
        /// The structure that was given at `path`, as text.
        found: String,
    },
    /// A prefix does not match the structure of a tree.
    #[error(
        "not a prefix: at {} the tree has {expected}, the prefix {found}",
        place(path)
    )]
    Prefix {
        /// Path in the tree of the first mismatch; empty at the root.
        path: String,
        /// The tree's branches at `path`, as text.
        expected: String,
        /// The prefix's branches at `path`, as text.
        found: String,
    },
    /// There are fewer leaves than the structure has.
    #[error("there is no leaf left for {}", place(path))]
    TooFewLeaves {
        /// The path of the first missing leaf; empty at the root.
        path: String,
    },
    /// There are more leaves than the structure has.
    #[error("there are more than the {expected} leaves of the tree")]
    TooManyLeaves {
        /// Number of leaves in the structure.
        expected: usize,
    },
}

impl TreeError {
    /// Converts a branch's error to an error of the tree that contains it: puts the branch's name
    /// in front of the error's path.
    #[must_use]
    pub fn below(mut self, name: &Name) -> Self {
        match &mut self {
            Self::Structure { path, .. }
            | Self::Prefix { path, .. }
            | Self::TooFewLeaves { path } => {
                let separator = if path.is_empty() { "" } else { "/" };
                path.insert_str(0, &format!("{name}{separator}"));
            }
            Self::TooManyLeaves { .. } => {}
        }
        self
    }
}

fn place(path: &str) -> String {
    if path.is_empty() {
        "the root".to_owned()
    } else {
        format!("`{path}`")
    }
}

/// Placeholder that `into_leaves` leaves in a tree for each leaf that it moves out.
struct TakenLeaf;

impl Leaf for TakenLeaf {}

impl<L: Leaf> Tree for L {
    type Leaf = L;
    type With<M: Leaf> = M;

    fn structure(&self) -> Structure {
        Structure::Leaf
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        matches!(structure, Structure::Leaf)
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a L)) {
        f(path, self);
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a L)) {
        f(self);
    }

    fn try_map<M: Leaf, E>(self, f: &mut dyn FnMut(L) -> Result<M, E>) -> Result<M, E> {
        f(self)
    }

    fn try_map_ref<M: Leaf, E>(&self, f: &mut dyn FnMut(&L) -> Result<M, E>) -> Result<M, E> {
        f(self)
    }

    fn build(structure: &Structure, leaves: &mut dyn Iterator<Item = L>) -> Result<L, TreeError> {
        if !matches!(structure, Structure::Leaf) {
            return Err(structure.misfit(&Structure::Leaf));
        }
        leaves.next().ok_or_else(|| TreeError::TooFewLeaves {
            path: String::new(),
        })
    }
}

macro_rules! leaves {
    ($($leaf:ty),*) => { $(impl Leaf for $leaf {})* };
}

leaves!(
    bool, i8, i16, i32, i64, isize, u8, u16, u32, u64, usize, f32, f64, String, &str
);

/// References are leaves too, so a tree can hold references to the leaves of another tree.
impl<L: Leaf> Leaf for &L {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::aval::{ShapedArray, f32s};

    /// A leaf type with a lifetime, like a view of a buffer.
    struct View<'a>(&'a mut f64);

    impl Leaf for View<'_> {}

    #[derive(Tree, Clone, Debug, PartialEq)]
    struct Linear<L> {
        w: L,
        bias: Option<L>,
    }

    #[derive(Tree, Clone, Debug, PartialEq)]
    struct Model<L: Leaf> {
        embed: L,
        blocks: Vec<Linear<L>>,
        r#extra: BTreeMap<String, (L, [L; 2])>,
        last: Pair<L>,
    }

    #[derive(Tree, Clone, Debug, PartialEq)]
    struct Pair<L: Leaf>(L, Box2<L, 1>);

    #[derive(Tree, Clone, Debug, PartialEq)]
    struct Box2<L, const N: usize> {
        items: [L; N],
    }

    fn model() -> Model<u64> {
        Model {
            embed: 1,
            blocks: vec![
                Linear {
                    w: 2,
                    bias: Some(3),
                },
                Linear { w: 4, bias: None },
            ],
            extra: BTreeMap::from([
                ("b".to_owned(), (6, [7, 8])),
                ("a".to_owned(), (5, [55, 56])),
            ]),
            last: Pair(9, Box2 { items: [10] }),
        }
    }

    const PATHS: [&str; 12] = [
        "embed",
        "blocks/0/w",
        "blocks/0/bias",
        "blocks/1/w",
        "extra/a/0",
        "extra/a/1/0",
        "extra/a/1/1",
        "extra/b/0",
        "extra/b/1/0",
        "extra/b/1/1",
        "last/0",
        "last/1/items/0",
    ];

    #[test]
    fn leaves_come_in_order_with_their_paths() {
        let model = model();
        let found = model.leaves_with_paths();
        assert!(found.iter().map(|(path, _)| path).eq(PATHS));
        let leaves: Vec<&u64> = found.into_iter().map(|(_, leaf)| leaf).collect();
        assert_eq!(leaves, [&1, &2, &3, &4, &5, &55, &56, &6, &7, &8, &9, &10]);
        assert_eq!(model.structure().paths(), PATHS);
        assert_eq!(model.structure().leaves(), model.leaves().len());
        assert_eq!(7u64.leaves_with_paths(), [(String::new(), &7)]);
    }

    #[test]
    fn mapping_keeps_the_structure_and_comes_back() {
        let model = model();
        assert!(model.has_structure(&model.structure()) && !model.has_structure(&Structure::Leaf));
        let other = Model {
            last: Pair(9, Box2 { items: [10] }),
            blocks: Vec::new(),
            ..self::model()
        };
        assert!(
            !other.has_structure(&model.structure()) && !model.has_structure(&other.structure())
        );
        let texts: Model<String> = model.map_ref(&mut u64::to_string);
        assert_eq!(texts.structure(), model.structure());
        let back: Model<u64> = texts.map(&mut |text| text.parse().unwrap());
        assert_eq!(back, model);
        let mut seen = 0;
        let failed = model.try_map_ref(&mut |leaf| {
            seen += 1;
            if *leaf == 3 { Err(*leaf) } else { Ok(*leaf) }
        });
        assert_eq!((failed, seen), (Err(3), 3));
    }

    #[test]
    fn trees_are_built_from_a_structure_and_leaves() {
        let model = model();
        let structure = model.structure();
        let built = Model::from_leaves(&structure, model.clone().into_leaves()).unwrap();
        assert_eq!(built, model);
        let short =
            Model::from_leaves(&structure, model.clone().into_leaves().into_iter().take(11));
        assert_eq!(
            short,
            Err(TreeError::TooFewLeaves {
                path: "last/1/items/0".into()
            })
        );
        let long = Model::from_leaves(&structure, 0..13u64);
        assert_eq!(long, Err(TreeError::TooManyLeaves { expected: 12 }));
        let other = Linear::<u64>::from_leaves(&structure, 0..12).unwrap_err();
        assert_eq!(
            other.to_string(),
            "at the root: expected [w, bias], found [embed, blocks, extra, last]"
        );
        let deep =
            <(u64, [u64; 2])>::from_leaves(&(1u64, vec![2u64]).structure(), 0..2).unwrap_err();
        assert_eq!(deep.to_string(), "at `1`: expected [0, 1], found [0]");
    }

    /// A kernel in miniature. Its associated types are trees of `u64`; `infer` and `run` use the
    /// same trees with other leaves.
    trait Kernel {
        type In: Tree<Leaf = u64>;
        type Out: Tree<Leaf = u64>;
        fn infer(
            x: &<Self::In as Tree>::With<ShapedArray>,
        ) -> <Self::Out as Tree>::With<ShapedArray>;
        fn run(x: <Self::In as Tree>::With<View<'_>>);
    }

    struct Swap;

    impl Kernel for Swap {
        type In = (u64, Linear<u64>);
        type Out = Vec<u64>;

        fn infer((x, linear): &(ShapedArray, Linear<ShapedArray>)) -> Vec<ShapedArray> {
            vec![linear.w.clone(), x.clone()]
        }

        fn run((x, linear): (View<'_>, Linear<View<'_>>)) {
            std::mem::swap(x.0, linear.w.0);
        }
    }

    fn call<K: Kernel>(x: &K::In, values: &mut [f64]) -> K::Out {
        let mut avals = (1..).map(|n| f32s([n]));
        let out = K::infer(&x.map_ref(&mut |_| avals.next().unwrap()));
        let views = values.iter_mut().map(View);
        K::run(<K::In as Tree>::With::from_leaves(&x.structure(), views).unwrap());
        let bytes: Vec<u64> = out
            .leaves()
            .into_iter()
            .map(|aval| aval.bytes() as u64)
            .collect();
        K::Out::from_leaves(&out.structure(), bytes).unwrap()
    }

    #[test]
    fn generic_code_goes_from_leaves_to_leaves() {
        let mut values = [1.0, 2.0];
        let out = call::<Swap>(&(0, Linear { w: 0, bias: None }), &mut values);
        assert_eq!((out, values), (vec![8, 4], [2.0, 1.0]));
    }
}
