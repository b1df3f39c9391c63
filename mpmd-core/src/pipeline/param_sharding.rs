//! Parameters that are stored in one sharding and computed with in another.

use crate::error::{Error, Result};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;

/// The shardings in which a stage computes with its parameters, if they differ from the stored
/// shardings. Set by [`Pipeline::store`](super::Pipeline::store).
///
/// Before the first use in a step, the runner transfers the parameters to the compute shardings,
/// once for all microbatches. This is an all-gather if the stored shardings divide over more axes.
/// The copies are dropped after the last use.
///
/// The gradients that the weight passes accumulate may be partial sums. After the last microbatch
/// the runner transfers them to the stored shardings, which adds partial sums up (a
/// reduce-scatter). Both transfers are plain `device_put`s.
#[derive(Clone, Debug)]
pub struct ParamSharding {
    compute: Vec<Sharding>,
    gradients: Vec<Sharding>,
}

/// The path and shape of a parameter, for error messages.
pub(super) struct NamedShape<'a> {
    pub(super) path: String,
    pub(super) aval: &'a ShapedArray,
}

impl ParamSharding {
    /// Creates the settings from the shardings to compute with, one for each parameter in leaf
    /// order. Weight passes write whole gradients in the same shardings.
    pub fn new(compute: Vec<Sharding>) -> Self {
        Self {
            gradients: compute.clone(),
            compute,
        }
    }

    /// Declares the gradients of the weight passes to be partial sums over these axes of the mesh.
    /// Each device then contributes the gradient of its own part of the batch.
    ///
    /// # Errors
    ///
    /// If a sharding has no mesh with these axes, or divides a parameter over one of them.
    pub fn partial_over(mut self, axes: &[&str]) -> Result<Self> {
        self.gradients = self
            .compute
            .iter()
            .map(|sharding| Ok(sharding.unreduced(axes)?))
            .collect::<Result<_>>()?;
        Ok(self)
    }

    /// Checks that there is one sharding for each parameter, on the devices of `mesh` and valid for
    /// the parameter's shape.
    pub(super) fn check(&self, params: &[NamedShape<'_>], mesh: &Mesh) -> Result<()> {
        let found = self.compute.len();
        let expected = params.len();
        if found != expected {
            let problem = format!(
                "{found} shardings for the {expected} parameters: give one for each, in leaf order"
            );
            return Err(Error::kernel(problem));
        }

        for (NamedShape { path, aval }, sharding) in params.iter().zip(&self.compute) {
            let mut devices = mesh.devices().iter();
            if !devices.all(|device| sharding.devices().contains(device)) {
                return Err(Error::kernel(format!(
                    "it cannot compute with parameter {path:?} as {sharding}: not on its mesh \
                     {mesh}"
                )));
            }
            sharding.layout(aval.shape()).map_err(|why| {
                Error::kernel(format!("it cannot compute with parameter {path:?}: {why}"))
            })?;
        }
        Ok(())
    }

    /// Returns the shardings that kernels compute with, in leaf order.
    pub(super) fn compute(&self) -> &[Sharding] {
        &self.compute
    }

    /// Returns the shardings of the gradients that the weight passes write, in leaf order.
    pub(super) fn gradients(&self) -> &[Sharding] {
        &self.gradients
    }
}
