//! The loss that balances the experts of a model (Fedus et al., 2021), over all layers together.

use mpmd::candle::candle_core::DType;
use mpmd::candle::{Device, Result, Tensor};

/// The sums over the layers so far, of a microbatch.
pub(crate) struct Balance {
    /// Of each expert, the number of tokens that take it, and the sum of its probabilities:
    /// `[2, experts]`.
    pub(crate) sums: Tensor,
    /// For each token, 1 if it counts. `None` if all do.
    counted: Option<Vec<f32>>,
}

impl Balance {
    /// Creates the sums of a part of a model. `before` are those of the layers before it.
    ///
    /// Tokens that fill up a row do not count. With `starts` `[rows, time]`, the columns at which
    /// the tokens' sequences start, these are the sequences of one token.
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

    /// Adds the sums of a layer: from the experts' probabilities `[tokens, experts]`, and the
    /// experts that each token takes.
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

    /// Returns the loss of a microbatch of so many tokens, from the sums of all `layers` layers
    /// with experts. It is least where all experts are taken equally.
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
