//! A stage of inference: the loader that reads and packs its weights, and the function that
//! computes a pass on the state of a device (`inference_state`).

use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;
use std::sync::Arc;

use mpmd::aval::{DType, ShapedArray, f32s};
use mpmd::candle::candle_core;
use mpmd::candle::nn::{BLOCK, PackedLinear, PagedRows};
use mpmd::candle::{CandleStage, Cx, Device, Result as CandleResult, Tensor, parts_builder, stage};
use mpmd::object::MpmdObject;
use mpmd::region::Region;
use mpmd::topology::Mesh;
use mpmd::weights::{LeafPart as Published, WantedLeaf};
use mpmd::{DeviceId, Error, Program, Result};

use crate::decoder::devices::DeviceDivision;
use crate::decoder::{Caches, Decoder, DecoderPlan, EMBEDDING, OUTPUT, PassRows};
use crate::division::costs::{HeldBytes, Room};
use crate::division::rules;
use crate::error::of_candle;
use crate::hub::folder::Folder;
use crate::inference::inference_state::{DeviceVersion, InferenceState};
use crate::inference::pass::{CHOICE_ROW, InferencePass, NONE, choice_rows};
use crate::inference::stage_times::StageClock;
use crate::inference::weight_store::{PackedKey, ReadRegion, WeightSource, WeightStore, held_as};
use crate::rope::RopeAngles;

/// Number of elements that are read at once where values are only checked.
const CHECKED_AT_ONCE: usize = 1 << 18;

/// The layers of an inference stage, and how its devices hold and compute them.
pub(crate) struct StageSpec<'a> {
    pub(crate) layers: Range<usize>,
    pub(crate) mesh: &'a Mesh,
    pub(crate) room: Room,
    /// Largest number of tokens in a sequence.
    pub(crate) positions: usize,
    pub(crate) in_half: bool,
    /// True if candle computes on the stage's accelerator. False if candle computes on the host,
    /// even for CUDA devices.
    pub(crate) on_device: bool,
    pub(crate) weights: &'a WeightStore,
}

/// Whether a stage is the first or the last of its pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageEnds {
    /// True if the stage's input is tokens.
    pub(super) is_first: bool,
    /// True if the stage chooses the next tokens.
    pub(super) is_last: bool,
}

/// Loads a stage's weights on its devices, and computes passes with them.
#[derive(Clone)]
pub(crate) struct StageLoader {
    pub(super) folder: Folder,
    angles: Vec<RopeAngles>,
    layers: Range<usize>,
    mesh: Mesh,
    over: DeviceDivision,
    room: Room,
    /// Largest number of tokens in a sequence.
    pub(super) positions: usize,
    in_half: bool,
    /// True if candle computes on the stage's accelerator. False if candle computes on the host,
    /// even for CUDA devices.
    on_device: bool,
    /// Bytes that the stage's state takes on a device.
    bytes: u64,
    weights: WeightStore,
    pub(super) clock: Arc<StageClock>,
}

impl StageLoader {
    /// Creates the loader of some layers on the devices of a mesh.
    pub(crate) fn new(folder: &Folder, angles: &[RopeAngles], spec: StageSpec<'_>) -> Result<Self> {
        let StageSpec {
            layers,
            mesh,
            room,
            positions,
            in_half,
            on_device,
            weights,
        } = spec;
        let HeldBytes { element, layer } = HeldBytes::inference(folder, room, in_half);
        let over = DeviceDivision::of(mesh)?;
        let mut loader = Self {
            folder: folder.clone(),
            angles: angles.to_vec(),
            layers: layers.clone(),
            mesh: mesh.clone(),
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
        let device = loader.mesh.devices()[0];
        for region in loader.regions(layers, device)?.into_values() {
            // Rows of a matrix are filled up. Experts have one each.
            let elements = match region.shape()[..] {
                [.., rows, _] => region.elements() / rows.max(1) * rows.next_multiple_of(32),
                _ => 2 * region.elements(),
            };
            loader.bytes += elements as u64 * element;
        }
        Ok(loader)
    }

    /// Issues the operation that creates the stage's state on the devices of `mesh`.
    #[track_caller]
    pub(super) fn issue(&self, p: &mut Program, mesh: &Mesh) -> Result<MpmdObject<InferenceState>> {
        let loader = self.clone();
        p.object_of_bytes(mesh, self.bytes, move |device| loader.load(device))
    }

    /// Returns the pipeline stage of this loader. The last stage of a model returns the choices,
    /// a row for each token that the pass can choose.
    pub(super) fn stage(&self, ends: StageEnds) -> Result<CandleStage<(), Tensor, Tensor>> {
        let loader = self.clone();
        let forward = move |(): &(), x: Tensor, cx: &mut Cx<'_>| match cx.state()? {
            Some(mut state) => loader.compute(&mut state, x, ends, cx),
            None => loader.compute_shapes(x, ends, cx),
        };
        let name = format!("layers {} to {}", self.layers.start, self.layers.end - 1);
        let stage = stage(|_| Ok(()), forward)?.named(name);
        let stage = if self.on_device {
            stage
        } else {
            stage.on_host()
        };

        let width = self.folder.config().hidden_size;
        let choices =
            ShapedArray::try_new(&[choice_rows(self.room.sequences), CHOICE_ROW], DType::U32)?;
        Ok(stage
            .outputs(move |x| match ends.is_last {
                true => Ok(choices.clone()),
                false => Ok(f32s([1, x.shape()[1], width])),
            })
            .frozen())
    }

    /// Computes a pass on the state of a device. Returns the choices on the last stage, otherwise
    /// the inputs of the next stage.
    fn compute(
        &self,
        state: &mut InferenceState,
        x: Tensor,
        ends: StageEnds,
        cx: &Cx<'_>,
    ) -> CandleResult<Tensor> {
        let form = x.dim(1)?;
        let pass = InferencePass::read(&cx.side("pass")?)?;
        let clock = state.clock.clone();
        let started = clock.as_ref().map(|clock| clock.start());
        let x = if ends.is_first {
            state.tokens(&x, &pass, cx)?
        } else {
            x
        };
        let x = x.narrow(1, 0, pass.tokens())?;

        let device = x.device().clone();
        let part = self.part(state, pass.version, &device);
        let part = part.map_err(candle_core::Error::wrap)?;
        let x = if ends.is_first { x } else { self.working(x)? };
        let rows = PassRows::new(pass.rows(), &device)?;
        let x = part.follow(x, &rows, &mut state.caches, cx)?;

        let y = match ends.is_last {
            true => state.choices(&part, &x, &pass, self.over, cx)?,
            false => {
                let x = x.to_dtype(candle_core::DType::F32)?;
                x.pad_with_zeros(1, 0, form - pass.tokens())?
            }
        };
        if let (Some(clock), Some(started)) = (clock, started) {
            clock.end(started, y.elem_count() * y.dtype().size_in_bytes());
        }
        Ok(y)
    }

    /// Returns placeholder values in the stage's output shape, for a probe that only records shapes
    /// and collectives.
    fn compute_shapes(&self, x: Tensor, ends: StageEnds, cx: &Cx<'_>) -> CandleResult<Tensor> {
        let form = x.dim(1)?;
        let width = self.folder.config().hidden_size;
        self.probe(x, ends.is_last, cx)?;
        match ends.is_last {
            true => {
                let rows = choice_rows(self.room.sequences);
                Tensor::full(NONE, (rows, CHOICE_ROW), &Device::Cpu)
            }
            false => Tensor::zeros((1, form, width), candle_core::DType::F32, &Device::Cpu),
        }
    }

    /// Calls the collectives of a pass with zeros, for a probe.
    fn probe(&self, x: Tensor, is_last: bool, cx: &Cx<'_>) -> CandleResult<()> {
        if self.over == DeviceDivision::ONE {
            return Ok(());
        }

        let zeros = self.zeros()?;
        let rows = x.dim(1)?.min(self.positions);
        let blocks = (0..rows.div_ceil(BLOCK) as u32).collect::<Vec<_>>();
        let mut caches = self.caches(blocks.len());
        let sequence = PagedRows {
            start: 0,
            rows,
            blocks,
        };
        let x = x.narrow(1, 0, rows)?;
        let rows = PassRows::new(vec![sequence], x.device())?;
        let x = zeros.follow(x, &rows, &mut caches, cx)?;

        if is_last {
            let most = x.dim(1)?.min(self.room.sequences);
            zeros.logits(&x.narrow(1, 0, most)?, cx)?;
        }
        Ok(())
    }

    /// Returns the name and shape of each parameter of the layers `layers`.
    fn params(&self, layers: Range<usize>) -> Result<BTreeMap<String, ShapedArray>> {
        let config = self.folder.config().clone();
        let over = self.over;
        let params = stage(
            move |vb| {
                let plan = DecoderPlan {
                    config: &config,
                    lora: None,
                    angles: &[],
                    over,
                };
                Decoder::new(plan, layers.clone(), &vb)
            },
            |part, x: Tensor, cx| part.forward(x, None, cx),
        )?
        .shapes();
        Ok(params.into_iter().collect())
    }

    /// Returns the region of each parameter of `layers` that a device holds, by name.
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

    /// Creates the state of a device. Reads the folder's weights, unless this process already holds
    /// them.
    fn load(&self, device: DeviceId) -> Result<InferenceState> {
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

        Ok(InferenceState {
            place,
            versions: Vec::new(),
            caches: self.caches(self.room.blocks),
            last: vec![0; self.room.sequences],
            histories: vec![None; self.room.sequences],
            clock: (place == 0).then(|| self.clock.clone()),
            bytes: self.bytes,
        })
    }

    /// Returns the reason why an accelerator's stage is computed on the host. `None` if the
    /// accelerator computes it.
    pub(super) fn on_host_because(&self) -> Option<&'static str> {
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

    fn key(&self, version: u64, place: usize) -> PackedKey {
        PackedKey {
            version,
            layers: self.layers.clone(),
            over: self.over,
            place,
            in_half: self.in_half,
        }
    }

    /// Returns a source of the folder's weights.
    fn of_folder(&self) -> WeightSource {
        let folder = self.folder.clone();
        Arc::new(move |name, region, values| folder.read(name, region, values))
    }

    /// Returns the stage's layers with the weights of a version, for a pass on this device.
    fn part(
        &self,
        state: &mut InferenceState,
        version: u64,
        device: &Device,
    ) -> Result<Arc<Decoder>> {
        let gone = || Error::kernel(format!("version {version} of the weights is not here"));
        if !self.on_device {
            let key = self.key(version, state.place);
            return self.weights.get(&key).ok_or_else(gone);
        }

        let source = {
            let held = self.weights.lock();
            let versions = &mut state.versions;
            versions.retain(|own| held.is_on_devices(own.version));
            if let Some(own) = versions.iter().find(|own| own.version == version) {
                return Ok(own.part.clone());
            }
            match version {
                0 if held.uses_folder() => self.of_folder(),
                _ => held.source(version).ok_or_else(gone)?,
            }
        };

        let part = Arc::new(self.read_to(device, &*source)?);
        if version == 0 {
            self.folder.check_weights()?;
        }
        state.versions.push(DeviceVersion {
            version,
            part: part.clone(),
        });
        Ok(part)
    }

    /// Stores version `version` for the stage's devices that are among `devices`. For stages
    /// computed on the host, blocks while the weights are packed.
    pub(super) fn take(
        &self,
        devices: &[DeviceId],
        version: u64,
        source: &WeightSource,
    ) -> Result<()> {
        let places = self.mesh.devices().iter().enumerate();
        for (place, device) in places.filter(|(_, device)| devices.contains(device)) {
            if self.on_device {
                // Its passes read the values later, when a refusal would come too late.
                self.check(*device, &**source)?;
                self.weights.lock().insert_source(version, source.clone());
            } else {
                let part = Arc::new(self.read(*device, &**source)?);
                let key = self.key(version, place);
                self.weights.lock().insert_packed(key, part);
            }
        }
        Ok(())
    }

    /// Reads all values of a device once, some rows at a time, and keeps none.
    ///
    /// # Errors
    ///
    /// As for `source`.
    fn check(&self, device: DeviceId, source: &ReadRegion) -> Result<()> {
        let mut values = Vec::new();
        for (name, region) in self.regions(self.layers.clone(), device)? {
            let rows = region.range(0);
            let width = (region.elements() / rows.len().max(1)).max(1);
            let step = (CHECKED_AT_ONCE / width).max(1);
            for start in rows.clone().step_by(step) {
                let part = start..rows.end.min(start + step);
                let ranges = iter::once(part).chain(region.ranges().skip(1));
                let part = Region::new(ranges.collect());
                values.resize(part.elements(), 0.0);
                source(&name, &part, &mut values)?;
            }
        }
        Ok(())
    }

    /// True if this process holds the weights of a version.
    pub(super) fn has(&self, version: u64) -> bool {
        self.weights.lock().has(version)
    }

    /// Frees the weights of a version.
    pub(super) fn retire(&self, version: u64) {
        self.weights.lock().retire(version);
    }

    /// Returns the arrays of a publication that the stage's devices need.
    pub(super) fn wanted(&self) -> Result<Vec<WantedLeaf>> {
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

    /// Reads the weights of a stage into the memory of its accelerator. After a recovery the job
    /// has other devices, and reads the weights again.
    fn read_to(&self, device: &Device, source: &ReadRegion) -> Result<Decoder> {
        let own = self.mesh.devices()[0];
        let half = self.in_half && !device.is_cpu();
        let mut tensors = BTreeMap::new();

        for (name, region) in self.regions(self.layers.clone(), own)? {
            let mut values = vec![0.0; region.elements()];
            source(&name, &region, &mut values)?;
            let tensor = Tensor::from_vec(values, region.shape(), device).map_err(of_candle)?;
            let tensor = match half {
                true => tensor
                    .to_dtype(candle_core::DType::BF16)
                    .map_err(of_candle)?,
                false => tensor,
            };
            tensors.insert(name, tensor);
        }

        Decoder::new(self.plan(), self.layers.clone(), &parts_builder(tensors)).map_err(of_candle)
    }

    /// Converts a stage's inputs to bf16 if its accelerator holds the matrices in bf16.
    fn working(&self, x: Tensor) -> CandleResult<Tensor> {
        match self.in_half && !x.device().is_cpu() {
            true => x.to_dtype(candle_core::DType::BF16),
            false => Ok(x),
        }
    }

    /// Reads the weights of a device layer by layer, and packs them in host memory.
    fn read(&self, device: DeviceId, source: &ReadRegion) -> Result<Decoder> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let in_half = self.in_half;
        let tables = self.regions(self.layers.clone(), device)?;

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
            PackedLinear::of_rows(rows.len(), columns.len(), in_half, read)
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

        let part = Decoder::packed(self.plan(), self.layers.clone(), in_half, table, params);
        part.map_err(of_candle)
    }

    /// Returns the stage's layers without values in their matrices.
    fn zeros(&self) -> CandleResult<Decoder> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let device = self.mesh.devices()[0];
        let regions = self.regions(self.layers.clone(), device).map_err(failed)?;
        let tensors = regions
            .into_iter()
            .map(|(name, region)| {
                let zero = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
                Ok((name, zero.broadcast_as(region.shape())?))
            })
            .collect::<CandleResult<BTreeMap<_, _>>>()?;
        Decoder::new(self.plan(), self.layers.clone(), &parts_builder(tensors))?.hollow()
    }

    /// Returns empty caches of `blocks` blocks for the stage's layers.
    fn caches(&self, blocks: usize) -> Caches {
        Caches::new(self.folder.config(), self.layers.len(), self.over, blocks)
    }

    fn plan(&self) -> DecoderPlan<'_> {
        DecoderPlan {
            config: self.folder.config(),
            lora: None,
            angles: &self.angles,
            over: self.over,
        }
    }
}
