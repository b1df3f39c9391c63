//! The versions of a model's weights, while a trainer publishes new ones.
//!
//! A version is taken on each process by a thread: that of a subscription ([`Arrival`]), or one
//! that reads a folder ([`Loading`]). Passes find it by its number (`load`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use half::{bf16, f16};
use mpmd::aval::{DType, ShapedArray};
use mpmd::region::Region;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::weights::{Intake, Received};
use mpmd::{DeviceId, Error, MpmdArray, ProcessId, Program, Result};
use mpmd_base::block::Mutex;

use crate::hub::folder::Folder;
use crate::inference::load::{Load, Source};

/// Words of the state of a device that reads a folder: the state, then the two halves of the hash
/// of the weights, or else the number of bytes of a reason, and the reason.
const STATE: usize = 2 + 64;

/// Bits of a version below those that tell its source: the number for people.
const NUMBER: u32 = 48;
/// The bit of versions that are read from a folder.
const FROM_FOLDER: u64 = 1 << 63;

/// Returns the number of a version for people: the one that its trainer gave it.
pub fn version_number(version: u64) -> u64 {
    version & ((1 << NUMBER) - 1)
}

/// Returns the version of weights that are read from a folder while `newest` is in use.
pub fn next_of_folder(newest: u64) -> u64 {
    (version_number(newest) + 1) | FROM_FOLDER
}

/// Returns the version of received weights. A trainer that has begun anew gives its numbers once
/// more.
fn received_version(received: &Received) -> u64 {
    (received.publication << NUMBER | version_number(received.version)) & !FROM_FOLDER
}

/// The versions of the weights of an inference. Clones share the state.
///
/// Version 0 are the weights of the folder. The upper bits of a later version tell its source; the
/// others are [`version_number`].
#[derive(Clone, Debug, Default)]
pub struct Versions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    newest: AtomicU64,
    has_room: AtomicBool,
    is_loading: AtomicBool,
    failure: Mutex<Option<String>>,
    publisher: Mutex<Option<Result<(), String>>>,
}

impl Versions {
    /// Returns the newest version that is whole on every process. 0 before the first one. Does not
    /// block.
    pub fn newest(&self) -> u64 {
        self.0.newest.load(Ordering::Acquire)
    }

    /// Says that every process has a further version. There is no room for others until
    /// [`set_room`](Self::set_room).
    pub fn arrive(&self, version: u64) {
        self.set_room(false);
        *self.0.failure.lock() = None;
        self.0.newest.store(version, Ordering::Release);
    }

    /// Says that a version was not taken.
    fn refuse(&self, why: String) {
        *self.0.failure.lock() = Some(why);
    }

    /// Says if there is room for a further version: no other one than the newest is in use.
    pub fn set_room(&self, has_room: bool) {
        self.0.has_room.store(has_room, Ordering::Release);
    }

    /// True if weights of a folder are being read.
    pub fn is_loading(&self) -> bool {
        self.0.is_loading.load(Ordering::Acquire)
    }

    /// Returns the reason why the last version was not taken, until a later one is.
    pub fn failure(&self) -> Option<String> {
        self.0.failure.lock().clone()
    }

    /// Returns the state of the link to a publisher, if the weights are subscribed to: why there is
    /// none now.
    pub fn publisher(&self) -> Option<Result<(), String>> {
        self.0.publisher.lock().clone()
    }

    /// True if there is room for a further version.
    pub fn has_room(&self) -> bool {
        self.0.has_room.load(Ordering::Acquire)
    }
}

/// Takes the versions of a subscription.
pub(crate) struct Arrival {
    loads: Vec<Load>,
    devices: Vec<DeviceId>,
    versions: Versions,
    /// The version that was taken last, until its end.
    taken: Option<u64>,
    /// True on process 0, which decides on the passes.
    decides: bool,
    /// The versions that this process has taken and still holds.
    held: Vec<u64>,
}

impl Intake for Arrival {
    fn has_room(&mut self) -> bool {
        let has_room = match self.decides {
            true => self.versions.has_room(),
            // An older one goes with the pass that retires it, which this process may reach late.
            false => {
                let Self { held, loads, .. } = self;
                held.retain(|version| loads.iter().any(|load| load.has(*version)));
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
        let source: Source = Arc::new(move |name: &str, region: &Region, values: &mut [f32]| {
            read(&received, name, region, values).map_err(Error::Kernel)
        });
        self.taken = Some(version);
        self.held.push(version);
        let mut loads = self.loads.iter();
        let taken = loads.try_for_each(|load| load.take(&self.devices, version, &source));
        taken.map_err(|why| why.to_string())
    }

    fn end(&mut self, number: u64, refused: Option<&str>) {
        let taken = self.taken.take();
        match (taken, refused) {
            (_, Some(why)) => {
                if let Some(version) = taken {
                    self.loads.iter().for_each(|load| load.retire(version));
                }
                self.versions.refuse(format!("version {number}: {why}"));
            }
            (Some(version), None) => self.versions.arrive(version),
            (None, None) => {}
        }
    }

    fn linked(&mut self, ended: Option<&str>) {
        let state = ended.map_or(Ok(()), |why| Err(why.to_owned()));
        *self.versions.0.publisher.lock() = Some(state);
    }
}

/// Reads a region of a received leaf as `f32`.
fn read(
    received: &Received,
    name: &str,
    region: &Region,
    values: &mut [f32],
) -> Result<(), String> {
    let dtype = received
        .dtype(name)
        .ok_or_else(|| format!("{name} was not published"))?;
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
        other => return Err(format!("{name} is of {other}")),
    }
    check_finite(name, region, values)
}

/// Checks that the values of a version can be computed with.
fn check_finite(name: &str, region: &Region, values: &[f32]) -> Result<(), String> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(format!("{name} {region} has values that are not finite")),
    }
}

/// The weights of a folder that threads of all processes are reading.
pub(crate) struct Loading {
    version: u64,
    folder: PathBuf,
    /// The result on this process: the hash of the weights.
    result: Arc<Mutex<Option<Result<u64, String>>>>,
    /// The states of all devices, on the way to the reader.
    states: Option<Vec<MpmdArray>>,
}

impl Arrival {
    /// Creates the intake of a subscription on this process.
    pub(crate) fn new(p: &Program, loads: &[Load], versions: &Versions) -> Self {
        let none = Err("the publisher has not been found yet".to_owned());
        *versions.0.publisher.lock() = Some(none);
        let devices = p.topology().devices_of(p.process()).to_vec();
        let (loads, versions) = (loads.to_vec(), versions.clone());
        let decides = p.process() == ProcessId(0);
        Self {
            loads,
            devices,
            versions,
            taken: None,
            decides,
            held: Vec::new(),
        }
    }
}

impl Loading {
    /// Begins to read the weights of a folder on this process, on a thread of its own.
    pub(crate) fn begin(
        p: &Program,
        loads: &[Load],
        versions: &Versions,
        (folder, version): (&Path, u64),
    ) -> Self {
        versions.0.is_loading.store(true, Ordering::Release);
        let result = Arc::new(Mutex::new(None));
        let (path, loads, to) = (folder.to_owned(), loads.to_vec(), result.clone());
        let devices = p.topology().devices_of(p.process()).to_vec();
        let read = move || {
            let loaded = take_folder(&loads, &devices, &path, version);
            *to.lock() = Some(loaded.map_err(|why| why.to_string()));
        };
        let builder = std::thread::Builder::new().name("mpmd-load".to_owned());
        if let Err(why) = builder.spawn(read) {
            *result.lock() = Some(Err(why.to_string()));
        }
        Self {
            version,
            folder: folder.to_owned(),
            result,
            states: None,
        }
    }

    /// Issues that the reader hears the states of these devices. Tells `versions` there if the last
    /// states say that all have ended.
    ///
    /// # Errors
    ///
    /// As for [`Program::device_put`].
    pub(crate) fn poll(
        &mut self,
        p: &mut Program,
        meshes: &[Mesh],
        reader: &Mesh,
        versions: &Versions,
    ) -> Result<()> {
        if let Some(states) = self
            .states
            .take_if(|all| all.iter().all(MpmdArray::is_complete))
            && let Some(ended) = ended(&states)?
        {
            let ended = ended.and_then(|hashes| self.compared(p, meshes, &hashes));
            match ended {
                Ok(()) => versions.arrive(self.version),
                Err(why) => {
                    let number = version_number(self.version);
                    versions.refuse(format!("version {number}: {why}"));
                }
            }
            versions.0.is_loading.store(false, Ordering::Release);
        }
        let mut states = Vec::new();
        for device in meshes.iter().flat_map(|mesh| mesh.devices()) {
            let aval = ShapedArray::try_new(&[STATE], DType::U32)?;
            let (on, result) = (Sharding::single_device(*device), self.result.clone());
            let own = p.array_from_fn(aval, on, move |_, mut view| {
                write_state(result.lock().as_ref(), view.as_mut_slice::<u32>()?);
                Ok(())
            })?;
            states.push(p.device_put(&own, reader.replicated())?);
        }
        // An earlier question that has not been answered stays.
        self.states.get_or_insert(states);
        Ok(())
    }
}

impl Loading {
    /// Returns an error if two processes have read other weights. `hashes` are those of the devices
    /// of the meshes.
    fn compared(&self, p: &Program, meshes: &[Mesh], hashes: &[u64]) -> Result<(), String> {
        let devices = meshes.iter().flat_map(|mesh| mesh.devices());
        let process = |device: &DeviceId| p.topology().process_of(*device);
        let processes: Option<Vec<ProcessId>> = devices.map(process).collect();
        let mut all = processes.unwrap_or_default().into_iter().zip(hashes);
        let Some((first, hash)) = all.next() else {
            return Ok(());
        };
        match all.find(|(_, other)| *other != hash) {
            None => Ok(()),
            Some((process, other)) => Err(format!(
                "{}: the weights of process {first} have hash {hash:016x}, those of process \
                 {process} {other:016x}: give all hosts the same files",
                self.folder.display()
            )),
        }
    }
}

/// Takes a version of the weights from a folder, whose model must be the same. Returns a hash of
/// the weights.
pub(crate) fn take_folder(
    loads: &[Load],
    devices: &[DeviceId],
    path: &Path,
    version: u64,
) -> Result<u64> {
    let folder = Folder::open(path)?;
    let hash = folder.content()?.of_weights();
    let checked = folder.clone();
    if loads
        .iter()
        .any(|load| load.folder.config() != folder.config())
    {
        let path = path.display();
        return Err(Error::Environment(format!(
            "{path}: its model has another config"
        )));
    }
    let source: Source = Arc::new(move |name: &str, region: &Region, values: &mut [f32]| {
        folder.read(name, region, values)?;
        check_finite(name, region, values)
            .map_err(|why| Error::Environment(format!("{}: {why}", folder.path().display())))
    });
    loads
        .iter()
        .try_for_each(|load| load.take(devices, version, &source))?;
    checked.check_weights()?;
    Ok(hash)
}

fn write_state(state: Option<&Result<u64, String>>, to: &mut [u32]) {
    to.fill(0);
    match state {
        None => {}
        Some(Ok(hash)) => to[..3].copy_from_slice(&[1, *hash as u32, (hash >> 32) as u32]),
        Some(Err(why)) => {
            let bytes = &why.as_bytes()[..why.len().min((STATE - 2) * 4)];
            (to[0], to[1]) = (2, bytes.len() as u32);
            for (word, bytes) in to[2..].iter_mut().zip(bytes.chunks(4)) {
                let mut four = [0; 4];
                four[..bytes.len()].copy_from_slice(bytes);
                *word = u32::from_le_bytes(four);
            }
        }
    }
}

/// Returns how the reading has ended: with a hash of the weights on each device. `None` if a device
/// still reads, or on other processes than the reader.
fn ended(states: &[MpmdArray]) -> Result<Option<Result<Vec<u64>, String>>> {
    let (mut failed, mut runs) = (None, false);
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
            failed.get_or_insert(String::from_utf8_lossy(&bytes[..len]).into_owned());
        }
    }
    Ok((!runs).then(|| failed.map_or(Ok(hashes), Err)))
}
