//! Products of matrices: what is multiplied, in rows as everything here is, and what that is to cuBLAS, which has columns.

use crate::aval::DType;
use crate::backend::cuda::{Operand, Product};
use crate::error::{Error, Result};

/// How `f32` operands are multiplied. Sums are in `f32` always.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Math {
    /// As they are.
    #[default]
    F32,
    /// Rounded to 10 bits of mantissa first, which tensor cores are quick with.
    Tf32,
    /// Rounded to `f16` first, which also has less range.
    F16,
    /// Rounded to `bf16` first: 7 bits of mantissa.
    Bf16,
}

/// A product `C = alpha * op(A) * op(B) + beta * C` of row-major matrices, or a batch of such.
///
/// `op(A)` has `m` rows and `k` columns, `op(B)` has `k` and `n`, `C` has `m` and `n`. The elements of A and B are of one
/// dtype, `f32`, `f64`, `f16` or `bf16`; those of C too, or `f32` where A and B are `f16` or `bf16`.
///
/// ```
/// use mpmd_core::cuda::{Gemm, Math};
///
/// // The gradient of the weights: dw += x' dy, of 64 rows of 512 and of 2048 values.
/// let gradient = Gemm::new(512, 2048, 64).transpose_a().beta(1.0).math(Math::Tf32);
/// // For each of 12 heads, which lie beside each other in a row of 12 * 64: scores = q k'.
/// let scores = Gemm::new(128, 128, 64).transpose_b().leading(768, 768, 128).batch(12, [64, 64, 128 * 128]);
/// # let _ = (gradient, scores);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    m: usize,
    n: usize,
    k: usize,
    transpose: [bool; 2],
    alpha: f64,
    beta: f64,
    /// For A, B, C; those of dense matrices where nothing was said.
    leading: Option<[usize; 3]>,
    batch: usize,
    strides: [usize; 3],
    math: Math,
}

impl Gemm {
    /// `C[m, n] = A[m, k] B[k, n]`, all dense.
    pub const fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            transpose: [false; 2],
            alpha: 1.0,
            beta: 0.0,
            leading: None,
            batch: 1,
            strides: [0; 3],
            math: Math::F32,
        }
    }

    /// A is there as `[k, m]`.
    #[must_use]
    pub const fn transpose_a(self) -> Self {
        Self { transpose: [true, self.transpose[1]], ..self }
    }

    /// B is there as `[n, k]`.
    #[must_use]
    pub const fn transpose_b(self) -> Self {
        Self { transpose: [self.transpose[0], true], ..self }
    }

    /// The product is multiplied with this. In `f32`, but for `f64` operands.
    #[must_use]
    pub const fn alpha(self, alpha: f64) -> Self {
        Self { alpha, ..self }
    }

    /// What C holds is multiplied with this and added. With 0, as it is unless it is said, what C holds does not matter.
    #[must_use]
    pub const fn beta(self, beta: f64) -> Self {
        Self { beta, ..self }
    }

    /// How many elements lie between the beginnings of two rows of A, B and C, as they are in memory: at least as many as a row has.
    #[must_use]
    pub const fn leading(self, a: usize, b: usize, c: usize) -> Self {
        Self { leading: Some([a, b, c]), ..self }
    }

    /// So many products, and how many elements lie between two matrices A, B and C of the batch. 0 takes the same
    /// A, or B, each time.
    #[must_use]
    pub const fn batch(self, products: usize, strides: [usize; 3]) -> Self {
        Self { batch: products, strides, ..self }
    }

    /// How `f32` operands are multiplied. Of no effect on others.
    #[must_use]
    pub const fn math(self, math: Math) -> Self {
        Self { math, ..self }
    }

    /// Rows and columns of A, B and C as they are in memory.
    fn stored(&self) -> [(usize, usize); 3] {
        let turned = |(rows, columns), turn| if turn { (columns, rows) } else { (rows, columns) };
        [
            turned((self.m, self.k), self.transpose[0]),
            turned((self.k, self.n), self.transpose[1]),
            (self.m, self.n),
        ]
    }

    /// What cuBLAS is asked for, of operands with so many elements. `None` where there is nothing to do.
    ///
    /// Rows of one are columns of the other: it sees every matrix transposed, and makes C' = op(B)' op(A)'.
    ///
    /// # Errors
    ///
    /// Where operands are too short, rows overlap, or cuBLAS has no such product.
    pub(super) fn product(&self, dtypes: [DType; 3], elements: [usize; 3]) -> Result<Option<Product>> {
        let wrong = |why: String| Error::kernel(format!("{self}: {why}"));
        let types = types(dtypes, self.math).ok_or_else(|| {
            let [a, b, c] = dtypes;
            wrong(format!("there is no product of {a} and {b} into {c}"))
        })?;
        if self.m == 0 || self.n == 0 || self.batch == 0 {
            return Ok(None);
        }
        let stored = self.stored();
        let leading = self.leading.unwrap_or(stored.map(|(_, columns)| columns));
        for (i, name) in ["A", "B", "C"].into_iter().enumerate() {
            let ((rows, columns), leading) = (stored[i], leading[i]);
            if leading < columns {
                return Err(wrong(format!(
                    "rows of {name} have {columns} elements and begin {leading} apart"
                )));
            }
            let last = (rows * columns > 0).then(|| {
                let first = (self.batch - 1).checked_mul(self.strides[i])?;
                (rows - 1).checked_mul(leading)?.checked_add(columns)?.checked_add(first)
            });
            let needed = last.unwrap_or(Some(0)).filter(|needed| *needed <= elements[i]);
            if needed.is_none() {
                return Err(wrong(format!("{name} has {} elements, which is too short", elements[i])));
            }
        }
        if self.batch > 1 && !self.results_are_apart(leading[2]) {
            let stride = self.strides[2];
            return Err(wrong(format!("matrices C that begin {stride} elements apart overlap")));
        }
        let int = |size: usize| {
            i32::try_from(size).map_err(|_| wrong(format!("a size of {size} is more than cuBLAS takes")))
        };
        let operand = |i: usize| -> Result<Operand> {
            Ok(Operand {
                transposed: i < 2 && self.transpose[i],
                leading: int(leading[i].max(1))?,
                stride: i64::try_from(self.strides[i])
                    .map_err(|_| wrong("a stride is more than cuBLAS takes".to_owned()))?,
            })
        };
        Ok(Some(Product {
            m: int(self.n)?,
            n: int(self.m)?,
            k: int(self.k)?,
            // Its first factor is ours second.
            first: operand(1)?,
            second: operand(0)?,
            result: operand(2)?,
            batch: int(self.batch)?,
            alpha: self.alpha,
            beta: self.beta,
            types,
        }))
    }

    /// Whether no element is in two matrices C: they come one after another, or lie beside each other in the rows.
    fn results_are_apart(&self, leading: usize) -> bool {
        let (stride, last) = (self.strides[2], self.batch - 1);
        let one_after_another = stride >= (self.m - 1).saturating_mul(leading).saturating_add(self.n);
        let beside = stride >= self.n && last.saturating_mul(stride).saturating_add(self.n) <= leading;
        one_after_another || beside
    }
}

impl std::fmt::Display for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b] = self.transpose.map(|transposed| if transposed { "'" } else { "" });
        let Self { m, n, k, batch, .. } = self;
        write!(f, "gemm A{a}[{m}, {k}] B{b}[{k}, {n}]")?;
        if *batch == 1 { Ok(()) } else { write!(f, ", {batch} times") }
    }
}

/// What elements of a product are, to cuBLAS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Types {
    /// Of both factors.
    pub(crate) factors: DType,
    pub(crate) result: DType,
    pub(crate) math: Math,
}

fn types([a, b, c]: [DType; 3], math: Math) -> Option<Types> {
    let known = match a {
        DType::F32 | DType::F64 => c == a,
        DType::F16 | DType::Bf16 => c == a || c == DType::F32,
        _ => false,
    };
    // Where elements are not `f32` there is one way to multiply them.
    let math = if a == DType::F32 { math } else { Math::F32 };
    (known && a == b).then_some(Types { factors: a, result: c, math })
}
