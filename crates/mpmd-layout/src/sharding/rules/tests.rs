//! Tests the ops on leaves with shardings known from the Python original.

use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::*;
use crate::aval::{DType, bf16s, f32s, i32s};
use crate::sharding::{Spec, SpecEntry};
use crate::spec;
use crate::topology::DeviceId;

fn mesh(axes: &[(&str, usize)]) -> Mesh {
    let count = axes.iter().map(|(_, size)| *size as u32).product();
    Mesh::new(axes, (0..count).map(DeviceId).collect()).unwrap()
}

fn d8() -> Mesh {
    mesh(&[("data", 8)])
}

fn m() -> Mesh {
    mesh(&[("replica", 2), ("fsdp", 4)])
}

fn run(
    mesh: &Mesh,
    rules: &[(&str, &str)],
    leaves: &[(&str, ShapedArray)],
    logical: LogicalAxes,
) -> Result<Vec<Spec>, RulesError> {
    let strategy = Strategy::parse(rules, &Registry::default())?.with_logical(logical);
    let leaves: Vec<_> = leaves
        .iter()
        .map(|(name, aval)| ((*name).to_owned(), aval.clone()))
        .collect();
    let inferred = infer(&leaves, &strategy, mesh)?;
    let found: Vec<String> = inferred
        .leaves()
        .iter()
        .map(|leaf| leaf.name.clone())
        .collect();
    assert_eq!(
        found,
        leaves.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    );
    Ok(inferred
        .leaves()
        .iter()
        .map(|leaf| leaf.spec.clone())
        .collect())
}

fn one(mesh: &Mesh, aval: ShapedArray, tactic: &str) -> Result<Spec, RulesError> {
    run(
        mesh,
        &[("k", tactic)],
        &[("k", aval)],
        LogicalAxes::default(),
    )
    .map(|specs| specs[0].clone())
}

/// Returns the spec that `tactic` gives to a single leaf, as text. Panics if the tactic fails.
fn of(mesh: &Mesh, aval: ShapedArray, tactic: &str) -> String {
    one(mesh, aval, tactic)
        .unwrap_or_else(|error| panic!("{error}"))
        .to_string()
}

fn error(mesh: &Mesh, aval: ShapedArray, tactic: &str) -> (&'static str, String) {
    let error = one(mesh, aval, tactic).expect_err(tactic);
    (error.kind().name(), error.to_string())
}

#[test]
fn fsdp_takes_the_largest_dimension_that_fits() {
    let fsdp = |aval| of(&d8(), aval, r#"fsdp("data")"#);
    assert_eq!(fsdp(f32s([1024, 4096])), "P(None, data)");
    assert_eq!(
        fsdp(f32s([2048, 2048])),
        "P(None, data)",
        "of equal ones the last"
    );
    assert_eq!(fsdp(f32s([16, 512, 512])), "P(None, None, data)");
    assert_eq!(
        fsdp(f32s([1024, 1024])),
        "P(None, None)",
        "exactly 4 MiB are too few"
    );
    assert_eq!(fsdp(f32s([1024, 1025])), "P(data, None)");
    assert_eq!(fsdp(bf16s([1024, 2048])), "P(None, None)");
    assert_eq!(fsdp(bf16s([1024, 2056])), "P(None, data)");
    assert_eq!(fsdp(f32s([4097, 1024])), "P(None, data)");
    assert_eq!(fsdp(f32s([4097, 1023])), "P(None, None)");
    let all = |aval| of(&d8(), aval, r#"fsdp("data",0)"#);
    assert_eq!(
        [all(f32s([8])), all(f32s([])), all(f32s([0, 8]))],
        ["P(data)", "P()", "P(None, None)"]
    );
    assert_eq!(
        of(&d8(), f32s([1024, 256]), r#"fsdp("data",0.5)"#),
        "P(data, None)"
    );
    let both = r#"fsdp(["replica","fsdp"])"#;
    assert_eq!(
        of(&m(), f32s([3, 3, 1024, 1024]), both),
        "P(None, None, None, (replica, fsdp))"
    );
}

#[test]
fn ops_are_applied_from_left_to_right() {
    let w = || f32s([4096, 1024]);
    assert_eq!(
        of(&m(), w(), r#"shard_dim("replica",0)|fsdp("fsdp")"#),
        "P(replica, fsdp)"
    );
    assert_eq!(
        error(&m(), w(), r#"fsdp("fsdp")|shard_dim("replica",0)"#),
        (
            "ValueError",
            concat!(
                r#"leaf `k`, f32[4096,1024] with spec P(fsdp, None): `shard_dim("replica",0)` "#,
                r#"of rule 0 (pattern "k"): dimension 0 is divided over fsdp already"#
            )
            .to_owned()
        )
    );
    let (kind, message) = error(&m(), w(), r#"fsdp("fsdp")|replicate"#);
    assert!(
        kind == "ValueError" && message.contains("inconsistent"),
        "{message}"
    );
    assert_eq!(
        of(&m(), w(), r#"replicate()| fsdp("fsdp") "#),
        "P(fsdp, None)"
    );
    // The original does not find the op ` replicate`. Here blanks are harmless, so it runs.
    assert_eq!(error(&m(), w(), r#"fsdp("fsdp") | replicate"#).1, message);
    // `ignore_ndim_error` affects only missing dimensions.
    assert!(one(&m(), w(), r#"fsdp("fsdp")|shard_dim("replica",0,True)"#).is_err());
}

#[test]
fn double_and_unknown_axes_are_found_at_the_end() {
    assert_eq!(
        error(&m(), f32s([4096, 4096]), r#"fsdp("fsdp")|fsdp(["fsdp"])"#),
        (
            "DuplicateSpecError",
            concat!(
                "leaf `k`: P(fsdp, fsdp) uses axis `fsdp` twice, ",
                r#"by `fsdp("fsdp")` and by `fsdp(["fsdp"])`"#
            )
            .to_owned()
        )
    );
    assert_eq!(
        error(&m(), f32s([16]), r#"fsdp(["fsdp","fsdp"],0)"#).0,
        "DuplicateSpecError"
    );
    assert_eq!(
        error(&m(), f32s([4, 4]), r#"shard_dim("nope",1)"#),
        (
            "ValueError",
            concat!(
                r#"leaf `k`: P(None, nope) names axis `nope` (by `shard_dim("nope",1)`), "#,
                "but the mesh is {replica:2, fsdp:4} devices [0, 1, 2, 3, 4, 5, 6, 7]"
            )
            .to_owned()
        )
    );
}

#[test]
fn first_matching_rule_applies_to_each_leaf() {
    let w = || f32s([4096, 1024]);
    let rules = [
        (".*/x", r#"shard_dim("fsdp",1)"#),
        ("b/.*", r#"shard_dim("replica",0)"#),
    ];
    let leaves = [("a/b", w()), ("a/x", w()), ("b/x", w()), ("b/y", w())];
    let specs = run(&m(), &rules, &leaves, LogicalAxes::default()).unwrap();
    let x = spec![None, "fsdp"];
    assert_eq!(
        specs,
        [spec![None, None], x.clone(), x, spec!["replica", None]]
    );

    let rules = [
        (".*FREEZE_ME.*", "replicate"),
        (".*", r#"fsdp(axis="fsdp")"#),
    ];
    let leaves = [
        ("params/FREEZE_ME/w", w()),
        ("params/w", w()),
        ("opt/0/mu", w()),
        ("opt/1", i32s([])),
    ];
    let specs = run(&m(), &rules, &leaves, LogicalAxes::default()).unwrap();
    assert_eq!(
        specs,
        [
            spec![None, None],
            spec!["fsdp", None],
            spec!["fsdp", None],
            spec![]
        ]
    );

    let kern = run(
        &m(),
        &[("kern", r#"fsdp("fsdp")"#)],
        &[("kernel", w())],
        LogicalAxes::default(),
    );
    assert_eq!(kern.unwrap(), [spec![None, None]], "the whole name");
}

#[test]
fn shard_dim_counts_from_either_end() {
    let dim =
        |shape: &[usize], dim: &str| of(&m(), f32s(shape), &format!(r#"shard_dim("fsdp",{dim})"#));
    assert_eq!(dim(&[16, 32], "-1"), "P(None, fsdp)");
    assert_eq!(dim(&[16, 32, 8], "-2"), "P(None, fsdp, None)");
    assert_eq!(dim(&[16, 32, 4], "1,True"), "P(None, fsdp, None)");
    assert_eq!(dim(&[32], "1,True"), "P(None)");
    assert_eq!(
        dim(&[15, 32], "0"),
        "P(fsdp, None)",
        "whether or not it divides evenly"
    );
    for dim in ["-2", "2", "-9223372036854775807"] {
        let (kind, message) = error(&m(), f32s([16, 32]), &format!(r#"shard_dim("fsdp",{dim})"#));
        assert_eq!(kind, "ValueError");
        assert!(
            message.ends_with(&format!(
                "dimension {dim} is out of range: its absolute value \
            must be below 2, the number of dimensions"
            )),
            "{message}"
        );
    }
    assert_eq!(
        error(&m(), f32s([]), r#"shard_dim("fsdp",0)"#).0,
        "ValueError"
    );
}

#[test]
fn fsdp_unknown_axis_fails_only_for_matching_leaves() {
    let (kind, message) = error(&m(), f32s([2]), r#"fsdp("nope")"#);
    assert_eq!(kind, "KeyError");
    let mesh = "{replica:2, fsdp:4} devices [0, 1, 2, 3, 4, 5, 6, 7]";
    assert!(
        message.ends_with(&format!("there is no axis `nope` in the mesh {mesh}")),
        "{message}"
    );
    let rules = [("x", r#"fsdp("nope")"#)];
    assert_eq!(
        run(&m(), &rules, &[("k", f32s([2]))], LogicalAxes::default()).unwrap(),
        [spec![None]]
    );
}

#[test]
fn wrong_strategies_have_the_originals_error_class() {
    let kind = |pattern, tactic| {
        let leaves = [("k", f32s([2]))];
        run(&m(), &[(pattern, tactic)], &leaves, LogicalAxes::default())
            .unwrap_err()
            .kind()
            .name()
    };
    assert_eq!(kind("k", "replicate|"), "SyntaxError");
    assert_eq!(kind("k", "fsdp(axis=data)"), "ValueError");
    assert_eq!(kind("k", "fsdp"), "TypeError");
    assert_eq!(kind("/k", "replicate"), "AssertionError");
    assert_eq!(kind("x", "nope"), "KeyError");
    let none = run(&m(), &[("k", "replicate")], &[], LogicalAxes::default()).unwrap_err();
    assert!(matches!(&none, RulesError::NoLeaves) && none.kind() == ErrorKind::Value);
}

#[test]
fn replicate_over_axes_binds_earlier_and_later_ops() {
    let w = || f32s([4096, 1024]);
    assert_eq!(
        of(&m(), w(), r#"replicate("replica")|fsdp("fsdp")"#),
        "P(fsdp, None)"
    );
    assert_eq!(
        of(&m(), w(), r#"fsdp("fsdp")|replicate(["replica"])"#),
        "P(fsdp, None)"
    );
    let (kind, message) = error(
        &m(),
        w(),
        r#"replicate(axes="fsdp")|fsdp(["replica", "fsdp"])"#,
    );
    assert_eq!(kind, "ValueError");
    let expected = concat!(
        r#"`fsdp(["replica", "fsdp"])` of rule 0 (pattern "k"): it divides over axis `fsdp`, "#,
        r#"but `replicate(axes="fsdp")` keeps the leaf whole along it"#
    );
    assert!(message.ends_with(expected), "{message}");
    let (kind, message) = error(&m(), w(), r#"fsdp("fsdp")|replicate("fsdp")"#);
    assert_eq!(kind, "ValueError");
    let expected = concat!(
        r#"`replicate("fsdp")` of rule 0 (pattern "k"): it keeps the leaf whole along axis "#,
        r#"`fsdp`, but `fsdp("fsdp")` divides over it"#
    );
    assert!(message.ends_with(expected), "{message}");
    assert_eq!(error(&m(), w(), r#"replicate("nope")"#).0, "KeyError");
}

#[test]
fn logical_names_become_axes() {
    let logical = LogicalAxes::default()
        .leaf("boxed", &[Some("embed"), Some("mlp")])
        .rule("embed", &["fsdp"])
        .rule("mlp", &["replica"])
        .rule("embed", &["replica"]);
    let leaves = [("boxed", f32s([16, 32])), ("plain", f32s([16, 32]))];
    let tactic = |tactic| run(&m(), &[(".*", tactic)], &leaves, logical.clone());
    assert_eq!(
        tactic("logical_partitioning()").unwrap(),
        [spec!["fsdp", "replica"], spec![None, None]]
    );
    let after = tactic("shard_dim('replica', 0)|logical_partitioning").unwrap();
    assert_eq!(
        after,
        [spec!["replica", None], spec!["replica", None]],
        "divided dimensions stay divided"
    );
    let whole = tactic("replicate('fsdp')|logical_partitioning()")
        .unwrap_err()
        .to_string();
    assert!(
        whole.contains("leaf `boxed`") && whole.contains("axis `fsdp`"),
        "{whole}"
    );
    let twice = logical
        .clone()
        .leaf("plain", &[Some("embed"), Some("embed")]);
    let twice = run(&m(), &[(".*", "logical_partitioning()")], &leaves, twice).unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::Value);
    assert!(twice.to_string().contains("leaf `plain`"), "{twice}");
}

#[test]
fn user_ops_see_the_leaf_and_refuse_with_a_reason() {
    let mut registry = Registry::default();
    // No type is written: plain closures are enough.
    let registered = registry.register(
        "my.matrices",
        |call| {
            let [axis] = call.bind(["axis"])?;
            axis.and_then(Literal::axes)
                .ok_or_else(|| ArgumentError("needs an axis".into()))
        },
        |axes, leaf| match leaf.aval().ndim() {
            2 => leaf.shard(1, axes),
            ndim => Err(OpError::Refused(format!(
                "{} has {ndim} dimensions, not 2",
                leaf.name()
            ))),
        },
    );
    registered.unwrap();
    let strategy = Strategy::parse(&[(".*", "my.matrices('fsdp')")], &registry).unwrap();
    let tree = vec![f32s([4, 4]), f32s([8, 8])];
    let shardings: Vec<Sharding> = infer_sharding(&tree, &strategy, &m()).unwrap();
    assert!(
        shardings
            .iter()
            .all(|sharding| sharding.spec() == Some(&spec![None, "fsdp"]))
    );
    let error = infer_sharding(&vec![f32s([4, 4]), f32s([4])], &strategy, &m()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "leaf `1`, f32[4] with spec P(None): `my.matrices('fsdp')` of rule 0 (pattern \".*\"): \
         1 has 1 dimensions, not 2"
    );
}

#[test]
fn names_are_the_paths_of_a_tree() {
    let tree = (f32s([8]), vec![f32s([8, 8]), f32s([])]);
    let rules = [
        ("0", "shard_dim('data', 0)"),
        ("1/0", "shard_dim('data', 1)"),
    ];
    let strategy = Strategy::parse(&rules, &Registry::default()).unwrap();
    let (first, rest): (Sharding, Vec<Sharding>) = infer_sharding(&tree, &strategy, &d8()).unwrap();
    assert_eq!(first.spec(), Some(&spec!["data"]));
    assert_eq!(rest[0].spec(), Some(&spec![None, "data"]));
    assert_eq!(rest[1].spec(), Some(&spec![]));
    let root = infer_sharding(&f32s([8]), &strategy, &d8()).unwrap();
    assert_eq!(
        root.spec(),
        Some(&spec![None]),
        "a tree that is a leaf has the empty name"
    );
}

proptest! {
    #[test]
    fn fsdp_divides_the_largest_evenly_divisible_dimension(
        shape in prop::collection::vec(0usize..200, 0..5),
        sizes in (1usize..5, 1usize..5),
        both in any::<bool>(),
        small in 0usize..3,
    ) {
        let mesh = mesh(&[("a", sizes.0), ("b", sizes.1)]);
        let axes = if both { "['a', 'b']" } else { "'b'" };
        let parts = if both { sizes.0 * sizes.1 } else { sizes.1 };
        let mebibytes = small as f64 / 8.0;
        let aval = f32s(&shape);
        let spec = one(&mesh, aval.clone(), &format!("fsdp({axes}, {mebibytes})")).unwrap();
        prop_assert!(mesh.sharding(spec.clone()).layout(&shape).is_ok());
        let divided: Vec<usize> =
            (0..shape.len()).filter(|dim| spec.entries()[*dim] != SpecEntry::None).collect();
        let fitting = (0..shape.len()).filter(|dim| shape[*dim].is_multiple_of(parts));
        let best = fitting.max_by_key(|dim| (shape[*dim], *dim));
        let expected = best.filter(|_| aval.bytes() as f64 > mebibytes * 1048576.0);
        prop_assert_eq!(divided, expected.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn table_lists_leaves_with_very_long_names() {
    let leaves = [("x".repeat(70_000), f32s([4])), ("y".to_owned(), f32s([4]))];
    let strategy = Strategy::parse(&[("y", "replicate")], &Registry::default()).unwrap();
    let table = infer(&leaves, &strategy, &m()).unwrap().to_string();
    let lengths: Vec<usize> = table.lines().map(str::len).collect();
    assert!(lengths[1] > 70_000 && lengths[2] < 300, "{lengths:?}");
}

#[test]
fn fuzz_tactics() {
    let samples = [
        "fsdp(axis=[\"replica\", 'fsdp'], min_size_to_shard_mb=-1.5e0) | replicate",
        "shard_dim('fsdp', -1, ignore_ndim_error=True)|logical_partitioning()|replicate((\"a\",))",
        "my.op({'a': [1, 0x1F, None], \"\\u00e9\": {1, 2}}, (), 1_000, x=0b11)",
    ];
    let samples = samples.map(|text| text.as_bytes().to_vec());
    mpmd_fuzz::bytes("tactics", &samples, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        match OpCall::parse_tactic(&text) {
            Ok(calls) => {
                for call in calls {
                    assert_eq!(OpCall::parse_tactic(call.text()).unwrap(), [call]);
                }
            }
            Err(error) => assert!(error.column <= text.chars().count() + 1),
        }
    });
}

#[test]
fn fuzz_strategies() {
    let mesh = m();
    let shapes: [&[usize]; 5] = [&[], &[8], &[4096, 1024], &[3, 0], &[usize::MAX / 8, 2]];
    let leaf = |shape: &&[usize]| {
        (
            format!("a/w{}", shape.len()),
            ShapedArray::try_new(shape, DType::U8).unwrap(),
        )
    };
    let leaves: Vec<_> = shapes.iter().map(leaf).collect();
    let logical = LogicalAxes::default()
        .leaf("a/w1", &[Some("embed")])
        .rule("embed", &["fsdp", "fsdp"]);
    let samples = [
        "a/w[0-2]\nfsdp(axis=[\"replica\", \"fsdp\"], min_size_to_shard_mb=0)",
        "(?!b).*/w\\d\nshard_dim(\"fsdp\", -1, ignore_ndim_error=True)|logical_partitioning()",
        "a{1,3}/(w)(\\d)?.{0,9}\nreplicate(\"fsdp\")|shard_dim(\"replica\", 0)",
    ];
    let samples = samples.map(|text| text.as_bytes().to_vec());
    let registry = Registry::default();
    mpmd_fuzz::bytes("strategies", &samples, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let lines: Vec<&str> = text.split('\n').collect();
        // Patterns take most of the time, so every second input uses a fixed one.
        let pattern = |pattern| if bytes.len() % 2 == 0 { pattern } else { "a.*" };
        let rules: Vec<(&str, &str)> = lines
            .chunks_exact(2)
            .map(|pair| (pattern(pair[0]), pair[1]))
            .collect();
        match Strategy::parse(&rules, &registry) {
            Ok(strategy) => match infer(&leaves, &strategy.with_logical(logical.clone()), &mesh) {
                Ok(inferred) => drop((inferred.to_string(), inferred.within(1 << 20))),
                Err(error) => drop(error.to_string()),
            },
            Err(error) => drop(error.to_string()),
        }
    });
}

#[test]
fn state_follows_its_parameter_or_its_parameters_name() {
    let rules = [
        ("params/a/.*", "fsdp('data')"),
        ("params/b", "logical_partitioning()"),
    ];
    let strategy = Strategy::parse(&rules, &Registry::default()).unwrap();
    let logical = LogicalAxes::default()
        .pattern("params/b", &[Some("rows"), None])
        .unwrap()
        .rule("rows", &["data"]);
    let strategy = strategy
        .with_logical(logical)
        .with_state("opt/mean", "params");
    let leaves = [
        // In `bf16` it would be too small to be divided by itself.
        ("opt/mean/a/w", bf16s([1024, 2048])),
        ("params/a/w", f32s([1024, 2048])),
        // Of another shape than its parameter: by the rule for the name.
        ("opt/mean/a/v", f32s([4096, 1024])),
        ("params/a/v", f32s([1024])),
        // Without a parameter.
        ("opt/mean/b", f32s([16, 3])),
        // No state: the branch has another name.
        ("opt/means/a/w", f32s([4096, 1024])),
    ];
    let leaves = leaves.map(|(name, aval)| (name.to_owned(), aval));
    let inferred = infer(&leaves, &strategy, &d8()).unwrap();
    let found: Vec<_> = inferred
        .leaves()
        .iter()
        .map(|leaf| (leaf.spec.to_string(), leaf.rule))
        .collect();
    let expected = [
        ("P(None, data)", Some(0)),
        ("P(None, data)", Some(0)),
        ("P(data, None)", Some(0)),
        ("P(None)", Some(0)),
        ("P(data, None)", Some(1)),
        ("P(None, None)", None),
    ];
    assert_eq!(found, expected.map(|(spec, rule)| (spec.to_owned(), rule)));
}

#[test]
fn state_of_parameters_at_the_root_has_their_names() {
    let strategy = Strategy::parse(&[("w", "shard_dim('data', 0)")], &Registry::default());
    let strategy = strategy.unwrap().with_state("square", "");
    let leaves = [
        ("w", f32s([8])),
        ("square/w", f32s([8])),
        ("square", f32s([8])),
    ];
    let leaves = leaves.map(|(name, aval)| (name.to_owned(), aval));
    let inferred = infer(&leaves, &strategy, &d8()).unwrap();
    let specs: Vec<_> = inferred
        .leaves()
        .iter()
        .map(|leaf| leaf.spec.to_string())
        .collect();
    assert_eq!(specs, ["P(data)", "P(data)", "P(None)"]);
}

#[test]
fn notes_are_events_with_level_leaf_rule_and_shape() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let rules = [
            ("odd", "fsdp('data')"),
            ("scalar", "shard_dim('data', 1, ignore_ndim_error=True)"),
            (".*", "shard_dim('data', 0)"),
        ];
        let leaves = [
            ("odd", f32s([2049, 1023])),
            ("short", f32s([15, 2])),
            ("even", f32s([8])),
            ("scalar", f32s([])),
        ];
        run(&d8(), &rules, &leaves, LogicalAxes::default()).unwrap();
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    for (line, expected) in lines.iter().zip([
        [
            "INFO",
            "`fsdp('data')` fits no dimension: none that is still whole divides evenly by 8 (data)",
            "leaf=odd",
            "f32[2049,1023]",
            "rule=\"odd\"",
        ],
        [
            "INFO",
            "dimension 0 of 15 does not divide evenly by 8 (data)",
            "leaf=short",
            "f32[15,2]",
            "rule=\".*\"",
        ],
        [
            "WARN",
            "ignore_ndim_error=True)` does nothing: the leaf has 0 dimensions",
            "leaf=scalar",
            "f32[]",
            "rule=\"scalar\"",
        ],
    ]) {
        expected
            .iter()
            .for_each(|part| assert!(line.contains(part), "{part} in {line}"));
    }
}

/// Takes the text of events.
#[derive(Clone, Default)]
struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
