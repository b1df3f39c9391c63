//! `mpmd plan reshard`: the pieces of an array that move from device to device.

use std::collections::BTreeMap;

use mpmd_base::DeviceId;
use mpmd_base::bytes_text;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{Piece, Summary, plan};
use mpmd_layout::topology::LinkClass;
use serde::Serialize;

use super::case::CaseSharding;
use super::field::{Field, Malformed};
use super::holding::Holding;
use super::job::{CaseJob, Job};
use super::refusal::Refusal;
use super::{Answer, json_text, tables};

/// The case `{shape, dtype, src, dst, process_of?, host_of?}`, read and not yet checked.
#[derive(Debug)]
pub(super) struct Case {
    shape: Vec<usize>,
    dtype: String,
    src: CaseSharding,
    dst: CaseSharding,
    job: CaseJob,
}

/// A plan with everything that its tables need.
#[derive(Debug)]
struct ReshardAnswer {
    aval: ShapedArray,
    src: Holding,
    dst: Holding,
    job: Job,
    pieces: Vec<Piece>,
    summary: Summary,
}

/// The pieces that move over some links, as their number and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    pieces: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct Json<'a> {
    pieces: Vec<PieceJson<'a>>,
    bytes_by_link_class: BytesJson,
    max_bytes_sent_by_a_device: u64,
    steps: u32,
}

#[derive(Serialize)]
struct PieceJson<'a> {
    src: DeviceId,
    dst: DeviceId,
    region: &'a Region,
}

#[derive(Serialize)]
struct BytesJson {
    same_device: u64,
    same_process: u64,
    same_host: u64,
    network: u64,
}

impl Case {
    /// Fields of a case, and of its answer.
    pub(super) const FIELDS: [&str; 10] = [
        "shape",
        "dtype",
        "src",
        "dst",
        "process_of",
        "host_of",
        "pieces",
        "bytes_by_link_class",
        "max_bytes_sent_by_a_device",
        "steps",
    ];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            shape: field.get("shape")?.list(Field::count)?,
            dtype: field.get("dtype")?.text()?,
            src: CaseSharding::read(&field.get("src")?)?,
            dst: CaseSharding::read(&field.get("dst")?)?,
            job: CaseJob::read(field)?,
        })
    }

    /// Plans the resharding. Returns a refusal if the values of the case are invalid.
    pub(super) fn answer(self) -> Result<Box<dyn Answer>, Refusal> {
        let aval = ShapedArray::try_new(&self.shape, self.dtype.parse()?)?;
        let side = |name: &str, case: &CaseSharding| {
            let sharding = case.sharding().map_err(|refusal| refusal.of(name))?;
            let layout =
                sharding.layout(&self.shape).map_err(|error| Refusal::from(error).of(name))?;
            Ok::<_, Refusal>((sharding, layout))
        };
        let ((src, src_layout), (dst, dst_layout)) =
            (side("src", &self.src)?, side("dst", &self.dst)?);
        let job = self.job.job([("src", src_layout.devices()), ("dst", dst_layout.devices())])?;
        let plan = plan(&src_layout, &dst_layout, aval.dtype().size(), job.topology())?;
        let (pieces, summary) = (plan.pieces(), plan.summary());
        let src = Holding::of_layout(format!("from {src}"), "device", &src_layout);
        let dst = Holding::of_layout(format!("to   {dst}"), "device", &dst_layout);
        Ok(Box::new(ReshardAnswer { aval, src, dst, job, pieces, summary }))
    }
}

impl ReshardAnswer {
    /// Returns the traffic over each class of links, nearest first, also for classes without
    /// traffic.
    fn by_class(&self) -> Vec<(LinkClass, Traffic)> {
        let by_class = self.traffic(|piece| Some(self.class(piece)));
        LinkClass::ALL
            .map(|class| (class, by_class.get(&class).copied().unwrap_or_default()))
            .to_vec()
    }

    /// Returns the traffic by (source, destination) process. Processes are places: indices in
    /// `Job::processes`.
    fn by_processes(&self) -> BTreeMap<(usize, usize), Traffic> {
        self.traffic(|piece| Some((self.job.place(piece.src), self.job.place(piece.dst))))
    }

    /// Returns the class of the links between two processes, given as indices in `Job::processes`.
    fn class_of(&self, from: usize, to: usize) -> LinkClass {
        let host = |place: usize| self.job.processes()[place].1;
        if from == to {
            LinkClass::SameProcess
        } else if host(from) == host(to) {
            LinkClass::SameHost
        } else {
            LinkClass::Network
        }
    }

    /// Returns one line: the array, its bytes, and the numbers of pieces and steps.
    fn headline(&self) -> String {
        let Summary { pieces, steps, .. } = self.summary;
        let [pieces, steps] = [count(pieces, "piece"), count(steps as usize, "step")];
        format!("{}, {}: {pieces} in {steps}", self.aval, bytes_text(self.aval.bytes() as u64))
    }

    fn class(&self, piece: &Piece) -> LinkClass {
        self.job.topology().link_between(piece.src, piece.dst).unwrap_or(LinkClass::Network)
    }

    /// Sums the traffic by a key of the pieces. Pieces without a key are left out.
    fn traffic<K: Ord>(&self, key: impl Fn(&Piece) -> Option<K>) -> BTreeMap<K, Traffic> {
        let mut by_key: BTreeMap<K, Traffic> = BTreeMap::new();
        for piece in &self.pieces {
            let Some(key) = key(piece) else { continue };
            let traffic = by_key.entry(key).or_default();
            let bytes = piece.region.elements() * self.aval.dtype().size();
            (traffic.pieces, traffic.bytes) =
                (traffic.pieces + 1, traffic.bytes.saturating_add(bytes as u64));
        }
        by_key
    }

    /// Returns the lines of a table of processes, hosts and devices; none if there is only one
    /// process.
    fn owners(&self) -> Vec<String> {
        let processes = self.job.processes();
        if processes.len() < 2 {
            return Vec::new();
        }
        let mut rows = vec![["process", "host", "devices"].map(str::to_owned).to_vec()];
        rows.extend(processes.iter().enumerate().map(|(place, (process, host))| {
            vec![process.to_string(), host.to_string(), self.devices_text(place)]
        }));
        tables::long_table(rows, &[0, 1])
    }

    /// Returns the devices of the process at `place`, an index in `Job::processes`, as `0-3, 8`.
    fn devices_text(&self, place: usize) -> String {
        let devices: Vec<u32> = self.job.devices_at(place).iter().map(|device| device.0).collect();
        super::holding::numbers(&devices)
    }

    fn links(&self) -> Vec<String> {
        let mut rows = vec![["link", "pieces", "bytes"].map(str::to_owned).to_vec()];
        let row = |(class, traffic): &(LinkClass, Traffic)| traffic.row([class.to_string()]);
        rows.extend(self.by_class().iter().map(row));
        tables::table(&rows, &[1, 2])
    }

    fn processes(&self) -> Vec<String> {
        let mut rows = vec![["from", "to", "link", "pieces", "bytes"].map(str::to_owned).to_vec()];
        let number = |place: usize| format!("process {}", self.job.processes()[place].0);
        rows.extend(self.by_processes().into_iter().filter(|((from, to), _)| from != to).map(
            |((from, to), traffic)| {
                traffic.row([number(from), number(to), self.class_of(from, to).to_string()])
            },
        ));
        if rows.len() == 1 { Vec::new() } else { tables::long_table(rows, &[3, 4]) }
    }

    fn steps(&self) -> Vec<String> {
        let steps = self.traffic(|piece| Some(piece.step));
        if steps.len() < 2 {
            return Vec::new();
        }
        let mut rows = vec![["step", "pieces", "bytes"].map(str::to_owned).to_vec()];
        rows.extend(steps.into_iter().map(|(step, traffic)| traffic.row([step.to_string()])));
        tables::long_table(rows, &[0, 1, 2])
    }

    /// Returns the lines of a table of the bytes that each device sends to and receives from
    /// others, largest senders first. None if nothing moves between devices.
    fn load(&self) -> Vec<String> {
        let crosses = |piece: &&Piece| piece.src != piece.dst;
        let mut devices: Vec<DeviceId> =
            self.pieces.iter().filter(crosses).flat_map(|piece| [piece.src, piece.dst]).collect();
        devices.sort_unstable();
        devices.dedup();
        if devices.is_empty() {
            return Vec::new();
        }
        let sent = self.traffic(|piece| (piece.src != piece.dst).then_some(piece.src));
        let received = self.traffic(|piece| (piece.src != piece.dst).then_some(piece.dst));
        let bytes = |by: &BTreeMap<DeviceId, Traffic>, device: &DeviceId| {
            by.get(device).map_or(0, |traffic| traffic.bytes)
        };
        devices.sort_by_key(|device| (std::cmp::Reverse(bytes(&sent, device)), *device));
        let mut rows = vec![["device", "sends", "receives"].map(str::to_owned).to_vec()];
        rows.extend(devices.iter().map(|device| {
            let amounts = [&sent, &received].map(|by| bytes_text(bytes(by, device)));
            vec![device.to_string(), amounts[0].clone(), amounts[1].clone()]
        }));
        tables::long_table(rows, &[0, 1, 2])
    }
}

impl<'a> PieceJson<'a> {
    fn of(piece: &'a Piece) -> Self {
        Self { src: piece.src, dst: piece.dst, region: &piece.region }
    }
}

impl Traffic {
    fn row<const N: usize>(self, names: [String; N]) -> Vec<String> {
        let amounts = [self.pieces.to_string(), bytes_text(self.bytes)];
        names.into_iter().chain(amounts).collect()
    }
}

impl Answer for ReshardAnswer {
    fn json(&self) -> String {
        let bytes = |class| self.summary.bytes_over(class);
        json_text(&Json {
            pieces: self.pieces.iter().map(PieceJson::of).collect(),
            bytes_by_link_class: BytesJson {
                same_device: bytes(LinkClass::SameDevice),
                same_process: bytes(LinkClass::SameProcess),
                same_host: bytes(LinkClass::SameHost),
                network: bytes(LinkClass::Network),
            },
            max_bytes_sent_by_a_device: self.summary.max_bytes_sent_by_a_device,
            steps: self.summary.steps,
        })
    }

    fn pretty(&self) -> String {
        let parts = [
            vec![self.headline()],
            vec![tables::holding(&self.src)],
            vec![tables::holding(&self.dst)],
            self.owners(),
            self.links(),
            self.processes(),
            self.steps(),
            self.load(),
        ];
        let parts =
            parts.into_iter().filter(|lines| !lines.is_empty()).map(|lines| lines.join("\n"));
        parts.collect::<Vec<_>>().join("\n\n")
    }
}

fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
