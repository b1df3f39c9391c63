//! Fuzz test: a dishonest peer sends random messages to a runtime, over a transport that checks
//! nothing.

use mpmd_device::copy::copy_region;
use mpmd_fuzz::{Rng, integer, mutate};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::{self, Failure, FailureKind, OpRecord, PieceSize, ProbeAnswer};
use mpmd_proto::{Header, MessageKind, control};
use mpmd_transport::transport::{Fetch, FetchDone};
use mpmd_transport::{Handler, Ticket, TransportError, batch};

use crate::exec::array::LocalShard;
use crate::exec::*;
use mpmd_layout::aval::{ShapedArray, f32s};
use mpmd_layout::region::Region;
use mpmd_layout::reshard;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::spec;
use mpmd_layout::topology::Mesh;

/// The process of the runtime. Process 1 is dishonest, process 2 is correct.
const ME: ProcessId = ProcessId(0);
const LIAR: ProcessId = ProcessId(1);
const OTHER: ProcessId = ProcessId(2);

/// Time limit of every wait.
const SOON: Duration = Duration::from_secs(20);

/// Upper bound of the staging bytes that pieces of these sizes may take.
const MOST_STAGING: u64 = 32 << 20;

/// A transport that drops all messages.
struct Nowhere {
    /// True if payloads of the dishonest peer are lent memory.
    lends: bool,
    handler: Mutex<Option<Arc<dyn Handler>>>,
    posted: Mutex<Vec<Ticket>>,
}

impl Transport for Nowhere {
    fn name(&self) -> &'static str {
        "nowhere"
    }

    fn process(&self) -> ProcessId {
        ME
    }

    fn processes(&self) -> usize {
        3
    }

    fn zero_copy(&self, peer: ProcessId) -> bool {
        self.lends && peer == LIAR
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        *self.handler.lock() = Some(handler);
    }

    fn post(&self, _: ProcessId, _: Header, _: Option<SharedBuffer>, ticket: Ticket) {
        if ticket != Ticket::NONE {
            self.posted.lock().push(ticket);
        }
    }

    fn shutdown(&self, _: Duration) {}
}

/// A payload that waits for a buffer.
struct Pending {
    bytes: SharedBuffer,
    announced: u64,
    breaks_off: bool,
}

impl Fetch for Pending {
    fn bytes(&self) -> u64 {
        self.announced
    }

    fn fetch(self: Box<Self>, mut into: OwnedBuffer, then: FetchDone) {
        assert_eq!(
            into.len() as u64,
            self.announced,
            "a payload is fetched into a buffer of its length"
        );
        if self.breaks_off {
            return then(Err(TransportError::PeerGone {
                peer: LIAR,
                why: "it broke off".to_owned(),
            }));
        }
        into.iter_mut()
            .zip(self.bytes.iter())
            .for_each(|(to, from)| *to = *from);
        then(Ok(into));
    }
}

/// Process 0's part in a move of an array.
struct Move {
    plan: PutPlan,
    mine: Region,
    source: Vec<(DeviceId, SharedBuffer)>,
    /// Pieces from other processes: sender, piece number, values.
    pieces: Vec<(ProcessId, u64, SharedBuffer)>,
    /// Regions of the result to which the dishonest peer contributes nothing, with their values.
    known: Vec<(Region, SharedBuffer)>,
}

impl Move {
    fn new(runtime: &Arc<Runtime>, aval: &ShapedArray, from: &Sharding, to: &Sharding) -> Self {
        let [source, layout] = [from, to].map(|sharding| sharding.layout(aval.shape()).unwrap());
        let source_layout = SourceLayout {
            sharding: from,
            layout: &source,
        };
        let plan = PutPlan::new(runtime, aval, Some(source_layout), to, layout.clone()).unwrap();
        let whole = Region::full(aval.shape());
        let values: Vec<u8> = (0..whole.elements())
            .flat_map(|i| (i as f32).to_le_bytes())
            .collect();
        let part = |region: &Region| {
            let mut bytes = vec![0; region.elements() * 4];
            copy_region(&values, &whole, &mut bytes, region, region, 4);
            SharedBuffer::from(bytes)
        };
        let here = runtime.devices[0].id;
        let deliveries = reshard::plan(&source, &layout, 4, &runtime.topology)
            .unwrap()
            .part_of(ME)
            .deliveries;
        let (mut pieces, mut known) = (Vec::new(), Vec::new());
        for delivery in deliveries {
            let values = part(&delivery.region);
            if let reshard::DeliveryOrigin::Process(from) = delivery.from {
                pieces.push((from, delivery.id, values.clone()));
            }
            if delivery.from != reshard::DeliveryOrigin::Process(LIAR)
                && delivery.targets.contains(&here)
            {
                known.push((delivery.region, values));
            }
        }
        let mine = layout.region_of(here).unwrap().clone();
        let source = source
            .region_of(here)
            .map(|region| (here, part(region)))
            .into_iter()
            .collect();
        Self {
            plan,
            mine,
            source,
            pieces,
            known,
        }
    }

    fn issue(&self, runtime: &Arc<Runtime>, op: u64) -> AsyncBuffer {
        let guard = runtime.in_flight.begin(op, hash(op), self.plan.bytes());
        let shard = |(device, bytes): &(DeviceId, SharedBuffer)| LocalShard {
            device: *device,
            slot: AsyncBuffer::filled(bytes.clone()),
        };
        let shards: Vec<LocalShard> = self.source.iter().map(shard).collect();
        let source = PutSource::Shards(&shards);
        self.plan.send(runtime, &guard, &source);
        self.plan
            .receive(runtime, &guard, &source, false)
            .remove(0)
            .slot
    }

    fn check(&self, found: &SharedBuffer) {
        for (region, values) in &self.known {
            let mut piece = vec![0; values.len()];
            copy_region(found, &self.mine, &mut piece, region, region, 4);
            assert!(
                piece == values[..],
                "the values of {region:?} are not those that were sent"
            );
        }
    }
}

/// A runtime on a transport that drops messages, and the moves from which its operations are
/// chosen.
struct Scene {
    runtime: Arc<Runtime>,
    transport: Arc<Nowhere>,
    handler: Arc<dyn Handler>,
    moves: Vec<Move>,
    garbage: SharedBuffer,
}

/// The operations that the process has issued, with their pieces and results.
#[derive(Default)]
struct Issued {
    pieces: Vec<(ProcessId, u64, u64, SharedBuffer)>,
    moved: Vec<(usize, AsyncBuffer)>,
    /// Messages of collectives: the bytes of the correct process, or the maximum length for the
    /// dishonest one.
    bytes: Vec<(AsyncBuffer, Result<SharedBuffer, u64>)>,
}

fn hash(op: u64) -> u128 {
    u128::from(op) + 77
}

/// Returns the record of an operation that all processes have issued.
fn record(op: u64) -> OpRecord {
    let at = std::panic::Location::caller();
    OpRecord {
        op,
        hash: hash(op),
        what: Arc::new("op"),
        values: None,
        note: None,
        at,
    }
}

fn one_of<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

impl Scene {
    fn new(lends: bool) -> Self {
        let transport = Arc::new(Nowhere {
            lends,
            handler: Mutex::default(),
            posted: Mutex::default(),
        });
        let config = RuntimeConfig {
            epoch: 1,
            peer_timeout: Duration::from_secs(3600),
            heartbeat: Duration::from_secs(10),
            run_ahead_ops: 1024,
            run_ahead_bytes: 1 << 30,
            spin: Spin::default(),
            check_uncommitted: false,
            check_replicas: false,
            check_replay: 0,
            sync: false,
            device_memory: None,
            ordinals: Vec::new(),
            trace: Trace::default(),
        };
        let topology = Topology::even(3, 1);
        let mesh = Mesh::new(&[("x", 3)], topology.device_ids().to_vec()).unwrap();
        let runtime = Runtime::start(ME, topology, config, Some(transport.clone()), None).unwrap();
        let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
        let single = |at: usize| Sharding::single_device(mesh.devices()[at]);
        let moves = [
            (f32s([12, 3]), &rows, &mesh.replicated()),
            (f32s([192, 192]), &rows, &mesh.replicated()),
            (f32s([6, 6]), &rows, &columns),
            (f32s([192, 384]), &rows, &columns),
            (f32s([100]), &single(2), &single(0)),
            (f32s([100, 100]), &single(2), &single(0)),
        ];
        let moves = moves
            .map(|(aval, from, to)| Move::new(&runtime, &aval, from, to))
            .into();
        let handler = transport.handler.lock().clone().expect("it was started");
        Self {
            runtime,
            transport,
            handler,
            moves,
            garbage: vec![0xee; 1 << 16].into(),
        }
    }

    /// Starts a new job on the runtime: with a new router and no transfer in progress.
    fn begin(&self) {
        let Runtime {
            zero_copy,
            config,
            router,
            under_way,
            trouble,
            ..
        } = &*self.runtime;
        let config = router::RouterConfig {
            process: ME,
            processes: 3,
            epoch: config.epoch,
            peer_timeout: config.peer_timeout,
            heartbeat: config.heartbeat,
            zero_copy: zero_copy.clone(),
        };
        let before = std::mem::replace(&mut *router.lock(), Router::new(config));
        let ended = std::mem::take(&mut *under_way.lock());
        *trouble.lock() = Trouble::default();
        drop((before, ended));
    }

    fn issue(&self, rng: &mut Rng, issued: &mut Issued) {
        let op = self.runtime.router.lock().count() + 1;
        self.runtime.issue(record(op));
        if rng.u8(..4) > 0 {
            let at = rng.usize(..self.moves.len());
            issued
                .moved
                .push((at, self.moves[at].issue(&self.runtime, op)));
            let pieces = self.moves[at].pieces.iter();
            issued
                .pieces
                .extend(pieces.map(|(from, id, values)| (*from, op, *id, values.clone())));
            return;
        }
        // Expects messages as a collective does.
        for (from, piece) in [(LIAR, 1 << 63), (OTHER, 1 << 63 | 1)] {
            let (resolver, slot) = AsyncBuffer::new();
            let most = one_of(rng, &[100, 30_000]);
            let values = self.garbage.slice(0..most as usize);
            let expected = if from == OTHER {
                Ok(values.clone())
            } else {
                Err(most)
            };
            let waiter = Waiter::Bytes {
                resolver,
                from,
                op,
                piece,
            };
            let now = self.runtime.now();
            self.runtime.with_router(|router| {
                let size = PieceSize { likely: most, most };
                router.expect_any_size(from, (op, piece), hash(op), size, waiter, now);
            });
            issued.bytes.push((slot, expected));
            issued.pieces.push((from, op, piece, values));
        }
    }

    /// Delivers a piece of the correct process.
    fn send(&self, (from, op, piece, values): &(ProcessId, u64, u64, SharedBuffer)) {
        let bytes = values.len() as u64;
        let kind = if bytes > router::EAGER_BYTES {
            MessageKind::Data
        } else {
            MessageKind::Eager
        };
        let header = Header {
            epoch: 1,
            op: *op,
            piece: *piece,
            bytes,
            hash: hash(*op),
            ..Header::new(kind)
        };
        let payload = match kind {
            MessageKind::Data => {
                let bytes = values.clone();
                Payload::Waiting(Box::new(Pending {
                    bytes,
                    announced: header.bytes,
                    breaks_off: false,
                }))
            }
            _ => Payload::Inline(values.clone()),
        };
        self.handler.arrived(*from, header, payload);
    }

    fn lie(&self, rng: &mut Rng, issued: &Issued) {
        use MessageKind::*;
        let count = self.runtime.router.lock().count();
        let pieces = [
            Eager, Eager, Data, Data, Data, Offer, Grant, Credit, AskTaken,
        ];
        let words = [
            Poison, Probe, Answer, Heartbeat, Step, Goodbye, Records, Failure, Batch,
        ];
        let kind = if rng.u8(..6) > 0 {
            one_of(rng, &pieces)
        } else {
            one_of(rng, &words)
        };
        let theirs: Vec<_> = issued
            .pieces
            .iter()
            .filter(|piece| piece.0 == LIAR)
            .collect();
        let (mut op, mut piece, mut bytes) = (rng.u64(..count + 3), rng.u64(..4), 100);
        if let Some((_, its_op, id, values)) =
            (!theirs.is_empty()).then(|| theirs[rng.usize(..theirs.len())])
        {
            (op, piece, bytes) = (*its_op, *id, values.len() as u64);
        }
        match rng.u8(..12) {
            0 => op = integer(rng),
            1 => piece = integer(rng),
            2 => bytes = integer(rng),
            3 => {
                bytes = one_of(
                    rng,
                    &[0, bytes + 1, bytes.saturating_sub(1), 16 << 10, 3 * bytes],
                )
            }
            _ => {}
        }
        let counted = if rng.u8(..8) > 0 {
            rng.u64(..count + 3)
        } else {
            integer(rng)
        };
        let subject = if matches!(kind, Heartbeat | Step | Goodbye) {
            counted
        } else {
            op
        };
        let hash = match rng.u8(..40) {
            0 => u128::from(rng.u64(..)),
            1 => 0,
            _ if subject == 0 => 0,
            _ => u128::from(subject).wrapping_add(77),
        };
        let text = words_of(rng, kind);
        let bytes = text.as_ref().map_or(bytes, |text| text.len() as u64);
        let header = Header {
            kind,
            epoch: 1,
            op,
            piece,
            bytes,
            hash,
            count: counted,
        };
        let Ok(header) = Header::decode(&header.encode()) else {
            return;
        };
        let length = match rng.u8(..20) {
            0 => rng.usize(..self.garbage.len()),
            _ => header.payload_bytes().min(self.garbage.len() as u64) as usize,
        };
        let bytes = text.map_or_else(|| self.garbage.slice(0..length), SharedBuffer::from);
        if matches!(kind, Eager | Data) && rng.u8(..4) == 0 {
            return self.lie_in_batch(rng, (header, bytes));
        }
        let payload = match rng.u8(..6) {
            0 => Payload::Lent(bytes),
            1 if kind == Data && rng.bool() => Payload::Empty,
            1..=3 if kind == Data => {
                let announced = if rng.u8(..20) > 0 {
                    header.bytes
                } else {
                    integer(rng)
                };
                Payload::Waiting(Box::new(Pending {
                    bytes,
                    announced,
                    breaks_off: rng.u8(..4) == 0,
                }))
            }
            _ if bytes.is_empty() => Payload::Empty,
            _ => Payload::Inline(bytes),
        };
        self.handler.arrived(LIAR, header, payload);
    }

    /// Sends copies of a message in a batch, which may be damaged.
    fn lie_in_batch(&self, rng: &mut Rng, message: (Header, SharedBuffer)) {
        let messages = vec![message; rng.usize(1..4)];
        let (mut header, batch) = batch::pack(&messages, &self.runtime.staging).unwrap();
        header.epoch = 1;
        let mut bytes = batch.to_vec();
        if rng.u8(..4) == 0 {
            mutate(rng, &mut bytes);
        }
        if rng.u8(..8) > 0 {
            header.bytes = bytes.len() as u64;
        }
        self.handler
            .arrived(LIAR, header, Payload::Inline(bytes.into()));
    }

    /// Ends all operations. Checks that those without a part of the dishonest peer ended well.
    fn end(&self, issued: Issued) {
        let Runtime {
            parker,
            in_flight,
            router,
            staging,
            ..
        } = &*self.runtime;
        let wait = |slot: &AsyncBuffer| {
            parker
                .wait(slot, Some(Instant::now() + SOON))
                .expect("every wait ends")
        };
        let has_failed = || router.lock().failed().is_some();
        for (slot, expected) in &issued.bytes {
            if let Ok(values) = expected {
                let found = wait(slot);
                assert!(found.is_ok_and(|found| found[..] == values[..]) || has_failed());
            }
        }
        for (at, slot) in &issued.moved {
            if self.moves[*at]
                .pieces
                .iter()
                .all(|(from, ..)| *from != LIAR)
            {
                assert!(wait(slot).is_ok() || has_failed());
            }
        }
        self.done();
        for peer in [LIAR, OTHER] {
            self.runtime
                .with_router(|router| router.peer_down(peer, "the job is over"));
            self.runtime.give_up(peer, "the job is over");
        }
        for (at, slot) in &issued.moved {
            if let Ok(found) = wait(slot) {
                self.moves[*at].check(&found);
            }
        }
        for (slot, expected) in &issued.bytes {
            if let (Ok(found), Err(most)) = (wait(slot), expected) {
                assert!(found.len() as u64 <= *most);
            }
        }
        drop(issued);
        self.done();
        let all_over = in_flight.wait_until(Instant::now() + SOON, |counts| counts.ops == 0);
        assert!(all_over, "operations end: {:?}", in_flight.counts());
        assert!(
            staging.stats().peak <= MOST_STAGING,
            "{:?}",
            staging.stats()
        );
    }

    /// Reports all posted tickets as done.
    fn done(&self) {
        let posted = std::mem::take(&mut *self.transport.posted.lock());
        posted
            .into_iter()
            .for_each(|ticket| self.handler.done(ticket, Ok(())));
    }
}

/// Returns the control payload of a kind that has one: valid, mutated, or empty.
fn words_of(rng: &mut Rng, kind: MessageKind) -> Option<Vec<u8>> {
    let failure = |kind| Failure::new(kind, LIAR, 1, "why");
    let mut text = match kind {
        MessageKind::Poison | MessageKind::Failure => {
            control::encode(&failure(FailureKind::Kernel))
        }
        MessageKind::Goodbye if rng.bool() => Ok(Vec::new()),
        MessageKind::Goodbye => control::encode(&failure(FailureKind::Left)),
        MessageKind::Answer => {
            let chain = vec!["process 1 waits".to_owned(); rng.usize(..40)];
            control::encode(&ProbeAnswer {
                count: integer(rng),
                doing: "computes".to_owned(),
                chain,
            })
        }
        MessageKind::Records => {
            let record = |op: u64| (op, hash(op), "op".to_owned(), 0u64);
            let records: Vec<_> = (1..rng.u64(1..9)).map(record).collect();
            control::encode(&(integer(rng), records))
        }
        _ => return None,
    }
    .expect("it is short");
    if rng.u8(..3) == 0 {
        mutate(rng, &mut text);
    }
    Some(text)
}

#[test]
fn fuzz_driver() {
    let scenes = [false, true].map(Scene::new);
    mpmd_fuzz::cases("driver", |rng| {
        let scene = &scenes[usize::from(rng.bool())];
        scene.begin();
        let mut issued = Issued::default();
        let mut sent = 0;
        for _ in 0..rng.usize(1..4) {
            (0..rng.usize(..3)).for_each(|_| scene.lie(rng, &issued));
            scene.issue(rng, &mut issued);
            (0..rng.usize(..6)).for_each(|_| scene.lie(rng, &issued));
            for piece in issued.pieces[sent..]
                .iter()
                .filter(|piece| piece.0 == OTHER)
            {
                scene.send(piece);
            }
            sent = issued.pieces.len();
        }
        scene.end(issued);
    });
}

#[test]
fn unexpected_lengths_take_no_memory() {
    let scene = Scene::new(false);
    let runtime = &scene.runtime;
    let pending = |announced| {
        let bytes = scene.garbage.clone();
        Payload::Waiting(Box::new(Pending {
            bytes,
            announced,
            breaks_off: false,
        }))
    };
    let inline = |bytes| Payload::Inline(scene.garbage.slice(0..bytes));
    // Announced lengths beyond the piece's, up to those that overflow. Then payloads that are
    // shorter or longer than announced.
    let long =
        [100_001, 1 << 40, 1 << 60, (1 << 63) + 1, u64::MAX].map(|bytes| (bytes, pending(bytes)));
    let other = [
        (100_000, pending(99_999)),
        (100_000, inline(7)),
        (100_000, Payload::Empty),
        (0, inline(1)),
    ];
    for (bytes, payload) in long.into_iter().chain(other) {
        scene.begin();
        runtime.issue(record(1));
        let (resolver, slot) = AsyncBuffer::new();
        let waiter = Waiter::Bytes {
            resolver,
            from: LIAR,
            op: 1,
            piece: 0,
        };
        let now = runtime.now();
        runtime.with_router(|router| {
            let size = PieceSize {
                likely: 100_000,
                most: 100_000,
            };
            router.expect_any_size(LIAR, (1, 0), hash(1), size, waiter, now);
        });
        let header = Header {
            epoch: 1,
            op: 1,
            bytes,
            hash: hash(1),
            ..Header::new(MessageKind::Data)
        };
        scene.handler.arrived(LIAR, header, payload);
        let failure = slot.peek().expect("it ended at once").unwrap_err();
        assert_eq!(failure.process, LIAR, "{failure}");
        let trouble = runtime.trouble().expect("its sender is lost");
        assert!(
            trouble
                .message
                .contains("process 1 is gone (it broke the protocol: it sent"),
            "{trouble}"
        );
        assert_eq!(runtime.staging.stats().peak, 0, "{bytes} bytes");
    }
}
