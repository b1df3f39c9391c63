//! The inputs and the results of a function: single values, tuples and lists.

use super::expr::Expr;
use crate::exec::array::MpmdArray;

/// The inputs of a function that `compute` traces: `&x`, tuples such as `(&x, &y)` of up to six
/// arrays, or a slice of arrays. The function gets expressions in the same form: `x`, `(x, y)`, or
/// a `Vec`.
pub trait ComputeInputs<'a> {
    /// The argument of the function: an expression for each array.
    type Exprs;

    /// Returns the arrays.
    #[doc(hidden)]
    fn arrays(&self) -> Vec<&'a MpmdArray>;

    /// Makes the function's arguments of as many expressions as there are arrays.
    #[doc(hidden)]
    fn exprs(&self, exprs: &[Expr]) -> Self::Exprs;
}

impl<'a> ComputeInputs<'a> for &'a MpmdArray {
    type Exprs = Expr;

    fn arrays(&self) -> Vec<&'a MpmdArray> {
        vec![self]
    }

    fn exprs(&self, exprs: &[Expr]) -> Expr {
        exprs[0]
    }
}

impl<'a> ComputeInputs<'a> for () {
    type Exprs = ();

    fn arrays(&self) -> Vec<&'a MpmdArray> {
        Vec::new()
    }

    fn exprs(&self, _: &[Expr]) {}
}

impl<'a> ComputeInputs<'a> for &'a [MpmdArray] {
    type Exprs = Vec<Expr>;

    fn arrays(&self) -> Vec<&'a MpmdArray> {
        self.iter().collect()
    }

    fn exprs(&self, exprs: &[Expr]) -> Vec<Expr> {
        exprs.to_vec()
    }
}

impl<'a> ComputeInputs<'a> for &'a Vec<MpmdArray> {
    type Exprs = Vec<Expr>;

    fn arrays(&self) -> Vec<&'a MpmdArray> {
        self.iter().collect()
    }

    fn exprs(&self, exprs: &[Expr]) -> Vec<Expr> {
        exprs.to_vec()
    }
}

macro_rules! tuples {
    ($($($name:ident $index:tt)+;)*) => {$(
        impl<'a> ComputeInputs<'a> for ($(tuples!(@array 'a $name),)+) {
            type Exprs = ($(tuples!(@expr $name),)+);

            fn arrays(&self) -> Vec<&'a MpmdArray> {
                vec![$(self.$index),+]
            }

            fn exprs(&self, exprs: &[Expr]) -> Self::Exprs {
                ($(exprs[$index],)+)
            }
        }
    )*};
    (@array $life:lifetime $name:ident) => { &$life MpmdArray };
    (@expr $name:ident) => { Expr };
}

tuples! {
    A 0;
    A 0 B 1;
    A 0 B 1 C 2;
    A 0 B 1 C 2 D 3;
    A 0 B 1 C 2 D 3 E 4;
    A 0 B 1 C 2 D 3 E 4 F 5;
}

/// The results of a function that `compute` traces: an expression, a tuple of up to four results,
/// or a list of expressions.
pub trait ComputeResults {
    /// The value of the call: an array for each expression.
    type Arrays;

    /// Appends the expressions, and the length of each list, in order.
    #[doc(hidden)]
    fn push_to(&self, exprs: &mut Vec<Expr>, lengths: &mut Vec<usize>);

    /// Makes the results of their arrays, and of the length of each list, in order.
    #[doc(hidden)]
    fn arrays(
        arrays: &mut dyn Iterator<Item = MpmdArray>,
        lengths: &mut dyn Iterator<Item = usize>,
    ) -> Option<Self::Arrays>;
}

impl ComputeResults for Expr {
    type Arrays = MpmdArray;

    fn push_to(&self, exprs: &mut Vec<Expr>, _: &mut Vec<usize>) {
        exprs.push(*self);
    }

    fn arrays(
        arrays: &mut dyn Iterator<Item = MpmdArray>,
        _: &mut dyn Iterator<Item = usize>,
    ) -> Option<MpmdArray> {
        arrays.next()
    }
}

impl ComputeResults for Vec<Expr> {
    type Arrays = Vec<MpmdArray>;

    fn push_to(&self, exprs: &mut Vec<Expr>, lengths: &mut Vec<usize>) {
        exprs.extend(self);
        lengths.push(self.len());
    }

    fn arrays(
        arrays: &mut dyn Iterator<Item = MpmdArray>,
        lengths: &mut dyn Iterator<Item = usize>,
    ) -> Option<Vec<MpmdArray>> {
        (0..lengths.next()?).map(|_| arrays.next()).collect()
    }
}

macro_rules! result_tuples {
    ($($($name:ident $index:tt)+;)*) => {$(
        impl<$($name: ComputeResults),+> ComputeResults for ($($name,)+) {
            type Arrays = ($($name::Arrays,)+);

            fn push_to(&self, exprs: &mut Vec<Expr>, lengths: &mut Vec<usize>) {
                $(self.$index.push_to(exprs, lengths);)+
            }

            fn arrays(
                arrays: &mut dyn Iterator<Item = MpmdArray>,
                lengths: &mut dyn Iterator<Item = usize>,
            ) -> Option<Self::Arrays> {
                Some(($($name::arrays(arrays, lengths)?,)+))
            }
        }
    )*};
}

result_tuples! {
    A 0;
    A 0 B 1;
    A 0 B 1 C 2;
    A 0 B 1 C 2 D 3;
}
