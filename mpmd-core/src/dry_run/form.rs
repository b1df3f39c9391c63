//! What an operation does, apart from the arrays that it does it to.

use serde::{Deserialize, Serialize};

use mpmd_layout::region::Region;
use mpmd_layout::sharding::Layout;
use mpmd_layout::topology::DeviceId;

/// What operations with one plan have in common: what runs where, what is made, and what goes
/// between devices.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Form {
    /// In words.
    pub what: String,
    /// What kind of operation.
    pub kind: Kind,
    /// The shards of each result.
    pub results: Vec<Vec<Shard>>,
    /// What goes from device to device, in an order in which it can.
    pub messages: Vec<Message>,
}

/// Kinds of operations.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// A kernel runs.
    Call {
        /// Its name.
        kernel: String,
        /// Where it runs, in the order of its mesh.
        devices: Vec<u32>,
    },
    /// An array moves to another sharding.
    Put,
    /// Devices fill their parts of a new array.
    Make,
    /// Arrays get new handles to what is there: cut, joined, in microbatches.
    Relabel,
    /// Processes compare something; nobody does anything for it.
    Compare,
    /// All processes get a value of one, and wait for it.
    Agree {
        /// Whose value.
        from: u32,
        /// Bytes of what stands for it in the plan.
        bytes: u64,
    },
}

/// One device's part of a result.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Shard {
    /// The device.
    pub device: u32,
    /// Its size.
    pub bytes: u64,
    /// Where it lies.
    pub memory: Memory,
}

/// Where a shard lies.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Memory {
    /// In new memory of its device.
    Own,
    /// In the host's memory, or in values that every process has: no device's budget.
    Host,
    /// In the memory of the operation's input with this number, on this device or another of its
    /// process.
    Of(u32),
}

/// Bytes that go from one device to another, of the same process or not.
///
/// What several devices of a process get crosses to it once, to one of them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Message {
    /// Who gives.
    pub from: u32,
    /// Who gets it.
    pub to: u32,
    /// How much.
    pub bytes: u64,
    /// 1 where the giver has it from the start; one more than the step of what it has to get first.
    /// Of collectives the number of the round, over all of them.
    pub step: u32,
}

impl Form {
    /// Every device that it names.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> + '_ {
        let runs = match &self.kind {
            Kind::Call { devices, .. } => &devices[..],
            _ => &[],
        };
        let shards = self.results.iter().flatten().map(|shard| shard.device);
        let messages = self.messages.iter().flat_map(|message| [message.from, message.to]);
        runs.iter().copied().chain(shards).chain(messages)
    }

    /// Every input whose memory a result shares.
    pub(super) fn inputs(&self) -> impl Iterator<Item = u32> + '_ {
        self.results.iter().flatten().filter_map(|shard| match shard.memory {
            Memory::Of(input) => Some(input),
            _ => None,
        })
    }

    /// Whether the operation runs on devices: takes its turn in their queues.
    pub fn computes_on(&self) -> Vec<u32> {
        match &self.kind {
            Kind::Call { devices, .. } => devices.clone(),
            Kind::Make => self.results.iter().flatten().map(|shard| shard.device).collect(),
            _ => Vec::new(),
        }
    }
}

/// The shards of an array of this layout, of elements of `item` bytes.
pub(crate) fn shards(
    layout: &Layout,
    item: usize,
    memory: impl Fn(DeviceId) -> Memory,
) -> Vec<Shard> {
    let shard = |(device, region): (DeviceId, &Region)| Shard {
        device: device.0,
        bytes: (region.elements() * item) as u64,
        memory: memory(device),
    };
    layout.iter().map(shard).collect()
}
