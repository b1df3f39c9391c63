//! Handles of the job's processes on this host. With them the system reports the end of a process
//! reliably.

use std::os::fd::OwnedFd;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_rendezvous::JobMember;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The longest wait for the end of a process. A dying process closes its connections shortly before
/// it ends.
const ENDING: Duration = Duration::from_millis(100);

/// A system handle (pidfd) of each process on this host, indexed by process. `None` for processes
/// on other hosts.
pub(super) struct Neighbours(Vec<Option<OwnedFd>>);

impl Neighbours {
    /// Opens handles of the processes on the host of process `me`. Leaves out processes that this
    /// one cannot see, such as those of another namespace.
    pub(super) fn find(me: ProcessId, members: &[JobMember]) -> Self {
        let host = members.get(me.index()).map(|member| &member.host);
        let handle = |member: &JobMember| {
            let pid = Pid::from_raw(member.pid.try_into().ok()?)?;
            (Some(&member.host) == host).then(|| pidfd_open(pid, PidfdFlags::empty()).ok())?
        };
        Self(members.iter().map(handle).collect())
    }

    /// Returns true if the process is known to have ended. Blocks for at most 100 ms: a process
    /// that dies closes its connections a little before it ends.
    pub(super) fn has_ended(&self, process: ProcessId) -> bool {
        let Some(Some(handle)) = self.0.get(process.index()) else {
            return false;
        };

        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: ENDING.subsec_nanos().into(),
        };
        poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&wait)).is_ok_and(|ended| ended > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn handle_reports_the_end_of_a_process() {
        let start = || {
            Command::new("cat")
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let mut children: Vec<Child> = (0..2).map(|_| start()).collect();
        let member = |pid, host: &str| JobMember {
            host: host.to_owned(),
            pid,
            ..JobMember::default()
        };
        let [ends, stays] = [children[0].id(), children[1].id()];
        let members = [
            member(1, "a"),
            member(ends, "a"),
            member(stays, "a"),
            member(ends, "b"),
        ];
        let neighbours = Neighbours::find(ProcessId(0), &members);
        children[0].kill().unwrap();
        // A handle becomes ready before the process is waited for.
        assert!((0..50).any(|_| neighbours.has_ended(ProcessId(1))));
        assert!(!neighbours.has_ended(ProcessId(2)), "it runs");
        assert!(
            !neighbours.has_ended(ProcessId(3)),
            "it is said to be on another host"
        );
        assert!(!neighbours.has_ended(ProcessId(4)), "there is none");
        for mut child in children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}
