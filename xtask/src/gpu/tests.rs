//! The tests of a kit, each in a process of its own: a device that one test has made fail stays
//! failed in that process.

use std::fs::{self, File};
use std::io::Write as _;
use std::process::Command;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::kit::KitTest;
use super::turn::{StagePlace, StageTurn, TESTS};

/// Time limit of one test.
const EACH: Duration = Duration::from_secs(60);

/// Remaining time below which no further test is started.
const WORTH_A_START: Duration = Duration::from_secs(3);

/// The kinds of tests, which run in different stages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Usual,
    /// Kills or stops a process that shares the GPU, after which a driver may hang.
    Kill,
    /// Always uses the driver in software.
    Software,
}

/// The result of a test.
enum Outcome {
    Passed,
    /// The output says that the test was skipped.
    Skipped,
    Failed(String),
    NotRun,
}

impl Kind {
    fn of(test: &KitTest) -> Self {
        const KILLS: [&str; 4] = ["killed_", "::stop_", "ended_process", "dead_process"];
        const SOFTWARE: [(&str, &str); 2] = [
            ("", "with_a_driver_in_software::"),
            ("tests-all", "cuda_nccl::"),
        ];
        let is_software =
            |(file, module): &(&str, &str)| test.file.ends_with(file) && test.name.contains(module);
        if SOFTWARE.iter().any(is_software) {
            Self::Software
        } else if KILLS.iter().any(|word| test.name.contains(word)) {
            Self::Kill
        } else {
            Self::Usual
        }
    }
}

/// Runs the tests of a kind, `jobs` at once. Tests that need the driver in software run only with
/// it.
pub(super) fn run(turn: &mut StageTurn<'_>, kind: Kind, jobs: usize) {
    let place = turn.place;
    let is_wanted = |test: &&KitTest| match Kind::of(test) {
        Kind::Software => kind == Kind::Usual && place.software,
        of => of == kind,
    };
    let tests: Vec<&KitTest> = place.kit.tests.iter().filter(is_wanted).collect();
    if tests.is_empty() {
        turn.failed("the kit has no tests of this kind", "");
        return;
    }
    let (until, next) = (turn.until, Mutex::new(tests.iter().enumerate()));
    let (sender, results) = mpsc::channel();
    let mut counts = [0; 4];
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let test = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((number, test)) = test else { break };
                    let begin = Instant::now();
                    let (outcome, output) = one(place, test, number, until);
                    // The receiver outlives all senders.
                    let _ = sender.send((*test, outcome, begin.elapsed(), output));
                }
            });
        }
        drop(sender);
        for (test, outcome, took, output) in results {
            let (index, word) = match &outcome {
                Outcome::Passed => (0, "ok"),
                Outcome::Skipped => (1, "skipped"),
                Outcome::Failed(_) => (2, "FAILED"),
                Outcome::NotRun => (3, "NOTRUN"),
            };
            counts[index] += 1;
            let mut line = format!("{word:8} {:5.1} s  {test}\n", took.as_secs_f64());
            if let Outcome::Failed(how) = outcome {
                turn.failed(&format!("{test}: {how}"), &output);
                line += &format!("    {how}\n{output}\n\n");
            }
            let written = place
                .file(TESTS)
                .and_then(|mut file| file.write_all(line.as_bytes()));
            if let Err(error) = written {
                turn.failed(TESTS, &error.to_string());
            }
        }
    });
    let [passed, skipped, failed, not_run] = counts;
    turn.detail = format!("{passed} passed, {skipped} skipped, {failed} failed, {not_run} not run");
    turn.is_cut = not_run > 0;
}

/// Runs one test. Returns its result, and the last part of its output.
fn one(place: &StagePlace<'_>, test: &KitTest, number: usize, until: Instant) -> (Outcome, String) {
    let now = Instant::now();
    if place.is_stopped() || until.saturating_duration_since(now) < WORTH_A_START {
        return (Outcome::NotRun, String::new());
    }
    let path = place.scratch.join(format!("test-{number}"));
    let files = File::create(&path).and_then(|file| Ok((file.try_clone()?, file)));
    let (stdout, stderr) = match files {
        Ok(files) => files,
        Err(error) => return (Outcome::Failed(error.to_string()), String::new()),
    };
    let mut command = Command::new(place.kit.folder.join(&test.file));
    command.args(["--exact", &test.name, "--nocapture", "--test-threads=1"]);
    // Other tests install the driver themselves, where they need it.
    if place.software && place.kit.content.links_cuda() {
        place.give_software(&mut command);
    }
    let end = place.ended(command.stdout(stdout).stderr(stderr), until.min(now + EACH));
    let output = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
    let _ = fs::remove_file(&path);
    let is_skipped = || {
        output
            .lines()
            .any(|line| line.trim_start().to_lowercase().starts_with("skipped"))
    };
    let outcome = match end.failure() {
        Some(how) => Outcome::Failed(how),
        None if !output.contains("1 passed") => Outcome::Failed("there is no such test".to_owned()),
        None if is_skipped() => Outcome::Skipped,
        None => Outcome::Passed,
    };
    (outcome, tail(&output, 60))
}

/// Returns the last lines of a text.
fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod runs {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    use super::*;
    use crate::gpu::kit::tests::TestFolder;

    #[test]
    fn each_test_has_a_result_and_failed_ones_their_output() {
        let folder = TestFolder::new("tests");
        let kit = folder.kit(
            "deps/a cuda::good\ndeps/a cuda::bad\ndeps/a cuda::none\ndeps/a cuda::idle\n\
             deps/a cuda::killed_x\ndeps/a with_a_driver_in_software::y\n",
        );
        // In place of a test executable; its second argument is the name of the test.
        let script = "#!/bin/sh\ncase $2 in\n*bad) echo why; exit 101;;\n*none) exit 0;;\n\
                      *idle) echo 'skipped: no';;\nesac\necho 'ok. 1 passed'\n";
        fs::create_dir(folder.0.join("deps")).unwrap();
        fs::write(folder.0.join("deps/a"), script).unwrap();
        fs::set_permissions(folder.0.join("deps/a"), fs::Permissions::from_mode(0o755)).unwrap();
        let place = StagePlace::new(&kit, false, Arc::default()).unwrap();
        let mut turn = StageTurn::new(&place, Instant::now() + Duration::from_secs(60));
        run(&mut turn, Kind::Usual, 2);
        assert_eq!(turn.detail, "1 passed, 1 skipped, 2 failed, 0 not run");
        let mut whats: Vec<&str> = turn.failures.iter().map(|failed| &*failed.what).collect();
        whats.sort_unstable();
        assert_eq!(
            whats,
            [
                "a cuda::bad: ended with exit status: 101",
                "a cuda::none: there is no such test"
            ]
        );
        let written = fs::read_to_string(place.out.join(TESTS)).unwrap();
        assert!(
            written.contains("\nwhy\n") && written.lines().count() == 10,
            "{written}"
        );
        let mut kills = StageTurn::new(&place, Instant::now() + Duration::from_secs(60));
        run(&mut kills, Kind::Kill, 2);
        assert_eq!(kills.detail, "1 passed, 0 skipped, 0 failed, 0 not run");
        let mut late = StageTurn::new(&place, Instant::now());
        run(&mut late, Kind::Usual, 2);
        assert_eq!(late.detail, "0 passed, 0 skipped, 0 failed, 4 not run");
        assert!(late.is_cut);
    }
}
