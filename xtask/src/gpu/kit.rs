//! The kit: a folder with everything that the stages need, to be moved to another machine.
//!
//! Programs lie in the folder itself, tests in `deps` below, as in cargo's target folder: tests
//! look for programs and for the driver in software in the folder above their own.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use ruzstd::decoding::StreamingDecoder;
use serde_json::Value;

use crate::candle_cuda;
use crate::commands::cargo;
use crate::program_output::{quiet, watched};

/// Name of the program that runs the stages.
const RUNNER: &str = "xtask";

/// The definition of a kit, which has all files that the stages need on another machine.
#[derive(Debug)]
pub(super) struct KitContent {
    /// Name of the kit in its manifest.
    pub(super) name: &'static str,
    /// The programs that the stages and their tests start, and the one that runs the stages.
    pub(super) programs: &'static [&'static str],
    /// The packages with these programs, and with tests that use the driver.
    packages: &'static [&'static str],
    /// The features that make candle compute on CUDA devices. `None` for a kit without candle for
    /// CUDA.
    features: Option<&'static str>,
    /// Files and folders for tests and stages.
    data: &'static [KitData],
}

/// A file or folder of the repository that is copied into a kit.
#[derive(Debug)]
struct KitData {
    /// Path in the repository.
    from: &'static str,
    /// Path in the kit.
    to: &'static str,
}

impl KitData {
    const fn new(from: &'static str, to: &'static str) -> Self {
        Self { from, to }
    }
}

impl KitContent {
    /// True if the programs and tests of the kit are linked with CUDA's libraries.
    pub(super) fn links_cuda(&self) -> bool {
        self.features.is_some()
    }
}

/// The definitions of both kits.
pub(super) static CONTENTS: [&KitContent; 2] = [&FRAMEWORK, &CANDLE];

/// The kit of all programs and tests that need no build of candle for CUDA.
pub(super) static FRAMEWORK: KitContent = KitContent {
    name: "framework",
    programs: &[
        "mpmd",
        "basic",
        "cuda_kernel",
        "pipeline",
        "reshard",
        "named",
        "train_gpt",
        RUNNER,
    ],
    packages: &[
        "mpmd-core",
        "mpmd-device",
        "mpmd-train",
        "mpmd-cli",
        "mpmd-examples",
        "mpmd-tests",
        "xtask",
    ],
    features: None,
    // Something to train on.
    data: &[KitData::new("README.md", "text")],
};

/// The kit of models on CUDA devices: tests of candle built for CUDA, and programs of models.
pub(super) static CANDLE: KitContent = KitContent {
    name: "candle",
    programs: &["finetune", "generate", "serve", "train_and_serve", RUNNER],
    packages: &["mpmd-candle", "mpmd-models", "mpmd-programs", "xtask"],
    features: Some("mpmd-candle/cuda,mpmd-models/candle-cuda,mpmd-programs/candle-cuda"),
    data: &[
        KitData::new("README.md", "text"),
        KitData::new("crates/mpmd-programs/mpmd-demo", "model"),
        KitData::new("crates/mpmd-models/tests/folders", FOLDERS),
    ],
};

/// The folder in a kit with the models of the tests. The tests look for it beside their own folder.
const FOLDERS: &str = "folders";

/// Name of a function that the macros of the driver in software define in each test that uses it.
/// The test executable contains the function's full name.
const REGISTERED: &[u8] = b"::needs_softcuda_driver";

/// File name of the driver in software.
const SOFTWARE: &str = "libsoftcuda_driver.so";

/// Name of the file in a kit that lists its commit and its tests.
const MANIFEST: &str = "manifest";

/// Name of the archive in a packed kit. It has everything except the program that runs the stages
/// and unpacks it.
const PACKED: &str = "packed.tar.zst";

/// Maximum bytes of a packed kit. Together with the repository it must fit the limit for files on
/// machines with GPUs.
const MOST: u64 = 60 << 20;

/// The newest version of glibc that programs of a kit may need.
const GLIBC: (u32, u32) = (2, 34);

/// The libraries that programs of a kit may need. CUDA's libraries are loaded when they are first
/// used.
const LIBRARIES: [&str; 4] = ["libc.so.", "libm.so.", "libgcc_s.so.", "ld-linux"];

/// Further libraries that programs with candle for CUDA may need.
const OF_CANDLE: [&str; 7] = [
    "libcuda.so",
    "libcudart.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcurand.so",
    "libnvrtc.so",
    "libstdc++.so",
];

/// Time limit of the build, and of each program that packs.
const LONG: Duration = Duration::from_secs(4 * 3600);

/// A kit in a folder, as described by its manifest.
pub(super) struct Kit {
    /// Absolute path of the kit's folder.
    pub(super) folder: PathBuf,
    pub(super) commit: String,
    pub(super) content: &'static KitContent,
    pub(super) tests: Vec<KitTest>,
}

/// A test in a kit.
pub(super) struct KitTest {
    /// The test executable, relative to the kit.
    pub(super) file: String,
    pub(super) name: String,
}

impl fmt::Display for KitTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.rsplit('/').next().unwrap_or_default();
        write!(f, "{file} {}", self.name)
    }
}

/// The executables that cargo has built.
#[derive(Debug, Default)]
struct Built {
    programs: BTreeMap<String, PathBuf>,
    /// Test executables, by their names in a kit.
    tests: BTreeMap<String, PathBuf>,
    software: Option<PathBuf>,
}

impl Kit {
    /// Reads the manifest of the kit in `folder`. Unpacks a packed kit first.
    ///
    /// # Errors
    ///
    /// If the kit cannot be unpacked, or has no manifest or a wrong one.
    pub(super) fn read(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(MANIFEST);
        let packed = folder.join(PACKED);
        if packed.exists() {
            unpack(&packed, folder).with_context(|| format!("unpacking {}", packed.display()))?;
        }

        let text = fs::read_to_string(&path)
            .with_context(|| format!("{}: no kit of `cargo xtask gpu --pack`", path.display()))?;
        let mut lines = text.lines();
        let commit = lines.next().and_then(|line| line.strip_prefix("commit "));
        let commit = commit.with_context(|| format!("{} names no commit", path.display()))?;

        let name = lines
            .next()
            .and_then(|line| line.strip_prefix("kit "))
            .unwrap_or_default();
        let content = CONTENTS.into_iter().find(|content| content.name == name);
        let content =
            content.with_context(|| format!("{}: there is no kit {name:?}", path.display()))?;

        let tests = lines.map(|line| {
            let (file, name) = line
                .split_once(' ')
                .with_context(|| format!("{}: {line:?}", path.display()))?;
            Ok(KitTest {
                file: file.to_owned(),
                name: name.to_owned(),
            })
        });

        Ok(Self {
            commit: commit.to_owned(),
            content,
            tests: tests.collect::<anyhow::Result<_>>()?,
            folder: folder.canonicalize().context("the kit's folder")?,
        })
    }
}

/// Builds the workspace at `root` and writes a kit to `folder`, in place of an older kit. With
/// `software`, candle is built with the driver in software, else with the toolkit of this machine.
///
/// # Errors
///
/// If the build fails or is interrupted by `stop`, or if the folder has other content than a kit.
pub(super) fn lay(
    root: &Path,
    content: &'static KitContent,
    software: bool,
    folder: &Path,
    stop: &AtomicBool,
) -> anyhow::Result<Kit> {
    let mut command = Command::new(cargo());
    command
        .current_dir(root)
        .args(["build", "--profile", "gpu", "--lib", "--bins", "--tests"]);
    command.args(
        content
            .packages
            .iter()
            .flat_map(|package| ["--package", package]),
    );
    if let Some(features) = content.features {
        command.args(["--package", "softcuda-driver", "--features", features]);
        candle_cuda::prepare(root, &mut command, software)?;
    }
    command.args(["--message-format", "json-render-diagnostics"]);

    println!("building programs and tests for speed, which takes 20 minutes or more at first");
    let said = watched(&mut command, LONG, stop)?;
    ensure!(said.code == Some(0), "the build failed");

    let mut describe = Command::new("git");
    describe
        .current_dir(root)
        .args(["describe", "--always", "--abbrev=40", "--dirty"]);
    describe.args(["--exclude", "*"]);
    // A copy without git's data has no commit.
    let commit = quiet(&mut describe, LONG, stop)
        .ok()
        .filter(|said| said.code == Some(0));
    let commit = commit.map_or_else(
        || "unknown".to_owned(),
        |said| said.stdout.trim().to_owned(),
    );

    laid(&built(&said.stdout), content, &commit, root, folder, stop)
}

/// Parses cargo's messages about a build.
fn built(said: &str) -> Built {
    let mut built = Built::default();
    for line in said.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let target = &message["target"];
        let files = message["filenames"].as_array();
        let Some(name) = target["name"].as_str() else {
            continue;
        };

        let files = files.into_iter().flatten().filter_map(Value::as_str);
        if let Some(file) = files.into_iter().find(|file| file.ends_with(SOFTWARE)) {
            built.software = Some(file.into());
        }

        let Some(executable) = message["executable"].as_str() else {
            continue;
        };
        if message["profile"]["test"] == true {
            // The package's folder says which of several targets `all` this is.
            let manifest = Path::new(message["manifest_path"].as_str().unwrap_or_default());
            let package = manifest
                .parent()
                .and_then(Path::file_name)
                .unwrap_or_default();
            // The tests of this function contain names of tests that do not exist.
            if package == env!("CARGO_PKG_NAME") {
                continue;
            }
            let file = format!("{}-{name}", package.to_string_lossy());
            built.tests.insert(file, executable.into());
        } else {
            built.programs.insert(name.to_owned(), executable.into());
        }
    }
    built
}

/// Writes a kit with the executables in `built`.
fn laid(
    built: &Built,
    content: &'static KitContent,
    commit: &str,
    root: &Path,
    folder: &Path,
    stop: &AtomicBool,
) -> anyhow::Result<Kit> {
    if folder.join(MANIFEST).is_file() {
        fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    fs::create_dir_all(folder.join("deps"))
        .with_context(|| format!("making {}", folder.display()))?;
    let is_new = fs::read_dir(folder).is_ok_and(|entries| entries.count() == 1);
    ensure!(is_new, "{} is neither empty nor a kit", folder.display());

    for name in content.programs {
        let program = built
            .programs
            .get(*name)
            .with_context(|| format!("{name} was not built"))?;
        link(program, &folder.join(name))?;
    }
    let software = built
        .software
        .as_ref()
        .with_context(|| format!("{SOFTWARE} was not built"))?;
    link(software, &folder.join(SOFTWARE))?;
    for KitData { from, to } in content.data {
        link_all(&root.join(from), &folder.join(to))?;
    }

    let mut manifest = format!("commit {commit}\nkit {}\n", content.name);
    for (file, path) in &built.tests {
        let registered = registered(&fs::read(path).context("reading a test executable")?);
        if registered.is_empty() {
            continue;
        }

        let mut list = Command::new(path);
        list.args(["--list", "--format", "terse"]);
        if content.links_cuda() {
            list.env("LD_LIBRARY_PATH", candle_cuda::toolkit()?);
        }

        let said = quiet(&mut list, LONG, stop)?;
        let listed: Vec<&str> = said
            .stdout
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .collect();
        let names = named(&listed, &registered)
            .map_err(|UnlistedTest(name)| anyhow!("{} has no test {name}", path.display()))?;
        link(path, &folder.join("deps").join(file))?;
        manifest.extend(names.iter().map(|name| format!("deps/{file} {name}\n")));
    }

    fs::write(folder.join(MANIFEST), manifest).context("writing the manifest")?;
    Kit::read(folder)
}

/// Returns the full names of the test functions that an executable registers, by their `REGISTERED`
/// suffix, which is removed. A name may have other text directly in front of it.
fn registered(executable: &[u8]) -> BTreeSet<String> {
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_:".contains(byte);
    let mut found = BTreeSet::new();
    for (end, _) in executable
        .windows(REGISTERED.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == REGISTERED)
    {
        let name = executable[..end]
            .iter()
            .rev()
            .take_while(|byte| is_of_name(byte))
            .count();
        let name = &executable[end - name..end];

        // The constant itself, in an executable that has this function.
        if !name.is_empty() {
            found.insert(String::from_utf8_lossy(name).into_owned());
        }
    }
    found
}

/// The error of a registered name that belongs to no listed test.
#[derive(Debug, Eq, PartialEq)]
struct UnlistedTest(String);

/// Returns the tests in `listed` that are registered. Fails if a registered name belongs to none of
/// them.
fn named<'a>(
    listed: &[&'a str],
    registered: &BTreeSet<String>,
) -> Result<Vec<&'a str>, UnlistedTest> {
    let mut names = BTreeSet::new();
    for full in registered {
        // The name of the crate comes first. A longer name may end with a shorter one.
        let ends = listed.iter().filter(|name| {
            full.strip_suffix(**name)
                .is_some_and(|before| before.ends_with("::"))
        });
        let name = ends
            .max_by_key(|name| name.len())
            .ok_or_else(|| UnlistedTest(full.clone()))?;
        names.insert(*name);
    }
    Ok(names.into_iter().collect())
}

/// Adds a file, or all files of a folder, to a kit.
fn link_all(from: &Path, to: &Path) -> anyhow::Result<()> {
    if !from.is_dir() {
        return link(from, to);
    }
    fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry.with_context(|| format!("reading {}", from.display()))?;
        link_all(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Adds a file to a kit: as a hard link, or as a copy on another file system.
fn link(from: &Path, to: &Path) -> anyhow::Result<()> {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    }
    Ok(())
}

/// Checks the libraries that the kit's files need, packs the kit beside its folder, and returns a
/// text on its use.
///
/// # Errors
///
/// If a file needs a newer system than machines with GPUs have, or if the archive is too large.
pub(super) fn pack(kit: &Kit) -> anyhow::Result<String> {
    let mut files = vec![PathBuf::from(SOFTWARE)];
    files.extend(kit.content.programs.iter().map(PathBuf::from));
    files.extend(kit.tests.iter().map(|test| PathBuf::from(&test.file)));
    files.dedup();

    check_needs(kit, &files)?;

    let name = kit
        .folder
        .file_name()
        .context("the kit's folder has no name")?;
    let archive = kit.folder.with_extension("tar");
    let above = kit.folder.parent().context("the kit lies in no folder")?;
    println!("packing {} files", files.len() + 2);
    write_archive(kit, &files, above, name, &archive)?;

    let bytes = fs::metadata(&archive).context("the archive")?.len();
    let mut sizes: Vec<(u64, &PathBuf)> = files
        .iter()
        .map(|file| Ok((fs::metadata(kit.folder.join(file))?.len(), file)))
        .collect::<std::io::Result<_>>()?;
    sizes.sort_unstable();
    let mut text = String::new();
    for (bytes, file) in &sizes {
        text += &format!("{:8.1} MB  {}\n", *bytes as f64 / 1e6, file.display());
    }

    ensure!(
        bytes <= MOST,
        "{text}{} has {bytes} bytes, more than {MOST}",
        archive.display()
    );

    let tests = kit.tests.len();
    let name = name.display();
    Ok(format!(
        "{text}{:8.1} MB packed: {}, {tests} tests, commit {}\nthere: tar xf {name}.tar && \
         {name}/{RUNNER} gpu --prebuilt {name}",
        bytes as f64 / 1e6,
        archive.display(),
        kit.commit
    ))
}

/// Checks that the files need no library or symbol that machines with GPUs may lack.
fn check_needs(kit: &Kit, files: &[PathBuf]) -> anyhow::Result<()> {
    let never = AtomicBool::new(false);
    for file in files {
        let mut dump = Command::new("objdump");
        dump.args(["-p", "-T"])
            .arg(kit.folder.join(file))
            .env("LC_ALL", "C");
        let said = quiet(&mut dump, LONG, &never).context("objdump is part of binutils")?;
        ensure!(
            said.code == Some(0),
            "objdump {}: {}",
            file.display(),
            said.first_words()
        );

        let more = kit.content.features.map_or(&[][..], |_| &OF_CANDLE[..]);
        if let Some(need) = too_new(&said.stdout, GLIBC, more) {
            bail!(
                "{} needs {need}, which machines with GPUs may lack",
                file.display()
            );
        }
    }
    Ok(())
}

/// Writes the archive of a kit: its packed files, and the program that unpacks them. The kit is the
/// folder `name` in `above`.
fn write_archive(
    kit: &Kit,
    files: &[PathBuf],
    above: &Path,
    name: &OsStr,
    archive: &Path,
) -> anyhow::Result<()> {
    let never = AtomicBool::new(false);
    let packed = kit.folder.join(PACKED);

    let mut inner = Command::new("tar");
    // No machine has all of xz and zstd: the stages' program unpacks by itself.
    inner
        .args(["-I", "zstd -q -9 -T0 --long=26", "-cf"])
        .arg(&packed)
        .arg("-C");
    inner
        .arg(&kit.folder)
        .arg(MANIFEST)
        .args(kit.content.data.iter().map(|data| data.to));
    inner.args(files.iter().filter(|file| *file != Path::new(RUNNER)));

    let mut outer = Command::new("tar");
    outer.arg("-cf").arg(archive).arg("-C").arg(above);
    outer.args([RUNNER, PACKED].map(|file| Path::new(name).join(file)));

    for mut tar in [inner, outer] {
        let said = quiet(&mut tar, LONG, &never).context("tar and zstd pack a kit")?;
        ensure!(said.code == Some(0), "tar {}", said.last_words());
    }
    fs::remove_file(&packed).context("removing what is in the archive")
}

/// Unpacks the archive of a kit into the kit's folder, and removes the archive.
fn unpack(packed: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut plain = StreamingDecoder::new(BufReader::new(File::open(packed)?))?;
    let mut tar = Command::new("tar");
    tar.arg("-C")
        .arg(folder)
        .args(["-xf", "-"])
        .stdin(Stdio::piped());
    let mut tar = tar.spawn().context("tar cannot be started")?;
    let mut input = tar.stdin.take().context("tar takes no input")?;

    let copied = io::copy(&mut plain, &mut input);
    drop(input);
    let status = tar.wait()?;
    copied?;
    ensure!(status.success(), "tar ended with {status}");
    Ok(fs::remove_file(packed)?)
}

/// Returns the first unusual need of a program, from the output of `objdump -p -T`. It is a library
/// outside of `LIBRARIES` and `more`, or a symbol of a glibc newer than `newest`.
fn too_new(dump: &str, newest: (u32, u32), more: &[&str]) -> Option<String> {
    dump.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["NEEDED", library] = words[..] {
            let is_known = LIBRARIES
                .iter()
                .chain(more)
                .any(|known| library.starts_with(known));
            return (!is_known).then(|| format!("the library {library}"));
        }

        let version = words
            .iter()
            .rev()
            .nth(1)
            .filter(|_| words.contains(&"*UND*"))?;
        let version = version.trim_matches(['(', ')']).strip_prefix("GLIBC_")?;
        let mut numbers = version
            .split('.')
            .map(|number| number.parse().unwrap_or(u32::MAX));
        let found = (numbers.next()?, numbers.next().unwrap_or(0));
        (found > newest).then(|| format!("{} of GLIBC_{version}", words[words.len() - 1]))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A temporary folder.
    pub(in crate::gpu) struct TestFolder(pub(in crate::gpu) PathBuf);

    impl TestFolder {
        pub(in crate::gpu) fn new(name: &str) -> Self {
            let name = format!("mpmd-xtask-gpu-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().canonicalize().unwrap().join(name);
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        /// Makes the folder a kit whose manifest has only these lines of tests.
        pub(in crate::gpu) fn kit(&self, tests: &str) -> Kit {
            let text = format!("commit 0123\nkit framework\n{tests}");
            fs::write(self.0.join(MANIFEST), text).unwrap();
            Kit::read(&self.0).unwrap()
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Returns a build result that has a small file in place of each program.
    fn fake(folder: &TestFolder) -> Built {
        let small = folder.0.join("small");
        fs::write(&small, "no program").unwrap();
        fs::write(folder.0.join("README.md"), "text").unwrap();
        let programs = FRAMEWORK.programs.iter();
        Built {
            programs: programs
                .map(|name| ((*name).to_owned(), small.clone()))
                .collect(),
            tests: [("small".to_owned(), "/bin/true".into())].into(),
            software: Some(small),
        }
    }

    #[test]
    fn kit_has_tests_of_gpus_alone_and_replaces_only_a_kit() {
        let folder = TestFolder::new("lay");
        let mut built = fake(&folder);
        let stop = AtomicBool::new(false);
        let listing = folder.0.join("listing");
        let script = "#!/bin/sh\necho 'cuda::one: test'\necho 'two: test'\n\
                      # all::cuda::one::needs_softcuda_driver\n";
        fs::write(&listing, script).unwrap();
        fs::set_permissions(&listing, fs::Permissions::from_mode(0o755)).unwrap();
        built.tests.insert("listing".to_owned(), listing);
        let kit = folder.0.join("kit");
        let lay = |built: &Built| laid(built, &FRAMEWORK, "abc", &folder.0, &kit, &stop);
        for _ in 0..2 {
            let kit = lay(&built).unwrap();
            let names: Vec<String> = kit.tests.iter().map(KitTest::to_string).collect();
            assert_eq!(names, ["listing cuda::one"]);
            assert_eq!(kit.commit, "abc");
            assert!(!kit.folder.join("deps/small").exists());
        }
        let mut poor = Built {
            software: None,
            ..fake(&folder)
        };
        assert!(
            lay(&poor)
                .err()
                .unwrap()
                .to_string()
                .contains("libsoftcuda_driver.so was not built")
        );
        fs::create_dir_all(&kit).unwrap();
        fs::write(kit.join("mine"), "").unwrap();
        assert!(
            lay(&built)
                .err()
                .unwrap()
                .to_string()
                .contains("is neither empty nor a kit")
        );
        assert!(kit.join("mine").exists());
        fs::remove_dir_all(&kit).unwrap();
        poor.programs.remove("named");
        assert!(
            lay(&poor)
                .err()
                .unwrap()
                .to_string()
                .contains("named was not built")
        );
        let missing = Kit::read(&folder.0).err().unwrap();
        assert!(format!("{missing:#}").contains("no kit of `cargo xtask gpu --pack`"));
    }

    #[test]
    fn messages_of_cargo_name_programs_tests_and_the_driver() {
        let said = r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"b"},"profile":{"test":false},"filenames":["/t/b"],"executable":"/t/b"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"all"},"profile":{"test":true},"filenames":["/t/all-1"],"executable":"/t/all-1"}
{"reason":"compiler-artifact","manifest_path":"/w/xtask/Cargo.toml","target":{"name":"xtask"},"profile":{"test":true},"filenames":["/t/xtask-1"],"executable":"/t/xtask-1"}
{"reason":"compiler-artifact","manifest_path":"/w/s/Cargo.toml","target":{"name":"s"},"profile":{"test":false},"filenames":["/t/libs.rlib","/t/libsoftcuda_driver.so"],"executable":null}
{"reason":"build-finished","success":true}"#;
        let Built {
            programs,
            tests,
            software,
        } = built(said);
        assert_eq!(programs, [("b".to_owned(), PathBuf::from("/t/b"))].into());
        assert_eq!(
            tests,
            [("a-all".to_owned(), PathBuf::from("/t/all-1"))].into()
        );
        assert_eq!(software, Some("/t/libsoftcuda_driver.so".into()));
    }

    #[test]
    fn packed_kit_is_unpacked_when_it_is_read() {
        let folder = TestFolder::new("pack");
        let program = PathBuf::from("/bin/true");
        let mut built = fake(&folder);
        built.software = Some(program.clone());
        built
            .programs
            .values_mut()
            .for_each(|file| file.clone_from(&program));
        let to = folder.0.join("kit");
        let never = AtomicBool::new(false);
        let kit = laid(&built, &FRAMEWORK, "abc", &folder.0, &to, &never);
        let said = pack(&kit.unwrap()).unwrap();
        assert!(
            said.contains("tar xf kit.tar && kit/xtask gpu --prebuilt kit"),
            "{said}"
        );
        let there = folder.0.join("there");
        fs::create_dir(&there).unwrap();
        let mut tar = Command::new("tar");
        tar.arg("-C")
            .arg(&there)
            .arg("-xf")
            .arg(folder.0.join("kit.tar"));
        assert!(tar.status().unwrap().success());
        let there = there.join("kit");
        assert_eq!(fs::read_dir(&there).unwrap().count(), 2);
        for _ in 0..2 {
            assert_eq!(Kit::read(&there).unwrap().commit, "abc");
        }
        assert_eq!(
            fs::read(there.join("mpmd")).unwrap(),
            fs::read(&program).unwrap()
        );
        assert!(Command::new(there.join("mpmd")).status().unwrap().success());
        assert_eq!(
            fs::read_dir(&there).unwrap().count(),
            FRAMEWORK.programs.len() + 3
        );
        fs::write(there.join(PACKED), "damaged").unwrap();
        let error = Kit::read(&there).err().unwrap();
        assert!(error.to_string().contains("unpacking "), "{error:#}");
    }

    #[test]
    fn newer_symbols_and_foreign_libraries_are_named() {
        let dump = "  NEEDED               libm.so.6\n  NEEDED               libc.so.6\n\
             0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.34) pthread_create\n\
             0000000000000000  w   D  *UND*\t0000000000000000  Base        __gmon_start__\n";
        assert_eq!(too_new(dump, GLIBC, &[]), None);
        let found = too_new(dump, (2, 33), &[]);
        assert_eq!(found.as_deref(), Some("pthread_create of GLIBC_2.34"));
        let library = too_new(&dump.replace("libm.so.6", "libucp.so.0"), GLIBC, &OF_CANDLE);
        assert_eq!(library.as_deref(), Some("the library libucp.so.0"));
        // The format of the installed objdump.
        let this = std::env::current_exe().unwrap();
        let said = Command::new("objdump")
            .args(["-p", "-T"])
            .arg(this)
            .output()
            .unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        assert_eq!(too_new(&said, GLIBC, &[]), None);
        let found = too_new(&said, (2, 1), &[]).unwrap_or_default();
        assert!(found.contains(" of GLIBC_2."), "{found}");
    }

    #[test]
    fn registered_tests_are_found_by_their_functions() {
        let bytes = b"\0wordsall::cuda::one::needs_softcuda_driver, xy_z::a::two\
            ::needs_softcuda_driver::needs_softcuda_driver";
        let found = registered(bytes);
        let expected = ["wordsall::cuda::one", "xy_z::a::two"];
        let nested = "xy_z::a::two::needs_softcuda_driver";
        assert_eq!(
            found,
            [&expected[..], &[nested]]
                .concat()
                .into_iter()
                .map(String::from)
                .collect()
        );
        let listed = ["cuda::one", "one", "a::two", "two", "other"];
        let two = expected.map(String::from).into();
        assert_eq!(named(&listed, &two), Ok(vec!["a::two", "cuda::one"]));
        assert_eq!(
            named(&listed[2..], &two),
            Err(UnlistedTest("wordsall::cuda::one".to_owned()))
        );
    }

    /// Returns the names of the packages below a folder whose Rust files contain one of `words`.
    fn packages_with(words: &[String]) -> BTreeSet<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut found = BTreeSet::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if path.is_dir() && !name.starts_with('.') && name != "target" {
                    folders.push(path);
                } else if name.ends_with(".rs") {
                    let text = fs::read_to_string(&path).unwrap();
                    if words.iter().any(|word| text.contains(word)) {
                        found.insert(package_of(&path));
                    }
                }
            }
        }
        found
    }

    /// Returns the name of the package that contains a file.
    fn package_of(file: &Path) -> String {
        let manifest = file.ancestors().map(|folder| folder.join("Cargo.toml"));
        let manifest = manifest
            .into_iter()
            .find(|manifest| manifest.is_file())
            .unwrap();
        let text = fs::read_to_string(manifest).unwrap();
        let name = text.lines().find_map(|line| line.strip_prefix("name = "));
        name.unwrap().trim_matches('"').to_owned()
    }

    #[test]
    fn kits_have_all_packages_with_tests_that_use_the_driver() {
        // Not written in one piece, as these are no uses.
        let words = ["again", "registered"].map(|name| format!("softcuda::{name}{}", "!("));
        let mut using = packages_with(&words);
        // The driver's own tests need no device.
        assert!(using.remove("softcuda"));
        let of_kits = CONTENTS
            .iter()
            .flat_map(|content| content.packages.iter().copied());
        let of_kits: BTreeSet<String> = of_kits.map(str::to_owned).collect();
        let missing: Vec<&String> = using.difference(&of_kits).collect();
        assert!(
            using.len() > 5 && missing.is_empty(),
            "{missing:?} of {using:?}"
        );
    }
}
