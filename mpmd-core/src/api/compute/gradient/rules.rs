//! The products of a gradient with the derivative of each operation.

use std::panic::Location;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{Sharding, Spec, SpecEntry};

use super::super::expr::{Expr, is_float};
use super::super::node::{Binary, Contraction, Op, Reduction, Unary};
use super::super::reductions::contract;
use super::{spread, zeros};

/// A node with the gradient of its value.
pub(super) struct Differentiated<'a> {
    pub(super) op: &'a Op,
    /// The node's value.
    pub(super) value: Expr,
    pub(super) operands: Vec<Expr>,
    /// The shardings with which the devices compute with the operands.
    pub(super) parts: &'a [Sharding],
    /// The gradient of the node's value, in its sharding.
    pub(super) gradient: Expr,
    pub(super) at: &'static Location<'static>,
}

impl Differentiated<'_> {
    /// Returns for each operand the part of its gradient that this node adds, with the operand's
    /// shape. `None` for one that has no gradient.
    pub(super) fn parts_of_operands(&self) -> Vec<Option<Expr>> {
        let g = self.gradient;
        match (self.op, &self.operands[..]) {
            (Op::Unary(f), [x]) => vec![self.of_unary(*f, *x)],
            (Op::Binary(f), [a, b]) => self.of_binary(*f, *a, *b),
            (Op::Cast, [x]) => {
                let dtype = x.dtype();
                vec![Some(g).filter(|_| is_float(dtype)).map(|g| g.cast(dtype))]
            }
            (Op::Select, [condition, yes, no]) => vec![
                None,
                Some(sum_to(condition.select(g, 0.0), &yes.aval())),
                Some(sum_to((!*condition).select(g, 0.0), &no.aval())),
            ],
            (
                Op::Reduce {
                    reduction, dims, ..
                },
                [x],
            ) => vec![self.of_reduction(*reduction, dims, *x)],
            (Op::Contract(contraction), [a, b]) => self.of_product(contraction, [*a, *b]),
            (Op::Transpose(order), [_]) => {
                let mut back = vec![0; order.len()];
                for (dim, from) in order.iter().enumerate() {
                    back[*from] = dim.cast_signed();
                }
                vec![Some(g.transpose(&back))]
            }
            (Op::Reshape, [x]) => vec![Some(g.reshape(&x.shape()))],
            (Op::Broadcast, [x]) => vec![Some(sum_to(g, &x.aval()))],
            (Op::Slice { dim, start }, [x]) => {
                let along = dim.cast_signed();
                let len = self.value.shape()[*dim];
                let behind = x.shape()[*dim] - start - len;
                vec![Some(g.pad(along, *start, behind, 0.0))]
            }
            (Op::Pad { dim, before, .. }, [x]) => {
                let range = *before..before + x.shape()[*dim];
                vec![Some(g.slice(dim.cast_signed(), range))]
            }
            (Op::Concatenate { dim }, operands) => of_concatenated(g, *dim, operands),
            (Op::Take { dim }, [x, indices]) => vec![Some(of_taken(g, *dim, *x, *indices)), None],
            (Op::TakeAlong { dim }, [x, indices]) => {
                let len = x.shape()[*dim];
                let indices = in_range(*indices, len);
                vec![Some(g.sum_along(*dim, indices, len, self.at)), None]
            }
            (Op::SumAlong { dim }, [_, indices]) => {
                let is_in = is_index(*indices, self.value.shape()[*dim]);
                let taken = g.take_along(dim.cast_signed(), *indices);
                vec![Some(is_in.select(taken, 0.0)), None]
            }
            (Op::SegmentSum { dim }, [x, segments]) => {
                vec![Some(self.of_segments(*dim, *x, *segments)), None]
            }
            (Op::Move, [_]) => vec![Some(g)],
            // Comparisons, indices and the like are constant almost everywhere.
            (_, operands) => vec![None; operands.len()],
        }
    }

    fn of_unary(&self, f: Unary, x: Expr) -> Option<Expr> {
        let (g, y) = (self.gradient, self.value);
        Some(match f {
            Unary::Neg => -g,
            Unary::Abs => x.greater_equal(0.0).select(g, -g),
            Unary::Not => return None,
            Unary::Exp => g * y,
            Unary::Log => g / x,
            Unary::Sqrt => g * 0.5 / y,
            Unary::Sin => g * x.cos(),
            Unary::Cos => -(g * x.sin()),
            Unary::Tanh => g * (1.0 - y.square()),
            Unary::Sigmoid => g * (y * (1.0 - y)),
        })
    }

    fn of_binary(&self, f: Binary, a: Expr, b: Expr) -> Vec<Option<Expr>> {
        let (g, y) = (self.gradient, self.value);
        let both = match f {
            Binary::Add => [g, g],
            Binary::Sub => [g, -g],
            Binary::Mul => [g * b, g * a],
            Binary::Div => [g / b, -(g * y) / b],
            Binary::Pow => {
                // The derivative by a base of 0 with the exponent 0 is 0, and not 0 * infinity.
                let of_base = b.equal(0.0).select(b.filled_like(0.0), b * a.pow(b - 1.0));
                let base = a.equal(0.0).select(a.filled_like(1.0), a);
                [g * of_base, g * (base.log() * y)]
            }
            Binary::Maximum | Binary::Minimum => [g * share(a, y, b), g * share(b, y, a)],
            Binary::And | Binary::Or => return vec![None; 2],
        };
        let [of_a, of_b] = both;
        vec![Some(sum_to(of_a, &a.aval())), Some(sum_to(of_b, &b.aval()))]
    }

    fn of_reduction(&self, reduction: Reduction, dims: &[usize], x: Expr) -> Option<Expr> {
        let at = self.at;
        let aval = x.aval();
        let mut kept = aval.shape().to_vec();
        dims.iter().for_each(|dim| kept[*dim] = 1);
        let gradient = self.gradient.reshape(&kept);
        match reduction {
            Reduction::Sum => Some(spread(gradient, &aval, self.parts.first(), at)),
            Reduction::Max | Reduction::Min => {
                let is_it = x.equal(self.value.reshape(&kept)).cast(aval.dtype());
                let dims: Vec<isize> = dims.iter().map(|dim| dim.cast_signed()).collect();
                let count = is_it.reduce(Reduction::Sum, &dims[..], true, at);
                Some(gradient * is_it / count)
            }
            Reduction::Any | Reduction::All => None,
        }
    }

    /// The gradient of each factor is the product of the other one with that of the result.
    fn of_product(&self, contraction: &Contraction, factors: [Expr; 2]) -> Vec<Option<Expr>> {
        let of_factor = |index: usize| {
            let letters = &contraction.operands[index];
            let other = &contraction.operands[1 - index];
            let is_known =
                |letter: &char| contraction.result.contains(letter) || other.contains(letter);
            let known: Vec<char> = letters.iter().copied().filter(is_known).collect();
            let aval = factors[index].aval();
            let like = self.parts.get(index).map(Sharding::reduced);
            let like_product = like.as_ref().map(|like| {
                let is_known = |dim: usize| letters.get(dim).is_some_and(&is_known);
                (&letters[..], undivided_but(like, is_known))
            });
            let product = contract(
                "gradient of a product",
                Contraction {
                    operands: [contraction.result.clone(), other.clone()],
                    result: known.clone(),
                },
                [self.gradient, factors[1 - index]],
                like_product,
                self.at,
            );
            if known.len() == letters.len() {
                return Some(product);
            }
            // A dimension that neither the result nor the other factor has was summed over.
            let size = |(dim, letter): (usize, &char)| match known.contains(letter) {
                true => aval.shape()[dim],
                false => 1,
            };
            let kept: Vec<usize> = letters.iter().enumerate().map(size).collect();
            let product = product.reshape(&kept);
            Some(spread(product, &aval, like.as_ref(), self.at))
        };
        vec![of_factor(0), of_factor(1)]
    }

    fn of_segments(&self, dim: usize, x: Expr, segments: Expr) -> Expr {
        let count = self.value.shape()[dim];
        let aval = x.aval();
        if count == 0 {
            return zeros(&x.node(self.at), self.at);
        }
        let taken = self.gradient.take(dim.cast_signed(), segments);
        // Parts of no segment were left out.
        let is_in = is_index(segments, count);
        let behind = aval.ndim() - dim - segments.shape().len();
        let shape = [&segments.shape()[..], &vec![1; behind]].concat();
        is_in.reshape(&shape).select(taken, 0.0)
    }
}

/// Returns a size as the number that it is beside whole numbers. More segments than an i64 has
/// numbers do not exist.
fn number_of(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// Returns which share of the extreme `y` of two values is `own`: 1, 0, or a half if both are.
fn share(own: Expr, y: Expr, other: Expr) -> Expr {
    let dtype = y.dtype();
    own.equal(y).cast(dtype) / (other.equal(y).cast(dtype) + 1.0)
}

/// Returns the sharding in which only these dimensions are divided.
fn undivided_but(sharding: &Sharding, is_kept: impl Fn(usize) -> bool) -> Sharding {
    let (Some(mesh), Some(spec)) = (sharding.mesh(), sharding.spec()) else {
        return sharding.clone();
    };
    let entries = spec.entries().iter().enumerate();
    let entries = entries.map(|(dim, entry)| match is_kept(dim) {
        true => entry.clone(),
        false => SpecEntry::None,
    });
    mesh.sharding(Spec::new(entries.collect()))
}

/// Sums a gradient over the dimensions along which an operand of this shape was repeated.
fn sum_to(g: Expr, aval: &ShapedArray) -> Expr {
    let shape = g.shape();
    // A value with an error has no dimensions.
    let Some(first) = shape.len().checked_sub(aval.ndim()) else {
        return g;
    };
    let is_repeated = |dim: &usize| match dim.checked_sub(first) {
        None => true,
        Some(own) => aval.shape()[own] == 1 && shape[*dim] != 1,
    };
    let repeated: Vec<isize> = (0..shape.len())
        .filter(is_repeated)
        .map(usize::cast_signed)
        .collect();
    match repeated.is_empty() {
        true => g,
        false => g.sum(&repeated[..]).reshape(aval.shape()),
    }
}

fn of_concatenated(g: Expr, dim: usize, operands: &[Expr]) -> Vec<Option<Expr>> {
    let mut start = 0;
    let part = |x: &Expr| {
        let end = start + x.shape()[dim];
        let part = g.slice(dim.cast_signed(), start..end);
        start = end;
        Some(part)
    };
    operands.iter().map(part).collect()
}

fn of_taken(g: Expr, dim: usize, x: Expr, indices: Expr) -> Expr {
    let len = x.shape()[dim];
    g.segment_sum(dim.cast_signed(), in_range(indices, len), len)
}

/// Returns the indices of the elements that are taken: an index beyond the dimension is that of its
/// last element, and a negative one that of its first.
fn in_range(indices: Expr, len: usize) -> Expr {
    let indices = indices.cast(DType::I64);
    indices.maximum(0).minimum(number_of(len) - 1)
}

/// Returns which numbers are indices of a dimension with this size.
fn is_index(numbers: Expr, len: usize) -> Expr {
    let numbers = numbers.cast(DType::I64);
    numbers.greater_equal(0) & numbers.less(number_of(len))
}
