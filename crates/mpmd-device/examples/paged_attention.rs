//! Measures attention to keys and values in blocks on one thread: the queries of a prompt, and one
//! query with many keys. Prints medians.
//!
//! ```sh
//! cargo run --release -p mpmd-device --example paged_attention -- [REPEATS]
//! ```

mod median;

use mpmd_device::cpu::paged::{BLOCK, KeyValueBlocks, Query, Scores};

use median::median;

const HEADS: usize = 12;
const DIM: usize = 64;

fn main() {
    let repeats = std::env::args().nth(1).map_or(15, |text| {
        text.parse::<usize>().expect("a number of repeats").max(1)
    });
    println!("{HEADS} heads of {DIM} elements, medians of {repeats}");
    for tokens in [128, 512, 2048] {
        let keys = sequence(tokens);
        let table: Vec<u32> = (0..tokens.div_ceil(BLOCK) as u32).collect();
        for first in [0, tokens - 1] {
            let seconds = median(repeats, || attend(&keys, &table, first, tokens));
            let keys = (first + 1..=tokens).sum::<usize>();
            let operations = 4.0 * (keys * HEADS * DIM) as f64;
            println!(
                "{:>5} queries, {tokens:>5} keys: {:>8.3} ms, {:>6.1} GFLOP/s",
                tokens - first,
                seconds * 1e3,
                operations / seconds / 1e9
            );
        }
    }
}

/// Returns the keys and values of a sequence.
fn sequence(tokens: usize) -> KeyValueBlocks {
    let mut keys = KeyValueBlocks::zeros(tokens.div_ceil(BLOCK), HEADS, DIM);
    let values: Vec<f32> = (0..HEADS * DIM)
        .map(|at| (at * 7919 % 1013) as f32 / 507.0 - 1.0)
        .collect();
    for token in 0..tokens {
        keys.set(token / BLOCK, token % BLOCK, &values, &values);
    }
    keys
}

/// Computes the queries of the tokens from `first` on, for all heads.
fn attend(keys: &KeyValueBlocks, table: &[u32], first: usize, tokens: usize) {
    let elements = [0.1; DIM];
    let scores = Scores {
        scale: 0.125,
        cap: None,
    };
    let queries: Vec<Query<'_>> = (first..tokens)
        .map(|position| Query {
            elements: &elements,
            seen: 0..position + 1,
        })
        .collect();
    let mut out = vec![0.0; queries.len() * DIM];
    for head in 0..HEADS {
        keys.attend(head, table, &queries, scores, &mut out);
    }
}
