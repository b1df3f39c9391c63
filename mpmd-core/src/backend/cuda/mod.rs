//! The CUDA back end. Programs that were built without the feature `cuda` hear that from [`found`], and from no
//! other place.

pub(crate) mod driver;

pub use driver::{Attributes, Driver, Gpu, NoCuda, OLDEST, Uuid, Version, cublas, found, nccl, nvrtc};
