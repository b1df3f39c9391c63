//! Stochastic gradient descent with momentum, as a function on slices.

use super::float::Float;

/// The constants of stochastic gradient descent, except the learning rate.
///
/// The gradient is increased by `decay` times the parameter. With momentum, the running sum `m` of
/// the gradients becomes `momentum * m + gradient`, and the update subtracts the learning rate
/// times `m`. Nesterov's form uses `gradient + momentum * m` instead of `m`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// Weight of the old sum in the running sum of the gradients. If it is 0, the optimiser keeps
    /// no running sum.
    pub momentum: f64,
    /// Weight decay: this fraction of a parameter is added to its gradient.
    pub decay: f64,
    /// True for Nesterov's form of momentum.
    pub nesterov: bool,
}

impl Sgd {
    /// Updates the parameters `w` and the running sum of the gradients for one step. `rate` is the
    /// learning rate; `factor` multiplies the gradients.
    ///
    /// The running sum must be zeros before the first update. It is `None` without momentum.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length.
    pub fn update<T: Float>(
        &self,
        rate: f64,
        factor: f64,
        w: &mut [T],
        sum: Option<&mut [T]>,
        gradient: &[T],
    ) {
        assert_eq!(gradient.len(), w.len(), "gradient");
        let of = T::from_double;
        let rate = of(rate);
        let factor = of(factor);
        let decay = of(self.decay);
        let momentum = of(self.momentum);

        let pairs = w.iter_mut().zip(gradient);
        let Some(sum) = sum else {
            pairs.for_each(|(w, gradient)| *w = *w - rate * (factor * *gradient + decay * *w));
            return;
        };

        assert_eq!(sum.len(), gradient.len(), "running sum");
        for ((w, gradient), sum) in pairs.zip(sum) {
            let gradient = factor * *gradient + decay * *w;
            *sum = momentum * *sum + gradient;
            let along = if self.nesterov {
                gradient + momentum * *sum
            } else {
                *sum
            };
            *w = *w - rate * along;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_equal_the_definition() {
        let cases = [
            (0.0, 0.0, false),
            (0.0, 0.25, false),
            (0.5, 0.25, false),
            (0.5, 0.0, true),
        ];
        for (momentum, decay, nesterov) in cases {
            let sgd = Sgd {
                momentum,
                decay,
                nesterov,
            };
            let (mut w, mut sum) = ([1.0f64], [0.0f64]);
            let (mut expected, mut m) = (1.0f64, 0.0f64);
            for gradient in [4.0, -2.0, 0.5] {
                let state = (momentum > 0.0).then_some(&mut sum[..]);
                sgd.update(0.125, 0.5, &mut w, state, &[gradient]);
                let g = gradient / 2.0 + decay * expected;
                m = momentum * m + g;
                expected -= 0.125 * if nesterov { g + momentum * m } else { m };
                assert!((w[0] - expected).abs() < 1e-15, "{sgd:?}: {w:?} {expected}");
            }
        }
    }
}
