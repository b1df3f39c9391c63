//! Trees of tensors, and the trees of arrays that they correspond to.

use std::collections::BTreeMap;

use candle_core::Tensor;
use mpmd_core::MpmdArray;
use mpmd_core::pipeline::Loss;
use mpmd_layout::tree::{Leaf, Tree};

/// A tensor as a leaf of a tree.
#[derive(Clone, Debug)]
pub struct TensorLeaf(pub Tensor);

impl Leaf for TensorLeaf {}

/// The tree type `T` with tensors in place of its arrays.
pub type Values<T> = <T as Tree>::With<TensorLeaf>;

/// Tensors that a function takes or returns: one [`Tensor`], a tuple of up to four, a `Vec`, a map
/// by name, or a [`Loss`].
pub trait Tensors: Sized + 'static {
    /// The same structure with arrays as leaves.
    type Arrays: Tree<Leaf = MpmdArray> + Send + 'static;

    /// Converts a tree of tensors to this type.
    fn from_values(values: Values<Self::Arrays>) -> Self;

    /// Converts this type to a tree of tensors.
    fn into_values(self) -> Values<Self::Arrays>;
}

impl Tensors for Tensor {
    type Arrays = MpmdArray;

    fn from_values(value: TensorLeaf) -> Self {
        value.0
    }

    fn into_values(self) -> TensorLeaf {
        TensorLeaf(self)
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    type Arrays = Vec<T::Arrays>;

    fn from_values(values: Values<Self::Arrays>) -> Self {
        values.into_iter().map(T::from_values).collect()
    }

    fn into_values(self) -> Values<Self::Arrays> {
        self.into_iter().map(T::into_values).collect()
    }
}

impl<T: Tensors> Tensors for BTreeMap<String, T> {
    type Arrays = BTreeMap<String, T::Arrays>;

    fn from_values(values: Values<Self::Arrays>) -> Self {
        values
            .into_iter()
            .map(|(name, value)| (name, T::from_values(value)))
            .collect()
    }

    fn into_values(self) -> Values<Self::Arrays> {
        self.into_iter()
            .map(|(name, tensor)| (name, tensor.into_values()))
            .collect()
    }
}

impl Tensors for Loss<Tensor> {
    type Arrays = Loss<MpmdArray>;

    fn from_values(values: Loss<TensorLeaf>) -> Self {
        let metrics = values.metrics.into_iter();
        let loss = Self::new(values.sum.0, values.weight.0);
        metrics.fold(loss, |loss, (name, value)| loss.metric(name, value.0))
    }

    fn into_values(self) -> Loss<TensorLeaf> {
        let loss = Loss::new(TensorLeaf(self.sum), TensorLeaf(self.weight));
        // They have no gradient, so none is computed.
        let metrics = self.metrics.into_iter();
        metrics.fold(loss, |loss, (name, value)| {
            loss.metric(name, TensorLeaf(value.detach()))
        })
    }
}

/// Implements `Tensors` for tuples of this many elements.
macro_rules! tuple {
    ($($name:ident: $type:ident),+) => {
        impl<$($type: Tensors),+> Tensors for ($($type,)+) {
            type Arrays = ($($type::Arrays,)+);

            fn from_values(values: Values<Self::Arrays>) -> Self {
                let ($($name,)+) = values;
                ($($type::from_values($name),)+)
            }

            fn into_values(self) -> Values<Self::Arrays> {
                let ($($name,)+) = self;
                ($($name.into_values(),)+)
            }
        }
    };
}

tuple! { a: A, b: B }
tuple! { a: A, b: B, c: C }
tuple! { a: A, b: B, c: C, d: D }
