//! The programs that the tests run. Each is a function of a [`Program`], so that the same code runs
//! as processes over tcp and as threads over `inproc`.

mod circling;
mod counters;
mod diverging;
mod examples;
mod flooding;
mod handing;
mod holdings;
mod joining;
mod kinds;
mod leaves;
mod lending;
mod looping;
mod parts;
mod products;
mod publishing;
mod routing;
mod sending;
mod soak;
mod stuck;
mod tight;
mod traced;
mod transfers;

pub use sending::STOPPED;

use mpmd_core::prelude::*;
use mpmd_core::{Builder, Simulation};

/// A function that receives the lines that a program prints.
pub type Say<'a> = dyn FnMut(String) + 'a;

/// A test program and its name.
pub struct Named {
    /// The name by which tests start the program.
    pub name: &'static str,
    /// Changes the settings of the program, except for the number of devices.
    pub settings: fn(Builder) -> Builder,
    /// Number of devices of the job; 0 for one per process.
    pub devices: usize,
    /// Runs the program with its command line arguments.
    pub run: fn(&mut Program, &[&str], &mut Say<'_>) -> Result<()>,
}

const ALL: &[Named] = &[
    Named {
        name: "hello",
        settings: |b| b,
        devices: 0,
        run: parts::hello,
    },
    Named {
        name: "transport",
        settings: |b| b,
        devices: 0,
        run: parts::transport,
    },
    Named {
        name: "products",
        settings: |b| b,
        devices: 0,
        run: products::product,
    },
    Named {
        name: "device_put_uncommitted",
        settings: |b| b,
        devices: 8,
        run: examples::uncommitted,
    },
    Named {
        name: "device_put_across_meshes",
        settings: |b| b,
        devices: 8,
        run: examples::across_meshes,
    },
    Named {
        name: "jit_and_transfer",
        settings: |b| b,
        devices: 8,
        run: examples::jit_and_transfer,
    },
    Named {
        name: "transfers",
        settings: |b| b,
        devices: 8,
        run: transfers::shapes,
    },
    Named {
        name: "routing",
        settings: |b| b,
        devices: 4,
        run: routing::table,
    },
    Named {
        name: "kinds",
        settings: |b| b,
        devices: 8,
        run: kinds::moves,
    },
    Named {
        name: "leaves",
        settings: |b| b,
        devices: 8,
        run: leaves::moves,
    },
    Named {
        name: "eager_limit",
        settings: |b| b,
        devices: 8,
        run: transfers::eager_limit,
    },
    Named {
        name: "large",
        settings: |b| b,
        devices: 8,
        run: transfers::large,
    },
    Named {
        name: "crossing",
        settings: |b| b,
        devices: 2,
        run: tight::crossing,
    },
    Named {
        name: "budget",
        settings: tight::small_memory,
        devices: 3,
        run: tight::budget,
    },
    Named {
        name: "looping",
        settings: looping::short_lead,
        devices: 4,
        run: looping::ring,
    },
    Named {
        name: "flooding",
        settings: flooding::short_lead,
        devices: 0,
        run: flooding::flood,
    },
    Named {
        name: "holdings",
        settings: |b| b,
        devices: 3,
        run: holdings::three,
    },
    Named {
        name: "traced",
        settings: |b| b,
        devices: 4,
        run: traced::steps,
    },
    Named {
        name: "sending",
        settings: |b| b,
        devices: 0,
        run: sending::send,
    },
    Named {
        name: "soak",
        settings: soak::long_lead,
        devices: 0,
        run: soak::soak,
    },
    Named {
        name: "counters",
        settings: |b| b,
        devices: 0,
        run: counters::count_calls,
    },
    Named {
        name: "lending",
        settings: lending::long_lead,
        devices: 0,
        run: lending::lend,
    },
    Named {
        name: "holding",
        settings: |b| b,
        devices: 0,
        run: lending::hold,
    },
    Named {
        name: "circling",
        settings: |b| b,
        devices: 0,
        run: circling::circle,
    },
    Named {
        name: "handing",
        settings: |b| b,
        devices: 0,
        run: handing::hand,
    },
    Named {
        name: "joining",
        settings: |b| b,
        devices: 0,
        run: joining::join,
    },
    Named {
        name: "stuck",
        settings: |b| b,
        devices: 4,
        run: stuck::pipeline,
    },
    Named {
        name: "publishing",
        settings: |b| b,
        devices: 0,
        run: publishing::publish,
    },
    Named {
        name: "subscribing",
        settings: |b| b,
        devices: 0,
        run: publishing::subscribe,
    },
    Named {
        name: "diverging",
        settings: |b| b,
        devices: 4,
        run: diverging::pipeline,
    },
];

/// Returns the program with this name.
///
/// # Panics
///
/// If there is no such program.
pub fn find(name: &str) -> &'static Named {
    ALL.iter()
        .find(|named| named.name == name)
        .unwrap_or_else(|| panic!("no program is named {name:?}"))
}

/// Runs a program as `processes` threads of this process, and returns the output of each.
///
/// # Panics
///
/// If one of the threads fails.
pub fn simulated(name: &str, processes: usize, args: &[&str]) -> Vec<String> {
    let named = find(name);
    let devices = if named.devices == 0 {
        processes
    } else {
        named.devices
    };
    let results = Simulation::new(processes, devices)
        .settings(named.settings)
        .run(|p| {
            let mut said = String::new();
            (named.run)(p, args, &mut |line| {
                said.push_str(&line);
                said.push('\n');
            })?;
            Ok(said)
        });
    let said = |(process, result): (usize, Result<String>)| {
        result.unwrap_or_else(|error| panic!("{name}: process {process} of {processes}: {error}"))
    };
    results.into_iter().enumerate().map(said).collect()
}
