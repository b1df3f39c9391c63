//! Collectives of values in the memory of CUDA devices, by way of the host's, or by NCCL
//! (`collectives_nccl.rs`).
//!
//! By way of the host they are those of [`Context`] for the host's values: declared, paired and
//! reduced in the same way, to the same bits, also among devices of different kinds. Here alone a
//! device's thread waits for its device: for the values to be on the host. What the kernel issues
//! after that waits on the device for what the others gave.

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
    /// As [`all_reduce`](Self::all_reduce), of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks until the device has done what the kernel issued so far, and as the other does; by
    /// NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, the values are only read, or work on
    /// the device has failed.
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
            with_type!(dtype, T => cx.all_reduce::<T>(axis, elements_mut(bytes)?), Err(no_reduction(dtype)))
        })
    }

    /// As [`all_gather`](Self::all_gather), of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks until the device has done what the kernel issued so far, and as the other does; by
    /// NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, `out` is only read, or work on the
    /// device has failed.
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

    /// As [`reduce_scatter`](Self::reduce_scatter), of values on the CUDA device that the kernel
    /// runs on.
    ///
    /// Blocks until the device has done what the kernel issued so far, and as the other does; by
    /// NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, `out` is only read, or work on the
    /// device has failed.
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

    /// As [`all_to_all`](Self::all_to_all), of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks until the device has done what the kernel issued so far, and as the other does; by
    /// NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, `out` is only read, or work on the
    /// device has failed.
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

    /// As [`permute`](Self::permute), of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks until the device has done what the kernel issued so far, and as the other does; by
    /// NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, `out` is only read, or work on the
    /// device has failed.
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

    /// As [`broadcast`](Self::broadcast), of values on the CUDA device that the kernel runs on.
    ///
    /// Blocks as the other does, on the root until the device has done what the kernel issued so
    /// far; by NCCL ([`CudaCollectives::Nccl`]) only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// As the other; where the kernel runs on no CUDA device, the values are only read, or work on
    /// the device has failed.
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

    /// A collective that changes values where they are; only where it `reads` them they are copied
    /// to the host first.
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
            // Others' work may have come to this thread meanwhile, and their device.
            turn.begin()?;
            cuda.put(staged, values)
        })
    }

    /// A collective that makes values of others.
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
            // Others' work may have come to this thread meanwhile, and their device.
            turn.begin()?;
            cuda.put(out, to)
        })
    }

    /// Has the device apart from the rest of the context, and gives it back whatever happens.
    pub(super) fn apart_from_device(
        &mut self,
        collective: impl FnOnce(&mut Self, &mut OnCuda<'a>) -> Result<()>,
    ) -> Result<()> {
        let Some(mut on_cuda) = self.on_cuda.take() else {
            return Err(Error::kernel(
                "a collective of a CUDA device's values, in a kernel that runs on none",
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
