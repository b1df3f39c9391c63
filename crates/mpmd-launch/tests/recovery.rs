//! Jobs that recover under the launcher. Their processes meet at its rendezvous service and do
//! nothing else: each is this file again, in [`process_of_a_job`].

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use mpmd_launch::{ExitKind, JobEnv, JobOutcome, Launch};
use mpmd_rendezvous::{Down, Identity, JobMember, JoinConfig, JoinedEpoch, Rendezvous};
use rustix::process::{Signal, getpid, kill_process};

/// The variable with the name of the case.
const CASE: &str = "MPMD_TEST_CASE";

/// The longest wait of a process for another.
const LONG: Duration = Duration::from_secs(20);

/// The grace of the launcher, and a longer time.
const GRACE: Duration = Duration::from_millis(100);
const BEYOND_GRACE: Duration = Duration::from_millis(800);

/// A temporary folder of one test, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(case: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("mpmd-recovery-{case}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Returns a job of two in which each process runs the case.
    fn job(&self, case: &str) -> Launch {
        self.job_of(2, case)
    }

    /// Returns a job in which each process runs the case.
    fn job_of(&self, processes: usize, case: &str) -> Launch {
        Launch::new(processes, std::env::current_exe().unwrap())
            .args(["--exact", "process_of_a_job", "--nocapture"])
            .env(CASE, case)
            .env("MPMD_TEST_FOLDER", &self.0)
            .peer_timeout(LONG)
            .grace(GRACE)
    }

    fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.0.join(file)).ok()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn how(outcome: &JobOutcome) -> Option<ExitKind> {
    outcome.first_failure.as_ref().map(|failure| failure.how)
}

/// The whole process of a job. In the test run itself it does nothing.
#[test]
fn process_of_a_job() {
    if let (Ok(case), Ok(folder)) = (std::env::var(CASE), std::env::var("MPMD_TEST_FOLDER")) {
        mpmd_launch::adopt().unwrap();
        let env = JobEnv::from_env()
            .unwrap()
            .expect("a launcher has started it");
        std::process::exit(
            Process {
                env,
                folder: folder.into(),
            }
            .run(&case),
        );
    }
}

struct Process {
    env: JobEnv,
    folder: PathBuf,
}

impl Process {
    /// Runs a case. Returns the exit code.
    fn run(&self, case: &str) -> i32 {
        let number = self.env.process.index();
        if case == "spare fails" && number == 2 {
            return 7;
        }
        if case == "one ends early" && number == 1 {
            return 0;
        }
        if case == "one is lost early" && number == 0 {
            self.die();
        }
        if case == "one never joins" && number == 1 {
            let script = "trap '' TERM; while :; do sleep 1; done";
            let error = Command::new("sh").args(["-c", script]).exec();
            panic!("{error}");
        }
        let identity = Identity::random().unwrap();
        let (rendezvous, joined) = match self.join(1, identity) {
            Ok(Some(joined)) => joined,
            Ok(None) => return 0,
            Err(why) => {
                eprintln!("{why}");
                if case == "all are killed" {
                    self.die();
                }
                return 1;
            }
        };
        let identity = Identity {
            run: Some(joined.run),
            ..identity
        };
        let place = joined.process.index();
        match case {
            "one saves long" if place == 1 => {
                self.leave(&rendezvous);
                std::thread::sleep(BEYOND_GRACE);
                self.write("saved", "");
            }
            "all are killed" => self.die(),
            "crash at exit" => {
                self.leave(&rendezvous);
                match place {
                    1 => self.die(),
                    _ => {
                        std::thread::sleep(BEYOND_GRACE);
                        self.write("saved", "");
                    }
                }
            }
            "spare fails" => {
                std::thread::sleep(BEYOND_GRACE);
                self.leave(&rendezvous);
            }
            "one is lost" => {
                if joined.epoch == 1 {
                    self.goes_on(place, rendezvous, identity);
                } else {
                    self.leave(&rendezvous);
                }
            }
            "nobody leaves" => {}
            _ => self.leave(&rendezvous),
        }
        0
    }

    /// Process 1 dies, and process 0 returns for the next epoch.
    fn goes_on(&self, place: usize, rendezvous: Rendezvous, identity: Identity) {
        if place == 1 {
            self.die();
        }
        let (sender, heard) = mpsc::channel();
        rendezvous.on_down(Box::new(move |down| _ = sender.send(down)));
        assert!(matches!(
            heard.recv_timeout(LONG).unwrap(),
            Down::Process(..)
        ));
        rendezvous.leave_epoch().unwrap();
        let (rendezvous, joined) = self.join(2, identity).unwrap().expect("it keeps its place");
        assert_eq!((joined.epoch, joined.process), (2, self.env.process));
        self.leave(&rendezvous);
    }

    fn join(
        &self,
        epoch: u64,
        identity: Identity,
    ) -> Result<Option<(Rendezvous, JoinedEpoch)>, String> {
        let rendezvous = Rendezvous::connect(JoinConfig {
            server: self.env.coordinator.clone(),
            process: self.env.process,
            processes: self.env.processes,
            token: self.env.token.clone(),
            peer_timeout: LONG,
        });
        let rendezvous = rendezvous.map_err(|error| error.to_string())?;
        let member = JobMember {
            pid: std::process::id(),
            ..JobMember::default()
        };
        let joined = rendezvous.join_epoch(member, epoch, identity);
        let joined = joined.map_err(|error| error.to_string())?;
        Ok(joined.map(|joined| (rendezvous, joined)))
    }

    /// Leaves in order, when all others have come to the end of the program.
    fn leave(&self, rendezvous: &Rendezvous) {
        rendezvous.barrier("end", LONG).unwrap();
        rendezvous.leave().unwrap();
    }

    fn die(&self) -> ! {
        kill_process(getpid(), Signal::KILL).unwrap();
        unreachable!("it is killed")
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.folder.join(file), text).unwrap();
    }
}

/// A spare that was not needed ends with code 0 too.
#[test]
fn process_that_still_saves_is_not_killed() {
    let folder = Folder::new("saves");
    let outcome = folder.job("one saves long").spares(1).run().unwrap();
    assert_eq!((outcome.code(), outcome.codes), (0, vec![0, 0, 0]));
    assert!(folder.read("saved").is_some());
}

#[test]
fn job_that_was_killed_wholly_has_failed() {
    for (spares, restarts) in [(1, 0), (0, 3), (2, 2)] {
        let folder = Folder::new(&format!("killed-{spares}-{restarts}"));
        let job = folder
            .job("all are killed")
            .spares(spares)
            .restarts(restarts);
        let outcome = job.run().unwrap();
        assert_eq!(how(&outcome), Some(ExitKind::Signal(9)), "{outcome:?}");
        assert_eq!(outcome.code(), 137);
    }
}

#[test]
fn crash_at_exit_fails_the_job_and_hurries_nobody() {
    let folder = Folder::new("crash");
    let outcome = folder
        .job("crash at exit")
        .spares(1)
        .restarts(1)
        .run()
        .unwrap();
    assert_eq!(
        (outcome.code(), &outcome.codes[..]),
        (137, &[0, 137, 0][..])
    );
    let failure = outcome.first_failure.unwrap();
    let expected = "process 1 failed first: it was ended by signal 9 (SIGKILL): by a user, \
                    a scheduler, or the system if memory was full (see dmesg)";
    assert_eq!(failure.to_string(), expected);
    assert!(folder.read("saved").is_some());
}

#[test]
fn failing_spare_does_not_end_the_job() {
    let folder = Folder::new("spare");
    let outcome = folder.job("spare fails").spares(1).run().unwrap();
    assert_eq!((outcome.code(), outcome.codes), (0, vec![0, 0, 7]));
}

#[test]
fn lost_process_is_replaced() {
    let outcome = Folder::new("lost")
        .job("one is lost")
        .restarts(1)
        .run()
        .unwrap();
    assert_eq!((outcome.code(), outcome.codes), (0, vec![0, 137, 0]));
}

#[test]
fn process_that_ends_with_code_0_before_it_joins_is_named_at_once() {
    let folder = Folder::new("early");
    let outcome = folder.job_of(3, "one ends early").run().unwrap();
    assert_eq!((outcome.code(), &outcome.codes[..]), (1, &[1, 0, 1][..]));
    let failure = outcome.first_failure.unwrap().to_string();
    let expected = "process 1 failed first: it ended with exit code 0; the others waited for it \
                    to join the job";
    assert_eq!(failure, expected);
}

#[test]
fn loss_of_a_process_that_nobody_replaces_is_told_to_those_that_join() {
    let folder = Folder::new("lost-early");
    // The only replacement is lost too.
    let outcome = folder
        .job_of(3, "one is lost early")
        .restarts(1)
        .run()
        .unwrap();
    assert_eq!((outcome.code(), &outcome.codes[1..3]), (137, &[1, 1][..]));
    let failure = outcome.first_failure.unwrap().to_string();
    assert!(
        failure.starts_with("process 0 failed first: it was ended by signal 9"),
        "{failure}"
    );
}

#[test]
fn spare_replaces_a_process_that_was_lost_before_it_joined() {
    for case in ["one is lost early", "one ends early"] {
        let folder = Folder::new(&case.replace(' ', "-"));
        let outcome = folder.job_of(2, case).spares(1).run().unwrap();
        assert_eq!(outcome.code(), 0, "{case}: {outcome:?}");
    }
}

#[test]
fn processes_that_end_without_leaving_have_failed() {
    let folder = Folder::new("nobody");
    let outcome = folder.job("nobody leaves").restarts(1).run().unwrap();
    assert_eq!(
        (outcome.code(), how(&outcome)),
        (1, Some(ExitKind::Exit(0))),
        "{outcome:?}"
    );
}

#[test]
fn programs_without_mpmd_are_judged_by_their_codes() {
    let folder = Folder::new("without");
    let script = format!("cd '{}' && ", folder.0.display());
    let sh = |rest: &str| {
        Launch::new(2, "sh")
            .args(["-c", &format!("{script}{rest}")])
            .grace(GRACE)
    };
    assert_eq!(sh("exit 0").spares(1).run().unwrap().code(), 0);
    let killed = "[ $MPMD_RANK = 1 ] && kill -9 $$; exit 0";
    assert_eq!(sh(killed).spares(1).run().unwrap().code(), 137);
    let once = "[ $MPMD_RANK = 1 ] && [ ! -e once ] && touch once && kill -9 $$; exit 0";
    let outcome = sh(once).restarts(1).run().unwrap();
    assert_eq!((outcome.code(), outcome.codes), (0, vec![0, 137, 0]));
}

#[test]
fn process_that_the_launcher_killed_is_named_as_such() {
    let folder = Folder::new("silent");
    let job = folder.job("one never joins");
    let outcome = job.peer_timeout(Duration::from_secs(1)).run().unwrap();
    assert_eq!(
        (how(&outcome), outcome.code()),
        (Some(ExitKind::Killed), 137)
    );
    let failure = outcome.first_failure.unwrap().to_string();
    let expected = "process 1 failed first: it was ended by signal 9 (SIGKILL), which the \
                    launcher sent; ";
    assert!(failure.starts_with(expected), "{failure}");
}
