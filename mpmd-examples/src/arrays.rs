//! Arrays of the examples `basic` and `overlap`: initial values, and reports of what has arrived.

use std::time::Instant;

use mpmd::ProcessId;
use mpmd::prelude::*;
use mpmd::random::{Key, normal_f64, uniform_f32};
use mpmd::topology::Mesh;

/// Returns random weights `[width, width]`, on every device of the mesh: normally distributed with
/// variance `1 / width`, so that products keep the size of their inputs.
///
/// # Errors
///
/// If the mesh has devices outside the job.
pub fn weights(p: &mut Program, width: usize, mesh: &Mesh, key: u64) -> Result<MpmdArray> {
    let scale = 1.0 / (width as f64).sqrt();
    let weight = move |i| (scale * normal_f64(Key(key), i)) as f32;
    p.array_from_fn(f32s([width, width]), mesh.replicated(), fill(weight))
}

/// Returns uniformly distributed random inputs of `shape`, on every device of the mesh.
///
/// # Errors
///
/// If the mesh has devices outside the job.
pub fn inputs(p: &mut Program, shape: [usize; 2], mesh: &Mesh) -> Result<MpmdArray> {
    p.array_from_fn(f32s(shape), mesh.replicated(), fill(|i| uniform_f32(Key(100), i)))
}

/// Returns a function that fills a region of a matrix. `value` gets an element's row-major index in
/// the whole matrix.
fn fill(
    value: impl Fn(u64) -> f32 + Send + Sync + 'static,
) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync {
    move |region, mut view| {
        let columns = view.global().shape()[1];
        let row = |row: usize| region.range(1).map(move |column| (row * columns + column) as u64);
        let places = region.range(0).flat_map(row);
        view.as_mut_slice::<f32>()?.iter_mut().zip(places).for_each(|(x, place)| *x = value(place));
        Ok(())
    }
}

/// Waits for an array, and checks that every element on this process equals `expected`. An element
/// that differs is an error.
///
/// Returns a description of the rows on this process, or says that the array is on other processes.
///
/// # Errors
///
/// If the array failed, or an element differs.
pub fn equal(x: &MpmdArray, expected: f32) -> Result<String> {
    if x.is_fully_remote() {
        return Ok(format!("is a handle: {} on other processes", x.aval()));
    }
    let mut places = Vec::new();
    for shard in x.addressable_shards()? {
        let place = format!("rows {:?} on device {}", shard.region.range(0), shard.device);
        if let Some(value) = shard.data.as_slice::<f32>()?.iter().find(|value| **value != expected)
        {
            return Err(Error::kernel(format!("{place}: {value} instead of {expected}")));
        }
        places.push(place);
    }
    Ok(format!("is {expected:?} everywhere in {}", places.join(", ")))
}

/// Waits for an array that is replicated on its mesh, and prints its type, its devices on this
/// process, and the root mean square of its values. Process 0 also prints the speed of `steps`
/// steps since `start`.
///
/// If the array is on other processes, prints only its type.
///
/// # Errors
///
/// If the array failed, or the root mean square is not finite.
pub fn report(p: &Program, x: &MpmdArray, steps: usize, start: Instant) -> Result<()> {
    println!("process {}: the output {}", p.process(), root_mean_square(x)?);
    if p.process() == ProcessId(0) {
        println!("{:.2} steps/s", steps as f64 / start.elapsed().as_secs_f64());
    }
    Ok(())
}

fn root_mean_square(x: &MpmdArray) -> Result<String> {
    let Some(values) = x.to_host()? else {
        return Ok(format!("is a handle: {} on other processes", x.aval()));
    };
    let values = values.as_slice::<f32>()?;
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let size = (squares / values.len().max(1) as f64).sqrt();
    if !size.is_finite() {
        return Err(Error::kernel(format!("{} has values that are not finite", x.aval())));
    }
    let shards = x.addressable_shards()?;
    let devices: Vec<_> = shards.iter().map(|shard| shard.device.to_string()).collect();
    let devices = devices.join(", ");
    Ok(format!("is here, {} on devices {devices}, root mean square {size:.6}", x.aval()))
}
