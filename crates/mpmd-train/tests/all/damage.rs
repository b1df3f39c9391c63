//! Checkpoints that cannot be restored, and saves that cannot be written: one message everywhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use mpmd_core::Simulation;
use mpmd_core::launch::testing::Processes;
use mpmd_core::prelude::*;
use mpmd_train::optimizer::Sgd;
use mpmd_train::{Checkpoints, Run};
use rustix::process::{Resource, Rlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;
use tempfile::TempDir;

use crate::chain::chain;
use crate::stages::{params, trainer, windows};

/// Saves steps 2 and 4 of the chain in two stages. Returns the folder.
fn saved(file_bytes: u64) -> (TempDir, Checkpoints) {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path()).file_bytes(file_bytes);
    let results = Simulation::new(2, 4).run(|p| {
        let run = Run::steps(4)
            .progress(false)
            .checkpoints(to.clone())
            .save_every(2);
        chain(p, 2, false)?.run(p, run, &windows())
    });
    results
        .into_iter()
        .for_each(|result| assert_eq!(result.unwrap().steps, 4));
    (folder, to)
}

/// Returns the error of a restore, which must be the same on every process and change nothing, and
/// after which the older checkpoint must still load.
fn refused(to: &Checkpoints) -> String {
    let results = Simulation::new(4, 4).run(|p| {
        let mut trainer = chain(p, 2, false)?;
        let before = params(p, &trainer)?;
        let said = trainer.restore(p, to).unwrap_err().to_string();
        assert_eq!((trainer.steps(), params(p, &trainer)?), (0, before));
        assert_eq!(trainer.restore(p, &to.clone().at(2))?, Some(2));
        Ok(said)
    });
    let said: Vec<String> = results.into_iter().map(Result::unwrap).collect();
    assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
    let (said, advice) = said[0]
        .split_once(". There is an older checkpoint: ")
        .unwrap();
    let damaged = advice
        .strip_prefix("to continue after step 2, remove ")
        .unwrap();
    // The advice leads to the older one.
    let hidden = format!("{damaged}.hidden");
    fs::rename(damaged, &hidden).unwrap();
    let results = Simulation::new(4, 4).run(|p| chain(p, 2, false)?.restore(p, to));
    results
        .into_iter()
        .for_each(|result| assert_eq!(result.unwrap(), Some(2)));
    fs::rename(hidden, damaged).unwrap();
    said.to_owned()
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Returns the path of a file of step 4.
fn file(folder: &TempDir, name: &str) -> PathBuf {
    folder.path().join("step-00000004").join(name)
}

#[test]
fn flipped_bit_names_file_array_and_region() {
    let (folder, to) = saved(1 << 30);
    let path = file(&folder, "model.safetensors");
    // The values end with the last layer's second state.
    change(&path, |bytes| *bytes.last_mut().unwrap() ^= 4);
    let said = refused(&to);
    let problem = "optimizer/square/layers.3: region [0..8]: damaged: hash ";
    assert!(
        said.starts_with(&format!("{}: {problem}", path.display())),
        "{said}"
    );
    assert!(said.contains(" is expected, "), "{said}");
}

#[test]
fn flipped_bit_anywhere_is_found() {
    let (folder, to) = saved(1 << 30);
    let names = ["model.safetensors", "pieces-0.json", "pieces-1.json"];
    let files = names.iter().map(|name| file(&folder, name));
    for path in files.chain([folder.path().join("step-00000004.json")]) {
        let whole = fs::read(&path).unwrap();
        for place in (0..whole.len()).step_by(whole.len() / 12) {
            change(&path, |bytes| bytes[place] ^= 1 << (place % 8));
            let results = Simulation::new(1, 4).run(|p| chain(p, 2, false)?.restore(p, &to));
            let result = results.into_iter().next().unwrap();
            // A manifest may have another space between its tokens.
            let harmless =
                path.extension().unwrap() == "json" && whole[place].is_ascii_whitespace();
            match result {
                Ok(step) => assert!(harmless && step == Some(4), "{path:?} at {place}"),
                Err(error) => {
                    let said = error.to_string();
                    assert!(
                        said.starts_with(&path.display().to_string()),
                        "{place}: {said}"
                    );
                }
            }
            fs::write(&path, &whole).unwrap();
        }
    }
}

#[test]
fn other_setting_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let with = |heads: usize| Checkpoints::new(folder.path()).setting("heads", heads);
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = chain(p, 2, false)?;
        trainer.save(p, &with(4))?;
        assert_eq!(trainer.restore(p, &with(4))?, Some(0));
        Ok(trainer.restore(p, &with(2)).unwrap_err().to_string())
    });
    let manifest = folder.path().join("step-00000000.json");
    let expected = format!(
        "{}: the checkpoint has heads 4, and this training has heads 2: give the same, or another \
         folder of checkpoints",
        manifest.display()
    );
    results
        .into_iter()
        .for_each(|said| assert_eq!(said.unwrap(), expected));
}

#[test]
fn truncated_and_missing_files_are_named() {
    let (folder, to) = saved(100);
    let path = file(&folder, "model-00001-of-00004.safetensors");
    let bytes = fs::read(&path).unwrap().len();
    change(&path, |bytes| bytes.truncate(bytes.len() - 3));
    let expected = format!(
        "{}: damaged: {bytes} bytes are expected, {} found",
        path.display(),
        bytes - 3
    );
    assert_eq!(refused(&to), expected);
    fs::remove_file(&path).unwrap();
    let missing = format!("{}: No such file or directory (os error 2)", path.display());
    assert_eq!(refused(&to), missing);
    let path = file(&folder, "pieces-1.json");
    change(&path, |bytes| bytes.truncate(bytes.len() - 1));
    let expected = "damaged: it does not have the hash in the manifest";
    assert_eq!(refused(&to), format!("{}: {expected}", path.display()));
    let path = folder.path().join("step-00000004.json");
    change(&path, |bytes| bytes.truncate(bytes.len() / 2));
    let said = refused(&to);
    let expected = format!("{}: no valid manifest of a checkpoint (", path.display());
    assert!(said.starts_with(&expected), "{said}");
}

#[test]
fn arrays_of_another_training_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let results = Simulation::new(2, 4).run(|p| {
        let run = Run::steps(1).progress(false).checkpoints(to.clone());
        trainer(p, true, Sgd::default())?.run(p, run, &windows())?;
        let other = chain(p, 2, false)?.restore(p, &to).unwrap_err();
        let momentum = Sgd {
            momentum: 0.5,
            ..Sgd::default()
        };
        let more = trainer(p, true, momentum)?.restore(p, &to).unwrap_err();
        let step = trainer(p, true, Sgd::default())?
            .restore(p, &to.clone().at(7))
            .unwrap_err();
        Ok([other, more, step].map(|error| error.to_string()))
    });
    let manifest = folder.path().join("step-00000001.json");
    let manifest = manifest.display();
    for result in results {
        let [other, more, step] = result.unwrap();
        let expected = "the checkpoint is of another model: layers.0: f32[8] is expected, no such \
                        array found";
        assert_eq!(other, format!("{manifest}: {expected}"));
        let expected = "the checkpoint is of another optimiser: optimizer/momentum/param: \
                        f32[256,4] is expected, no such array found";
        assert_eq!(more, format!("{manifest}: {expected}"));
        let expected = "there is no checkpoint of step 7, but of [1]";
        assert_eq!(step, format!("{}: {expected}", folder.path().display()));
    }
}

/// The variable that makes a test process one of the job's. Its value is the folder.
const FOLDER: &str = "MPMD_TEST_FULL_DISK";

/// The program of each process of a job in which process 1 can write no large file. Does nothing if
/// the test itself runs.
#[test]
fn full_disk_process() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let error = Program::builder().devices(4).run(|p| -> Result<()> {
        let mut trainer = chain(p, 2, false)?;
        let limited = p.process().0 == 1;
        let run = Run::steps(1 << 40).progress(false).on_step(|report| {
            if limited && report.step == 2 {
                // With a handler for the signal, the limit is an error of the write.
                let flag = Arc::new(AtomicBool::new(false));
                signal_hook::flag::register(SIGXFSZ, flag).unwrap();
                let limit = Rlimit {
                    current: Some(1000),
                    maximum: None,
                };
                setrlimit(Resource::Fsize, limit).unwrap();
            }
        });
        let run = run.checkpoints(Checkpoints::new(&folder)).save_every(5);
        trainer.run(p, run, &windows()).map(drop)
    });
    println!("refused: {}", error.unwrap_err());
}

#[test]
fn full_disk_of_one_process_stops_all_with_its_message() {
    let folder = tempfile::tempdir().unwrap();
    let processes = Processes::new(2, std::env::current_exe().unwrap())
        .args(["--exact", "damage::full_disk_process", "--nocapture"])
        .env(FOLDER, folder.path())
        // Its memory is no file, so the limit does not hold for it.
        .env("MPMD_TRANSPORT", "tcp");
    let mut job = processes.start().unwrap();
    let ends = job.wait().unwrap();
    let line = |text: &str| {
        text.lines()
            .find(|line| line.contains("refused: "))
            .map(str::to_owned)
    };
    let said: Vec<Option<String>> = ends.iter().map(|end| line(&end.stdout)).collect();
    let path = folder.path().join("step-00000005/model.safetensors");
    let problem = "region [0..8]: File too large (os error 27); the save of step 5 is broken, \
                   there is no whole checkpoint";
    let first = said[0]
        .clone()
        .unwrap_or_else(|| panic!("{}", job.report()));
    assert!(
        first.contains(&path.display().to_string()) && first.ends_with(problem),
        "{first}"
    );
    assert_eq!(said[1].as_ref(), Some(&first));
    assert!(!folder.path().join("step-00000005.json").exists());
}

#[test]
fn manifest_that_cannot_be_written_stops_all() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("step-00000003.json");
    let to = Checkpoints::new(folder.path());
    let results = Simulation::new(4, 4).run(|p| {
        let mut trainer = chain(p, 4, false)?;
        let first = p.process().0 == 0;
        // The files are there by now. The manifest is written after this report.
        let run = Run::steps(1 << 40).progress(false).on_step(|report| {
            if first && report.step == 4 {
                fs::create_dir(&blocked).unwrap();
            }
        });
        trainer.run(p, run.checkpoints(to.clone()).save_every(3), &windows())
    });
    let expected = format!(
        "{}: File exists (os error 17); the save of step 3 is broken, there is no whole checkpoint",
        blocked.display()
    );
    for result in results {
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
    assert_eq!(to.steps().unwrap(), [0; 0]);
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(
        left, 3,
        "the lock, the files and the folder in the manifest's place"
    );
}

/// Runs a training that must fail before its first step. Returns the error, which must be the same
/// on every process.
fn refused_before_the_first_step(to: &Checkpoints) -> String {
    let results = Simulation::new(3, 3).run(|p| {
        let mut trainer = chain(p, 3, false)?;
        let said = trainer.run(
            p,
            Run::steps(3).progress(false).checkpoints(to.clone()),
            &windows(),
        );
        assert_eq!(trainer.steps(), 0);
        Ok(said.unwrap_err().to_string())
    });
    let mut said: Vec<String> = results.into_iter().map(Result::unwrap).collect();
    assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
    said.remove(0)
}

#[test]
fn folder_without_room_for_files_stops_before_the_first_step() {
    // Nobody can create files there, not even root.
    let said = refused_before_the_first_step(&Checkpoints::new("/proc"));
    assert!(
        said.starts_with("/proc: no file can be created there: "),
        "{said}"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    let folder = file.path().join("checkpoints");
    let said = refused_before_the_first_step(&Checkpoints::new(&folder));
    assert_eq!(
        said,
        format!("{}: Not a directory (os error 20)", folder.display())
    );
}

#[test]
fn second_job_on_a_folder_is_refused_at_its_start() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = chain(p, 2, false)?;
        let mut said = None;
        // The other job runs meanwhile, between two steps of this one.
        let first = p.process().0 == 0;
        let run = Run::steps(4).progress(false).on_step(|report| {
            if first && report.step == 2 {
                said = Some(refused_before_the_first_step(&Checkpoints::new(
                    folder.path(),
                )));
            }
        });
        trainer.run(p, run.checkpoints(to.clone()).save_every(1), &windows())?;
        Ok(said)
    });
    let said = results.into_iter().next().unwrap().unwrap().unwrap();
    let holder = format!("process {} on ", std::process::id());
    assert!(
        said.starts_with(&format!("{}: {holder}", folder.path().display())),
        "{said}"
    );
    assert!(
        said.contains("saves the checkpoints of another job there"),
        "{said}"
    );
    assert_eq!(to.steps().unwrap(), [1, 2, 3, 4]);
    // It ends with the first job.
    drop(to);
    let results = Simulation::new(1, 4).run(|p| {
        let mut trainer = chain(p, 2, false)?;
        let to = Checkpoints::new(folder.path());
        trainer.restore(p, &to)?;
        trainer.run(p, Run::steps(5).progress(false).checkpoints(to), &windows())
    });
    assert_eq!(results.into_iter().next().unwrap().unwrap().steps, 5);
}
