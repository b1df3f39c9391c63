//! Dumps of an operation's inputs, and their replay by `run_here`.

use std::collections::BTreeSet;
use std::path::Path;

use mpmd_core::prelude::*;
use mpmd_core::{Simulation, run_here};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::common::watchdog;

/// The operation that is dumped: the third call of the kernel, after two arrays.
const OP: u64 = 5;

/// Multiplies `x` by `n`.
fn scale() -> impl Kernel<In = (MpmdArray, MpmdArray), Out = MpmdArray> {
    kernel(
        |x: &ShapedArray, _: &ShapedArray| Ok(x.clone()),
        |x: View<f32>, n: View<i32>, mut y: ViewMut<f32>| {
            y.iter_mut().zip(x.iter()).for_each(|(y, x)| *y = x * n[0] as f32);
            Ok(())
        },
    )
}

/// Scales an array on four devices six times, with each call replayed if `replays`. The input of
/// each call is donated.
fn scaled(processes: usize, folder: &Path, replays: bool) {
    let job = Simulation::new(processes, 4).settings(|settings| settings.dump(OP, folder));
    let results = job.run(|p| {
        let mesh = p.mesh(&[("x", 4)])?;
        let rows = mesh.sharding(spec!["x"]);
        let scale = p.jit(scale()).on(&mesh).donate("0").outputs(rows.clone()).build()?;
        let x = MpmdArray::from_slice(&[8], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?;
        let mut x = p.device_put(&x, rows)?;
        let n = p.device_put(&MpmdArray::scalar(3i32), mesh.replicated())?;
        let step = |p: &mut Program, x: MpmdArray| scale.call(p, (x, n.clone()));
        if replays {
            let (y, captured) = p.capture(x, step)?;
            x = y;
            for _ in 0..5 {
                x = captured.replay(p, x)?;
            }
        } else {
            for _ in 0..6 {
                x = step(p, x)?;
            }
        }
        for shard in x.addressable_shards()? {
            let first = (shard.device.0 * 2 + 1) as f32 * 3f32.powi(6);
            assert_eq!(shard.data.as_slice::<f32>()?[0], first);
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn inputs_of_an_operation_are_written_and_run_again() {
    let _limit = watchdog(60);
    for (processes, replays) in [(1, false), (2, false), (4, false), (2, true)] {
        let folder = tempfile::tempdir().unwrap();
        scaled(processes, folder.path(), replays);
        let names = std::fs::read_dir(folder.path()).unwrap();
        let names: BTreeSet<_> =
            names.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        let name = |device: u32| format!("operation-{OP}-device-{device}.safetensors");
        assert_eq!(names, (0..4).map(name).collect());
        for device in 0..4 {
            let path = folder.path().join(name(device));
            let [x, n] = HostArray::read_dump(&path).unwrap().try_into().unwrap();
            let values = |times: i32| {
                let first = (device * 2 + 1) as f32;
                [first, first + 1.0].map(|value| value * 3f32.powi(times))
            };
            assert_eq!(x.to_vec::<f32>().unwrap(), values(2));
            assert_eq!(n.to_vec::<i32>().unwrap(), [3]);
            let y = run_here(scale(), &(x, n)).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), values(3));
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            assert!(text.contains("dump.rs:") && text.contains("jit "), "{text}");
        }
    }
}

#[test]
fn operation_goes_on_if_its_inputs_cannot_be_written() {
    let file = tempfile::NamedTempFile::new().unwrap();
    scaled(2, &file.path().join("folder"), false);
}

#[test]
fn files_that_are_no_dumps_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.safetensors");
    let refused = |text: &str| {
        let error = HostArray::read_dump(&path).unwrap_err();
        assert!(
            matches!(&error, Error::Dump { .. }) && error.to_string().contains(text),
            "{error}"
        );
        assert!(error.to_string().contains("broken.safetensors"), "{error}");
    };
    refused("No such file");
    // Reading it as a file would wait for its writer.
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    refused("it is no regular file");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "nothing of that").unwrap();
    refused("header");
    let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0; 4]);
    std::fs::write(&path, bytes).unwrap();
    refused("\"w\" is not the number of an input");
}
