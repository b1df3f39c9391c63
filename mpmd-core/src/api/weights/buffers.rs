//! Arrays of buffers that a process has: the published bits.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceId;
use mpmd_memory::SharedBuffer;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

use crate::api::program::{IssuedOp, NewOp, OpPart, Program};
use crate::error::Result;
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed};
use crate::exec::{AsyncBuffer, Rolling};

/// The published values of a shard on a device of this process.
pub(super) struct DeviceBuffer {
    pub(super) device: DeviceId,
    pub(super) buffer: SharedBuffer,
}

impl Program {
    /// Creates an array from one buffer for each of its shards on this process, without a copy.
    /// Every process must call it with the buffers of its own devices.
    pub(super) fn array_of_buffers(
        &mut self,
        aval: ShapedArray,
        sharding: Sharding,
        buffers: Vec<DeviceBuffer>,
        at: &'static Location<'static>,
    ) -> Result<MpmdArray> {
        let layout = sharding.layout(aval.shape())?;
        let what = Arc::new(OfBuffers {
            aval: aval.clone(),
            sharding: sharding.clone(),
        });

        let descriptor = || {
            let results = vec![dry_run::shards(&layout, aval.dtype().size(), |_| {
                ShardMemory::Host
            })];
            OpDescriptor::local(&what, OpKind::ArrayFromFn, results)
        };
        let word = Rolling::default()
            .mix_bytes(aval.to_string().as_bytes())
            .word();
        let IssuedOp { op, .. } = self.issue_op(
            [0x0fb5, sharding.fingerprint(), word],
            NewOp {
                part: if buffers.is_empty() {
                    OpPart::Idle
                } else {
                    OpPart::Work(0)
                },
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );

        let shard = |DeviceBuffer { device, buffer }| LocalShard {
            device,
            slot: AsyncBuffer::filled(buffer),
        };
        let shards: Vec<LocalShard> = buffers.into_iter().map(shard).collect();
        let made = Made::new(aval, sharding, layout, what, self.runtime.clone());
        Ok(Placed::array(
            Arc::new(made),
            shards,
            Origin { op, leaf: 0, at },
        ))
    }
}

/// Describes the creation of an array from buffers, for messages.
struct OfBuffers {
    aval: ShapedArray,
    sharding: Sharding,
}

impl fmt::Display for OfBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "published {} as {}", self.aval, self.sharding)
    }
}
