//! Inference: passes over the stages. A pass computes tokens of several sequences. The stages keep
//! the weights, and the keys and values of earlier tokens; the last one chooses the next tokens.
//!
//! The data path of a pass: its form (`pass`), the function of a stage (`stage_loader`), the state
//! of a device (`inference_state`), the weights of its version (`weight_store`), the choices
//! (`choice`). These go to the first stage for later passes.

pub(crate) mod choice;
pub(crate) mod generator;
pub(crate) mod inference_state;
pub(crate) mod pass;
pub(crate) mod same_model;
pub(crate) mod sample;
pub(crate) mod stage_loader;
pub(crate) mod stage_times;
pub(crate) mod token_order;
pub(crate) mod versions;
pub(crate) mod weight_store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::nn::BLOCK;
use mpmd::pipeline::{Microbatch, Pipeline};
use mpmd::sharding::Sharding;
use mpmd::topology::{DeviceKind, Mesh};
use mpmd::weights::{Subscribing, Subscription, WantedLeaf};
use mpmd::{DeviceId, Error, MpmdArray, ProcessId, Program, Result};
use mpmd_base::block::{now, since};

use crate::division::costs::Room;
use crate::inference::choice::Choice;
use crate::inference::pass::{
    CHOICE_ROW, InferencePass, NONE, PassChunk, PassForm, PassForms, choice_rows,
};
use crate::inference::stage_loader::{StageEnds, StageLoader};
use crate::inference::stage_times::{StageTimes, TIMES};
use crate::inference::versions::{
    FolderLoading, FolderVersion, PublishedIntake, WeightVersions, take_folder,
};

/// A model for inference: a pipeline whose stages keep packed weights and caches.
pub struct Inference {
    pipeline: Pipeline<MpmdArray, MpmdArray>,
    loaders: Vec<StageLoader>,
    meshes: Vec<Mesh>,
    room: Room,
    positions: usize,
    forms: PassForms,
    /// The mesh to which choices are sent for [`Inference::read`].
    reader: Mesh,
    owner: ProcessId,
    /// The versions of the weights that passes can name.
    versions: WeightVersions,
    /// The reading of another folder's weights, while it is under way.
    loading: Option<FolderLoading>,
}

/// The choices of a pass that may still be running. [`Inference::read`] waits for them.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The copy on the first stage, from which later passes take their tokens.
    first: MpmdArray,
    /// The copy on the mesh of the process that reads choices.
    read: MpmdArray,
}

/// The times of all stages, which [`Inference::read_times`] reads once they have arrived.
#[derive(Clone, Debug)]
pub struct PendingTimes(Vec<MpmdArray>);

impl Inference {
    /// Creates the pipeline of the loaders' stages, and issues the reading of their weights.
    pub(crate) fn new(
        p: &mut Program,
        loaders: Vec<StageLoader>,
        meshes: &[Mesh],
        room: Room,
    ) -> Result<Self> {
        let mut pipeline: Option<Pipeline<MpmdArray, MpmdArray>> = None;
        let stages = loaders.len();
        for (index, (loader, mesh)) in loaders.iter().zip(meshes).enumerate() {
            let stage = loader.stage(StageEnds {
                is_first: index == 0,
                is_last: index + 1 == stages,
            })?;
            let state = loader.issue(p, mesh)?;
            let mut more = match pipeline.take() {
                None => Pipeline::first(stage, mesh, Default::default())?,
                Some(pipeline) => pipeline.then(stage, mesh, Default::default())?,
            };
            more.state(index, &state)?;
            pipeline = Some(more);
        }

        let positions = loaders.iter().map(|loader| loader.positions).min();
        let positions = positions.unwrap_or(1);
        let none = || Error::kernel("a model without stages");
        let reader = meshes.first().ok_or_else(none)?.clone();
        let mut inference = Self {
            pipeline: pipeline.ok_or_else(none)?,
            loaders,
            meshes: meshes.to_vec(),
            room,
            positions,
            forms: PassForms::of(positions),
            owner: owner(p, &reader)?,
            reader,
            versions: WeightVersions::default(),
            loading: None,
        };

        // The largest form: others have smaller collectives.
        if let Some(pass) = inference.forms.pass_of_each(inference.most_tokens()).last() {
            let microbatch = inference.microbatch(p, &pass, None)?;
            inference.pipeline.probe(p, &microbatch.shapes())?;
        }
        Ok(inference)
    }

    /// Sends the choices of later passes to `mesh`. The default is the mesh of the first stage.
    ///
    /// # Errors
    ///
    /// If no process of the job owns the devices of `mesh`.
    pub fn read_on(&mut self, p: &Program, mesh: &Mesh) -> Result<()> {
        self.owner = owner(p, mesh)?;
        self.reader = mesh.clone();
        Ok(())
    }

    /// Returns a line for users that names the devices of the stages. `None` if all devices are
    /// CPUs.
    pub fn computed_by(&self, p: &Program) -> Option<String> {
        let is_accelerator = |device: &DeviceId| {
            p.topology()
                .kind_of(*device)
                .is_some_and(DeviceKind::is_accelerator)
        };
        let stages = self.loaders.iter().zip(&self.meshes);
        let stages = stages.filter(|(_, mesh)| mesh.devices().iter().any(is_accelerator));
        let reasons: Vec<_> = stages.map(|(loader, _)| loader.on_host_because()).collect();
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

    /// Returns the process on which [`Inference::read`] returns choices.
    pub fn owner(&self) -> ProcessId {
        self.owner
    }

    /// Replaces the caches of all stages by empty ones after a pass has failed. All sequences are
    /// forgotten, but the job continues. Later passes must not get choices of earlier ones.
    ///
    /// # Errors
    ///
    /// As for [`Stages::inference`](crate::Stages::inference).
    #[track_caller]
    pub fn renew(&mut self, p: &mut Program) -> Result<()> {
        p.forgive_failures();
        for (stage, (loader, mesh)) in self.loaders.iter().zip(&self.meshes).enumerate() {
            self.pipeline.state(stage, &loader.issue(p, mesh)?)?;
        }
        Ok(())
    }

    /// Returns the versions of the weights.
    pub fn versions(&self) -> &WeightVersions {
        &self.versions
    }

    /// Subscribes to the weights of a trainer, in the dtypes of this inference. Threads of the
    /// subscription pack each version. When all processes have a version, it becomes
    /// [`WeightVersions::newest`] on process 0.
    ///
    /// # Errors
    ///
    /// As for [`Program::subscribe_with`].
    pub fn subscribe(&self, p: &mut Program, subscribing: Subscribing) -> Result<Subscription> {
        let wanted: Result<Vec<Vec<WantedLeaf>>> =
            self.loaders.iter().map(StageLoader::wanted).collect();
        let intake = Box::new(PublishedIntake::new(p, &self.loaders, &self.versions));
        p.subscribe_with(subscribing, wanted?.into_iter().flatten().collect(), intake)
    }

    /// Frees the weights of a version on this process. No later pass may name the version.
    pub fn retire(&mut self, version: u64) {
        for loader in &self.loaders {
            loader.retire(version);
        }
    }

    /// Reads another folder's weights as version `version`, and blocks until they are read. The
    /// folder must have the same model. Every process must call it, since the processes compare the
    /// weights.
    ///
    /// # Errors
    ///
    /// If the folder is invalid, or a value is infinite or NaN. If config, tokenizer, end tokens or
    /// chat templates differ from those of the model in use, as far as both folders have them.
    /// Every process gets the error of the first one with an error, and none has the version. As
    /// for [`Program::assert_same`] if the processes have read different weights.
    pub fn read_weights(&self, p: &mut Program, folder: &Path, version: u64) -> Result<()> {
        let devices = p.topology().devices_of(p.process()).to_vec();
        let what = FolderVersion {
            folder: folder.to_owned(),
            version,
        };
        let read = take_folder(&self.loaders, &devices, &what);
        let own = read.as_ref().err().map(ToString::to_string);
        let errors = p.gather_value(None, || Ok(own))?;
        let error = errors.into_iter().flatten().next();
        if error.is_some() || read.is_err() {
            self.loaders
                .iter()
                .for_each(|loader| loader.retire(version));
        }
        if let Some(why) = error {
            return Err(Error::Environment(why));
        }
        // In a dry run each process has its own error alone.
        let hash = read?;
        p.assert_same(format!(
            "weights of a folder as version {version}, with hash {hash:016x}"
        ))
    }

    /// Starts to read another folder's weights as version `version`, on threads of their own. Every
    /// process must call it. Then every process must call [`poll`](Self::poll) while
    /// [`WeightVersions::is_loading`] is true on process 0.
    pub fn load_weights(&mut self, p: &Program, folder: &Path, version: u64) {
        let what = FolderVersion {
            folder: folder.to_owned(),
            version,
        };
        let loading = FolderLoading::begin(p, &self.loaders, &self.versions, what);
        self.loading = Some(loading);
    }

    /// Issues operations that tell process 0 whether every process has read the folder's weights.
    /// If all have, their version becomes [`WeightVersions::newest`] on process 0. If one failed,
    /// [`WeightVersions::failure`] has the reason, and every process must [`retire`](Self::retire)
    /// the version, since others may have read it.
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

    /// Returns the largest number of tokens that one sequence can have in the cache.
    fn most_tokens(&self) -> usize {
        (self.room.blocks * BLOCK).min(self.positions)
    }

    /// Runs passes of each size, the smallest first, so that later passes need no new plans. Blocks
    /// until the weights are read and these passes have ended. No sequence may have begun.
    ///
    /// After each size the [owner](Self::owner) calls `is_enough` with the number of tokens and the
    /// time of a pass. Once it returns true, larger sizes are left out, and their first pass will
    /// make plans.
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

            // The second pass of a form needs no new plans: its time is measured.
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

    /// Issues a pass, and returns its choices. `last` must be the choices of an earlier pass; give
    /// each pass's choices once, in order. A chunk without given tokens computes the last token
    /// that was chosen for its slot.
    ///
    /// # Errors
    ///
    /// If the pass has too many tokens or words. If a chunk has a slot, a position, a block or a
    /// token that the model lacks, or two chunks have one slot or write to one block. Every process
    /// gets this error, and nothing is issued.
    ///
    /// If processes give different passes, their programs have diverged. A chunk that does not
    /// continue its sequence is no error: the sequence gets an [`Unchosen`](crate::Unchosen).
    #[track_caller]
    pub fn pass(
        &mut self,
        p: &mut Program,
        pass: &InferencePass,
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
    /// If a token has none. The message names the token.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let rows = self
            .loaders
            .first()
            .map_or(0, |loader| loader.folder.config().vocab_size);
        match tokens.iter().find(|token| **token as usize >= rows) {
            None => Ok(()),
            Some(token) => Err(Error::kernel(format!(
                "token {token} has no row in the model's embedding of {rows} rows"
            ))),
        }
    }

    fn check_pass(&self, pass: &InferencePass) -> Result<()> {
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

        let mut slots = BTreeSet::new();
        match pass.chunks.iter().find(|chunk| !slots.insert(chunk.slot)) {
            None => Ok(()),
            Some(PassChunk { slot, .. }) => Err(Error::kernel(format!(
                "a pass with two chunks for place {slot}: one sequence has one chunk in a pass"
            ))),
        }
    }

    /// Checks the slot, the positions, the blocks and the tokens of a chunk.
    fn check_chunk(&self, chunk: &PassChunk) -> Result<()> {
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

    /// Waits for the choices of a pass, and returns them by slot. Returns `None` on processes other
    /// than the [owner](Self::owner).
    ///
    /// # Errors
    ///
    /// If the pass failed.
    pub fn read(&self, choices: &Choices) -> Result<Option<BTreeMap<u32, Choice>>> {
        let Some(host) = choices.read.to_host()? else {
            return Ok(None);
        };
        let words = host.to_vec::<u32>()?;
        let rows = words.chunks_exact(CHOICE_ROW);
        Ok(Some(rows.filter_map(Choice::read).collect()))
    }

    /// Issues operations that send the times of all stages to the [owner](Self::owner), after the
    /// passes so far.
    ///
    /// # Errors
    ///
    /// As for [`Program::device_put`].
    pub fn times(&self, p: &mut Program) -> Result<PendingTimes> {
        let mut all = Vec::new();
        for (loader, mesh) in self.loaders.iter().zip(&self.meshes) {
            let aval = ShapedArray::try_new(&[TIMES], DType::U32)?;
            let clock = loader.clock.clone();
            let on = Sharding::single_device(mesh.devices()[0]);
            let own = p.array_from_fn(aval, on, move |_, mut view| {
                clock.write(view.as_mut_slice::<u32>()?);
                Ok(())
            })?;
            all.push(p.device_put(&own, self.reader.replicated())?);
        }
        Ok(PendingTimes(all))
    }

    /// Returns the times of each stage, or `None` if they have not arrived.
    ///
    /// # Errors
    ///
    /// If a stage failed.
    pub fn read_times(&self, times: &PendingTimes) -> Result<Option<Vec<StageTimes>>> {
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

    /// Issues the creation of a pass's inputs.
    fn microbatch(
        &self,
        p: &mut Program,
        pass: &InferencePass,
        last: Option<&Choices>,
    ) -> Result<Microbatch<MpmdArray>> {
        let PassForm { tokens, words } = self.forms.form(pass)?;
        let pass = Arc::new(pass.clone());
        let mut array = |mesh: &Mesh, shape: &[usize], write: fn(&InferencePass, &mut [u32])| {
            let aval = ShapedArray::try_new(shape, DType::U32)?;
            let pass = pass.clone();
            p.array_from_fn(aval, mesh.replicated(), move |_, mut view| {
                write(&pass, view.as_mut_slice::<u32>()?);
                Ok(())
            })
        };

        let mut sides = Vec::new();
        for mesh in &self.meshes {
            let pass = array(mesh, &[words], InferencePass::write)?;
            sides.push(BTreeMap::from([("pass".to_owned(), pass)]));
        }
        let first = &self.meshes[0];
        let last = match last {
            Some(last) => last.first.clone(),
            None => {
                let rows = choice_rows(self.room.sequences);
                array(first, &[rows, CHOICE_ROW], |_, to| to.fill(NONE))?
            }
        };
        sides[0].insert("last".to_owned(), last);

        let inputs = array(first, &[1, tokens], InferencePass::write_tokens)?;
        let mut microbatch = Microbatch::new(inputs);
        for (stage, side) in sides.into_iter().enumerate() {
            microbatch = microbatch.side(stage, side);
        }
        Ok(microbatch)
    }
}

/// Returns the process that owns a mesh's first device.
fn owner(p: &Program, mesh: &Mesh) -> Result<ProcessId> {
    let owner = mesh
        .devices()
        .first()
        .and_then(|device| p.topology().process_of(*device));
    owner.ok_or_else(|| Error::kernel(format!("no process has the devices of {mesh}")))
}
