//! Helpers of the tests in this module.

use crate::math::random_unit;

/// Returns values in `[-1, 1)` that depend only on the seed.
pub(super) fn random(len: usize, seed: u64) -> Vec<f64> {
    (0..len).map(|i| random_unit(seed, i as u64)).collect()
}

/// Compares each element of `gradient` with central differences of `value`. The gradient is with
/// respect to the leaf of `at` that `leaf` returns.
///
/// # Panics
///
/// Panics if an element differs from the expected one by 1e-7 times `1 + |expected|` or more.
pub(super) fn assert_gradient<S>(
    name: &str,
    gradient: &[f64],
    at: &mut S,
    leaf: impl Fn(&mut S) -> &mut Vec<f64>,
    value: impl Fn(&S) -> f64,
) {
    const STEP: f64 = 1e-5;
    assert_eq!(gradient.len(), leaf(at).len(), "elements of {name}");
    for (i, got) in gradient.iter().enumerate() {
        let here = leaf(at)[i];
        leaf(at)[i] = here + STEP;
        let above = value(at);
        leaf(at)[i] = here - STEP;
        let below = value(at);
        leaf(at)[i] = here;
        let expected = (above - below) / (2.0 * STEP);
        assert!(
            (got - expected).abs() < 1e-7 * (1.0 + expected.abs()),
            "{name}[{i}]: {got}, not {expected}"
        );
    }
}
