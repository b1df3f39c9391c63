//! The keys of the architecture of a GGUF file, and those of a `config.json` that several families
//! get from them.

use mpmd::Result;
use mpmd_gguf::GgufFile;
use serde_json::{Map, Value, json};

use super::keys::{MetadataKeys, of_gguf};
use super::rope;

/// The keys of the architecture of a file, and the sizes that all architectures have.
pub(super) struct ModelKeys<'a> {
    pub(super) keys: MetadataKeys<'a>,
    pub(super) hidden: u64,
    pub(super) heads: u64,
    pub(super) head_dim: u64,
    pub(super) layers: u64,
}

impl<'a> ModelKeys<'a> {
    pub(super) fn new(file: &'a GgufFile, architecture: &str) -> Result<Self> {
        let keys = MetadataKeys::new(file, architecture);
        let hidden = keys.required_count("embedding_length")?;
        let heads = keys.required_count("attention.head_count")?;
        if heads == 0 {
            return Err(keys.unexpected("attention.head_count", "1 or more", heads));
        }
        let own = keys.count("attention.key_length")?;
        let head_dim = own.unwrap_or(hidden / heads);
        if let Some(values) = keys.count("attention.value_length")?
            && values != head_dim
        {
            return Err(keys.unexpected("attention.value_length", head_dim, values));
        }
        Ok(Self {
            hidden,
            heads,
            head_dim,
            layers: keys.required_count("block_count")?,
            keys,
        })
    }

    /// True if the file has this tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.keys.file().tensor(tensor).is_ok()
    }

    /// Writes the keys that all families have.
    pub(super) fn common(&self) -> Result<Map<String, Value>> {
        let keys = &self.keys;
        let table = keys.file().tensor("token_embd.weight").map_err(of_gguf)?;
        let groups = keys.count("attention.head_count_kv")?;
        let config = json!({
            "vocab_size": table.rows(),
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": groups.unwrap_or(self.heads),
            "head_dim": self.head_dim,
            "intermediate_size": keys.required_count("feed_forward_length")?,
            "max_position_embeddings": keys.required_count("context_length")?,
            "tie_word_embeddings": !self.has("output.weight"),
        });
        match config {
            Value::Object(config) => Ok(config),
            _ => Ok(Map::new()),
        }
    }

    /// Writes the family and its class in `transformers`.
    pub(super) fn name(&self, config: &mut Map<String, Value>, family: &str, class: &str) {
        config.insert("model_type".into(), family.into());
        config.insert("architectures".into(), json!([class]));
    }

    /// Writes the epsilon of RMS norms.
    pub(super) fn rms(&self, config: &mut Map<String, Value>) -> Result<()> {
        const KEY: &str = "attention.layer_norm_rms_epsilon";
        let epsilon = self.keys.number(KEY)?;
        let epsilon =
            epsilon.ok_or_else(|| self.keys.unexpected(KEY, "a number", "no such key"))?;
        config.insert("rms_norm_eps".into(), epsilon.into());
        Ok(())
    }

    /// Writes the epsilon of layer norms under the key `name`.
    pub(super) fn layer_norm(&self, config: &mut Map<String, Value>, name: &str) -> Result<()> {
        const KEY: &str = "attention.layer_norm_epsilon";
        let epsilon = self.keys.number(KEY)?;
        let epsilon =
            epsilon.ok_or_else(|| self.keys.unexpected(KEY, "a number", "no such key"))?;
        config.insert(name.to_owned(), epsilon.into());
        Ok(())
    }

    /// Writes a rotary embedding over whole heads.
    pub(super) fn rope(&self, config: &mut Map<String, Value>) -> Result<()> {
        const KEY: &str = "rope.dimension_count";
        match self.keys.count(KEY)? {
            Some(turned) if turned != self.head_dim => {
                let expected = format!("{}, the width of a head", self.head_dim);
                Err(self.keys.unexpected(KEY, expected, turned))
            }
            _ => self.rope_with(config, "rope_theta", self.head_dim),
        }
    }

    /// Writes a rotary embedding over a share of each head under the key `share`, and its base
    /// under the key `theta`.
    pub(super) fn partial_rope(
        &self,
        config: &mut Map<String, Value>,
        theta: &str,
        share: &str,
    ) -> Result<()> {
        const KEY: &str = "rope.dimension_count";
        let turned = self.keys.required_count(KEY)?;
        if turned > self.head_dim {
            let expected = format!("at most {}, the width of a head", self.head_dim);
            return Err(self.keys.unexpected(KEY, expected, turned));
        }
        let dim = self.head_dim as f64;
        let exact = turned as f64 / dim;
        // The reader of the config rounds the product down.
        let is_low = (dim * exact) as u64 != turned;
        let part = if is_low { exact.next_up() } else { exact };
        config.insert(share.to_owned(), part.into());
        self.rope_with(config, theta, turned)
    }

    fn rope_with(&self, config: &mut Map<String, Value>, theta: &str, turned: u64) -> Result<()> {
        let base = self.keys.number("rope.freq_base")?.unwrap_or(10_000.0);
        config.insert(theta.to_owned(), base.into());
        let positions = self.keys.required_count("context_length")?;
        if let Some(scaling) = rope::scaling(&self.keys, base, turned, positions)? {
            config.insert("rope_scaling".into(), scaling);
        }
        Ok(())
    }

    /// Writes the size of the sliding window. Null if the file has none, or 0.
    pub(super) fn window(&self, config: &mut Map<String, Value>) -> Result<Option<u64>> {
        let window = self.keys.count("attention.sliding_window")?;
        let window = window.filter(|window| *window > 0);
        config.insert("sliding_window".into(), window.into());
        Ok(window)
    }

    /// Writes which layers have the sliding window, if the file says so: a flag for each layer, or
    /// a number `n`, where each `n`th layer has none.
    pub(super) fn window_layers(&self, config: &mut Map<String, Value>) -> Result<()> {
        const KEY: &str = "attention.sliding_window_pattern";
        let slides: Vec<bool> = if let Some(flags) = self.keys.flags(KEY)? {
            flags
        } else if let Some(every) = self.keys.count(KEY)? {
            let is_last = |layer: u64| every > 0 && (layer + 1).is_multiple_of(every);
            let layers = self.layers.min(1 << 20);
            (0..layers).map(|layer| !is_last(layer)).collect()
        } else {
            return Ok(());
        };
        let name = |slides: bool| match slides {
            true => "sliding_attention",
            false => "full_attention",
        };
        let types: Vec<&str> = slides.into_iter().map(name).collect();
        config.insert("layer_types".into(), json!(types));
        Ok(())
    }

    /// Writes the number of experts, and how many compute each token. `count` is the key of the
    /// number in a `config.json`.
    pub(super) fn experts(&self, config: &mut Map<String, Value>, count: &str) -> Result<()> {
        let experts = self.keys.required_count("expert_count")?;
        let used = self.keys.required_count("expert_used_count")?;
        config.insert(count.to_owned(), experts.into());
        config.insert("num_experts_per_tok".into(), used.into());
        Ok(())
    }

    /// Returns an error if the key has another number than `only`, unless it has been read.
    pub(super) fn only_unread(&self, key: &str, only: f64) -> Result<()> {
        match self.keys.was_read(key) {
            true => Ok(()),
            false => self.keys.only_number(key, only),
        }
    }
}
