//! Requests of clients and the events of their replies, in tokens.

use std::sync::Arc;

use mpmd::{Error, FailureKind};
use mpmd_models::Sampling;
use serde::{Deserialize, Serialize};

/// A text to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRequest {
    /// The tokens of the text; at least one.
    pub prompt: Vec<u32>,
    /// Largest number of new tokens; at least one.
    pub max_tokens: usize,
    /// The choice of each token.
    pub sampling: Sampling,
    /// The tokens after which the text has ended.
    pub ends: Vec<u32>,
    /// Number of the most probable tokens whose probabilities are wanted beside that of each chosen
    /// token. `None` if no probabilities are wanted.
    pub logprobs: Option<usize>,
}

/// A step of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplyEvent {
    /// A further token. It comes before [`ReplyEvent::End`], also if it ends the text.
    Token(ReplyToken),
    /// The text has ended. Nothing follows.
    End(Finish),
    /// The request failed for this reason. Nothing follows.
    Failed(Arc<str>),
}

/// Why a text has ended.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Finish {
    /// A token of [`TextRequest::ends`].
    Stop,
    /// There are [`TextRequest::max_tokens`], or as many as the model has positions.
    Length,
    /// A pause of the server has ended it: see [`PauseMode::Abort`](crate::PauseMode::Abort).
    Abort,
}

/// A token of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplyToken {
    /// Its number in the vocabulary.
    pub id: u32,
    /// The probabilities, if they are wanted.
    pub logprobs: Option<Logprobs>,
}

/// Natural logarithms of the probabilities at a token, by the model's own logits: before penalties,
/// temperature and the cuts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Logprobs {
    /// The logarithm of the chosen token's probability.
    pub chosen: f32,
    /// (token, logarithm of its probability) of the most probable tokens, the most probable first.
    pub top: Vec<(u32, f32)>,
}

/// The reason of a failure that clients need not know.
const LOG: &str = "the server's log has the reason";

/// Returns the reason of a failure for clients, without lines and operations of the program: these
/// are for its log.
pub(crate) fn reason(why: &Error) -> String {
    let Some(failure) = why.failure() else {
        return LOG.to_owned();
    };
    let process = failure.process;
    match failure.kind {
        FailureKind::PeerLost => format!("process {process} is lost"),
        FailureKind::Memory => format!("process {process} has no memory left"),
        _ => LOG.to_owned(),
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
            (FailureKind::Kernel, LOG),
        ] {
            let failure = Failure::new(kind, ProcessId(1), 3, message);
            assert_eq!(reason(&Error::Failed(Arc::new(failure))), expected);
        }
        assert_eq!(reason(&Error::kernel(message)), LOG);
    }
}
