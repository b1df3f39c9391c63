//! A job that a program starts by itself. The program is this test.

use std::process::{Command, ExitCode};

use mpmd::job::JobArgs;

/// Environment variable that makes this test run as the program of the job.
const IS_PROGRAM: &str = "MPMD_TEST_PROGRAM";

#[test]
fn transport_of_the_environment_reaches_the_processes() {
    if std::env::var_os(IS_PROGRAM).is_some() {
        let args = JobArgs {
            processes: Some(2),
            ..JobArgs::default()
        };
        let code = mpmd::job::run(&args, 2, 2, |p| {
            println!("over {}", p.transport());
            anyhow::Ok(())
        });
        assert!(code.is_ok_and(|code| code == ExitCode::SUCCESS));
        return;
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    let this = "transport_of_the_environment_reaches_the_processes";
    program
        .args(["--exact", this, "--nocapture"])
        .env(IS_PROGRAM, "1");
    let output = program.env("MPMD_TRANSPORT", "tcp").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(said.matches("over tcp").count(), 2, "{said}");
}
