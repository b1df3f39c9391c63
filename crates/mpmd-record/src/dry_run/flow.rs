//! Conversion of a dry run to a [`Flow`], the input of proofs and simulations.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Array, DryRun, OpDescriptor, OpKind, Read, ShardKey, ShardMemory, TakenArray};
use mpmd_schedule::flow::{Flow, Node, Post, Transfer};

/// A [`Flow`] of a whole program, with the meaning of its nodes and transfers.
///
/// A lane runs its nodes one after the other. The first lanes are the job's devices. Each process
/// may have up to two more lanes. One is for its program's waits, for values of other processes and
/// for arrays that it reads. The other is for nodes that combine data to send.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct DryRunFlow {
    /// The nodes, the order on each lane, and the transfers between processes. The tag of a node or
    /// transfer is its index in `nodes` or `transfers`.
    pub flow: Flow,
    /// Meaning of each node, indexed by the node's number, which is also its tag.
    pub nodes: Vec<Computed>,
    /// Meaning of each transfer, indexed by the transfer's number, which is also its tag.
    pub transfers: Vec<SentMessages>,
}

/// The meaning of a node in a dry run's flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Computed {
    /// A device's part of an operation: it runs a kernel or fills its shard of an array.
    Run {
        /// Number of the operation that the device runs.
        operation: u64,
    },
    /// A device reaches a kernel with collectives, and its data for the collectives is ready. Takes
    /// no time.
    Arrive {
        /// Number of the operation with the collectives.
        operation: u64,
    },
    /// All data to be sent together is ready: that of several nodes, or data that one or more
    /// transfers brought. Takes no time.
    Join {
        /// Number of the operation that sends the data.
        operation: u64,
    },
    /// The program of a process sends or receives a value by
    /// `Program::broadcast_value`. Takes no time.
    BroadcastValue {
        /// Number of the `broadcast_value` operation.
        operation: u64,
    },
    /// The program of a process waits for an array. Takes no time.
    Wait {
        /// Index of the wait in [`DryRun::reads`].
        read: usize,
    },
}

/// The meaning of a transfer in a dry run's flow. It has all pieces of one step of an operation,
/// from one process to another, that are ready at the same time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SentMessages {
    /// Number of the operation that moves the data.
    pub operation: u64,
    /// The number of pieces in the transfer.
    pub messages: u32,
}

/// The nodes and transfers that must be complete before a piece of work on a process can begin.
#[derive(Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
struct ReadyAfter {
    nodes: BTreeSet<u32>,
    transfers: BTreeSet<u32>,
}

impl ReadyAfter {
    fn with(&mut self, other: &Self) {
        self.nodes.extend(&other.nodes);
        self.transfers.extend(&other.transfers);
    }
}

/// The messages collected so far for one transfer between two processes.
#[derive(Default)]
struct MessageBundle {
    bytes: u64,
    messages: u32,
    after: ReadyAfter,
}

/// The sending and the receiving process of a transfer.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct ProcessPair {
    from: u32,
    to: u32,
}

/// A leaf of an operation, and the two processes between which it moves.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct LeafMove {
    between: ProcessPair,
    leaf: u32,
}

/// The messages that move a leaf between two processes, and the devices that receive them.
#[derive(Default)]
struct MovedLeaf {
    bundle: MessageBundle,
    devices: BTreeSet<u32>,
}

struct DryRunFlowBuilder<'a> {
    dry_run: &'a DryRun,
    made: DryRunFlow,
    /// The nodes and transfers after which each shard is ready.
    ready: HashMap<ShardKey, ReadyAfter>,
    /// Lane of the program's waits, by process. `copy_engines` has the lanes of nodes that combine
    /// data to send.
    programs: BTreeMap<u32, u32>,
    copy_engines: BTreeMap<u32, u32>,
    /// The node of each program's last wait, indexed by process; `None` before the first wait.
    waited: Vec<Option<u32>>,
}

impl DryRun {
    /// Returns the flow of all operations of the dry run: nodes, their order, and transfers.
    ///
    /// Kernel calls and fills of new arrays are nodes, one on each device. All pieces of an
    /// operation that go from one process to another in one step are one transfer. A kernel with
    /// collectives between processes has two nodes on each device. Between them, each participating
    /// process receives the data of the others. If a process forwards data or combines data from
    /// several sources, the send has a node that takes no time. Processes post sends and receives
    /// in the order of operations, and within an operation in one order that all share.
    pub fn flow(&self) -> DryRunFlow {
        let flow = Flow {
            lanes: self.devices.clone(),
            processes: self.processes,
            posts: vec![Vec::new(); self.processes as usize],
            ..Flow::default()
        };

        let mut builder = DryRunFlowBuilder {
            dry_run: self,
            made: DryRunFlow {
                flow,
                ..DryRunFlow::default()
            },
            ready: HashMap::new(),
            programs: BTreeMap::new(),
            copy_engines: BTreeMap::new(),
            waited: vec![None; self.processes as usize],
        };

        let mut reads = self.reads.iter().enumerate().peekable();
        for operation in 1..=self.operations.len() as u64 {
            while let Some((place, read)) = reads.next_if(|(_, read)| read.after < operation) {
                builder.wait(place, read);
            }
            builder.operation(operation);
        }
        reads.for_each(|(place, read)| builder.wait(place, read));
        builder.made
    }
}

impl DryRunFlowBuilder<'_> {
    fn operation(&mut self, operation: u64) {
        let dry_run = self.dry_run;
        let Some(descriptor) = dry_run.descriptor_of(operation) else {
            return;
        };
        let takes = &dry_run.operations[operation as usize - 1].takes;
        match &descriptor.kind {
            OpKind::Call { .. } | OpKind::ArrayFromFn => self.run(operation, descriptor, takes),
            OpKind::Put => self.put(operation, descriptor, takes),
            OpKind::Relabel => self.relabel(operation, descriptor, takes),
            OpKind::BroadcastValue { from, bytes } => self.agree(operation, *from, *bytes),
            OpKind::AssertSame => {}
        }
    }

    fn process_of(&self, device: u32) -> u32 {
        self.dry_run.devices[device as usize]
    }

    /// Returns the nodes and transfers after which an operation's inputs are ready on a device.
    fn inputs(&self, takes: &[TakenArray], device: u32) -> ReadyAfter {
        let mut ready = ReadyAfter::default();
        for array in takes.iter().filter_map(|taken| taken.array) {
            if let Some(known) = self.ready.get(&array.on(device)) {
                ready.with(known);
            }
        }
        ready
    }

    fn run(&mut self, operation: u64, descriptor: &OpDescriptor, takes: &[TakenArray]) {
        let devices = descriptor.computes_on();
        let crosses = descriptor
            .messages
            .iter()
            .filter(|message| self.process_of(message.from) != self.process_of(message.to));
        let mut bundles: BTreeMap<ProcessPair, MessageBundle> = BTreeMap::new();
        for message in crosses {
            let between = ProcessPair {
                from: self.process_of(message.from),
                to: self.process_of(message.to),
            };
            let bundle = bundles.entry(between).or_default();
            bundle.bytes += message.bytes;
            bundle.messages += 1;
        }

        let mut arrived: BTreeMap<u32, ReadyAfter> = BTreeMap::new();
        if !bundles.is_empty() {
            for device in &devices {
                let ready = self.inputs(takes, *device);
                let process = self.process_of(*device);
                let node = self.node(*device, process, ready, Computed::Arrive { operation });
                arrived.entry(process).or_default().nodes.insert(node);
            }
        }

        let mut gets: BTreeMap<u32, ReadyAfter> = BTreeMap::new();
        for (ProcessPair { from, to }, mut bundle) in bundles {
            bundle.after = arrived.get(&from).cloned().unwrap_or_default();
            let transfer = self.transfer(operation, from, to, bundle);
            gets.entry(to).or_default().transfers.insert(transfer);
        }

        for device in devices {
            let process = self.process_of(device);
            // The inputs were already dependencies of the node that arrives.
            let mut ready = match gets.is_empty() {
                true => self.inputs(takes, device),
                false => ReadyAfter::default(),
            };
            [arrived.get(&process), gets.get(&process)]
                .into_iter()
                .flatten()
                .for_each(|more| ready.with(more));

            let node = self.node(device, process, ready, Computed::Run { operation });
            for (result, shards) in descriptor.results.iter().enumerate() {
                if shards.iter().any(|shard| shard.device == device) {
                    let made = ReadyAfter {
                        nodes: BTreeSet::from([node]),
                        transfers: BTreeSet::new(),
                    };
                    let array = Array {
                        operation,
                        result: result as u32,
                    };
                    self.ready.insert(array.on(device), made);
                }
            }
        }
    }

    fn put(&mut self, operation: u64, descriptor: &OpDescriptor, takes: &[TakenArray]) {
        let at_source = |this: &Self, leaf: u32, device: u32| {
            let source = takes.get(leaf as usize).and_then(|taken| taken.array);
            source
                .and_then(|array| this.ready.get(&array.on(device)).cloned())
                .unwrap_or_default()
        };
        let array = |leaf: u32| Array {
            operation,
            result: leaf,
        };
        // A device keeps or copies the parts that it already has.
        for (leaf, shards) in (0..).zip(&descriptor.results) {
            for shard in shards {
                let own = at_source(self, leaf, shard.device);
                self.ready.insert(array(leaf).on(shard.device), own);
            }
        }

        let mut messages = &descriptor.messages[..];
        while let Some(step) = messages.first().map(|message| message.step) {
            let (now, later) =
                messages.split_at(messages.partition_point(|message| message.step <= step));
            messages = later;

            let mut leaves: BTreeMap<LeafMove, MovedLeaf> = BTreeMap::new();
            let mut within: Vec<(ShardKey, ReadyAfter)> = Vec::new();
            for message in now {
                let from = self.process_of(message.from);
                let to = self.process_of(message.to);
                let has = match step {
                    1 => at_source(self, message.leaf, message.from),
                    _ => {
                        let source = array(message.leaf).on(message.from);
                        self.ready.get(&source).cloned().unwrap_or_default()
                    }
                };
                if from == to {
                    within.push((array(message.leaf).on(message.to), has));
                    continue;
                }

                let between = ProcessPair { from, to };
                let leaf = message.leaf;
                let moved = leaves.entry(LeafMove { between, leaf }).or_default();
                moved.bundle.bytes += message.bytes;
                moved.bundle.messages += 1;
                moved.bundle.after.with(&has);
                moved.devices.insert(message.to);
            }

            self.send_together(operation, leaves);
            for (target, has) in within {
                self.ready.entry(target).or_default().with(&has);
            }
        }
    }

    /// Adds the transfers of an operation's leaves. Leaves that are ready at the same time share a
    /// transfer.
    fn send_together(&mut self, operation: u64, leaves: BTreeMap<LeafMove, MovedLeaf>) {
        let mut together: BTreeMap<(ProcessPair, ReadyAfter), (MessageBundle, Vec<ShardKey>)> =
            BTreeMap::new();
        for (LeafMove { between, leaf }, MovedLeaf { bundle, devices }) in leaves {
            let array = Array {
                operation,
                result: leaf,
            };
            let (all, targets) = together.entry((between, bundle.after)).or_default();
            all.bytes += bundle.bytes;
            all.messages += bundle.messages;
            targets.extend(devices.into_iter().map(|device| array.on(device)));
        }

        for ((ProcessPair { from, to }, after), (bundle, targets)) in together {
            let transfer = self.transfer(operation, from, to, MessageBundle { after, ..bundle });
            for target in targets {
                self.ready
                    .entry(target)
                    .or_default()
                    .transfers
                    .insert(transfer);
            }
        }
    }

    fn relabel(&mut self, operation: u64, descriptor: &OpDescriptor, takes: &[TakenArray]) {
        for (result, shards) in descriptor.results.iter().enumerate() {
            for shard in shards {
                let ShardMemory::Of(input) = shard.memory else {
                    continue;
                };
                let array = takes.get(input as usize).and_then(|taken| taken.array);
                let known =
                    array.and_then(|array| self.ready.get(&array.on(shard.device)).cloned());
                let array = Array {
                    operation,
                    result: result as u32,
                };
                self.ready
                    .insert(array.on(shard.device), known.unwrap_or_default());
            }
        }
    }

    fn agree(&mut self, operation: u64, from: u32, bytes: u64) {
        let what = Computed::BroadcastValue { operation };
        let given = self.program_node(from, ReadyAfter::default(), what);

        for to in (0..self.dry_run.processes).filter(|to| *to != from) {
            let after = ReadyAfter {
                nodes: BTreeSet::from([given]),
                transfers: BTreeSet::new(),
            };

            let transfer = self.transfer(
                operation,
                from,
                to,
                MessageBundle {
                    bytes,
                    messages: 1,
                    after,
                },
            );

            let taken = ReadyAfter {
                nodes: BTreeSet::new(),
                transfers: BTreeSet::from([transfer]),
            };
            self.program_node(to, taken, what);
        }
    }

    /// Adds a read of the dry run; `place` is its index. On each process with a shard of the array,
    /// the program waits at a new node.
    fn wait(&mut self, place: usize, read: &Read) {
        let descriptor = self.dry_run.descriptor_of(read.array.operation);
        let shards =
            descriptor.and_then(|descriptor| descriptor.results.get(read.array.result as usize));

        let mut parts: BTreeMap<u32, ReadyAfter> = BTreeMap::new();
        for shard in shards.into_iter().flatten() {
            let process = self.process_of(shard.device);
            let known = self
                .ready
                .get(&read.array.on(shard.device))
                .cloned()
                .unwrap_or_default();
            parts.entry(process).or_default().with(&known);
        }

        for (process, ready) in parts {
            self.program_node(process, ready, Computed::Wait { read: place });
        }
    }

    fn program_node(&mut self, process: u32, ready: ReadyAfter, what: Computed) -> u32 {
        let lane = lane(&mut self.programs, &mut self.made.flow.lanes, process);
        let node = self.node(lane, process, ready, what);
        self.waited[process as usize] = Some(node);
        node
    }

    /// Adds a node to a lane and returns the node's number. The node also depends on the last wait
    /// of the process's program.
    fn node(&mut self, lane: u32, process: u32, mut ready: ReadyAfter, what: Computed) -> u32 {
        ready.nodes.extend(self.waited[process as usize]);
        let DryRunFlow { flow, nodes, .. } = &mut self.made;

        let number = flow.nodes.len() as u32;
        let needs = (flow.needs.len() as u32, ready.nodes.len() as u32);
        let takes = (flow.takes.len() as u32, ready.transfers.len() as u32);
        flow.needs.extend(ready.nodes);
        flow.takes.extend(ready.transfers);
        flow.nodes.push(Node {
            lane,
            needs,
            takes,
            tag: number,
        });
        nodes.push(what);
        number
    }

    /// Adds a transfer with its send and its receive, and returns the transfer's number. If the
    /// transfer depends on anything but one node, adds a node that joins what it depends on.
    fn transfer(&mut self, operation: u64, from: u32, to: u32, bundle: MessageBundle) -> u32 {
        let MessageBundle {
            bytes,
            messages,
            mut after,
        } = bundle;

        after.nodes.extend(self.waited[from as usize]);
        let after = match (after.nodes.len(), after.transfers.len()) {
            (0, 0) => u32::MAX,
            (1, 0) => after.nodes.first().copied().unwrap_or(u32::MAX),
            _ => {
                let lane = lane(&mut self.copy_engines, &mut self.made.flow.lanes, from);
                self.node(lane, from, after, Computed::Join { operation })
            }
        };

        let DryRunFlow {
            flow, transfers, ..
        } = &mut self.made;
        let number = flow.transfers.len() as u32;
        flow.transfers.push(Transfer {
            from,
            to,
            after,
            bytes,
            tag: number,
        });
        transfers.push(SentMessages {
            operation,
            messages,
        });

        flow.posts[from as usize].push(Post::Send(number));
        flow.posts[to as usize].push(Post::Receive(number));
        number
    }
}

/// Returns the number of an extra lane of a process. `known` has the lanes added so far; a missing
/// one is added to it and to `lanes`.
fn lane(known: &mut BTreeMap<u32, u32>, lanes: &mut Vec<u32>, process: u32) -> u32 {
    *known.entry(process).or_insert_with(|| {
        lanes.push(process);
        lanes.len() as u32 - 1
    })
}

impl Computed {
    /// Returns the number of the operation that the node belongs to. `None` for a wait.
    pub fn operation(self) -> Option<u64> {
        match self {
            Self::Run { operation }
            | Self::Arrive { operation }
            | Self::Join { operation }
            | Self::BroadcastValue { operation } => Some(operation),
            Self::Wait { .. } => None,
        }
    }

    /// True if the node takes time: it runs a kernel or fills an array.
    pub fn takes_time(self) -> bool {
        matches!(self, Self::Run { .. })
    }
}

impl DryRunFlow {
    /// Describes a node for messages.
    pub fn describe(&self, dry_run: &DryRun, node: u32) -> String {
        let at = |line: u32| {
            dry_run
                .lines
                .get(line as usize)
                .map_or("nowhere", String::as_str)
        };

        match self.nodes.get(node as usize) {
            Some(Computed::Run { operation }) => dry_run.describe(*operation),
            Some(Computed::Arrive { operation }) => {
                format!("the collectives of {}", dry_run.describe(*operation))
            }
            Some(Computed::Join { operation }) => {
                format!("the data to send in {}", dry_run.describe(*operation))
            }
            Some(Computed::BroadcastValue { operation }) => dry_run.describe(*operation),
            Some(Computed::Wait { read }) => match dry_run.reads.get(*read) {
                Some(read) => format!("the program waits at {} for {}", at(read.line), read.array),
                None => "the program waits".to_owned(),
            },
            None => format!("node {node}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;
    use super::super::{IssuedOperation, OpMessage, ResultShard};
    use super::*;

    /// Returns the dependencies of a node: `(nodes, transfers)`.
    fn before(flow: &Flow, node: u32) -> (&[u32], &[u32]) {
        (flow.needs_of(node), flow.takes_of(node))
    }

    #[test]
    fn call_depends_on_the_transfer_to_its_device() {
        let dry_run_flow = small().flow();
        let DryRunFlow {
            flow,
            nodes,
            transfers,
        } = &dry_run_flow;
        assert_eq!((&flow.lanes[..2], flow.processes), (&[0, 1][..], 2));
        let run = |operation| Computed::Run { operation };
        assert_eq!(nodes[..3], [run(1), run(3), run(5)]);
        assert_eq!(transfers.len(), 2);
        assert!(
            flow.transfers
                .iter()
                .all(|t| (t.from, t.to, t.after, t.bytes) == (0, 1, 0, 64))
        );
        assert_eq!(before(flow, 1), (&[][..], &[0][..]));
        assert_eq!(before(flow, 2), (&[][..], &[1][..]));
        assert_eq!(flow.posts[0], [Post::Send(0), Post::Send(1)]);
        assert_eq!(flow.posts[1], [Post::Receive(0), Post::Receive(1)]);
        // The read at the end is a node of the program.
        assert_eq!(nodes[3], Computed::Wait { read: 0 });
        assert_eq!((flow.lanes.len(), before(flow, 3).0), (3, &[0][..]));
        assert_eq!(
            dry_run_flow.describe(&small(), 3),
            "the program waits at train.rs:1:2 for result 0 of operation 1"
        );
    }

    #[test]
    fn forwarded_data_waits_for_its_arrival() {
        let mut dry_run = small();
        dry_run.processes = 3;
        dry_run.devices = vec![0, 1, 2];
        dry_run.descriptors[1].results[0].push(ResultShard {
            device: 2,
            bytes: 64,
            memory: ShardMemory::Own,
        });
        dry_run.descriptors[1].messages.push(OpMessage {
            from: 1,
            to: 2,
            bytes: 64,
            step: 2,
            leaf: 0,
        });
        let DryRunFlow { flow, nodes, .. } = dry_run.flow();
        let [first, second] = [flow.transfers[0], flow.transfers[1]];
        assert_eq!((first.from, first.to, second.from, second.to), (0, 1, 1, 2));
        assert_eq!(
            nodes[second.after as usize],
            Computed::Join { operation: 2 }
        );
        assert_eq!(before(&flow, second.after), (&[][..], &[0][..]));
    }

    #[test]
    fn collectives_wait_for_all_participants() {
        let mut dry_run = small();
        dry_run.descriptors[2].kind = OpKind::Call {
            kernel: "k".into(),
            devices: vec![0, 1],
        };
        let [to, back] = [(0, 1), (1, 0)].map(|(from, to)| OpMessage {
            from,
            to,
            bytes: 8,
            step: 1,
            leaf: 0,
        });
        dry_run.descriptors[2].messages = vec![to, back];
        let DryRunFlow { flow, nodes, .. } = dry_run.flow();
        let find = |what: Computed| -> Vec<usize> {
            (0..nodes.len())
                .filter(|node| nodes[*node] == what)
                .collect()
        };
        let (arrive, run) = (
            find(Computed::Arrive { operation: 3 }),
            find(Computed::Run { operation: 3 }),
        );
        assert_eq!((arrive.len(), run.len()), (2, 2));
        for (process, node) in run.into_iter().enumerate() {
            let (needs, takes) = before(&flow, node as u32);
            assert_eq!(needs, [arrive[process] as u32]);
            let [taken] = takes else {
                panic!("one from the other: {takes:?}")
            };
            let transfer = flow.transfers[*taken as usize];
            assert_eq!(
                (transfer.to as usize, transfer.after),
                (process, arrive[1 - process] as u32)
            );
        }
    }

    #[test]
    fn operations_after_agree_wait_for_the_value() {
        let mut dry_run = small();
        let kind = OpKind::BroadcastValue { from: 1, bytes: 1 };
        dry_run.descriptors.push(OpDescriptor {
            what: "broadcast_value".into(),
            kind,
            results: Vec::new(),
            messages: Vec::new(),
        });
        dry_run.operations.insert(
            0,
            IssuedOperation {
                descriptor: 3,
                takes: Vec::new(),
                ..dry_run.operations[0].clone()
            },
        );
        for operation in &mut dry_run.operations {
            operation
                .takes
                .iter_mut()
                .filter_map(|taken| taken.array.as_mut())
                .for_each(|a| a.operation += 1);
        }
        (dry_run.reads, dry_run.drops) = (Vec::new(), Vec::new());
        let DryRunFlow { flow, nodes, .. } = dry_run.flow();
        assert_eq!(nodes[..2], [Computed::BroadcastValue { operation: 1 }; 2]);
        assert_eq!(before(&flow, 1), (&[][..], &[0][..]));
        assert_eq!(nodes[2], Computed::Run { operation: 2 });
        assert_eq!(before(&flow, 2).0, [1], "it is process 0's");
    }
}
