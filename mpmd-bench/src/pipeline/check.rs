//! The expected losses: the same training in one process, by the definitions, in double precision.

use super::mlp::{Shape, Values};

/// The maximum relative error of a loss. The checked losses are computed in single precision.
const TOLERANCE: f64 = 1e-4;

/// The maximum number of multiplications for which `--check` is accepted, about ten seconds of
/// work.
pub(super) const MOST: f64 = 1e10;

/// Returns the approximate number of multiplications that [`losses`] makes for `steps` steps.
pub(super) fn multiplications(shape: &Shape, steps: usize) -> f64 {
    let products = 3 * shape.layers * shape.microbatches * steps;
    products as f64 * shape.rows as f64 * (shape.dim as f64).powi(2)
}

/// Returns the mean square error of each of `steps` training steps, before its update. Computes
/// them on this thread, with the learning rate `rate`.
pub(super) fn losses(shape: &Shape, rate: f64, steps: usize) -> Vec<f64> {
    let Shape { dim, layers, rows, microbatches, .. } = *shape;
    let double = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let mut w: Vec<_> =
        (0..layers).map(|l| double(Values::Matrix(l).vec(dim, dim * dim))).collect();
    let mut b: Vec<_> = (0..layers).map(|l| double(Values::Bias(l).vec(dim, dim))).collect();
    let whole = |of: fn(usize) -> Values| -> Vec<f64> {
        (0..microbatches).flat_map(|m| double(of(m).vec(dim, rows * dim))).collect()
    };
    let (x, labels) = (whole(Values::Input), whole(Values::Labels));
    let elements = x.len() as f64;
    let mut losses = Vec::with_capacity(steps);
    for _ in 0..steps {
        let mut outputs = vec![x.clone()];
        for (w, b) in w.iter().zip(&b) {
            let input = &outputs[outputs.len() - 1];
            let mut y = Vec::with_capacity(input.len());
            for x in input.chunks_exact(dim) {
                let mut row = b.clone();
                for (x, w) in x.iter().zip(w.chunks_exact(dim)) {
                    row.iter_mut().zip(w).for_each(|(y, w)| *y += x * w);
                }
                y.extend(row.into_iter().map(|y| y.max(0.0)));
            }
            outputs.push(y);
        }
        let errors: Vec<f64> =
            outputs[layers].iter().zip(&labels).map(|(y, label)| y - label).collect();
        losses.push(errors.iter().map(|error| error * error).sum::<f64>() / elements);
        let mut d: Vec<f64> = errors.iter().map(|error| 2.0 * error / elements).collect();
        for layer in (0..layers).rev() {
            d.iter_mut()
                .zip(&outputs[layer + 1])
                .filter(|(_, y)| **y <= 0.0)
                .for_each(|(d, _)| *d = 0.0);
            let mut before = vec![0.0; d.len()];
            let (mut dw, mut db) = (vec![0.0; dim * dim], vec![0.0; dim]);
            for (row, d) in d.chunks_exact(dim).enumerate() {
                db.iter_mut().zip(d).for_each(|(db, d)| *db += d);
                for column in 0..dim {
                    let (at, of) = (row * dim + column, column * dim..(column + 1) * dim);
                    let x = outputs[layer][at];
                    dw[of.clone()].iter_mut().zip(d).for_each(|(dw, d)| *dw += x * d);
                    before[at] = w[layer][of].iter().zip(d).map(|(w, d)| w * d).sum();
                }
            }
            w[layer].iter_mut().zip(dw).for_each(|(w, d)| *w -= rate * d);
            b[layer].iter_mut().zip(db).for_each(|(b, d)| *b -= rate * d);
            d = before;
        }
    }
    losses
}

/// Describes the first loss that differs from the expected one by more than `TOLERANCE`; `None` if
/// all are right.
pub(super) fn first_off(found: &[f32], expected: &[f64]) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("there are {} losses instead of {}", found.len(), expected.len()));
    }
    let near = |found: f32, expected: f64| {
        (f64::from(found) - expected).abs() <= TOLERANCE * expected.abs()
    };
    let step = found.iter().zip(expected).position(|(found, expected)| !near(*found, *expected))?;
    Some(format!("the loss of step {step} is {} instead of {:.8}", found[step], expected[step]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_lowers_the_loss_by_the_square_of_the_gradient() {
        // To first order loss(w - r g) = loss(w) - r |g|^2, for every network.
        let shape = Shape { dim: 6, layers: 3, stages: 1, rows: 4, microbatches: 2 };
        let slope = |rate: f64| {
            let losses = losses(&shape, rate, 2);
            (losses[0] - losses[1]) / rate
        };
        let (fine, finer) = (slope(1e-5), slope(1e-6));
        assert!(fine > 0.0 && (fine / finer - 1.0).abs() < 1e-3, "{fine} {finer}");
        let losses = losses(&shape, 0.05, 20);
        assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
    }

    #[test]
    fn first_wrong_loss_is_named() {
        assert_eq!(first_off(&[1.0, 0.50002], &[1.0, 0.5]), None);
        let said = first_off(&[1.0, 0.5003, 7.0], &[1.0, 0.5, 0.25]).unwrap();
        assert_eq!(said, "the loss of step 1 is 0.5003 instead of 0.50000000");
        assert!(first_off(&[f32::NAN], &[1.0]).is_some());
        assert_eq!(first_off(&[], &[1.0]).unwrap(), "there are 0 losses instead of 1");
    }
}
