//! Layouts: a sharding applied to a shape.

use crate::fingerprint::Fingerprint;
use crate::region::Region;
use crate::topology::DeviceId;
use crate::topology::mesh::DeviceIndex;

/// The region of an array that each device holds, for an array of one shape.
///
/// Layouts are equal if their shapes, devices (in order), regions and partial sums are equal, even
/// if they come from different shardings.
#[derive(Clone, Debug)]
pub struct Layout {
    shape: Vec<usize>,
    devices: Vec<DeviceId>,
    /// The region of each device, in the order of `devices`.
    regions: Vec<Region>,
    fully_replicated: bool,
    /// Number of partial sums.
    terms: usize,
    /// Index of the partial sum that each device holds, in the order of `devices`. Empty if there
    /// is only one partial sum.
    term_of: Vec<usize>,
    fingerprint: u64,
    /// Each device with its index in `devices`, ascending by device.
    places: Vec<DeviceIndex>,
}

impl Layout {
    /// Creates a layout in which `devices[i]` holds `regions[i]`. `fully_replicated` is true if the
    /// sharding divides no dimension. The regions alone cannot tell, because all regions of an
    /// empty array may be equal. The regions of two devices must be equal or disjoint, which is not
    /// checked.
    ///
    /// # Panics
    ///
    /// If there is not one region for each device, a device comes twice, or a region is not within
    /// `shape`.
    pub fn new(
        shape: &[usize],
        devices: Vec<DeviceId>,
        regions: Vec<Region>,
        fully_replicated: bool,
    ) -> Self {
        assert_eq!(
            devices.len(),
            regions.len(),
            "a layout has one region for each device"
        );
        let whole = Region::full(shape);
        if let Some(region) = regions.iter().find(|region| !whole.contains(region)) {
            panic!("region {region} is not within {whole}");
        }

        let places = DeviceIndex::sorted(&devices);
        assert!(
            places
                .windows(2)
                .all(|pair| pair[0].device != pair[1].device),
            "a device comes twice: {devices:?}"
        );

        let mut fingerprint = Fingerprint::new("layout");
        fingerprint.words(shape.iter().map(|dim| *dim as u64));
        fingerprint.words(devices.iter().map(|device| u64::from(device.0)));
        for range in regions.iter().flat_map(Region::ranges) {
            fingerprint.word(range.start as u64);
            fingerprint.word(range.end as u64);
        }
        let fingerprint = fingerprint.finish();

        let shape = shape.to_vec();
        let terms = 1;
        let term_of = Vec::new();
        Self {
            shape,
            devices,
            regions,
            fully_replicated,
            terms,
            term_of,
            fingerprint,
            places,
        }
    }

    /// Makes the shards partial sums: device `i` of the layout holds the partial sum with index
    /// `term_of[i]` of its region. Each value of the array is the sum of all its partial sums.
    ///
    /// # Panics
    ///
    /// If `term_of` has not one index for each device, or if an index below the highest is missing.
    #[must_use]
    pub(super) fn with_terms(mut self, term_of: Vec<usize>) -> Self {
        assert_eq!(
            self.devices.len(),
            term_of.len(),
            "a layout has one term for each device"
        );

        let mut held = term_of.clone();
        held.sort_unstable();
        held.dedup();
        assert!(
            held.iter().copied().eq(0..held.len()),
            "no device holds one of the terms: {held:?}"
        );

        if held.len() > 1 {
            let mut fingerprint = Fingerprint::new("partial sums");
            fingerprint.word(self.fingerprint);
            fingerprint.words(term_of.iter().map(|term| *term as u64));
            self.fingerprint = fingerprint.finish();
            (self.terms, self.term_of) = (held.len(), term_of);
        }
        self
    }

    /// Returns the shape of the whole array.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the devices, in device-assignment order.
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// Returns the region that each of [`devices`](Self::devices) holds, in the same order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the region that a device holds, or `None` if the array is not on the device.
    pub fn region_of(&self, device: DeviceId) -> Option<&Region> {
        self.place_of(device).map(|place| &self.regions[place])
    }

    /// Iterates over the devices with their regions, in device-assignment order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (DeviceId, &Region)> + '_ {
        self.devices.iter().copied().zip(&self.regions)
    }

    /// Returns the number of partial sums of the array; 1 if no axis is unreduced.
    pub fn terms(&self) -> usize {
        self.terms
    }

    /// Returns the index of the partial sum that the device at index `place` of
    /// [`devices`](Self::devices) holds. The index is below [`terms`](Self::terms). It combines the
    /// device's coordinates along the unreduced axes, major to minor in the order of the mesh.
    ///
    /// # Panics
    ///
    /// If `place` is not below the number of devices.
    pub fn term_of(&self, place: usize) -> usize {
        assert!(
            place < self.devices.len(),
            "there is no place {place} of {}",
            self.devices.len()
        );
        self.term_of.get(place).copied().unwrap_or(0)
    }

    /// True if the sharding divides no dimension: every device holds the whole array, or a partial
    /// sum of the whole array.
    pub fn fully_replicated(&self) -> bool {
        self.fully_replicated
    }

    /// Returns a number that is the same for equal layouts, on every process and in every run.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns a device's index in device-assignment order, or `None` if the array is not on the
    /// device.
    pub fn place_of(&self, device: DeviceId) -> Option<usize> {
        let at = self
            .places
            .binary_search_by_key(&device, |place| place.device)
            .ok()?;
        Some(self.places[at].index)
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
            && self.shape == other.shape
            && self.devices == other.devices
            && self.regions == other.regions
            && self.term_of == other.term_of
    }
}

impl Eq for Layout {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;
    use crate::spec;
    use crate::topology::Mesh;

    fn sharding(axes: &[(&str, usize)], spec: crate::sharding::Spec) -> Sharding {
        let count = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (0..count).map(DeviceId).collect())
            .unwrap()
            .sharding(spec)
    }

    #[test]
    fn layouts_with_equal_regions_are_equal() {
        let flat = sharding(&[("data", 4)], spec!["data"])
            .layout(&[8])
            .unwrap();
        let square = [("a", 2), ("b", 2)];
        let major = sharding(&square, spec![("a", "b")]).layout(&[8]).unwrap();
        let minor = sharding(&square, spec![("b", "a")]).layout(&[8]).unwrap();
        assert_eq!(flat, major);
        assert_eq!(flat.fingerprint(), major.fingerprint());
        assert_ne!(flat, minor);
        let a = sharding(&square, spec!["a"]).layout(&[8]).unwrap();
        let b = sharding(&square, spec!["b"]).layout(&[8]).unwrap();
        assert_ne!(a, b);
        let one = sharding(&[("x", 1)], spec![]).layout(&[8]).unwrap();
        assert_eq!(
            one,
            Sharding::single_device(DeviceId(0)).layout(&[8]).unwrap()
        );
    }

    #[test]
    fn partial_sums_are_counted_along_the_unreduced_axes() {
        let rows = sharding(&[("a", 2), ("b", 3), ("c", 2)], spec!["b"]);
        let layout = |axes: &[&str]| rows.unreduced(axes).unwrap().layout(&[6]).unwrap();
        let whole = rows.layout(&[6]).unwrap();
        let terms = |layout: &Layout| {
            (0..12)
                .map(|place| layout.term_of(place))
                .collect::<Vec<_>>()
        };
        assert_eq!((whole.terms(), terms(&whole)), (1, vec![0; 12]));
        let (a, c, both) = (layout(&["a"]), layout(&["c"]), layout(&["c", "a"]));
        assert_eq!(
            (a.terms(), terms(&a)),
            (2, vec![0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
        );
        assert_eq!(
            (c.terms(), terms(&c)),
            (2, vec![0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
        );
        assert_eq!(
            (both.terms(), terms(&both)),
            (4, vec![0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3])
        );
        let all = [&whole, &a, &c, &both];
        for (i, one) in all.iter().enumerate() {
            assert_eq!(one.regions(), whole.regions());
            for other in &all[i + 1..] {
                assert!(one != other && one.fingerprint() != other.fingerprint());
            }
        }
        let replicated = sharding(&[("a", 2)], spec![]).unreduced(&["a"]).unwrap();
        assert!(
            replicated.layout(&[6]).unwrap().fully_replicated(),
            "it divides nothing"
        );
        let one = sharding(&[("a", 1)], spec![]);
        assert_eq!(
            one.unreduced(&["a"]).unwrap().layout(&[6]),
            one.layout(&[6]),
            "one sum is the value"
        );
    }

    #[test]
    #[should_panic(expected = "no device holds one of the terms")]
    fn term_without_holder_panics() {
        let _ = Layout::new(&[4], vec![DeviceId(0)], vec![Region::full(&[4])], true)
            .with_terms(vec![1]);
    }

    #[test]
    fn regions_are_found_by_device() {
        let devices = [4, 9, 2].map(DeviceId).to_vec();
        let mesh = Mesh::new(&[("x", 3)], devices).unwrap();
        let layout = mesh.sharding(spec![None, "x"]).layout(&[2, 6]).unwrap();
        assert_eq!(
            layout.region_of(DeviceId(9)).unwrap().to_string(),
            "[0..2, 2..4]"
        );
        assert_eq!(layout.region_of(DeviceId(3)), None);
        let found: Vec<u32> = layout.iter().map(|(device, _)| device.0).collect();
        assert_eq!(found, [4, 9, 2]);
    }

    #[test]
    #[should_panic(expected = "not within")]
    fn region_outside_shape_panics() {
        let _ = Layout::new(&[4], vec![DeviceId(0)], vec![Region::full(&[5])], true);
    }
}
