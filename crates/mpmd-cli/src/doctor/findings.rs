//! Judges the facts. Does no I/O.

use mpmd_base::bytes_text;
use mpmd_core::transports;

use super::facts::{DoctorFacts, SharingFacts, UcxFacts, wants_cuda};
use super::verdict::{DoctorFinding, Verdict, finding};

/// Limit on open files below which a process with many large arrays may run out of file
/// descriptors.
const FEWEST_FILES: u64 = 4096;

/// Judges all facts. The findings are in the order of the report.
pub(super) fn judge(facts: &DoctorFacts) -> Vec<DoctorFinding> {
    let mut findings = vec![transport(facts)];
    findings.extend(sharing(facts));
    findings.extend(facts.address_space.map(address_space_finding));
    findings.push(ucx(facts));
    findings.extend(super::cuda::judge(
        &facts.cuda,
        facts.wants_cuda(),
        facts.wants_nccl,
    ));
    findings
}

impl DoctorFacts {
    /// Returns the verdict for a fault of UCX: a problem if the requested transport is `ucx`, else
    /// a note.
    fn problem_of_ucx(&self) -> Verdict {
        if self.transport == "ucx" {
            Verdict::Problem
        } else {
            Verdict::Note
        }
    }

    /// True if devices of kind `cuda` are requested.
    pub(super) fn wants_cuda(&self) -> bool {
        wants_cuda(self.device.as_deref())
    }
}

fn transport(facts: &DoctorFacts) -> DoctorFinding {
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
            finding(
                name,
                format!("{} is asked for", facts.transport),
                Verdict::Ok,
                advice,
            )
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
fn sharing(facts: &DoctorFacts) -> Vec<DoctorFinding> {
    let SharingFacts {
        error,
        huge_pages,
        open_files,
    } = &facts.sharing;
    let name = "sharing memory";

    if let Some(why) = error {
        let verdict = if facts.transport == "shm" {
            Verdict::Problem
        } else {
            Verdict::Note
        };
        let advice = "processes of this host talk over tcp and copy what they send: a sandbox or \
            a filter of system \
                      calls may be the reason, or a kernel before 5.3";
        return vec![finding(
            name,
            format!("not possible here: {why}"),
            verdict,
            advice,
        )];
    }

    let value = "processes of this host can use each other's arrays where they are, tried";
    let mut findings = vec![finding(name, value, Verdict::Ok, "")];
    findings.extend(huge_pages.as_deref().map(huge_pages_finding));
    findings.push(open_files_finding(*open_files));
    findings
}

/// Judges the system's setting of huge pages in shared memory.
fn huge_pages_finding(chosen: &str) -> DoctorFinding {
    let has_them = matches!(chosen, "always" | "within_size" | "advise" | "force");
    let (verdict, advice) = if has_them {
        (Verdict::Ok, "")
    } else {
        let advice = "the first use of a large array from another process (zero-copy transfer) \
                      takes a while for each MiB; as root: `echo advise > \
                      /sys/kernel/mm/transparent_hugepage/shmem_enabled`";
        (Verdict::Note, advice)
    };
    finding(
        "huge pages",
        format!("{chosen}, for memory that is shared"),
        verdict,
        advice,
    )
}

/// Judges the hard limit on open files of a process.
fn open_files_finding(limit: Option<u64>) -> DoctorFinding {
    let name = "open files";
    match limit {
        None => finding(name, "without limit", Verdict::Ok, ""),
        Some(limit) if limit >= FEWEST_FILES => {
            finding(name, format!("at most {limit}"), Verdict::Ok, "")
        }
        Some(limit) => {
            let advice = "each large array takes one here and in every process that has it: raise \
                          the hard limit (`ulimit -Hn`, LimitNOFILE for services, \
                          `--ulimit nofile` for containers)";
            finding(name, format!("at most {limit}"), Verdict::Note, advice)
        }
    }
}

/// Judges a limit on the address space of a process.
fn address_space_finding(limit: u64) -> DoctorFinding {
    let advice = "a process that needs more ends with `memory allocation of … bytes failed`, and \
                  shared memory counts in every process that has it: `ulimit -v unlimited`, and \
                  limit the memory of devices instead (`Builder::device_memory`)";
    let value = format!("at most {} (ulimit -v)", bytes_text(limit));
    finding("address space", value, Verdict::Note, advice)
}

fn ucx(facts: &DoctorFacts) -> DoctorFinding {
    let (value, advice) = match &facts.ucx {
        UcxFacts::Usable { version, library } => {
            return finding("ucx", format!("{version} from {library}"), Verdict::Ok, "");
        }
        UcxFacts::NotCompiledIn => (
            "not compiled into this program",
            "build this and your programs with `--features ucx`, which takes autoconf, automake, \
             libtool and libclang",
        ),
        UcxFacts::Unusable(why) => (
            why.as_str(),
            "a library of UCX 1.12 or later must be found by the loader: LD_LIBRARY_PATH, or \
             ldconfig; `UCX_LOG_LEVEL=info` says more",
        ),
    };
    finding("ucx", value, facts.problem_of_ucx(), advice)
}

#[cfg(test)]
mod tests {
    use super::super::cuda::CudaFacts;
    use super::*;

    /// Returns the facts of a machine without faults.
    fn well() -> DoctorFacts {
        DoctorFacts {
            transport: "ucx".into(),
            device: Some("cpu,cuda".into()),
            wants_nccl: false,
            cuda: CudaFacts::well(),
            ucx: UcxFacts::Usable {
                version: "1.12.1".into(),
                library: "/lib/libucp.so.0".into(),
            },
            loopback_error: None,
            sharing: SharingFacts {
                error: None,
                huge_pages: Some("advise".into()),
                open_files: Some(1 << 20),
            },
            address_space: None,
        }
    }

    /// Returns the verdict and all text of the only finding with this name.
    fn said(facts: &DoctorFacts, name: &str) -> (Verdict, String) {
        let findings = judge(facts);
        let mut found = findings.iter().filter(|finding| finding.name == name);
        let finding = found
            .next()
            .unwrap_or_else(|| panic!("{name}: {findings:?}"));
        assert!(found.next().is_none(), "{name}: {findings:?}");
        assert!(
            finding.verdict == Verdict::Ok || !finding.advice.is_empty(),
            "{finding:?}"
        );
        (
            finding.verdict,
            format!("{}; {}", finding.value, finding.advice),
        )
    }

    fn check(facts: &DoctorFacts, name: &str, verdict: Verdict, texts: &[&str]) {
        let (found, text) = said(facts, name);
        assert_eq!(found, verdict, "{text}");
        for expected in texts {
            assert!(text.contains(expected), "{expected:?} is not in: {text}");
        }
    }

    /// Checks that a fault of UCX is a problem if `ucx` is requested, else a note.
    fn stops_ucx(mut facts: DoctorFacts, name: &str, texts: &[&str]) {
        check(&facts, name, Verdict::Problem, texts);
        facts.transport = "tcp".into();
        check(&facts, name, Verdict::Note, texts);
    }

    #[test]
    fn machine_without_faults_has_no_notes() {
        let findings = judge(&well());
        assert!(
            findings
                .iter()
                .all(|finding| finding.verdict == Verdict::Ok),
            "{findings:?}"
        );
        check(
            &well(),
            "ucx",
            Verdict::Ok,
            &["1.12.1 from /lib/libucp.so.0"],
        );
    }

    #[test]
    fn unknown_transport_or_no_loopback_is_a_problem() {
        let pigeon = DoctorFacts {
            transport: "pigeon".into(),
            ..well()
        };
        check(
            &pigeon,
            "transport",
            Verdict::Problem,
            &["pigeon", "auto, shm, tcp, ucx"],
        );
        for transport in transports::NAMES {
            let facts = DoctorFacts {
                transport: transport.into(),
                ..well()
            };
            check(&facts, "transport", Verdict::Ok, &[transport]);
            let cut = DoctorFacts {
                loopback_error: Some("refused".into()),
                ..facts
            };
            check(
                &cut,
                "transport",
                Verdict::Problem,
                &["refused", "127.0.0.1"],
            );
        }
    }

    #[test]
    fn limit_on_the_address_space_is_a_note() {
        let facts = DoctorFacts {
            address_space: Some(4 << 30),
            ..well()
        };
        let texts = ["at most 4.0 GiB (ulimit -v)", "memory allocation"];
        check(&facts, "address space", Verdict::Note, &texts);
    }

    #[test]
    fn unshareable_memory_is_a_problem_only_for_shm() {
        let with =
            |transport: &str, error: Option<&str>, huge: Option<&str>, open_files| DoctorFacts {
                transport: transport.into(),
                sharing: SharingFacts {
                    error: error.map(Into::into),
                    huge_pages: huge.map(Into::into),
                    open_files,
                },
                ..well()
            };
        let name = "sharing memory";
        for (transport, verdict) in [
            ("shm", Verdict::Problem),
            ("auto", Verdict::Note),
            ("tcp", Verdict::Note),
        ] {
            let facts = with(
                transport,
                Some("memfd_create failed"),
                Some("never"),
                Some(16),
            );
            check(
                &facts,
                name,
                verdict,
                &["memfd_create failed", "over tcp", "filter"],
            );
            let findings = judge(&facts);
            assert!(
                findings.iter().all(|finding| finding.name != "huge pages"),
                "{findings:?}"
            );
        }
        check(&well(), name, Verdict::Ok, &["where they are"]);
        check(&well(), "huge pages", Verdict::Ok, &["advise"]);
        let small = with("auto", None, Some("never"), Some(1024));
        check(
            &small,
            "huge pages",
            Verdict::Note,
            &["never", "shmem_enabled"],
        );
        check(
            &small,
            "open files",
            Verdict::Note,
            &["at most 1024", "ulimit -Hn"],
        );
        check(
            &small,
            "transport",
            Verdict::Ok,
            &["auto", "share memory where they can"],
        );
        let findings = judge(&with("auto", None, None, None));
        assert!(
            findings.iter().all(|finding| finding.name != "huge pages"),
            "{findings:?}"
        );
        check(
            &with("auto", None, None, None),
            "open files",
            Verdict::Ok,
            &["without limit"],
        );
    }

    #[test]
    fn ucx_fault_is_a_problem_only_for_ucx() {
        stops_ucx(
            DoctorFacts {
                ucx: UcxFacts::NotCompiledIn,
                ..well()
            },
            "ucx",
            &["not compiled", "--features ucx"],
        );
        let unusable = UcxFacts::Unusable("no libucp.so.0".into());
        stops_ucx(
            DoctorFacts {
                ucx: unusable,
                ..well()
            },
            "ucx",
            &["no libucp.so.0", "LD_LIBRARY_PATH"],
        );
    }

    #[test]
    fn cuda_is_wanted_by_the_kinds_of_devices() {
        let with = |device: Option<&str>| DoctorFacts {
            device: device.map(str::to_owned),
            ..well()
        };
        for (device, wanted) in [
            (None, false),
            (Some("cpu"), false),
            (Some("cpu,cuda"), true),
            (Some("gpu"), false),
        ] {
            assert_eq!(with(device).wants_cuda(), wanted, "{device:?}");
        }
    }
}
