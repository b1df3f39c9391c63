//! Compiles all CUDA sources of the repository with NVIDIA's own compilers, which need no device.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use fancy_regex::Regex;
use mpmd_layout::aval::DType;

use super::*;
use crate::cuda::kernels;

/// The environment variable that names folders of NVRTC libraries, with colons in between.
const FOLDERS: &str = "MPMD_TEST_NVRTC";

/// The word by which CUDA code is found. Not written in one piece, as this is no CUDA code.
const KERNEL: &str = concat!("__glo", "bal__");

/// Folders whose texts are not compiled as they are: outputs, the driver in software with its
/// tests, and mpmd's own kernels, which are compiled as the sources that have them.
const SKIPPED: [&str; 3] = [
    "target",
    "tests/softcuda",
    "crates/mpmd-device/src/cuda/kernels",
];

/// CUDA code of the repository: (file and line, code).
type Code = (String, String);

/// Returns the CUDA code in the files below `folder` of the repository `root`.
fn code_below(root: &Path, folder: &Path, found: &mut Vec<Code>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let relative = path
            .strip_prefix(root)
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let is_hidden = relative
            .rsplit('/')
            .next()
            .is_some_and(|name| name.starts_with('.'));
        if is_hidden || SKIPPED.contains(&relative.as_str()) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            code_below(root, &path, found);
        } else if relative.ends_with(".cu") {
            found.push((relative, fs::read_to_string(path).unwrap()));
        } else if relative.ends_with(".rs") {
            let text = fs::read_to_string(path).unwrap();
            if text.contains(KERNEL) {
                found.extend(code_in(&relative, &text));
            }
        }
    }
}

/// Returns the CUDA code in the literals of a Rust file, also in the examples of its comments.
///
/// # Panics
///
/// If the file has CUDA code elsewhere than in raw literals or as the text of a `Source`.
fn code_in(file: &str, text: &str) -> Vec<Code> {
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let part = |of_comments: bool| {
        let lines = text.lines().map(|line| match is_comment(&line) {
            is if is != of_comments => "",
            true => line.trim_start().trim_start_matches(['/', '!']),
            false => line,
        });
        lines.collect::<Vec<_>>().join("\n")
    };
    let [program, comments] = [false, true].map(part);
    let found = literals(file, &program);
    let count = |text: &str| text.matches(KERNEL).count();
    let of_found: usize = found.iter().map(|(_, code)| count(code)).sum();
    assert_eq!(
        count(&program),
        of_found,
        "{file} has CUDA code in no literal: {found:?}"
    );
    found.into_iter().chain(literals(file, &comments)).collect()
}

fn literals(file: &str, text: &str) -> Vec<Code> {
    let raw = r##"r(#+)"(?<raw>(?s:.*?))"\1"##;
    let plain = r#"Source::cuda\(\s*"[^"]*",\s*"(?<plain>(?:[^"\\]|\\.)*)""#;
    let both = Regex::new(&format!("{raw}|{plain}")).unwrap();
    let all = both.captures_iter(text).map(|found| {
        let found = found.unwrap();
        let begin = found.get(0).unwrap().start();
        let place = format!("{file}:{}", text[..begin].lines().count().max(1));
        let code = match (found.name("raw"), found.name("plain")) {
            (Some(raw), _) => raw.as_str().to_owned(),
            (_, plain) => plain
                .unwrap()
                .as_str()
                .replace("\\\"", "\"")
                .replace("\\n", "\n"),
        };
        (place, code)
    });
    all.filter(|(_, code)| code.contains(KERNEL)).collect()
}

#[test]
fn cuda_code_is_found_in_literals_and_comments() {
    let text = "static A: Source = Source::cuda(\n\"a.cu\", r#\"GLOBAL a\"#);\n\
        /// Source::cuda(\"b.cu\", r##\"\n///  GLOBAL b\n///\"##)\n\
        Source::cuda(\"c.cu\", \"\\\"C\\\" GLOBAL c\\n\");"
        .replace("GLOBAL", KERNEL);
    let code: Vec<String> = code_in("f.rs", &text)
        .into_iter()
        .map(|(_, code)| code)
        .collect();
    let expected = ["GLOBAL a", "\"C\" GLOBAL c\n", "\n  GLOBAL b\n"];
    assert_eq!(code, expected.map(|code| code.replace("GLOBAL", KERNEL)));
}

#[test]
fn all_cuda_sources_compile_with_real_nvrtc() {
    let folders = std::env::var_os(FOLDERS).filter(|folders| !folders.is_empty());
    let Some(folders) = folders else {
        println!("SKIPPED: {FOLDERS} names no folders with NVRTC libraries");
        return;
    };
    for folder in std::env::split_paths(&folders) {
        let folder = folder.canonicalize().unwrap();
        // A toolkit that has only this NVRTC. NVRTC loads any driver that it finds, and a driver in
        // software ends it.
        let toolkit = tempfile::tempdir().unwrap();
        symlink(&folder, toolkit.path().join("lib64")).unwrap();
        let prepare = |command: &mut Command| {
            command
                .env(FOLDERS, &folder)
                .env("CUDA_HOME", toolkit.path());
            command
                .env_remove("LD_LIBRARY_PATH")
                .env_remove("CUDA_PATH");
        };
        match softcuda::anew!(prepare) {
            Some(output) => println!("{output}"),
            None => return compile_all(&folder),
        }
    }
}

fn compile_all(folder: &Path) {
    let version = super::super::driver::nvrtc().unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let file = folder.join("libnvrtc.so").display().to_string();
    assert!(
        maps.contains(&file),
        "the loader found another NVRTC first: {version}"
    );

    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = root.ancestors().nth(2).unwrap();
    let mut sources = Vec::new();
    code_below(root, root, &mut sources);
    assert!(sources.len() > 5, "{sources:?}");
    let mut sources: Vec<Source> = sources
        .into_iter()
        .map(|(place, code)| Source::cuda(place.leak(), code.leak()))
        .collect();
    sources.extend(own_sources().map(|source| Source::cuda(source.name(), source.text())));
    let architecture = Architecture::new(9, 0);
    let count = sources.len();
    for source in sources {
        for (form, exact) in [(ImageForm::Binary, false), (ImageForm::Assembly, true)] {
            let source = Source::cuda(source.name(), source.text());
            let source = if exact { source.exact() } else { source };
            let (place, begin) = (source.name(), now());
            let compiled = compile(&source, &options(&source, architecture, form), form);
            println!(
                "{place}, {form:?}: {:?} in {:?}",
                compiled.as_ref().map(Vec::len),
                since(begin)
            );
            // A source of the tests, which must fail.
            let is_broken = source.text().contains("nonsense");
            assert_eq!(
                compiled.is_err(),
                is_broken,
                "{place} by NVRTC {version}: {compiled:?}"
            );
        }
    }
    println!("NVRTC {version} compiles all {count} sources");
    print_registers(architecture);
}

/// Returns the sources of mpmd's own kernels.
fn own_sources() -> impl Iterator<Item = &'static Source> {
    let layers = kernels::LAYERS.iter().flat_map(|pair| both(pair));
    [&kernels::ADD, &kernels::UPDATE].into_iter().chain(layers)
}

fn both(pair: &'static kernels::SourcePair) -> [&'static Source; 2] {
    [DType::F32, DType::Bf16].map(|dtype| pair.of(dtype).expect("the dtypes of layers"))
}

/// Prints the table of `docs/gpu-kernels.md`.
fn print_registers(architecture: Architecture) {
    println!("| source | kernel | registers, f32 | bf16 | shared bytes |\n|---|---|--:|--:|--:|");
    for pair in kernels::LAYERS {
        let [f32s, bf16s] = both(pair).map(|source| registers(source, architecture));
        let source = both(pair)[0].name().trim_end_matches(" of f32");
        for ((kernel, [registers, shared]), [halves, _]) in f32s.iter().zip(bf16s.values()) {
            println!("| {source} | {kernel} | {registers} | {halves} | {shared} |");
        }
    }
}

/// Returns the registers and the shared memory of each kernel of a source.
///
/// # Panics
///
/// If the compilation has warnings, or registers are spilled to memory.
fn registers(source: &'static Source, architecture: Architecture) -> BTreeMap<String, [String; 2]> {
    let mut options = options(source, architecture, ImageForm::Binary);
    options.push("--ptxas-options=-v".to_owned());
    let log = log(&compiled(source, &options).unwrap());
    assert!(!log.contains("warning"), "{log}");
    let name = r"entry function '(\w+)'(?s:.*?)(\d+) bytes spill stores";
    let used = r"Used (\d+) registers(?:.*?(\d+) bytes smem)?";
    let entry = Regex::new(&format!("{name}(?s:.*?){used}")).unwrap();
    let kernels = entry.captures_iter(&log).map(|found| {
        let found = found.unwrap();
        let text = |group| {
            found
                .get(group)
                .map_or("0", |text| text.as_str())
                .to_owned()
        };
        assert_eq!(
            text(2),
            "0",
            "{} of {} spills registers",
            text(1),
            source.name()
        );
        (text(1), [text(3), text(4)])
    });
    let kernels: BTreeMap<_, _> = kernels.collect();
    assert_eq!(
        kernels.len(),
        source.text().matches(KERNEL).count(),
        "{log}"
    );
    kernels
}
