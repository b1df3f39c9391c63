//! Unknown and wrong parts of GGUF files are refused by name. The guide's page lists the known
//! ones.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use mpmd_gguf::{BlockType, GgufFile, MetadataArray, MetadataValue};
use mpmd_models::{Folder, Sampling, Stages};

use crate::folders::simulate;
use crate::gguf::{open, path};
use crate::gguf_change::{Change, changed, key, without_key};
use crate::other_weights::exchange;

/// The page of the guide about GGUF files.
const PAGE: &str = "../../docs/guide/gguf.md";

/// Returns the error for a changed copy of a file, without the path in front.
fn refusal(file: &str, change: &Change<'_>) -> String {
    let changed = changed(file, change);
    let said = Folder::open(changed.path()).unwrap_err().to_string();
    let path = format!("{}: ", changed.path().display());
    let at = said.find(&path).unwrap_or_else(|| panic!("{said}"));
    said[at + path.len()..].to_owned()
}

#[test]
fn unknown_keys_and_values_are_refused_by_name() {
    let unknown = "expected no such key: it may change results, and nothing here handles it";
    for (file, change, right) in [
        (
            "mistral-f32",
            key("general.architecture", "mamba"),
            "general.architecture: expected \"llama\", ",
        ),
        (
            "mistral-f32",
            key("general.type", "adapter"),
            "general.type: expected \"model\", found \"adapter\"",
        ),
        (
            "mistral-f32",
            key("llama.attention.scale", 0.5f32),
            &format!("llama.attention.scale: {unknown}, found 0.5"),
        ),
        (
            "mistral-f32",
            key("llama.attention.causal", false),
            "llama.attention.causal: expected true, found false",
        ),
        (
            "mixtral-f16",
            key("llama.expert_weights_scale", 2.5f32),
            "llama.expert_weights_scale: expected 1, found 2.5",
        ),
        (
            "mixtral-f16",
            key("llama.expert_gating_func", 2u32),
            "llama.expert_gating_func: expected 1, found 2",
        ),
        (
            "qwen2-f16",
            key("qwen2.expert_count", 4u32),
            "qwen2.expert_count: expected 0, found 4",
        ),
        (
            "qwen2-f16",
            key("qwen2.rope.scaling.type", "wool"),
            "qwen2.rope.scaling.type: expected \"none\", \"linear\", \"yarn\" or \"longrope\", \
             found \"wool\"",
        ),
        (
            "qwen2-f16",
            key("qwen2.rope.scaling.yarn_log_multiplier", 0.1f32),
            "qwen2.rope.scaling.yarn_log_multiplier: expected 0, found 0.1",
        ),
        (
            "olmo2-f16",
            key("olmo2.attention.sliding_window", 4096u32),
            "olmo2.attention.sliding_window: expected 0, found 4096",
        ),
        (
            "granite-f16",
            key("granite.rope.scaling.finetuned", false),
            "granite.rope.scaling.finetuned: expected true, found false",
        ),
        (
            "qwen3-bf16",
            key("qwen3.rope.dimension_count", 4u32),
            "qwen3.rope.dimension_count: expected 10, the width of a head, found 4",
        ),
        (
            "qwen3-bf16",
            without_key("qwen3.embedding_length"),
            "qwen3.embedding_length: expected a whole number, found no such key",
        ),
        (
            "qwen3-bf16",
            key(
                "qwen3.attention.head_count",
                MetadataArray::U32(vec![3, 3, 3, 3]),
            ),
            "metadata \"qwen3.attention.head_count\": expected an integer, found array of u32",
        ),
        (
            "qwen3-bf16",
            key("qwen3.attention.layer_norm_rms_epsilon", f32::NAN),
            "qwen3.attention.layer_norm_rms_epsilon: expected a finite number, found NaN",
        ),
        (
            "qwen3-bf16",
            key("tokenizer.ggml.model", "rwkv"),
            "tokenizer.ggml.model: expected \"llama\" (SentencePiece) or \"gpt2\" (byte pairs), \
             found \"rwkv\"",
        ),
        (
            "qwen3-bf16",
            key("tokenizer.ggml.precompiled_charsmap", 1u32),
            &format!("tokenizer.ggml.precompiled_charsmap: {unknown}, found 1"),
        ),
        (
            "qwen3-bf16",
            without_key("tokenizer.ggml.merges"),
            "tokenizer.ggml.merges: expected texts, found no such key",
        ),
        (
            "qwen3-bf16",
            key("tokenizer.ggml.eos_token_id", 323u32),
            "tokenizer.ggml.eos_token_id: expected the number of a token, below 323, found 323",
        ),
    ] {
        let said = refusal(file, &change);
        assert!(said.starts_with(right), "{file}: {said}\n{right}");
    }
}

#[test]
fn unknown_splitters_are_refused_with_the_known_ones() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = fs::read_to_string(page).unwrap();
    for change in [
        key("tokenizer.ggml.pre", "jina-v2-de"),
        without_key("tokenizer.ggml.pre"),
    ] {
        let said = refusal("qwen3-bf16", &change);
        let known = said.strip_prefix("tokenizer.ggml.pre: expected ").unwrap();
        let (known, _) = known.split_once(", found ").unwrap();
        let known: Vec<String> = known
            .split(", ")
            .map(|name| name.replace('"', "`"))
            .collect();
        let known = known.join(", ");
        assert!(
            page.replace('\n', " ").contains(&known),
            "{PAGE} lacks: {known}"
        );
    }
}

#[test]
fn lying_tensors_are_refused_by_name() {
    let lacks = Change {
        without: vec!["blk.1.attn_k.weight"],
        ..Change::default()
    };
    assert_eq!(
        refusal("mistral-f32", &lacks),
        "blk.1.attn_k.weight: expected 10 x 20 elements, found no such tensor"
    );
    let has_more = Change {
        with: vec![("blk.2.attn_sub_norm.weight", vec![20])],
        ..Change::default()
    };
    assert_eq!(
        refusal("mistral-f32", &has_more),
        "blk.2.attn_sub_norm.weight: expected no such tensor: it may change results, and nothing \
         here handles it, found one"
    );
    let other_shape = Change {
        without: vec!["blk.0.ffn_up_exps.weight"],
        with: vec![("blk.0.ffn_up_exps.weight", vec![3, 12, 16])],
        ..Change::default()
    };
    assert_eq!(
        refusal("mixtral-f16", &other_shape),
        "blk.0.ffn_up_exps.weight: expected 48 x 16 elements, found 36 x 16"
    );
    assert_eq!(
        refusal("mistral-f32", &key("llama.attention.head_count", 4u32)),
        "blk.0.attn_output.weight: expected 20 x 40 elements, found 20 x 30"
    );
}

#[test]
fn heads_of_one_element_are_refused() {
    let key_of = |name: &'static str| (name, Some(MetadataValue::U32(1)));
    let narrow = Change {
        keys: [
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.rope.dimension_count",
        ]
        .map(key_of)
        .to_vec(),
        ..Change::default()
    };
    let said = refusal("mistral-f32", &narrow);
    assert!(said.contains("head"), "{said}");
}

#[test]
fn files_that_are_no_models_are_refused() {
    let weights = crate::folders::path("plain").join("model.safetensors");
    let said = Folder::open(&weights).unwrap_err().to_string();
    assert!(said.contains("model.safetensors: "), "{said}");
    assert!(said.contains("GGUF"), "{said}");

    let cut = tempfile::NamedTempFile::new().unwrap();
    let mut bytes = Vec::new();
    let file = fs::File::open(path("mistral-f32")).unwrap();
    file.take(60_000).read_to_end(&mut bytes).unwrap();
    fs::write(cut.path(), bytes).unwrap();
    let said = Folder::open(cut.path()).unwrap_err().to_string();
    assert!(
        said.starts_with(&format!("{}: ", cut.path().display())),
        "{said}"
    );
}

#[test]
fn weights_for_a_server_come_from_a_file_of_its_model() {
    let used = path("llama3-bf16");
    let same = changed("llama3-bf16", &Change::default());
    assert_eq!(exchange(&used, same.path()), None);
    let other = changed(
        "llama3-bf16",
        &key("llama.attention.layer_norm_rms_epsilon", 0.5f32),
    );
    let said = exchange(&used, other.path()).unwrap();
    let right = "rms_norm_eps: expected 0.00001, as in the model in use, found 0.5";
    assert_eq!(said, format!("{}: {right}", other.path().display()));
}

#[test]
fn folder_of_files_alone_says_to_name_one() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("model-q8_0.gguf");
    fs::write(&file, "").unwrap();
    let said = Folder::open(place.path()).unwrap_err().to_string();
    let hint = format!("name one of its GGUF files, such as {}", file.display());
    assert!(
        said.contains("config.json: ") && said.ends_with(&hint),
        "{said}"
    );

    fs::copy(
        crate::folders::path("plain").join("config.json"),
        place.path().join("config.json"),
    )
    .unwrap();
    let said = Folder::open(place.path()).unwrap_err().to_string();
    assert!(
        said.contains("model.safetensors") && said.ends_with(&hint),
        "{said}"
    );
}

#[test]
fn values_that_are_not_finite_fail_with_the_tensors_name() {
    let place = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    fs::copy(path("mistral-f32"), place.path()).unwrap();
    let opened = GgufFile::open(place.path()).unwrap();
    let at = opened
        .tensor_bytes("blk.0.attn_k.weight")
        .unwrap()
        .range
        .start;
    let file = fs::File::options().write(true).open(place.path()).unwrap();
    file.write_all_at(&f32::NAN.to_le_bytes(), at).unwrap();

    let folder = Folder::open(place.path()).unwrap();
    let said = simulate(1, 1, |p, meshes| {
        let mut generator = Stages::new(&folder, 1, 4)?.generator(p, meshes, false)?;
        let found = generator.generate(p, &[5], &Sampling::default(), 1, |_, _| Ok(false));
        p.forgive_failures();
        Ok(Some(found.unwrap_err().to_string()))
    });
    let right = format!(
        "{}: blk.0.attn_k.weight: expected finite values, found NaN",
        place.path().display()
    );
    assert!(said.contains(&right), "{said}");
}

#[test]
fn factors_that_follow_no_rule_are_divisors_of_the_frequencies() {
    let own = Change {
        without: vec!["rope_freqs.weight"],
        with: vec![("rope_freqs.weight", vec![8])],
        ..Change::default()
    };
    // All are 1, as without a scaling.
    let same = Folder::open(changed("llama3-bf16", &own).path()).unwrap();
    let none = Change {
        without: vec!["rope_freqs.weight"],
        ..Change::default()
    };
    let none = Folder::open(changed("llama3-bf16", &none).path()).unwrap();
    let frequencies = |folder: &Folder| folder.config().ropes[0].frequencies(100);
    assert_eq!(frequencies(&same), frequencies(&none));
    let scaled = frequencies(&open("llama3-bf16"));
    assert_ne!(frequencies(&none), scaled);

    // Divisors of no rule: those of Llama 3, in the other order.
    let moved = Change {
        renamed: vec![("rope_freqs.weight", "rope_factors_short.weight")],
        with: vec![("rope_factors_long.weight", vec![8])],
        ..Change::default()
    };
    let moved = Folder::open(changed("llama3-bf16", &moved).path()).unwrap();
    let short = moved.config().ropes[0].frequencies(100);
    let close = short
        .iter()
        .zip(&scaled)
        .all(|(a, b)| (a - b).abs() <= b * 1e-6);
    assert!(close, "{short:?} {scaled:?}");
    assert_eq!(
        moved.config().ropes[0].frequencies(2000),
        frequencies(&none)
    );
}

#[test]
fn page_about_files_has_all_architectures_and_types() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = fs::read_to_string(page).unwrap();
    let said = refusal("mistral-f32", &key("general.architecture", "none"));
    let known = said
        .strip_prefix("general.architecture: expected ")
        .unwrap();
    let (known, _) = known.split_once(", found").unwrap();
    let mut files: Vec<(String, &str)> = Vec::new();
    for file in fs::read_dir(path("x").parent().unwrap()).unwrap() {
        let file = file.unwrap().path();
        let name = GgufFile::open(&file).unwrap();
        let name = name
            .metadata()
            .text("general.architecture")
            .unwrap()
            .to_owned();
        files.push((name, Folder::open(&file).unwrap().config().family));
    }
    for name in known.split(", ").map(|name| name.trim_matches('"')) {
        let mut families: Vec<&str> = files
            .iter()
            .filter(|(architecture, _)| architecture == name)
            .map(|(_, family)| *family)
            .collect();
        families.sort_unstable();
        families.dedup();
        assert!(!families.is_empty(), "{name} has no file");
        let row = format!("| `{name}` | `{}` |", families.join("`, `"));
        assert!(page.contains(&row), "{PAGE} lacks this row: {row}");
    }
    for block in BlockType::ALL {
        let bits = block.bytes() as f64 * 8.0 / block.elements() as f64;
        let row = format!("| `{}` | {bits} |", block.name());
        assert!(page.contains(&row), "{PAGE} lacks this row: {row}");
    }
}
