//! The config of a model in a GGUF file, as the keys that a `config.json` has.

use mpmd::Result;
use mpmd_gguf::GgufFile;
use serde_json::{Map, Value};

use super::families::{
    gemma2, gemma3, gpt_neox, gpt2, granite, llama, olmo2, phi3, qwen2, qwen2_moe, qwen3,
    qwen3_moe, stablelm,
};
use super::keys::{MetadataKeys, of_gguf};
use super::model_keys::ModelKeys;
use crate::error::unexpected;

/// The key of the architecture.
const ARCHITECTURE: &str = "general.architecture";
/// Keys of architectures that change no result, separated by blanks: sizes that tensors show, notes
/// on how a file was made, the epsilon of a kind of norms that the model lacks, and how programs
/// make embeddings of texts.
const HARMLESS: &str = "
    vocab_size tensor_data_layout rope.scaling.finetuned attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon use_parallel_residual pooling_type
";
/// An architecture of GGUF files.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The value of [`ARCHITECTURE`].
    pub(crate) name: &'static str,
    /// Function that writes the keys of a `config.json`.
    write: fn(&ModelKeys<'_>, &mut Map<String, Value>) -> Result<()>,
    /// True if neighbouring rows of the queries and keys rotate together, instead of rows that are
    /// half a head apart.
    pub(super) is_interleaved: bool,
    /// True if the weights of norms have 1 added to them.
    pub(super) is_shifted: bool,
}

/// An architecture that keeps rows and norms as the folders of hubs do.
const PLAIN: Architecture = Architecture {
    name: "",
    write: |_, _| Ok(()),
    is_interleaved: false,
    is_shifted: false,
};

/// All architectures, in the order of the guide.
pub(crate) static ARCHITECTURES: [Architecture; 13] = [
    Architecture {
        name: "llama",
        write: llama,
        is_interleaved: true,
        ..PLAIN
    },
    Architecture {
        name: "qwen2",
        write: qwen2,
        ..PLAIN
    },
    Architecture {
        name: "qwen3",
        write: qwen3,
        ..PLAIN
    },
    Architecture {
        name: "qwen2moe",
        write: qwen2_moe,
        ..PLAIN
    },
    Architecture {
        name: "qwen3moe",
        write: qwen3_moe,
        ..PLAIN
    },
    Architecture {
        name: "gemma2",
        write: gemma2,
        is_shifted: true,
        ..PLAIN
    },
    Architecture {
        name: "gemma3",
        write: gemma3,
        is_shifted: true,
        ..PLAIN
    },
    Architecture {
        name: "phi3",
        write: phi3,
        ..PLAIN
    },
    Architecture {
        name: "olmo2",
        write: olmo2,
        ..PLAIN
    },
    Architecture {
        name: "granite",
        write: granite,
        is_interleaved: true,
        ..PLAIN
    },
    Architecture {
        name: "gpt2",
        write: gpt2,
        ..PLAIN
    },
    Architecture {
        name: "gptneox",
        write: gpt_neox,
        ..PLAIN
    },
    Architecture {
        name: "stablelm",
        write: stablelm,
        ..PLAIN
    },
];

/// Returns the architecture of a file, and the keys that a `config.json` of this model has.
///
/// # Errors
///
/// If the file holds no model, or one of an unknown architecture. If a key is missing, has another
/// type, or may change results and is unknown.
pub(super) fn config_of(file: &GgufFile) -> Result<(&'static Architecture, Map<String, Value>)> {
    let general = MetadataKeys::new(file, "general");
    if let Some(kind) = general.text("type")?
        && kind != "model"
    {
        return Err(general.unexpected("type", "\"model\"", format!("{kind:?}")));
    }
    // It says which products need more precision than others.
    if file.metadata().contains("general.tensor_extra.name") {
        return Err(general.unexpected("tensor_extra.name", "no such key", "a list of tensors"));
    }

    let name = file.metadata().text(ARCHITECTURE).map_err(of_gguf)?;
    let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == name) else {
        let known: Vec<String> = ARCHITECTURES
            .iter()
            .map(|known| format!("{:?}", known.name))
            .collect();
        let found = format!("{name:?}");
        return Err(unexpected(
            file.path(),
            ARCHITECTURE,
            known.join(", "),
            found,
        ));
    };

    let model = ModelKeys::new(file, name)?;
    let mut config = model.common()?;
    (architecture.write)(&model, &mut config)?;
    model.keys.only_flag("attention.causal", true)?;
    for (key, only) in [
        ("expert_weights_scale", 1.0),
        ("expert_gating_func", 1.0),
        ("expert_count", 0.0),
        ("expert_used_count", 0.0),
        ("nextn_predict_layers", 0.0),
    ] {
        model.only_unread(key, only)?;
    }
    model.keys.finish(HARMLESS)?;
    Ok((architecture, config))
}
