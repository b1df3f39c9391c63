//! Refusals: well-formed cases without an answer. Each has an error as one word and a message.

use mpmd_layout::aval::AvalError;
use mpmd_layout::reshard::ReshardError;
use mpmd_layout::sharding::ShardingError;
use mpmd_layout::sharding::rules::RulesError;
use mpmd_layout::topology::MeshError;
use serde::Serialize;

/// The reason why a case has no answer. It is printed in place of the answer, as `{error,
/// message}`.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct CaseRefusal {
    /// The error as one word, which stays the same in all versions.
    pub(super) error: &'static str,
    /// The message for people: the fault and its place.
    pub(super) message: String,
}

impl CaseRefusal {
    /// Creates a refusal with `error`, one word, and a message for people.
    pub(super) fn new(error: &'static str, message: impl Into<String>) -> Self {
        Self {
            error,
            message: message.into(),
        }
    }

    /// Puts the name of a field of the case in front of the message.
    pub(super) fn of(self, field: &str) -> Self {
        Self {
            message: format!("{field}: {}", self.message),
            ..self
        }
    }
}

impl From<MeshError> for CaseRefusal {
    fn from(error: MeshError) -> Self {
        let kind = match &error {
            MeshError::DuplicateDevice { .. } => "duplicate_device",
            MeshError::UnknownProcess { .. } => "unknown_process",
            MeshError::UnknownDevice { .. } => "unknown_device",
            MeshError::DeviceCount { .. } => "device_count",
            MeshError::DuplicateAxis { .. } => "duplicate_axis",
            MeshError::EmptyAxis { .. } => "empty_axis",
            MeshError::UnknownAxis { .. } => "unknown_axis",
            _ => "mesh",
        };
        Self::new(kind, error.to_string())
    }
}

impl From<ShardingError> for CaseRefusal {
    fn from(error: ShardingError) -> Self {
        let kind = match &error {
            ShardingError::UnknownAxis { .. } | ShardingError::UnreducedUnknownAxis { .. } => {
                "unknown_axis"
            }
            ShardingError::AxisUsedTwice { .. } | ShardingError::UnreducedTwice { .. } => {
                "duplicate_axis"
            }
            ShardingError::SpecTooLong { .. } => "spec_too_long",
            ShardingError::NotDivisible { .. } => "not_divisible",
            ShardingError::UnknownDevice { .. } => "unknown_device",
            ShardingError::UnreducedDivides { .. } => "unreduced_divides",
            ShardingError::NoPlacements { .. } => "no_placements",
            ShardingError::PlacedTwice { .. } | ShardingError::ShardTwice { .. } => {
                "duplicate_device"
            }
            ShardingError::DimOutOfRange { .. } => "dim_out_of_range",
            ShardingError::NoShards => "no_shards",
            ShardingError::ShardNdim { .. } | ShardingError::ShapeNdim { .. } => "shape",
            ShardingError::Overlap { .. } => "overlap",
            ShardingError::PastEnd { .. } => "past_end",
            ShardingError::Gap { .. } => "gap",
            ShardingError::RankTwice { .. } => "duplicate_rank",
            ShardingError::UnknownRank { .. } => "unknown_rank",
            ShardingError::MissingRank { .. } => "missing_rank",
            _ => "sharding",
        };
        Self::new(kind, error.to_string())
    }
}

impl From<ReshardError> for CaseRefusal {
    fn from(error: ReshardError) -> Self {
        let kind = match &error {
            ReshardError::Shape { .. } => "shape",
            ReshardError::UnknownDevice { .. } => "unknown_device",
            ReshardError::TooLarge { .. } => "too_large",
            _ => "reshard",
        };
        Self::new(kind, error.to_string())
    }
}

impl From<AvalError> for CaseRefusal {
    fn from(error: AvalError) -> Self {
        let kind = match &error {
            AvalError::TooLarge { .. } => "too_large",
            AvalError::UnknownDType { .. } => "unknown_dtype",
            _ => "array",
        };
        Self::new(kind, error.to_string())
    }
}

/// The error word is the name of the exception that the Python original of the sharding rules
/// raises.
impl From<RulesError> for CaseRefusal {
    fn from(error: RulesError) -> Self {
        Self::new(error.kind().name(), error.to_string())
    }
}
