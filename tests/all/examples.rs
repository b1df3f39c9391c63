//! The example programs as a user starts them: plainly, as threads, and by `mpmd run`.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, ProcessEnd, Sandbox, over_each_carrier, package_program};

over_each_carrier! {
    pipeline_check_passes_at_any_number_of_processes
    pipeline_check_passes_under_the_launcher
}

/// No run takes this long, on any machine.
const LONG: Duration = Duration::from_secs(120);

/// Runs an example program over tcp until its end and checks that nothing is left. Starts it by
/// `mpmd run` if `launched` gives a number of processes.
fn run(launched: Option<usize>, program: &str, args: &[&str]) -> ProcessEnd {
    run_over(
        Carrier::TCP,
        &Sandbox::new().unwrap(),
        launched,
        program,
        args,
    )
}

/// Runs an example program with these arguments until its end and checks that nothing is left.
/// Starts it by `mpmd run` if `launched` gives a number of processes.
fn run_over(
    carrier: Carrier,
    site: &Sandbox,
    launched: Option<usize>,
    program: &str,
    args: &[&str],
) -> ProcessEnd {
    let program = package_program("mpmd-examples", program);
    let mut command = match launched {
        None => site.command(&program),
        Some(processes) => {
            let mut command = site.command(package_program("mpmd-cli", "mpmd"));
            command
                .args(["run", "-n", &processes.to_string(), "--"])
                .arg(&program);
            command
        }
    };
    carrier.set(command.args(args));
    let mut process = site.start(command, "example").unwrap();
    let end = process.wait(Instant::now() + LONG).unwrap();
    let left = site.processes();
    assert!(
        left.is_empty(),
        "processes {left:?} are left\n{}",
        process.report()
    );
    end
}

fn check_passes(carrier: Carrier, launched: Option<usize>, args: &[&str]) {
    let end = run_over(
        carrier,
        &Sandbox::new().unwrap(),
        launched,
        "pipeline",
        args,
    );
    assert_eq!(
        end.code(),
        0,
        "{launched:?} {args:?}:\n{}\n{}",
        end.stdout,
        end.stderr
    );
    // The numbers show that the results were compared, not only computed.
    assert!(
        end.stdout.contains("0.179679") || end.stdout.contains("2.217942"),
        "{args:?}:\n{}",
        end.stdout
    );
}

/// The program starts its processes itself; its arguments set the transport.
fn pipeline_check_passes_at_any_number_of_processes(carrier: Carrier) {
    for processes in [1, 2, 4, 8]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        let processes = processes.to_string();
        let args = [
            "--check",
            "--processes",
            &processes,
            "--transport",
            carrier.transport,
        ];
        check_passes(carrier, None, &args);
    }
}

#[test]
fn pipeline_check_passes_as_threads() {
    for processes in ["1", "2", "4", "8"] {
        let args = ["--check", "--processes", processes, "--transport", "inproc"];
        check_passes(Carrier::TCP, None, &args);
    }
}

/// A launcher starts the processes; its environment sets the transport.
fn pipeline_check_passes_under_the_launcher(carrier: Carrier) {
    for processes in [1, 2, 4, 8]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        check_passes(carrier, Some(processes), &["--check"]);
    }
}

#[test]
fn wrong_number_fails_the_job() {
    let off = ["--check", "--learning-rate", "0.044"];
    for launched in [None, Some(4)] {
        let end = run(launched, "pipeline", &off);
        assert_eq!(
            end.code(),
            1,
            "{launched:?}:\n{}\n{}",
            end.stdout,
            end.stderr
        );
        assert!(
            end.stderr.contains("a number is off: "),
            "{launched:?}:\n{}",
            end.stderr
        );
    }
    let end = run(
        None,
        "pipeline",
        &[&off[..], &["--transport", "inproc"]].concat(),
    );
    assert_eq!(end.code(), 1, "{}\n{}", end.stdout, end.stderr);
}

#[test]
fn processes_that_do_not_divide_the_devices_are_refused() {
    let end = run(Some(3), "pipeline", &["--check"]);
    assert_eq!(end.code(), 1, "{}\n{}", end.stdout, end.stderr);
    assert!(
        end.stderr
            .contains("8 devices cannot be spread evenly over 3 processes"),
        "{}",
        end.stderr
    );
}
