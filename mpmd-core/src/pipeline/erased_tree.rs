//! Trees without their types: only the stage knows the type.

use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::Kernel;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{Leaf, Path, Structure, Tree, TreeError};

/// A tree of any structure, known only at run time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ErasedTree<L = MpmdArray> {
    pub(super) structure: Structure,
    pub(super) leaves: Vec<L>,
}

impl<L: Leaf> ErasedTree<L> {
    pub(super) fn of<T: Tree<Leaf = L>>(tree: T) -> Self {
        Self {
            structure: tree.structure(),
            leaves: tree.into_leaves(),
        }
    }

    pub(super) fn empty() -> Self {
        Self {
            structure: Structure::sequence([]),
            leaves: Vec::new(),
        }
    }

    /// Creates a tree whose branches 0 and 1 are `first` and `second`.
    pub(super) fn pair(first: Self, second: Self) -> Self {
        let structure = Structure::sequence([first.structure, second.structure]);
        Self {
            structure,
            leaves: first.leaves.into_iter().chain(second.leaves).collect(),
        }
    }

    /// Creates the tree of an `Option` that is `None`.
    pub(super) fn absent() -> Self {
        Self {
            structure: Structure::Absent,
            leaves: Vec::new(),
        }
    }

    /// Returns `None` if this is the tree of an `Option` that is `None`, else the tree itself.
    pub(super) fn present(self) -> Option<Self> {
        (self.structure != Structure::Absent).then_some(self)
    }

    /// Splits the tree into its `N` branches. Returns `None` if the number of branches is not `N`.
    pub(super) fn into_branches<const N: usize>(self) -> Option<[Self; N]> {
        let Structure::Node(branches) = self.structure else {
            return None;
        };
        let branches: &[_; N] = (&*branches).try_into().ok()?;
        let mut leaves = self.leaves.into_iter();
        Some(branches.each_ref().map(|(_, structure)| {
            let leaves = leaves.by_ref().take(structure.leaves()).collect();
            Self {
                structure: structure.clone(),
                leaves,
            }
        }))
    }

    /// Builds a tree of type `T` from the leaves. `value` is the name of the tree in error
    /// messages.
    pub(super) fn into_tree<T: Tree<Leaf = L>>(self, value: &str) -> Result<T> {
        let wrong = |why| {
            Error::kernel(format!(
                "its {value} is not the tree that is asked for: {why}"
            ))
        };
        T::from_leaves(&self.structure, self.leaves).map_err(wrong)
    }
}

impl ErasedTree {
    /// Calls a kernel whose input is a tuple of trees, and returns its outputs. `branches` has the
    /// trees' structures, `leaves` the leaves of all trees in order.
    #[track_caller]
    pub(super) fn called<K: Kernel, const N: usize>(
        jit: &Jit<K>,
        program: &mut Program,
        branches: [&Structure; N],
        leaves: &[&MpmdArray],
    ) -> Result<Self> {
        let structure = Structure::sequence(branches.map(Structure::clone));
        let (structure, leaves) = jit.call_leaves(program, &structure, leaves)?;
        Ok(Self { structure, leaves })
    }

    /// Transfers all arrays to the sharding `to`. Arrays that already have this sharding cost
    /// nothing.
    pub(super) fn put(self, program: &mut Program, to: &Sharding) -> Result<Self> {
        let leaves = put_each(program, self.leaves, |_| to)?;
        Ok(Self {
            structure: self.structure,
            leaves,
        })
    }
}

impl<L: Leaf> Tree for ErasedTree<L> {
    type Leaf = L;
    type With<M: Leaf> = ErasedTree<M>;

    fn structure(&self) -> Structure {
        self.structure.clone()
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        self.structure == *structure
    }

    fn visit<'a>(&'a self, path: &mut Path, f: &mut dyn FnMut(&Path, &'a L)) {
        visit(&self.structure, &mut self.leaves.iter(), path, f);
    }

    fn each_leaf<'a>(&'a self, f: &mut dyn FnMut(&'a L)) {
        self.leaves.iter().for_each(f);
    }

    fn try_map<M: Leaf, E>(
        self,
        f: &mut dyn FnMut(L) -> std::result::Result<M, E>,
    ) -> std::result::Result<ErasedTree<M>, E> {
        let leaves = self
            .leaves
            .into_iter()
            .map(f)
            .collect::<std::result::Result<_, E>>()?;
        Ok(ErasedTree {
            structure: self.structure,
            leaves,
        })
    }

    fn try_map_ref<M: Leaf, E>(
        &self,
        f: &mut dyn FnMut(&L) -> std::result::Result<M, E>,
    ) -> std::result::Result<ErasedTree<M>, E> {
        let leaves = self
            .leaves
            .iter()
            .map(f)
            .collect::<std::result::Result<_, E>>()?;
        Ok(ErasedTree {
            structure: self.structure.clone(),
            leaves,
        })
    }

    fn build(
        structure: &Structure,
        leaves: &mut dyn Iterator<Item = L>,
    ) -> std::result::Result<Self, TreeError> {
        let leaves: Vec<L> = leaves.take(structure.leaves()).collect();
        if leaves.len() < structure.leaves() {
            let missing = structure.paths().swap_remove(leaves.len());
            return Err(TreeError::TooFewLeaves { path: missing });
        }
        Ok(Self {
            structure: structure.clone(),
            leaves,
        })
    }
}

fn visit<'a, L>(
    structure: &Structure,
    leaves: &mut std::slice::Iter<'a, L>,
    path: &mut Path,
    f: &mut dyn FnMut(&Path, &'a L),
) {
    match structure {
        Structure::Leaf => leaves.next().into_iter().for_each(|leaf| f(path, leaf)),
        Structure::Absent => {}
        Structure::Node(branches) => {
            for (name, branch) in branches.iter() {
                path.push(name.clone());
                visit(branch, leaves, path, f);
                path.pop();
            }
        }
    }
}

/// Transfers each array to the sharding that `to` returns for its index. Arrays that already have
/// it cost nothing. Does not wait for the transfers.
#[track_caller]
pub(super) fn put_each<'a>(
    program: &mut Program,
    mut arrays: Vec<MpmdArray>,
    to: impl Fn(usize) -> &'a Sharding,
) -> Result<Vec<MpmdArray>> {
    let other = |place: &usize| arrays[*place].sharding() != Some(to(*place));
    let places: Vec<usize> = (0..arrays.len()).filter(other).collect();
    if places.is_empty() {
        return Ok(arrays);
    }

    let moved = places.iter().map(|place| (&arrays[*place], to(*place)));
    let moved = program.put_list(&moved.collect::<Vec<_>>())?;
    places
        .into_iter()
        .zip(moved)
        .for_each(|(place, array)| arrays[place] = array);
    Ok(arrays)
}
