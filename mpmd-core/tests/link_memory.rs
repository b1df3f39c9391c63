//! The memory that a subscriber keeps of links that have ended. A test binary of its own, since it
//! counts all memory of the process.

use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::weights::{Publication, Subscribing, Subscription, WantedLeaf};
use mpmd_rendezvous::Token;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const SOON: Duration = Duration::from_secs(60);

/// More operations than a program remembers.
const REMEMBERED: usize = 8192 + 100;

/// Largest growth in bytes that does not count, such as that of a buffer which a thread is about to
/// drop.
const NOISE: usize = 64 << 10;

fn token() -> Token {
    Token::new([7; 32])
}

/// Publishes one version in a job of its own, until `taken` ends.
fn publish(address: SocketAddr, version: u64, taken: &mpsc::Receiver<()>) {
    let mut p = Program::builder().alone().unwrap();
    let on = Sharding::single_device(DeviceId(0));
    let fill =
        move |_: &_, mut view: mpmd_core::kernel::ViewMut<'_>| Ok(view.fill(version as f32)?);
    let tree = vec![p.array_from_fn(f32s([16]), on, fill).unwrap()];
    let publication = Publication::new("policy", token()).listen(address);
    let mut publisher = p.publisher(publication, &tree).unwrap();
    publisher.publish(version, &tree).unwrap();
    _ = taken.recv_timeout(SOON);
    drop(publisher);
    p.finish().unwrap();
}

/// Takes a version from a publisher that then ends. Returns after the end of the link.
fn link(p: &mut Program, subscription: &mut Subscription, address: SocketAddr, version: u64) {
    let (taken, is_taken) = mpsc::channel();
    let publisher = std::thread::spawn(move || publish(address, version, &is_taken));

    let start = Instant::now();
    loop {
        let next = subscription.next(p).unwrap();
        p.step_end().unwrap();
        if let Some((number, _)) = next {
            assert_eq!(number, version);
            break;
        }
        assert!(start.elapsed() < SOON, "{:?}", subscription.state());
        std::thread::sleep(Duration::from_millis(1));
    }

    drop(taken);
    publisher.join().unwrap();
    while subscription.state().is_linked {
        assert!(start.elapsed() < SOON, "{:?}", subscription.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn ended_links_leave_no_memory() {
    // Free a moment ago; nothing else here takes ports of its own choice.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|taken| taken.local_addr());
    let address = free.unwrap();
    let mut p = Program::builder().alone().unwrap();
    let on = Sharding::single_device(DeviceId(0));
    let wanted = vec![WantedLeaf::new("0", f32s([16]), on)];
    let subscribing = Subscribing::new("policy", address.to_string(), token());
    let mut subscription = p.subscribe(subscribing, wanted).unwrap();

    // Each call is an operation, of which the program remembers the last ones.
    for _ in 0..REMEMBERED {
        assert!(subscription.next(&mut p).unwrap().is_none());
    }

    let mut live = Vec::new();
    for version in 1..=20 {
        link(&mut p, &mut subscription, address, version);
        live.push(ALLOCATOR.current_usage());
    }
    let before = *live[3..8].iter().min().unwrap();
    let after = *live[15..].iter().min().unwrap();
    assert!(after < before + NOISE, "{live:?}");
    drop(subscription);
    p.finish().unwrap();
}
