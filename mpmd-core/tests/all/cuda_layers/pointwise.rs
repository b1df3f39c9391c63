//! Activations, sums and conversions.

use super::*;
use layers::{Curve, add_to};

const CURVES: [Curve; 3] = [Curve::Gelu, Curve::GeluErf, Curve::Silu];

/// The value of a curve.
fn value(curve: Curve, x: f64) -> f64 {
    match curve {
        Curve::Gelu => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        Curve::GeluErf => {
            // The error function by its series.
            let z = x / std::f64::consts::SQRT_2;
            let (mut term, mut sum) = (z, z);
            for n in 1..150 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            0.5 * x * (1.0 + sum * 2.0 / std::f64::consts::PI.sqrt())
        }
        _ => x / (1.0 + (-x).exp()),
    }
}

fn slope(curve: Curve, x: f64) -> f64 {
    (value(curve, x + 1e-5) - value(curve, x - 1e-5)) / 2e-5
}

#[test]
fn activations_and_slopes_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        // Whole vectors of four, and others.
        for (rows, width) in [(1, 1), (3, 257), (5, 64)] {
            let n = rows * width;
            let (x, exact) = sample(dtype, n, 1);
            let (bias, more) = sample(dtype, width, 2);
            let (d, slopes) = sample(dtype, n, 3);
            for curve in CURVES {
                let outputs = [shape(dtype, n), shape(dtype, n), shape(dtype, n)];
                let inputs = [x.clone(), bias.clone(), d.clone()];
                let y = device(&layers::ACTIVATION, &inputs, &outputs, move |cuda, x, y| {
                    let [out, plain, d_x] = y else { panic!("three outputs") };
                    let (bias, size) = (Some(x[1].at(0)), (rows, width));
                    layers::activate(cuda, curve, size, &x[0], bias, &mut *out)?;
                    layers::activate(cuda, curve, size, &x[0], None, plain)?;
                    cuda.copy(&*out, &mut *d_x)?;
                    layers::activate_backward(cuda, curve, size, &x[0], bias, &x[2], add_to(d_x))
                });
                let name = format!("{curve:?} of {dtype} [{rows}, {width}]");
                let at = |i: usize| exact[i] + more[i % width];
                let values: Vec<f64> = (0..n).map(|i| value(curve, at(i))).collect();
                close(&name, &y[0], &values, 1e-6);
                let plain: Vec<f64> = exact.iter().map(|x| value(curve, *x)).collect();
                close(&name, &y[1], &plain, 1e-6);
                let out = numbers(&y[0]);
                let sums = (0..n).map(|i| out[i] + slopes[i] * slope(curve, at(i)));
                close(&format!("gradient of {name}"), &y[2], &sums.collect::<Vec<_>>(), 2e-6);
            }
        }
    }
}

#[test]
fn activations_end_in_lines() {
    if softcuda::again!() {
        return;
    }
    let x = array(DType::F32, &[1e20, 100.0, -100.0, -1e20]);
    for curve in CURVES {
        let outputs = [shape(DType::F32, 4), shape(DType::F32, 4)];
        let y = device(&layers::ACTIVATION, &[x.clone()], &outputs, move |cuda, x, y| {
            let [y, d_x] = y else { panic!("two outputs") };
            layers::activate(cuda, curve, (1, 4), &x[0], None, &mut *y)?;
            layers::activate_backward(cuda, curve, (1, 4), &x[0], None, &x[0], d_x)
        });
        let [y, d_x] = [&y[0], &y[1]].map(|y| y.to_vec::<f32>().unwrap());
        assert!(y[..2] == [1e20, 100.0] && y[2..].iter().all(|y| y.abs() < 1e-25), "{y:?}");
        assert!(d_x[..2] == [1e20, 100.0] && d_x[2..].iter().all(|d| d.abs() < 1e-3), "{d_x:?}");
    }
}

#[test]
fn biases_and_residuals_are_added() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, width) in [(1, 1), (3, 33), (7, 100)] {
            let n = rows * width;
            let [(x, a), (more, b), (bias, c)] =
                [(n, 1), (n, 2), (width, 3)].map(|(n, seed)| sample(dtype, n, seed));
            let outputs = [shape(dtype, n), shape(dtype, n), shape(dtype, n)];
            let y = device(&layers::ELEMENTWISE, &[x, more, bias], &outputs, move |cuda, x, y| {
                let [all, biased, sum] = y else { panic!("three outputs") };
                let (size, bias) = ((rows, width), Some(x[2].at(0)));
                layers::add_bias(cuda, size, &x[0], bias, Some(x[1].at(0)), all)?;
                layers::add_bias(cuda, size, &x[0], bias, None, biased)?;
                // In place.
                cuda.copy(&x[0], &mut *sum)?;
                let sum = sum.at(0);
                layers::add(cuda, rows * width, sum, &x[1], sum)
            });
            let name = format!("sums of {dtype} [{rows}, {width}]");
            let exact = |with_bias: f64, with_more: f64| -> Vec<f64> {
                (0..n).map(|i| a[i] + with_bias * c[i % width] + with_more * b[i]).collect()
            };
            close(&name, &y[0], &exact(1.0, 1.0), 1e-6);
            close(&name, &y[1], &exact(1.0, 0.0), 1e-6);
            close(&name, &y[2], &exact(0.0, 1.0), 1e-6);
        }
    }
}
