//! Publishers and subscribers of one process: each end is a job of its own, with several devices.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::spec;
use mpmd_memory::SharedBuffer;
use mpmd_rendezvous::Token;

use super::*;
use crate::{MpmdArray, Program};

const LONG: Duration = Duration::from_secs(60);

fn token() -> Token {
    Token::new([7; 32])
}

/// The value of an element in a version.
fn value(version: u64, leaf: usize, index: u64) -> f32 {
    // One in 64 changes with the version.
    let own = if (index + version).is_multiple_of(64) {
        version
    } else {
        0
    };
    ((index * 37 + own * 11) % 9973) as f32 / 16.0 + leaf as f32
}

/// Returns the leaves of a version: each over other devices.
fn tree(p: &mut Program, version: u64, shapes: &[&[usize]]) -> Vec<MpmdArray> {
    let devices = p.topology().device_ids().to_vec();
    let mut leaves = Vec::new();
    for (leaf, shape) in shapes.iter().enumerate() {
        let mesh = p.mesh(&[("x", devices.len())]).unwrap();
        let sharding = match leaf % 3 {
            0 => mesh.sharding(spec!["x"]),
            1 => Sharding::single_device(devices[leaf % devices.len()]),
            _ => mesh.replicated(),
        };
        let aval = ShapedArray::new(shape, DType::F32);
        let all = shape.to_vec();
        let fill = move |region: &Region, mut view: crate::kernel::ViewMut<'_>| {
            let to = view.as_mut_slice::<f32>()?;
            for (to, index) in to.iter_mut().zip(region.indices(&all)) {
                *to = value(version, leaf, index);
            }
            Ok(())
        };
        leaves.push(p.array_from_fn(aval, sharding, fill).unwrap());
    }
    leaves
}

/// Publishes versions 1 to `versions`, when it is asked for the next one.
fn publisher(
    publication: Publication,
    shapes: &'static [&'static [usize]],
) -> (
    SocketAddr,
    mpsc::Sender<u64>,
    std::thread::JoinHandle<PublisherMetrics>,
) {
    let (told, address) = mpsc::channel();
    let (sender, versions) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut p = Program::builder().devices(3).alone().unwrap();
        let first = tree(&mut p, 0, shapes);
        let mut publisher = p.publisher(publication, &first).unwrap();
        told.send(publisher.address().unwrap()).unwrap();
        for version in versions {
            let leaves = tree(&mut p, version, shapes);
            publisher.publish(version, &leaves).unwrap();
        }
        let start = std::time::Instant::now();
        // The last link may still be told of its last version.
        while publisher.metrics().subscribers > 0 && start.elapsed() < Duration::from_millis(300) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let metrics = publisher.metrics();
        drop(publisher);
        p.finish().unwrap();
        metrics
    });
    (address.recv_timeout(LONG).unwrap(), sender, thread)
}

/// Compares a leaf with a version, on the devices of the subscriber.
fn check(array: &MpmdArray, version: u64, from: impl Fn(&[usize]) -> (usize, u64)) {
    for shard in array.addressable_shards().unwrap() {
        let shape = shard.region.shape();
        let found = shard.data.to_vec::<half::bf16>().unwrap();
        for (i, found) in found.into_iter().enumerate() {
            let (mut left, mut at) = (i, vec![0; shape.len()]);
            for dim in (0..shape.len()).rev() {
                at[dim] = shard.region.range(dim).start + left % shape[dim];
                left /= shape[dim];
            }
            let (leaf, index) = from(&at);
            assert_eq!(
                found,
                half::bf16::from_f32(value(version, leaf, index)),
                "{at:?}"
            );
        }
    }
}

const SHAPES: &[&[usize]] = &[&[6, 640], &[7], &[4, 3, 130]];

fn wanted(p: &Program) -> Vec<WantedLeaf> {
    let mesh = p.mesh(&[("y", 2), ("z", 2)]).unwrap();
    let bf16 = |shape: &[usize]| ShapedArray::new(shape, DType::Bf16);
    let part = |from: &str, region: &[std::ops::Range<usize>], at: &[usize]| LeafPart {
        from: from.to_owned(),
        region: Some(Region::new(region.to_vec())),
        at: at.to_vec(),
    };
    vec![
        WantedLeaf::new("0", bf16(&[6, 640]), mesh.sharding(spec![None, "y"])),
        WantedLeaf::new("1", bf16(&[7]), mesh.replicated()),
        WantedLeaf::new("2", bf16(&[4, 3, 130]), mesh.sharding(spec![("y", "z")])),
        // Rows of a fused leaf, and a fused one of columns in another order.
        WantedLeaf::new(
            "rows",
            bf16(&[3, 640]),
            mesh.sharding(spec![None, ("z", "y")]),
        )
        .of(vec![part("0", &[2..5, 0..640], &[0, 0])]),
        WantedLeaf::new("fused", bf16(&[6, 600]), mesh.sharding(spec!["z", "y"])).of(vec![
            part("0", &[0..6, 540..640], &[0, 0]),
            part("0", &[0..6, 0..500], &[0, 100]),
        ]),
    ]
}

fn check_all(arrays: &[MpmdArray], version: u64) {
    let flat = |shape: &'static [usize]| {
        move |at: &[usize]| {
            at.iter()
                .zip(shape)
                .fold(0, |all, (at, size)| all * *size as u64 + *at as u64)
        }
    };
    for (leaf, array) in arrays[..3].iter().enumerate() {
        let flat = flat(SHAPES[leaf]);
        check(array, version, |at| (leaf, flat(at)));
    }
    check(&arrays[3], version, |at| {
        (0, (at[0] as u64 + 2) * 640 + at[1] as u64)
    });
    check(&arrays[4], version, |at| {
        let column = if at[1] < 100 {
            at[1] + 540
        } else {
            at[1] - 100
        };
        (0, (at[0] * 640 + column) as u64)
    });
}

fn next(p: &mut Program, subscription: &mut Subscription, version: u64) -> Vec<MpmdArray> {
    assert_eq!(
        subscription.wait(version, LONG),
        Some(version),
        "{:?}",
        subscription.state()
    );
    let (found, arrays) = subscription.next(p).unwrap().unwrap();
    assert_eq!(found, version);
    arrays
}

#[test]
fn versions_come_in_any_layout_whole_or_as_changes() {
    let publication = Publication::new("policy", token()).dtype(DType::Bf16);
    let (address, versions, thread) = publisher(publication, SHAPES);
    let mut p = Program::builder().devices(4).alone().unwrap();
    let subscribe = |p: &mut Program, changes| {
        let subscribing = Subscribing::new("policy", address.to_string(), token());
        p.subscribe(subscribing.changes(changes), wanted(p))
            .unwrap()
    };
    let (mut whole, mut changes) = (subscribe(&mut p, false), subscribe(&mut p, true));
    let mut bytes = Vec::new();
    for version in [1, 2, 5, 6] {
        versions.send(version).unwrap();
        for subscription in [&mut whole, &mut changes] {
            check_all(&next(&mut p, subscription, version), version);
            bytes.push(subscription.state().bytes);
        }
    }
    // Two elements in 64 change.
    assert!(
        bytes[1] == bytes[0] && bytes[3] * 6 < bytes[2] && bytes[7] * 6 < bytes[6],
        "{bytes:?}"
    );
    // A version in between is missed, while the one before is not taken.
    versions.send(7).unwrap();
    assert_eq!(changes.wait(7, LONG), Some(7));
    assert_eq!(whole.wait(7, LONG), Some(7));
    versions.send(8).unwrap();
    check_all(&next(&mut p, &mut changes, 7), 7);
    check_all(&next(&mut p, &mut whole, 7), 7);
    check_all(&next(&mut p, &mut changes, 8), 8);
    assert!(changes.next(&mut p).unwrap().is_none());
    drop(whole);
    versions.send(9).unwrap();
    check_all(&next(&mut p, &mut changes, 9), 9);
    drop(versions);
    let metrics = thread.join().unwrap();
    assert!(metrics.taken >= 11 && metrics.refused == 0, "{metrics:?}");
    drop(changes);
    p.finish().unwrap();
}

/// Refuses some versions, and counts its calls.
struct Choosy(std::sync::Arc<[AtomicU64; 2]>);

impl Intake for Choosy {
    fn has_room(&mut self) -> bool {
        true
    }

    fn take(&mut self, received: &Received) -> Result<(), String> {
        match received.version {
            2 => Err("no room on this shelf".to_owned()),
            _ => Ok(()),
        }
    }

    fn end(&mut self, _: u64, refused: Option<&str>) {
        self.0[usize::from(refused.is_some())].fetch_add(1, Ordering::SeqCst);
    }
}

/// Returns the bits that leave the publisher: of publication `flipped` the first ones of version 2
/// are damaged.
pub(super) fn on_the_way(name: &str, version: u64, bits: &SharedBuffer) -> SharedBuffer {
    static DAMAGED: AtomicBool = AtomicBool::new(false);
    if name != "flipped" || version != 2 || DAMAGED.swap(true, Ordering::SeqCst) {
        return bits.clone();
    }
    let mut damaged = bits.to_vec();
    damaged[100] ^= 4;
    damaged.into()
}

/// Records the ends of versions.
struct Recorder(mpsc::Sender<(u64, Option<String>)>);

impl Intake for Recorder {
    fn has_room(&mut self) -> bool {
        true
    }

    fn take(&mut self, _: &Received) -> Result<(), String> {
        Ok(())
    }

    fn end(&mut self, version: u64, refused: Option<&str>) {
        self.0.send((version, refused.map(str::to_owned))).unwrap();
    }
}

#[test]
fn flipped_bit_is_refused_by_name_and_asked_for_again() {
    let publication = Publication::new("flipped", token()).dtype(DType::Bf16);
    let (address, versions, thread) = publisher(publication, SHAPES);
    let mut p = Program::builder().devices(4).alone().unwrap();
    let subscribing = Subscribing::new("flipped", address.to_string(), token());
    let (sender, ends) = mpsc::channel();
    let leaves = vec![wanted(&p).remove(0)];
    let subscription = p
        .subscribe_with(subscribing, leaves, Box::new(Recorder(sender)))
        .unwrap();
    let next = || ends.recv_timeout(LONG).unwrap();
    versions.send(1).unwrap();
    assert_eq!(next(), (1, None));
    versions.send(2).unwrap();
    let (version, why) = next();
    let why = why.unwrap();
    assert!(
        version == 2 && why.starts_with("0 [0..6, 0..320] arrived with other bits"),
        "{why}"
    );
    assert_eq!(next(), (2, None));
    assert_eq!(subscription.wait(2, LONG), Some(2));
    let state = subscription.state();
    assert_eq!(
        (state.version, state.refused, state.trouble),
        (Some(2), 1, None)
    );
    drop((versions, subscription));
    thread.join().unwrap();
    p.finish().unwrap();
}

/// Panics at the first call of `has_room` and of `take`, and records the ends of versions.
struct Panicking {
    asked: bool,
    taken: bool,
    ends: mpsc::Sender<Option<String>>,
}

impl Intake for Panicking {
    fn has_room(&mut self) -> bool {
        assert!(
            std::mem::replace(&mut self.asked, true),
            "no one looks for room"
        );
        true
    }

    fn take(&mut self, received: &Received) -> Result<(), String> {
        let version = received.version;
        assert!(
            std::mem::replace(&mut self.taken, true),
            "no shelf for version {version}"
        );
        Ok(())
    }

    fn end(&mut self, _: u64, refused: Option<&str>) {
        self.ends.send(refused.map(str::to_owned)).unwrap();
    }
}

#[test]
fn panic_of_an_intake_is_trouble_and_a_refusal() {
    let (address, versions, thread) = publisher(Publication::new("policy", token()), SHAPES);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let subscribing = Subscribing::new("policy", address.to_string(), token());
    let wanted = vec![wanted_here(&p)];
    let (sender, ends) = mpsc::channel();
    let intake = Box::new(Panicking {
        asked: false,
        taken: false,
        ends: sender,
    });
    let subscription = p.subscribe_with(subscribing, wanted, intake).unwrap();
    let start = std::time::Instant::now();
    let said = || subscription.state().trouble.unwrap_or_default();
    while said() != "the intake panicked: no one looks for room" {
        assert!(start.elapsed() < LONG, "{}", said());
        std::thread::sleep(Duration::from_millis(1));
    }
    versions.send(1).unwrap();
    let refused = ends.recv_timeout(LONG).unwrap();
    assert_eq!(
        refused.unwrap(),
        "the intake panicked: no shelf for version 1"
    );
    // It is asked for once more.
    assert_eq!(ends.recv_timeout(LONG).unwrap(), None);
    assert_eq!(subscription.wait(1, Duration::MAX), Some(1));
    let state = subscription.state();
    assert_eq!((state.refused, state.trouble), (1, None));
    drop((versions, subscription));
    thread.join().unwrap();
    p.finish().unwrap();
}

#[test]
fn refused_version_is_told_to_both_ends() {
    let (address, versions, thread) = publisher(Publication::new("policy", token()), SHAPES);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let counts = std::sync::Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let all = p.mesh(&[("y", 2)]).unwrap().replicated();
    let leaf = WantedLeaf::new("1", ShapedArray::new(&[7], DType::F32), all);
    let subscribing = Subscribing::new("policy", address.to_string(), token()).changes(true);
    let intake = Box::new(Choosy(counts.clone()));
    let subscription = p.subscribe_with(subscribing, vec![leaf], intake).unwrap();
    versions.send(1).unwrap();
    assert_eq!(subscription.wait(1, LONG), Some(1));
    versions.send(2).unwrap();
    while counts[1].load(Ordering::SeqCst) < 2 {
        std::thread::sleep(Duration::from_millis(5));
    }
    versions.send(3).unwrap();
    assert_eq!(subscription.wait(3, LONG), Some(3));
    drop(versions);
    let metrics = thread.join().unwrap();
    assert!(metrics.taken == 2 && metrics.refused == 2, "{metrics:?}");
    // The publisher has ended in order. The last version stays.
    while subscription.state().is_linked {
        std::thread::sleep(Duration::from_millis(5));
    }
    let state = subscription.state();
    assert_eq!((state.version, state.versions), (Some(3), 2));
    drop(subscription);
    p.finish().unwrap();
}

#[test]
fn subscriber_says_what_does_not_fit() {
    let (address, versions, thread) = publisher(Publication::new("policy", token()), SHAPES);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let all = p.mesh(&[("y", 2)]).unwrap().replicated();
    let f32s = |shape: &[usize]| ShapedArray::new(shape, DType::F32);
    let leaf = |name: &str, aval: &ShapedArray| WantedLeaf::new(name, aval.clone(), all.clone());
    let part = |at: usize| LeafPart {
        from: "1".to_owned(),
        region: None,
        at: vec![at],
    };
    for (name, token, leaf, expected) in [
        (
            "other",
            token(),
            leaf("1", &f32s(&[7])),
            "publishes policy, not other",
        ),
        (
            "policy",
            Token::new([8; 32]),
            leaf("1", &f32s(&[7])),
            "has another secret",
        ),
        (
            "policy",
            token(),
            leaf("5", &f32s(&[7])),
            "the publisher has no leaf 5; it has 0, 1, 2",
        ),
        (
            "policy",
            token(),
            leaf("1", &f32s(&[8])),
            "[8] is wanted, and 1 is published with",
        ),
        (
            "policy",
            token(),
            leaf("1", &ShapedArray::new(&[7], DType::Bf16)),
            "bf16 is wanted, and 1 is published as f32: give both ends one type, as with \
             --publish-as bf16 of finetune or --dtype f32 of serve",
        ),
        (
            "policy",
            token(),
            leaf("all", &f32s(&[14])).of(vec![part(0), part(3)]),
            "overlap",
        ),
        (
            "policy",
            token(),
            leaf("all", &f32s(&[15])).of(vec![part(0), part(8)]),
            "14 elements",
        ),
    ] {
        let subscribing = Subscribing::new(name, address.to_string(), token);
        let subscription = p.subscribe(subscribing, vec![leaf]).unwrap();
        let start = std::time::Instant::now();
        let said = loop {
            let said = subscription.state().trouble.unwrap_or_default();
            if said.contains(expected) || start.elapsed() > LONG {
                break said;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(said.contains(expected), "{said}");
    }
    drop(versions);
    thread.join().unwrap();
    p.finish().unwrap();
}

/// Records why there is no link.
struct Unlinked(mpsc::Sender<String>);

impl Intake for Unlinked {
    fn has_room(&mut self) -> bool {
        true
    }

    fn take(&mut self, _: &Received) -> Result<(), String> {
        Ok(())
    }

    fn end(&mut self, _: u64, _: Option<&str>) {}

    fn linked(&mut self, ended: Option<&str>) {
        // The receiver is gone at the end of the test.
        _ = self.0.send(ended.unwrap_or("linked").to_owned());
    }
}

#[test]
fn intake_is_told_why_the_publisher_is_not_found() {
    let (address, versions, thread) = publisher(Publication::new("policy", token()), SHAPES);
    let listen = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (stranger, gone) = (listen(), listen());
    let addresses = [
        address,
        stranger.local_addr().unwrap(),
        gone.local_addr().unwrap(),
    ];
    drop(gone);
    std::thread::spawn(move || {
        use std::io::Write as _;
        for client in stranger.incoming() {
            _ = client.and_then(|mut client| client.write_all(&[b'x'; 4096]));
        }
    });
    let mut p = Program::builder().devices(1).alone().unwrap();
    let [publisher, stranger, gone] = addresses.map(|address| address.to_string());
    for (address, expected) in [
        (
            &publisher,
            format!("the publisher at {publisher} has another secret or another name"),
        ),
        (
            &stranger,
            format!("the program that listens at {stranger} is no publisher of mpmd"),
        ),
        (
            &gone,
            format!("no publisher answers at {gone}: Connection refused"),
        ),
    ] {
        let (sender, reasons) = mpsc::channel();
        let subscribing = Subscribing::new("policy", address, Token::new([8; 32]));
        let wanted = vec![wanted_here(&p)];
        let subscription = p
            .subscribe_with(subscribing, wanted, Box::new(Unlinked(sender)))
            .unwrap();
        let said = reasons.recv_timeout(LONG).unwrap();
        assert!(said.starts_with(&expected), "{said}");
        drop(subscription);
    }
    drop(versions);
    thread.join().unwrap();
    p.finish().unwrap();
}

#[test]
fn new_publisher_gives_versions_of_any_number() {
    let publication = || Publication::new("policy", token()).dtype(DType::Bf16);
    let (address, versions, thread) = publisher(publication(), SHAPES);
    let mut p = Program::builder().devices(4).alone().unwrap();
    let subscribing = Subscribing::new("policy", address.to_string(), token());
    let mut subscription = p.subscribe(subscribing, wanted(&p)).unwrap();
    versions.send(7).unwrap();
    check_all(&next(&mut p, &mut subscription, 7), 7);
    drop(versions);
    thread.join().unwrap();
    let mut taken = 1;
    for version in [2, 2, 9] {
        let (_, versions, thread) = publisher(publication().listen(address), SHAPES);
        versions.send(version).unwrap();
        let start = std::time::Instant::now();
        taken += 1;
        while subscription.state().versions < taken {
            assert!(start.elapsed() < LONG, "{:?}", subscription.state());
            std::thread::sleep(Duration::from_millis(5));
        }
        check_all(&next(&mut p, &mut subscription, version), version);
        assert!(subscription.next(&mut p).unwrap().is_none());
        drop(versions);
        thread.join().unwrap();
    }
    drop(subscription);
    p.finish().unwrap();
}

#[test]
fn publish_refuses_other_leaves_and_lower_versions() {
    let mut p = Program::builder().devices(2).alone().unwrap();
    let leaves = tree(&mut p, 0, SHAPES);
    let mut publisher = p
        .publisher(Publication::new("policy", token()), &leaves)
        .unwrap();
    publisher.publish(4, &leaves).unwrap();
    for (version, leaves, expected) in [
        (4, leaves.clone(), "version 4 after version 4"),
        (5, leaves[..2].to_vec(), "2 leaves: there were 3"),
        (
            5,
            tree(&mut p, 0, &[&[6, 640], &[8], &[4, 3, 130]]),
            "in the place of 1, f32[7]",
        ),
    ] {
        let said = publisher.publish(version, &leaves).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
    let host = MpmdArray::from_slice(&[1], &[1.0f32]).unwrap();
    let said = p
        .publisher(Publication::new("policy", token()), &vec![host])
        .err()
        .unwrap();
    assert!(said.to_string().contains("0: is uncommitted"), "{said}");
    let address = publisher.address().unwrap().to_string();
    let twice = vec![wanted_here(&p), wanted_here(&p)];
    let said = p
        .subscribe(Subscribing::new("policy", address, token()), twice)
        .err()
        .unwrap();
    assert!(said.to_string().contains("1 is wanted twice"), "{said}");
    drop(publisher);
    p.finish().unwrap();
}

fn wanted_here(p: &Program) -> WantedLeaf {
    let all = p.mesh(&[("y", -1)]).unwrap().replicated();
    WantedLeaf::new("1", ShapedArray::new(&[7], DType::F32), all)
}

#[test]
fn publisher_whose_values_never_come_ends_in_time() {
    let mut p = Program::builder().devices(1).alone().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let on = Sharding::single_device(p.topology().device_ids()[0]);
    let slow = p.array_from_fn(
        ShapedArray::new(&[2], DType::F32),
        on,
        move |_, mut view| {
            _ = wait.lock().unwrap().recv();
            Ok(view.fill(1.0f32)?)
        },
    );
    let slow = vec![slow.unwrap()];
    let mut publisher = p
        .publisher(Publication::new("policy", token()), &slow)
        .unwrap();
    publisher.publish(1, &slow).unwrap();
    let start = std::time::Instant::now();
    drop(publisher);
    assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
    drop(go);
    p.finish().unwrap();
}

/// Asserts counts, not bytes: the system's allocator keeps some memory of each thread that it has
/// seen, until it has as many arenas as it wants.
#[test]
fn links_that_end_leave_no_entries_at_the_publisher() {
    let mut training = Program::builder().devices(3).alone().unwrap();
    let leaves = tree(&mut training, 1, SHAPES);
    let publication = Publication::new("policy", token());
    let mut publisher = training.publisher(publication, &leaves).unwrap();
    publisher.publish(1, &leaves).unwrap();
    let address = publisher.address().unwrap().to_string();
    let holders = || std::sync::Arc::strong_count(&publisher.shared);
    let before = holders();

    let mut p = Program::builder().devices(2).alone().unwrap();
    for _ in 0..20 {
        let subscribing = Subscribing::new("policy", address.clone(), token());
        let wanted = vec![wanted_here(&p)];
        let subscription = p.subscribe(subscribing, wanted).unwrap();
        assert_eq!(subscription.wait(1, LONG), Some(1));
    }

    // The thread of a link ends a moment after it.
    let start = std::time::Instant::now();
    while holders() > before && start.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(holders(), before, "no thread of a link is left");
    assert_eq!(publisher.shared.store.link_entries(), 0);
    assert_eq!(publisher.metrics().subscribers, 0);
    drop(publisher);
    training.finish().unwrap();
    p.finish().unwrap();
}
