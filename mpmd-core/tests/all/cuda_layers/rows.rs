//! Norms, column sums, embeddings and cross-entropy.

use super::*;
use layers::{CudaCrossEntropy, CudaEmbedding, CudaNorm, add_to};

/// Shapes `[rows, width]`: single elements, and more columns than a block has threads.
const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 33), (33, 257), (2, 1000), (300, 4)];

#[test]
fn norms_and_their_gradients_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, width) in SHAPES {
            for remove_mean in [true, false] {
                norm(
                    dtype,
                    CudaNorm {
                        rows,
                        width,
                        eps: 1e-5,
                        remove_mean,
                    },
                );
            }
        }
    }
}

fn norm(dtype: DType, norm: CudaNorm) {
    let CudaNorm {
        rows,
        width,
        eps,
        remove_mean,
    } = norm;
    let n = rows * width;
    let [(x, a), (weight, w), (bias, b), (d_y, d)] =
        [(n, 1), (width, 2), (width, 3), (n, 4)].map(|(n, seed)| sample(dtype, n, seed));
    let sums = shape(DType::F32, width);
    let outputs = [
        shape(dtype, n),
        shape(dtype, n),
        sums.clone(),
        sums,
        shape(DType::F32, 2 * rows),
    ];
    let y = device(
        &layers::NORM,
        &[x, weight, bias, d_y],
        &outputs,
        move |cuda, x, y| {
            let [y, d_x, d_weight, d_bias, statistics] = y else {
                panic!("five outputs")
            };
            let bias = remove_mean.then(|| x[2].at(0));
            norm.forward(cuda, &x[0], x[1].at(0), bias, y, &mut *statistics)?;
            cuda.copy(&x[0], &mut *d_x)?;
            norm.backward(cuda, &x[0], &x[1], &x[3], &*statistics, add_to(d_x))?;
            // Twice the bias gradient.
            norm.backward_weight(
                cuda,
                &x[0],
                &x[3],
                &*statistics,
                &mut *d_weight,
                Some((&mut *d_bias).into()),
            )?;
            norm.backward_weight(
                cuda,
                &x[0],
                &x[3],
                &*statistics,
                d_weight,
                Some(add_to(d_bias)),
            )
        },
    );
    let (mut out, mut d_x) = (Vec::new(), Vec::new());
    let (mut d_weight, mut d_bias) = (vec![0.0; width], vec![0.0; width]);
    for (row, d) in a.chunks(width).zip(d.chunks(width)) {
        let mean = |x: &dyn Fn(usize) -> f64| (0..width).map(x).sum::<f64>() / width as f64;
        let middle = if remove_mean { mean(&|i| row[i]) } else { 0.0 };
        let scale = 1.0 / (mean(&|i| (row[i] - middle).powi(2)) + f64::from(eps)).sqrt();
        let normal = |i: usize| (row[i] - middle) * scale;
        let shift = if remove_mean {
            mean(&|i| d[i] * w[i])
        } else {
            0.0
        };
        let along = mean(&|i| d[i] * w[i] * normal(i));
        for i in 0..width {
            out.push(normal(i) * w[i] + if remove_mean { b[i] } else { 0.0 });
            d_x.push(row[i] + scale * (d[i] * w[i] - shift - normal(i) * along));
            d_weight[i] += d[i] * normal(i);
            d_bias[i] += 2.0 * d[i];
        }
    }
    let name = format!("{dtype} {norm:?}");
    close(&format!("norm {name}"), &y[0], &out, 1e-6);
    // One over the deviation may be large.
    close(&format!("gradient {name}"), &y[1], &d_x, 3e-6);
    close(&format!("weight {name}"), &y[2], &d_weight, 2e-6);
    close(&format!("bias {name}"), &y[3], &d_bias, 2e-6);
}

#[test]
fn column_sums_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, width) in [(1, 1), (17, 3), (1000, 33), (2500, 2)] {
            let (x, exact) = sample(dtype, rows * width, 1);
            let outputs = [shape(DType::F32, width), shape(DType::F32, width)];
            let y = device(&layers::COLUMNS, &[x], &outputs, move |cuda, x, y| {
                let [once, twice] = y else {
                    panic!("two outputs")
                };
                layers::sum_rows(cuda, layers::MatrixShape::new(rows, width), &x[0], once)?;
                layers::sum_rows(
                    cuda,
                    layers::MatrixShape::new(rows, width),
                    &x[0],
                    &mut *twice,
                )?;
                layers::sum_rows(
                    cuda,
                    layers::MatrixShape::new(rows, width),
                    &x[0],
                    add_to(twice),
                )
            });
            let sum = |i: usize| exact.iter().skip(i).step_by(width).sum::<f64>();
            let sums: Vec<f64> = (0..width).map(sum).collect();
            close(
                &format!("sums of {dtype} [{rows}, {width}]"),
                &y[0],
                &sums,
                2e-6,
            );
            let sums: Vec<f64> = sums.iter().map(|sum| 2.0 * sum).collect();
            close("twice", &y[1], &sums, 2e-6);
        }
    }
    let none = device(
        &layers::COLUMNS,
        &[],
        &[shape(DType::F32, 3)],
        |cuda, _, y| {
            let empty = cuda.scratch(DType::F32, 0)?;
            layers::sum_rows(cuda, layers::MatrixShape::new(0, 3), &empty, &mut y[0])
        },
    );
    assert_eq!(none[0].to_vec::<f32>().unwrap(), [0.0; 3]);
}

/// Indices of so many tokens: one of them very often.
fn tokens(count: usize, entries: u64, seed: u64) -> Vec<u64> {
    let mut numbers = fastrand::Rng::with_seed(seed);
    (0..count)
        .map(|_| {
            if numbers.bool() {
                0
            } else {
                numbers.u64(..entries)
            }
        })
        .collect()
}

#[test]
fn embeddings_and_their_gradients_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (tokens, entries, width) in [(1, 1, 1), (12, 5, 3), (300, 7, 257), (600, 256, 33)] {
            embedding(
                dtype,
                CudaEmbedding {
                    tokens,
                    entries,
                    width,
                },
            );
        }
    }
}

fn embedding(dtype: DType, embedding: CudaEmbedding) {
    let CudaEmbedding {
        tokens: count,
        entries,
        width,
    } = embedding;
    let time = if count.is_multiple_of(3) { 3 } else { 1 };
    let mut indices = tokens(count, entries as u64, 5);
    if count > 2 {
        indices[2] = entries as u64;
    }
    let [(table, t), (positions, p), (d_y, d)] =
        [(entries * width, 1), (time * width, 2), (count * width, 3)]
            .map(|(n, seed)| sample(dtype, n, seed));
    let sums = shape(DType::F32, entries * width);
    let outputs = [shape(dtype, count * width), sums.clone(), sums];
    let kinds = [
        of(&indices
            .iter()
            .map(|index| *index as u32)
            .collect::<Vec<_>>()),
        of(&indices
            .iter()
            .map(|index| *index as i64)
            .collect::<Vec<_>>()),
    ];
    for indices_here in kinds {
        let inputs = [table.clone(), positions.clone(), d_y.clone(), indices_here];
        let y = device(&layers::EMBEDDING, &inputs, &outputs, move |cuda, x, y| {
            let [y, once, twice] = y else {
                panic!("three outputs")
            };
            embedding.forward(cuda, &x[0], &x[3], Some((x[1].at(0), time)), y)?;
            embedding.backward(cuda, &x[3], &x[2], once)?;
            embedding.backward(cuda, &x[3], &x[2], &mut *twice)?;
            embedding.backward(cuda, &x[3], &x[2], add_to(twice))
        });
        let mut sums = vec![0.0; entries * width];
        let mut rows = Vec::new();
        for (token, index) in indices.iter().map(|index| *index as usize).enumerate() {
            for i in 0..width {
                let value = t.get(index * width + i).copied().unwrap_or(f64::NAN);
                rows.push(value + p[token % time * width + i]);
                if index < entries {
                    sums[index * width + i] += d[token * width + i];
                }
            }
        }
        let name = format!("{dtype} {embedding:?}");
        close(&name, &y[0], &rows, 1e-6);
        // The sum of up to 300 numbers.
        close(&format!("gradient {name}"), &y[1], &sums, 3e-6);
        let sums: Vec<f64> = sums.iter().map(|sum| 2.0 * sum).collect();
        close(&format!("twice {name}"), &y[2], &sums, 3e-6);
    }
}

#[test]
fn cross_entropy_and_its_gradient_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, classes) in SHAPES {
            for with_weights in [false, true] {
                cross_entropy(dtype, rows, classes, with_weights);
            }
        }
    }
}

fn cross_entropy(dtype: DType, rows: usize, classes: usize, with_weights: bool) {
    let n = rows * classes;
    // Some logits are far from zero.
    let logits: Vec<f64> = random(n, 1).iter().map(|x| x * 5.0 + 200.0).collect();
    let logits = array(dtype, &logits);
    let mut exact = numbers(&logits);
    let mut targets: Vec<u32> = tokens(rows, classes as u64, 2)
        .iter()
        .map(|x| *x as u32)
        .collect();
    let mut weights: Vec<f32> = random(rows, 3).iter().map(|x| x.abs() as f32).collect();
    // An ignored row: any target, and infinite logits.
    let mut values = exact.clone();
    if rows > 1 && with_weights {
        weights[1] = 0.0;
        targets[1] = u32::MAX;
        values[classes] = f64::INFINITY;
        exact[classes] = 0.0;
    }
    let inputs = [
        array(dtype, &values),
        of(&targets),
        of(&weights),
        of(&[0.5f32]),
    ];
    let single = |n| shape(DType::F32, n);
    let outputs = [single(2), shape(dtype, n), single(2 * rows)];
    let y = device(&layers::SOFTMAX, &inputs, &outputs, move |cuda, x, y| {
        let [total, d_logits, normalizers] = y else {
            panic!("three outputs")
        };
        let weights = with_weights.then(|| x[2].at(0));
        let loss = CudaCrossEntropy {
            rows,
            classes,
            targets: x[1].at(0),
            weights,
        };
        loss.forward(cuda, &x[0], total, &mut *normalizers)?;
        // In place.
        cuda.copy(&x[0], &mut *d_logits)?;
        let d_logits = d_logits.at(0);
        loss.backward(
            cuda,
            d_logits,
            &*normalizers,
            3.0,
            Some(x[3].at(0)),
            d_logits,
        )
    });
    let (mut sum, mut weight_sum, mut d_logits) = (0.0, 0.0, Vec::new());
    for (row, logits) in exact.chunks(classes).enumerate() {
        let weight = if with_weights {
            f64::from(weights[row])
        } else {
            1.0
        };
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
        let target = targets[row] as usize;
        weight_sum += weight;
        if weight > 0.0 {
            sum += weight * (largest + total.ln() - logits[target]);
        }
        for (at, x) in logits.iter().enumerate() {
            let share = (x - largest).exp() / total - f64::from(u8::from(at == target));
            d_logits.push(1.5 * weight * if weight > 0.0 { share } else { 0.0 });
        }
    }
    let name = format!("cross-entropy of {dtype} [{rows}, {classes}], weights {with_weights}");
    close(&name, &y[0], &[sum, weight_sum], 1e-6);
    close(&format!("gradient of {name}"), &y[1], &d_logits, 1e-6);
}

#[test]
fn wrong_target_is_seen_in_the_loss() {
    if softcuda::again!() {
        return;
    }
    let inputs = [array(DType::F32, &[0.0; 6]), of(&[1u32, 3])];
    let outputs = [shape(DType::F32, 2), shape(DType::F32, 4)];
    let y = device(&layers::SOFTMAX, &inputs, &outputs, |cuda, x, y| {
        let [total, normalizers] = y else {
            panic!("two outputs")
        };
        let loss = CudaCrossEntropy {
            rows: 2,
            classes: 3,
            targets: x[1].at(0),
            weights: None,
        };
        loss.forward(cuda, &x[0], total, normalizers)
    });
    let total = y[0].to_vec::<f32>().unwrap();
    assert!(total[0].is_nan() && total[1] == 2.0, "{total:?}");
}

#[test]
fn softmax_and_its_gradient_are_exact() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for (rows, width) in SHAPES {
            for is_log in [false, true] {
                softmax(dtype, rows, width, is_log);
            }
        }
    }
}

fn softmax(dtype: DType, rows: usize, width: usize, is_log: bool) {
    let n = rows * width;
    // Far above zero, or all below it.
    let middle = if is_log { 500.0 } else { -20.0 };
    let x = array(
        dtype,
        &random(n, 1)
            .iter()
            .map(|x| 3.0 * x + middle)
            .collect::<Vec<_>>(),
    );
    let exact = numbers(&x);
    // The gradient is that of a result that has the dtype.
    let mut shares = Vec::new();
    for row in exact.chunks(width) {
        let total: f64 = row.iter().map(|x| (x - middle).exp()).sum();
        shares.extend(row.iter().map(|x| match is_log {
            true => x - middle - total.ln(),
            false => (x - middle).exp() / total,
        }));
    }
    let y = array(dtype, &shares);
    let ((d_y, d), given) = (sample(dtype, n, 2), numbers(&y));
    let outputs = [shape(dtype, n), shape(dtype, n)];
    let found = device(
        &layers::SOFTMAX,
        &[x, y, d_y],
        &outputs,
        move |cuda, x, y| {
            let [out, d_x] = y else { panic!("two outputs") };
            layers::softmax(
                cuda,
                layers::MatrixShape::new(rows, width),
                is_log,
                &x[0],
                out,
            )?;
            // In place.
            cuda.copy(&x[2], &mut *d_x)?;
            let d_x = d_x.at(0);
            layers::softmax_backward(
                cuda,
                layers::MatrixShape::new(rows, width),
                is_log,
                &x[1],
                d_x,
                d_x,
            )
        },
    );
    let mut d_x = Vec::new();
    for (y, d) in given.chunks(width).zip(d.chunks(width)) {
        let sum: f64 = y
            .iter()
            .zip(d)
            .map(|(y, d)| if is_log { *d } else { y * d })
            .sum();
        d_x.extend(y.iter().zip(d).map(|(y, d)| match is_log {
            true => d - y.exp() * sum,
            false => y * (d - sum),
        }));
    }
    let name = format!("softmax of {dtype} [{rows}, {width}], log {is_log}");
    close(&name, &found[0], &shares, 1e-6);
    close(&format!("gradient of {name}"), &found[1], &d_x, 1e-6);
}
