//! The memory use of a dry run on each device: in the order of issue, and in simulated time.

use std::collections::HashMap;

use mpmd_memory::Pool;

use super::flow::{Computed, DryRunFlow};
use super::{Array, DryRun, OpKind, ResultShard, ShardKey, ShardMemory};

/// The memory use of a dry run's devices.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DryRunMemory {
    /// Memory use of each device, indexed by device id.
    pub devices: Vec<DeviceMemoryUse>,
    /// Peak memory use of each process, indexed by process: the peak in simulated time of the sum
    /// over its devices.
    pub processes: Vec<MemoryPeak>,
}

/// The memory use of one device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DeviceMemoryUse {
    /// Id of the device.
    pub device: u32,
    /// The process that owns the device.
    pub process: u32,
    /// Peak memory use if each operation runs at the moment when it is issued.
    pub in_order: MemoryPeak,
    /// Peak memory use in simulated time. Devices compute independently, and all kernels take
    /// equally long. The result of a move takes memory once its source is ready and the program has
    /// issued the move. The program issues it after its earlier waits.
    pub in_time: MemoryPeak,
    /// Bytes in use on the device when the dry run ends.
    pub left: u64,
}

/// The largest amount of memory in use at one time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct MemoryPeak {
    /// Bytes in use at the peak, on the device or on all devices of the process. Sizes are rounded
    /// up as memory pools do.
    pub bytes: u64,
    /// Number of the operation whose result causes the peak.
    pub operation: u64,
}

/// A block of device memory that one or more arrays share.
struct MemoryBlock {
    device: u32,
    bytes: u64,
    operation: u64,
    /// Simulated time at which the block is allocated.
    start: u64,
    /// Simulated time at which the last of the readers known so far ends.
    read_until: u64,
    /// Number of the last operation known so far that reads the block.
    read_by: u64,
    /// Number of live arrays in the block.
    arrays: u32,
    /// Number of the last operation that was issued before an array in the block was dropped. Grows
    /// with further drops.
    let_go_after: u64,
}

impl DryRun {
    /// Returns the peak memory use of each device and process, with sizes rounded as memory pools
    /// do. A shard counts from the start of the operation that makes its array. It counts until the
    /// array's last handle is dropped and its last reader has ended.
    ///
    /// `dry_run_flow` must be this dry run's [`flow`](Self::flow).
    ///
    /// A process that receives an array counts it itself. (With zero-copy transfers in shared
    /// memory, the sender holds it instead until the receiver has finished.) Buffers for packing
    /// and forwarding, and memory that kernels keep, are not included.
    pub fn memory(&self, dry_run_flow: &DryRunFlow) -> DryRunMemory {
        let times = WorkTimes::of(self, dry_run_flow);
        let mut blocks = MemoryBlocks {
            dry_run: self,
            blocks: Vec::new(),
            of: HashMap::new(),
        };

        let mut drops = self.drops.iter().peekable();
        for operation in 1..=self.operations.len() as u64 {
            while let Some(dropped) = drops.next_if(|dropped| dropped.after < operation) {
                blocks.let_go(dropped.array, dropped.after);
            }
            blocks.operation(operation, &times);
        }
        drops.for_each(|dropped| blocks.let_go(dropped.array, dropped.after));
        blocks.sums()
    }
}

/// The simulated times of all work. A kernel takes one unit of time, all other work none.
#[derive(Default)]
struct WorkTimes {
    runs: HashMap<WorkPlace, RunTime>,
    /// Time at which an operation's last transfer leaves a process, by operation and sending
    /// process.
    sends: HashMap<WorkPlace, u64>,
    /// Time at which an operation's first transfer reaches a process, by operation and receiving
    /// process.
    comes: HashMap<WorkPlace, u64>,
    /// The waits of each process's program in order, by process.
    waits: HashMap<u32, Vec<WaitEnd>>,
}

/// The key of an operation's work on one device or in one process.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
struct WorkPlace {
    operation: u64,
    /// Id of the device or process.
    place: u32,
}

/// The start and end of an operation's work on a device, in simulated time.
#[derive(Clone, Copy)]
struct RunTime {
    start: u64,
    end: u64,
}

/// The end of a program's wait, in simulated time.
#[derive(Clone, Copy)]
struct WaitEnd {
    /// Number of the last operation that was issued before the wait.
    after: u64,
    end: u64,
}

/// The allocation or release of a block.
struct BlockEvent<'b> {
    /// Time of the event: simulated time, or a position in the order of operations.
    at: u64,
    allocates: bool,
    block: &'b MemoryBlock,
}

impl<'b> BlockEvent<'b> {
    fn allocation(at: u64, block: &'b MemoryBlock) -> Self {
        Self {
            at,
            allocates: true,
            block,
        }
    }

    fn release(at: u64, block: &'b MemoryBlock) -> Self {
        Self {
            at,
            allocates: false,
            block,
        }
    }

    /// Returns the sort key of the event.
    fn rank(&self) -> (u64, bool, u64) {
        (self.at, self.allocates, self.block.operation)
    }
}

impl WorkTimes {
    fn of(dry_run: &DryRun, dry_run_flow: &DryRunFlow) -> Self {
        let DryRunFlow {
            flow,
            nodes,
            transfers,
        } = dry_run_flow;
        let mut ends: Vec<u64> = Vec::with_capacity(flow.nodes.len());
        let mut free = vec![0; flow.lanes.len()];
        let mut times = Self::default();

        let sent = |ends: &[u64], transfer: u32| {
            let after = flow.transfers[transfer as usize].after;
            ends.get(after as usize).copied().unwrap_or_default()
        };

        for (number, (node, what)) in (0..).zip(flow.nodes.iter().zip(nodes)) {
            let needs = flow
                .needs_of(number)
                .iter()
                .map(|need| ends[*need as usize]);
            let takes = flow
                .takes_of(number)
                .iter()
                .map(|transfer| sent(&ends, *transfer));

            let start = needs
                .chain(takes)
                .chain([free[node.lane as usize]])
                .max()
                .unwrap_or_default();
            let end = start + u64::from(what.takes_time());
            free[node.lane as usize] = end;
            ends.push(end);

            let waited_after = match *what {
                Computed::Run { operation } => {
                    let place = WorkPlace {
                        operation,
                        place: node.lane,
                    };
                    times.runs.insert(place, RunTime { start, end });
                    None
                }
                Computed::Wait { read } => dry_run.reads.get(read).map(|read| read.after),
                Computed::BroadcastValue { operation } => Some(operation),
                Computed::Arrive { .. } | Computed::Join { .. } => None,
            };
            if let Some(after) = waited_after {
                let process = flow.lanes[node.lane as usize];
                let wait = WaitEnd { after, end };
                times.waits.entry(process).or_default().push(wait);
            }
        }

        for (number, (transfer, what)) in flow.transfers.iter().zip(transfers).enumerate() {
            let at = sent(&ends, number as u32);
            let left = times
                .sends
                .entry(WorkPlace {
                    operation: what.operation,
                    place: transfer.from,
                })
                .or_default();
            *left = at.max(*left);
            let come = times
                .comes
                .entry(WorkPlace {
                    operation: what.operation,
                    place: transfer.to,
                })
                .or_insert(at);
            *come = at.min(*come);
        }
        times
    }

    /// Returns the simulated time at which the program of a process can issue an operation: the end
    /// of the last wait before it.
    fn issued_at(&self, operation: u64, process: u32) -> u64 {
        let waits = self.waits.get(&process).map_or(&[][..], Vec::as_slice);
        let before = waits.partition_point(|wait| wait.after < operation);
        before.checked_sub(1).map_or(0, |last| waits[last].end)
    }
}

struct MemoryBlocks<'a> {
    dry_run: &'a DryRun,
    blocks: Vec<MemoryBlock>,
    /// Index into `blocks` for each live shard. Shards in host memory have no block.
    of: HashMap<ShardKey, usize>,
}

impl MemoryBlocks<'_> {
    fn operation(&mut self, operation: u64, times: &WorkTimes) {
        let dry_run = self.dry_run;
        let Some(descriptor) = dry_run.descriptor_of(operation) else {
            return;
        };
        let takes = &dry_run.operations[operation as usize - 1].takes;
        let is_put = matches!(descriptor.kind, OpKind::Put);

        for (result, shards) in descriptor.results.iter().enumerate() {
            let array = Array {
                operation,
                result: result as u32,
            };
            for shard in shards {
                let block = match shard.memory {
                    ShardMemory::Own => {
                        self.allocate(operation, shard, times);
                        Some(self.blocks.len() - 1)
                    }
                    ShardMemory::Host => None,
                    ShardMemory::Of(input) => takes
                        .get(input as usize)
                        .and_then(|taken| self.block_near(taken.array?, shard.device)),
                };

                if let Some(block) = block {
                    self.blocks[block].arrays += 1;
                    self.of.insert(array.on(shard.device), block);
                }
            }
        }

        for taken in takes {
            let Some(array) = taken.array else { continue };
            for device in 0..dry_run.devices.len() as u32 {
                let Some(block) = self.of.get(&array.on(device)).copied() else {
                    continue;
                };

                let process = dry_run.devices[device as usize];
                let until = match is_put {
                    true => {
                        let place = WorkPlace {
                            operation,
                            place: process,
                        };
                        times.sends.get(&place).copied()
                    }
                    false => {
                        let place = WorkPlace {
                            operation,
                            place: device,
                        };
                        times.runs.get(&place).map(|run| run.end)
                    }
                };

                let block = &mut self.blocks[block];
                block.read_by = operation;
                block.read_until = block.read_until.max(until.unwrap_or_default());
            }

            if taken.donated {
                self.let_go(array, operation);
            }
        }
    }

    /// Adds the block of a result's shard that gets new memory.
    fn allocate(&mut self, operation: u64, shard: &ResultShard, times: &WorkTimes) {
        let process = self.dry_run.devices[shard.device as usize];
        let takes = &self.dry_run.operations[operation as usize - 1].takes;
        let on_device = WorkPlace {
            operation,
            place: shard.device,
        };
        let in_process = WorkPlace {
            operation,
            place: process,
        };

        let run = times.runs.get(&on_device).copied();
        let come = times.comes.get(&in_process).copied();
        let start = run
            .map(|run| run.start)
            .or(come)
            .unwrap_or_else(|| self.known_at(takes, process));
        let start = start.max(times.issued_at(operation, process));

        self.blocks.push(MemoryBlock {
            device: shard.device,
            bytes: Pool::rounded(shard.bytes as usize),
            operation,
            start,
            read_until: run.map_or(start, |run| run.end),
            read_by: operation,
            arrays: 0,
            let_go_after: 0,
        });
    }

    /// Returns the simulated time at which an operation's inputs on `process` are ready. For
    /// results that no kernel and no transfer produces.
    fn known_at(&self, takes: &[super::TakenArray], process: u32) -> u64 {
        let arrays = takes.iter().filter_map(|taken| taken.array);
        let devices = |array: Array| {
            (0..self.dry_run.devices.len() as u32)
                .filter(move |device| self.dry_run.devices[*device as usize] == process)
                .filter_map(move |device| self.of.get(&array.on(device)))
        };
        arrays
            .flat_map(devices)
            .map(|block| self.blocks[*block].start)
            .max()
            .unwrap_or_default()
    }

    /// Returns the index of an array's block on a device, or else on another device of the same
    /// process. `None` if neither exists.
    fn block_near(&self, array: Array, device: u32) -> Option<usize> {
        let process = self.dry_run.devices[device as usize];
        let others = (0..self.dry_run.devices.len() as u32)
            .filter(|other| self.dry_run.devices[*other as usize] == process);
        std::iter::once(device)
            .chain(others)
            .find_map(|device| self.of.get(&array.on(device)).copied())
    }

    /// Removes an array from its blocks after its last handle was dropped or it was donated.
    /// `after` is the number of the last operation issued before that.
    fn let_go(&mut self, array: Array, after: u64) {
        for device in 0..self.dry_run.devices.len() as u32 {
            let Some(block) = self.of.remove(&array.on(device)) else {
                continue;
            };
            let block = &mut self.blocks[block];
            block.arrays -= 1;
            block.let_go_after = block.let_go_after.max(after);
        }
    }

    fn sums(&self) -> DryRunMemory {
        let Self {
            dry_run, blocks, ..
        } = self;

        let count = dry_run.devices.len();
        let processes = dry_run.processes as usize;
        let mut in_order: Vec<BlockEvent<'_>> = Vec::new();
        let mut in_time: Vec<BlockEvent<'_>> = Vec::new();
        let mut devices: Vec<DeviceMemoryUse> = (0..count)
            .map(|device| DeviceMemoryUse {
                device: device as u32,
                process: dry_run.devices[device],
                ..DeviceMemoryUse::default()
            })
            .collect();

        for block in blocks {
            in_order.push(BlockEvent::allocation(2 * block.operation, block));
            in_time.push(BlockEvent::allocation(2 * block.start + 1, block));
            if block.arrays > 0 {
                devices[block.device as usize].left += block.bytes;
                continue;
            }

            let last = block.let_go_after.max(block.read_by);
            in_order.push(BlockEvent::release(2 * last + 1, block));
            // At equal times, releases come before allocations. A block lives for at least one
            // unit.
            let end = block.read_until.max(block.start + 1);
            in_time.push(BlockEvent::release(2 * end, block));
        }

        in_order.sort_by_key(BlockEvent::rank);
        in_time.sort_by_key(BlockEvent::rank);
        let by_device = |block: &MemoryBlock| block.device as usize;
        let by_process = |block: &MemoryBlock| dry_run.devices[block.device as usize] as usize;

        for (device, peak) in peaks(&in_order, count, by_device).into_iter().enumerate() {
            devices[device].in_order = peak;
        }
        for (device, peak) in peaks(&in_time, count, by_device).into_iter().enumerate() {
            devices[device].in_time = peak;
        }

        DryRunMemory {
            devices,
            processes: peaks(&in_time, processes, by_process),
        }
    }
}

/// Returns the peak memory use of each owner, a device or a process. `events` are (position, true
/// for an allocation, block), in order. The closure maps a block to its owner.
fn peaks(
    events: &[BlockEvent<'_>],
    count: usize,
    whose: impl Fn(&MemoryBlock) -> usize,
) -> Vec<MemoryPeak> {
    let mut live = vec![0u64; count];
    let mut peaks = vec![MemoryPeak::default(); count];

    for BlockEvent {
        allocates, block, ..
    } in events
    {
        let who = whose(block);
        if *allocates {
            live[who] += block.bytes;
            if live[who] > peaks[who].bytes {
                peaks[who] = MemoryPeak {
                    bytes: live[who],
                    operation: block.operation,
                };
            }
        } else {
            live[who] -= block.bytes;
        }
    }
    peaks
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;
    use super::super::{Dropped, OpMessage};
    use super::*;

    #[test]
    fn arrays_count_until_dropped_and_read() {
        let dry_run = small();
        let memory = dry_run.memory(&dry_run.flow());
        let one = Pool::rounded(64);
        let of = |device: usize| {
            let DeviceMemoryUse {
                in_order,
                in_time,
                left,
                ..
            } = memory.devices[device];
            (in_order.bytes / one, in_time.bytes / one, left / one)
        };
        // The first array is never dropped. The second device holds the moved array and the
        // kernel's result, twice. In simulated time both moves happen at once, since no dependency
        // delays them.
        assert_eq!(of(0), (1, 1, 1));
        assert_eq!(of(1), (2, 3, 0));
        assert_eq!(memory.devices[1].in_order.operation, 3);
        assert_eq!(memory.processes[1].bytes, 3 * one);
    }

    #[test]
    fn donated_memory_counts_once() {
        let mut dry_run = small();
        dry_run.drops.clear();
        let one = Pool::rounded(64);
        let peak =
            |dry_run: &DryRun| dry_run.memory(&dry_run.flow()).devices[1].in_order.bytes / one;
        assert_eq!(peak(&dry_run), 4);
        // The kernel writes its input in place.
        dry_run.descriptors[2].results[0][0].memory = ShardMemory::Of(0);
        for call in [2, 4] {
            dry_run.operations[call].takes[0].donated = true;
        }
        assert_eq!(peak(&dry_run), 2);
        let last = Array {
            operation: 3,
            result: 0,
        };
        dry_run.drops.push(Dropped {
            array: last,
            after: 3,
        });
        assert_eq!(
            peak(&dry_run),
            1,
            "a block ends with the array that reuses it"
        );
    }

    #[test]
    fn memory_shared_by_two_devices_counts_once() {
        let mut dry_run = small();
        dry_run.devices = vec![0, 0];
        dry_run.descriptors[1].results[0][0].memory = ShardMemory::Of(0);
        dry_run.descriptors[1].messages = vec![OpMessage {
            from: 0,
            to: 1,
            bytes: 64,
            step: 1,
            leaf: 0,
        }];
        let memory = dry_run.memory(&dry_run.flow());
        assert_eq!(memory.devices[0].in_order.bytes, Pool::rounded(64));
        assert_eq!(
            memory.devices[1].in_order.bytes,
            Pool::rounded(64),
            "its kernel's result"
        );
    }
}
