//! A running job loses its rendezvous service, warns, and goes on.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job, Processes, over_each_carrier};

over_each_carrier! {
    cut_connection_is_a_warning_and_the_job_ends_well
    silent_service_is_a_warning_and_the_job_goes_on
}

const PROCESSES: usize = 4;

/// The longest time that a job of 2000 steps may take on a busy machine.
const LONG: Duration = Duration::from_secs(180);

/// Time between two checks for an awaited event.
const LOOK: Duration = Duration::from_millis(5);

fn options(carrier: Carrier) -> Processes {
    carrier.processes(env!("CARGO_BIN_EXE_named"), PROCESSES)
}

/// Connections to the rendezvous service that can be cut, or stand still.
#[derive(Clone)]
struct Relay {
    address: SocketAddr,
    is_still: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// Starts a relay to the service at `service`.
    fn to(service: String) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let relay = Self {
            address,
            is_still: Arc::default(),
            ends: Arc::default(),
        };
        let of_thread = relay.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(&service) else {
                    continue;
                };
                of_thread.carry(near.try_clone(), far.try_clone());
                of_thread.carry(far.try_clone(), near.try_clone());
                of_thread
                    .ends
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend([near, far]);
            }
        });
        relay
    }

    fn carry(&self, from: std::io::Result<TcpStream>, to: std::io::Result<TcpStream>) {
        let (Ok(mut from), Ok(mut to)) = (from, to) else {
            return;
        };
        let is_still = self.is_still.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                while is_still.load(Ordering::Relaxed) {
                    std::thread::sleep(LOOK);
                }
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
    }

    fn cut(&self) {
        for end in self
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain(..)
        {
            // The other end may have been faster.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// Starts a job in which the processes `by_relay` connect through a relay.
fn start(options: Processes, args: &[&str], by_relay: &[usize]) -> (Job, Relay) {
    let mut job = Job::prepare(options);
    let command = job.command(0);
    let service = command
        .get_envs()
        .find(|(name, _)| *name == variables::COORDINATOR);
    let service = service
        .and_then(|(_, address)| address?.to_str())
        .expect("the service's address");
    let relay = Relay::to(service.to_owned());
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        if by_relay.contains(&process) {
            command.env(variables::COORDINATOR, relay.address.to_string());
        }
        command.args(args);
        job.spawn(command);
    }
    (job, relay)
}

/// Returns the number of warnings in the output of a process.
fn warnings(said: &str) -> usize {
    said.matches("has lost the rendezvous service of the job")
        .count()
}

fn cut_connection_is_a_warning_and_the_job_ends_well(carrier: Carrier) {
    // Long enough for the others to hear that process 1 may be gone, and to see that it is not.
    let options = options(carrier).deadline(LONG);
    let (mut job, relay) = start(options, &["looping", "reading", "2000"], &[1]);
    job.wait_for_output("step 6\n").unwrap();
    relay.cut();
    let ended = job.wait();
    for (process, end) in ended.iter().enumerate() {
        assert_eq!(end.code(), 0, "process {process}\n{}", job.report());
        assert_eq!(
            warnings(&end.stderr),
            usize::from(process == 1),
            "{}",
            job.report()
        );
    }
}

fn silent_service_is_a_warning_and_the_job_goes_on(carrier: Carrier) {
    let options = options(carrier).peer_timeout(Duration::from_secs(2));
    let (mut job, relay) = start(options, &["looping", "reading"], &[0, 1, 2, 3]);
    job.wait_for_output("step 6\n").unwrap();
    relay.is_still.store(true, Ordering::Relaxed);
    while !(0..PROCESSES).all(|process| warnings(&job.error_output(process).unwrap()) == 1) {
        assert!(
            Instant::now() < job.deadline(),
            "not all warn\n{}",
            job.report()
        );
        std::thread::sleep(LOOK);
    }
    let steps: Vec<usize> = (0..PROCESSES)
        .map(|process| job.output(process).unwrap().lines().count())
        .collect();
    for (process, steps) in steps.into_iter().enumerate() {
        job.wait_for_output_of(process, &format!("step {}\n", steps + 20))
            .unwrap();
    }
    let ended = job.end();
    assert!(
        ended.iter().all(|end| warnings(&end.stderr) == 1),
        "once each\n{}",
        job.report()
    );
}
