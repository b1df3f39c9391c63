//! Experts of a decoder's layer: MLPs of which each token takes some.

use std::sync::Arc;

use mpmd::candle::candle_core::DType;
use mpmd::candle::nn::ops::{sigmoid, softmax_last_dim};
use mpmd::candle::nn::{Activation, Module, VarBuilder, grouped, linear_no_bias};
use mpmd::candle::{Cx, Device, Result, Tensor};

use super::DecoderPlan;
use super::balance::Balance;
use super::mlp::Mlp;
use super::routes::{Routes, SpreadRows, Sum};
use crate::config;
use crate::decoder::devices::DeviceDivision;
use crate::decoder::matrix::{Matrices, MatrixForm, MatrixLayer};

/// The experts of a layer, the router that gives each token its experts, and an optional shared
/// expert for all tokens.
///
/// Each device has some of the experts, and computes all tokens routed to them. The results are
/// summed in the order of a binary tree over all experts, within and between devices.
///
/// A probe of zeros builds the largest graph of any microbatch. All its experts have equal
/// probabilities, so each token takes the first experts, which are those of the probed device. No
/// token can have more rows on one device.
pub(super) struct ExpertLayer {
    router: MatrixLayer,
    gate: Matrices,
    up: Matrices,
    down: Matrices,
    activation: Activation,
    /// The shared expert, an MLP for all tokens, and the weight of the gate that scales its result.
    shared: Option<(Mlp, MatrixLayer)>,
    config: config::ExpertsConfig,
    over: DeviceDivision,
}

impl ExpertLayer {
    pub(super) fn new(
        plan: DecoderPlan<'_>,
        experts: config::ExpertsConfig,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let DecoderPlan { config, over, .. } = plan;
        let width = config.hidden_size;
        let inner = experts.width;
        let vb_experts = vb.pp("experts");

        let matrices = |name, inputs, outputs| {
            let layer = grouped(experts.count, inputs, outputs, vb_experts.pp(name))?;
            Result::Ok(Matrices::Plain(layer))
        };

        let shared = |inner| {
            let mlp = Mlp::new(
                DecoderPlan { lora: None, ..plan },
                inner,
                &vb.pp("shared_expert"),
            )?;
            let factor = linear_no_bias(width, 1, vb.pp("shared_expert_gate"))?;
            Result::Ok((mlp, MatrixLayer::Plain(factor)))
        };

        Ok(Self {
            router: MatrixLayer::Plain(linear_no_bias(width, experts.count, vb.pp("gate"))?),
            gate: matrices("gate_proj", width, inner)?,
            up: matrices("up_proj", width, inner)?,
            down: matrices("down_proj", inner, width)?,
            activation: config.activation,
            shared: experts.shared.map(shared).transpose()?,
            config: experts,
            over,
        })
    }

    pub(super) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        let all = [&mut self.gate, &mut self.up, &mut self.down];
        all.into_iter()
            .try_for_each(|matrices| matrices.pack(form))?;
        self.router.pack(form)?;
        self.shared.iter_mut().try_for_each(|(mlp, factor)| {
            mlp.pack(form)?;
            factor.pack(form)
        })
    }

    /// Computes the experts of each token, and adds this layer to the sums in `balance`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        balance: Option<&mut Balance>,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        let (batch, time, width) = x.dims3()?;
        let x = x.reshape((batch * time, width))?;

        // Shares and sums are f32, also if the model computes in another dtype.
        let dtype = x.dtype();
        let shares = softmax_last_dim(&self.router.forward(&x)?.to_dtype(DType::F32)?)?;
        let per_token = self.config.per_token;
        let taken: Vec<_> = shares
            .to_vec2()?
            .iter()
            .map(|of| taken(of, per_token))
            .collect();
        balance.map_or(Ok(()), |balance| balance.add(&shares, &taken))?;

        let indices: Vec<u32> = taken.iter().flatten().copied().collect();
        let indices = Tensor::from_vec(indices, (batch * time, per_token), &Device::Cpu)?;
        let mut weights = shares.gather(&indices, 1)?;
        if self.config.normalizes {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let weights = self.over.for_experts(&weights.flatten_all()?, cx)?;

        let own = self.gate.experts()?;
        let first = self.over.first_expert(own, cx)?;
        let routes = Arc::new(Routes::new(&taken, first..first + own));
        let rows = self.over.for_experts(&x.to_dtype(DType::F32)?, cx)?;
        let rows = rows
            .apply_op1(SpreadRows(routes.clone()))?
            .to_dtype(dtype)?;
        let gate = self
            .activation
            .forward(&self.gate.forward(&rows, &routes.rows)?)?;
        let inner = (gate * self.up.forward(&rows, &routes.rows)?)?;
        let results = self.down.forward(&inner, &routes.rows)?;

        let sum = results
            .to_dtype(DType::F32)?
            .apply_op2(&weights, Sum(routes))?;
        let mut sum = self.over.sum_of_experts(sum, cx)?.to_dtype(dtype)?;
        if let Some((mlp, factor)) = &self.shared {
            let shared = mlp.forward(&x, cx)?;
            sum = (sum + shared.broadcast_mul(&sigmoid(&factor.forward(&x)?)?)?)?;
        }
        sum.reshape((batch, time, width))
    }
}

/// Returns the experts of one token: the `per_token` largest shares. Among equal shares the lower
/// index comes first.
fn taken(shares: &[f32], per_token: usize) -> Vec<u32> {
    let mut experts: Vec<u32> = (0..shares.len() as u32).collect();
    let share = |expert: u32| shares[expert as usize];
    experts.sort_by(|a, b| share(*b).total_cmp(&share(*a)));
    experts.truncate(per_token);
    experts
}

#[cfg(test)]
mod tests {
    use mpmd::random::Key;

    use super::*;

    /// Routes tokens with these router probabilities. Returns the number of rows on each device.
    fn rows(shares: &[Vec<f32>], per_token: usize, devices: usize) -> Vec<usize> {
        let own = shares[0].len() / devices;
        let taken: Vec<_> = shares
            .iter()
            .map(|shares| taken(shares, per_token))
            .collect();
        let on = |device: usize| Routes::new(&taken, device * own..(device + 1) * own);
        (0..devices)
            .map(|device| on(device).rows.iter().sum())
            .collect()
    }

    #[test]
    fn no_device_has_more_rows_than_a_probe() {
        for (experts, per_token, devices) in [(4, 2, 2), (8, 2, 8), (8, 5, 4), (6, 6, 2), (3, 2, 1)]
        {
            let probe = rows(&vec![vec![0.1; experts]; 10], per_token, devices)[0];
            let random = |seed: usize| Key(7).fold_in(seed as u64).0 as f32;
            let token = |at: usize| (0..experts).map(|e| random(at * experts + e)).collect();
            let tokens: Vec<Vec<f32>> = (0..10).map(token).collect();
            // All tokens prefer the experts of the last device.
            let last = vec![(0..experts).map(|expert| expert as f32).collect(); 10];
            for shares in [&tokens, &last] {
                let rows = rows(shares, per_token, devices);
                assert_eq!(rows.iter().sum::<usize>(), 10 * per_token);
                assert!(
                    rows.iter().all(|rows| *rows <= probe),
                    "{rows:?}, and {probe} in a probe"
                );
            }
            assert_eq!(
                rows(&last, per_token, devices)[devices - 1],
                probe,
                "the bound is reached"
            );
        }
    }
}
