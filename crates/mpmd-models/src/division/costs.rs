//! The division of layers over stages, by their costs and by memory: without a model.

use std::ops::Range;

use mpmd::candle::nn::BLOCK;

use crate::hub::folder::Folder;

/// The capacity of an inference's caches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Room {
    /// Number of blocks in the cache of keys and values, of [`BLOCK`] tokens each.
    pub blocks: usize,
    /// Largest number of sequences at the same time.
    pub sequences: usize,
}

impl Room {
    /// Returns the capacity for one sequence of up to `positions` tokens.
    pub fn for_one(positions: usize) -> Self {
        Self {
            blocks: positions.div_ceil(BLOCK),
            sequences: 1,
        }
    }
}

/// The memory that a stage needs on a device, in bytes per unit.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct HeldBytes {
    /// Bytes per element of a parameter.
    pub element: u64,
    /// Bytes per layer in addition to its parameters, such as caches.
    pub layer: u64,
}

impl HeldBytes {
    /// The bytes of trained parameters in f32: the array, the model's copy, the gradient, and two
    /// moments of the optimiser.
    pub const TRAINING: Self = Self {
        element: 5 * 4,
        layer: 0,
    };
    /// The bytes of frozen parameters in f32: the array and the model's copy.
    pub const FROZEN: Self = Self {
        element: 2 * 4,
        layer: 0,
    };

    /// Returns the bytes for an inference with caches of capacity `room`. Weights are in `bf16` if
    /// `in_half`, else in `f32`.
    pub fn inference(folder: &Folder, room: Room, in_half: bool) -> Self {
        let config = folder.config();
        let token = 2 * config.num_key_value_heads * config.head_dim * size_of::<f32>();
        let layer = (room.blocks * BLOCK * token) as u64;
        Self {
            element: if in_half { 2 } else { 4 },
            layer,
        }
    }
}

/// The cost of a layer on a device, or of the embedding or output of a stage.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Cost {
    /// Computation per token, proportional to its multiplications.
    pub(crate) work: u64,
    /// Memory, in bytes.
    pub(crate) bytes: u64,
}

impl Cost {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            work: self.work + other.work,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// A stage for which no division needs little enough memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TooLittle {
    pub(crate) stage: usize,
    /// The least memory that the stage needs if all earlier stages are filled, in bytes.
    pub(crate) needs: u64,
}

/// The costs of the model's layers on one device of a stage. `first` and `last` are the costs of
/// the parts that only the first and the last stage have.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    /// Prefix sums: `sums[n]` is the cost of the first `n` layers.
    sums: Vec<Cost>,
    first: Cost,
    last: Cost,
}

impl Layers {
    pub(crate) fn new(layers: &[Cost], first: Cost, last: Cost) -> Self {
        let mut sums = vec![Cost::default()];
        for layer in layers {
            sums.push(sums[sums.len() - 1].and(*layer));
        }
        Self { sums, first, last }
    }
}

/// The costs of a model's layers for each stage. They differ between stages, since a stage's
/// devices may divide the layers.
#[derive(Clone, Debug)]
pub(crate) struct ModelCosts(pub(crate) Vec<Layers>);

impl ModelCosts {
    fn stages(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of layers of the model.
    fn len(&self) -> usize {
        self.0.first().map_or(0, |layers| layers.sums.len() - 1)
    }

    /// Divides the layers over the stages, with at least one layer for each. Minimises the largest
    /// work of a stage; among such divisions, evens out the works. A stage needs at most
    /// `limits[stage]` bytes, if `limits` is not empty.
    ///
    /// # Errors
    ///
    /// If no division stays within the limits.
    ///
    /// # Panics
    ///
    /// If there are fewer layers than stages, or no stage.
    pub(crate) fn cut(&self, limits: &[u64]) -> Result<Vec<Range<usize>>, TooLittle> {
        let most = self.least_work(limits)?;
        let stages = self.stages();
        let layers = self.len();

        // `best[n]`: the least sum of squared works of the stages so far with `n` layers together,
        // and the layers before the last of them.
        let mut best: Vec<Option<(u128, usize)>> = vec![None; layers + 1];
        best[0] = Some((0, 0));
        let mut chosen = Vec::new();
        for stage in 0..stages {
            let mut next = vec![None; layers + 1];
            for (start, found) in best.iter().enumerate().take(layers) {
                let Some((sum, _)) = *found else { continue };
                let last = layers - (stages - 1 - stage);
                for (end, best) in next.iter_mut().enumerate().take(last + 1).skip(start + 1) {
                    let Cost { work, bytes } = self.cost(start..end, stage);
                    if work > most || limits.get(stage).is_some_and(|limit| bytes > *limit) {
                        break;
                    }
                    let sum = sum + u128::from(work).pow(2);
                    if best.is_none_or(|(least, _)| sum < least) {
                        *best = Some((sum, start));
                    }
                }
            }
            chosen.push(std::mem::replace(&mut best, next));
        }

        chosen.push(best);
        let mut end = layers;
        let mut ranges = Vec::new();
        for all in chosen[1..].iter().rev() {
            let start = all[end].map_or(0, |(_, start)| start);
            ranges.push(start..end);
            end = start;
        }
        ranges.reverse();
        Ok(ranges)
    }

    /// Returns the cost of `layers` on a device of stage `stage`.
    pub(crate) fn cost(&self, layers: Range<usize>, stage: usize) -> Cost {
        let Layers { sums, first, last } = &self.0[stage];
        let before = sums[layers.start];
        let all = sums[layers.end];
        let own = Cost {
            work: all.work - before.work,
            bytes: all.bytes - before.bytes,
        };

        let own = if stage == 0 { own.and(*first) } else { own };
        if stage + 1 == self.stages() {
            own.and(*last)
        } else {
            own
        }
    }

    /// Returns the smallest bound on the work of a stage that some division keeps within `limits`.
    fn least_work(&self, limits: &[u64]) -> Result<u64, TooLittle> {
        let all = (0..self.stages()).map(|stage| self.cost(0..self.len(), stage).work);
        let all = all.max().unwrap_or(0);
        self.fits(limits, all)?;

        let mut low = 0;
        let mut high = all;
        while low < high {
            let middle = low + (high - low) / 2;
            match self.fits(limits, middle) {
                Ok(()) => high = middle,
                Err(_) => low = middle + 1,
            }
        }
        Ok(high)
    }

    /// Checks that the layers fit if each stage has at most `most` work and its bytes in `limits`.
    /// Gives each stage in turn as many layers as fit. The error names the first stage for which a
    /// layer does not fit, or the last one if layers remain.
    fn fits(&self, limits: &[u64], most: u64) -> Result<(), TooLittle> {
        let mut start = 0;
        let stages = self.stages();
        for stage in 0..stages {
            let last = self.len() - (stages - 1 - stage);
            let limit = limits.get(stage).copied().unwrap_or(u64::MAX);
            let fits = |end: &usize| {
                let Cost { work, bytes } = self.cost(start..*end, stage);
                work <= most && bytes <= limit
            };
            // A last stage must take all that is left.
            let least = if stage + 1 == stages { last } else { start + 1 };

            let Some(end) = (least..=last).take_while(fits).last() else {
                let needs = self.cost(start..least, stage).bytes;
                return Err(TooLittle { stage, needs });
            };
            start = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mpmd::random::Key;

    use super::*;

    /// Returns costs of layers for stages with these numbers of devices. `works` has the work of
    /// each layer on one device.
    fn costs(devices: &[u64], works: &[u64], first: u64, last: u64) -> ModelCosts {
        let of = |devices: &u64| {
            let cost = |work: &u64| Cost {
                work: work / devices,
                bytes: 10 * work / devices,
            };
            let all: Vec<Cost> = works.iter().map(cost).collect();
            Layers::new(&all, cost(&first), cost(&last))
        };
        ModelCosts(devices.iter().map(of).collect())
    }

    /// Returns the number of layers in each stage of the division.
    fn lengths(model: &ModelCosts, limits: &[u64]) -> Vec<usize> {
        let cut = model.cut(limits).unwrap();
        let ends = cut.iter().map(|range| range.end);
        let starts = [0].into_iter().chain(ends).take(model.stages());
        assert!(cut.iter().map(|range| range.start).eq(starts));
        cut.into_iter().map(|range| range.len()).collect()
    }

    /// Returns the least possible work of the largest stage, by trying all divisions.
    fn least(model: &ModelCosts, start: usize, stage: usize) -> u64 {
        let (all, stages) = (model.len(), model.stages());
        if stage + 1 == stages {
            return model.cost(start..all, stage).work;
        }
        let of = |end| {
            let own = model.cost(start..end, stage).work;
            own.max(least(model, end, stage + 1))
        };
        (start + 1..=all - (stages - 1 - stage))
            .map(of)
            .min()
            .unwrap()
    }

    #[test]
    fn equal_layers_are_divided_evenly() {
        assert_eq!(lengths(&costs(&[1; 4], &[3; 8], 0, 0), &[]), [2, 2, 2, 2]);
        assert_eq!(
            lengths(&costs(&[1; 3], &[3; 7], 0, 0), &[])
                .iter()
                .sum::<usize>(),
            7
        );
        assert_eq!(lengths(&costs(&[1; 5], &[3; 5], 0, 0), &[]), [1; 5]);
        assert_eq!(lengths(&costs(&[1], &[1; 5], 9, 9), &[]), [5]);
    }

    #[test]
    fn head_counts_as_layers_of_its_work() {
        assert_eq!(lengths(&costs(&[1; 2], &[2; 10], 0, 8), &[]), [7, 3]);
        assert_eq!(lengths(&costs(&[1; 3], &[2; 6], 0, 100), &[]), [2, 3, 1]);
    }

    #[test]
    fn no_division_has_less_work_in_its_largest_stage() {
        let mut drawn = 0;
        let mut random = |end: u64| {
            drawn += 1;
            Key(1).fold_in(drawn).0 % end
        };
        for _ in 0..200 {
            let works: Vec<u64> = (0..2 + random(7)).map(|_| 12 * random(20)).collect();
            let stages = 1 + random(works.len() as u64) as usize;
            let devices: Vec<u64> = (0..stages).map(|_| 1 + random(3)).collect();
            let model = costs(&devices, &works, 12 * random(30), 12 * random(30));
            let cut = model.cut(&[]).unwrap();
            let works = (0..)
                .zip(&cut)
                .map(|(stage, range)| model.cost(range.clone(), stage).work);
            let most = works.max().unwrap();
            assert_eq!(most, least(&model, 0, 0), "{model:?}: {cut:?}");
        }
    }

    #[test]
    fn stage_of_several_devices_has_more_layers() {
        let model = costs(&[2, 1], &[4; 9], 0, 0);
        assert_eq!(lengths(&model, &[]), [6, 3]);
        assert_eq!(lengths(&model, &[80, 1000]), [4, 5]);
    }

    #[test]
    fn limits_of_memory_hold_or_are_named() {
        let model = costs(&[1; 2], &[1; 10], 2, 4);
        assert_eq!(lengths(&model, &[]), [6, 4]);
        assert_eq!(lengths(&model, &[50, 1000]), [3, 7]);
        assert_eq!(lengths(&model, &[1000, 50]), [9, 1]);
        assert_eq!(
            model.cut(&[20, 1000]),
            Err(TooLittle {
                stage: 0,
                needs: 30
            })
        );
        assert_eq!(
            model.cut(&[70, 80]),
            Err(TooLittle {
                stage: 1,
                needs: 90
            })
        );
    }
}
