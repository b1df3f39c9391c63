//! Slurm on this machine, for one test.

use std::net::{Ipv4Addr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpmd_launch::testing::{Sandbox, Watched};
use rustix::process::geteuid;

use crate::installed::system_program;

/// Programs that must be installed, and the Debian package of each.
const NEEDED: [(&str, &str); 5] = [
    ("munged", "munge"),
    ("slurmctld", "slurmctld"),
    ("slurmd", "slurmd"),
    ("srun", "slurm-client"),
    ("setpriv", "util-linux"),
];

/// Number of CPUs that the node reports, on any machine.
const CPUS: usize = 4;

/// A cluster of one node, this machine, with its own ports, keys and files. The test's user is the
/// administrator.
///
/// Dropping this ends its daemons. Processes that they have started end with the [`Sandbox`].
pub struct Slurm {
    daemons: Vec<Watched>,
    settings: PathBuf,
    /// Lock that allows one cluster per process, because two would choose the same ports.
    _alone: MutexGuard<'static, ()>,
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl Slurm {
    /// Starts a cluster and waits until it accepts jobs. Returns `None` if Slurm is not installed
    /// and the user cannot install it.
    ///
    /// # Panics
    ///
    /// If a daemon ends, or if the node is not ready by `deadline`. Also if Slurm is missing and
    /// could be installed.
    pub fn start(site: &Sandbox, deadline: Instant) -> Option<Self> {
        let found: Option<Vec<PathBuf>> = NEEDED
            .iter()
            .map(|(program, package)| system_program(program, package))
            .collect();
        let [munged, slurmctld, slurmd, ..] = &found?[..] else {
            return None;
        };
        // A failed test in here does not break the others.
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let host = hostname();
        // Its sockets are for other users too; otherwise their services complain.
        std::fs::set_permissions(site.path(), PermissionsExt::from_mode(0o755))
            .expect("the test's own folder");
        let settings = site.path().join("slurm.conf");
        std::fs::write(&settings, slurm_conf(site.path(), &host)).expect("the test's own folder");
        for folder in ["spool", "state"] {
            std::fs::create_dir(site.path().join(folder)).expect("the test's own folder");
        }
        let key = site.path().join("munge.key");
        // Need not be secret: any user of this machine may run jobs there.
        std::fs::write(&key, site.path().display().to_string().repeat(8))
            .expect("the test's own folder");
        std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600))
            .expect("the test's own file");

        let mut slurm = Self {
            daemons: Vec::new(),
            settings,
            _alone: alone,
        };
        let file =
            |option: &str, name: &str| format!("--{option}={}", site.path().join(name).display());
        let mut command = launcher_command(site, munged);
        command.args(["--foreground".to_owned(), file("key-file", "munge.key")]);
        command.args([
            file("socket", "munge.socket"),
            file("pid-file", "munged.pid"),
        ]);
        command.args([
            file("log-file", "munged.log"),
            file("seed-file", "munge.seed"),
        ]);
        slurm.daemons.push(site.start(command, "munged").unwrap());
        slurm.wait_until(deadline, || site.path().join("munge.socket").exists());
        let mut command = slurm.command(site, slurmctld);
        command.arg("-D");
        slurm
            .daemons
            .push(site.start(command, "slurmctld").unwrap());
        let mut command = slurm.command(site, slurmd);
        command.args(["-D", "-N", &host]);
        slurm.daemons.push(site.start(command, "slurmd").unwrap());

        let mut asked = 0;
        loop {
            let mut command = slurm.command(site, Path::new("sinfo"));
            command.args(["--noheader", "--format=%T"]);
            asked += 1;
            let mut sinfo = site.start(command, &format!("sinfo-{asked}")).unwrap();
            slurm.wait_until(deadline, || sinfo.has_ended());
            if sinfo.wait(deadline).unwrap().stdout.trim() == "idle" {
                return Some(slurm);
            }
            assert!(
                Instant::now() < deadline,
                "no idle node\n{}\n{}",
                sinfo.report(),
                slurm.report()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the command that runs a client program of this cluster, such as `srun`.
    pub fn command(&self, site: &Sandbox, program: &Path) -> Command {
        let mut command = launcher_command(site, program);
        command.env("SLURM_CONF", &self.settings);
        command
    }

    /// Waits until no process of earlier job steps is left.
    ///
    /// # Panics
    ///
    /// If a daemon ends, or if a process of a step is left at `deadline`.
    pub fn wait_until_idle(&mut self, site: &Sandbox, deadline: Instant) {
        // The controller has a helper process as its child.
        let own: Vec<u32> = self.daemons.iter().map(Watched::pid).collect();
        let is_own =
            |pid: &u32| own.contains(pid) || parent(*pid).is_some_and(|pid| own.contains(&pid));
        self.wait_until(deadline, || site.processes().iter().all(is_own));
    }

    /// Returns the output of the daemons, for messages of failed tests.
    pub fn report(&self) -> String {
        self.daemons
            .iter()
            .map(Watched::report)
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn wait_until(&mut self, deadline: Instant, mut done: impl FnMut() -> bool) {
        while !done() {
            let ended = self
                .daemons
                .iter_mut()
                .map(|daemon| usize::from(daemon.has_ended()))
                .sum::<usize>();
            assert!(ended == 0, "a daemon has ended\n{}", self.report());
            assert!(Instant::now() < deadline, "not in time\n{}", self.report());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns a command that runs `program` in the sandbox, and ends with the test.
pub fn launcher_command(site: &Sandbox, program: &Path) -> Command {
    // A test may be killed, and then drops nothing.
    let mut command = site.command("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

fn slurm_conf(folder: &Path, host: &str) -> String {
    let [controller, node] = free_ports();
    let folder = folder.display();
    let user = if geteuid().is_root() {
        "root".to_owned()
    } else {
        geteuid().as_raw().to_string()
    };
    // mpmd's port depends on the job's number; other tests on this machine have other numbers.
    let first_job = 1 + std::process::id() % 4096;
    format!(
        "ClusterName=mpmd
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
FirstJobId={first_job}
NodeName={host} NodeAddr=127.0.0.1 CPUs={CPUS} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"
    )
}

/// Returns this machine's name as the name of the node. Processes of a job resolve it to find one
/// another.
fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim().split('.').next().unwrap_or_default().to_owned();
    let is_known = (name.as_str(), 0)
        .to_socket_addrs()
        .is_ok_and(|mut found| found.next().is_some());
    if is_known {
        name
    } else {
        "localhost".to_owned()
    }
}

/// Returns two free ports, below the range that systems assign automatically.
fn free_ports() -> [u16; 2] {
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    let mut free =
        (first..32_000).filter(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok());
    [(); 2].map(|()| free.next().expect("a port"))
}

fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Name in parentheses, state, parent.
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}
