//! Runs whole programs over a transport that the waiting threads drive.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Instant, Mutex, Spin, thread};
use mpmd_memory::SharedBuffer;
use mpmd_proto::Header;
use mpmd_transport::inproc::{Fabric, FabricFaults, Inproc};
use mpmd_transport::{Handler, Parking, Payload, Ticket, Transport, TransportError};

use crate::api::program::Builder;
use crate::prelude::*;

/// Interval at which a background thread drives the transport, for events that no thread waits for.
const NOW_AND_THEN: Duration = Duration::from_millis(5);

type Event = Box<dyn FnOnce(&dyn Handler) + Send>;

/// An `inproc` transport that queues its events until a thread fetches them.
struct Driven {
    inner: Arc<Inproc>,
    door: Arc<TransportHandler>,
}

#[derive(Default)]
struct TransportHandler {
    state: Mutex<State>,
    changed: Condvar,
    /// Locked by the thread that passes events to the handler, which keeps them in order.
    driver: Mutex<Option<Arc<dyn Handler>>>,
    closed: AtomicBool,
    /// Number of events that waiting threads have fetched.
    by_waiters: AtomicUsize,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    changes: u32,
}

impl TransportHandler {
    fn push(&self, event: Event) {
        self.change(|state| state.events.push_back(event));
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.changes += 1;
        self.changed.notify_all();
    }

    fn drive(&self) -> usize {
        // The thread that holds the lock handles these events too.
        let Some(driver) = self.driver.try_lock() else {
            return 0;
        };
        let Some(handler) = &*driver else { return 0 };
        let mut count = 0;
        loop {
            let event = self.state.lock().events.pop_front();
            let Some(event) = event else { break };
            event(&**handler);
            count += 1;
        }
        count
    }
}

impl Handler for TransportHandler {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        self.push(Box::new(move |handler| {
            handler.arrived(from, header, payload)
        }));
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        self.push(Box::new(move |handler| handler.done(ticket, result)));
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        self.push(Box::new(move |handler| handler.peer_down(peer, why)));
    }
}

impl Transport for Driven {
    fn name(&self) -> &'static str {
        "driven"
    }

    fn process(&self) -> ProcessId {
        self.inner.process()
    }

    fn processes(&self) -> usize {
        self.inner.processes()
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        *self.door.driver.lock() = Some(handler);
        self.inner.start(self.door.clone());
        let door = self.door.clone();
        thread::spawn(move || {
            while !door.closed.load(Ordering::Relaxed) {
                thread::sleep(NOW_AND_THEN);
                door.drive();
            }
        });
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        self.inner.post(to, header, payload, ticket);
    }

    fn progress(&self) -> bool {
        let count = self.door.drive();
        self.door.by_waiters.fetch_add(count, Ordering::Relaxed);
        count > 0
    }

    fn parking(&self) -> Option<Parking> {
        Some(Parking(self.door.state.lock().changes))
    }

    fn park(&self, parking: Parking, deadline: Instant) {
        let mut state = self.door.state.lock();
        while Parking(state.changes) == parking && Instant::now() < deadline {
            self.door.changed.wait_until(&mut state, deadline);
        }
        drop(state);
        self.progress();
    }

    fn wake(&self) {
        self.door.change(|_| {});
    }

    fn shutdown(&self, deadline: Duration) {
        self.inner.shutdown(deadline);
        self.door.closed.store(true, Ordering::Relaxed);
        self.door.drive();
        *self.door.driver.lock() = None;
        drop(std::mem::take(&mut self.door.state.lock().events));
    }
}

/// Sums the input over all devices and adds one.
struct SumOfAll;

impl Kernel for SumOfAll {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()).all_reduce("x", f32s([1])))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let mut sum = [x.as_slice::<f32>()?.iter().sum::<f32>()];
        cx.all_reduce("x", &mut sum)?;
        Ok(y.fill(sum[0] + 1.0)?)
    }
}

/// Moves values back and forth between two processes, and through a collective of both, 40 times.
/// Returns the values that this process reads.
fn to_and_fro(p: &mut Program) -> Result<Vec<Option<Vec<f32>>>> {
    let mesh = p.mesh(&[("x", 2)])?;
    let sides = mesh.split("x")?;
    let sum = p
        .jit(SumOfAll)
        .on(&mesh)
        .outputs(mesh.sharding(spec!["x"]))
        .build()?;
    let mut x = p.array_from_fn(f32s([2]), mesh.sharding(spec!["x"]), |_, mut view| {
        Ok(view.fill(0.25f32)?)
    })?;
    let mut read = Vec::new();
    for round in 0..40 {
        x = p.device_put(&x, sides[round % 2].replicated())?;
        read.push(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?);
        x = p.device_put(&x, mesh.sharding(spec!["x"]))?;
        let all = sum.call(p, x)?;
        x = p.device_put(&all, mesh.replicated())?;
        let value = x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?;
        read.push(value.map(|value| vec![value[0] % 64.0]));
        x = p.array_from_fn(f32s([2]), mesh.sharding(spec!["x"]), move |_, mut view| {
            Ok(view.fill(round as f32)?)
        })?;
    }
    Ok(read)
}

#[test]
fn results_do_not_depend_on_driver_or_spin_setting() {
    let expected: Vec<_> = crate::api::program::Simulation::new(2, 2)
        .run(to_and_fro)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    for spin in [
        Spin::Auto,
        Spin::Never,
        Spin::For(Duration::from_micros(200)),
    ] {
        let fabric = Fabric::new(2, FabricFaults::default());
        let one = |process: u32| {
            let door = Arc::<TransportHandler>::default();
            let transport = Arc::new(Driven {
                inner: fabric.endpoint(ProcessId(process)),
                door: door.clone(),
            });
            let mut p = Builder::default()
                .devices(2)
                .spin(spin)
                .over(transport)
                .unwrap();
            let read = to_and_fro(&mut p).unwrap();
            p.finish().unwrap();
            (read, door.by_waiters.load(Ordering::Relaxed))
        };
        let found = thread::scope(|scope| {
            let threads = [0, 1].map(|process| scope.spawn(move || one(process)));
            threads.map(|thread| thread.join().unwrap())
        });
        for ((read, by_waiters), expected) in found.into_iter().zip(&expected) {
            assert_eq!(read, *expected, "{spin:?}");
            assert!(by_waiters > 0, "waiting threads fetch events: {spin:?}");
        }
    }
}
