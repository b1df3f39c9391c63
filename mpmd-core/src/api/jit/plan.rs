//! The plan of a call: computed once from the shapes and shardings of its inputs, then kept.

use std::collections::HashSet;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;

use super::call::DeviceCall;
use super::dimensions::{check_dimensions, shardings_by_rule};
use super::prepared::{DeviceSlots, PreparedCalls};
use super::settings::KernelSettings;
use super::unchanged_inputs::UnchangedInputs;
use super::warm::Warm;
use crate::error::IssueProblem;
use crate::exec::array::{LocalShard, Made, MpmdArray, NewArrays, Origin, Placed, Repr, Shards};
use crate::exec::{CollectiveGroup, MOST_COLLECTIVES, MOST_DEVICES, Rolling, Runtime};
use crate::kernel::{
    Collective, DeviceBindings, MeshPosition, OutputShapes, ShardInfo, UntypedKernel,
};
use crate::{api::program::Program, exec::dry_run::KnownDescriptor};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{DeviceParts, MemoryKind, Sharding};
use mpmd_layout::topology::{DeviceId, Mesh, MeshError, Topology};
use mpmd_layout::tree::{PrefixTree, Structure};
use mpmd_memory::BufferSizes;

/// Maximum number of ended calls that a [`Bound`] keeps for reuse. About as many calls are queued
/// when a program runs ahead.
const MOST_SPARE: usize = 1024;

/// Maximum number of donated inputs that are each compared with all other inputs. For more, the
/// inputs are sorted instead.
const FEW_DONATED: usize = 4;

type PlanResult<T> = Result<T, IssueProblem>;

/// A kernel with the plan of its calls. Both are in one object, so that a queued call holds one
/// pointer.
pub(super) struct Bound {
    pub(super) kernel: Arc<dyn UntypedKernel>,
    pub(super) plan: CallPlan,
    /// The results of compiling the kernel's code for CUDA devices.
    pub(super) warm: Arc<Warm>,
    /// Ended calls whose buffers are dropped, kept for reuse.
    #[expect(
        clippy::vec_box,
        reason = "the boxes themselves are reused: a queue takes them as they are"
    )]
    spare: Mutex<Vec<Box<DeviceCall>>>,
    /// Empty lists that replays reuse.
    pub(super) prepared: Mutex<PreparedCalls>,
    pub(super) unchanged: Mutex<UnchangedInputs>,
}

impl Bound {
    pub(super) fn new(kernel: Arc<dyn UntypedKernel>, plan: CallPlan, warm: Arc<Warm>) -> Self {
        Self {
            kernel,
            plan,
            warm,
            spare: Mutex::new(Vec::new()),
            prepared: Mutex::default(),
            unchanged: Mutex::default(),
        }
    }

    /// Returns an empty call: a kept one, or a new one.
    pub(super) fn spare(&self) -> Box<DeviceCall> {
        self.spare.lock().pop().unwrap_or_default()
    }

    /// Keeps an emptied call for reuse by [`Self::spare`]. Drops it if [`MOST_SPARE`] calls are
    /// kept already.
    pub(super) fn keep(&self, call: Box<DeviceCall>) {
        let mut spare = self.spare.lock();
        if spare.len() < MOST_SPARE {
            spare.push(call);
        }
    }
}

/// The part of a call that depends only on the tree, shapes and shardings of its inputs. Later
/// calls reuse it.
pub(super) struct CallPlan {
    pub(super) runtime: Arc<Runtime>,
    pub(super) inputs: Vec<InputPlan>,
    pub(super) takes_host_values: bool,
    /// Indices of the donated inputs.
    donated: Vec<usize>,
    pub(super) outputs: Vec<OutputPlan>,
    /// The properties of each output array: shape, sharding and layout.
    made: Arc<[Arc<Made>]>,
    pub(super) input_structure: Structure,
    pub(super) output_structure: Structure,
    pub(super) mesh: DeviceBindings,
    /// This process's devices in the mesh, each with its part of the call.
    pub(super) seats: Vec<DeviceBinding>,
    /// Bytes of all outputs on this process's devices, which count for the run-ahead limit.
    pub(super) bytes: u64,
    pub(super) objects: ObjectPlan,
    /// True if the job recomputes calls and calls of this plan can be recomputed.
    pub(super) is_recomputable: bool,
    pub(super) fingerprint: u64,
    pub(super) what: Arc<CallWhat>,
    paths: Vec<String>,
    /// Index of the call's descriptor in the dry run, once it is known.
    pub(super) known_descriptor: KnownDescriptor,
}

/// The indices of a call's inputs and outputs that are objects.
#[derive(Default)]
pub(super) struct ObjectPlan {
    /// Indices of the inputs that are objects.
    pub(super) inputs: Vec<usize>,
    /// Indices of the outputs that are objects.
    pub(super) outputs: Vec<usize>,
    /// The new objects with declared bytes, in ascending order of outputs.
    pub(super) bytes: Vec<OutputBytes>,
}

/// The declared bytes, on each device, of a new object.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct OutputBytes {
    /// Index of the output.
    pub(super) output: usize,
    pub(super) bytes: u64,
}

pub(super) struct InputPlan {
    aval: ShapedArray,
    /// The properties of the input array for which the plan was made; `None` for host values.
    pub(super) made: Option<Arc<Made>>,
    pub(super) donated: bool,
    /// True if an output updates this input in place.
    pub(super) in_place: bool,
}

impl InputPlan {
    fn sharding(&self) -> Option<&Sharding> {
        self.made.as_ref().map(|made| &made.sharding)
    }

    /// True if the array has the shape, dtype and sharding for which the plan was made.
    fn fits(&self, leaf: &MpmdArray) -> bool {
        match (&self.made, &leaf.repr) {
            // Mostly arrays of the same operation of the step before.
            (Some(made), Repr::Placed(placed)) => {
                let found = placed.made();
                Arc::ptr_eq(made, found)
                    || made.sharding == found.sharding && made.aval == found.aval
            }
            (None, Repr::Host(host)) => self.aval == *host.aval(),
            _ => false,
        }
    }
}

/// Returns the index of another input that is the same array as input `i`, if any.
fn twin(leaves: &[&MpmdArray], i: usize) -> Option<usize> {
    leaves
        .iter()
        .enumerate()
        .position(|(j, leaf)| j != i && leaf.is_same(leaves[i]))
}

pub(super) struct OutputPlan {
    pub(super) made: Arc<Made>,
    /// Index of the input that this output updates in place; `None` for a new output.
    pub(super) alias: Option<usize>,
}

/// A device of this process that runs the kernel: its position in the mesh, and its shards of the
/// inputs and outputs.
pub(super) struct DeviceBinding {
    /// Describes the call in messages. Each device has its own object, so that device threads and
    /// the program thread share no reference count.
    pub(super) what: Arc<dyn fmt::Display + Send + Sync>,
    pub(super) local_index: usize,
    pub(super) place: MeshPosition,
    pub(super) inputs: Vec<ShardInfo>,
    pub(super) outputs: Vec<ShardInfo>,
    /// Size in bytes of each output that does not take over an input's memory, in order.
    pub(super) fresh: Vec<usize>,
    /// Total size of the outputs in `fresh` and of new objects with declared bytes.
    pub(super) reserved: BufferSizes,
}

/// The description of a call in messages: kernel, mesh, and the first four inputs.
pub(super) struct CallWhat {
    pub(super) name: String,
    mesh: Mesh,
    inputs: Vec<String>,
}

impl CallWhat {
    /// Creates the description of a call on these inputs.
    fn of(jit: &KernelSettings, leaves: &[&MpmdArray]) -> Self {
        let inputs = leaves.iter().map(|leaf| match leaf.sharding() {
            Some(sharding) => match sharding.spec() {
                Some(spec) if unusual(sharding).is_none() => format!("{} {spec}", leaf.aval()),
                _ => format!("{} {sharding}", leaf.aval()),
            },
            None => format!("{} uncommitted", leaf.aval()),
        });
        Self {
            name: jit.kernel.name().to_owned(),
            mesh: jit.mesh.clone(),
            inputs: inputs.collect(),
        }
    }
}

impl fmt::Display for CallWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "jit {} on {}", self.name, self.mesh)?;
        let shown = self.inputs.len().min(4);
        write!(f, " of ({}", self.inputs[..shown].join(", "))?;
        if shown < self.inputs.len() {
            write!(f, ", and {} more", self.inputs.len() - shown)?;
        }
        f.write_str(")")
    }
}

impl CallPlan {
    /// True if the inputs have the number, shapes, dtypes and shardings for which this plan was
    /// made. The caller knows that the first `checked` inputs fit.
    pub(super) fn fits(&self, leaves: &[&MpmdArray], checked: usize) -> bool {
        let others = || self.inputs.iter().zip(leaves).skip(checked);
        self.inputs.len() == leaves.len() && others().all(|(input, leaf)| input.fits(leaf))
    }

    /// True if the output updates a donated input, so that it takes over the input's memory.
    pub(super) fn takes_over(&self, output: &OutputPlan) -> bool {
        output.alias.is_some_and(|input| self.inputs[input].donated)
    }

    pub(super) fn input_path(&self, index: usize) -> &str {
        &self.paths[index]
    }

    /// Returns an error if a donated input is the same array as another input of the call.
    pub(super) fn check_donations(&self, leaves: &[&MpmdArray]) -> PlanResult<()> {
        let twins = match self.donated.len() {
            0 => None,
            1..=FEW_DONATED => self
                .donated
                .iter()
                .find_map(|i| Some((*i, twin(leaves, *i)?))),
            _ => self.first_twins(leaves),
        };
        match twins {
            None => Ok(()),
            Some((i, j)) => Err(IssueProblem::Signature(format!(
                "{:?} is donated, and is the same array as {:?}",
                self.paths[i], self.paths[j]
            ))),
        }
    }

    /// Finds the first donated input that is the same array as another input. Returns the indices
    /// of both. Takes linear time, for calls that donate many inputs.
    fn first_twins(&self, leaves: &[&MpmdArray]) -> Option<(usize, usize)> {
        let mut origins: Vec<(u64, u32)> = leaves.iter().filter_map(|leaf| leaf.origin()).collect();
        origins.sort_unstable();
        // Seldom: the same array twice, donated or not, or arrays of several programs.
        let twice = origins.windows(2).any(|pair| pair[0] == pair[1]);
        twice
            .then(|| {
                self.donated
                    .iter()
                    .find_map(|i| Some((*i, twin(leaves, *i)?)))
            })
            .flatten()
    }

    /// Returns an error if a captured step calls the kernel and the call donates an array from
    /// outside the step. Arrays that the step made or has as inputs may be donated.
    pub(super) fn check_given_up(
        &self,
        program: &Program,
        leaves: &[&MpmdArray],
    ) -> PlanResult<()> {
        let donated = self
            .inputs
            .iter()
            .zip(&self.paths)
            .zip(leaves)
            .filter(|((input, _), _)| input.donated);
        let donated: Vec<(String, &MpmdArray)> = donated
            .map(|((_, path), leaf)| (path.clone(), *leaf))
            .collect();
        program.check_given_up(&donated)
    }

    /// Marks the arrays that this call donates as donated to operation `op`. Later uses of them
    /// fail.
    pub(super) fn donate(&self, leaves: &[&MpmdArray], op: u64, at: &'static Location<'static>) {
        for index in &self.donated {
            if let Repr::Placed(placed) = &leaves[*index].repr {
                placed.donate(op, at);
            }
        }
    }

    /// Returns handles to the outputs of operation `op`. Takes the async buffers of local shards
    /// from `slots`, which has a list for each local device.
    pub(super) fn arrays(
        &self,
        slots: &mut [DeviceSlots],
        op: u64,
        at: &'static Location<'static>,
    ) -> NewArrays {
        if self.seats.is_empty() && self.runtime.dry_run.is_none() {
            return Placed::remote_arrays(&self.made, Origin { op, leaf: 0, at });
        }

        let all = self.outputs.iter().enumerate().map(|(i, output)| {
            let next = |slots: &mut DeviceSlots| {
                Some(LocalShard {
                    device: slots.device,
                    slot: slots.buffers.next()?,
                })
            };
            let shards = match &mut *slots {
                [one] => next(one).map_or_else(|| Shards::Several(Vec::new()), Shards::One),
                several => Shards::Several(several.iter_mut().filter_map(next).collect()),
            };
            Placed::new(
                output.made.clone(),
                shards,
                Origin {
                    op,
                    leaf: i as u32,
                    at,
                },
            )
        });
        Placed::arrays(all)
    }

    /// Creates the plan of a call on a tree of this structure with these leaves.
    ///
    /// # Errors
    ///
    /// If the inputs do not fit the kernel's mesh and shardings, or the kernel refuses the shapes.
    /// If its signature contradicts the inputs, the outputs or the mesh.
    pub(super) fn new(
        jit: &KernelSettings,
        runtime: &Arc<Runtime>,
        input_structure: Structure,
        leaves: &[&MpmdArray],
    ) -> PlanResult<Self> {
        let paths = input_structure.paths();
        jit.mesh
            .replicated()
            .check_devices(&runtime.topology)
            .map_err(|why| IssueProblem::Sharding {
                path: String::new(),
                why,
            })?;
        check_inputs(jit, &input_structure, &paths, leaves)?;

        let mut shapes = leaves.iter().map(|leaf| leaf.aval().clone());
        let signature = jit
            .kernel
            .infer(&input_structure, &mut shapes)
            .map_err(|error| IssueProblem::Infer(Box::new(error)))?;
        let OutputShapes {
            structure: output_structure,
            paths: output_paths,
            shapes: output_shapes,
        } = signature.outputs;
        let what = Arc::new(CallWhat::of(jit, leaves));
        let shardings = match &jit.outputs {
            Some(declared) => declared
                .broadcast(&output_structure)
                .map_err(IssueProblem::Tree)?,
            None => shardings_by_rule(&*jit.kernel, &jit.mesh, leaves, &output_shapes)?,
        };
        let mut outputs = output_plans(runtime, &output_paths, &output_shapes, shardings, &what)?;
        let mut inputs = input_plans(jit, &input_structure, leaves)?;
        let made: Vec<&Made> = outputs.iter().map(|output| &*output.made).collect();
        let parts = check_dimensions(&*jit.kernel, leaves, &made)?;

        for (input, output) in &signature.aliases {
            let i = find(&paths, input, "input")?;
            let o = find(&output_paths, output, "output")?;
            check_alias(&inputs[i], leaves[i], &outputs[o], input, output)?;
            inputs[i].in_place = true;
            outputs[o].alias = Some(i);
        }
        let declared = &signature.object_bytes;
        let objects = ObjectPlan::new(&inputs, &outputs, declared, &output_paths)?;
        check_collectives(&jit.mesh, &signature.collectives)?;
        let mesh = DeviceBindings {
            mesh: jit.mesh.clone(),
            collectives: signature.collectives,
        };

        let planner = SeatPlanner {
            what: &what,
            mesh: &mesh,
            leaves,
            inputs: &inputs,
            outputs: &outputs,
            parts: parts.as_ref(),
            objects: &objects,
            topology: &runtime.topology,
        };
        let seats = jit
            .mesh
            .devices()
            .iter()
            .filter_map(|device| Some((runtime.local_index(*device)?, *device)))
            .map(|(local_index, device)| planner.seat(local_index, device))
            .collect::<PlanResult<Vec<_>>>()?;
        let bytes = bytes_here(&seats, &objects);
        let fingerprint = fingerprint(&*jit.kernel, &mesh, &inputs, &outputs);

        let mut plan = Self {
            runtime: runtime.clone(),
            takes_host_values: inputs.iter().any(|input| input.made.is_none()),
            donated: (0..inputs.len())
                .filter(|index| inputs[*index].donated)
                .collect(),
            inputs,
            made: outputs.iter().map(|output| output.made.clone()).collect(),
            outputs,
            input_structure,
            output_structure,
            mesh,
            seats,
            bytes,
            objects,
            is_recomputable: false,
            fingerprint,
            what,
            paths,
            known_descriptor: KnownDescriptor::default(),
        };
        plan.is_recomputable = runtime.config.check_replay > 0 && plan.can_be_recomputed();
        Ok(plan)
    }
}

/// Returns the plans of outputs with these shapes and shardings.
fn output_plans(
    runtime: &Arc<Runtime>,
    paths: &[String],
    avals: &[ShapedArray],
    shardings: Vec<Sharding>,
    what: &Arc<CallWhat>,
) -> PlanResult<Vec<OutputPlan>> {
    let mut outputs = Vec::new();
    for ((path, aval), sharding) in paths.iter().zip(avals).zip(shardings) {
        let layout = sharding
            .layout(aval.shape())
            .map_err(|why| IssueProblem::Sharding {
                path: format!("output {path}"),
                why,
            })?;
        let aval = aval.clone();
        let made = Made::new(aval, sharding, layout, what.clone(), runtime.clone());
        outputs.push(OutputPlan {
            made: Arc::new(made),
            alias: None,
        });
    }
    Ok(outputs)
}

/// Returns the plans of the inputs, with `in_place` false. Fails if the kernel donates a path that
/// no input has.
fn input_plans(
    jit: &KernelSettings,
    structure: &Structure,
    leaves: &[&MpmdArray],
) -> PlanResult<Vec<InputPlan>> {
    let mut donated = HashSet::new();
    for path in &jit.donate {
        let found = structure.leaves_at(path);
        if found.is_empty() {
            return Err(IssueProblem::Signature(format!(
                "donate({path:?}) names none of the inputs"
            )));
        }
        donated.extend(found);
    }

    let inputs = leaves.iter().enumerate().map(|(i, leaf)| InputPlan {
        aval: leaf.aval().clone(),
        made: leaf.made().cloned(),
        // Host values have no memory of a device to give.
        donated: leaf.made().is_some() && donated.contains(&i),
        in_place: false,
    });
    Ok(inputs.collect())
}

/// Returns the total bytes of all outputs and new objects on this process's devices.
fn bytes_here(seats: &[DeviceBinding], objects: &ObjectPlan) -> u64 {
    let held: u64 = objects.bytes.iter().map(|object| object.bytes).sum();
    let bytes = seats
        .iter()
        .flat_map(|seat| &seat.outputs)
        .map(|info| info.bytes() as u64);
    bytes.sum::<u64>() + held * seats.len() as u64
}

/// Checks the collectives that a signature declares on `mesh`.
fn check_collectives(mesh: &Mesh, collectives: &[Collective]) -> PlanResult<()> {
    for collective in collectives {
        collective.check(mesh).map_err(|why| {
            IssueProblem::Signature(format!("the signature declares {collective}, but {why}"))
        })?;
    }

    if collectives.len() > MOST_COLLECTIVES {
        return Err(IssueProblem::Signature(format!(
            "the signature declares {} collectives; the maximum is {MOST_COLLECTIVES}",
            collectives.len()
        )));
    }
    if !collectives.is_empty() && mesh.devices().len() > MOST_DEVICES {
        return Err(IssueProblem::Signature(format!(
            "the signature declares collectives on a mesh of {} devices; the maximum is \
             {MOST_DEVICES}",
            mesh.devices().len()
        )));
    }
    Ok(())
}

impl ObjectPlan {
    /// Returns the declared bytes of each new object of the call on one device.
    pub(super) fn held(&self) -> impl Iterator<Item = usize> + '_ {
        self.bytes.iter().map(|object| object.bytes as usize)
    }

    /// Returns the declared bytes of the new object that is output `output`, on one device.
    pub(super) fn declared(&self, output: usize) -> Option<u64> {
        self.bytes
            .iter()
            .find(|object| object.output == output)
            .map(|object| object.bytes)
    }

    fn new(
        inputs: &[InputPlan],
        outputs: &[OutputPlan],
        declared: &[(String, u64)],
        output_paths: &[String],
    ) -> PlanResult<Self> {
        let inputs: Vec<&ShapedArray> = inputs.iter().map(|input| &input.aval).collect();
        let outputs: Vec<&ShapedArray> = outputs.iter().map(|output| &output.made.aval).collect();
        if let Some(odd) = inputs
            .iter()
            .chain(&outputs)
            .find(|aval| aval.is_object() && aval.ndim() > 0)
        {
            return Err(IssueProblem::Signature(format!(
                "{odd}: objects have no dimensions"
            )));
        }

        let objects = |avals: &[&ShapedArray]| {
            (0..avals.len())
                .filter(|i| avals[*i].is_object())
                .collect::<Vec<_>>()
        };
        let inputs = objects(&inputs);
        let outputs = objects(&outputs);

        let mut bytes = Vec::with_capacity(declared.len());
        for (path, declared) in declared {
            let index = find(output_paths, path, "output")?;
            if !outputs.contains(&index) {
                let problem =
                    format!("the signature declares object bytes for {path:?}, which is no object");
                return Err(IssueProblem::Signature(problem));
            }
            bytes.push(OutputBytes {
                output: index,
                bytes: *declared,
            });
        }

        bytes.retain(|object| object.bytes > 0);
        bytes.sort_unstable();
        Ok(Self {
            inputs,
            outputs,
            bytes,
        })
    }
}

/// Returns an error unless every sharding in the prefix tree covers exactly the mesh's devices and
/// is in device memory.
pub(super) fn check_outputs(prefix: &PrefixTree<Sharding>, mesh: &Mesh) -> PlanResult<()> {
    match prefix {
        PrefixTree::Node(branches) => branches
            .iter()
            .try_for_each(|(_, branch)| check_outputs(branch, mesh)),
        PrefixTree::Leaf(sharding) => {
            if sharding.memory_kind() == MemoryKind::Host {
                return Err(IssueProblem::Mesh(format!(
                    "output sharding {sharding}: a kernel writes the memory of its devices; move \
                     its outputs \
                     to host memory with device_put"
                )));
            }

            let of = |devices: &[DeviceId]| devices.iter().copied().collect::<HashSet<_>>();
            if of(sharding.devices()) == of(mesh.devices()) {
                Ok(())
            } else {
                Err(IssueProblem::Mesh(format!(
                    "output sharding {sharding} is not on the devices of the kernel's mesh {mesh}"
                )))
            }
        }
    }
}

/// Checks the shardings of the inputs against the mesh and the declared shardings.
fn check_inputs(
    jit: &KernelSettings,
    structure: &Structure,
    paths: &[String],
    leaves: &[&MpmdArray],
) -> PlanResult<()> {
    let mesh = &jit.mesh;
    let declared = jit
        .inputs
        .as_ref()
        .map(|prefix| prefix.broadcast(structure))
        .transpose()
        .map_err(IssueProblem::Tree)?;

    let sums: HashSet<usize> = jit
        .partial_sums
        .into_iter()
        .flat_map(|path| structure.leaves_at(path))
        .collect();
    for (i, leaf) in leaves.iter().enumerate() {
        let Repr::Placed(placed) = &leaf.repr else {
            continue;
        };
        let path = paths[i].clone();
        let everywhere = mesh
            .devices()
            .iter()
            .all(|device| placed.made.layout.region_of(*device).is_some());
        if !everywhere {
            return Err(IssueProblem::InputMesh {
                path,
                expected: mesh.to_string(),
                found: placed.made.sharding.to_string(),
            });
        }

        let unusual = unusual(&placed.made.sharding);
        match declared.as_ref().map(|declared| &declared[i]) {
            Some(expected) if *expected == placed.made.sharding => {}
            Some(expected) => {
                let wrong = |why| IssueProblem::Sharding {
                    path: path.clone(),
                    why,
                };
                // Only the layouts must be equal, unless memory kind or partial sums matter.
                let differ = unusual.is_some()
                    || self::unusual(expected).is_some()
                    || *expected.layout(leaf.shape()).map_err(wrong)? != *placed.made.layout;
                if differ {
                    return Err(IssueProblem::InputSharding {
                        path,
                        expected: expected.to_string(),
                        found: placed.made.sharding.to_string(),
                    });
                }
            }
            None => {
                let accepted =
                    !placed.made.sharding.unreduced_axes().is_empty() && sums.contains(&i);
                if let Some(what) = unusual.filter(|_| !accepted) {
                    let found = placed.made.sharding.to_string();
                    return Err(IssueProblem::InputUndeclared {
                        path,
                        found,
                        property: what,
                    });
                }
            }
        }
    }
    Ok(())
}

/// Returns the property of a sharding that a kernel accepts only if declared: partial sums or host
/// memory. `None` for other shardings.
pub(super) fn unusual(sharding: &Sharding) -> Option<&'static str> {
    if !sharding.unreduced_axes().is_empty() {
        return Some("partial sums");
    }
    match sharding.memory_kind() {
        MemoryKind::Device => None,
        MemoryKind::Host => Some("arrays in host memory"),
    }
}

/// Returns an error if the output cannot be the input updated in place, or if either has another
/// alias already.
fn check_alias(
    input: &InputPlan,
    leaf: &MpmdArray,
    output: &OutputPlan,
    input_path: &str,
    output_path: &str,
) -> PlanResult<()> {
    let layouts_agree = match &leaf.repr {
        Repr::Placed(placed) => {
            *placed.made.layout == *output.made.layout
                && placed.made.sharding.memory_kind() == output.made.sharding.memory_kind()
                && placed.made.sharding.unreduced_axes() == output.made.sharding.unreduced_axes()
        }
        Repr::Host(_) => true,
    };

    if input.aval == output.made.aval && layouts_agree {
        if input.in_place || output.alias.is_some() {
            return Err(IssueProblem::Signature(format!(
                "{input_path:?} or {output_path:?} is aliased twice"
            )));
        }
        return Ok(());
    }
    let sharding = input
        .sharding()
        .map_or_else(|| "uncommitted".to_owned(), ToString::to_string);
    Err(IssueProblem::Signature(format!(
        "output {output_path:?} ({} {}) cannot be input {input_path:?} ({} {sharding}) updated in \
         place: shape, \
         dtype and sharding must be the same",
        output.made.aval, output.made.sharding, input.aval
    )))
}

/// The inputs and outputs of a call, from which the binding of each device is computed.
struct SeatPlanner<'a> {
    what: &'a Arc<CallWhat>,
    mesh: &'a DeviceBindings,
    leaves: &'a [&'a MpmdArray],
    inputs: &'a [InputPlan],
    outputs: &'a [OutputPlan],
    /// The parts that the kernel's rule tells. `None` if it has no rule.
    parts: Option<&'a DeviceParts>,
    objects: &'a ObjectPlan,
    topology: &'a Topology,
}

impl SeatPlanner<'_> {
    /// Returns the binding of a device of this process. Fails if a collective's axis is not in the
    /// mesh.
    fn seat(&self, local_index: usize, device: DeviceId) -> PlanResult<DeviceBinding> {
        let mesh = self.mesh;
        let groups = mesh
            .collectives
            .iter()
            .map(|collective| group(device, &mesh.mesh, collective, self.topology))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| IssueProblem::Signature(error.to_string()))?;

        let part = |aval: &ShapedArray, region: Option<Region>| {
            ShardInfo::new(
                aval.clone(),
                region.unwrap_or_else(|| Region::full(aval.shape())),
            )
        };
        let shard = |made: &Made| part(&made.aval, made.layout.region_of(device).cloned());
        let inputs = self.leaves.iter().enumerate();
        let inputs = inputs.map(|(i, leaf)| match &leaf.repr {
            Repr::Host(host) => {
                let region = self.parts.and_then(|parts| parts.region_of(i, device));
                part(host.aval(), region)
            }
            Repr::Placed(placed) => shard(&placed.made),
        });
        let parts: Vec<ShardInfo> = self
            .outputs
            .iter()
            .map(|output| shard(&output.made))
            .collect();

        let takes_over =
            |output: &OutputPlan| output.alias.is_some_and(|input| self.inputs[input].donated);
        let fresh: Vec<usize> = self
            .outputs
            .iter()
            .zip(&parts)
            .filter(|(output, _)| !takes_over(output))
            .map(|(_, info)| info.bytes())
            .collect();
        Ok(DeviceBinding {
            what: Arc::new(self.what.clone()),
            local_index,
            place: MeshPosition {
                device,
                position: mesh.mesh.position(device).unwrap_or_default(),
                groups,
            },
            inputs: inputs.collect(),
            reserved: fresh.iter().copied().chain(self.objects.held()).collect(),
            fresh,
            outputs: parts,
        })
    }
}

/// Returns the devices that run a collective together with `device`, and the rank of `device` among
/// them. Fails if the collective's axis is not in the mesh.
fn group(
    device: DeviceId,
    mesh: &Mesh,
    collective: &Collective,
    topology: &Topology,
) -> Result<CollectiveGroup, MeshError> {
    let devices = mesh.group_of(device, &collective.axis)?;
    // The mesh's devices were checked against this topology.
    let processes: Vec<ProcessId> = devices
        .iter()
        .filter_map(|device| topology.process_of(*device))
        .collect();
    let rank = devices
        .iter()
        .position(|other| *other == device)
        .unwrap_or_default();
    let places = devices
        .iter()
        .filter_map(|device| mesh.place(*device))
        .collect();

    let joined = collective.is_joined(&devices, topology);
    let rounds = collective.rounds(&processes, joined);
    let most = collective.most_bytes() as u64;
    Ok(CollectiveGroup {
        devices,
        places,
        processes,
        rank,
        joined,
        most,
        rounds,
    })
}

fn find(paths: &[String], path: &str, what: &str) -> PlanResult<usize> {
    paths.iter().position(|known| known == path).ok_or_else(|| {
        IssueProblem::Signature(format!(
            "the signature names {what} {path:?}; there are {}",
            paths.join(", ")
        ))
    })
}

fn fingerprint(
    kernel: &dyn UntypedKernel,
    mesh: &DeviceBindings,
    inputs: &[InputPlan],
    outputs: &[OutputPlan],
) -> u64 {
    let text = |hash: Rolling, text: &str| hash.mix_bytes(text.as_bytes());
    let mut hash = text(Rolling::default(), kernel.name());
    hash = kernel
        .statics()
        .into_iter()
        .fold(hash, Rolling::mix)
        .mix(mesh.mesh.fingerprint());

    for input in inputs {
        hash = text(hash, &input.aval.to_string()).mix(u64::from(input.donated));
        hash = hash.mix(input.sharding().map_or(0, Sharding::fingerprint));
    }
    for output in outputs {
        hash = text(hash, &output.made.aval.to_string()).mix(output.made.sharding.fingerprint());
        hash = hash.mix(output.alias.map_or(0, |input| input as u64 + 1));
    }

    mesh.collectives
        .iter()
        .fold(hash, |hash, collective| text(hash, &collective.to_string()))
        .word()
}
