//! `mpmd plan intermediate`: finds the sharding through which a source can reach a smaller target.

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::reshard::{
    Intermediate, NoIntermediate, WhyNoIntermediate, cheapest_intermediate,
    find_intermediate_sharding,
};
use mpmd_layout::sharding::Sharding;
use serde_json::json;

use super::case::{CaseSharding, NamedJson};
use super::field::{Field, Malformed};
use super::job::CaseJob;
use super::refusal::CaseRefusal;

/// The case `{src, dst}` of two shardings, read and not yet checked. The case is about one array if
/// it also has the fields of `mpmd plan reshard`.
#[derive(Debug)]
pub(super) struct IntermediateCase {
    src: CaseSharding,
    dst: CaseSharding,
    /// Shape and dtype of the array, if the case is about one array.
    array: Option<(Vec<usize>, String)>,
    job: CaseJob,
}

impl IntermediateCase {
    /// Names of the fields of a case and of its answer.
    pub(super) const FIELDS: [&str; 9] = [
        "src",
        "dst",
        "shape",
        "dtype",
        "process_of",
        "host_of",
        "intermediate",
        "replica_axes",
        "reason",
    ];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let sharding = |name| CaseSharding::read(&field.get(name)?);
        let src = sharding("src")?;
        let dst = sharding("dst")?;

        let of_array = ["shape", "dtype", "process_of", "host_of"];
        let found: Vec<_> = of_array
            .iter()
            .map(|name| field.find(name))
            .collect::<Result<_, _>>()?;
        let array = if found.iter().any(Option::is_some) {
            Some((
                field.get("shape")?.list(Field::count)?,
                field.get("dtype")?.text()?,
            ))
        } else {
            None
        };

        Ok(Self {
            src,
            dst,
            array,
            job: CaseJob::read(field)?,
        })
    }

    pub(super) fn answer(self) -> Result<String, CaseRefusal> {
        let src = checked(&self.src).map_err(|refusal| refusal.of("src"))?;
        let dst = checked(&self.dst).map_err(|refusal| refusal.of("dst"))?;

        let found = match &self.array {
            None => find_intermediate_sharding(&src, &dst),
            Some((shape, dtype)) => {
                let aval = ShapedArray::try_new(shape, dtype.parse()?)?;
                for (name, sharding) in [("src", &src), ("dst", &dst)] {
                    sharding
                        .layout(shape)
                        .map_err(|error| CaseRefusal::from(error).of(name))?;
                }
                let job = self
                    .job
                    .job([("src", src.devices()), ("dst", dst.devices())])?;
                cheapest_intermediate(&src, &dst, &aval, &job)
            }
        };

        let answer = match &found {
            Ok(Intermediate {
                sharding,
                replica_axes,
                ..
            }) => {
                json!({ "intermediate": NamedJson::of(sharding), "replica_axes": replica_axes })
            }
            Err(NoIntermediate {
                why: why @ WhyNoIntermediate::NotNeeded,
                ..
            }) => {
                json!({ "error": why.reason() })
            }
            Err(none) => json!({ "error": "none", "reason": none.why.reason() }),
        };
        Ok(answer.to_string())
    }
}

/// Returns the sharding of a case, or a refusal if its spec does not fit its mesh. Without a shape,
/// no later step checks that.
fn checked(case: &CaseSharding) -> Result<Sharding, CaseRefusal> {
    let sharding = case.sharding()?;
    if let Some(spec) = sharding.spec() {
        // Dimensions of length 0 are divisible by any number.
        sharding.layout(&vec![0; spec.entries().len()])?;
    }
    Ok(sharding)
}
