//! The ways of tokens to their experts and back.

use std::ops::Range;
use std::sync::Arc;

use mpmd::candle::candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, bail};
use mpmd::candle::{Result, Tensor};

/// The routes of tokens to a device's experts and back. Each row is one (expert, token) pair; rows
/// are ordered by expert.
pub(super) struct Routes {
    /// The experts of this device.
    experts: Range<usize>,
    /// Number of rows of each expert of this device.
    pub(super) rows: Vec<usize>,
    /// The token of each row.
    tokens: Vec<usize>,
    /// The index of each row's weight in the tensor of all routing weights. `all` is the length of
    /// that tensor.
    weights: Vec<usize>,
    all: usize,
    /// For each token, its (expert, row) pairs in the order of experts.
    places: Vec<Vec<(usize, usize)>>,
}

impl Routes {
    /// Creates the routes to `experts`. `taken` has the experts of each token.
    pub(super) fn new(taken: &[Vec<u32>], experts: Range<usize>) -> Self {
        // (expert, token, place of the weight)
        let mut all = Vec::new();
        for (token, taken_of) in taken.iter().enumerate() {
            for (slot, expert) in taken_of.iter().enumerate() {
                if experts.contains(&(*expert as usize)) {
                    all.push((*expert as usize, token, token * taken_of.len() + slot));
                }
            }
        }

        all.sort_unstable();
        let mut rows = vec![0; experts.len()];
        let mut places = vec![Vec::new(); taken.len()];
        for (row, (expert, token, _)) in all.iter().enumerate() {
            rows[expert - experts.start] += 1;
            places[*token].push((*expert, row));
        }

        let (tokens, weights) = all
            .into_iter()
            .map(|(_, token, weight)| (token, weight))
            .unzip();
        let all = taken.iter().map(Vec::len).sum();
        Self {
            experts,
            rows,
            tokens,
            weights,
            all,
            places,
        }
    }

    /// Returns for each row the vector of its token. `x` has the vectors of all tokens, of `width`
    /// elements each.
    fn spread(&self, x: &[f32], width: usize) -> Vec<f32> {
        let rows = self.tokens.iter();
        rows.flat_map(|token| &x[token * width..(token + 1) * width])
            .copied()
            .collect()
    }

    /// Returns for each token the sum of its rows. `read` writes a row to a buffer.
    ///
    /// Adds in the order of a binary tree over all experts, so that a half of the tree may be
    /// summed on another device. A token without rows gets -0, which changes no sum.
    fn sum(&self, width: usize, read: &dyn Fn(usize, &mut [f32])) -> Vec<f32> {
        let mut out = vec![-0.0; self.places.len() * width];
        for (places, out) in self.places.iter().zip(out.chunks_exact_mut(width.max(1))) {
            if !places.is_empty() {
                add(places, self.experts.clone(), read, out);
            }
        }
        out
    }
}

/// Writes the sum of the rows at `places` to `out`. `experts` contains their experts.
fn add(
    places: &[(usize, usize)],
    experts: Range<usize>,
    read: &dyn Fn(usize, &mut [f32]),
    out: &mut [f32],
) {
    if let [(_, row)] = places {
        return read(*row, out);
    }

    let middle = experts.start.midpoint(experts.end);
    let (low, high) = places.split_at(places.partition_point(|place| place.0 < middle));
    match (low, high) {
        ([], high) => add(high, middle..experts.end, read, out),
        (low, []) => add(low, experts.start..middle, read, out),
        (low, high) => {
            let mut other = vec![0.0; out.len()];
            add(low, experts.start..middle, read, out);
            add(high, middle..experts.end, read, &mut other);
            out.iter_mut()
                .zip(other)
                .for_each(|(sum, term)| *sum += term);
        }
    }
}

/// Operation that copies each token's vector to its rows. With weights, each row is multiplied by
/// its own.
///
/// The gradient of a token is the sum of its rows, in an order that does not depend on the devices
/// of the experts.
pub(super) struct SpreadRows(pub(super) Arc<Routes>);

/// Operation that adds up the rows of each token. With weights, each row is multiplied by its own
/// before.
///
/// The weights are part of this operation because candle drops factors from the graph on a device
/// without rows. All devices must call the same collectives.
pub(super) struct Sum(pub(super) Arc<Routes>);

/// Operation that computes the gradient of each routing weight from the gradients of the tokens and
/// the rows.
struct RouteWeights(Arc<Routes>);

impl CustomOp1 for SpreadRows {
    fn name(&self) -> &'static str {
        "rows of experts"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.dims()[1];
        let rows = self.0.spread(values(x, layout)?, width);
        Ok((
            CpuStorage::F32(rows),
            Shape::from((self.0.tokens.len(), width)),
        ))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        gradient
            .contiguous()?
            .apply_op1_no_bwd(&Sum(self.0.clone()))
            .map(Some)
    }
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        "sum of experts"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = values(x, layout)?;
        let width = layout.dims()[1];

        let sum = self.0.sum(width, &|row, out| {
            out.copy_from_slice(&x[row * width..][..width])
        });
        Ok((
            CpuStorage::F32(sum),
            Shape::from((self.0.places.len(), width)),
        ))
    }
}

impl CustomOp2 for SpreadRows {
    fn name(&self) -> &'static str {
        "weighted rows of experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        weights: &CpuStorage,
        of_weights: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let width = layout.dims()[1];
        let weights = values(weights, of_weights)?;
        let mut rows = self.0.spread(values(x, layout)?, width);
        for (row, weight) in rows.chunks_exact_mut(width.max(1)).zip(&self.0.weights) {
            row.iter_mut().for_each(|value| *value *= weights[*weight]);
        }
        Ok((
            CpuStorage::F32(rows),
            Shape::from((self.0.tokens.len(), width)),
        ))
    }
}

impl CustomOp2 for Sum {
    fn name(&self) -> &'static str {
        "weighted sum of experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        weights: &CpuStorage,
        of_weights: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = values(x, layout)?;
        let width = layout.dims()[1];
        let weights = values(weights, of_weights)?;
        let sum = self.0.sum(width, &|row, out| {
            let weight = weights[self.0.weights[row]];
            out.iter_mut()
                .zip(&x[row * width..])
                .for_each(|(out, value)| *out = weight * value);
        });
        Ok((
            CpuStorage::F32(sum),
            Shape::from((self.0.places.len(), width)),
        ))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let of_x = gradient.apply_op2_no_bwd(weights, &SpreadRows(self.0.clone()))?;
        let of_weights = gradient.apply_op2_no_bwd(x, &RouteWeights(self.0.clone()))?;
        Ok((Some(of_x), Some(of_weights.reshape(weights.shape())?)))
    }
}

impl CustomOp2 for RouteWeights {
    fn name(&self) -> &'static str {
        "weights of experts"
    }

    fn cpu_fwd(
        &self,
        gradient: &CpuStorage,
        layout: &Layout,
        x: &CpuStorage,
        of_x: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let gradient = values(gradient, layout)?;
        let width = layout.dims()[1];
        let x = values(x, of_x)?;
        let mut out = vec![0.0; self.0.all];

        let rows = x
            .chunks_exact(width.max(1))
            .zip(&self.0.tokens)
            .zip(&self.0.weights);
        for ((row, token), weight) in rows {
            let products = row.iter().zip(&gradient[token * width..]);
            out[*weight] = products.map(|(value, gradient)| value * gradient).sum();
        }
        let shape = Shape::from(out.len());
        Ok((CpuStorage::F32(out), shape))
    }
}

/// Returns the f32 elements of a contiguous tensor.
fn values<'a>(x: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (x, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((from, to))) => Ok(&values[from..to]),
        _ => bail!("the rows of experts are not of f32, or not contiguous"),
    }
}

#[cfg(test)]
mod tests {
    use mpmd::candle::Device;
    use mpmd::candle::candle_core::{DType, Var};

    use super::*;

    /// Returns the sum of one token's rows on the experts `of`. `experts` has the token's experts,
    /// and `results` the value of each.
    fn sum(experts: &[u32], of: Range<usize>, results: &[f32]) -> f32 {
        let routes = Routes::new(&[experts.to_vec()], of);
        routes.sum(1, &|row, out| out[0] = results[routes.weights[row]])[0]
    }

    #[test]
    fn results_are_added_in_the_order_of_a_tree() {
        // 1 is lost beside a large number of the same half.
        assert_eq!(sum(&[3, 1, 2], 0..4, &[-1e8, 1.0, 1e8]), 1.0);
        assert_eq!(sum(&[0, 1, 3], 0..4, &[1.0, 1e8, -1e8]), 0.0);
        assert_eq!(sum(&[2], 0..4, &[3.0]), 3.0);
    }

    #[test]
    fn sums_of_halves_give_the_bits_of_the_whole() {
        let results = [0.1, -1e8, -0.0, 0.7, 1e8, 3e-9];
        for experts in [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [7, 0, 6, 3, 4, 1]] {
            for taken in 1..=6 {
                let experts = &experts[..taken];
                let part = |part: Range<usize>| sum(experts, part, &results);
                let whole = part(0..8);
                let halves = part(0..4) + part(4..8);
                let quarters = (part(0..2) + part(2..4)) + (part(4..6) + part(6..8));
                assert_eq!(halves.to_bits(), whole.to_bits(), "{experts:?}");
                assert_eq!(quarters.to_bits(), whole.to_bits(), "{experts:?}");
            }
        }
        assert_eq!(
            sum(&[2], 0..2, &[1.0]).to_bits(),
            (-0.0f32).to_bits(),
            "no row"
        );
        assert_eq!(
            (sum(&[2], 0..2, &[1.0]) + -0.0).to_bits(),
            (-0.0f32).to_bits()
        );
    }

    #[test]
    fn rows_are_by_expert_then_by_token() {
        let taken = [vec![3, 1], vec![0, 3], vec![1, 0]];
        let routes = Routes::new(&taken, 0..4);
        assert_eq!(
            (routes.rows, routes.tokens),
            (vec![2, 2, 0, 2], vec![1, 2, 0, 2, 0, 1])
        );
        assert_eq!(routes.weights, [2, 5, 1, 4, 0, 3]);
        let routes = Routes::new(&taken, 2..4);
        assert_eq!(routes.spread(&[5.0, 6.0, 7.0], 1), [5.0, 6.0]);
        assert_eq!((routes.rows, routes.weights), (vec![0, 2], vec![0, 3]));
        assert!(routes.places[2].is_empty());
    }

    #[test]
    fn gradients_equal_those_of_separate_operations() -> Result<()> {
        let taken = [vec![3, 1], vec![0, 3], vec![1, 0]];
        let variable = |shape: &[usize], step: f64| {
            let count = shape.iter().product::<usize>() as f32;
            let values = (Tensor::arange(0f32, count, &Device::Cpu)? * step)?.sin()?;
            Var::from_tensor(&values.reshape(shape)?)
        };
        let (x, weights) = (variable(&[3, 5], 0.7)?, variable(&[6], 1.1)?);
        for experts in [0..4, 1..3, 2..3] {
            let routes = Arc::new(Routes::new(&taken, experts));
            let u32s = |from: &[usize]| {
                let values = from.iter().map(|value| *value as u32).collect::<Vec<_>>();
                Tensor::from_vec(values, from.len(), &Device::Cpu)
            };
            let (tokens, places) = (u32s(&routes.tokens)?, u32s(&routes.weights)?);
            let zeros = Tensor::zeros((3, 5), DType::F32, &Device::Cpu)?;
            let of = |y: Tensor| {
                let store = (y.sqr()?.sum_all()? + y.sum_all()?)?.backward()?;
                let all = [Some(&y), store.get(&x), store.get(&weights)];
                all.map(|one| {
                    one.map(|one| one.flatten_all()?.to_vec1::<f32>())
                        .transpose()
                })
                .into_iter()
                .collect::<Result<Vec<_>>>()
            };
            let rows = x.as_tensor().apply_op1(SpreadRows(routes.clone()))?.sqr()?;
            let found = of(rows.apply_op2(weights.as_tensor(), Sum(routes.clone()))?)?;
            if routes.tokens.is_empty() {
                assert_eq!(
                    found,
                    vec![
                        Some(vec![-0.0; 15]),
                        Some(vec![0.0; 15]),
                        Some(vec![0.0; 6])
                    ]
                );
                continue;
            }
            let rows = x.index_select(&tokens, 0)?.sqr()?;
            let rows = rows.broadcast_mul(&weights.index_select(&places, 0)?.unsqueeze(1)?)?;
            let expected = of(zeros.index_add(&tokens, &rows, 0)?)?;
            for (found, expected) in found.into_iter().zip(expected) {
                let pairs = found.unwrap().into_iter().zip(expected.unwrap());
                pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{a}, not {b}"));
            }
        }
        Ok(())
    }
}
