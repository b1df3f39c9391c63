//! Attention to keys and values in blocks, for inference.
//!
//! A block has the keys and values of [`BLOCK`] tokens of a sequence, for each head. Blocks of a
//! sequence may lie anywhere. The numbers of a query depend on its own position and keys alone, in
//! one order: so its result does not depend, to the bit, on other queries or on the places of the
//! blocks. With fused multiply-add instructions, which all widths but the baseline have, the bits
//! differ from those without.

use std::ops::Range;

use super::{VectorWidth, lanes, processor_width, width};

/// Number of tokens in a block.
pub const BLOCK: usize = 16;

/// The keys and values of tokens, in blocks of [`BLOCK`] tokens.
#[derive(Clone, Debug)]
pub struct KeyValueBlocks {
    heads: usize,
    dim: usize,
    /// The keys: `[blocks, heads, dim, BLOCK]`. Tokens of a block are adjacent in memory.
    keys: Vec<f32>,
    /// The values: `[blocks, heads, BLOCK, dim]`.
    values: Vec<f32>,
}

/// A query of one token, and the keys that it sees.
#[derive(Clone, Debug)]
pub struct Query<'a> {
    /// The `dim` elements of the query.
    pub elements: &'a [f32],
    /// The positions of the keys that the query sees, at least one.
    pub seen: Range<usize>,
}

/// The scale and the cap that turn products of queries and keys into scores.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// Factor that multiplies the products of queries and keys.
    pub scale: f32,
    /// If set, a score `x` becomes `cap tanh(x / cap)`.
    pub cap: Option<f32>,
}

impl KeyValueBlocks {
    /// Creates `blocks` blocks of zeros for `heads` key heads, with `dim` elements per key.
    pub fn zeros(blocks: usize, heads: usize, dim: usize) -> Self {
        let elements = blocks * heads * dim * BLOCK;
        Self {
            heads,
            dim,
            keys: vec![0.0; elements],
            values: vec![0.0; elements],
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.keys
            .len()
            .checked_div(self.heads * self.dim * BLOCK)
            .unwrap_or(0)
    }

    /// Sets the keys and values of one token, `[heads, dim]` each, at index `place` of block
    /// `block`.
    ///
    /// # Panics
    ///
    /// If the block or the index does not exist, or the lengths do not fit.
    pub fn set(&mut self, block: usize, place: usize, keys: &[f32], values: &[f32]) {
        let Self { heads, dim, .. } = *self;
        assert!(place < BLOCK && keys.len() == heads * dim && values.len() == heads * dim);
        let start = block * heads * dim * BLOCK;
        for head in 0..heads {
            let from = head * dim;
            let to = start + head * dim * BLOCK;
            let column = self.keys[to..][..dim * BLOCK]
                .iter_mut()
                .skip(place)
                .step_by(BLOCK);
            column
                .zip(&keys[from..][..dim])
                .for_each(|(to, key)| *to = *key);

            let row = &mut self.values[to + place * dim..][..dim];
            row.copy_from_slice(&values[from..][..dim]);
        }
    }

    /// Computes `softmax(scores) v` for queries of one sequence and key head `head`, on the calling
    /// thread. `table` has the sequence's blocks, in order. `out` is `[queries, dim]`.
    ///
    /// # Panics
    ///
    /// If a block does not exist, or the lengths do not fit.
    pub fn attend(
        &self,
        head: usize,
        table: &[u32],
        queries: &[Query<'_>],
        scores: Scores,
        out: &mut [f32],
    ) {
        self.attend_by(width(), head, table, queries, scores, out);
    }

    /// Computes [`attend`](Self::attend) with the vector instructions of `width`.
    fn attend_by(
        &self,
        width: VectorWidth,
        head: usize,
        table: &[u32],
        queries: &[Query<'_>],
        scores: Scores,
        out: &mut [f32],
    ) {
        let dim = self.dim;
        assert!(
            head < self.heads && out.len() == queries.len() * dim,
            "results of queries"
        );
        for query in queries {
            assert!(
                query.elements.len() == dim && !query.seen.is_empty(),
                "a query of {dim}"
            );
        }

        let mut room = Vec::new();
        for (query, out) in queries.iter().zip(out.chunks_mut(dim)) {
            let seen = SeenKeys {
                paged: self,
                head,
                table,
                query,
                scores,
            };
            dispatch(width, &seen, &mut room, out);
        }
    }

    fn keys_of(&self, block: u32, head: usize) -> &[[f32; BLOCK]] {
        let len = self.dim * BLOCK;
        self.keys[(block as usize * self.heads + head) * len..][..len]
            .as_chunks()
            .0
    }
}

/// A query, with the blocks of the keys and values that it sees.
struct SeenKeys<'a> {
    paged: &'a KeyValueBlocks,
    head: usize,
    table: &'a [u32],
    query: &'a Query<'a>,
    scores: Scores,
}

/// Computes with the vector instructions of `width`, which the processor has. `room` is scratch
/// memory for scores.
fn dispatch(width: VectorWidth, keys: &SeenKeys<'_>, room: &mut Vec<f32>, out: &mut [f32]) {
    assert!(width <= processor_width(), "instructions of {width}");
    #[cfg(target_arch = "x86_64")]
    match width {
        VectorWidth::Baseline => compute::<false>(keys, room, out),
        // SAFETY: the processor has these instructions.
        VectorWidth::Avx2 => unsafe { with_avx2(keys, room, out) },
        // SAFETY: the same.
        VectorWidth::Avx512 => unsafe { with_avx512(keys, room, out) },
    }

    // Others have the fused instruction always.
    #[cfg(not(target_arch = "x86_64"))]
    compute::<true>(keys, room, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512(keys: &SeenKeys<'_>, room: &mut Vec<f32>, out: &mut [f32]) {
    compute::<true>(keys, room, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2(keys: &SeenKeys<'_>, room: &mut Vec<f32>, out: &mut [f32]) {
    compute::<true>(keys, room, out);
}

/// Computes `softmax(scores) v` for a query. `room` is scratch memory for scores.
///
/// The compiler keeps the sums of eight vectors in registers, which hide the time of each product:
/// those of four blocks of keys, or of 64 elements of values. With several queries at a time it
/// does not, so queries are computed one by one.
#[inline(always)]
fn compute<const FUSED: bool>(keys: &SeenKeys<'_>, room: &mut Vec<f32>, out: &mut [f32]) {
    let seen = keys.query.seen.clone();
    let first = seen.start / BLOCK * BLOCK;
    let blocks = &keys.table[seen.start / BLOCK..seen.end.div_ceil(BLOCK)];
    room.resize(blocks.len() * BLOCK, 0.0);

    let (fours, rest) = blocks.as_chunks::<4>();
    let (rooms, rest_room) = room.split_at_mut(fours.len() * 4 * BLOCK);
    for (blocks, room) in fours.iter().zip(rooms.chunks_exact_mut(4 * BLOCK)) {
        multiply_keys::<4, FUSED>(keys, blocks, room);
    }
    for (block, room) in rest.iter().zip(rest_room.chunks_exact_mut(BLOCK)) {
        multiply_keys::<1, FUSED>(keys, &[*block], room);
    }

    let shares = &mut room[seen.start - first..seen.end - first];
    softmax(shares, keys.scores);

    let dim = keys.paged.dim;
    let mut lane = 0;
    while lane + 64 <= dim {
        add_values::<64, FUSED>(keys, shares, lane, out);
        lane += 64;
    }
    while lane + 16 <= dim {
        add_values::<16, FUSED>(keys, shares, lane, out);
        lane += 16;
    }
    for lane in lane..dim {
        add_values::<1, FUSED>(keys, shares, lane, out);
    }
}

/// Writes the products of the query and all keys of some blocks to `out`, including keys that the
/// query does not see.
#[inline(always)]
fn multiply_keys<const BLOCKS: usize, const FUSED: bool>(
    seen: &SeenKeys<'_>,
    blocks: &[u32; BLOCKS],
    out: &mut [f32],
) {
    let elements = seen.query.elements;
    let keys: [&[[f32; BLOCK]]; BLOCKS] =
        std::array::from_fn(|at| &seen.paged.keys_of(blocks[at], seen.head)[..elements.len()]);

    let mut sums = [[0.0f32; BLOCK]; BLOCKS];
    for (column, x) in elements.iter().enumerate() {
        for (sums, keys) in sums.iter_mut().zip(&keys) {
            add_product::<BLOCK, FUSED>(sums, *x, &keys[column]);
        }
    }
    out.copy_from_slice(sums.as_flattened());
}

/// Turns products of the query and its keys into the shares of the keys' values.
#[inline(always)]
fn softmax(row: &mut [f32], scores: Scores) {
    let Scores { scale, cap } = scores;
    for x in &mut *row {
        *x *= scale;
        if let Some(cap) = cap {
            *x = cap * (*x / cap).tanh();
        }
    }

    let largest = lanes::max(row);
    row.iter_mut().for_each(|x| *x = lanes::exp(*x - largest));
    let share = 1.0 / lanes::sum(row);
    row.iter_mut().for_each(|x| *x *= share);
}

/// Writes `LANES` elements of the result, from `lane` on: the sum of the seen values, each times
/// its share, in the order of positions.
#[inline(always)]
fn add_values<const LANES: usize, const FUSED: bool>(
    seen: &SeenKeys<'_>,
    shares: &[f32],
    lane: usize,
    out: &mut [f32],
) {
    let KeyValueBlocks {
        heads, dim, values, ..
    } = seen.paged;
    let mut sums = [0.0f32; LANES];
    for (position, share) in seen.query.seen.clone().zip(shares) {
        let block = seen.table[position / BLOCK] as usize;
        let row = (block * heads + seen.head) * BLOCK + position % BLOCK;
        let values = values[row * dim + lane..].first_chunk::<LANES>();
        if let Some(values) = values {
            add_product::<LANES, FUSED>(&mut sums, *share, values);
        }
    }
    out[lane..lane + LANES].copy_from_slice(&sums);
}

/// Adds `x` times each of `values` to `sums`.
#[inline(always)]
fn add_product<const LANES: usize, const FUSED: bool>(
    sums: &mut [f32; LANES],
    x: f32,
    values: &[f32; LANES],
) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = if FUSED {
            x.mul_add(*value, *sum)
        } else {
            *sum + x * *value
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::width::widths;
    use super::*;

    fn number(i: usize) -> f32 {
        ((i * 7919) % 1013) as f32 / 507.0 - 1.0
    }

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| number(i + seed * 1299)).collect()
    }

    const HEADS: usize = 2;
    const DIM: usize = 5;

    /// Returns the blocks of a sequence of `tokens` tokens, in this order, and others of NaN.
    fn sequence(tokens: usize, table: &[u32]) -> KeyValueBlocks {
        let mut paged = KeyValueBlocks::zeros(40, HEADS, DIM);
        let none = [f32::NAN; HEADS * DIM];
        (0..40 * BLOCK).for_each(|at| paged.set(at / BLOCK, at % BLOCK, &none, &none));
        for token in 0..tokens {
            let [keys, values] = [1, 2].map(|seed| numbers(HEADS * DIM, seed + 3 * token));
            paged.set(table[token / BLOCK] as usize, token % BLOCK, &keys, &values);
        }
        paged
    }

    /// Computes the query of the token at `position` in double precision.
    fn exact(position: usize, seen: Range<usize>, head: usize, scores: Scores) -> Vec<f64> {
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let query = wide(&numbers(DIM, position + 99));
        let of = |seed: usize, token: usize| {
            wide(&numbers(HEADS * DIM, seed + 3 * token)[head * DIM..][..DIM])
        };
        let score = |token| {
            let x: f64 = of(1, token).iter().zip(&query).map(|(a, b)| a * b).sum();
            let x = x * f64::from(scores.scale);
            scores
                .cap
                .map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
        };
        let weights: Vec<f64> = seen.clone().map(|token| score(token).exp()).collect();
        let total: f64 = weights.iter().sum();
        let terms = seen.zip(weights);
        terms.fold(vec![0.0; DIM], |sum, (token, weight)| {
            sum.iter()
                .zip(of(2, token))
                .map(|(sum, value)| sum + weight / total * value)
                .collect()
        })
    }

    #[test]
    fn results_are_exact_wherever_the_blocks_are() {
        let tables = [
            (0..8).collect::<Vec<u32>>(),
            vec![9, 3, 39, 0, 17, 2, 30, 31],
        ];
        for cap in [None, Some(0.7)] {
            let scores = Scores { scale: 1.3, cap };
            for head in 0..HEADS {
                for position in [0, 1, 14, 15, 16, 17, 47, 100, 127] {
                    for window in [1, 3, 16, 50, 1000] {
                        let seen = (position + 1usize).saturating_sub(window)..position + 1;
                        let exact = exact(position, seen.clone(), head, scores);
                        let found = tables.each_ref().map(|table| {
                            let (paged, elements) =
                                (sequence(position + 1, table), numbers(DIM, position + 99));
                            let query = Query {
                                elements: &elements,
                                seen: seen.clone(),
                            };
                            let mut out = [0.0; DIM];
                            paged.attend(head, table, &[query], scores, &mut out);
                            out
                        });
                        assert_eq!(found[0].map(f32::to_bits), found[1].map(f32::to_bits));
                        for (found, exact) in found[0].iter().zip(&exact) {
                            let off = (f64::from(*found) - exact).abs();
                            assert!(off < 2e-6, "{position}, window {window}: {found}: {exact}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn queries_have_the_same_bits_whatever_is_computed_beside() {
        let table: Vec<u32> = (0..8).rev().collect();
        let (paged, scores) = (
            sequence(128, &table),
            Scores {
                scale: 0.4,
                cap: None,
            },
        );
        let elements: Vec<Vec<f32>> = (0..128).map(|at| numbers(DIM, at + 99)).collect();
        let query = |at: usize| Query {
            elements: &elements[at],
            seen: 0..at + 1,
        };
        let run = |first: usize, count: usize| {
            let queries: Vec<_> = (first..first + count).map(query).collect();
            let mut out = vec![0.0; count * DIM];
            paged.attend(1, &table, &queries, scores, &mut out);
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let whole = run(0, 128);
        for (first, count) in [(0, 1), (127, 1), (3, 2), (5, 9), (64, 64), (1, 127)] {
            assert_eq!(run(first, count), whole[first * DIM..(first + count) * DIM]);
        }
    }

    #[test]
    fn widths_with_fused_products_give_the_same_bits() {
        let table: Vec<u32> = (0..8).rev().collect();
        let paged = sequence(128, &table);
        let elements: Vec<Vec<f32>> = (0..7).map(|at| numbers(DIM, at + 99)).collect();
        let query = |at: usize| Query {
            elements: &elements[at],
            seen: at..at + 100,
        };
        let queries: Vec<_> = (0..7).map(query).collect();
        let scores = Scores {
            scale: 0.4,
            cap: Some(0.9),
        };
        let run = |width| {
            let mut out = vec![f32::NAN; queries.len() * DIM];
            paged.attend_by(width, 1, &table, &queries, scores, &mut out);
            out
        };
        let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();

        let plain = run(VectorWidth::Baseline);
        let fused: Vec<_> = widths().skip(1).map(run).collect();
        for pair in fused.windows(2) {
            assert_eq!(bits(&pair[0]), bits(&pair[1]));
        }
        for (plain, fused) in plain.iter().zip(fused.iter().flatten()) {
            assert!((plain - fused).abs() < 2e-6, "{plain} {fused}");
        }
    }
}
