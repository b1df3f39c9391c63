//! A program that publishes versions of arrays, and one that takes them in another layout and
//! compares every element, until the test ends them.

use std::time::Duration;

use mpmd::launch::Token;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::weights::{LeafPart, Publication, Subscribing, WantedLeaf};

use super::Say;

/// Shapes of several leaves, of which the last has some MiB.
const SHAPES: [[usize; 2]; 3] = [[6, 50], [128, 96], [1024, 768]];

fn token() -> Token {
    Token::new([3; 32])
}

/// Returns the value of an element in a version. In each version, one element in 50 has a value of
/// that version alone. The others change with every eighth version.
fn element(version: u64, leaf: usize, index: u64) -> f32 {
    let own = if (index + version).is_multiple_of(50) {
        version
    } else {
        version / 8
    };
    ((index * 31 + own * 7 + leaf as u64) % 251) as f32
}

/// Publishes versions, with numbers from the first version on. Arguments: the address, and the
/// first version.
pub(super) fn publish(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let wrong = |what: &str| Error::Environment(what.to_owned());
    let [address, first] = args else {
        return Err(wrong("publishing ADDRESS VERSION"));
    };
    let address = address.parse().map_err(|_| wrong("the address"))?;
    let mut version: u64 = first.parse().map_err(|_| wrong("the version"))?;
    let rows = p.mesh(&[("x", -1)])?.sharding(spec!["x"]);
    let tree = |p: &mut Program, version: u64| -> Result<Vec<MpmdArray>> {
        let leaf = |(leaf, shape): (usize, &[usize; 2])| {
            let on = match leaf {
                1 => Sharding::single_device(DeviceId(1)),
                _ => rows.clone(),
            };
            p.array_from_fn(f32s(*shape), on, move |region, mut view| {
                for (to, index) in view
                    .as_mut_slice::<f32>()?
                    .iter_mut()
                    .zip(region.indices(&SHAPES[leaf]))
                {
                    *to = element(version, leaf, index);
                }
                Ok(())
            })
        };
        SHAPES.iter().enumerate().map(leaf).collect()
    };
    let leaves = tree(p, version)?;
    let publication = Publication::new("test", token())
        .listen(address)
        .dtype(DType::Bf16);
    let mut publisher = p.publisher(publication, &leaves)?;
    loop {
        let leaves = tree(p, version)?;
        publisher.publish(version, &leaves)?;
        say(format!("published {version}"));
        std::thread::sleep(Duration::from_millis(10));
        p.step_end()?;
        version += 1;
    }
}

/// Subscribes to versions and compares their values. Arguments: the address, the transport, and
/// `changes` or `whole`.
pub(super) fn subscribe(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let [address, transport, how] = args else {
        return Err(Error::Environment(
            "subscribing ADDRESS TRANSPORT HOW".to_owned(),
        ));
    };
    let mesh = p.mesh(&[("y", -1)])?;
    let bf16 = |shape: [usize; 2]| ShapedArray::new(&shape, DType::Bf16);
    let rows = |at: usize| {
        let region = Region::new(vec![at..at + 512, 0..768]);
        LeafPart {
            from: "2".to_owned(),
            region: Some(region),
            at: vec![0, 0],
        }
    };
    let wanted = vec![
        WantedLeaf::new("0", bf16(SHAPES[0]), mesh.sharding(spec![None, "y"])),
        WantedLeaf::new("1", bf16(SHAPES[1]), mesh.replicated()),
        WantedLeaf::new("upper", bf16([512, 768]), mesh.sharding(spec![None, "y"]))
            .of(vec![rows(0)]),
        WantedLeaf::new("lower", bf16([512, 768]), mesh.sharding(spec!["y"])).of(vec![rows(512)]),
    ];
    let subscribing = Subscribing::new("test", *address, token());
    let subscribing = subscribing.transport(*transport).changes(*how == "changes");
    let mut subscription = p.subscribe(subscribing, wanted)?;
    let mut said = String::new();
    loop {
        if let Some((version, arrays)) = subscription.next(p)? {
            let places = [(0, 0), (1, 0), (2, 0), (2, 512)];
            for (array, (leaf, row)) in arrays.iter().zip(places) {
                compare(array, version, leaf, row)?;
            }
            say(format!("version {version}"));
        }
        let state = subscription.state();
        if state.refused > 0 {
            return Err(Error::Environment(format!("{state:?}")));
        }
        let now = format!("linked {}", state.is_linked);
        if now != said {
            said.clone_from(&now);
            say(now);
        }
        std::thread::sleep(Duration::from_millis(2));
        p.step_end()?;
    }
}

/// Compares every element of an array with its value in a version.
fn compare(array: &MpmdArray, version: u64, leaf: usize, row: usize) -> Result<()> {
    for shard in array.addressable_shards()? {
        let columns = shard.region.range(1);
        let values = shard.data.to_vec::<half::bf16>()?;
        for (i, value) in values.into_iter().enumerate() {
            let at = row + shard.region.range(0).start + i / columns.len();
            let index = (at * SHAPES[leaf][1] + columns.start + i % columns.len()) as u64;
            if value.to_f32() != element(version, leaf, index) {
                let found = format!("leaf {leaf} has {value} at {index} in version {version}");
                return Err(Error::Environment(found));
            }
        }
    }
    Ok(())
}
