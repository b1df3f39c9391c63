//! Random choices of tests.

use fastrand::Rng;

/// Creates a generator with a new seed for each run. Prints the seed, so that a failed test can be
/// repeated.
pub fn rng_of_this_run() -> Rng {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    Rng::with_seed(seed)
}

/// Returns random bytes. Equal seeds give equal bytes on every process.
pub(crate) fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
