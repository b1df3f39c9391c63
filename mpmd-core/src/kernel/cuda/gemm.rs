//! Products of row-major matrices, and their translation to cuBLAS, which takes column-major
//! matrices.

use crate::error::{Error, Result};
use mpmd_device::cuda::work::{Math, Types};
use mpmd_device::cuda::{CublasProduct, Operand};
use mpmd_layout::aval::DType;

/// A product `C = alpha * op(A) * op(B) + beta * C` of row-major matrices, or a batch of products.
///
/// `op(A)` is `[m, k]`, `op(B)` is `[k, n]` and `C` is `[m, n]`. A and B have the same dtype:
/// `f32`, `f64`, `f16` or `bf16`. C has that dtype too, or `f32` if A and B are `f16` or `bf16`.
///
/// ```
/// use mpmd_core::cuda::{Gemm, Math};
///
/// // The gradient of the weights, dw += x' dy: x is [64, 512] and dy is [64, 2048].
/// let gradient = Gemm::new(512, 2048, 64).transpose_a().beta(1.0).math(Math::Tf32);
/// // scores = q k' for each of 12 heads, which lie side by side in rows of 12 * 64 elements.
/// let one = Gemm::new(128, 128, 64).transpose_b().leading(768, 768, 128);
/// let scores = one.batch(12, [64, 64, 128 * 128]);
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
    /// Elements between the starts of successive stored rows of A, B and C. `None` for dense
    /// matrices.
    leading: Option<[usize; 3]>,
    batch: usize,
    strides: [usize; 3],
    math: Math,
}

/// The shape of a matrix as it is stored.
#[derive(Clone, Copy)]
struct StoredShape {
    rows: usize,
    columns: usize,
}

impl StoredShape {
    /// Describes a matrix of `rows` rows and `columns` columns that is stored transposed or not.
    fn new(rows: usize, columns: usize, transposed: bool) -> Self {
        if transposed {
            Self {
                rows: columns,
                columns: rows,
            }
        } else {
            Self { rows, columns }
        }
    }
}

impl Gemm {
    /// Describes `C[m, n] = A[m, k] B[k, n]` of dense matrices.
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

    /// Marks A as stored transposed, as `[k, m]`.
    #[must_use]
    pub const fn transpose_a(self) -> Self {
        Self {
            transpose: [true, self.transpose[1]],
            ..self
        }
    }

    /// Marks B as stored transposed, as `[n, k]`.
    #[must_use]
    pub const fn transpose_b(self) -> Self {
        Self {
            transpose: [self.transpose[0], true],
            ..self
        }
    }

    /// Multiplies the product by `alpha`, which is rounded to `f32` unless the operands are `f64`.
    #[must_use]
    pub const fn alpha(self, alpha: f64) -> Self {
        Self { alpha, ..self }
    }

    /// Adds `beta` times the old content of C. With 0, the default, the old content is not read.
    /// Like the factor of the product, `beta` is rounded to `f32` unless the operands are `f64`.
    #[must_use]
    pub const fn beta(self, beta: f64) -> Self {
        Self { beta, ..self }
    }

    /// Sets the distance in elements between the starts of successive stored rows of A, B and C.
    /// Each must be at least the length of a row; the default is that length.
    #[must_use]
    pub const fn leading(self, a: usize, b: usize, c: usize) -> Self {
        Self {
            leading: Some([a, b, c]),
            ..self
        }
    }

    /// Computes `products` products. `strides` are the distances in elements between successive
    /// matrices A, B and C. A stride of 0 uses the same A or B each time.
    #[must_use]
    pub const fn batch(self, products: usize, strides: [usize; 3]) -> Self {
        Self {
            batch: products,
            strides,
            ..self
        }
    }

    /// Sets the precision of `f32` products. Has no effect on other dtypes.
    #[must_use]
    pub const fn math(self, math: Math) -> Self {
        Self { math, ..self }
    }

    /// Returns the shapes of A, B and C as they are stored.
    fn stored(&self) -> [StoredShape; 3] {
        [
            StoredShape::new(self.m, self.k, self.transpose[0]),
            StoredShape::new(self.k, self.n, self.transpose[1]),
            StoredShape::new(self.m, self.n, false),
        ]
    }

    /// Translates the product for cuBLAS. `elements` are the lengths of A, B and C. `None` if C is
    /// empty.
    ///
    /// A stored row is a column for cuBLAS, so it sees every matrix transposed. It computes C' =
    /// op(B)' op(A)'.
    ///
    /// # Errors
    ///
    /// If operands are too short, rows or matrices C overlap, or cuBLAS has no such product.
    pub(super) fn product(
        &self,
        dtypes: [DType; 3],
        elements: [usize; 3],
    ) -> Result<Option<CublasProduct>> {
        let types = types(dtypes, self.math).ok_or_else(|| {
            let [a, b, c] = dtypes;
            self.wrong(&format!("there is no product of {a} and {b} into {c}"))
        })?;
        if self.m == 0 || self.n == 0 || self.batch == 0 {
            return Ok(None);
        }

        let stored = self.stored();
        let leading = self.leading.unwrap_or(stored.map(|shape| shape.columns));
        self.check_operands(&stored, leading, elements)?;
        if self.batch > 1 && !self.results_are_apart(leading[2]) {
            let stride = self.strides[2];
            return Err(self.wrong(&format!(
                "matrices C that begin {stride} elements apart overlap"
            )));
        }

        let operand = |i: usize| -> Result<Operand> {
            Ok(Operand {
                transposed: i < 2 && self.transpose[i],
                leading: self.int(leading[i].max(1))?,
                stride: i64::try_from(self.strides[i])
                    .map_err(|_| self.wrong("a stride is more than cuBLAS takes"))?,
            })
        };
        Ok(Some(CublasProduct {
            m: self.int(self.n)?,
            n: self.int(self.m)?,
            k: self.int(self.k)?,
            // cuBLAS's first factor is B.
            first: operand(1)?,
            second: operand(0)?,
            result: operand(2)?,
            batch: self.int(self.batch)?,
            alpha: self.alpha,
            beta: self.beta,
            types,
        }))
    }

    /// Checks that no row is longer than the distance between rows, and that A, B and C have enough
    /// elements.
    fn check_operands(
        &self,
        stored: &[StoredShape; 3],
        leading: [usize; 3],
        elements: [usize; 3],
    ) -> Result<()> {
        for (i, name) in ["A", "B", "C"].into_iter().enumerate() {
            let StoredShape { rows, columns } = stored[i];
            let leading = leading[i];
            if leading < columns {
                return Err(self.wrong(&format!(
                    "rows of {name} have {columns} elements and begin {leading} apart"
                )));
            }

            // The number of elements up to the end of the last matrix; the inner `None` is an
            // overflow.
            let last = (rows * columns > 0).then(|| {
                let first = (self.batch - 1).checked_mul(self.strides[i])?;
                (rows - 1)
                    .checked_mul(leading)?
                    .checked_add(columns)?
                    .checked_add(first)
            });
            let needed = last
                .unwrap_or(Some(0))
                .filter(|needed| *needed <= elements[i]);
            if needed.is_none() {
                return Err(self.wrong(&format!(
                    "{name} has {} elements, which is too short",
                    elements[i]
                )));
            }
        }
        Ok(())
    }

    /// Converts a size to the integer type of cuBLAS. Fails if it does not fit.
    fn int(&self, size: usize) -> Result<i32> {
        i32::try_from(size)
            .map_err(|_| self.wrong(&format!("a size of {size} is more than cuBLAS takes")))
    }

    fn wrong(&self, why: &str) -> Error {
        Error::kernel(format!("{self}: {why}"))
    }

    /// Returns true if the matrices C of a batch do not overlap: they follow each other, or their
    /// rows lie side by side.
    fn results_are_apart(&self, leading: usize) -> bool {
        let stride = self.strides[2];
        let last = self.batch - 1;
        let one_after_another =
            stride >= (self.m - 1).saturating_mul(leading).saturating_add(self.n);
        let beside =
            stride >= self.n && last.saturating_mul(stride).saturating_add(self.n) <= leading;
        one_after_another || beside
    }
}

impl std::fmt::Display for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b] = self
            .transpose
            .map(|transposed| if transposed { "'" } else { "" });
        let Self { m, n, k, batch, .. } = self;
        write!(f, "gemm A{a}[{m}, {k}] B{b}[{k}, {n}]")?;
        if *batch == 1 {
            Ok(())
        } else {
            write!(f, ", {batch} times")
        }
    }
}

fn types([a, b, c]: [DType; 3], math: Math) -> Option<Types> {
    let known = match a {
        DType::F32 | DType::F64 => c == a,
        DType::F16 | DType::Bf16 => c == a || c == DType::F32,
        _ => false,
    };
    // Only `f32` elements have a choice of precision.
    let math = if a == DType::F32 { math } else { Math::F32 };
    (known && a == b).then_some(Types {
        factors: a,
        result: c,
        math,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: [DType; 3] = [DType::F32; 3];

    /// Computes a product in column-major order, as cuBLAS does.
    fn by_columns(product: &CublasProduct, a: &[f64], b: &[f64], c: &mut [f64]) {
        let CublasProduct {
            m,
            n,
            k,
            first,
            second,
            result,
            batch,
            alpha,
            beta,
            ..
        } = *product;
        let at = |operand: Operand, index: i32, row: i32, column: i32| {
            let (row, column) = if operand.transposed {
                (column, row)
            } else {
                (row, column)
            };
            (i64::from(index) * operand.stride
                + i64::from(column) * i64::from(operand.leading)
                + i64::from(row)) as usize
        };
        for index in 0..batch {
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                // The first factor is B.
                let sum: f64 = (0..k)
                    .map(|i| b[at(first, index, row, i)] * a[at(second, index, i, column)])
                    .sum();
                let to = &mut c[at(result, index, row, column)];
                *to = alpha * sum + beta * *to;
            }
        }
    }

    /// Computes the same product in row-major order, as `Gemm` documents it.
    fn by_rows(gemm: &Gemm, a: &[f64], b: &[f64], c: &mut [f64]) {
        let leading = gemm
            .leading
            .unwrap_or(gemm.stored().map(|shape| shape.columns));
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
                let sum: f64 = (0..gemm.k)
                    .map(|i| a[at(0, row, i)] * b[at(1, i, column)])
                    .sum();
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
    fn column_major_product_equals_row_major_product() {
        let values = |count: usize| -> Vec<f64> {
            (0..count)
                .map(|i| ((i * 37 + 11) % 23) as f64 - 9.0)
                .collect()
        };
        for ((a, b), wide) in [(false, false), (false, true), (true, false), (true, true)]
            .into_iter()
            .flat_map(|t| [(t, false), (t, true)])
        {
            let mut gemm = turned(Gemm::new(3, 5, 4), a, b).alpha(2.0).beta(-1.0);
            if wide {
                // A batch of two, with the matrices C side by side in the same rows.
                gemm = gemm.leading(7, 9, 12).batch(2, [40, 0, 6]);
            }
            let (x, y, mut c) = (values(100), values(60), values(90));
            let mut expected = c.clone();
            by_rows(&gemm, &x, &y, &mut expected);
            let product = gemm
                .product(F32, [x.len(), y.len(), c.len()])
                .unwrap()
                .unwrap();
            by_columns(&product, &x, &y, &mut c);
            assert_eq!(c, expected, "{gemm}, wide: {wide}");
        }
    }

    #[test]
    fn operands_one_element_short_are_refused() {
        let gemm = Gemm::new(3, 5, 4).transpose_b().batch(2, [12, 0, 15]);
        let try_with = |elements| gemm.product(F32, elements).map(|product| product.is_some());
        assert!(try_with([24, 20, 30]).unwrap());
        for (elements, name) in [
            ([23, 20, 30], "A has 23"),
            ([24, 19, 30], "B has 19"),
            ([24, 20, 29], "C has 29"),
        ] {
            let said = try_with(elements).unwrap_err().to_string();
            assert!(
                said.contains(name) && said.contains("gemm A[3, 4] B'[4, 5], 2 times"),
                "{said}"
            );
        }
        // The last row needs no padding behind it.
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
            let gemm = Gemm::new(3, 5, 4)
                .leading(4, 5, leading)
                .batch(4, [0, 0, stride]);
            assert_eq!(product(gemm).is_ok(), fits, "{stride} {leading}");
        }
    }

    #[test]
    fn huge_sizes_are_refused_and_empty_products_skipped() {
        let huge = Gemm::new(1, 1, 1).leading(1 << 31, 1, 1);
        assert!(huge.product(F32, [1; 3]).is_err());
        let wraps = Gemm::new(2, 1, 1)
            .leading(usize::MAX, 1, 1)
            .batch(2, [usize::MAX, 0, 2]);
        assert!(wraps.product(F32, [usize::MAX; 3]).is_err());
        assert_eq!(Gemm::new(0, 5, 4).product(F32, [0, 20, 0]).unwrap(), None);
        assert_eq!(
            Gemm::new(3, 5, 4)
                .batch(0, [0; 3])
                .product(F32, [0; 3])
                .unwrap(),
            None
        );
        // With k = 0, C is still multiplied by beta.
        let none = Gemm::new(3, 5, 0)
            .product(F32, [0, 0, 15])
            .unwrap()
            .unwrap();
        assert_eq!((none.k, none.first.leading, none.second.leading), (0, 5, 1));
    }

    #[test]
    fn unsupported_dtypes_are_refused() {
        use DType::{Bf16, F16, F32, F64, I32};
        let types = |dtypes| {
            Gemm::new(1, 1, 1)
                .math(Math::Tf32)
                .product(dtypes, [1; 3])
                .map(|p| p.unwrap().types)
        };
        assert_eq!(types([F32; 3]).unwrap().math, Math::Tf32);
        assert_eq!(
            types([F16, F16, F32]).unwrap(),
            Types {
                factors: F16,
                result: F32,
                math: Math::F32
            }
        );
        assert!(types([Bf16; 3]).is_ok() && types([F64; 3]).is_ok());
        for dtypes in [
            [F32, F32, F16],
            [F16, Bf16, F32],
            [F32, F16, F32],
            [I32; 3],
            [F64, F64, F32],
        ] {
            assert!(types(dtypes).is_err(), "{dtypes:?}");
        }
    }
}
