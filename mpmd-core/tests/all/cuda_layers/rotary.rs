//! Rotary position embeddings.

use super::*;
use layers::{Heads, Rotary, RotaryAngles};

#[test]
fn rotations_are_exact_and_turn_back() {
    if softcuda::again!() {
        return;
    }
    for dtype in BOTH {
        for sizes in [[1, 1, 1, 2], [2, 5, 3, 6], [1, 33, 2, 64]] {
            for beside in [false, true] {
                for kind in 0..3 {
                    rotate(dtype, sizes, beside, kind);
                }
            }
        }
    }
}

/// Rotates `dim` elements of vectors that have one more. `kind` 0: all sequences have the same
/// angles; 1: each has its own; 2: each token has the angles of a position.
fn rotate(dtype: DType, [batch, time, heads, dim]: [usize; 4], beside: bool, kind: usize) {
    let (tokens, half, row) = (batch * time, dim / 2, heads * (dim + 1));
    let n = tokens * row;
    let (x, exact) = sample(dtype, n, 1);
    let places = tokens + 2;
    let angles = random(places * half, 2);
    let table = |f: fn(f64) -> f64| {
        array(
            DType::F32,
            &angles.iter().map(|x| f(*x)).collect::<Vec<_>>(),
        )
    };
    let positions: Vec<u32> = (0..tokens)
        .map(|token| ((token * 7 + 1) % places) as u32)
        .collect();
    let inputs = [x, table(f64::cos), table(f64::sin), of(&positions)];
    let outputs = [shape(dtype, n), shape(dtype, n)];
    let y = device(&layers::ROTARY, &inputs, &outputs, move |cuda, x, y| {
        let [there, back] = y else {
            panic!("two outputs")
        };
        let angles = match kind {
            0 => RotaryAngles::ByTime(0),
            1 => RotaryAngles::ByTime(time),
            _ => RotaryAngles::ByPosition(x[3].at(0)),
        };
        let rotary = Rotary {
            batch,
            time,
            heads,
            dim,
            beside,
            angles,
        };
        let tables = [x[1].at(0), x[2].at(0)];
        let heads_of = |part| Heads::in_rows(part, time, row, dim + 1);
        cuda.copy(&x[0], &mut *there)?;
        let there = there.at(0);
        rotary.rotate(cuda, false, heads_of(there), tables, heads_of(there))?;
        cuda.copy(there, &mut *back)?;
        rotary.rotate(cuda, true, heads_of(there), tables, heads_of(back.at(0)))
    });
    let mut out = exact.clone();
    for (token, position) in positions.iter().enumerate() {
        let place = match kind {
            0 => token % time,
            1 => token,
            _ => *position as usize,
        };
        for head in 0..heads {
            let start = token * row + head * (dim + 1);
            for i in 0..half {
                let (sin, cos) = angles[place * half + i].sin_cos();
                let (a, b) = if beside {
                    (2 * i, 2 * i + 1)
                } else {
                    (i, i + half)
                };
                let (a, b) = (start + a, start + b);
                out[a] = exact[a] * cos - exact[b] * sin;
                out[b] = exact[a] * sin + exact[b] * cos;
            }
        }
    }
    let name = format!(
        "rotation of {dtype} {:?}, {beside}, {kind}",
        [batch, time, heads, dim]
    );
    close(&name, &y[0], &out, 1e-6);
    close(&format!("{name} and back"), &y[1], &exact, 1e-6);
}
