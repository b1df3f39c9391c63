//! The matrices of an adapter beside one weight, and their product.

use mpmd::region::Region;

/// The matrices of an adapter beside one weight `W`, which stand for the product `scale B A`.
#[derive(Debug)]
pub(crate) struct AdapterMatrices {
    /// A, `[rank, inputs]`, row-major.
    pub(crate) a: Vec<f32>,
    /// B, `[outputs, rank]`, row-major.
    pub(crate) b: Vec<f32>,
    pub(crate) rank: usize,
    pub(crate) inputs: usize,
    pub(crate) scale: f32,
}

impl AdapterMatrices {
    /// Returns the shape of the weight, `[outputs, inputs]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.b.len() / self.rank.max(1), self.inputs]
    }

    /// Adds the product to a region of the weight. The weight is `[inputs, outputs]` if
    /// `is_transposed`.
    pub(crate) fn add(&self, region: &Region, is_transposed: bool, values: &mut [f32]) {
        let columns = region.range(1);
        for (row, values) in region.range(0).zip(values.chunks_mut(columns.len().max(1))) {
            for at in 0..self.rank {
                if is_transposed {
                    let factor = self.scale * self.a[at * self.inputs + row];
                    for (value, column) in values.iter_mut().zip(columns.clone()) {
                        *value += factor * self.b[column * self.rank + at];
                    }
                } else {
                    let factor = self.scale * self.b[row * self.rank + at];
                    let a = &self.a[at * self.inputs..][columns.clone()];
                    for (value, a) in values.iter_mut().zip(a) {
                        *value += factor * a;
                    }
                }
            }
        }
    }
}
