//! The check of replicas: each device hashes its part of a kernel's output, and the output's first
//! device compares the hashes of equal parts.

use std::panic::Location;

use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result};
use crate::exec::Rolling;
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::{DeviceId, Mesh};

/// Name of the only axis of a mesh over the devices of an output.
const DEVICE: &str = "device";

impl Program {
    /// Issues the comparison of the replicas of the outputs of kernel `kernel`, given as (path,
    /// array). Does nothing without [`Builder::check_replicas`](crate::Builder::check_replicas). A
    /// difference fails the job.
    pub(super) fn check_replicas<'a>(
        &mut self,
        kernel: &str,
        outputs: impl IntoIterator<Item = (String, &'a MpmdArray)>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        for (path, output) in outputs {
            let Some(sharding) = output.sharding() else {
                continue;
            };
            let whole = sharding.unreduced_axes().is_empty() && !output.aval().is_object();
            let problem = |why| {
                IssueProblem::Sharding {
                    path: path.clone(),
                    why,
                }
                .at(at, kernel)
            };

            let layout = sharding.layout(output.shape()).map_err(problem)?;
            let compared = Replicas {
                output: match path.as_str() {
                    "" => format!("the output of kernel {kernel} at {at}"),
                    path => format!("output {path:?} of kernel {kernel} at {at}"),
                },
                parts: layout
                    .devices()
                    .iter()
                    .copied()
                    .zip(layout.regions().to_vec())
                    .map(|(device, region)| DevicePart { device, region })
                    .collect(),
            };

            if whole && compared.pairs().next().is_some() {
                self.without_recomputing(|program| {
                    program.compare_replicas(output, sharding, compared, at)
                })?;
            }
        }
        Ok(())
    }

    fn compare_replicas(
        &mut self,
        output: &MpmdArray,
        sharding: &Sharding,
        compared: Replicas,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let devices: Vec<DeviceId> = compared.parts.iter().map(|part| part.device).collect();
        let wrong = |why: String| IssueProblem::Mesh(why).at(at, "the check of replicas");
        let mesh = |devices: &[DeviceId]| {
            Mesh::new(&[(DEVICE, devices.len())], devices.to_vec())
                .map_err(|error| wrong(error.to_string()))
        };
        let all = mesh(&devices)?;
        let first = mesh(&devices[..1])?;
        let each = all.sharding(Spec::new(vec![DEVICE.into()]));

        let hash = self
            .jit(HashPart {
                devices: devices.len(),
            })
            .on(&all);
        let hash = hash.inputs(sharding).outputs(each).build()?;
        let hashes = hash.call_at(self, output, at)?;
        let before = self.set_caller(Some(at));
        let hashes = self.put_list(&[(&hashes, &first.replicated())]);
        self.set_caller(before);

        let compare = self
            .jit(compared)
            .on(&first)
            .outputs(first.replicated())
            .build()?;
        // Nothing reads the result: a failed kernel fails the job.
        compare.call_at(self, &hashes?[0], at).map(drop)
    }
}

/// The kernel that hashes each device's shard of an array.
struct HashPart {
    devices: usize,
}

impl Kernel for HashPart {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::new(
            &[self.devices],
            DType::U64,
        )))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |_, x, mut y| {
            y.as_mut_slice::<u64>()?[0] = Rolling::default().mix_bytes(x.bytes()).word();
            Ok(())
        })
    }

    fn name(&self) -> &str {
        "hash of replicas"
    }
}

/// The kernel that compares the hashes of replicas.
struct Replicas {
    /// The name of the output in messages.
    output: String,
    /// The devices of the output, each with its region.
    parts: Vec<DevicePart>,
}

/// A device and its region of an array.
struct DevicePart {
    device: DeviceId,
    region: Region,
}

impl Replicas {
    /// Returns (index of the first device, index of another device) for each pair with the same
    /// region.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        (1..self.parts.len()).filter_map(|place| {
            let same = |part: &DevicePart| part.region == self.parts[place].region;
            self.parts[..place]
                .iter()
                .position(same)
                .map(|first| (first, place))
        })
    }
}

impl Kernel for Replicas {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::new(&[], DType::U8)))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |_, x, mut y| {
            let hashes = x.as_slice::<u64>()?;
            for (a, b) in self.pairs() {
                if hashes[a] != hashes[b] {
                    let DevicePart {
                        device: first,
                        region,
                    } = &self.parts[a];
                    let other = self.parts[b].device;
                    return Err(Error::kernel(format!(
                        "the replicas of {} differ: devices {first} and {other} have \
                         different values of {region:?}",
                        self.output
                    )));
                }
            }

            y.zero();
            Ok(())
        })
    }

    fn name(&self) -> &str {
        "comparison of replicas"
    }
}
