//! Tests of `JobEnv`: reads the variables of each launcher.

use std::time::Instant;

use super::*;
use mpmd_layout::topology::DeviceKind::{Cpu, Cuda};

fn read(vars: &[(&str, &str)]) -> Result<Option<JobEnv>, LaunchError> {
    read_for(&secret::owners(), vars)
}

fn read_for(owners: &[u32], vars: &[(&str, &str)]) -> Result<Option<JobEnv>, LaunchError> {
    let look = |name: &str| {
        vars.iter()
            .find(|(other, _)| *other == name)
            .map(|(_, value)| (*value).to_owned())
    };
    JobEnv::from_vars(&look, owners)
}

fn job(vars: &[(&str, &str)]) -> JobEnv {
    read(vars).unwrap().unwrap()
}

fn who(env: &JobEnv) -> (u32, usize, Option<usize>, &str, &str) {
    (
        env.process.0,
        env.processes,
        env.local_process,
        &env.coordinator,
        env.source,
    )
}

#[test]
fn no_variables_give_a_job_of_one() {
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(
        read(&[("HOME", "/"), ("MPMD_TRANSPORT", "tcp"), ("MPMD_RANK", " ")]),
        Ok(None)
    );
    // A batch script is one process, even in a larger allocation.
    assert_eq!(
        read(&[
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_JOB_ID", "7")
        ]),
        Ok(None)
    );
}

#[test]
fn variables_of_every_launcher_are_read() {
    let token = Token::new([5; 32]);
    let ours = job(&[
        ("MPMD_RANK", "1"),
        ("MPMD_WORLD_SIZE", "4"),
        ("MPMD_LOCAL_RANK", "1"),
        ("MPMD_COORDINATOR", "10.0.0.1:77"),
        ("MPMD_HOSTED", "1"),
        ("MPMD_JOB_TOKEN", &token.to_hex()),
        ("MPMD_TRANSPORT", "tcp"),
        ("MPMD_SPIN", "never"),
        ("MPMD_DEVICES_PER_PROCESS", "2"),
        ("MPMD_DEVICE", "cpu,cuda"),
        ("MPMD_CUDA_COLLECTIVES", "nccl"),
        ("MPMD_PEER_TIMEOUT", "1.5"),
        ("MPMD_HOST", "left"),
        ("MPMD_CHECK", "uncommitted, replicas,replay:10"),
        // Our launcher has priority.
        ("RANK", "3"),
        ("SLURM_STEP_NODELIST", "x"),
    ]);
    assert_eq!(who(&ours), (1, 4, Some(1), "10.0.0.1:77", "mpmd"));
    assert_eq!((ours.token, ours.hosted), (token, true));
    assert_eq!(ours.peer_timeout, Some(Duration::from_millis(1500)));
    assert_eq!(ours.host.as_deref(), Some("left"));
    assert_eq!(
        (ours.spin, ours.check_uncommitted),
        (Some(Spin::Never), true)
    );
    assert!(ours.check_replicas);
    assert_eq!(ours.check_replay, Some(10));
    assert_eq!(
        ours.cuda_collectives,
        Some(mpmd_layout::topology::CudaCollectives::Nccl)
    );
    assert_eq!(
        ours.device_kinds.as_deref(),
        Some(&[Cpu, Cuda, Cuda, Cuda][..])
    );
    assert_eq!(
        (ours.transport.as_deref(), ours.devices_per_process),
        (Some("tcp"), Some(2))
    );

    let torchrun = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "fd00::7"),
        ("MASTER_PORT", "29500"),
    ];
    assert!(!job(&torchrun).check_uncommitted && !job(&torchrun).check_replicas);
    assert_eq!(job(&torchrun).check_replay, None);
    assert_eq!(
        who(&job(&torchrun)),
        (5, 8, Some(1), "[fd00::7]:29500", "torchrun")
    );
    let with_store = [&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
    assert_eq!(job(&with_store).coordinator, "[fd00::7]:29501");

    let slurm = [
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "6"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_JOB_ID", "8195"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "node[03-05,7],login"),
    ];
    assert_eq!(who(&job(&slurm)), (3, 6, Some(0), "node03:61443", "Slurm"));
    // Two `srun` steps at the same time, in one allocation.
    let second = [&[("SLURM_STEP_ID", "1")], &slurm[..]].concat();
    assert_eq!(job(&second).coordinator, "node03:61700");

    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-host-17@1"),
        ("PMIX_RANK", "1"),
    ];
    let inside_slurm = [&slurm[..], &open_mpi].concat();
    for env in [job(&open_mpi), job(&inside_slurm)] {
        let (process, processes, local, coordinator, source) = who(&env);
        assert_eq!(
            (process, processes, local, source),
            (1, 2, Some(1), "Open MPI")
        );
        let port: u16 = coordinator
            .strip_prefix("127.0.0.1:")
            .unwrap()
            .parse()
            .unwrap();
        assert!(port >= 61440);
    }
    let pmix = [
        ("PMIX_RANK", "0"),
        ("PMIX_NAMESPACE", "n"),
        ("MPMD_WORLD_SIZE", "2"),
    ];
    assert_eq!(job(&pmix).source, "PMIx");
    let pmi = [
        ("PMI_RANK", "2"),
        ("PMI_SIZE", "3"),
        ("MPI_LOCALRANKID", "2"),
        ("MPMD_COORDINATOR", "h:9"),
    ];
    assert_eq!(who(&job(&pmi)), (2, 3, Some(2), "h:9", "PMI"));
    let kubernetes = [
        ("JOB_COMPLETION_INDEX", "2"),
        ("MPMD_WORLD_SIZE", "3"),
        ("MPMD_COORDINATOR", "job-0.svc:9"),
    ];
    assert_eq!(
        who(&job(&kubernetes)),
        (2, 3, None, "job-0.svc:9", "Kubernetes")
    );
}

#[test]
fn dry_run_overrides_launchers() {
    let dry_run = job(&[
        ("MPMD_DRY_RUN", "/tmp/dry_run.json"),
        ("MPMD_DRY_RUN_PROCESSES", "4"),
        ("MPMD_DEVICES_PER_PROCESS", "2"),
        ("MPMD_RANK", "1"),
        ("RANK", "0"),
    ]);
    assert_eq!((dry_run.process, dry_run.processes), (ProcessId(4), 4));
    assert_eq!(dry_run.devices_per_process, Some(2));
    let expected = DryRunEnv {
        file: "/tmp/dry_run.json".into(),
        steps: None,
    };
    assert_eq!(dry_run.dry_run, Some(expected));
    let steps = [
        ("MPMD_DRY_RUN", "p"),
        ("MPMD_DRY_RUN_PROCESSES", "1"),
        ("MPMD_DRY_RUN_STEPS", "3"),
    ];
    assert_eq!(job(&steps).dry_run.unwrap().steps, Some(3));
    let numbered = |number: &str| {
        read(&[
            ("MPMD_DRY_RUN", "p"),
            ("MPMD_DRY_RUN_PROCESSES", "4"),
            ("MPMD_DRY_RUN_PROCESS", number),
        ])
    };
    assert_eq!(numbered("3").unwrap().unwrap().process, ProcessId(3));
    let beyond = numbered("4").unwrap_err().to_string();
    assert!(
        beyond.contains("below the number of processes, 4"),
        "{beyond}"
    );
    let none = read(&[("MPMD_DRY_RUN", "p"), ("MPMD_DRY_RUN_PROCESSES", "0")]);
    assert_eq!(none, Err(LaunchError::Processes { processes: 0 }));
    let half = read(&[("MPMD_DRY_RUN", "p")]).unwrap_err().to_string();
    assert!(
        half.contains("mpmd check, but MPMD_DRY_RUN_PROCESSES is not set"),
        "{half}"
    );
}

#[test]
fn incomplete_launcher_error_names_variables_read() {
    for (vars, missing) in [
        (&[("MPMD_RANK", "0")][..], "MPMD_WORLD_SIZE"),
        (
            &[("MPMD_RANK", "0"), ("MPMD_WORLD_SIZE", "2")],
            "MPMD_COORDINATOR",
        ),
        (&[("MPMD_WORLD_SIZE", "2")], "MPMD_RANK"),
        (&[("MPMD_COORDINATOR", "h:1")], "MPMD_RANK"),
        (&[("RANK", "0")], "WORLD_SIZE"),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")],
            "MASTER_PORT",
        ),
        (
            &[
                ("SLURM_STEP_NODELIST", "n1"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_JOB_ID", "1"),
            ],
            "SLURM_PROCID",
        ),
        (&[("OMPI_COMM_WORLD_RANK", "0")], "OMPI_COMM_WORLD_SIZE"),
        (&[("PMIX_RANK", "0")], "MPMD_WORLD_SIZE"),
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MPMD_COORDINATOR"),
        (
            &[("JOB_COMPLETION_INDEX", "0"), ("MPMD_WORLD_SIZE", "2")],
            "MPMD_COORDINATOR",
        ),
    ] {
        let error = read(vars).unwrap_err().to_string();
        assert!(error.contains(&format!("{missing} ")), "{vars:?}: {error}");
        for (name, value) in vars {
            assert!(
                error.contains(&format!("{name}={value}")),
                "{vars:?}: {error}"
            );
        }
    }
    let several = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "n"),
    ];
    assert!(
        read(&several)
            .unwrap_err()
            .to_string()
            .contains("spans several hosts")
    );
}

#[test]
fn invalid_value_error_names_the_variable() {
    let base = [
        ("MPMD_RANK", "0"),
        ("MPMD_WORLD_SIZE", "2"),
        ("MPMD_COORDINATOR", "h:1"),
    ];
    for (name, value) in [
        ("MPMD_RANK", "two"),
        ("MPMD_WORLD_SIZE", "-1"),
        ("MPMD_COORDINATOR", "h"),
        ("MPMD_COORDINATOR", "h:0"),
        ("MPMD_COORDINATOR", "h:99999"),
        ("MPMD_JOB_TOKEN", "secret"),
        ("MPMD_DEVICES_PER_PROCESS", "0"),
        ("MPMD_PEER_TIMEOUT", "-3"),
        ("MPMD_PEER_TIMEOUT", "0"),
        ("MPMD_SPIN", "often"),
        ("MPMD_SIMD", "AVX2"),
        ("MPMD_CHECK", "everything"),
        ("MPMD_CHECK", "replay"),
        ("MPMD_CHECK", "replay:"),
        ("MPMD_CHECK", "replay:0"),
        ("MPMD_CHECK", "replicas,replay:-1"),
        ("MPMD_CHECK", "replay:ten"),
        ("MPMD_DEVICE", "gpu"),
        ("MPMD_CUDA_COLLECTIVES", "gloo"),
        ("MPMD_DEVICE", "cpu,cpu,cuda"),
        ("MPMD_LOCAL_RANK", "x"),
    ] {
        let vars = [&[(name, value)], &base[..]].concat();
        let error = read(&vars).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let beyond = [
        ("MPMD_RANK", "2"),
        ("MPMD_WORLD_SIZE", "2"),
        ("MPMD_COORDINATOR", "h:1"),
    ];
    assert!(
        read(&beyond)
            .unwrap_err()
            .to_string()
            .contains("below the number of processes, 2")
    );
}

#[test]
fn settings_of_a_job_without_a_launcher_are_read() {
    let settings = |vars: &[(&str, &str)], processes| {
        let look = |name: &str| {
            vars.iter()
                .find(|(other, _)| *other == name)
                .map(|(_, value)| (*value).to_owned())
        };
        JobEnv::settings(&look, processes)
    };
    // A rendezvous of another job does not count.
    let vars = [
        ("MPMD_CHECK", "replicas,replay:3"),
        ("MPMD_PEER_TIMEOUT", "2"),
        ("MPMD_SPIN", "never"),
        ("MPMD_TRANSPORT", "tcp"),
        ("MPMD_COORDINATOR", "nonsense"),
        ("MPMD_JOB_TOKEN", "nonsense"),
    ];
    let env = settings(&vars, 1).unwrap();
    assert_eq!(
        (env.processes, env.hosted, env.check_replicas),
        (1, false, true)
    );
    assert_eq!(env.check_replay, Some(3));
    assert_eq!(env.peer_timeout, Some(Duration::from_secs(2)));
    assert_eq!(
        (env.spin, env.transport.as_deref()),
        (Some(Spin::Never), Some("tcp"))
    );
    for (name, value, processes) in [
        ("MPMD_TRANSPORT", "pigeon", 1),
        ("MPMD_PEER_TIMEOUT", "0", 2),
        ("MPMD_SPIN", "often", 2),
        ("MPMD_SIMD", "sse9", 1),
        ("MPMD_DEVICE", "cpu,cpu,cuda", 2),
    ] {
        let said = settings(&[(name, value)], processes)
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with(&format!("{name}={value} makes no sense")),
            "{said}"
        );
    }
}

#[test]
fn derived_token_is_common_to_one_job() {
    let slurm = |process, job| {
        let vars = [
            ("SLURM_PROCID", process),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", job),
            ("SLURM_STEP_NODELIST", "a,b"),
        ];
        super::tests::job(&vars).token
    };
    assert_eq!(slurm("0", "7"), slurm("1", "7"));
    // The port is the same, but the job differs.
    assert_ne!(slurm("0", "7"), slurm("0", "4103"));
}

#[test]
fn another_attempt_has_another_token() {
    let slurm = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_NODELIST", "a,b"),
    ];
    let torchrun = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "9"),
    ];
    for (vars, name) in [
        (&slurm[..], "SLURM_RESTART_COUNT"),
        (&torchrun[..], "TORCHELASTIC_RESTART_COUNT"),
    ] {
        let token = |attempt| job(&[vars, &[(name, attempt)]].concat()).token;
        assert_ne!(token("1"), token("2"), "{name}");
        assert_ne!(job(vars).token, token("1"), "{name}");
        assert_eq!(token("1"), token("1"), "{name}");
    }
    // On several hosts each agent counts its own restarts.
    let two_hosts = |attempt| {
        let mut vars = torchrun.to_vec();
        vars[2].1 = "1";
        vars.push(("TORCHELASTIC_RESTART_COUNT", attempt));
        job(&vars).token
    };
    assert_eq!(two_hosts("0"), two_hosts("1"));
}

const JOB_17: [(&str, &str); 3] = [
    ("MPMD_RANK", "0"),
    ("MPMD_WORLD_SIZE", "2"),
    ("MPMD_COORDINATOR", "h:17"),
];

/// Reads the environment of a process with a secret file of these bytes and this mode, in a folder
/// that all can enter.
fn with_secret(bytes: &[u8], mode: u32) -> Result<JobEnv, LaunchError> {
    with_secret_in(0o755, bytes, mode)
}

/// Reads the environment of a process with a secret file of these bytes and this mode, in a folder
/// of another mode.
fn with_secret_in(folder_mode: u32, bytes: &[u8], mode: u32) -> Result<JobEnv, LaunchError> {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(folder_mode)).unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, bytes).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    let vars = [
        &JOB_17[..],
        &[("MPMD_JOB_TOKEN_FILE", file.to_str().unwrap())],
    ]
    .concat();
    read(&vars).map(Option::unwrap)
}

#[test]
fn token_is_derived_from_secret_and_job() {
    let secret = [b'a'; 40];
    let env = with_secret(&secret, 0o600).unwrap();
    let same = with_secret(&[&secret[..], b"\n"].concat(), 0o400).unwrap();
    assert_eq!(env.token, same.token);
    assert!(!env.token_is_guessable && job(&JOB_17).token_is_guessable);
    assert_ne!(env.token, job(&JOB_17).token);
    assert_ne!(env.token, with_secret(&[b'b'; 40], 0o600).unwrap().token);
    assert_eq!(env.token, Token::of_secret(&secret, "mpmd  h:17"));
    assert_ne!(
        env.token,
        Token::of_secret(&secret, "mpmd  h:18"),
        "another job's"
    );
    let token = Token::new([5; 32]);
    let hex = token.to_hex();
    let both = [
        ("MPMD_JOB_TOKEN", hex.as_str()),
        ("MPMD_JOB_TOKEN_FILE", "/none"),
    ];
    let both = [&JOB_17[..], &both];
    assert_eq!(
        job(&both.concat()).token,
        token,
        "that of a launcher goes first"
    );
}

#[test]
fn unsafe_secret_files_are_refused() {
    let refused = |result: Result<JobEnv, LaunchError>, why: &str| {
        let said = result.unwrap_err().to_string();
        assert!(
            said.contains("MPMD_JOB_TOKEN_FILE=") && said.contains(why),
            "{said}"
        );
    };
    for mode in [0o644, 0o640, 0o620, 0o602] {
        refused(
            with_secret(&[b'a'; 40], mode),
            &format!("its mode is {mode:04o}; make that 0600"),
        );
    }
    for folder_mode in [0o710, 0o701, 0o777] {
        refused(
            with_secret_in(folder_mode, &[b'a'; 40], 0o644),
            "others can use it",
        );
    }
    with_secret_in(0o700, &[b'a'; 40], 0o644).unwrap();
    with_secret_in(0o744, &[b'a'; 40], 0o644).unwrap();
    refused(
        with_secret(&[b'a'; 31], 0o600),
        "32 to 4096 bytes long; this one has 31",
    );
    refused(with_secret(&[b' '; 40], 0o600), "this one has 0");
    assert!(with_secret(&[b'a'; 4096], 0o600).is_ok());
    refused(
        with_secret(&[b'a'; 4097], 0o600),
        "it has more than 4096 bytes",
    );
    let folder = tempfile::tempdir().unwrap();
    let named = |name: &std::path::Path| {
        let vars = [
            &JOB_17[..],
            &[("MPMD_JOB_TOKEN_FILE", name.to_str().unwrap())],
        ]
        .concat();
        read(&vars).map(Option::unwrap)
    };
    refused(named(folder.path()), "no regular file");
    refused(named(&folder.path().join("none")), "No such file");
    // Opening a pipe without a writer must not block.
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .unwrap();
    assert!(made.success());
    refused(named(&pipe), "no regular file");
    let foreign = folder.path().join("foreign");
    std::fs::write(&foreign, [b'a'; 40]).unwrap();
    std::fs::set_permissions(
        &foreign,
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    match std::os::unix::fs::chown(&foreign, Some(12345), None) {
        Ok(()) => refused(named(&foreign), "it belongs to user 12345"),
        Err(error) => eprintln!("skipped: only root gives files away ({error})"),
    }
}

#[test]
fn secret_of_another_user_than_the_process_is_not_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, [b'a'; 40]).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let vars = [
        &JOB_17[..],
        &[("MPMD_JOB_TOKEN_FILE", file.to_str().unwrap())],
    ]
    .concat();
    let own = rustix::process::geteuid().as_raw();
    assert!(read_for(&[own], &vars).is_ok());
    // As root would read it for a process of that user.
    let error = read_for(&[own + 12345], &vars).unwrap_err().to_string();
    assert!(
        error.contains(&format!("it belongs to user {own}, who is not trusted")),
        "{error}"
    );
}

#[test]
fn environment_of_another_process_is_read_for_its_user() {
    use std::os::unix::process::CommandExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, [b'a'; 40]).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let of_user = |user: Option<u32>, asked: Option<u32>| {
        let mut sleeper = std::process::Command::new("sleep");
        sleeper
            .arg("60")
            .envs(JOB_17)
            .env("MPMD_JOB_TOKEN_FILE", &file);
        if let Some(user) = user {
            sleeper.uid(user);
        }
        let mut sleeper = sleeper.spawn().unwrap();
        // The environment is that of `sleep` once it has begun; for a moment there is none.
        let [exe, environ] =
            ["exe", "environ"].map(|name| format!("/proc/{}/{name}", sleeper.id()));
        let own = std::env::current_exe().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while std::fs::read_link(&exe).is_ok_and(|exe| exe == own)
            || std::fs::read(&environ).is_ok_and(|environ| environ.is_empty())
        {
            assert!(Instant::now() < until, "it does not begin");
            std::thread::yield_now();
        }
        let read = JobEnv::of_process(sleeper.id(), asked);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        read
    };
    let token = Token::of_secret(&[b'a'; 40], "mpmd  h:17");
    let own = rustix::process::geteuid();
    for asked in [None, Some(own.as_raw())] {
        assert_eq!(of_user(None, asked).unwrap().unwrap().token, token);
    }
    assert!(of_user(None, Some(own.as_raw() + 1)).unwrap().is_none());
    if !own.is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    // Its file is not even looked at unless the process was asked for.
    assert!(of_user(Some(12345), Some(0)).unwrap().is_none());
    let error = of_user(Some(12345), None).unwrap_err().to_string();
    assert!(
        error.contains("it belongs to user 0, who is not trusted here"),
        "{error}"
    );
}

#[test]
fn listen_address_is_reachable_by_all() {
    for (coordinator, listens) in [
        ("127.0.0.1:9", "127.0.0.1:9"),
        ("localhost:9", "127.0.0.1:9"),
        ("[::1]:9", "[::1]:9"),
        ("node03:61443", "[::]:61443"),
        ("[fe80::1%eth0]:9", "[::]:9"),
        ("10.0.0.1:9", "0.0.0.0:9"),
        ("[fd00::7]:9", "[::]:9"),
    ] {
        let vars = [
            ("MPMD_RANK", "0"),
            ("MPMD_WORLD_SIZE", "2"),
            ("MPMD_COORDINATOR", coordinator),
        ];
        assert_eq!(job(&vars).listen_address().unwrap().to_string(), listens);
    }
}

#[test]
fn counts_above_the_limits_are_refused() {
    let refused = |name: &str, value: &str| {
        let base = [
            ("MPMD_RANK", "0"),
            ("MPMD_WORLD_SIZE", "2"),
            ("MPMD_COORDINATOR", "h:1"),
        ];
        let vars = [&[(name, value), ("MPMD_DEVICE", "cpu")], &base[..]].concat();
        read(&vars).unwrap_err().to_string()
    };
    for value in ["1048577", "18446744073709551615"] {
        for name in ["MPMD_WORLD_SIZE", "MPMD_DEVICES_PER_PROCESS"] {
            let said = refused(name, value);
            assert_eq!(
                said,
                format!("{name}={value} makes no sense: it must be at most 1048576")
            );
        }
    }
    let dry_run = [
        ("MPMD_DRY_RUN", "p"),
        ("MPMD_DRY_RUN_PROCESSES", "4294967296"),
        ("MPMD_DEVICE", "cpu"),
    ];
    assert!(
        read(&dry_run)
            .unwrap_err()
            .to_string()
            .contains("at most 1048576")
    );
}

#[test]
fn store_port_is_avoided_at_both_ends_of_the_range() {
    for (port, beside) in [("0", 1), ("29500", 29501), ("65535", 65534)] {
        let vars = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "h"),
            ("MASTER_PORT", port),
            ("TORCHELASTIC_USE_AGENT_STORE", "true"),
        ];
        assert_eq!(job(&vars).coordinator, format!("h:{beside}"));
    }
}

#[test]
fn fuzz_environment() {
    let token = "5".repeat(64);
    // The variables of each launcher for a job.
    let jobs: [&[(&str, &str)]; 8] = [
        &[
            ("MPMD_RANK", "1"),
            ("MPMD_WORLD_SIZE", "4"),
            ("MPMD_LOCAL_RANK", "1"),
            ("MPMD_COORDINATOR", "10.0.0.1:77"),
        ],
        &[
            ("RANK", "1"),
            ("WORLD_SIZE", "8"),
            ("MASTER_ADDR", "fd00::7"),
            ("MASTER_PORT", "29500"),
        ],
        &[
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "6"),
            ("SLURM_JOB_ID", "8195"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "node[03-05,7],login"),
        ],
        &[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("PMIX_NAMESPACE", "host-17@1"),
        ],
        &[
            ("PMIX_RANK", "0"),
            ("PMIX_NAMESPACE", "n"),
            ("MPMD_WORLD_SIZE", "2"),
        ],
        &[
            ("PMI_RANK", "2"),
            ("PMI_SIZE", "3"),
            ("MPMD_COORDINATOR", "[::1]:9"),
        ],
        &[
            ("JOB_COMPLETION_INDEX", "2"),
            ("MPMD_WORLD_SIZE", "3"),
            ("MPMD_COORDINATOR", "localhost:9"),
        ],
        &[
            ("MPMD_DRY_RUN", "p"),
            ("MPMD_DRY_RUN_PROCESSES", "4"),
            ("MPMD_DRY_RUN_STEPS", "3"),
        ],
    ];
    let always = [
        ("MPMD_DEVICE", "cpu,cuda"),
        ("MPMD_DEVICES_PER_PROCESS", "2"),
        ("MPMD_SPIN", "250"),
        ("MPMD_PEER_TIMEOUT", "1.5"),
        ("MPMD_JOB_TOKEN", token.as_str()),
        ("MPMD_CUDA_COLLECTIVES", "nccl"),
        ("TORCHELASTIC_USE_AGENT_STORE", "true"),
    ];
    mpmd_fuzz::cases("environment", |rng| {
        let mut vars: Vec<(&str, String)> = jobs[rng.usize(..jobs.len())]
            .iter()
            .chain(always.iter().filter(|_| rng.bool()))
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect();
        for _ in 0..rng.u8(..4) {
            let at = rng.usize(..vars.len());
            let mut bytes = vars[at].1.clone().into_bytes();
            mpmd_fuzz::mutate(rng, &mut bytes);
            vars[at].1 = String::from_utf8_lossy(&bytes).into_owned();
        }
        let look = |name: &str| {
            vars.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| value.clone())
        };
        match JobEnv::from_vars(&look, &secret::owners()) {
            Ok(Some(env)) => {
                assert!(env.dry_run.is_some() || env.process.index() < env.processes);
                assert!(
                    env.device_kinds
                        .is_none_or(|kinds| kinds.len() == env.processes)
                );
            }
            Ok(None) => {}
            Err(error) => drop(error.to_string()),
        }
        if let Ok(Some(env)) = JobEnv::from_vars(&look, &secret::owners()) {
            assert!(env.listen_address().is_ok());
        }
    });
}
