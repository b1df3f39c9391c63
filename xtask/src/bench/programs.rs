//! Builds the programs that a comparison measures: those of the working tree, and those of the
//! commit to compare with. The latter are built in a temporary work tree of git.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::program_output::{ProgramOutput, quiet, watched};

/// Time limit for git, which writes a few thousand files.
const GIT: Duration = Duration::from_secs(120);

/// Time limit for a build of all programs and their dependencies.
const BUILD: Duration = Duration::from_secs(3600);

/// Paths of the executables of one commit, by program name. Programs that the commit does not have
/// are left out.
pub(super) type Programs = BTreeMap<String, PathBuf>;

/// Builds programs with cargo, and stores the programs of other commits for later comparisons.
pub(super) struct ProgramBuilder<'a> {
    /// The folder of the workspace.
    pub(super) root: &'a Path,
    /// The folder for the work tree, its build, and the stored programs of other commits.
    pub(super) folder: PathBuf,
    pub(super) cargo: OsString,
    /// Ends a build when it becomes true.
    pub(super) stop: &'a AtomicBool,
}

impl ProgramBuilder<'_> {
    /// Returns the hash of the commit `rev`.
    ///
    /// # Errors
    ///
    /// If there is no such commit.
    pub(super) fn commit(&self, rev: &str) -> anyhow::Result<String> {
        let wanted = format!("{rev}^{{commit}}");
        let found = self.git(&[
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &wanted,
        ]);
        Ok(found
            .with_context(|| format!("there is no commit {rev}"))?
            .trim()
            .to_owned())
    }

    /// True if files of the working tree differ from its commit. Pages in `docs` do not count.
    pub(super) fn has_changes(&self) -> anyhow::Result<bool> {
        let status = [
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":!docs",
        ];
        Ok(!self.git(&status)?.trim().is_empty())
    }

    /// Builds programs of the working tree.
    pub(super) fn here(&self, names: &[&str]) -> anyhow::Result<Programs> {
        self.build(self.root, names, None)
    }

    /// Returns the programs `names` of another commit. Builds them, unless an earlier call has
    /// built them with the same compiler and flags.
    pub(super) fn of(&self, commit: &str, names: &[&str]) -> anyhow::Result<Programs> {
        let kept = self.folder.join(commit);
        let known = kept.join("built");

        // The first line is the compiler, each further line a name that was asked for.
        let compiler = self.compiler();
        let said = fs::read_to_string(&known).unwrap_or_default();
        let mut lines = said.lines();
        let same = lines.next() == Some(&compiler);
        let mut built: Vec<&str> = if same { lines.collect() } else { Vec::new() };

        if !names.iter().all(|name| built.contains(name)) {
            let source = WorkTree::add(self, commit)?;
            let target = self.folder.join("build");
            let programs = self.build(&source.folder, names, Some(&target))?;
            fs::create_dir_all(&kept).with_context(|| format!("making {}", kept.display()))?;
            for (name, program) in programs {
                fs::copy(&program, kept.join(&name))
                    .with_context(|| format!("copying {}", program.display()))?;
            }
            built.extend(names);
            fs::write(
                &known,
                [&[compiler.as_str()], &built[..]].concat().join("\n"),
            )
            .with_context(|| format!("writing {}", known.display()))?;
        }

        let found = names
            .iter()
            .map(|name| ((*name).to_owned(), kept.join(name)));
        Ok(found.filter(|(_, program)| program.is_file()).collect())
    }

    /// Builds the programs in `names` that the workspace in `source` has. Each is built by its own
    /// command with `--package`, so its features do not depend on the other names.
    fn build(
        &self,
        source: &Path,
        names: &[&str],
        target: Option<&Path>,
    ) -> anyhow::Result<Programs> {
        let mut ask = self.cargo_in(source);
        ask.args(["metadata", "--no-deps", "--format-version", "1"]);
        let said = ended_well(watched(&mut ask, GIT, self.stop)?)?;
        let metadata: Value = serde_json::from_str(&said).context("the metadata of cargo")?;

        let mut programs = Programs::new();
        for name in names {
            let Some(package) = package_of(&metadata, name) else {
                continue;
            };
            let mut command = self.cargo_in(source);
            command.args(["build", "--release", "--package", package, "--bin", name]);
            command.args(["--message-format", "json-render-diagnostics"]);
            if let Some(target) = target {
                command.arg("--target-dir").arg(target);
            }

            println!("   building {name} in {}", source.display());
            let said = ended_well(watched(&mut command, BUILD, self.stop)?)?;
            let file = said.lines().find_map(|line| executable(line, name));
            programs.insert((*name).to_owned(), file.context("cargo names no program")?);
        }
        Ok(programs)
    }

    fn cargo_in(&self, folder: &Path) -> Command {
        let mut command = Command::new(&self.cargo);
        command.current_dir(folder);
        command
    }

    fn compiler(&self) -> String {
        let said = quiet(Command::new("rustc").arg("--version"), GIT, self.stop);
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        format!(
            "{} {flags}",
            said.map(|said| said.stdout.trim().to_owned())
                .unwrap_or_default()
        )
    }

    fn git(&self, arguments: &[&str]) -> anyhow::Result<String> {
        ended_well(run_git(self.root, arguments)?)
    }
}

/// Runs git in its own process group, so that Ctrl-C in a terminal does not interrupt it. An
/// interruption could leave half a work tree behind.
fn run_git(root: &Path, arguments: &[&str]) -> anyhow::Result<ProgramOutput> {
    let mut command = Command::new("git");
    command.process_group(0).current_dir(root).args(arguments);
    quiet(&mut command, GIT, &AtomicBool::new(false))
}

fn ended_well(said: ProgramOutput) -> anyhow::Result<String> {
    if said.code != Some(0) {
        bail!("{}", said.last_words());
    }
    Ok(said.stdout)
}

/// Returns the package that has a binary of this name.
fn package_of<'a>(metadata: &'a Value, name: &str) -> Option<&'a str> {
    let is_it = |target: &Value| {
        let kinds = target["kind"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        target["name"] == name && kinds.iter().any(|kind| kind == "bin")
    };

    let mut packages = metadata["packages"].as_array()?.iter();
    let package = packages.find(|package| {
        package["targets"]
            .as_array()
            .is_some_and(|targets| targets.iter().any(is_it))
    })?;
    package["name"].as_str()
}

/// Returns the path of the program `name` if this message of cargo reports it.
fn executable(line: &str, name: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
    is_it
        .then(|| message["executable"].as_str().map(PathBuf::from))
        .flatten()
}

/// A work tree of git. Dropping this removes it.
struct WorkTree<'a> {
    root: &'a Path,
    folder: PathBuf,
}

impl<'a> WorkTree<'a> {
    /// Checks out a commit. The folder is the same for all commits, so that cargo can reuse the
    /// build of the dependencies.
    fn add(builder: &ProgramBuilder<'a>, commit: &str) -> anyhow::Result<Self> {
        let folder = builder.folder.join("source");
        let tree = Self {
            root: builder.root,
            folder,
        };

        // A killed run may have left one.
        tree.remove();
        let path = tree
            .folder
            .to_str()
            .context("the target folder's name is not UTF-8")?;
        let added = builder.git(&["worktree", "add", "--detach", path, commit]);
        added.context("checking out the commit")?;
        Ok(tree)
    }

    fn remove(&self) {
        // `--force` twice also removes a work tree that a killed git has locked. The command fails
        // if git knows no such work tree, which is fine.
        if let Some(path) = self.folder.to_str() {
            let _ = run_git(
                self.root,
                &["worktree", "remove", "--force", "--force", path],
            );
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Drop for WorkTree<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    /// A repository of one commit in a temporary folder, with a script in place of cargo. The
    /// script reports the program `mpmd` in the workspace, and the file `mpmd` as the result of a
    /// build.
    pub(in crate::bench) struct Repository {
        pub(in crate::bench) root: PathBuf,
        pub(in crate::bench) stop: AtomicBool,
    }

    impl Repository {
        pub(in crate::bench) fn new(name: &str, program: &str) -> Self {
            let name = format!("mpmd-xtask-{name}-{}", std::process::id());
            let root = std::env::temp_dir().canonicalize().unwrap().join(name);
            fs::create_dir_all(&root).unwrap();
            let this = Self {
                root,
                stop: AtomicBool::new(false),
            };
            this.git(&["init", "--quiet"]);
            this.script("mpmd", program);
            this.commit("first");
            let metadata = r#"{"packages":[{"name":"lib","targets":[{"name":"mpmd",
                "kind":["lib"]}]},{"name":"cli","targets":[{"name":"mpmd","kind":["bin"]}]}]}"#;
            let built = r#"{"reason":"compiler-artifact","target":{"name":"mpmd"},"executable":"'"#;
            this.script(
                "cargo",
                &format!(
                    "[ $1 = metadata ] && exec echo '{}'\n\
                     echo \"$@\" >> {}/calls\n\
                     [ -e slow ] && sleep 60\n\
                     [ -e broken ] && exit 101\n\
                     echo '{built}$PWD/mpmd'\"}}'",
                    metadata.replace('\n', " "),
                    this.root.display(),
                ),
            );
            this
        }

        pub(in crate::bench) fn builder(&self) -> ProgramBuilder<'_> {
            ProgramBuilder {
                root: &self.root,
                folder: self.root.join("target"),
                cargo: self.root.join("cargo").into(),
                stop: &self.stop,
            }
        }

        /// Writes a program that runs these lines in a shell.
        pub(in crate::bench) fn script(&self, name: &str, lines: &str) {
            let path = self.root.join(name);
            fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }

        pub(in crate::bench) fn commit(&self, message: &str) {
            self.git(&["add", "--all"]);
            let author = ["-c", "user.name=a", "-c", "user.email=a@b"];
            self.git(&[&author[..], &["commit", "--quiet", "-m", message]].concat());
        }

        pub(in crate::bench) fn git(&self, arguments: &[&str]) -> String {
            ended_well(run_git(&self.root, arguments).unwrap()).unwrap()
        }

        fn work_trees(&self) -> usize {
            self.git(&["worktree", "list"]).lines().count()
        }

        /// Returns the number of times that cargo was run to build.
        fn builds(&self) -> usize {
            let calls = fs::read_to_string(self.root.join("calls")).unwrap_or_default();
            calls
                .lines()
                .filter(|line| line.starts_with("build --release"))
                .count()
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.root);
        }
    }

    #[test]
    fn other_commit_is_built_once_and_leaves_no_work_tree() {
        let there = Repository::new("once", "echo first");
        let builder = there.builder();
        let commit = builder.commit("HEAD").unwrap();
        assert!(!builder.has_changes().unwrap());
        there.script("mpmd", "echo second");
        assert!(builder.has_changes().unwrap());
        for _ in 0..2 {
            let programs = builder.of(&commit, &["mpmd", "train_gpt"]).unwrap();
            let names: Vec<&str> = programs.keys().map(String::as_str).collect();
            assert_eq!(
                names,
                ["mpmd"],
                "a program that the commit lacks is left out"
            );
            let said = Command::new(&programs["mpmd"]).output().unwrap();
            assert_eq!(said.stdout, b"first\n");
            assert_eq!((there.work_trees(), there.builds()), (1, 1));
        }
        let here = builder.here(&["mpmd"]).unwrap();
        assert_eq!(
            Command::new(&here["mpmd"]).output().unwrap().stdout,
            b"second\n"
        );
    }

    #[test]
    fn cargo_builds_the_programs_of_a_commit() {
        let there = Repository::new("cargo", "");
        let package = "[workspace]\n[package]\nname = \"cli\"\nedition = \"2024\"\n\
            [[bin]]\nname = \"mpmd\"\npath = \"main.rs\"\n";
        fs::write(there.root.join("Cargo.toml"), package).unwrap();
        fs::write(
            there.root.join("main.rs"),
            "fn main() { println!(\"built\") }",
        )
        .unwrap();
        there.commit("package");
        let builder = ProgramBuilder {
            cargo: crate::commands::cargo(),
            ..there.builder()
        };
        let commit = builder.commit("HEAD").unwrap();
        let programs = builder.of(&commit, &["mpmd", "train_gpt"]).unwrap();
        assert_eq!(programs.len(), 1, "{programs:?}");
        assert_eq!(
            Command::new(&programs["mpmd"]).output().unwrap().stdout,
            b"built\n"
        );
        assert_eq!(there.work_trees(), 1);
    }

    #[test]
    fn remains_of_a_killed_run_are_replaced() {
        let there = Repository::new("killed", "echo first");
        let builder = there.builder();
        let source = builder.folder.join("source");
        there.git(&[
            "worktree",
            "add",
            "--lock",
            "--detach",
            source.to_str().unwrap(),
        ]);
        fs::remove_dir_all(&source).unwrap();
        let commit = builder.commit("HEAD").unwrap();
        assert_eq!(builder.of(&commit, &["mpmd"]).unwrap().len(), 1);
        assert_eq!(there.work_trees(), 1);
    }

    #[test]
    fn missing_commit_is_named() {
        let there = Repository::new("none", "");
        let error = there.builder().commit("no-such-commit").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("there is no commit no-such-commit"),
            "{error:#}"
        );
    }

    #[test]
    fn failed_build_leaves_no_work_tree() {
        let there = Repository::new("broken", "");
        fs::write(there.root.join("broken"), "").unwrap();
        there.commit("broken");
        let builder = there.builder();
        let commit = builder.commit("HEAD").unwrap();
        let error = builder.of(&commit, &["mpmd"]).unwrap_err();
        assert!(
            error.to_string().contains("ended with status 101"),
            "{error:#}"
        );
        assert_eq!(there.work_trees(), 1);
        assert!(!builder.folder.join("source").exists());
    }

    #[test]
    fn interrupted_build_leaves_no_work_tree() {
        let there = Repository::new("slow", "");
        fs::write(there.root.join("slow"), "").unwrap();
        there.commit("slow");
        let builder = there.builder();
        let commit = builder.commit("HEAD").unwrap();
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + GIT;
                while there.builds() == 0 && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(5));
                }
                there.stop.store(true, Ordering::Relaxed);
            });
            builder.of(&commit, &["mpmd"]).unwrap_err()
        });
        assert!(error.to_string().contains("was interrupted"), "{error:#}");
        assert_eq!(there.work_trees(), 1);
        assert!(!builder.folder.join("source").exists());
    }
}
