//! What torch's text of a schedule cannot say, in a file beside it: a [`Sidecar`].

use std::fmt::Write;

use serde::Deserialize;

use super::costs::Costs;
use super::schedule::Schedule;
use super::text::Text;

/// The version of the form that this writes and reads.
const VERSION: u32 = 1;

/// What lies beside `NAME.csv` as `NAME.toml`, so that torch still loads the text.
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
#[derive(Clone, Debug, PartialEq)]
pub struct Sidecar {
    /// The schedule's name.
    pub name: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of microbatches.
    pub microbatches: usize,
    /// Number of stages on each rank; `None` where ranks have different numbers of them.
    pub chunks: Option<usize>,
    /// The name of the [`Placement`](super::Placement).
    pub placement: String,
    /// The rank of each stage.
    pub rank_of_stage: Vec<usize>,
    /// The name of the text's [`Flavour`](super::Flavour).
    pub flavour: String,
    /// [`Text::hash`].
    pub hash: u64,
    /// The channel over which it was proved to come to its end, as `check` names it; `None` where
    /// it was not.
    pub channel: Option<String>,
    /// What the passes cost, where the order was made for these.
    pub costs: Option<Costs>,
}

/// Why a sidecar is not one, or not of its text.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SidecarError {
    /// It is not in the form.
    #[error("the sidecar is not in its form: {0}")]
    Form(String),
    /// It is of a later version.
    #[error("the sidecar has format version {found}; this reads {VERSION}")]
    Version {
        /// The version in it.
        found: u32,
    },
    /// It is of another text.
    #[error("the sidecar is of another text: {}", .differences.join("; "))]
    Differs {
        /// What differs: the name of the value, what the sidecar says and what the text does.
        differences: Vec<String>,
    },
}

#[derive(Deserialize)]
struct Version {
    format: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    #[serde(rename = "format")]
    _format: u32,
    name: String,
    ranks: usize,
    microbatches: usize,
    chunks: Option<usize>,
    placement: String,
    rank_of_stage: Vec<usize>,
    flavour: String,
    hash: String,
    channel: Option<String>,
    costs: Option<Costs>,
}

impl Sidecar {
    /// Of a schedule and its text; nothing proved, no costs.
    pub fn new(schedule: &Schedule, text: &Text) -> Self {
        let mut chunks = vec![0_usize; schedule.ranks()];
        schedule.ranks_of_stages().iter().for_each(|rank| chunks[*rank] += 1);
        Self {
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

    /// Reads one.
    ///
    /// # Errors
    ///
    /// [`SidecarError::Version`] where it is of another version, [`SidecarError::Form`] where it is
    /// not TOML, a value is missing, unknown or of another type.
    pub fn parse(text: &str) -> Result<Self, SidecarError> {
        let form =
            |error: toml::de::Error| SidecarError::Form(error.to_string().trim_end().to_owned());
        // First: a later version may have any other values.
        let Version { format: found } = toml::from_str(text).map_err(form)?;
        if found != VERSION {
            return Err(SidecarError::Version { found });
        }
        let form: Form = toml::from_str(text).map_err(form)?;
        let digits =
            form.hash.len() == 16 && form.hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        let hash = u64::from_str_radix(&form.hash, 16).ok().filter(|_| digits);
        let hash = hash
            .ok_or_else(|| SidecarError::Form("`hash` is not 16 hexadecimal digits".to_owned()))?;
        Ok(Self {
            name: form.name,
            ranks: form.ranks,
            microbatches: form.microbatches,
            chunks: form.chunks,
            placement: form.placement,
            rank_of_stage: form.rank_of_stage,
            flavour: form.flavour,
            hash,
            channel: form.channel,
            costs: form.costs,
        })
    }

    /// As TOML.
    pub fn to_toml(&self) -> String {
        let Self { ranks, microbatches, rank_of_stage, hash, .. } = self;
        let mut toml = format!("format = {VERSION}\nname = {}\n", quoted(&self.name));
        let _ = write!(toml, "ranks = {ranks}\nmicrobatches = {microbatches}\n");
        if let Some(chunks) = self.chunks {
            let _ = writeln!(toml, "chunks = {chunks}");
        }
        let _ = write!(
            toml,
            "placement = {}\nrank_of_stage = {rank_of_stage:?}\nflavour = {}\nhash \
             = \"{hash:016x}\"\n",
            quoted(&self.placement),
            quoted(&self.flavour)
        );
        if let Some(channel) = &self.channel {
            let _ = writeln!(toml, "channel = {}", quoted(channel));
        }
        if let Some(costs) = &self.costs {
            let _ = write!(toml, "\n[costs]\n{}", costs.to_toml_in("costs.stage"));
        }
        toml
    }

    /// Whether this is the sidecar of that text. The name, the channel and the costs are not in a
    /// text.
    ///
    /// # Errors
    ///
    /// [`SidecarError::Differs`] with all that differs; costs of another number of stages are among
    /// it.
    pub fn check(&self, schedule: &Schedule, text: &Text) -> Result<(), SidecarError> {
        let of = Self::new(schedule, text);
        let mut differences = Vec::new();
        let mut compare = |what: &str, here: String, there: String| {
            if here != there {
                differences
                    .push(format!("{what} is {here} in the sidecar and {there} in the text"));
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
        if differences.is_empty() { Ok(()) } else { Err(SidecarError::Differs { differences }) }
    }
}

/// A TOML string.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::super::text::Flavour;
    use super::*;

    fn example(flavour: Flavour) -> (Schedule, Text) {
        let schedule = Schedule::named("zbv", 2, 4, None).unwrap();
        let text = Text::of(&schedule, flavour).unwrap();
        (schedule, text)
    }

    #[test]
    fn a_sidecar_is_read_as_it_was_written() {
        let (schedule, text) = example(Flavour::ComputeOnly);
        let mut sidecar = Sidecar::new(&schedule, &text);
        assert_eq!(Sidecar::parse(&sidecar.to_toml()).unwrap(), sidecar);
        sidecar.name = "a \"b\" \\ \u{1}é\n".to_owned();
        sidecar.channel = Some("tags".to_owned());
        sidecar.costs = Some(Costs::units(4));
        sidecar.chunks = None;
        let read = Sidecar::parse(&sidecar.to_toml()).unwrap();
        assert_eq!(read, sidecar);
        assert_eq!(Sidecar { chunks: Some(2), ..read }.check(&schedule, &text), Ok(()));
    }

    #[test]
    fn fuzz_sidecars() {
        let (schedule, text) = example(Flavour::ComputeOnly);
        let mut sidecar = Sidecar::new(&schedule, &text);
        let bare = sidecar.to_toml();
        sidecar.channel = Some("tags".to_owned());
        sidecar.costs = Some(Costs::units(4));
        mpmd_fuzz::bytes(
            "sidecars",
            &[bare.into_bytes(), sidecar.to_toml().into_bytes()],
            |bytes| {
                let Ok(read) = Sidecar::parse(&String::from_utf8_lossy(bytes)) else { return };
                let again = Sidecar::parse(&read.to_toml()).unwrap();
                // Costs that are not a number differ from themselves.
                assert_eq!(format!("{again:?}"), format!("{read:?}"));
                let _ = read.check(&schedule, &text);
            },
        );
    }

    #[test]
    fn what_differs_is_said() {
        let (schedule, text) = example(Flavour::ComputeOnly);
        let sidecar = Sidecar::new(&schedule, &text);
        let (_, comms) = example(Flavour::ComputeComms);
        let error = sidecar.check(&schedule, &comms).unwrap_err().to_string();
        let expected =
            "flavour is compute_only in the sidecar and compute_comms in the text; hash is";
        assert!(error.contains(expected), "{error}");
        let other = Schedule::named("interleaved", 2, 2, None).unwrap();
        let text = Text::of(&other, Flavour::ComputeOnly).unwrap();
        let error = sidecar.check(&other, &text).unwrap_err().to_string();
        for expected in [
            "microbatches is 4 in the sidecar and 2 in the text",
            "placement is V in the sidecar and loop in the text",
            "rank_of_stage is [0, 1, 1, 0] in the sidecar and [0, 1, 0, 1] in the text",
        ] {
            assert!(error.contains(expected), "{error}");
        }
        let costs = Sidecar { costs: Some(Costs::units(3)), ..Sidecar::new(&other, &text) };
        let error = costs.check(&other, &text).unwrap_err().to_string();
        assert!(error.contains("stages with costs is 3 in the sidecar and 4"), "{error}");
    }

    #[test]
    fn only_its_own_form_is_read() {
        let (schedule, text) = example(Flavour::ComputeOnly);
        let toml = Sidecar::new(&schedule, &text).to_toml();
        let error = |toml: String| Sidecar::parse(&toml).unwrap_err().to_string();
        let later = error(format!("{}novel = 1\n", toml.replace("format = 1", "format = 2")));
        assert_eq!(later, "the sidecar has format version 2; this reads 1");
        assert!(error(format!("{toml}novel = 1\n")).contains("novel"));
        assert!(error(toml.replace("ranks = 2\n", "")).contains("missing field `ranks`"));
        assert!(error(toml.replace("hash = \"", "hash = \"+")).contains("16 hexadecimal digits"));
        assert!(error("{".to_owned()).contains("not in its form"));
    }

    #[test]
    fn the_hash_is_of_what_is_done_not_of_waits() {
        let of = |text: &str| Text::parse(text, None).unwrap().hash();
        assert_eq!(of("0F0,,0B0\n,1F0,1B0"), of("0F0,0B0\r\n1F0,1B0,\r\n"));
        assert_ne!(of("0F0,0B0\n1F0,1B0"), of("0F0,0B0,1F0,1B0"));
        // FNV-1a of "0F0,0B0\r\n".
        assert_eq!(of("0F0,0B0"), 0xa4bd_6870_4644_7b64);
    }
}
