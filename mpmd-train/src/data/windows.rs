//! Next-token windows over the bytes of a text.

use std::sync::Arc;

use mpmd_core::aval::{DType, Element};
use mpmd_core::pipeline::Microbatch;
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::random;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;

use super::rows::{Named, array_of_rows, ends};
use super::{At, Data, Text};

/// Limit on the number of held-out microbatches. It bounds the time for texts of any size.
const MOST_HELD_OUT: usize = 256;

/// Windows of a text: `rows` sequences of `time` bytes, and the byte that follows each byte.
///
/// The first stage gets the sequences as its input, `[rows, time]`. The last stage gets the
/// following bytes as the side input `targets`, of the same shape. Both are `u32`, one token for
/// each byte. The bytes depend only on the text, the microbatch's key and the row.
#[derive(Clone, Debug)]
pub struct Windows {
    text: Text,
    time: usize,
    rows: usize,
    dtype: DType,
    spec: Spec,
    /// The name of the targets; `None` for a side input that is the array itself.
    targets: Option<String>,
    /// Index of the first byte of each held-out window.
    held_out: Arc<[usize]>,
}

impl Windows {
    /// Creates windows of `time` tokens, `rows` of them in each microbatch. Keeps up to 256
    /// held-out microbatches, spread evenly over the text.
    ///
    /// # Errors
    ///
    /// If a size is zero, or the text has no training sequence of `time` bytes.
    pub fn new(text: &Text, time: usize, rows: usize) -> Result<Self> {
        if time == 0 || rows == 0 || text.sequences(time) == 0 {
            let bytes = text.bytes().len();
            return Err(Error::Environment(format!(
                "{bytes} bytes of text have no {rows} training windows of {time} bytes"
            )));
        }
        let starts: Vec<usize> = text.held_out_starts(time).collect();
        let most = MOST_HELD_OUT * rows;
        let every = starts.len().div_ceil(most).max(1);
        Ok(Self {
            text: text.clone(),
            time,
            rows,
            dtype: DType::U32,
            spec: Spec::default(),
            targets: Some("targets".to_owned()),
            held_out: starts.into_iter().step_by(every).collect(),
        })
    }

    /// Makes `u8` arrays in place of `u32` ones.
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

    /// Sets the name of the targets among the last stage's side inputs. Default: `targets`.
    #[must_use]
    pub fn target_name(mut self, name: impl Into<String>) -> Self {
        self.targets = Some(name.into());
        self
    }

    /// Gives the last stage the targets as its whole side input, without a name.
    #[must_use]
    pub fn unnamed_targets(mut self) -> Self {
        self.targets = None;
        self
    }

    /// Issues the making of a microbatch. `start` maps a row to the index of its first byte in the
    /// text.
    fn microbatch(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        start: impl Fn(usize) -> usize + Clone + Send + Sync + 'static,
    ) -> Result<Microbatch<MpmdArray>> {
        let (first, last) = ends(meshes, &self.spec);
        let following = start.clone();
        let inputs = self.array(p, &first, start)?;
        let targets = self.array(p, &last, move |row| following(row) + 1)?;
        let (microbatch, stage) = (Microbatch::new(inputs), meshes.len() - 1);
        Ok(match &self.targets {
            Some(name) => microbatch.side(stage, Named::from([(name.clone(), targets)])),
            None => microbatch.side(stage, targets),
        })
    }

    fn array(
        &self,
        p: &mut Program,
        sharding: &Sharding,
        start: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        match self.dtype {
            DType::U8 => self.array_of::<u8>(p, sharding, start),
            _ => self.array_of::<u32>(p, sharding, start),
        }
    }

    fn array_of<T: Element + From<u8>>(
        &self,
        p: &mut Program,
        sharding: &Sharding,
        start: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        let text = self.text.clone();
        array_of_rows::<T>(p, sharding, [self.rows, self.time], move |row, columns, values| {
            let bytes = &text.bytes()[start(row)..][columns];
            values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = T::from(*byte));
        })
    }
}

impl Data<MpmdArray> for Windows {
    fn compare(&self, p: &mut Program) -> Result<()> {
        self.text.compare(p)
    }

    fn training(&self, p: &mut Program, meshes: &[Mesh], at: At) -> Result<Microbatch<MpmdArray>> {
        let (text, time) = (self.text.clone(), self.time);
        self.microbatch(p, meshes, move |row| {
            text.sequence_start(random::bits(at.key, row as u64), time).unwrap_or(0)
        })
    }

    /// Returns the number of whole microbatches. The last held-out windows that fill none are
    /// skipped.
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
            return Err(Error::kernel(format!("there is no held-out microbatch {index}")));
        }
        let (held_out, first) = (self.held_out.clone(), index * self.rows);
        self.microbatch(p, meshes, move |row| held_out[first + row])
    }
}

#[cfg(test)]
mod tests {
    use mpmd_core::Simulation;
    use mpmd_layout::spec;

    use super::super::BLOCK;
    use super::*;

    fn text() -> Text {
        Text::of_files(&[(0..20 * BLOCK).map(|i| (i % 251) as u8 + 1).collect()]).unwrap()
    }

    /// Returns (inputs, targets) of training microbatch 3 of step 2, and the numbers of held-out
    /// microbatches.
    fn values(processes: usize, windows: &Windows) -> (Vec<u32>, Vec<u32>) {
        let results = Simulation::new(processes, 4).run(|p| {
            let meshes = p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?;
            let at = At::new(5, 2, 3);
            let (text, time) = (windows.text.clone(), windows.time);
            let start = move |row: usize| {
                text.sequence_start(random::bits(at.key, row as u64), time).unwrap_or(0)
            };
            let following = start.clone();
            let (first, last) = ends(&meshes, &windows.spec);
            let inputs = windows.array(p, &first, start)?;
            let targets = windows.array(p, &last, move |row| following(row) + 1)?;
            let to = mpmd_layout::sharding::Sharding::single_device(p.topology().device_ids()[0]);
            let arrays = p.device_put(&(inputs, targets), to)?;
            let host = |array: &MpmdArray| -> Result<Vec<u32>> {
                Ok(array.to_host()?.map_or(Ok(Vec::new()), |host| host.to_vec())?)
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
        let all = text().held_out_sequences(8).len();
        assert_eq!(windows.held_out_len(), all / 6);
        let few = Windows::new(&text(), 8, 1).unwrap();
        assert!(few.held_out_len() <= MOST_HELD_OUT && few.held_out_len() * 2 > MOST_HELD_OUT);
    }

    #[test]
    fn text_that_is_too_short_is_an_error() {
        let text = Text::of_files(&[vec![b'x'; 99]]).unwrap();
        assert!(Windows::new(&text, 100, 1).is_err() && Windows::new(&text, 0, 1).is_err());
        assert_eq!(Windows::new(&text, 99, 1).unwrap().held_out_len(), 0);
    }
}
