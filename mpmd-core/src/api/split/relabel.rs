//! New handles to existing shards: the operation behind cutting and joining.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use mpmd_memory::SharedBuffer;

use crate::api::program::{Again, IssuedOp, NewOp, OpPart, Program, Replayed};
use crate::error::IssueProblem;
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed, Repr};
use crate::exec::{AsyncBuffer, OpGuard, follow};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::Mesh;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

/// Description of a new array that consists of existing shards.
#[derive(Clone)]
pub(crate) struct Relabelled {
    pub(crate) aval: ShapedArray,
    pub(crate) sharding: Sharding,
    pub(crate) layout: Arc<Layout>,
    /// Indices, among the operation's source arrays, of those that hold the shards.
    pub(crate) sources: Range<usize>,
}

impl Relabelled {
    /// Describes an array over another mesh with the same axes. Spec, unreduced axes and memory
    /// kind stay.
    pub(crate) fn over(
        path: &str,
        aval: ShapedArray,
        sharding: &Sharding,
        mesh: Mesh,
        sources: Range<usize>,
    ) -> std::result::Result<Self, IssueProblem> {
        let spec = sharding.spec().cloned().unwrap_or_default();
        let wrong = |why| IssueProblem::Sharding {
            path: path.to_owned(),
            why,
        };
        let sums: Vec<&str> = sharding
            .unreduced_axes()
            .iter()
            .map(String::as_str)
            .collect();

        let named = Sharding::named(mesh, spec, sharding.memory_kind());
        let sharding = named.unreduced(&sums).map_err(wrong)?;
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;
        Ok(Self {
            aval,
            sharding,
            layout,
            sources,
        })
    }
}

/// An operation that gives existing shards new handles, and transfers nothing.
pub(crate) struct Relabel {
    pub(crate) made: Vec<Relabelled>,
    pub(crate) what: Arc<dyn fmt::Display + Send + Sync>,
    /// True if the source arrays are donated and become unusable.
    pub(crate) donate: bool,
    /// True if the results complete only after the sends of the first source array.
    pub(crate) awaits_sends: bool,
}

impl Program {
    /// Issues the operation on `sources` and returns a handle to each array of `made`. `words` are
    /// mixed into the program's hash.
    pub(crate) fn relabel(
        &mut self,
        sources: &[&MpmdArray],
        relabel: Relabel,
        mut words: Vec<u64>,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        words.push(u64::from(relabel.donate));
        for source in sources {
            if let Repr::Placed(placed) = &source.repr {
                words.extend([
                    placed.origin.op,
                    u64::from(placed.origin.leaf),
                    placed.made.sharding.fingerprint(),
                ]);
            }
        }
        self.issue_relabel(sources, &Arc::new(relabel), words, None, at)
    }

    fn issue_relabel(
        &mut self,
        sources: &[&MpmdArray],
        relabel: &Arc<Relabel>,
        words: Vec<u64>,
        replayed: Option<Replayed<'_>>,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        let shards = |array: &MpmdArray| match &array.repr {
            Repr::Placed(placed) => placed.shards.to_vec(),
            Repr::Host(_) => Vec::new(),
        };
        let shards: Vec<Vec<LocalShard>> = sources.iter().map(|array| shards(array)).collect();
        let takes_part = shards.iter().any(|shards| !shards.is_empty());
        let here = takes_part || self.is_dry_run();

        let IssuedOp { op, guard } = self.issue_op(
            words,
            NewOp {
                part: if takes_part {
                    OpPart::Work(0)
                } else {
                    OpPart::Idle
                },
                takes: sources,
                donates: &|_| relabel.donate,
                source: sources
                    .iter()
                    .find_map(|source| source.origin())
                    .map(|(op, _)| op),
                again: &|| here.then(|| relabel.clone() as Arc<dyn Again>),
                replayed,
                ..NewOp::new(at, &|| relabel.what.clone(), &|| {
                    relabel.descriptor(sources)
                })
            },
        );

        let sends = sources.first().and_then(|source| source.sends());
        let sends = sends.filter(|_| relabel.awaits_sends);
        let mut results = Vec::with_capacity(relabel.made.len());
        for (i, made) in relabel.made.iter().enumerate() {
            let Relabelled {
                aval,
                sharding,
                layout,
                sources,
            } = made.clone();
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

            let what = relabel.what.clone();
            let runtime = self.runtime.clone();
            let made = Arc::new(Made::new(aval, sharding, layout, what, runtime));
            let origin = Origin {
                op,
                leaf: i as u32,
                at,
            };
            results.push(Placed::array_after(sends.cloned(), made, taken, origin));
        }

        if relabel.donate {
            for source in sources {
                if let Repr::Placed(placed) = &source.repr {
                    placed.donate(op, at);
                    let failure = placed.donated_failure();
                    // After the new handles, so that they still get the values.
                    placed
                        .shards
                        .iter()
                        .for_each(|shard| shard.slot.give_up(failure.clone()));
                }
            }
        }
        results
    }
}

impl Relabel {
    fn descriptor(&self, sources: &[&MpmdArray]) -> OpDescriptor {
        let has = |source: usize, device| match &sources[source].repr {
            Repr::Placed(placed) => placed.made.layout.place_of(device).is_some(),
            Repr::Host(_) => false,
        };

        let shards = |made: &Relabelled| {
            let source = |device| made.sources.clone().find(|source| has(*source, device));
            let memory = |device| {
                source(device).map_or(ShardMemory::Own, |source| ShardMemory::Of(source as u32))
            };
            dry_run::shards(&made.layout, made.aval.dtype().size(), memory)
        };
        OpDescriptor::local(
            &self.what,
            OpKind::Relabel,
            self.made.iter().map(shards).collect(),
        )
    }
}

impl Again for Relabel {
    fn again(
        self: Arc<Self>,
        program: &mut Program,
        x: &[&MpmdArray],
        replayed: Replayed<'_>,
        at: &'static Location<'static>,
        made: &mut Vec<MpmdArray>,
    ) {
        made.extend(program.issue_relabel(x, &self, Vec::new(), Some(replayed), at));
    }
}

/// Returns an async buffer that shares the memory of `source` as soon as `source` has its buffer.
/// `guard` is kept until `source` has ended.
fn alias(source: &AsyncBuffer, guard: Option<OpGuard>) -> AsyncBuffer {
    let (resolver, slot) = AsyncBuffer::new();
    follow(source, resolver, SharedBuffer::clone, None, guard);
    slot
}
