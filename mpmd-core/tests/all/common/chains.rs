//! Random chains of puts, on random hosts, with large and small arrays. Checks the values at every
//! step and that no memory remains.

use std::time::{Duration, Instant};

use fastrand::Rng;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::{DeviceId, DeviceKind, LinkSpeed, LinkSpeeds, Mesh};
use mpmd_core::{Builder, Simulation};

use super::arrays::{check, values};

const DEVICES: usize = 8;

fn any<T: Clone>(numbers: &mut Rng, choices: &[T]) -> T {
    choices[numbers.usize(..choices.len())].clone()
}

fn any_sharding(numbers: &mut Rng) -> Sharding {
    let mut devices: Vec<DeviceId> = (0..DEVICES as u32).map(DeviceId).collect();
    for i in (1..DEVICES).rev() {
        devices.swap(i, numbers.usize(..i + 1));
    }
    let sharding = match numbers.usize(..8) {
        0 => Sharding::single_device(devices[0]),
        1 => {
            let count = 1 + numbers.usize(..DEVICES);
            Sharding::chunk(numbers.usize(..2) as isize, devices[..count].to_vec()).unwrap()
        }
        _ => {
            let (a, b) = any(
                numbers,
                &[(2, 2), (4, 2), (1, 4), (2, 4), (8, 1), (4, 1), (2, 1)],
            );
            let mesh = Mesh::new(&[("a", a), ("b", b)], devices[..a * b].to_vec()).unwrap();
            let specs = [
                spec![],
                spec!["a"],
                spec![None, "b"],
                spec!["b", "a"],
                spec![None, ("b", "a")],
            ];
            let sharding = mesh.sharding(any(numbers, &specs));
            let sums =
                ["a", "b"].map(|axis| sharding.unreduced(&[axis]).unwrap_or(sharding.clone()));
            any(numbers, &[sharding, sums[0].clone(), sums[1].clone()])
        }
    };
    let memory = [MemoryKind::Device, MemoryKind::Device, MemoryKind::Host];
    sharding.with_memory_kind(any(numbers, &memory))
}

/// Moves an array through six random shardings, on random processes. Panics if a value changes or
/// memory is not freed within 20 seconds. With `gpus` some processes have CUDA devices. With
/// `zero_copy`, even seeds use zero-copy transfers within a host; otherwise `simulation` decides.
pub(crate) fn chain(
    seed: u64,
    gpus: bool,
    simulation: impl Fn(usize, usize) -> Simulation,
    zero_copy: bool,
) {
    let mut numbers = Rng::with_seed(seed);
    let processes = any(&mut numbers, &[1, 2, 4, 8]);
    let most = 1 + numbers.usize(..4);
    let hosts: Vec<usize> = (0..processes).map(|_| numbers.usize(..most)).collect();
    // Without latency every region is passed on from host to host.
    let network = LinkSpeed {
        latency_ns: any(&mut numbers, &[0, 50_000]),
        bytes_per_us: 1200,
    };
    let links = LinkSpeeds {
        network,
        ..LinkSpeeds::default()
    };
    let rows = 8 * (1 + numbers.usize(..16));
    // The larger arrays move in parts and chunks.
    let columns = any(&mut numbers, &[24, 320, 1 << 15]);
    let whole = values(
        &[rows, columns],
        any(&mut numbers, &[DType::I16, DType::I32, DType::I64]),
    );
    let mut steps = Vec::new();
    for _ in 0..6 {
        let options = MoveOptions::default().donate(numbers.usize(..2) == 0);
        steps.push((
            any_sharding(&mut numbers),
            options.may_alias(numbers.usize(..3) > 0),
        ));
    }
    let delay = Duration::from_micros(any(&mut numbers, &[0, 300, 3000]));
    let kind = |numbers: &mut Rng| {
        if gpus && numbers.usize(..3) > 0 {
            DeviceKind::Cuda
        } else {
            DeviceKind::Cpu
        }
    };
    let kinds: Vec<DeviceKind> = (0..processes).map(|_| kind(&mut numbers)).collect();
    let mut simulation = simulation(processes, DEVICES).delays(seed, delay);
    if zero_copy && seed.is_multiple_of(2) {
        simulation = simulation.zero_copy(&hosts);
    }
    let settings = |b: Builder| b.hosts(&hosts).links(links).device_kinds(&kinds);
    let results = simulation.settings(settings).run(|p| {
        let rows = p.mesh(&[("x", DEVICES)])?.sharding(spec!["x"]);
        let mut x = MpmdArray::from_host(whole.clone());
        for (to, options) in &steps {
            x = p.device_put_with(&x, to, *options)?;
            if to.unreduced_axes().is_empty() {
                check(p, &x, &whole)?;
            } else {
                let sum = p.device_put(&x, &rows)?;
                check(p, &sum, &whole)?;
            }
        }
        drop(x);
        let until = Instant::now() + Duration::from_secs(20);
        while p.memory().live + p.memory().host_live > 0 {
            assert!(
                Instant::now() < until,
                "process {} keeps {:?}",
                p.process(),
                p.memory()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    for (process, result) in results.into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("seed {seed}, process {process}: {error}; {kinds:?}"));
    }
}
