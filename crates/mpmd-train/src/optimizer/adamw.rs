//! The AdamW update, as a function on slices.

use super::float::Float;

/// The AdamW optimiser's constants, except the learning rate: Adam with weight decay separate from
/// the gradient (Loshchilov and Hutter, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Weight of the old mean in the running mean of the gradients.
    pub beta1: f64,
    /// Weight of the old mean in the running mean of the squared gradients.
    pub beta2: f64,
    /// Small number that prevents a division by zero.
    pub epsilon: f64,
    /// Weight decay: each step subtracts this fraction of a weight, times the learning rate. Weight
    /// decay is usual for matrices, but not for vectors (biases, gains).
    pub decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            decay: 0.1,
        }
    }
}

/// The values of one AdamW step that are equal for all parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Number of this update in the training, counted from 1.
    pub number: u64,
    /// The learning rate.
    pub rate: f64,
    /// Factor that multiplies the gradients: the [`clip_factor`](super::clip_factor), divided by
    /// the weight of the summed loss, such as its number of tokens.
    pub gradient_factor: f64,
}

/// The factors of one [`AdamW`] step, derived from its constants and the step's number.
pub(super) struct AdamFactors<T> {
    pub(super) rate: T,
    pub(super) root: T,
    pub(super) keep: T,
    pub(super) beta1: T,
    pub(super) fresh1: T,
    pub(super) beta2: T,
    pub(super) fresh2: T,
    pub(super) epsilon: T,
}

impl AdamW {
    /// Updates the parameters `w`, the running mean `mean` of the gradients, and the running mean
    /// `square` of the squared gradients for one step.
    ///
    /// Both running means must be zeros before the first update.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length or the step's number is zero.
    pub fn update<T: Float>(
        &self,
        step: AdamStep,
        w: &mut [T],
        mean: &mut [T],
        square: &mut [T],
        gradient: &[T],
    ) {
        assert!(step.number > 0, "updates are counted from one");
        let len = w.len();
        assert_eq!(mean.len(), len, "state and gradient");
        assert_eq!(square.len(), len, "state and gradient");
        assert_eq!(gradient.len(), len, "state and gradient");

        let AdamFactors {
            rate,
            root,
            keep,
            beta1,
            fresh1,
            beta2,
            fresh2,
            epsilon,
        } = self.factors(step);

        let factor = T::from_double(step.gradient_factor);
        let state = mean.iter_mut().zip(square.iter_mut());
        for ((w, (mean, square)), gradient) in w.iter_mut().zip(state).zip(gradient) {
            let gradient = factor * *gradient;
            *mean = beta1 * *mean + fresh1 * gradient;
            *square = beta2 * *square + fresh2 * (gradient * gradient);
            *w = keep * *w - rate * *mean / (square.root() * root + epsilon);
        }
    }

    /// Returns the factors of one step, which are equal for all elements.
    pub(super) fn factors<T: Float>(&self, step: AdamStep) -> AdamFactors<T> {
        // The running means start at zero. These factors correct the bias in the first updates.
        let unbias = |beta: f64| 1.0 - beta.powf(step.number as f64);
        let of = T::from_double;
        AdamFactors {
            rate: of(step.rate / unbias(self.beta1)),
            root: of(unbias(self.beta2).sqrt().recip()),
            keep: of(1.0 - step.rate * self.decay),
            beta1: of(self.beta1),
            fresh1: of(1.0 - self.beta1),
            beta2: of(self.beta2),
            fresh2: of(1.0 - self.beta2),
            epsilon: of(self.epsilon),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_equal_the_definition() {
        let adamw = AdamW {
            beta1: 0.75,
            beta2: 0.9,
            epsilon: 1e-3,
            decay: 0.5,
        };
        let (mut w, mut mean, mut square) = (vec![1.0, -2.0], vec![0.0; 2], vec![0.0; 2]);
        let (mut expected, mut m, mut v) = ([1.0f64, -2.0], [0.0f64; 2], [0.0f64; 2]);
        for (number, gradient) in [[4.0, -0.01], [0.0, 3.0], [-1.0, 2.0]]
            .into_iter()
            .enumerate()
        {
            let step = AdamStep {
                number: number as u64 + 1,
                rate: 0.1,
                gradient_factor: 0.5,
            };
            adamw.update(step, &mut w, &mut mean, &mut square, &gradient);
            for i in 0..2 {
                let g: f64 = gradient[i] / 2.0;
                m[i] = 0.75 * m[i] + 0.25 * g;
                v[i] = 0.9 * v[i] + 0.1 * g * g;
                let power = number as i32 + 1;
                let (m_hat, v_hat) = (
                    m[i] / (1.0 - 0.75f64.powi(power)),
                    v[i] / (1.0 - 0.9f64.powi(power)),
                );
                expected[i] -= 0.1 * (m_hat / (v_hat.sqrt() + 1e-3) + 0.5 * expected[i]);
                assert!(
                    (w[i] - expected[i]).abs() < 1e-13,
                    "step {power}: {w:?} {expected:?}"
                );
            }
        }
    }
}
