//! Improves an order by swaps on its critical path.

use super::shop::{OrderPlace, Shop, TimedOrder};

impl Shop<'_> {
    /// Improves an order by up to `tries` random swaps on its critical path. Early in the search it
    /// also accepts swaps that make the order longer.
    pub(super) fn anneal(
        &self,
        start: TimedOrder,
        tries: usize,
        random: &mut Random,
    ) -> TimedOrder {
        let Some(mut run) = self.run(&start.rows) else {
            return start;
        };

        let mut now = start.rows.clone();
        // At the beginning, a step that adds this much to the makespan is accepted once in e times.
        let warm = 0.01 * start.makespan;
        let mut best = start;

        for step in 0..tries {
            if run.critical.is_empty() {
                break;
            }

            let OrderPlace { rank, place } = run.critical[random.below(run.critical.len())];
            let row = &mut now[rank];
            // The number of places that the action moves.
            let far = 1 + random.below(4);
            let moved = if random.below(2) == 0 {
                self.shift(row, place, far, true)
            } else {
                self.shift(row, place + 1, far, false)
            };
            let Some(shift) = moved else { continue };

            let tried = if self.holds(&now[rank]) {
                self.run(&now)
            } else {
                None
            };

            let warmth = warm * (1.0 - step as f64 / tries as f64);
            match tried {
                Some(tried)
                    if tried.makespan <= run.makespan
                        || random.chance((run.makespan - tried.makespan) / warmth) =>
                {
                    run = tried;
                    if run.makespan < best.makespan {
                        best = TimedOrder {
                            makespan: run.makespan,
                            rows: now.clone(),
                        };
                    }
                }
                _ => shift.undo(&mut now[rank]),
            }
        }
        best
    }

    /// Moves the action at index `place` of a row by up to `far` positions, towards the end if
    /// `later`. Returns `None` if the action cannot move.
    fn shift(&self, row: &mut [u32], place: usize, far: usize, later: bool) -> Option<ActionShift> {
        let mut at = place;
        for _ in 0..far {
            let other = if later {
                Some(at + 1)
            } else {
                at.checked_sub(1)
            };

            let Some(other) = other.filter(|other| *other < row.len()) else {
                break;
            };
            if !self.may_swap(row[at.min(other)], row[at.max(other)]) {
                break;
            }
            row.swap(at, other);
            at = other;
        }
        (at != place).then_some(ActionShift {
            from: place,
            to: at,
        })
    }
}

/// A move of one action inside its row, from index `from` to index `to`.
struct ActionShift {
    from: usize,
    to: usize,
}

impl ActionShift {
    /// Moves the action back to its old position in the row.
    fn undo(self, row: &mut [u32]) {
        let Self { from, to } = self;
        if from < to {
            row[from..=to].rotate_right(1);
        } else {
            row[to..=from].rotate_left(1);
        }
    }
}

/// An xorshift* generator of random numbers. Its numbers are the same on every machine.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end.max(1)
    }

    /// Returns true with a probability of about e^`exponent`; `exponent` is at most 0. Uses only
    /// addition, subtraction, multiplication and division, so that all machines get the same bits.
    fn chance(&mut self, exponent: f64) -> bool {
        let even = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        even * (1.0 - exponent + 0.5 * exponent * exponent) < 1.0
    }
}
