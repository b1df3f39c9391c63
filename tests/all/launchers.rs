//! Programs under real cluster launchers: the README's own commands, and other common uses.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{
    ProcessEnd, Sandbox, Slurm, Watched, launcher_command, package_program, system_program,
};
use rustix::process::{Pid, Signal, kill_process};

/// No run takes this long, on any machine.
const LONG: Duration = Duration::from_secs(120);

const TRANSPORTS: &[&str] = &[
    "tcp",
    #[cfg(feature = "ucx")]
    "ucx",
];

/// Returns the line that begins with `begin` in the README's section about clusters, without its
/// comment.
fn readme(begin: &str) -> &'static str {
    let (_, section) = include_str!("../../README.md")
        .split_once("\n## On a cluster\n")
        .expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let line = section.lines().find(|line| line.starts_with(begin));
    let line =
        line.unwrap_or_else(|| panic!("no line of the README's section begins with {begin:?}"));
    line.split(" #").next().unwrap_or_default().trim()
}

/// Creates a sandbox where `./pipeline` and `./named` can be started.
fn site() -> Sandbox {
    let site = Sandbox::new().unwrap();
    let named = PathBuf::from(env!("CARGO_BIN_EXE_named"));
    for (program, name) in [
        (package_program("mpmd-examples", "pipeline"), "pipeline"),
        (named, "named"),
    ] {
        std::os::unix::fs::symlink(program, site.path().join(name)).expect("the test's own folder");
    }
    site
}

/// Starts a shell that runs a script, on the cluster or on this machine alone.
fn shell(site: &Sandbox, slurm: Option<&Slurm>, transport: &str, script: &str) -> Watched {
    let sh = Path::new("sh");
    let mut command = slurm.map_or_else(
        || launcher_command(site, sh),
        |slurm| slurm.command(site, sh),
    );
    command
        .args(["-ec", script])
        .env(variables::TRANSPORT, transport);
    // By default Open MPI refuses more processes than cores, and root. The variables have other
    // names in versions 4 and 5.
    for open_mpi in ["OMPI", "PRTE"] {
        command.env(format!("{open_mpi}_ALLOW_RUN_AS_ROOT"), "1");
        command.env(format!("{open_mpi}_ALLOW_RUN_AS_ROOT_CONFIRM"), "1");
    }
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    site.start(command, &format!("script-{transport}")).unwrap()
}

fn deadline() -> Instant {
    Instant::now() + LONG
}

fn run(site: &Sandbox, slurm: Option<&Slurm>, transport: &str, script: &str) -> ProcessEnd {
    let mut process = shell(site, slurm, transport, script);
    let end = process.wait(deadline()).unwrap();
    assert_eq!(
        end.code(),
        0,
        "{script} over {transport}\n{}",
        process.report()
    );
    end
}

fn check_has_passed(end: &ProcessEnd) {
    // The numbers show that the results were compared, not only computed.
    assert!(
        end.stdout.contains("0.179679") && end.stdout.contains("2.217942"),
        "{}",
        end.stdout
    );
}

/// Returns the lines of all processes of `named transfers`, sorted, each once.
fn sorted(said: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    lines.dedup();
    lines
}

fn check_transfers(said: &str) {
    let alone = mpmd_tests::programs::simulated("transfers", 1, &[]).concat();
    assert_eq!(sorted(said), sorted(&alone));
}

#[test]
fn readme_command_runs_under_slurm() {
    let site = site();
    let Some(mut slurm) = Slurm::start(&site, deadline()) else {
        return;
    };
    for transport in TRANSPORTS {
        check_has_passed(&run(&site, Some(&slurm), transport, readme("srun ")));
        // With a secret of the user's.
        let script = format!(
            "{}\nexec {}",
            readme("export MPMD_JOB_TOKEN="),
            readme("srun ")
        );
        check_has_passed(&run(&site, Some(&slurm), transport, &script));
        check_transfers(
            &run(
                &site,
                Some(&slurm),
                transport,
                "exec srun -n 4 ./named transfers",
            )
            .stdout,
        );
    }
    slurm.wait_until_idle(&site, deadline());
}

#[test]
fn two_steps_of_one_allocation_run_at_once() {
    let site = site();
    let Some(mut slurm) = Slurm::start(&site, deadline()) else {
        return;
    };
    let step = |name| format!("srun --overlap -n 4 ./named transfers > {name}");
    let script = format!("{} & {}; wait $!", step("first"), step("second"));
    for transport in TRANSPORTS {
        run(
            &site,
            Some(&slurm),
            transport,
            &format!("exec salloc -n 4 sh -ec '{script}'"),
        );
        for step in ["first", "second"] {
            check_transfers(
                &std::fs::read_to_string(site.path().join(step)).expect("a step's output"),
            );
        }
    }
    slurm.wait_until_idle(&site, deadline());
}

#[test]
fn mpirun_runs_inside_an_allocation_of_slurm() {
    let site = site();
    let Some(mut slurm) = Slurm::start(&site, deadline()) else {
        return;
    };
    if system_program("mpirun", "openmpi-bin").is_none() {
        return;
    }
    for transport in TRANSPORTS {
        let script = format!("exec salloc -n 4 {}", readme("mpirun -n 4 ./"));
        check_has_passed(&run(&site, Some(&slurm), transport, &script));
    }
    slurm.wait_until_idle(&site, deadline());
}

#[test]
fn a_process_killed_under_slurm_is_named_by_all_others() {
    const VICTIM: u32 = 2;
    let site = site();
    let Some(mut slurm) = Slurm::start(&site, deadline()) else {
        return;
    };
    let deadline = deadline();
    for transport in TRANSPORTS {
        let mut step = shell(
            &site,
            Some(&slurm),
            transport,
            "exec srun -n 4 ./named looping reading",
        );
        step.wait_for_output("step 6\n", deadline).unwrap();
        let rank = format!("SLURM_PROCID={VICTIM}");
        let is_victim = |pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == rank.as_bytes())
        };
        let victims: Vec<u32> = site.processes().into_iter().filter(is_victim).collect();
        let [victim] = victims[..] else {
            panic!("{victims:?} have {rank}\n{}", step.report())
        };
        let victim = Pid::from_raw(victim.cast_signed()).expect("a process number");
        kill_process(victim, Signal::KILL).expect("a process that runs");
        let end = step.wait(deadline).unwrap();
        assert_ne!(end.code(), 0, "{}", step.report());
        let named = end
            .stderr
            .matches(&format!("process {VICTIM} is gone"))
            .count();
        assert!(named >= 3, "all others must name it\n{}", step.report());
        slurm.wait_until_idle(&site, deadline);
    }
}

#[test]
fn readme_commands_run_under_open_mpi() {
    if system_program("mpirun", "openmpi-bin").is_none() {
        return;
    }
    let site = site();
    for transport in TRANSPORTS {
        check_has_passed(&run(&site, None, transport, readme("mpirun -n 4 ./")));
        check_transfers(&run(&site, None, transport, "exec mpirun -n 4 ./named transfers").stdout);
    }
    // As on several hosts: rank 0's host and a port of the user's choice, and a secret.
    let several = readme("mpirun -n 4 -x ");
    assert!(several.contains("node1:29400"), "{several}");
    let several = several.replace("node1:29400", &format!("localhost:{}", free_port()));
    let script = format!("{}\nexec {several}", readme("export MPMD_JOB_TOKEN="));
    for transport in TRANSPORTS {
        check_has_passed(&run(&site, None, transport, &script));
    }
    assert_eq!(site.processes(), Vec::<u32>::new(), "nothing may be left");
}

#[test]
fn a_job_that_fails_is_a_failure_to_its_launcher() {
    let site = site();
    if system_program("mpirun", "openmpi-bin").is_none() {
        return;
    }
    let Some(mut slurm) = Slurm::start(&site, deadline()) else {
        return;
    };
    let wrong = "./pipeline --check --learning-rate 0.044";
    for launcher in ["srun", "mpirun"] {
        let mut process = shell(
            &site,
            Some(&slurm),
            "tcp",
            &format!("exec {launcher} -n 4 {wrong}"),
        );
        let end = process.wait(deadline()).unwrap();
        assert_eq!(end.code(), 1, "{launcher}\n{}", process.report());
        // `mpirun` ends all processes when the first has failed, even if another was about to print
        // the cause.
        let said = launcher == "mpirun" || end.stderr.contains("a number is off: ");
        assert!(said, "{launcher}\n{}", process.report());
    }
    slurm.wait_until_idle(&site, deadline());
}

/// Returns a free port, below those that systems assign automatically.
fn free_port() -> u16 {
    let first = 32_000 + (std::process::id() % 500) as u16;
    let is_free = |port: &u16| std::net::TcpListener::bind(("0.0.0.0", *port)).is_ok();
    (first..32_768).find(is_free).expect("a port")
}
