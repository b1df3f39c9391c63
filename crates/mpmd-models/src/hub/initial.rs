//! The first values of a new model, as `transformers` chooses their distributions.

use std::path::Path;

use mpmd::Result;
use mpmd::aval::DType;
use mpmd::random::{Key, normal_f32};
use mpmd::region::Region;
use serde_json::{Map, Value};

use crate::config::{ModelConfig, NormKind};
use crate::error::unexpected;

/// The config settings for the first values of a new model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InitialSettings {
    /// Standard deviation of the first weights.
    deviation: f32,
    /// The dtype in which the new model is saved. Training is in f32.
    pub(crate) dtype: DType,
}

/// The distribution of a new tensor's first values. Each value depends only on the seed, the
/// tensor's name and the index in the tensor. So it is the same on any number of stages and
/// devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InitialValues {
    pub(crate) key: Key,
    mean: f32,
    deviation: f32,
}

impl InitialSettings {
    /// Reads the settings from the config `map`: `initializer_range`, by default 0.02, and `dtype`
    /// (or `torch_dtype`), by default f32.
    ///
    /// # Errors
    ///
    /// If a value is invalid. The message names `file`.
    pub(crate) fn of(file: &Path, map: &Map<String, Value>) -> Result<Self> {
        let value = |key| map.get(key).unwrap_or(&Value::Null);
        let wrong = |key, expected| unexpected(file, key, expected, value(key));
        let deviation = match value("initializer_range") {
            Value::Null => 0.02,
            given => given
                .as_f64()
                .filter(|given| (0.0..=1.0).contains(given))
                .ok_or_else(|| wrong("initializer_range", "a standard deviation from 0 to 1"))?,
        };
        let key = if value("dtype").is_null() {
            "torch_dtype"
        } else {
            "dtype"
        };
        let dtype = match value(key).as_str().unwrap_or_default() {
            "" if value(key).is_null() => DType::F32,
            "float32" => DType::F32,
            "bfloat16" => DType::Bf16,
            "float16" => DType::F16,
            _ => return Err(wrong(key, r#""float32", "bfloat16" or "float16""#)),
        };
        Ok(Self {
            deviation: deviation as f32,
            dtype,
        })
    }
}

impl InitialValues {
    /// Returns the first values of the tensor `name` for the parameter `param`.
    ///
    /// Norms begin as the identity, biases are zero, and weights are normal with the config's
    /// deviation. In GPT-2, the weights of projections to the residual stream are smaller the more
    /// layers there are. `transformers` scales them in none of the other families here.
    pub(crate) fn of(
        config: &ModelConfig,
        settings: InitialSettings,
        param: &str,
        name: &str,
        seed: u64,
    ) -> Self {
        let key = name
            .bytes()
            .fold(Key(seed), |key, byte| key.fold_in(u64::from(byte)));
        let has = |end: &[&str]| {
            param
                .split('.')
                .any(|part| end.iter().any(|it| part.ends_with(it)))
        };
        let fixed = |mean| Self {
            key,
            mean,
            deviation: 0.0,
        };
        let branches = (2 * config.num_hidden_layers) as f32;
        let deviation = settings.deviation;
        match config.family {
            _ if has(&["bias"]) => fixed(0.0),
            _ if has(&["norm"]) => fixed(f32::from(config.norm != NormKind::RmsPlusOne)),
            "gpt2" if has(&["o_proj", "down_proj"]) => Self {
                key,
                mean: 0.0,
                deviation: deviation / branches.sqrt(),
            },
            _ => Self {
                key,
                mean: 0.0,
                deviation,
            },
        }
    }

    /// Computes the values in a region of the tensor, whose whole shape is `shape`.
    pub(crate) fn fill(&self, shape: &[usize], region: &Region, values: &mut [f32]) {
        if self.deviation == 0.0 {
            return values.fill(self.mean);
        }
        for (value, element) in values.iter_mut().zip(region.indices(shape)) {
            *value = self.mean + self.deviation * normal_f32(self.key, element);
        }
    }
}
