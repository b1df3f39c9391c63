//! Attention to keys and values in blocks.

use super::*;
use layers::{AttentionScores, Heads, PagedKeysValues, PagedTokens};

/// Heads, groups and elements of a vector.
const SIZES: [usize; 3] = [4, 2, 24];

/// Lengths of sequences: more than a block of threads has, exactly a block of tokens, one token.
const LENGTHS: [usize; 3] = [300, 16, 1];

/// Returns the blocks of each sequence, in rows of 20.
fn tables() -> Vec<u32> {
    let mut tables = vec![u32::MAX; 60];
    (0..19).for_each(|at| tables[at] = 23 - at as u32);
    tables[20] = 3;
    tables[40] = 1;
    tables
}

/// Runs passes of tokens, (sequence, positions) each, one after the other. Returns the results of
/// all tokens in order: `[tokens, heads, dim]`.
fn run(
    dtype: DType,
    passes: Vec<Vec<(usize, std::ops::Range<usize>)>>,
    window: Option<usize>,
    cap: Option<f32>,
) -> HostArray {
    let [heads, groups, dim] = SIZES;
    // Queries, keys and values of a token lie in one row.
    let row = (heads + 2 * groups) * dim;
    let all = passes.iter().flatten();
    let tokens: Vec<(u32, u32)> = all
        .flat_map(|(sequence, range)| range.clone().map(|at| (*sequence as u32, at as u32)))
        .collect();
    let lengths: Vec<usize> = passes
        .iter()
        .map(|pass| pass.iter().map(|(_, range)| range.len()).sum())
        .collect();
    let rows: Vec<f64> = tokens
        .iter()
        .flat_map(|(s, at)| random(row, u64::from(s * 1000 + at)))
        .collect();
    let of_tokens = |pick: fn(&(u32, u32)) -> u32| of(&tokens.iter().map(pick).collect::<Vec<_>>());
    let inputs = [
        array(dtype, &rows),
        of_tokens(|token| token.0),
        of_tokens(|token| token.1),
        of(&tables()),
    ];
    let cached = shape(dtype, 24 * groups * dim * 16);
    let outputs = [
        shape(dtype, tokens.len() * heads * dim),
        cached.clone(),
        cached,
    ];
    let y = device(&layers::PAGED, &inputs, &outputs, move |cuda, x, y| {
        let [out, keys, values] = y else {
            panic!("three outputs")
        };
        cuda.zero(&mut *keys)?;
        cuda.zero(&mut *values)?;
        let out = out.at(0);
        let cache = PagedKeysValues {
            blocks: 24,
            groups,
            dim,
            keys: keys.at(0),
            values: values.at(0),
        };
        let mut first = 0;
        for tokens in &lengths {
            let rows = PagedTokens {
                tokens: *tokens,
                sequences: x[1].at(first),
                positions: x[2].at(first),
                tables: x[3].at(0),
                most: 20,
            };
            let part = |at| Heads::new(x[0].at(first * row + at * dim), [0, row, dim]);
            let out = Heads::new(out.at(first * heads * dim), [0, heads * dim, dim]);
            cache.write(cuda, &rows, part(heads), part(heads + groups))?;
            let scores = AttentionScores {
                scale: 0.6,
                cap,
                window,
            };
            cache.attend(cuda, &rows, heads, scores, part(0), out)?;
            first += tokens;
        }
        Ok(())
    });
    y[0].clone()
}

/// Computes the result of a token in double precision.
fn exact(
    dtype: DType,
    sequence: usize,
    position: usize,
    window: Option<usize>,
    cap: Option<f32>,
) -> Vec<f64> {
    let [heads, groups, dim] = SIZES;
    let row = (heads + 2 * groups) * dim;
    let of = |at: usize| numbers(&array(dtype, &random(row, (sequence * 1000 + at) as u64)));
    let seen = window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
    let rows: Vec<Vec<f64>> = seen.map(of).collect();
    let query = of(position);
    let mut out = Vec::new();
    for head in 0..heads {
        let group = head / (heads / groups);
        let shares: Vec<f64> = rows
            .iter()
            .map(|row| {
                let key = &row[(heads + group) * dim..][..dim];
                let x: f64 = query[head * dim..]
                    .iter()
                    .zip(key)
                    .map(|(a, b)| a * b)
                    .sum();
                let x = x * f64::from(0.6f32);
                cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
                    .exp()
            })
            .collect();
        let total: f64 = shares.iter().sum();
        let value = |row: &Vec<f64>, i: usize| row[(heads + groups + group) * dim + i];
        out.extend((0..dim).map(|i| {
            rows.iter()
                .zip(&shares)
                .map(|(row, share)| share / total * value(row, i))
                .sum::<f64>()
        }));
    }
    out
}

#[test]
fn attention_to_blocks_is_exact_and_the_same_in_all_passes() {
    if softcuda::again!() {
        return;
    }
    let of_all = |ranges: [std::ops::Range<usize>; 3]| {
        ranges
            .into_iter()
            .enumerate()
            .filter(|(_, range)| !range.is_empty())
            .collect::<Vec<_>>()
    };
    for dtype in BOTH {
        for (window, cap) in [(None, None), (Some(40), None), (Some(3), Some(0.7f32))] {
            let whole = run(
                dtype,
                vec![of_all(LENGTHS.map(|length| 0..length))],
                window,
                cap,
            );
            let mut expected = Vec::new();
            for (sequence, length) in LENGTHS.into_iter().enumerate() {
                (0..length).for_each(|at| expected.extend(exact(dtype, sequence, at, window, cap)));
            }
            let name = format!("blocks of {dtype}, window {window:?}, cap {cap:?}");
            close(&name, &whole, &expected, 2e-6);
            // The same tokens in other passes.
            let passes = [
                [0..20, 0..1, 0..0],
                [20..297, 1..16, 0..1],
                [297..300, 0..0, 0..0],
            ];
            let parts = run(dtype, passes.map(of_all).to_vec(), window, cap);
            let width = SIZES[0] * SIZES[2] * dtype.size();
            let starts = [0, 300, 316];
            let mut at = 0;
            for pass in [
                [0..20, 0..1, 0..0],
                [20..297, 1..16, 0..1],
                [297..300, 0..0, 0..0],
            ] {
                for (sequence, range) in pass.into_iter().enumerate() {
                    for token in range {
                        let place = (starts[sequence] + token) * width;
                        let [whole, part] = [
                            &whole.bytes()[place..][..width],
                            &parts.bytes()[at..][..width],
                        ];
                        assert_eq!(whole, part, "{name}: token {token} of sequence {sequence}");
                        at += width;
                    }
                }
            }
        }
    }
}
