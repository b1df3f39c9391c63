use std::path::Path;
use std::time::{Duration, Instant};

use super::sandbox::is_alive;
use super::*;
use crate::{ExitKind, JobEnv, LaunchError, variables};

/// Returns the settings of a job that runs a shell script in each process.
fn scripts(processes: usize, script: &str) -> Processes {
    Processes::new(processes, "sh").args(["-c", script])
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn wait_until(awaited: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = soon();
    while !is_so() {
        assert!(Instant::now() < deadline, "not in time: {awaited}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

#[test]
fn output_and_exit_code_of_each_process_are_captured() {
    let script = "echo out $MPMD_RANK of $MPMD_WORLD_SIZE $WORD $0; echo err >&2; exit $MPMD_RANK";
    let mut job = scripts(3, script)
        .args(["argument"])
        .env("WORD", "word")
        .start()
        .unwrap();
    let ends = job.wait().unwrap();
    for (process, end) in ends.iter().enumerate() {
        assert_eq!(end.how, ExitKind::Exit(process as i32));
        assert_eq!(end.stdout, format!("out {process} of 3 word argument\n"));
        assert_eq!((end.stderr.as_str(), end.code()), ("err\n", process as i32));
    }
    let shown = format!("{:?}", ends[2]);
    assert!(
        shown.starts_with("--- process 2: it ended with exit code 2\n"),
        "{shown}"
    );
}

#[test]
fn deadline_kills_all_and_shows_last_lines() {
    let script = "for i in $(seq 30); do echo line $i; done; [ $MPMD_RANK = 1 ] || exec sleep 60";
    let mut job = scripts(3, script)
        .deadline(Duration::from_millis(500))
        .start()
        .unwrap();
    let pids = job.pids();
    let error = job.wait().unwrap_err();
    assert!(pids.iter().all(|pid| !is_alive(*pid)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("500ms passed during the wait for the end of process 0"),
        "{text}"
    );
    assert!(
        text.contains("\nline 30") && !text.contains("\nline 10\n"),
        "{text}"
    );
    assert!(
        format!("{error:?}").contains("\nline 30"),
        "the lines stay lines: {error:?}"
    );
    let LaunchError::Deadline { ends, .. } = error else {
        panic!("{text}")
    };
    assert_eq!(
        (ends[0].how, ends[2].how),
        (ExitKind::Signal(9), ExitKind::Signal(9))
    );
}

#[test]
fn killed_process_ends_and_others_go_on() {
    let mut job = scripts(2, "echo ready; until [ -e go ]; do sleep 0.01; done")
        .start()
        .unwrap();
    job.wait_for_output("ready\n").unwrap();
    job.kill(1).unwrap();
    assert_eq!(job.wait_for(1).unwrap().how, ExitKind::Signal(9));
    assert!(!job.has_ended(0).unwrap(), "{}", job.report());
    std::fs::write(job.folder().join("go"), "").unwrap();
    assert_eq!(job.wait().unwrap()[0].how, ExitKind::Exit(0));
    job.kill(1)
        .expect("a signal to an ended process does nothing");
}

#[test]
fn stopped_process_prints_nothing_until_resumed() {
    let mut job = scripts(2, "while :; do echo tick; sleep 0.01; done")
        .start()
        .unwrap();
    job.wait_for_output("tick\n").unwrap();
    let pid = job.pids()[0];
    job.stop(0).unwrap();
    wait_until("the process is stopped", || is_stopped(pid));
    let before = job.output(0).unwrap();
    let other = job.output(1).unwrap();
    let more = format!("{other}tick\ntick\ntick\n");
    job.wait_for_output_of(1, &more).unwrap();
    assert_eq!(job.output(0).unwrap(), before);
    job.resume(0).unwrap();
    job.wait_for_output_of(0, &format!("{before}tick\n"))
        .unwrap();
    drop(job);
    assert!(!is_alive(pid));
}

#[test]
fn panic_of_the_test_leaves_nothing_behind() {
    let (tell, told) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        // A child with another session, folder and output, and one in the same process group.
        let script = "(cd / && setsid sleep 60 >/dev/null 2>&1) & sleep 60 & echo ready; sleep 60";
        let mut job = scripts(2, script).start().unwrap();
        job.wait_for_output("ready\n").unwrap();
        job.stop(1).unwrap();
        let own = job.sandbox.processes();
        tell.send((own, job.folder().to_owned())).unwrap();
        panic!("a test fails");
    });
    test.join().unwrap_err();
    let (pids, folder) = told.recv().unwrap();
    assert!(pids.len() >= 6, "{pids:?}");
    assert!(pids.iter().all(|pid| !is_alive(*pid)), "{pids:?}");
    assert!(!folder.exists());
}

#[test]
fn process_that_outlives_the_job_is_an_error() {
    let mut job = scripts(1, "setsid sleep 60 & exit 0").start().unwrap();
    let error = job.wait().unwrap_err();
    let LaunchError::LeftBehind { pids, ends } = &error else {
        panic!("{error}")
    };
    assert_eq!((pids.len(), ends[0].how), (1, ExitKind::Exit(0)));
    drop(job);
    assert!(!is_alive(pids[0]));
}

#[test]
fn end_without_awaited_output_is_an_error() {
    let mut job = scripts(1, "echo this; echo why >&2").start().unwrap();
    let error = job.wait_for_output("more").unwrap_err().to_string();
    assert!(
        error.starts_with("process 0 ended without printing \"more\"; "),
        "{error}"
    );
    assert!(error.ends_with("standard error\nwhy"), "{error}");
}

#[test]
fn wrong_calls_are_errors() {
    let nobody = scripts(0, "").start().err().unwrap();
    assert_eq!(nobody, LaunchError::Processes { processes: 0 });
    let missing = Processes::new(1, "no-such-program").start().err().unwrap();
    assert_eq!(missing.to_string(), "there is no program no-such-program");
    let mut job = scripts(2, "").start().unwrap();
    let error = job.kill(2).unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no process 2: 2 were started, numbered from 0"
    );
}

#[test]
fn process_can_be_started_late_with_other_settings() {
    let mut job = scripts(2, "echo $MPMD_RANK $WORD").prepare().unwrap();
    for process in [1, 0] {
        let mut command = job.command(process);
        command.env("WORD", format!("word-{process}"));
        job.spawn(command).unwrap();
    }
    let said: Vec<String> = job
        .wait()
        .unwrap()
        .into_iter()
        .map(|end| end.stdout)
        .collect();
    assert_eq!(said, ["1 word-1\n", "0 word-0\n"]);
}

#[test]
fn command_keeps_the_variables_that_it_sets() {
    let site = Sandbox::new().unwrap();
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", "echo $MPMD_TEST_WORD $TMPDIR; pwd"])
        .env("MPMD_TEST_WORD", "word");
    site.enclose(&mut command);
    let end = site.start(command, "sh").unwrap().wait(soon()).unwrap();
    let path = site.path().display();
    assert_eq!(end.stdout, format!("word {path}\n{path}\n"));
}

#[test]
fn drop_kills_processes_that_left_session_and_folder() {
    let site = Sandbox::new().unwrap();
    // A process with another session, parent and folder, and without an environment. Ending a
    // program kills its group, so the script waits until the process has left the group.
    let script = "env -i setsid sh -c ': > detached; cd / && exec sleep 60' & \
                  until [ -e detached ]; do sleep 0.01; done; exit 0";
    let mut command = site.command("sh");
    command.args(["-c", script]);
    assert_eq!(
        site.start(command, "sh")
            .unwrap()
            .wait(soon())
            .unwrap()
            .code(),
        0
    );
    let left = site.processes();
    assert_eq!(left.len(), 1);
    drop(site);
    assert!(!is_alive(left[0]));
}

#[test]
fn drop_of_a_process_kills_its_group() {
    let site = Sandbox::new().unwrap();
    let mut command = site.command("sh");
    command.args(["-c", "sleep 60 & echo started; exit 3"]);
    let mut process = site.start(command, "sh").unwrap();
    assert_eq!(process.wait(soon()).unwrap().code(), 3);
    assert_eq!(site.processes().len(), 1, "{}", process.report());
    drop(process);
    wait_until("nothing is left", || site.processes().is_empty());
}

#[test]
fn test_can_run_itself_as_the_processes() {
    if JobEnv::from_env().unwrap().is_some() {
        let inner = bare_command("true");
        let removed = inner
            .get_envs()
            .any(|(name, value)| name == variables::RANK && value.is_none());
        return println!("inherits no rank: {removed}");
    }
    let name = "testing::tests::test_can_run_itself_as_the_processes";
    let again = Processes::new(2, std::env::current_exe().unwrap());
    let ends = again
        .args([name, "--exact", "--nocapture"])
        .start()
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(ends.len(), 2);
    assert!(
        ends.iter()
            .all(|end| end.stdout.contains("inherits no rank: true\n")),
        "{ends:?}"
    );
}

#[test]
fn relative_program_is_found_from_the_test_folder() {
    let here = std::env::current_dir().unwrap();
    let up: String = here.components().skip(1).map(|_| "../").collect();
    assert!(Path::new(&up).join("bin/sh").exists());
    let mut job = Processes::new(1, format!("{up}bin/sh"))
        .args(["-c", "echo found"])
        .start();
    assert_eq!(job.as_mut().unwrap().wait().unwrap()[0].stdout, "found\n");
}
