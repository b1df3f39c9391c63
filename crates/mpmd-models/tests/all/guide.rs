//! The guide's table of families says what the folders have, and its page on adding one shows code
//! of the repository.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use mpmd::aval::DType;
use mpmd::candle::nn::Activation;
use mpmd_models::{Folder, HeadNorm, NormKind};

use crate::folders::{ALL, change_config, copy, open};

const HEAD: &str = "\
| family | folder | heads × size / width | positions | window | norms; MLP | besides |
|---|---|---|---|---|---|---|
";

/// Returns the row of the guide's table of families for a folder.
#[expect(clippy::too_many_lines, reason = "a paragraph for each column")]
fn row(name: &str, folder: &Folder) -> String {
    let config = folder.config();
    let (heads, groups) = (config.num_attention_heads, config.num_key_value_heads);
    let heads = match heads == groups {
        true => heads.to_string(),
        false => format!("{heads} ({groups} for keys)"),
    };
    let heads = format!("{heads} × {} / {}", config.head_dim, config.hidden_size);
    let ropes = config.ropes.iter().map(|rope| {
        let kind = format!("{:?}", rope.scaling).to_lowercase();
        let kind = kind.split(' ').next().unwrap_or_default().to_owned();
        if rope.dim == config.head_dim {
            kind
        } else {
            format!("{kind}, {} rotate", rope.dim)
        }
    });
    let ropes: Vec<String> = ropes.collect();
    let positions = if config.learned_positions {
        "learned".to_owned()
    } else {
        ropes.join("; ")
    };
    let windows: Vec<usize> = config
        .layers
        .iter()
        .filter_map(|layer| layer.window)
        .collect();
    let window = windows.first().map_or_else(String::new, |window| {
        format!(
            "{window} in {} of {} layers",
            windows.len(),
            config.layers.len()
        )
    });
    let norm = match config.norm {
        NormKind::Rms => "RMS",
        NormKind::RmsPlusOne => "RMS with 1 + weight",
        NormKind::Layer => "layer norm",
    };
    let place = match config.norm_names.map(|name| name.is_some()) {
        [true, true, ..] => "before and after",
        [true, false, ..] => "before",
        _ => "after",
    };
    let activation = match config.activation {
        Activation::Silu => "SiLU",
        Activation::Gelu => "GELU",
        _ => "tanh-GELU",
    };
    let gate = if config.is_gated { "gated " } else { "" };
    let biases = [
        (config.qkv_bias, "q k v"),
        (config.out_bias, "o"),
        (config.mlp_bias, "MLP"),
    ];
    let biases: Vec<&str> = biases
        .iter()
        .filter(|(has, _)| *has)
        .map(|(_, of)| *of)
        .collect();
    let head_norm = match config.head_norm {
        None => "",
        Some(HeadNorm::Head) => "norms of each head",
        Some(HeadNorm::EachHead) => "norms of each head, with weights of its own",
        Some(HeadNorm::Width) => "norms of all heads",
    };
    let experts = config.experts.map_or_else(String::new, |experts| {
        let layers = config
            .layers
            .iter()
            .filter(|layer| layer.has_experts)
            .count();
        let (taken, count, all) = (experts.per_token, experts.count, config.layers.len());
        let shared = if experts.shared.is_some() {
            " and a shared one"
        } else {
            ""
        };
        format!("{taken} of {count} experts{shared} in {layers} of {all} layers")
    });
    let usual = (config.head_dim as f64).sqrt();
    let factors = [
        (config.embedding_scale != 1.0, "embedding"),
        (
            config
                .layers
                .iter()
                .any(|layer| (layer.scale * usual - 1.0).abs() > 1e-9),
            "scores",
        ),
        (config.residual_scale != 1.0, "residuals"),
        (config.logits_divisor != 1.0, "logits"),
    ];
    let factors: Vec<&str> = factors
        .iter()
        .filter(|(has, _)| *has)
        .map(|(_, of)| *of)
        .collect();
    let caps = [(config.score_cap, "scores"), (config.logits_cap, "logits")];
    let caps: Vec<&str> = caps
        .iter()
        .filter(|(cap, _)| cap.is_some())
        .map(|(_, of)| *of)
        .collect();
    let list = |what: &str, of: &[&str]| match of {
        [] => String::new(),
        of => format!("{what} of {}", of.join(", ")),
    };
    let is = |is: bool, what: &str| if is { what.to_owned() } else { String::new() };
    let besides = [
        list("biases", &biases),
        head_norm.to_owned(),
        experts,
        list("factors", &factors),
        list("caps", &caps),
        is(config.is_parallel, "attention beside the MLP"),
        is(config.tie_word_embeddings, "tied output"),
        is(
            folder
                .tensors()
                .all(|(_, aval)| aval.dtype() == DType::Bf16),
            "bf16",
        ),
        is(folder.split().is_some(), "several files"),
    ];
    let besides: Vec<String> = besides
        .into_iter()
        .filter(|what| !what.is_empty())
        .collect();
    let (family, besides) = (config.family, besides.join("; "));
    format!(
        "| `{family}` | `{name}` | {heads} | {positions} | {window} | {norm} {place}; \
         {gate}{activation} | {besides} |"
    )
}

#[test]
fn table_of_families_is_that_of_the_folders() {
    let mut table = HEAD.to_owned();
    let mut families = Vec::new();
    for name in ALL {
        let folder = open(name);
        families.push(folder.config().family);
        writeln!(table, "{}", row(name, &folder)).unwrap();
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/families.md");
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains(&table),
        "docs/guide/families.md lacks this table:\n{table}"
    );
    let folder = copy("plain");
    change_config(folder.path(), |config| config["model_type"] = "none".into());
    let said = Folder::open(folder.path()).unwrap_err().to_string();
    let known = said
        .split("expected ")
        .nth(1)
        .unwrap()
        .split(", found")
        .next()
        .unwrap();
    for family in known.split(", ").map(|name| name.trim_matches('"')) {
        let folders = families.iter().filter(|name| **name == family).count();
        assert!(folders >= 2, "{family} has {folders} folders");
    }
}

#[test]
fn page_add_a_family_has_the_code_of_its_example() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file| fs::read_to_string(folder.join(file)).unwrap();
    let page = read("../../docs/guide/add-a-family.md");
    let mut parts = 0;
    for block in page.split("```").skip(1).step_by(2) {
        let (kind, code) = block.split_once('\n').unwrap();
        let file = match kind {
            "text" => "src/family/stablelm.rs",
            "python" => "tests/make_folders.py",
            _ => continue,
        };
        for part in code.split("    …\n") {
            assert!(
                read(file).contains(part),
                "{file} lacks this part of the page:\n{part}"
            );
            parts += 1;
        }
    }
    assert_eq!(parts, 4);
}
