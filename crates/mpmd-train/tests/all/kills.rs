//! Jobs that are killed while they save: the last complete checkpoint always loads.

use std::path::Path;
use std::time::{Duration, Instant};

use mpmd_core::Simulation;
use mpmd_core::launch::testing::Processes;
use mpmd_core::prelude::*;
use mpmd_train::{Checkpoints, Run, Trainer};

use crate::chain::chain;
use crate::stages::windows;

/// The variable that makes a test process one of the job's. Its value is the folder.
const FOLDER: &str = "MPMD_TEST_KILLED";

/// The variable with the number of kills.
const KILLS: &str = "MPMD_TEST_KILLS";

/// The program of each process: restores, then trains and saves without end. Does nothing if the
/// test itself runs.
#[test]
fn killed_process() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let result = Program::builder().devices(4).run(|p| -> Result<()> {
        let mut trainer = chain(p, 2, false)?;
        let to = Checkpoints::new(&folder).keep(3);
        trainer.restore(p, &to)?;
        if p.process().0 == 0 {
            println!("training");
        }
        let run = Run::steps(1 << 40)
            .progress(false)
            .checkpoints(to)
            .save_every(1);
        trainer.run(p, run, &windows()).map(drop)
    });
    result.unwrap();
}

/// Starts two processes and kills one or both of them soon after the start of training, or after
/// the first checkpoint if there is none yet.
fn kill_once(folder: &Path, rng: &mut fastrand::Rng) {
    let processes = Processes::new(2, std::env::current_exe().unwrap())
        .args(["--exact", "kills::killed_process", "--nocapture"])
        .env(FOLDER, folder)
        .peer_timeout(Duration::from_secs(20));
    let mut job = processes.start().unwrap();
    job.wait_for_output_of(0, "training\n")
        .unwrap_or_else(|e| panic!("{e}\n{}", job.report()));
    let (to, deadline) = (
        Checkpoints::new(folder),
        Instant::now() + Duration::from_secs(60),
    );
    while to.steps().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "no checkpoint: {}", job.report());
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_micros(rng.u64(0..100_000)));
    let first = rng.usize(0..2);
    job.kill(first).unwrap();
    if rng.bool() {
        job.kill(1 - first).unwrap();
    }
    job.wait()
        .unwrap_or_else(|error| panic!("{error}\n{}", job.report()));
}

#[test]
fn last_complete_checkpoint_loads_after_every_kill() {
    let kills = std::env::var(KILLS).map_or(12, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let results = Simulation::new(1, 4).run(|p| {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut expected = chain(p, 1, false)?;
        let (mut loaded, mut broken) = (0, 0);
        for _ in 0..kills {
            kill_once(folder.path(), &mut rng);
            let Some(newest) = to.steps()?.pop() else {
                continue;
            };
            assert!(
                newest >= expected.steps(),
                "{newest} after {}",
                expected.steps()
            );
            // Training from the start, without a kill, must give the same bits.
            expected.run(p, Run::steps(newest).progress(false), &windows())?;
            let mut found = chain(p, 1, false)?;
            assert_eq!(found.restore(p, &to)?, Some(newest));
            assert_eq!(values(&found)?, values(&expected)?, "step {newest}");
            loaded += 1;
            let next = format!("step-{:08}", newest + 1);
            broken += u32::from(folder.path().join(next).exists());
        }
        let last = expected.steps();
        println!("{loaded} of {kills} kills left a checkpoint, {broken} a broken save too; {last}");
        assert!(2 * loaded >= kills, "{loaded} of {kills}");
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// Returns the bytes of all parameters and of the optimiser's state.
fn values(trainer: &Trainer<MpmdArray>) -> Result<Vec<Vec<u8>>> {
    let arrays = trainer
        .pipeline()
        .params(0)
        .into_iter()
        .chain(trainer.optimizer().state(0));
    let bytes = |(_, array): (String, MpmdArray)| {
        Ok(array
            .to_host()?
            .map_or_else(Vec::new, |values| values.bytes().to_vec()))
    };
    arrays.map(bytes).collect()
}
