//! Measures the choice of a token: the time of one choice on one thread, beside a walk over as many
//! numbers in the same run. Prints medians of pairs.
//!
//! ```sh
//! cargo run --release -p mpmd-models --example sampling -- [VOCABULARY] [REPEATS]
//! ```

use std::hint::black_box;
use std::time::Instant;

use mpmd::random::{Key, normal_f32};
use mpmd_models::Sampling;

/// Size of the vocabulary in several model families.
const VOCABULARY: u64 = 151_936;
const REPEATS: u64 = 101;

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|text| text.parse().expect("a number"));
    let tokens: u64 = arguments.next().unwrap_or(VOCABULARY);
    let repeats: u64 = arguments.next().unwrap_or(REPEATS);

    let drawn = Sampling {
        temperature: 1.0,
        ..Sampling::default()
    };
    let cases = [
        ("greedy", Sampling::default()),
        ("temperature", drawn),
        (
            "temperature, top_p 0.9",
            Sampling {
                top_p: 0.9,
                ..drawn
            },
        ),
        (
            "temperature, top_p 0.99",
            Sampling {
                top_p: 0.99,
                ..drawn
            },
        ),
        (
            "temperature, min_p 0.05",
            Sampling {
                min_p: 0.05,
                ..drawn
            },
        ),
        ("temperature, top_k 50", Sampling { top_k: 50, ..drawn }),
        (
            "temperature, top_k 20, top_p 0.8",
            Sampling {
                top_k: 20,
                top_p: 0.8,
                ..drawn
            },
        ),
        (
            "temperature, repetition_penalty 1.1",
            Sampling {
                repetition_penalty: 1.1,
                ..drawn
            },
        ),
    ];
    println!("{tokens} tokens, medians of {repeats}; a walk is a sum of as many f32");
    for (name, deviation) in [("flat", 1.0), ("peaked", 4.0)] {
        let logits: Vec<f32> = (0..tokens)
            .map(|token| deviation * normal_f32(Key(1), token))
            .collect();
        for (case, sampling) in cases {
            let mut times = Vec::new();
            let mut walks = Vec::new();
            for seed in 0..repeats {
                let start = Instant::now();
                black_box(black_box(&logits).iter().sum::<f32>());
                let walk = start.elapsed().as_secs_f64();

                let own = Sampling { seed, ..sampling };
                let start = Instant::now();
                black_box(own.next(black_box(&logits), &[1, 2, 3], &[4, 5]));
                times.push(start.elapsed().as_secs_f64());
                walks.push(times[seed as usize] / walk);
            }
            let [time, walks] = [times, walks].map(median);
            println!(
                "{name} logits, {case}: {:.0} us, {walks:.2} walks",
                time * 1e6
            );
        }
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
