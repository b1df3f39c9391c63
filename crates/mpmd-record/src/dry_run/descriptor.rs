//! Descriptions of operations, without their input arrays.

use std::fmt;

use serde::{Deserialize, Serialize};

use mpmd_layout::sharding::Layout;
use mpmd_layout::topology::DeviceId;

/// The properties that all operations of one `PutPlan` or `CallPlan` share: kernels and their
/// devices, results, and messages between devices.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct OpDescriptor {
    /// Description of the operation for messages.
    pub what: String,
    /// Kind of the operation.
    pub kind: OpKind,
    /// The shards of each result of the operation, indexed by result.
    pub results: Vec<Vec<ResultShard>>,
    /// Messages between devices, in an order in which they can be sent.
    pub messages: Vec<OpMessage>,
}

/// Kinds of operations.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OpKind {
    /// A kernel runs on devices.
    Call {
        /// The kernel's name.
        kernel: String,
        /// Ids of the devices that run the kernel, in the order of its mesh.
        devices: Vec<u32>,
    },
    /// An array moves to another sharding.
    Put,
    /// Devices fill their shards of a new array.
    ArrayFromFn,
    /// Existing shards get new array handles: arrays are cut, joined, or divided into microbatches.
    Relabel,
    /// The processes check that a text is equal on all of them. No process computes or waits for
    /// this.
    AssertSame,
    /// One process sends a value to all, and they wait for it.
    BroadcastValue {
        /// Number of the process that computes the value.
        from: u32,
        /// Encoded size in bytes of the value that the dry run uses as a substitute.
        bytes: u64,
    },
}

/// One device's part of a result.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct ResultShard {
    /// Id of the device that holds the shard.
    pub device: u32,
    /// Size of the shard in bytes.
    pub bytes: u64,
    /// The memory in which the shard is stored.
    pub memory: ShardMemory,
}

/// The memory in which a shard is stored.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ShardMemory {
    /// New memory of the shard's device. Host values that count toward the device's limit are
    /// included.
    Own,
    /// Host memory. No device's limit includes it.
    Host,
    /// Memory that the shard shares with the operation's input with this index. The input's shard
    /// is on the same device or on another device of its process.
    Of(u32),
}

/// A message from one device to another, in the same or another process.
///
/// Bytes that several devices of one process need are sent once, to one of these devices.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct OpMessage {
    /// Id of the source device.
    pub from: u32,
    /// Id of the target device.
    pub to: u32,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Dependency level of the message: 1 if the source device has the bytes from the start.
    /// Otherwise it is one more than the level of the message that brings the bytes there. For
    /// collectives it is the round, counted over all collectives of the operation.
    pub step: u32,
    /// Index of the moved array, if the operation moves several arrays. 0 for collectives.
    #[serde(default, skip_serializing_if = "is_first")]
    pub leaf: u32,
}

/// True for the default leaf index 0, which files omit.
fn is_first(leaf: &u32) -> bool {
    *leaf == 0
}

impl OpDescriptor {
    /// Describes an operation without messages between devices.
    #[doc(hidden)]
    pub fn local(what: &impl fmt::Display, kind: OpKind, results: Vec<Vec<ResultShard>>) -> Self {
        Self {
            what: what.to_string(),
            kind,
            results,
            messages: Vec::new(),
        }
    }

    /// Returns the ids of all devices in the descriptor, possibly with repeats.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> + '_ {
        let runs = match &self.kind {
            OpKind::Call { devices, .. } => &devices[..],
            _ => &[],
        };
        let shards = self.results.iter().flatten().map(|shard| shard.device);
        let messages = self
            .messages
            .iter()
            .flat_map(|message| [message.from, message.to]);
        runs.iter().copied().chain(shards).chain(messages)
    }

    /// Returns the index of every input that shares memory with a result, possibly with repeats.
    pub(super) fn inputs(&self) -> impl Iterator<Item = u32> + '_ {
        self.results
            .iter()
            .flatten()
            .filter_map(|shard| match shard.memory {
                ShardMemory::Of(input) => Some(input),
                _ => None,
            })
    }

    /// Returns the ids of the devices that run the operation in their queues. Empty for operations
    /// without work on devices.
    pub fn computes_on(&self) -> Vec<u32> {
        match &self.kind {
            OpKind::Call { devices, .. } => devices.clone(),
            OpKind::ArrayFromFn => self
                .results
                .iter()
                .flatten()
                .map(|shard| shard.device)
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// Returns the shards of an array with layout `layout` and `item` bytes per element. `memory` gives
/// the memory in which a device's shard is stored.
#[doc(hidden)]
pub fn shards(
    layout: &Layout,
    item: usize,
    memory: impl Fn(DeviceId) -> ShardMemory,
) -> Vec<ResultShard> {
    layout
        .iter()
        .map(|(device, region)| ResultShard {
            device: device.0,
            bytes: (region.elements() * item) as u64,
            memory: memory(device),
        })
        .collect()
}
