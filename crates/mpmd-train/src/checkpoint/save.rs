//! A save: copies of the arrays, which a thread of each process writes while the training goes on.
//!
//! Process 0 creates the files, and all processes copy their regions. The thread of each process
//! writes its copies and a list of their hashes. Every report of a step tells all processes how far
//! the saves of all are. When all have written, process 0's thread writes the manifest. So the
//! program's thread does not wait for the disk.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use mpmd_base::block::thread::{Builder, JoinHandle};
use mpmd_base::block::{Mutex, mpsc};
use mpmd_core::{Error, MoveOptions, MpmdArray, ProcessId, Program, Result, read_regular};

use super::manifest::{ArrayPieces, FORMAT, FileEntry, LARGEST, ListEntry, Manifest, hash};
use super::{CheckpointContents, Checkpoints, folder};
use crate::agree::{agree, on_first};
use crate::tensors::disk::{sync_folder, write_new};
use crate::tensors::failed;
use crate::tensors::files::{PlannedFile, TensorFiles};
use crate::tensors::host_owners;
use crate::tensors::owners::{PIECE_BYTES, pieces};

/// The phase of a save on one process.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum SavePhase {
    /// The process could not write a file.
    Failed,
    /// The process is writing its regions.
    #[default]
    Writing,
    /// The process's regions and its list of pieces are on the disk.
    Written,
    /// The manifest is on the disk. Only process 0 reaches this phase.
    Committed,
}

/// The step and the phase of the last save on one process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct SaveProgress {
    pub(crate) step: u64,
    pub(crate) phase: SavePhase,
}

/// This process's progress with its last save. Clones share the value.
#[derive(Clone, Debug, Default)]
pub(crate) struct SaveStatus(Arc<Mutex<SaveProgress>>);

impl SaveStatus {
    /// Encodes the step and the phase as two words of a report.
    pub(crate) fn words(&self) -> [i64; 2] {
        let SaveProgress { step, phase } = *self.0.lock();
        [step.cast_signed(), phase as i64]
    }

    fn set(&self, step: u64, phase: SavePhase) {
        *self.0.lock() = SaveProgress { step, phase };
    }

    /// Decodes the step and the phase from two words of a report.
    pub(crate) fn read([step, phase]: [i64; 2]) -> SaveProgress {
        let phases = [
            SavePhase::Failed,
            SavePhase::Writing,
            SavePhase::Written,
            SavePhase::Committed,
        ];
        let phase = phases.into_iter().find(|known| *known as i64 == phase);
        SaveProgress {
            step: step.cast_unsigned(),
            phase: phase.unwrap_or_default(),
        }
    }
}

/// A save in progress. If it is dropped, the checkpoint gets no manifest, so it does not exist.
pub(crate) struct Saving {
    pub(crate) step: u64,
    /// Receives the result of writing this process's regions. `None` if no thread writes.
    written: Option<mpsc::Receiver<Result<()>>>,
    /// Tells the thread of process 0 to write the manifest, since all processes have written.
    commit: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Saving {
    /// Creates the files, issues copies of the arrays to host memory, and starts the thread that
    /// writes them. Blocks until process 0 has created the files. Writes nothing if an earlier
    /// epoch of the job has saved this step.
    pub(crate) fn begin(
        p: &mut Program,
        to: &Checkpoints,
        contents: CheckpointContents,
        status: &SaveStatus,
    ) -> Result<Self> {
        let CheckpointContents {
            step,
            seed,
            best,
            stages,
            by_stage,
            arrays,
        } = contents;
        let avals: Vec<_> = arrays
            .iter()
            .map(|(name, array)| (name.clone(), array.aval().clone()))
            .collect();
        let metadata = BTreeMap::from([("step".to_owned(), step.to_string())]);

        let plan = TensorFiles::plan(&avals, to.file_bytes, &metadata)?;
        let hosts = arrays.iter().map(|(_, array)| host_owners(p, array));
        let hosts = hosts.collect::<Result<Vec<_>>>()?;

        let run = p.run_id();
        let epoch = p.epoch();
        let prepare = || {
            to.lock(run, epoch)?;
            folder::prepare(&to.folder, step, epoch, &plan)
        };
        if !on_first(p, true, prepare)? {
            status.set(step, SavePhase::Committed);
            return Ok(Self::without_thread(step));
        }

        // Later steps change the arrays in place, so the copies must not share their memory.
        let options = MoveOptions::default().may_alias(false);
        let mut copies = Vec::with_capacity(arrays.len());
        for ((name, array), host) in arrays.into_iter().zip(hosts) {
            copies.push((name, p.device_put_with(&array, host, options)?));
        }
        status.set(step, SavePhase::Writing);
        if p.is_dry_run() {
            return Ok(Self::without_thread(step));
        }

        let manifest = Manifest {
            format: FORMAT,
            step,
            epoch,
            seed,
            best,
            processes: p.processes(),
            stages,
            by_stage,
            settings: to.settings.clone(),
            files: plan.files.iter().map(file_entry).collect(),
            lists: Vec::new(),
        };
        let writer = Writer {
            process: p.process(),
            folder: to.folder.clone(),
            keep: to.keep,
            keeps_best: to.keeps_best,
            plan,
            copies,
            manifest,
            status: status.clone(),
        };
        Ok(Self::start(writer))
    }

    /// Returns a save that writes nothing.
    fn without_thread(step: u64) -> Self {
        Self {
            step,
            written: None,
            commit: None,
            thread: None,
        }
    }

    /// Starts the thread that writes this process's part of a save.
    fn start(writer: Writer) -> Self {
        let step = writer.manifest.step;
        let status = writer.status.clone();
        let (told, written) = mpsc::channel();
        let (commit, committing) = mpsc::channel();
        let tell = told.clone();
        let run = move || writer.run(&told, &committing);
        let thread = Builder::new().name("checkpoint".to_owned()).spawn(run);
        if let Err(error) = &thread {
            // The other processes learn it as they learn that a file cannot be written.
            status.0.lock().phase = SavePhase::Failed;
            let problem = format!("cannot start the thread of a save: {error}");
            let _ = tell.send(Err(Error::Environment(problem)));
        }
        Self {
            step,
            written: Some(written),
            commit: Some(commit),
            thread: thread.ok(),
        }
    }

    /// Updates the save from `saves`, the progress of all processes in a report. Each process must
    /// pass the same report. Returns true if the save is complete.
    ///
    /// # Errors
    ///
    /// If a process could not write. Every process gets this process's error.
    pub(crate) fn report(&mut self, p: &mut Program, saves: &[SaveProgress]) -> Result<bool> {
        let here = saves.iter().filter(|save| save.step == self.step);
        let here: Vec<SavePhase> = here.map(|save| save.phase).collect();
        if here.contains(&SavePhase::Failed) {
            self.finish(p)?;
        }

        let all = here.len() == saves.len();
        if all
            && here.iter().all(|phase| *phase >= SavePhase::Written)
            && let Some(commit) = self.commit.take()
            && p.process() == ProcessId(0)
        {
            // Without a receiver the thread has failed, as a later report says.
            let _ = commit.send(());
        }
        Ok(all && here.first() == Some(&SavePhase::Committed))
    }

    /// Blocks until the checkpoint is complete. Every process must call it.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Saving::report`].
    pub(crate) fn finish(&mut self, p: &mut Program) -> Result<()> {
        let ended = || {
            Err(Error::Environment(
                "the thread of a save has panicked".to_owned(),
            ))
        };
        let written = self.written.take();
        agree(
            p,
            written.map_or(Ok(()), |written| written.recv().unwrap_or_else(|_| ended())),
        )?;

        let commit = self.commit.take();
        let thread = self.thread.take();
        on_first(p, (), || {
            if let Some(commit) = commit {
                // Without a receiver the thread has ended, with the result that is read next.
                let _ = commit.send(());
            }
            thread.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| ended()))
        })
    }
}

fn file_entry(file: &PlannedFile) -> FileEntry {
    FileEntry {
        name: file.name.clone(),
        bytes: file.bytes,
        header_bytes: file.start.len() as u64,
        header_hash: hash(&file.start),
    }
}

/// The data and settings of the thread that writes a save on one process.
struct Writer {
    process: ProcessId,
    folder: PathBuf,
    keep: Option<usize>,
    keeps_best: bool,
    plan: TensorFiles,
    /// (name, copy in host memory) of each array.
    copies: Vec<(String, MpmdArray)>,
    /// The manifest without the lists of pieces.
    manifest: Manifest,
    status: SaveStatus,
}

impl Writer {
    fn run(
        mut self,
        told: &mpsc::Sender<Result<()>>,
        committing: &mpsc::Receiver<()>,
    ) -> Result<()> {
        let written = self.write().map_err(|error| self.failed(&error));
        self.note(if written.is_ok() {
            SavePhase::Written
        } else {
            SavePhase::Failed
        });
        // Without a receiver the training has ended with an error.
        let _ = told.send(written.clone());
        written?;

        if self.process != ProcessId(0) || committing.recv().is_err() {
            return Ok(());
        }
        let committed = self.commit().map_err(|error| self.failed(&error));
        self.note(if committed.is_ok() {
            SavePhase::Committed
        } else {
            SavePhase::Failed
        });
        committed
    }

    /// Returns the error of a broken save, with the checkpoint from which a training can continue.
    fn failed(&self, error: &Error) -> Error {
        let whole = match folder::steps(&self.folder).unwrap_or_default().last() {
            Some(step) => format!("the newest whole checkpoint is that of step {step}"),
            None => "there is no whole checkpoint".to_owned(),
        };
        let step = self.manifest.step;
        Error::Environment(format!(
            "{error}; the save of step {step} is broken, {whole}"
        ))
    }

    fn note(&self, phase: SavePhase) {
        let mut status = self.status.0.lock();
        // Otherwise a later save has begun.
        if status.step == self.manifest.step {
            status.phase = phase;
        }
    }

    /// Writes this process's regions, then the list of their pieces. Drops each copy after writing
    /// it.
    fn write(&mut self) -> Result<()> {
        let folder = folder::files(&self.folder, self.manifest.step, self.manifest.epoch);
        let mut files = self.plan.writer(&folder, "");
        let mut lists = Vec::new();
        for (place, (name, array)) in std::mem::take(&mut self.copies).into_iter().enumerate() {
            if array.is_fully_remote() {
                continue;
            }
            let item = array.dtype().size();
            let mut hashes = Vec::new();
            for shard in array.addressable_shards()? {
                let mut rest = &shard.data.bytes()[..];
                for piece in pieces(&shard.region, item, PIECE_BYTES) {
                    let (bytes, later) = rest.split_at(piece.elements() * item);
                    rest = later;
                    files.write(place, &piece, bytes)?;
                    hashes.push((piece, hash(bytes)));
                }
            }
            lists.push(ArrayPieces {
                array: name,
                pieces: hashes,
            });
        }

        files.sync(self.process == ProcessId(0))?;
        let path = folder.join(folder::list(self.process.index()));
        let text = serde_json::to_vec(&lists).map_err(|error| failed(&path, &error))?;
        write_new(&path, &text).map_err(|error| failed(&path, &error))?;
        sync_folder(&folder)
    }

    /// Writes the manifest, then removes old checkpoints.
    fn commit(&self) -> Result<()> {
        let mut manifest = self.manifest.clone();
        let Manifest { step, epoch, .. } = manifest;
        let folder = folder::files(&self.folder, step, epoch);
        for process in 0..manifest.processes {
            let name = folder::list(process);
            let path = folder.join(&name);
            let list = read_regular(&path, LARGEST).map_err(|error| failed(&path, &error))?;
            manifest.lists.push(ListEntry {
                name,
                hash: hash(&list),
            });
        }

        // A manifest must not outlive its files. Each process has done the same for their folder.
        sync_folder(&self.folder)?;
        let best = manifest.best.filter(|_| self.keeps_best);
        folder::commit(&self.folder, step, epoch, &manifest.seal()?)?;
        let best = best.map(|best| best.step);
        self.keep
            .map_or(Ok(()), |keep| folder::remove_old(&self.folder, keep, best))
    }
}
