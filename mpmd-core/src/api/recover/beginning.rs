//! Losses while an epoch begins: between joining at the rendezvous, connecting, and the first
//! operations.

use std::time::Duration;

use fastrand::Rng;
use mpmd_base::ProcessId;
use mpmd_base::block::{Instant, Mutex, now, thread};
use mpmd_layout::aval::f32s;
use mpmd_layout::spec;

use crate::api::program::{Program, Simulation};
use crate::error::Result;
use crate::kernel::elementwise;

const STEPS: u64 = 30;

/// The longest time of a job, in simulated time. Far below the peer timeout, after which a lost
/// process is noticed in any case.
const QUICK: Duration = Duration::from_secs(20);

/// A job whose processes are lost in bursts, each while the epoch after the one before begins.
#[derive(Debug)]
struct Bursts {
    seed: u64,
    processes: usize,
    /// The times in microseconds at which processes are lost. Those that come later are in it too.
    losses: Vec<(ProcessId, u64)>,
    /// The times in microseconds at which other processes come.
    comers: Vec<u64>,
    shrinks: bool,
}

impl Bursts {
    fn of(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let processes = random.usize(2..5);
        // Process `order[0]` stays, so the job is never lost. Joining takes a few milliseconds.
        let first = random.u64(20_000..40_000);
        let mut losses = Vec::new();
        let mut comers = Vec::new();
        let mut order: Vec<u32> = (0..processes as u32).collect();
        random.shuffle(&mut order);

        let burst = random.usize(1..processes);
        for victim in order.drain(1..=burst) {
            losses.push((ProcessId(victim), first + random.u64(..200)));
            comers.push(first + random.u64(..3_000));
        }
        // Also those that have just come.
        order.remove(0);
        order.extend((0..burst as u32).map(|comer| processes as u32 + comer));
        random.shuffle(&mut order);
        for victim in order.into_iter().take(random.usize(1..processes)) {
            let at = first + random.u64(..12_000);
            losses.push((ProcessId(victim), at));
            comers.push(at + random.u64(..3_000));
        }
        Self {
            seed,
            processes,
            losses,
            comers,
            shrinks: random.bool(),
        }
    }

    fn simulation(&self) -> Simulation {
        let processes = self.processes;
        let mut job = Simulation::new(processes, processes).seed(self.seed);
        if self.shrinks {
            job = job.shrink_devices_stay();
        }
        for (process, after) in &self.losses {
            job = job.lose_after(*process, Duration::from_micros(*after));
        }
        for after in &self.comers {
            job = job.spare_after(Duration::from_micros(*after));
        }
        job
    }

    /// Adds 1 to each of twelve numbers in each step. Every process tells the others a value before
    /// and after, as a serving program does. Returns the sum of the numbers.
    fn count(p: &mut Program) -> Result<f32> {
        for from in 0..p.processes() as u32 {
            let told = p.broadcast_value(ProcessId(from), from, || Ok(from))?;
            assert_eq!(told, from);
        }
        let mesh = p.mesh(&[("x", -1)])?;
        let here = mesh.sharding(spec!["x"]);
        let add = p
            .jit(elementwise(|x: f32| x + 1.0))
            .on(&mesh)
            .outputs(&here)
            .build()?;
        let mut x = p.array_from_fn(f32s([12]), &here, |_, mut values| Ok(values.fill(0f32)?))?;
        // Without commits, as in a serving program: each epoch begins anew.
        for _ in 0..STEPS {
            x = add.call(p, x)?;
            p.step_end()?;
            x.block_until_ready()?;
            thread::sleep(Duration::from_millis(3));
        }
        let all = p.device_put(&x, mesh.replicated())?.to_host()?;
        Ok(all
            .expect("every process has it")
            .to_vec::<f32>()?
            .iter()
            .sum())
    }
}

#[test]
fn loss_while_an_epoch_begins_is_noticed_at_once() {
    let mut slow = Vec::new();
    for seed in super::tests::seeds(200) {
        let job = Bursts::of(seed);
        let ended: Mutex<Option<Instant>> = Mutex::default();
        let began: Mutex<Option<Instant>> = Mutex::default();
        let (ends, report) = job.simulation().run_recovering(1, |p, _| {
            began.lock().get_or_insert_with(now);
            let sum = Bursts::count(p)?;
            *ended.lock() = Some(now());
            Ok(sum)
        });

        assert_eq!(report.left, [""; 0], "{job:?}");
        for (process, end) in (0..).map(ProcessId).zip(&ends) {
            let is_lost = job.losses.iter().any(|(lost, _)| *lost == process);
            match end {
                Ok(sum) => assert!(sum.is_none_or(|sum| sum == 12.0 * STEPS as f32), "{job:?}"),
                Err(error) => assert!(is_lost, "{job:?}: process {process}: {error}"),
            }
        }
        if let (Some(began), Some(ended)) = (*began.lock(), *ended.lock()) {
            let took = ended.saturating_duration_since(began);
            if took >= QUICK {
                slow.push((took, job));
            }
        }
    }
    assert!(slow.is_empty(), "{} jobs: {slow:#?}", slow.len());
}
