//! The errors of the rendezvous.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::facts::{Difference, on_two, over_time};
use mpmd_base::VectorWidth;
use mpmd_proto::wire::ProcessId;

/// The reason why a rendezvous failed. The server sends some of these errors to its clients.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The server's address is in use, or is not an address of this host. The environment's fault.
    #[error("the rendezvous service cannot listen at {address}: {why}")]
    Bind {
        /// The address that the server should listen at.
        address: String,
        /// The system's error, as text.
        why: String,
    },
    /// The server does not accept connections at its address. The environment's fault.
    #[error(
        "the rendezvous service at {server} could not be reached within {peer_timeout:?}: {why}"
    )]
    Unreachable {
        /// The server's address, as `host:port`.
        server: String,
        /// The peer timeout.
        peer_timeout: Duration,
        /// The error of the last attempt, as text.
        why: String,
    },
    /// The server does not know this process's token, or closed the connection without an answer.
    /// Most likely the caller's fault.
    #[error("no rendezvous of this job answers at {server}: the job token is probably wrong")]
    Token {
        /// The server's address, as `host:port`.
        server: String,
    },
    /// The program that listens at the server's address is not a rendezvous server. The caller's
    /// fault.
    #[error("the program that listens at {server} is not a rendezvous service of mpmd")]
    Stranger {
        /// The address at which that program listens, as `host:port`.
        server: String,
    },
    /// The server comes from another build. The caller's fault.
    #[error(
        "the rendezvous service at {server} speaks version {theirs}, this process speaks {ours}; \
         run the same build on every process"
    )]
    Version {
        /// The server's address, as `host:port`.
        server: String,
        /// The server's protocol version.
        theirs: u16,
        /// The protocol version of this process.
        ours: u16,
    },
    /// Some processes of the job did not join in time. All processes that have joined get this
    /// error. A peer's fault.
    #[error("{} not joined after {peer_timeout:?}", have(missing, *processes))]
    Missing {
        /// The missing processes, ascending.
        missing: Vec<ProcessId>,
        /// Number of processes in the job.
        processes: usize,
        /// The time that the processes that have joined were waiting.
        peer_timeout: Duration,
    },
    /// A process has ended before all had joined, and its launcher starts no other in its place.
    /// All processes that have joined get this error. That process's fault.
    #[error("process {process} has ended before all processes had joined the job: {why}")]
    NeverJoins {
        /// The process that has ended.
        process: ProcessId,
        /// The way in which it ended, as text.
        why: String,
    },
    /// A process of a running job has ended, and its launcher starts no other in its place. All
    /// processes that begin the next epoch get this error. That process's fault.
    #[error("process {process} is lost, and its launcher starts no other in its place: {why}")]
    NotReplaced {
        /// The process that has ended.
        process: ProcessId,
        /// The way in which it ended, as text.
        why: String,
    },
    /// Another living process has joined with the same number and keeps it. The caller's fault.
    #[error("process {process} is already in the job: it runs on host {host} with pid {pid}")]
    Duplicate {
        /// The process number of both.
        process: ProcessId,
        /// The host of the process that joined first.
        host: String,
        /// The operating system's id of the process that joined first.
        pid: u32,
    },
    /// This process and the server disagree on the size of the job. The caller's fault.
    #[error(
        "process {process} was started for a job of {believes} processes, but this job has {job}"
    )]
    Count {
        /// The number of the process that asked to join.
        process: ProcessId,
        /// The number of processes that this process was started with.
        believes: usize,
        /// The number of processes that the server was started with.
        job: usize,
    },
    /// The process's number is not one of the job's. The caller's fault.
    #[error("there is no process {process} in a job of {processes}: they count from 0")]
    NoSuchProcess {
        /// The process number that is too large.
        process: ProcessId,
        /// Number of processes in the job.
        processes: usize,
    },
    /// All processes have joined the job, and no other process can. The caller's fault.
    #[error(
        "process {process} has joined and left this job of {processes} before: a process joins \
         once, so a program has a single `Program::run` (or `from_env`) for all its work; or it \
         was started again after its end: then the program must recover (`Builder::spares`)"
    )]
    Complete {
        /// The number of the process that asked to join.
        process: ProcessId,
        /// Number of processes in the job.
        processes: usize,
    },
    /// A process of another run of the job, with the same token, tries to return to this run. Its
    /// arrays and commits do not belong to this run. The environment's fault.
    #[error(
        "process {process} was in another run of this job, and cannot go on in this one: its \
         rendezvous service was started anew; end all processes and start the job again"
    )]
    OtherRun {
        /// The number of the process that asked to join.
        process: ProcessId,
    },
    /// Two processes run different programs. All processes get this error. The caller's fault.
    #[error(
        "process {process} on host {host} runs another program than process {other} on host \
         {other_host} \
         (fingerprints {program:?} and {other_program:?}); start the same build with the same \
         arguments everywhere"
    )]
    Program {
        /// The number of the process that joined later.
        process: ProcessId,
        /// The host of `process`.
        host: String,
        /// The program fingerprint of `process`.
        program: String,
        /// The number of a process that joined before.
        other: ProcessId,
        /// The host of `other`.
        other_host: String,
        /// The program fingerprint of `other`.
        other_program: String,
    },
    /// Two processes have different options or files. All processes get this error, unless the
    /// later one only waits for a place. The caller's fault.
    #[error(
        "process {process} on host {host} differs from process {other} on host {other_host}: {}. \
         Give all processes the same options and the same files; if files have changed since the \
         job was started, put the old ones back, or start the job again",
        on_two(facts, *process, *other)
    )]
    Differs {
        /// The number of the process that joined later.
        process: ProcessId,
        /// The host of `process`.
        host: String,
        /// The number of a process that joined before.
        other: ProcessId,
        /// The host of `other`.
        other_host: String,
        /// The facts that differ, with the values of `process` first.
        facts: Vec<Difference>,
    },
    /// A process that came after the job's start has narrower vectors than the job computes with.
    /// The others go on. The environment's fault.
    #[error(
        "process {process} on host {host} cannot compute as this job does: the job has used \
         {job} vectors since its start, and this process has {vectors} at most. Start the job \
         with MPMD_SIMD={vectors} on all processes, so that it can take such a process"
    )]
    Narrower {
        /// The number of the process that was refused.
        process: ProcessId,
        /// The host of `process`.
        host: String,
        /// The widest vectors of `process`.
        vectors: VectorWidth,
        /// The vectors of the job.
        job: VectorWidth,
    },
    /// The files of a process have changed while it waited for a place. The environment's fault.
    #[error(
        "this process waited for a place in the job, and takes none, since its files have changed \
         meanwhile: {}. Put the old ones back, or start the job again",
        over_time(facts)
    )]
    Changed {
        /// The facts that have changed, with the earlier values first.
        facts: Vec<Difference>,
    },
    /// No process takes the place of a lost one; a process that could have was refused. The
    /// environment's fault.
    #[error("{missing}. A process that came was refused: {refused}")]
    NoReplacement {
        /// The text of the error that names the missing processes.
        missing: String,
        /// The reason of the refusal, as text.
        refused: String,
    },
    /// A request that is only allowed after joining, or a second request to join. The caller's
    /// fault.
    #[error("{what} is possible only {when}")]
    OutOfTurn {
        /// The request, in words.
        what: String,
        /// The condition under which the request would be allowed, in words.
        when: String,
    },
    /// No process set the value of a key in time. A peer's fault.
    #[error("no process has set {key:?} after {peer_timeout:?}")]
    Unset {
        /// The key of the value.
        key: String,
        /// The time that the request has waited.
        peer_timeout: Duration,
    },
    /// Some processes did not reach the barrier in time. A peer's fault.
    #[error("barrier {name:?}: {} not arrived after {peer_timeout:?}", have(missing, *processes))]
    Barrier {
        /// The barrier's name.
        name: String,
        /// The missing processes, ascending.
        missing: Vec<ProcessId>,
        /// Number of processes in the job.
        processes: usize,
        /// The time that the processes at the barrier were waiting.
        peer_timeout: Duration,
    },
    /// The service has given this process up, and may have given its place to another process. The
    /// fault of this process or its machine.
    #[error("the rendezvous service at {server} has given this process up: {why}")]
    GivenUp {
        /// The address of the rendezvous service, as `host:port`.
        server: String,
        /// The reason why the service has given this process up.
        why: String,
    },
    /// All processes of the job are lost, so a spare has no state to continue from. The
    /// environment's fault.
    #[error("all {processes} processes of the job are lost")]
    AllLost {
        /// Number of processes in the job.
        processes: usize,
    },
    /// A process was lost before the value of a key was set. A peer's fault.
    #[error("the value of {key:?} will not come: process {process} is lost: {why}")]
    NeverSet {
        /// The key whose value was requested.
        key: String,
        /// The process that was lost.
        process: ProcessId,
        /// The reason why the process was lost.
        why: String,
    },
    /// A process that a barrier needs will never reach it. A peer's fault.
    #[error("barrier {name:?}: process {process} will not come: {why}")]
    BarrierBroken {
        /// The barrier's name.
        name: String,
        /// The process that will not reach the barrier.
        process: ProcessId,
        /// The reason why the process will not reach the barrier.
        why: String,
    },
    /// A key, a value, a name, or the [`JobMember`](super::JobMember) of a process is too long. The
    /// caller's fault.
    #[error("{what} has {bytes} bytes; at most {limit} are allowed")]
    TooLong {
        /// The kind of text or value that is too long.
        what: String,
        /// The actual length in bytes.
        bytes: usize,
        /// The largest allowed length in bytes.
        limit: usize,
    },
    /// The connection to the server has ended. The environment's fault, or the server's.
    #[error("the rendezvous service at {server} is gone: {why}")]
    ServerGone {
        /// The server's address, as `host:port`.
        server: String,
        /// The reason for the end of the connection, as text.
        why: String,
    },
    /// The service is gone. This process does not take it over, because the others may have ended
    /// the job without it. The environment's fault.
    #[error(
        "the rendezvous service of this job at {server} is gone, and this process does not go on \
         without the others, since {why}: they may have ended the job. See what they say and have \
         saved; if the job has not ended, start it again"
    )]
    Outlived {
        /// The service's address, as `host:port`.
        server: String,
        /// The reason why the others may have ended the job without this process.
        why: String,
    },
    /// This process has already left the job. The caller's fault.
    #[error("this process has left the job")]
    Left,
    /// The server's owner stopped the server before all processes had joined. The caller's fault.
    #[error("the rendezvous service was stopped")]
    Stopped,
    /// An operation of this process failed because of its environment.
    #[error("{doing} failed: {why}")]
    Environment {
        /// The failed operation.
        doing: String,
        /// The system's error.
        why: String,
    },
}

/// Formats missing processes as "processes 2 and 5 of 8 have". Shortens long lists.
fn have(missing: &[ProcessId], of: usize) -> String {
    const SHOWN: usize = 16;
    let mut names: Vec<String> = missing
        .iter()
        .take(SHOWN)
        .map(ToString::to_string)
        .collect();
    if missing.len() > SHOWN {
        names.push(format!("{} more", missing.len() - SHOWN));
    }

    match names.split_last() {
        None => format!("no process of {of} has"),
        Some((only, [])) => format!("process {only} of {of} has"),
        Some((last, others)) => format!("processes {} and {last} of {of} have", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(who: impl IntoIterator<Item = u32>, processes: usize) -> String {
        let missing = who.into_iter().map(ProcessId).collect();
        RendezvousError::Missing {
            missing,
            processes,
            peer_timeout: Duration::from_secs(60),
        }
        .to_string()
    }

    #[test]
    fn missing_processes_read_like_a_sentence() {
        assert_eq!(missing([2], 8), "process 2 of 8 has not joined after 60s");
        assert_eq!(
            missing([2, 5], 8),
            "processes 2 and 5 of 8 have not joined after 60s"
        );
        assert_eq!(
            missing([1, 2, 5], 8),
            "processes 1, 2 and 5 of 8 have not joined after 60s"
        );
        let many = missing(0..100, 128);
        assert!(many.contains("14, 15 and 84 more of 128 have"), "{many}");
    }
}
