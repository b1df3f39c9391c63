//! Next-token windows over a text or another source of tokens.

use std::sync::Arc;

use mpmd_core::aval::{DType, Element};
use mpmd_core::pipeline::Microbatch;
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::random;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;

use super::blocks::SequenceBlocks;
use super::rows::{Named, array_of_rows, ends};
use super::{Data, MicrobatchPlace, TokenSource};

/// Limit on the number of held-out microbatches, which bounds the time of an evaluation.
const MOST_HELD_OUT: usize = 256;

/// Microbatches of windows from a long sequence of tokens. A microbatch has `rows` windows of
/// `time` tokens, and the token that follows each of these tokens.
///
/// The first stage gets the windows as its input, `[rows, time]`. The last stage gets the following
/// tokens as the side input `targets`, of the same shape. Both are `u32`. The tokens depend only on
/// their source, the microbatch's key and the row.
///
/// The source is cut into blocks of [`BLOCK`](super::BLOCK) tokens. Every tenth block is held out:
/// no training window overlaps it. With [`Windows::evaluated_on`], no block is held out.
#[derive(Clone, Debug)]
pub struct Windows {
    source: Arc<dyn TokenSource>,
    /// The source for evaluation, if it differs from the source for training.
    other: Option<Arc<dyn TokenSource>>,
    time: usize,
    rows: usize,
    dtype: DType,
    spec: Spec,
    /// Index of the first token of each held-out window.
    held_out: Arc<[usize]>,
}

impl Windows {
    /// Creates microbatches of `rows` windows of `time` tokens from a
    /// [`TextBytes`](super::TextBytes) or another source. Uses up to 256 held-out microbatches,
    /// spread evenly over the source.
    ///
    /// # Errors
    ///
    /// If a size is zero, or the source has no training window of `time` tokens and one more.
    pub fn new(source: &(impl TokenSource + Clone), time: usize, rows: usize) -> Result<Self> {
        let blocks = SequenceBlocks {
            len: source.tokens(),
            is_whole: false,
        };
        if time == 0 || rows == 0 || blocks.sequences(time) == 0 {
            return Err(Error::Environment(format!(
                "the text has {} tokens: a window of {time} and one more are needed",
                blocks.len
            )));
        }

        let held_out = some(blocks.held_out_starts(time).collect(), rows);
        Ok(Self {
            source: Arc::new(source.clone()),
            other: None,
            time,
            rows,
            dtype: DType::U32,
            spec: Spec::default(),
            held_out,
        })
    }

    /// Evaluates on up to 256 microbatches of windows from another source. Trains on the whole
    /// first source.
    ///
    /// # Errors
    ///
    /// If `source` has too few windows of `time` tokens for one microbatch.
    pub fn evaluated_on(mut self, source: &(impl TokenSource + Clone)) -> Result<Self> {
        let len = source.tokens();
        let time = self.time;
        let starts = (0..len).step_by(time).filter(|start| start + time < len);
        self.held_out = some(starts.collect(), self.rows);
        if self.held_out.len() < self.rows {
            return Err(Error::Environment(format!(
                "the text for evaluation has {len} tokens: {} windows of {time} and one more are \
                 needed",
                self.rows
            )));
        }
        self.other = Some(Arc::new(source.clone()));
        Ok(self)
    }

    /// Creates `u8` arrays instead of `u32` arrays. A token above 255 then fails the array.
    #[must_use]
    pub fn bytes(mut self) -> Self {
        self.dtype = DType::U8;
        self
    }

    /// Sets the sharding of the arrays over the stages' meshes, for instance `spec!["data"]`.
    /// Default: replicated on every device.
    #[must_use]
    pub fn sharded(mut self, spec: Spec) -> Self {
        self.spec = spec;
        self
    }

    /// Issues the operations that create a microbatch. `start` maps a row to the index of its first
    /// token in the source.
    fn microbatch(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        source: &Arc<dyn TokenSource>,
        start: impl Fn(usize) -> usize + Clone + Send + Sync + 'static,
    ) -> Result<Microbatch<MpmdArray>> {
        let (first, last) = ends(meshes, &self.spec);
        let following = start.clone();
        let inputs = self.array(p, &first, source, start)?;
        let targets = self.array(p, &last, source, move |row| following(row) + 1)?;
        let microbatch = Microbatch::new(inputs);
        let stage = meshes.len() - 1;
        Ok(microbatch.side(stage, Named::from([("targets".to_owned(), targets)])))
    }

    fn array(
        &self,
        p: &mut Program,
        sharding: &Sharding,
        source: &Arc<dyn TokenSource>,
        start: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        match self.dtype {
            DType::U8 => self.array_of::<u8>(p, sharding, source, start),
            _ => self.array_of::<u32>(p, sharding, source, start),
        }
    }

    fn array_of<T: Element + TryFrom<u32>>(
        &self,
        p: &mut Program,
        sharding: &Sharding,
        source: &Arc<dyn TokenSource>,
        start: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        let source = source.clone();
        array_of_rows::<T>(
            p,
            sharding,
            [self.rows, self.time],
            move |row, columns, values| {
                let mut tokens = vec![0; values.len()];
                source.read(start(row) + columns.start, &mut tokens)?;
                for (value, token) in values.iter_mut().zip(tokens) {
                    let other =
                        |_| Error::kernel(format!("token {token} does not fit {}", T::DTYPE));
                    *value = T::try_from(token).map_err(other)?;
                }
                Ok(())
            },
        )
    }

    /// Returns the division of the training source into blocks.
    fn blocks(&self) -> SequenceBlocks {
        SequenceBlocks {
            len: self.source.tokens(),
            is_whole: self.other.is_some(),
        }
    }

    /// Returns a function that maps a row of a training microbatch to the index of its first token.
    fn training_start(
        &self,
        at: MicrobatchPlace,
    ) -> impl Fn(usize) -> usize + Clone + Send + Sync + 'static {
        let blocks = self.blocks();
        let time = self.time;
        // `new` has found a training window.
        move |row| {
            blocks
                .sequence_start(random::bits(at.key, row as u64), time)
                .unwrap_or(0)
        }
    }
}

/// Returns the first tokens of at most [`MOST_HELD_OUT`] microbatches of `rows` windows, spread
/// evenly.
fn some(starts: Vec<usize>, rows: usize) -> Arc<[usize]> {
    let every = starts.len().div_ceil(MOST_HELD_OUT * rows).max(1);
    starts.into_iter().step_by(every).collect()
}

impl Data<MpmdArray> for Windows {
    fn compare(&self, p: &mut Program) -> Result<()> {
        self.source.compare(p)?;
        self.other.iter().try_for_each(|other| other.compare(p))
    }

    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        self.microbatch(p, meshes, &self.source, self.training_start(at))
    }

    /// Returns the number of complete held-out microbatches. The last windows are skipped if they
    /// do not fill a microbatch.
    fn held_out_len(&self) -> usize {
        self.held_out.len() / self.rows
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        if index >= self.held_out_len() {
            return Err(Error::kernel(format!(
                "there is no held-out microbatch {index}"
            )));
        }
        let held_out = self.held_out.clone();
        let first = index * self.rows;
        let source = self.other.as_ref().unwrap_or(&self.source);
        self.microbatch(p, meshes, source, move |row| held_out[first + row])
    }
}

#[cfg(test)]
mod tests {
    use mpmd_core::Simulation;
    use mpmd_layout::spec;

    use super::super::{BLOCK, TextBytes};
    use super::*;

    fn text() -> TextBytes {
        TextBytes::of_files(&[(0..20 * BLOCK).map(|i| (i % 251) as u8 + 1).collect()]).unwrap()
    }

    /// Returns (inputs, targets) of training microbatch 3 of step 2.
    fn values(processes: usize, windows: &Windows) -> (Vec<u32>, Vec<u32>) {
        let results = Simulation::new(processes, 4).run(|p| {
            let meshes = p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?;
            let start = windows.training_start(MicrobatchPlace::new(5, 2, 3, 4));
            let following = start.clone();
            let (first, last) = ends(&meshes, &windows.spec);
            let source = &windows.source;
            let inputs = windows.array(p, &first, source, start)?;
            let targets = windows.array(p, &last, source, move |row| following(row) + 1)?;
            let to = Sharding::single_device(p.topology().device_ids()[0]);
            let arrays = p.device_put(&(inputs, targets), to)?;
            let host = |array: &MpmdArray| -> Result<Vec<u32>> {
                Ok(array
                    .to_host()?
                    .map_or(Ok(Vec::new()), |host| host.to_vec())?)
            };
            Ok((host(&arrays.0)?, host(&arrays.1)?))
        });
        results.into_iter().next().unwrap().unwrap()
    }

    #[test]
    fn windows_are_the_same_on_any_number_of_processes() {
        let windows = Windows::new(&text(), 8, 6).unwrap().sharded(spec!["data"]);
        let alone = values(1, &windows);
        assert_eq!((alone.0.len(), alone.1.len()), (48, 48));
        for (inputs, targets) in alone.0.chunks(8).zip(alone.1.chunks(8)) {
            assert_eq!(inputs[1..], targets[..7]);
        }
        assert_eq!(values(2, &windows), alone);
        assert_eq!(values(4, &windows), alone);
    }

    #[test]
    fn held_out_windows_are_bounded() {
        let windows = Windows::new(&text(), 8, 6).unwrap();
        let all = windows.blocks().held_out_starts(8).count();
        assert_eq!(windows.held_out_len(), all / 6);
        let few = Windows::new(&text(), 8, 1).unwrap();
        assert!(few.held_out_len() <= MOST_HELD_OUT && few.held_out_len() * 2 > MOST_HELD_OUT);
    }

    #[test]
    fn another_source_is_for_evaluation_alone() {
        let other = TextBytes::of_files(&[vec![b'x'; 50]]).unwrap();
        let windows = Windows::new(&text(), 8, 3)
            .unwrap()
            .evaluated_on(&other)
            .unwrap();
        // The file ends with a separator: 51 tokens.
        assert_eq!(*windows.held_out, [0, 8, 16, 24, 32, 40]);
        assert_eq!(windows.held_out_len(), 2);
        assert_eq!(windows.blocks().sequences(8), text().bytes().len() - 8);
        let short = Windows::new(&text(), 8, 7).unwrap().evaluated_on(&other);
        assert!(
            short
                .unwrap_err()
                .to_string()
                .contains("evaluation has 51 tokens")
        );
    }

    #[test]
    fn text_that_is_too_short_is_an_error() {
        let text = TextBytes::of_files(&[vec![b'x'; 99]]).unwrap();
        assert!(Windows::new(&text, 100, 1).is_err() && Windows::new(&text, 0, 1).is_err());
        assert_eq!(Windows::new(&text, 99, 1).unwrap().held_out_len(), 0);
    }
}
