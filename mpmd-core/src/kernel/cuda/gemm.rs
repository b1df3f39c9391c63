//! Products of matrices: what is multiplied, in rows as everything here is, and what that is to
//! cuBLAS, which has columns.

use crate::device::cuda::work::{Math, Types};
use crate::device::cuda::{Operand, Product};
use crate::error::{Error, Result};
use mpmd_layout::aval::DType;

/// A product `C = alpha * op(A) * op(B) + beta * C` of row-major matrices, or a batch of such.
///
/// `op(A)` has `m` rows and `k` columns, `op(B)` has `k` and `n`, `C` has `m` and `n`. The elements
/// of A and B are of one dtype, `f32`, `f64`, `f16` or `bf16`; those of C too, or `f32` where A and
/// B are `f16` or `bf16`.
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

    /// What C holds is multiplied with this and added. With 0, as it is unless it is said, what C
    /// holds does not matter.
    #[must_use]
    pub const fn beta(self, beta: f64) -> Self {
        Self { beta, ..self }
    }

    /// How many elements lie between the beginnings of two rows of A, B and C, as they are in
    /// memory: at least as many as a row has.
    #[must_use]
    pub const fn leading(self, a: usize, b: usize, c: usize) -> Self {
        Self { leading: Some([a, b, c]), ..self }
    }

    /// So many products, and how many elements lie between two matrices A, B and C of the batch. 0
    /// takes the same A, or B, each time.
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

    /// What cuBLAS is asked for, of operands with so many elements. `None` where there is nothing
    /// to do.
    ///
    /// Rows of one are columns of the other: it sees every matrix transposed, and makes C' = op(B)'
    /// op(A)'.
    ///
    /// # Errors
    ///
    /// Where operands are too short, rows overlap, or cuBLAS has no such product.
    pub(super) fn product(
        &self,
        dtypes: [DType; 3],
        elements: [usize; 3],
    ) -> Result<Option<Product>> {
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
                return Err(wrong(format!(
                    "{name} has {} elements, which is too short",
                    elements[i]
                )));
            }
        }
        if self.batch > 1 && !self.results_are_apart(leading[2]) {
            let stride = self.strides[2];
            return Err(wrong(format!("matrices C that begin {stride} elements apart overlap")));
        }
        let int = |size: usize| {
            i32::try_from(size)
                .map_err(|_| wrong(format!("a size of {size} is more than cuBLAS takes")))
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

    /// Whether no element is in two matrices C: they come one after another, or lie beside each
    /// other in the rows.
    fn results_are_apart(&self, leading: usize) -> bool {
        let (stride, last) = (self.strides[2], self.batch - 1);
        let one_after_another =
            stride >= (self.m - 1).saturating_mul(leading).saturating_add(self.n);
        let beside =
            stride >= self.n && last.saturating_mul(stride).saturating_add(self.n) <= leading;
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

#[cfg(test)]
mod tests {
    use super::*;

    const F32: [DType; 3] = [DType::F32; 3];

    /// What a library of columns makes of a product.
    fn by_columns(product: &Product, a: &[f64], b: &[f64], c: &mut [f64]) {
        let Product { m, n, k, first, second, result, batch, alpha, beta, .. } = *product;
        let at = |operand: Operand, index: i32, row: i32, column: i32| {
            let (row, column) = if operand.transposed { (column, row) } else { (row, column) };
            (i64::from(index) * operand.stride
                + i64::from(column) * i64::from(operand.leading)
                + i64::from(row)) as usize
        };
        for index in 0..batch {
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                // Ours second is its first.
                let sum: f64 = (0..k)
                    .map(|i| b[at(first, index, row, i)] * a[at(second, index, i, column)])
                    .sum();
                let to = &mut c[at(result, index, row, column)];
                *to = alpha * sum + beta * *to;
            }
        }
    }

    /// The same of rows, as `Gemm` says it.
    fn by_rows(gemm: &Gemm, a: &[f64], b: &[f64], c: &mut [f64]) {
        let leading = gemm.leading.unwrap_or(gemm.stored().map(|(_, columns)| columns));
        for index in 0..gemm.batch {
            let base: Vec<usize> = gemm.strides.iter().map(|stride| index * stride).collect();
            let at = |i: usize, row: usize, column: usize| {
                let turned = i < 2 && gemm.transpose[i];
                let (row, column) = if turned { (column, row) } else { (row, column) };
                base[i] + row * leading[i] + column
            };
            for (row, column) in
                (0..gemm.m).flat_map(|row| (0..gemm.n).map(move |column| (row, column)))
            {
                let sum: f64 = (0..gemm.k).map(|i| a[at(0, row, i)] * b[at(1, i, column)]).sum();
                let to = &mut c[at(2, row, column)];
                *to = gemm.alpha * sum + gemm.beta * *to;
            }
        }
    }

    fn turned(gemm: Gemm, a: bool, b: bool) -> Gemm {
        let gemm = if a { gemm.transpose_a() } else { gemm };
        if b { gemm.transpose_b() } else { gemm }
    }

    #[test]
    fn a_library_of_columns_makes_the_product_of_rows() {
        let values = |count: usize| -> Vec<f64> {
            (0..count).map(|i| ((i * 37 + 11) % 23) as f64 - 9.0).collect()
        };
        for ((a, b), wide) in [(false, false), (false, true), (true, false), (true, true)]
            .into_iter()
            .flat_map(|t| [(t, false), (t, true)])
        {
            let mut gemm = turned(Gemm::new(3, 5, 4), a, b).alpha(2.0).beta(-1.0);
            if wide {
                // Of matrices beside each other: of a batch of two in each row of C.
                gemm = gemm.leading(7, 9, 12).batch(2, [40, 0, 6]);
            }
            let (x, y, mut c) = (values(100), values(60), values(90));
            let mut expected = c.clone();
            by_rows(&gemm, &x, &y, &mut expected);
            let product = gemm.product(F32, [x.len(), y.len(), c.len()]).unwrap().unwrap();
            by_columns(&product, &x, &y, &mut c);
            assert_eq!(c, expected, "{gemm}, wide: {wide}");
        }
    }

    #[test]
    fn operands_that_are_too_short_are_refused_to_the_element() {
        let gemm = Gemm::new(3, 5, 4).transpose_b().batch(2, [12, 0, 15]);
        let try_with = |elements| gemm.product(F32, elements).map(|product| product.is_some());
        assert!(try_with([24, 20, 30]).unwrap());
        for (elements, name) in
            [([23, 20, 30], "A has 23"), ([24, 19, 30], "B has 19"), ([24, 20, 29], "C has 29")]
        {
            let said = try_with(elements).unwrap_err().to_string();
            assert!(
                said.contains(name) && said.contains("gemm A[3, 4] B'[4, 5], 2 times"),
                "{said}"
            );
        }
        // Behind the last row comes nothing.
        let wide = Gemm::new(3, 5, 4).leading(10, 10, 10);
        assert!(
            wide.product(F32, [24, 35, 25]).is_ok() && wide.product(F32, [24, 35, 24]).is_err()
        );
    }

    #[test]
    fn rows_and_results_must_not_overlap() {
        let product = |gemm: Gemm| gemm.product(F32, [1000; 3]);
        assert!(product(Gemm::new(3, 5, 4).leading(3, 5, 5)).is_err());
        assert!(product(Gemm::new(3, 5, 4).transpose_a().leading(3, 5, 5)).is_ok());
        for (stride, leading, fits) in [
            (15, 5, true),
            (14, 5, false),
            (0, 5, false),
            (5, 20, true),
            (5, 19, false),
            (4, 20, false),
        ] {
            let gemm = Gemm::new(3, 5, 4).leading(4, 5, leading).batch(4, [0, 0, stride]);
            assert_eq!(product(gemm).is_ok(), fits, "{stride} {leading}");
        }
    }

    #[test]
    fn sizes_that_cublas_cannot_count_are_refused_and_nothing_is_no_product() {
        let huge = Gemm::new(1, 1, 1).leading(1 << 31, 1, 1);
        assert!(huge.product(F32, [1; 3]).is_err());
        let wraps = Gemm::new(2, 1, 1).leading(usize::MAX, 1, 1).batch(2, [usize::MAX, 0, 2]);
        assert!(wraps.product(F32, [usize::MAX; 3]).is_err());
        assert_eq!(Gemm::new(0, 5, 4).product(F32, [0, 20, 0]).unwrap(), None);
        assert_eq!(Gemm::new(3, 5, 4).batch(0, [0; 3]).product(F32, [0; 3]).unwrap(), None);
        // No factors: C is multiplied with beta all the same.
        let none = Gemm::new(3, 5, 0).product(F32, [0, 0, 15]).unwrap().unwrap();
        assert_eq!((none.k, none.first.leading, none.second.leading), (0, 5, 1));
    }

    #[test]
    fn only_known_types_are_multiplied() {
        use DType::{Bf16, F16, F32, F64, I32};
        let types = |dtypes| {
            Gemm::new(1, 1, 1).math(Math::Tf32).product(dtypes, [1; 3]).map(|p| p.unwrap().types)
        };
        assert_eq!(types([F32; 3]).unwrap().math, Math::Tf32);
        assert_eq!(
            types([F16, F16, F32]).unwrap(),
            Types { factors: F16, result: F32, math: Math::F32 }
        );
        assert!(types([Bf16; 3]).is_ok() && types([F64; 3]).is_ok());
        for dtypes in
            [[F32, F32, F16], [F16, Bf16, F32], [F32, F16, F32], [I32; 3], [F64, F64, F32]]
        {
            assert!(types(dtypes).is_err(), "{dtypes:?}");
        }
    }
}
