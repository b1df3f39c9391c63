//! An array from arrays that each are one device's shard of it.

use std::borrow::Borrow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::SplitOptions;
use super::relabel::{Relabel, Relabelled};
use crate::api::program::Program;
use crate::api::put::refuse_twice;
use crate::error::{IssueProblem, Result, leaf};
use crate::exec::Rolling;
use crate::exec::array::{MpmdArray, Repr};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;

impl Program {
    /// Makes one array of `shape` from its shards, without moving anything.
    ///
    /// Each shard is an array on one device of `sharding`, with the shape of that device's region,
    /// and in the memory kind of `sharding`. There is one shard for each device, in any order. The
    /// caller must ensure that shards of the same region have equal values. With unreduced axes the
    /// shards are the terms of a sum. The new array shares the memory of the shards, as in
    /// [`Program::concatenate_by_mesh_axis`].
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    /// use mpmd_core::sharding::Sharding;
    /// use mpmd_core::topology::DeviceId;
    ///
    /// let mut p = Program::builder().devices(2).alone()?;
    /// let rows = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
    /// let mut shard = |device, values: &[f32]| {
    ///     p.device_put(&MpmdArray::from_slice(&[2], values)?, Sharding::single_device(device))
    /// };
    /// let shards = [shard(DeviceId(0), &[1.0, 2.0])?, shard(DeviceId(1), &[3.0, 4.0])?];
    /// let x = p.array_from_shards(&[4], &rows, &shards, SplitOptions::default())?;
    /// assert_eq!(x.to_host()?.unwrap().to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// p.finish()?;
    /// # Ok::<(), mpmd_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the sharding does not fit the shape. If a shard is uncommitted, donated or of another
    /// dtype than the first. If it is on several devices or on one without a region. If it has
    /// another shape than the region, or another memory kind. If a device has no shard, or two. The
    /// error is the same on every process, and nothing is donated.
    #[track_caller]
    pub fn array_from_shards(
        &mut self,
        shape: &[usize],
        sharding: impl Borrow<Sharding>,
        shards: &[MpmdArray],
        options: SplitOptions,
    ) -> Result<MpmdArray> {
        let at = Location::caller();
        let wrong = |problem: IssueProblem| problem.at(at, "array_from_shards");
        let leaves: Vec<(String, &MpmdArray)> = shards
            .iter()
            .enumerate()
            .map(|(i, shard)| (i.to_string(), shard))
            .collect();

        let made = self
            .whole(shape, sharding.borrow(), &leaves)
            .map_err(wrong)?;
        if options.donate {
            refuse_twice(&leaves).map_err(wrong)?;
            self.check_given_up(&leaves).map_err(wrong)?;
        }

        let word = Rolling::default()
            .mix_bytes(made.aval.to_string().as_bytes())
            .word();
        let words = vec![0x5a4d, word, made.sharding.fingerprint()];
        let what = Arc::new(FromShards {
            aval: made.aval.clone(),
            sharding: made.sharding.clone(),
        });
        let donate = options.donate;
        let relabel = Relabel {
            made: vec![made],
            what,
            donate,
            awaits_sends: false,
        };

        let sources: Vec<&MpmdArray> = shards.iter().collect();
        let mut made = self.relabel(&sources, relabel, words, at);
        Ok(made.pop().expect("one was asked for"))
    }

    /// Describes the array that consists of these shards. Fails if they do not fit together.
    fn whole(
        &self,
        shape: &[usize],
        sharding: &Sharding,
        shards: &[(String, &MpmdArray)],
    ) -> std::result::Result<Relabelled, IssueProblem> {
        let unfit = |why| IssueProblem::Sharding {
            path: String::new(),
            why,
        };
        let split = |why: String| IssueProblem::Split(why);
        let Some((_, first)) = shards.first() else {
            return Err(split("there is no shard".to_owned()));
        };

        let aval = ShapedArray::try_new(shape, first.dtype());
        let aval = aval.map_err(|error| split(error.to_string()))?;
        sharding
            .check_devices(&self.runtime.topology)
            .map_err(unfit)?;
        let layout = sharding.layout(shape).map_err(unfit)?;

        let mut given = vec![None; layout.devices().len()];
        for (i, (path, shard)) in shards.iter().enumerate() {
            shard.check_usable(path)?;
            self.check_own(path, shard)?;
            let split = |why: String| split(format!("{}{why}", leaf(path)));
            let Repr::Placed(placed) = &shard.repr else {
                return Err(split(format!(
                    "{} is uncommitted: device_put it first",
                    shard.aval()
                )));
            };

            let &[device] = placed.made.layout.devices() else {
                let count = placed.made.layout.devices().len();
                return Err(split(format!("is on {count} devices: a shard is on one")));
            };
            let Some(place) = layout.place_of(device) else {
                return Err(split(format!(
                    "is on device {device}, which {sharding} does not have"
                )));
            };

            let expected = ShapedArray::try_new(&layout.regions()[place].shape(), aval.dtype());
            let expected = expected.map_err(|error| split(error.to_string()))?;
            if *shard.aval() != expected {
                let found = shard.aval();
                return Err(split(format!(
                    "is {found}, but device {device} has {expected} of it"
                )));
            }
            if placed.made.sharding.memory_kind() != sharding.memory_kind() {
                let found = &placed.made.sharding;
                return Err(split(format!(
                    "is as {found}, in another memory than {sharding}"
                )));
            }
            if let Some(other) = given[place].replace(i) {
                return Err(split(format!("is on device {device}, as is shard {other}")));
            }
        }

        if let Some(place) = given.iter().position(Option::is_none) {
            let device = layout.devices()[place];
            return Err(split(format!("device {device} of {sharding} has no shard")));
        }

        Ok(Relabelled {
            aval,
            sharding: sharding.clone(),
            layout,
            sources: 0..shards.len(),
        })
    }
}

struct FromShards {
    aval: ShapedArray,
    sharding: Sharding,
}

impl fmt::Display for FromShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} as {} from its shards", self.aval, self.sharding)
    }
}
