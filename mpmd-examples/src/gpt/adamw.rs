//! AdamW, its learning rate over time, and gradient clipping by the global norm.

use std::f64::consts::PI;

use crate::math::Real;

/// The AdamW optimiser's constants, except the learning rate: Adam with weight decay separate from
/// the gradient (Loshchilov and Hutter, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Weight of the past values in the running mean of the gradients.
    pub beta1: f64,
    /// Weight of the past values in the running mean of the squared gradients.
    pub beta2: f64,
    /// Small number that prevents a division by zero.
    pub epsilon: f64,
    /// Weight decay: each step subtracts this fraction of a weight, times the learning rate. It is
    /// usual for matrices, but not for vectors (biases, gains).
    pub decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, decay: 0.1 }
    }
}

/// The values of one optimiser step that are equal for all leaves, the arrays of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Number of this update, counted from 1.
    pub number: u64,
    /// The learning rate, for instance from [`WarmupCosine`].
    pub rate: f64,
    /// Factor of the gradients: the [`clip_factor`] divided by the weight of the summed loss, for
    /// instance its number of tokens.
    pub gradient_factor: f64,
}

impl AdamW {
    /// Updates the parameters `w`, the running mean `mean` of the gradients, and the running mean
    /// `square` of their squares, once.
    ///
    /// Both running means must be zeros before the first update.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length or the step's number is zero.
    pub fn update<T: Real>(
        &self,
        step: AdamStep,
        w: &mut [T],
        mean: &mut [T],
        square: &mut [T],
        gradient: &[T],
    ) {
        assert!(step.number > 0, "updates are counted from one");
        let len = w.len();
        assert_eq!(
            (mean.len(), square.len(), gradient.len()),
            (len, len, len),
            "state and gradient"
        );
        // The running means start at zero. These factors correct the bias in the first updates.
        let unbias = |beta: f64| 1.0 - beta.powf(step.number as f64);
        let rate = T::of(step.rate / unbias(self.beta1));
        let root = T::of(unbias(self.beta2).sqrt().recip());
        let keep = T::of(1.0 - step.rate * self.decay);
        let factor = T::of(step.gradient_factor);
        let (beta1, beta2, epsilon) = (T::of(self.beta1), T::of(self.beta2), T::of(self.epsilon));
        let (fresh1, fresh2) = (T::of(1.0 - self.beta1), T::of(1.0 - self.beta2));
        let state = mean.iter_mut().zip(square.iter_mut());
        for ((w, (mean, square)), gradient) in w.iter_mut().zip(state).zip(gradient) {
            let gradient = factor * *gradient;
            *mean = beta1 * *mean + fresh1 * gradient;
            *square = beta2 * *square + fresh2 * (gradient * gradient);
            *w = keep * *w - rate * *mean / (square.sqrt() * root + epsilon);
        }
    }
}

/// A learning rate that rises linearly, then falls along half a cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    /// The highest rate, reached in step `warmup`.
    pub peak: f64,
    /// The lowest rate, from step `total` on.
    pub floor: f64,
    /// Steps of the rise. With zero, the first step already has nearly the peak's rate.
    pub warmup: u64,
    /// Number of all steps.
    pub total: u64,
}

impl WarmupCosine {
    /// Returns the rate of a step, counted from 1.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        if step >= self.total {
            return self.floor;
        }
        // `warmup <= step < total` here, so the divisor is not zero.
        let done = (step - self.warmup) as f64 / (self.total - self.warmup) as f64;
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (PI * done).cos())
    }
}

/// Returns the sum of a leaf's squares, in doubles and in the order of the elements.
pub fn square_sum<T: Real>(leaf: &[T]) -> f64 {
    leaf.iter().fold(0.0, |sum, x| sum + x.to_f64() * x.to_f64())
}

/// Returns (factor, norm). The factor reduces the global norm of all gradients to at most `limit`,
/// and is 1 if the norm is not above it. `square_sums` are the [`square_sum`]s of the leaves, in
/// their order.
///
/// If the norm is not finite, the factor is zero or NaN: the caller should check the norm.
pub fn clip_factor(square_sums: impl IntoIterator<Item = f64>, limit: f64) -> (f64, f64) {
    let norm = square_sums.into_iter().fold(0.0, |sum, x| sum + x).sqrt();
    (if norm <= limit { 1.0 } else { limit / norm }, norm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_equal_the_definition() {
        let adamw = AdamW { beta1: 0.75, beta2: 0.9, epsilon: 1e-3, decay: 0.5 };
        let (mut w, mut mean, mut square) = (vec![1.0, -2.0], vec![0.0; 2], vec![0.0; 2]);
        let (mut expected, mut m, mut v) = ([1.0f64, -2.0], [0.0f64; 2], [0.0f64; 2]);
        for (number, gradient) in [[4.0, -0.01], [0.0, 3.0], [-1.0, 2.0]].into_iter().enumerate() {
            let step = AdamStep { number: number as u64 + 1, rate: 0.1, gradient_factor: 0.5 };
            adamw.update(step, &mut w, &mut mean, &mut square, &gradient);
            for i in 0..2 {
                let g: f64 = gradient[i] / 2.0;
                m[i] = 0.75 * m[i] + 0.25 * g;
                v[i] = 0.9 * v[i] + 0.1 * g * g;
                let power = number as i32 + 1;
                let (m_hat, v_hat) =
                    (m[i] / (1.0 - 0.75f64.powi(power)), v[i] / (1.0 - 0.9f64.powi(power)));
                expected[i] -= 0.1 * (m_hat / (v_hat.sqrt() + 1e-3) + 0.5 * expected[i]);
                assert!((w[i] - expected[i]).abs() < 1e-13, "step {power}: {w:?} {expected:?}");
            }
        }
    }

    #[test]
    fn rate_rises_linearly_and_falls_along_a_cosine() {
        let rates = WarmupCosine { peak: 1.0, floor: 0.2, warmup: 4, total: 12 };
        let expected = [
            (1, 0.25),
            (2, 0.5),
            (4, 1.0),
            (6, 0.6 + 0.4 * 0.5f64.sqrt()),
            (8, 0.6),
            (12, 0.2),
            (13, 0.2),
            (u64::MAX, 0.2),
        ];
        for (step, rate) in expected {
            assert!((rates.rate(step) - rate).abs() < 1e-12, "{step}: {}", rates.rate(step));
        }
        let none = WarmupCosine { warmup: 0, ..rates };
        assert!(none.rate(1) > 0.98);
        let only = WarmupCosine { warmup: 12, ..rates };
        assert_eq!((only.rate(6), only.rate(12)), (0.5, 0.2));
    }

    #[test]
    fn clipping_scales_the_global_norm_to_the_limit() {
        let leaves = [vec![3.0f32, 0.0], vec![4.0]];
        assert_eq!(clip_factor(leaves.iter().map(|l| square_sum(l)), 2.5), (0.5, 5.0));
        assert_eq!(clip_factor(leaves.iter().map(|l| square_sum(l)), 5.0), (1.0, 5.0));
        assert_eq!(clip_factor([0.0], 1.0), (1.0, 0.0));
        assert!(clip_factor([f64::NAN], 1.0).0.is_nan());
    }
}
