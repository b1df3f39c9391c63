//! Random programs: lists of steps that all processes execute.

use fastrand::Rng;
use mpmd_core::MoveOptions;
use mpmd_core::region::Region;
use mpmd_core::sharding::{Sharding, Spec, SpecEntry};
use mpmd_core::topology::{DeviceId, Mesh};

/// Number of rows of an array that was not divided.
pub(crate) const ROWS: usize = 16;
/// Numbers of columns of the arrays: in most programs the first, in some the second. With the
/// second, pieces are too large for eager messages, and the receiver must grant them.
const COLUMNS: [usize; 2] = [8, 1024];
/// Number of steps of a program.
pub(crate) const STEPS: usize = 40;

/// A step that all processes execute. Fields such as `source` are indices of arrays or objects, in
/// the order of their creation.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Makes an array on its devices.
    Make {
        shape: [usize; 2],
        to: Sharding,
        key: u64,
    },
    /// Moves a host value, which every process has, to devices.
    Host {
        shape: [usize; 2],
        to: Sharding,
        value: f32,
    },
    /// Moves an array.
    Put {
        source: usize,
        to: Sharding,
        options: MoveOptions,
    },
    /// Moves several arrays in one call.
    PutTree { sources: Vec<usize>, to: Sharding },
    /// Multiplies an array by a host value.
    Scale { source: usize, factor: f32 },
    /// Computes the mean over an axis of the array's mesh.
    Reduce {
        source: usize,
        axis: String,
        size: usize,
    },
    /// Changes an array in place, if it is donated and nothing else reads it.
    Update { source: usize, donate: bool },
    /// Computes the mean of two arrays with the same sharding.
    Add { left: usize, right: usize },
    /// Divides the rows of an array.
    Microbatches { source: usize, m: usize },
    /// Captures a step that moves an array and back, and replays it.
    Replay {
        source: usize,
        through: Sharding,
        times: usize,
    },
    /// Makes an object on a device.
    Object { device: DeviceId },
    /// Calls a method of an object, which returns an array.
    Append {
        object: usize,
        value: f32,
        shape: [usize; 2],
    },
    /// Drops the last handle of an object.
    DropObject { object: usize },
    /// Registers a closure that is called when an array is ready.
    Then { source: usize },
    /// Waits for an array.
    Await { source: usize },
    /// Drops the program's handle of an array.
    Drop { source: usize },
    /// Broadcasts values from one process, and compares them on all.
    Agree { from: u32, value: u64, count: usize },
    /// Compares the operations that all processes have issued so far.
    Compare,
}

impl Step {
    /// True if a process that leaves out the step diverges from the other processes.
    pub(crate) fn is_operation(&self) -> bool {
        !matches!(
            self,
            Self::Then { .. } | Self::Await { .. } | Self::Drop { .. } | Self::DropObject { .. }
        )
    }

    /// Returns the number of arrays that the step makes.
    pub(crate) fn makes(&self) -> usize {
        match self {
            Self::Make { .. }
            | Self::Host { .. }
            | Self::Put { .. }
            | Self::Scale { .. }
            | Self::Reduce { .. }
            | Self::Update { .. }
            | Self::Add { .. }
            | Self::Replay { .. }
            | Self::Append { .. } => 1,
            Self::PutTree { sources, .. } => sources.len(),
            Self::Microbatches { m, .. } => *m,
            _ => 0,
        }
    }

    /// Returns the arrays that the step uses.
    pub(crate) fn uses(&self) -> Vec<usize> {
        match self {
            Self::Put { source, .. }
            | Self::Scale { source, .. }
            | Self::Reduce { source, .. }
            | Self::Update { source, .. }
            | Self::Microbatches { source, .. }
            | Self::Replay { source, .. }
            | Self::Then { source }
            | Self::Await { source }
            | Self::Drop { source } => vec![*source],
            Self::PutTree { sources, .. } => sources.clone(),
            Self::Add { left, right } => vec![*left, *right],
            _ => Vec::new(),
        }
    }
}

/// Rows and sharding of a live array, for the generator of programs.
#[derive(Clone)]
struct Known {
    rows: usize,
    sharding: Sharding,
}

/// Returns the steps of the random program of a seed, for `devices` devices. Equal arguments give
/// equal programs.
pub(crate) fn program(seed: u64, devices: usize) -> Vec<Step> {
    let random = Rng::with_seed(seed);
    let columns = COLUMNS[usize::from(seed % 8 == 7)];
    let mut maker = Maker {
        random,
        devices,
        columns,
        arrays: Vec::new(),
        objects: Vec::new(),
    };
    let mut steps = Vec::new();
    while steps.len() < STEPS {
        steps.extend(maker.step());
    }
    steps
}

/// Returns `count` random shardings for arrays of [`ROWS`] rows.
pub(crate) fn shardings(
    random: Rng,
    devices: usize,
    columns: usize,
    count: usize,
) -> Vec<Sharding> {
    let mut maker = Maker {
        random,
        devices,
        columns,
        arrays: Vec::new(),
        objects: Vec::new(),
    };
    (0..count).map(|_| maker.sharding(ROWS)).collect()
}

struct Maker {
    random: Rng,
    devices: usize,
    columns: usize,
    /// The live arrays. `None` for an array that was dropped or donated.
    arrays: Vec<Option<Known>>,
    /// The device of each object; `None` once it is dropped.
    objects: Vec<Option<DeviceId>>,
}

impl Maker {
    /// Returns a random step. `None` if the drawn step is impossible.
    fn step(&mut self) -> Option<Step> {
        let alive: Vec<usize> = (0..self.arrays.len())
            .filter(|i| self.arrays[*i].is_some())
            .collect();
        if alive.len() < 3 {
            return Some(self.new_array());
        }
        let source = *self.random.choice(&alive)?;
        let known = self.arrays[source].clone()?;
        let mesh = known.sharding.mesh().cloned();
        Some(match (self.random.u8(..20), mesh) {
            (0..5, _) => {
                let to = self.sharding(known.rows);
                let (donate, may_alias) = (self.random.u8(..4) == 0, self.random.u8(..4) != 0);
                self.adds(Known {
                    rows: known.rows,
                    sharding: to.clone(),
                });
                self.gives(source, donate);
                let options = MoveOptions::default().donate(donate).may_alias(may_alias);
                Step::Put {
                    source,
                    to,
                    options,
                }
            }
            (5..7, Some(_)) => {
                self.adds(known);
                Step::Scale {
                    source,
                    factor: f32::from(self.random.u8(1..8)) / 8.0,
                }
            }
            (7..9, Some(mesh)) => {
                let axis = self.random.choice(mesh.axis_names())?.clone();
                let size = mesh.axis_size(&axis).ok()?;
                self.adds(known);
                Step::Reduce { source, axis, size }
            }
            (9..11, Some(_)) => {
                let donate = self.random.u8(..3) != 0;
                self.adds(known);
                self.gives(source, donate);
                Step::Update { source, donate }
            }
            (11, Some(_)) => {
                let right = *self.random.choice(&self.alike(&alive, &known))?;
                self.adds(known);
                Step::Add {
                    left: source,
                    right,
                }
            }
            (12, _) => self.microbatches(source, &known)?,
            (13, _) => {
                self.arrays[source] = None;
                Step::Drop { source }
            }
            (14, _) => match self.random.u8(..4) {
                0 => Step::Agree {
                    from: self.random.u32(..),
                    value: self.random.u64(..1000),
                    count: [1, 20_000][self.random.usize(..2)],
                },
                1 => Step::Then { source },
                2 => Step::Await { source },
                _ => Step::Compare,
            },
            (15, _) => {
                let sources: Vec<usize> = alive
                    .iter()
                    .copied()
                    .filter(|i| self.rows(*i) == known.rows)
                    .collect();
                let to = self.sharding(known.rows);
                for _ in &sources {
                    self.adds(Known {
                        rows: known.rows,
                        sharding: to.clone(),
                    });
                }
                Step::PutTree { sources, to }
            }
            (16, Some(_)) => {
                let through = self.sharding(known.rows);
                self.adds(known);
                Step::Replay {
                    source,
                    through,
                    times: self.random.usize(1..4),
                }
            }
            (17..20, _) => self.of_objects(),
            _ => return None,
        })
    }

    fn new_array(&mut self) -> Step {
        let (rows, key) = (
            [ROWS, ROWS / 2][self.random.usize(..2)],
            self.random.u64(..1000),
        );
        let to = self.sharding(rows);
        self.adds(Known {
            rows,
            sharding: to.clone(),
        });
        let shape = [rows, self.columns];
        match self.random.u8(..3) {
            0 => Step::Host {
                shape,
                to,
                value: key as f32,
            },
            _ => Step::Make { shape, to, key },
        }
    }

    fn of_objects(&mut self) -> Step {
        let alive: Vec<usize> = (0..self.objects.len())
            .filter(|i| self.objects[*i].is_some())
            .collect();
        match (self.random.choice(alive), self.random.u8(..8)) {
            (Some(object), 0) => {
                self.objects[object] = None;
                Step::DropObject { object }
            }
            (Some(object), 1..7) => {
                let device = self.objects[object].expect("it is alive");
                self.adds(Known {
                    rows: ROWS,
                    sharding: alone(device).replicated(),
                });
                let (value, shape) = (f32::from(self.random.u8(..)), [ROWS, self.columns]);
                Step::Append {
                    object,
                    value,
                    shape,
                }
            }
            _ => {
                let device = DeviceId(self.random.u32(..self.devices as u32));
                self.objects.push(Some(device));
                Step::Object { device }
            }
        }
    }

    fn microbatches(&mut self, source: usize, known: &Known) -> Option<Step> {
        let m = self.random.usize(1..3);
        let rows = known.rows / m;
        // Its parts must still divide over the mesh: each device's rows must be divisible.
        let layout = known.sharding.layout(&[known.rows, self.columns]).ok()?;
        let divisible = |region: &Region| region.range(0).len().is_multiple_of(m);
        // Enumerated parts apply to one shape only.
        if !layout.regions().iter().all(divisible)
            || known.sharding.layout(&[rows, self.columns]).is_err()
        {
            return None;
        }
        (0..m).for_each(|_| {
            self.adds(Known {
                rows,
                sharding: known.sharding.clone(),
            })
        });
        Some(Step::Microbatches { source, m })
    }

    fn adds(&mut self, known: Known) {
        self.arrays.push(Some(known));
    }

    fn gives(&mut self, source: usize, donate: bool) {
        if donate {
            self.arrays[source] = None;
        }
    }

    fn rows(&self, array: usize) -> usize {
        self.arrays[array].as_ref().map_or(0, |known| known.rows)
    }

    fn alike(&self, alive: &[usize], known: &Known) -> Vec<usize> {
        let is_like = |i: &usize| {
            self.arrays[*i]
                .as_ref()
                .is_some_and(|other| other.rows == known.rows && other.sharding == known.sharding)
        };
        alive.iter().copied().filter(is_like).collect()
    }

    /// Returns a random sharding for `rows` rows, on some of the devices in any order. It is over a
    /// mesh, in chunks, or in enumerated parts.
    fn sharding(&mut self, rows: usize) -> Sharding {
        let mut ids: Vec<u32> = (0..self.devices as u32).collect();
        self.random.shuffle(&mut ids);
        let shapes: [&[usize]; 6] = [&[1], &[2], &[4], &[2, 2], &[1, 4], &[4, 2]];
        let fits = |shape: &&[usize]| shape.iter().product::<usize>() <= self.devices;
        let fitting: Vec<&[usize]> = shapes.into_iter().filter(fits).collect();
        let shape = self.random.choice(fitting).expect("one device fits");
        let axes: Vec<(&str, usize)> = ["a", "b"].into_iter().zip(shape.iter().copied()).collect();
        let count = shape.iter().product();
        let devices: Vec<DeviceId> = ids[..count].iter().copied().map(DeviceId).collect();
        let mesh = Mesh::new(&axes, devices.clone()).expect("a mesh of the devices");
        if count == 1 && self.random.bool() {
            return Sharding::single_device(devices[0]);
        }
        match self.random.u8(..8) {
            0 => {
                let axis = self.random.isize(-2..2);
                return Sharding::chunk(axis, devices).expect("chunks over devices");
            }
            1 => return self.parts(devices, rows),
            _ => {}
        }
        loop {
            let mut entries = [SpecEntry::None, SpecEntry::None];
            for (axis, _) in &axes {
                let dim = self.random.usize(..3);
                if dim < 2 {
                    let before = entries[dim].axes().to_vec();
                    entries[dim] = SpecEntry::from([before, vec![(*axis).to_owned()]].concat());
                }
            }
            let sharding = mesh.sharding(Spec::new(entries.to_vec()));
            if sharding.layout(&[rows, self.columns]).is_ok() {
                return sharding;
            }
        }
    }

    /// Returns an enumerated sharding with one part for each device, made by random cuts across the
    /// whole array. Some parts may be empty.
    fn parts(&mut self, devices: Vec<DeviceId>, rows: usize) -> Sharding {
        let mut parts = vec![Region::full(&[rows, self.columns])];
        while parts.len() < devices.len() {
            let part = parts.swap_remove(self.random.usize(..parts.len()));
            let dim = self.random.usize(..2);
            let range = part.range(dim);
            let middle = range.start + self.random.usize(..=range.len());
            for side in [range.start..middle, middle..range.end] {
                let mut ranges: Vec<_> = part.ranges().collect();
                ranges[dim] = side;
                parts.push(Region::new(ranges));
            }
        }
        Sharding::enumerated(devices.into_iter().zip(parts).collect()).expect("parts of devices")
    }
}

/// Returns a mesh with this device alone.
pub(crate) fn alone(device: DeviceId) -> Mesh {
    Mesh::new(&[("x", 1)], vec![device]).expect("a mesh of one device")
}
