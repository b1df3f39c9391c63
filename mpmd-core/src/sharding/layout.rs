//! Layouts: a sharding applied to a shape.

use crate::fingerprint::Fingerprint;
use crate::region::Region;
use crate::topology::DeviceId;

/// Which region of an array each device holds.
///
/// Equal where shape, devices in their order and regions are, whatever shardings they come from.
#[derive(Clone, Debug)]
pub struct Layout {
    shape: Vec<usize>,
    devices: Vec<DeviceId>,
    /// In the order of `devices`.
    regions: Vec<Region>,
    fully_replicated: bool,
    fingerprint: u64,
    /// Each device with its place in `devices`, ascending by device.
    places: Vec<(DeviceId, usize)>,
}

impl Layout {
    /// The layout in which each device holds the region at its place. `fully_replicated` says that the
    /// sharding divides nothing; every device of an empty array may hold all of it and yet be divided.
    /// Regions of two devices are equal or have nothing in common.
    ///
    /// # Panics
    ///
    /// Where there is not one region for each device, a device comes twice, or a region is not within
    /// `shape`.
    pub fn new(
        shape: &[usize],
        devices: Vec<DeviceId>,
        regions: Vec<Region>,
        fully_replicated: bool,
    ) -> Self {
        assert_eq!(devices.len(), regions.len(), "a layout has one region for each device");
        let whole = Region::full(shape);
        if let Some(region) = regions.iter().find(|region| !whole.contains(region)) {
            panic!("region {region} is not within {whole}");
        }
        let mut places: Vec<_> = devices.iter().copied().zip(0..).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].0 != pair[1].0), "a device comes twice: {devices:?}");
        let mut fingerprint = Fingerprint::new("layout");
        fingerprint.words(shape.iter().map(|dim| *dim as u64));
        fingerprint.words(devices.iter().map(|device| u64::from(device.0)));
        for range in regions.iter().flat_map(Region::ranges) {
            fingerprint.word(range.start as u64);
            fingerprint.word(range.end as u64);
        }
        let fingerprint = fingerprint.finish();
        Self { shape: shape.to_vec(), devices, regions, fully_replicated, fingerprint, places }
    }

    /// The whole array's shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The devices, in device-assignment order.
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// The region that each of [`devices`](Self::devices) holds, in the same order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The region a device holds; `None` where the array is not on it.
    pub fn region_of(&self, device: DeviceId) -> Option<&Region> {
        self.place_of(device).map(|place| &self.regions[place])
    }

    /// The devices with their regions, in device-assignment order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (DeviceId, &Region)> + '_ {
        self.devices.iter().copied().zip(&self.regions)
    }

    /// Whether the sharding divides nothing, so that every device holds the whole array.
    pub fn fully_replicated(&self) -> bool {
        self.fully_replicated
    }

    /// A number that is the same for equal layouts, on every process and in every run.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// How many partial sums the array is kept as: 1 where nothing is unreduced.
    pub fn terms(&self) -> usize {
        1
    }

    /// Which partial sum the device at a place holds.
    pub fn term_of(&self, _place: usize) -> usize {
        0
    }

    /// A device's place in device-assignment order.
    pub fn place_of(&self, device: DeviceId) -> Option<usize> {
        let at = self.places.binary_search_by_key(&device, |(device, _)| *device).ok()?;
        Some(self.places[at].1)
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
            && self.shape == other.shape
            && self.devices == other.devices
            && self.regions == other.regions
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
        Mesh::new(axes, (0..count).map(DeviceId).collect()).unwrap().sharding(spec)
    }

    #[test]
    fn layouts_are_compared_by_what_they_hold() {
        let flat = sharding(&[("data", 4)], spec!["data"]).layout(&[8]).unwrap();
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
        assert_eq!(one, Sharding::single_device(DeviceId(0)).layout(&[8]).unwrap());
    }

    #[test]
    fn regions_are_found_by_device() {
        let devices = [4, 9, 2].map(DeviceId).to_vec();
        let mesh = Mesh::new(&[("x", 3)], devices).unwrap();
        let layout = mesh.sharding(spec![None, "x"]).layout(&[2, 6]).unwrap();
        assert_eq!(layout.region_of(DeviceId(9)).unwrap().to_string(), "[0..2, 2..4]");
        assert_eq!(layout.region_of(DeviceId(3)), None);
        let found: Vec<u32> = layout.iter().map(|(device, _)| device.0).collect();
        assert_eq!(found, [4, 9, 2]);
    }

    #[test]
    #[should_panic(expected = "not within")]
    fn regions_outside_the_shape_are_the_callers_bug() {
        let _ = Layout::new(&[4], vec![DeviceId(0)], vec![Region::full(&[5])], true);
    }
}
