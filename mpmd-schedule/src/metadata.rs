//! Schedule metadata that torch's text format cannot express, in a file beside the text.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::costs::Costs;
use super::schedule::Schedule;
use super::text::Text;

/// The format version that this code writes and reads.
const VERSION: u32 = 1;

/// Schedule metadata, stored in `NAME.toml` beside the schedule text `NAME.csv`. Torch can still
/// load the text.
///
/// ```toml
/// format = 1
/// name = "ZBVZeroBubble"
/// ranks = 2
/// microbatches = 4
/// chunks = 2
/// placement = "V"
/// rank_of_stage = [0, 1, 1, 0]
/// flavour = "compute_only"
/// hash = "5c1c9a0f39d1e5b7"
/// channel = "tags"
/// [costs]
/// # as of `Costs`
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleMetadata {
    /// The format version of the file: always `VERSION`.
    format: u32,
    /// The schedule's name.
    pub name: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of microbatches.
    pub microbatches: usize,
    /// Number of stages on each rank; `None` if it differs between ranks.
    pub chunks: Option<usize>,
    /// The name of the [`Placement`](super::Placement): `loop`, `V` or `custom`.
    pub placement: String,
    /// The rank of each stage.
    pub rank_of_stage: Vec<usize>,
    /// The dialect of the text: `compute_only` or `compute_comms`.
    pub flavour: String,
    /// The hash of the text: [`Text::hash`].
    #[serde(serialize_with = "as_digits", deserialize_with = "of_digits")]
    pub hash: u64,
    /// The channel over which the schedule was proved free of deadlock, as `check::Channel`
    /// displays it: `tags`, for instance. `None` if it was not proved.
    pub channel: Option<String>,
    /// The costs of the passes, if the order was optimised for them.
    pub costs: Option<Costs>,
}

/// An error in schedule metadata, or a mismatch with its text.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleMetadataError {
    /// The file does not follow the format.
    #[error("the schedule metadata file is malformed: {0}")]
    Form(String),
    /// The file has another format version.
    #[error("the schedule metadata file has format version {found}; this version reads {VERSION}")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The metadata belong to another text.
    #[error("the schedule metadata file belongs to another text: {}", .differences.join("; "))]
    Differs {
        /// One message for each difference: the name of the value, its value in the metadata, and
        /// its value in the text.
        differences: Vec<String>,
    },
}

#[derive(Deserialize)]
struct Version {
    format: u32,
}

impl ScheduleMetadata {
    /// Creates the metadata of a schedule and its text, without a channel and without costs.
    pub fn new(schedule: &Schedule, text: &Text) -> Self {
        let mut chunks = vec![0_usize; schedule.ranks()];
        schedule.ranks_of_stages().iter().for_each(|rank| chunks[*rank] += 1);
        Self {
            format: VERSION,
            name: schedule.name().to_owned(),
            ranks: schedule.ranks(),
            microbatches: schedule.microbatches(),
            chunks: chunks.iter().all(|count| *count == chunks[0]).then(|| chunks[0]),
            placement: schedule.placement().name().to_owned(),
            rank_of_stage: schedule.ranks_of_stages().to_vec(),
            flavour: text.flavour.name().to_owned(),
            hash: text.hash(),
            channel: None,
            costs: None,
        }
    }

    /// Parses metadata from TOML.
    ///
    /// # Errors
    ///
    /// - [`ScheduleMetadataError::Version`] if the format version differs.
    /// - [`ScheduleMetadataError::Form`] if the text is not TOML, or a value is missing, unknown or
    ///   of another type.
    pub fn parse(text: &str) -> Result<Self, ScheduleMetadataError> {
        let form = |error: toml::de::Error| {
            ScheduleMetadataError::Form(error.to_string().trim_end().to_owned())
        };
        // Read the version first: another version may have any other values.
        let Version { format: found } = toml::from_str(text).map_err(form)?;
        if found != VERSION {
            return Err(ScheduleMetadataError::Version { found });
        }
        toml::from_str(text).map_err(form)
    }

    /// Formats the metadata as TOML.
    ///
    /// # Panics
    ///
    /// As for [`Costs::to_toml`].
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("texts, numbers and lists of them")
    }

    /// Checks that the metadata belong to `text` and to `schedule`, which was made from it. The
    /// name, the channel and the costs are not in a text and are not compared.
    ///
    /// # Errors
    ///
    /// [`ScheduleMetadataError::Differs`] with all differences. It includes costs for another
    /// number of stages.
    pub fn check(&self, schedule: &Schedule, text: &Text) -> Result<(), ScheduleMetadataError> {
        let of = Self::new(schedule, text);
        let mut differences = Vec::new();
        let mut compare = |field: &str, here: String, there: String| {
            if here != there {
                differences
                    .push(format!("{field} is {here} in the metadata and {there} in the text"));
            }
        };
        compare("ranks", self.ranks.to_string(), of.ranks.to_string());
        compare("microbatches", self.microbatches.to_string(), of.microbatches.to_string());
        let chunks =
            |chunks: Option<usize>| chunks.map_or("not one number".to_owned(), |n| n.to_string());
        compare("chunks", chunks(self.chunks), chunks(of.chunks));
        compare("placement", self.placement.clone(), of.placement);
        compare(
            "rank_of_stage",
            format!("{:?}", self.rank_of_stage),
            format!("{:?}", of.rank_of_stage),
        );
        compare("flavour", self.flavour.clone(), of.flavour);
        compare("hash", format!("{:016x}", self.hash), format!("{:016x}", of.hash));
        if let Some(costs) = &self.costs {
            compare(
                "stages with costs",
                costs.stage.len().to_string(),
                schedule.stages().to_string(),
            );
        }
        if differences.is_empty() {
            Ok(())
        } else {
            Err(ScheduleMetadataError::Differs { differences })
        }
    }
}

/// Writes a hash as 16 hexadecimal digits.
fn as_digits<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{hash:016x}"))
}

/// Reads a hash of 16 hexadecimal digits.
fn of_digits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let hash = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
    hash.ok_or_else(|| D::Error::custom("`hash` is not 16 hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::super::text::Dialect;
    use super::*;

    fn example(flavour: Dialect) -> (Schedule, Text) {
        let schedule = Schedule::named("zbv", 2, 4, None).unwrap();
        let text = Text::of(&schedule, flavour).unwrap();
        (schedule, text)
    }

    #[test]
    fn written_metadata_is_read_unchanged() {
        let (schedule, text) = example(Dialect::ComputeOnly);
        let mut sidecar = ScheduleMetadata::new(&schedule, &text);
        assert_eq!(ScheduleMetadata::parse(&sidecar.to_toml()).unwrap(), sidecar);
        sidecar.name = "a \"b\" \\ \u{1}é\n".to_owned();
        sidecar.channel = Some("tags".to_owned());
        sidecar.costs = Some(Costs::units(4));
        sidecar.chunks = None;
        let read = ScheduleMetadata::parse(&sidecar.to_toml()).unwrap();
        assert_eq!(read, sidecar);
        assert_eq!(ScheduleMetadata { chunks: Some(2), ..read }.check(&schedule, &text), Ok(()));
    }

    #[test]
    fn fuzz_sidecars() {
        let (schedule, text) = example(Dialect::ComputeOnly);
        let mut sidecar = ScheduleMetadata::new(&schedule, &text);
        let bare = sidecar.to_toml();
        sidecar.channel = Some("tags".to_owned());
        sidecar.costs = Some(Costs::units(4));
        mpmd_fuzz::bytes(
            "sidecars",
            &[bare.into_bytes(), sidecar.to_toml().into_bytes()],
            |bytes| {
                let Ok(read) = ScheduleMetadata::parse(&String::from_utf8_lossy(bytes)) else {
                    return;
                };
                let again = ScheduleMetadata::parse(&read.to_toml()).unwrap();
                // NaN costs differ from themselves, so compare their text.
                assert_eq!(format!("{again:?}"), format!("{read:?}"));
                let _ = read.check(&schedule, &text);
            },
        );
    }

    #[test]
    fn all_differences_are_reported() {
        let (schedule, text) = example(Dialect::ComputeOnly);
        let sidecar = ScheduleMetadata::new(&schedule, &text);
        let (_, comms) = example(Dialect::ComputeComms);
        let error = sidecar.check(&schedule, &comms).unwrap_err().to_string();
        let expected =
            "flavour is compute_only in the metadata and compute_comms in the text; hash is";
        assert!(error.contains(expected), "{error}");
        let other = Schedule::named("interleaved", 2, 2, None).unwrap();
        let text = Text::of(&other, Dialect::ComputeOnly).unwrap();
        let error = sidecar.check(&other, &text).unwrap_err().to_string();
        for expected in [
            "microbatches is 4 in the metadata and 2 in the text",
            "placement is V in the metadata and loop in the text",
            "rank_of_stage is [0, 1, 1, 0] in the metadata and [0, 1, 0, 1] in the text",
        ] {
            assert!(error.contains(expected), "{error}");
        }
        let costs = ScheduleMetadata {
            costs: Some(Costs::units(3)),
            ..ScheduleMetadata::new(&other, &text)
        };
        let error = costs.check(&other, &text).unwrap_err().to_string();
        assert!(error.contains("stages with costs is 3 in the metadata and 4"), "{error}");
    }

    #[test]
    fn other_versions_and_malformed_files_are_refused() {
        let (schedule, text) = example(Dialect::ComputeOnly);
        let toml = ScheduleMetadata::new(&schedule, &text).to_toml();
        let error = |toml: String| ScheduleMetadata::parse(&toml).unwrap_err().to_string();
        let later = error(format!("{}novel = 1\n", toml.replace("format = 1", "format = 2")));
        assert_eq!(later, "the schedule metadata file has format version 2; this version reads 1");
        assert!(error(format!("{toml}novel = 1\n")).contains("novel"));
        assert!(error(toml.replace("ranks = 2\n", "")).contains("missing field `ranks`"));
        assert!(error(toml.replace("hash = \"", "hash = \"+")).contains("16 hexadecimal digits"));
        assert!(error("{".to_owned()).contains("file is malformed"));
    }

    #[test]
    fn hash_ignores_empty_cells() {
        let of = |text: &str| Text::parse(text, None).unwrap().hash();
        assert_eq!(of("0F0,,0B0\n,1F0,1B0"), of("0F0,0B0\r\n1F0,1B0,\r\n"));
        assert_ne!(of("0F0,0B0\n1F0,1B0"), of("0F0,0B0,1F0,1B0"));
        // FNV-1a of "0F0,0B0\r\n".
        assert_eq!(of("0F0,0B0"), 0xa4bd_6870_4644_7b64);
    }
}
