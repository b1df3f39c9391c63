//! Training windows, each made on the device that needs it, and initial values of weights.
//!
//! All values depend only on a seed and on positions in the whole array. They are the same on any
//! number of processes.

use std::sync::Arc;

use mpmd::aval::Element;
use mpmd::prelude::*;
use mpmd::topology::Mesh;

use crate::math::random_unit;
use crate::next_byte::CONTEXT;
use crate::text::{ByteWindows as _, Text};

/// A context and the byte that follows it.
pub(crate) struct Window {
    context: [u8; CONTEXT],
    target: u8,
}

impl Window {
    fn new(context: &[u8], target: u8) -> Self {
        let mut window = Self { context: [0; CONTEXT], target };
        window.context.copy_from_slice(context);
        window
    }
}

/// Windows of a text that are not used for training: each is a context and the byte that follows.
pub struct HeldOut {
    windows: Arc<[Window]>,
}

impl HeldOut {
    /// Selects windows from the held-out windows of a text, evenly spread and no more than `most`.
    pub fn new(text: &Text, most: usize) -> Self {
        let every = text.held_out_windows().div_ceil(most.max(1)).max(1);
        let windows = text.held_out().step_by(every).take(most);
        Self { windows: windows.map(|(context, target)| Window::new(context, target)).collect() }
    }

    /// Returns the number of windows.
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    /// Returns a function from a row to its window: row 0 is window `first`. The function panics if
    /// there is no such window.
    pub(crate) fn sampler(&self, first: usize) -> impl Fn(usize) -> Window + Send + Sync + 'static {
        let windows = self.windows.clone();
        move |row| {
            let Window { context, target } = &windows[first + row];
            Window { context: *context, target: *target }
        }
    }
}

/// Returns a function from a row of a step's batch to its window.
pub(crate) fn sampler(
    text: &Arc<Text>,
    seed: u64,
    step: usize,
) -> impl Fn(usize) -> Window + Send + Sync + 'static {
    let text = text.clone();
    move |row| {
        let (context, target) = text.sample(seed, step as u64, row as u64);
        Window::new(context, target)
    }
}

/// Issues the making of the contexts of `rows` windows, `[rows, CONTEXT]`, replicated on `mesh`,
/// and returns without waiting. `window` maps a row to its window.
pub(crate) fn make_contexts(
    p: &mut Program,
    mesh: &Mesh,
    rows: usize,
    window: impl Fn(usize) -> Window + Send + Sync + 'static,
) -> Result<MpmdArray> {
    p.array_from_fn(u8s([rows, CONTEXT]), &mesh.replicated(), move |region, mut contexts| {
        let contexts = contexts.as_mut_slice::<u8>()?.chunks_exact_mut(CONTEXT);
        contexts
            .zip(region.range(0))
            .for_each(|(context, row)| context.copy_from_slice(&window(row).context));
        Ok(())
    })
}

/// Issues the making of the bytes that follow the contexts of `rows` windows, `[rows]`, replicated
/// on `mesh`. Returns without waiting. `window` maps a row to its window.
pub(crate) fn make_targets(
    p: &mut Program,
    mesh: &Mesh,
    rows: usize,
    window: impl Fn(usize) -> Window + Send + Sync + 'static,
) -> Result<MpmdArray> {
    p.array_from_fn(u8s([rows]), &mesh.replicated(), move |region, mut targets| {
        let targets = targets.as_mut_slice::<u8>()?.iter_mut();
        targets.zip(region.range(0)).for_each(|(target, row)| *target = window(row).target);
        Ok(())
    })
}

/// Issues the making of an array of uniformly distributed `f32` values between `-scale` and
/// `scale`, replicated on `mesh`. Returns without waiting. `stream` is the seed.
pub(crate) fn make_random(
    p: &mut Program,
    mesh: &Mesh,
    shape: [usize; 2],
    stream: u64,
    scale: f64,
) -> Result<MpmdArray> {
    p.array_from_fn(f32s(shape), &mesh.replicated(), move |region, mut values| {
        let elements =
            region.range(0).flat_map(|row| region.range(1).map(move |column| (row, column)));
        for (value, (row, column)) in values.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
            *value = (scale * random_unit(stream, (row * shape[1] + column) as u64)) as f32;
        }
        Ok(())
    })
}

/// Issues the making of an array of zeros of type `T`, replicated on `mesh`, and returns without
/// waiting.
pub(crate) fn make_zeros<T: Element + Default>(
    p: &mut Program,
    mesh: &Mesh,
    shape: &[usize],
) -> Result<MpmdArray> {
    let aval = ShapedArray::new(shape, T::DTYPE);
    p.array_from_fn(aval, &mesh.replicated(), |_, mut values| Ok(values.fill(T::default())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::BLOCK;

    #[test]
    fn held_out_windows_are_spread_evenly() {
        let text = Text::of_files(&[vec![b'x'; 20 * BLOCK]]).unwrap();
        assert_eq!(text.held_out_windows(), 2 * BLOCK);
        for most in [1, 7, 600, 1 << 20] {
            let held_out = HeldOut::new(&text, most);
            let windows = held_out.windows();
            assert!(
                windows <= most && windows * 2 > most.min(text.held_out_windows()),
                "{most}: {windows}"
            );
        }
        assert_eq!(HeldOut::new(&text, 0).windows(), 0);
    }
}
