//! The launcher as a library call, with programs that do not use mpmd.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_launch::{ExitKind, Launch, LaunchError, OutputMode};

/// Returns a job, not started yet, in which each process runs this shell script.
fn sh(processes: usize, script: &str) -> Launch {
    Launch::new(processes, "sh").args(["-c", script])
}

/// A temporary folder of one test, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("mpmd-launch-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn in_script(&self, script: &str) -> String {
        format!("cd '{}' && {script}", self.0.display())
    }

    /// Returns the text that the script wrote into `file`; empty if the file does not exist.
    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap_or_default()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_job_that_goes_well_has_no_failure() {
    let folder = Folder::new("well");
    let script = folder.in_script(
        "echo $MPMD_RANK/$MPMD_WORLD_SIZE $MPMD_TRANSPORT $MPMD_PEER_TIMEOUT > $MPMD_RANK",
    );
    let job = sh(3, &script)
        .transport(Some("tcp".into()))
        .peer_timeout(Duration::from_millis(2500));
    let outcome = job.run().unwrap();
    assert_eq!((outcome.code(), &outcome.first_failure), (0, &None));
    assert_eq!(outcome.codes, [0, 0, 0]);
    for process in 0..3 {
        assert_eq!(
            folder.read(&process.to_string()),
            format!("{process}/3 tcp 2.5\n")
        );
    }
}

#[test]
fn maximal_peer_timeout_and_grace_do_not_panic() {
    let folder = Folder::new("endless");
    let script = folder.in_script("echo $MPMD_PEER_TIMEOUT > $MPMD_RANK; exit $MPMD_RANK");
    let outcome = sh(2, &script)
        .peer_timeout(Duration::MAX)
        .grace(Duration::MAX)
        .run()
        .unwrap();
    assert_eq!(outcome.codes, [0, 1]);
    assert_eq!(folder.read("0"), "18446744073709552000\n");
}

#[test]
fn the_first_failure_decides_and_the_rest_is_ended() {
    let script = "[ $MPMD_RANK = 1 ] && exit 7; exec sleep 60";
    let outcome = sh(3, script)
        .grace(Duration::from_millis(100))
        .output(OutputMode::Quiet0)
        .run()
        .unwrap();
    let failure = outcome.first_failure.clone().unwrap();
    assert_eq!(
        (failure.processes, failure.how, failure.why),
        (vec![ProcessId(1)], ExitKind::Exit(7), None)
    );
    assert_eq!(outcome.code(), 7);
    assert_eq!(outcome.codes, [143, 7, 143]);
}

#[test]
fn process_that_ignores_sigterm_is_killed() {
    let script = "trap '' TERM; [ $MPMD_RANK = 0 ] && exit 1; sleep 60; sleep 60";
    let outcome = sh(2, script)
        .grace(Duration::from_millis(100))
        .run()
        .unwrap();
    assert_eq!((outcome.code(), outcome.codes), (1, vec![1, 137]));
}

#[test]
fn death_by_signal_ranks_before_its_consequences() {
    // Process 1 sees the pipe of process 0 close before the exit status of process 0 is known.
    let folder = Folder::new("cause");
    let script = folder.in_script(
        "case $MPMD_RANK in \
         0) mkfifo made; mv made pipe; exec 3>pipe; kill -9 $$;; \
         1) while [ ! -p pipe ] && [ $((i += 1)) -lt 600 ]; do sleep 0.05; done; read line <pipe; \
         exit 5;; \
         esac",
    );
    let outcome = sh(2, &script).run().unwrap();
    let failure = outcome.first_failure.unwrap();
    assert_eq!(
        (failure.processes, failure.how),
        (vec![ProcessId(0)], ExitKind::Signal(9))
    );
    assert_eq!(outcome.codes, [137, 5]);
}

#[test]
fn unstartable_program_is_named_and_leaves_nothing() {
    let error = Launch::new(2, "no-such-program-here").run().unwrap_err();
    assert_eq!(
        error,
        LaunchError::NotFound {
            program: "no-such-program-here".into()
        }
    );
    assert_eq!(
        sh(0, "exit").run().unwrap_err(),
        LaunchError::Processes { processes: 0 }
    );
    // The file exists but is not a program.
    let error = Launch::new(1, "/etc/passwd").run().unwrap_err().to_string();
    assert!(error.contains("starting /etc/passwd"), "{error}");
}
