//! Requests of clients and the events of their replies, in tokens.

use std::sync::Arc;

use mpmd::{Error, FailureKind};
use mpmd_models::Sampling;
use serde::{Deserialize, Serialize};

/// A request to continue a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRequest {
    /// The tokens of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Largest number of new tokens; at least one.
    pub max_tokens: usize,
    /// The settings for choosing each token.
    pub sampling: Sampling,
    /// The tokens that end the reply.
    pub ends: Vec<u32>,
    /// Number of most probable tokens whose probabilities are returned with each chosen token's.
    /// `None` if no probabilities are returned.
    pub logprobs: Option<usize>,
}

/// An event of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// A new token. The token that ends the reply is sent, too, before [`ReplyEvent::End`].
    Token(ReplyToken),
    /// The reply has ended. No event follows.
    End(Finish),
    /// The request has failed, for this reason. No event follows.
    Failed(Arc<str>),
}

/// The reason why a reply has ended.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Finish {
    /// A token of [`TextRequest::ends`] was generated.
    Stop,
    /// The reply has [`TextRequest::max_tokens`] tokens, or the sequence has as many tokens as the
    /// model has positions.
    Length,
    /// A pause of the server has ended the reply: see
    /// [`PauseMode::Abort`](crate::PauseMode::Abort).
    Abort,
}

/// A token of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplyToken {
    /// The number of the token in the vocabulary.
    pub id: u32,
    /// The logarithms of probabilities, if the request has [`TextRequest::logprobs`].
    pub logprobs: Option<Logprobs>,
}

/// Natural logarithms of tokens' probabilities at one position. They come from the model's logits
/// without penalties, temperature, `top_k`, `top_p` and `min_p`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Logprobs {
    /// The logarithm of the probability of the chosen token.
    pub chosen: f32,
    /// The most probable tokens and the logarithms of their probabilities, the most probable first.
    pub top: Vec<(u32, f32)>,
}

/// The reason that clients get for a failure whose details are not for them.
pub(crate) const REASON_IN_LOG: &str = "the server's log has the reason";

/// Returns the reason of a failure for clients. Leaves out source lines and operations of the
/// program, which are only written to the log.
pub(crate) fn reason(why: &Error) -> String {
    let Some(failure) = why.failure() else {
        return REASON_IN_LOG.to_owned();
    };
    let process = failure.process;
    match failure.kind {
        FailureKind::PeerLost => format!("process {process} is lost"),
        FailureKind::Memory => format!("process {process} has no memory left"),
        _ => REASON_IN_LOG.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use mpmd::{Failure, ProcessId};

    use super::*;

    #[test]
    fn reasons_for_clients_tell_no_lines_of_the_program() {
        let message = "put (operation 3, src/load.rs:70): no memory";
        for (kind, expected) in [
            (FailureKind::PeerLost, "process 1 is lost"),
            (FailureKind::Memory, "process 1 has no memory left"),
            (FailureKind::Kernel, REASON_IN_LOG),
        ] {
            let failure = Failure::new(kind, ProcessId(1), 3, message);
            assert_eq!(reason(&Error::Failed(Arc::new(failure))), expected);
        }
        assert_eq!(reason(&Error::kernel(message)), REASON_IN_LOG);
    }
}
