//! Meshes: n-d grids of devices with named axes.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use super::{DeviceId, MeshError};
use crate::fingerprint::Fingerprint;
use crate::tree::Leaf;

/// A grid of devices with named axes. Cheap to clone. Meshes are equal if their axes, sizes and
/// devices are equal, in the same order.
#[derive(Clone)]
pub struct Mesh {
    inner: Arc<MeshInner>,
}

#[derive(Eq, PartialEq)]
struct MeshInner {
    fingerprint: u64,
    names: Vec<String>,
    shape: Vec<usize>,
    /// The devices in row-major order.
    devices: Vec<DeviceId>,
    /// The indices in `devices`, in ascending order of the devices' ids.
    places: Vec<DeviceIndex>,
}

/// A device, and its index in a list of devices. Ordered by the device.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct DeviceIndex {
    pub(crate) device: DeviceId,
    pub(crate) index: usize,
}

impl DeviceIndex {
    /// Pairs each device with its index in the list. Sorts the pairs by device id.
    pub(crate) fn sorted(devices: &[DeviceId]) -> Vec<Self> {
        let mut places: Vec<Self> = devices
            .iter()
            .copied()
            .zip(0..)
            .map(|(device, index)| Self { device, index })
            .collect();
        places.sort_unstable();
        places
    }
}

impl Mesh {
    /// Creates a mesh from the (name, size) of each axis, major to minor. `devices` are in
    /// row-major order: the last axis varies fastest. One size may be -1, which stands for the
    /// number of devices divided by the other sizes. Sizes must be signed then (`tp as isize`).
    ///
    /// ```
    /// use mpmd_layout::topology::{DeviceId, Mesh};
    ///
    /// let mesh = Mesh::new(&[("data", -1), ("model", 2)], (0..6).map(DeviceId).collect())?;
    /// assert_eq!(mesh.shape(), [3, 2]);
    /// # Ok::<(), mpmd_layout::topology::MeshError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the sizes do not multiply to the number of devices, or a device is listed twice. Also if
    /// an axis has no name, the name of another axis, or size 0.
    pub fn new<S: Copy + TryInto<isize>>(
        axes: &[(&str, S)],
        devices: Vec<DeviceId>,
    ) -> Result<Self, MeshError> {
        let names: Vec<String> = axes.iter().map(|(name, _)| (*name).to_owned()).collect();
        // A size that does not fit is too large for any number of devices.
        let sizes: Vec<isize> = axes
            .iter()
            .map(|(_, size)| (*size).try_into().unwrap_or(isize::MAX))
            .collect();

        let shape = shape(&names, &sizes, devices.len())?;
        let text = || axes_text(&names, &shape);
        for (i, (name, size)) in names.iter().zip(&shape).enumerate() {
            if name.is_empty() || *size == 0 {
                return Err(MeshError::EmptyAxis {
                    axis: name.clone(),
                    size: *size,
                    mesh: text(),
                });
            }
            if names[..i].contains(name) {
                return Err(MeshError::DuplicateAxis {
                    axis: name.clone(),
                    mesh: text(),
                });
            }
        }

        let expected = shape
            .iter()
            .fold(1usize, |product, size| product.saturating_mul(*size));
        if expected != devices.len() {
            return Err(MeshError::DeviceCount {
                mesh: text(),
                expected,
                found: devices.len(),
            });
        }

        let places = DeviceIndex::sorted(&devices);
        if let Some(pair) = places
            .windows(2)
            .find(|pair| pair[0].device == pair[1].device)
        {
            return Err(MeshError::DuplicateDevice {
                device: pair[0].device,
            });
        }

        Ok(Self::of_parts(names, shape, devices, places))
    }

    fn of_parts(
        names: Vec<String>,
        shape: Vec<usize>,
        devices: Vec<DeviceId>,
        places: Vec<DeviceIndex>,
    ) -> Self {
        let mut fingerprint = Fingerprint::new("mesh");
        fingerprint.words(shape.iter().map(|size| *size as u64));
        names.iter().for_each(|name| fingerprint.text(name));
        fingerprint.words(devices.iter().map(|device| u64::from(device.0)));

        Self {
            inner: Arc::new(MeshInner {
                fingerprint: fingerprint.finish(),
                names,
                shape,
                devices,
                places,
            }),
        }
    }

    /// Returns the names of the axes, major to minor.
    pub fn axis_names(&self) -> &[String] {
        &self.inner.names
    }

    /// Returns the sizes of the axes, major to minor.
    pub fn shape(&self) -> &[usize] {
        &self.inner.shape
    }

    /// Returns the devices in row-major order.
    pub fn devices(&self) -> &[DeviceId] {
        &self.inner.devices
    }

    /// Returns the index of an axis, from 0 for the major axis, or `None` if the mesh has no such
    /// axis.
    pub fn axis_index(&self, axis: &str) -> Option<usize> {
        self.inner.names.iter().position(|name| name == axis)
    }

    /// Returns the size of an axis: the number of indices along it.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis.
    pub fn axis_size(&self, axis: &str) -> Result<usize, MeshError> {
        self.axis(axis).map(|index| self.inner.shape[index])
    }

    /// Returns a device's index along every axis, or `None` if the device is not in the mesh.
    pub fn position(&self, device: DeviceId) -> Option<Vec<usize>> {
        self.place(device).map(|place| self.coordinates(place))
    }

    /// Returns a number that is the same for equal meshes, on every process and in every run.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// Splits the mesh into one mesh for each index of `axis`, for example the stages of a
    /// pipeline. The resulting meshes lack the axis. If it is the only axis, they keep it with size
    /// 1.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis.
    pub fn split(&self, axis: &str) -> Result<Vec<Self>, MeshError> {
        let index = self.axis(axis)?;
        let piece = |i: usize| {
            let piece = self.part(index, i..i + 1);
            if self.inner.shape.len() == 1 {
                return piece;
            }

            let mut names = piece.inner.names.clone();
            let mut shape = piece.inner.shape.clone();
            names.remove(index);
            shape.remove(index);
            Self::of_parts(
                names,
                shape,
                piece.inner.devices.clone(),
                piece.inner.places.clone(),
            )
        };
        Ok((0..self.inner.shape[index]).map(piece).collect())
    }

    /// Returns the part of the mesh whose indices along `axis` are in `range`. The axis stays.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis, or `range` is empty or ends past the axis.
    pub fn slice(&self, axis: &str, range: Range<usize>) -> Result<Self, MeshError> {
        let index = self.axis(axis)?;
        if range.is_empty() || range.end > self.inner.shape[index] {
            return Err(MeshError::Range {
                axis: axis.to_owned(),
                start: range.start,
                end: range.end,
                mesh: self.to_string(),
            });
        }
        Ok(self.part(index, range))
    }

    /// Returns the devices that differ from `device` only in their index along `axis`, including
    /// `device`. They are in order of that index.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis or device.
    pub fn group_of(&self, device: DeviceId, axis: &str) -> Result<Vec<DeviceId>, MeshError> {
        let index = self.axis(axis)?;
        let unknown = || MeshError::UnknownDevice {
            device,
            within: format!("mesh {self}"),
        };
        let place = self.place(device).ok_or_else(unknown)?;
        Ok(self.group_at(index, place))
    }

    /// Returns the indices along every axis of the device at position `place` of the row-major
    /// order.
    #[doc(hidden)]
    pub fn coordinates(&self, mut place: usize) -> Vec<usize> {
        let mut coordinates = vec![0; self.inner.shape.len()];
        for (coordinate, size) in coordinates.iter_mut().zip(&self.inner.shape).rev() {
            *coordinate = place % size;
            place /= size;
        }
        coordinates
    }

    fn axis(&self, axis: &str) -> Result<usize, MeshError> {
        let unknown = || MeshError::UnknownAxis {
            axis: axis.to_owned(),
            mesh: self.to_string(),
        };
        self.axis_index(axis).ok_or_else(unknown)
    }

    #[doc(hidden)]
    pub fn place(&self, device: DeviceId) -> Option<usize> {
        let at = self
            .inner
            .places
            .binary_search_by_key(&device, |place| place.device)
            .ok()?;
        Some(self.inner.places[at].index)
    }

    /// Returns the distance in row-major order between two devices that are neighbours along the
    /// axis with index `index`.
    fn stride(&self, index: usize) -> usize {
        self.inner.shape[index + 1..].iter().product()
    }

    fn group_at(&self, index: usize, place: usize) -> Vec<DeviceId> {
        let size = self.inner.shape[index];
        let stride = self.stride(index);
        let first = place - place / stride % size * stride;
        (0..size)
            .map(|i| self.inner.devices[first + i * stride])
            .collect()
    }

    fn part(&self, index: usize, range: Range<usize>) -> Self {
        let size = self.inner.shape[index];
        let stride = self.stride(index);
        let inside = |place: &usize| range.contains(&(place / stride % size));
        let kept = (0..self.inner.devices.len()).filter(inside);
        let devices: Vec<DeviceId> = kept.map(|place| self.inner.devices[place]).collect();
        let places = DeviceIndex::sorted(&devices);
        let mut shape = self.inner.shape.clone();
        shape[index] = range.len();
        Self::of_parts(self.inner.names.clone(), shape, devices, places)
    }
}

impl PartialEq for Mesh {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) || self.inner == other.inner
    }
}

impl Eq for Mesh {}

impl Hash for Mesh {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.inner.fingerprint);
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = axes_text(&self.inner.names, &self.inner.shape);
        write!(f, "{axes} devices {}", DeviceList(self.devices()))
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({self})")
    }
}

impl Leaf for Mesh {}

/// A list of devices that is displayed as bare numbers: `[0, 1, 2]`. A long list is displayed as
/// runs, `[0-1023]`, so that messages stay short.
pub(crate) struct DeviceList<'a>(pub(crate) &'a [DeviceId]);

/// Maximum number of devices that are displayed one by one.
const LISTED: usize = 32;

/// Number of runs of consecutive ids that are displayed of a longer list.
const RUNS_SHOWN: usize = 8;

impl fmt::Display for DeviceList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() <= LISTED {
            return f
                .debug_list()
                .entries(self.0.iter().map(|device| device.0))
                .finish();
        }

        let runs = self
            .0
            .chunk_by(|before, device| before.0.checked_add(1) == Some(device.0));
        let mut shown = 0;
        for (i, run) in runs.take(RUNS_SHOWN).enumerate() {
            write!(f, "{}{}", if i == 0 { "[" } else { ", " }, run[0].0)?;
            if run.len() > 1 {
                write!(f, "-{}", run[run.len() - 1].0)?;
            }
            shown += run.len();
        }

        match self.0.len() - shown {
            0 => f.write_str("]"),
            more => write!(f, ", and {more} more]"),
        }
    }
}

/// Returns the axis sizes with -1 replaced by the number of `devices` divided by the other sizes.
/// Fails if two sizes are negative, one is below -1, or the others do not divide the devices.
fn shape(names: &[String], sizes: &[isize], devices: usize) -> Result<Vec<usize>, MeshError> {
    let mut below = (0..sizes.len()).filter(|at| sizes[*at] < 0);
    let rest = below.next();
    let second = below.next();

    let of_others = sizes.iter().filter(|size| **size >= 0);
    let others = of_others.fold(1usize, |all, size| all.saturating_mul(size.unsigned_abs()));
    let fits = |at: usize| {
        second.is_none() && sizes[at] == -1 && others > 0 && devices.is_multiple_of(others)
    };

    let Some(at) = rest.filter(|at| !fits(*at)) else {
        let left = devices.checked_div(others).unwrap_or(0);
        let size = |size: &isize| if *size < 0 { left } else { size.unsigned_abs() };
        return Ok(sizes.iter().map(size).collect());
    };
    Err(MeshError::Rest {
        axis: names[at].clone(),
        mesh: axes_text(names, sizes),
        devices,
    })
}

fn axes_text(names: &[String], shape: &[impl fmt::Display]) -> String {
    let axes: Vec<String> = names
        .iter()
        .zip(shape)
        .map(|(name, size)| format!("{name}:{size}"))
        .collect();
    format!("{{{}}}", axes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(devices: &[u32]) -> Vec<DeviceId> {
        devices.iter().copied().map(DeviceId).collect()
    }

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        let count = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, ids(&(0..count).collect::<Vec<_>>())).unwrap()
    }

    #[test]
    fn axes_are_row_major() {
        let mesh = Mesh::new(&[("stage", 2), ("model", 3)], ids(&[5, 4, 3, 2, 1, 0])).unwrap();
        assert_eq!(
            mesh.to_string(),
            "{stage:2, model:3} devices [5, 4, 3, 2, 1, 0]"
        );
        assert_eq!(format!("{mesh:?}"), format!("Mesh({mesh})"));
        assert_eq!(mesh.position(DeviceId(3)), Some(vec![0, 2]));
        assert_eq!(mesh.position(DeviceId(1)), Some(vec![1, 1]));
        assert_eq!(mesh.position(DeviceId(6)), None);
        assert_eq!(mesh.axis_size("model"), Ok(3));
    }

    #[test]
    fn splitting_removes_the_axis_unless_it_is_the_only_one() {
        let stages = mesh(&[("stage", 2), ("model", 2)]).split("stage").unwrap();
        assert_eq!(
            stages,
            [0, 2].map(|i| Mesh::new(&[("model", 2)], ids(&[i, i + 1])).unwrap())
        );
        let inner = mesh(&[("stage", 2), ("model", 2)]).split("model").unwrap();
        assert_eq!(inner[1], Mesh::new(&[("stage", 2)], ids(&[1, 3])).unwrap());
        let single = mesh(&[("stage", 2)]).split("stage").unwrap();
        assert_eq!(single[1], Mesh::new(&[("stage", 1)], ids(&[1])).unwrap());
        assert_eq!(single[1].to_string(), "{stage:1} devices [1]");
    }

    #[test]
    fn slices_keep_the_axis() {
        let part = mesh(&[("x", 4), ("y", 2)]).slice("x", 1..3).unwrap();
        assert_eq!(
            part,
            Mesh::new(&[("x", 2), ("y", 2)], ids(&[2, 3, 4, 5])).unwrap()
        );
        assert!(matches!(
            mesh(&[("x", 4)]).slice("x", 2..5),
            Err(MeshError::Range { end: 5, .. })
        ));
        assert!(mesh(&[("x", 4)]).slice("x", 2..2).is_err());
    }

    #[test]
    fn groups_differ_only_along_their_axis() {
        let mesh = mesh(&[("a", 2), ("b", 3), ("c", 2)]);
        assert_eq!(mesh.group_of(DeviceId(7), "b").unwrap(), ids(&[7, 9, 11]));
        assert_eq!(mesh.group_of(DeviceId(7), "a").unwrap(), ids(&[1, 7]));
        assert!(matches!(
            mesh.group_of(DeviceId(12), "a"),
            Err(MeshError::UnknownDevice { .. })
        ));
        let wrong = mesh.group_of(DeviceId(7), "d");
        assert!(matches!(wrong, Err(MeshError::UnknownAxis { .. })));
    }

    #[test]
    fn fingerprints_and_equality_go_by_value() {
        let (a, b) = (mesh(&[("x", 2), ("y", 2)]), mesh(&[("x", 2), ("y", 2)]));
        assert!(a == b && a.fingerprint() == b.fingerprint());
        for other in [
            mesh(&[("y", 2), ("x", 2)]),
            mesh(&[("x", 4)]),
            mesh(&[("x", 4), ("y", 1)]),
        ] {
            assert!(a != other && a.fingerprint() != other.fingerprint());
        }
    }

    #[test]
    fn short_device_lists_are_full_and_long_ones_are_runs() {
        let shown = |devices: &[u32]| DeviceList(&ids(devices)).to_string();
        assert_eq!(shown(&[3, 4, 9]), "[3, 4, 9]");
        assert_eq!(shown(&(0..1024).collect::<Vec<_>>()), "[0-1023]");
        let two_and_one: Vec<u32> = (8..40).chain([2, 50]).collect();
        assert_eq!(shown(&two_and_one), "[8-39, 2, 50]");
        let apart: Vec<u32> = (0..100).map(|i| 8 * i).collect();
        assert_eq!(shown(&apart), "[0, 8, 16, 24, 32, 40, 48, 56, and 92 more]");
    }

    #[test]
    fn malformed_meshes_are_refused() {
        let new =
            |axes: &[(&str, usize)], devices: &[u32]| Mesh::new(axes, ids(devices)).unwrap_err();
        let error = new(&[("x", 2), ("y", 2)], &[0, 1, 2]);
        assert_eq!(
            error.to_string(),
            "a mesh {x:2, y:2} takes 4 devices, found 3"
        );
        assert!(matches!(
            new(&[("x", 1), ("x", 1)], &[0]),
            MeshError::DuplicateAxis { .. }
        ));
        assert!(matches!(new(&[("", 1)], &[0]), MeshError::EmptyAxis { .. }));
        assert!(matches!(new(&[("x", 0)], &[]), MeshError::EmptyAxis { .. }));
        assert_eq!(
            new(&[("x", 2)], &[3, 3]),
            MeshError::DuplicateDevice {
                device: DeviceId(3)
            }
        );
        assert!(matches!(
            new(&[("x", usize::MAX), ("y", 2)], &[0]),
            MeshError::DeviceCount { .. }
        ));
        assert!(
            Mesh::new::<usize>(&[], ids(&[0])).is_ok(),
            "no axes, one device"
        );
    }

    #[test]
    fn one_size_may_be_what_the_others_leave() {
        let new = |axes: &[(&str, i32)], devices: u32| {
            Mesh::new(axes, (0..devices).map(DeviceId).collect())
        };
        let shape = |axes: &[(&str, i32)], devices| new(axes, devices).unwrap().shape().to_vec();
        assert_eq!(shape(&[("a", -1), ("b", 4)], 8), [2, 4]);
        assert_eq!(shape(&[("a", 2), ("b", -1), ("c", 4)], 8), [2, 1, 4]);
        assert_eq!(shape(&[("a", -1)], 5), [5]);
        let error = |axes: &[(&str, i32)], devices| new(axes, devices).unwrap_err().to_string();
        assert_eq!(
            error(&[("a", -1), ("b", 4)], 6),
            "axis `a` of mesh {a:-1, b:4} cannot be what is left of 6 devices: the sizes of the \
             other axes must divide that number, and one axis may be of size -1"
        );
        for (axes, devices) in [
            (&[("a", -1), ("b", -1)][..], 4),
            (&[("a", -2)], 4),
            (&[("a", -1), ("b", 0)], 4),
            (&[("a", -1), ("b", 8)], 4),
        ] {
            assert!(
                error(axes, devices).contains("cannot be what is left"),
                "{axes:?}"
            );
        }
        assert!(matches!(
            new(&[("a", -1)], 0),
            Err(MeshError::EmptyAxis { .. })
        ));
    }
}
