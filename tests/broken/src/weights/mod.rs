//! Programs that publish and take versions of weights.

pub(crate) mod host_values;
pub(crate) mod intake_panics;
pub(crate) mod leaf_not_published;
pub(crate) mod lower_version;
pub(crate) mod next_on_one_process;
pub(crate) mod other_publication;
pub(crate) mod two_at_one_address;
pub(crate) mod wanted_twice;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mpmd::ProcessId;
use mpmd::launch::Token;
use mpmd::prelude::*;
use mpmd::weights::{Publication, Publisher, Subscribing, Subscription, WantedLeaf};

/// Time for the trouble of a subscription.
const SOON: Duration = Duration::from_secs(30);

fn token() -> Token {
    Token::derived("a wrong program")
}

/// Creates an array over all devices.
fn leaf(p: &mut Program) -> Result<MpmdArray> {
    let on = p.mesh(&[("x", -1)])?.sharding(spec!["x"]);
    p.array_from_fn(f32s([4]), on, |_, mut view| Ok(view.fill(1.0f32)?))
}

/// Publishes a tree of one leaf, `w`.
fn publisher(p: &mut Program, tree: &BTreeMap<String, MpmdArray>) -> Result<Publisher> {
    p.publisher(Publication::new("policy", token()), tree)
}

/// Returns the settings of a subscription to a publisher.
fn subscribing(publisher: &Publisher) -> Subscribing {
    let address = publisher.address().map(|address| address.to_string());
    Subscribing::new("policy", address.unwrap_or_default(), token())
}

/// Wants a leaf whole on every device.
fn wanted(p: &Program, name: &str) -> Result<Vec<WantedLeaf>> {
    Ok(vec![WantedLeaf::new(
        name,
        f32s([4]),
        p.mesh(&[("x", -1)])?.replicated(),
    )])
}

/// Returns the trouble of a subscription as an error, once there is some. A dry run has none.
fn trouble(p: &Program, subscription: &Subscription) -> Result<()> {
    match p.is_dry_run() {
        true => Ok(()),
        false => wait_for_trouble(subscription).map_or(Ok(()), |why| Err(Error::Environment(why))),
    }
}

/// Returns the trouble of the subscription on process 0 as an error on every process.
fn trouble_of_process_0(p: &mut Program, subscription: &Subscription) -> Result<()> {
    let wait = || Ok(wait_for_trouble(subscription));
    let why: Option<String> = p.broadcast_value(ProcessId(0), None, wait)?;
    why.map_or(Ok(()), |why| Err(Error::Environment(why)))
}

/// Waits for the trouble of a subscription, at most for [`SOON`].
fn wait_for_trouble(subscription: &Subscription) -> Option<String> {
    let start = Instant::now();
    while start.elapsed() < SOON {
        if let Some(why) = subscription.state().trouble {
            return Some(why);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}
