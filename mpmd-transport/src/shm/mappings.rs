//! What this process has mapped of others.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::devices::DeviceGiven;
use crate::memory::{File, Segment};

/// What this process has mapped of others. One segment may come by several ways, where others pass
/// on what they have borrowed, and come again and again: it is mapped once.
#[derive(Default)]
pub(super) struct Mappings {
    files: Mutex<HashMap<File, Weak<Segment>>>,
    /// Memory of devices, by the words that open it.
    devices: Mutex<HashMap<Vec<u8>, Weak<Segment>>>,
}

/// A segment that a peer has given.
pub(super) enum Given {
    /// It came by this way when it was not mapped: it stays so until the peer says that it is no
    /// more.
    First(Arc<Segment>),
    /// It came by other ways before. It is no reason to keep it mapped: two processes that have a
    /// segment of each other would both wait for the other to let go of it.
    Again { descriptor: OwnedFd, bytes: u64, segment: Weak<Segment> },
    /// Memory of a device.
    Device(DeviceGiven),
}

impl Mappings {
    /// Notes what a peer has given, which must be a segment of so many bytes.
    pub(super) fn given(&self, descriptor: OwnedFd, bytes: u64) -> io::Result<Given> {
        let mut mapped = self.files.lock();
        // One that is mapped keeps its file, so that no other is taken for it.
        let file = Segment::file(descriptor.as_fd())?;
        let found = mapped.get(&file).and_then(Weak::upgrade);
        if let Some(segment) = found.filter(|segment| segment.bytes() as u64 == bytes) {
            return Ok(Given::Again { descriptor, bytes, segment: Arc::downgrade(&segment) });
        }
        let segment = Arc::new(Segment::foreign(descriptor, bytes)?);
        mapped.retain(|_, segment| segment.strong_count() > 0);
        mapped.insert(file, Arc::downgrade(&segment));
        Ok(Given::First(segment))
    }

    /// The memory of a device that these words open: as it is open already, or opened by `make`;
    /// whether it is new.
    pub(super) fn opened(
        &self,
        words: &[u8],
        make: impl FnOnce() -> io::Result<Arc<Segment>>,
    ) -> io::Result<(Arc<Segment>, bool)> {
        let mut open = self.devices.lock();
        if let Some(found) = open.get(words).and_then(Weak::upgrade) {
            return Ok((found, false));
        }
        let segment = make()?;
        open.retain(|_, segment| segment.strong_count() > 0);
        open.insert(words.to_vec(), Arc::downgrade(&segment));
        Ok((segment, true))
    }
}

impl Given {
    /// The segment, mapped; where it is the host's.
    pub(super) fn segment(&mut self, mappings: &Mappings) -> io::Result<Arc<Segment>> {
        match self {
            Self::First(segment) => Ok(segment.clone()),
            Self::Device(_) => Err(io::Error::other("the memory of a device is no file")),
            Self::Again { descriptor, bytes, segment } => {
                if let Some(segment) = segment.upgrade() {
                    return Ok(segment);
                }
                loop {
                    let found = match mappings.given(descriptor.try_clone()?, *bytes)? {
                        Self::First(segment) => Some(segment),
                        Self::Again { segment, .. } => segment.upgrade(),
                        Self::Device(_) => None,
                    };
                    // None where its last holder let go of it just now.
                    if let Some(found) = found {
                        *segment = Arc::downgrade(&found);
                        return Ok(found);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Pool};

    #[test]
    fn a_segment_is_mapped_once_and_only_the_first_way_keeps_it() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let owner = pool.allocate(100).unwrap().freeze().place().unwrap().segment;
        let give =
            || (owner.descriptor().unwrap().try_clone_to_owned().unwrap(), owner.bytes() as u64);
        let mappings = Mappings::default();
        let given = |(descriptor, bytes)| mappings.given(descriptor, bytes).unwrap();
        let (mut first, mut again) = (given(give()), given(give()));
        assert!(matches!((&first, &again), (Given::First(_), Given::Again { .. })));
        let segment = first.segment(&mappings).unwrap();
        assert!(Arc::ptr_eq(&segment, &again.segment(&mappings).unwrap()));
        assert!(mappings.given(give().0, 64).is_err(), "it is longer");
        drop(first);
        assert_eq!(Arc::strong_count(&segment), 1, "who reads it");
        drop(segment);
        let segment = again.segment(&mappings).unwrap();
        assert!(
            Arc::ptr_eq(&segment, &again.segment(&mappings).unwrap()),
            "it is mapped anew, once"
        );
        assert_eq!(Arc::strong_count(&segment), 1);
    }
}
