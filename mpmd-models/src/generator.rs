//! Generation of text over the stages, one token after another.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::aval::{DType, ShapedArray, f32s};
use mpmd::candle::candle_core::{self, bail};
use mpmd::candle::nn::PackedLinear;
use mpmd::candle::{
    CandleStage, Cx, Device, Result as CandleResult, Tensor, named, parts_builder, stage,
};
use mpmd::object::ObjectBytes;
use mpmd::pipeline::{Microbatch, Pipeline};
use mpmd::region::Region;
use mpmd::topology::Mesh;
use mpmd::{DeviceId, Error, MpmdArray, ProcessId, Program, Result};

use crate::cut::Held;
use crate::decoder::{Caches, EMBEDDING, OUTPUT, Over, Part, Plan};
use crate::divide;
use crate::folder::Folder;
use crate::rope::Angles;
use crate::sample::Sampling;

/// Number of a prompt's tokens that a pass computes.
const CHUNK: usize = 256;

/// A model for generation. Each stage has its weights, and the keys and values of the tokens so
/// far, as its state.
///
/// ```no_run
/// use mpmd::prelude::*;
/// use mpmd_models::{Folder, Sampling, Stages};
///
/// fn main() -> Result<()> {
///     let folder = Folder::open("model")?;
///     Program::builder().devices(2).run(|p| {
///         let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
///         let mut generator = Stages::new(&folder, 2, 100)?.generator(p, &meshes, false)?;
///         let greedy = Sampling::default();
///         let tokens = generator.generate(p, &[5, 17, 3], &greedy, 20, |_, _| Ok(false))?;
///         println!("{tokens:?}");
///         Ok(())
///     })
/// }
/// ```
pub struct Generator {
    pipeline: Pipeline<MpmdArray, MpmdArray>,
    meshes: Vec<Mesh>,
    /// Number of tokens so far.
    tokens: usize,
    /// Number of tokens for which the caches have room.
    positions: usize,
    /// The process that has the logits.
    owner: ProcessId,
}

/// The state of a stage on a device.
struct Loaded {
    part: Part,
    caches: Caches,
    bytes: u64,
}

impl ObjectBytes for Loaded {
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A part of a model that is to be loaded.
#[derive(Clone)]
struct Load {
    folder: Folder,
    angles: Vec<Angles>,
    layers: Range<usize>,
    mesh: Mesh,
    over: Over,
    positions: usize,
    in_half: bool,
    bytes: u64,
}

impl Load {
    /// Creates the plan of some layers on the devices of a mesh, for sequences of up to `positions`
    /// tokens.
    fn new(
        folder: &Folder,
        angles: &[Angles],
        (layers, mesh): (Range<usize>, &Mesh),
        positions: usize,
        in_half: bool,
    ) -> Result<Self> {
        let Held { element, layer } = Held::generation(folder, positions, in_half);
        let (mesh, over) = (mesh.clone(), Over::of(mesh)?);
        let mut load = Self {
            folder: folder.clone(),
            angles: angles.to_vec(),
            layers: layers.clone(),
            mesh,
            over,
            positions,
            in_half,
            bytes: layers.len() as u64 * layer / over.tensor as u64,
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

    /// Returns the region of each parameter of some layers on a device, by name.
    fn regions(&self, layers: Range<usize>, device: DeviceId) -> Result<BTreeMap<String, Region>> {
        let mut regions = BTreeMap::new();
        let (config, over) = (self.folder.config().clone(), self.over);
        let params = stage(
            move |vb| {
                let plan = Plan { config: &config, lora: None, angles: &[], over };
                Part::new(plan, layers.clone(), &vb)
            },
            |part, x: Tensor, cx| part.forward(x, None, cx),
        )?
        .shapes();
        let shardings =
            divide::shardings(self.folder.config(), &self.mesh, params.clone().into_iter())?;
        for (name, aval) in params {
            let layout = shardings[&name].layout(aval.shape())?;
            let region = layout.region_of(device);
            let none = || Error::kernel(format!("{name} is not on {device}"));
            let region = region.cloned().ok_or_else(none)?;
            regions.insert(name, region);
        }
        Ok(regions)
    }

    /// Reads the weights of a device layer by layer, and packs them.
    fn load(&self, device: DeviceId) -> Result<Loaded> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let Self { folder, layers, positions, in_half, .. } = self;
        let tables = self.regions(layers.clone(), device)?;
        let table = |name: &str| {
            // A tied output is the embedding.
            let region = tables.get(name).or(tables.get(EMBEDDING));
            let none = || candle_core::Error::msg(format!("{name} is no parameter of the part"));
            let (rows, columns) =
                region.map(|all| (all.range(0), all.range(1))).ok_or_else(none)?;
            let read = |part: Range<usize>, values: &mut [f32]| {
                let part = rows.start + part.start..rows.start + part.end;
                let region = Region::new(vec![part, columns.clone()]);
                folder.read(name, &region, values).map_err(failed)
            };
            PackedLinear::of_rows((rows.len(), columns.len()), *in_half, read)
        };
        let params = |own: Range<usize>| {
            let mut tensors = BTreeMap::new();
            for (name, region) in self.regions(own, device).map_err(failed)? {
                if name != EMBEDDING && name != OUTPUT {
                    let mut values = vec![0.0; region.elements()];
                    folder.read(&name, &region, &mut values).map_err(failed)?;
                    tensors.insert(name, Tensor::from_vec(values, region.shape(), &Device::Cpu)?);
                }
            }
            Ok(parts_builder(tensors))
        };
        let part = Part::packed(self.plan(), layers.clone(), *in_half, table, params);
        let part = part.map_err(|why| Error::kernel(why.to_string()))?;
        Ok(Loaded { part, caches: Caches::new(layers.len(), *positions), bytes: self.bytes })
    }

    /// Returns the part without the values of its matrices.
    fn zeros(&self) -> CandleResult<Part> {
        let failed = |why: Error| candle_core::Error::wrap(why);
        let device = self.mesh.devices()[0];
        let zeros = |(name, region): (String, Region)| {
            let zero = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
            Ok((name, zero.broadcast_as(region.shape())?))
        };
        let regions = self.regions(self.layers.clone(), device).map_err(failed)?;
        let tensors = regions.into_iter().map(zeros).collect::<CandleResult<BTreeMap<_, _>>>()?;
        Part::new(self.plan(), self.layers.clone(), &parts_builder(tensors))?.hollow()
    }

    fn plan(&self) -> Plan<'_> {
        Plan { config: self.folder.config(), lora: None, angles: &self.angles, over: self.over }
    }

    /// Returns the stage that computes with the loaded part. The last one of a model returns the
    /// logits of the last token, `[1, vocab_size]`.
    fn stage(&self) -> Result<CandleStage<(), Tensor, Tensor>> {
        let config = self.folder.config();
        let is_last = self.layers.end == config.num_hidden_layers;
        let (width, tokens) = (config.hidden_size, config.vocab_size);
        let shape = move |time: usize| match is_last {
            true => vec![1, tokens],
            false => vec![1, time, width],
        };
        let load = self.clone();
        let forward = move |(): &(), x: Tensor, cx: &mut Cx<'_>| {
            if let Some(mut loaded) = cx.state::<Loaded>()? {
                return follow(&mut loaded, x, cx, is_last);
            }
            if load.over == Over::ONE {
                return Tensor::zeros(shape(x.dim(1)?), candle_core::DType::F32, &Device::Cpu);
            }
            // The probe learns of the collectives.
            let zeros = load.zeros()?;
            let mut caches = Caches::new(load.layers.len(), x.dim(1)?);
            result(zeros.follow(x, &mut caches, cx)?, &zeros, cx, is_last)
        };
        let name = format!("layers {} to {}", self.layers.start, self.layers.end - 1);
        let stage = stage(|_| Ok(()), forward)?.named(name);
        Ok(stage.outputs(move |x| Ok(f32s(shape(x.shape()[1])))).frozen())
    }
}

/// Computes the tokens of a pass. The side input `at` is the number of tokens before them.
fn follow(loaded: &mut Loaded, x: Tensor, cx: &Cx<'_>, is_last: bool) -> CandleResult<Tensor> {
    let Loaded { part, caches, .. } = loaded;
    let at = cx.side("at")?.to_vec1::<u32>()?[0] as usize;
    if at == 0 {
        caches.clear();
    }
    if at != caches.tokens() {
        bail!("a pass at position {at}, where {} tokens are known", caches.tokens());
    }
    let x = part.follow(x, caches, cx)?;
    result(x, part, cx, is_last)
}

/// Returns the result of a stage, of which the layers have these outputs.
fn result(x: Tensor, part: &Part, cx: &Cx<'_>, is_last: bool) -> CandleResult<Tensor> {
    let time = x.dim(1)?;
    if is_last { part.logits(&x.narrow(1, time - 1, 1)?, cx)?.squeeze(1) } else { Ok(x) }
}

impl Generator {
    /// Creates the pipeline, and issues the reading of the weights, in which each process reads
    /// those of its own stages. `layers` are those of the stages; `meshes` are theirs, in order.
    /// The weights are `bf16` if `in_half` is set.
    pub(crate) fn new(
        p: &mut Program,
        folder: &Folder,
        layers: &[Range<usize>],
        meshes: &[Mesh],
        (positions, in_half): (usize, bool),
    ) -> Result<Self> {
        folder.compare(p)?;
        let angles = folder.config().ropes.iter().map(|rope| Angles::fixed(rope, positions));
        let angles = angles.collect::<CandleResult<Vec<_>>>();
        let angles = angles.map_err(|why| Error::kernel(why.to_string()))?;
        let mut pipeline: Option<Pipeline<MpmdArray, MpmdArray>> = None;
        for (index, (layers, mesh)) in layers.iter().zip(meshes).enumerate() {
            let load = Load::new(folder, &angles, (layers.clone(), mesh), positions, in_half)?;
            let (stage, bytes) = (load.stage()?, load.bytes);
            let state = p.object_of_bytes(mesh, bytes, move |device| load.load(device))?;
            let mut more = match pipeline.take() {
                None => Pipeline::first(stage, mesh, Default::default())?,
                Some(pipeline) => pipeline.then(stage, mesh, Default::default())?,
            };
            more.state(index, &state)?;
            pipeline = Some(more);
        }
        let none = || Error::kernel("a model without stages");
        let (mut pipeline, last) = (pipeline.ok_or_else(none)?, meshes.last().ok_or_else(none)?);
        // The largest pass: others have smaller collectives.
        let most = CHUNK.min(positions).max(1);
        let first = microbatch(p, meshes, &vec![0; most], 0)?;
        pipeline.probe(p, &first.shapes())?;
        let owner = last.devices().first().and_then(|device| p.topology().process_of(*device));
        let (meshes, owner) = (meshes.to_vec(), owner.ok_or_else(none)?);
        Ok(Self { pipeline, meshes, tokens: 0, positions, owner })
    }

    /// Generates up to `most` tokens that follow a prompt, and returns them on every process. All
    /// must call it with the same arguments, and block until it ends. It ends early once `is_end`
    /// returns true: all processes call it after each token, with the tokens so far, and must get
    /// the same answer. Tokens of an earlier call are forgotten.
    ///
    /// # Errors
    ///
    /// If the prompt is empty, a token has no row in the embedding, or there are more tokens than
    /// positions. If the model's logits are not finite, or `is_end` fails.
    pub fn generate(
        &mut self,
        p: &mut Program,
        prompt: &[u32],
        sampling: &Sampling,
        most: usize,
        mut is_end: impl FnMut(&mut Program, &[u32]) -> Result<bool>,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            return Err(Error::Environment("the prompt has no tokens".to_owned()));
        }
        self.tokens = 0;
        let (mut text, mut logits) = (Vec::new(), None);
        for part in prompt.chunks(CHUNK) {
            logits = Some(self.pass(p, part)?);
        }
        while text.len() < most {
            let choose = || {
                let host = logits.take().map(|logits| logits.to_host()).transpose()?.flatten();
                let Some(host) = host else { return Ok(None) };
                Ok(sampling.next(host.to_vec::<f32>()?, prompt, &text))
            };
            let Some(next) = p.broadcast_value(self.owner, Some(0), choose)? else {
                return Err(Error::kernel(
                    "the model's logits are not finite: its weights are not, or its activations \
                     overflow",
                ));
            };
            text.push(next);
            if is_end(p, &text)? {
                break;
            }
            if text.len() < most {
                logits = Some(self.pass(p, &[next])?);
            }
        }
        Ok(text)
    }

    /// Issues the pass of the next tokens. Returns the logits of the last one.
    fn pass(&mut self, p: &mut Program, tokens: &[u32]) -> Result<MpmdArray> {
        let at = self.tokens;
        self.tokens += tokens.len();
        if self.tokens > self.positions {
            let (needed, room) = (self.tokens, self.positions);
            return Err(Error::Environment(format!(
                "token {needed} of a sequence: the generator has room for {room}, the positions of \
                 `Stages::new`"
            )));
        }
        let microbatch = microbatch(p, &self.meshes, tokens, at)?;
        self.pipeline.forward(p, microbatch)
    }
}

/// Issues the making of the input of a pass with these tokens, of which `at` are before.
fn microbatch(
    p: &mut Program,
    meshes: &[Mesh],
    tokens: &[u32],
    at: usize,
) -> Result<Microbatch<MpmdArray>> {
    let mut array = |mesh: &Mesh, shape: &[usize], values: Vec<u32>| {
        let aval = ShapedArray::try_new(shape, DType::U32)?;
        p.array_from_fn(aval, mesh.replicated(), move |_, mut view| {
            view.as_mut_slice::<u32>()?.copy_from_slice(&values);
            Ok(())
        })
    };
    let inputs = array(&meshes[0], &[1, tokens.len()], tokens.to_vec())?;
    meshes.iter().enumerate().try_fold(Microbatch::new(inputs), |microbatch, (stage, mesh)| {
        let at = array(mesh, &[1], vec![at as u32])?;
        Ok(microbatch.side(stage, named([("at", at)])))
    })
}
