//! Generation of one text over the stages, one token after another.

use mpmd::{Error, Program, Result};

use crate::division::costs::Room;
use crate::inference::choice::Unchosen;
use crate::inference::pass::{InferencePass, NewSequence, PassChunk};
use crate::inference::sample::Sampling;
use crate::inference::{Choices, Inference};

/// Number of tokens of a prompt that one pass computes.
const CHUNK: usize = 256;

/// Generates text with a model, one sequence at a time. Each stage's devices hold its weights and
/// the cached keys and values.
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
    inference: Inference,
    /// Largest number of tokens in a sequence.
    positions: usize,
}

impl Generator {
    pub(crate) fn new(inference: Inference, positions: usize) -> Self {
        Self {
            inference,
            positions,
        }
    }

    /// Returns a line for users that names the devices of the stages. `None` if all devices are
    /// CPUs.
    pub fn computed_by(&self, p: &Program) -> Option<String> {
        self.inference.computed_by(p)
    }

    /// Generates up to `most` tokens after a prompt, and returns them on every process. Blocks
    /// until the last token. Every process must call it with the same arguments. Forgets the
    /// sequence of an earlier call.
    ///
    /// After each token, every process calls `is_end` with the new tokens so far. Generation ends
    /// if it returns true; all processes must return the same.
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
        let begin = NewSequence {
            sampling: *sampling,
            prompt: prompt.len() as u32,
            top: None,
        };
        let mut new = Some(begin);
        let mut start = 0;
        let mut choices = None;
        for part in prompt.chunks(CHUNK) {
            let is_last = start + part.len() == prompt.len() && most > 0;
            choices = Some(self.pass(p, start, part, new.take(), is_last, None)?);
            start += part.len();
        }

        let mut text = Vec::new();
        while text.len() < most {
            let Some(chosen) = &choices else { break };
            let read = || {
                let all = self.inference.read(chosen)?.unwrap_or_default();
                let choice = all.into_values().next();
                Ok(choice.map_or(Err(Unchosen::OutOfOrder), |choice| choice.token))
            };
            let next = p.broadcast_value(self.inference.owner(), Ok(0), read)?;

            text.push(next.map_err(|why| Error::kernel(why.to_string()))?);
            if is_end(p, &text)? {
                break;
            }
            if text.len() < most {
                choices = Some(self.pass(p, start, &[], None, true, choices.as_ref())?);
                start += 1;
            }
        }
        Ok(text)
    }

    /// Issues a pass of the tokens `given`, or of the last chosen token if `given` is empty.
    fn pass(
        &mut self,
        p: &mut Program,
        start: usize,
        given: &[u32],
        new: Option<NewSequence>,
        samples: bool,
        last: Option<&Choices>,
    ) -> Result<Choices> {
        let needed = start + given.len().max(1);
        if needed > self.positions {
            return Err(Error::Environment(format!(
                "token {needed} of a sequence: the generator has room for {}, the positions of \
                 `Stages::new`",
                self.positions
            )));
        }

        let blocks = (0..Room::for_one(needed).blocks as u32).collect();
        let chunk = PassChunk {
            slot: 0,
            start: start as u32,
            given: given.to_vec(),
            samples,
            blocks,
            new,
        };
        let pass = InferencePass {
            version: 0,
            chunks: vec![chunk],
        };
        self.inference.pass(p, &pass, last)
    }
}
