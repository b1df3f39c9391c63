//! New handles to existing shards: the operation behind cutting and joining.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use mpmd_transport::SharedBuffer;

use crate::api::program::{NewOp, Part, Program};
use crate::error::IssueProblem;
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed, Repr};
use crate::exec::{AsyncBuffer, OpGuard, follow};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::Mesh;
use mpmd_record::dry_run::{self, Kind, Memory, OpDescriptor};

/// Description of a new array that consists of existing shards.
#[derive(Clone)]
pub(crate) struct Relabelled {
    pub(crate) aval: ShapedArray,
    pub(crate) sharding: Sharding,
    pub(crate) layout: Arc<Layout>,
    /// Indices of those source arrays of the operation that hold the shards.
    pub(crate) sources: Range<usize>,
}

impl Relabelled {
    /// Describes an array of the same spec, unreduced axes and memory kind over another mesh with
    /// the same axes.
    pub(crate) fn over(
        path: &str,
        aval: ShapedArray,
        sharding: &Sharding,
        mesh: Mesh,
        sources: Range<usize>,
    ) -> std::result::Result<Self, IssueProblem> {
        let spec = sharding.spec().cloned().unwrap_or_default();
        let wrong = |why| IssueProblem::Sharding { path: path.to_owned(), why };
        let sums: Vec<&str> = sharding.unreduced_axes().iter().map(String::as_str).collect();
        let named = Sharding::named(mesh, spec, sharding.memory_kind());
        let sharding = named.unreduced(&sums).map_err(wrong)?;
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;
        Ok(Self { aval, sharding, layout, sources })
    }
}

impl Program {
    /// Issues an operation that gives existing shards new handles and moves nothing. Returns a
    /// handle to each of `made`. `words` go into the program's hash. With `donate`, the sources
    /// become unusable.
    pub(crate) fn relabel(
        &mut self,
        sources: &[&MpmdArray],
        made: Vec<Relabelled>,
        mut words: Vec<u64>,
        what: Arc<dyn fmt::Display + Send + Sync>,
        donate: bool,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        let shards = |array: &MpmdArray| match &array.repr {
            Repr::Placed(placed) => placed.shards.to_vec(),
            Repr::Host(_) => Vec::new(),
        };
        let shards: Vec<Vec<LocalShard>> = sources.iter().map(|array| shards(array)).collect();
        words.push(u64::from(donate));
        for source in sources {
            if let Repr::Placed(placed) = &source.repr {
                words.extend([
                    placed.origin.op,
                    u64::from(placed.origin.leaf),
                    placed.made.sharding.fingerprint(),
                ]);
            }
        }
        let descriptor = || {
            let has = |source: usize, device| match &sources[source].repr {
                Repr::Placed(placed) => placed.made.layout.place_of(device).is_some(),
                Repr::Host(_) => false,
            };
            let shards = |made: &Relabelled| {
                let source = |device| made.sources.clone().find(|source| has(*source, device));
                let memory =
                    |device| source(device).map_or(Memory::Own, |source| Memory::Of(source as u32));
                dry_run::shards(&made.layout, made.aval.dtype().size(), memory)
            };
            OpDescriptor::local(&what, Kind::Relabel, made.iter().map(shards).collect())
        };
        let takes_part = shards.iter().any(|shards| !shards.is_empty());
        let (op, guard) = self.issue_op(
            words,
            NewOp {
                part: if takes_part { Part::Work(0) } else { Part::Idle },
                takes: sources,
                donates: &|_| donate,
                source: sources.iter().find_map(|source| source.origin()).map(|(op, _)| op),
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );
        let runtime = self.runtime.clone();
        let mut results = Vec::with_capacity(made.len());
        for (i, Relabelled { aval, sharding, layout, sources }) in made.into_iter().enumerate() {
            let own = |shard: &&LocalShard| layout.place_of(shard.device).is_some();
            let mut taken: Vec<LocalShard> = shards[sources]
                .iter()
                .flatten()
                .filter(own)
                .map(|shard| LocalShard {
                    device: shard.device,
                    slot: alias(&shard.slot, guard.clone()),
                })
                .collect();
            taken.sort_by_key(|shard| layout.place_of(shard.device));
            let made = Made::new(aval, sharding, layout, what.clone(), runtime.clone());
            results.push(Placed::array(Arc::new(made), taken, Origin { op, leaf: i as u32, at }));
        }
        if donate {
            for source in sources {
                if let Repr::Placed(placed) = &source.repr {
                    placed.donate(op, at);
                    let failure = placed.donated_failure();
                    // After the new handles, so that they still get the values.
                    placed.shards.iter().for_each(|shard| shard.slot.give_up(failure.clone()));
                }
            }
        }
        results
    }
}

/// Returns an async buffer that shares the memory of `source` as soon as `source` has its buffer.
/// `guard` is kept until `source` has ended.
fn alias(source: &AsyncBuffer, guard: Option<OpGuard>) -> AsyncBuffer {
    let (resolver, slot) = AsyncBuffer::new();
    follow(source, resolver, SharedBuffer::clone, None, guard);
    slot
}
