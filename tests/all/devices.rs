//! Jobs with devices of kind `cuda` on machines without them. Every process soon ends and names the
//! libraries or devices it did not find. Nothing panics.

use std::process::Command;
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job, ProcessEnd, Sandbox, bare_command, package_program};

/// Far more than the job takes, and far less than the peer timeout.
const PROMPT: Duration = Duration::from_secs(30);

/// Time limit of a benchmark, of which the driver in software makes much work.
const LONG: Duration = Duration::from_secs(120);

/// Longer than any test may take.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// Hides the GPUs of this machine, if it has any.
fn without_gpus(command: &mut Command) -> &mut Command {
    command.env("CUDA_VISIBLE_DEVICES", "")
}

fn start_and_wait(command: Command) -> ProcessEnd {
    wait_within(PROMPT, command)
}

fn wait_within(limit: Duration, command: Command) -> ProcessEnd {
    let site = Sandbox::new().unwrap();
    site.start(command, "process")
        .unwrap()
        .wait(Instant::now() + limit)
        .unwrap()
}

/// Returns how often `stderr` reports that there are no such devices here.
fn complaints(stderr: &str) -> usize {
    let begin = "this process cannot have its devices of kind cuda: ";
    stderr
        .match_indices(begin)
        .filter(|(at, _)| is_reason(&stderr[at + begin.len()..]))
        .count()
}

fn is_reason(text: &str) -> bool {
    // With a driver that shows no GPUs, and without a driver.
    text.starts_with("no CUDA driver found")
        || text.starts_with("the CUDA driver shows no graphics processor")
}

#[test]
fn missing_devices_are_reported_once() {
    for processes in ["1", "2"] {
        let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
        command.args([
            "run",
            "-n",
            processes,
            "--device",
            "cuda",
            "--peer-timeout",
            "600",
            "--",
        ]);
        without_gpus(command.arg(env!("CARGO_BIN_EXE_named")).arg("hello"));
        let end = start_and_wait(command);
        assert_eq!(end.code(), 1, "{end:?}");
        // All processes fail over the same, which is shown once.
        assert_eq!(complaints(&end.stderr), 1, "{}", end.stderr);
        let is_shared = end
            .stderr
            .contains("mpmd: all 2 processes failed with exit code 1: ");
        assert_eq!(is_shared, processes == "2", "{}", end.stderr);
        assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
    }
}

#[test]
fn device_kinds_come_from_the_environment_without_launcher() {
    let with = |device: &str| {
        let mut command = bare_command(env!("CARGO_BIN_EXE_named"));
        without_gpus(command.arg("hello").env(variables::DEVICE, device));
        start_and_wait(command)
    };
    let end = with("cuda");
    assert_eq!((end.code(), complaints(&end.stderr)), (1, 1), "{end:?}");
    assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
    let end = with("cpu");
    assert_eq!(
        (end.code(), end.stdout.as_str()),
        (0, "hello from process 0 of 1: 42\n"),
        "{end:?}"
    );
    for (wrong, expected) in [
        ("gpu", "cpu or cuda"),
        ("cpu,cuda", "at most as many kinds"),
    ] {
        let end = with(wrong);
        assert_eq!(end.code(), 1, "{end:?}");
        let named = end
            .stderr
            .contains(&format!("MPMD_DEVICE={wrong} makes no sense"));
        assert!(named && end.stderr.contains(expected), "{}", end.stderr);
    }
}

/// Runs a job with one process for each entry of `kinds`, its value of `MPMD_DEVICE`, without GPUs.
/// The launcher runs the rendezvous service if `hosted`, else process 0.
fn job(kinds: &[&str], hosted: bool) -> Vec<ProcessEnd> {
    let options = Carrier::TCP
        .processes(env!("CARGO_BIN_EXE_named"), kinds.len())
        .peer_timeout(TIME_LIMIT)
        .deadline(PROMPT);
    let mut job = Job::prepare(options);
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|taken| taken.local_addr());
    let coordinator = port.expect("a port").to_string();
    for (process, kind) in kinds.iter().enumerate() {
        let mut command = job.command(process);
        without_gpus(command.arg("hello").env(variables::DEVICE, kind));
        if !hosted {
            command
                .env_remove(variables::HOSTED)
                .env(variables::COORDINATOR, &coordinator);
        }
        job.spawn(command);
    }
    job.wait()
}

#[test]
fn process_without_driver_is_named_to_the_others() {
    for hosted in [true, false] {
        let ends = job(&["cpu,cuda,cpu"; 3], hosted);
        for (process, end) in ends.iter().enumerate() {
            assert_eq!(end.code(), 1, "{end:?}");
            assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
            if process == 1 {
                assert_eq!(complaints(&end.stderr), 1, "{}", end.stderr);
                continue;
            }
            let (who, why) = end
                .stderr
                .split_once(" has no devices of kind cuda: ")
                .expect(&end.stderr);
            assert!(
                who.contains("process 1 on host ") && is_reason(why),
                "{}",
                end.stderr
            );
        }
    }
}

#[test]
fn different_device_kinds_are_reported_by_all() {
    for end in job(&["cpu", "cpu,cuda"], true) {
        assert_eq!(end.code(), 1, "{end:?}");
        for expected in [
            ", 2 devices\"",
            ", 2 devices, of kind cpu 0, of kind cuda 1\"",
        ] {
            assert!(end.stderr.contains(expected), "{expected}: {}", end.stderr);
        }
    }
}

#[test]
fn dry_run_needs_no_driver() {
    let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
    command.args([
        "check",
        "-n",
        "2",
        "--",
        env!("CARGO_BIN_EXE_named"),
        "hello",
    ]);
    without_gpus(command.env(variables::DEVICE, "cpu,cuda"));
    let end = start_and_wait(command);
    assert_eq!(end.code(), 0, "{end:?}");
}

#[test]
fn library_that_is_no_driver_is_reported() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has it");
    let libc = maps
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .find(|file| file.contains("libc.so"));
    let libc = libc.expect("this program has a libc");
    // The first name that is tried.
    std::os::unix::fs::symlink(libc, folder.path().join("libcuda.so.1"))
        .expect("the folder is ours");
    let mut command = bare_command(env!("CARGO_BIN_EXE_named"));
    command
        .arg("hello")
        .env(variables::DEVICE, "cuda")
        .env("LD_LIBRARY_PATH", folder.path());
    let end = start_and_wait(command);
    assert_eq!(end.code(), 1, "{end:?}");
    let expected =
        "no CUDA driver found that can be used: the library here has no cuInit, cuDriverGetVersion";
    assert!(
        end.stderr.contains(expected) && !end.stderr.contains("panicked"),
        "{}",
        end.stderr
    );
}

/// Programs that find a driver: the tests' own.
mod with_a_driver_in_software {
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    fn on(folder: &Path, devices: &str, command: &mut Command) {
        if softcuda::real() {
            return;
        }
        let driver = softcuda::install(folder).unwrap_or_else(|error| panic!("{error}"));
        softcuda::environment(command, &driver);
        command.env("SOFTCUDA_DEVICES", devices);
    }

    #[test]
    fn doctor_lists_all_cuda_devices() {
        softcuda::registered!();
        if softcuda::real() {
            println!("skipped: a real driver has as many devices as it has");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder for the test");
        for (devices, turns) in [
            ("1", "all processes of this host share 0"),
            ("2", "2 processes of a device each get 0, 1; 3 get 0, 1, 0"),
            (
                "3",
                "3 processes of a device each get 0, 1, 2; 4 get 0, 1, 2, 0",
            ),
        ] {
            let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
            on(
                folder.path(),
                devices,
                command.args(["doctor", "--json", "--device", "cuda"]),
            );
            let end = start_and_wait(command);
            assert_eq!(end.code(), 0, "{end:?}");
            assert!(end.stdout.contains(turns), "{}", end.stdout);
            let listed = end.stdout.matches("\"uuid\"").count();
            assert_eq!(listed.to_string(), devices, "{}", end.stdout);
        }
    }

    #[test]
    fn processes_get_cuda_devices_of_their_own_or_share_them() {
        softcuda::registered!();
        let folder = tempfile::tempdir().expect("a folder for the test");
        for devices in ["1", "2"] {
            for kinds in ["cuda", "cpu,cuda"] {
                let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
                command.args(["run", "-n", "2", "--device", kinds, "--"]);
                let named = package_program("mpmd-tests", "named");
                on(folder.path(), devices, command.arg(named).arg("hello"));
                let end = start_and_wait(command);
                assert_eq!(end.code(), 0, "{kinds} over {devices}: {end:?}");
                for process in 0..2 {
                    let line = format!("[{process}] hello from process {process} of 2: 42");
                    assert!(
                        end.stdout.contains(&line),
                        "{kinds} over {devices}: {}",
                        end.stdout
                    );
                }
            }
        }
    }

    /// Runs `mpmd bench` with these settings of the driver in software. Returns its lines.
    fn bench(arguments: &str, settings: &[(&str, &str)]) -> Vec<Value> {
        let folder = tempfile::tempdir().expect("a folder for the test");
        let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
        command
            .arg("bench")
            .args(arguments.split(' '))
            .args(["--device", "cuda", "--json"]);
        on(folder.path(), "1", &mut command);
        command.envs(settings.iter().copied());
        let end = wait_within(LONG, command);
        assert_eq!(end.code(), 0, "{arguments}: {end:?}");
        let lines = end
            .stdout
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>();
        lines.unwrap_or_else(|error| panic!("{error}: {}", end.stdout))
    }

    fn named<'a>(lines: &'a [Value], name: &str) -> Vec<&'a Value> {
        let lines: Vec<_> = lines.iter().filter(|line| line["name"] == name).collect();
        assert!(!lines.is_empty(), "there is no {name}");
        lines
    }

    /// Runs small versions of all benchmarks of CUDA devices.
    #[test]
    fn cuda_benchmarks_print_every_expected_figure() {
        softcuda::registered!();
        for (arguments, expected) in [
            (
                "dispatch --repeats 2",
                &[("jit issue", "over_launch_us"), ("launch", "p90")][..],
            ),
            (
                "reshard --mib 1 --processes 1 --repeats 2",
                &[
                    ("rows to columns", "of_device_copy"),
                    ("to other devices", "of_device_copy"),
                    ("replicate", "of_device_copy"),
                    ("chunks to chunks", "of_device_copy"),
                    ("regions to rows", "of_device_copy"),
                    ("device copy", "median"),
                    ("host to device", "of_pinned"),
                    ("device to host", "of_pinned"),
                    ("pinned in", "median"),
                    ("pinned out", "median"),
                ],
            ),
        ] {
            let lines = bench(arguments, &[]);
            for (name, field) in expected {
                let found = named(&lines, name)[0];
                assert!(
                    found[field].as_f64().is_some_and(f64::is_finite),
                    "{field} of {found}"
                );
            }
            assert!(
                lines.iter().all(|line| line["name"] != "memcpy"),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn hand_overs_stand_beside_cuda_alone() {
        softcuda::registered!();
        let lines = bench("p2p --case handover --sizes 4Ki,64Ki --repeats 2", &[]);
        let figure = |line: &Value, field: &str| {
            line[field]
                .as_f64()
                .filter(|figure| figure.is_finite())
                .unwrap_or_else(|| {
                    panic!("{field} of {line}");
                })
        };
        for (name, field) in [
            ("handover", "over_bare_ipc_us"),
            ("one copy", "of_device_copy"),
            ("bare ipc", "median"),
            ("bare ipc copy", "median"),
            ("futex wake", "median"),
            ("device copy", "median"),
        ] {
            let found = named(&lines, name);
            assert_eq!(found.len(), 2, "{name}: {lines:?}");
            for line in found {
                figure(line, field);
                assert!(0.0 < figure(line, "p10") && figure(line, "p10") <= figure(line, "p90"));
            }
        }
        // Each size is printed before the next is measured.
        let sizes: Vec<_> = lines
            .iter()
            .filter_map(|line| line["bytes"].as_u64())
            .collect();
        assert!(sizes.len() == lines.len() && sizes.is_sorted(), "{lines:?}");
        // Memory is known by its address on the device. The sender keeps 8 arrays.
        for (steady, new) in named(&lines, "handover")
            .iter()
            .zip(named(&lines, "handover warm-up"))
        {
            let [steady, new] = [steady, &new].map(|line| figure(line, "repeats"));
            assert!(
                steady + new == 16.0 && new > 8.0 && steady > 0.0,
                "{steady} and {new}"
            );
        }
    }

    #[test]
    fn probe_prints_every_fact_of_a_driver() {
        softcuda::registered!();
        let small = ("SOFTCUDA_MEMORY", "1073741824");
        let lines = bench("probe --events 50", &[small]);
        assert!(
            lines.iter().all(|line| line.get("failed").is_none()),
            "{lines:?}"
        );
        assert!(
            named(&lines, "driver")[0]["version"]
                .as_str()
                .is_some_and(|it| it.contains('.'))
        );
        let positive = |name: &str, path: &str| {
            for line in named(&lines, name) {
                assert!(
                    line.pointer(path).and_then(Value::as_f64) > Some(0.0),
                    "{path} of {line}"
                );
            }
        };
        positive("context", "/open_us");
        positive("device copy", "/read_and_written_gb_per_s");
        positive("event recorded and waited for", "/us/median");
        assert_eq!(named(&lines, "event recorded and waited for").len(), 3);
        let pinned = named(&lines, "host memory");
        assert!(
            pinned.len() == 3 && pinned.iter().all(|line| line["pin"] == "ok"),
            "{pinned:?}"
        );
        positive("host memory", "/in/gb_per_s");
        positive("host memory", "/out/gb_per_s");
        let last = *named(&lines, "ipc memory").last().expect("it is there");
        assert_eq!(
            [&last["first"]["open"], &last["second"]["open"]],
            ["ok"; 2],
            "{last}"
        );
        assert_eq!(
            [&last["first"]["first_byte"], &last["second"]["first_byte"]],
            [17, 34]
        );
        assert_ne!(last["same_process"], "ok", "{last}");
        positive("ipc memory", "/allocate_us");
        positive("ipc event", "/idle_us/median");
        let event = named(&lines, "ipc event")[0];
        assert_eq!(
            [&event["opened"]["open"], &event["last"]["wait"]],
            ["ok"; 2],
            "{event}"
        );
        assert_eq!(named(&lines, "interprocess events")[0]["made"], 50);
        let garbage = named(&lines, "garbage handles")[0];
        assert!(
            garbage["memory"] != "ok" && garbage["event"] != "ok",
            "{garbage}"
        );
        if softcuda::real() {
            return;
        }
        // A refusal is a fact, and so is an error.
        let fail = "cuMemHostRegister_v2=801:1,cuIpcGetEventHandle=801:1";
        let refused = bench("probe --events 50", &[small, ("SOFTCUDA_FAIL", fail)]);
        assert_eq!(refused.len(), lines.len(), "{refused:?}");
        assert_eq!(
            named(&refused, "host memory")[0]["pin"],
            "CUDA_ERROR_NOT_SUPPORTED"
        );
        let event = named(&refused, "ipc event")[0];
        assert!(
            event["failed"]
                .as_str()
                .is_some_and(|why| why.contains("NOT_SUPPORTED"))
        );
    }
}
