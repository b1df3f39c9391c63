//! The copies between host and device in a step.

use mpmd_core::Result;
use mpmd_core::pipeline::Schedule;
use mpmd_core::prelude::*;
use mpmd_layout::topology::DeviceKind;

use crate::model::{Settings, microbatches, pipeline};
use crate::pipelines::update;

/// The kinds of copies that leave a device, or reach one.
const KINDS: [&str; 4] = [
    "pinned_to_device",
    "pageable_to_device",
    "device_to_pinned",
    "device_to_pageable",
];

/// Returns the bytes of copies of each kind in steps 3 and 4 of a training, whose microbatches are
/// on the devices before.
fn copied(settings: Settings, schedule: &str) -> Result<[u64; 4]> {
    let stages = settings.stages;
    let mut p = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .devices(stages)
        .alone()?;
    let mut model = pipeline(&mut p, settings)?;
    let schedule = Schedule::named(schedule, stages, 4, None)?;
    let ends = [model.mesh(0).clone(), model.mesh(stages - 1).clone()];
    let mut batches = Vec::new();
    for step in 0..5 {
        batches.push(microbatches(
            &mut p,
            [&ends[0], &ends[1]],
            stages,
            (step, 4),
        )?);
    }
    let driver = softcuda::driver().expect("the driver is loaded");
    for (step, batch) in batches.into_iter().enumerate() {
        if step == 3 {
            driver.reset();
        }
        let output = model.train_step(&mut p, &schedule, batch)?;
        let loss = output.loss.sum.clone();
        update(&mut p, &mut model, output)?;
        p.step_end()?;
        for (_, param) in (0..stages).flat_map(|stage| model.params(stage)) {
            param.block_until_ready()?;
        }
        loss.block_until_ready()?;
    }
    let found = KINDS.map(|kind| driver.bytes(kind));
    p.finish()?;
    Ok(found)
}

#[test]
fn steps_copy_nothing_between_host_and_device() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    // The runner makes the gradient of each microbatch's loss on the host.
    let expected = [2 * 4 * size_of::<f32>() as u64, 0, 0, 0];
    let settings = Settings {
        stages: 2,
        dropout: 0.3,
        split: false,
    };
    assert_eq!(copied(settings, "1f1b").unwrap(), expected, "{KINDS:?}");
    let settings = Settings {
        split: true,
        ..settings
    };
    assert_eq!(
        copied(settings, "zb-h1").unwrap(),
        expected,
        "{KINDS:?}, split"
    );
}
