//! Moves arrays between shardings of all kinds (named, chunked, enumerated, single device), on any
//! devices.

use std::time::Duration;

use crate::common::arrays::{check, values};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_core::topology::DeviceId;
use mpmd_core::{Simulation, simulate};

fn devices(numbers: &[u32]) -> Vec<DeviceId> {
    numbers.iter().copied().map(DeviceId).collect()
}

fn permutations(count: u32) -> Vec<Vec<u32>> {
    (0..count).fold(vec![vec![]], |shorter, next| {
        let longer = |p: &Vec<u32>| {
            let p = p.clone();
            (0..=p.len()).map(move |at| [&p[..at], &[next], &p[at..]].concat())
        };
        shorter.iter().flat_map(longer).collect()
    })
}

#[test]
fn chunks_move_by_every_permutation() {
    let _limit = watchdog(120);
    assert_eq!(permutations(4).len(), 24);
    for processes in [1, 2, 4] {
        let results = simulate(processes, 4, processes as u64, |p| {
            for (count, shape) in [(3, [13, 2]), (4, [5, 2]), (4, [13, 3])] {
                let whole = values(&shape, DType::F32);
                let host = MpmdArray::from_host(whole.clone());
                let start = Sharding::chunk(0, devices(&(0..count).collect::<Vec<_>>()))?;
                let x = p.device_put(&host, &start)?;
                for permutation in permutations(count) {
                    let y = p.device_put(&x, Sharding::chunk(0, devices(&permutation))?)?;
                    check(p, &y, &whole)?;
                    // And back again, so that every permutation is also undone.
                    let back = p.device_put(&y, &start)?;
                    check(p, &back, &whole)?;
                }
            }
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

/// Chunks of 5, 5 and 3 rows move in a cycle of three; an implementation that swaps pairs would
/// fail.
#[test]
fn cycle_of_three_moves_each_chunk_to_the_next_device() {
    let results = simulate(3, 3, 1, |p| {
        let rows: Vec<f32> = (0..26).map(|i| i as f32).collect();
        let host = MpmdArray::from_slice(&[13, 2], &rows)?;
        let x = p.device_put(&host, Sharding::chunk(0, devices(&[0, 1, 2]))?)?;
        let y = p.device_put(&x, Sharding::chunk(0, devices(&[1, 2, 0]))?)?;
        let shards = y.addressable_shards()?;
        Ok(shards[0].data.to_vec::<f32>()?)
    });
    let shards: Vec<Vec<f32>> = results.into_iter().map(Result::unwrap).collect();
    let rows = |from: u32, to: u32| (2 * from..2 * to).map(|i| i as f32).collect::<Vec<f32>>();
    assert_eq!(shards, [rows(10, 13), rows(0, 5), rows(5, 10)]);
}

#[test]
fn chunks_of_one_dimension_become_chunks_of_another() {
    let _limit = watchdog(120);
    let orders = [[0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 3, 2], [3, 2, 1, 0]];
    let results = simulate(4, 4, 3, |p| {
        for shape in [[13, 21], [12, 24], [5, 3], [1, 7], [2, 2], [4, 6], [5, 0]] {
            let whole = values(&shape, DType::I16);
            let host = MpmdArray::from_host(whole.clone());
            for (from, to) in [(0, 1), (1, 0), (-1, -2)] {
                for before in permutations(4).iter().step_by(5) {
                    let x = p.device_put(&host, Sharding::chunk(from, devices(before))?)?;
                    for after in &orders {
                        let y = p.device_put(&x, Sharding::chunk(to, devices(after))?)?;
                        check(p, &y, &whole)?;
                    }
                }
            }
        }
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// A generator of random numbers; equal seeds give the same numbers on every process.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn shuffled(&mut self, count: u32) -> Vec<DeviceId> {
        let mut all = devices(&(0..count).collect::<Vec<_>>());
        (1..all.len()).for_each(|i| all.swap(i, self.below(i + 1)));
        all
    }

    /// Returns a random sharding of an array of `shape` over some of eight devices, in any order.
    fn sharding(&mut self, p: &Program, shape: &[usize]) -> Result<Sharding> {
        let mut order = self.shuffled(8);
        let sharding = match self.below(8) {
            0 => Sharding::single_device(order[0]),
            1 | 2 => {
                order.truncate(1 + self.below(8));
                let dim = self.below(2 * shape.len()) as isize - shape.len() as isize;
                Sharding::chunk(dim, order)?
            }
            3 | 4 => Sharding::enumerated(order.into_iter().zip(self.tiling(shape)).collect())?,
            _ => self.named(p, shape, order)?,
        };
        let host = self.below(8) == 0;
        Ok(if host {
            sharding.with_memory_kind(MemoryKind::Host)
        } else {
            sharding
        })
    }

    /// Returns at most eight tiles that cover the shape, made by random cuts. Some may be empty.
    fn tiling(&mut self, shape: &[usize]) -> Vec<Region> {
        let mut tiles = vec![Region::full(shape)];
        for _ in 0..self.below(8) {
            let tile = tiles.remove(self.below(tiles.len()));
            let dim = self.below(shape.len());
            let at = tile.range(dim).start + self.below(tile.range(dim).len() + 1);
            let part = |start, end| {
                let ranges = tile.ranges().enumerate();
                ranges
                    .map(|(d, r)| {
                        if d == dim {
                            (start, end)
                        } else {
                            (r.start, r.end)
                        }
                    })
                    .collect()
            };
            tiles.extend([
                part(tile.range(dim).start, at),
                part(at, tile.range(dim).end),
            ]);
        }
        tiles
    }

    /// Returns a sharding over a mesh of one to three axes, on the first devices of `order`. Each
    /// axis divides a dimension evenly or is unused.
    fn named(&mut self, p: &Program, shape: &[usize], order: Vec<DeviceId>) -> Result<Sharding> {
        const MESHES: [&[usize]; 7] = [&[8], &[2, 4], &[4, 2], &[2, 2, 2], &[3], &[2, 3], &[5]];
        let sizes = MESHES[self.below(MESHES.len())];
        let axes: Vec<(&str, usize)> = ["a", "b", "c"]
            .into_iter()
            .zip(sizes.iter().copied())
            .collect();
        let mesh = p.mesh_of(&axes, &order[..sizes.iter().product()])?;
        let mut left = shape.to_vec();
        let mut entries: Vec<Vec<String>> = vec![Vec::new(); shape.len()];
        for (axis, size) in axes {
            let dim = self.below(shape.len() + 1);
            if dim < shape.len() && left[dim].is_multiple_of(size) {
                left[dim] /= size;
                entries[dim].push(axis.to_owned());
            }
        }
        Ok(mesh.sharding(Spec::new(
            entries.into_iter().map(SpecEntry::from).collect(),
        )))
    }
}

#[test]
fn random_shardings_reach_each_other_unchanged() {
    let _limit = watchdog(300);
    const SHAPES: [&[usize]; 6] = [&[24], &[12, 10], &[7, 5], &[2, 60, 3], &[16, 0], &[1, 30]];
    for seed in 0..48 {
        let processes = [1, 2, 4, 8][seed as usize % 4];
        // One, two or four processes on each host.
        let hosts: Vec<usize> = (0..processes)
            .map(|process| process >> (seed / 4 % 3))
            .collect();
        let job = Simulation::new(processes, 8).delays(seed, Duration::from_millis(2));
        let results = job.settings(|builder| builder.hosts(&hosts)).run(|p| {
            let mut draws = Draws(seed);
            let shape = SHAPES[draws.below(SHAPES.len())];
            let dtype = DType::ALL[draws.below(DType::ALL.len())];
            let whole = values(shape, dtype);
            let mut x = MpmdArray::from_host(whole.clone());
            for round in 0..6 {
                let to = draws.sharding(p, shape)?;
                let y = match round % 3 {
                    0 => p.device_put(&x, &to)?,
                    1 => p.reshard(&x, &to, MoveOptions::default().donate(true))?,
                    _ => p.reshard(&x, &to, MoveOptions::default().may_alias(false))?,
                };
                check(p, &y, &whole)?;
                x = y;
            }
            Ok(())
        });
        results
            .into_iter()
            .for_each(|result| result.unwrap_or_else(|error| panic!("seed {seed}: {error}")));
    }
}

/// The array is large enough to move in chunks, through relays.
#[test]
fn large_relayed_arrays_arrive_whole() {
    let _limit = watchdog(120);
    for processes in [2, 4] {
        let results = Simulation::new(processes, 4).run(|p| {
            let whole = values(&[1 << 11, 1 << 10], DType::F32);
            let host = MpmdArray::from_host(whole.clone());
            let x = p.device_put(&host, Sharding::single_device(DeviceId(0)))?;
            let mesh = p.mesh(&[("x", 4)])?;
            let everywhere = p.device_put(&x, mesh.replicated())?;
            check(p, &everywhere, &whole)?;
            let columns = p.device_put(&x, mesh.sharding(spec![None, "x"]))?;
            check(p, &columns, &whole)?;
            let rows = p.device_put(&columns, mesh.sharding(spec!["x"]))?;
            check(p, &rows, &whole)?;
            let everywhere = p.device_put(&columns, mesh.replicated())?;
            check(p, &everywhere, &whole)
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}
