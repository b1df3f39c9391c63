//! Attention with all masks, and its gradients.

use super::*;
use layers::{CudaAttention, CudaMask, Heads};

/// The mask of a case.
#[derive(Clone, Copy, Debug)]
enum Masked {
    None,
    Causal,
    /// A sliding window of so many keys.
    Window(usize),
    /// Each sequence has two packed ones, that meet at another place in each.
    Packed,
    /// Random numbers for each query and key, the same for all heads. Some keys are hidden.
    Additive,
    /// As `Additive`, where the first query sees no key.
    Blind,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// Sequences, heads, groups, queries, keys and elements.
    sizes: [usize; 6],
    masked: Masked,
    cap: Option<f32>,
}

impl Case {
    fn new(sizes: [usize; 6], masked: Masked) -> Self {
        Self {
            sizes,
            masked,
            cap: None,
        }
    }

    /// Returns what is added to the score of a query and a key: minus infinity if it is hidden.
    fn term(&self, sequence: usize, query: usize, key: usize, mask: &[f64]) -> f64 {
        let [_, _, _, queries, keys, _] = self.sizes;
        let own = (keys + query).checked_sub(queries);
        let seen = match self.masked {
            Masked::None => true,
            Masked::Additive | Masked::Blind => {
                return mask[(sequence * queries + query) * keys + key];
            }
            _ => own.is_some_and(|own| (self.first(sequence, query)..=own).contains(&key)),
        };
        if seen { 0.0 } else { f64::NEG_INFINITY }
    }

    fn first(&self, sequence: usize, query: usize) -> usize {
        let [_, _, _, queries, keys, _] = self.sizes;
        let own = keys - queries + query;
        match self.masked {
            Masked::Window(window) => (own + 1).saturating_sub(window),
            Masked::Packed => {
                let meet = keys / (2 + sequence);
                if own >= meet { meet } else { 0 }
            }
            _ => 0,
        }
    }
}

#[test]
fn attention_and_its_gradients_are_exact() {
    if softcuda::again!() {
        return;
    }
    let cases = [
        Case::new([1, 1, 1, 1, 1, 1], Masked::Causal),
        Case::new([2, 2, 2, 65, 65, 16], Masked::Causal),
        Case::new([1, 4, 2, 33, 33, 33], Masked::None),
        Case::new([1, 2, 1, 3, 130, 8], Masked::Causal),
        Case::new([2, 2, 1, 70, 70, 8], Masked::Window(5)),
        Case::new([2, 1, 1, 150, 150, 4], Masked::Packed),
        Case::new([2, 2, 1, 20, 70, 12], Masked::Additive),
        Case::new([1, 1, 1, 5, 1, 8], Masked::None),
        Case::new([1, 1, 1, 3, 4, 4], Masked::Blind),
        Case::new([1, 1, 1, 70, 70, 128], Masked::Causal),
        Case::new([1, 2, 1, 35, 35, 256], Masked::Causal),
        Case {
            cap: Some(0.8),
            ..Case::new([1, 2, 1, 20, 20, 8], Masked::Causal)
        },
    ];
    for case in cases {
        for dtype in BOTH {
            check(case, dtype);
        }
    }
}

/// Checks causal attention to heads of `dim` elements, with more tokens than the largest tile has.
fn check_causal(dim: usize) {
    for dtype in BOTH {
        check(Case::new([1, 2, 1, 70, 70, dim], Masked::Causal), dtype);
    }
}

#[test]
fn gradients_fit_devices_with_99_kib_of_shared_memory() {
    if softcuda::again!("SOFTCUDA_SHARED" = "101376") {
        return;
    }
    [64, 128, 256].into_iter().for_each(check_causal);
}

#[test]
fn gradients_that_fit_no_block_are_refused_by_size() {
    if softcuda::again!("SOFTCUDA_SHARED" = "65536") {
        return;
    }
    check_causal(64);
    let refused = std::panic::catch_unwind(|| check_causal(128)).unwrap_err();
    let said = refused.downcast_ref::<String>().expect("a message");
    let expected = "gradient of attention: a block for heads of 128 elements needs 72192 bytes \
                    of shared memory, and this device gives a block at most 65536";
    assert!(said.contains(expected), "{said}");
}

#[expect(
    clippy::too_many_lines,
    reason = "attention and its gradient in full, beside the call"
)]
fn check(case: Case, dtype: DType) {
    let [batch, heads, groups, queries, keys, dim] = case.sizes;
    // Queries, keys and values of one matrix if all have the same shape, else of two.
    let fused = heads == groups && queries == keys;
    let (of_queries, of_keys) = (batch * queries * heads * dim, batch * keys * groups * dim);
    let [(q, a), (kv, b), (d_out, d)] = if fused {
        [(3 * of_queries, 1), (1, 2), (of_queries, 3)]
    } else {
        [(of_queries, 1), (2 * of_keys, 2), (of_queries, 3)]
    }
    .map(|(n, seed)| sample(dtype, n, seed));
    let mut mask = random(batch * queries * keys, 7);
    mask.iter_mut()
        .filter(|x| **x > 0.8)
        .for_each(|x| *x = f64::NEG_INFINITY);
    // The first key stays, so that all queries see one.
    mask.iter_mut().step_by(keys).for_each(|x| *x = 0.5);
    if let Masked::Blind = case.masked {
        mask[..keys].fill(f64::NEG_INFINITY);
    }
    let mask = array(DType::F32, &mask);
    let exact_mask = numbers(&mask);
    let (first, sequences) = match case.masked {
        // The same for all sequences.
        Masked::Window(_) => (1, 0),
        _ => (batch, queries),
    };
    let first: Vec<u32> = match case.masked {
        Masked::Window(_) | Masked::Packed => {
            let all = (0..first).flat_map(|s| (0..queries).map(move |q| (s, q)));
            all.map(|(s, q)| case.first(s, q) as u32).collect()
        }
        _ => vec![0],
    };
    // Gradients lie as queries, keys and values do.
    let lengths = if fused {
        [3 * of_queries, 1]
    } else {
        [of_queries, 2 * of_keys]
    };
    let rows = batch * heads * queries;
    let outputs = [
        shape(dtype, of_queries),
        shape(dtype, lengths[0]),
        shape(dtype, lengths[1]),
        shape(DType::F32, 2 * rows),
    ];
    let inputs = [q, kv, d_out, mask, of(&first)];
    let source = match dim {
        0..=64 => &layers::ATTENTION_64,
        65..=128 => &layers::ATTENTION_128,
        _ => &layers::ATTENTION_256,
    };
    let scale = 0.7 / (dim as f32).sqrt();
    let y = device(source, &inputs, &outputs, move |cuda, x, y| {
        let [out, d_q, d_kv, normalizers] = y else {
            panic!("four outputs")
        };
        // Not used if there is one matrix.
        cuda.zero(&mut *d_kv)?;
        let mask = match case.masked {
            Masked::None => CudaMask::None,
            Masked::Causal => CudaMask::Causal,
            Masked::Window(_) | Masked::Packed => CudaMask::CausalFrom(x[4].at(0), sequences),
            Masked::Additive | Masked::Blind => {
                CudaMask::Additive(x[3].at(0), [queries * keys, 0, keys])
            }
        };
        let attention = CudaAttention {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
            scale,
            cap: case.cap,
            mask,
        };
        let (q, kv, d_q, d_kv) = (x[0].at(0), x[1].at(0), d_q.at(0), d_kv.at(0));
        let row = heads * 3 * dim;
        let (fused_strides, beside) = (
            [queries * row, row, 3 * dim],
            [keys * 2 * groups * dim, 2 * groups * dim, dim],
        );
        let of_q = [heads * queries * dim, dim, queries * dim];
        let [from, to] = [(q, kv), (d_q, d_kv)].map(|(q, kv)| match fused {
            true => [0, dim, 2 * dim].map(|at| Heads::new(q.at(at), fused_strides)),
            false => [
                Heads::new(q, of_q),
                Heads::new(kv, beside),
                Heads::new(kv.at(groups * dim), beside),
            ],
        });
        let result = |part| Heads::in_rows(part, queries, heads * dim, dim);
        let out = result(out.at(0));
        attention.forward(cuda, from, out, &mut *normalizers)?;
        let results = [out, result(x[2].at(0))];
        attention.backward(cuda, from, results, &*normalizers, to)
    });
    // The same in double precision, dense: `[batch, tokens, heads, dim]`.
    let at = |which: usize, s: usize, t: usize, h: usize, i: usize| match (fused, which) {
        (true, _) => ((s * queries + t) * heads + h) * 3 * dim + which * dim + i,
        (false, 0) => ((s * heads + h) * queries + t) * dim + i,
        _ => ((s * keys + t) * 2 + which - 1) * groups * dim + h * dim + i,
    };
    let from = |which: usize, place: usize| {
        if fused || which == 0 {
            a[place]
        } else {
            b[place]
        }
    };
    let value =
        |which: usize, s: usize, t: usize, h: usize, i: usize| from(which, at(which, s, t, h, i));
    let mut out = vec![0.0; of_queries];
    let mut gradients = lengths.map(|length| vec![0.0; length]);
    let scale = f64::from(scale);
    for s in 0..batch {
        for h in 0..heads {
            let group = h / (heads / groups);
            for t in 0..queries {
                let raw: Vec<f64> = (0..keys)
                    .map(|k| {
                        let terms =
                            (0..dim).map(|i| value(0, s, t, h, i) * value(1, s, k, group, i));
                        terms.sum::<f64>() * scale
                    })
                    .collect();
                let cap = case.cap.map(f64::from);
                let capped = |x: f64| cap.map_or(x, |cap| cap * (x / cap).tanh());
                let scores: Vec<f64> = (0..keys)
                    .map(|k| capped(raw[k]) + case.term(s, t, k, &exact_mask))
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|x| (x - largest).exp()).sum();
                let share: Vec<f64> = scores.iter().map(|x| (x - largest).exp() / total).collect();
                let row = ((s * queries + t) * heads + h) * dim;
                for i in 0..dim {
                    out[row + i] = (0..keys).map(|k| share[k] * value(2, s, k, group, i)).sum();
                }
                let mean: f64 = (0..dim).map(|i| out[row + i] * d[row + i]).sum();
                for k in 0..keys {
                    let along: f64 = (0..dim)
                        .map(|i| d[row + i] * value(2, s, k, group, i))
                        .sum();
                    let slope = cap.map_or(1.0, |cap| 1.0 - (capped(raw[k]) / cap).powi(2));
                    let d_score = share[k] * (along - mean) * slope * scale;
                    let other = usize::from(!fused);
                    for i in 0..dim {
                        gradients[0][at(0, s, t, h, i)] += d_score * value(1, s, k, group, i);
                        gradients[other][at(1, s, k, group, i)] += d_score * value(0, s, t, h, i);
                        gradients[other][at(2, s, k, group, i)] += share[k] * d[row + i];
                    }
                }
            }
        }
    }
    let name = format!("{case:?} of {dtype}");
    close(&name, &y[0], &out, 1e-6);
    close(&format!("gradient of {name}"), &y[1], &gradients[0], 3e-6);
    if !fused {
        close(
            &format!("gradient of keys of {name}"),
            &y[2],
            &gradients[1],
            3e-6,
        );
    }
}
