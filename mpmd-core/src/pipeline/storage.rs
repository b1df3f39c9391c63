//! Parameters that a stage keeps otherwise than its kernels compute with them.

use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::PrefixTree;

/// How the kernels of a stage see its parameters where these are kept in other shardings:
/// [`Pipeline::store`](super::Pipeline::store).
///
/// A step puts the parameters to the shardings that the kernels compute with before it first uses
/// them (an all-gather, where the stored ones are divided over more axes), once for all
/// microbatches, and drops what it put after the last use. The gradients that the weight passes
/// accumulate may be partial sums; after the last microbatch they are put to the shardings of the
/// stored parameters, which adds them up (a reduce-scatter). Both are plain `device_put`s.
#[derive(Clone, Debug)]
pub struct Storage {
    compute: Vec<Sharding>,
    gradients: Vec<Sharding>,
}

impl Storage {
    /// Kernels compute with parameters in these shardings, in leaf order, and write whole gradients
    /// in the same.
    pub fn new(compute: Vec<Sharding>) -> Self {
        Self { gradients: compute.clone(), compute }
    }

    /// The gradients that the weight passes write are partial sums over these axes of the mesh:
    /// what each device has from its own part of the batch.
    ///
    /// # Errors
    ///
    /// Where a sharding has no mesh with these axes, or divides a parameter over one of them.
    pub fn partial_over(mut self, axes: &[&str]) -> Result<Self> {
        self.gradients = self
            .compute
            .iter()
            .map(|sharding| Ok(sharding.unreduced(axes)?))
            .collect::<Result<_>>()?;
        Ok(self)
    }

    /// Whether these are shardings for the parameters of a stage on `mesh`.
    pub(super) fn check(&self, params: &[(String, &ShapedArray)], mesh: &Mesh) -> Result<()> {
        let (found, expected) = (self.compute.len(), params.len());
        if found != expected {
            let problem = format!(
                "{found} shardings for the {expected} parameters: give one for each, in leaf order"
            );
            return Err(Error::kernel(problem));
        }
        for ((path, param), sharding) in params.iter().zip(&self.compute) {
            let mut devices = mesh.devices().iter();
            if !devices.all(|device| sharding.devices().contains(device)) {
                return Err(Error::kernel(format!(
                    "it cannot compute with parameter {path:?} as {sharding}: not on its mesh \
                     {mesh}"
                )));
            }
            sharding.layout(param.shape()).map_err(|why| {
                Error::kernel(format!("it cannot compute with parameter {path:?}: {why}"))
            })?;
        }
        Ok(())
    }

    /// What kernels compute with, in leaf order.
    pub(super) fn compute(&self) -> &[Sharding] {
        &self.compute
    }

    /// What the weight passes write, in leaf order.
    pub(super) fn gradients(&self) -> &[Sharding] {
        &self.gradients
    }
}

/// Puts each array to its sharding; those that have it are left alone, and so cost nothing.
#[track_caller]
pub(super) fn put_each(
    program: &mut Program,
    mut arrays: Vec<MpmdArray>,
    to: &[Sharding],
) -> Result<Vec<MpmdArray>> {
    let other = |place: &usize| arrays[*place].sharding() != Some(&to[*place]);
    let places: Vec<usize> = (0..arrays.len()).filter(other).collect();
    if places.is_empty() {
        return Ok(arrays);
    }
    let moved: Vec<MpmdArray> = places.iter().map(|place| arrays[*place].clone()).collect();
    let shardings: Vec<Sharding> = places.iter().map(|place| to[*place].clone()).collect();
    let moved = program.device_put(&moved, PrefixTree::from(shardings))?;
    places.into_iter().zip(moved).for_each(|(place, array)| arrays[place] = array);
    Ok(arrays)
}
