//! Folders that give new weights to an inference: those of the same model are taken, others are
//! refused by file and key.

use std::fs;
use std::path::Path;

use mpmd::aval::DType;
use mpmd_models::{Room, Stages};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::folders::{change, change_config, copy, open, simulate, zeros};

/// A folder that takes the place of a model with [`TEMPLATE`], after a change.
struct Other {
    change: fn(&Path),
    /// The error, without the path of the folder. `None` if its weights are taken.
    said: Option<&'static str>,
}

const TEMPLATE: &str = "{% for m in messages %}\n{{ m.content }}{% endfor %}";
const GENERATION: &str = "generation_config.json";

/// Reads the weights of `other` as a new version of the model in `used`, in two processes. Returns
/// the error, without the path of the folder.
pub(crate) fn exchange(used: &Path, other: &Path) -> Option<String> {
    let used = mpmd_models::Folder::open(used).unwrap();
    simulate(2, 2, |p, meshes| {
        let room = Room {
            blocks: 4,
            sequences: 2,
        };
        let inference = Stages::new(&used, 2, 16)?.inference(p, meshes, room, false)?;
        let said = inference.read_weights(p, other, 1).err();
        let path = format!("{}/", other.display());
        Ok(Some(said.map(|said| said.to_string().replace(&path, ""))))
    })
}

/// Copies a test folder, and adds a chat template and special tokens.
fn chat(name: &str) -> TempDir {
    let folder = copy(name);
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let settings = json!({ "eos_token": "</s>", "chat_template": TEMPLATE });
    let file = folder.path().join("tokenizer_config.json");
    fs::write(file, settings.to_string()).unwrap();
    folder
}

/// Changes a JSON file of a folder.
fn change_json(folder: &Path, name: &str, change: impl FnOnce(&mut Value)) {
    let file = folder.join(name);
    let mut value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, format!("{value:#}")).unwrap();
}

/// Sets the first value of a tensor.
fn set_first(folder: &Path, name: &str, value: f32) {
    change(folder, |tensors| {
        let found = tensors.iter_mut().find(|(other, ..)| other == name);
        found.unwrap().2[..4].copy_from_slice(&value.to_le_bytes());
    });
}

const OTHERS: &[Other] = &[
    Other {
        change: |_| {},
        said: None,
    },
    Other {
        change: |folder| set_first(folder, "model.norm.weight", 2.0),
        said: None,
    },
    // They change no result of inference, or not of this one.
    Other {
        change: |folder| {
            change_config(folder, |config| {
                config["attention_dropout"] = json!(0.1);
                config["max_position_embeddings"] = json!(4096);
                config["transformers_version"] = json!("4.0");
            });
            change_json(folder, "tokenizer.json", |json| {
                json["truncation"] = json!({ "direction": "Right", "max_length": 8,
                    "strategy": "LongestFirst", "stride": 0 });
            });
            fs::remove_file(folder.join("chat_template.jinja")).unwrap();
        },
        said: None,
    },
    Other {
        change: |folder| {
            for name in ["tokenizer.json", "tokenizer_config.json", GENERATION] {
                fs::remove_file(folder.join(name)).unwrap();
            }
        },
        said: None,
    },
    Other {
        change: |folder| {
            change(folder, |tensors| {
                let mut unused = zeros("extra", &[1], DType::F32);
                unused.2.copy_from_slice(&f32::NAN.to_le_bytes());
                tensors.push(unused);
            });
        },
        said: None,
    },
    Other {
        change: |folder| set_first(folder, "model.norm.weight", f32::NAN),
        said: Some("model.safetensors: model.norm.weight: expected finite values, found NaN"),
    },
    Other {
        change: |folder| {
            change_config(folder, |config| {
                config["rope_parameters"]["rope_theta"] = json!(5e3)
            })
        },
        said: Some(
            "config.json: rope_parameters.rope_theta: expected 10000.0, as in the model in use, \
             found 5000.0",
        ),
    },
    Other {
        change: |folder| {
            change_config(folder, |config| {
                config["attention_dropout"] = json!(0.1);
                config["rope_scaling"] = json!({ "type": "linear", "factor": 2.0 });
            });
        },
        said: Some(
            "config.json: rope_scaling: expected none, as in the model in use, found \
             {\"factor\":2.0,\"type\":\"linear\"}",
        ),
    },
    Other {
        change: |folder| change_config(folder, |config| config["hidden_size"] = json!(64)),
        said: Some("model.safetensors: lm_head.weight: expected f32, bf16 or f16 [320, 64], found"),
    },
    Other {
        change: |folder| {
            change_json(folder, "tokenizer.json", |json| {
                json["added_tokens"][1]["content"] = json!("<end>")
            })
        },
        said: Some(
            "tokenizer.json: added_tokens[1].content: expected \"</s>\", as in the model in use, \
             found \"<end>\"",
        ),
    },
    Other {
        change: |folder| {
            change_json(folder, GENERATION, |json| {
                json["eos_token_id"] = json!([1, 7])
            })
        },
        said: Some(
            "generation_config.json: eos_token_id: expected {1}, as in the model in use, found \
             {1, 7}",
        ),
    },
    Other {
        change: |folder| {
            fs::remove_file(folder.join(GENERATION)).unwrap();
            change_config(folder, |config| config["eos_token_id"] = json!(0));
        },
        said: Some("config.json: eos_token_id: expected {1}, as in the model in use, found {0}"),
    },
    Other {
        change: |folder| {
            let other = TEMPLATE.replace("m.content", "m.role");
            fs::write(folder.join("chat_template.jinja"), other).unwrap();
        },
        said: Some(
            "chat_template.jinja: expected the chat template of the model in use, found another \
             one from line 2 on",
        ),
    },
    Other {
        change: |folder| {
            change_json(folder, "tokenizer_config.json", |json| {
                json["eos_token"] = json!("<s>")
            })
        },
        said: Some(
            "tokenizer_config.json: eos_token: expected \"</s>\", as in the model in use, found \
             \"<s>\"",
        ),
    },
    Other {
        change: |folder| {
            let file = folder.join("model.safetensors");
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        },
        said: Some("model.safetensors: cut off: it has"),
    },
];

#[test]
fn weights_of_other_models_are_refused_by_key() {
    let used = chat("plain");
    for (at, Other { change, said }) in OTHERS.iter().enumerate() {
        let other = chat("plain");
        change(other.path());
        let found = exchange(used.path(), other.path());
        match said {
            None => assert_eq!(found, None, "{at}"),
            Some(said) => {
                let found = found.unwrap_or_default();
                assert!(found.starts_with(said), "{at}: {found}, not {said}");
            }
        }
    }
}

#[test]
fn end_tokens_of_the_model_in_use_count_from_either_file() {
    let (used, other) = (chat("plain"), chat("plain"));
    change_json(used.path(), GENERATION, |json| {
        json["eos_token_id"] = json!([1, 7])
    });
    fs::remove_file(other.path().join(GENERATION)).unwrap();
    assert_eq!(
        exchange(used.path(), other.path()),
        None,
        "those of the config"
    );
    change_config(other.path(), |config| {
        config["eos_token_id"] = json!([7, 1])
    });
    assert_eq!(exchange(used.path(), other.path()), None, "all of them");
    change_config(other.path(), |config| config["eos_token_id"] = json!(7));
    let said = exchange(used.path(), other.path()).unwrap();
    assert!(
        said.starts_with("config.json: eos_token_id: expected {1}"),
        "{said}"
    );
}

#[test]
fn tied_and_missing_weights_are_named() {
    let used = copy("grouped");
    let other = copy("grouped");
    let shard = "model-00003-of-00007.safetensors";
    fs::remove_file(other.path().join(shard)).unwrap();
    let said = exchange(used.path(), other.path()).unwrap();
    assert!(
        said.starts_with(&format!("{shard}: No such file")),
        "{said}"
    );

    // An output of its own unties it.
    let (used, other) = (copy("qwen2-window"), copy("qwen2-window"));
    assert!(open("qwen2-window").config().tie_word_embeddings);
    change(other.path(), |tensors| {
        let table = tensors
            .iter()
            .find(|(name, ..)| name.ends_with("embed_tokens.weight"));
        let (_, aval, _) = table.unwrap();
        let output = zeros("lm_head.weight", aval.shape(), aval.dtype());
        tensors.push(output);
    });
    let said = exchange(used.path(), other.path()).unwrap();
    let expected = "config.json: tie_word_embeddings: expected true, as in the model in use, found \
                    false";
    assert_eq!(said, expected);
}

#[test]
fn files_of_the_model_in_use_may_be_replaced() {
    // A training saves into the folder from which the server was started.
    let used = chat("plain");
    let folder = mpmd_models::Folder::open(used.path()).unwrap();
    simulate(1, 1, |p, meshes| {
        let room = Room {
            blocks: 4,
            sequences: 2,
        };
        let mut inference = Stages::new(&folder, 1, 16)?.inference(p, meshes, room, false)?;
        inference.warm_up(p, |_, _| true)?;
        set_first(used.path(), "model.norm.weight", 2.0);
        inference.read_weights(p, used.path(), 1)?;
        Ok(Some(()))
    });
}
