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

/// Reads a region of a parameter.
pub(super) type ReadRegion = dyn Fn(&str, &Region, &mut [f32]) -> Result<()> + Send + Sync;
/// The values of a version of the weights.
pub(super) type WeightSource = Arc<ReadRegion>;

/// The weights that this process has, of each version. They stay as long as the stages do, so a
/// later epoch of the job reads none, nor does a stage that is made anew.
#[derive(Clone, Default)]
pub(crate) struct WeightStore(Arc<Mutex<HeldVersions>>);

/// The versions in a [`WeightStore`].
#[derive(Default)]
pub(super) struct HeldVersions {
    packed: HashMap<PackedKey, Arc<Decoder>>,
    /// Versions for stages that compute on devices which are not CPUs.
    sources: HashMap<u64, WeightSource>,
    /// True if the weights of the folder are no longer used.
    is_published: bool,
}

/// The key of the packed weights of one device of a stage.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct PackedKey {
    pub(super) version: u64,
    pub(super) layers: Range<usize>,
    /// The division of the layers over the devices of the stage.
    pub(super) over: DeviceDivision,
    /// The place of the device in its mesh.
    pub(super) place: usize,
    /// True if matrices are in `bf16`.
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

    /// Returns packed weights, if they are here.
    pub(super) fn get(&self, key: &PackedKey) -> Option<Arc<Decoder>> {
        self.lock().packed.get(key).cloned()
    }

    /// Reads the weights of the folder, unless they are here or no longer used. The store is not
    /// locked meanwhile.
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
    /// Adds the packed weights of one device.
    pub(super) fn insert_packed(&mut self, key: PackedKey, part: Arc<Decoder>) {
        self.packed.insert(key, part);
    }

    /// Adds a version for stages that compute on devices which are not CPUs.
    pub(super) fn insert_source(&mut self, version: u64, source: WeightSource) {
        self.sources.insert(version, source);
    }

    /// Returns the source of a published version.
    pub(super) fn source(&self, version: u64) -> Option<WeightSource> {
        self.sources.get(&version).cloned()
    }

    /// True if the weights of the folder are still used.
    pub(super) fn uses_folder(&self) -> bool {
        !self.is_published
    }

    /// True if passes on a device that is not a CPU may still name the version.
    pub(super) fn is_on_devices(&self, version: u64) -> bool {
        match version {
            0 => self.uses_folder(),
            version => self.sources.contains_key(&version),
        }
    }

    /// True if the weights of the version are here, or their source.
    pub(super) fn has(&self, version: u64) -> bool {
        self.packed.keys().any(|key| key.version == version) || self.sources.contains_key(&version)
    }

    /// Forgets a version.
    pub(super) fn retire(&mut self, version: u64) {
        self.packed.retain(|key, _| key.version != version);
        self.sources.remove(&version);
        self.is_published |= version == 0;
    }
}

/// The type of a model's weights in the memory of an inference. Sums are in f32 in any case.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WeightType {
    /// All in single precision.
    #[default]
    F32,
    /// Matrices in `bf16`, vectors in single precision.
    Bf16,
}

/// Returns the dtype in which an inference holds a parameter: with `in_half` that of matrices is
/// `bf16`.
pub(crate) fn held_as(name: &str, aval: &ShapedArray, in_half: bool) -> DType {
    let is_matrix = aval.shape().len() > 1 && !name.ends_with("embed_positions.weight");
    if in_half && is_matrix {
        DType::Bf16
    } else {
        DType::F32
    }
}
