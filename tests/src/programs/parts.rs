//! Parts that several programs use.

use std::hash::Hasher;

use mpmd_core::prelude::*;

use super::Say;

/// Sends one value from process 0 to all processes, which print it. The smallest program.
pub(super) fn hello(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let value = p.broadcast_value(mpmd_core::ProcessId(0), 0, || Ok(42))?;
    say(format!(
        "hello from process {} of {}: {value}",
        p.process(),
        p.processes()
    ));
    Ok(())
}

/// Prints the name of the job's transport.
pub(super) fn transport(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    say(format!("over {}", p.transport()));
    Ok(())
}

/// A kernel that applies `f` to each element.
pub(super) struct Each {
    pub(super) name: &'static str,
    pub(super) f: fn(f32) -> f32,
}

impl Kernel for Each {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, _: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        for (y, x) in y
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(x.as_slice::<f32>()?)
        {
            *y = (self.f)(*x);
        }
        Ok(())
    }

    fn name(&self) -> &str {
        self.name
    }
}

/// Returns a kernel that sums all elements of an unsharded array of whole numbers, modulo 2^24 so
/// that the sum is exact.
pub(super) fn sum() -> impl Kernel<In = MpmdArray, Out = MpmdArray> {
    kernel(
        |_: &ShapedArray| f32s([]),
        |x: View<f32>, mut y: ViewMut<f32>| {
            let sum: u64 = x.iter().map(|x| *x as u64).sum();
            y[0] = (sum % (1 << 24)) as f32;
        },
    )
}

/// Returns a function that fills an array with whole numbers. Each depends on the element's global
/// index and on `salt`.
pub(super) fn numbered(salt: u64) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync {
    move |region, mut view| {
        let shape = view.global().shape().to_vec();
        let mut at: Vec<usize> = region.ranges().map(|range| range.start).collect();
        for value in view.as_mut_slice::<f32>()? {
            let index = at
                .iter()
                .zip(&shape)
                .fold(0, |index, (at, size)| index * size + at) as u64;
            *value = ((index * 7 + salt * 1013) % 65_521) as f32;
            // The next element, row-major.
            for dim in (0..at.len()).rev() {
                at[dim] += 1;
                if at[dim] < region.range(dim).end {
                    break;
                }
                at[dim] = region.range(dim).start;
            }
        }
        Ok(())
    }
}

/// Prints this process's shards of an array: device, region, and a hash of the bytes.
pub(super) fn say_shards(name: &str, x: &MpmdArray, say: &mut Say<'_>) -> Result<()> {
    if x.is_fully_remote() {
        return Ok(());
    }
    for shard in x.addressable_shards()? {
        // Without random keys: equal in every process.
        let mut hash = std::hash::DefaultHasher::new();
        hash.write(shard.data.bytes());
        say(format!(
            "{name} {} on {} {:?} {:016x}",
            x.aval(),
            shard.device,
            shard.region,
            hash.finish()
        ));
    }
    Ok(())
}
