//! A kernel with the mesh, shardings and donations that its calls are checked against.

use std::sync::Arc;

use crate::kernel::UntypedKernel;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::PrefixTree;

/// A kernel, the mesh that it is bound to, and the shardings of its inputs and outputs.
pub(super) struct KernelSettings {
    pub(super) kernel: Arc<dyn UntypedKernel>,
    pub(super) mesh: Mesh,
    /// The shardings that inputs must have. `None` for any.
    pub(super) inputs: Option<PrefixTree<Sharding>>,
    /// The path of inputs that may be partial sums although `inputs` does not declare them.
    pub(super) partial_sums: Option<&'static str>,
    /// The shardings of the outputs. `None` if they follow from the kernel's rule.
    pub(super) outputs: Option<PrefixTree<Sharding>>,
    /// The paths of the inputs that are donated with each call.
    pub(super) donate: Vec<String>,
}
