//! The weights of inferences that a process holds: in each version, packed or as their source.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use mpmd::Result;
use mpmd::aval::{DType, ShapedArray};
use mpmd::region::Region;
use mpmd_base::block::{Mutex, MutexGuard};

use crate::decoder::Decoder;
use crate::decoder::devices::DeviceDivision;

/// A function that reads a region of a parameter, given by name, as f32.
pub(super) type ReadRegion = dyn Fn(&str, &Region, &mut [f32]) -> Result<()> + Send + Sync;
/// A shared function that reads the weights of one version.
pub(super) type WeightSource = Arc<ReadRegion>;

/// The weights that this process holds, by version. They outlive epochs of the job and new
/// pipelines, which then need not read them again.
#[derive(Clone, Default)]
pub(crate) struct WeightStore(Arc<Mutex<HeldVersions>>);

/// The content of a [`WeightStore`].
#[derive(Default)]
pub(super) struct HeldVersions {
    packed: HashMap<PackedKey, Arc<Decoder>>,
    /// The source of each published version, for stages that candle computes on an accelerator.
    sources: HashMap<u64, WeightSource>,
    /// True once version 0, the weights of the folder, has been retired.
    is_published: bool,
}

/// The key of the packed weights of one device of a stage.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct PackedKey {
    pub(super) version: u64,
    pub(super) layers: Range<usize>,
    /// The division of the stage's layers over its devices.
    pub(super) over: DeviceDivision,
    /// Index of the device in the stage's mesh.
    pub(super) place: usize,
    /// True if the matrices are in `bf16`.
    pub(super) in_half: bool,
}

impl fmt::Debug for WeightStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock().packed.keys()).finish()
    }
}

impl WeightStore {
    pub(super) fn lock(&self) -> MutexGuard<'_, HeldVersions> {
        self.0.lock()
    }

    /// Returns the packed weights of a device. `None` if this process does not hold them.
    pub(super) fn get(&self, key: &PackedKey) -> Option<Arc<Decoder>> {
        self.lock().packed.get(key).cloned()
    }

    /// Calls `read` for the folder's weights, and stores them. Does nothing if they are stored, or
    /// if version 0 was retired. The store is not locked meanwhile.
    pub(super) fn get_or_read(
        &self,
        key: PackedKey,
        read: impl FnOnce() -> Result<Decoder>,
    ) -> Result<()> {
        let has = {
            let held = self.lock();
            held.is_published || held.packed.contains_key(&key)
        };
        if !has {
            let part = Arc::new(read()?);
            self.lock().packed.insert(key, part);
        }
        Ok(())
    }
}

impl HeldVersions {
    /// Stores the packed weights of one device.
    pub(super) fn insert_packed(&mut self, key: PackedKey, part: Arc<Decoder>) {
        self.packed.insert(key, part);
    }

    /// Stores the source of a version, for stages that candle computes on an accelerator.
    pub(super) fn insert_source(&mut self, version: u64, source: WeightSource) {
        self.sources.insert(version, source);
    }

    /// Returns the source of a version. `None` if this process does not hold one.
    pub(super) fn source(&self, version: u64) -> Option<WeightSource> {
        self.sources.get(&version).cloned()
    }

    /// True until version 0, the weights of the folder, is retired.
    pub(super) fn uses_folder(&self) -> bool {
        !self.is_published
    }

    /// True if passes on an accelerator may still use the version.
    pub(super) fn is_on_devices(&self, version: u64) -> bool {
        match version {
            0 => self.uses_folder(),
            version => self.sources.contains_key(&version),
        }
    }

    /// True if this process holds packed weights or a source of the version.
    pub(super) fn has(&self, version: u64) -> bool {
        self.packed.keys().any(|key| key.version == version) || self.sources.contains_key(&version)
    }

    /// Frees the weights of a version.
    pub(super) fn retire(&mut self, version: u64) {
        self.packed.retain(|key, _| key.version != version);
        self.sources.remove(&version);
        self.is_published |= version == 0;
    }
}

/// The dtypes of weights in the memory of an inference. Sums are always in f32.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WeightType {
    /// All weights in f32.
    #[default]
    F32,
    /// Matrices in `bf16`, vectors in f32.
    Bf16,
}

/// Returns the dtype in which an inference holds a parameter: `bf16` for matrices if `in_half`,
/// else f32.
pub(crate) fn held_as(name: &str, aval: &ShapedArray, in_half: bool) -> DType {
    let is_matrix = aval.shape().len() > 1 && !name.ends_with("embed_positions.weight");
    if in_half && is_matrix {
        DType::Bf16
    } else {
        DType::F32
    }
}
