//! The versions of a model's weights, while a trainer publishes new ones.
//!
//! A version is taken on each process by a thread: that of a subscription ([`PublishedIntake`]), or
//! one that reads a folder ([`FolderLoading`]). Passes find it by its number (`weight_store`).

use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use mpmd::aval::{DType, ShapedArray};
use mpmd::region::Region;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::weights::{Intake, NotReceived, Received};
use mpmd::{DeviceId, Error, MpmdArray, ProcessId, Program, Result};
use mpmd_base::block::Mutex;

use crate::hub::folder::Folder;
use crate::hub::stored_tensor::not_finite;
use crate::inference::same_model::check_same_model;
use crate::inference::stage_loader::StageLoader;
use crate::inference::weight_store::WeightSource;
use crate::text::tokens::boundary;

/// Number of 32-bit words in the state of a process that reads a folder: a code, then either the
/// hash of the weights, or the length and bytes of an error message.
const STATE_WORDS: usize = 2 + 256;

/// Number of low bits of a version that hold its number. The bits above tell its source.
const NUMBER: u32 = 48;
/// The bit that marks versions read from a folder.
const FROM_FOLDER: u64 = 1 << 63;

/// Returns the number of a version that users see: for published versions, the number that the
/// trainer gave.
pub fn version_number(version: u64) -> u64 {
    version & ((1 << NUMBER) - 1)
}

/// Returns the version for weights that will be read from a folder while version `newest` is in
/// use.
pub fn next_of_folder(newest: u64) -> u64 {
    (version_number(newest) + 1) | FROM_FOLDER
}

/// Returns the version of received weights. It contains the publication, since a restarted trainer
/// repeats its version numbers.
fn received_version(received: &Received) -> u64 {
    (received.publication << NUMBER | version_number(received.version)) & !FROM_FOLDER
}

/// The versions of an inference's weights. Clones share the state.
///
/// Version 0 is the weights of the folder. In later versions the upper bits tell the source, and
/// the lower bits are the [`version_number`].
#[derive(Clone, Debug, Default)]
pub struct WeightVersions(Arc<Mutex<VersionsState>>);

/// A copy of a [`WeightVersions`]' state at one moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct VersionsState {
    /// The newest version that all processes have in full. 0 until the first later version.
    pub newest: u64,
    /// True if a further version can be received.
    pub has_room: bool,
    /// True if the weights of another folder are being read.
    pub is_loading: bool,
    /// The reason why the last version was refused. `None` after a later version has been received.
    pub failure: Option<String>,
    /// The state of the connection to a publisher. `None` without a subscription.
    pub publisher: Option<PublisherState>,
}

/// The state of the connection to a publisher of weights.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PublisherState {
    /// The publisher is connected.
    Linked,
    /// There is no connection now.
    Unlinked {
        /// The reason, as a message.
        why: String,
    },
}

impl WeightVersions {
    /// Returns a copy of the whole state. Does not block.
    pub fn state(&self) -> VersionsState {
        self.0.lock().clone()
    }

    /// Returns the newest version that all processes have in full. 0 until the first later version.
    /// Does not block.
    pub fn newest(&self) -> u64 {
        self.0.lock().newest
    }

    /// Records that all processes have `version` in full. No further version is received until
    /// [`set_room`](Self::set_room) allows it.
    pub fn arrive(&self, version: u64) {
        self.0.lock().arrive(version);
    }

    /// Sets whether a further version can be received. It can if no version other than the newest
    /// is in use.
    pub fn set_room(&self, has_room: bool) {
        self.0.lock().has_room = has_room;
    }

    /// True if the weights of another folder are being read.
    pub fn is_loading(&self) -> bool {
        self.0.lock().is_loading
    }

    /// Returns the reason why the last version was refused. `None` after a later version has been
    /// received.
    pub fn failure(&self) -> Option<String> {
        self.0.lock().failure.clone()
    }

    /// Returns the state of the connection to a publisher. `None` without a subscription.
    pub fn publisher(&self) -> Option<PublisherState> {
        self.0.lock().publisher.clone()
    }

    /// True if a further version can be received.
    pub fn has_room(&self) -> bool {
        self.0.lock().has_room
    }

    /// Sets the state of the connection to a publisher.
    fn link(&self, publisher: PublisherState) {
        self.0.lock().publisher = Some(publisher);
    }

    /// Records that the weights of another folder are being read.
    fn begin_loading(&self) {
        self.0.lock().is_loading = true;
    }

    /// Records the reason why a version was refused.
    fn refuse(&self, why: String) {
        self.0.lock().failure = Some(why);
    }

    /// Records the end of reading a folder: all processes have its weights as `version`, or the
    /// reason why they are refused.
    fn end_loading(&self, version: u64, result: Result<(), LoadRefusal>) {
        let mut state = self.0.lock();
        match result {
            Ok(()) => state.arrive(version),
            Err(why) => {
                let number = version_number(version);
                state.failure = Some(format!("version {number}: {why}"));
            }
        }
        state.is_loading = false;
    }
}

impl VersionsState {
    fn arrive(&mut self, version: u64) {
        self.has_room = false;
        self.failure = None;
        self.newest = version;
    }
}

/// Receives the versions of a subscription on one process.
pub(super) struct PublishedIntake {
    loaders: Vec<StageLoader>,
    devices: Vec<DeviceId>,
    versions: WeightVersions,
    /// The version that is being received. `None` between versions.
    taken: Option<u64>,
    /// True on process 0, which chooses the version of each pass.
    decides: bool,
    /// The received versions that this process still holds.
    held: Vec<u64>,
}

impl PublishedIntake {
    /// Creates the receiver of a subscription on this process.
    pub(super) fn new(p: &Program, loaders: &[StageLoader], versions: &WeightVersions) -> Self {
        versions.link(PublisherState::Unlinked {
            why: "the publisher has not been found yet".to_owned(),
        });
        Self {
            loaders: loaders.to_vec(),
            devices: p.topology().devices_of(p.process()).to_vec(),
            versions: versions.clone(),
            taken: None,
            decides: p.process() == ProcessId(0),
            held: Vec::new(),
        }
    }
}

impl Intake for PublishedIntake {
    fn has_room(&mut self) -> bool {
        let has_room = match self.decides {
            true => self.versions.has_room(),
            // An older one goes with the pass that retires it, which this process may reach late.
            false => {
                let Self { held, loaders, .. } = self;
                held.retain(|version| loaders.iter().any(|loader| loader.has(*version)));
                held.len() < 2
            }
        };
        has_room && !self.versions.is_loading()
    }

    fn take(&mut self, received: &Received) -> Result<(), String> {
        let version = received_version(received);
        let received = received.clone();
        if received.version != version_number(received.version) {
            return Err(format!(
                "its number is too large: expected less than 2^{NUMBER}"
            ));
        }
        if self.versions.is_loading() {
            return Err("weights of a folder are being read".to_owned());
        }

        let source: WeightSource =
            Arc::new(move |name: &str, region: &Region, values: &mut [f32]| {
                read_leaf(&received, name, region, values)
                    .map_err(|why| Error::Kernel(why.to_string()))
            });
        self.taken = Some(version);
        self.held.push(version);
        let mut loaders = self.loaders.iter();
        let taken = loaders.try_for_each(|loader| loader.take(&self.devices, version, &source));
        taken.map_err(|why| why.to_string())
    }

    fn end(&mut self, number: u64, refused: Option<&str>) {
        let taken = self.taken.take();
        match (taken, refused) {
            (_, Some(why)) => {
                if let Some(version) = taken {
                    self.loaders
                        .iter()
                        .for_each(|loader| loader.retire(version));
                }
                self.versions.refuse(format!("version {number}: {why}"));
            }
            (Some(version), None) => self.versions.arrive(version),
            (None, None) => {}
        }
    }

    fn linked(&mut self, ended: Option<&str>) {
        self.versions.link(match ended {
            None => PublisherState::Linked,
            Some(why) => PublisherState::Unlinked {
                why: why.to_owned(),
            },
        });
    }
}

/// Error: a region of the weights cannot be used for computation.
#[derive(Debug, thiserror::Error)]
enum RegionError {
    #[error("{0} was not published")]
    NotPublished(String),
    #[error(transparent)]
    NotReceived(#[from] NotReceived),
    #[error("{name} is of {dtype}")]
    OtherType { name: String, dtype: DType },
    #[error("{name} {region}: expected finite values, found {found}")]
    NotFinite {
        name: String,
        region: Region,
        found: f32,
    },
}

/// Reads a region of a received array as `f32`.
fn read_leaf(
    received: &Received,
    name: &str,
    region: &Region,
    values: &mut [f32],
) -> Result<(), RegionError> {
    let dtype = received
        .dtype(name)
        .ok_or_else(|| RegionError::NotPublished(name.to_owned()))?;
    let mut bytes = vec![0; region.elements() * dtype.size()];
    received.read(name, region, &mut bytes)?;

    let (halves, _) = bytes.as_chunks::<2>();
    let (singles, _) = bytes.as_chunks::<4>();
    match dtype {
        DType::Bf16 => values.iter_mut().zip(halves).for_each(|(value, bytes)| {
            *value = bf16::from_le_bytes(*bytes).to_f32();
        }),
        DType::F16 => values.iter_mut().zip(halves).for_each(|(value, bytes)| {
            *value = f16::from_le_bytes(*bytes).to_f32();
        }),
        DType::F32 => values.iter_mut().zip(singles).for_each(|(value, bytes)| {
            *value = f32::from_le_bytes(*bytes);
        }),
        dtype => {
            let name = name.to_owned();
            return Err(RegionError::OtherType { name, dtype });
        }
    }
    check_finite(name, region, values)
}

/// Returns an error if a value is infinite or NaN.
fn check_finite(name: &str, region: &Region, values: &[f32]) -> Result<(), RegionError> {
    match not_finite(values) {
        None => Ok(()),
        Some(found) => Err(RegionError::NotFinite {
            name: name.to_owned(),
            region: region.clone(),
            found,
        }),
    }
}

/// A folder, and the version that its weights will have.
#[derive(Clone, Debug)]
pub(super) struct FolderVersion {
    pub(super) folder: PathBuf,
    pub(super) version: u64,
}

/// The reading of a folder's weights, on one thread of each process.
pub(super) struct FolderLoading {
    what: FolderVersion,
    /// The progress of the reading on this process.
    reading: Arc<Mutex<FolderReading>>,
    /// The states of all devices' processes, on the way to the reader's mesh. `None` if none are
    /// under way.
    states: Option<Vec<MpmdArray>>,
}

/// The progress of reading a folder's weights on one process.
#[derive(Clone, Debug)]
enum FolderReading {
    Running,
    /// The weights are in memory. This is their hash.
    Read(u64),
    /// The error message.
    Failed(String),
}

/// Error: the weights of a folder are not used.
#[derive(Debug, thiserror::Error)]
enum LoadRefusal {
    /// A process could not read the weights.
    #[error("{0}")]
    Failed(String),
    /// Two processes have read different weights.
    #[error(
        "{}: the weights of process {} have hash {:016x}, those of process {} {:016x}: give all \
         hosts the same files",
        .folder.display(), .first.process, .first.hash, .other.process, .other.hash
    )]
    Different {
        folder: PathBuf,
        first: ProcessHash,
        other: ProcessHash,
    },
}

/// The hash of the weights that one process has read.
#[derive(Clone, Copy, Debug)]
struct ProcessHash {
    process: ProcessId,
    hash: u64,
}

impl FolderLoading {
    /// Starts to read a folder's weights on this process, on a new thread.
    pub(super) fn begin(
        p: &Program,
        loaders: &[StageLoader],
        versions: &WeightVersions,
        what: FolderVersion,
    ) -> Self {
        versions.begin_loading();
        let reading = Arc::new(Mutex::new(FolderReading::Running));

        let loaders = loaders.to_vec();
        let own = what.clone();
        let to = reading.clone();
        let devices = p.topology().devices_of(p.process()).to_vec();
        let read = move || {
            let taken = take_folder(&loaders, &devices, &own);
            *to.lock() = match taken {
                Ok(hash) => FolderReading::Read(hash),
                Err(why) => FolderReading::Failed(why.to_string()),
            };
        };
        let builder = std::thread::Builder::new().name("mpmd-load".to_owned());
        if let Err(why) = builder.spawn(read) {
            *reading.lock() = FolderReading::Failed(why.to_string());
        }
        Self {
            what,
            reading,
            states: None,
        }
    }

    /// Issues operations that send the states of the devices' processes to `reader`. If the
    /// previous states have arrived and no process still reads, records the result in `versions`.
    ///
    /// # Errors
    ///
    /// As for [`Program::device_put`].
    pub(super) fn poll(
        &mut self,
        p: &mut Program,
        meshes: &[Mesh],
        reader: &Mesh,
        versions: &WeightVersions,
    ) -> Result<()> {
        if let Some(states) = self
            .states
            .take_if(|all| all.iter().all(MpmdArray::is_complete))
            && let Some(ended) = ended(&states)?
        {
            let result = ended.and_then(|hashes| self.compare(p, meshes, &hashes));
            versions.end_loading(self.what.version, result);
        }

        let mut states = Vec::new();
        for device in meshes.iter().flat_map(|mesh| mesh.devices()) {
            let aval = ShapedArray::try_new(&[STATE_WORDS], DType::U32)?;
            let on = Sharding::single_device(*device);
            let reading = self.reading.clone();
            let own = p.array_from_fn(aval, on, move |_, mut view| {
                write_state(&reading.lock(), view.as_mut_slice::<u32>()?);
                Ok(())
            })?;
            states.push(p.device_put(&own, reader.replicated())?);
        }

        // An earlier question that has not been answered stays.
        self.states.get_or_insert(states);
        Ok(())
    }

    /// Returns an error if two processes have read different weights. `hashes` has one hash for
    /// each device of `meshes`.
    fn compare(&self, p: &Program, meshes: &[Mesh], hashes: &[u64]) -> Result<(), LoadRefusal> {
        let devices = meshes.iter().flat_map(|mesh| mesh.devices());
        let process = |device: &DeviceId| p.topology().process_of(*device);
        let processes: Option<Vec<ProcessId>> = devices.map(process).collect();
        let mut all =
            processes
                .unwrap_or_default()
                .into_iter()
                .zip(hashes)
                .map(|(process, hash)| ProcessHash {
                    process,
                    hash: *hash,
                });
        let Some(first) = all.next() else {
            return Ok(());
        };
        match all.find(|other| other.hash != first.hash) {
            None => Ok(()),
            Some(other) => Err(LoadRefusal::Different {
                folder: self.what.folder.clone(),
                first,
                other,
            }),
        }
    }
}

/// Reads the weights of a folder with the same model, and stores them as a version. Returns a hash
/// of the weights.
pub(super) fn take_folder(
    loaders: &[StageLoader],
    devices: &[DeviceId],
    what: &FolderVersion,
) -> Result<u64> {
    let folder = Folder::open(&what.folder)?;
    let hash = folder.content()?.of_weights();
    // All loaders have one folder.
    if let Some(loader) = loaders.first() {
        check_same_model(&loader.folder, &folder)?;
    }

    let checked = folder.clone();
    let source: WeightSource = Arc::new(move |name: &str, region: &Region, values: &mut [f32]| {
        folder.read(name, region, values)
    });
    loaders
        .iter()
        .try_for_each(|loader| loader.take(devices, what.version, &source))?;
    checked.check_weights()?;
    Ok(hash)
}

/// Writes the state of this process as [`STATE_WORDS`] words.
fn write_state(state: &FolderReading, to: &mut [u32]) {
    to.fill(0);
    match state {
        FolderReading::Running => {}
        FolderReading::Read(hash) => {
            to[..3].copy_from_slice(&[1, *hash as u32, (hash >> 32) as u32])
        }
        FolderReading::Failed(why) => {
            let most = boundary(why, why.len().min((STATE_WORDS - 2) * 4));
            let bytes = &why.as_bytes()[..most];
            to[0] = 2;
            to[1] = bytes.len() as u32;
            for (word, bytes) in to[2..].iter_mut().zip(bytes.chunks(4)) {
                let mut four = [0; 4];
                four[..bytes.len()].copy_from_slice(bytes);
                *word = u32::from_le_bytes(four);
            }
        }
    }
}

/// Returns the result of the reading: the hash of the weights on each device, or the first error.
/// `None` while a process still reads, and on processes other than the reader.
fn ended(states: &[MpmdArray]) -> Result<Option<Result<Vec<u64>, LoadRefusal>>> {
    let mut failed = None;
    let mut runs = false;
    let mut hashes = Vec::new();
    for state in states {
        let Some(host) = state.to_host()? else {
            return Ok(None);
        };
        let words = host.to_vec::<u32>()?;
        runs |= words[0] == 0;
        hashes.push(u64::from(words[1]) | u64::from(words[2]) << 32);

        if words[0] == 2 {
            let bytes: Vec<u8> = words[2..]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            let len = (words[1] as usize).min(bytes.len());
            let why = String::from_utf8_lossy(&bytes[..len]).into_owned();
            failed.get_or_insert(LoadRefusal::Failed(why));
        }
    }
    Ok((!runs).then(|| failed.map_or(Ok(hashes), Err)))
}
