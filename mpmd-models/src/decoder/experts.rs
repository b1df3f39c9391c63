//! Experts of a decoder's layer: MLPs of which each token takes some.

use mpmd::candle::candle_core::{CpuStorage, CustomOp1, Layout, Shape, bail};
use mpmd::candle::nn::ops::softmax_last_dim;
use mpmd::candle::nn::{Linear, Module, VarBuilder, linear_no_bias};
use mpmd::candle::{Cx, Device, Result, Tensor};

use super::Plan;
use super::mlp::Mlp;
use crate::config;
use crate::matrix::Form;

/// The experts of a layer, and the router that gives each token its experts.
pub(super) struct Experts {
    router: Linear,
    experts: Vec<Mlp>,
    config: config::Experts,
}

impl Experts {
    pub(super) fn new(
        plan: Plan<'_>,
        experts: config::Experts,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let plan = Plan { lora: None, ..plan };
        let expert = |at| Mlp::new(plan, experts.width, &vb.pp("experts").pp(at));
        Ok(Self {
            router: linear_no_bias(plan.config.hidden_size, experts.count, vb.pp("gate"))?,
            experts: (0..experts.count).map(expert).collect::<Result<_>>()?,
            config: experts,
        })
    }

    pub(super) fn pack(&mut self, form: Form) -> Result<()> {
        self.experts.iter_mut().try_for_each(|expert| expert.pack(form))
    }

    pub(super) fn forward(&self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let (batch, time, width) = x.dims3()?;
        let x = x.reshape((batch * time, width))?;
        let shares = softmax_last_dim(&self.router.forward(&x)?)?;
        let taken = self.taken(&shares.to_vec2()?);
        let per_token = self.config.per_token;
        let indices: Vec<u32> = taken.iter().flatten().copied().collect();
        let indices = Tensor::from_vec(indices, (batch * time, per_token), &Device::Cpu)?;
        let mut weights = shares.gather(&indices, 1)?;
        if self.config.normalizes {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let weights = weights.flatten_all()?;
        // The results of the experts in turn, and the place of each token's results in them.
        let (mut results, mut places, mut rows) = (Vec::new(), vec![Vec::new(); batch * time], 0);
        for (expert, mlp) in self.experts.iter().enumerate() {
            let (mut tokens, mut slots) = (Vec::new(), Vec::new());
            for (token, taken) in taken.iter().enumerate() {
                if let Some(slot) = taken.iter().position(|taken| *taken as usize == expert) {
                    places[token].push((expert, rows + tokens.len()));
                    tokens.push(token as u32);
                    slots.push((token * per_token + slot) as u32);
                }
            }
            let is_idle = tokens.is_empty();
            if is_idle && !self.router.weight().track_op() {
                continue;
            }
            if is_idle {
                // Its parameters have gradients, too: zeros. Nobody reads the row.
                (tokens, slots) = (vec![0], vec![0]);
            }
            rows += tokens.len();
            let count = tokens.len();
            let at = |indices: Vec<u32>| Tensor::from_vec(indices, count, &Device::Cpu);
            let result = mlp.forward(&x.index_select(&at(tokens)?, 0)?, cx)?;
            let weight = match is_idle {
                true => Tensor::zeros((1, 1), result.dtype(), &Device::Cpu)?,
                false => weights.index_select(&at(slots)?, 0)?.reshape((count, 1))?,
            };
            results.push(result.broadcast_mul(&weight)?);
        }
        let sum = Sum { places, experts: self.experts.len(), rows };
        Tensor::cat(&results, 0)?.apply_op1(sum)?.reshape((batch, time, width))
    }

    /// Returns the experts that each token takes: those with the largest shares, of equal ones the
    /// first.
    fn taken(&self, shares: &[Vec<f32>]) -> Vec<Vec<u32>> {
        let of = |shares: &Vec<f32>| {
            let mut experts: Vec<u32> = (0..shares.len() as u32).collect();
            let share = |expert: u32| shares[expert as usize];
            experts.sort_by(|a, b| share(*b).total_cmp(&share(*a)));
            experts.truncate(self.config.per_token);
            experts
        };
        shares.iter().map(of).collect()
    }
}

/// Adds up the results of each token's experts, in the order of a binary tree over all experts: the
/// sums of both halves are added. So a half may be summed elsewhere.
struct Sum {
    /// For each token (expert, row of its result), by expert.
    places: Vec<Vec<(usize, usize)>>,
    experts: usize,
    rows: usize,
}

impl Sum {
    /// Adds up the rows of these experts, which are among `first..last`, in `out`.
    fn add(places: &[(usize, usize)], (first, last): (usize, usize), x: &[f32], out: &mut [f32]) {
        if let [(_, row)] = places {
            out.copy_from_slice(&x[row * out.len()..][..out.len()]);
            return;
        }
        let middle = first.midpoint(last);
        let (low, high) = places.split_at(places.partition_point(|place| place.0 < middle));
        match (low, high) {
            ([], high) => Self::add(high, (middle, last), x, out),
            (low, []) => Self::add(low, (first, middle), x, out),
            (low, high) => {
                let mut other = vec![0.0; out.len()];
                Self::add(low, (first, middle), x, out);
                Self::add(high, (middle, last), x, &mut other);
                out.iter_mut().zip(other).for_each(|(sum, term)| *sum += term);
            }
        }
    }
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        "sum of experts"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(values), Some((from, to))) = (x, layout.contiguous_offsets()) else {
            bail!("the results of experts are not of f32, or not contiguous");
        };
        let (values, width) = (&values[from..to], layout.dims()[1]);
        let mut out = vec![0.0; self.places.len() * width];
        for (places, out) in self.places.iter().zip(out.chunks_exact_mut(width)) {
            Self::add(places, (0, self.experts), values, out);
        }
        Ok((CpuStorage::F32(out), Shape::from((self.places.len(), width))))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let mut tokens = vec![0u32; self.rows];
        for (token, places) in self.places.iter().enumerate() {
            places.iter().for_each(|(_, row)| tokens[*row] = token as u32);
        }
        let tokens = Tensor::from_vec(tokens, self.rows, &Device::Cpu)?;
        gradient.contiguous()?.index_select(&tokens, 0).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_added_in_the_order_of_a_tree() {
        let sum = |experts: &[usize], results: &[f32]| {
            let places: Vec<(usize, usize)> = experts.iter().copied().zip(0..).collect();
            let mut out = [0.0];
            Sum::add(&places, (0, 4), results, &mut out);
            out[0]
        };
        // 1 is lost beside a large number of the same half.
        assert_eq!(sum(&[1, 2, 3], &[1.0, 1e8, -1e8]), 1.0);
        assert_eq!(sum(&[0, 1, 3], &[1.0, 1e8, -1e8]), 0.0);
        assert_eq!(sum(&[2], &[3.0]), 3.0);
    }
}
