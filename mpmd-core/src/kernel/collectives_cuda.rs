//! Collectives on values in the memory of CUDA devices: through the host, or with NCCL
//! (`collectives_nccl.rs`).
//!
//! Through the host, the values are copied to the host and the host collectives of [`Context`] run
//! on them. So declarations, pairing and results are the same bit for bit, also among devices of
//! different kinds. Here alone a device's thread waits for its device, until the values are on the
//! host. Work that the kernel issues afterwards waits on the device for the result.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use half::{bf16, f16};
use num_complex::Complex;

use super::context::{Context, OnCuda};
use crate::error::ViewError;
use crate::error::{Error, Result};
use crate::kernel::cuda::Part;
use mpmd_layout::aval::{DType, Element};
#[cfg(doc)]
use mpmd_layout::topology::CudaCollectives;

/// Calls `$call` with `$t` as the type of elements of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $call:expr, $bool:expr) => {
        match $dtype {
            DType::Bool => $bool,
            DType::I8 => { type $t = i8; $call }
            DType::I16 => { type $t = i16; $call }
            DType::I32 => { type $t = i32; $call }
            DType::I64 => { type $t = i64; $call }
            DType::U8 => { type $t = u8; $call }
            DType::U16 => { type $t = u16; $call }
            DType::U32 => { type $t = u32; $call }
            DType::U64 => { type $t = u64; $call }
            DType::Bf16 => { type $t = bf16; $call }
            DType::F16 => { type $t = f16; $call }
            DType::F32 => { type $t = f32; $call }
            DType::F64 => { type $t = f64; $call }
            DType::C64 => { type $t = Complex<f32>; $call }
            DType::C128 => { type $t = Complex<f64>; $call }
        }
    };
    ($dtype:expr, $t:ident => $call:expr) => {
        with_type!($dtype, $t => $call, { type $t = bool; $call })
    };
}

impl<'a> Context<'a> {
    /// Does an [`all_reduce`](Self::all_reduce) of values on the CUDA device that the kernel runs
    /// on.
    ///
    /// Blocks like `all_reduce`, and until the device has done all work that the kernel issued so
    /// far. With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group
    /// have called it.
    ///
    /// # Errors
    ///
    /// As `all_reduce`. Also if the kernel does not run on a CUDA device, the values are read-only,
    /// or work on the device has failed.
    pub fn all_reduce_on_cuda<'x>(
        &mut self,
        axis: &str,
        values: impl Into<Part<'x>>,
    ) -> Result<()> {
        let values = values.into();
        let dtype = values.dtype();
        if self.is_next_joined() {
            return self.by_nccl(("all_reduce", None), axis, &values, &values);
        }
        self.in_place(&values, true, |cx, bytes| {
            with_type!(
                dtype,
                T => cx.all_reduce::<T>(axis, elements_mut(bytes)?),
                Err(no_reduction(dtype))
            )
        })
    }

    /// Does an [`all_gather`](Self::all_gather) of values on the CUDA device that the kernel runs
    /// on.
    ///
    /// Blocks like `all_gather`, and until the device has done all work that the kernel issued so
    /// far. With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group
    /// have called it.
    ///
    /// # Errors
    ///
    /// As `all_gather`. Also if the kernel does not run on a CUDA device, `out` is read-only, or
    /// work on the device has failed.
    pub fn all_gather_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        part: impl Into<Part<'x>>,
        out: impl Into<Part<'y>>,
    ) -> Result<()> {
        self.between(("all_gather", axis), &part.into(), &out.into(), |cx, dtype, part, out| {
            with_type!(dtype, T => cx.all_gather::<T>(axis, elements(part)?, elements_mut(out)?))
        })
    }

    /// Does a [`reduce_scatter`](Self::reduce_scatter) of values on the CUDA device that the kernel
    /// runs on.
    ///
    /// Blocks like `reduce_scatter`, and until the device has done all work that the kernel issued
    /// so far. With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group
    /// have called it.
    ///
    /// # Errors
    ///
    /// As `reduce_scatter`. Also if the kernel does not run on a CUDA device, `out` is read-only,
    /// or work on the device has failed.
    pub fn reduce_scatter_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<Part<'x>>,
        out: impl Into<Part<'y>>,
    ) -> Result<()> {
        self.between(
            ("reduce_scatter", axis),
            &values.into(),
            &out.into(),
            |cx, dtype, values, out| {
                with_type!(
                    dtype,
                    T => cx.reduce_scatter::<T>(axis, elements(values)?, elements_mut(out)?),
                    Err(no_reduction(dtype))
                )
            },
        )
    }

    /// Does an [`all_to_all`](Self::all_to_all) of values on the CUDA device that the kernel runs
    /// on.
    ///
    /// Blocks like `all_to_all`, and until the device has done all work that the kernel issued so
    /// far. With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group
    /// have called it.
    ///
    /// # Errors
    ///
    /// As `all_to_all`. Also if the kernel does not run on a CUDA device, `out` is read-only, or
    /// work on the device has failed.
    pub fn all_to_all_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<Part<'x>>,
        out: impl Into<Part<'y>>,
    ) -> Result<()> {
        self.between(("all_to_all", axis), &values.into(), &out.into(), |cx, dtype, values, out| {
            with_type!(dtype, T => cx.all_to_all::<T>(axis, elements(values)?, elements_mut(out)?))
        })
    }

    /// Does a [`permute`](Self::permute) of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks like `permute`, and until the device has done all work that the kernel issued so far.
    /// With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have
    /// called it.
    ///
    /// # Errors
    ///
    /// As `permute`. Also if the kernel does not run on a CUDA device, `out` is read-only, or work
    /// on the device has failed.
    pub fn permute_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<Part<'x>>,
        out: impl Into<Part<'y>>,
    ) -> Result<()> {
        self.between(("permute", axis), &values.into(), &out.into(), |cx, dtype, values, out| {
            with_type!(dtype, T => cx.permute::<T>(axis, elements(values)?, elements_mut(out)?))
        })
    }

    /// Does a [`broadcast`](Self::broadcast) of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks like `broadcast`; the root also waits until the device has done all work that the
    /// kernel issued so far. With NCCL ([`CudaCollectives::Nccl`]) it blocks only until all devices
    /// of the group have called it.
    ///
    /// # Errors
    ///
    /// As `broadcast`. Also if the kernel does not run on a CUDA device, the values are read-only,
    /// or work on the device has failed.
    pub fn broadcast_on_cuda<'x>(
        &mut self,
        axis: &str,
        root: usize,
        values: impl Into<Part<'x>>,
    ) -> Result<()> {
        let values = values.into();
        if self.is_next_joined() {
            return self.by_nccl(("broadcast", Some(root)), axis, &values, &values);
        }
        let (dtype, is_root) = (values.dtype(), self.axis_index(axis)? == root);
        self.in_place(
            &values,
            is_root,
            |cx, bytes| with_type!(dtype, T => cx.broadcast::<T>(axis, root, elements_mut(bytes)?)),
        )
    }

    /// Runs a host collective that updates device values in place. If `reads` is false, the old
    /// values are not copied to the host first.
    fn in_place(
        &mut self,
        values: &Part<'_>,
        reads: bool,
        collective: impl FnOnce(&mut Self, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.apart_from_device(|cx, OnCuda { cuda, turn }| {
            cuda.check_room(values)?;
            let mut staged = if reads { cuda.fetch(values)? } else { cuda.room(values)? };
            if reads && let Err(error) = turn.wait() {
                cuda.hold(staged);
                return Err(error.into());
            }
            if !reads {
                staged.fill(0);
            }
            turn.pause(|| collective(cx, &mut staged))?;
            // Meanwhile this thread may have run work of another device; make this one current
            // again.
            turn.begin()?;
            cuda.put(staged, values)
        })
    }

    /// Runs a host collective from one part to another.
    fn between(
        &mut self,
        (verb, axis): (&'static str, &str),
        from: &Part<'_>,
        to: &Part<'_>,
        collective: impl FnOnce(&mut Self, DType, &[u8], &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if from.dtype() != to.dtype() {
            return Err(Error::kernel(format!(
                "a collective of {} values has room for {} values",
                from.dtype(),
                to.dtype()
            )));
        }
        if self.is_next_joined() {
            return self.by_nccl((verb, None), axis, from, to);
        }
        self.apart_from_device(|cx, OnCuda { cuda, turn }| {
            cuda.check_room(to)?;
            let given = cuda.fetch(from)?;
            if let Err(error) = turn.wait() {
                cuda.hold(given);
                return Err(error.into());
            }
            let mut out = cuda.room(to)?;
            out.fill(0);
            turn.pause(|| collective(cx, from.dtype(), &given, &mut out))?;
            // Meanwhile this thread may have run work of another device; make this one current
            // again.
            turn.begin()?;
            cuda.put(out, to)
        })
    }

    /// Takes the device out of the context for a call and puts it back afterwards, even after a
    /// panic.
    pub(super) fn apart_from_device(
        &mut self,
        collective: impl FnOnce(&mut Self, &mut OnCuda<'a>) -> Result<()>,
    ) -> Result<()> {
        let Some(mut on_cuda) = self.on_cuda.take() else {
            return Err(Error::kernel(
                "a collective on values of a CUDA device was called in a kernel that does not run \
                 on one",
            ));
        };
        let result = catch_unwind(AssertUnwindSafe(|| collective(self, &mut on_cuda)));
        self.on_cuda = Some(on_cuda);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn no_reduction(dtype: DType) -> Error {
    Error::kernel(format!("there is no reduction of {dtype} values"))
}

fn elements<T: Element>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::checked::try_cast_slice(bytes).map_err(|_| ViewError::Invalid(T::DTYPE).into())
}

fn elements_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::checked::try_cast_slice_mut(bytes).map_err(|_| ViewError::Invalid(T::DTYPE).into())
}
