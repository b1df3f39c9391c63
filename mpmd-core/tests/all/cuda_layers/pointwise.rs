//! Activations, sums and conversions.

use super::*;
use layers::{ActivationCurve, GateHalves, MatrixShape, add_to};

const CURVES: [ActivationCurve; 3] = [
    ActivationCurve::Gelu,
    ActivationCurve::GeluErf,
    ActivationCurve::Silu,
];

/// The value of a curve.
fn value(curve: ActivationCurve, x: f64) -> f64 {
    match curve {
        ActivationCurve::Gelu => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        ActivationCurve::GeluErf => {
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

fn slope(curve: ActivationCurve, x: f64) -> f64 {
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
                    let [out, plain, d_x] = y else {
                        panic!("three outputs")
                    };
                    let (bias, size) = (Some(x[1].at(0)), MatrixShape::new(rows, width));
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
                close(
                    &format!("gradient of {name}"),
                    &y[2],
                    &sums.collect::<Vec<_>>(),
                    2e-6,
                );
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
        let y = device(
            &layers::ACTIVATION,
            std::slice::from_ref(&x),
            &outputs,
            move |cuda, x, y| {
                let [y, d_x] = y else { panic!("two outputs") };
                let size = MatrixShape::new(1, 4);
                layers::activate(cuda, curve, size, &x[0], None, &mut *y)?;
                layers::activate_backward(cuda, curve, size, &x[0], None, &x[0], d_x)
            },
        );
        let [y, d_x] = [&y[0], &y[1]].map(|y| y.to_vec::<f32>().unwrap());
        assert!(
            y[..2] == [1e20, 100.0] && y[2..].iter().all(|y| y.abs() < 1e-25),
            "{y:?}"
        );
        assert!(
            d_x[..2] == [1e20, 100.0] && d_x[2..].iter().all(|d| d.abs() < 1e-3),
            "{d_x:?}"
        );
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
            let y = device(
                &layers::ELEMENTWISE,
                &[x, more, bias],
                &outputs,
                move |cuda, x, y| {
                    let [all, biased, sum] = y else {
                        panic!("three outputs")
                    };
                    let (size, bias) = (MatrixShape::new(rows, width), Some(x[2].at(0)));
                    layers::add_bias(cuda, size, &x[0], bias, Some(x[1].at(0)), all)?;
                    layers::add_bias(cuda, size, &x[0], bias, None, biased)?;
                    // In place.
                    cuda.copy(&x[0], &mut *sum)?;
                    let sum = sum.at(0);
                    layers::add(cuda, rows * width, sum, &x[1], sum)
                },
            );
            let name = format!("sums of {dtype} [{rows}, {width}]");
            let exact = |with_bias: f64, with_more: f64| -> Vec<f64> {
                (0..n)
                    .map(|i| a[i] + with_bias * c[i % width] + with_more * b[i])
                    .collect()
            };
            close(&name, &y[0], &exact(1.0, 1.0), 1e-6);
            close(&name, &y[1], &exact(1.0, 0.0), 1e-6);
            close(&name, &y[2], &exact(0.0, 1.0), 1e-6);
        }
    }
}

#[test]
fn gates_and_their_gradients_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, width) in [(1, 1), (3, 33), (5, 64)] {
            let n = rows * width;
            let (x, exact) = sample(dtype, 2 * n, 1);
            let (d_y, d) = sample(dtype, n, 2);
            for curve in CURVES {
                let outputs = [shape(dtype, n), shape(dtype, 2 * n)];
                let inputs = [x.clone(), d_y.clone()];
                let y = device(&layers::ACTIVATION, &inputs, &outputs, move |cuda, x, y| {
                    let [y, d_x] = y else { panic!("two outputs") };
                    let size = MatrixShape::new(rows, width);
                    let halves = GateHalves {
                        a: x[0].at(0),
                        b: x[0].at(width),
                        stride: 2 * width,
                    };
                    layers::gate(cuda, curve, size, halves, y)?;
                    // In place.
                    cuda.copy(&x[0], &mut *d_x)?;
                    let d_x = d_x.at(0);
                    let results = [d_x, d_x.at(width)];
                    let halves = GateHalves {
                        a: d_x,
                        b: d_x.at(width),
                        stride: 2 * width,
                    };
                    layers::gate_backward(cuda, curve, size, halves, &x[1], results)
                });
                let (mut out, mut d_x) = (Vec::new(), Vec::new());
                for (row, d) in exact.chunks(2 * width).zip(d.chunks(width)) {
                    let (a, b) = row.split_at(width);
                    out.extend((0..width).map(|i| value(curve, a[i]) * b[i]));
                    d_x.extend((0..width).map(|i| d[i] * b[i] * slope(curve, a[i])));
                    d_x.extend((0..width).map(|i| d[i] * value(curve, a[i])));
                }
                let name = format!("gate {curve:?} of {dtype} [{rows}, {width}]");
                close(&name, &y[0], &out, 1e-6);
                close(&format!("gradient of {name}"), &y[1], &d_x, 2e-6);
            }
        }
    }
}

#[test]
fn scaled_sums_go_to_either_dtype() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for n in [1, 3, 257, 1000] {
            let [(x, a), (y, b)] = [1, 2].map(|seed| sample(dtype, n, seed));
            let outputs = [shape(dtype, n), shape(DType::F32, n)];
            let y = device(
                &layers::ELEMENTWISE,
                &[x, y],
                &outputs,
                move |cuda, x, y| {
                    let [same, single] = y else {
                        panic!("two outputs")
                    };
                    cuda.copy(&x[1], &mut *same)?;
                    layers::add_scaled(cuda, n, -0.75, &x[0], same)?;
                    layers::convert(cuda, n, &x[1], &mut *single)?;
                    layers::add_scaled(cuda, n, -0.75, &x[0], single)
                },
            );
            let sums: Vec<f64> = a.iter().zip(&b).map(|(a, b)| b - 0.75 * a).collect();
            close(&format!("scaled sums of {dtype} {n}"), &y[0], &sums, 1e-6);
            close(
                &format!("scaled sums of {dtype} {n} in f32"),
                &y[1],
                &sums,
                1e-6,
            );
        }
    }
}

#[test]
fn conversions_round_as_the_host_does() {
    if softcuda::again!() {
        return;
    }
    let mut numbers = fastrand::Rng::with_seed(1);
    let mut values: Vec<f32> = (0..1001).map(|_| f32::from_bits(numbers.u32(..))).collect();
    values.retain(|x| !x.is_nan());
    values.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
    ]);
    let n = values.len();
    let outputs = [shape(DType::Bf16, n), shape(DType::F32, n)];
    let y = device(
        &layers::ELEMENTWISE,
        &[of(&values)],
        &outputs,
        move |cuda, x, y| {
            let [half, single] = y else {
                panic!("two outputs")
            };
            layers::convert(cuda, n, &x[0], &mut *half)?;
            layers::convert(cuda, n, &*half, single)
        },
    );
    let halves: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(y[0].to_vec::<bf16>().unwrap(), halves);
    let singles: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    assert_eq!(y[1].to_vec::<f32>().unwrap(), singles);
}

#[test]
fn dropout_keeps_the_elements_that_the_host_keeps() {
    if softcuda::again!() {
        return;
    }
    let key = mpmd_layout::random::Key(0x0123_4567_89ab_cdef);
    for dtype in BOTH {
        for (n, drop_p, limit) in [
            (1, 0.5, 32768),
            (1003, 0.1, 6554),
            (64, 0.0, 0),
            (9, 0.999_999, 65535),
        ] {
            let (x, exact) = sample(dtype, n, 1);
            let y = device(
                &layers::ELEMENTWISE,
                &[x],
                &[shape(dtype, n)],
                move |cuda, x, y| layers::dropout(cuda, n, key, drop_p, &x[0], &mut y[0]),
            );
            let scale = (65536.0 / (65536.0 - limit as f64)) as f32;
            let kept = (0..n).map(|i| {
                let bits = mpmd_layout::random::bits(key, i as u64 / 4) >> (16 * (i % 4)) & 0xffff;
                let value = if bits < limit {
                    0.0
                } else {
                    exact[i] as f32 * scale
                };
                f64::from(if dtype == DType::Bf16 {
                    bf16::from_f32(value).to_f32()
                } else {
                    value
                })
            });
            assert_eq!(
                numbers(&y[0]),
                kept.collect::<Vec<_>>(),
                "{dtype} {n} {drop_p}"
            );
        }
    }
}
