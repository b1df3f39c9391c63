//! Runs `ucx_perftest`, the benchmark of UCX: two processes of it, with the same tests and sizes.
//!
//! Its server takes the test from its client, so both get the same arguments except the server's
//! address. Both inherit the environment, such as `UCX_TLS`, and end with this process.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use mpmd_ids::block::Spin;
use mpmd_launch::EXEC;
use mpmd_launch::variables::LAUNCHER_PID;
use mpmd_transport::ucx;

use super::found::Test;
use super::pace::{self, Pace};

const NAME: &str = "ucx_perftest";

/// The time limit for UCX to open in this process, which tells the path of its library.
const EXAMINE_WITHIN: Duration = Duration::from_secs(10);
/// The time limit for the server to listen.
const LISTEN_WITHIN: Duration = Duration::from_secs(10);
/// The time limit for one run of the client, far above its expected length.
const RUN_WITHIN: Duration = Duration::from_secs(20);
/// The divisor of the iterations after a run over the time limit. On a busy machine the program's
/// spinning processes can become extremely slow.
const FEWER: u64 = 16;
const TIMES_FEWER: usize = 3;
/// The time limit for the server to end after its client.
const END_WITHIN: Duration = Duration::from_secs(5);
/// The number of ports to try: a free port may be taken before the server uses it.
const PORTS_TRIED: usize = 3;

/// The program `ucx_perftest` with its further options. `sleeps` is true if it sleeps while it
/// waits.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Perftest {
    program: PathBuf,
    options: Vec<String>,
    sleeps: bool,
}

/// The parameters of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    test: Test,
    bytes: usize,
    iterations: u64,
}

impl Perftest {
    /// Finds the program at `named`, or if that is `None`, beside the UCX library in use. If `spin`
    /// is `Never`, the program's processes sleep while they wait. Starts no program.
    ///
    /// # Errors
    ///
    /// If the program does not exist, or if UCX cannot be opened to find it.
    pub(super) fn find(named: Option<&Path>, options: &[String], spin: Spin) -> Result<Self> {
        let program = match named {
            Some(path) => path.to_owned(),
            None => beside_the_library()?,
        };
        ensure!(
            program.is_file(),
            "there is no {NAME} at {}; name one with --perftest PATH",
            program.display()
        );
        Ok(Self { program, options: options.to_vec(), sleeps: spin == Spin::Never })
    }

    /// Runs a server and a client, and blocks until both have ended. Returns one sample:
    /// microseconds of half a round trip, or GB/s.
    ///
    /// `known` is the time of one iteration in microseconds by the last run; this updates it. If it
    /// is `None`, a short run finds it first. It determines the iterations that take about
    /// `pace.sample`.
    ///
    /// # Errors
    ///
    /// If the program cannot be started, fails, prints no figures, or takes too long.
    pub(super) fn sample(
        &self,
        test: Test,
        bytes: usize,
        pace: &Pace,
        known: &mut Option<f64>,
    ) -> Result<f64> {
        let least = pace::warm_up(bytes).max(pace::window(bytes) as u64);
        let each = match *known {
            Some(each) => each,
            None => self.in_time(Run { test, bytes, iterations: least })?.iteration_us(test),
        };
        let iterations = pace.rounds(Duration::from_secs_f64(each / 1e6)).max(least);
        let said = self.in_time(Run { test, bytes, iterations })?;
        *known = Some(said.iteration_us(test));
        Ok(if test == Test::Latency { said.overall_us } else { said.gb_per_s(bytes) })
    }

    fn in_time(&self, mut run: Run) -> Result<Said> {
        for _ in 0..TIMES_FEWER {
            match self.run(run) {
                Err(error) if error.is::<TooLong>() && run.iterations > 2 => {
                    run.iterations = (run.iterations / FEWER).max(2);
                }
                said => return said,
            }
        }
        self.run(run)
    }

    fn run(&self, run: Run) -> Result<Said> {
        let doing = || {
            format!(
                "running {} for {} of {} bytes",
                self.program.display(),
                run.test.name(),
                run.bytes
            )
        };
        for _ in 0..PORTS_TRIED {
            if let Some(text) = self.try_run(run).with_context(doing)? {
                return said(&text).with_context(doing);
            }
        }
        Err(anyhow!("every port that was free was taken at once")).with_context(doing)
    }

    /// Starts a server and a client, and blocks until both have ended. Returns the output of the
    /// client, or `None` if the server did not get the port.
    fn try_run(&self, run: Run) -> Result<Option<String>> {
        let port = free_port()?;
        let mut server = Running::start(self.command(run, port))?;
        if !server.listens(port)? {
            return Ok(None);
        }
        let mut command = self.command(run, port);
        command.arg(Ipv4Addr::LOCALHOST.to_string());
        let mut client = Running::start(command)?;
        let (status, text) = client.end(RUN_WITHIN).context("the client")?;
        ensure!(status.success(), "the client ended with {status}: {}", last_words(&text));
        let (status, words) = server.end(END_WITHIN).context("the server")?;
        ensure!(status.success(), "the server ended with {status}: {}", last_words(&words));
        Ok(Some(text))
    }

    fn command(&self, run: Run, port: u16) -> Command {
        // Started through this program, so that it ends with this process.
        let this = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
        let mut command = Command::new(this);
        command
            .args([EXEC, "--"])
            .arg(&self.program)
            .env(LAUNCHER_PID, std::process::id().to_string());
        let words = |command: &mut Command, option: &str, value: u64| {
            command.args([option, &value.to_string()]);
        };
        match run.test {
            Test::Latency => command.args(["-t", "ucp_am_lat"]),
            // Only latency and bandwidth are requested.
            _ => command.args(["-t", "ucp_am_bw"]),
        };
        words(&mut command, "-p", port.into());
        words(&mut command, "-s", run.bytes as u64);
        words(&mut command, "-n", run.iterations);
        words(&mut command, "-w", pace::warm_up(run.bytes));
        words(&mut command, "-O", pace::window(run.bytes) as u64);
        // Final figures only, separated by commas.
        command.args(["-f", "-v"]);
        if self.sleeps {
            command.args(["-E", "sleep"]);
        }
        command.args(&self.options);
        command
    }
}

fn beside_the_library() -> Result<PathBuf> {
    let report = ucx::examine(EXAMINE_WITHIN)
        .with_context(|| format!("looking for {NAME}; one can be named with --perftest PATH"))?;
    // Beside `lib`, or, as in distributions, beside a folder above it.
    let places: Vec<_> =
        report.library.ancestors().skip(2).map(|folder| folder.join("bin").join(NAME)).collect();
    let found = places.iter().find(|place| place.is_file()).or(places.first());
    found.cloned().with_context(|| format!("{} lies nowhere", report.library.display()))
}

/// The error of a child that took longer than this time and was killed.
#[derive(Debug, thiserror::Error)]
#[error("it did not end within {0:?}")]
struct TooLong(Duration);

/// A child process and its output, which arrives when the child has closed it. The child is killed
/// when this is dropped.
struct Running {
    child: Child,
    text: Receiver<String>,
}

impl Running {
    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting it")?;
        let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
        let (sender, text) = mpsc::channel();
        let mut running = Self { child, text };
        let reading = std::thread::Builder::new().name("perftest".to_owned()).spawn(move || {
            let mut bytes = Vec::new();
            // Unreadable output is ignored; the exit status says more.
            let _ = stdout.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
            let _ = stderr.as_mut().map(|pipe| pipe.read_to_end(&mut bytes));
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
        if let Err(error) = reading {
            running.stop();
            return Err(error).context("starting a thread that reads its output");
        }
        Ok(running)
    }

    /// Waits up to `LISTEN_WITHIN` until the child listens at `port`. Returns false if the child
    /// has ended because the port was taken.
    fn listens(&mut self, port: u16) -> Result<bool> {
        let until = Instant::now() + LISTEN_WITHIN;
        loop {
            if listening(port)? {
                return Ok(true);
            }
            if let Some(status) = self.child.try_wait()? {
                let text = self.text.recv_timeout(END_WITHIN).unwrap_or_default();
                let taken = text.contains("in use") || text.contains("bind");
                ensure!(taken, "the server ended with {status}: {}", last_words(&text));
                return Ok(false);
            }
            ensure!(Instant::now() < until, "the server did not listen within {LISTEN_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits up to `peer_timeout` until the child closes its output, then up to `END_WITHIN` for
    /// its end. Kills a child that takes longer. Returns (exit status, output).
    fn end(&mut self, peer_timeout: Duration) -> Result<(ExitStatus, String)> {
        let text = self.text.recv_timeout(peer_timeout);
        let Ok(text) = text else {
            self.stop();
            return Err(TooLong(peer_timeout).into());
        };
        // Its output is closed: it has ended, or is about to.
        let until = Instant::now() + END_WITHIN;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok((status, text));
            }
            if Instant::now() > until {
                self.stop();
                bail!("closed its output and did not end within {END_WITHIN:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stop(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

fn free_port() -> Result<u16> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a free port")?;
    Ok(listener.local_addr().context("looking for a free port")?.port())
}

/// Returns true if a socket of this host listens at the TCP port, by the system's tables. A test
/// connection would count as the client.
fn listening(port: u16) -> Result<bool> {
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        match std::fs::read_to_string(table) {
            Ok(text) if lists(&text, port) => return Ok(true),
            Ok(_) => {}
            // A host without IPv6 has no such table.
            Err(_) if table.ends_with('6') => {}
            Err(error) => return Err(error).with_context(|| format!("reading {table}")),
        }
    }
    Ok(false)
}

/// Returns true if a table in the format of `/proc/net/tcp` has a socket that listens at `port`.
fn lists(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next(), fields.next(), fields.next());
        let local = local
            .and_then(|local| local.rsplit_once(':'))
            .map(|(_, port)| u16::from_str_radix(port, 16));
        state == Some(LISTEN) && local == Some(Ok(port))
    })
}

/// The figures of one run of the program, over all its iterations.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Said {
    /// Microseconds of half a round trip, or of one message.
    overall_us: f64,
    /// The program's "MB/s", which are 2^20 bytes per second.
    overall_mib_per_s: f64,
}

impl Said {
    /// Returns the microseconds of one iteration: a round trip, or one message. The program's
    /// latency is half a round trip.
    fn iteration_us(&self, test: Test) -> f64 {
        self.overall_us * if test == Test::Latency { 2.0 } else { 1.0 }
    }

    /// Returns the bandwidth in GB/s (10^9 bytes per second) for messages of `bytes` bytes. Uses
    /// the one of the two figures that has more digits.
    fn gb_per_s(&self, bytes: usize) -> f64 {
        if self.overall_mib_per_s >= 10.0 {
            self.overall_mib_per_s * f64::from(1 << 20) / 1e9
        } else {
            bytes as f64 / self.overall_us / 1e3
        }
    }
}

/// Parses the program's output: finds the figures by their column names. Lines of UCX's log may
/// stand anywhere around them. Fails if a figure is missing.
fn said(text: &str) -> Result<Said> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("iterations,"));
    let (Some(names), Some(figures)) = (lines.next(), lines.find(|line| !line.starts_with('[')))
    else {
        bail!("it gave no figures: {}", last_words(text));
    };
    let figure = |name: &str| {
        let at = names.split(',').position(|other| other.trim() == name);
        let text = at.and_then(|at| figures.split(',').nth(at));
        let figure = text.and_then(|text| text.trim().parse::<f64>().ok());
        figure.with_context(|| format!("it gave no figure for {name}: {figures}"))
    };
    let said =
        Said { overall_us: figure("overall_lat")?, overall_mib_per_s: figure("overall_bw")? };
    ensure!(said.overall_us > 0.0, "it measured nothing: {figures}");
    Ok(said)
}

/// Returns the first three lines of a program's output that are not blank, joined.
fn last_words(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).take(3).collect();
    if lines.is_empty() { "it said nothing".to_owned() } else { lines.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the figures that ucx_perftest prints.
    const NAMES: &str =
        "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr";

    #[test]
    fn final_figures_are_read() {
        // UCX 1.12.1, two processes over shared memory.
        let latency = format!("{NAMES}\n100000,0.105,0.108,0.108,70.80,70.80,9279947,9279947\n");
        assert_eq!(said(&latency).unwrap(), Said { overall_us: 0.108, overall_mib_per_s: 70.80 });
        let bandwidth = format!(
            "[1795270444.862306] [host:2316 :0]  parser.c:1885 UCX  WARN  unused env variable\n\
             {NAMES}\n  16,0.150,12470.424,12470.424,5132.14,5132.14,80,80\n"
        );
        let read = said(&bandwidth).unwrap();
        assert_eq!(read.overall_us, 12470.424);
        assert!((read.gb_per_s(64 << 20) - 5.381).abs() < 1e-3);
        // Eight bytes at a time on a busy machine.
        let slow = format!("{NAMES}\n 115,0.361,2631.687,2631.687,0.00,0.00,380,380\n");
        let read = said(&slow).unwrap();
        assert!((read.gb_per_s(8) * 2_631_687.0 - 8.0).abs() < 1e-9);
        assert_eq!(
            (read.iteration_us(Test::Latency), read.iteration_us(Test::Bandwidth)),
            (5263.374, 2631.687)
        );
    }

    #[test]
    fn output_without_figures_is_an_error() {
        let usage = "[1795270444.862306] [host:2316 :0] perftest_params.c:280  UCX  ERROR \
                     Invalid option argument for -t\n  \
                     Usage: ucx_perftest [ server-hostname ] [ options ]\n";
        assert!(said(usage).unwrap_err().to_string().contains("Invalid option argument for -t"));
        let names = format!("{NAMES}\n");
        assert!(said(&names).unwrap_err().to_string().contains("no figures"));
        let zero = format!("{names}0,0.0,0.0,0.0,0.0,0.0,0,0\n");
        assert!(said(&zero).unwrap_err().to_string().contains("measured nothing"));
        let cut = format!("{names}10,0.1,0.1\n");
        assert!(said(&cut).unwrap_err().to_string().contains("overall_lat"));
        assert!(said("").unwrap_err().to_string().contains("said nothing"));
    }

    #[test]
    fn listening_sockets_are_told_from_others() {
        let table =
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   1: 0100007F:1F91 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0
";
        assert!(lists(table, 8080));
        assert!(!lists(table, 8081), "connected, not listening");
        assert!(!lists(table, 80));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(listening(listener.local_addr().unwrap().port()).unwrap());
    }

    #[test]
    fn missing_program_error_names_the_option() {
        let said = Perftest::find(Some(Path::new("/nowhere/ucx_perftest")), &[], Spin::Auto)
            .unwrap_err()
            .to_string();
        assert!(said.contains("/nowhere/ucx_perftest") && said.contains("--perftest"), "{said}");
    }

    #[test]
    fn child_over_its_time_limit_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut running = Running::start(command).unwrap();
        let ended = running.end(Duration::from_millis(20));
        let error = ended.context("the client").context("running it").unwrap_err();
        assert!(error.is::<TooLong>(), "{error:#}");
        assert!(running.child.try_wait().unwrap().is_some(), "it is gone");
    }

    #[test]
    fn peer_sleeps_if_ours_never_spins() {
        let this = std::env::current_exe().unwrap();
        assert!(Perftest::find(Some(&this), &[], Spin::Never).unwrap().sleeps);
        assert!(!Perftest::find(Some(&this), &[], Spin::Auto).unwrap().sleeps);
    }
}
