//! Examines CUDA on this machine, and judges the results for jobs with devices of kind `cuda`.

use std::fs;

use mpmd_base::ProcessId;
use mpmd_base::bytes_text;
use mpmd_device::cuda::{self, CudaError, Driver, FirstUseError, FirstUses, GpuInfo, NoCuda};
use mpmd_launch::variables;
use mpmd_layout::topology::{DeviceKind, Topology};
use serde::Serialize;

use super::verdict::{DoctorFinding, Verdict, finding};

/// Name of the host's initial namespace of process ids, the same on every system. See `proc_ns.h`
/// of Linux.
const HOSTS_OWN: &str = "pid:[4026531836]";

/// The report's text about the place where each kind of work is computed: on the devices, or on the
/// host.
const COMPUTING: &str = "\
devices: kernels with CUDA sources, stages written with them, matrix products, sums of gradients,
  optimisers, moves; of programs built with the feature `candle-cuda` also candle's stages
host: other candle stages, candle functions, kernels from closures, sums of evaluations";

/// The facts about CUDA. Without a driver only the reason is known.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CudaFacts {
    Missing {
        why: String,
    },
    Found {
        driver: Driver,
        /// The version of NVRTC, or the reason why it cannot be used. `cublas` and `nccl` have the
        /// same form.
        nvrtc: Result<String, Box<NoCuda>>,
        cublas: Result<String, Box<NoCuda>>,
        nccl: Result<String, Box<NoCuda>>,
        /// True if process ids in this process differ from the host's, as in a container.
        own_pids: bool,
        /// Times of the first uses of the first GPU, or the reason why it cannot be opened. `None`
        /// if CUDA devices are not requested.
        first_uses: Option<Result<Box<FirstUses>, CudaError>>,
    },
}

impl CudaFacts {
    /// Starts the CUDA driver, if there is one, and gathers the facts about it and its libraries.
    /// If CUDA devices are `wanted`, also uses the first one.
    pub(super) fn look(wanted: bool) -> Self {
        match cuda::found() {
            Err(why) => Self::Missing {
                why: why.to_string(),
            },
            Ok(driver) => Self::Found {
                driver: driver.clone(),
                nvrtc: cuda::nvrtc().map_err(Box::new),
                cublas: cuda::cublas().map_err(Box::new),
                nccl: cuda::nccl().map_err(Box::new),
                own_pids: fs::read_link("/proc/self/ns/pid")
                    .is_ok_and(|name| name.as_os_str() != HOSTS_OWN),
                first_uses: wanted.then(|| cuda::first_uses(0).map(Box::new)),
            },
        }
    }
}

/// Returns a finding for each fact about CUDA. `wanted` is true if CUDA devices are requested,
/// `joined` if NCCL is requested for their collectives.
pub(super) fn judge(cuda: &CudaFacts, wanted: bool, joined: bool) -> Vec<DoctorFinding> {
    let stops = if wanted {
        Verdict::Problem
    } else {
        Verdict::Note
    };

    let (driver, nvrtc, cublas, nccl, own_pids, first_uses) = match cuda {
        CudaFacts::Missing { why } => {
            let advice = "devices of kind cpu work; for graphics processors the loader must find \
                          the library of NVIDIA's driver, libcuda.so.1, which containers get from \
                          the host (`--gpus all`)";
            return vec![finding("cuda", why, stops, advice)];
        }
        CudaFacts::Found {
            driver,
            nvrtc,
            cublas,
            nccl,
            own_pids,
            first_uses,
        } => (driver, nvrtc, cublas, nccl, *own_pids, first_uses),
    };

    let mut findings = vec![
        finding(
            "cuda",
            format!("a driver for CUDA {}", driver.version),
            Verdict::Ok,
            "",
        ),
        gpus(&driver.gpus, stops),
        library(
            "cuda kernels",
            "NVRTC",
            nvrtc,
            stops,
            "kernels that programs have as source are not compiled",
        ),
        library(
            "cuda products",
            "cuBLAS",
            cublas,
            stops,
            "products of matrices are not computed",
        ),
        collectives(nccl, joined, if joined { stops } else { Verdict::Ok }),
        sharing(&driver.gpus, own_pids),
        turns(driver.gpus.len()),
        finding("cuda computing", COMPUTING, Verdict::Ok, ""),
    ];

    match first_uses {
        None => {}
        Some(Ok(uses)) => findings.extend([first(uses, stops), pinning(&uses.pinning_ms)]),
        Some(Err(error)) => findings.push(finding(
            "cuda first use",
            error.to_string(),
            stops,
            "programs with devices of kind cuda do not start",
        )),
    }
    findings
}

/// Reports how long the first uses of a GPU took. `failed` is the verdict on a failure.
fn first(uses: &FirstUses, failed: Verdict) -> DoctorFinding {
    let FirstUses {
        open_ms,
        allocation_ms,
        compilation_ms,
        product_ms,
        ..
    } = uses;

    let steps = [
        ("first allocation", allocation_ms),
        ("a compilation", compilation_ms),
        ("cuBLAS and first products", product_ms),
    ];
    let took = steps.map(|(name, result)| match result {
        Ok(millis) => format!("{name} {millis:.1} ms"),
        Err(why) => format!("{name} failed: {why}"),
    });

    let value = format!(
        "opening the first device took {open_ms:.1} ms\n{}",
        took.join("\n")
    );

    match steps.iter().all(|(_, result)| result.is_ok()) {
        true => finding("cuda first use", value, Verdict::Ok, ""),
        false => finding("cuda first use", value, failed, "kernels that need it fail"),
    }
}

/// Judges whether host memory that processes share can be pinned.
fn pinning(took_ms: &Result<f64, FirstUseError>) -> DoctorFinding {
    let name = "cuda pinning";
    match took_ms {
        Ok(millis) => finding(
            name,
            format!("1 MiB was pinned in {millis:.2} ms"),
            Verdict::Ok,
            "",
        ),
        Err(why) => finding(
            name,
            format!("host memory cannot be pinned: {why}"),
            Verdict::Note,
            "copies between the host and devices go through staging buffers: one more copy by a \
             processor, at most some 5 GB/s instead of the bus's 25 to 50; raise the limit on \
             locked memory (`ulimit -l`; in containers `--ulimit memlock=-1`)",
        ),
    }
}

fn gpus(gpus: &[GpuInfo], stops: Verdict) -> DoctorFinding {
    let line = |gpu: &GpuInfo| {
        let GpuInfo {
            ordinal,
            name,
            uuid,
            memory_bytes,
            capability,
            attributes,
        } = gpu;

        let memory = bytes_text(*memory_bytes);
        let processors = attributes.processors;
        format!(
            "{ordinal}: {name}, {memory}, capability {capability}, {processors} multiprocessors, \
             {uuid}"
        )
    };

    let value = gpus.iter().map(line).collect::<Vec<_>>().join("\n");
    let numbers = |which: fn(&GpuInfo) -> bool| {
        let numbers = gpus
            .iter()
            .filter(|gpu| which(gpu))
            .map(|gpu| gpu.ordinal.to_string());
        numbers.collect::<Vec<_>>().join(", ")
    };

    let prohibited = numbers(|gpu| gpu.attributes.prohibited);
    if !prohibited.is_empty() {
        let advice = format!(
            "nobody may compute on {prohibited}: as root, `nvidia-smi -c DEFAULT`, or hide them by \
             CUDA_VISIBLE_DEVICES"
        );
        return finding("cuda devices", value, stops, advice);
    }

    let exclusive = numbers(|gpu| gpu.attributes.exclusive);
    if !exclusive.is_empty() {
        let advice = format!(
            "one process alone may use each of {exclusive}, so none may have two and none opens \
             another's memory: as \
             root, `nvidia-smi -c DEFAULT`"
        );
        return finding("cuda devices", value, Verdict::Note, advice);
    }

    finding("cuda devices", value, Verdict::Ok, "")
}

fn library(
    name: &'static str,
    library: &str,
    found: &Result<String, Box<NoCuda>>,
    missing: Verdict,
    without: &str,
) -> DoctorFinding {
    match found {
        Ok(version) => finding(name, format!("{library} {version}"), Verdict::Ok, ""),
        Err(error) => finding(
            name,
            error.to_string(),
            missing,
            format!("{without}; {library} comes with CUDA's toolkit or as a package"),
        ),
    }
}

/// Judges whether NCCL can be used for collectives of CUDA devices. `missing` is the verdict if it
/// cannot.
fn collectives(
    nccl: &Result<String, Box<NoCuda>>,
    joined: bool,
    missing: Verdict,
) -> DoctorFinding {
    let name = "cuda collectives";
    match (nccl, joined) {
        (Ok(version), true) => finding(
            name,
            format!("NCCL {version}, which is asked for"),
            Verdict::Ok,
            "",
        ),
        (Ok(version), false) => {
            let ask = variables::CUDA_COLLECTIVES;
            let advice = format!(
                "in kernels they go by the host's memory and the transports; {ask}=nccl has them \
                 go by NCCL, which adds in \
                 an order of its own"
            );
            finding(name, format!("NCCL {version}"), Verdict::Ok, advice)
        }
        (Err(error), _) => {
            let ways = match joined {
                true => "they are asked to go by NCCL, so programs with such devices do not start",
                false => "in kernels they go by the host's memory and the transports",
            };
            let advice = format!(
                "{ways}; NCCL comes with NVIDIA's HPC SDK or as a package: the loader must find \
                 libnccl.so.2 or libnccl.so"
            );
            finding(name, error.to_string(), missing, advice)
        }
    }
}

/// Judges whether one process of this host can use another process's arrays in GPU memory without a
/// copy.
fn sharing(gpus: &[GpuInfo], own_pids: bool) -> DoctorFinding {
    let name = "cuda sharing";
    let cannot = gpus
        .iter()
        .filter(|gpu| !gpu.attributes.ipc || gpu.attributes.integrated);
    let cannot: Vec<String> = cannot.map(|gpu| gpu.ordinal.to_string()).collect();

    if !cannot.is_empty() {
        let value = format!("not the memory of {}", cannot.join(", "));
        let advice = "the driver cannot show it to other processes (CUDA IPC), as on integrated \
            processors and under \
                      WSL: arrays between processes go through the host's memory";
        return finding(name, value, Verdict::Note, advice);
    }

    let value =
        "processes of this host can open each other's memory (CUDA IPC), as the driver says";
    let advice = if own_pids {
        "not those of other containers: this one has process numbers of its own (`--pid=host`, \
         `--ipc=host`)"
    } else {
        ""
    };
    finding(name, value, Verdict::Ok, advice)
}

/// Reports the GPUs that the processes of jobs of two sizes would get.
fn turns(gpus: usize) -> DoctorFinding {
    let of = |processes: usize| -> String {
        let job = Topology::even(processes, 1).of_kinds(&[DeviceKind::Cuda]);
        let ordinals = (0..processes as u32).flat_map(|process| {
            job.as_ref()
                .map(|job| job.ordinals(ProcessId(process), gpus as u32))
                .unwrap_or_default()
        });
        ordinals
            .map(|ordinal| ordinal.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    };

    // The smallest job in which two processes share a GPU.
    let more = gpus + 1;
    let value = match gpus {
        1 => format!("all processes of this host share {}", of(1)),
        _ => format!(
            "{gpus} processes of a device each get {}; {more} get {}",
            of(gpus),
            of(more)
        ),
    };
    finding("cuda turns", value, Verdict::Ok, "")
}

#[cfg(test)]
impl CudaFacts {
    /// Returns the facts of a machine with two GPUs and no faults.
    pub(super) fn well() -> Self {
        use mpmd_device::cuda::{Attributes, CudaVersion, Uuid};
        let attributes = Attributes {
            processors: 132,
            copy_engines: 3,
            unified_addressing: true,
            ipc: true,
            ..Attributes::default()
        };
        let gpu = |ordinal: u32| GpuInfo {
            ordinal,
            name: "NVIDIA H100".to_owned(),
            uuid: Uuid([ordinal as u8; 16]),
            memory_bytes: 80 << 30,
            capability: CudaVersion { major: 9, minor: 0 },
            attributes,
        };
        Self::Found {
            driver: Driver {
                version: CudaVersion {
                    major: 12,
                    minor: 8,
                },
                gpus: vec![gpu(0), gpu(1)],
            },
            nvrtc: Ok("12.8".into()),
            cublas: Ok("12.8.4".into()),
            nccl: Ok("2.26.2".into()),
            own_pids: false,
            first_uses: Some(Ok(Box::new(FirstUses {
                open_ms: 412.34,
                allocation_ms: Ok(1.5),
                compilation_ms: Ok(120.0),
                product_ms: Ok(800.0),
                pinning_ms: Ok(0.42),
            }))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(cuda: &CudaFacts, wanted: bool, name: &str, verdict: Verdict, texts: &[&str]) {
        check_for(cuda, wanted, false, name, verdict, texts);
    }

    fn check_for(
        cuda: &CudaFacts,
        wanted: bool,
        joined: bool,
        name: &str,
        verdict: Verdict,
        texts: &[&str],
    ) {
        let findings = judge(cuda, wanted, joined);
        let finding = findings
            .iter()
            .find(|finding| finding.name == name)
            .unwrap_or_else(|| panic!("{findings:?}"));
        let said = format!("{}; {}", finding.value, finding.advice);
        assert_eq!(finding.verdict, verdict, "{said}");
        assert!(
            finding.verdict == Verdict::Ok || !finding.advice.is_empty(),
            "{finding:?}"
        );
        for expected in texts {
            assert!(said.contains(expected), "{expected:?} is not in: {said}");
        }
    }

    /// Checks that a finding is a problem if CUDA devices are requested, else a note.
    fn stops(cuda: &CudaFacts, name: &str, texts: &[&str]) {
        check(cuda, true, name, Verdict::Problem, texts);
        check(cuda, false, name, Verdict::Note, texts);
    }

    fn with(change: impl FnOnce(&mut CudaFacts)) -> CudaFacts {
        let mut cuda = CudaFacts::well();
        change(&mut cuda);
        cuda
    }

    fn with_gpu(change: impl FnOnce(&mut GpuInfo)) -> CudaFacts {
        with(|cuda| match cuda {
            CudaFacts::Found { driver, .. } => change(&mut driver.gpus[1]),
            CudaFacts::Missing { .. } => unreachable!("it has a driver"),
        })
    }

    #[test]
    fn gpus_and_libraries_are_listed() {
        let well = CudaFacts::well();
        assert!(
            judge(&well, true, true)
                .iter()
                .all(|finding| finding.verdict == Verdict::Ok)
        );
        check(&well, true, "cuda", Verdict::Ok, &["CUDA 12.8"]);
        let lines = [
            "0: NVIDIA H100, 80.0 GiB, capability 9.0, 132 multi",
            "\n1: ",
            "GPU-01010101-0101",
        ];
        check(&well, true, "cuda devices", Verdict::Ok, &lines);
        check(
            &well,
            true,
            "cuda products",
            Verdict::Ok,
            &["cuBLAS 12.8.4"],
        );
        check(
            &well,
            true,
            "cuda turns",
            Verdict::Ok,
            &["2 processes of a device each get 0, 1; 3 get 0, 1, 0"],
        );
        let one = with(|cuda| {
            if let CudaFacts::Found { driver, .. } = cuda {
                driver.gpus.truncate(1)
            }
        });
        check(&one, true, "cuda turns", Verdict::Ok, &["share 0"]);
    }

    #[test]
    fn missing_driver_is_a_problem_if_cuda_is_requested() {
        let missing = CudaFacts::Missing {
            why: "no CUDA driver found: looked for it".into(),
        };
        stops(
            &missing,
            "cuda",
            &["looked for", "devices of kind cpu work", "libcuda.so.1"],
        );
        assert_eq!(judge(&missing, true, true).len(), 1);
    }

    #[test]
    fn missing_libraries_name_the_lost_feature() {
        let gone = || {
            Err(Box::new(NoCuda::NoSymbols {
                library: "no such library",
                symbols: Vec::new(),
            }))
        };
        let without = |which: usize| {
            with(|cuda| {
                if let CudaFacts::Found {
                    nvrtc,
                    cublas,
                    nccl,
                    ..
                } = cuda
                {
                    *[nvrtc, cublas, nccl][which] = gone();
                }
            })
        };
        stops(
            &without(0),
            "cuda kernels",
            &["no such library", "not compiled"],
        );
        stops(
            &without(1),
            "cuda products",
            &["no such library", "products"],
        );
        check(
            &without(2),
            true,
            "cuda collectives",
            Verdict::Ok,
            &["no such library", "go by the host's memory", "libnccl.so.2"],
        );
        let asked = |wanted, verdict| {
            check_for(
                &without(2),
                wanted,
                true,
                "cuda collectives",
                verdict,
                &["no such library", "do not start"],
            );
        };
        asked(true, Verdict::Problem);
        asked(false, Verdict::Note);
        let well = CudaFacts::well();
        check(
            &well,
            true,
            "cuda collectives",
            Verdict::Ok,
            &["NCCL 2.26.2", "MPMD_CUDA_COLLECTIVES=nccl"],
        );
        check_for(
            &well,
            true,
            true,
            "cuda collectives",
            Verdict::Ok,
            &["NCCL 2.26.2, which is asked for"],
        );
    }

    #[test]
    fn prohibited_and_exclusive_gpus_are_named() {
        stops(
            &with_gpu(|gpu| gpu.attributes.prohibited = true),
            "cuda devices",
            &["on 1:", "nvidia-smi -c DEFAULT"],
        );
        let exclusive = with_gpu(|gpu| gpu.attributes.exclusive = true);
        check(
            &exclusive,
            true,
            "cuda devices",
            Verdict::Note,
            &["each of 1,", "nvidia-smi -c DEFAULT"],
        );
    }

    #[test]
    fn first_uses_are_timed_and_failures_named() {
        let with_uses = |uses| {
            with(|cuda| {
                if let CudaFacts::Found { first_uses, .. } = cuda {
                    *first_uses = uses
                }
            })
        };
        let well = CudaFacts::well();
        let times = [
            "took 412.3 ms",
            "a compilation 120.0 ms",
            "products 800.0 ms",
        ];
        check(&well, true, "cuda first use", Verdict::Ok, &times);
        check(
            &well,
            true,
            "cuda pinning",
            Verdict::Ok,
            &["1 MiB", "0.42 ms"],
        );
        let CudaFacts::Found {
            first_uses: Some(Ok(uses)),
            ..
        } = well
        else {
            unreachable!()
        };
        let broken = |change: fn(&mut FirstUses) -> &mut Result<f64, FirstUseError>| {
            let mut uses = uses.clone();
            *change(&mut uses) = Err(CudaError::new("it broke", "", "").into());
            with_uses(Some(Ok(uses)))
        };
        let refused = broken(|uses| &mut uses.pinning_ms);
        check(
            &refused,
            true,
            "cuda pinning",
            Verdict::Note,
            &["it broke", "5 GB/s", "ulimit -l"],
        );
        let failed = broken(|uses| &mut uses.compilation_ms);
        stops(
            &failed,
            "cuda first use",
            &["a compilation failed: it broke", "kernels"],
        );
        let closed = with_uses(Some(Err(CudaError::new("it cannot be opened", "", ""))));
        stops(
            &closed,
            "cuda first use",
            &["it cannot be opened", "do not start"],
        );
        assert_eq!(
            judge(&with_uses(None), true, false).len(),
            judge(&closed, true, false).len() - 1
        );
    }

    #[test]
    fn gpus_without_ipc_are_named() {
        for change in [
            |gpu: &mut GpuInfo| gpu.attributes.ipc = false,
            |gpu: &mut GpuInfo| gpu.attributes.integrated = true,
        ] {
            check(
                &with_gpu(change),
                true,
                "cuda sharing",
                Verdict::Note,
                &["memory of 1;", "the host's memory"],
            );
        }
        let contained = with(|cuda| {
            if let CudaFacts::Found { own_pids, .. } = cuda {
                *own_pids = true
            }
        });
        check(
            &contained,
            true,
            "cuda sharing",
            Verdict::Ok,
            &["other containers", "--pid=host"],
        );
    }
}
