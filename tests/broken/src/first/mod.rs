//! Mistakes of a first program: handles, meshes, kernels and stages.

pub(crate) mod moved_on_one_process;
pub(crate) mod other_element_type;
pub(crate) mod rows_that_do_not_divide;
pub(crate) mod schedule_of_more_stages;
pub(crate) mod shards_of_a_handle;
pub(crate) mod used_after_donation;

use mpmd::prelude::*;

/// Returns an array of so many ones on the host.
fn ones(length: usize) -> Result<MpmdArray> {
    MpmdArray::from_slice(&[length], &vec![1.0f32; length])
}
