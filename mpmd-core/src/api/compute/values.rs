//! The inputs and the results of a function: single values, tuples and lists.

use super::expr::Expr;
use crate::exec::array::MpmdArray;

/// The inputs of a function that `compute` traces: `&x`, a list of arrays, or a tuple of up to six
/// inputs, such as `(&x, &y)` or `(&params, &x)`. The function gets expressions in the same form:
/// `x`, a `Vec` for a list, or a tuple.
pub trait ComputeInputs<'a> {
    /// The argument of the function: an expression for each array.
    type Exprs;

    /// Appends the arrays, and the length of each list, in order.
    #[doc(hidden)]
    fn push_to(&self, arrays: &mut Vec<&'a MpmdArray>, lengths: &mut Vec<usize>);

    /// Makes the function's arguments of as many expressions as there are arrays.
    #[doc(hidden)]
    fn exprs(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self::Exprs>;
}

impl<'a> ComputeInputs<'a> for &'a MpmdArray {
    type Exprs = Expr;

    fn push_to(&self, arrays: &mut Vec<&'a MpmdArray>, _: &mut Vec<usize>) {
        arrays.push(self);
    }

    fn exprs(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Expr> {
        exprs.next()
    }
}

impl<'a> ComputeInputs<'a> for () {
    type Exprs = ();

    fn push_to(&self, _: &mut Vec<&'a MpmdArray>, _: &mut Vec<usize>) {}

    fn exprs(&self, _: &mut dyn Iterator<Item = Expr>) -> Option<()> {
        Some(())
    }
}

impl<'a> ComputeInputs<'a> for &'a [MpmdArray] {
    type Exprs = Vec<Expr>;

    fn push_to(&self, arrays: &mut Vec<&'a MpmdArray>, lengths: &mut Vec<usize>) {
        arrays.extend(self.iter());
        lengths.push(self.len());
    }

    fn exprs(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Vec<Expr>> {
        self.iter().map(|_| exprs.next()).collect()
    }
}

impl<'a> ComputeInputs<'a> for &'a Vec<MpmdArray> {
    type Exprs = Vec<Expr>;

    fn push_to(&self, arrays: &mut Vec<&'a MpmdArray>, lengths: &mut Vec<usize>) {
        self.as_slice().push_to(arrays, lengths);
    }

    fn exprs(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Vec<Expr>> {
        self.as_slice().exprs(exprs)
    }
}

macro_rules! tuples {
    ($($($name:ident $index:tt)+;)*) => {$(
        impl<'a, $($name: ComputeInputs<'a>),+> ComputeInputs<'a> for ($($name,)+) {
            type Exprs = ($($name::Exprs,)+);

            fn push_to(&self, arrays: &mut Vec<&'a MpmdArray>, lengths: &mut Vec<usize>) {
                $(self.$index.push_to(arrays, lengths);)+
            }

            fn exprs(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self::Exprs> {
                Some(($(self.$index.exprs(exprs)?,)+))
            }
        }
    )*};
}

tuples! {
    A 0;
    A 0 B 1;
    A 0 B 1 C 2;
    A 0 B 1 C 2 D 3;
    A 0 B 1 C 2 D 3 E 4;
    A 0 B 1 C 2 D 3 E 4 F 5;
}

/// Values of a function that `compute` traces, such as its results: an expression, a list of
/// expressions, or a tuple of up to four of these.
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

    /// Makes the same form of other expressions, as many as there are.
    #[doc(hidden)]
    fn with(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self>
    where
        Self: Sized;
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

    fn with(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self> {
        exprs.next()
    }
}

impl<const N: usize> ComputeResults for [Expr; N] {
    type Arrays = [MpmdArray; N];

    fn push_to(&self, exprs: &mut Vec<Expr>, _: &mut Vec<usize>) {
        exprs.extend(self);
    }

    fn arrays(
        arrays: &mut dyn Iterator<Item = MpmdArray>,
        _: &mut dyn Iterator<Item = usize>,
    ) -> Option<[MpmdArray; N]> {
        let list: Vec<MpmdArray> = arrays.take(N).collect();
        list.try_into().ok()
    }

    fn with(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self> {
        let list: Vec<Expr> = exprs.take(N).collect();
        list.try_into().ok()
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

    fn with(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self> {
        self.iter().map(|_| exprs.next()).collect()
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

            fn with(&self, exprs: &mut dyn Iterator<Item = Expr>) -> Option<Self> {
                Some(($(self.$index.with(exprs)?,)+))
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
