//! Judges the facts. Does no I/O.

use std::collections::BTreeMap;

use mpmd_base::bytes_text;
use mpmd_core::transports;

use super::facts::{Facts, Sharing, Ucx, wants_cuda};
use super::verdict::{Finding, Verdict, finding};

/// Bytes of locked memory that a first registration with an RDMA device may need: queues, and
/// buffers of a few MiB.
const LOCKED_FOR_RDMA: u64 = 64 << 20;

/// If the limit on open files is lower, a process with many large arrays may run out of file
/// descriptors.
const FEWEST_FILES: u64 = 4096;

/// With fewer free bytes in `/dev/shm`, UCX's queues for a handful of processes may not fit. A
/// container's default is 64 MiB.
const SHM_LITTLE: u64 = 256 << 20;

/// With fewer free bytes in `/dev/shm`, UCX's queues of one process may not fit.
const SHM_NOTHING: u64 = 8 << 20;

/// Judges all facts. The findings are in the order of the report.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![transport(facts)];
    findings.extend(sharing(facts));
    findings.extend(ucx(facts));
    findings.extend(super::cuda::judge(&facts.cuda, facts.wants_cuda(), facts.wants_nccl));
    findings.push(locked_memory(facts));
    findings.push(shared_memory(facts));
    findings
}

impl Facts {
    /// Returns the verdict for a fault of UCX: a problem if the requested transport is `ucx`, else
    /// a note.
    fn problem_of_ucx(&self) -> Verdict {
        if self.transport == "ucx" { Verdict::Problem } else { Verdict::Note }
    }

    /// True if devices of kind `cuda` are requested.
    pub(super) fn wants_cuda(&self) -> bool {
        wants_cuda(self.device.as_deref())
    }
}

fn transport(facts: &Facts) -> Finding {
    let name = "transport";
    if let Err(error) = transports::check(&facts.transport) {
        return finding(name, &facts.transport, Verdict::Problem, error.to_string());
    }
    match &facts.loopback_error {
        None => {
            let advice = if facts.transport == transports::DEFAULT {
                "processes of one host share memory where they can; all others talk over tcp"
            } else {
                ""
            };
            finding(name, format!("{} is asked for", facts.transport), Verdict::Ok, advice)
        }
        Some(why) => {
            let advice = "processes meet over TCP whatever their transport: this host must reach \
                itself at \
                          127.0.0.1; look at its loopback interface and firewall";
            finding(
                name,
                format!("no TCP connection to this host itself: {why}"),
                Verdict::Problem,
                advice,
            )
        }
    }
}

/// Judges the requirements of the transport `shm`, and the settings that make it faster.
fn sharing(facts: &Facts) -> Vec<Finding> {
    let Sharing { error, huge_pages, open_files } = &facts.sharing;
    let name = "sharing memory";
    if let Some(why) = error {
        let verdict = if facts.transport == "shm" { Verdict::Problem } else { Verdict::Note };
        let advice = "processes of this host talk over tcp and copy what they send: a sandbox or \
            a filter of system \
                      calls may be the reason, or a kernel before 5.3";
        return vec![finding(name, format!("not possible here: {why}"), verdict, advice)];
    }
    let value = "processes of this host can use each other's arrays where they are, tried";
    let mut findings = vec![finding(name, value, Verdict::Ok, "")];
    if let Some(chosen) = huge_pages {
        let has_them = matches!(chosen.as_str(), "always" | "within_size" | "advise" | "force");
        let (verdict, advice) = if has_them {
            (Verdict::Ok, "")
        } else {
            let advice = "the first use of a large array from another process (zero-copy transfer) \
                takes a while for each \
                          MiB; as root: `echo advise > \
                          /sys/kernel/mm/transparent_hugepage/shmem_enabled`";
            (Verdict::Note, advice)
        };
        findings.push(finding(
            "huge pages",
            format!("{chosen}, for memory that is shared"),
            verdict,
            advice,
        ));
    }
    let name = "open files";
    findings.push(match open_files {
        None => finding(name, "without limit", Verdict::Ok, ""),
        Some(limit) if *limit >= FEWEST_FILES => finding(
            name,
            format!(
                "at most \
            {limit}"
            ),
            Verdict::Ok,
            "",
        ),
        Some(limit) => {
            let advice = "each large array takes one here and in every process that has it: raise \
                the hard limit \
                          (`ulimit -Hn`, LimitNOFILE for services, `--ulimit nofile` for \
                          containers)";
            finding(name, format!("at most {limit}"), Verdict::Note, advice)
        }
    });
    findings
}

fn ucx(facts: &Facts) -> Vec<Finding> {
    let (version, library, resources, lanes) = match &facts.ucx {
        Ucx::NotCompiledIn => {
            let advice = "build this and your programs with `--features ucx`, which takes \
                autoconf, automake, \
                          libtool and libclang";
            return vec![finding(
                "ucx",
                "not compiled into this program",
                facts.problem_of_ucx(),
                advice,
            )];
        }
        Ucx::Unusable(why) => {
            let advice = "a library of UCX 1.12 or later must be found by the loader: \
                LD_LIBRARY_PATH, or \
                          ldconfig; `UCX_LOG_LEVEL=info` says more";
            return vec![finding("ucx", why, facts.problem_of_ucx(), advice)];
        }
        Ucx::Usable { version, library, resources, lanes } => (version, library, resources, lanes),
    };
    vec![
        finding("ucx", format!("{version} from {library}"), Verdict::Ok, ""),
        ucx_devices(facts, resources),
        ucx_lanes(facts, lanes),
    ]
}

fn ucx_devices(facts: &Facts, resources: &[(String, String)]) -> Finding {
    let mut by_transport: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (transport, device) in resources {
        by_transport.entry(transport).or_default().push(device);
    }
    let lines = by_transport
        .iter()
        .map(|(transport, devices)| format!("{transport}: {}", devices.join(", ")));
    let value = lines.collect::<Vec<_>>().join("\n");
    if resources.is_empty() {
        let advice =
            "UCX_TLS and UCX_NET_DEVICES may exclude all there is; unset them and look again";
        return finding("ucx devices", "none", facts.problem_of_ucx(), advice);
    }
    finding("ucx devices", value, Verdict::Ok, "")
}

fn ucx_lanes(facts: &Facts, lanes: &[String]) -> Finding {
    let name = "ucx on this host";
    if lanes.is_empty() {
        let advice =
            "two processes of this host find no way to each other; unset UCX_TLS and look again";
        return finding(name, "no lanes", facts.problem_of_ucx(), advice);
    }
    let value = lanes.join("\n");
    if lanes.iter().all(|lane| lane.contains("tcp")) {
        let advice = "neighbours talk over TCP although they could share memory: see shared \
            memory below, and \
                      whether UCX_TLS leaves out `sm`";
        return finding(name, value, Verdict::Note, advice);
    }
    finding(name, value, Verdict::Ok, "")
}

fn locked_memory(facts: &Facts) -> Finding {
    let name = "locked memory";
    let rdma = if facts.rdma.is_empty() {
        "no RDMA devices".to_owned()
    } else {
        format!("RDMA devices: {}", facts.rdma.join(", "))
    };
    let Some(limit) = facts.lockable_bytes else {
        return finding(name, format!("without limit; {rdma}"), Verdict::Ok, "");
    };
    let value = format!("at most {}; {rdma}", bytes_text(limit));
    if facts.may_lock {
        return finding(name, value, Verdict::Ok, "this user is not bound by the limit");
    }
    let how = "`ulimit -l unlimited`, LimitMEMLOCK=infinity for services, `--ulimit memlock=-1` \
        for containers";
    match (facts.rdma.is_empty(), limit < LOCKED_FOR_RDMA) {
        (true, _) => {
            let advice = format!(
                "enough without RDMA, which locks every buffer that it sends from; else {how}"
            );
            finding(name, value, Verdict::Ok, advice)
        }
        (false, true) => {
            let advice =
                format!("RDMA locks every buffer that it sends from, and will fail: {how}");
            finding(name, value, facts.problem_of_ucx(), advice)
        }
        (false, false) => {
            let advice =
                format!("RDMA locks every buffer that it sends from, so this bounds them: {how}");
            finding(name, value, Verdict::Note, advice)
        }
    }
}

fn shared_memory(facts: &Facts) -> Finding {
    let name = "shared memory";
    let larger = "make /dev/shm larger: `--shm-size` for containers, an emptyDir of medium Memory \
        in Kubernetes";
    let Some(shared) = facts.shared_memory else {
        let advice =
            format!("UCX goes without its fastest way between processes of one host; {larger}");
        return finding(name, "there is no /dev/shm", Verdict::Note, advice);
    };
    let value =
        format!("/dev/shm has {}, {} free", bytes_text(shared.bytes), bytes_text(shared.free));
    if shared.free < SHM_NOTHING {
        return finding(
            name,
            value,
            facts.problem_of_ucx(),
            format!("UCX's queues do not fit; {larger}"),
        );
    }
    if shared.free < SHM_LITTLE {
        let advice = format!("little for many processes: a full one ends them by SIGBUS; {larger}");
        return finding(name, value, Verdict::Note, advice);
    }
    finding(name, value, Verdict::Ok, "")
}

#[cfg(test)]
mod tests {
    use super::super::cuda::Cuda;
    use super::super::facts::SharedMemory;
    use super::*;

    /// Returns the facts of a machine without faults.
    fn well() -> Facts {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        Facts {
            transport: "ucx".into(),
            device: Some("cpu,cuda".into()),
            wants_nccl: false,
            cuda: Cuda::well(),
            ucx: Ucx::Usable {
                version: "1.12.1".into(),
                library: "/lib/libucp.so.0".into(),
                resources: vec![pair("tcp", "eth0"), pair("posix", "memory"), pair("tcp", "lo")],
                lanes: vec!["lane[0]: posix/memory am".into(), "lane[1]: tcp/eth0 wireup".into()],
            },
            loopback_error: None,
            sharing: Sharing {
                error: None,
                huge_pages: Some("advise".into()),
                open_files: Some(1 << 20),
            },
            lockable_bytes: None,
            may_lock: false,
            rdma: vec!["mlx5_0".into()],
            shared_memory: Some(SharedMemory { bytes: 1 << 34, free: 1 << 33 }),
        }
    }

    /// Returns the verdict and all text of the only finding with this name.
    fn said(facts: &Facts, name: &str) -> (Verdict, String) {
        let findings = judge(facts);
        let mut found = findings.iter().filter(|finding| finding.name == name);
        let finding = found.next().unwrap_or_else(|| panic!("{name}: {findings:?}"));
        assert!(found.next().is_none(), "{name}: {findings:?}");
        assert!(finding.verdict == Verdict::Ok || !finding.advice.is_empty(), "{finding:?}");
        (finding.verdict, format!("{}; {}", finding.value, finding.advice))
    }

    fn check(facts: &Facts, name: &str, verdict: Verdict, texts: &[&str]) {
        let (found, text) = said(facts, name);
        assert_eq!(found, verdict, "{text}");
        for expected in texts {
            assert!(text.contains(expected), "{expected:?} is not in: {text}");
        }
    }

    /// Checks that a fault of UCX is a problem if `ucx` is requested, else a note.
    fn stops_ucx(mut facts: Facts, name: &str, texts: &[&str]) {
        check(&facts, name, Verdict::Problem, texts);
        facts.transport = "tcp".into();
        check(&facts, name, Verdict::Note, texts);
    }

    #[test]
    fn machine_without_faults_has_no_notes() {
        let findings = judge(&well());
        assert!(findings.iter().all(|finding| finding.verdict == Verdict::Ok), "{findings:?}");
        check(&well(), "ucx", Verdict::Ok, &["1.12.1 from /lib/libucp.so.0"]);
        check(&well(), "ucx devices", Verdict::Ok, &["posix: memory\ntcp: eth0, lo"]);
        check(&well(), "ucx on this host", Verdict::Ok, &["lane[0]: posix"]);
    }

    #[test]
    fn unknown_transport_or_no_loopback_is_a_problem() {
        let pigeon = Facts { transport: "pigeon".into(), ..well() };
        check(&pigeon, "transport", Verdict::Problem, &["pigeon", "auto, shm, tcp, ucx"]);
        for transport in transports::NAMES {
            let facts = Facts { transport: transport.into(), ..well() };
            check(&facts, "transport", Verdict::Ok, &[transport]);
            let cut = Facts { loopback_error: Some("refused".into()), ..facts };
            check(&cut, "transport", Verdict::Problem, &["refused", "127.0.0.1"]);
        }
    }

    #[test]
    fn unshareable_memory_is_a_problem_only_for_shm() {
        let with = |transport: &str, error: Option<&str>, huge: Option<&str>, open_files| Facts {
            transport: transport.into(),
            sharing: Sharing {
                error: error.map(Into::into),
                huge_pages: huge.map(Into::into),
                open_files,
            },
            ..well()
        };
        let name = "sharing memory";
        for (transport, verdict) in
            [("shm", Verdict::Problem), ("auto", Verdict::Note), ("tcp", Verdict::Note)]
        {
            let facts = with(transport, Some("memfd_create failed"), Some("never"), Some(16));
            check(&facts, name, verdict, &["memfd_create failed", "over tcp", "filter"]);
            let findings = judge(&facts);
            assert!(findings.iter().all(|finding| finding.name != "huge pages"), "{findings:?}");
        }
        check(&well(), name, Verdict::Ok, &["where they are"]);
        check(&well(), "huge pages", Verdict::Ok, &["advise"]);
        let small = with("auto", None, Some("never"), Some(1024));
        check(&small, "huge pages", Verdict::Note, &["never", "shmem_enabled"]);
        check(&small, "open files", Verdict::Note, &["at most 1024", "ulimit -Hn"]);
        check(&small, "transport", Verdict::Ok, &["auto", "share memory where they can"]);
        let findings = judge(&with("auto", None, None, None));
        assert!(findings.iter().all(|finding| finding.name != "huge pages"), "{findings:?}");
        check(&with("auto", None, None, None), "open files", Verdict::Ok, &["without limit"]);
    }

    #[test]
    fn ucx_fault_is_a_problem_only_for_ucx() {
        stops_ucx(
            Facts { ucx: Ucx::NotCompiledIn, ..well() },
            "ucx",
            &["not compiled", "--features ucx"],
        );
        let unusable = Ucx::Unusable("no libucp.so.0".into());
        stops_ucx(Facts { ucx: unusable, ..well() }, "ucx", &["no libucp.so.0", "LD_LIBRARY_PATH"]);
        let with = |resources: &[(&str, &str)], lanes: &[&str]| {
            let resources =
                resources.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
            let lanes = lanes.iter().map(|lane| (*lane).to_owned()).collect();
            Facts {
                ucx: Ucx::Usable { version: "1".into(), library: "l".into(), resources, lanes },
                ..well()
            }
        };
        stops_ucx(with(&[], &["posix"]), "ucx devices", &["none", "UCX_TLS"]);
        stops_ucx(with(&[("tcp", "lo")], &[]), "ucx on this host", &["no lanes"]);
        let slow = with(&[("tcp", "lo")], &["lane[0]: tcp/lo"]);
        check(&slow, "ucx on this host", Verdict::Note, &["tcp/lo", "share memory"]);
    }

    #[test]
    fn locked_memory_counts_with_rdma() {
        let with = |limit, rdma: &[&str], may_lock| Facts {
            lockable_bytes: limit,
            rdma: rdma.iter().map(|name| (*name).to_owned()).collect(),
            may_lock,
            ..well()
        };
        let name = "locked memory";
        stops_ucx(
            with(Some(8 << 20), &["mlx5_0"], false),
            name,
            &["8.0 MiB", "mlx5_0", "ulimit -l"],
        );
        check(
            &with(Some(1 << 30), &["mlx5_0"], false),
            name,
            Verdict::Note,
            &["1.0 GiB", "bounds them"],
        );
        check(&with(Some(8 << 20), &["mlx5_0"], true), name, Verdict::Ok, &["not bound"]);
        check(
            &with(Some(8 << 20), &[], false),
            name,
            Verdict::Ok,
            &["no RDMA devices", "enough without"],
        );
        check(&with(None, &[], false), name, Verdict::Ok, &["without limit"]);
    }

    #[test]
    fn cuda_is_wanted_by_the_kinds_of_devices() {
        let with = |device: Option<&str>| Facts { device: device.map(str::to_owned), ..well() };
        for (device, wanted) in
            [(None, false), (Some("cpu"), false), (Some("cpu,cuda"), true), (Some("gpu"), false)]
        {
            assert_eq!(with(device).wants_cuda(), wanted, "{device:?}");
        }
    }

    #[test]
    fn small_shared_memory_is_reported() {
        let with =
            |free| Facts { shared_memory: Some(SharedMemory { bytes: 1 << 26, free }), ..well() };
        let name = "shared memory";
        check(&with(1 << 26), name, Verdict::Note, &["64.0 MiB", "--shm-size"]);
        stops_ucx(with(4096), name, &["4.0 KiB free", "--shm-size"]);
        let none = Facts { shared_memory: None, ..well() };
        check(&none, name, Verdict::Note, &["no /dev/shm"]);
    }
}
