//! Computes the nodes of a kernel on one device.

mod block;
mod contract;
mod elements;
mod indexed;
mod reduce;
mod reshape;

use std::borrow::Cow;

use mpmd_layout::aval::DType;
use mpmd_layout::random::{Key, normal_f32, normal_f64, uniform_f32, uniform_f64};
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;

pub(super) use block::Block;

use super::kernel::Step;
use super::node::{Distribution, Op};
use crate::error::{Error, Result};
use block::{offset, unsupported};

/// The values of a kernel's inputs and steps on one device.
pub(super) struct Evaluation<'a> {
    device: DeviceId,
    values: Vec<Option<Block<'a>>>,
    /// True for each value that is an output.
    is_kept: Vec<bool>,
}

impl<'a> Evaluation<'a> {
    /// Begins with the inputs. `outputs` are places among inputs and steps.
    pub(super) fn new(device: DeviceId, inputs: Vec<Block<'a>>, outputs: &[usize]) -> Self {
        let places = outputs.iter().max().map_or(0, |last| last + 1);
        let mut is_kept = vec![false; places];
        outputs.iter().for_each(|place| is_kept[*place] = true);
        Self {
            device,
            values: inputs.into_iter().map(Some).collect(),
            is_kept,
        }
    }

    /// Computes the next step, and frees what no later one needs.
    pub(super) fn run(&mut self, step: &Step) -> Result<()> {
        let operands = step.operands.iter().map(|operand| {
            let value = self.value(operand.place)?;
            match operand.cut(self.device) {
                // Whole values, such as host values, have the region of the whole array.
                Some((own, part)) => Ok(Cow::Owned(value.cut(&own, &part)?)),
                None => Ok(Cow::Borrowed(value)),
            }
        });
        let operands: Vec<Cow<'_, Block<'_>>> = operands.collect::<Result<_>>()?;
        let blocks: Vec<&Block<'_>> = operands.iter().map(|operand| &**operand).collect();
        let region = step.region(self.device);
        let computed = compute(step, &region, &blocks)?;
        drop(blocks);
        drop(operands);

        self.values.push(Some(computed));
        for operand in &step.operands {
            let is_kept = self.is_kept.get(operand.place).copied().unwrap_or(false);
            if operand.is_last_use && !is_kept {
                self.values[operand.place] = None;
            }
        }
        Ok(())
    }

    /// Returns the value at a place among inputs and steps.
    pub(super) fn value(&self, place: usize) -> Result<&Block<'a>> {
        let value = self.values.get(place).and_then(Option::as_ref);
        value.ok_or_else(|| Error::kernel("a value of a traced function is missing"))
    }
}

/// Computes the region of a step's result from the parts of its operands.
fn compute(step: &Step, region: &Region, x: &[&Block<'_>]) -> Result<Block<'static>> {
    let shape: Vec<usize> = region.ranges().map(|range| range.len()).collect();
    let shape = &shape[..];
    match (&step.op, x) {
        (Op::Constant(value), []) => elements::filled(shape, step.aval.dtype(), *value),
        (Op::Random(key, distribution), []) => random(
            *key,
            *distribution,
            step.aval.shape(),
            region,
            step.aval.dtype(),
        ),
        (Op::Unary(f), [x]) => elements::unary(*f, x),
        (Op::Cast, [x]) => elements::cast(x, step.aval.dtype()),
        (Op::Binary(f), [a, b]) => elements::binary(*f, shape, a, b),
        (Op::Compare(f), [a, b]) => elements::compare(*f, shape, a, b),
        (Op::Select, [condition, yes, no]) => elements::select(shape, condition, yes, no),
        (
            Op::Reduce {
                reduction, dims, ..
            },
            [x],
        ) => reduce::reduce(*reduction, dims, x, shape),
        (Op::ArgMax { dim }, [x]) => reduce::argmax(*dim, x, shape),
        (Op::Contract(contraction), [a, b]) => contract::contract(contraction, a, b, shape),
        (Op::Transpose(order), [x]) => reshape::transpose(order, x),
        (Op::Reshape, [x]) => reshape::reshape(x, shape),
        (Op::Broadcast, [x]) => elements::broadcast(x, shape),
        (Op::Slice { dim, start }, [x]) => reshape::slice(*dim, *start, x, shape),
        (Op::Pad { dim, before, value }, [x]) => reshape::pad(*dim, *before, *value, x, shape),
        (Op::Concatenate { dim }, blocks) => reshape::concatenate(*dim, blocks, shape),
        (Op::Take { dim }, [x, indices]) => indexed::take(*dim, x, indices, shape),
        (Op::TakeAlong { dim }, [x, indices]) => indexed::take_along(*dim, x, indices, shape),
        (Op::SumAlong { dim }, [x, indices]) => indexed::sum_along(*dim, x, indices, shape),
        (Op::SegmentSum { dim }, [x, segments]) => indexed::segment_sum(*dim, x, segments, shape),
        (Op::OneHot, [x]) => indexed::one_hot(x, shape, step.aval.dtype()),
        _ => Err(Error::kernel(
            "a node of a traced function has other operands",
        )),
    }
}

/// Returns random numbers for a region of an array. Each depends on its place in the array alone.
fn random(
    key: Key,
    distribution: Distribution,
    global: &[usize],
    region: &Region,
    dtype: DType,
) -> Result<Block<'static>> {
    let shape: Vec<usize> = region.ranges().map(|range| range.len()).collect();
    let starts: Vec<usize> = region.ranges().map(|range| range.start).collect();
    let mut places = Vec::with_capacity(shape.iter().product());
    block::for_rows(&shape, |row| {
        let at = row.iter().zip(&starts).map(|(at, start)| at + start);
        let first = offset(global, at) as u64;
        places.extend(first..first + shape.last().copied().unwrap_or(1) as u64);
    });
    let places = places.into_iter();
    match (dtype, distribution) {
        (DType::F32, Distribution::Uniform) => Ok(Block::new(
            &shape,
            places.map(|at| uniform_f32(key, at)).collect(),
        )),
        (DType::F32, Distribution::Normal) => Ok(Block::new(
            &shape,
            places.map(|at| normal_f32(key, at)).collect(),
        )),
        (DType::F64, Distribution::Uniform) => Ok(Block::new(
            &shape,
            places.map(|at| uniform_f64(key, at)).collect(),
        )),
        (DType::F64, Distribution::Normal) => Ok(Block::new(
            &shape,
            places.map(|at| normal_f64(key, at)).collect(),
        )),
        (other, _) => Err(unsupported(other)),
    }
}
