//! Reductions and products: methods that sum over dimensions, or compare along them.

use std::panic::Location;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{DimensionLinks, Linearity, OperandDimension, Sharding};

use super::dims::{Dims, dim};
use super::expr::{Expr, is_float};
use super::node::{Contraction, Op, Reduction};
use super::trace::{self, NewNode, fail};

impl Expr {
    /// Returns the sums over these dimensions, which the result lacks. Over a divided dimension it
    /// is a partial sum. Whole numbers wrap.
    #[track_caller]
    #[must_use]
    pub fn sum(self, dims: impl Dims) -> Self {
        self.reduce(Reduction::Sum, dims, false, Location::caller())
    }

    /// Returns the means over these dimensions, which the result lacks. Over a divided dimension it
    /// is a partial sum.
    #[track_caller]
    #[must_use]
    pub fn mean(self, dims: impl Dims) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        if !is_float(aval.dtype()) {
            return fail(at, format!("mean is not defined for {aval}: cast it"));
        }
        let dims = match dims.of_rank(aval.ndim()) {
            Ok(dims) => dims,
            Err(why) => return fail(at, format!("mean: {why}")),
        };
        let count: usize = dims.iter().map(|dim| aval.shape()[*dim]).product();
        let dims: Vec<isize> = dims.into_iter().map(usize::cast_signed).collect();
        self.reduce(Reduction::Sum, &dims[..], false, at) / count as f64
    }

    /// Returns the largest elements along these dimensions, which the result lacks; NaN where one
    /// is a NaN.
    #[track_caller]
    #[must_use]
    pub fn max(self, dims: impl Dims) -> Self {
        self.reduce(Reduction::Max, dims, false, Location::caller())
    }

    /// Returns the smallest elements along these dimensions, which the result lacks; NaN where one
    /// is a NaN.
    #[track_caller]
    #[must_use]
    pub fn min(self, dims: impl Dims) -> Self {
        self.reduce(Reduction::Min, dims, false, Location::caller())
    }

    /// Returns true where any boolean along these dimensions is true.
    #[track_caller]
    #[must_use]
    pub fn any(self, dims: impl Dims) -> Self {
        self.reduce(Reduction::Any, dims, false, Location::caller())
    }

    /// Returns true where all booleans along these dimensions are true.
    #[track_caller]
    #[must_use]
    pub fn all(self, dims: impl Dims) -> Self {
        self.reduce(Reduction::All, dims, false, Location::caller())
    }

    /// Returns the indices of the first largest element along a dimension, which the result lacks,
    /// as i32. A NaN is the largest.
    #[track_caller]
    #[must_use]
    pub fn argmax(self, along: isize) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let along = match dim(along, aval.ndim()) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("argmax: {why}")),
        };
        if aval.dtype() == DType::Bool || aval.shape()[along] == 0 {
            return fail(
                at,
                format!("argmax is not defined for dimension {along} of {aval}"),
            );
        }
        let kept = (0..aval.ndim()).filter(|dim| *dim != along).collect();
        let new = Reduced {
            op: Op::ArgMax { dim: along },
            dtype: DType::I32,
            kept,
            keeps: false,
            is_sum: false,
        };
        new.write(self, &aval, at)
    }

    /// Returns `exp(x) / sum(exp(x))` along a dimension.
    #[track_caller]
    #[must_use]
    pub fn softmax(self, along: isize) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        if !is_float(aval.dtype()) {
            return fail(at, format!("softmax is not defined for {aval}: cast it"));
        }
        // The result does not depend on the scale.
        let scale = self.reduce(Reduction::Max, along, true, at).stop_gradient();
        let powers = (self - scale).exp();
        powers / powers.reduce(Reduction::Sum, along, true, at)
    }

    /// Returns `log(sum(exp(x)))` along a dimension, which the result lacks.
    #[track_caller]
    #[must_use]
    pub fn log_sum_exp(self, along: isize) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        if !is_float(aval.dtype()) {
            return fail(
                at,
                format!("log_sum_exp is not defined for {aval}: cast it"),
            );
        }
        // Infinite elements need no scale.
        let scale = |keeps| {
            let largest = self.reduce(Reduction::Max, along, keeps, at);
            let scale = largest.abs().less(f64::INFINITY).select(largest, 0.0);
            // The result does not depend on it.
            scale.stop_gradient()
        };
        let powers = (self - scale(true)).exp();
        let sums = powers.reduce(Reduction::Sum, along, false, at);
        sums.log() + scale(false)
    }

    /// Reduces dimensions; the result keeps them with size 1 if `keeps` is true.
    pub(super) fn reduce(
        self,
        reduction: Reduction,
        dims: impl Dims,
        keeps: bool,
        at: &'static Location<'static>,
    ) -> Self {
        let aval = self.node(at).aval;
        let name = format!("{reduction:?}").to_lowercase();
        let dims = match dims.of_rank(aval.ndim()) {
            Ok(dims) => dims,
            Err(why) => return fail(at, format!("{name}: {why}")),
        };
        let is_of_booleans = matches!(reduction, Reduction::Any | Reduction::All);
        if is_of_booleans != (aval.dtype() == DType::Bool) {
            return fail(at, format!("{name} is not defined for {aval}: cast it"));
        }
        let is_order = matches!(reduction, Reduction::Max | Reduction::Min);
        if is_order && dims.iter().any(|dim| aval.shape()[*dim] == 0) {
            return fail(at, format!("{name} of no elements: {aval}"));
        }
        let new = Reduced {
            kept: (0..aval.ndim()).filter(|dim| !dims.contains(dim)).collect(),
            op: Op::Reduce {
                reduction,
                dims,
                keeps,
            },
            dtype: aval.dtype(),
            keeps,
            is_sum: reduction == Reduction::Sum,
        };
        new.write(self, &aval, at)
    }

    /// Returns the matrix product of `[.., m, k]` and `[k, n]`, or of `[.., m, k]` and `[.., k, n]`
    /// with the same leading dimensions. Over a divided dimension `k` it is a partial sum.
    #[track_caller]
    #[must_use]
    pub fn matmul(self, other: Self) -> Self {
        let at = Location::caller();
        let (a, b) = (self.node(at).aval, other.node(at).aval);
        let (rank, rank_b) = (a.ndim(), b.ndim());
        if !(2..=MOST_MATRIX_DIMENSIONS).contains(&rank) || !(rank_b == 2 || rank_b == rank) {
            let why = format!("matmul: expected [.., m, k] and [k, n], found {a} and {b}");
            return fail(at, why);
        }
        let is_same_list = rank_b == 2 || a.shape()[..rank - 2] == b.shape()[..rank - 2];
        if !is_same_list || a.shape()[rank - 1] != b.shape()[rank_b - 2] {
            return fail(
                at,
                format!("matmul: the shapes of {a} and {b} do not fit together"),
            );
        }
        // Letters for the leading dimensions, beside m, k and n.
        let leading: Vec<char> = ('A'..='Z').take(rank - 2).collect();
        let letters = |last: [char; 2]| leading.iter().copied().chain(last).collect();
        let of_b = match rank_b == 2 && rank > 2 {
            true => vec!['k', 'n'],
            false => letters(['k', 'n']),
        };
        let contraction = Contraction {
            operands: [letters(['m', 'k']), of_b],
            result: letters(['m', 'n']),
        };
        contract("matmul", contraction, [self, other], None, at)
    }
}

/// Most dimensions of a list of matrices: as many as there are letters for them.
const MOST_MATRIX_DIMENSIONS: usize = 28;

/// A node that lacks some of its operand's dimensions, or keeps them with size 1.
struct Reduced {
    op: Op,
    dtype: DType,
    /// The operand's dimensions that are not reduced.
    kept: Vec<usize>,
    /// True if the result has the reduced dimensions with size 1.
    keeps: bool,
    /// True if the result may be a partial sum.
    is_sum: bool,
}

impl Reduced {
    fn write(self, operand: Expr, aval: &ShapedArray, at: &'static Location<'static>) -> Expr {
        let is_kept = |dim: &usize| self.kept.contains(dim);
        let linked = |dim| match self.is_sum || is_kept(&dim) {
            true => OperandDimension::Linked(dim),
            false => OperandDimension::Whole,
        };
        let result: Vec<Option<usize>> = (0..aval.ndim())
            .filter(|dim| self.keeps || is_kept(dim))
            .map(|dim| Some(dim).filter(is_kept))
            .collect();
        let shape: Vec<usize> = result
            .iter()
            .map(|dim| dim.map_or(1, |dim| aval.shape()[dim]))
            .collect();
        trace::write(NewNode {
            op: self.op,
            operands: vec![operand],
            shape,
            dtype: self.dtype,
            links: DimensionLinks {
                operands: vec![(0..aval.ndim()).map(linked).collect()],
                results: vec![result],
            },
            linearity: match self.is_sum {
                true => Linearity::Joint,
                false => Linearity::None,
            },
            at,
        })
    }
}

/// Returns the product of two arrays by Einstein's convention: `einsum("b k, k n -> b n", x, w)`.
/// Each dimension has a letter; those that the result lacks are summed over. Over a divided
/// dimension it is a partial sum. Blanks mean nothing.
#[track_caller]
#[must_use]
pub fn einsum(text: &str, a: Expr, b: Expr) -> Expr {
    let at = Location::caller();
    match read_contraction(text) {
        Ok(contraction) => contract(&format!("einsum {text:?}"), contraction, [a, b], None, at),
        Err(why) => fail(at, format!("einsum {text:?}: {why}")),
    }
}

fn read_contraction(text: &str) -> Result<Contraction, String> {
    let expected = "expected two operands and a result, such as \"bk,kn->bn\"";
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let (operands, result) = text.split_once("->").ok_or(expected)?;
    let (a, b) = operands.split_once(',').ok_or(expected)?;
    let letters = |word: &str| {
        let letters: Vec<char> = word.chars().collect();
        if let Some(odd) = letters.iter().find(|c| !c.is_ascii_alphabetic()) {
            return Err(format!("expected letters, found {odd:?}"));
        }
        let mut seen = letters.clone();
        seen.sort_unstable();
        match seen.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(twice) => Err(format!("{word} has the dimension {} twice", twice[0])),
            None => Ok(letters),
        }
    };
    let contraction = Contraction {
        operands: [letters(a)?, letters(b)?],
        result: letters(result)?,
    };
    let all = contraction.operands.concat();
    match contraction
        .result
        .iter()
        .find(|letter| !all.contains(letter))
    {
        Some(unknown) => Err(format!(
            "no operand has the dimension {unknown} of the result"
        )),
        None => Ok(contraction),
    }
}

/// Writes the product of two arrays. Its sharding follows also from that of `like`, an array with
/// the dimensions of these letters.
pub(super) fn contract(
    name: &str,
    contraction: Contraction,
    operands: [Expr; 2],
    like: Option<(&[char], Sharding)>,
    at: &'static Location<'static>,
) -> Expr {
    let avals = operands.map(|expr| expr.node(at).aval);
    let [a, b] = &avals;
    if a.dtype() != b.dtype() || a.dtype() == DType::Bool {
        return fail(
            at,
            format!("{name}: expected numbers of one dtype, found {a} and {b}"),
        );
    }
    let mut sizes: Vec<(char, usize)> = Vec::new();
    for (index, (letters, aval)) in contraction.operands.iter().zip(&avals).enumerate() {
        if letters.len() != aval.ndim() {
            let count = letters.len();
            let why = format!("expected {count} dimensions of input {index}, found {aval}");
            return fail(at, format!("{name}: {why}"));
        }
        for (letter, size) in letters.iter().zip(aval.shape()) {
            match sizes.iter().find(|(known, _)| known == letter) {
                Some((_, known)) if known != size => {
                    let why = format!("dimension {letter} has the sizes {known} and {size}");
                    return fail(at, format!("{name}: {why}: {a} and {b}"));
                }
                Some(_) => {}
                None => sizes.push((*letter, *size)),
            }
        }
    }

    let place = |letter: &char| sizes.iter().position(|(known, _)| known == letter);
    let linked = |letter| place(letter).map_or(OperandDimension::Whole, OperandDimension::Linked);
    let links = DimensionLinks {
        operands: contraction
            .operands
            .iter()
            .map(|letters| letters.iter().map(linked).collect())
            .collect(),
        results: vec![contraction.result.iter().map(place).collect()],
    };
    let like = like.map(|(letters, sharding)| (letters.iter().map(linked).collect(), sharding));
    let size = |letter| place(letter).map_or(1, |place| sizes[place].1);
    let new = NewNode {
        operands: operands.to_vec(),
        shape: contraction.result.iter().map(size).collect(),
        dtype: a.dtype(),
        links,
        op: Op::Contract(contraction),
        linearity: Linearity::Each,
        at,
    };
    trace::write_like(new, like)
}
