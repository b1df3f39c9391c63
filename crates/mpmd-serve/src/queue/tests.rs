//! The waiting line with clients in one thread.

use mpmd_models::Sampling;

use super::*;
use crate::metrics::StageFigures;
use crate::request::ReplyToken;

const SECOND: Duration = Duration::from_secs(1);

fn request(tokens: usize) -> TextRequest {
    let (prompt, sampling) = (vec![1; tokens], Sampling::default());
    TextRequest {
        prompt,
        max_tokens: 9,
        sampling,
        ends: Vec::new(),
        logprobs: None,
    }
}

/// Returns the next event of a client.
fn next(client: &mut ReplyStream) -> Option<ReplyEvent> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().build().unwrap();
    let next = async { tokio::time::timeout(60 * SECOND, client.next()).await };
    runtime.block_on(next).expect("an event comes")
}

fn ready(requests: usize, tokens: usize) -> (RequestQueue, RequestArrivals) {
    let (queue, arrivals) = queue(QueueLimits { requests, tokens });
    arrivals.open();
    arrivals.wait(Duration::ZERO);
    (queue, arrivals)
}

fn refused(queue: &RequestQueue, tokens: usize) -> Refused {
    queue.submit(request(tokens)).err().unwrap()
}

#[test]
fn both_limits_count_requests_until_they_start() {
    let (queue, arrivals) = ready(2, 10);
    let _clients = [
        queue.submit(request(4)).unwrap(),
        queue.submit(request(6)).unwrap(),
    ];
    assert_eq!(
        refused(&queue, 1),
        Refused::Requests {
            waiting: 2,
            retry: SECOND
        }
    );
    let mut taken = arrivals.take();
    assert_eq!(
        refused(&queue, 1),
        Refused::Requests {
            waiting: 2,
            retry: SECOND
        }
    );
    taken[0].sender.start();
    taken[0].sender.start();
    assert_eq!(
        refused(&queue, 5),
        Refused::Tokens {
            waiting: 6,
            retry: SECOND
        }
    );
    let third = queue.submit(request(4)).unwrap();
    taken.remove(1);
    // A prompt of any length is taken if it would not wait behind another.
    drop((arrivals.take(), third));
    assert!(queue.submit(request(1000)).is_ok());
}

#[test]
fn retry_follows_the_rate_of_ends() {
    let (queue, _arrivals) = ready(100, 1000);
    let _clients: Vec<_> = (0..40).map(|_| queue.submit(request(1)).unwrap()).collect();
    let at = |count: u32, seconds| {
        let mut state = queue.0.state.lock();
        state.ends = (0..count)
            .map(|_| now() - Duration::from_secs(seconds))
            .collect();
        retry(&state)
    };
    assert_eq!(at(0, 0), 20 * SECOND);
    assert_eq!(at(15, 1), 2 * SECOND);
    assert_eq!(at(10, 9000), 60 * SECOND);
    assert_eq!(at(64, 0), SECOND);
}

#[test]
fn no_request_is_taken_before_start_and_after_drain() {
    let (queue, arrivals) = queue(QueueLimits::default());
    assert_eq!(refused(&queue, 1), Refused::Starting);
    arrivals.open();
    let client = queue.submit(request(1)).unwrap();
    queue.drain();
    arrivals.open();
    assert_eq!(
        (refused(&queue, 1), queue.phase()),
        (Refused::Draining, ServerPhase::Draining)
    );
    assert!(!arrivals.is_over());
    drop(client);
    assert!(arrivals.is_over());
    assert!(
        queue
            .metrics()
            .contains("mpmd_requests_rejected_total{reason=\"draining\"} 1")
    );
}

#[test]
fn wait_returns_for_arrivals_leavers_and_drain() {
    let (queue, arrivals) = ready(9, 99);
    assert!(!arrivals.wait(Duration::from_millis(1)));
    let client = queue.submit(request(1)).unwrap();
    assert!(arrivals.wait(SECOND) && !arrivals.wait(Duration::ZERO));
    let taken = arrivals.take();
    assert!(!taken[0].sender.is_gone());
    drop(client);
    assert!(arrivals.wait(SECOND) && taken[0].sender.is_gone());
    std::thread::scope(|scope| {
        scope.spawn(|| queue.drain());
        assert!(arrivals.wait(60 * SECOND));
    });
}

#[test]
fn events_end_once_however_a_request_ends() {
    let (queue, arrivals) = ready(9, 99);
    let ends = |end: fn(ReplySender)| {
        let mut client = queue.submit(request(1)).unwrap();
        let mut sender = arrivals.take().remove(0).sender;
        sender.start();
        sender.send(ReplyEvent::Token(ReplyToken {
            id: 7,
            logprobs: None,
        }));
        end(sender);
        let events: Vec<ReplyEvent> = std::iter::from_fn(|| next(&mut client)).collect();
        assert!(next(&mut client).is_none());
        events.last().cloned().unwrap()
    };
    assert_eq!(
        ends(|mut sender| sender.send(ReplyEvent::End(Finish::Stop))),
        { ReplyEvent::End(Finish::Stop) }
    );
    assert_eq!(
        ends(drop),
        ReplyEvent::Failed("the engine has ended".into())
    );
    let mut client = queue.submit(request(1)).unwrap();
    queue.fail("a reason");
    assert_eq!(
        next(&mut client),
        Some(ReplyEvent::Failed("a reason".into()))
    );
    drop(client);
    let text = queue.metrics();
    for line in [
        "mpmd_requests_ended_total{end=\"stop\"} 1",
        "mpmd_requests_ended_total{end=\"failed\"} 2",
        "mpmd_generated_tokens_total 2",
        "mpmd_time_to_first_token_seconds_count 2",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn request_with_its_last_event_runs_no_more() {
    let (queue, arrivals) = ready(9, 99);
    let mut client = queue.submit(request(1)).unwrap();
    let mut sender = arrivals.take().remove(0).sender;
    sender.start();
    assert!(queue.metrics().contains("mpmd_requests_running 1\n"));
    sender.send(ReplyEvent::End(Finish::Stop));
    assert_eq!(next(&mut client), Some(ReplyEvent::End(Finish::Stop)));
    assert!(queue.metrics().contains("mpmd_requests_running 0\n"));
    // It is counted once.
    drop(sender);
    assert!(queue.metrics().contains("mpmd_requests_running 0\n"));
}

#[test]
fn figures_of_the_engine_are_shown_by_stage() {
    let (queue, arrivals) = ready(9, 99);
    let stage = StageFigures {
        busy: SECOND,
        handed_bytes: 5,
        handed: 2 * SECOND,
    };
    arrivals.report(EngineFigures {
        blocks: 8,
        stages: vec![stage, StageFigures::default()],
        ..EngineFigures::default()
    });
    let text = queue.metrics();
    for line in [
        "mpmd_cache_blocks 8",
        "mpmd_stage_idle_share{stage=\"1\"} 1.0",
        "mpmd_stage_busy_seconds_total{stage=\"0\"} 1.0",
        "mpmd_handover_bytes_total{stage=\"0\"} 5",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}

/// Runs a future to its end, and returns its result.
fn result<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().build().unwrap();
    let result = runtime.block_on(async { tokio::time::timeout(60 * SECOND, future).await });
    result.expect("it ends")
}

#[test]
fn pause_is_in_force_when_the_engine_says_so() {
    let (queue, arrivals) = ready(9, 99);
    let pause = |mode| {
        let queue = queue.clone();
        std::thread::spawn(move || result(queue.pause(mode)))
    };
    let asked = pause(PauseMode::Keep);
    while arrivals.news().pause.is_none() {}
    arrivals.paused(PauseMode::Wait);
    assert!(!queue.is_paused() && !asked.is_finished(), "another pause");
    assert!(queue.metrics().contains("mpmd_paused 0"));
    arrivals.paused(PauseMode::Keep);
    assert_eq!(asked.join().unwrap(), Ok(()));
    assert!(queue.is_paused() && queue.metrics().contains("mpmd_paused 1"));
    assert!(queue.submit(request(1)).is_ok(), "requests are taken");
    // The next one is not in force yet.
    let asked = pause(PauseMode::Wait);
    while arrivals.news().pause != Some(PauseMode::Wait) {}
    assert!(!queue.is_paused());
    queue.resume();
    assert_eq!(asked.join().unwrap(), Err(Denied::Resumed));
    let asked = pause(PauseMode::Wait);
    while arrivals.news().pause.is_none() {}
    queue.drain();
    assert_eq!(asked.join().unwrap(), Err(Denied::Resumed));
    assert_eq!(arrivals.news().pause, None, "a drain ends it");
    assert_eq!(
        result(queue.pause(PauseMode::Keep)),
        Err(Refused::Draining.into())
    );
}

#[test]
fn pause_aborts_earlier_requests_alone() {
    let (queue, arrivals) = ready(9, 99);
    let mut earlier = queue.submit(request(1)).unwrap();
    let asked = queue.clone();
    let asked = std::thread::spawn(move || result(asked.pause(PauseMode::Abort)));
    assert_eq!(next(&mut earlier), Some(ReplyEvent::End(Finish::Abort)));
    assert_eq!(earlier.versions(), ["default".into()]);
    let _later = queue.submit(request(1)).unwrap();
    arrivals.paused(PauseMode::Abort);
    assert!(!queue.is_paused(), "the engine has not heard of it");
    let news = arrivals.news();
    assert_eq!((news.arrived.len(), news.aborts), (1, true));
    assert!(!arrivals.news().aborts, "it is told once");
    arrivals.paused(PauseMode::Abort);
    assert_eq!(asked.join().unwrap(), Ok(()));
    drop(earlier);
    assert!(
        queue
            .metrics()
            .contains("mpmd_requests_ended_total{end=\"abort\"} 1")
    );
}

#[test]
fn requests_keep_the_label_with_which_they_start() {
    let (queue, arrivals) = ready(9, 99);
    let mut clients = Vec::new();
    let mut start = || {
        clients.push(queue.submit(request(1)).unwrap());
        let mut sender = arrivals.take().remove(0).sender;
        sender.start();
        sender
    };
    let mut senders = vec![start()];
    queue.set_label("base");
    senders.push(start());
    arrivals.set_weights(3, Some(0));
    let info = queue.weights();
    assert_eq!(
        (info.version, &*info.label, info.old),
        (3, "3", Some((0, "base".into())))
    );
    senders.push(start());
    queue.set_label("step-3");
    senders[0].tell_version();
    arrivals.set_weights(3, None);
    arrivals.set_weights(0, None);
    assert_eq!(
        &*queue.weights().label,
        "default",
        "labels end with their versions"
    );
    senders
        .into_iter()
        .for_each(|mut sender| sender.send(ReplyEvent::End(Finish::Stop)));
    let labels = clients.iter_mut().map(|client| {
        next(client);
        client
            .versions()
            .iter()
            .map(|label| label.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    });
    assert_eq!(labels.collect::<Vec<_>>(), ["default, step-3", "base", "3"]);
}

#[test]
fn weights_are_loaded_one_after_the_other() {
    let (queue, arrivals) = ready(9, 99);
    let load = |path: &str| {
        let (queue, path) = (queue.clone(), path.to_owned());
        std::thread::spawn(move || result(queue.load(path)))
    };
    for said in [Ok(5), Err(Denied::Weights("no".to_owned()))] {
        let first = load("one");
        let path = loop {
            if let Some(path) = arrivals.news().load {
                break path;
            }
        };
        assert_eq!((&*path, arrivals.news().load), ("one", None));
        assert_eq!(load("two").join().unwrap(), Err(Denied::Busy));
        arrivals.loaded(said.clone());
        assert_eq!(first.join().unwrap(), said);
    }
    let last = load("three");
    while arrivals.news().load.is_none() {}
    queue.drain();
    assert_eq!(last.join().unwrap(), Err(Refused::Draining.into()));
}

#[test]
fn waker_ends_the_wait() {
    let (_queue, arrivals) = ready(9, 99);
    let waker = arrivals.waker();
    assert!(!arrivals.is_woken());
    std::thread::scope(|scope| {
        scope.spawn(|| waker.clone().wake());
        assert!(arrivals.wait(60 * SECOND));
    });
    assert!(arrivals.is_woken() && !arrivals.is_woken());
}

#[test]
fn failed_engine_tells_its_reason_to_all_requests() {
    let (queue, arrivals) = ready(9, 99);
    let mut taken = queue.submit(request(1)).unwrap();
    let mut sender = arrivals.take().swap_remove(0).sender;
    sender.start();
    let mut waiting = queue.submit(request(1)).unwrap();

    let why: Arc<str> = "process 1 is lost".into();
    arrivals.fail(&why);
    // The engine ends with all it has, before the clients look.
    drop((sender, arrivals));
    for client in [&mut taken, &mut waiting] {
        assert_eq!(next(client), Some(ReplyEvent::Failed(why.clone())));
        assert_eq!(next(client), None);
    }
    assert_eq!(refused(&queue, 1), Refused::Failed);
    queue.drain();
    assert_eq!(queue.phase(), ServerPhase::Failed);
}
