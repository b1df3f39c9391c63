//! Handles to arrays that share an allocation.

use std::ops::{Deref, Range};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use super::{Made, MpmdArray, Origin, Placed, Repr, Shards};
use crate::exec::memory::WORTH_NAMING;

/// A handle to one of the arrays that an operation made. Clones refer to the same array.
///
/// The arrays of one operation share one allocation. Each array's buffers are freed when its own
/// last handle is dropped.
pub(crate) struct ArrayHandle {
    all: Arc<ResultArrays>,
    index: u32,
    /// True if this array counts its handles. The drop of the last handle then frees the shards,
    /// and is noted in a dry run.
    counted: bool,
}

/// A handle that does not keep the array alive. It can be upgraded while another handle exists.
pub(crate) struct WeakHandle {
    all: Weak<ResultArrays>,
    index: u32,
}

/// The arrays that one operation made.
struct ResultArrays {
    /// The arrays. Empty until they are first read, if this process has no part in the operation.
    arrays: OnceLock<Arrays>,
    /// The properties of arrays in which this process has no part. `None` for arrays with shards
    /// here.
    remote: Option<Remote>,
}

/// An iterator over the first handles to all arrays of an operation, in order. Take every handle:
/// the arrays share an allocation.
pub(crate) struct NewArrays {
    all: Arc<ResultArrays>,
    next: Range<u32>,
    /// True if each array counts its handles, so that it ends with the last one. False for a single
    /// array, whose shards end with the allocation, and for arrays without shards here. Always true
    /// in a dry run.
    counted: bool,
    /// True if one of the arrays may be large enough to be listed in out-of-memory errors.
    large: bool,
}

enum Arrays {
    /// The only array. It needs no allocation of its own. The usual case.
    One(Placed),
    Several(Box<[Placed]>),
}

/// The properties of the arrays of an operation in which this process has no part.
struct Remote {
    made: Arc<[Arc<Made>]>,
    /// The operation, with the index of its first array.
    first: Origin,
}

impl ResultArrays {
    /// Returns all arrays. Creates them at the first call if this process has no part in the
    /// operation.
    #[inline]
    fn arrays(&self) -> &[Placed] {
        let arrays = match self.arrays.get() {
            Some(arrays) => arrays,
            None => self.created(),
        };
        match arrays {
            Arrays::One(array) => std::slice::from_ref(array),
            Arrays::Several(arrays) => arrays,
        }
    }

    #[cold]
    fn created(&self) -> &Arrays {
        self.arrays.get_or_init(|| {
            let remote = self.remote.as_ref();
            let remote = remote.expect("arrays with shards are not left out");
            let arrays = remote.made.iter().zip(0..).map(|(made, leaf)| {
                let origin = Origin {
                    leaf,
                    ..remote.first
                };
                Placed::new(made.clone(), Shards::Several(Vec::new()), origin)
            });
            Arrays::Several(arrays.collect())
        })
    }
}

impl Placed {
    /// Creates an array and returns a handle to it.
    pub(super) fn into_array(self) -> MpmdArray {
        Self::handles(Arrays::One(self)).next().expect("one array")
    }

    /// Creates and returns one handle for each of an operation's new arrays, in order. All have
    /// shards on the same devices of this process.
    pub(crate) fn arrays(mut all: impl ExactSizeIterator<Item = Self>) -> NewArrays {
        Self::handles(match (all.len(), all.next()) {
            (1, Some(one)) => Arrays::One(one),
            (count, first) => {
                let mut several = Vec::with_capacity(count);
                several.extend(first);
                several.extend(all);
                Arrays::Several(several.into())
            }
        })
    }

    fn handles(arrays: Arrays) -> NewArrays {
        let all = Arc::new(ResultArrays {
            arrays: OnceLock::from(arrays),
            remote: None,
        });

        let arrays = all.arrays();
        let noted = arrays
            .first()
            .is_some_and(|first| first.made.runtime.dry_run.is_some());
        let counted = arrays
            .first()
            .is_some_and(|first| first.is_counted(arrays.len(), noted));
        let large = arrays.iter().any(Self::is_large);
        NewArrays {
            next: 0..arrays.len() as u32,
            counted,
            large,
            all,
        }
    }

    /// Returns true if the array is large enough to be listed in out-of-memory errors.
    fn is_large(&self) -> bool {
        self.shards.len().saturating_mul(self.made.bytes) as u64 >= WORTH_NAMING
    }

    /// Creates and returns one handle for each of an operation's new arrays, in order. Only for
    /// operations in which this process has no part. The arrays are created when one is first read.
    /// Must not be used in a dry run, which counts handles.
    pub(crate) fn remote_arrays(made: &Arc<[Arc<Made>]>, first: Origin) -> NewArrays {
        let remote = Remote {
            made: made.clone(),
            first,
        };
        let all = Arc::new(ResultArrays {
            arrays: OnceLock::new(),
            remote: Some(remote),
        });
        NewArrays {
            all,
            next: 0..made.len() as u32,
            counted: false,
            large: false,
        }
    }

    /// Returns true if the array must count its handles. `arrays` is the number of arrays in its
    /// allocation, and `noted` is true in a dry run. The shards of a single array are freed with
    /// the allocation.
    fn is_counted(&self, arrays: usize, noted: bool) -> bool {
        arrays > 1 && !self.shards.is_empty() || noted
    }
}

impl Iterator for NewArrays {
    type Item = MpmdArray;

    #[inline]
    fn next(&mut self) -> Option<MpmdArray> {
        let index = self.next.next()?;
        let all = self.all.clone();
        // The array's count already includes this handle.
        let handle = ArrayHandle {
            all,
            index,
            counted: self.counted,
        };
        if self.large && handle.is_large() {
            handle.made.runtime.holds(&handle);
        }
        Some(MpmdArray {
            repr: Repr::Placed(handle),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.next.size_hint()
    }
}

impl ExactSizeIterator for NewArrays {}

impl ArrayHandle {
    #[inline]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.index == other.index && Arc::ptr_eq(&self.all, &other.all)
    }

    pub(crate) fn downgrade(&self) -> WeakHandle {
        WeakHandle {
            all: Arc::downgrade(&self.all),
            index: self.index,
        }
    }

    /// Returns the properties of the array, without creating arrays that were left out.
    #[inline]
    pub(crate) fn made(&self) -> &Arc<Made> {
        match &self.all.remote {
            Some(remote) => &remote.made[self.index as usize],
            None => &self.made,
        }
    }

    /// Returns the array's origin, without creating arrays that were left out.
    #[inline]
    pub(crate) fn whole_origin(&self) -> Origin {
        match &self.all.remote {
            Some(remote) => Origin {
                leaf: self.index,
                ..remote.first
            },
            None => self.origin,
        }
    }

    /// Returns true if the array was donated and must not be used any more. Does not create arrays
    /// that were left out.
    #[inline]
    pub(crate) fn is_donated(&self) -> bool {
        self.all.arrays.get().is_some() && Placed::is_donated(self)
    }

    /// Frees the array's shards, and notes that in a dry run. Called for the last handle.
    #[cold]
    fn end(&self) {
        if let Some(dry_run) = &self.made.runtime.dry_run {
            dry_run.dropped(self.dry_run_array());
        }
        self.shards.iter().for_each(|shard| shard.slot.leave());
    }
}

impl Deref for ArrayHandle {
    type Target = Placed;

    #[inline]
    fn deref(&self) -> &Placed {
        &self.all.arrays()[self.index as usize]
    }
}

impl Clone for ArrayHandle {
    #[inline]
    fn clone(&self) -> Self {
        if self.counted {
            self.handles.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            all: self.all.clone(),
            index: self.index,
            counted: self.counted,
        }
    }
}

impl Drop for ArrayHandle {
    #[inline]
    fn drop(&mut self) {
        if self.counted && self.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end();
        }
    }
}

impl WeakHandle {
    /// Returns true if `handle` is a handle to this array. Reads nothing of the array.
    #[inline]
    pub(crate) fn is(&self, handle: &ArrayHandle) -> bool {
        self.index == handle.index && std::ptr::eq(self.all.as_ptr(), Arc::as_ptr(&handle.all))
    }

    /// Returns a handle, or `None` if the array's last handle was dropped.
    pub(crate) fn upgrade(&self) -> Option<ArrayHandle> {
        let all = self.all.upgrade()?;
        let arrays = all.arrays();
        let array = &arrays[self.index as usize];
        let counted = array.is_counted(arrays.len(), array.made.runtime.dry_run.is_some());
        if counted {
            let one_more = |handles: usize| (handles > 0).then_some(handles + 1);
            array
                .handles
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
                .ok()?;
        }
        Some(ArrayHandle {
            all,
            index: self.index,
            counted,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::exec::array::Repr;
    use crate::kernel::Views;
    use crate::kernel::ViewsMut;
    use crate::prelude::*;
    use crate::simulate;

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
        let copies = p
            .jit(Copies)
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()
            .unwrap();
        let bytes = 1 << 20;
        let host = MpmdArray::from_slice(&[bytes], &vec![7u8; bytes]).unwrap();
        let mut y = copies.call(&mut p, vec![host; 3]).unwrap();
        y.iter()
            .for_each(|y| drop(y.block_until_ready().unwrap().clone()));
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
        assert_eq!(
            clone.to_host().unwrap().unwrap().to_vec::<u8>().unwrap(),
            vec![7; bytes]
        );
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

    #[test]
    fn results_elsewhere_are_created_when_one_is_read() {
        let results = simulate(2, 2, 1, |p| {
            let device = p.topology().device_ids()[1];
            let mesh = p.mesh_of(&[("x", 1)], &[device])?;
            let copies = p.jit(Copies).on(&mesh).outputs(mesh.replicated()).build()?;
            let host = MpmdArray::from_slice(&[4], &[7u8; 4])?;
            let y = copies.call(p, vec![host.clone(); 3])?;
            // The first call with such arrays looks at them to make its plan.
            y[0].block_until_ready()?;
            let _ = copies.call(p, y)?;
            let y = copies.call(p, vec![host; 3])?;
            let created = |y: &[MpmdArray]| match &y[0].repr {
                Repr::Placed(placed) => placed.all.arrays.get().is_some(),
                Repr::Host(_) => unreachable!("a kernel made it"),
            };
            let z = copies.call(p, y.clone())?;
            let clones = (y[1].clone().is_same(&y[1]), y[1].is_same(&y[2]));
            let origins = [&y[1], &z[2]].map(MpmdArray::origin);
            let before = [created(&y), created(&z)];
            z[2].block_until_ready()?;
            let read = [created(&y), created(&z)];
            assert_eq!([&y[1], &z[2]].map(MpmdArray::origin), origins);
            let lines = [&y[1], &z[2]].map(|array| match &array.repr {
                Repr::Placed(placed) => (placed.origin(), placed.origin.at.line()),
                Repr::Host(_) => unreachable!("a kernel made it"),
            });
            assert_eq!(lines.map(|(origin, _)| Some(origin)), origins);
            assert!(lines[0].1 < lines[1].1);
            Ok((before, read, clones))
        });
        let [elsewhere, here] = [0, 1].map(|process: usize| *results[process].as_ref().unwrap());
        assert_eq!(elsewhere, ([false; 2], [false, true], (true, false)));
        assert_eq!(here, ([true; 2], [true; 2], (true, false)));
    }
}
