//! Inference: passes over the stages. A pass computes tokens of several sequences. The stages keep
//! the weights, and the keys and values of earlier tokens; the last one chooses the next tokens.
//!
//! The data path of a pass: its form (`pass`), the state of a stage (`load`), the function of a
//! stage ([`Load::stage`]), the choices (`choice`). These go to the first stage for later passes.

pub(crate) mod choice;
pub(crate) mod generator;
pub(crate) mod load;
pub(crate) mod pass;
pub(crate) mod sample;
pub(crate) mod stage_times;
pub(crate) mod token_order;
pub(crate) mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mpmd::aval::{DType, ShapedArray, f32s};
use mpmd::candle::candle_core;
use mpmd::candle::nn::{BLOCK, PagedRows};
use mpmd::candle::{CandleStage, Cx, Device, Result as CandleResult, Tensor, stage};
use mpmd::object::MpmdObject;
use mpmd::pipeline::{Microbatch, Pipeline};
use mpmd::sharding::Sharding;
use mpmd::topology::{DeviceKind, Mesh};
use mpmd::weights::{Subscribing, Subscription, WantedLeaf};
use mpmd::{DeviceId, Error, MpmdArray, ProcessId, Program, Result};
use mpmd_base::block::{now, since};
use rayon::prelude::*;

use crate::decoder::devices::Over;
use crate::decoder::{Part, Rows};
use crate::division::costs::Room;
use crate::inference::choice::{Choice, History, Unchosen, read_token};
use crate::inference::load::{Load, Loaded};
use crate::inference::pass::{CHOICE, Chunk, Form, Forms, NONE, Pass};
use crate::inference::stage_times::{StageTimes, TIMES};
use crate::inference::versions::{Arrival, Loading, Versions, take_folder};

/// A model for inference: each stage has its weights, packed, and its caches.
pub struct Inference {
    pipeline: Pipeline<MpmdArray, MpmdArray>,
    loads: Vec<Load>,
    meshes: Vec<Mesh>,
    room: Room,
    positions: usize,
    forms: Forms,
    /// The place of choices for [`Inference::read`].
    reader: Mesh,
    owner: ProcessId,
    /// The versions of the weights.
    versions: Versions,
    /// The weights of a folder that are being read.
    loading: Option<Loading>,
}

/// The choices of a pass, where they will be.
#[derive(Clone, Debug)]
pub struct Choices {
    /// On the first stage.
    first: MpmdArray,
    /// On the reader.
    read: MpmdArray,
}

/// The times of all stages, where they will be.
#[derive(Clone, Debug)]
pub struct Times(Vec<MpmdArray>);

impl Inference {
    /// Creates the pipeline of these stages, and issues the reading of the weights.
    pub(crate) fn new(
        p: &mut Program,
        loads: Vec<Load>,
        meshes: &[Mesh],
        room: Room,
    ) -> Result<Self> {
        let mut pipeline: Option<Pipeline<MpmdArray, MpmdArray>> = None;
        let stages = loads.len();
        let positions = loads.iter().map(|load| load.positions).min().unwrap_or(1);
        for (index, (load, mesh)) in loads.iter().zip(meshes).enumerate() {
            let stage = load.stage(index == 0, index + 1 == stages, room)?;
            let state = load.issue(p, mesh)?;
            let mut more = match pipeline.take() {
                None => Pipeline::first(stage, mesh, Default::default())?,
                Some(pipeline) => pipeline.then(stage, mesh, Default::default())?,
            };
            more.state(index, &state)?;
            pipeline = Some(more);
        }
        let none = || Error::kernel("a model without stages");
        let reader = meshes.first().ok_or_else(none)?.clone();
        let mut inference = Self {
            pipeline: pipeline.ok_or_else(none)?,
            loads,
            meshes: meshes.to_vec(),
            room,
            positions,
            forms: Forms::of(positions),
            owner: owner(p, &reader)?,
            reader,
            versions: Versions::default(),
            loading: None,
        };
        // The largest form: others have smaller collectives.
        if let Some(pass) = inference.forms.pass_of_each(inference.most_tokens()).last() {
            let microbatch = inference.microbatch(p, &pass, None)?;
            inference.pipeline.probe(p, &microbatch.shapes())?;
        }
        Ok(inference)
    }

    /// Has choices read on a mesh, not on that of the first stage.
    ///
    /// # Errors
    ///
    /// If no process of the job has its devices.
    pub fn read_on(&mut self, p: &Program, mesh: &Mesh) -> Result<()> {
        (self.owner, self.reader) = (owner(p, mesh)?, mesh.clone());
        Ok(())
    }

    /// Returns a line that says what computes the stages, for people. `None` if all devices are
    /// CPUs.
    pub fn computed_by(&self, p: &Program) -> Option<String> {
        let is_accelerator = |device: &DeviceId| {
            p.topology()
                .kind_of(*device)
                .is_some_and(DeviceKind::is_accelerator)
        };
        let stages = self.loads.iter().zip(&self.meshes);
        let stages = stages.filter(|(_, mesh)| mesh.devices().iter().any(is_accelerator));
        let reasons: Vec<_> = stages.map(|(load, _)| load.on_host_because()).collect();
        if reasons.is_empty() {
            return None;
        }

        let mut line = self.pipeline.describe_devices(p);
        for why in reasons.into_iter().flatten().collect::<BTreeSet<_>>() {
            line += "; ";
            line += why;
        }
        Some(line)
    }

    /// Returns the process that can read choices.
    pub fn owner(&self) -> ProcessId {
        self.owner
    }

    /// Replaces the caches of all stages by empty ones after a pass that has failed. The job goes
    /// on. All sequences are forgotten. Choices of earlier passes must not be given to later ones.
    ///
    /// # Errors
    ///
    /// As for [`Stages::inference`](crate::Stages::inference).
    #[track_caller]
    pub fn renew(&mut self, p: &mut Program) -> Result<()> {
        p.forgive_failures();
        for (stage, (load, mesh)) in self.loads.iter().zip(&self.meshes).enumerate() {
            self.pipeline.state(stage, &load.issue(p, mesh)?)?;
        }
        Ok(())
    }

    /// Returns the versions of the weights.
    pub fn versions(&self) -> &Versions {
        &self.versions
    }

    /// Subscribes to the weights of a trainer, in the dtypes of this inference. A version is packed
    /// on threads of the subscription. It is [`Versions::newest`] on process 0 once every process
    /// has it.
    ///
    /// # Errors
    ///
    /// As for [`Program::subscribe_with`].
    pub fn subscribe(&self, p: &mut Program, subscribing: Subscribing) -> Result<Subscription> {
        let wanted: Result<Vec<Vec<WantedLeaf>>> = self.loads.iter().map(Load::wanted).collect();
        let intake = Box::new(Arrival::new(p, &self.loads, &self.versions));
        p.subscribe_with(subscribing, wanted?.into_iter().flatten().collect(), intake)
    }

    /// Forgets the weights of a version on this process. No later pass may have it.
    pub fn retire(&mut self, version: u64) {
        for load in &self.loads {
            load.retire(version);
        }
    }

    /// Reads the weights of another folder as a version, for passes of this process. Blocks. The
    /// folder's model must be the same. Every process must call it: they compare the weights.
    ///
    /// # Errors
    ///
    /// If the folder is invalid, or its model has another config. As for [`Program::assert_same`].
    pub fn read_weights(&self, p: &mut Program, folder: &Path, version: u64) -> Result<()> {
        let devices = p.topology().devices_of(p.process()).to_vec();
        let read = take_folder(&self.loads, &devices, folder, version);
        let hash = match &read {
            Ok(hash) => format!("hash {hash:016x}"),
            Err(why) => format!("an error: {why}"),
        };
        p.assert_same(format!(
            "weights of a folder as version {version}, with {hash}"
        ))?;
        read.map(drop)
    }

    /// Begins to read the weights of another folder as a version, on threads of their own. Every
    /// process must call it, and [`poll`](Self::poll) while [`Versions::is_loading`] on process 0.
    pub fn load_weights(&mut self, p: &Program, folder: &Path, version: u64) {
        let what = (folder, version);
        self.loading = Some(Loading::begin(p, &self.loads, &self.versions, what));
    }

    /// Issues that process 0 hears whether every process has read the weights. Then
    /// [`Versions::newest`] is their version there, or [`Versions::failure`] says why not.
    ///
    /// # Errors
    ///
    /// As for [`Program::device_put`].
    pub fn poll(&mut self, p: &mut Program) -> Result<()> {
        match &mut self.loading {
            Some(loading) => loading.poll(p, &self.meshes, &self.reader, &self.versions),
            None => Ok(()),
        }
    }

    /// Returns the number of tokens of one sequence for which there are blocks.
    fn most_tokens(&self) -> usize {
        (self.room.blocks * BLOCK).min(self.positions)
    }

    /// Computes passes of each form, the smallest first, so that later passes need no new plans.
    /// Blocks until the weights have been read and the passes have ended. Ends with the form for
    /// which `is_enough` returns true, on the [owner](Self::owner): it gets the number of tokens
    /// and the time of a pass. Only passes of more tokens need plans later. No sequence may have
    /// begun.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, a device has too little memory, or a pass fails.
    pub fn warm_up(
        &mut self,
        p: &mut Program,
        mut is_enough: impl FnMut(usize, Duration) -> bool,
    ) -> Result<()> {
        self.times(p)?;
        let mut last = None;
        let forms = self.forms.clone();
        for pass in forms.pass_of_each(self.most_tokens()) {
            last = Some(self.pass(p, &pass, last.as_ref())?);
            let wait = || {
                last.as_ref()
                    .map_or(Ok(()), |choices| self.read(choices).map(drop))
            };
            p.broadcast_value(self.owner, (), wait)?;
            let start = now();
            let choices = self.pass(p, &pass, last.as_ref())?;
            let end = || {
                self.read(&choices)?;
                Ok(is_enough(pass.tokens(), since(start)))
            };
            let is_last = p.broadcast_value(self.owner, false, end)?;
            last = Some(choices);
            if is_last {
                for larger in forms.pass_of_each_wider(pass.tokens()) {
                    last = Some(self.pass(p, &larger, last.as_ref())?);
                }
                break;
            }
        }
        let wait = || {
            last.as_ref()
                .map_or(Ok(()), |choices| self.read(choices).map(drop))
        };
        p.broadcast_value(self.owner, (), wait)
    }

    /// Issues a pass, and returns its choices. `last` are the choices of an earlier pass: give
    /// those of each pass once, in order. A chunk without given tokens computes the token that was
    /// chosen last for its place.
    ///
    /// # Errors
    ///
    /// If there is no room for so many tokens or words. If a chunk has a place, a position, a block
    /// or a token that the model does not have, or two chunks fill one block. The error is the same
    /// on every process, and nothing was issued. If processes give different passes, their programs
    /// have diverged. A chunk that does not follow its sequence's tokens is an [`Unchosen`] of that
    /// sequence.
    #[track_caller]
    pub fn pass(
        &mut self,
        p: &mut Program,
        pass: &Pass,
        last: Option<&Choices>,
    ) -> Result<Choices> {
        self.check_pass(pass)?;
        p.assert_same(format!("{pass}"))?;
        let microbatch = self.microbatch(p, pass, last)?;
        let choices = self.pipeline.forward(p, microbatch)?;
        let first = p.device_put(&choices, self.meshes[0].replicated())?;
        let read = match self.reader == self.meshes[0] {
            true => first.clone(),
            false => p.device_put(&choices, self.reader.replicated())?,
        };
        Ok(Choices { first, read })
    }

    /// Checks that the embedding has a row for each token of a prompt.
    ///
    /// # Errors
    ///
    /// If a token has none: the text names it.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let rows = self
            .loads
            .first()
            .map_or(0, |load| load.folder.config().vocab_size);
        match tokens.iter().find(|token| **token as usize >= rows) {
            None => Ok(()),
            Some(token) => Err(Error::kernel(format!(
                "token {token} has no row in the model's embedding of {rows} rows"
            ))),
        }
    }

    fn check_pass(&self, pass: &Pass) -> Result<()> {
        pass.chunks
            .iter()
            .try_for_each(|chunk| self.check_chunk(chunk))?;

        let mut filled = BTreeSet::new();
        for chunk in &pass.chunks {
            let from = chunk.start as usize / BLOCK;
            let to = (chunk.start as usize + chunk.tokens()).div_ceil(BLOCK);
            for block in &chunk.blocks[from..to] {
                if !filled.insert(block) {
                    return Err(Error::kernel(format!(
                        "a pass whose chunks fill block {block} twice: one would get the keys of \
                         the other"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks all that the stages look up by the numbers of a chunk.
    fn check_chunk(&self, chunk: &Chunk) -> Result<()> {
        let Room { blocks, sequences } = self.room;
        let end = chunk.start as usize + chunk.tokens();
        let needed = end.div_ceil(BLOCK);
        let wrong = |what: String| Err(Error::kernel(format!("a chunk of a pass: {what}")));

        if chunk.slot as usize >= sequences {
            return wrong(format!("place {} of {sequences}", chunk.slot));
        }
        if end > self.positions {
            return wrong(format!("{end} tokens, where {} have room", self.positions));
        }
        if chunk.blocks.len() < needed {
            return wrong(format!("{} blocks for {end} tokens", chunk.blocks.len()));
        }
        if let Some(block) = chunk.blocks.iter().find(|block| **block as usize >= blocks) {
            return wrong(format!("block {block} of {blocks}"));
        }
        self.check_tokens(&chunk.given)
    }

    /// Waits for choices, and returns that of each place for which one was made. `None` on other
    /// processes than the [owner](Self::owner).
    ///
    /// # Errors
    ///
    /// If the pass failed.
    pub fn read(&self, choices: &Choices) -> Result<Option<Vec<Option<Choice>>>> {
        let Some(host) = choices.read.to_host()? else {
            return Ok(None);
        };
        let words = host.to_vec::<u32>()?;
        Ok(Some(words.chunks_exact(CHOICE).map(Choice::read).collect()))
    }

    /// Issues that the owner gets the times of all stages, after the passes so far.
    ///
    /// # Errors
    ///
    /// As for [`Program::device_put`].
    pub fn times(&self, p: &mut Program) -> Result<Times> {
        let times = |(load, mesh): (&Load, &Mesh)| {
            let (aval, clock) = (
                ShapedArray::try_new(&[TIMES], DType::U32)?,
                load.clock.clone(),
            );
            let on = Sharding::single_device(mesh.devices()[0]);
            let own = p.array_from_fn(aval, on, move |_, mut view| {
                clock.write(view.as_mut_slice::<u32>()?);
                Ok(())
            })?;
            p.device_put(&own, self.reader.replicated())
        };
        self.loads
            .iter()
            .zip(&self.meshes)
            .map(times)
            .collect::<Result<_>>()
            .map(Times)
    }

    /// Returns the times of each stage, if they have come.
    ///
    /// # Errors
    ///
    /// If a stage failed.
    pub fn read_times(&self, times: &Times) -> Result<Option<Vec<StageTimes>>> {
        if !times.0.iter().all(MpmdArray::is_complete) {
            return Ok(None);
        }
        let read = |times: &MpmdArray| {
            let words = times
                .to_host()?
                .map(|host| host.to_vec::<u32>())
                .transpose()?;
            Ok(words.map(|words| StageTimes::read(&words)))
        };
        times.0.iter().map(read).collect()
    }

    /// Issues the making of a pass's inputs.
    fn microbatch(
        &self,
        p: &mut Program,
        pass: &Pass,
        last: Option<&Choices>,
    ) -> Result<Microbatch<MpmdArray>> {
        let Form { tokens, words } = self.forms.form(pass)?;
        let pass = Arc::new(pass.clone());
        let mut array = |mesh: &Mesh, shape: &[usize], write: fn(&Pass, &mut [u32])| {
            let (aval, pass) = (ShapedArray::try_new(shape, DType::U32)?, pass.clone());
            p.array_from_fn(aval, mesh.replicated(), move |_, mut view| {
                write(&pass, view.as_mut_slice::<u32>()?);
                Ok(())
            })
        };
        let mut sides = Vec::new();
        for mesh in &self.meshes {
            let pass = array(mesh, &[words], Pass::write)?;
            sides.push(BTreeMap::from([("pass".to_owned(), pass)]));
        }
        let first = &self.meshes[0];
        let last = match last {
            Some(last) => last.first.clone(),
            None => array(first, &[self.room.sequences, CHOICE], |_, to| to.fill(NONE))?,
        };
        sides[0].insert("last".to_owned(), last);
        let inputs = array(first, &[1, tokens], Pass::write_tokens)?;
        let all = sides.into_iter().enumerate();
        let inputs = Microbatch::new(inputs);
        Ok(all.fold(inputs, |microbatch, (stage, side)| {
            microbatch.side(stage, side)
        }))
    }
}

/// Returns the process of a mesh's first device.
fn owner(p: &Program, mesh: &Mesh) -> Result<ProcessId> {
    let owner = mesh
        .devices()
        .first()
        .and_then(|device| p.topology().process_of(*device));
    owner.ok_or_else(|| Error::kernel(format!("no process has the devices of {mesh}")))
}

impl Load {
    /// Issues the making of the state.
    #[track_caller]
    fn issue(&self, p: &mut Program, mesh: &Mesh) -> Result<MpmdObject<Loaded>> {
        let load = self.clone();
        p.object_of_bytes(mesh, self.bytes, move |device| load.load(device))
    }

    /// Returns the stage that computes with the loaded part. The last one of a model returns the
    /// choices `[sequences, CHOICE]`.
    fn stage(
        &self,
        is_first: bool,
        is_last: bool,
        room: Room,
    ) -> Result<CandleStage<(), Tensor, Tensor>> {
        let width = self.folder.config().hidden_size;
        let load = self.clone();
        let forward = move |(): &(), x: Tensor, cx: &mut Cx<'_>| {
            let form = x.dim(1)?;
            let Some(mut loaded) = cx.state::<Loaded>()? else {
                load.probe(x, room, is_last, cx)?;
                return match is_last {
                    true => Tensor::full(NONE, (room.sequences, CHOICE), &Device::Cpu),
                    false => Tensor::zeros((1, form, width), candle_core::DType::F32, &Device::Cpu),
                };
            };
            let pass = Pass::read(&cx.side("pass")?)?;
            let clock = loaded.clock.clone();
            let started = clock.as_ref().map(|clock| clock.start());
            let x = if is_first {
                loaded.tokens(&x, &pass, cx)?
            } else {
                x
            };
            let x = x.narrow(1, 0, pass.tokens())?;
            let device = x.device().clone();
            let part = load.part(&mut loaded, pass.version, &device);
            let part = part.map_err(candle_core::Error::wrap)?;
            let x = if is_first { x } else { load.working(x)? };
            let rows = Rows::new(pass.rows(), &device)?;
            let x = part.follow(x, &rows, &mut loaded.caches, cx)?;
            let y = match is_last {
                true => loaded.choices(&part, &x, &pass, (room, load.over), cx)?,
                false => {
                    let x = x.to_dtype(candle_core::DType::F32)?;
                    x.pad_with_zeros(1, 0, form - pass.tokens())?
                }
            };
            if let (Some(clock), Some(started)) = (clock, started) {
                clock.end(started, y.elem_count() * y.dtype().size_in_bytes());
            }
            Ok(y)
        };
        let name = format!("layers {} to {}", self.layers.start, self.layers.end - 1);
        let stage = stage(|_| Ok(()), forward)?.named(name);
        let stage = if self.on_device {
            stage
        } else {
            stage.on_host()
        };
        let choices = ShapedArray::try_new(&[room.sequences, CHOICE], DType::U32)?;
        Ok(stage
            .outputs(move |x| match is_last {
                true => Ok(choices.clone()),
                false => Ok(f32s([1, x.shape()[1], width])),
            })
            .frozen())
    }

    /// Calls the collectives of a pass, on zeros.
    fn probe(&self, x: Tensor, room: Room, is_last: bool, cx: &Cx<'_>) -> CandleResult<()> {
        if self.over == Over::ONE {
            return Ok(());
        }
        let (zeros, tokens) = (self.zeros()?, x.dim(1)?);
        let rows = tokens.min(self.positions);
        let blocks = (0..rows.div_ceil(BLOCK) as u32).collect::<Vec<_>>();
        let mut caches = self.caches(blocks.len());
        let rows = vec![PagedRows {
            start: 0,
            rows,
            blocks,
        }];
        let rows = Rows::new(rows, x.device())?;
        let x = zeros.follow(
            x.narrow(1, 0, rows.sequences[0].rows)?,
            &rows,
            &mut caches,
            cx,
        )?;
        if is_last {
            let most = x.dim(1)?.min(room.sequences);
            zeros.logits(&x.narrow(1, 0, most)?, cx)?;
        }
        Ok(())
    }
}

impl Loaded {
    /// Returns the tokens of a pass, those of the table of last tokens included.
    fn tokens(&mut self, x: &Tensor, pass: &Pass, cx: &Cx<'_>) -> CandleResult<Tensor> {
        let last = cx
            .side("last")?
            .narrow(1, 0, 1)?
            .flatten_all()?
            .to_vec1::<u32>()?;
        for (known, last) in self.last.iter_mut().zip(last) {
            if let Some(last) = read_token(last) {
                // A sequence without a token has failed. What is computed for it is not used.
                *known = last.unwrap_or(0);
            }
        }

        let mut tokens = x.flatten_all()?.to_vec1::<u32>()?;
        let mut at = 0;
        for chunk in &pass.chunks {
            if chunk.given.is_empty() {
                tokens[at] = self.last.get(chunk.slot as usize).copied().unwrap_or(0);
            }
            at += chunk.tokens();
        }
        Tensor::from_vec(tokens, x.shape(), x.device())
    }

    /// Chooses the token that follows each chunk which asks for it. `x` are the outputs of the last
    /// layer.
    fn choices(
        &mut self,
        part: &Part,
        x: &Tensor,
        pass: &Pass,
        (room, over): (Room, Over),
        cx: &Cx<'_>,
    ) -> CandleResult<Tensor> {
        self.note(pass);
        let mut rows = Vec::new();
        let mut asked = Vec::new();
        let mut at = 0;
        for chunk in &pass.chunks {
            at += chunk.tokens();
            if chunk.samples {
                rows.push(at as u32 - 1);
                asked.push(chunk.slot as usize);
            }
        }
        // All devices call the same collectives.
        if rows.is_empty() && over != Over::ONE && at > 0 {
            rows.push(0);
        }

        let mut choices = vec![NONE; room.sequences * CHOICE];
        if rows.is_empty() {
            return Tensor::from_vec(choices, (room.sequences, CHOICE), x.device());
        }
        let count = rows.len();
        let x = x.index_select(&Tensor::from_vec(rows, count, x.device())?, 1)?;
        let logits = part
            .logits(&x, cx)?
            .squeeze(0)?
            .to_dtype(candle_core::DType::F32)?;
        let tokens = logits.dim(1)?;
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        let mut logits_of = vec![None; room.sequences];
        for (slot, logits) in asked.into_iter().zip(logits.chunks_exact(tokens)) {
            if let Some(of_place) = logits_of.get_mut(slot) {
                *of_place = Some(logits);
            }
        }
        // On the threads of this device.
        let places = self
            .histories
            .par_iter_mut()
            .zip(choices.par_chunks_exact_mut(CHOICE));
        places
            .zip(logits_of)
            .for_each(|((history, words), logits)| {
                let Some(logits) = logits else { return };
                let choice = match history {
                    Some(history) => history.choose(logits),
                    None => Unchosen::OutOfOrder.into(),
                };
                choice.write(words);
            });
        Tensor::from_vec(choices, (room.sequences, CHOICE), x.device())
    }

    /// Adds the tokens of a pass to their sequences, and begins new ones.
    fn note(&mut self, pass: &Pass) {
        for chunk in &pass.chunks {
            let Some(place) = self.histories.get_mut(chunk.slot as usize) else {
                continue;
            };
            if let Some(begin) = chunk.new {
                *place = Some(History::new(begin, chunk.start as usize));
            }
            if let Some(history) = place {
                history.add(chunk.start as usize, &chunk.given);
            }
        }
    }
}
