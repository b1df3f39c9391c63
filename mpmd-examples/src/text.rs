//! Text to train on: given files, or this repository's files.
//!
//! All files form one sequence, with a [`SEPARATOR`] after each. The sequence is cut into blocks of
//! [`BLOCK`] bytes. Every tenth block is *held out*: no training window overlaps it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, bail, ensure};

use crate::math::random_bits;
use crate::next_byte::{BYTES, CONTEXT};

/// The byte after each file. No text contains it: a file with this byte counts as binary.
pub const SEPARATOR: u8 = 0;
/// Length of a block, in bytes. A text is divided block by block into training and held-out text.
pub const BLOCK: usize = 4 << 10;
/// Number of blocks of which one is held out: the last.
pub const HELD_OUT_EVERY: usize = 10;
/// Size limit for files found in a folder, in bytes. Larger files are skipped.
pub const LARGEST_FILE: u64 = 4 << 20;
/// Names of folders that are skipped, because they hold no text to train on.
const SKIPPED_FOLDERS: [&str; 2] = [".git", "target"];

/// A text in memory, divided into training and held-out bytes.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: Vec<u8>,
    files: usize,
    /// For each run of training blocks: the index of its first target among all training targets,
    /// and the position of that target in `bytes`. Sorted.
    runs: Vec<(usize, usize)>,
    targets: usize,
}

impl Text {
    /// Reads files and folders, in the order given.
    ///
    /// A folder is read in sorted order. It skips `.git`, `target`, links, files that are not UTF-8
    /// text and files above [`LARGEST_FILE`]. A file given by name may have any size.
    ///
    /// # Errors
    ///
    /// If a path cannot be read, or a file given by name is not text. If there is too little text
    /// for one training window.
    pub fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            let kind =
                fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
            if kind.is_dir() {
                let mut found = Vec::new();
                walk(path, &mut found)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                files.extend(read_texts(&found)?);
            } else {
                let text = read_text(path, u64::MAX)
                    .with_context(|| format!("cannot read {}", path.display()))?
                    .with_context(|| format!("{} is not UTF-8 text", path.display()))?;
                files.push(text);
            }
        }
        Self::of_files(&files)
    }

    /// Reads the text of this repository: the files that `git` tracks or, without git, all files.
    /// Skips files that are not UTF-8 text, and files above [`LARGEST_FILE`].
    ///
    /// # Errors
    ///
    /// If the folder from which this program was built is gone or cannot be read, or has no text.
    pub fn of_this_repository() -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("the workspace has no folder")?;
        let files = match tracked_files(root) {
            Some(files) => files,
            None => {
                let mut found = Vec::new();
                walk(root, &mut found)
                    .with_context(|| format!("cannot read {}", root.display()))?;
                found
            }
        };
        Self::of_files(&read_texts(&files)?)
    }

    /// Joins files that are already in memory, with a [`SEPARATOR`] after each.
    ///
    /// # Errors
    ///
    /// If there is too little text for one training window.
    pub fn of_files(files: &[Vec<u8>]) -> anyhow::Result<Self> {
        let mut bytes = Vec::with_capacity(files.iter().map(|file| file.len() + 1).sum());
        for file in files {
            bytes.extend_from_slice(file);
            bytes.push(SEPARATOR);
        }
        let (mut runs, mut targets) = (Vec::new(), 0);
        for start in (0..bytes.len()).step_by(BLOCK * HELD_OUT_EVERY) {
            let end = bytes.len().min(start + BLOCK * (HELD_OUT_EVERY - 1));
            // A window does not reach back over a held-out block.
            if end - start > CONTEXT {
                runs.push((targets, start + CONTEXT));
                targets += end - start - CONTEXT;
            }
        }
        ensure!(
            targets > 0,
            "{} bytes of text are too few: a training window has {}",
            bytes.len(),
            CONTEXT + 1
        );
        Ok(Self { bytes, files: files.len(), runs, targets })
    }

    /// Returns all bytes, including the held-out ones.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of files.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Returns the number of training windows.
    pub fn training_windows(&self) -> usize {
        self.targets
    }

    /// Returns training window `index`: (the context of [`CONTEXT`] bytes, the byte that follows).
    ///
    /// # Panics
    ///
    /// Panics if `index` is not below [`Self::training_windows`].
    pub fn training_window(&self, index: usize) -> (&[u8], u8) {
        assert!(index < self.targets, "training window {index} of {}", self.targets);
        let run = self.runs.partition_point(|(first, _)| *first <= index) - 1;
        let (first, position) = self.runs[run];
        self.window(position + index - first)
    }

    /// Returns the training window for one row of one step's batch: (the context, the byte that
    /// follows). It is the same on every process.
    pub fn sample(&self, seed: u64, step: u64, row: u64) -> (&[u8], u8) {
        // Each step has its own stream, and each row a place in it. The high half of the product
        // maps 64 random bits onto the windows, with negligible bias.
        let bits = random_bits(random_bits(seed, step), row);
        self.training_window(((u128::from(bits) * self.targets as u128) >> 64) as usize)
    }

    /// Fills `contexts` (`[rows, CONTEXT]`) and `targets` (`[rows]`) with the rows of a step's
    /// batch from `first_row` on.
    ///
    /// # Panics
    ///
    /// Panics if the two do not fit each other.
    pub fn fill_batch(
        &self,
        seed: u64,
        step: u64,
        first_row: u64,
        contexts: &mut [u8],
        targets: &mut [u8],
    ) {
        assert_eq!(contexts.len(), targets.len() * CONTEXT, "context bytes");
        let rows = contexts.chunks_exact_mut(CONTEXT).zip(targets).zip(first_row..);
        for ((context, target), row) in rows {
            let window = self.sample(seed, step, row);
            context.copy_from_slice(window.0);
            *target = window.1;
        }
    }

    /// Returns the number of held-out bytes: zero if the text is shorter than [`HELD_OUT_EVERY`]
    /// blocks.
    pub fn held_out_windows(&self) -> usize {
        self.held_out_blocks().map(|block| block.len()).sum()
    }

    /// Returns (the context, the byte) for each held-out byte, in order. The first contexts of a
    /// block overlap the training text before the block.
    pub fn held_out(&self) -> impl Iterator<Item = (&[u8], u8)> {
        self.held_out_blocks().flatten().map(|position| self.window(position))
    }

    /// Returns the cross-entropy of the held-out bytes under the byte frequencies of the training
    /// text, in nats per byte. A model should be below it. Each frequency count is one more than
    /// the number seen. `None` if nothing is held out.
    pub fn byte_frequency_loss(&self) -> Option<f64> {
        let mut seen = [1u64; BYTES];
        for (_, block) in self.blocks().filter(|(held_out, _)| !held_out) {
            self.bytes[block].iter().for_each(|byte| seen[usize::from(*byte)] += 1);
        }
        let total = seen.iter().sum::<u64>() as f64;
        let losses =
            self.held_out().map(|(_, byte)| -(seen[usize::from(byte)] as f64 / total).ln());
        let held_out = self.held_out_windows();
        (held_out > 0).then(|| losses.sum::<f64>() / held_out as f64)
    }

    /// Returns (`time` consecutive training bytes, the byte that follows each) for one row of one
    /// step's batch. The bytes are the same on every process. `None` if no run of training blocks
    /// has more than `time` bytes.
    pub fn sequence(&self, seed: u64, step: u64, row: u64, time: usize) -> Option<(&[u8], &[u8])> {
        let room = |run: &std::ops::Range<usize>| run.len().saturating_sub(time);
        let starts: usize = self.training_runs().map(|run| room(&run)).sum();
        if starts == 0 {
            return None;
        }
        let bits = random_bits(random_bits(seed, step), row);
        let mut index = ((u128::from(bits) * starts as u128) >> 64) as usize;
        for run in self.training_runs() {
            if index < room(&run) {
                return Some(self.shifted(run.start + index, time));
            }
            index -= room(&run);
        }
        None
    }

    /// Cuts the held-out blocks into pieces of `time` bytes. Returns (piece, the byte that follows
    /// each of its bytes), all within one block. The last bytes of a block that fill no piece are
    /// skipped.
    ///
    /// # Panics
    ///
    /// If `time` is zero and something is held out.
    pub fn held_out_sequences(&self, time: usize) -> Vec<(&[u8], &[u8])> {
        let cut = |block: std::ops::Range<usize>| {
            (block.start..block.end).step_by(time).filter(move |start| start + time < block.end)
        };
        self.held_out_blocks().flat_map(cut).map(|start| self.shifted(start, time)).collect()
    }

    /// Returns the runs of training bytes, as ranges of indices in all bytes of the text. None of
    /// them overlaps a held-out block.
    pub fn training_runs(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let len = self.bytes.len();
        (0..len)
            .step_by(BLOCK * HELD_OUT_EVERY)
            .map(move |start| start..len.min(start + BLOCK * (HELD_OUT_EVERY - 1)))
    }

    fn shifted(&self, start: usize, time: usize) -> (&[u8], &[u8]) {
        (&self.bytes[start..start + time], &self.bytes[start + 1..start + 1 + time])
    }

    /// Returns a hash of the text, for a comparison between processes that read their own files.
    pub fn fingerprint(&self) -> u64 {
        self.bytes.chunks(8).fold(self.bytes.len() as u64, |state, chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            random_bits(state, u64::from_le_bytes(word))
        })
    }

    fn window(&self, target: usize) -> (&[u8], u8) {
        (&self.bytes[target - CONTEXT..target], self.bytes[target])
    }

    /// Returns (true if held out, range of indices in `bytes`) for each block, in order.
    fn blocks(&self) -> impl Iterator<Item = (bool, std::ops::Range<usize>)> {
        let len = self.bytes.len();
        (0..len).step_by(BLOCK).enumerate().map(move |(i, start)| {
            (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1, start..len.min(start + BLOCK))
        })
    }

    fn held_out_blocks(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.blocks().filter_map(|(held_out, block)| held_out.then_some(block))
    }
}

/// Runs `git` to list the files that it tracks under `root`, and returns them sorted. `None`
/// without git, without a repository, or if a name is not UTF-8.
fn tracked_files(root: &Path) -> Option<Vec<PathBuf>> {
    let output = Command::new("git").arg("-C").arg(root).args(["ls-files", "-z"]).output().ok()?;
    if !output.status.success() || output.stdout.is_empty() {
        return None;
    }
    let names = String::from_utf8(output.stdout).ok()?;
    // A set, because a file in conflict is listed several times.
    let names: BTreeSet<_> = names.split('\0').filter(|name| !name.is_empty()).collect();
    Some(names.into_iter().map(|name| root.join(name)).filter(|file| is_plain(file)).collect())
}

/// True if `file` is a regular file: tracked links, submodules and deleted files are not read.
fn is_plain(file: &Path) -> bool {
    fs::symlink_metadata(file).is_ok_and(|kind| kind.is_file())
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let mut entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        // The type of the entry, not of a link's target: a link may lead back up.
        let kind = entry.file_type()?;
        let skipped = SKIPPED_FOLDERS.iter().any(|name| entry.file_name() == *name);
        if kind.is_dir() && !skipped {
            walk(&entry.path(), found)?;
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn read_texts(files: &[PathBuf]) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut texts = Vec::new();
    for file in files {
        let text = read_text(file, LARGEST_FILE)
            .with_context(|| format!("cannot read {}", file.display()))?;
        texts.extend(text);
    }
    if texts.is_empty() {
        bail!("none of the {} files found is UTF-8 text", files.len());
    }
    Ok(texts)
}

/// Returns a file's bytes. `None` if it is larger than `largest` bytes or is not text.
fn read_text(file: &Path, largest: u64) -> io::Result<Option<Vec<u8>>> {
    if fs::metadata(file)?.len() > largest {
        return Ok(None);
    }
    let bytes = fs::read(file)?;
    let is_text = !bytes.contains(&SEPARATOR) && std::str::from_utf8(&bytes).is_ok();
    Ok(is_text.then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a text in which each byte marks its block: `h` in held-out blocks, `t` in the
    /// others.
    fn marked(blocks: usize, rest: usize) -> Text {
        let len = blocks * BLOCK + rest;
        let mark =
            |at: usize| if at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 { b'h' } else { b't' };
        Text::of_files(&[(0..len - 1).map(mark).collect()]).unwrap()
    }

    #[test]
    fn sequences_never_overlap_held_out_blocks() {
        let bytes: Vec<u8> = (0..BLOCK * 21).map(|i| (i / BLOCK) as u8).collect();
        let text = Text::of_files(&[bytes]).unwrap();
        for row in 0..500 {
            let (inputs, targets) = text.sequence(1, 2, row, 100).unwrap();
            assert_eq!(inputs[1..], targets[..99]);
            assert!(inputs.iter().chain(targets).all(|block| *block % 10 != 9), "row {row}");
        }
        assert_eq!(text.sequence(1, 2, 3, 100), text.sequence(1, 2, 3, 100));
        assert_ne!(text.sequence(1, 2, 3, 100), text.sequence(2, 2, 3, 100));
        assert_eq!(text.sequence(1, 2, 3, BLOCK * 30), None);
        let held_out = text.held_out_sequences(100);
        assert_eq!(held_out.len(), 2 * 40);
        assert!(held_out.iter().all(|(inputs, targets)| {
            inputs.iter().chain(*targets).all(|block| *block % 10 == 9)
        }));
    }

    #[test]
    fn training_windows_cover_exactly_the_training_text() {
        // A run of nine blocks has one window per byte, except for the context of its first.
        let run = 9 * BLOCK - CONTEXT;
        let cases = [
            (1, 1, BLOCK + 1 - CONTEXT),
            (9, 0, run),
            (10, 0, run),
            (10, 5, run),
            (10, 17, run + 1),
            (25, 100, 2 * run + 5 * BLOCK + 100 - CONTEXT),
            (30, 3000, 3 * run + 3000 - CONTEXT),
        ];
        for (blocks, rest, expected) in cases {
            let text = marked(blocks, rest);
            assert_eq!(text.training_windows(), expected, "{blocks} blocks, {rest}");
            let starts: BTreeSet<_> = (0..expected)
                .map(|i| {
                    let (context, target) = text.training_window(i);
                    assert!(
                        !context.contains(&b'h') && target != b'h',
                        "{blocks} blocks, {rest}, window {i}"
                    );
                    context.as_ptr() as usize
                })
                .collect();
            assert_eq!(starts.len(), expected, "each window once");
        }
    }

    #[test]
    fn each_held_out_byte_has_one_window() {
        let text = marked(25, 100);
        assert_eq!(text.held_out_windows(), 2 * BLOCK);
        let windows: Vec<_> = text.held_out().collect();
        assert_eq!(windows.len(), 2 * BLOCK);
        assert!(
            windows.iter().all(|(context, target)| context.len() == CONTEXT && *target == b'h')
        );
        assert_eq!(windows[0].0, [b't'; CONTEXT]);
        let short = marked(9, 0);
        assert_eq!((short.held_out_windows(), short.byte_frequency_loss()), (0, None));
    }

    #[test]
    fn samples_depend_on_seed_step_and_row_and_cover_the_text() {
        let text = Text::of_files(&[(0..200u8).map(|i| i.max(1)).collect()]).unwrap();
        let (mut contexts, mut targets) = ([0; 8 * CONTEXT], [0; 8]);
        text.fill_batch(1, 2, 3, &mut contexts, &mut targets);
        for (row, (context, target)) in contexts.chunks(CONTEXT).zip(targets).enumerate() {
            assert_eq!(text.sample(1, 2, 3 + row as u64), (context, target));
        }
        let draw =
            |seed, step| (0..16).map(|row| text.sample(seed, step, row).1).collect::<Vec<_>>();
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
        let seen: BTreeSet<u8> = (0..5000).map(|step| text.sample(7, step, 0).1).collect();
        assert_eq!(seen.len(), text.training_windows());
    }

    #[test]
    fn byte_frequency_loss_matches_its_definition() {
        let text = marked(10, 0);
        // Training text has no `h`, and each of 256 counts is one more. The separator ends the
        // held-out block.
        let total = (9 * BLOCK + BYTES) as f64;
        assert!((text.byte_frequency_loss().unwrap() - total.ln()).abs() < 1e-12);
        let even: Vec<u8> = (0..20 * BLOCK).map(|i| if i % 2 == 0 { b'a' } else { b'b' }).collect();
        let loss = Text::of_files(&[even]).unwrap().byte_frequency_loss().unwrap();
        assert!((loss - 2f64.ln()).abs() < 0.01, "{loss}");
    }

    #[test]
    fn folders_are_walked_sorted_and_only_text_is_taken() {
        let folder = std::env::temp_dir().join(format!("mpmd-text-{}", std::process::id()));
        let write = |name: &str, content: &[u8]| {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        };
        write("b.txt", b"second file, after the folder");
        write("a/z.txt", b"first file, of the folder");
        write("a/latin1", &[b'g', 0xfc, b'n']);
        write("a/nul", b"binary\0file");
        write("target/x.txt", b"built");
        write(".git/config", b"history");
        write("large.txt", &vec![b'x'; LARGEST_FILE as usize + 1]);
        let walked = Text::read(std::slice::from_ref(&folder));
        let named = Text::read(&[folder.join("b.txt"), folder.join("a/z.txt")]);
        let large = Text::read(&[folder.join("large.txt")]);
        let errors = ["a/latin1", "a/nul", "absent"].map(|name| Text::read(&[folder.join(name)]));
        fs::remove_dir_all(&folder).unwrap();

        let walked = walked.unwrap();
        assert_eq!(walked.bytes(), b"first file, of the folder\0second file, after the folder\0");
        assert_eq!(walked.files(), 2);
        let named = named.unwrap();
        assert_eq!(named.bytes(), b"second file, after the folder\0first file, of the folder\0");
        assert_ne!(walked.fingerprint(), named.fingerprint());
        assert_eq!(large.unwrap().files(), 1);
        for (error, name) in errors.into_iter().zip(["latin1", "nul", "absent"]) {
            assert!(error.unwrap_err().to_string().contains(name));
        }
        assert!(Text::of_files(&[b"sixteen bytes..".to_vec()]).is_err());
        assert!(Text::of_files(&[]).is_err());
    }

    #[test]
    fn repository_text_has_held_out_blocks() {
        let text = Text::of_this_repository().unwrap();
        assert!(text.files() > 10 && text.held_out_windows() > 0);
        let baseline = text.byte_frequency_loss().unwrap();
        assert!((2.0..5.545).contains(&baseline), "{baseline}");
        assert_eq!(text.fingerprint(), Text::of_this_repository().unwrap().fingerprint());
    }
}
