//! The segments of other processes that this process has mapped.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use mpmd_memory::{File, Segment};

/// The segments of other processes that this process has mapped, each once. Several peers may give
/// this process the same segment, because they lend borrowed memory on.
#[derive(Default)]
pub(super) struct Mappings {
    files: Mutex<HashMap<File, Weak<Segment>>>,
    /// Open segments of device memory, by the description that opens them.
    devices: Mutex<HashMap<Vec<u8>, Weak<Segment>>>,
}

/// A host memory segment whose descriptor a peer has sent.
pub(super) enum HostGiven {
    /// This peer sent the segment's descriptor first. The segment stays mapped until the peer
    /// reports that it is freed.
    First(Arc<Segment>),
    /// Another peer had sent the segment's descriptor before. This entry does not keep the segment
    /// mapped. Otherwise two processes that have given each other a segment would both wait for the
    /// other to release it.
    Again {
        descriptor: OwnedFd,
        bytes: u64,
        segment: Weak<Segment>,
    },
}

/// A segment of another process's device memory that is open in this process.
pub(super) struct FoundSegment {
    pub(super) segment: Arc<Segment>,
    /// True if this call opened the segment; false if it was open before.
    pub(super) is_new: bool,
}

impl Mappings {
    /// Records a segment of `bytes` bytes whose descriptor a peer has sent, and maps it if it is
    /// not mapped yet. Does not [populate](Segment::populate) its pages.
    pub(super) fn given(&self, descriptor: OwnedFd, bytes: u64) -> io::Result<HostGiven> {
        let mut mapped = self.files.lock();
        // A mapped segment keeps its file, so its identity is not reused.
        let file = Segment::file(descriptor.as_fd())?;
        let found = mapped.get(&file).and_then(Weak::upgrade);
        if let Some(segment) = found.filter(|segment| segment.bytes() as u64 == bytes) {
            return Ok(HostGiven::Again {
                descriptor,
                bytes,
                segment: Arc::downgrade(&segment),
            });
        }

        // Entries of segments that nobody holds any more are dropped on the way.
        let segment = Arc::new(Segment::foreign(descriptor, bytes)?);
        mapped.retain(|_, segment| segment.strong_count() > 0);
        mapped.insert(file, Arc::downgrade(&segment));
        Ok(HostGiven::First(segment))
    }

    /// Returns the segment of device memory with the description `words`. If it is not open, opens
    /// it by calling `make`.
    pub(super) fn opened(
        &self,
        words: &[u8],
        make: impl FnOnce() -> io::Result<Arc<Segment>>,
    ) -> io::Result<FoundSegment> {
        let mut open = self.devices.lock();
        if let Some(found) = open.get(words).and_then(Weak::upgrade) {
            return Ok(FoundSegment {
                segment: found,
                is_new: false,
            });
        }

        let segment = make()?;
        open.retain(|_, segment| segment.strong_count() > 0);
        open.insert(words.to_vec(), Arc::downgrade(&segment));
        Ok(FoundSegment {
            segment,
            is_new: true,
        })
    }
}

impl HostGiven {
    /// Returns the mapped segment. Maps it again if it was unmapped meanwhile.
    pub(super) fn segment(&mut self, mappings: &Mappings) -> io::Result<Arc<Segment>> {
        match self {
            Self::First(segment) => Ok(segment.clone()),
            Self::Again {
                descriptor,
                bytes,
                segment,
            } => {
                if let Some(segment) = segment.upgrade() {
                    return Ok(segment);
                }

                loop {
                    let found = match mappings.given(descriptor.try_clone()?, *bytes)? {
                        Self::First(segment) => {
                            segment.populate();
                            Some(segment)
                        }
                        Self::Again { segment, .. } => segment.upgrade(),
                    };
                    // `None` if its last holder dropped it just now.
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
    use mpmd_memory::{Arena, Pool};

    #[test]
    fn segment_is_mapped_once_and_kept_by_first_giver() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let owner = pool
            .allocate(100)
            .unwrap()
            .freeze()
            .place()
            .unwrap()
            .segment;
        let give = || {
            (
                owner.descriptor().unwrap().try_clone_to_owned().unwrap(),
                owner.bytes() as u64,
            )
        };
        let mappings = Mappings::default();
        let given = |(descriptor, bytes)| mappings.given(descriptor, bytes).unwrap();
        let (mut first, mut again) = (given(give()), given(give()));
        assert!(matches!(
            (&first, &again),
            (HostGiven::First(_), HostGiven::Again { .. })
        ));
        let segment = first.segment(&mappings).unwrap();
        assert!(Arc::ptr_eq(&segment, &again.segment(&mappings).unwrap()));
        assert!(mappings.given(give().0, 64).is_err(), "it is longer");
        drop(first);
        assert_eq!(Arc::strong_count(&segment), 1, "only the reader holds it");
        drop(segment);
        let segment = again.segment(&mappings).unwrap();
        assert!(
            Arc::ptr_eq(&segment, &again.segment(&mappings).unwrap()),
            "it is mapped anew, once"
        );
        assert_eq!(Arc::strong_count(&segment), 1);
    }
}
