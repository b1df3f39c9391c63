//! The thread that looks for the publisher, on process 0 of a subscriber, and invites the processes
//! of both ends to links.
//!
//! A link is known by its rendezvous, which runs here: the link is over once that can never be
//! complete, or once all processes have joined it and left. An invitation to a link that is over
//! fails at once.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::mpsc;
use mpmd_proto::router::FailureKind;
use mpmd_rendezvous::{RendezvousError, ServerConfig, Token, TokenError};

use super::group::{CallError, GroupAnswer, GroupCall, Invitation, LONGEST, call, link_token};
use super::net::Service;
use super::subscriber::{Subscribing, SubscriptionShared};
use super::taker::TakerNews;

/// First pause between two attempts to reach a publisher.
const RETRY: Duration = Duration::from_millis(500);
/// Longest pause between two attempts. The pause grows with each link that brings no version.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// Time limit of a call to the processes of a publisher or subscriber.
const CALL: Duration = Duration::from_secs(5);
/// Interval of the checks for the end of the subscription during a link.
const WATCH: Duration = Duration::from_millis(100);

/// Looks for the publisher on process 0 of a subscriber, and invites all processes of both ends to
/// links.
pub(super) struct PublisherSeeker {
    pub(super) subscribing: Subscribing,
    /// The address of the rendezvous of this subscriber's processes. `token` is its token.
    pub(super) own: String,
    pub(super) token: Token,
    pub(super) devices: Vec<usize>,
    pub(super) peer_timeout: Duration,
    pub(super) shared: Arc<SubscriptionShared>,
    pub(super) told: mpsc::Sender<TakerNews>,
}

/// The reason why there is no link to the publisher.
#[derive(Clone, Debug, thiserror::Error)]
enum SeekError {
    #[error("a process of this job does not answer: {0}")]
    OwnProcess(#[source] CallError),
    #[error(transparent)]
    Publisher(#[from] CallError),
    /// The publication at the address has another name.
    #[error("{address} publishes {found}, not {name}")]
    OtherPublication {
        address: String,
        found: String,
        name: String,
    },
    /// The system gives no random number for the link's nonce.
    #[error(transparent)]
    Random(#[from] TokenError),
    /// The rendezvous of the link could not be opened, or has failed.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
}

/// The way in which a link ended.
enum LinkEnd {
    /// A process of the link was lost.
    Lost,
    /// All processes have left the link in order, perhaps because the two ends do not fit each
    /// other.
    Over,
}

impl PublisherSeeker {
    pub(super) fn run(&self) {
        let mut retry = RETRY;
        // The reasons of the last attempt and of the last line in the log.
        let mut last = None;
        let mut said = None;
        while !self.shared.has_ended() {
            let before = self.shared.state().versions;
            let found = self.link();
            let has_more = self.shared.state().versions > before;
            retry = match found {
                // One that does not fit is not called all the time.
                Ok(LinkEnd::Over) if !has_more => (retry * 2).min(LONGEST_RETRY),
                _ => RETRY,
            };
            let why = found.err().map(|why| why.to_string());
            if let Some(why) = &why {
                self.shared.note(|state| state.trouble = Some(why.clone()));
            }

            match &why {
                None => said = None,
                Some(reason) if why != last => {
                    // The receiver is gone once the subscription has ended.
                    _ = self.told.send(TakerNews::NotFound(reason.clone()));
                }
                // A publisher that starts is not ready at the first attempt.
                Some(reason) if why != said => {
                    tracing::warn!(name = self.subscribing.name, "no versions come: {reason}");
                    said = why.clone();
                }
                Some(_) => {}
            }

            last = why;
            self.shared.sleep(retry);
        }
    }

    /// Creates a link with the publisher, and returns after the link's end.
    fn link(&self) -> Result<LinkEnd, SeekError> {
        let Subscribing {
            name,
            address,
            token,
            transport,
            net,
            ..
        } = &self.subscribing;

        // This process has decided on all versions of the link before. The others hear of it before
        // they are invited to the next one, and all are there.
        let settle = GroupCall::Settle(self.shared.whole());
        let own = |asked: &GroupCall| {
            call(&self.own, &self.token, net, asked, CALL).map_err(SeekError::OwnProcess)
        };
        own(&settle)?;

        let publisher = |asked: &GroupCall| call(address, token, net, asked, CALL);
        let answers = publisher(&GroupCall::Hello(name.clone()))?;
        let devices = answers.by_process.iter().map(|answer| match answer {
            GroupAnswer::Here(devices) => Ok(*devices),
            GroupAnswer::Other(other) => Err(SeekError::OtherPublication {
                address: address.clone(),
                found: other.clone(),
                name: name.clone(),
            }),
        });
        let mut devices = devices.collect::<Result<Vec<usize>, SeekError>>()?;
        let publishers = devices.len();
        devices.extend(&self.devices);

        let nonce = Token::random()?.to_hex();
        let config = ServerConfig {
            processes: devices.len(),
            token: link_token(token, &nonce),
            peer_timeout: self.peer_timeout.min(LONGEST),
        };
        let server = net.bind((answers.local_ip, 0).into(), config)?;
        let invitation = Invitation {
            name: name.clone(),
            server: server.address().to_string(),
            nonce,
            publishers,
            devices,
            transport: transport.clone(),
        };
        let join = GroupCall::Join(invitation);
        publisher(&join)?;
        own(&join)?;

        let ended = self.wait_end(&server);
        // Those that have not joined yet fail at once.
        drop(server);
        self.shared.wait_unlinked();
        Ok(ended?)
    }

    /// Waits until a link is over. Stops waiting if the subscription ends before the link has
    /// begun.
    fn wait_end(&self, server: &Service) -> Result<LinkEnd, RendezvousError> {
        loop {
            match server.wait_end(WATCH) {
                Some(Ok(())) => break,
                Some(Err(why)) => return Err(why),
                None if self.shared.has_ended() && !server.is_complete() => break,
                None => {}
            }
        }
        let mut reports = server.reports().into_iter();
        let is_lost = reports.any(|(_, told)| told.failure.kind == FailureKind::PeerLost);
        Ok(if is_lost {
            LinkEnd::Lost
        } else {
            LinkEnd::Over
        })
    }
}
