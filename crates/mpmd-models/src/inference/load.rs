//! The state of a stage of inference: its weights, which are read and packed, and its caches.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::candle_core;
use mpmd::candle::nn::PackedLinear;
use mpmd::candle::{Device, Result as CandleResult, Tensor, parts_builder, stage};
use mpmd::object::ObjectBytes;
use mpmd::region::Region;
use mpmd::topology::Mesh;
use mpmd::weights::{LeafPart as Published, WantedLeaf};
use mpmd::{DeviceId, Error, Result};
use mpmd_base::block::Mutex;

use crate::decoder::devices::Over;
use crate::decoder::{Caches, EMBEDDING, OUTPUT, Part, Plan};
use crate::division::costs::{Held, Room};
use crate::division::rules;
use crate::hub::folder::Folder;
use crate::inference::choice::History;
use crate::inference::stage_times::Clock;
use crate::rope::Angles;

/// The state of a stage on a device.
pub(crate) struct Loaded {
    place: usize,
    /// The versions on a device of candle's other than the CPU.
    parts: Vec<(u64, Arc<Part>)>,
    pub(crate) caches: Caches,
    /// The last token of each place, on the first stage.
    pub(crate) last: Vec<u32>,
    /// The sequence of each place, on the last stage.
    pub(crate) histories: Vec<Option<History>>,
    /// On the first device of the stage.
    pub(crate) clock: Option<Arc<Clock>>,
    bytes: u64,
}

impl ObjectBytes for Loaded {
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The weights that this process has, of each version. They stay as long as the stages do, so a
/// later epoch of the job reads none, nor does a stage that is made anew.
#[derive(Clone, Default)]
pub(crate) struct Weights(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    packed: HashMap<Packed, Arc<Part>>,
    /// Versions for stages that compute on devices which are not CPUs.
    sources: HashMap<u64, Source>,
    /// True if the weights of the folder are no longer used.
    is_published: bool,
}

/// The version, the layers, their division, the place of the device in its mesh, and the type of
/// the weights.
type Packed = (u64, Range<usize>, Over, usize, bool);

/// Reads a region of a parameter.
type SourceFn = dyn Fn(&str, &Region, &mut [f32]) -> Result<()> + Send + Sync;
pub(crate) type Source = Arc<SourceFn>;

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.lock().packed.keys()).finish()
    }
}

impl Weights {
    fn get(&self, what: &Packed) -> Option<Arc<Part>> {
        self.0.lock().packed.get(what).cloned()
    }

    fn get_or_read(&self, what: Packed, read: impl FnOnce() -> Result<Part>) -> Result<()> {
        let has = {
            let known = self.0.lock();
            known.is_published || known.packed.contains_key(&what)
        };
        if !has {
            let part = Arc::new(read()?);
            self.0.lock().packed.insert(what, part);
        }
        Ok(())
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

/// A part of a model that is to be loaded.
#[derive(Clone)]
pub(crate) struct Load {
    pub(crate) folder: Folder,
    angles: Vec<Angles>,
    pub(crate) layers: Range<usize>,
    mesh: Mesh,
    pub(crate) over: Over,
    room: Room,
    /// The most tokens of a sequence.
    pub(crate) positions: usize,
    in_half: bool,
    /// True if candle computes on the devices themselves, which are not CPUs.
    pub(crate) on_device: bool,
    /// The bytes on a device.
    pub(crate) bytes: u64,
    weights: Weights,
    pub(crate) clock: Arc<Clock>,
}

impl Load {
    /// Creates the plan of some layers on the devices of a mesh.
    pub(crate) fn new(
        folder: &Folder,
        angles: &[Angles],
        (layers, mesh): (Range<usize>, &Mesh),
        (room, positions): (Room, usize),
        (in_half, on_device, weights): (bool, bool, &Weights),
    ) -> Result<Self> {
        let Held { element, layer } = Held::inference(folder, room, in_half);
        let (mesh, over) = (mesh.clone(), Over::of(mesh)?);
        let mut load = Self {
            folder: folder.clone(),
            angles: angles.to_vec(),
            layers: layers.clone(),
            mesh,
            over,
            room,
            positions,
            in_half,
            on_device,
            bytes: layers.len() as u64 * layer / over.tensor as u64,
            weights: weights.clone(),
            clock: Arc::default(),
        };
        // Parts are alike on all devices.
        let device = load.mesh.devices()[0];
        for region in load.regions(layers, device)?.into_values() {
            // Rows of a matrix are filled up. Experts have one each.
            let elements = match region.shape()[..] {
                [.., rows, _] => region.elements() / rows.max(1) * rows.next_multiple_of(32),
                _ => 2 * region.elements(),
            };
            load.bytes += elements as u64 * element;
        }
        Ok(load)
    }

    /// Returns the shape of each parameter of some layers, by name.
    fn params(&self, layers: Range<usize>) -> Result<BTreeMap<String, ShapedArray>> {
        let (config, over) = (self.folder.config().clone(), self.over);
        let params = stage(
            move |vb| {
                let plan = Plan {
                    config: &config,
                    lora: None,
                    angles: &[],
                    over,
                };
                Part::new(plan, layers.clone(), &vb)
            },
            |part, x: Tensor, cx| part.forward(x, None, cx),
        )?
        .shapes();
        Ok(params.into_iter().collect())
    }

    /// Returns the region of each parameter of some layers on a device, by name.
    fn regions(&self, layers: Range<usize>, device: DeviceId) -> Result<BTreeMap<String, Region>> {
        let mut regions = BTreeMap::new();
        let params = self.params(layers)?;
        let shardings = rules::shardings(self.folder.config(), &self.mesh, params.clone())?;
        for (name, aval) in params {
            let layout = shardings[&name].layout(aval.shape())?;
            let region = layout.region_of(device);
            let none = || Error::kernel(format!("{name} is not on {device}"));
            let region = region.cloned().ok_or_else(none)?;
            regions.insert(name, region);
        }
        Ok(regions)
    }

    /// Creates the state of a device. Reads its weights unless this process has them.
    pub(crate) fn load(&self, device: DeviceId) -> Result<Loaded> {
        let place = self
            .mesh
            .devices()
            .iter()
            .position(|own| *own == device)
            .unwrap_or(0);
        // Passes before it, in order, may have failed on one stage alone.
        if place == 0 {
            self.clock.reset();
        }
        if !self.on_device {
            let read = || {
                let part = self.read(device, &*self.of_folder())?;
                // A file may have been written while it was read.
                self.folder.check_weights().map(|()| part)
            };
            self.weights.get_or_read(self.key(0, place), read)?;
        }
        Ok(Loaded {
            place,
            parts: Vec::new(),
            caches: self.caches(self.room.blocks),
            last: vec![0; self.room.sequences],
            histories: vec![None; self.room.sequences],
            clock: (place == 0).then(|| self.clock.clone()),
            bytes: self.bytes,
        })
    }

    /// Returns the reason why a stage whose devices are no CPUs computes on the host. `None` if its
    /// device computes it.
    pub(crate) fn on_host_because(&self) -> Option<&'static str> {
        if self.on_device {
            return None;
        }
        Some(match self.folder.config().experts {
            Some(_) => "passes with experts are for CPUs",
            None if self.mesh.devices().len() > 1 => {
                "passes of a stage that is divided over several devices are for CPUs"
            }
            None => "the program is built without the feature `candle-cuda`",
        })
    }

    fn key(&self, version: u64, place: usize) -> Packed {
        (version, self.layers.clone(), self.over, place, self.in_half)
    }

    fn of_folder(&self) -> Source {
        let folder = self.folder.clone();
        Arc::new(move |name, region, values| folder.read(name, region, values))
    }

    /// Returns the part of a version for a pass on this device.
    pub(crate) fn part(
        &self,
        loaded: &mut Loaded,
        version: u64,
        device: &Device,
    ) -> Result<Arc<Part>> {
        let gone = || Error::kernel(format!("version {version} of the weights is not here"));
        if !self.on_device {
            return self
                .weights
                .get(&self.key(version, loaded.place))
                .ok_or_else(gone);
        }
        let source = {
            let known = self.weights.0.lock();
            loaded.parts.retain(|(other, _)| match other {
                0 => !known.is_published,
                other => known.sources.contains_key(other),
            });
            if let Some((_, part)) = loaded.parts.iter().find(|(other, _)| *other == version) {
                return Ok(part.clone());
            }
            match version {
                0 if !known.is_published => self.of_folder(),
                _ => known.sources.get(&version).cloned().ok_or_else(gone)?,
            }
        };
        let part = Arc::new(self.read_to(device, &*source)?);
        if version == 0 {
            self.folder.check_weights()?;
        }
        loaded.parts.push((version, part.clone()));
        Ok(part)
    }

    /// Takes a version for the devices of its mesh that are here. Blocks while it packs them.
    pub(crate) fn take(&self, p: &[DeviceId], version: u64, source: &Source) -> Result<()> {
        let own = self
            .mesh
            .devices()
            .iter()
            .enumerate()
            .filter(|(_, device)| p.contains(device));
        for (place, device) in own {
            match self.on_device {
                true => {
                    _ = self
                        .weights
                        .0
                        .lock()
                        .sources
                        .insert(version, source.clone())
                }
                false => {
                    let part = Arc::new(self.read(*device, &**source)?);
                    self.weights
                        .0
                        .lock()
                        .packed
                        .insert(self.key(version, place), part);
                }
            }
        }
        Ok(())
    }

    /// True if this process holds a version.
    pub(crate) fn has(&self, version: u64) -> bool {
        let known = self.weights.0.lock();
        known.packed.keys().any(|what| what.0 == version) || known.sources.contains_key(&version)
    }

    /// Forgets a version.
    pub(crate) fn retire(&self, version: u64) {
        let mut known = self.weights.0.lock();
        known.packed.retain(|what, _| what.0 != version);
        known.sources.remove(&version);
        known.is_published |= version == 0;
    }

    /// Returns the leaves of a publication that the devices of the mesh need.
    pub(crate) fn wanted(&self) -> Result<Vec<WantedLeaf>> {
        let params = self.params(self.layers.clone())?;
        let shardings = rules::shardings(self.folder.config(), &self.mesh, params.clone())?;
        let tied = self.folder.config().tie_word_embeddings;
        let wanted = params.into_iter().map(|(name, aval)| {
            let aval = ShapedArray::try_new(aval.shape(), held_as(&name, &aval, self.in_half))?;
            let at = vec![0; aval.shape().len()];
            let leaf = WantedLeaf::new(&name, aval, shardings[&name].clone());
            Ok(match tied && name == OUTPUT {
                true => leaf.of(vec![Published {
                    from: EMBEDDING.to_owned(),
                    region: None,
                    at,
                }]),
                false => leaf,
            })
        });
        wanted.collect()
    }

    /// Reads the weights of a device to its memory, for a pass there. A later epoch of the job has
    /// other devices, and reads them again.
    fn read_to(&self, device: &Device, source: &SourceFn) -> Result<Part> {
        let own = self.mesh.devices()[0];
        let half = self.in_half && !device.is_cpu();
        let mut tensors = BTreeMap::new();
        let failed = |why: candle_core::Error| Error::kernel(why.to_string());
        for (name, region) in self.regions(self.layers.clone(), own)? {
            let mut values = vec![0.0; region.elements()];
            source(&name, &region, &mut values)?;
            let tensor = Tensor::from_vec(values, region.shape(), device).map_err(failed)?;
            let tensor = match half {
                true => tensor.to_dtype(candle_core::DType::BF16).map_err(failed)?,
                false => tensor,
            };
            tensors.insert(name, tensor);
        }
        Part::new(self.plan(), self.layers.clone(), &parts_builder(tensors)).map_err(failed)
    }

    /// Returns the inputs of a stage in the dtype of its weights.
    pub(crate) fn working(&self, x: Tensor) -> CandleResult<Tensor> {
        match self.in_half && !x.device().is_cpu() {
            true => x.to_dtype(candle_core::DType::BF16),
            false => Ok(x),
        }
    }

    /// Reads the weights of a device layer by layer, and packs them.
    fn read(&self, device: DeviceId, source: &SourceFn) -> Result<Part> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let Self {
            layers, in_half, ..
        } = self;
        let tables = self.regions(layers.clone(), device)?;
        let table = |name: &str| {
            // A tied output is the embedding.
            let region = tables.get(name).or(tables.get(EMBEDDING));
            let none = || candle_core::Error::msg(format!("{name} is no parameter of the part"));
            let (rows, columns) = region
                .map(|all| (all.range(0), all.range(1)))
                .ok_or_else(none)?;
            let read = |part: Range<usize>, values: &mut [f32]| {
                let part = rows.start + part.start..rows.start + part.end;
                let region = Region::new(vec![part, columns.clone()]);
                source(name, &region, values).map_err(failed)
            };
            PackedLinear::of_rows((rows.len(), columns.len()), *in_half, read)
        };
        let params = |own: Range<usize>| {
            let mut tensors = BTreeMap::new();
            for (name, region) in self.regions(own, device).map_err(failed)? {
                if name != EMBEDDING && name != OUTPUT {
                    let mut values = vec![0.0; region.elements()];
                    source(&name, &region, &mut values).map_err(failed)?;
                    tensors.insert(
                        name,
                        Tensor::from_vec(values, region.shape(), &Device::Cpu)?,
                    );
                }
            }
            Ok(parts_builder(tensors))
        };
        let part = Part::packed(self.plan(), layers.clone(), *in_half, table, params);
        part.map_err(|why| Error::kernel(why.to_string()))
    }

    /// Returns the part without the values of its matrices.
    pub(crate) fn zeros(&self) -> CandleResult<Part> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let device = self.mesh.devices()[0];
        let zeros = |(name, region): (String, Region)| {
            let zero = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
            Ok((name, zero.broadcast_as(region.shape())?))
        };
        let regions = self.regions(self.layers.clone(), device).map_err(failed)?;
        let tensors = regions
            .into_iter()
            .map(zeros)
            .collect::<CandleResult<BTreeMap<_, _>>>()?;
        Part::new(self.plan(), self.layers.clone(), &parts_builder(tensors))?.hollow()
    }

    /// Returns empty caches of so many blocks.
    pub(crate) fn caches(&self, blocks: usize) -> Caches {
        Caches::new(self.folder.config(), self.layers.len(), self.over, blocks)
    }

    fn plan(&self) -> Plan<'_> {
        Plan {
            config: self.folder.config(),
            lora: None,
            angles: &self.angles,
            over: self.over,
        }
    }
}
