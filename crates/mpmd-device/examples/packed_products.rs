//! Measures products with a packed weight that is larger than the caches: the time of one product,
//! its arithmetic, and the share of the rate at which the same threads only read the weight. Prints
//! medians.
//!
//! ```sh
//! cargo run --release -p mpmd-device --example packed_products -- [THREADS] [MIB] [REPEATS]
//! ```

mod median;

use std::hint::black_box;
use std::thread;

use mpmd_device::cpu::packed::{PANEL, PackedWeight};

use median::median;

/// Columns of the weight: the width of a small model.
const COLUMNS: usize = 2048;
/// The numbers of rows of `x`: tokens that are computed at once.
const TOKENS: [usize; 9] = [1, 2, 4, 8, 12, 16, 32, 64, 512];

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|text| text.parse::<usize>().expect("a number"));
    let threads = arguments.next().unwrap_or(1).max(1);
    let mib = arguments.next().unwrap_or(256).max(1);
    let repeats = arguments.next().unwrap_or(7).max(1);

    println!("weight of {mib} MiB, {threads} threads, medians of {repeats}");
    for in_half in [false, true] {
        measure(threads, mib << 20, repeats, in_half);
    }
}

/// Measures the products with a weight of `bytes` bytes.
fn measure(threads: usize, bytes: usize, repeats: usize, in_half: bool) {
    let (name, size) = if in_half { ("bf16", 2) } else { ("f32", 4) };
    let rows = (bytes / size / COLUMNS).next_multiple_of(PANEL * threads);
    let weight = random_weight(rows, in_half);
    let bytes = rows * COLUMNS * size;
    let words: Vec<u64> = (0..bytes as u64 / 8).collect();

    let read = median(repeats, || read_all(&words, threads));
    println!("{name}: {:.1} GB/s are read", bytes as f64 / read / 1e9);
    println!(
        "{:>8} {:>10} {:>10} {:>14}",
        "tokens", "ms", "GFLOP/s", "of the read"
    );
    for tokens in TOKENS {
        let x = vec![0.5f32; tokens * COLUMNS];
        let mut out = vec![0.0f32; rows * tokens];
        let repeats = if tokens > 64 {
            repeats.div_ceil(2)
        } else {
            repeats
        };
        let seconds = median(repeats, || multiply(&weight, &x, tokens, threads, &mut out));

        let operations = 2.0 * (rows * COLUMNS * tokens) as f64;
        println!(
            "{tokens:>8} {:>10.2} {:>10.1} {:>13.2}",
            seconds * 1e3,
            operations / seconds / 1e9,
            read / seconds
        );
    }
}

/// Returns a weight of small values.
fn random_weight(rows: usize, in_half: bool) -> PackedWeight {
    let mut weight = PackedWeight::zeros(rows, COLUMNS, in_half);
    let mut values = vec![0.0f32; PANEL * COLUMNS];
    for first in (0..rows).step_by(PANEL) {
        for (at, value) in values.iter_mut().enumerate() {
            *value = ((first + at * 7919) % 1013) as f32 / 507.0 - 1.0;
        }
        weight.set_rows(first, &values);
    }
    weight
}

/// Multiplies on several threads, each with a part of the weight's panels.
fn multiply(weight: &PackedWeight, x: &[f32], tokens: usize, threads: usize, out: &mut [f32]) {
    let each = weight.panels() / threads;
    thread::scope(|scope| {
        for (at, out) in out.chunks_exact_mut(each * tokens * PANEL).enumerate() {
            scope.spawn(move || weight.multiply(x, at * each..(at + 1) * each, out));
        }
    });
    black_box(out);
}

/// Reads all words on several threads.
fn read_all(words: &[u64], threads: usize) {
    thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(threads)) {
            scope.spawn(move || black_box(part.iter().fold(0, |all, word| all ^ word)));
        }
    });
}
