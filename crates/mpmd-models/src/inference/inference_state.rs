//! The state of a stage of inference on one device: its caches and the tokens of its sequences.

use std::sync::Arc;

use mpmd::candle::candle_core;
use mpmd::candle::{Cx, Result as CandleResult, Tensor};
use mpmd::object::ObjectBytes;
use rayon::prelude::*;

use crate::decoder::devices::DeviceDivision;
use crate::decoder::{Caches, Decoder};
use crate::inference::choice::{SequenceHistory, Unchosen, read_token};
use crate::inference::pass::{CHOICE_ROW, InferencePass, NONE, choice_rows};
use crate::inference::stage_times::StageClock;

/// The state of an inference stage on one device: caches, tokens and sequences.
pub(super) struct InferenceState {
    /// Index of the device in the stage's mesh.
    pub(super) place: usize,
    /// The versions of the weights in the memory of an accelerator. Empty if candle computes on the
    /// host.
    pub(super) versions: Vec<DeviceVersion>,
    pub(super) caches: Caches,
    /// The last token of each slot. Used on the first stage only.
    pub(super) last: Vec<u32>,
    /// The sequence in each slot. Used on the last stage only.
    pub(super) histories: Vec<Option<SequenceHistory>>,
    /// The clock of the stage. `None` except on the stage's first device.
    pub(super) clock: Option<Arc<StageClock>>,
    pub(super) bytes: u64,
}

/// One version of the weights in the memory of an accelerator.
pub(super) struct DeviceVersion {
    pub(super) version: u64,
    pub(super) part: Arc<Decoder>,
}

/// The rows of a pass after which a token is chosen.
struct SampledRows {
    rows: Vec<u32>,
    /// The slot of each row's sequence.
    slots: Vec<usize>,
}

impl ObjectBytes for InferenceState {
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl InferenceState {
    /// Returns the tokens of a pass. A chunk without tokens gets the last token of its slot.
    pub(super) fn tokens(
        &mut self,
        x: &Tensor,
        pass: &InferencePass,
        cx: &Cx<'_>,
    ) -> CandleResult<Tensor> {
        let last = cx
            .side("last")?
            .narrow(1, 0, 2)?
            .flatten_all()?
            .to_vec1::<u32>()?;
        for row in last.chunks_exact(2) {
            // A row without a choice has no slot.
            let known = self.last.get_mut(row[0] as usize);
            if let (Some(known), Some(last)) = (known, read_token(row[1])) {
                // A sequence without a token has failed, and its results are not used.
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

    /// Chooses the next token of each chunk that has `samples` set. `x` has the outputs of the last
    /// layer. `over` is the division of the stage over its devices.
    pub(super) fn choices(
        &mut self,
        part: &Decoder,
        x: &Tensor,
        pass: &InferencePass,
        over: DeviceDivision,
        cx: &Cx<'_>,
    ) -> CandleResult<Tensor> {
        self.note(pass);
        let shape = (choice_rows(self.histories.len()), CHOICE_ROW);
        let SampledRows { mut rows, slots } = SampledRows::of(pass);
        // All devices call the same collectives.
        if rows.is_empty() && over != DeviceDivision::ONE && pass.tokens() > 0 {
            rows.push(0);
        }

        let mut choices = vec![NONE; shape.0 * shape.1];
        if rows.is_empty() {
            return Tensor::from_vec(choices, shape, x.device());
        }

        let count = rows.len();
        let x = x.index_select(&Tensor::from_vec(rows, count, x.device())?, 1)?;
        let logits = part
            .logits(&x, cx)?
            .squeeze(0)?
            .to_dtype(candle_core::DType::F32)?;
        let tokens = logits.dim(1)?;
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        let logits: Vec<&[f32]> = logits.chunks_exact(tokens).collect();
        self.choose(&slots, &logits, &mut choices);
        Tensor::from_vec(choices, shape, x.device())
    }

    /// Chooses a token for each of `slots`, on the threads of this device. `logits` has a row for
    /// each of them. Writes the choices to the rows of `choices`. Takes no time for other slots.
    fn choose(&mut self, slots: &[usize], logits: &[&[f32]], choices: &mut [u32]) {
        let taken = slots
            .iter()
            .map(|slot| self.histories.get_mut(*slot).and_then(Option::take));
        let mut histories: Vec<Option<SequenceHistory>> = taken.collect();

        let rows = choices.par_chunks_exact_mut(CHOICE_ROW);
        let sampled = histories.par_iter_mut().zip(slots).zip(logits);
        sampled
            .zip(rows)
            .for_each(|(((history, slot), logits), row)| {
                let choice = match history {
                    Some(history) => history.choose(logits),
                    None => Unchosen::OutOfOrder.into(),
                };
                choice.write(*slot as u32, row);
            });

        for (slot, history) in slots.iter().zip(histories) {
            if let Some(place) = self.histories.get_mut(*slot) {
                *place = history;
            }
        }
    }

    /// Appends the tokens of a pass to their sequences, and creates the new sequences.
    fn note(&mut self, pass: &InferencePass) {
        for chunk in &pass.chunks {
            let Some(place) = self.histories.get_mut(chunk.slot as usize) else {
                continue;
            };
            if let Some(begin) = chunk.new {
                *place = Some(SequenceHistory::new(begin, chunk.start as usize));
            }
            if let Some(history) = place {
                history.add(chunk.start as usize, &chunk.given);
            }
        }
    }
}

impl SampledRows {
    /// Returns the last row of each chunk that has `samples` set.
    fn of(pass: &InferencePass) -> Self {
        let mut rows = Vec::new();
        let mut slots = Vec::new();
        let mut end = 0;
        for chunk in &pass.chunks {
            end += chunk.tokens();
            if chunk.samples {
                rows.push(end as u32 - 1);
                slots.push(chunk.slot as usize);
            }
        }
        Self { rows, slots }
    }
}
