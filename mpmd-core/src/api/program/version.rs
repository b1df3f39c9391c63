//! The fingerprint of this process's program. The rendezvous compares it before the first
//! operation.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::job_size::JobSize;
use super::transports::listed;
use crate::exec::Rolling;
use mpmd_layout::topology::{CudaCollectives, DeviceKind, Topology};

/// Path of the running executable, valid even if its file was replaced.
const RUNNING: &str = "/proc/self/exe";

/// Number of bytes at the start of an executable that are searched for the build id. Linkers put
/// the build id near the beginning.
const NEAR: usize = 64 << 10;

/// The type and name fields of a GNU build id note. In the file, the lengths of the name and of the
/// id come before them.
const KIND_AND_NAME: [u8; 8] = [3, 0, 0, 0, b'G', b'N', b'U', 0];

/// The additional checks that a job makes at run time.
#[derive(Clone, Copy)]
pub(super) struct JobChecks {
    /// True if host values of any size are compared whole.
    pub(super) uncommitted: bool,
    /// True if the replicas of kernels' outputs are compared.
    pub(super) replicas: bool,
    /// Interval of the kernel calls that are recomputed; 0 for none.
    pub(super) replay: u64,
}

/// Returns a text of the properties that must be equal on all processes of a job: the version of
/// mpmd, the executable, the devices, and the checks.
///
/// Command-line arguments are not included, since some may concern only one process.
/// `Builder::facts` adds those that must be equal.
pub(super) fn fingerprint(topology: &Topology, checks: JobChecks, sizes: &[JobSize]) -> String {
    let program = std::env::current_exe().ok();
    let name = program.as_ref().and_then(|program| program.file_name());
    let name = name.map_or_else(
        || "a program".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    let name = name.trim_end_matches(" (deleted)");

    let build = build(Path::new(RUNNING)).unwrap_or_else(|error| format!("unknown: {error}"));
    // The default of a build needs no text: other builds have another build id.
    let compared = match (checks.uncommitted, cfg!(debug_assertions)) {
        (true, false) => ", host values of any size compared",
        (false, true) => ", small host values compared",
        _ => "",
    };
    let replicas = if checks.replicas {
        ", replicas compared"
    } else {
        ""
    };
    let replay = match checks.replay {
        0 => String::new(),
        every => format!(", one kernel call in {every} recomputed"),
    };
    let sizes = match sizes.is_empty() {
        true => String::new(),
        false => format!(", goes on with {}", list_sizes(sizes)),
    };

    format!(
        "{name}, build {build}, mpmd {}, {}{compared}{replicas}{replay}{sizes}",
        env!("CARGO_PKG_VERSION"),
        devices(topology)
    )
}

/// Lists the sizes of a job as text, consecutive sizes together. After the first few it adds a hash
/// of all, since the text has a length limit.
fn list_sizes(sizes: &[JobSize]) -> String {
    const MOST_LISTED: usize = 6;
    // `None` with one device for each process.
    let devices = |size: &JobSize| (size.processes != size.devices).then_some(size.devices);
    let is_next = |one: &JobSize, next: &JobSize| {
        next.processes == one.processes + 1 && devices(one) == devices(next)
    };
    let text = |run: &[JobSize]| {
        let first = run[0].processes;
        let last = run[run.len() - 1].processes;
        match devices(&run[0]) {
            None => format!("{first} to {last} processes of one device each"),
            Some(devices) => format!("{first} to {last} processes and {devices} devices"),
        }
    };
    let runs: Vec<&[JobSize]> = sizes.chunk_by(is_next).collect();
    let mut texts: Vec<String> = runs.iter().take(MOST_LISTED).map(|run| text(run)).collect();

    if runs.len() > MOST_LISTED {
        let mix = |hash: Rolling, size: &JobSize| {
            hash.mix_bytes(&size.processes.to_le_bytes())
                .mix_bytes(&size.devices.to_le_bytes())
        };
        let hash = sizes.iter().fold(Rolling::default(), mix);
        texts.push(format!(
            "{} others ({:032x})",
            runs.len() - MOST_LISTED,
            hash.value()
        ));
    }
    texts.join(", ")
}

/// Returns the properties that must be equal on all processes of a side job, such as a link of a
/// publisher. Its processes may run different executables.
pub(super) fn fingerprint_beside(topology: &Topology) -> String {
    format!("mpmd {}, {}", env!("CARGO_PKG_VERSION"), devices(topology))
}

/// Describes the devices: their number, their kinds, and the path of CUDA collectives. Lists the
/// number of each process if these differ.
fn devices(topology: &Topology) -> String {
    let mut devices = kinds(topology);
    let counts = topology.counts();
    if counts.windows(2).any(|pair| pair[0] != pair[1]) {
        devices += &format!(", by process {counts:?}");
    }
    match topology.cuda_collectives() {
        CudaCollectives::Host => devices,
        CudaCollectives::Nccl => format!("{devices}, collectives by nccl"),
    }
}

fn kinds(topology: &Topology) -> String {
    let of = |kind| {
        let devices = topology
            .devices()
            .iter()
            .filter(|device| device.kind == kind);
        devices
            .map(|device| device.id.0 as usize)
            .collect::<Vec<_>>()
    };

    let [cpu, cuda] = [of(DeviceKind::Cpu), of(DeviceKind::Cuda)];
    match (cpu.len(), cuda.len()) {
        (cpus, 0) => format!("{cpus} devices"),
        (0, cudas) => format!("{cudas} devices of kind cuda"),
        (..) => {
            let all = topology.devices().len();
            format!(
                "{all} devices, of kind cpu {}, of kind cuda {}",
                listed(&cpu),
                listed(&cuda)
            )
        }
    }
}

/// Returns the build id of an executable, or a hash of the whole file if it has none.
fn build(program: &Path) -> io::Result<String> {
    let mut file = File::open(program)?;
    let mut start = Vec::with_capacity(NEAR);
    Read::by_ref(&mut file)
        .take(NEAR as u64)
        .read_to_end(&mut start)?;
    if let Some(number) = number(&start) {
        return Ok(number.iter().map(|byte| format!("{byte:02x}")).collect());
    }

    let mut hash = Rolling::default().mix_bytes(&start);
    let mut part = vec![0; 1 << 20];
    loop {
        match file.read(&mut part)? {
            0 => return Ok(format!("{:032x}", hash.value())),
            read => hash = hash.mix_bytes(&part[..read]),
        }
    }
}

/// Finds the build id in the first bytes of an executable. Returns `None` if there is none.
fn number(start: &[u8]) -> Option<&[u8]> {
    let at = start
        .windows(KIND_AND_NAME.len())
        .position(|bytes| bytes == KIND_AND_NAME)?;
    let word =
        |at: usize| Some(u32::from_le_bytes(start.get(at..at + 4)?.try_into().ok()?) as usize);
    let name = word(at.checked_sub(8)?)?;
    let length = word(at.checked_sub(4)?)?;

    let begin = at + KIND_AND_NAME.len();
    (name == 4 && (8..=64).contains(&length))
        .then(|| start.get(begin..begin + length))
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_depends_on_build_and_topology() {
        let topology = Topology::even(2, 3);
        let [one, other] = [[2, 1], [1, 2]].map(|counts| Topology::with_devices(&counts));
        let checks = JobChecks {
            uncommitted: cfg!(debug_assertions),
            replicas: false,
            replay: 0,
        };
        let fingerprint = |topology| fingerprint(topology, checks, &[]);
        assert_ne!(fingerprint(&one), fingerprint(&other), "other owners");
        let ours = fingerprint(&topology);
        assert!(
            ours.starts_with("mpmd_core") && ours.ends_with(", 6 devices"),
            "{ours}"
        );
        assert_eq!(ours, fingerprint(&topology));
        assert_ne!(ours, fingerprint(&Topology::even(2, 2)));
        let folder = std::env::temp_dir();
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.join(format!("mpmd-build-{}-{name}", std::process::id()));
            std::fs::write(&path, bytes).unwrap();
            let found = build(&path);
            std::fs::remove_file(&path).unwrap();
            found.unwrap()
        };
        let mut large = vec![7; 3 << 20];
        let one = file("one", &large);
        *large.last_mut().unwrap() = 8;
        assert_ne!(one, file("other", &large), "all of it counts");
        assert!(build(&folder.join("mpmd-no-such-program")).is_err());
    }

    #[test]
    fn sizes_are_listed_briefly_and_none_is_left_out() {
        let list = |sizes: &[(u32, u32)]| {
            let sizes = sizes
                .iter()
                .map(|&(processes, devices)| JobSize { processes, devices });
            list_sizes(&sizes.collect::<Vec<_>>())
        };
        let each: Vec<_> = (1..=3)
            .map(|size| (size, 4))
            .chain((4..=4000).map(|n| (n, n)))
            .collect();
        let said = list(&each);
        assert_eq!(
            said,
            "1 to 3 processes and 4 devices, 4 to 4000 processes of one device each"
        );
        let odd = |last: u32| -> Vec<_> { (1..last).step_by(2).map(|size| (size, 9000)).collect() };
        let [one, other] = [odd(8000), odd(8002)].map(|sizes| list(&sizes));
        assert!(one.len() < 512 && other.len() < 512, "{one}");
        assert_ne!(one, other);
        assert_ne!(
            list(&[(3, 4), (4, 4), (5, 5)]),
            list(&[(3, 3), (4, 4), (5, 5)])
        );
    }

    #[test]
    fn fingerprint_depends_on_the_checks() {
        let of = |uncommitted, replicas, replay| {
            fingerprint(
                &Topology::even(2, 3),
                JobChecks {
                    uncommitted,
                    replicas,
                    replay,
                },
                &[],
            )
        };
        let [small, all] = [false, true].map(|check| of(check, false, 0));
        assert_ne!(of(true, true, 0), all);
        assert_ne!(of(true, false, 10), all);
        assert_ne!(of(true, false, 10), of(true, false, 11));
        assert_ne!(small, all);
        assert!(
            [small, all]
                .iter()
                .any(|program| program.contains("host values"))
        );
    }

    #[test]
    fn fingerprint_depends_on_device_kinds() {
        use DeviceKind::{Cpu, Cuda};
        let of = |kinds: &[DeviceKind]| devices(&Topology::even(3, 2).of_kinds(kinds).unwrap());
        assert_eq!(of(&[Cpu]), "6 devices");
        assert_eq!(of(&[Cuda]), "6 devices of kind cuda");
        assert_eq!(
            of(&[Cpu, Cuda, Cpu]),
            "6 devices, of kind cpu 0, 1, 4 and 5, of kind cuda 2 and 3"
        );
        assert_ne!(of(&[Cpu, Cuda, Cpu]), of(&[Cuda, Cpu, Cpu]));
        let joined = Topology::even(1, 2)
            .of_kinds(&[Cuda])
            .unwrap()
            .with_cuda_collectives(CudaCollectives::Nccl);
        assert_eq!(
            devices(&joined),
            "2 devices of kind cuda, collectives by nccl"
        );
    }

    #[test]
    fn build_id_is_found_or_none() {
        let note = [
            &[9, 9, 4, 0, 0, 0, 8, 0, 0, 0][..],
            &KIND_AND_NAME,
            &[1, 2, 3, 4, 5, 6, 7, 8, 9],
        ]
        .concat();
        assert_eq!(number(&note), Some(&[1, 2, 3, 4, 5, 6, 7, 8][..]));
        assert_eq!(number(&note[..20]), None, "cut off");
        assert_eq!(number(&KIND_AND_NAME), None);
        assert_eq!(number(b"no note"), None);
    }
}
