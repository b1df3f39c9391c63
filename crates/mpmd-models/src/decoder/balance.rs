//! The loss that balances the experts of a model (Fedus et al., 2021), over all layers together.

use mpmd::candle::candle_core::DType;
use mpmd::candle::{Device, Result, Tensor};

/// The sums for the loss that balances experts, over one microbatch and all layers so far.
pub(crate) struct Balance {
    /// For each expert, the number of tokens routed to it, and the sum of its router probabilities:
    /// `[2, experts]`.
    pub(crate) sums: Tensor,
    /// For each token, 1 if it enters the sums, or 0 if it is padding. `None` if there is no
    /// padding.
    counted: Option<Vec<f32>>,
}

impl Balance {
    /// Creates the sums for one part of a model. `before` has the sums of the earlier layers.
    ///
    /// Padding does not enter the sums. `starts` `[rows, time]` has the column at which each
    /// token's sequence starts; a sequence of a single token is padding.
    ///
    /// # Errors
    ///
    /// If `starts` is no matrix of u32.
    pub(crate) fn new(
        experts: usize,
        before: Option<Tensor>,
        starts: Option<&Tensor>,
    ) -> Result<Self> {
        let sums = match before {
            Some(before) => before,
            None => Tensor::zeros((2, experts), DType::F32, &Device::Cpu)?,
        };

        let counted = |row: &Vec<u32>| {
            let is_start = |column: usize| {
                row.get(column)
                    .is_none_or(|start| *start as usize == column)
            };
            let counts = |column| !(is_start(column) && is_start(column + 1));
            (0..row.len())
                .map(|column| f32::from(u8::from(counts(column))))
                .collect::<Vec<_>>()
        };

        let rows = starts.map(Tensor::to_vec2::<u32>).transpose()?;
        Ok(Self {
            sums,
            counted: rows.map(|rows| rows.iter().flat_map(counted).collect()),
        })
    }

    /// Adds one layer to the sums: the experts' probabilities `[tokens, experts]`, and the experts
    /// to which each token is routed.
    pub(super) fn add(&mut self, shares: &Tensor, taken: &[Vec<u32>]) -> Result<()> {
        let (tokens, experts) = shares.dims2()?;
        let weight = |token: usize| self.counted.as_ref().map_or(1.0, |counted| counted[token]);
        let mut counts = vec![0.0; experts];
        for (token, taken) in taken.iter().enumerate() {
            taken
                .iter()
                .for_each(|expert| counts[*expert as usize] += weight(token));
        }

        let shares = match &self.counted {
            None => shares.clone(),
            Some(counted) => {
                let counted = Tensor::from_slice(counted, (tokens, 1), &Device::Cpu)?;
                shares.broadcast_mul(&counted)?
            }
        };
        let counts = Tensor::from_vec(counts, (1, experts), &Device::Cpu)?;
        let layer = Tensor::cat(&[counts, shares.sum_keepdim(0)?], 0)?;
        self.sums = (&self.sums + layer)?;
        Ok(())
    }

    /// Returns the balancing loss of a microbatch of `tokens` tokens. `layers` is the number of
    /// layers with experts. The loss is least if all experts get equally many tokens.
    pub(crate) fn loss(&self, tokens: usize, layers: usize) -> Result<Tensor> {
        let tokens = self
            .counted
            .as_ref()
            .map_or(tokens as f32, |counted| counted.iter().sum());
        let rows = f64::from(tokens).max(1.0) * layers as f64;
        let (_, experts) = self.sums.dims2()?;
        let means = (&self.sums / rows)?;
        (means.get(0)?.detach() * means.get(1)?)?.sum_all()? * experts as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_fill_a_row_do_not_count() -> Result<()> {
        // Sequences of three and two tokens, and two tokens that fill the row.
        let starts = Tensor::new(
            &[[0u32, 0, 0, 3, 3, 5, 6], [0, 0, 0, 0, 0, 0, 0]],
            &Device::Cpu,
        )?;
        let balance = Balance::new(2, None, Some(&starts))?;
        assert_eq!(
            balance.counted.unwrap()[..8],
            [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
        );
        Ok(())
    }

    #[test]
    fn loss_is_that_of_the_definition() -> Result<()> {
        // Two layers and three tokens, of which the last does not count.
        let starts = Tensor::new(&[[0u32, 0, 2]], &Device::Cpu)?;
        let mut balance = Balance::new(2, None, Some(&starts))?;
        let shares = |shares: [[f32; 2]; 3]| Tensor::new(&shares, &Device::Cpu);
        let taken = |experts: [u32; 3]| experts.map(|expert| vec![expert]);
        balance.add(
            &shares([[0.75, 0.25], [0.5, 0.5], [0.0, 1.0]])?,
            &taken([0, 0, 1]),
        )?;
        let before = balance.sums;
        let mut balance = Balance::new(2, Some(before), Some(&starts))?;
        balance.add(
            &shares([[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]])?,
            &taken([1, 0, 1]),
        )?;
        // The first expert is taken three times of four, with a mean probability of 2.5 / 4.
        let expected = 2.0 * (0.75 * 0.625 + 0.25 * 0.375);
        assert_eq!(balance.loss(3, 2)?.to_scalar::<f32>()?, expected);
        Ok(())
    }
}
