//! Several CUDA devices in a stage.

use mpmd_core::prelude::*;
use mpmd_layout::topology::DeviceKind;

use crate::collectives::{Form, devices, train};

fn run(kind: DeviceKind, form: Form) -> Vec<Vec<f32>> {
    let builder = Program::builder()
        .device_kinds(&[kind])
        .devices(2 * devices(form));
    let mut p = builder.alone().unwrap();
    let found = train(&mut p, form).unwrap();
    p.finish().unwrap();
    found
}

#[test]
fn divided_layers_equal_those_of_cpus() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "4") {
        return;
    }
    for form in [
        Form::Reduced,
        Form::Tree,
        Form::Gathered,
        Form::Scattered,
        Form::Rows,
        Form::Stored,
    ] {
        let (found, expected) = (run(DeviceKind::Cuda, form), run(DeviceKind::Cpu, form));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.concat().iter().zip(expected.concat()) {
            let is_near = (found - expected).abs() < 1e-5 * expected.abs().max(1.0);
            assert!(is_near, "{form:?}: {found}, not {expected}");
        }
    }
    assert_eq!(
        softcuda::driver().map(|driver| driver.races()),
        Some(0),
        "races"
    );
}
