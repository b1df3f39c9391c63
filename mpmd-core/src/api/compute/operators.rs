//! Rust's operators on expressions and numbers.

use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};
use std::panic::Location;

use super::expr::{Expr, Operand};
use super::node::{Binary, Unary};

macro_rules! binary_operators {
    ($($operator:ident $method:ident)*) => {$(
        impl<T: Operand> $operator<T> for Expr {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: T) -> Self {
                let at = Location::caller();
                let other = other.beside(self, at);
                self.binary(Binary::$operator, other, at)
            }
        }

        binary_operators! { @number f32 $operator $method }
        binary_operators! { @number f64 $operator $method }
        binary_operators! { @number i32 $operator $method }
        binary_operators! { @number i64 $operator $method }
    )*};
    (@number $number:ident $operator:ident $method:ident) => {
        impl $operator<Expr> for $number {
            type Output = Expr;

            #[track_caller]
            fn $method(self, other: Expr) -> Expr {
                let at = Location::caller();
                self.beside(other, at).binary(Binary::$operator, other, at)
            }
        }
    };
}

binary_operators! { Add add Sub sub Mul mul Div div }

impl Neg for Expr {
    type Output = Self;

    #[track_caller]
    fn neg(self) -> Self {
        self.unary(Unary::Neg, Location::caller())
    }
}

impl Not for Expr {
    type Output = Self;

    #[track_caller]
    fn not(self) -> Self {
        self.unary(Unary::Not, Location::caller())
    }
}

impl BitAnd for Expr {
    type Output = Self;

    #[track_caller]
    fn bitand(self, other: Self) -> Self {
        self.binary(Binary::And, other, Location::caller())
    }
}

impl BitOr for Expr {
    type Output = Self;

    #[track_caller]
    fn bitor(self, other: Self) -> Self {
        self.binary(Binary::Or, other, Location::caller())
    }
}
