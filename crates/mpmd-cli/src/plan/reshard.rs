//! `mpmd plan reshard`: the pieces of an array that move from device to device.

use mpmd_base::DeviceId;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{ReshardPiece, plan};
use mpmd_layout::topology::LinkClass;
use serde::Serialize;

use super::case::CaseSharding;
use super::field::{Field, Malformed};
use super::job::CaseJob;
use super::json_text;
use super::refusal::CaseRefusal;

/// The case `{shape, dtype, src, dst, process_of?, host_of?}`, read and not yet checked.
#[derive(Debug)]
pub(super) struct ReshardCase {
    shape: Vec<usize>,
    dtype: String,
    src: CaseSharding,
    dst: CaseSharding,
    job: CaseJob,
}

#[derive(Serialize)]
struct ReshardJson<'a> {
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

impl ReshardCase {
    /// Names of the fields of a case and of its answer.
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
    pub(super) fn answer(self) -> Result<String, CaseRefusal> {
        let aval = ShapedArray::try_new(&self.shape, self.dtype.parse()?)?;
        let side = |name: &str, case: &CaseSharding| {
            let sharding = case.sharding().map_err(|refusal| refusal.of(name))?;
            sharding
                .layout(&self.shape)
                .map_err(|error| CaseRefusal::from(error).of(name))
        };
        let src = side("src", &self.src)?;
        let dst = side("dst", &self.dst)?;

        let job = self
            .job
            .job([("src", src.devices()), ("dst", dst.devices())])?;

        let plan = plan(&src, &dst, aval.dtype().size(), &job)?;
        let pieces = plan.pieces();
        let summary = plan.summary();
        let bytes = |class| summary.bytes_over(class);
        Ok(json_text(&ReshardJson {
            pieces: pieces.iter().map(PieceJson::of).collect(),
            bytes_by_link_class: BytesJson {
                same_device: bytes(LinkClass::SameDevice),
                same_process: bytes(LinkClass::SameProcess),
                same_host: bytes(LinkClass::SameHost),
                network: bytes(LinkClass::Network),
            },
            max_bytes_sent_by_a_device: summary.max_bytes_sent_by_a_device,
            steps: summary.steps,
        }))
    }
}

impl<'a> PieceJson<'a> {
    fn of(piece: &'a ReshardPiece) -> Self {
        Self {
            src: piece.src,
            dst: piece.dst,
            region: &piece.region,
        }
    }
}
