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

use super::context::{Context, CudaAccess};
use crate::error::ViewError;
use crate::error::{Error, Result};
use crate::kernel::cuda::CudaPart;
use mpmd_layout::aval::{DType, Element};
#[cfg(doc)]
use mpmd_layout::topology::CudaCollectives;

/// Evaluates `$call` with `$t` as the Rust type of the dtype `$dtype`; for booleans, evaluates
/// `$bool` instead.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $call:expr, $bool:expr) => {
        match $dtype {
            // Collectives of objects were refused with the signature.
            DType::Bool | DType::Object => $bool,
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
    /// Reduces values on the kernel's CUDA device over the devices along `axis`, in place, as
    /// [`all_reduce`](Self::all_reduce) does for host values.
    ///
    /// Blocks until every device of the group has called it or one failed. Also waits until this
    /// device has done all work that the kernel issued so far. With NCCL
    /// ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// If the call does not fit its declaration or the calls of the other devices, or one of them
    /// failed. If the kernel does not run on a CUDA device, the values are read-only, or work on
    /// the device has failed.
    pub fn all_reduce_on_cuda<'x>(
        &mut self,
        axis: &str,
        values: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let values = values.into();
        let dtype = values.dtype();

        if self.is_next_joined() {
            return self.by_nccl("all_reduce", axis, &values, &values);
        }

        self.apart_from_device(|cx, CudaAccess { cuda, turn }| {
            cuda.check_room(&values)?;
            let mut staged = cuda.fetch(&values)?;
            if let Err(error) = turn.wait() {
                cuda.hold(staged);
                return Err(error.into());
            }

            turn.pause(|| {
                with_type!(
                    dtype,
                    T => cx.all_reduce::<T>(axis, elements_mut(&mut staged)?),
                    Err(no_reduction(dtype))
                )
            })?;

            // Meanwhile this thread may have run work of another device; make this one current
            // again.
            turn.begin()?;
            cuda.put(staged, &values)
        })
    }

    /// Gathers parts on the kernel's CUDA device from all devices along `axis`: `out` gets them in
    /// the order of the devices, as with [`all_gather`](Self::all_gather) for host values.
    ///
    /// Blocks until every device of the group has called it or one failed. Also waits until this
    /// device has done all work that the kernel issued so far. With NCCL
    /// ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// If the call does not fit its declaration or the calls of the other devices, or one of them
    /// failed. If the kernel does not run on a CUDA device, `out` is read-only, or work on the
    /// device has failed.
    pub fn all_gather_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        part: impl Into<CudaPart<'x>>,
        out: impl Into<CudaPart<'y>>,
    ) -> Result<()> {
        self.between("all_gather", axis, &part.into(), &out.into(), |cx, dtype, part, out| {
            with_type!(dtype, T => cx.all_gather::<T>(axis, elements(part)?, elements_mut(out)?))
        })
    }

    /// Reduces values on the kernel's CUDA device over the devices along `axis`. `out` gets this
    /// device's share, as with [`reduce_scatter`](Self::reduce_scatter) for host values.
    ///
    /// Blocks until every device of the group has called it or one failed. Also waits until this
    /// device has done all work that the kernel issued so far. With NCCL
    /// ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// If the call does not fit its declaration or the calls of the other devices, or one of them
    /// failed. If the kernel does not run on a CUDA device, `out` is read-only, or work on the
    /// device has failed.
    pub fn reduce_scatter_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<CudaPart<'x>>,
        out: impl Into<CudaPart<'y>>,
    ) -> Result<()> {
        self.between(
            "reduce_scatter",
            axis,
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

    /// Sends each device along `axis` one block of values on the kernel's CUDA device. `out` gets
    /// one block from each, as with [`all_to_all`](Self::all_to_all) for host values.
    ///
    /// Blocks until every device of the group has called it or one failed. Also waits until this
    /// device has done all work that the kernel issued so far. With NCCL
    /// ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// If the call does not fit its declaration or the calls of the other devices, or one of them
    /// failed. If the kernel does not run on a CUDA device, `out` is read-only, or work on the
    /// device has failed.
    pub fn all_to_all_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<CudaPart<'x>>,
        out: impl Into<CudaPart<'y>>,
    ) -> Result<()> {
        self.between("all_to_all", axis, &values.into(), &out.into(), |cx, dtype, values, out| {
            with_type!(dtype, T => cx.all_to_all::<T>(axis, elements(values)?, elements_mut(out)?))
        })
    }

    /// Moves values between the CUDA devices of the kernel by the declared pairs along `axis`.
    /// `out` gets the values sent to this device, or zeros, as with [`permute`](Self::permute) for
    /// host values.
    ///
    /// Blocks until the device that sends to this one has called it or failed. Also waits until
    /// this device has done all work that the kernel issued so far. With NCCL
    /// ([`CudaCollectives::Nccl`]) it blocks only until all devices of the group have called it.
    ///
    /// # Errors
    ///
    /// If the call does not fit its declaration or the call of the sending device, or that device
    /// failed. If the kernel does not run on a CUDA device, `out` is read-only, or work on this
    /// device has failed.
    pub fn permute_on_cuda<'x, 'y>(
        &mut self,
        axis: &str,
        values: impl Into<CudaPart<'x>>,
        out: impl Into<CudaPart<'y>>,
    ) -> Result<()> {
        self.between("permute", axis, &values.into(), &out.into(), |cx, dtype, values, out| {
            with_type!(dtype, T => cx.permute::<T>(axis, elements(values)?, elements_mut(out)?))
        })
    }

    /// Runs the next collective on values of the device. Waits for a copy of `from` to the host,
    /// runs `collective` there, and issues the copy of its output to `to`. If the collective uses
    /// NCCL, runs it on the device instead. Fails if dtypes differ.
    fn between(
        &mut self,
        verb: &'static str,
        axis: &str,
        from: &CudaPart<'_>,
        to: &CudaPart<'_>,
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
            return self.by_nccl(verb, axis, from, to);
        }

        self.apart_from_device(|cx, CudaAccess { cuda, turn }| {
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

    /// Calls `collective` with the CUDA device taken out of the context. Puts the device back
    /// afterwards, even after a panic.
    pub(super) fn apart_from_device(
        &mut self,
        collective: impl FnOnce(&mut Self, &mut CudaAccess<'a>) -> Result<()>,
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
