//! The process that runs the rendezvous service dies, and another one goes on with it.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_rendezvous::{
    Identity, JobMember, JoinConfig, JoinedEpoch, Rendezvous, RendezvousError, RendezvousServer,
    ServerConfig, ServiceSeeker, SizeRange, Succession, Token,
};

/// Time limit for a wait. Nothing here takes this long; it ends a test that would hang.
const LONG: Duration = Duration::from_secs(30);

/// Number of processes with which each job is started.
const PROCESSES: usize = 3;

/// A process of a job.
struct Process {
    number: u32,
    identity: Identity,
    seeker: ServiceSeeker,
    server: Option<RendezvousServer>,
    sizes: Vec<SizeRange>,
    peer_timeout: Duration,
}

/// A process that has joined an epoch.
struct Part {
    process: Process,
    rendezvous: Rendezvous,
    joined: JoinedEpoch,
}

impl Process {
    /// Returns the first process of a job, which runs the service.
    fn host(sizes: &[u32]) -> Self {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (token, processes) = (Token::new([42; 32]), PROCESSES);
        let config = ServerConfig {
            processes,
            token,
            peer_timeout: LONG,
        };
        let server = RendezvousServer::bind(any, config).unwrap();
        let at = server.address().to_string();
        Self {
            server: Some(server),
            ..Self::new(0, &at, sizes)
        }
    }

    fn new(number: u32, service: &str, sizes: &[u32]) -> Self {
        let (identity, seeker) = (
            Identity::random().unwrap(),
            ServiceSeeker::new(service.to_owned()),
        );
        let (sizes, peer_timeout) = (SizeRange::of(sizes.iter().copied()), LONG);
        Self {
            number,
            identity,
            seeker,
            server: None,
            sizes,
            peer_timeout,
        }
    }

    fn connect(&mut self) -> Result<Rendezvous, RendezvousError> {
        let config = JoinConfig {
            server: String::new(),
            process: ProcessId(self.number),
            processes: PROCESSES,
            token: Token::new([42; 32]),
            peer_timeout: self.peer_timeout,
        };
        self.seeker.connect(&config, &mut self.server)
    }

    /// Joins an epoch, as often as the service is lost meanwhile.
    fn join(mut self, epoch: u64) -> Result<Part, RendezvousError> {
        loop {
            let rendezvous = self.connect()?;
            let at = rendezvous.local_address();
            let heir = self.seeker.heir(at, &self.identity, self.server.as_ref())?;
            let (pid, sizes) = (self.number, self.sizes.clone());
            let member = JobMember {
                pid,
                heir,
                sizes,
                ..JobMember::default()
            };
            match rendezvous.join_epoch(member, epoch, self.identity) {
                Ok(Some(joined)) => {
                    self.identity.run = Some(joined.run);
                    self.seeker.hear(Succession::of(&joined));
                    return Ok(Part {
                        process: self,
                        rendezvous,
                        joined,
                    });
                }
                Ok(None) => panic!("the job goes on"),
                Err(RendezvousError::ServerGone { .. }) => {
                    self.seeker.hear(rendezvous.succession());
                    self.seeker.part(rendezvous.parting());
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn join_later(self, epoch: u64) -> Receiver<Result<Part, RendezvousError>> {
        let (sender, joined) = mpsc::channel();
        thread::spawn(move || drop(sender.send(self.join(epoch))));
        joined
    }
}

impl Part {
    /// Leaves the epoch, and joins the next one.
    fn go_on(self) -> Receiver<Result<Part, RendezvousError>> {
        let Self {
            mut process,
            rendezvous,
            joined,
        } = self;
        let _ = rendezvous.leave_epoch();
        process.seeker.part(rendezvous.parting());
        process.join_later(joined.epoch + 1)
    }

    fn place(&self) -> (u32, u32, u64, usize) {
        let JoinedEpoch {
            process,
            epoch,
            ref members,
            ..
        } = self.joined;
        (self.process.number, process.0, epoch, members.len())
    }
}

/// Waits for processes that join. Returns those.
fn wait(joining: Vec<Receiver<Result<Part, RendezvousError>>>) -> Vec<Part> {
    joining
        .into_iter()
        .map(|joined| joined.recv_timeout(LONG).unwrap().unwrap())
        .collect()
}

/// Starts a job.
fn start(sizes: &[u32]) -> (Vec<Part>, String) {
    let host = Process::host(sizes);
    let at = host.server.as_ref().unwrap().address().to_string();
    let others = (1..PROCESSES as u32).map(|number| Process::new(number, &at, sizes));
    let parts: Vec<_> = std::iter::once(host)
        .chain(others)
        .map(|p| p.join_later(1))
        .collect();
    (wait(parts), at)
}

/// Lets a process wait for a place, and waits until it has heard of the others.
fn spare(number: u32, at: &str) -> Receiver<Result<Part, RendezvousError>> {
    let spare = Process::new(number, at, &[]).join_later(1);
    thread::sleep(Duration::from_millis(100));
    spare
}

fn places(parts: &[Part]) -> Vec<(u32, u32, u64, usize)> {
    parts.iter().map(Part::place).collect()
}

#[test]
fn service_goes_on_from_process_to_process_and_spares_find_it() {
    let (mut parts, at) = start(&[]);
    let run = parts[0].joined.run;
    let spares = [spare(3, &at), spare(4, &at)];
    drop(parts.remove(0));
    // The last one comes long before the next service does.
    let last = parts.pop().unwrap().go_on();
    thread::sleep(Duration::from_millis(200));
    let [first, second] = spares;
    let mut parts = wait(vec![parts.pop().unwrap().go_on(), last]);
    assert_eq!(places(&parts), [(1, 1, 2, 3), (2, 2, 2, 3)]);
    // Which of the spares came first to the second service is not known.
    let until = Instant::now() + LONG;
    let (got, waits) = loop {
        assert!(Instant::now() < until, "a spare has the place");
        if let Ok(part) = first.recv_timeout(Duration::from_millis(10)) {
            break (part.unwrap(), second);
        }
        if let Ok(part) = second.recv_timeout(Duration::from_millis(10)) {
            break (part.unwrap(), first);
        }
    };
    assert_eq!(got.joined.process, ProcessId(0));
    assert!(
        parts[0].process.server.is_some(),
        "process 1 runs the service"
    );
    drop(parts.remove(0));
    // The spare in place 0 came later than process 2.
    let next = wait(vec![got.go_on(), parts.pop().unwrap().go_on(), waits]);
    let found: Vec<u32> = next.iter().map(|part| part.joined.process.0).collect();
    assert_eq!(found, [0, 2, 1]);
    assert!(
        next.iter()
            .all(|part| part.joined.run == run && part.joined.epoch == 3)
    );
    let serves: Vec<bool> = next
        .iter()
        .map(|part| part.process.server.is_some())
        .collect();
    assert_eq!(serves, [false, true, false]);
}

#[test]
fn next_one_in_the_list_goes_on_if_the_first_is_dead_too() {
    let (mut parts, _) = start(&[1, 2, 3]);
    let last = parts.pop().unwrap();
    drop(parts);
    let parts = wait(vec![last.go_on()]);
    assert_eq!(places(&parts), [(2, 0, 2, 1)], "nobody waits for process 1");
}

#[test]
fn service_that_dies_while_others_join_is_followed_by_the_next() {
    let (mut parts, _) = start(&[1, 2, 3]);
    let last = parts.pop().unwrap().go_on();
    let mut second = parts.pop().unwrap();
    drop(parts);
    let _ = second.rendezvous.leave_epoch();
    second.process.seeker.part(second.rendezvous.parting());
    // It has taken over, and dies before it joins.
    let connected = second.process.connect().unwrap();
    assert!(second.process.server.is_some());
    thread::sleep(Duration::from_millis(200));
    assert!(last.try_recv().is_err(), "process 1 is awaited");
    drop((connected, second));
    assert_eq!(places(&wait(vec![last])), [(2, 0, 2, 1)]);
}

#[test]
fn service_of_a_process_that_leaves_goes_on_at_once() {
    let (mut parts, _) = start(&[2, 3]);
    let leaves = parts.remove(0);
    leaves.rendezvous.leave().unwrap();
    for part in &mut parts {
        assert!(part.process.seeker.leaves());
    }
    let next = wait(parts.into_iter().map(Part::go_on).collect());
    assert_eq!(places(&next), [(1, 0, 2, 2), (2, 1, 2, 2)]);
    drop(leaves);
}

#[test]
fn nobody_goes_on_for_a_service_that_is_only_silent() {
    let (mut parts, _) = start(&[]);
    let mut last = parts.pop().unwrap();
    let _ = last.rendezvous.leave_epoch();
    // A listener that is there, and does not answer.
    let silent = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut seeker = ServiceSeeker::new(silent.local_addr().unwrap().to_string());
    seeker.hear(Succession::of(&last.joined));
    last.process.seeker = seeker;
    last.process.peer_timeout = Duration::from_millis(300);
    let error = last.process.connect().unwrap_err();
    assert!(
        matches!(error, RendezvousError::Unreachable { .. }),
        "{error}"
    );
    assert!(last.process.server.is_none());
}

#[test]
fn process_left_alone_without_a_part_hears_that_all_are_gone() {
    let (parts, at) = start(&[]);
    let spare = spare(3, &at);
    drop(parts);
    let error = spare.recv_timeout(LONG).unwrap().err().unwrap();
    assert!(
        error.to_string().contains("all that could go on with it"),
        "{error}"
    );
}
