//! Collectives: communication among the devices of a mesh in the middle of a kernel.
//!
//! The table gives the costs for a group of `n` devices, each of which gives or gets `b` bytes in a
//! call. Bytes for several devices of one process are sent to that process once. `q` is the number
//! of *other* processes in the group.
//!
//! | collective | rounds | bytes that a device sends to other processes, at most |
//! |---|---|---|
//! | `all_reduce`, small or of two devices | 1 | `q b` |
//! | `all_reduce`, large | 2 | `(n - 1)/n b + q b/n` |
//! | `all_gather` | 1 | `q b` |
//! | `reduce_scatter`, `all_to_all` | 1 | `(n - 1)/n b` |
//! | `permute` | 1 | `b` |
//!
//! Values on CUDA devices may use NCCL instead (`collectives_nccl.rs`). In groups that use NCCL,
//! the table holds for host values, after one more round of a few bytes.
//!
//! Every reduction adds an element's values in the order of the devices along the axis, on one
//! device or on all of them. This does not depend on the algorithm, the number of processes or the
//! order of arrival. So the results are always the same bits.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_device::collective::CollectiveKind;
use mpmd_device::collective::{Reduce, Reducible, combine};
use mpmd_memory::SharedBuffer;
use mpmd_proto::{Failure, FailureKind};

use super::collectives_nccl::AGREEING_BYTES;
use super::context::Context;
use super::signature::Collective;
use crate::error::{Error, Result};
use crate::exec::{CollectiveGroup, Pattern, Round, RoundFlow};
use mpmd_layout::aval::{DType, Element};

/// The declared size, in bytes per device, above which a collective takes two rounds if that saves
/// bytes.
///
/// A second round costs the latency of one more message: tens of microseconds between processes of
/// a host. In a group of four devices it saves half of the bytes. From about this size on, sending
/// the saved bytes would take as long, at 1 to 2 GB/s. The declared size decides, not that of the
/// call, because all devices know it before any of them runs.
pub const TWO_ROUNDS_FROM_BYTES: usize = 64 << 10;

pub(super) type Fallible<T> = std::result::Result<T, Arc<Failure>>;

impl Collective {
    /// Returns the flow of each round of the collective. `processes` are the owners of the group's
    /// devices, by rank. `joined` is true if the group [uses NCCL](Self::is_joined). A group of one
    /// device has no rounds. A pure function: all devices of the group get the same result.
    pub(crate) fn rounds(&self, processes: &[ProcessId], joined: bool) -> Vec<RoundFlow> {
        let agree = joined.then_some(RoundFlow {
            pattern: Pattern::Everyone,
            shared: true,
        });
        agree
            .into_iter()
            .chain(self.rounds_of_the_host(processes))
            .collect()
    }

    fn rounds_of_the_host(&self, processes: &[ProcessId]) -> Vec<RoundFlow> {
        let large = self.aval.bytes() > TWO_ROUNDS_FROM_BYTES;
        let n = processes.len();
        let flow = |pattern, shared| RoundFlow { pattern, shared };

        match &self.kind {
            _ if n == 1 => Vec::new(),
            // With two devices, two rounds would send as many bytes as one.
            CollectiveKind::AllReduce(_) if large && n > 2 => {
                vec![
                    flow(Pattern::Everyone, false),
                    flow(Pattern::Everyone, true),
                ]
            }
            CollectiveKind::AllReduce(_) | CollectiveKind::AllGather => {
                vec![flow(Pattern::Everyone, true)]
            }
            CollectiveKind::ReduceScatter(_) | CollectiveKind::AllToAll => {
                vec![flow(Pattern::Everyone, false)]
            }
            CollectiveKind::Permute(pairs) => vec![flow(Pattern::Pairs(pairs.clone()), false)],
        }
    }

    /// Returns an upper bound, in bytes, for a message between two devices in any round. A call may
    /// not have more elements than declared.
    pub(crate) fn most_bytes(&self) -> usize {
        self.aval.bytes().max(AGREEING_BYTES)
    }

    pub(super) fn reduce(&self) -> Reduce {
        match self.kind {
            CollectiveKind::AllReduce(reduce) | CollectiveKind::ReduceScatter(reduce) => reduce,
            _ => Reduce::Sum,
        }
    }
}

/// A call of a collective that matches its declaration.
pub(super) struct CollectiveCall<'a> {
    pub(super) index: usize,
    pub(super) declared: &'a Collective,
    pub(super) group: &'a CollectiveGroup,
    /// The number of elements that this device passes to the call.
    pub(super) elements: usize,
}

impl CollectiveCall<'_> {
    pub(super) fn devices(&self) -> usize {
        self.group.devices.len()
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank
    }

    /// Returns the number of rounds for host values. Excludes the round in which a group that uses
    /// NCCL compares the call.
    fn rounds(&self) -> usize {
        self.group.rounds.len() - usize::from(self.group.joined)
    }

    /// Returns the range of elements in the segment for the device of rank `rank`.
    fn segment(&self, rank: usize) -> Range<usize> {
        share(self.elements, self.devices(), rank)
    }
}

/// One device's segment of the values of every device of the group.
struct ScatteredSegments {
    /// The segments from the other devices, by rank.
    parts: Vec<Option<SharedBuffer>>,
    /// The segment from the device's own values.
    mine: SharedBuffer,
}

impl<'a> Context<'a> {
    /// Reduces `values` over the devices along `axis`, with the declared reduction. Afterwards each
    /// device has the sums, maxima or minima over all devices.
    ///
    /// Small values take one round: each device sends them to every other, and each reduces all of
    /// them. For large values, each device reduces one segment and sends it to all others. The
    /// declared size decides ([`TWO_ROUNDS_FROM_BYTES`]); the result is the same bit for bit. A
    /// group of one keeps its values.
    ///
    /// Blocks until every device of the group has called it, or one of them has failed. The values
    /// are reduced in the order of the devices, so every device and every run gets the same bits.
    ///
    /// # Errors
    ///
    /// If the next collective in the signature is another one, or devices of the group call it with
    /// different lengths. If one of them failed or its process has ended.
    pub fn all_reduce<T: Reducible>(&mut self, axis: &str, values: &mut [T]) -> Result<()> {
        let call = self.begin_on_host::<T>("all_reduce", axis, values.len())?;

        let result = match call.rounds() {
            0 => Ok(()),
            1 => self.reduce_directly(&call, values),
            _ => self.reduce_by_segments(&call, values),
        };
        self.end(result)
    }

    /// Gathers the parts of all devices along `axis`: `out` gets them in the order of the devices.
    ///
    /// Takes one round, in which each device sends its part to every other.
    ///
    /// Blocks until every device of the group has called it, or one of them has failed.
    ///
    /// # Errors
    ///
    /// If the next collective in the signature is another one, or devices of the group call it with
    /// different lengths. If one of them failed or its process has ended. If the length of `out` is
    /// not that of all parts together.
    pub fn all_gather<T: Element>(&mut self, axis: &str, part: &[T], out: &mut [T]) -> Result<()> {
        let call = self.begin_on_host::<T>("all_gather", axis, part.len())?;
        self.check_out(&call, out.len(), part.len() * call.devices())?;

        let place = |rank: usize| rank * part.len()..(rank + 1) * part.len();
        out[place(call.rank())].copy_from_slice(part);

        let result = if call.rounds() == 0 {
            Ok(())
        } else {
            self.copy_in(part)
                .and_then(|given| self.gather(&call, &given, out, place))
        };
        self.end(result)
    }

    /// Reduces `values` over the devices along `axis`, with the declared reduction. `out` gets this
    /// device's share of the result: on the device with index `i` of `n`, the `i`-th of `n` equal
    /// blocks.
    ///
    /// Takes one round: each device gets its share of every device's values and reduces it in the
    /// order of the devices.
    ///
    /// Blocks until every device of the group has called it, or one of them has failed.
    ///
    /// # Errors
    ///
    /// If the next collective in the signature is another one, or devices of the group call it with
    /// different lengths. If one of them failed or its process has ended. If the number of devices
    /// does not divide the number of values, or `out` is not as long as a share.
    pub fn reduce_scatter<T: Reducible>(
        &mut self,
        axis: &str,
        values: &[T],
        out: &mut [T],
    ) -> Result<()> {
        let call = self.begin_on_host::<T>("reduce_scatter", axis, values.len())?;
        self.check_divides(&call)?;
        self.check_out(&call, out.len(), values.len() / call.devices())?;

        let result = if call.rounds() == 0 {
            out.copy_from_slice(values);
            Ok(())
        } else {
            self.scatter(&call, values)
                .and_then(|got| self.reduce(&call, &got.parts, &got.mine, out))
        };
        self.end(result)
    }

    /// Sends the `j`-th of `n` equal blocks of `values` to the device with index `j` along `axis`.
    /// `out` gets one block from each device, in the order of the devices.
    ///
    /// Takes one round, in which each block goes directly to its receiver.
    ///
    /// Blocks until every device of the group has called it, or one of them has failed.
    ///
    /// # Errors
    ///
    /// If the next collective in the signature is another one, or devices of the group call it with
    /// different lengths. If one of them failed or its process has ended. If the number of devices
    /// does not divide the number of values, or `out` is not as long as `values`.
    pub fn all_to_all<T: Element>(
        &mut self,
        axis: &str,
        values: &[T],
        out: &mut [T],
    ) -> Result<()> {
        let call = self.begin_on_host::<T>("all_to_all", axis, values.len())?;
        self.check_divides(&call)?;
        self.check_out(&call, out.len(), values.len())?;

        let own = call.segment(call.rank());
        out[own.clone()].copy_from_slice(&values[own]);

        let result = if call.rounds() == 0 {
            Ok(())
        } else {
            self.scatter(&call, values)
                .and_then(|got| self.copy_out(&call, &got.parts, out, |rank| call.segment(rank)))
        };
        self.end(result)
    }

    /// Moves `values` between the devices along `axis` by the declared pairs `(from, to)`. `out`
    /// gets the values of the device that sends to this one, or zeros if none does.
    ///
    /// Takes one round.
    ///
    /// Blocks until the device that sends to this one has called it or failed. Does not wait if no
    /// device sends to this one. In a group that uses NCCL for device values, every device waits
    /// until all have called it or failed.
    ///
    /// # Errors
    ///
    /// If the next collective in the signature is another one, or `out` is not as long as `values`.
    /// If the sending device calls it with another length, has failed, or its process has ended.
    pub fn permute<T: Element>(&mut self, axis: &str, values: &[T], out: &mut [T]) -> Result<()> {
        let call = self.begin_on_host::<T>("permute", axis, values.len())?;
        self.check_out(&call, out.len(), values.len())?;
        let CollectiveKind::Permute(pairs) = &call.declared.kind else {
            return self.end(Ok(()));
        };

        let me = call.rank();
        match pairs.iter().find(|(_, to)| *to == me) {
            Some((from, _)) if *from == me => out.copy_from_slice(values),
            Some(_) => {}
            // All-zero bytes are the zero of every dtype.
            None => out.fill(bytemuck::checked::pod_read_unaligned(&vec![
                0;
                size_of::<T>()
            ])),
        }

        let result = if call.rounds() == 0 {
            Ok(())
        } else {
            let gives = pairs.iter().any(|(from, to)| *from == me && to != from);
            let given = if gives {
                self.copy_in(values)
            } else {
                Ok(Vec::new().into())
            };
            let all = 0..values.len();
            given
                .and_then(|given| self.step::<T>(&call, |_| given.clone(), |_| values.len()))
                .and_then(|parts| self.copy_out(&call, &parts, out, |_| all.clone()))
        };
        self.end(result)
    }

    fn reduce_directly<T: Reducible>(
        &mut self,
        call: &CollectiveCall<'_>,
        values: &mut [T],
    ) -> Fallible<()> {
        let mine = self.copy_in(values)?;
        let parts = self.step::<T>(call, |_| mine.clone(), |_| call.elements)?;
        self.reduce(call, &parts, &mine, values)
    }

    fn reduce_by_segments<T: Reducible>(
        &mut self,
        call: &CollectiveCall<'_>,
        values: &mut [T],
    ) -> Fallible<()> {
        let own = call.segment(call.rank());
        let ScatteredSegments { parts, mine } = self.scatter(call, values)?;
        self.reduce(call, &parts, &mine, &mut values[own.clone()])?;

        // Frees the received values before memory is allocated for the second round.
        drop(parts);
        drop(mine);

        let given = self.copy_in(&values[own])?;
        self.gather(call, &given, values, |rank| call.segment(rank))
    }

    /// Sends each device its segment of `values` and waits for the segments from the others.
    fn scatter<T: Element>(
        &mut self,
        call: &CollectiveCall<'_>,
        values: &[T],
    ) -> Fallible<ScatteredSegments> {
        let own = call.segment(call.rank());
        let mine = self.copy_in(values)?;
        let segment = |rank| in_bytes::<T>(call.segment(rank));
        let parts = self.step::<T>(call, |to| mine.slice(segment(to)), |_| own.len())?;
        Ok(ScatteredSegments {
            parts,
            mine: mine.slice(segment(call.rank())),
        })
    }

    /// Sends `given` to every other device and waits for the parts of all devices. Copies the part
    /// of each rank to the range `place(rank)` of `out`.
    fn gather<T: Element>(
        &mut self,
        call: &CollectiveCall<'_>,
        given: &SharedBuffer,
        out: &mut [T],
        place: impl Fn(usize) -> Range<usize>,
    ) -> Fallible<()> {
        let parts = self.step::<T>(call, |_| given.clone(), |from| place(from).len())?;
        self.copy_out(call, &parts, out, place)
    }

    /// Reduces the parts of all ranks into `out`, in the order of the devices, so that every device
    /// gets the same bits. `mine` is this device's own part.
    fn reduce<T: Reducible>(
        &self,
        call: &CollectiveCall<'_>,
        parts: &[Option<SharedBuffer>],
        mine: &SharedBuffer,
        out: &mut [T],
    ) -> Fallible<()> {
        for (rank, part) in parts.iter().enumerate() {
            let part = self.elements::<T>(call, part.as_ref().unwrap_or(mine))?;
            match rank {
                0 => out.copy_from_slice(&part),
                _ => combine(call.declared.reduce(), out, &part),
            }
        }
        Ok(())
    }

    fn copy_out<T: Element>(
        &self,
        call: &CollectiveCall<'_>,
        parts: &[Option<SharedBuffer>],
        out: &mut [T],
        place: impl Fn(usize) -> Range<usize>,
    ) -> Fallible<()> {
        for (rank, part) in parts.iter().enumerate() {
            if let Some(part) = part {
                out[place(rank)].copy_from_slice(&self.elements::<T>(call, part)?);
            }
        }
        Ok(())
    }

    fn copy_in<T: Element>(&self, values: &[T]) -> Fallible<SharedBuffer> {
        self.exchange.copy_in(bytemuck::cast_slice(values))
    }

    /// Casts received bytes to elements, with a copy if the buffer is not aligned. Fails if the
    /// bytes are not valid values. Booleans are always copied before the check, because the peer
    /// that lent the bytes can still change them.
    fn elements<'b, T: Element>(
        &self,
        call: &CollectiveCall<'_>,
        bytes: &'b [u8],
    ) -> Fallible<Cow<'b, [T]>> {
        if T::DTYPE != DType::Bool
            && let Ok(elements) = bytemuck::checked::try_cast_slice(bytes)
        {
            return Ok(Cow::Borrowed(elements));
        }

        let each = bytes.chunks_exact(size_of::<T>());
        let elements: std::result::Result<Vec<T>, _> = each
            .map(bytemuck::checked::try_pod_read_unaligned)
            .collect();

        elements.map(Cow::Owned).map_err(|_| {
            let message = format!(
                "collective {} of operation {}: bytes came that are no {} values",
                call.index,
                self.op,
                T::DTYPE
            );
            Arc::new(Failure::new(
                FailureKind::Transport,
                self.exchange.runtime.me,
                self.op,
                message,
            ))
        })
    }

    /// Runs the next round of the current collective: sends `give(rank)` to each receiver, then
    /// blocks until `count(rank)` elements have come from each sender. Returns the received buffers
    /// by rank, `None` for ranks that send nothing. Fails if a received length differs.
    pub(super) fn step<T: Element>(
        &mut self,
        call: &CollectiveCall<'_>,
        give: impl Fn(usize) -> SharedBuffer,
        count: impl Fn(usize) -> usize,
    ) -> Fallible<Vec<Option<SharedBuffer>>> {
        let round = Round {
            op: self.op,
            index: call.index,
            round: self.round,
            group: call.group,
        };

        self.exchange.give(&round, give);
        let parts = self
            .exchange
            .take(&round, |from| count(from) * size_of::<T>());
        // The round counts even after an error: its messages were sent and received.
        self.round += 1;
        let parts = parts?;

        for (from, part) in parts.iter().enumerate() {
            let expected = count(from) * size_of::<T>();
            if let Some(part) = part.as_ref().filter(|part| part.len() != expected) {
                return Err(self.lengths_differ(call, from, expected, part.len()));
            }
        }

        Ok(parts)
    }

    /// Creates the failure for a device of rank `from` that sent `found` bytes instead of
    /// `expected`.
    pub(super) fn lengths_differ(
        &self,
        call: &CollectiveCall<'_>,
        from: usize,
        expected: usize,
        found: usize,
    ) -> Arc<Failure> {
        let message = format!(
            "collective {} of operation {}, declared as {}: device {} calls it with {} elements \
             and expects \
             {expected} bytes, another device of its group, {}, gives {found}: they call it with \
             different lengths",
            call.index,
            self.op,
            call.declared,
            self.place.device,
            call.elements,
            call.group.devices[from],
        );

        Arc::new(Failure::new(
            FailureKind::Kernel,
            self.exchange.runtime.me,
            self.op,
            message,
        ))
    }

    /// Checks the next call against its declaration and returns it. Fails if the verb, axis or
    /// dtype differs from the declared one, or if there are more elements than declared.
    pub(super) fn begin(
        &self,
        verb: &'static str,
        axis: &str,
        dtype: DType,
        elements: usize,
    ) -> Result<CollectiveCall<'a>> {
        let index = self.called;
        let called = || format!("{verb} of {elements} {dtype} elements over {axis:?}");

        let Some(declared) = self.seats.collectives.get(index) else {
            return Err(Error::kernel(format!(
                "the kernel calls {}, but its signature declares only {index} collectives",
                called()
            )));
        };

        let fits = declared.kind.verb() == verb
            && declared.axis == axis
            && declared.aval.dtype() == dtype
            && elements <= declared.aval.elements();
        if !fits {
            return Err(Error::kernel(format!(
                "the kernel calls {} where its signature declares {declared} (collective {index})",
                called()
            )));
        }

        Ok(CollectiveCall {
            index,
            declared,
            group: &self.place.groups[index],
            elements,
        })
    }

    pub(super) fn check_out(
        &self,
        call: &CollectiveCall<'_>,
        found: usize,
        expected: usize,
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(Error::kernel(format!(
            "the kernel calls {} with {} elements and an output of {found} where {expected} come \
             out (collective \
             {}, declared as {})",
            call.declared.kind.verb(),
            call.elements,
            call.index,
            call.declared
        )))
    }

    pub(super) fn check_divides(&self, call: &CollectiveCall<'_>) -> Result<()> {
        if call.elements.is_multiple_of(call.devices()) {
            return Ok(());
        }
        Err(Error::kernel(format!(
            "the kernel calls {} with {} elements, which {} devices cannot share (collective {}, \
             declared as {})",
            call.declared.kind.verb(),
            call.elements,
            call.devices(),
            call.index,
            call.declared
        )))
    }

    /// Ends the current collective. After a failure, its remaining rounds fail on the other devices
    /// too.
    pub(super) fn end(&mut self, result: Fallible<()>) -> Result<()> {
        match result {
            Ok(()) => {
                self.next_collective();
                Ok(())
            }
            Err(failure) => {
                self.abandon_collective(&failure);
                Err(Error::failed(failure))
            }
        }
    }
}

/// Returns the range of the `i`-th of `n` shares of `len` elements. The first shares have one
/// element more if `n` does not divide `len`.
pub(super) fn share(len: usize, n: usize, i: usize) -> Range<usize> {
    let each = len / n;
    let more = len % n;
    let start = i * each + i.min(more);
    start..start + each + usize::from(i < more)
}

fn in_bytes<T>(elements: Range<usize>) -> Range<usize> {
    elements.start * size_of::<T>()..elements.end * size_of::<T>()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::{Instant, thread};

    use super::super::{Kernel, Signature, View, ViewMut};
    use super::*;
    use crate::api::program::{Program, Simulation};
    use crate::exec::array::MpmdArray;
    use mpmd_layout::aval::{ShapedArray, f32s};

    fn rounds(signature: Signature<()>, processes: &[u32]) -> usize {
        let processes: Vec<ProcessId> = processes.iter().copied().map(ProcessId).collect();
        signature.collectives[0].rounds(&processes, false).len()
    }

    #[test]
    fn two_rounds_only_for_large_values_that_save_bytes() {
        let new = || Signature::new(());
        let (small, large) = (
            f32s([TWO_ROUNDS_FROM_BYTES / 4]),
            f32s([TWO_ROUNDS_FROM_BYTES / 4 + 1]),
        );
        assert_eq!(rounds(new().all_reduce("x", small), &[0, 1, 2]), 1);
        assert_eq!(rounds(new().all_reduce("x", large.clone()), &[0, 0, 0]), 2);
        assert_eq!(rounds(new().all_reduce("x", large.clone()), &[0, 1]), 1);
        assert_eq!(rounds(new().all_gather("x", large.clone()), &[0, 1, 2]), 1);
        assert_eq!(rounds(new().all_reduce("x", large.clone()), &[0]), 0);
        let joined = &new().all_reduce("x", large).collectives[0];
        assert_eq!(
            joined.rounds(&[0, 1, 2].map(ProcessId), true).len(),
            3,
            "one to agree in"
        );
    }

    #[test]
    fn shares_are_contiguous_and_differ_by_at_most_one() {
        for n in 1..9 {
            for len in 0..30 {
                let shares: Vec<_> = (0..n).map(|i| share(len, n, i)).collect();
                assert_eq!((shares[0].start, shares[n - 1].end), (0, len));
                assert!(
                    shares.windows(2).all(|pair| pair[0].end == pair[1].start),
                    "{shares:?}"
                );
                assert!(
                    shares
                        .iter()
                        .all(|share| share.len().abs_diff(len / n) <= 1),
                    "{shares:?}"
                );
            }
        }
    }

    /// Calls many collectives; then, if `fails` is set, one device returns an error.
    struct Many {
        fails: bool,
    }

    const LARGE: usize = TWO_ROUNDS_FROM_BYTES / 2;
    const TIMES: usize = 10;

    impl Kernel for Many {
        type In = MpmdArray;
        type Out = MpmdArray;

        fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
            let one = |signature: Signature<_>, _| {
                signature
                    .all_gather("x", f32s([4]))
                    .all_reduce("x", f32s([LARGE]))
            };
            let signature = (0..TIMES).fold(Signature::new(x.clone()), one);
            Ok(signature
                .all_reduce("x", f32s([1]))
                .all_reduce("x", f32s([LARGE]))
                .all_gather("x", f32s([1])))
        }

        fn run(&self, cx: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
            let mut values = vec![1.0f32; LARGE];
            for _ in 0..TIMES {
                cx.all_gather("x", &[1.0f32; 4], &mut [0.0; 24])?;
                cx.all_reduce("x", &mut values)?;
            }
            // Once this returns, every device has reached it.
            cx.all_reduce("x", &mut [0.0f32])?;
            let left = cx.exchange.runtime.mailbox.len();
            // Messages of this collective from the other devices, and of the next one from those
            // that are ahead.
            assert!(left <= 3 * 6 * 6, "{left} letters");
            if self.fails && cx.axis_index("x")? == 4 {
                return Err(Error::kernel("enough"));
            }
            cx.all_reduce("x", &mut values)?;
            cx.all_gather("x", &[1.0f32], &mut [0.0; 6])?;
            y.zero();
            Ok(())
        }
    }

    #[test]
    fn mailbox_and_staging_memory_are_empty_afterwards() {
        for processes in [1, 2, 3] {
            for fails in [false, true] {
                let simulation = Simulation::new(processes, 6).delays(3, Duration::from_millis(1));
                let results = simulation.run(|p: &mut Program| {
                    let mesh = p.mesh(&[("x", 6)])?;
                    let jit = p
                        .jit(Many { fails })
                        .on(&mesh)
                        .outputs(mesh.replicated())
                        .build()?;
                    let x = p.device_put(&MpmdArray::scalar(0u8), mesh.replicated())?;
                    let y = jit.call(p, x)?;
                    assert_eq!(y.block_until_ready().is_err(), fails);
                    p.runtime.wait_idle();
                    assert_eq!(p.runtime.mailbox.len(), 0);
                    // Another process may still read data that this one gave to it.
                    let deadline = Instant::now() + Duration::from_secs(20);
                    while p.runtime.staging.stats().live > 0 && Instant::now() < deadline {
                        thread::sleep(Duration::from_millis(1));
                    }
                    assert_eq!(p.runtime.staging.stats().live, 0);
                    Ok(())
                });
                assert!(
                    results.iter().all(|result| result.is_err() == fails),
                    "{results:?}"
                );
            }
        }
    }
}
