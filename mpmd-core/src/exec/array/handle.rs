//! Handles to arrays that share an allocation.

use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::Placed;
use crate::exec::memory::WORTH_NAMING;

/// A handle to one of the arrays that an operation made. Clones refer to the same array.
///
/// The arrays of one operation share one allocation. The buffers of an array are still freed with
/// its own last handle.
pub(crate) struct Handle {
    all: Arc<[Placed]>,
    index: u32,
    /// True if the array's own last handle has something to do: in a dry run it is recorded; the
    /// shards of one of several arrays are freed.
    counted: bool,
}

/// A handle that does not keep the array alive. It can be upgraded while another handle exists.
pub(crate) struct WeakHandle {
    all: Weak<[Placed]>,
    index: u32,
}

impl Handle {
    /// Creates the first handle to the new array at `index` of `all`; the array's count already
    /// includes it. Lists a large array for out-of-memory errors. `recorded` is true in a dry run.
    pub(super) fn first_of(all: Arc<[Placed]>, index: u32, recorded: bool) -> Self {
        let counted = all[index as usize].is_counted(all.len(), recorded);
        let handle = Self { all, index, counted };
        // Most arrays are too small even in total: then nothing is looked up.
        if handle.shards.len().saturating_mul(handle.made.bytes) as u64 >= WORTH_NAMING {
            handle.made.runtime.holds(&handle);
        }
        handle
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(&raw const **self, &raw const **other)
    }

    pub(crate) fn downgrade(&self) -> WeakHandle {
        WeakHandle { all: Arc::downgrade(&self.all), index: self.index }
    }

    /// Frees the array's shards with its last handle, and records that in a dry run.
    #[cold]
    fn end(&self) {
        if let Some(recorder) = &self.made.runtime.recorder {
            recorder.dropped(self.origin());
        }
        self.shards.iter().for_each(|shard| shard.slot.leave());
    }
}

impl Placed {
    /// True if handles to this array, one of `arrays` in an allocation, are counted. The shards of
    /// a single array are freed with the allocation.
    fn is_counted(&self, arrays: usize, recorded: bool) -> bool {
        arrays > 1 && !self.shards.is_empty() || recorded
    }
}

impl Deref for Handle {
    type Target = Placed;

    fn deref(&self) -> &Placed {
        &self.all[self.index as usize]
    }
}

impl Clone for Handle {
    #[inline]
    fn clone(&self) -> Self {
        if self.counted {
            self.handles.fetch_add(1, Ordering::Relaxed);
        }
        Self { all: self.all.clone(), index: self.index, counted: self.counted }
    }
}

impl Drop for Handle {
    #[inline]
    fn drop(&mut self) {
        if self.counted && self.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end();
        }
    }
}

impl WeakHandle {
    /// True if `handle` is a handle to this array. Reads nothing of the array.
    #[inline]
    pub(crate) fn is(&self, handle: &Handle) -> bool {
        self.index == handle.index
            && std::ptr::addr_eq(self.all.as_ptr(), Arc::as_ptr(&handle.all))
    }

    /// Returns a handle, or `None` if the array's last handle was dropped.
    pub(crate) fn upgrade(&self) -> Option<Handle> {
        let all = self.all.upgrade()?;
        let array = &all[self.index as usize];
        let counted = array.is_counted(all.len(), array.made.runtime.recorder.is_some());
        if counted {
            let one_more = |handles: usize| (handles > 0).then_some(handles + 1);
            array.handles.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        }
        Some(Handle { all, index: self.index, counted })
    }
}

#[cfg(test)]
mod tests {
    use crate::exec::array::Repr;
    use crate::kernel::Views;
    use crate::kernel::ViewsMut;
    use crate::prelude::*;

    /// A kernel that copies any number of arrays.
    struct Copies;

    impl Kernel for Copies {
        type In = Vec<MpmdArray>;
        type Out = Vec<MpmdArray>;

        fn infer(&self, x: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
            Ok(Signature::new(x.clone()))
        }

        fn run(
            &self,
            _: &mut Context<'_>,
            x: Views<'_, Self::In>,
            y: ViewsMut<'_, Self::Out>,
        ) -> Result<()> {
            x.into_iter().zip(y).try_for_each(|(x, mut y)| {
                y.as_mut_slice::<u8>()?.copy_from_slice(x.as_slice::<u8>()?);
                Ok(())
            })
        }
    }

    #[test]
    fn each_result_is_freed_with_its_own_last_handle() {
        let mut p = Program::builder().devices(2).alone().unwrap();
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let copies = p.jit(Copies).on(&mesh).outputs(mesh.replicated()).build().unwrap();
        let bytes = 1 << 20;
        let host = MpmdArray::from_slice(&[bytes], &vec![7u8; bytes]).unwrap();
        let mut y = copies.call(&mut p, vec![host; 3]).unwrap();
        y.iter().for_each(|y| drop(y.block_until_ready().unwrap().clone()));
        let live = |p: &Program| p.memory().live / (2 * bytes as u64);
        assert_eq!(live(&p), 3);
        let clone = y[1].clone();
        assert!(clone.is_same(&y[1]) && !clone.is_same(&y[0]));
        let weak = |y: &MpmdArray| match &y.repr {
            Repr::Placed(placed) => placed.downgrade(),
            Repr::Host(_) => unreachable!("a kernel made it"),
        };
        let (first, second) = (weak(&y[0]), weak(&y[1]));
        drop(y.remove(1));
        assert_eq!(live(&p), 3);
        drop(y.remove(0));
        assert_eq!(live(&p), 2);
        assert!(first.upgrade().is_none() && second.upgrade().is_some());
        assert_eq!(clone.to_host().unwrap().unwrap().to_vec::<u8>().unwrap(), vec![7; bytes]);
        drop(clone);
        assert_eq!(live(&p), 1);
        assert!(second.upgrade().is_none());
        // An output that is dropped before it is ready is freed too.
        let host = MpmdArray::from_slice(&[bytes], &vec![7u8; bytes]).unwrap();
        let mut more = copies.call(&mut p, vec![host; 2]).unwrap();
        drop(more.pop());
        more[0].block_until_ready().unwrap();
        drop((y, more));
        p.finish().unwrap();
    }
}
