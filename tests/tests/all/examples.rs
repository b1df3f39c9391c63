//! The example programs as a user starts them: plainly, as threads, and by `mpmd run`.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, ProcessEnd, Sandbox, over_each_carrier, package_program};

over_each_carrier! {
    pipeline_check_passes_at_any_number_of_processes
    pipeline_check_passes_under_the_launcher
    losses_are_bit_identical_over_every_carrier
}

/// No run takes this long, on any machine.
const LONG: Duration = Duration::from_secs(120);

/// Runs an example program over tcp until its end and checks that nothing is left. Starts it by
/// `mpmd run` if `launched` gives a number of processes.
fn run(launched: Option<usize>, program: &str, args: &[&str]) -> ProcessEnd {
    run_over(Carrier::TCP, &Sandbox::new().unwrap(), launched, program, args)
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
            command.args(["run", "-n", &processes.to_string(), "--"]).arg(&program);
            command
        }
    };
    carrier.set(command.args(args));
    let mut process = site.start(command, "example").unwrap();
    let end = process.wait(Instant::now() + LONG).unwrap();
    let left = site.processes();
    assert!(left.is_empty(), "processes {left:?} are left\n{}", process.report());
    end
}

fn check_passes(carrier: Carrier, launched: Option<usize>, args: &[&str]) {
    let end = run_over(carrier, &Sandbox::new().unwrap(), launched, "pipeline", args);
    assert_eq!(end.code(), 0, "{launched:?} {args:?}:\n{}\n{}", end.stdout, end.stderr);
    // The numbers show that the results were compared, not only computed.
    assert!(
        end.stdout.contains("0.179679") || end.stdout.contains("2.217942"),
        "{args:?}:\n{}",
        end.stdout
    );
}

/// The program starts its processes itself; its arguments set the transport.
fn pipeline_check_passes_at_any_number_of_processes(carrier: Carrier) {
    for processes in [1, 2, 4, 8].into_iter().filter(|processes| carrier.takes(*processes)) {
        let processes = processes.to_string();
        let args = ["--check", "--processes", &processes, "--transport", carrier.transport];
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
    for processes in [1, 2, 4, 8].into_iter().filter(|processes| carrier.takes(*processes)) {
        check_passes(carrier, Some(processes), &["--check"]);
    }
}

#[test]
fn wrong_number_fails_the_job() {
    let off = ["--check", "--learning-rate", "0.044"];
    for launched in [None, Some(4)] {
        let end = run(launched, "pipeline", &off);
        assert_eq!(end.code(), 1, "{launched:?}:\n{}\n{}", end.stdout, end.stderr);
        assert!(end.stderr.contains("a number is off: "), "{launched:?}:\n{}", end.stderr);
    }
    let end = run(None, "pipeline", &[&off[..], &["--transport", "inproc"]].concat());
    assert_eq!(end.code(), 1, "{}\n{}", end.stdout, end.stderr);
}

/// Returns the losses of a short training over tcp, with all their bits.
fn losses(launched: Option<usize>, args: &[&str]) -> String {
    losses_over(Carrier::TCP, launched, args)
}

fn losses_over(carrier: Carrier, launched: Option<usize>, args: &[&str]) -> String {
    let site = Sandbox::new().unwrap();
    let file = site.path().join("losses");
    let text = site.path().join("text");
    // A text of the test's own: the losses must not depend on files of the repository.
    let line = |i: usize| format!("line {i} says {} and {}\n", i * i % 97, i * 31 % 89);
    std::fs::write(&text, (0..4000).map(line).collect::<String>()).expect("the test's own folder");
    let (file_name, text_name) = (file.display().to_string(), text.display().to_string());
    let fixed = ["--steps", "6", "--width", "8", "--hidden", "32", "--rows", "2", "--losses-out"];
    let args = [&fixed[..], &[&file_name, &text_name], args].concat();
    let end = run_over(carrier, &site, launched, "train_mlp", &args);
    assert_eq!(end.code(), 0, "{launched:?} {args:?}:\n{}\n{}", end.stdout, end.stderr);
    let losses = std::fs::read_to_string(&file).expect("the program writes them");
    assert_eq!(losses.lines().count(), 6, "{losses}");
    losses
}

#[test]
fn losses_are_bit_identical_as_threads() {
    let alone = losses(None, &["--processes", "1"]);
    for processes in ["2", "4"] {
        let found = losses(None, &["--processes", processes, "--transport", "inproc"]);
        assert_eq!(found, alone, "{processes} processes as threads");
    }
    assert_ne!(
        losses(None, &["--processes", "1", "--seed", "77"]),
        alone,
        "they depend on the seed"
    );
}

fn losses_are_bit_identical_over_every_carrier(carrier: Carrier) {
    let alone = losses(None, &["--processes", "1"]);
    for processes in ["2", "4"] {
        let args = ["--processes", processes, "--transport", carrier.transport];
        assert_eq!(losses_over(carrier, None, &args), alone, "{processes} processes");
    }
    assert_eq!(losses_over(carrier, Some(4), &[]), alone, "under the launcher");
}

#[test]
fn processes_that_do_not_divide_the_devices_are_refused() {
    let end = run(Some(3), "pipeline", &["--check"]);
    assert_eq!(end.code(), 1, "{}\n{}", end.stdout, end.stderr);
    assert!(
        end.stderr.contains("8 devices cannot be spread evenly over 3 processes"),
        "{}",
        end.stderr
    );
}
