//! A task: checks its inputs, computes for a while, and writes its own place as output.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpmd_core::aval::DType;
use mpmd_core::prelude::{
    Context, Error, Kernel, MpmdArray, Result, ShapedArray, Signature, View, ViewMut,
};

/// Values of a task's computation.
const VALUES: usize = 64;

/// The kernel of one task. An output repeats the pair (row, point) of its task.
pub(super) struct Task {
    pub(super) row: usize,
    pub(super) point: usize,
    /// The points of the row before that make the inputs, in their order.
    pub(super) makers: Vec<usize>,
    /// Elements of every input and of the output, an even number.
    pub(super) elements: usize,
    pub(super) iterations: u64,
    /// Counts the tasks of this process that have succeeded.
    pub(super) done: Arc<AtomicU64>,
}

impl Kernel for Task {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, _: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::new(&[self.elements], DType::I64)))
    }

    fn run(&self, _: &mut Context<'_>, x: Vec<View<'_>>, mut y: ViewMut<'_>) -> Result<()> {
        let place = |row: usize, point: usize| [row as i64, point as i64];
        if x.len() != self.makers.len() {
            return Err(Error::kernel(format!("{} inputs, not {}", x.len(), self.makers.len())));
        }
        for (x, maker) in x.iter().zip(&self.makers) {
            let expected = place(self.row - 1, *maker);
            let found = x.as_slice::<i64>()?;
            if found.len() != self.elements || found.chunks(2).any(|found| found != expected) {
                return Err(Error::kernel(format!(
                    "row {}, point {}: an input is {found:?}, not {expected:?} repeated",
                    self.row, self.point
                )));
            }
        }
        compute(self.iterations);
        let own = place(self.row, self.point);
        y.as_mut_slice::<i64>()?.chunks_exact_mut(2).for_each(|pair| pair.copy_from_slice(&own));
        self.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.row as u64, self.point as u64, self.iterations]
    }
}

/// Multiplies and adds `iterations` times for each of `VALUES` values, as `compute` of mpi.c does.
/// Each iteration reads and writes all values, so that both compilers produce the same loop.
#[inline(never)]
fn compute(iterations: u64) {
    let mut values = [-0.5f64; VALUES];
    for _ in 0..iterations {
        values.iter_mut().for_each(|value| *value = *value * *value + *value);
        black_box(&mut values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_core::HostArray;

    fn task(row: usize, makers: &[usize]) -> Task {
        let (makers, done) = (makers.to_vec(), Arc::default());
        Task { row, point: 7, makers, elements: 4, iterations: 3, done }
    }

    fn output(row: i64, point: i64) -> HostArray {
        HostArray::from_slice(&[4], &[row, point, row, point]).unwrap()
    }

    #[test]
    fn task_writes_its_place_and_is_counted() {
        let task = task(5, &[6, 8]);
        let done = task.done.clone();
        let y = mpmd_core::run_here(task, &vec![output(4, 6), output(4, 8)]).unwrap();
        assert_eq!(y.to_vec::<i64>().unwrap(), [5, 7, 5, 7]);
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn wrong_inputs_are_refused_and_not_counted() {
        let half = HostArray::from_slice(&[4], &[4i64, 6, 4, 7]).unwrap();
        let short = HostArray::from_slice(&[2], &[4i64, 6]).unwrap();
        for wrong in [output(3, 6), output(4, 5), half, short] {
            let task = task(5, &[6]);
            let done = task.done.clone();
            let error = mpmd_core::run_here(task, &vec![wrong]).unwrap_err().to_string();
            assert!(error.contains("row 5, point 7: an input is"), "{error}");
            assert_eq!(done.load(Ordering::Relaxed), 0);
        }
        let error = mpmd_core::run_here(task(5, &[6]), &Vec::<HostArray>::new()).unwrap_err();
        assert!(error.to_string().contains("0 inputs, not 1"), "{error}");
    }
}
