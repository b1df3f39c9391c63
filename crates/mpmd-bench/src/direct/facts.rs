//! Finds out facts of a CUDA driver, one after another. The dangerous ones come last.

use std::time::Instant;

use anyhow::{Context as _, Result};
use mpmd_device::cuda;
use mpmd_device::cuda::direct::{Direct, DirectMemory, EventWait};
use serde_json::{Value, json};

use super::peer::{Peer, Request, us, word};
use crate::case::quantile;
use crate::job::now;

/// Number of copies before an event, for a measurement in which another process waits for the
/// event.
const COPIES: usize = 8;

/// Sizes in bytes of the memory that the other process opens: smaller and larger than the drivers'
/// unit of 2 MiB.
const SHOWN: [usize; 6] = [1, 640 << 10, 1 << 20, 2 << 20, 4 << 20, 256 << 20];

/// Prints all facts of the CUDA driver. Creates at most `events` interprocess events.
///
/// # Errors
///
/// If there is no driver, or if its first device cannot be opened.
pub(super) fn print(json: bool, events: usize) -> Result<()> {
    let fact = |name: &str, find: &mut dyn FnMut() -> Result<Value>| {
        let mut found = find().unwrap_or_else(|error| json!({ "failed": format!("{error:#}") }));
        if json {
            found["name"] = json!(name);
            println!("{found}");
        } else {
            println!("{name}: {found}");
        }
    };
    let start = Instant::now();
    let (driver, found_after) = (cuda::found()?, us(start));
    let gpu = &driver.gpus[0];
    fact("driver", &mut || {
        Ok(json!({ "version": driver.version, "start_us": found_after, "gpu": gpu }))
    });
    let start = Instant::now();
    let (direct, opened_after) = (Direct::open(0)?, us(start));
    fact("context", &mut || Ok(json!({ "open_us": opened_after })));
    // A sixteenth of the memory, so that all copies fit.
    let large = usize::try_from(gpu.memory_bytes / 16)?.clamp(1 << 20, 2 << 30);
    fact("device copy", &mut || device_copy(&direct, large));
    for waiting in [
        EventWait::Blocking,
        EventWait::Interprocess,
        EventWait::Spinning,
    ] {
        fact("event recorded and waited for", &mut || {
            recorded(&direct, waiting)
        });
    }
    for (shared, bytes) in [(false, large / 8), (true, large / 8), (true, 4 << 20)] {
        fact("host memory", &mut || host_memory(&direct, bytes, shared));
    }
    let mut peer = Peer::start();
    let mut with_peer = |name: &str, find: &mut dyn FnMut(&mut Peer) -> Result<Value>| {
        fact(name, &mut || match &mut peer {
            Ok(peer) => find(peer),
            Err(error) => Err(anyhow::anyhow!("there is no other process: {error:#}")),
        });
    };
    for bytes in SHOWN.into_iter().filter(|bytes| *bytes <= large) {
        with_peer("ipc memory", &mut |peer| ipc_memory(&direct, peer, bytes));
    }
    with_peer("ipc event", &mut |peer| ipc_event(&direct, peer, large / 4));
    fact("interprocess events", &mut || {
        interprocess_events(&direct, events)
    });
    fact("interprocess event after their destruction", &mut || {
        let event = direct.event(EventWait::Interprocess);
        let recorded = event.as_ref().map(|event| word(&event.record()));
        Ok(json!({ "create": word(&event), "record": recorded.ok() }))
    });
    with_peer("garbage handles", &mut |peer| peer.ask(&Request::Garbage));
    Ok(())
}

/// Returns the median, and the 10th and 90th percentiles, of times in microseconds.
fn spread(times: &[f64]) -> Value {
    let [p10, median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(times, share));
    json!({ "p10": p10, "median": median, "p90": p90 })
}

fn device_copy(direct: &Direct, bytes: usize) -> Result<Value> {
    let (from, to) = (direct.allocate(bytes)?, direct.allocate(bytes)?);
    direct.fill(&from, 5)?;
    direct.wait()?;
    let times = (0..10)
        .map(|_| copies(direct, &from, &to, 1))
        .collect::<Result<Vec<_>>>()?;
    let times: Vec<f64> = times.into_iter().map(|[_, all]| all).collect();
    // Each byte is read and written.
    let rate = 2.0 * bytes as f64 / quantile(&times, 0.5) / 1e3;
    Ok(json!({ "bytes": bytes, "us": spread(&times), "read_and_written_gb_per_s": rate }))
}

/// Copies all of `from` to `to`, `rounds` times. Returns the microseconds until the copies were
/// issued, and until they were done.
fn copies(
    direct: &Direct,
    from: &DirectMemory,
    to: &DirectMemory,
    rounds: usize,
) -> Result<[f64; 2]> {
    let start = Instant::now();
    (0..rounds).try_for_each(|_| direct.copy(from, to, usize::MAX))?;
    let issued = us(start);
    direct.wait()?;
    Ok([issued, us(start)])
}

fn recorded(direct: &Direct, waiting: EventWait) -> Result<Value> {
    let event = direct.event(waiting)?;
    let one = |_| {
        let start = Instant::now();
        event.record()?;
        event.wait()?;
        Ok(us(start))
    };
    let times = (0..200).map(one).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "kind": format!("{waiting:?}").to_lowercase(), "us": spread(&times) }))
}

fn host_memory(direct: &Direct, bytes: usize, shared: bool) -> Result<Value> {
    const ROUNDS: usize = 4;
    let (device, mut host) = (direct.allocate(bytes)?, direct.host(bytes, shared)?);
    let start = Instant::now();
    let pinned = host.pin();
    let pin = us(start);
    let rate = |from: &DirectMemory, to: &DirectMemory| -> Result<Value> {
        let [issued, all] = copies(direct, from, to, ROUNDS)?;
        let rate = (ROUNDS * bytes) as f64 / all / 1e3;
        Ok(json!({ "gb_per_s": rate, "issue_us": issued }))
    };
    Ok(json!({
        "memory": if shared { "sealed memory file" } else { "anonymous" },
        "bytes": bytes,
        "pin": word(&pinned),
        "pin_us": pin,
        "in": rate(&host, &device)?,
        "out": rate(&device, &host)?,
    }))
}

fn ipc_memory(direct: &Direct, peer: &mut Peer, bytes: usize) -> Result<Value> {
    let start = Instant::now();
    let first = direct.allocate(bytes)?;
    let allocated = us(start);
    let second = direct.allocate(bytes)?;
    direct.fill(&first, 17)?;
    direct.fill(&second, 34)?;
    direct.wait()?;
    let start = Instant::now();
    let handle = first.handle()?;
    let shown = us(start);
    let request = |handle: [u8; 64]| Request::Memory(handle.to_vec(), bytes);
    let (one, other) = (request(handle), request(second.handle()?));
    let opened = [peer.ask(&one)?, peer.ask(&other)?, peer.ask(&one)?];
    let same_process = word(&direct.open_memory(handle, bytes));
    peer.ask(&Request::CloseFirst)?;
    let after_close = peer.ask(&other)?;
    let (address, apart) = (
        first.address(),
        second.address().wrapping_sub(first.address()),
    );
    // Memory is not freed while it is open: CUDA does not define the outcome.
    peer.ask(&Request::CloseAll)?;
    let start = Instant::now();
    drop(first);
    let freed = us(start);
    let again = direct.allocate(bytes)?;
    let is_reused = again.handle()? == handle;
    let [first, second, first_again] = opened;
    Ok(json!({
        "bytes": bytes,
        "allocate_us": allocated,
        "free_us": freed,
        "handle_us": shown,
        "apart": apart as i64,
        "first": first,
        "second": second,
        "first_again": first_again,
        "same_process": same_process,
        "second_after_close_of_first": after_close,
        "address_reused_after_free": again.address() == address,
        "handle_reused_after_free": is_reused,
    }))
}

fn ipc_event(direct: &Direct, peer: &mut Peer, bytes: usize) -> Result<Value> {
    let event = direct.event(EventWait::Interprocess)?;
    let opened = peer.ask(&Request::Event(event.handle()?.to_vec()))?;
    if opened["open"] != "ok" {
        return Ok(json!({ "opened": opened }));
    }
    let (from, to) = (direct.allocate(bytes)?, direct.allocate(bytes)?);
    // The time from the request, or from the end of this process's own wait if there is work, until
    // the other process has waited.
    let mut times = |rounds: usize, copies: usize| -> Result<(Value, Value)> {
        let (mut found, mut last) = (Vec::new(), Value::Null);
        for _ in 0..rounds {
            (0..copies).try_for_each(|_| direct.copy(&from, &to, bytes))?;
            event.record()?;
            let mut start = now();
            peer.tell(&Request::Wait)?;
            if copies > 0 {
                event.wait()?;
                start = now();
            }
            last = peer.answer()?;
            let end = last["end"]
                .as_u64()
                .context("the other process has not waited")?;
            found.push((end as f64 - start as f64) / 1e3);
        }
        Ok((spread(&found), last))
    };
    let (idle, _) = times(50, 0)?;
    let (behind, last) = times(10, COPIES)?;
    Ok(json!({
        "opened": opened,
        "idle_us": idle,
        "copies": COPIES,
        "copied_bytes": bytes,
        "after_own_wait_us": behind,
        "last": last,
    }))
}

fn interprocess_events(direct: &Direct, most: usize) -> Result<Value> {
    let (mut events, start, mut refused) = (Vec::new(), Instant::now(), None);
    while events.len() < most && refused.is_none() {
        let made = direct.event(EventWait::Interprocess);
        match made.and_then(|event| event.record().map(|()| event)) {
            Ok(event) => events.push(event),
            Err(error) => refused = Some(word::<()>(&Err(error))),
        }
    }
    let each = us(start) / events.len().max(1) as f64;
    direct.wait()?;
    let start = Instant::now();
    let made = events.len();
    drop(events);
    let destroyed = us(start) / made.max(1) as f64;
    Ok(json!({ "made": made, "refused": refused, "us_each": each, "destroy_us_each": destroyed }))
}
